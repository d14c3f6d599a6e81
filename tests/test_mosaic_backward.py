"""Gradients of the Mosaic kernels of delayed eviction, interpreted: races are errors, unwritten memory is NaN."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import delayed_attention
from kernels.delayed_eviction import mosaic, reference
from kernels.hopper import plgpu
from kernels.visibility import PADDING

INTERPRETER = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
WINDOW = 20
NAMES = ("q", "k", "v", "bias")
TOLERANCE = 1e-2
"""Largest error over the largest entry of a gradient."""


def _inputs(dim: int, length: int, groups: int, mode: str, batch: int, kv_heads: int) -> tuple[Any, ...]:
    """q, k, v, bias as the kernels take them, and the gradient of the result."""
    keys = jax.random.split(jax.random.key(dim + length), 5)
    q = jax.random.normal(keys[0], (batch, kv_heads * groups, length, dim), jnp.bfloat16)
    k, v = (jax.random.normal(key, (batch, kv_heads, length, dim), jnp.bfloat16) for key in keys[1:3])
    gate = 3 * jax.random.normal(keys[3], (batch, kv_heads, length))
    bias = {"plain": None, "soft": -jax.nn.softplus(gate), "hard": jnp.where(gate > 0, -jnp.inf, 0.0)}[mode]
    return q, k, v, bias, jax.random.normal(keys[4], q.shape, jnp.bfloat16)


def _segments(length: int, batch: int) -> jax.Array:
    """Left padding, two segments, right padding; their ends are others in each row."""
    at, row = np.arange(length)[None], np.arange(batch)[:, None]
    ids = np.where(at < length // 2 + 7 * row, 0, 1)
    return jnp.asarray(np.where((at < 9 * row + 3) | (at >= length - 5), PADDING - row, ids), jnp.int32)


@pytest.mark.parametrize(
    ("dim", "length", "groups", "mode", "segmented", "local", "batch", "kv_heads"),
    [
        (64, 256, 4, "soft", False, None, 1, 1),
        (64, 256, 1, "soft", True, 100, 2, 1),
        (64, 256, 1, "plain", False, 70, 1, 2),
        (80, 130, 2, "hard", True, None, 1, 1),
        (96, 128, 4, "soft", False, None, 1, 1),
        (128, 256, 4, "soft", True, None, 1, 1),
        (128, 256, 1, "plain", True, None, 1, 1),
        (128, 200, 2, "hard", False, 150, 1, 2),
        (192, 128, 4, "soft", True, None, 1, 1),
        (192, 256, 1, "plain", False, None, 1, 1),
        (256, 128, 4, "hard", False, None, 1, 1),
        (256, 256, 1, "soft", True, None, 1, 1),
    ],
)
def test_gradients_equal_reference(
    dim: int, length: int, groups: int, mode: str, segmented: bool, local: int | None, batch: int, kv_heads: int
) -> None:
    *inputs, cotangent = _inputs(dim, length, groups, mode, batch, kv_heads)
    segments = _segments(length, batch) if segmented else None
    reach = None if local is None else jnp.int32(local)
    rest: Any = {"window": WINDOW, "scale": dim**-0.5}
    wide = [None if x is None else x.astype(jnp.float32) for x in inputs]
    _, vjp = jax.vjp(lambda *x: reference.attention(*x, segments, reach, **rest), *wide)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        _, kernel_vjp = jax.vjp(lambda *x: mosaic.attention(*x, segments, reach, **rest, hard=mode == "hard"), *inputs)
        found = kernel_vjp(cotangent)
    for name, got, wanted, given in zip(NAMES, found, vjp(cotangent.astype(jnp.float32)), inputs, strict=True):
        if given is None:
            continue
        assert got.dtype == given.dtype, name
        got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
        worst = np.abs(got - wanted).max() / np.abs(wanted).max()
        assert worst <= TOLERANCE, (name, worst)  # and not NaN
        if segments is not None and name != "bias":
            assert not got[:, 0][np.asarray(segments) < 0].any(), name


def test_local_window_of_one() -> None:
    """The softmax of one key is 1: queries and keys have no gradient but rounding."""
    *inputs, cotangent = _inputs(16, 9, 2, "soft", 1, 1)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        _, vjp = jax.vjp(lambda *x: mosaic.attention(*x, None, jnp.int32(1), window=3, scale=0.25), *inputs)
        d_q, d_k, d_v, d_bias = (np.asarray(x, np.float32) for x in vjp(cotangent))
    np.testing.assert_allclose(d_v[0, 0], np.asarray(cotangent, np.float32)[0].sum(0), rtol=TOLERANCE, atol=1e-3)
    for name, got in (("q", d_q), ("k", d_k), ("bias", d_bias)):
        np.testing.assert_allclose(got, 0, atol=2e-2, err_msg=name)


def test_all_rows_masked_gives_zeros() -> None:
    *inputs, cotangent = _inputs(64, 128, 2, "soft", 1, 1)
    segments = jnp.full((1, 128), PADDING, jnp.int32)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        _, vjp = jax.vjp(lambda *x: mosaic.attention(*x, segments, None, window=3, scale=0.1), *inputs)
        found = vjp(cotangent)
    for name, got in zip(NAMES, found, strict=True):
        assert not np.asarray(got, np.float32).any(), name


@pytest.mark.parametrize("hard", [False, True])
def test_gradient_of_the_gate_through_dispatch(hard: bool) -> None:
    """From the logits that tokens emit: each decides about the token before it; hard decisions have no gradient."""
    q, k, v, _, cotangent = _inputs(64, 128, 2, "plain", 1, 2)
    gate = 3 * jax.random.normal(jax.random.key(0), k.shape[:3])
    rest: Any = {"window": WINDOW, "scale": 0.125, "segment_ids": _segments(128, 1), "hard": hard}

    def gradient(implementation: str | None, *inputs: jax.Array) -> np.ndarray:
        _, vjp = jax.vjp(lambda gate: delayed_attention(*inputs, gate, **rest, implementation=implementation), gate)
        return np.asarray(vjp(cotangent.astype(inputs[0].dtype))[0])

    wanted = gradient("reference", *(x.astype(jnp.float32) for x in (q, k, v)))
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        found = gradient(None, q, k, v)
    assert np.abs(found - wanted).max() <= TOLERANCE * np.abs(wanted).max()
    assert found.any() != hard


def test_backward_is_the_kernels_and_no_array_is_length_squared() -> None:
    length = 2**14
    q, k, v, bias, _ = jax.eval_shape(lambda: _inputs(128, length, 2, "soft", 1, 2))
    segments = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def gradients(q: Any, k: Any, v: Any, bias: Any, segments: Any) -> Any:
        def loss(*x: Any) -> jax.Array:
            return mosaic.attention(*x, segments, None, window=256, scale=1.0).astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1, 2, 3))(q, k, v, bias)

    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        program = str(jax.make_jaxpr(gradients)(q, k, v, bias, segments))
    assert {"delayed_forward", "delayed_backward_keys", "delayed_backward_queries"} == set(
        re.findall(r"\bdelayed_(?:forward|backward)\w*", program)
    )
    assert str(length) in program
    assert f"{length},{length}" not in program

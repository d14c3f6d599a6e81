"""Attention under delayed eviction: goldens of the original code, and blockwise against the dense reference."""

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import delayed_attention
from kernels.delayed_eviction import reference, xla
from kernels.delayed_eviction.api import attention_with_lse
from kernels.visibility import PADDING

GOLDENS = (
    "big_W3_G2",
    "soft_W3_G1",
    "soft_W3_G2",
    "soft_W3_G3",
    "soft_W8_G1",
    "soft_W8_G2",
    "soft_W8_G3",
    "teacher_W3_G2",
)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("name", GOLDENS)
def test_golden(golden_methods: Path, name: str, x64: bool, implementation: str) -> None:
    golden = np.load(golden_methods / "1_train_attention" / f"{name}.npz")
    with jax.enable_x64(x64):
        dtype = jnp.float64 if x64 else jnp.float32
        inputs = [jnp.asarray(golden[key], dtype) for key in ("q", "k", "v", "decision_logits")]

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, gate: jax.Array) -> jax.Array:
            return delayed_attention(
                q,
                k,
                v,
                gate,
                window=int(golden["window"]),
                scale=float(golden["attn_scale"]),
                implementation=implementation,
            )

        out, vjp = jax.vjp(attend, *inputs)
        grads = vjp(jnp.asarray(golden["cotangent"], dtype))
        np.testing.assert_allclose(out, golden["out"], rtol=0, atol=1e-11 if x64 else 1e-5)
        for key, grad in zip(("q", "k", "v", "decision_logits"), grads, strict=True):
            np.testing.assert_allclose(grad, golden[f"grad_{key}"], rtol=0, atol=1e-11 if x64 else 2e-5)


def _inputs(length: int = 77) -> tuple[list[jax.Array], jax.Array]:
    keys = jax.random.split(jax.random.key(1), 5)
    batch, heads, kv_heads, dim = 2, 6, 2, 8
    q = jax.random.normal(keys[0], (batch, heads, length, dim))
    k, v = (jax.random.normal(key, (batch, kv_heads, length, dim)) for key in keys[1:3])
    bias = -jnp.abs(jax.random.normal(keys[3], (batch, kv_heads, length)))
    return [q, k, v, bias], jax.random.normal(keys[4], q.shape)


SEGMENTS = np.repeat([[0, 1, 1, 2, PADDING, PADDING, 3], [PADDING, PADDING, 4, 4, 5, 5, 0]], 11, axis=1)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("segmented", [False, True])
def test_blockwise_equals_dense(hard: bool, segmented: bool) -> None:
    inputs, cotangent = _inputs()
    if hard:
        inputs[3] = jnp.where(inputs[3] < -0.5, -jnp.inf, 0.0)
    segments = jnp.asarray(SEGMENTS, jnp.int32) if segmented else None
    for local, window, (block_q, block_k) in itertools.product((None, 5, 30), (0, 3, 100), ((8, 16), (16, 16))):
        local_window = None if local is None else jnp.int32(local)

        def blockwise(*a: jax.Array, settings: Any = (local_window, window, block_q, block_k)) -> jax.Array:
            return xla.attention(
                *a, segments, settings[0], window=settings[1], scale=0.4, block_q=settings[2], block_k=settings[3]
            )

        def dense(*a: jax.Array, settings: Any = (local_window, window)) -> jax.Array:
            return reference.attention(*a, segments, settings[0], window=settings[1], scale=0.4)

        out, vjp = jax.vjp(blockwise, *inputs)
        wanted, wanted_vjp = jax.vjp(dense, *inputs)
        np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-5)
        for grad, wanted_grad in zip(vjp(cotangent), wanted_vjp(cotangent), strict=True):
            np.testing.assert_allclose(grad, wanted_grad, rtol=0, atol=2e-5)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("local", [None, 5])
def test_log_sum_exp(implementation: str, local: int | None) -> None:
    """Of every row, in numpy float64; the output beside it is the plain one."""
    (q, k, v, _), _ = _inputs()
    segments = jnp.asarray(SEGMENTS, jnp.int32)
    settings: dict[str, Any] = {"scale": 0.4, "segment_ids": segments, "local_window": local}
    out, lse = attention_with_lse(q, k, v, **settings, implementation=implementation)
    np.testing.assert_allclose(out, delayed_attention(q, k, v, window=0, **settings), atol=1e-5)
    length = q.shape[2]
    distance = np.arange(length)[:, None] - np.arange(length)
    seen = (SEGMENTS[:, :, None] == SEGMENTS[:, None]) & (SEGMENTS != PADDING)[:, :, None] & (distance >= 0)
    seen &= distance < (local or length)
    scores = 0.4 * np.einsum("bhqd,bhkd->bhqk", np.asarray(q, np.float64), np.repeat(np.asarray(k), 3, 1))
    with np.errstate(divide="ignore"):
        wanted = np.log(np.where(seen[:, None], np.exp(scores), 0).sum(-1))
    np.testing.assert_allclose(lse, np.where(np.isneginf(wanted), np.inf, wanted), atol=1e-5)


@pytest.mark.parametrize("length", [600, 1000])
def test_blocks_of_both_sizes(length: int) -> None:
    """The sizes that are taken by default, more than one block of each."""
    assert xla._side(length, 6, False) == {600: 256, 1000: 512}[length]
    assert xla._side(length, 64, False) == xla._side(length, 6, True) == 256
    (q, k, v, bias), _ = _inputs(length)
    for inputs in ((q, k, v, None), (q, k, v, bias)):
        got = xla.attention(*inputs, None, None, window=9, scale=0.4, with_lse=True)
        wanted = reference.attention(*inputs, None, None, window=9, scale=0.4, with_lse=True)
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)


def test_padding_is_zero_and_never_leaks() -> None:
    inputs, cotangent = _inputs()
    segments = jnp.asarray(SEGMENTS, jnp.int32)
    padded = (SEGMENTS == PADDING)[:, None]
    # Junk, not NaN: 0 * NaN is NaN in a product, and what a padded column holds is an embedding, never NaN.
    dirty = [jnp.where(padded[..., None] if x.ndim == 4 else padded, 1e3, x) for x in inputs]

    def attend(*a: jax.Array) -> jax.Array:
        return delayed_attention(*a, window=3, scale=0.4, segment_ids=segments)

    clean_out, clean_vjp = jax.vjp(attend, *inputs)
    dirty_out, dirty_vjp = jax.vjp(attend, *dirty)
    np.testing.assert_array_equal(clean_out, dirty_out)
    assert not np.asarray(dirty_out)[np.broadcast_to(padded[..., None], dirty_out.shape)].any()
    for grad in dirty_vjp(cotangent):
        where = padded if grad.ndim == 3 else padded[..., None]
        assert not np.asarray(grad)[np.broadcast_to(where, grad.shape)].any()


def test_all_rows_masked_gives_zeros_and_zero_gradients() -> None:
    inputs, cotangent = _inputs(9)
    segments = jnp.full((2, 9), PADDING, jnp.int32)
    for implementation in ("reference", "xla"):
        out, vjp = jax.vjp(
            lambda *a, i=implementation: delayed_attention(
                *a, window=1, scale=1.0, segment_ids=segments, implementation=i
            ),
            *inputs,
        )
        assert not np.asarray(out).any()
        for grad in vjp(cotangent):
            assert not np.asarray(grad).any()


def test_packed_rows_equal_rows_alone() -> None:
    (q, k, v, gate), _ = _inputs(40)
    segments = jnp.asarray([[0] * 17 + [1] * 23] * 2, jnp.int32)
    packed = delayed_attention(q, k, v, gate, window=4, scale=0.4, segment_ids=segments)
    for part in (slice(0, 17), slice(17, 40)):
        alone = delayed_attention(q[:, :, part], k[:, :, part], v[:, :, part], gate[:, :, part], window=4, scale=0.4)
        np.testing.assert_allclose(packed[:, :, part], alone, rtol=0, atol=1e-6)


def test_no_array_of_length_squared() -> None:
    """Doubling T doubles the temporaries, forward and backward."""

    def temporaries(length: int) -> int:
        q = jax.ShapeDtypeStruct((1, 2, length, 16), jnp.bfloat16)
        k = jax.ShapeDtypeStruct((1, 1, length, 16), jnp.bfloat16)
        gate = jax.ShapeDtypeStruct((1, 1, length), jnp.float32)

        def loss(*a: jax.Array) -> jax.Array:
            return delayed_attention(*a, window=64, scale=0.25).astype(jnp.float32).sum()

        memory = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(q, k, k, gate).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    assert temporaries(8192) <= 2.2 * temporaries(4096)


def test_arguments_that_do_not_fit() -> None:
    (q, k, v, gate), _ = _inputs(9)
    with pytest.raises(ValueError, match="do not fit"):
        delayed_attention(q, k[:, :, :5], v, window=1, scale=1.0)
    with pytest.raises(ValueError, match="cannot be shared"):
        delayed_attention(q[:, :5], k, v, window=1, scale=1.0)
    with pytest.raises(ValueError, match="gate_logits must be"):
        delayed_attention(q, k, v, gate[:, :, :3], window=1, scale=1.0)
    with pytest.raises(ValueError, match="window must be at least 0"):
        delayed_attention(q, k, v, gate, window=-1, scale=1.0)
    with pytest.raises(NotImplementedError, match="no implementation 'cuda'"):
        delayed_attention(q, k, v, gate, window=1, scale=1.0, implementation="cuda")

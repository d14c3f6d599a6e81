"""The forward kernel of attention under delayed eviction, interpreted: races are errors, unwritten memory is NaN."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import delayed_attention
from kernels.delayed_eviction import mosaic, reference, schedule
from kernels.delayed_eviction.schedule import Bounds, Kept
from kernels.hopper import plgpu
from kernels.visibility import NEVER, PADDING

INTERPRETER = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")


def _inputs(dim: int, length: int, groups: int, mode: str, batch: int = 1) -> tuple[jax.Array | None, ...]:
    keys = jax.random.split(jax.random.key(dim + length), 4)
    q = jax.random.normal(keys[0], (batch, 2 * groups, length, dim), jnp.bfloat16)
    k, v = (jax.random.normal(key, (batch, 2, length, dim), jnp.bfloat16) for key in keys[1:3])
    gate = 3 * jax.random.normal(keys[3], (batch, 2, length)) + (3 if mode == "hard" else 0)
    bias = {"plain": None, "soft": -jax.nn.softplus(gate), "hard": jnp.where(gate > 0, -jnp.inf, 0.0)}[mode]
    return q, k, v, bias


def _near(got: Any, wanted: Any, tolerance: float = 1e-2) -> None:
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - wanted) <= tolerance * np.linalg.norm(wanted)


def _segments(length: int) -> jax.Array:
    """Left padding, two segments, right padding."""
    at = np.arange(length)
    return jnp.asarray(np.where(at < 9, PADDING, np.where(at < length // 2, 0, np.where(at < length - 5, 1, -7))))[None]


@pytest.mark.parametrize(
    ("dim", "length", "groups", "mode", "segmented", "local"),
    [
        (64, 256, 2, "plain", False, None),
        (64, 300, 1, "soft", True, 100),
        (64, 384, 1, "hard", True, None),
        (96, 129, 3, "soft", False, None),
        (128, 257, 1, "hard", False, 150),
        (192, 128, 1, "plain", True, None),
        (256, 130, 2, "hard", False, None),
        (80, 127, 1, "soft", False, 1),
        (16, 1, 1, "soft", False, None),
    ],
)
def test_forward_equals_reference(
    dim: int, length: int, groups: int, mode: str, segmented: bool, local: int | None
) -> None:
    inputs = _inputs(dim, length, groups, mode)
    segments = _segments(length).astype(jnp.int32) if segmented else None
    rest: dict[str, Any] = {"window": 20, "scale": dim**-0.5}
    reach = None if local is None else jnp.int32(local)
    wide = [None if x is None else x.astype(jnp.float32) for x in inputs]
    wanted = reference.attention(*wide, segments, reach, **rest)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        found = mosaic.attention(*inputs, segments, reach, **rest, hard=mode == "hard")
    _near(found, wanted)
    if segments is not None:
        assert not np.asarray(found.astype(jnp.float32))[0][:, np.asarray(segments[0]) < 0].any()


def test_log_sum_exp() -> None:
    q, k, v, _ = _inputs(64, 130, 2, "plain")
    rest: dict[str, Any] = {"window": 0, "scale": 0.125, "with_lse": True}
    segments = _segments(130).astype(jnp.int32)
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    wanted = reference.attention(*wide, None, segments, None, **rest)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        found = mosaic.attention(q, k, v, None, segments, None, **rest)
    _near(found[0], wanted[0])
    np.testing.assert_allclose(found[1], wanted[1], atol=2e-2)


def test_all_rows_masked_gives_zeros() -> None:
    q, k, v, bias = _inputs(64, 128, 1, "hard")
    segments = jnp.full((1, 128), PADDING, jnp.int32)
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        out = mosaic.attention(q, k, v, bias, segments, None, window=3, scale=0.1, hard=True)
    assert not np.asarray(out.astype(jnp.float32)).any()


def test_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, gate = _inputs(64, 128, 1, "soft")
    settings: dict[str, Any] = {"window": 3, "scale": 0.1}
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU.*'xla' can"):
        delayed_attention(q, k, v, gate, implementation="mosaic", **settings)
    plain = delayed_attention(q, k, v, gate, **settings)  # on a CPU: XLA
    np.testing.assert_array_equal(plain, delayed_attention(q, k, v, gate, implementation="xla", **settings))
    used = []
    monkeypatch.setattr(mosaic, "attention", lambda *a, **b: used.append(b["hard"]) or a[0])
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        delayed_attention(q, k, v, gate, hard=True, **settings)
        assert used == [True]
        wide = [x.astype(jnp.float32) for x in (q, k, v)]
        delayed_attention(*wide, gate, **settings)  # not bfloat16: XLA
        assert used == [True]
    monkeypatch.undo()
    with plgpu.force_gpu_interpret_mode(INTERPRETER):
        with pytest.raises(NotImplementedError, match="bfloat16, not float32"):
            delayed_attention(*wide, gate, implementation="mosaic", **settings)
        big = jnp.zeros((1, 2, 8, 320), jnp.bfloat16)
        with pytest.raises(NotImplementedError, match="go up to 256, not 320"):
            delayed_attention(big, big, big, implementation="mosaic", **settings)


@pytest.mark.parametrize("local", [None, 40])
@pytest.mark.parametrize("segmented", [False, True])
def test_schedule_visits_what_the_rule_shows(segmented: bool, local: int | None) -> None:
    """Against the mask itself: no visible pair is left out, and without segments no block that has none is visited."""
    length, block_q, block_k, window = 96, 16, 8, 10
    at = np.arange(length)
    segments = jnp.asarray(np.where(at < 9, PADDING, np.where(at < 50, 0, 1)), jnp.int32)[None]
    distance = at[:, None] - at[None]
    seen = (distance >= 0) & (distance < (local or length))
    pairs = schedule.pairs(
        Bounds.of(schedule.positions(length), block_q),
        Bounds.of(schedule.positions(length), block_k),
        0,
        schedule.reach(None if local is None else jnp.int32(local)),
        window + 1,
    )
    if segmented:
        of_q, of_k = schedule.ids(segments)
        seen &= np.asarray(of_q[0])[:, None] == np.asarray(of_k[0])[None]
        pairs = pairs.within(Bounds.of(of_q[:, None], block_q), Bounds.of(of_k[:, None], block_k))
    blocks = seen.reshape(length // block_q, block_q, length // block_k, block_k)
    late = (distance > window).reshape(blocks.shape)
    live, plain = (np.asarray(x)[0, 0] for x in pairs)
    assert not (blocks.any((1, 3)) & ~live).any()
    assert not (live & ~blocks.any((1, 3))).any() or segmented
    np.testing.assert_array_equal(plain, (blocks & late).all((1, 3)))
    for visits, wanted in ((pairs.by_query(), live), (pairs.by_key(), live.T)):
        for row, (order, counts) in enumerate(zip(visits.order[0, 0], visits.counts[0, 0], strict=True)):
            assert set(np.asarray(order)[: int(counts[1])]) == set(np.flatnonzero(wanted[row]))


def test_hard_cost_falls_with_compression() -> None:
    """At one key in eight, scattered, a late query block visits about an eighth of the blocks of the past."""
    keep = jax.random.bernoulli(jax.random.key(0), 1 / 8, (1, 2, 4096))
    kept = Kept.of(keep)
    for head in range(2):
        n = int(keep[0, head].sum())
        np.testing.assert_array_equal(kept.positions[0, head, :n], np.flatnonzero(np.asarray(keep)[0, head]))
        assert (np.asarray(kept.positions)[0, head, n:] == NEVER).all()
    q = Bounds.of(schedule.positions(4096), 128)
    visits = schedule.pairs(q, Bounds.of(kept.positions, 128), 257, NEVER, 257).by_query()
    assert int(visits.counts[0, :, -1, 1].max()) <= 5  # of 32

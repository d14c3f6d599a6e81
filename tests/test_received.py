"""The attention that keys receive, against softmax written in numpy float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels.received import xla
from kernels.received.api import IMPLEMENTATIONS, received
from kernels.visibility import NEVER


def case(queries=7, keys=13, seed=0):
    """q, k and positions of two rows: row 1 is padded on the left and lacks some keys, per head, which hold NaN."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(2, 6, queries, 4)).astype(np.float32)
    k = rng.normal(size=(2, 2, keys, 4)).astype(np.float32)
    q_at = np.arange(keys - queries, keys, dtype=np.int32)[None].repeat(2, 0)
    q_at[1, : queries // 3] = -1
    k_at = np.broadcast_to(np.arange(keys, dtype=np.int32), (2, 2, keys)).copy()
    k_at[1][rng.uniform(size=(2, keys)) < 0.3] = NEVER
    k[k_at == NEVER] = np.nan
    weight = rng.uniform(0.1, 2, (2, queries)).astype(np.float32)
    weight[:, 2::5] = 0
    return q, k, q_at, k_at, weight


def expected(q, k, q_at, k_at, weight, scale, reduce):
    out = np.zeros((*q.shape[:2], k.shape[2]))
    for b, h in np.ndindex(*q.shape[:2]):
        g = h // (q.shape[1] // k.shape[1])
        rows = np.zeros((q.shape[2], k.shape[2]))
        for t in range(q.shape[2]):
            seen = k_at[b, g] <= q_at[b, t]
            if seen.any():
                s = k[b, g][seen].astype(np.float64) @ q[b, h, t] * scale
                e = np.exp(s - s.max())
                rows[t, seen] = e / e.sum() * weight[b, t]
        out[b, h] = rows.sum(0) if reduce == "sum" else rows.max(0)
    return out


@pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
@pytest.mark.parametrize("reduce", ["sum", "max"])
@pytest.mark.parametrize("weighted", [True, False])
def test_equals_softmax(implementation, reduce, weighted):
    q, k, q_at, k_at, weight = case()
    given = weight if weighted else None
    got = received(*map(jnp.asarray, (q, k, q_at, k_at)), scale=0.7, reduce=reduce,
                   row_weight=None if given is None else jnp.asarray(given), implementation=implementation)  # fmt: skip
    want = expected(q, k, q_at, k_at, weight if weighted else np.ones_like(weight), 0.7, reduce)
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_blocks_do_not_show(monkeypatch, reduce):
    monkeypatch.setattr(xla, "BLOCK_Q", 4)
    monkeypatch.setattr(xla, "BLOCK_K", 8)
    q, k, q_at, k_at, weight = case(queries=30, keys=41, seed=1)
    got = received(*map(jnp.asarray, (q, k, q_at, k_at)), scale=0.7, reduce=reduce, row_weight=jnp.asarray(weight))
    np.testing.assert_allclose(got, expected(q, k, q_at, k_at, weight, 0.7, reduce), atol=1e-6)


@pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_part_of_the_keys(monkeypatch, implementation, reduce):
    """With the log-sum-exp over all keys, some of them receive what they receive among all."""
    monkeypatch.setattr(xla, "BLOCK_Q", 4)
    monkeypatch.setattr(xla, "BLOCK_K", 8)
    q, k, q_at, k_at, weight = case(queries=30, keys=41, seed=2)
    lse = np.full(q.shape[:3], np.inf)
    for b, h, t in np.ndindex(*lse.shape):
        seen = k_at[b, h // 3] <= q_at[b, t]
        if seen.any():
            lse[b, h, t] = np.logaddexp.reduce(k[b, h // 3][seen].astype(np.float64) @ q[b, h, t] * 0.7)
    want = expected(q, k, q_at, k_at, weight, 0.7, reduce)[..., 5:19]
    arrays = q, k[:, :, 5:19], q_at, k_at[:, :, 5:19], weight, lse.astype(np.float32)
    q, k, q_at, k_at, weight, lse = map(jnp.asarray, arrays)
    got = received(
        q, k, q_at, k_at, scale=0.7, reduce=reduce, row_weight=weight, lse=lse, implementation=implementation
    )
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_bad_arguments():
    q, k, q_at, k_at, _ = map(jnp.asarray, case())
    with pytest.raises(ValueError, match="do not fit"):
        received(q, k[:, :, :, :2], q_at, k_at, scale=1.0)
    with pytest.raises(ValueError, match="k_positions"):
        received(q, k, q_at, k_at[:, 0], scale=1.0)
    with pytest.raises(ValueError, match="row_weight"):
        received(q, k, q_at, k_at, scale=1.0, row_weight=jnp.ones((2,)))
    with pytest.raises(ValueError, match="lse"):
        received(q, k, q_at, k_at, scale=1.0, lse=jnp.ones((2, 6)))
    with pytest.raises(ValueError, match="reduce"):
        received(q, k, q_at, k_at, scale=1.0, reduce="mean")
    with pytest.raises(NotImplementedError, match="there are"):
        received(q, k, q_at, k_at, scale=1.0, implementation="mosaic")

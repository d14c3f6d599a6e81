"""The warm start against a plain numpy computation of the same quantities."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvsparse_jax as kvs
from kernels.visibility import PADDING
from train.step import Batch
from train.warm_start import Moments, fit, future_importance, solve, warm_start


def test_future_importance_is_the_largest_late_contribution() -> None:
    batch, heads, kv_heads, length, dim, window, scale = 2, 4, 2, 21, 8, 3, 0.3
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (batch, heads, length, dim))
    k = jax.random.normal(keys[1], (batch, kv_heads, length, dim))
    size = jnp.abs(jax.random.normal(keys[2], (batch, heads, length)))
    stream = jnp.abs(jax.random.normal(keys[3], (batch, length))) + 0.5
    segments = np.asarray([[0] * 12 + [1] * 9, [PADDING] * 4 + [0] * 17])
    found, count = future_importance(q, k, size, stream, jnp.asarray(segments), window=window, scale=scale)

    wanted = np.zeros((batch, kv_heads, length))
    queries = np.zeros((batch, length), int)
    for b in range(batch):
        for at in range(length):
            own = segments[b, at]
            if own == PADDING:
                continue
            seen = [i for i in range(at + 1) if segments[b, i] == own]
            for h in range(heads):
                score = np.asarray([np.asarray(q)[b, h, at] @ np.asarray(k)[b, h // 2, i] * scale for i in seen])
                weight = np.exp(score - score.max()) / np.exp(score - score.max()).sum()
                for i, w in zip(seen, weight, strict=True):
                    if at - i > window:
                        value = w * float(size[b, h, i]) / float(stream[b, at])
                        wanted[b, h // 2, i] = max(wanted[b, h // 2, i], value)
            for i in seen:
                queries[b, i] += at - i > window
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(count, queries)


def test_ridge_from_moments_equals_least_squares() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 5))
    y = x @ rng.normal(size=(5, 2)) + 1.5 + 0.1 * rng.normal(size=(200, 2))
    wide = np.concatenate([x, np.ones((200, 1))], 1)
    found = solve(
        Moments((wide.T @ wide)[None], (wide.T @ y)[None], (y * y).sum(0)[None], np.asarray(200.0)), ridge=1e-9
    )
    wanted = np.linalg.lstsq(wide, y, rcond=None)[0]
    np.testing.assert_allclose(found.slope[0], wanted[:5], atol=1e-6)
    np.testing.assert_allclose(found.intercept[0], wanted[5], atol=1e-6)
    error = ((y - wide @ wanted) ** 2).sum(0) / ((y - y.mean(0)) ** 2).sum(0)
    np.testing.assert_allclose(found.r2[0], 1 - error, atol=1e-6)


@pytest.fixture(scope="module")
def lm() -> kvs.LM:
    """A tiny model with its eviction taken off."""
    path = Path(__file__).parent / "data" / "methods" / "3_model" / "adapter"
    return kvs.load(path, dtype="float32").with_policy(kvs.Dense())


def _rows(lm: kvs.LM, count: int, length: int = 160) -> list[Batch]:
    ids = np.random.default_rng(0).integers(0, lm.config.vocab_size, (count, 1, length)).astype(np.int32)
    return [Batch(jnp.asarray(i), jnp.zeros_like(i), jnp.zeros_like(i)) for i in ids]


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("per", ["head", "layer"])
def test_evicts_about_the_wished_fraction(lm: kvs.LM, shift: int, per: str) -> None:
    policy = kvs.DMS.init(lm.config, window=4, shift=shift, per=per)
    rows = _rows(lm, 6)
    warm = warm_start(lm, policy, rows, evict_fraction=0.6, ridge=1e-3)
    assert warm.window == 4 and warm.shift == shift and warm.per == per
    gates = np.asarray(kvs.decision_logits(lm.with_policy(warm), np.concatenate([r.input_ids for r in rows[:4]])))
    # The fraction is met for the predictions without eviction, whose own effect on the hidden states is small here.
    assert abs((gates > 0).mean() - 0.6) < 0.15
    if per == "layer":
        np.testing.assert_array_equal(gates, np.broadcast_to(gates[:, :, :1], gates.shape))


def test_features_are_those_of_the_key(lm: kvs.LM) -> None:
    """Every head's importance is predicted better than chance, which for E features and n keys is r2 = E / n."""
    rows = _rows(lm, 24)
    found = fit(lm, [(r.input_ids, r.segment_ids) for r in rows], window=2, shift=0, margin=8)
    chance = lm.config.hidden_size / (24 * (160 - 2 - 8))
    assert found.r2.min() > 3 * chance


def test_bad_input(lm: kvs.LM) -> None:
    rows = _rows(lm, 1)
    with pytest.raises(kvs.InputError, match="neuron variant has none"):
        warm_start(lm, kvs.DMS.init(lm.config, variant="neuron"), rows, evict_fraction=0.5)
    with pytest.raises(kvs.InputError, match="between 0 and 1"):
        warm_start(lm, kvs.DMS.init(lm.config), rows, evict_fraction=1.0)
    with pytest.raises(kvs.InputError, match="segments longer than window 512"):
        warm_start(lm, kvs.DMS.init(lm.config), rows, evict_fraction=0.5)

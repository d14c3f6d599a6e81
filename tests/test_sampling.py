"""Sampling against a plain numpy model of its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvsparse_jax import sampling as module
from kvsparse_jax.errors import InputError
from kvsparse_jax.sampling import choose, sampling

CHOOSE = jax.jit(choose)


def distribution(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, present=()):
    """Probabilities [V] of one row in float64: penalty, then temperature, then one filter after the other."""
    logits = np.array(logits, np.float64)
    for token in present:
        logits[token] = logits[token] / repetition_penalty if logits[token] > 0 else logits[token] * repetition_penalty
    p = np.exp((logits - logits.max()) / temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
        p /= p.sum()
    if top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= top_p]] = 0
        p /= p.sum()
    p[p < min_p * p.max()] = 0
    return p / p.sum()


SETTINGS = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0, "top_k": 5},
    {"top_k": 1},
    {"top_p": 0.7},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"temperature": 1.7, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.7, "top_k": 6, "top_p": 0.6, "repetition_penalty": 1.8},
    {"repetition_penalty": 0.5, "min_p": 0.1},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: " ".join(f"{k}={v}" for k, v in s.items()) or "plain")
@pytest.mark.parametrize("size", [40, 600])
def test_distribution(settings, size):
    """Draws of many rows have the support and the frequencies that the definition gives; 600 is above CANDIDATES."""
    rng = np.random.default_rng(0)
    row = rng.normal(size=size) * 2
    draws, present = 6000, [int(np.argmax(row)), 3]
    mask = np.zeros((draws, size), bool)
    mask[:, present] = True
    logits = jnp.broadcast_to(jnp.asarray(row, jnp.float32)[None], (draws, size))
    got = CHOOSE(logits, sampling(draws, **{"temperature": 1.0} | settings, seed=7), jnp.zeros(draws, jnp.int32), mask)
    want = distribution(row, **settings, present=present)
    counts = np.bincount(np.asarray(got), minlength=size)
    assert (want[counts > 0] > 0).all(), "a token that a filter removes was drawn"
    # Five standard deviations of a binomial, for each token.
    deviation = 5 * np.sqrt(draws * want * (1 - want)) + 1
    assert (np.abs(counts - draws * want) <= deviation).all()


def test_all_candidates_give_the_same_draws(monkeypatch):
    """Looking at a few candidates first changes nothing, whatever a row asks for."""
    rng = np.random.default_rng(1)
    batch, size = 400, 300
    logits = jnp.asarray(rng.normal(size=(batch, size)) * rng.uniform(0.1, 3, (batch, 1)), jnp.float32)
    pick = rng.integers
    settings = sampling(
        batch,
        temperature=rng.choice([0.0, 0.3, 1.0, 5.0], batch).tolist(),
        top_k=rng.choice([0, 0, 1, 7, 32, 200], batch).tolist(),
        top_p=rng.choice([1.0, 1.0, 0.5, 0.97], batch).tolist(),
        min_p=rng.choice([0.0, 0.0, 0.1], batch).tolist(),
        seed=pick(0, 2**32, batch).tolist(),
    )
    positions = jnp.asarray(pick(0, 1000, batch), jnp.int32)
    every = np.asarray(jax.jit(lambda *a: choose(*a))(logits, settings, positions))
    monkeypatch.setattr(module, "CANDIDATES", 32)
    few = jax.jit(lambda *a: choose(*a))
    np.testing.assert_array_equal(few(logits, settings, positions), every)
    # Rows with few candidates only: the second look is never taken.
    short = sampling(batch, temperature=0.7, top_k=20, top_p=0.95, seed=3)
    got = few(logits, short, positions)
    monkeypatch.setattr(module, "CANDIDATES", size)
    np.testing.assert_array_equal(got, jax.jit(lambda *a: choose(*a))(logits, short, positions))


def test_greedy():
    logits = jnp.asarray([[0.0, 3, 3, 1], [-1, -2, -3, -0.5], [5, 4, 3, 2]], jnp.float32)
    positions = jnp.zeros(3, jnp.int32)
    assert CHOOSE(logits, sampling(3), positions).tolist() == [1, 3, 0]
    # The filters keep the best token, and a temperature near 0 takes it too, without overflow.
    settings = sampling(3, temperature=[0, 1e-30, 1], top_k=[5, 0, 1], top_p=[0.1, 1, 1], min_p=[0.99, 0, 0])
    assert CHOOSE(logits, settings, positions).tolist() == [1, 3, 0]
    # The penalty counts for greedy rows as well.
    present = jnp.asarray([[False, True, False, False]] * 3)
    assert CHOOSE(logits, sampling(3, repetition_penalty=2.0), positions, present).tolist() == [2, 3, 0]


def test_rows_do_not_depend_on_each_other():
    rng = np.random.default_rng(2)
    logits = jnp.asarray(rng.normal(size=(6, 500)), jnp.float32)
    seeds = [5, 6, 7, 5, 2**32 - 1, 0]
    kinds = [0.0, 1.0, 2.0, 1.0, 1.0, 9.0]
    positions = jnp.asarray([3, 1, 4, 3, 5, 9], jnp.int32)
    together = CHOOSE(logits, sampling(6, temperature=kinds, seed=seeds), positions).tolist()
    alone = [
        CHOOSE(logits[i : i + 1], sampling(1, temperature=kinds[i], seed=seeds[i]), positions[i : i + 1]).item()
        for i in range(6)
    ]
    assert together == alone
    same = jnp.broadcast_to(logits[:1], logits.shape)
    shared = CHOOSE(same, sampling(6, temperature=5.0, seed=1), positions)
    assert len(set(shared.tolist())) > 2, "rows of one seed draw from streams of their own"
    later = CHOOSE(same, sampling(6, temperature=5.0, seed=1), positions + 1)
    assert later.tolist() != shared.tolist()
    again = CHOOSE(same, sampling(6, temperature=5.0, seed=1), positions)
    assert again.tolist() == shared.tolist()


def test_one_compilation_for_all_settings():
    compiled = jax.jit(lambda *a: choose(*a))
    for settings in SETTINGS:
        settings = {k: v for k, v in settings.items() if k != "repetition_penalty"}
        compiled(jnp.zeros((2, 400)), sampling(2, **settings), jnp.zeros(2, jnp.int32))
    assert compiled._cache_size() == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"top_p": 0}, "top_p must be above 0 and at most 1, not 0"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"temperature": -0.1}, "temperature must be at least 0, not -0.1"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"min_p": 1}, "min_p must be at least 0 and below 1, not 1"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0, not 0"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**32}, "seed"),
        ({"temperature": [1.0, 2.0]}, "temperature has 2 values for a batch of 3"),
        ({"top_p": [1.0, 0.5, 0.0]}, "top_p"),
    ],
)
def test_bad_settings(settings, words):
    with pytest.raises(InputError, match=words):
        sampling(3, **settings)

"""Choosing the next token: repetition penalty, then temperature, then the filters top-k, top-p and min-p.

All settings are per row, so one compiled program serves every mix of requests. Each draw uses a single uniform number
whose key depends on the row's seed and the position alone: what a row gets does not depend on who shares the batch.
"""

import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvsparse_jax.errors import InputError

CANDIDATES = 256
"""Tokens that are looked at first. Sorting a whole vocabulary takes XLA:CPU 30-100 times as long as finding so many."""

PerRow = float | Sequence[float]
"""One number for all rows, or one for each."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """Settings of B rows, made by :func:`sampling`.

    Attributes:
        temperature: [B] float32; 0 takes the most probable token.
        top_k: [B] int32, only this many of the most probable tokens; 0 is off.
        top_p: [B] float32, only the most probable tokens that together just reach this probability; 1 is off.
        min_p: [B] float32, only tokens with at least this fraction of the largest probability; 0 is off.
        repetition_penalty: [B] float32, divides positive and multiplies negative logits of tokens present; 1 is off.
        keys: [B] random keys.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    repetition_penalty: Array
    keys: Array

    @property
    def penalised(self) -> bool:
        """Whether some row has a repetition penalty (reads the device)."""
        return bool(np.any(np.asarray(self.repetition_penalty) != 1))


def sampling(
    batch: int,
    *,
    temperature: PerRow = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: PerRow = 1.0,
    min_p: PerRow = 0.0,
    repetition_penalty: PerRow = 1.0,
    seed: int | Sequence[int] = 0,
) -> Sampling:
    """Checks the settings of ``batch`` rows; each is one value for all rows or a sequence with one for each.

    Args:
        batch: B.
        temperature, top_k, top_p, min_p, repetition_penalty: see :class:`Sampling`.
        seed: 0 to 2**32 - 1. With one seed for all, row i draws from stream i of it; with one for each, every row draws
            from stream 0 of its own, as it would alone.

    Raises:
        InputError: a setting is out of range, or there are not ``batch`` of them.
    """

    def row(name: str, value: Any, good: Callable[[Any], bool], accepted: str, whole: bool = False) -> list[float]:
        values = per_row(name, value, batch)
        for one in values:
            kind = numbers.Integral if whole else numbers.Real
            if isinstance(one, bool) or not isinstance(one, kind) or not good(one):
                raise InputError(f"{name} must be {accepted}, not {one!r}")
        return [float(one) for one in values]

    def positive(x: float) -> bool:
        return 0 < x < float("inf")

    floats = {
        "temperature": row("temperature", temperature, lambda x: x == 0 or positive(x), "at least 0"),
        "top_p": row("top_p", top_p, lambda x: 0 < x <= 1, "above 0 and at most 1"),
        "min_p": row("min_p", min_p, lambda x: 0 <= x < 1, "at least 0 and below 1"),
        "repetition_penalty": row("repetition_penalty", repetition_penalty, positive, "above 0"),
    }
    ks = row("top_k", top_k, lambda x: 0 <= x < 2**31, "a whole number, at least 0 (0: off)", whole=True)
    seeds = row("seed", seed, lambda x: 0 <= x < 2**32, "a whole number from 0 to 2**32 - 1", whole=True)
    streams = np.arange(batch, dtype=np.uint32) if isinstance(seed, numbers.Integral) else np.zeros(batch, np.uint32)
    return Sampling(
        **{name: jnp.asarray(values, jnp.float32) for name, values in floats.items()},
        top_k=jnp.asarray(np.asarray(ks, np.int32)),
        keys=_keys(jnp.asarray(np.asarray(seeds, np.uint32)), jnp.asarray(streams)),
    )


def per_row(name: str, value: Any, batch: int) -> list[Any]:
    """One value for all rows, or a sequence of one for each, as a list of ``batch``. Raises InputError."""
    if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray):
        return [value] * batch
    if len(value) != batch:
        raise InputError(f"{name} has {len(value)} values for a batch of {batch}")
    return list(value)


@jax.jit
def _keys(seeds: Array, streams: Array) -> Array:
    return jax.vmap(lambda seed, stream: jax.random.fold_in(jax.random.key(seed), stream))(seeds, streams)


def penalise(logits: Array, present: Array, penalty: Array) -> Array:
    """Repetition penalty (arXiv 1909.05858, section 4.1) on logits [B, V].

    Args:
        logits: [B, V].
        present: [B, V] bool, tokens of the row's prompt and answer so far.
        penalty: [B].
    """
    penalty = penalty.astype(logits.dtype)[:, None]
    return jnp.where(present, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def most_probable(logits: Array) -> Array:
    """argmax over the last axis, the lowest index among equals, [...] int32; 10 times as fast as argmax on XLA:CPU."""
    size = logits.shape[-1]
    best = logits == jnp.max(logits, -1, keepdims=True)
    index = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.min(jnp.where(best, index, jnp.int32(size - 1)), -1)


def choose(logits: Array, settings: Sampling, positions: Array, present: Array | None = None) -> Array:
    """Draws the next token of each row.

    Args:
        logits: [B, V] float32 or float64.
        settings: of the B rows.
        positions: [B] int32, number of tokens before the one drawn: the same position of the same stream always draws
            the same number.
        present: [B, V] bool for the repetition penalty, None: no row has one.

    Returns:
        [B] int32.
    """
    if present is not None:
        logits = penalise(logits, present, settings.repetition_penalty)
    greedy = settings.temperature == 0
    best = most_probable(logits)
    drawn = lax.cond(jnp.all(greedy), lambda: best, lambda: _draw(logits, settings, positions))
    return jnp.where(greedy, best, drawn)


def _draw(logits: Array, settings: Sampling, positions: Array) -> Array:
    size = logits.shape[-1]
    greedy = settings.temperature == 0
    temperature = jnp.where(greedy, jnp.ones_like(settings.temperature), settings.temperature).astype(logits.dtype)
    # Relative to the largest, so that a tiny temperature gives -inf and no NaN.
    scaled = (logits - jnp.max(logits, -1, keepdims=True)) / temperature[:, None]
    whole = jax.nn.logsumexp(scaled, -1)
    uniform = jax.vmap(lambda key, at: jax.random.uniform(jax.random.fold_in(key, at)))(settings.keys, positions)

    def among(count: int) -> tuple[Array, Array]:
        """Tokens drawn when ``count`` candidates are looked at, and whether more would change nothing."""
        values, ids = lax.top_k(scaled, count)
        rank, sure = _rank(jnp.exp(values - whole[:, None]), settings, uniform.astype(scaled.dtype))
        return jnp.take_along_axis(ids, rank[:, None], 1)[:, 0], sure

    if size <= CANDIDATES:
        return among(size)[0]
    first, sure = among(CANDIDATES)
    return lax.cond(jnp.all(sure | greedy), lambda: first, lambda: among(size)[0])


def _rank(p: Array, settings: Sampling, uniform: Array) -> tuple[Array, Array]:
    """Which of the candidates is drawn, [B] int32, and whether that is certain without the others, [B] bool.

    Args:
        p: [B, N] probabilities after the temperature, the N largest in descending order.
        settings: of the rows.
        uniform: [B] in [0, 1).
    """
    count = p.shape[1]
    rank = jnp.arange(count, dtype=jnp.int32)[None]
    top_k, top_p, min_p = settings.top_k[:, None], settings.top_p.astype(p.dtype)[:, None], settings.min_p[:, None]
    one = jnp.ones((), p.dtype)
    before = jnp.cumsum(p, 1) - p
    # Every filter keeps a prefix of the ranks. Each works on what the one before it left, renormalised.
    within = (top_k == 0) | (rank < top_k)
    mass = jnp.where(top_k == 0, one, jnp.sum(jnp.where(within, p, 0), 1, keepdims=True))
    kept = within & ((top_p >= 1) | (before < top_p * mass)) & (p >= min_p.astype(p.dtype) * p[:, :1])
    kept = kept | (rank == 0)
    number = jnp.sum(kept, 1, dtype=jnp.int32)
    unfiltered = (top_k == 0) & (top_p >= 1) & (min_p == 0)
    total = jnp.where(unfiltered[:, 0], one, jnp.sum(jnp.where(kept, p, 0), 1))
    target = uniform * total
    passed = jnp.sum(kept & (before + p <= target[:, None]), 1, dtype=jnp.int32)
    ended = (number < count) | (settings.top_k == count)
    sure = jnp.where(unfiltered[:, 0], passed < count, ended & (settings.top_k <= count))
    return jnp.minimum(passed, number - 1), sure

"""Partial softmax results, and the one place where they are combined.

Attention over a set of keys that is split (pages, cache and chunk, devices) is computed part by part, each
unnormalised and in the accumulator's precision. A part without visible keys is ``top = EMPTY, weight = 0, total = 0``.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

EMPTY = -1e30
"""Largest score of a part that sees no key: finite, so that differences of two of them are not NaN."""


class Partial(NamedTuple):
    """Attention over some of the keys, before the division.

    Attributes:
        total: [..., D], sum of ``exp(score - top) * v`` over the visible keys.
        top: [...], a bound of the scores that the exponentials are relative to (their maximum, or EMPTY).
        weight: [...], sum of ``exp(score - top)``.
    """

    total: Array
    top: Array
    weight: Array


def empty(shape: tuple[int, ...], dim: int, dtype: DTypeLike) -> Partial:
    """A part without keys for rows of the given shape."""
    return Partial(jnp.zeros((*shape, dim), dtype), jnp.full(shape, EMPTY, dtype), jnp.zeros(shape, dtype))


def merge(a: Partial, b: Partial) -> Partial:
    """The part over the keys of both (which must be disjoint)."""
    top = jnp.maximum(a.top, b.top)
    by_a, by_b = jnp.exp(a.top - top), jnp.exp(b.top - top)
    return Partial(a.total * by_a[..., None] + b.total * by_b[..., None], top, a.weight * by_a + b.weight * by_b)


def normalise(part: Partial) -> Array:
    """The attention output [..., D]; rows that see no key are zero."""
    nothing = part.weight == 0
    return part.total / jnp.where(nothing, jnp.ones_like(part.weight), part.weight)[..., None]

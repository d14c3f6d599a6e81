"""What happens when a cache is full: it grows, gives up entries, or the run ends. Never silently.

Host-side: call :func:`ensure` before a forward pass, or before a device loop that itself stops when
:meth:`kvsparse_jax.cache.base.Cache.fits` says no.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from kvsparse_jax.cache import paged
from kvsparse_jax.cache.base import Cache, Size, by_shard
from kvsparse_jax.cache.paged import PagedCache
from kvsparse_jax.errors import RunError

WhenFull = Literal["grow", "evict", "error"]

Tokens = int | Sequence[int] | np.ndarray
"""How many more tokens: of every sequence, or [B]."""


class CapacityError(RunError):
    """The cache is full and was not allowed, or not able, to make room."""


@jax.jit
def _fits(cache: Cache, tokens: Array) -> Array:
    return cache.fits(tokens)


@functools.partial(jax.jit, static_argnames="size")
def _repack[C: Cache](cache: C, rows: Array, size: Size) -> C:
    return cache.repack(rows, size)


def _per_row(cache: Cache, tokens: Tokens) -> np.ndarray:
    return np.broadcast_to(np.asarray(tokens, np.int32), cache.seen.shape)


def fits(cache: Cache, tokens: Tokens) -> bool:
    """Whether ``tokens`` more tokens are sure to find room, whatever the policy decides about them."""
    return bool(_fits(cache, jnp.asarray(_per_row(cache, tokens))))


def ensure[C: Cache](cache: C, tokens: Tokens, when_full: WhenFull = "grow") -> C:
    """A cache that is sure to hold ``tokens`` more tokens, whatever the policy decides about them.

    Args:
        cache: the state. Where "evict" gives up entries it is donated; when this raises it is as before.
        tokens: of every sequence, or [B].
        when_full: "grow" copies to the next :func:`bucket` of the capacity; "evict" gives up the entries of lowest
            priority (see :func:`trim`); "error" raises.

    Raises:
        CapacityError: there is no room, and none can be made.
        ValueError: unknown ``when_full``.
    """
    if when_full not in ("grow", "evict", "error"):
        raise ValueError(f"when_full must be 'grow', 'evict' or 'error', not {when_full!r}")
    if fits(cache, tokens):
        return cache
    if when_full == "grow":
        return grow(cache, tokens)
    more = _per_row(cache, tokens)
    detail = "and when_full='error'"
    if not isinstance(cache, PagedCache):
        detail = "and it can only grow"
    elif when_full == "evict":
        # A page more than asked for, or the next step would be here again.
        wished, least = (jnp.asarray(x, jnp.int32) for x in (np.where(more > 0, more + cache.page, 0), more))
        level = _level(cache, wished, least)
        if int(level) >= 0:
            return trim(cache, level)
        detail = "and nothing outside the window is left to give up"
    raise CapacityError(f"{cache.shortage(more)}, {detail}")


def grow[C: Cache](cache: C, tokens: Tokens) -> C:
    """A copy with room for ``tokens`` more tokens, at the next buckets. The old one stays as it is."""
    rows = np.arange(cache.seen.shape[0], dtype=np.int32)
    needed = cache.size_for(rows, _per_row(cache, tokens))
    size = tuple(max(old, new) for old, new in zip(cache.size, needed, strict=True))
    return _repack(cache, jnp.asarray(rows), size)


def fork[C: Cache](cache: C, rows: Sequence[int] | np.ndarray, tokens: Tokens = 0, size: Size | None = None) -> C:
    """A cache whose sequences are copies of ``rows`` [B'], with room for ``tokens`` (of each, or [B']) more tokens.

    Pages are copied, none is shared: the copies go on independently, and the original stays as it is. ``size`` is the
    capacity if it is to be another than the bucket for the tokens.
    """
    chosen = np.asarray(rows, np.int32)
    if chosen.size == 0 or chosen.min() < 0 or chosen.max() >= cache.seen.shape[0]:
        raise ValueError(f"rows must name sequences 0 to {cache.seen.shape[0] - 1}, not {list(rows)}")
    if size is None:
        size = cache.size_for(chosen, np.broadcast_to(np.asarray(tokens, np.int32), chosen.shape))
    return _repack(cache, jnp.asarray(chosen), size)


def _protected(cache: PagedCache) -> tuple[Array, Array]:
    """Slots in the ring that hold a token of the window [L, B, H, R] (-1: none), and how many there are [L, B, H]."""
    held = (cache.seen[:, None] > jnp.arange(cache.ring.shape[3], dtype=jnp.int32)[None])[None, :, None]
    ring = jnp.where(held, cache.ring, -1)
    return ring, jnp.sum(ring >= 0, -1, dtype=jnp.int32)


def _cut(cache: PagedCache, level: Array) -> Array:
    """Lengths [L, B, H] when no head keeps more than ``level`` pages, or what the window takes if that is more."""
    _, protected = _protected(cache)
    return jnp.maximum(jnp.minimum(cache.lengths, level * cache.page), jnp.minimum(protected, cache.lengths))


@jax.jit
def _level(cache: PagedCache, wished: Array, least: Array) -> Array:
    """Most pages that heads may keep for ``wished`` [B] more tokens to fit, else for ``least`` [B]; -1: not even 0."""
    levels = jnp.arange(cache.tables.shape[3] + 1, dtype=jnp.int32)

    def highest(tokens: Array) -> Array:
        def enough(level: Array) -> Array:
            return dataclasses.replace(cache, lengths=_cut(cache, level)).fits(tokens)

        return jnp.max(jnp.where(lax.map(enough, levels), levels, -1))

    level = highest(wished)
    return jnp.where(level < 0, highest(least), level)


@functools.partial(jax.jit, donate_argnums=(0,))
def trim(cache: PagedCache, level: Array) -> PagedCache:
    """Gives up entries until no head holds more than ``level`` (int32) pages, but for what is never given up.

    The longest heads are cut, all to one length, so short ones are left alone. Within a head the keys of largest norm
    go first (Knorm, arXiv 2406.11430), never those in the ring (the window, the newest token). ``trimmed`` counts them.
    """
    trimmed: PagedCache = by_shard(_trim, cache, (level,), (PartitionSpec(),), cache.specs())
    return trimmed


def _trim(cache: PagedCache, level: Array) -> PagedCache:
    """:func:`trim` of a shard."""
    ring, _ = _protected(cache)
    surplus = cache.lengths - _cut(cache, level)

    def layer(cache: PagedCache, x: tuple[Array, Array, Array]) -> tuple[PagedCache, None]:
        index, surplus, ring = x
        k, _, _, used = paged.entries(cache, index)
        norm = jnp.sqrt(jnp.sum(jnp.square(k.astype(jnp.float32)), -1))
        b, h = (x[..., None] for x in jnp.indices(surplus.shape, dtype=jnp.int32, sparse=True))
        kept = ~used.at[b, h, jnp.where(ring >= 0, ring, cache.slots)].set(False, mode="drop")
        order = jnp.argsort(jnp.where(kept, jnp.inf, -norm), -1)
        ranks = jnp.argsort(order, -1).astype(jnp.int32)
        return paged.drop(cache, index, ranks < surplus[..., None]), None

    indices = jnp.arange(cache.lengths.shape[0], dtype=jnp.int32)
    cache, _ = lax.scan(layer, cache, (indices, surplus, ring))
    return dataclasses.replace(cache, trimmed=cache.trimmed + surplus)

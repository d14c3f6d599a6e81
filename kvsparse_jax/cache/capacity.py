"""What happens when a cache is full: it grows, gives up entries, or the run ends. Never silently.

Host-side: call :func:`ensure` before a forward pass, or before a device loop that itself stops when :func:`paged.fits`
says no.
"""

import dataclasses
import functools
from typing import Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kernels.visibility import NEVER
from kvsparse_jax.cache import dense, paged
from kvsparse_jax.cache.dense import DenseCache
from kvsparse_jax.cache.paged import PagedCache
from kvsparse_jax.errors import RunError

WhenFull = Literal["grow", "evict", "error"]


class CapacityError(RunError):
    """The cache is full and was not allowed, or not able, to make room."""


def bucket(n: int) -> int:
    """The next capacity of at least ``n``: powers of two and the numbers halfway, so that few programs are compiled."""
    power = 1 << max(n - 1, 0).bit_length()
    return power * 3 // 4 if n <= power * 3 // 4 and power >= 4 else power


@functools.partial(jax.jit, static_argnames=("pages", "width"))
def _repack(cache: PagedCache, rows: Array, *, pages: int, width: int) -> PagedCache:
    return paged.repack(cache, rows, pages=pages, width=width)


@overload
def ensure(cache: PagedCache, tokens: int, when_full: WhenFull = ...) -> PagedCache: ...
@overload
def ensure(cache: DenseCache, tokens: int, when_full: WhenFull = ...) -> DenseCache: ...
def ensure(cache: PagedCache | DenseCache, tokens: int, when_full: WhenFull = "grow") -> PagedCache | DenseCache:
    """A cache that is sure to hold ``tokens`` more tokens per sequence, whatever the policy decides about them.

    Args:
        cache: the state; not donated, except that "evict" donates it.
        tokens: at least 1.
        when_full: "grow" copies to the next :func:`bucket` of pages and table width; "evict" gives up the entries of
            lowest priority (see :func:`trim`); "error" raises.

    Raises:
        CapacityError: there is no room, and none can be made.
        ValueError: unknown ``when_full``.
    """
    if when_full not in ("grow", "evict", "error"):
        raise ValueError(f"when_full must be 'grow', 'evict' or 'error', not {when_full!r}")
    if isinstance(cache, DenseCache):
        return _ensure_dense(cache, tokens, when_full)
    return _ensure_paged(cache, tokens, when_full)


def _ensure_paged(cache: PagedCache, tokens: int, when_full: WhenFull) -> PagedCache:
    if bool(paged.fits(cache, tokens)):
        return cache
    if when_full == "grow":
        return grow(cache, tokens)
    if when_full == "evict":
        # A page more than asked for, or the next step would be here again.
        cache = trim(cache, jnp.int32(tokens + cache.page), jnp.int32(tokens))
        if bool(paged.fits(cache, tokens)):
            return cache
        detail = "and nothing outside the window is left to give up"
    else:
        detail = "and when_full='error'"
    needed = int(paged.pages_needed(cache, tokens))
    longest = int(jnp.max(cache.lengths))
    raise CapacityError(
        f"the cache is full: {tokens} more tokens may need {needed} pages of {cache.pages} and "
        f"{longest + tokens} slots of {cache.slots} per head, {detail}"
    )


def grow(cache: PagedCache, tokens: int) -> PagedCache:
    """A copy with room for ``tokens`` more tokens per sequence, at the next buckets. The old one stays as it is."""
    pages = max(cache.pages, bucket(int(paged.pages_needed(cache, tokens))))
    longest = int(jnp.max(cache.lengths)) + tokens
    width = max(cache.tables.shape[3], bucket(-(-longest // cache.page)))
    rows = jnp.arange(cache.seen.shape[0], dtype=jnp.int32)
    return _repack(cache, rows, pages=pages, width=width)


def fork(cache: PagedCache, rows: list[int], tokens: int = 0) -> PagedCache:
    """A cache whose sequences are copies of ``rows``, with room for ``tokens`` more tokens each.

    Pages are copied, none is shared: the copies go on independently, and the original stays as it is.
    """
    chosen = np.asarray(rows, np.int32)
    if chosen.size == 0 or chosen.min() < 0 or chosen.max() >= cache.seen.shape[0]:
        raise ValueError(f"rows must name sequences 0 to {cache.seen.shape[0] - 1}, not {rows}")
    more = -(-(np.asarray(cache.lengths)[:, chosen] + tokens) // cache.page)
    pages, width = bucket(int(more.sum())), max(cache.tables.shape[3], bucket(int(more.max())))
    return _repack(cache, jnp.asarray(chosen), pages=pages, width=width)


@functools.partial(jax.jit, donate_argnums=(0,))
def trim(cache: PagedCache, wished: Array, least: Array) -> PagedCache:
    """Gives up entries until ``wished`` more tokens per sequence are sure to fit; if that cannot be, then ``least``.

    The longest heads are cut, all to one length, so short ones are left alone. Within a head the keys of largest norm
    go first (Knorm, arXiv 2406.11430), never those in the ring (the window, the newest token). ``trimmed`` counts them.
    If the window alone is too much, the result does not fit either.
    """
    held = (cache.seen[:, None] > jnp.arange(cache.ring.shape[3], dtype=jnp.int32)[None])[None, :, None]
    ring = jnp.where(held, cache.ring, -1)
    protected = jnp.sum(ring >= 0, -1, dtype=jnp.int32)

    def cut(pages: Array) -> Array:
        return jnp.maximum(jnp.minimum(cache.lengths, pages * cache.page), jnp.minimum(protected, cache.lengths))

    def enough(pages: Array, tokens: Array) -> Array:
        return paged.fits(dataclasses.replace(cache, lengths=cut(pages)), tokens)

    levels = jnp.arange(cache.tables.shape[3] + 1, dtype=jnp.int32)

    def highest(tokens: Array) -> Array:
        """Largest level that leaves room, or -1."""
        return jnp.max(jnp.where(lax.map(lambda pages: enough(pages, tokens), levels), levels, -1))

    level = highest(wished)
    level = jnp.where(level < 0, highest(least), level)
    target = cut(jnp.maximum(level, 0))
    surplus = cache.lengths - target

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


def _ensure_dense(cache: DenseCache, tokens: int, when_full: WhenFull) -> DenseCache:
    if bool(dense.fits(cache, tokens)):
        return cache
    needed = int(jnp.max(cache.seen)) + tokens
    if when_full != "grow":
        raise CapacityError(
            f"the dense cache is full: {needed} slots of {cache.slots} are needed, and it can only grow"
        )
    more = -(-bucket(needed) // dense.block_of(needed)) * dense.block_of(needed) - cache.slots

    def pad(x: Array, axis: int, value: int = 0) -> Array:
        return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)], constant_values=value)

    expires = None if cache.expires is None else pad(cache.expires, 3, NEVER)
    return dataclasses.replace(cache, k=pad(cache.k, 4), v=pad(cache.v, 3), expires=expires)

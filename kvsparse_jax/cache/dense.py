"""The dense cache: every token of every head, contiguous. The reference and the baseline of the paged cache.

It has the interface of :mod:`kvsparse_jax.cache.paged`. Decisions to evict are masked and free nothing; without them
(``window=None``) no mask but the length is computed. Work follows the longest sequence, not the capacity.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from kernels.ragged_decode.partial import normalise
from kernels.visibility import NEVER
from kernels.visibility import expires as last_query
from kvsparse_jax.cache import blockwise

_FULL_BLOCK_HEADS = 64
"""Up to this many (sequence, head) pairs per block of BLOCK_K keys; fewer pairs get longer blocks."""


@dataclasses.dataclass(frozen=True)
class DenseCache:
    """State of the dense cache. L layers, B sequences, H KV heads, D channels, S slots: slot = position.

    Attributes:
        k: [L, B, H, D, S], keys, channels first (as in the paged cache).
        v: [L, B, H, S, D].
        expires: [L, B, H, S] int32, or None where nothing is ever flagged.
        seen: [B] int32.
        flagged: [L, B, H] int32, decisions to evict so far.
        lost: int32 scalar, entries past the capacity.
        window, shift: as in the paged cache.
        local: some layer has a sliding window.
    """

    k: Array
    v: Array
    expires: Array | None
    seen: Array
    flagged: Array
    lost: Array
    window: int | None
    shift: int
    local: bool

    @property
    def slots(self) -> int:
        """Tokens that a sequence can hold (S)."""
        return self.v.shape[3]


_STATIC = ("window", "shift", "local")
jax.tree_util.register_dataclass(
    DenseCache,
    data_fields=[f.name for f in dataclasses.fields(DenseCache) if f.name not in _STATIC],
    meta_fields=list(_STATIC),
)


def init(
    *,
    layers: int,
    batch: int,
    kv_heads: int,
    head_dim: int,
    dtype: DTypeLike,
    slots: int,
    window: int | None = None,
    shift: int = 0,
    local_windows: tuple[int | None, ...] = (),
) -> DenseCache:
    """An empty cache with room for at least ``slots`` tokens per sequence; the other arguments as in ``paged.init``."""
    if min(layers, batch, kv_heads, head_dim, slots) < 1:
        raise ValueError("layers, batch, kv_heads, head_dim and slots must be at least 1")
    if shift not in (0, 1):
        raise ValueError(f"shift must be 0 or 1, not {shift}")
    slots = -(-slots // block_of(slots)) * block_of(slots)
    heads = (layers, batch, kv_heads)
    return DenseCache(
        k=jnp.zeros((*heads, head_dim, slots), dtype),
        v=jnp.zeros((*heads, slots, head_dim), dtype),
        expires=None if window is None else jnp.full((*heads, slots), NEVER, jnp.int32),
        seen=jnp.zeros((batch,), jnp.int32),
        flagged=jnp.zeros(heads, jnp.int32),
        lost=jnp.zeros((), jnp.int32),
        window=window,
        shift=shift,
        local=any(w is not None for w in local_windows),
    )


def block_of(slots: int) -> int:
    """Keys per block, of which a capacity is a multiple."""
    return min(blockwise.BLOCK_K, 1 << (slots - 1).bit_length())


def positions(cache: DenseCache, valid: Array) -> Array:
    """Positions [B, T] of the columns of a chunk, from ``valid`` [B, T]."""
    return cache.seen[:, None] + jnp.maximum(jnp.cumsum(valid, 1, dtype=jnp.int32) - 1, 0)


def attend(
    cache: DenseCache,
    layer: Array,
    q: Array,
    k: Array,
    v: Array,
    evict: Array | None,
    valid: Array,
    *,
    scale: float,
    local_window: Array | None = None,
) -> tuple[Array, DenseCache]:
    """Stores new tokens and attends over all that is visible; arguments and result as in ``paged.attend``."""
    layer = jnp.asarray(layer, jnp.int32)
    at = positions(cache, valid)
    cache = _store(cache, layer, k, v, at, valid)
    if cache.expires is not None and evict is not None:
        cache = _decide(cache, layer, evict, at, valid)
    elif evict is not None:
        raise ValueError("this cache was made for a policy that never evicts (window=None)")

    batch, kv_heads, dim = q.shape[0], k.shape[1], q.shape[3]
    block = block_of(cache.slots)
    while q.shape[2] == 1 and batch * kv_heads * 2 * block <= _FULL_BLOCK_HEADS * blockwise.BLOCK_K:
        if cache.slots % (2 * block):
            break
        block *= 2
    total = cache.seen + jnp.sum(valid, 1, dtype=jnp.int32)

    def fetch(j: Array) -> blockwise.Keys:
        start = j * block
        zero = jnp.zeros_like(start)
        slot = start + jnp.arange(block, dtype=jnp.int32)[None]
        last = last_query(slot, jnp.zeros_like(slot, bool), 0, local_window)[:, None]
        if cache.expires is not None:
            stored = lax.dynamic_slice(cache.expires, (layer, zero, zero, start), (1, batch, kv_heads, block))[0]
            last = jnp.minimum(last, stored)
        return blockwise.Keys(
            lax.dynamic_slice(cache.k, (layer, zero, zero, zero, start), (1, batch, kv_heads, dim, block))[0],
            lax.dynamic_slice(cache.v, (layer, zero, zero, start, zero), (1, batch, kv_heads, block, dim))[0],
            jnp.where(slot < total[:, None], slot, NEVER),
            last,
        )

    def blocks(column: Array) -> Array:
        newest = jnp.where(valid, at, -1)
        seen_by = jnp.where(jnp.arange(valid.shape[1], dtype=jnp.int32)[None] <= column, newest, -1)
        return jnp.minimum(jnp.max(seen_by) // block + 1, jnp.int32(cache.slots // block))

    part = blockwise.attention(q, jnp.where(valid, at, -1), fetch, blocks, scale=scale)
    return normalise(part).astype(q.dtype), cache


def _store(cache: DenseCache, layer: Array, k: Array, v: Array, at: Array, valid: Array) -> DenseCache:
    slot = jnp.where(valid, at, cache.slots)[:, None]
    b, h = (x[..., None] for x in jnp.indices(k.shape[:2], dtype=jnp.int32, sparse=True))
    lost = jnp.sum(valid & (at >= cache.slots), dtype=jnp.int32) * k.shape[1]
    return dataclasses.replace(
        cache,
        k=cache.k.at[layer, b, h, :, slot].set(k.astype(cache.k.dtype), mode="drop"),
        v=cache.v.at[layer, b, h, slot].set(v.astype(cache.v.dtype), mode="drop"),
        lost=cache.lost + lost,
    )


def _decide(cache: DenseCache, layer: Array, evict: Array, at: Array, valid: Array) -> DenseCache:
    if cache.expires is None or cache.window is None:
        raise ValueError("this cache was made for a policy that never evicts (window=None)")
    b, h = (x[..., None] for x in jnp.indices(evict.shape[:2], dtype=jnp.int32, sparse=True))
    by_key = blockwise.decided(evict, cache.shift, valid)
    own = last_query(jnp.broadcast_to(at[:, None], evict.shape), by_key, cache.window)
    expires = cache.expires.at[layer, b, h, jnp.where(valid, at, cache.slots)[:, None]].set(own, mode="drop")
    flagged = jnp.sum(by_key, -1, dtype=jnp.int32)
    if cache.shift == 1:
        first = jnp.argmax(valid, 1).astype(jnp.int32)
        newest = jnp.broadcast_to((cache.seen - 1)[:, None, None], (*evict.shape[:2], 1))
        pending = jnp.take_along_axis(evict, first[:, None, None], 2) & (newest >= 0) & valid.any(1)[:, None, None]
        last = newest + jnp.int32(cache.window)
        expires = expires.at[layer, b, h, jnp.where(pending, newest, cache.slots)].set(last, mode="drop")
        flagged = flagged + pending[..., 0].astype(jnp.int32)
    old = lax.dynamic_index_in_dim(cache.flagged, layer, 0, False)
    flagged = lax.dynamic_update_index_in_dim(cache.flagged, old + flagged, layer, 0)
    return dataclasses.replace(cache, expires=expires, flagged=flagged)


def advance(cache: DenseCache, valid: Array) -> DenseCache:
    """Counts the tokens of a forward pass as seen, after its last layer; valid [B, T]."""
    return dataclasses.replace(cache, seen=cache.seen + jnp.sum(valid, 1, dtype=jnp.int32))


def release(cache: DenseCache, rows: Array) -> DenseCache:
    """Empties the sequences ``rows`` [B] bool."""
    flagged = jnp.where(rows[None, :, None], 0, cache.flagged)
    return dataclasses.replace(cache, seen=jnp.where(rows, 0, cache.seen), flagged=flagged)


def fits(cache: DenseCache, tokens: Array | int) -> Array:
    """Whether ``tokens`` ([B] or one number) more tokens find room; bool scalar."""
    return jnp.max(cache.seen + jnp.asarray(tokens, jnp.int32)) <= cache.slots

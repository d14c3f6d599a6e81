"""The dense cache: every token of every head, contiguous. The reference and the baseline of the paged cache.

Decisions to evict are masked and free nothing; without them (``window=None``) no mask but the length is computed. Work
follows the longest sequence, not the capacity.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Self, final

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh

from kernels.blockwise import xla as blockwise
from kernels.partial import normalise
from kernels.visibility import NEVER, visible
from kernels.visibility import expires as last_query
from kvsparse_jax.cache.base import Cache, Size, attend_by_shard, bucket, held_until, register, shards
from kvsparse_jax.cache.spec import CacheSpec

_FULL_BLOCK_HEADS = 64
"""Up to this many (sequence, head) pairs per block of BLOCK_K keys; fewer pairs get longer blocks."""


@final
@register
@dataclass(frozen=True)
class DenseCache(Cache):
    """State of the dense cache. L layers, B sequences, H KV heads, D channels, S slots: slot = position.

    ``k`` is [L, B, H, D, S], channels first (as in the paged cache), ``v`` [L, B, H, S, D]; nothing is ever trimmed.

    Attributes:
        expires: [L, B, H, S] int32, last query position that may see the key; None where nothing is ever flagged.
    """

    expires: Array | None

    @property
    def slots(self) -> int:
        """Tokens that a sequence can hold (S)."""
        return self.v.shape[3]

    @property
    def channels(self) -> int:
        """See :attr:`Cache.channels`."""
        return self.k.shape[3] + self.v.shape[4]

    @property
    def size(self) -> Size:
        """(slots,)"""
        return (self.slots,)

    def attend(
        self,
        layer: Array,
        q: Array,
        k: Array,
        v: Array,
        evict: Array | None,
        valid: Array,
        *,
        scale: float,
        local_window: Array | None = None,
        hold: Array | None = None,
    ) -> tuple[Array, Self]:
        """Stores new tokens and attends over all that is visible, see :meth:`Cache.attend`."""
        attend = functools.partial(_attend, scale=scale)
        return attend_by_shard(attend, self, layer, q, k, v, evict, valid, local_window, hold)

    def entries(self, layer: Array) -> tuple[Array, Array]:
        """Keys and values [B, H, slots, D] of a layer."""
        keys = lax.dynamic_index_in_dim(self.k, layer, 0, False).swapaxes(2, 3)
        return keys, lax.dynamic_index_in_dim(self.v, layer, 0, False) if self.v.shape[4] else keys

    def sweep(self) -> Self:
        """See :meth:`Cache.sweep`: nothing is freed, only made invisible also to the newest query."""
        if self.expires is None:
            return self
        gone = self.expires < self.seen[None, :, None, None]
        return dataclasses.replace(self, expires=jnp.where(gone, -1, self.expires))

    def release(self, rows: Array) -> Self:
        """Empties the sequences ``rows`` [B] bool."""
        flagged = jnp.where(rows[None, :, None], 0, self.flagged)
        return dataclasses.replace(self, seen=jnp.where(rows, 0, self.seen), flagged=flagged)

    def live(self) -> Array:
        """Keys visible to the newest query, [L, B, H] int32: fewer than are held."""
        slot = jnp.arange(self.slots, dtype=jnp.int32)[None, None, None]
        newest = (self.seen - 1)[None, :, None, None]
        if self.expires is not None:
            last = self.expires
        else:
            reach = [NEVER if window is None else window for window in self.local_windows or (None,)]
            last = last_query(slot, jnp.zeros_like(slot, bool), 0, jnp.asarray(reach, jnp.int32)[:, None, None, None])
        count = jnp.sum(visible(newest, slot, last), -1, dtype=jnp.int32)
        return jnp.broadcast_to(count, self.flagged.shape)

    @property
    def head_axes(self) -> dict[str, int]:
        """Keys, values and when they expire, and the counts."""
        named = {"k": 2, "v": 2, "expires": 2, "flagged": 2, "trimmed": 2, "lost": 0}
        return {name: axis for name, axis in named.items() if getattr(self, name) is not None}

    def pages_taken(self) -> Array:
        """Zeros: there are no pages."""
        return jnp.zeros_like(self.flagged)

    def fits(self, tokens: Array | int) -> Array:
        """Whether ``tokens`` ([B] or one number) more tokens find room; bool scalar."""
        return jnp.max(self.seen + jnp.asarray(tokens, jnp.int32)) <= self.slots

    def size_for(self, rows: np.ndarray, tokens: np.ndarray) -> Size:
        """See :meth:`Cache.size_for`."""
        return (max(self.slots, _whole_blocks(bucket(int((np.asarray(self.seen)[rows] + tokens).max())))),)

    def size_for_batch(self, batch: int) -> Size:
        """The same slots."""
        return self.size

    def repack(self, rows: Array, size: Size) -> Self:
        """See :meth:`Cache.repack`; there can only be more slots than before, not fewer."""
        more = size[0] - self.slots

        def pad(x: Array, axis: int, value: int = 0) -> Array:
            return jnp.pad(x[:, rows], [(0, more if i == axis else 0) for i in range(x.ndim)], constant_values=value)

        return dataclasses.replace(
            self,
            k=pad(self.k, 4),
            v=pad(self.v, 3),
            expires=None if self.expires is None else pad(self.expires, 3, NEVER),
            seen=self.seen[rows],
            flagged=self.flagged[:, rows],
            trimmed=self.trimmed[:, rows],
        )

    def shortage(self, tokens: np.ndarray) -> str:
        """See :meth:`Cache.shortage`."""
        needed = int((np.asarray(self.seen) + tokens).max())
        return f"the dense cache is full: {needed} slots of {self.slots} are needed"


def init(spec: CacheSpec, batch: int, *, slots: int, mesh: Mesh | None = None) -> DenseCache:
    """An empty cache with room for at least ``slots`` tokens of each of ``batch`` sequences."""
    if min(batch, slots) < 1:
        raise ValueError("batch and slots must be at least 1")
    slots = _whole_blocks(slots)
    heads = (spec.layers, batch, spec.kv_heads)
    return DenseCache(
        k=jnp.zeros((*heads, spec.head_dim, slots), spec.dtype),
        v=jnp.zeros((*heads, slots, spec.stored_values), spec.dtype),
        expires=None if spec.window is None else jnp.full((*heads, slots), NEVER, jnp.int32),
        seen=jnp.zeros((batch,), jnp.int32),
        flagged=jnp.zeros(heads, jnp.int32),
        trimmed=jnp.zeros(heads, jnp.int32),
        lost=jnp.zeros(() if mesh is None else (shards(mesh, spec.kv_heads),), jnp.int32),
        window=spec.window,
        shift=spec.shift,
        recent=spec.recent,
        local_windows=spec.local_windows,
        mesh=mesh,
    )


def block_of(slots: int) -> int:
    """Keys per block, of which a capacity is a multiple."""
    return min(blockwise.BLOCK_K, 1 << (slots - 1).bit_length())


def _whole_blocks(slots: int) -> int:
    return -(-slots // block_of(slots)) * block_of(slots)


def _attend(
    cache: DenseCache,
    layer: Array,
    q: Array,
    k: Array,
    v: Array,
    evict: Array | None,
    valid: Array,
    local_window: Array | None,
    hold: Array | None,
    *,
    scale: float,
) -> tuple[Array, DenseCache]:
    """:meth:`DenseCache.attend` of a shard."""
    at = cache.positions(valid)
    cache = _store(cache, layer, k, v, evict, at, valid, local_window, hold)
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
        if cache.expires is None:
            last = last_query(slot, jnp.zeros_like(slot, bool), 0, local_window)[:, None]
        else:
            last = lax.dynamic_slice(cache.expires, (layer, zero, zero, start), (1, batch, kv_heads, block))[0]
        keys = lax.dynamic_slice(cache.k, (layer, zero, zero, zero, start), (1, batch, kv_heads, dim, block))[0]
        values = None
        if cache.v.shape[4]:
            values = lax.dynamic_slice(cache.v, (layer, zero, zero, start, zero), (1, batch, kv_heads, block, dim))[0]
        return blockwise.Keys(
            keys,
            keys.swapaxes(2, 3) if values is None else values,
            jnp.where(slot < total[:, None], slot, NEVER),
            last,
        )

    def blocks(column: Array) -> Array:
        newest = jnp.where(valid, at, -1)
        seen_by = jnp.where(jnp.arange(valid.shape[1], dtype=jnp.int32)[None] <= column, newest, -1)
        return jnp.minimum(jnp.max(seen_by) // block + 1, jnp.int32(cache.slots // block))

    part = blockwise.attention(q, jnp.where(valid, at, -1), fetch, blocks, scale=scale)
    return normalise(part).astype(q.dtype), cache


def _store(
    cache: DenseCache,
    layer: Array,
    k: Array,
    v: Array,
    evict: Array | None,
    at: Array,
    valid: Array,
    local_window: Array | None,
    hold: Array | None,
) -> DenseCache:
    """Stores a chunk k, v [B, H, T, D] at positions ``at`` [B, T], and when its keys expire."""
    cache, decisions = cache.decide(layer, evict, at, valid, local_window, hold)
    slot = jnp.where(valid, at, cache.slots)[:, None]
    b, h = (x[..., None] for x in jnp.indices(k.shape[:2], dtype=jnp.int32, sparse=True))
    expires = cache.expires
    if expires is not None and hold is not None:
        # What the first query sees of the past, all of them do.
        old = lax.dynamic_index_in_dim(expires, layer, 0, False)
        positions = jnp.broadcast_to(jnp.arange(cache.slots, dtype=jnp.int32)[None, None], old.shape)
        held = held_until(old, positions, cache.seen, hold, local_window)
        expires = lax.dynamic_update_index_in_dim(expires, held, layer, 0)
    if expires is not None:
        expires = expires.at[layer, b, h, slot].set(decisions.expires, mode="drop")
        if decisions.pending is not None and decisions.pending_expires is not None:
            newest = jnp.where(decisions.pending, (cache.seen - 1)[:, None], cache.slots)
            expires = expires.at[layer, b[..., 0], h[..., 0], newest].set(decisions.pending_expires, mode="drop")
    lost = jnp.sum(valid & (at >= cache.slots), dtype=jnp.int32) * k.shape[1]
    return dataclasses.replace(
        cache,
        k=cache.k.at[layer, b, h, :, slot].set(k.astype(cache.k.dtype), mode="drop"),
        v=cache.v.at[layer, b, h, slot].set(v[..., : cache.v.shape[4]].astype(cache.v.dtype), mode="drop"),
        expires=expires,
        lost=cache.lost + lost,
    )

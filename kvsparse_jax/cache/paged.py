"""The compressed cache: one pool of pages for all layers, page tables per (layer, sequence, KV head).

Every array is allocated once; allocating, storing and dropping happen inside jit on donated buffers. What holds between
calls, for every layer, sequence and head:

* The head's entries fill slots ``0 .. length - 1`` of its pages, in any order (keys are stored after RoPE), and each
  of them is visible to the newest query by the rule of ``kernels.visibility``. So ``length`` is the live count, the
  head takes ``ceil(length / page)`` pages, and decoding needs no mask but ``length``.
* ``expires`` of a slot is the last query position that may see it.
* ``ring[p % R]`` is the slot of the token at position ``p`` for the R newest positions, -1 when it is gone. R reaches
  as far back as a token can leave, so the slots that a step frees are found without a search.

In a decode step at most one token leaves the window, and the new one takes its slot; else it is appended. A chunk fills
the slots that it frees by rank, and what is flagged and outside the window at its end is never stored. Only models with
sliding-window layers can free more slots than they fill: the last entries then move into the holes.

On a mesh every shard of the KV heads has a pool and a free list of its own, and page numbers count from its first page.

Running out of pages or of table width never overwrites anything: the token is not stored and ``lost`` counts it.
Callers ask :meth:`PagedCache.fits` first and grow the pool or trim it (:mod:`kvsparse_jax.cache.capacity`).
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import NamedTuple, Self, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from kernels.blockwise import xla as blockwise
from kernels.partial import Partial, merge, normalise
from kernels.ragged_decode.api import ragged_attention
from kernels.visibility import NEVER
from kvsparse_jax.cache.base import Cache, Size, attend_by_shard, bucket, by_shard, held_until, register, shards
from kvsparse_jax.cache.quantise import Quantisation, dequantise, quantise, storage_dtype
from kvsparse_jax.cache.spec import CacheSpec
from kvsparse_jax.policies.base import Held, Selection

_LANES = 128
"""Numbers in a row of a TPU's memory."""


@final
@register
@dataclass(frozen=True)
class PagedCache(Cache):
    """State of the cache. L layers, B sequences (rows), H KV heads, D channels, P pages of ``page`` slots.

    ``k`` is [P, D, page], channels first, ``v`` [P, page, D]; without channels where the key is the value, too (latent
    attention). Where ``token_major``, k is as v, and both are [P, page / n, n D]: n tokens side by side in a row.

    Attributes:
        k_scale, v_scale: [P, page] float32, for 8-bit pools; else None. Only k_scale where the key is the value.
        expires: [P, page] int32.
        statistic: [P, page] float32, what a policy that selects notes about each entry; else None.
        free: [P] int32; ``free[:free_count]`` are the pages that nobody holds, taken from the end.
        free_count: int32 scalar.
        tables: [L, B, H, width] int32; page of each run of slots, P where there is none.
        lengths: [L, B, H] int32.
        ring: [L, B, H, R] int32.
        token_major: static, on TPUs: they store rows of 128 lanes. XLA would pad shorter ones, and would copy all keys
            to a layout with channels last in every layer that stores one of them.
    """

    k_scale: Array | None
    v_scale: Array | None
    expires: Array
    statistic: Array | None
    free: Array
    free_count: Array
    tables: Array
    lengths: Array
    ring: Array
    token_major: bool

    @property
    def pages(self) -> int:
        """Pages in the pool (P)."""
        return self.expires.shape[0]

    @property
    def page(self) -> int:
        """Slots per page."""
        return self.expires.shape[1]

    @property
    def channels(self) -> int:
        """See :attr:`Cache.channels`."""
        return sum(math.prod(x.shape[1:]) for x in (self.k, self.v)) // self.page

    @property
    def pool(self) -> list[Array]:
        """Keys, values, scales, ``expires`` and ``statistic``."""
        every = (self.k, self.v, self.k_scale, self.v_scale, self.expires, self.statistic)
        return [x for x in every if x is not None]

    @property
    def head_axes(self) -> dict[str, int]:
        """All but ``seen``: the pool is the shards' pools one after the other, and so is the free list."""
        named = dict.fromkeys(("tables", "lengths", "ring", "flagged", "trimmed"), 2)
        named |= dict.fromkeys(("k", "v", "k_scale", "v_scale", "expires", "statistic", "free", *self.counters), 0)
        return {name: axis for name, axis in named.items() if getattr(self, name) is not None}

    @property
    def counters(self) -> tuple[str, ...]:
        """See :meth:`Cache.counters`."""
        return "lost", "free_count"

    @property
    def shard_pages(self) -> int:
        """Pages of a shard; as the number of a page: none."""
        return self.pages // self.shards

    @property
    def slots(self) -> int:
        """Slots that a head's table can name."""
        return self.tables.shape[3] * self.page

    @property
    def size(self) -> Size:
        """(pages, entries of a page table)"""
        return self.pages, self.tables.shape[3]

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
        statistic: Array | None = None,
        implementation: str | None = None,
    ) -> tuple[Array, Self]:
        """See :meth:`Cache.attend`.

        Args:
            layer, q, k, v, evict, valid, scale, local_window, hold: as there.
            statistic: [B, H, T] float32, of the new entries; None: 0.
            implementation: of the attention over the cache, see :func:`ragged_attention`.
        """
        attend = functools.partial(_attend, scale=scale, implementation=implementation)
        return attend_by_shard(attend, self, layer, q, k, v, evict, valid, local_window, hold, statistic)

    def sweep(self) -> Self:
        """See :meth:`Cache.sweep`."""
        swept: Self = by_shard(_sweep, self, (), (), self.specs())
        return swept

    def release(self, rows: Array) -> Self:
        """Empties the sequences ``rows`` [B] bool. All released: as new, but for stale pages."""
        released: Self = by_shard(_release, self, (rows,), (PartitionSpec(),), self.specs())
        return released

    def live(self) -> Array:
        """Keys visible to the newest query, [L, B, H] int32: all that are held."""
        return self.lengths

    def pages_taken(self) -> Array:
        """Pages that each head holds, [L, B, H] int32."""
        return pages_of(self, self.lengths)

    def fits(self, tokens: Array | int) -> Array:
        """See :meth:`Cache.fits`."""
        longest = jnp.max(self.lengths + _more(self, tokens))
        return (jnp.max(pages_needed(self, tokens)) <= self.shard_pages) & (longest <= self.slots)

    def size_for(self, rows: np.ndarray, tokens: np.ndarray) -> Size:
        """See :meth:`Cache.size_for`."""
        pages = -(-(np.asarray(self.lengths)[:, rows] + tokens[None, :, None]) // self.page)
        most = int(self._per_shard(pages).max())
        return self.shards * bucket(most), max(self.tables.shape[3], bucket(int(pages.max())))

    def _per_shard(self, pages: np.ndarray) -> np.ndarray:
        """Sums [shards] of numbers [L, B, H]."""
        return pages.reshape(*pages.shape[:2], self.shards, -1).sum((0, 1, 3))

    def size_for_batch(self, batch: int) -> Size:
        """As many pages per sequence, and tables as long."""
        return self.shards * -(-self.shard_pages * batch // self.seen.shape[0]), self.tables.shape[3]

    def shortage(self, tokens: np.ndarray) -> str:
        """See :meth:`Cache.shortage`."""
        lengths = np.asarray(self.lengths) + tokens[None, :, None]
        return (
            f"the cache is full: {int(tokens.max())} more tokens may need "
            f"{int(self._per_shard(-(-lengths // self.page)).max())} pages of {self.shard_pages} and "
            f"{int(lengths.max())} slots of {self.slots} per head"
        )

    def take(self, rows: Array) -> Self:
        """The sequences ``rows`` [B'] int32 (none twice; B or more: an empty one) with the whole pool and free list.

        A forward pass over the part takes pages of the pool that it shares; :meth:`put` brings it back, and until then
        neither the cache nor another part of it may be used.
        """

        def some(x: Array, axis: int, fill: int) -> Array:
            return jnp.take(x, rows, axis, mode="fill", fill_value=fill)

        return dataclasses.replace(
            self,
            tables=some(self.tables, 1, self.shard_pages),
            lengths=some(self.lengths, 1, 0),
            ring=some(self.ring, 1, -1),
            seen=some(self.seen, 0, 0),
            flagged=some(self.flagged, 1, 0),
            trimmed=some(self.trimmed, 1, 0),
        )

    def put(self, rows: Array, part: Self) -> Self:
        """The cache after what happened to a part that :meth:`take` gave of it, with the same ``rows``."""

        def back(name: str, axis: int) -> Array:
            at = (slice(None),) * axis + (rows,)
            whole: Array = getattr(self, name)
            return whole.at[at].set(getattr(part, name), mode="drop")

        return dataclasses.replace(
            part,
            tables=back("tables", 1),
            lengths=back("lengths", 1),
            ring=back("ring", 1),
            seen=back("seen", 0),
            flagged=back("flagged", 1),
            trimmed=back("trimmed", 1),
        )

    def repack(self, rows: Array, size: Size) -> Self:
        """See :meth:`Cache.repack`. Pages come to lie in the order of the tables."""
        own = size[0] // self.shards, size[1]
        repack = functools.partial(_repack, size=own)
        repacked: Self = by_shard(repack, self, (rows,), (PartitionSpec(),), self.specs())
        return repacked


def _on_tpu(mesh: Mesh | None) -> bool:
    return (jax.default_backend() if mesh is None else mesh.devices.flat[0].platform) == "tpu"


def init(
    spec: CacheSpec,
    batch: int,
    *,
    pages: int,
    width: int,
    page: int = 64,
    quantisation: Quantisation | None = None,
    mesh: Mesh | None = None,
) -> PagedCache:
    """An empty cache.

    Args:
        spec: what it is for.
        batch: sequences (B).
        pages: capacity of the pool, shared by all layers, sequences and heads of a shard; of all shards together.
        width: entries of a page table: a head holds at most ``width * page`` tokens.
        page: slots per page.
        quantisation: "int8", "float8_e4m3" or None.
        mesh: devices that it is for.

    Raises:
        ValueError: a number that makes no sense.
    """
    if min(batch, pages, width, page) < 1:
        raise ValueError("batch, pages, width and page must be at least 1")
    parts = shards(mesh, spec.kv_heads)
    if pages % parts:
        raise ValueError(f"{pages} pages cannot be divided over {parts} shards")
    own = pages // parts
    stored = spec.dtype if quantisation is None else storage_dtype(quantisation)
    heads, counter = (spec.layers, batch, spec.kv_heads), () if mesh is None else (parts,)
    scales = [
        None if quantisation is None or not channels else jnp.ones((pages, page), jnp.float32)
        for channels in (spec.head_dim, spec.stored_values)
    ]
    token_major = _on_tpu(mesh)
    side_by_side = math.gcd(page, _LANES // spec.head_dim) if token_major and not _LANES % spec.head_dim else 1
    rows = pages, page // side_by_side, spec.head_dim * side_by_side
    return PagedCache(
        k=jnp.zeros(rows if token_major else (pages, spec.head_dim, page), stored),
        v=jnp.zeros((*rows[:2], spec.stored_values * side_by_side), stored),
        k_scale=scales[0],
        v_scale=scales[1],
        expires=jnp.full((pages, page), NEVER, jnp.int32),
        statistic=jnp.zeros((pages, page), jnp.float32) if spec.recent is not None else None,
        free=jnp.tile(jnp.arange(own - 1, -1, -1, dtype=jnp.int32), parts),
        free_count=jnp.full(counter, own, jnp.int32),
        tables=jnp.full((*heads, width), own, jnp.int32),
        lengths=jnp.zeros(heads, jnp.int32),
        ring=jnp.full((*heads, spec.reach), -1, jnp.int32),
        seen=jnp.zeros((batch,), jnp.int32),
        flagged=jnp.zeros(heads, jnp.int32),
        lost=jnp.zeros(counter, jnp.int32),
        trimmed=jnp.zeros(heads, jnp.int32),
        window=spec.window,
        shift=spec.shift,
        recent=spec.recent,
        local_windows=spec.local_windows,
        mesh=mesh,
        token_major=token_major,
    )


def _attend(
    cache: PagedCache,
    layer: Array,
    q: Array,
    k: Array,
    v: Array,
    evict: Array | None,
    valid: Array,
    local_window: Array | None,
    hold: Array | None,
    statistic: Array | None,
    *,
    scale: float,
    implementation: str | None,
) -> tuple[Array, PagedCache]:
    """:meth:`PagedCache.attend` of a shard."""
    chunk = q.shape[2]
    at = cache.positions(valid)
    cache, last = _decide(cache, layer, evict, at, valid, local_window, hold)

    def past(cache: PagedCache, at: Array | None) -> tuple[Partial, PagedCache]:
        table, length, _ = _read(cache, layer)
        part = ragged_attention(
            q,
            cache.k,
            cache.v,
            table,
            jnp.where(valid.any(1)[:, None], length, 0),
            scale=scale,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale if cache.v.shape[2] else cache.k_scale,
            expires=None if at is None else cache.expires,
            q_positions=at,
            token_major=cache.token_major,
            implementation=implementation,
        )
        # XLA does not see that the pools have been read before they are next written to, and would copy them.
        return lax.optimization_barrier((part, cache))

    if chunk == 1:
        # Stored first: what the step frees is then gone, and what is left is all visible.
        if cache.local:
            cache = _store(cache, layer, k, v, last, statistic, at, valid)
        else:
            cache = _store_one(cache, layer, k, v, last, statistic, valid[:, 0])
        part, cache = past(cache, None)
    else:
        part, cache = past(cache, at)
        part = merge(part, blockwise.chunk_attention(q, k, v, at, valid, last, scale=scale))
        cache = _store(cache, layer, k, v, last, statistic, at, valid)
    out = jnp.where(valid[:, None, :, None], normalise(part), 0)
    return out.astype(q.dtype), cache


def _release(cache: PagedCache, rows: Array) -> PagedCache:
    """:meth:`PagedCache.release` of a shard."""
    gone = rows[None, :, None]
    lengths = jnp.where(gone, 0, cache.lengths)
    tables = jnp.where(gone[..., None], cache.pages, cache.tables)
    # The free list is rebuilt from the tables, so its order does not depend on history.
    nth = jnp.arange(tables.shape[3], dtype=jnp.int32)[None, None, None]
    held = nth < pages_of(cache, lengths)[..., None]
    taken = jnp.zeros((cache.pages,), bool).at[jnp.where(held, tables, cache.pages)].set(True, mode="drop")
    ids = jnp.arange(cache.pages, dtype=jnp.int32)
    return dataclasses.replace(
        cache,
        tables=tables,
        lengths=lengths,
        free=jnp.sort(jnp.where(taken, -1, ids), descending=True),
        free_count=jnp.sum(~taken, dtype=jnp.int32),
        ring=jnp.where(gone[..., None], -1, cache.ring),
        seen=jnp.where(rows, 0, cache.seen),
        flagged=jnp.where(gone, 0, cache.flagged),
        trimmed=jnp.where(gone, 0, cache.trimmed),
    )


def _repack(cache: PagedCache, rows: Array, *, size: Size) -> PagedCache:
    """:meth:`PagedCache.repack` of a shard."""
    pages, width = size
    lengths, ring = cache.lengths[:, rows], cache.ring[:, rows]
    old = cache.tables[:, rows][..., :width]
    old = jnp.pad(old, ((0, 0), (0, 0), (0, 0), (0, width - old.shape[3])), constant_values=cache.pages)
    nth = jnp.arange(width, dtype=jnp.int32)[None, None, None]
    held = nth < pages_of(cache, lengths)[..., None]
    new = jnp.where(held, _running(held.astype(jnp.int32)), pages)
    # Only an overfull pool makes a difference here: a head keeps the slots before its first missing page.
    kept = jnp.sum(new < pages, -1, dtype=jnp.int32) * cache.page
    short = jnp.maximum(lengths - kept, 0)
    source = jnp.full((pages,), 0, jnp.int32).at[jnp.where(held, new, pages)].set(old, mode="drop")
    taken = jnp.sum(new < pages, dtype=jnp.int32)
    ids = jnp.arange(pages, dtype=jnp.int32)
    scale = [None if x is None else x[source] for x in (cache.k_scale, cache.v_scale)]
    return dataclasses.replace(
        cache,
        k=cache.k[source],
        v=cache.v[source],
        k_scale=scale[0],
        v_scale=scale[1],
        expires=cache.expires[source],
        statistic=None if cache.statistic is None else cache.statistic[source],
        free=jnp.sort(jnp.where(ids < taken, -1, ids), descending=True),
        free_count=pages - taken,
        tables=jnp.minimum(new, pages),
        lengths=lengths - short,
        ring=jnp.where(ring >= (lengths - short)[..., None], -1, ring),
        seen=cache.seen[rows],
        flagged=cache.flagged[:, rows],
        trimmed=cache.trimmed[:, rows],
        lost=cache.lost + jnp.sum(short, dtype=jnp.int32),
    )


# One layer of the cache


class _Layer(NamedTuple):
    """The bookkeeping of one layer, taken out of the stacks."""

    table: Array
    length: Array
    ring: Array


def _read(cache: PagedCache, layer: Array) -> _Layer:
    return _Layer(*(lax.dynamic_index_in_dim(x, layer, 0, False) for x in (cache.tables, cache.lengths, cache.ring)))


def _write(cache: PagedCache, layer: Array, state: _Layer) -> PagedCache:
    stacks = (cache.tables, cache.lengths, cache.ring)
    new = [lax.dynamic_update_index_in_dim(x, y, layer, 0) for x, y in zip(stacks, state, strict=True)]
    return dataclasses.replace(cache, tables=new[0], lengths=new[1], ring=new[2])


class _Place(NamedTuple):
    """Where slots lie: page (P, out of range, for no slot) and offset in it, of equal shape."""

    page: Array
    offset: Array


def _places(cache: PagedCache, table: Array, slots: Array) -> _Place:
    """Places of slots [B, H, N] (negative: none) of a layer with table [B, H, width]."""
    nth = jnp.clip(slots, 0) // cache.page
    page = jnp.take_along_axis(table, jnp.minimum(nth, table.shape[2] - 1), 2)
    exists = (slots >= 0) & (nth < table.shape[2])
    return _Place(jnp.where(exists, page, cache.pages), jnp.clip(slots, 0) % cache.page)


def _get(cache: PagedCache, place: _Place) -> tuple[Array, Array]:
    """Keys and values [..., D] at places, as they are stored; values [..., 0] where the key is the value."""

    def of(pool: Array) -> Array:
        side_by_side = cache.page // pool.shape[1]
        row = pool[place.page, place.offset // side_by_side]
        row = row.reshape(*place.page.shape, side_by_side, pool.shape[2] // side_by_side)
        return jnp.take_along_axis(row, (place.offset % side_by_side)[..., None, None], -2)[..., 0, :]

    return of(cache.k) if cache.token_major else cache.k[place.page, :, place.offset], of(cache.v)


def _set(cache: PagedCache, place: _Place, k: Array, v: Array) -> tuple[Array, Array]:
    """The pools of keys and values with k, v [..., D] at places; no place, nothing stored."""

    def of(pool: Array, x: Array) -> Array:
        side_by_side = cache.page // pool.shape[1]
        if side_by_side == 1 or not x.shape[-1]:
            return pool.at[place.page, place.offset].set(x, mode="drop")
        lane = place.offset % side_by_side * x.shape[-1]
        axes = lax.ScatterDimensionNumbers((x.ndim - 1,), (0, 1), (0, 1, 2))
        at = jnp.stack([place.page, place.offset // side_by_side, lane], -1)
        return lax.scatter(pool, at, x, axes, mode="drop")

    if cache.token_major:
        return of(cache.k, k), of(cache.v, v)
    return cache.k.at[place.page, :, place.offset].set(k, mode="drop"), of(cache.v, v)


def _put(cache: PagedCache, place: _Place, k: Array, v: Array, expires: Array, statistic: Array | None) -> PagedCache:
    """Stores k, v [B, H, N, D], expires and statistic [B, H, N] at places [B, H, N]; no place, nothing stored."""
    page, offset = place.page.reshape(-1), place.offset.reshape(-1)
    k, v = k.reshape(-1, k.shape[-1]), v.reshape(-1, v.shape[-1])[:, : cache.v.shape[2]]
    k_scale, v_scale = cache.k_scale, cache.v_scale
    if k_scale is not None:
        k, of_k = quantise(k, cache.k.dtype)
        k_scale = k_scale.at[page, offset].set(of_k, mode="drop")
    if v_scale is not None:
        v, of_v = quantise(v, cache.v.dtype)
        v_scale = v_scale.at[page, offset].set(of_v, mode="drop")
    k, v = _set(cache, _Place(page, offset), k.astype(cache.k.dtype), v.astype(cache.v.dtype))
    return dataclasses.replace(
        cache,
        k=k,
        v=v,
        k_scale=k_scale,
        v_scale=v_scale,
        expires=cache.expires.at[page, offset].set(expires.reshape(-1), mode="drop"),
        statistic=None if cache.statistic is None else _noted(cache.statistic, place, statistic),
    )


def _noted(pool: Array, place: _Place, statistic: Array | None) -> Array:
    """The pool's statistic with values [B, H, N] (None: 0) at places [B, H, N]."""
    value = jnp.zeros_like(place.page, pool.dtype) if statistic is None else statistic.astype(pool.dtype)
    return pool.at[place.page, place.offset].set(value, mode="drop")


def _move(cache: PagedCache, source: _Place, target: _Place) -> PagedCache:
    """Copies entries as they are stored; no target, nothing moved."""

    def moved(pool: Array) -> Array:
        return pool.at[target.page, target.offset].set(pool[source.page, source.offset], mode="drop")

    k, v = _set(cache, target, *_get(cache, source))
    return dataclasses.replace(
        cache,
        k=k,
        v=v,
        k_scale=None if cache.k_scale is None else moved(cache.k_scale),
        v_scale=None if cache.v_scale is None else moved(cache.v_scale),
        expires=moved(cache.expires),
        statistic=None if cache.statistic is None else moved(cache.statistic),
    )


# Pages


def pages_of(cache: PagedCache, lengths: Array) -> Array:
    """Pages that heads of these lengths take."""
    return (lengths + (cache.page - 1)) // cache.page


def _running(x: Array) -> Array:
    """Exclusive running sum over all elements of x, in row-major order, same shape."""
    flat = x.reshape(-1)
    return (jnp.cumsum(flat, dtype=jnp.int32) - flat).reshape(x.shape)


def _take_pages(cache: PagedCache, table: Array, old: Array, new: Array, most: int) -> tuple[PagedCache, Array]:
    """Lengthens tables [B, H, width] from ``old`` to ``new`` pages [B, H], at most ``most`` each, while pages last."""
    need = jnp.maximum(new - old, 0)
    start = _running(need)
    nth = jnp.arange(most, dtype=jnp.int32)[None, None]
    rank = start[..., None] + nth
    wanted = nth < need[..., None]
    found = wanted & (rank < cache.free_count)
    page = cache.free.at[jnp.maximum(cache.free_count - 1 - rank, 0)].get(mode="clip")
    at = jnp.where(wanted, old[..., None] + nth, table.shape[2])
    b, h = jnp.indices(old.shape, dtype=jnp.int32, sparse=True)
    table = table.at[b[..., None], h[..., None], at].set(jnp.where(found, page, cache.pages), mode="drop")
    taken = jnp.minimum(jnp.sum(need, dtype=jnp.int32), cache.free_count)
    return dataclasses.replace(cache, free_count=cache.free_count - taken), table


def _return_pages(cache: PagedCache, table: Array, old: Array, new: Array) -> tuple[PagedCache, Array]:
    """Shortens tables [B, H, width] from ``old`` to ``new`` pages [B, H] where that is less."""
    nth = jnp.arange(table.shape[2], dtype=jnp.int32)[None, None]
    gone = (nth >= new[..., None]) & (nth < old[..., None])
    at = jnp.where(gone, cache.free_count + _running(gone.astype(jnp.int32)), cache.pages)
    free = cache.free.at[at].set(table, mode="drop")
    count = cache.free_count + jnp.sum(gone, dtype=jnp.int32)
    return dataclasses.replace(cache, free=free, free_count=count), jnp.where(gone, cache.pages, table)


def _room(cache: PagedCache, table: Array, need: Array) -> Array:
    """Slots [B, H] that a head can use after it asked for ``need`` pages: those before the first that is missing."""
    nth = jnp.arange(table.shape[2], dtype=jnp.int32)[None, None]
    missing = (nth < need[..., None]) & (table >= cache.pages)
    held = jnp.where(missing.any(-1), jnp.argmax(missing, -1).astype(jnp.int32), table.shape[2])
    return held * cache.page


# Storing


def _decide(
    cache: PagedCache,
    layer: Array,
    evict: Array | None,
    at: Array,
    valid: Array,
    local_window: Array | None,
    hold: Array | None,
) -> tuple[PagedCache, Array]:
    """Applies the decisions that a chunk emits: writes the pending one, returns ``expires`` [B, H, T] of its tokens."""
    cache, decisions = cache.decide(layer, evict, at, valid, local_window, hold)
    if hold is not None:
        # What the first query sees of the past, all of them do.
        table, _, ring = _read(cache, layer)
        place = _places(cache, table, ring)
        old = cache.expires.at[place.page, place.offset].get(mode="fill", fill_value=NEVER)
        before = (cache.seen - 1)[:, None]
        of_ring = before - (before - jnp.arange(ring.shape[2], dtype=jnp.int32)[None]) % ring.shape[2]
        positions = jnp.broadcast_to(of_ring[:, None], ring.shape)
        held = held_until(old, positions, cache.seen, hold, local_window)
        cache = dataclasses.replace(cache, expires=cache.expires.at[place.page, place.offset].set(held, mode="drop"))
    if decisions.pending is None or decisions.pending_expires is None:
        return cache, decisions.expires
    state = _read(cache, layer)
    slot = _of_position(state.ring, cache.seen - 1)
    place = _places(cache, state.table, jnp.where(decisions.pending, slot, -1)[..., None])
    expires = cache.expires.at[place.page[..., 0], place.offset[..., 0]].set(decisions.pending_expires, mode="drop")
    return dataclasses.replace(cache, expires=expires), decisions.expires


def _of_position(ring: Array, position: Array) -> Array:
    """Slots [B, H] of the tokens at ``position`` [B], which are among the R newest; ring [B, H, R]."""
    index = jnp.broadcast_to((position % ring.shape[2])[:, None, None], (*ring.shape[:2], 1))
    return jnp.take_along_axis(ring, index, 2)[..., 0]


def _store(
    cache: PagedCache,
    layer: Array,
    k: Array,
    v: Array,
    last: Array,
    statistic: Array | None,
    at: Array,
    valid: Array,
) -> PagedCache:
    """Stores a chunk: k, v [B, H, T, D] with expires ``last`` [B, H, T] at positions ``at`` [B, T]."""
    table, length, ring = _read(cache, layer)
    batch, kv_heads, size = ring.shape
    chunk = at.shape[1]
    count = jnp.sum(valid, 1, dtype=jnp.int32)
    newest = cache.seen + count - 1

    # Which of the ring's tokens are gone at the chunk's end, and which of the chunk's are still seen.
    before = (cache.seen - 1)[:, None]
    held = before - (before - jnp.arange(size, dtype=jnp.int32)[None]) % size
    there = (held >= 0)[:, None] & (ring >= 0) & (count > 0)[:, None, None]
    place = _places(cache, table, jnp.where(there, ring, -1))
    expiry = cache.expires.at[place.page, place.offset].get(mode="fill", fill_value=NEVER)
    dead = there & (expiry < newest[:, None, None])
    kept = valid[:, None] & (last >= newest[:, None, None])
    dead_rank = jnp.cumsum(dead, -1, dtype=jnp.int32) - 1
    kept_rank = jnp.cumsum(kept, -1, dtype=jnp.int32) - 1
    n_dead, n_kept = dead_rank[..., -1] + 1, kept_rank[..., -1] + 1

    # Holes by rank, then new slots at the end.
    b, h = (x[..., None] for x in jnp.indices((batch, kv_heads), dtype=jnp.int32, sparse=True))
    holes = jnp.full_like(ring, -1).at[b, h, jnp.where(dead, dead_rank, size)].set(ring, mode="drop")
    filled = jnp.take_along_axis(holes, jnp.clip(kept_rank, 0, size - 1), 2)
    slot = jnp.where(kept_rank < n_dead[..., None], filled, length[..., None] + kept_rank - n_dead[..., None])
    slot = jnp.where(kept, slot, -1)
    grown = length + jnp.maximum(n_kept - n_dead, 0)

    need = pages_of(cache, grown)
    cache, table = _take_pages(cache, table, pages_of(cache, length), need, chunk // cache.page + 1)
    room = _room(cache, table, need)
    stored = slot < room[..., None]
    cache = dataclasses.replace(cache, lost=cache.lost + jnp.sum(~stored, dtype=jnp.int32))
    slot = jnp.where(stored, slot, -1)
    grown = jnp.minimum(grown, room)
    cache = _put(cache, _places(cache, table, slot), k, v, last, statistic)

    recent = valid & (at > (newest - size)[:, None])
    index = jnp.where(recent, at % size, size)[:, None]
    ring = jnp.where(dead, -1, ring).at[b, h, index].set(slot, mode="drop")
    if not cache.local:
        return _write(cache, layer, _Layer(table, grown, ring))
    # More may leave than arrived: the holes that are left over are closed with the last entries.
    most = min(size, 2 * chunk)
    rank = n_kept[..., None] + jnp.arange(most, dtype=jnp.int32)[None, None]
    left = jnp.where(rank < n_dead[..., None], jnp.take_along_axis(holes, jnp.minimum(rank, size - 1), 2), -1)
    return _close(cache, layer, _Layer(table, grown, ring), left)


def _close(cache: PagedCache, layer: Array, state: _Layer, holes: Array) -> PagedCache:
    """Frees the slots ``holes`` [B, H, M] (-1: none; no slot twice) by moving the last entries into them."""
    table, length, ring = state
    most = holes.shape[2]
    count = jnp.sum(holes >= 0, -1, dtype=jnp.int32)
    end = length - count
    b, h = (x[..., None] for x in jnp.indices(length.shape, dtype=jnp.int32, sparse=True))
    nth = jnp.arange(most, dtype=jnp.int32)[None, None]

    def at_end(slots: Array) -> Array:
        """Index of slots from the new end on; out of range for others."""
        return jnp.where(slots >= end[..., None], slots - end[..., None], most)

    hole_at_end = jnp.zeros(holes.shape, bool).at[b, h, at_end(holes)].set(True, mode="drop")
    movers = (nth < count[..., None]) & ~hole_at_end
    inside = (holes >= 0) & (holes < end[..., None])
    rank = jnp.cumsum(inside, -1, dtype=jnp.int32) - 1
    by_rank = jnp.full_like(holes, -1).at[b, h, jnp.where(inside, rank, most)].set(holes, mode="drop")
    rank = jnp.clip(jnp.cumsum(movers, -1, dtype=jnp.int32) - 1, 0)
    target = jnp.where(movers, jnp.take_along_axis(by_rank, rank, 2), -1)
    source = jnp.where(movers, end[..., None] + nth, -1)
    cache = _move(cache, _places(cache, table, source), _places(cache, table, target))
    moved = jnp.take_along_axis(target, jnp.clip(at_end(ring), 0, most - 1), 2)
    ring = jnp.where(ring >= end[..., None], moved, ring)
    cache, table = _return_pages(cache, table, pages_of(cache, length), pages_of(cache, end))
    return _write(cache, layer, _Layer(table, end, ring))


def _store_one(
    cache: PagedCache, layer: Array, k: Array, v: Array, last: Array, statistic: Array | None, valid: Array
) -> PagedCache:
    """:func:`_store` for one token (T = 1), without anything as wide as the ring; valid [B]."""
    table, length, ring = _read(cache, layer)
    batch, kv_heads, size = ring.shape
    now = cache.seen
    slot = length
    if cache.window is not None:
        # With R = window + 1 the token that leaves is the one whose place in the ring the new token takes.
        old = jnp.where((valid & (now >= size))[:, None], _of_position(ring, now), -1)
        place = _places(cache, table, old[..., None])
        expiry = cache.expires.at[place.page[..., 0], place.offset[..., 0]].get(mode="fill", fill_value=NEVER)
        slot = jnp.where((old >= 0) & (expiry < now[:, None]), old, slot)
    slot = jnp.where(valid[:, None], slot, -1)

    appended = slot == length
    grown = length + appended.astype(jnp.int32)
    cache, table = _take_pages(cache, table, pages_of(cache, length), pages_of(cache, grown), 1)
    place = _places(cache, table, slot[..., None])
    stored = (slot >= 0) & (place.page[..., 0] < cache.pages)
    lost = jnp.sum((slot >= 0) & ~stored, dtype=jnp.int32)
    cache = _put(cache, place, k, v, last, statistic)
    b, h = jnp.indices((batch, kv_heads), dtype=jnp.int32, sparse=True)
    index = jnp.where(valid, now % size, size)[:, None]
    ring = ring.at[b, h, index].set(jnp.where(stored, slot, -1), mode="drop")
    cache = dataclasses.replace(cache, lost=cache.lost + lost)
    return _write(cache, layer, _Layer(table, jnp.where(stored, grown, length), ring))


# What only this cache can do


def drop(cache: PagedCache, layer: Array, mask: Array) -> PagedCache:
    """Removes the slots ``mask`` [B, H, width * page] of a layer; the last entries move into the holes."""
    layer = jnp.asarray(layer, jnp.int32)
    state = _read(cache, layer)
    slots = jnp.arange(cache.slots, dtype=jnp.int32)[None, None]
    gone = mask & (slots < state.length[..., None])
    held = jnp.take_along_axis(gone, jnp.clip(state.ring, 0), 2) & (state.ring >= 0)
    ring = jnp.where(held, -1, state.ring)
    return _close(cache, layer, state._replace(ring=ring), jnp.where(gone, slots, -1))


def _sweep(cache: PagedCache) -> PagedCache:
    """:meth:`PagedCache.sweep`, layer by layer."""

    def layer(cache: PagedCache, index: Array) -> tuple[PagedCache, None]:
        return drop(cache, index, _expiries(cache, index) < cache.seen[:, None, None]), None

    swept, _ = lax.scan(layer, cache, jnp.arange(cache.lengths.shape[0], dtype=jnp.int32))
    return swept


def entries(cache: PagedCache, layer: Array) -> tuple[Array, Array, Array, Array]:
    """What a layer holds, for policies and tests: k, v [B, H, S, D] dequantised, expires and used (bool) [B, H, S].

    S = width * page; what is not used is zero.
    """
    state = _read(cache, jnp.asarray(layer, jnp.int32))
    slots = jnp.arange(cache.slots, dtype=jnp.int32)[None, None]
    used = slots < state.length[..., None]
    place = _places(cache, state.table, jnp.where(used, slots, -1))
    page, offset = jnp.minimum(place.page, cache.pages - 1), place.offset
    k, v = _get(cache, _Place(page, offset))
    if cache.k_scale is not None:
        k = dequantise(k, cache.k_scale[page, offset])
    if cache.v_scale is not None:
        v = dequantise(v, cache.v_scale[page, offset])
    if not cache.v.shape[2]:
        v = k
    k, v = (jnp.where(used[..., None], x, 0) for x in (k, v))
    return k, v, jnp.where(used, cache.expires[page, offset], 0), used


def _expiries(cache: PagedCache, layer: Array) -> Array:
    """``expires`` [B, H, S] of a layer's slots, NEVER for those that are not in use."""
    return _of_slots(cache, layer, cache.expires, NEVER)


def _of_slots(cache: PagedCache, layer: Array, pool: Array, fill: int | float) -> Array:
    """Values [B, H, S] of a per-slot pool for a layer's slots, ``fill`` for those that are not in use."""
    state = _read(cache, layer)
    slots = jnp.arange(cache.slots, dtype=jnp.int32)[None, None]
    place = _places(cache, state.table, jnp.where(slots < state.length[..., None], slots, -1))
    return pool.at[place.page, place.offset].get(mode="fill", fill_value=fill)


def held(cache: PagedCache, layer: Array, q: Array, k: Array, valid: Array, scale: float) -> Held:
    """What a policy selects from in a layer: what it holds, and a chunk that is about to enter.

    Args:
        q: [B, Hq, T, D] after RoPE.
        k: [B, H, T, D] after RoPE.
        valid: [B, T], as in :meth:`Cache.attend`.
        scale: multiplies ``<q, k>``.
    """
    heads, every = cache.along(1), PartitionSpec()
    layer = jnp.asarray(layer, jnp.int32)
    found = by_shard(_held, cache, (layer, k, valid), (every, heads, every), heads)
    q_positions = jnp.where(valid, cache.positions(valid), -1)
    return Held(q=q, q_positions=q_positions, layer=layer, scale=scale, **found)


def _held(cache: PagedCache, layer: Array, k: Array, valid: Array) -> dict[str, Array]:
    """What :func:`held` knows of the heads of a shard."""
    if cache.statistic is None or cache.recent is None:
        raise ValueError("this cache was made for a policy that does not select")
    old, _, _, used = entries(cache, layer)
    at = cache.positions(valid)
    count = jnp.sum(valid, 1, dtype=jnp.int32)
    size = cache.ring.shape[3]
    newest = cache.seen + count - 1
    # Place p % R of the ring belongs to the newest position before the chunk that is p there.
    before = (cache.seen - 1)[:, None]
    of_ring = before - (before - jnp.arange(size, dtype=jnp.int32)[None]) % size
    ring = _read(cache, layer).ring
    still = (of_ring > (newest - cache.recent)[:, None])[:, None] & (of_ring >= 0)[:, None] & (ring >= 0)
    b, h = (x[..., None] for x in jnp.indices(ring.shape[:2], dtype=jnp.int32, sparse=True))
    recent = jnp.zeros(used.shape, bool).at[b, h, jnp.where(still, ring, cache.slots)].set(True, mode="drop")
    shape = k.shape[:3]
    new = jnp.broadcast_to((valid & (at > (newest - cache.recent)[:, None]))[:, None], shape)
    positions = jnp.broadcast_to(jnp.where(valid, at, NEVER)[:, None], shape)
    noted = _of_slots(cache, layer, cache.statistic, 0.0)
    return dict(
        k=jnp.concatenate([old.astype(k.dtype), k], 2),
        k_positions=jnp.concatenate([jnp.where(used, jnp.int32(0), jnp.int32(NEVER)), positions], 2),
        recent=jnp.concatenate([recent, new], 2),
        statistic=jnp.concatenate([noted, jnp.zeros(shape, noted.dtype)], 2),
    )


def settle(cache: PagedCache, layer: Array, there: Array, selection: Selection) -> PagedCache:
    """Applies a selection to the slots that a layer had in use before a chunk was stored.

    Args:
        there: [B, H, S] bool, the slots in question; what the chunk brought is left alone.
        selection: among the columns of :func:`held`, of which the first S count.
    """
    heads = cache.along(1)
    args = jnp.asarray(layer, jnp.int32), there, selection
    settled: PagedCache = by_shard(_settle, cache, args, (PartitionSpec(), heads, heads), cache.specs())
    return settled


def _settle(cache: PagedCache, layer: Array, there: Array, selection: Selection) -> PagedCache:
    """:func:`settle` of a shard."""
    if cache.statistic is None:
        raise ValueError("this cache was made for a policy that does not select")
    keep, statistic = (x[:, :, : cache.slots] for x in selection)
    slots = jnp.arange(cache.slots, dtype=jnp.int32)[None, None]
    place = _places(cache, _read(cache, layer).table, jnp.where(there, slots, -1))
    gone = there & ~keep
    flagged = cache.flagged.at[layer].add(jnp.sum(gone, -1, dtype=jnp.int32))
    cache = dataclasses.replace(cache, statistic=_noted(cache.statistic, place, statistic), flagged=flagged)
    return drop(cache, layer, gone)


def pages_needed(cache: PagedCache, tokens: Array | int) -> Array:
    """Pages that shards take at most after ``tokens`` ([B] or one number) more tokens, [shards] int32."""
    pages = pages_of(cache, cache.lengths + _more(cache, tokens))
    return jnp.sum(pages.reshape(*pages.shape[:2], cache.shards, -1), (0, 1, 3), dtype=jnp.int32)


def _more(cache: PagedCache, tokens: Array | int) -> Array:
    """[B] or one number as [1, B, 1]."""
    return jnp.broadcast_to(jnp.asarray(tokens, jnp.int32), cache.seen.shape)[None, :, None]

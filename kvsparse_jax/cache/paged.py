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

Running out of pages or of table width never overwrites anything: the token is not stored and ``lost`` counts it.
Callers ask :func:`fits` first and grow the pool or trim it (:mod:`kvsparse_jax.cache.capacity`).
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from kernels.ragged_decode.api import ragged_attention
from kernels.ragged_decode.partial import Partial, merge, normalise
from kernels.visibility import NEVER
from kernels.visibility import expires as last_query
from kvsparse_jax.cache import blockwise
from kvsparse_jax.cache.quantise import Quantisation, dequantise, quantise, storage_dtype


@dataclasses.dataclass(frozen=True)
class PagedCache:
    """State of the cache. L layers, B sequences (rows), H KV heads, D channels, P pages of ``page`` slots.

    Attributes:
        k: [P, D, page], keys, channels first.
        v: [P, page, D].
        k_scale, v_scale: [P, page] float32, for 8-bit pools; else None.
        expires: [P, page] int32.
        free: [P] int32; ``free[:free_count]`` are the pages that nobody holds, taken from the end.
        free_count: int32 scalar.
        tables: [L, B, H, width] int32; page of each run of slots, P where there is none.
        lengths: [L, B, H] int32.
        ring: [L, B, H, R] int32.
        seen: [B] int32, tokens seen = position of the next token.
        flagged: [L, B, H] int32, decisions to evict so far.
        lost: int32 scalar, entries that found no room (0, or the results are not to be trusted).
        trimmed: [L, B, H] int32, entries given up to make room (capacity outcome "evict").
        window: delay of the eviction in tokens; None: the policy never flags a token.
        shift: token k + shift decides about token k; 0 or 1.
        local: some layer has a sliding window of its own.
    """

    k: Array
    v: Array
    k_scale: Array | None
    v_scale: Array | None
    expires: Array
    free: Array
    free_count: Array
    tables: Array
    lengths: Array
    ring: Array
    seen: Array
    flagged: Array
    lost: Array
    trimmed: Array
    window: int | None
    shift: int
    local: bool

    @property
    def pages(self) -> int:
        """Pages in the pool (P)."""
        return self.expires.shape[0]

    @property
    def page(self) -> int:
        """Slots per page."""
        return self.expires.shape[1]

    @property
    def slots(self) -> int:
        """Slots that a head's table can name."""
        return self.tables.shape[3] * self.page


_STATIC = ("window", "shift", "local")
jax.tree_util.register_dataclass(
    PagedCache,
    data_fields=[f.name for f in dataclasses.fields(PagedCache) if f.name not in _STATIC],
    meta_fields=list(_STATIC),
)


def init(
    *,
    layers: int,
    batch: int,
    kv_heads: int,
    head_dim: int,
    dtype: DTypeLike,
    pages: int,
    width: int,
    page: int = 64,
    window: int | None = None,
    shift: int = 0,
    local_windows: tuple[int | None, ...] = (),
    max_positions: int | None = None,
    quantisation: Quantisation | None = None,
) -> PagedCache:
    """An empty cache.

    Args:
        layers, batch, kv_heads, head_dim: L, B, H, D.
        dtype: of keys and values, when they are not quantised.
        pages: capacity of the pool, shared by all layers, sequences and heads.
        width: entries of a page table: a head holds at most ``width * page`` tokens.
        page: slots per page.
        window: delay of the eviction in tokens (at least 0); None when nothing is ever flagged.
        shift: 0 or 1.
        local_windows: per layer, the model's own sliding window or None.
        max_positions: no sequence gets longer than this, which bounds the ring where a window is longer still.
        quantisation: "int8", "float8_e4m3" or None.

    Raises:
        ValueError: a number that makes no sense.
    """
    if min(layers, batch, kv_heads, head_dim, pages, width, page) < 1:
        raise ValueError("layers, batch, kv_heads, head_dim, pages, width and page must be at least 1")
    if window is not None and window < 0:
        raise ValueError(f"window must be at least 0 tokens or None, not {window}")
    if shift not in (0, 1):
        raise ValueError(f"shift must be 0 or 1, not {shift}")
    reach = max([1, *(w for w in local_windows if w is not None), 1 if window is None else window + 1])
    if max_positions is not None:
        reach = min(reach, max(max_positions, 1))
    stored = dtype if quantisation is None else storage_dtype(quantisation)
    heads = (layers, batch, kv_heads)
    scales = [None if quantisation is None else jnp.ones((pages, page), jnp.float32) for _ in range(2)]
    return PagedCache(
        k=jnp.zeros((pages, head_dim, page), stored),
        v=jnp.zeros((pages, page, head_dim), stored),
        k_scale=scales[0],
        v_scale=scales[1],
        expires=jnp.full((pages, page), NEVER, jnp.int32),
        free=jnp.arange(pages - 1, -1, -1, dtype=jnp.int32),
        free_count=jnp.asarray(pages, jnp.int32),
        tables=jnp.full((*heads, width), pages, jnp.int32),
        lengths=jnp.zeros(heads, jnp.int32),
        ring=jnp.full((*heads, reach), -1, jnp.int32),
        seen=jnp.zeros((batch,), jnp.int32),
        flagged=jnp.zeros(heads, jnp.int32),
        lost=jnp.zeros((), jnp.int32),
        trimmed=jnp.zeros(heads, jnp.int32),
        window=window,
        shift=shift,
        local=any(w is not None for w in local_windows),
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


def _count(stack: Array, layer: Array, more: Array) -> Array:
    """Adds [B, H] to one layer of an [L, B, H] counter."""
    return lax.dynamic_update_index_in_dim(stack, lax.dynamic_index_in_dim(stack, layer, 0, False) + more, layer, 0)


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


def _put(cache: PagedCache, place: _Place, k: Array, v: Array, expires: Array) -> PagedCache:
    """Stores k, v [B, H, N, D] and expires [B, H, N] at places [B, H, N]; no place, nothing stored."""
    page, offset = place.page.reshape(-1), place.offset.reshape(-1)
    k, v = k.reshape(-1, k.shape[-1]), v.reshape(-1, v.shape[-1])
    k_scale, v_scale = cache.k_scale, cache.v_scale
    if k_scale is not None and v_scale is not None:
        k, of_k = quantise(k, cache.k.dtype)
        v, of_v = quantise(v, cache.v.dtype)
        k_scale = k_scale.at[page, offset].set(of_k, mode="drop")
        v_scale = v_scale.at[page, offset].set(of_v, mode="drop")
    return dataclasses.replace(
        cache,
        k=cache.k.at[page, :, offset].set(k.astype(cache.k.dtype), mode="drop"),
        v=cache.v.at[page, offset].set(v.astype(cache.v.dtype), mode="drop"),
        k_scale=k_scale,
        v_scale=v_scale,
        expires=cache.expires.at[page, offset].set(expires.reshape(-1), mode="drop"),
    )


def _move(cache: PagedCache, source: _Place, target: _Place) -> PagedCache:
    """Copies entries as they are stored; no target, nothing moved."""

    def moved(pool: Array) -> Array:
        return pool.at[target.page, target.offset].set(pool[source.page, source.offset], mode="drop")

    return dataclasses.replace(
        cache,
        k=cache.k.at[target.page, :, target.offset].set(cache.k[source.page, :, source.offset], mode="drop"),
        v=moved(cache.v),
        k_scale=None if cache.k_scale is None else moved(cache.k_scale),
        v_scale=None if cache.v_scale is None else moved(cache.v_scale),
        expires=moved(cache.expires),
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


def positions(cache: PagedCache, valid: Array) -> Array:
    """Positions [B, T] of the columns of a chunk, from ``valid`` [B, T]; those of padding mean nothing."""
    return cache.seen[:, None] + jnp.maximum(jnp.cumsum(valid, 1, dtype=jnp.int32) - 1, 0)


def _decide(
    cache: PagedCache, layer: Array, evict: Array | None, at: Array, valid: Array, local_window: Array | None
) -> tuple[PagedCache, Array]:
    """Applies the decisions that a chunk emits: writes the pending one, returns ``expires`` [B, H, T] of its tokens."""
    batch, kv_heads = cache.tables.shape[1:3]
    shape = (batch, kv_heads, at.shape[1])
    if cache.window is None or evict is None:
        if evict is not None:
            raise ValueError("this cache was made for a policy that never evicts (window=None)")
        keep = jnp.zeros(at.shape, bool)
        return cache, jnp.broadcast_to(last_query(at, keep, 0, local_window)[:, None], shape)
    by_key = blockwise.decided(evict, cache.shift, valid)
    own = last_query(jnp.broadcast_to(at[:, None], shape), by_key, cache.window, local_window)
    flagged = jnp.sum(by_key, -1, dtype=jnp.int32)
    if cache.shift == 1:
        first = jnp.argmax(valid, 1).astype(jnp.int32)
        pending = jnp.take_along_axis(evict, first[:, None, None], 2)[..., 0]
        newest = cache.seen - 1
        pending = pending & (valid.any(1) & (newest >= 0))[:, None]
        state = _read(cache, layer)
        slot = _of_position(state.ring, newest)
        place = _places(cache, state.table, jnp.where(pending, slot, -1)[..., None])
        last = last_query(newest, jnp.ones_like(newest, bool), cache.window, local_window)
        last = jnp.broadcast_to(last[:, None], slot.shape)
        cache = dataclasses.replace(
            cache, expires=cache.expires.at[place.page[..., 0], place.offset[..., 0]].set(last, mode="drop")
        )
        flagged = flagged + pending.astype(jnp.int32)
    return dataclasses.replace(cache, flagged=_count(cache.flagged, layer, flagged)), own


def _of_position(ring: Array, position: Array) -> Array:
    """Slots [B, H] of the tokens at ``position`` [B], which are among the R newest; ring [B, H, R]."""
    index = jnp.broadcast_to((position % ring.shape[2])[:, None, None], (*ring.shape[:2], 1))
    return jnp.take_along_axis(ring, index, 2)[..., 0]


def _store(cache: PagedCache, layer: Array, k: Array, v: Array, last: Array, at: Array, valid: Array) -> PagedCache:
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
    cache = _put(cache, _places(cache, table, slot), k, v, last)

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
    cache: PagedCache, layer: Array, k: Array, v: Array, last: Array, valid: Array, victim: Array | None
) -> PagedCache:
    """:func:`_store` for one token, without anything as wide as the ring: k, v [B, H, D], last [B, H], valid [B]."""
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
    if victim is not None:
        slot = jnp.where(victim >= 0, victim, slot)
    slot = jnp.where(valid[:, None], slot, -1)

    appended = slot == length
    grown = length + appended.astype(jnp.int32)
    cache, table = _take_pages(cache, table, pages_of(cache, length), pages_of(cache, grown), 1)
    place = _places(cache, table, slot[..., None])
    stored = (slot >= 0) & (place.page[..., 0] < cache.pages)
    lost = jnp.sum((slot >= 0) & ~stored, dtype=jnp.int32)
    cache = _put(cache, place, k[:, :, None], v[:, :, None], last[..., None])
    b, h = jnp.indices((batch, kv_heads), dtype=jnp.int32, sparse=True)
    index = jnp.where(valid, now % size, size)[:, None]
    ring = ring.at[b, h, index].set(jnp.where(stored, slot, -1), mode="drop")
    cache = dataclasses.replace(cache, lost=cache.lost + lost)
    return _write(cache, layer, _Layer(table, jnp.where(stored, grown, length), ring))


# The interface


def attend(
    cache: PagedCache,
    layer: Array,
    q: Array,
    k: Array,
    v: Array,
    evict: Array | None,
    valid: Array,
    *,
    scale: float,
    local_window: Array | None = None,
    victim: Array | None = None,
    implementation: str | None = None,
) -> tuple[Array, PagedCache]:
    """Attention of new tokens over what is live in the cache and over each other, exact; then stores them.

    T = 1 is a decode step, T > 1 a chunk of a prompt. Call it once per layer and then :func:`advance`.

    Args:
        cache: the state.
        layer: int32 scalar.
        q: [B, Hq, T, D] after RoPE at :func:`positions`.
        k, v: [B, H, T, D], k after RoPE.
        evict: [B, H, T] bool as emitted by each token (with shift 1 about the token before it, also across calls);
            None keeps everything.
        valid: [B, T] bool, False for padding; the valid columns of a row lie next to each other. A row may have none.
        scale: multiplies ``<q, k>``.
        local_window: int32 scalar, the layer's own sliding window (NEVER: full attention), or None.
        victim: [B, H] int32, slot that the new token overwrites (-1: append), for policies that choose by other rules
            than the window; only for T = 1 and caches with ``window=None`` and no sliding windows.
        implementation: of the attention over the cache, see :func:`ragged_attention`.

    Returns:
        Output [B, Hq, T, D] in the dtype of q (zeros at padding), and the cache.
    """
    chunk = q.shape[2]
    layer = jnp.asarray(layer, jnp.int32)
    if (local_window is not None) and not cache.local:
        raise ValueError("this cache was made for a model without sliding windows")
    if victim is not None and (chunk != 1 or cache.window is not None or cache.local):
        raise ValueError("victim needs one-token steps of a cache without window and sliding windows")
    at = positions(cache, valid)
    cache, last = _decide(cache, layer, evict, at, valid, local_window)

    def past(cache: PagedCache, at: Array | None) -> Partial:
        table, length, _ = _read(cache, layer)
        return ragged_attention(
            q,
            cache.k,
            cache.v,
            table,
            jnp.where(valid.any(1)[:, None], length, 0),
            scale=scale,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            expires=None if at is None else cache.expires,
            q_positions=at,
            implementation=implementation,
        )

    if chunk == 1:
        # Stored first: what the step frees is then gone, and what is left is all visible.
        if cache.local:
            cache = _store(cache, layer, k, v, last, at, valid)
        else:
            cache = _store_one(cache, layer, k[:, :, 0], v[:, :, 0], last[..., 0], valid[:, 0], victim)
        part = past(cache, None)
    else:
        part = past(cache, at)
        part = merge(part, blockwise.chunk_attention(q, k, v, at, valid, last, scale=scale))
        cache = _store(cache, layer, k, v, last, at, valid)
    out = jnp.where(valid[:, None, :, None], normalise(part), 0)
    return out.astype(q.dtype), cache


def advance(cache: PagedCache, valid: Array) -> PagedCache:
    """Counts the tokens of a forward pass as seen, after its last layer; valid [B, T]."""
    return dataclasses.replace(cache, seen=cache.seen + jnp.sum(valid, 1, dtype=jnp.int32))


def drop(cache: PagedCache, layer: Array, mask: Array) -> PagedCache:
    """Removes the slots ``mask`` [B, H, width * page] of a layer; the last entries move into the holes."""
    layer = jnp.asarray(layer, jnp.int32)
    state = _read(cache, layer)
    slots = jnp.arange(cache.slots, dtype=jnp.int32)[None, None]
    gone = mask & (slots < state.length[..., None])
    held = jnp.take_along_axis(gone, jnp.clip(state.ring, 0), 2) & (state.ring >= 0)
    ring = jnp.where(held, -1, state.ring)
    return _close(cache, layer, state._replace(ring=ring), jnp.where(gone, slots, -1))


def entries(cache: PagedCache, layer: Array) -> tuple[Array, Array, Array, Array]:
    """What a layer holds, for policies and tests: k, v [B, H, S, D] dequantised, expires and used (bool) [B, H, S].

    S = width * page; what is not used is zero.
    """
    state = _read(cache, jnp.asarray(layer, jnp.int32))
    slots = jnp.arange(cache.slots, dtype=jnp.int32)[None, None]
    used = slots < state.length[..., None]
    place = _places(cache, state.table, jnp.where(used, slots, -1))
    page, offset = jnp.minimum(place.page, cache.pages - 1), place.offset
    k, v = cache.k[page, :, offset], cache.v[page, offset]
    if cache.k_scale is not None and cache.v_scale is not None:
        k, v = dequantise(k, cache.k_scale[page, offset]), dequantise(v, cache.v_scale[page, offset])
    k, v = (jnp.where(used[..., None], x, 0) for x in (k, v))
    return k, v, jnp.where(used, cache.expires[page, offset], 0), used


def release(cache: PagedCache, rows: Array) -> PagedCache:
    """Empties the sequences ``rows`` [B] bool. With every row released the cache is as new, contents of pages aside."""
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


def repack(cache: PagedCache, rows: Array, *, pages: int, width: int) -> PagedCache:
    """A new cache with copies of the sequences ``rows`` [B'] int32, in a pool of another capacity.

    Grows and shrinks the pool, forks a sequence into several (its pages are copied, nothing is shared), reorders and
    drops rows. Pages come to lie in the order of the tables. Entries that do not fit are lost, and counted: ask
    :func:`pages_taken` first.
    """
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


def live(cache: PagedCache) -> Array:
    """Keys visible to the newest query, [L, B, H] int32."""
    return cache.lengths


def pages_taken(cache: PagedCache) -> Array:
    """Pages that each head holds, [L, B, H] int32."""
    return pages_of(cache, cache.lengths)


def pages_needed(cache: PagedCache, tokens: Array | int) -> Array:
    """Pages that the cache takes at most after ``tokens`` ([B] or one number) more tokens, int32 scalar."""
    more = jnp.broadcast_to(jnp.asarray(tokens, jnp.int32), cache.seen.shape)[None, :, None]
    return jnp.sum(pages_of(cache, cache.lengths + more), dtype=jnp.int32)


def fits(cache: PagedCache, tokens: Array | int) -> Array:
    """Whether ``tokens`` ([B] or one number) more tokens are sure to find room, whatever is decided; bool scalar."""
    more = jnp.broadcast_to(jnp.asarray(tokens, jnp.int32), cache.seen.shape)[None, :, None]
    return (pages_needed(cache, tokens) <= cache.pages) & (jnp.max(cache.lengths + more) <= cache.slots)

"""Ragged attention in plain XLA: a loop over a work list of the pages that are really there.

The number of iterations is dynamic, so time follows the live entries, summed over the heads, and one compilation serves
every length. Two loops: many pages at a time for few queries (decode), one head at a time for many (prefill chunks).

Pages are widened to float32 as they are gathered. On XLA:CPU the conversion makes the gather vectorise (2x) and the
products no slower, since decoding is bound by memory; it also makes 8-bit pages cost nothing extra.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from kernels.numerics import accumulator
from kernels.partial import EMPTY, Partial, empty

ROWS_AT_ONCE = 32
"""Query rows per KV head (group x queries) up to which pages of several heads share an iteration."""

KEYS_PER_ITEM = 128
"""Keys of one head per item of the decode loop's work list, in whole pages. Whether one page of 64 or two made no
difference in a whole step; pages below 64 are slower whatever the numbers."""

ENTRIES_AT_ONCE = 4096
"""Entries per iteration of the decode loop: 0.90 to 0.94 of the time of 8192 (2048: 0.94 to 0.99, 16384: 1.08), since
the widened keys and values of an iteration then fit the caches of two cores."""

KEYS_AT_ONCE = 512
"""Keys of one head per iteration of the prefill loop."""


class _Pool(NamedTuple):
    k: Array
    v: Array
    k_scale: Array | None
    v_scale: Array | None
    expires: Array | None
    dim: int
    token_major: bool

    @property
    def page(self) -> int:
        """Slots per page."""
        return self.k.shape[1] * self.k.shape[2] // self.dim


def _widen(x: Array, dtype: DTypeLike) -> Array:
    """Converts a gathered block; uint8 holds float8_e4m3fn, decoded 7 times faster than by XLA:CPU's conversion."""
    if x.dtype != jnp.uint8:
        return x.astype(dtype)
    bits = x.astype(jnp.int32)
    # Exponent and mantissa move to their places in a float32, and the exponent bias from 7 to 127; below the smallest
    # normal number the code is a multiple of 2**-9.
    rest = bits & 0x7F
    normal = lax.bitcast_convert_type((rest << 20) + (120 << 23), jnp.float32)
    size = jnp.where(rest < 8, rest.astype(jnp.float32) * jnp.float32(2.0**-9), normal)
    return jnp.where(bits < 128, size, -size).astype(dtype)


def _take(pool: Array, pages: Array) -> Array:
    return pool.at[pages].get(mode="promise_in_bounds")


def _keys(pool: _Pool, pages: Array, dtype: DTypeLike) -> Array:
    """Keys [N, D, page] of pages [N]."""
    keys = _widen(_take(pool.k, pages), dtype)
    return keys.reshape(-1, pool.page, pool.dim).swapaxes(1, 2) if pool.token_major else keys


def attention(
    q: Array,
    k: Array,
    v: Array,
    k_scale: Array | None,
    v_scale: Array | None,
    tables: Array,
    lengths: Array,
    expires: Array | None,
    q_positions: Array | None,
    *,
    scale: float,
    soft_cap: float | None = None,
    token_major: bool = False,
) -> Partial:
    """See :func:`kernels.ragged_decode.api.ragged_attention`."""
    batch, heads, queries, dim = q.shape
    kv_heads, width = tables.shape[1:]
    rows = heads // kv_heads * queries
    pool = _Pool(k, v, k_scale, v_scale, expires, dim, token_major)
    flat = batch * kv_heads
    q = q.reshape(flat, rows, dim)
    tables = jnp.clip(tables.reshape(flat, width), 0, k.shape[0] - 1)  # the entries past a head's end hold anything
    lengths = lengths.reshape(flat)
    if q_positions is not None:
        # Row r of a head is query r % T of the group's head r // T.
        q_positions = jnp.tile(jnp.repeat(q_positions, kv_heads, 0), (1, heads // kv_heads))
    loop = _many_heads if rows <= ROWS_AT_ONCE else _one_head
    part = loop(q, pool, tables, lengths, q_positions, scale, soft_cap)
    shape = (batch, heads, queries)
    return Partial(part.total.reshape(*shape, dim), part.top.reshape(shape), part.weight.reshape(shape))


def _owner(ends: Array, items: Array, item: Array) -> tuple[Array, Array]:
    """Head that each work item belongs to (the number of heads past the list's end), and which of its items it is."""
    head = jnp.sum(ends[None, :] <= item[:, None], 1, dtype=jnp.int32)
    start = (ends - items)[jnp.minimum(head, ends.shape[0] - 1)]
    return head, item - start


def _many_heads(
    q: Array,
    pool: _Pool,
    tables: Array,
    lengths: Array,
    q_positions: Array | None,
    scale: float,
    soft_cap: float | None,
) -> Partial:
    """q [N, R, D], tables [N, width], lengths [N], q_positions [N, R] or None -> parts of shape [N, R]."""
    acc = accumulator(q.dtype)
    heads, rows, dim = q.shape
    page = pool.page
    run = min(max(1, KEYS_PER_ITEM // page), tables.shape[1])
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % run)))
    at_once = min(max(1, ENTRIES_AT_ONCE // (run * page)), heads * (tables.shape[1] // run))
    # An empty head counts as one item, all masked: then the items of an iteration belong to `span` heads in a row.
    span = min(at_once, heads)
    items = jnp.maximum((lengths + (run * page - 1)) // (run * page), 1)
    ends = jnp.cumsum(items, dtype=jnp.int32)
    wide_q = q.astype(acc) * jnp.asarray(scale, acc)
    pages_of = jnp.arange(run, dtype=jnp.int32)[None]

    def body(i: Array, sofar: Partial) -> Partial:
        head, nth = _owner(ends, items, i * at_once + jnp.arange(at_once, dtype=jnp.int32))
        first = jnp.minimum(head[0], heads - span)
        mine = head[None, :] == first + jnp.arange(span, dtype=jnp.int32)[:, None]  # [span, items]; none past the end
        safe = jnp.minimum(head, heads - 1)
        nth = jnp.where(head < heads, nth, 0) * run
        at = tables[safe[:, None], nth[:, None] + pages_of].reshape(-1)  # [items x run]
        room = jnp.where(head < heads, lengths[safe] - nth * page, 0)
        used = jnp.arange(run * page, dtype=jnp.int32)[None] < room[:, None]
        # A slot that nobody wrote may hold NaN, and 0 * NaN is NaN: values are cleared, scores are masked.
        keys = _keys(pool, at, acc)
        values = _widen(_take(pool.v, at), acc) if pool.v.shape[2] else keys.swapaxes(1, 2)
        values = values.reshape(at_once, run * page, dim)
        values = jnp.where(used[:, :, None], values, 0)
        s = jnp.einsum("nrd,ndp->nrp", wide_q[jnp.repeat(safe, run)], keys)
        s = jnp.swapaxes(s.reshape(at_once, run, rows, page), 1, 2).reshape(at_once, rows, run * page)
        if pool.k_scale is not None:
            s = s * _take(pool.k_scale, at).astype(acc).reshape(at_once, 1, -1)
        if soft_cap is not None:
            s = soft_cap * jnp.tanh(s / soft_cap)
        seen = used[:, None]
        if pool.expires is not None and q_positions is not None:
            seen = seen & (q_positions[safe][:, :, None] <= _take(pool.expires, at).reshape(at_once, 1, -1))
        s = jnp.where(seen, s, EMPTY)
        top = s.max(-1)
        p = jnp.where(seen, jnp.exp(s - top[..., None]), 0)
        weight = p.sum(-1)
        if pool.v_scale is not None:
            p = p * jnp.where(used, _take(pool.v_scale, at).astype(acc).reshape(at_once, -1), 0)[:, None]
        total = jnp.einsum("nrp,npd->nrd", p, values)

        # The items of a head are merged at once, by a product with the 0/1 matrix of who owns what.
        old_part = Partial(*(lax.dynamic_slice_in_dim(x, first, span) for x in sofar))
        new_top = jnp.maximum(old_part.top, jnp.max(jnp.where(mine[..., None], top[None], EMPTY), 1))
        old = jnp.exp(old_part.top - new_top)
        new = jnp.where((head < heads)[:, None], jnp.exp(top - new_top[safe - first]), 0)
        share = mine.astype(acc)
        gathered = jnp.einsum("hn,nrd->hrd", share, total * new[..., None])
        merged = (old_part.total * old[..., None] + gathered, new_top, old_part.weight * old + share @ (weight * new))
        return Partial(*(lax.dynamic_update_slice_in_dim(x, y, first, 0) for x, y in zip(sofar, merged, strict=True)))

    blocks = (ends[-1] + (at_once - 1)) // at_once
    return lax.fori_loop(jnp.int32(0), blocks, body, empty((heads, rows), dim, acc))


def _one_head(
    q: Array,
    pool: _Pool,
    tables: Array,
    lengths: Array,
    q_positions: Array | None,
    scale: float,
    soft_cap: float | None,
) -> Partial:
    """Same contract as :func:`_many_heads`, for many rows: products large enough to fill the machine by themselves."""
    acc = accumulator(q.dtype)
    heads, rows, dim = q.shape
    page = pool.page
    run = min(max(1, KEYS_AT_ONCE // page), tables.shape[1])
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % run)))
    items = (lengths + (run * page - 1)) // (run * page)
    ends = jnp.cumsum(items, dtype=jnp.int32)

    def body(i: Array, sofar: Partial) -> Partial:
        owner, nth = _owner(ends, items, i[None])
        head, first = owner[0], nth[0] * run
        at = lax.dynamic_slice(tables, (head, first), (1, run))[0]
        used = first * page + jnp.arange(run * page, dtype=jnp.int32) < lengths[head]
        keys = jnp.swapaxes(_keys(pool, at, q.dtype), 0, 1).reshape(dim, run * page)
        values = _widen(_take(pool.v, at), q.dtype).reshape(run * page, dim) if pool.v.shape[2] else keys.T
        values = jnp.where(used[:, None], values, 0)
        s = jnp.einsum("rd,dp->rp", q[head], keys, preferred_element_type=acc) * jnp.asarray(scale, acc)
        if pool.k_scale is not None:
            s = s * _take(pool.k_scale, at).astype(acc).reshape(1, -1)
        if soft_cap is not None:
            s = soft_cap * jnp.tanh(s / soft_cap)
        seen = used[None]
        if pool.expires is not None and q_positions is not None:
            seen = seen & (q_positions[head][:, None] <= _take(pool.expires, at).reshape(1, -1))
        s = jnp.where(seen, s, EMPTY)
        old_top = sofar.top[head]
        top = jnp.maximum(old_top, s.max(-1))
        p = jnp.where(seen, jnp.exp(s - top[:, None]), 0)
        decay = jnp.exp(old_top - top)
        weight = sofar.weight[head] * decay + p.sum(-1)
        if pool.v_scale is not None:
            p = p * jnp.where(used, _take(pool.v_scale, at).astype(acc).reshape(-1), 0)[None]
        part = jnp.einsum("rp,pd->rd", p.astype(values.dtype), values, preferred_element_type=acc)
        total = sofar.total[head] * decay[:, None] + part
        return Partial(*(x.at[head].set(y) for x, y in zip(sofar, (total, top, weight), strict=True)))

    return lax.fori_loop(jnp.int32(0), ends[-1], body, empty((heads, rows), dim, acc))

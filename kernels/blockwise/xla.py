"""Attention over keys that lie one after another, block by block with an online softmax, in plain XLA."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels.numerics import accumulator
from kernels.partial import EMPTY, Partial, empty
from kernels.visibility import NEVER, visible

BLOCK_Q = 256
"""Queries per block."""

BLOCK_K = 256
"""Keys per block: the best of 64 to 2048 for dense decoding with 48 heads of 64 channels on two cores."""

WIDE_ROWS = 32
"""Up to this many query rows per KV head the products are memory-bound, and run faster with keys widened to float32."""


class Keys(NamedTuple):
    """A block of keys.

    Attributes:
        k: [B, H, D, C].
        v: [B, H, C, D].
        positions: [B, C] int32; NEVER where there is no key (then k and v may hold NaN).
        expires: [B, H or 1, C] int32.
    """

    k: Array
    v: Array
    positions: Array
    expires: Array


def attention(
    q: Array, q_positions: Array, fetch: Callable[[Array], Keys], blocks: Callable[[Array], Array], *, scale: float
) -> Partial:
    """Attention by the visibility rule over blocks of keys, with an online softmax; no array grows with T x keys.

    Args:
        q: [B, Hq, T, D].
        q_positions: [B, T] int32; -1 for a column that sees nothing.
        fetch: index of a block (int32) -> its keys.
        blocks: last query column of a query block (int32) -> number of key blocks that may be visible to it (int32).
        scale: multiplies ``<q, k>``.

    Returns:
        Partial of shapes [B, Hq, T, D], [B, Hq, T], [B, Hq, T].
    """
    batch, heads, length, dim = q.shape
    acc = accumulator(q.dtype)
    kv_heads = jax.eval_shape(fetch, jax.ShapeDtypeStruct((), jnp.int32)).k.shape[1]
    groups = heads // kv_heads
    block = min(BLOCK_Q, length)
    pad = -length % block
    q = jnp.pad(q.reshape(batch, kv_heads, groups, length, dim), ((0, 0), (0, 0), (0, 0), (0, pad), (0, 0)))
    q_positions = jnp.pad(q_positions, ((0, 0), (0, pad)), constant_values=-1)
    wide = groups * block <= WIDE_ROWS

    def query_block(i: Array) -> Partial:
        qi = lax.dynamic_slice_in_dim(q, i * block, block, 3).reshape(batch, kv_heads, groups * block, dim)
        if wide:
            qi = qi.astype(acc)
        at = lax.dynamic_slice_in_dim(q_positions, i * block, block, 1)

        def body(j: Array, sofar: Partial) -> Partial:
            keys = fetch(j)
            k = keys.k.astype(qi.dtype)
            v = jnp.where((keys.positions != NEVER)[:, None, :, None], keys.v, 0).astype(qi.dtype)
            s = jnp.einsum("bhrd,bhdc->bhrc", qi, k, preferred_element_type=acc) * jnp.asarray(scale, acc)
            seen = visible(at[:, None, :, None], keys.positions[:, None, None], keys.expires[:, :, None])
            seen = jnp.tile(seen, (1, 1, groups, 1))
            s = jnp.where(seen, s, EMPTY)
            top = jnp.maximum(sofar.top, s.max(-1))
            p = jnp.where(seen, jnp.exp(s - top[..., None]), 0)
            decay = jnp.exp(sofar.top - top)
            total = jnp.einsum("bhrc,bhcd->bhrd", p.astype(v.dtype), v, preferred_element_type=acc)
            return Partial(sofar.total * decay[..., None] + total, top, sofar.weight * decay + p.sum(-1))

        start = empty((batch, kv_heads, groups * block), dim, acc)
        return lax.fori_loop(jnp.int32(0), blocks((i + 1) * block - 1), body, start)

    count = (length + pad) // block
    if count == 1:
        parts = jax.tree.map(lambda x: x[None], query_block(jnp.int32(0)))
    else:
        parts = lax.map(query_block, jnp.arange(count, dtype=jnp.int32))

    def whole(x: Array) -> Array:
        """[count, B, H, G * block, ...] -> [B, Hq, T, ...]."""
        x = x.reshape(count, batch, kv_heads, groups, block, *x.shape[4:])
        x = jnp.moveaxis(x, 0, 3).reshape(batch, heads, count * block, *x.shape[5:])
        return x[:, :, :length]

    return Partial(*map(whole, parts))


def chunk_attention(
    q: Array, k: Array, v: Array, positions: Array, valid: Array, expires: Array, *, scale: float
) -> Partial:
    """Attention of a chunk's tokens to each other.

    Args:
        q: [B, Hq, T, D].
        k, v: [B, H, T, D].
        positions: [B, T] int32, increasing over the valid columns of a row.
        valid: [B, T] bool, False for padding.
        expires: [B, H, T] int32, of the chunk's tokens.
        scale: multiplies ``<q, k>``.
    """
    length = k.shape[2]
    block = min(BLOCK_K, length)
    pad = -length % block
    keys = jnp.pad(jnp.swapaxes(k, 2, 3), ((0, 0), (0, 0), (0, 0), (0, pad)))
    values = jnp.pad(v, ((0, 0), (0, 0), (0, pad), (0, 0)))
    at = jnp.pad(jnp.where(valid, positions, NEVER), ((0, 0), (0, pad)), constant_values=NEVER)
    last = jnp.pad(expires, ((0, 0), (0, 0), (0, pad)))

    def fetch(j: Array) -> Keys:
        def cut(x: Array, axis: int) -> Array:
            return lax.dynamic_slice_in_dim(x, j * block, block, axis)

        return Keys(cut(keys, 3), cut(values, 2), cut(at, 1), cut(last, 2))

    def blocks(column: Array) -> Array:
        return jnp.minimum(column // block + 1, jnp.int32((length + pad) // block))

    return attention(q, jnp.where(valid, positions, -1), fetch, blocks, scale=scale)

"""Blockwise attention under delayed eviction in plain XLA, with its own gradient; runs on every device.

Online softmax over key blocks, so no array grows with T x T; the backward pass recomputes each block's weights from the
saved log-sum-exp and returns the gradient of the per-key bias beside those of q, k and v. Blocks that no query can see
(after the query, outside the local window, other segments) are skipped by dynamic loop bounds.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from kernels.numerics import accumulator, narrow
from kernels.visibility import PADDING

BLOCKS = (512, 256)
"""Query x key block: the larger one, a sixth faster on CPUs, where it costs little: see :func:`_side`."""
_HEADS = 32  # rows x query heads up to which a block pair's scores may be 1 MB for each

SAVED = ("delayed_attention_out", "delayed_attention_lse")
"""Checkpoint names of what the backward pass needs; a rematerialisation policy that saves them skips this attention."""


class Shape(NamedTuple):
    """What a program is compiled for; block sizes divide the padded length."""

    window: int
    scale: float
    block_q: int
    block_k: int


def attention(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    segment_ids: Array | None,
    local_window: Array | None,
    *,
    window: int,
    scale: float,
    with_lse: bool = False,
    block_q: int | None = None,
    block_k: int | None = None,
) -> Array | tuple[Array, Array]:
    """Same contract as :func:`kernels.delayed_eviction.reference.attention`; differentiable in q, k, v and bias.

    Args:
        block_q, block_k: see :data:`BLOCKS`, of which None takes one.
    """
    length = q.shape[2]
    step = min(8, length)
    side = _side(length, q.shape[0] * q.shape[1], local_window is not None)
    block_q, block_k = block_q or side, block_k or side
    block_k = min(block_k, -(-length // step) * step)
    block_q = min(block_q, block_k)
    if block_k % block_q:
        raise ValueError(f"block_k {block_k} must be a multiple of block_q {block_q}")
    pad = -length % block_k
    if pad:
        grow = [(0, 0), (0, 0), (0, pad), (0, 0)]
        q, k, v = jnp.pad(q, grow), jnp.pad(k, grow), jnp.pad(v, grow)
        bias = None if bias is None else jnp.pad(bias, grow[:3])
        segment_ids = None if segment_ids is None else jnp.pad(segment_ids, grow[1:3], constant_values=PADDING)
    shape = Shape(window, scale, block_q, block_k)
    if with_lse:
        out, lse = _forward(shape, q, k, v, bias, segment_ids, local_window)
        return out[:, :, :length], lse.reshape(out.shape[:3])[:, :, :length]
    return _attention(shape, q, k, v, bias, segment_ids, local_window)[:, :, :length]


def _side(length: int, heads: int, local: bool) -> int:
    """Which of :data:`BLOCKS`: small ones cover a window best, and large ones of many heads need too much memory."""
    large, small = BLOCKS
    padding = -length % large <= max(length // 16, -length % small)
    return large if heads <= _HEADS and not local and padding else small


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    shape: Shape, q: Array, k: Array, v: Array, bias: Array | None, segment_ids: Array | None, local: Array | None
) -> Array:
    return _forward(shape, q, k, v, bias, segment_ids, local)[0]


class _Blocks(NamedTuple):
    """What is to be done for each query block x key block, [T / block_q, T / block_k] bool each."""

    live: Array
    """May any query of the block see any key?"""
    plain: Array
    """Does every query see every key, beyond the window? Then the bias is added and nothing is masked."""


def _blocks(shape: Shape, length: int, bias: Array | None, segment_ids: Array | None, local: Array | None) -> _Blocks:
    q_first = jnp.arange(0, length, shape.block_q)[:, None]
    k_first = jnp.arange(0, length, shape.block_k)[None, :]
    q_last, k_last = q_first + (shape.block_q - 1), k_first + (shape.block_k - 1)
    live = k_first <= q_last
    plain = q_first - k_last > (-1 if bias is None else shape.window)
    if local is not None:
        live = live & (q_first - k_last < local)
        plain = plain & (q_last - k_first < local)
    if segment_ids is not None:
        batch = segment_ids.shape[0]
        by_q = segment_ids.reshape(batch, -1, 1, shape.block_q)
        by_k = segment_ids.reshape(batch, 1, -1, shape.block_k)
        overlap = (by_q.min(-1) <= by_k.max(-1)) & (by_k.min(-1) <= by_q.max(-1)) & (by_q.max(-1) > PADDING)
        live = live & overlap.any(0)
        one = (by_q.min(-1) == by_k.max(-1)) & (by_k.min(-1) == by_q.max(-1)) & (by_q.min(-1) > PADDING)
        plain = plain & one.all(0)
    return _Blocks(live, plain)


def _ranges(live: Array) -> tuple[Array, Array]:
    """First and one past the last true column of each row ([n] int32 each; equal where the row has none)."""
    n = live.shape[1]
    any_live = live.any(1)
    first = jnp.where(any_live, jnp.argmax(live, 1), 0).astype(jnp.int32)
    last = jnp.where(any_live, n - jnp.argmax(live[:, ::-1], 1), 0).astype(jnp.int32)
    return first, last


def _block(x: Array, index: Array, size: int, axis: int) -> Array:
    return lax.dynamic_slice_in_dim(x, index * jnp.int32(size), size, axis)


def _mask(
    shape: Shape, segments: tuple[Array, Array] | None, local: Array | None, i: Array, j: Array
) -> tuple[Array, Array]:
    """Of one block pair: which entries are visible [B or 1, block_q, block_k], which lie beyond the window."""
    distance = (i * jnp.int32(shape.block_q) + jnp.arange(shape.block_q, dtype=jnp.int32))[:, None] - (
        j * jnp.int32(shape.block_k) + jnp.arange(shape.block_k, dtype=jnp.int32)
    )[None, :]
    seen = (distance >= 0)[None]
    if local is not None:
        seen = seen & (distance < local)[None]
    if segments is not None:
        of_q, of_k = segments
        seen = seen & (of_q[:, :, None] == of_k[:, None, :]) & (of_q > PADDING)[:, :, None]
    return seen, (distance > jnp.int32(shape.window))[None]


def _segments_of(shape: Shape, ids: Array | None, i: Array, j: Array) -> tuple[Array, Array] | None:
    return None if ids is None else (_block(ids, i, shape.block_q, 1), _block(ids, j, shape.block_k, 1))


def _forward(
    shape: Shape, q: Array, k: Array, v: Array, bias: Array | None, segment_ids: Array | None, local: Array | None
) -> tuple[Array, Array]:
    """Output [B, Hq, T, D] and log-sum-exp [B, H, G, T] (+inf for rows that see nothing)."""
    batch, heads, length, dim = q.shape
    kv_heads = k.shape[1]
    groups = heads // kv_heads
    acc = accumulator(q.dtype)
    grouped = q.reshape(batch, kv_heads, groups, length, dim)
    blocks = _blocks(shape, length, bias, segment_ids, local)
    first, last = _ranges(blocks.live)

    def q_block(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        out, lse = carry
        qi = _block(grouped, i, shape.block_q, 3).reshape(batch, kv_heads, groups * shape.block_q, dim)

        def k_block(j: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            kj, vj = _block(k, j, shape.block_k, 2), _block(v, j, shape.block_k, 2)
            bj = None if bias is None else _block(bias, j, shape.block_k, 2)[:, :, None, None].astype(acc)

            def merge(masked: bool, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                total, top, weight = state
                s = jnp.einsum("bhqd,bhkd->bhqk", qi, kj, preferred_element_type=acc)
                s = s.reshape(*top.shape, shape.block_k) * jnp.asarray(shape.scale, acc)
                seen = late = None
                if masked:
                    seen, late = _mask(shape, _segments_of(shape, segment_ids, i, j), local, i, j)
                if bj is not None:
                    s = s + (bj if late is None else jnp.where(late[:, None, None], bj, jnp.zeros((), acc)))
                if seen is not None:
                    s = jnp.where(seen[:, None, None], s, -jnp.inf)
                new_top = jnp.maximum(top, s.max(-1))
                safe = jnp.where(jnp.isneginf(new_top), jnp.zeros_like(new_top), new_top)
                p = jnp.exp(s - safe[..., None])
                decay = jnp.exp(top - safe)
                pv = jnp.einsum(
                    "bhqk,bhkd->bhqd",
                    narrow(p, v.dtype).reshape(*qi.shape[:3], shape.block_k),
                    vj,
                    preferred_element_type=acc,
                ).reshape(total.shape)
                return total * decay[..., None] + pv, new_top, weight * decay + p.sum(-1)

            return lax.cond(blocks.plain[i, j], functools.partial(merge, False), functools.partial(merge, True), state)

        rows = (batch, kv_heads, groups, shape.block_q)
        start = (jnp.zeros((*rows, dim), acc), jnp.full(rows, -jnp.inf, acc), jnp.zeros(rows, acc))
        total, top, weight = lax.fori_loop(first[i], last[i], k_block, start)
        empty = weight == 0
        divisor = jnp.where(empty, jnp.ones_like(weight), weight)
        block = (total / divisor[..., None]).astype(q.dtype)
        block_lse = jnp.where(empty, jnp.inf, top + jnp.log(divisor)).astype(acc)
        at = i * jnp.int32(shape.block_q)
        return (
            lax.dynamic_update_slice_in_dim(out, block, at, 3),
            lax.dynamic_update_slice_in_dim(lse, block_lse, at, 3),
        )

    out = jnp.zeros(grouped.shape, q.dtype)
    lse = jnp.zeros(grouped.shape[:-1], acc)
    out, lse = lax.fori_loop(jnp.int32(0), jnp.int32(length // shape.block_q), q_block, (out, lse))
    return out.reshape(q.shape), lse


def _attention_fwd(
    shape: Shape, q: Array, k: Array, v: Array, bias: Array | None, segment_ids: Array | None, local: Array | None
) -> tuple[Array, tuple[Array | None, ...]]:
    out, lse = _forward(shape, q, k, v, bias, segment_ids, local)
    out, lse = checkpoint_name(out, SAVED[0]), checkpoint_name(lse, SAVED[1])
    return out, (q, k, v, bias, segment_ids, local, out, lse)


def backward(shape: Shape, residuals: tuple[Array, ...], d_out: Array) -> tuple[Array | None, ...]:
    """Gradients of all six inputs, from (the inputs, output [B, Hq, T, D], log-sum-exp [B, H, G, T])."""
    # Scores are formed as [keys, queries] and dq is gathered as [D, queries], so that no product has a transposed first
    # operand, which XLA:CPU multiplies four times slower.
    q, k, v, bias, segment_ids, local, out, lse = residuals
    batch, heads, length, dim = q.shape
    kv_heads = k.shape[1]
    groups = heads // kv_heads
    acc = accumulator(q.dtype)
    grouped = q.reshape(batch, kv_heads, groups, length, dim)
    d_grouped = d_out.reshape(grouped.shape)
    delta = jnp.sum(d_grouped.astype(acc) * out.reshape(grouped.shape).astype(acc), -1)
    k_transposed = k.swapaxes(2, 3)
    blocks = _blocks(shape, length, bias, segment_ids, local)
    first, last = _ranges(blocks.live.T)
    flat = (batch, kv_heads, groups * shape.block_q)

    def k_block(j: Array, carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        dq, dk, dv, db = carry
        kj, vj = _block(k, j, shape.block_k, 2), _block(v, j, shape.block_k, 2)
        kj_transposed = _block(k_transposed, j, shape.block_k, 3)
        bj = None if bias is None else _block(bias, j, shape.block_k, 2)[..., None, None].astype(acc)

        def q_block(i: Array, state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
            qi = _block(grouped, i, shape.block_q, 3).reshape(*flat, dim)
            doi = _block(d_grouped, i, shape.block_q, 3).reshape(*flat, dim)
            lse_i, delta_i = (
                _block(lse, i, shape.block_q, 3)[:, :, None],
                _block(delta, i, shape.block_q, 3)[:, :, None],
            )

            def add(masked: bool, state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
                dq, dkj, dvj, dbj = state
                s = jnp.einsum("bhkd,bhqd->bhkq", kj, qi, preferred_element_type=acc)
                s = s.reshape(batch, kv_heads, shape.block_k, groups, shape.block_q) * jnp.asarray(shape.scale, acc)
                seen = late = None
                if masked:
                    seen, late = (
                        x.swapaxes(1, 2)[:, None, :, None]
                        for x in _mask(shape, _segments_of(shape, segment_ids, i, j), local, i, j)
                    )
                if bj is not None:
                    s = s + (bj if late is None else jnp.where(late, bj, jnp.zeros((), acc)))
                if seen is not None:
                    s = jnp.where(seen, s, -jnp.inf)
                p = narrow(jnp.exp(s - lse_i), v.dtype)
                dp = jnp.einsum("bhkd,bhqd->bhkq", vj, doi, preferred_element_type=acc).reshape(s.shape)
                ds = p.astype(acc) * (dp - delta_i)
                if bias is not None:
                    dbj = dbj + (ds if late is None else jnp.where(late, ds, jnp.zeros((), acc))).sum((3, 4))
                p = p.reshape(batch, kv_heads, shape.block_k, -1)
                ds = narrow(ds * jnp.asarray(shape.scale, acc), q.dtype).reshape(p.shape)
                dvj = dvj + jnp.einsum("bhkq,bhqd->bhkd", p, doi, preferred_element_type=acc)
                dkj = dkj + jnp.einsum("bhkq,bhqd->bhkd", ds, qi, preferred_element_type=acc)
                dqi = jnp.einsum("bhdk,bhkq->bhdq", kj_transposed, ds, preferred_element_type=acc)
                dqi = dqi.reshape(batch, kv_heads, dim, groups, shape.block_q) + _block(dq, i, shape.block_q, 4)
                return lax.dynamic_update_slice_in_dim(dq, dqi, i * jnp.int32(shape.block_q), 4), dkj, dvj, dbj

            return lax.cond(blocks.plain[i, j], functools.partial(add, False), functools.partial(add, True), state)

        zeros = jnp.zeros(kj.shape, acc)
        state = (dq, zeros, zeros, jnp.zeros(kj.shape[:-1], acc))
        dq, dkj, dvj, dbj = lax.fori_loop(first[j], last[j], q_block, state)
        at = j * jnp.int32(shape.block_k)
        return (
            dq,
            lax.dynamic_update_slice_in_dim(dk, dkj.astype(k.dtype), at, 2),
            lax.dynamic_update_slice_in_dim(dv, dvj.astype(v.dtype), at, 2),
            lax.dynamic_update_slice_in_dim(db, dbj, at, 2),
        )

    start = (
        jnp.zeros((batch, kv_heads, dim, groups, length), acc),
        jnp.zeros_like(k),
        jnp.zeros_like(v),
        jnp.zeros(k.shape[:-1], acc),
    )
    dq, dk, dv, db = lax.fori_loop(jnp.int32(0), jnp.int32(length // shape.block_k), k_block, start)
    d_bias = None if bias is None else db.astype(bias.dtype)
    return jnp.moveaxis(dq, 2, -1).reshape(q.shape).astype(q.dtype), dk, dv, d_bias, None, None


_attention.defvjp(_attention_fwd, backward)

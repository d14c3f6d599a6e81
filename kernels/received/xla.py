"""The attention that keys receive, in plain XLA: blocks of queries, each against all blocks of keys.

A first pass over the keys finds each query's log-sum-exp, unless it is known; the last one reduces over the queries:
sums of probabilities, or maxima of their logarithms, which need no exponential of every score. Each pass computes the
products anew, so that nothing is larger than a block of queries x a block of keys.
"""

import jax.numpy as jnp
from jax import Array, lax

from kernels.numerics import accumulator
from kernels.partial import EMPTY
from kernels.visibility import NEVER

BLOCK_Q = 256
"""Queries per block."""

BLOCK_K = 512
"""Keys per block."""


def received(
    q: Array,
    k: Array,
    q_positions: Array,
    k_positions: Array,
    row_weight: Array | None,
    lse: Array | None,
    *,
    scale: float,
    reduce: str,
) -> Array:
    """See :func:`kernels.received.api.received`."""
    batch, heads, queries, dim = q.shape
    kv_heads, count = k.shape[1:3]
    group = heads // kv_heads
    acc = accumulator(q.dtype)
    block_q, block_k = min(BLOCK_Q, queries), min(BLOCK_K, count)
    pad_q, pad_k = -queries % block_q, -count % block_k

    q = jnp.pad(q, ((0, 0), (0, 0), (0, pad_q), (0, 0)))
    q = q.reshape(batch, kv_heads, group, queries + pad_q, dim)
    q_positions = jnp.pad(q_positions, ((0, 0), (0, pad_q)), constant_values=-1)
    weight = jnp.ones((batch, queries), acc) if row_weight is None else row_weight.astype(acc)
    weight = jnp.log(jnp.pad(weight, ((0, 0), (0, pad_q))))
    if lse is not None:
        lse = jnp.pad(lse.astype(acc), ((0, 0), (0, 0), (0, pad_q)), constant_values=jnp.inf)
        lse = lse.reshape(batch, kv_heads, group, -1)
    k_positions = jnp.pad(k_positions, ((0, 0), (0, 0), (0, pad_k)), constant_values=NEVER)
    k = jnp.pad(k, ((0, 0), (0, 0), (0, pad_k), (0, 0)))
    k = jnp.where((k_positions == NEVER)[..., None], 0, k)  # what is not there may hold NaN
    blocks = (count + pad_k) // block_k

    def query_block(out: Array, i: Array) -> tuple[Array, None]:
        qi = lax.dynamic_slice_in_dim(q, i * block_q, block_q, 3).reshape(batch, kv_heads, group * block_q, dim)
        at = lax.dynamic_slice_in_dim(q_positions, i * block_q, block_q, 1)
        share = lax.dynamic_slice_in_dim(weight, i * block_q, block_q, 1)
        rows = jnp.tile(at, (1, group))[:, None, :, None]  # [B, 1, G x block, 1]
        newest = jnp.max(at)

        def scores(j: Array) -> tuple[Array, Array]:
            kj = lax.dynamic_slice_in_dim(k, j * block_k, block_k, 2)
            keys_at = lax.dynamic_slice_in_dim(k_positions, j * block_k, block_k, 2)[:, :, None]
            s = jnp.einsum("bhrd,bhcd->bhrc", qi, kj, preferred_element_type=acc) * jnp.asarray(scale, acc)
            seen = (keys_at <= rows) & (keys_at != NEVER)
            return jnp.where(seen, s, EMPTY), seen

        def visible(j: Array) -> Array:
            """Whether some query of the block sees a key of block j: else there is nothing to compute."""
            return jnp.min(lax.dynamic_slice_in_dim(k_positions, j * block_k, block_k, 2)) <= newest

        def first(j: Array, sofar: tuple[Array, Array]) -> tuple[Array, Array]:
            def add(sofar: tuple[Array, Array]) -> tuple[Array, Array]:
                top, total = sofar
                s, seen = scores(j)
                new_top = jnp.maximum(top, s.max(-1))
                p = jnp.where(seen, jnp.exp(s - new_top[..., None]), 0)
                return new_top, total * jnp.exp(top - new_top) + p.sum(-1)

            return lax.cond(visible(j), add, lambda x: x, sofar)

        if lse is None:
            start = jnp.full((batch, kv_heads, group * block_q), EMPTY, acc)
            top, total = lax.fori_loop(jnp.int32(0), jnp.int32(blocks), first, (start, jnp.zeros_like(start)))
            known = jnp.where(total == 0, jnp.inf, top + jnp.log(jnp.where(total == 0, 1, total)))
        else:
            known = lax.dynamic_slice_in_dim(lse, i * block_q, block_q, 3).reshape(batch, kv_heads, -1)
        # Probability times weight is exp(score - less); +inf where there is nothing to receive.
        less = (known - jnp.tile(share, (1, group))[:, None])[..., None]

        def second(j: Array, out: Array) -> Array:
            def add(out: Array) -> Array:
                s, seen = scores(j)
                old = lax.dynamic_slice_in_dim(out, j * block_k, block_k, 3)
                if reduce == "sum":
                    p = jnp.where(seen, jnp.exp(s - less), 0)
                    new = old + p.reshape(batch, kv_heads, group, block_q, block_k).sum(3)
                else:
                    new = jnp.maximum(old, (s - less).reshape(batch, kv_heads, group, block_q, block_k).max(3))
                return lax.dynamic_update_slice_in_dim(out, new, j * block_k, 3)

            return lax.cond(visible(j), add, lambda x: x, out)

        return lax.fori_loop(jnp.int32(0), jnp.int32(blocks), second, out), None

    out = jnp.full((batch, kv_heads, group, count + pad_k), 0 if reduce == "sum" else -jnp.inf, acc)
    indices = jnp.arange((queries + pad_q) // block_q, dtype=jnp.int32)
    out, _ = lax.scan(query_block, out, indices)
    out = out if reduce == "sum" else jnp.exp(out)
    return out.reshape(batch, heads, count + pad_k)[:, :, :count]

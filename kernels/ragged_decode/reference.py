"""Definition of ragged attention: gather every slot of every head, mask, softmax. Slow, and easy to check."""

import jax.numpy as jnp
from jax import Array, lax

from kernels.numerics import accumulator
from kernels.partial import EMPTY, Partial


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
) -> Partial:
    """See :func:`kernels.ragged_decode.api.ragged_attention`."""
    acc = accumulator(q.dtype)
    batch, heads, queries, dim = q.shape
    kv_heads, width = tables.shape[1:]
    pages, _, page = k.shape
    slots = width * page
    used = jnp.arange(slots, dtype=jnp.int32)[None, None] < lengths[..., None]
    at = jnp.where(used[..., ::page], tables, 0)

    if k.dtype == jnp.uint8:
        k, v = (lax.bitcast_convert_type(x, jnp.float8_e4m3fn) for x in (k, v))
    keys = jnp.swapaxes(k[at].astype(acc), -1, -2).reshape(batch, kv_heads, slots, dim)
    values = v[at].astype(acc).reshape(batch, kv_heads, slots, dim) if v.shape[2] else keys
    if k_scale is not None and v_scale is not None:
        keys = keys * k_scale[at].astype(acc).reshape(batch, kv_heads, slots, 1)
        values = values * v_scale[at].astype(acc).reshape(batch, kv_heads, slots, 1)
    seen = jnp.broadcast_to(used[:, :, None], (batch, kv_heads, queries, slots))
    if expires is not None and q_positions is not None:
        last = expires[at].reshape(batch, kv_heads, 1, slots)
        seen = seen & (q_positions[:, None, :, None] <= last)
    seen = jnp.repeat(seen, heads // kv_heads, 1)
    used = jnp.repeat(used, heads // kv_heads, 1)[..., None]

    keys = jnp.where(used, jnp.repeat(keys, heads // kv_heads, 1), 0)
    values = jnp.where(used, jnp.repeat(values, heads // kv_heads, 1), 0)
    scores = jnp.einsum("bhtd,bhsd->bhts", q.astype(acc), keys) * jnp.asarray(scale, acc)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen, scores, EMPTY)
    top = scores.max(-1)
    p = jnp.where(seen, jnp.exp(scores - top[..., None]), 0)
    return Partial(jnp.einsum("bhts,bhsd->bhtd", p, values), top, p.sum(-1))

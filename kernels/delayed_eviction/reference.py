"""Dense reference of attention under delayed eviction: the contract that every implementation is tested against."""

import jax.numpy as jnp
from jax import Array

from kernels.numerics import accumulator
from kernels.visibility import PADDING


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
) -> Array | tuple[Array, Array]:
    """Masked attention with a [T, T] score matrix; for tests and tiny inputs.

    ``score[q, k] = scale * <q, k> + (bias[k] if q - k > window else 0)`` over the keys of the query's own segment with
    ``0 <= q - k < local_window``; rows without a visible key give zeros.

    Args:
        q: [B, Hq, T, D].
        k: [B, H, T, D]; query head ``h`` reads KV head ``h // (Hq // H)``.
        v: [B, H, T, D].
        bias: [B, H, T] or None, see :func:`kernels.visibility.log_visibility`.
        segment_ids: [B, T] int32 or None; negative ids are padding.
        local_window: int32 scalar or None.
        window: delay of the eviction in tokens.
        scale: multiplies ``<q, k>``.
        with_lse: give the log-sum-exp of each row's scores, too; that form is not differentiable.

    Returns:
        [B, Hq, T, D] in the dtype of q; and [B, Hq, T], +inf for rows without a visible key.
    """
    batch, heads, length, dim = q.shape
    kv_heads = k.shape[1]
    acc = accumulator(q.dtype)
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, length, dim)
    scores = jnp.einsum("bhgqd,bhkd->bhgqk", grouped.astype(acc), k.astype(acc)) * jnp.asarray(scale, acc)
    distance = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    seen = (distance >= 0)[None]
    if local_window is not None:
        seen = seen & (distance < local_window)[None]
    if segment_ids is not None:
        same = segment_ids[:, :, None] == segment_ids[:, None, :]
        seen = seen & same & (segment_ids > PADDING)[:, :, None]
    if bias is not None:
        late = (distance > window)[None, None, None]
        scores = scores + jnp.where(late, bias[:, :, None, None, :].astype(acc), jnp.zeros((), acc))
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    top = scores.max(-1, keepdims=True)
    top = jnp.where(jnp.isneginf(top), jnp.zeros_like(top), top)
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    weights = weights / jnp.where(total == 0, jnp.ones_like(total), total)
    out = jnp.einsum("bhgqk,bhkd->bhgqd", weights, v.astype(acc)).reshape(q.shape).astype(q.dtype)
    lse = jnp.where(total == 0, jnp.inf, top + jnp.log(total))[..., 0]
    return (out, lse.reshape(q.shape[:3])) if with_lse else out

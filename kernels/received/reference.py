"""The attention that keys receive, written down directly: the arrays that the fast implementation avoids."""

import jax.numpy as jnp
from jax import Array

from kernels.numerics import accumulator
from kernels.partial import EMPTY
from kernels.visibility import NEVER


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
    acc = accumulator(q.dtype)
    group = q.shape[1] // k.shape[1]
    keys = jnp.repeat(k.astype(acc), group, 1)
    at = jnp.repeat(k_positions, group, 1)[:, :, None]
    seen = (at <= q_positions[:, None, :, None]) & (at != NEVER)
    s = jnp.einsum("bhtd,bhsd->bhts", q.astype(acc), jnp.where(at[:, :, 0, :, None] == NEVER, 0, keys))
    s = jnp.where(seen, s * jnp.asarray(scale, acc), EMPTY)
    if lse is not None:
        p = jnp.where(seen, jnp.exp(s - lse.astype(acc)[..., None]), 0)
    else:
        p = jnp.where(seen, jnp.exp(s - s.max(-1, keepdims=True)), 0)
        total = p.sum(-1, keepdims=True)
        p = p / jnp.where(total == 0, jnp.ones_like(total), total)
    if row_weight is not None:
        p = p * row_weight.astype(acc)[:, None, :, None]
    return p.sum(2) if reduce == "sum" else p.max(2)

"""Definition of attention within a chunk: all scores at once, mask, softmax. Slow, and easy to check."""

import jax.numpy as jnp
from jax import Array

from kernels.numerics import accumulator
from kernels.partial import EMPTY, Partial
from kernels.visibility import visible


def chunk_attention(
    q: Array, k: Array, v: Array, positions: Array, valid: Array, expires: Array, *, scale: float
) -> Partial:
    """See :func:`kernels.blockwise.xla.chunk_attention`."""
    acc = accumulator(q.dtype)
    groups = q.shape[1] // k.shape[1]
    seen = visible(positions[:, None, :, None], positions[:, None, None], expires[:, :, None])
    seen = jnp.repeat(seen & valid[:, None, :, None] & valid[:, None, None], groups, 1)
    keys, values = (jnp.repeat(x.astype(acc), groups, 1) for x in (k, v))
    there = jnp.repeat(valid[:, None], q.shape[1], 1)[..., None]
    scores = jnp.einsum("bhtd,bhsd->bhts", q.astype(acc), jnp.where(there, keys, 0)) * jnp.asarray(scale, acc)
    scores = jnp.where(seen, scores, EMPTY)
    top = scores.max(-1)
    p = jnp.where(seen, jnp.exp(scores - top[..., None]), 0)
    return Partial(jnp.einsum("bhts,bhsd->bhtd", p, jnp.where(there, values, 0)), top, p.sum(-1))

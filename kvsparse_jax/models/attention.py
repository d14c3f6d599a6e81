"""What goes into attention and comes out of it: plain heads, and latent attention in its absorbed form.

Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) is computed as attention with a single KV head. Its key is
the latent with the rotated channels and its value the same vector: keys and values per head are never made. Each query
is carried into the latent space by its head's key projection, each output out of it by the value projection.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from kernels.numerics import accumulator
from kvsparse_jax.models import rope
from kvsparse_jax.models.config import Latent, ModelConfig
from kvsparse_jax.models.parts import Params, dense, rms_norm

_LATENT_EPS = 1e-6
"""Of the norms of latents, whatever the configuration says of the others (as in the original models)."""


class Heads(NamedTuple):
    """What a layer's attention works on.

    Attributes:
        plain: [B, T, Hq, D], queries before the rotation.
        q: [B, T, Hq, D], after it.
        k: [B, T, H, D], after it.
        v: [B, T, H, D].
    """

    plain: Array
    q: Array
    k: Array
    v: Array


def without_borrowed(q: Array, kv_heads: int, left: Array | None = None) -> Array:
    """Queries [B, T, Hq, D] without the channel that decisions are read from, see ``ModelConfig.borrowed_channel``.

    Args:
        q: the queries.
        kv_heads: H.
        left: scalar, the share of the channel that stays; None: nothing.
    """
    group = q.shape[2] // kv_heads
    borrowed = (jnp.arange(q.shape[2]) % group == 0)[:, None] & (jnp.arange(q.shape[3]) == q.shape[3] - 1)[None]
    rest = jnp.zeros_like(q) if left is None else q * left.astype(q.dtype)
    return jnp.where(borrowed[None, None], rest, q)


def heads(config: ModelConfig, p: Params, normed: Array, angles: tuple[Array, Array], fade: Array | None) -> Heads:
    """Queries, keys and values of a layer from its normed input [B, T, E]; for ``fade`` see the decoder."""
    if config.latent is not None:
        return _latent_heads(config, config.latent, p, normed, angles)
    batch, length, _ = normed.shape
    plain = dense(p["q"], normed).reshape(batch, length, config.heads, config.head_dim)
    k = dense(p["k"], normed).reshape(batch, length, config.kv_heads, config.head_dim)
    v = dense(p["v"], normed).reshape(batch, length, config.kv_heads, config.head_dim)
    if config.qk_norm:
        plain, k = (
            rms_norm(x, p[name], config.rms_eps, config.unit_offset) for x, name in ((plain, "q_norm"), (k, "k_norm"))
        )
    if config.borrowed_channel:
        # Before and again after the rotation, which mixes it with its partner (as in the released code).
        rotated = rope.rotate(without_borrowed(plain, config.kv_heads, fade), *angles)
        q = without_borrowed(rotated, config.kv_heads, fade)
    else:
        q = rope.rotate(plain, *angles)
    return Heads(plain, q, rope.rotate(k, *angles), v)


def output(config: ModelConfig, p: Params, out: Array) -> Array:
    """The layer's attention output [B, T, E] from that of its heads [B, T, Hq, D]."""
    if config.latent is not None:
        values = _up(config, config.latent, p)[..., config.latent.nope :].astype(out.dtype)
        out = jnp.einsum("bthr,rhv->bthv", out[..., : config.latent.rank], values)
    return dense(p["o"], out.reshape(*out.shape[:2], -1))


def value_projection(config: ModelConfig, p: Params) -> Array:
    """What takes a head's value to the residual stream: [Hq, D, E], in the accumulator's dtype."""
    kernel = p["o"]["kernel"]
    o = kernel.astype(accumulator(kernel.dtype)).reshape(config.heads, -1, kernel.shape[-1])
    if config.latent is None:
        return o
    values = _up(config, config.latent, p)[..., config.latent.nope :].astype(o.dtype)
    return jnp.pad(jnp.einsum("rhv,hve->hre", values, o), ((0, 0), (0, config.latent.rope), (0, 0)))


def _up(config: ModelConfig, latent: Latent, p: Params) -> Array:
    """[rank, Hq, nope + value], what makes a head's key and value of the latent."""
    kernel: Array = p["kv_b"]["kernel"]
    return kernel.reshape(latent.rank, config.heads, latent.nope + latent.value)


def _latent_heads(config: ModelConfig, latent: Latent, p: Params, normed: Array, angles: tuple[Array, Array]) -> Heads:
    batch, length, _ = normed.shape
    if latent.q_rank is None:
        q = dense(p["q"], normed)
    else:
        q = dense(p["q_b"], rms_norm(dense(p["q_a"], normed), p["q_a_norm"], _LATENT_EPS))
    q = q.reshape(batch, length, config.heads, latent.nope + latent.rope)
    down = dense(p["kv_a"], normed)
    entry = rms_norm(down[..., : latent.rank], p["kv_a_norm"], _LATENT_EPS)[:, :, None]

    def by_halves(x: Array) -> Array:
        if not latent.interleaved:
            return x
        return x.reshape(*x.shape[:-1], latent.rope // 2, 2).swapaxes(-1, -2).reshape(x.shape)

    keys = _up(config, latent, p)[..., : latent.nope].astype(q.dtype)
    in_latent = jnp.einsum("bthn,rhn->bthr", q[..., : latent.nope], keys)
    q_rope, k_rope = by_halves(q[..., latent.nope :]), by_halves(down[:, :, None, latent.rank :])
    k = jnp.concatenate([entry, rope.rotate(k_rope, *angles)], -1)
    return Heads(
        jnp.concatenate([in_latent, q_rope], -1),
        jnp.concatenate([in_latent, rope.rotate(q_rope, *angles)], -1),
        k,
        k,
    )

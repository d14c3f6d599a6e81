"""What layers of every family are made of: projections, norms, the gated MLP."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels.numerics import accumulator, narrow, widen

Params = dict[str, Any]

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}
"""The gate activations of the MLP, as config.json names them."""


def rms_norm(x: Array, weight: Array, eps: float, unit_offset: bool = False) -> Array:
    """RMS norm over the last axis, computed in float32 and scaled by the weight in the dtype of x.

    With ``unit_offset`` (Gemma) the factor is 1 + weight, in float32.
    """
    acc = accumulator(x.dtype)
    wide = x.astype(acc)
    normed = wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + jnp.asarray(eps, acc))
    weight = weight.reshape((1,) * (x.ndim - 1) + weight.shape)
    if unit_offset:
        return (normed * (1 + weight.astype(acc))).astype(x.dtype)
    return normed.astype(x.dtype) * weight.astype(x.dtype)


def dense(p: Params, x: Array) -> Array:
    """``x @ kernel (+ bias) (+ low-rank update)`` for x [B, T, in]; weights are cast to the dtype of x.

    A parameter dict may carry ``lora_a`` [in, r] and ``lora_b`` [r, out], whose product is added (any alpha / r is
    folded into them).
    """
    y = x @ p["kernel"].astype(x.dtype)
    if "bias" in p:
        y = y + p["bias"].astype(x.dtype)[None, None]
    if "lora_a" in p:
        y = y + (x @ p["lora_a"].astype(x.dtype)) @ p["lora_b"].astype(x.dtype)
    return y


def gated(activation: str, gate: Array, up: Array) -> Array:
    """``activation(gate) * up`` in float32, in the dtype of ``gate``."""
    return narrow(ACTIVATIONS[activation](widen(gate)) * widen(up), gate.dtype)


def mlp(activation: str, p: Params, x: Array) -> Array:
    """The gated MLP on x [B, T, E]; p holds ``gate``, ``up`` and ``down``."""
    return dense(p["down"], gated(activation, dense(p["gate"], x), dense(p["up"], x)))

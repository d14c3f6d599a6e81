"""Precision shared by all kernels."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike


def accumulator(dtype: DTypeLike) -> jnp.dtype:
    """Dtype in which sums over keys are kept: float32, or float64 for float64 inputs (tests in x64)."""
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def narrow(x: Array, dtype: DTypeLike) -> Array:
    """``x.astype(dtype)``, rounding to the nearest even; faster inside a CPU loop.

    XLA:CPU's own float32 -> bfloat16 conversion keeps the loop that it is fused into from being vectorised (an
    exponential and its conversion took 2.4x as long, a SwiGLU 7x), integer arithmetic does not. NaN stays NaN for the
    bit patterns that arithmetic produces.
    """
    if x.dtype != jnp.float32 or jnp.dtype(dtype) != jnp.bfloat16:
        return x.astype(dtype)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    rounded = (bits + jnp.uint32(0x7FFF) + ((bits >> jnp.uint32(16)) & jnp.uint32(1))) >> jnp.uint32(16)
    return lax.bitcast_convert_type(rounded.astype(jnp.uint16), jnp.bfloat16)


@narrow.defjvp
def _narrow_jvp(dtype: DTypeLike, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return narrow(primals[0], dtype), tangents[0].astype(dtype)


@jax.custom_vjp
def widen(x: Array) -> Array:
    """``x`` in the dtype of :func:`accumulator`; its gradient is narrowed again."""
    return x.astype(accumulator(x.dtype))


widen.defvjp(lambda x: (widen(x), jnp.zeros((), x.dtype)), lambda like, d: (narrow(d, like.dtype),))

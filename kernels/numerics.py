"""Precision shared by all kernels."""

import jax.numpy as jnp
from jax.typing import DTypeLike


def accumulator(dtype: DTypeLike) -> jnp.dtype:
    """Dtype in which sums over keys are kept: float32, or float64 for float64 inputs (tests in x64)."""
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)

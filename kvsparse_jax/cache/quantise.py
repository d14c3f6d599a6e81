"""8-bit keys and values: one scale per token and head, the largest magnitude mapped to the largest code.

float8_e4m3fn is stored as its bits in uint8: XLA:CPU has no scatter for it, and would convert the whole pool to write a
token.
"""

from typing import Literal

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

Quantisation = Literal["int8", "float8_e4m3"]

_STORED: dict[str, DTypeLike] = {"int8": jnp.int8, "float8_e4m3": jnp.uint8}
_LARGEST = {"int8": 127.0, "uint8": 448.0}

QUANTISATIONS = tuple(_STORED)


def storage_dtype(quantisation: str) -> DTypeLike:
    """Dtype of the codes. Raises ValueError for an unknown name."""
    if quantisation not in _STORED:
        raise ValueError(f"quantisation must be None or one of {QUANTISATIONS}, not {quantisation!r}")
    return _STORED[quantisation]


def quantise(x: Array, dtype: DTypeLike) -> tuple[Array, Array]:
    """Codes [..., D] of the given storage dtype and scales [...] float32 with ``x ~ codes * scale``.

    A vector of zeros gets scale 1. Rounding is half to even in both formats.
    """
    name = jnp.dtype(dtype).name
    limit = _LARGEST[name]
    wide = x.astype(jnp.float32)
    most = jnp.max(jnp.abs(wide), -1)
    scale = jnp.where(most > 0, most / limit, 1)
    codes = jnp.clip(wide / scale[..., None], -limit, limit)
    if name == "int8":
        return jnp.round(codes).astype(jnp.int8), scale
    return lax.bitcast_convert_type(codes.astype(jnp.float8_e4m3fn), jnp.uint8), scale


def dequantise(codes: Array, scale: Array) -> Array:
    """Inverse of :func:`quantise`, float32."""
    if codes.dtype == jnp.uint8:
        codes = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    return codes.astype(jnp.float32) * scale[..., None]

"""Rotary position embedding and its published scalings (default, linear, llama3, yarn, longrope)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from kernels.numerics import accumulator
from kvsparse_jax.errors import InputError

KINDS = ("default", "linear", "llama3", "yarn", "longrope")

ALWAYS_LONG = "kvsparse_longrope_always_long"
"""Key of config.json: longrope's factors for long texts count from the first token on."""


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of one kind of layer. Every value comes from the model's configuration; none has a default.

    Attributes:
        kind: one of KINDS.
        theta: base of the frequencies.
        dim: number of rotated channels of a head, even.
        scaling: the kind's own settings, (name, value) pairs; empty for "default".
        short, long: longrope's divisors of each channel pair's frequency [dim / 2], for positions within the original
            context and beyond it.
    """

    kind: str
    theta: float
    dim: int
    scaling: tuple[tuple[str, float], ...] = ()
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()

    @classmethod
    def read(cls, config: dict[str, Any], dim: int, max_positions: int, absent_theta: float | None = None) -> "Rope":
        """Reads ``rope_theta``/``rope_scaling`` (before transformers 5) or ``rope_parameters`` (since).

        Args:
            config: the model's config.json, or the entry of one layer type of it.
            dim: rotated channels of a head.
            max_positions: the model's context, which yarn takes where its original context is not given.
            absent_theta: the family's base for configurations older than the key; None refuses those.

        Raises:
            InputError: unknown kind, or a setting that is missing.
        """
        given = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        if nested := [name for name, value in given.items() if isinstance(value, Mapping)]:
            raise InputError(
                f"config.json gives a rope for each layer type ({', '.join(nested)}), which is not supported"
            )
        theta = given.get("rope_theta", config.get("rope_theta", absent_theta))
        if theta is None:
            raise InputError("config.json has no rope_theta (accepted: rope_theta, or rope_parameters.rope_theta)")
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in KINDS:
            raise InputError(f"unknown rope type {kind!r} in config.json (accepted: {', '.join(KINDS)})")

        def need(name: str) -> float:
            if given.get(name) is None:
                raise InputError(f"rope type {kind!r} needs {name!r} in config.json")
            return float(given[name])

        scaling: dict[str, float] = {}
        divisors: dict[str, tuple[float, ...]] = {}
        if kind == "longrope":
            original = given.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
            if not isinstance(original, int | float) or original < 2:
                raise InputError("rope type 'longrope' needs 'original_max_position_embeddings' in config.json")
            factor = max_positions / original
            grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
            scaling = {
                "original_max_position_embeddings": float(original),
                "attention_factor": float(given.get("attention_factor") or grown),
                "always_long": float(bool(config.get(ALWAYS_LONG))),
            }
            for name in ("short", "long"):
                values = given.get(f"{name}_factor")
                if not isinstance(values, list) or len(values) != dim // 2 or not all(_positive(x) for x in values):
                    raise InputError(
                        f"rope type 'longrope' needs '{name}_factor' in config.json: {dim // 2} numbers above 0"
                    )
                divisors[name] = tuple(float(x) for x in values)
        elif kind == "linear":
            scaling = {"factor": need("factor")}
        elif kind == "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            scaling = {name: need(name) for name in names}
        elif kind == "yarn":
            original = given.get("original_max_position_embeddings") or max_positions
            factor = given.get("factor") or max_positions / original
            scaling = {
                "factor": float(factor),
                "original_max_position_embeddings": float(original),
                "beta_fast": float(given.get("beta_fast") or 32.0),
                "beta_slow": float(given.get("beta_slow") or 1.0),
                "truncate": float(given.get("truncate", True)),
                "attention_factor": float(given.get("attention_factor") or _yarn_attention_factor(factor, given)),
                "mscale_all_dim": float(given.get("mscale_all_dim") or 0.0),
            }
        return cls(kind, float(theta), dim, tuple(scaling.items()), **divisors)

    @property
    def softmax_factor(self) -> float:
        """What yarn multiplies queries and keys by where the whole head is scaled, not only its rotated channels.

        Latent attention's factor on <q, k> contains its square (DeepSeek's code).
        """
        s = dict(self.scaling)
        return _mscale(s["factor"], s["mscale_all_dim"]) if s.get("mscale_all_dim") else 1.0

    def frequencies(self) -> tuple[np.ndarray, float]:
        """Angular frequency of each channel pair, [dim / 2] float32, and the factor on cos and sin.

        Of longrope those of positions within the original context; the others are :meth:`beyond`.
        """
        s = dict(self.scaling)
        base = self.theta ** -(np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)
        if self.kind == "longrope":
            divisors = self.long if s["always_long"] else self.short
            return (base / np.asarray(divisors)).astype(np.float32), s["attention_factor"]
        if self.kind == "default":
            return base.astype(np.float32), 1.0
        if self.kind == "linear":
            return (base / s["factor"]).astype(np.float32), 1.0
        original = s["original_max_position_embeddings"]
        if self.kind == "llama3":
            # Slow channels are stretched by the factor, fast ones kept, those between blended by turns per context.
            turns = original * base / (2 * math.pi)
            low, high = s["low_freq_factor"], s["high_freq_factor"]
            keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
            return ((1 - keep) * base / s["factor"] + keep * base).astype(np.float32), 1.0

        def channel(rotations: float) -> float:
            return self.dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = channel(s["beta_fast"]), channel(s["beta_slow"])
        if s["truncate"]:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        if low == high:
            high += 0.001
        stretch = np.clip((np.arange(self.dim // 2) - low) / (high - low), 0.0, 1.0)
        return (stretch * base / s["factor"] + (1 - stretch) * base).astype(np.float32), s["attention_factor"]

    def beyond(self) -> tuple[int, np.ndarray] | None:
        """First position that has other frequencies, and these [dim / 2] float32; None where there is none.

        Each position has frequencies of its own, whatever is computed with it, so that a cache holds what one pass over
        the text gives. (Hugging Face takes those of the last position for all positions of a call: the same for texts
        within the original context, and for what is generated beyond it token by token.)
        """
        s = dict(self.scaling)
        if self.kind != "longrope" or s["always_long"]:
            return None
        base = self.theta ** -(np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)
        return int(s["original_max_position_embeddings"]), (base / np.asarray(self.long)).astype(np.float32)


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn_attention_factor(factor: float, given: dict[str, Any]) -> float:
    if given.get("mscale") and given.get("mscale_all_dim"):
        return _mscale(factor, given["mscale"]) / _mscale(factor, given["mscale_all_dim"])
    return _mscale(factor, 1.0)


def angles(rope: Rope, positions: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
    """cos and sin [B, T, 1, dim / 2] of the positions [B, T], at least in float32."""
    frequencies, factor = rope.frequencies()
    acc = accumulator(dtype)
    at = positions[..., None].astype(acc)
    turn = at * jnp.asarray(frequencies, acc)[None, None]
    if (beyond := rope.beyond()) is not None:
        turn = jnp.where(positions[..., None] >= beyond[0], at * jnp.asarray(beyond[1], acc)[None, None], turn)
    scale = jnp.asarray(factor, acc)
    return (jnp.cos(turn) * scale)[:, :, None], (jnp.sin(turn) * scale)[:, :, None]


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates x [B, T, H, D] by halves (channel c pairs with c + dim / 2); channels past the rotated ones stay."""
    half = cos.shape[-1]
    acc = cos.dtype
    first, second, rest = x[..., :half].astype(acc), x[..., half : 2 * half].astype(acc), x[..., 2 * half :]
    parts = [(first * cos - second * sin).astype(x.dtype), (second * cos + first * sin).astype(x.dtype)]
    return jnp.concatenate([*parts, rest] if rest.shape[-1] else parts, axis=-1)

"""What a cache must be made for: the model's shape and the rule of the policy, in one place for every kind of cache."""

from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from kvsparse_jax.models.config import ModelConfig
from kvsparse_jax.policies.base import LayerInput, Policy


@dataclass(frozen=True)
class CacheSpec:
    """Shape of the keys and values, and how long a token may stay.

    Attributes:
        layers, kv_heads, head_dim: L, H, D.
        value_dim: channels of a value; 0: the key is the value, too, and is stored once (latent attention); None: D.
        dtype: of the model's keys and values.
        window: delay of the eviction in tokens (at least 0); None when nothing is ever flagged.
        shift: token k + shift decides about token k; 0 or 1.
        local_windows: per layer, the model's own sliding window or None; empty: no layer has one.
        max_positions: no sequence gets longer than this; None: unknown.
        recent: how many of the newest tokens a policy that selects has to be told of; None: it does not select.

    Raises:
        ValueError: a number that makes no sense.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: DTypeLike
    window: int | None = None
    shift: int = 0
    local_windows: tuple[int | None, ...] = ()
    max_positions: int | None = None
    recent: int | None = None
    value_dim: int | None = None

    def __post_init__(self) -> None:
        if min(self.layers, self.kv_heads, self.head_dim) < 1:
            raise ValueError("layers, kv_heads and head_dim must be at least 1")
        if self.window is not None and self.window < 0:
            raise ValueError(f"window must be at least 0 tokens or None, not {self.window}")
        if self.shift not in (0, 1):
            raise ValueError(f"shift must be 0 or 1, not {self.shift}")
        if self.value_dim not in (None, 0, self.head_dim):
            raise ValueError(f"value_dim must be 0 or head_dim ({self.head_dim}), not {self.value_dim}")
        if len(self.local_windows) not in (0, self.layers):
            raise ValueError(f"{len(self.local_windows)} local_windows do not fit {self.layers} layers")

    @classmethod
    def of(cls, config: ModelConfig, policy: Policy, dtype: DTypeLike) -> Self:
        """What a model of this shape and dtype needs under a policy.

        Raises:
            InputError: a policy with a budget, and a model without a layer of full attention.
        """
        if policy.selects:
            config.needs_full_attention(type(policy).__name__)
        return cls(
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=jnp.dtype(dtype),
            window=0 if policy.selects else policy.window if _decides(policy, config, dtype) else None,
            shift=policy.shift,
            local_windows=config.local_windows,
            max_positions=config.max_positions,
            recent=policy.recent if policy.selects else None,
            value_dim=None if config.latent is None else 0,
        )

    @property
    def stored_values(self) -> int:
        """Channels of a value that are stored beside its key."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def local(self) -> bool:
        """Some layer has a sliding window of its own."""
        return any(window is not None for window in self.local_windows)

    @property
    def reach(self) -> int:
        """How many of the newest tokens there are among which one may still leave by the rule; at least 1."""
        windows = [
            self.recent or 0,
            1 if self.window is None else self.window + 1,
            *(w for w in self.local_windows if w is not None),
        ]
        return min(max(windows), max(windows) if self.max_positions is None else max(self.max_positions, 1))

    @property
    def always_kept(self) -> int:
        """The newest tokens that no policy evicts: the window and the token itself; 0 where nothing is flagged."""
        if self.window is None:
            return 0
        newest = max(self.window + 1, self.recent or 0)
        return newest if self.max_positions is None else min(newest, self.max_positions)


def _decides(policy: Policy, config: ModelConfig, dtype: DTypeLike) -> bool:
    """Whether the policy ever flags a token: its gate is traced, not run."""

    def gate(params: Any, residual: Array, q: Array, positions: Array) -> Array | None:
        return policy.gate(params, LayerInput(residual, residual, q, positions, config.kv_heads, config.rms_eps))

    def shape(*dims: int, of: DTypeLike = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, of)

    one_layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), policy.params)
    residual, q = shape(1, 1, config.hidden_size), shape(1, 1, config.heads, config.head_dim)
    return jax.eval_shape(gate, one_layer, residual, q, shape(1, 1, of=jnp.int32)) is not None

"""StreamingLLM (arXiv 2309.17453): attention sinks and a sliding window."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvsparse_jax.errors import InputError, whole
from kvsparse_jax.policies.base import LayerInput, Policy

SINKS = 4
"""First tokens that are never evicted, unless another number is asked for (the paper's choice)."""


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """Keeps the first ``sinks`` tokens and the newest ones, ``budget`` in all with the query's own.

    Attributes:
        budget: tokens held per head.
        sinks: first tokens that are never evicted.
    """

    budget: int
    sinks: int = SINKS

    shift = 0
    params = None

    def __post_init__(self) -> None:
        whole("StreamingLLM budget", self.budget, 1)
        whole("StreamingLLM sinks", self.sinks, 0)
        if self.sinks < 0 or self.budget <= self.sinks:
            raise InputError(f"StreamingLLM needs budget > sinks >= 0, not budget={self.budget}, sinks={self.sinks}")

    @property
    def window(self) -> int:  # type: ignore[override]
        """What the budget leaves beside the sinks and the newest token."""
        return self.budget - self.sinks - 1

    def gate(self, params: Any, layer: LayerInput) -> Array | None:
        """Every token that is no sink is flagged on arrival."""
        sign = jnp.where(layer.positions >= self.sinks, 1.0, -1.0)
        return jnp.broadcast_to(sign[:, None], (sign.shape[0], layer.kv_heads, sign.shape[1]))


jax.tree_util.register_dataclass(StreamingLLM, data_fields=[], meta_fields=["budget", "sinks"])

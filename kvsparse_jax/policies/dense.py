"""The full cache: nothing is evicted."""

from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

from kvsparse_jax.policies.base import LayerInput, Policy


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dense(Policy):
    """Keeps every token."""

    window = 0
    shift = 0
    params = None

    def gate(self, params: Any, layer: LayerInput) -> Array | None:
        """None: there are no decisions."""
        return None

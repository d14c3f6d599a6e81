"""The full cache: nothing is evicted."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from jax import Array

from kvsparse_jax.policies.base import LayerInput, Policy


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dense(Policy):
    """Keeps every token."""

    window: ClassVar[int] = 0
    shift: ClassVar[int] = 0
    params: ClassVar[Any] = None

    def gate(self, params: Any, layer: LayerInput) -> Array | None:
        """None: there are no decisions."""
        return None

"""Knorm (arXiv 2406.11430): keys of large norm are dropped."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from kernels.numerics import accumulator
from kernels.visibility import NEVER
from kvsparse_jax.policies.base import Held
from kvsparse_jax.policies.budgeted import Budgeted, register


@register
@dataclass(frozen=True)
class Knorm(Budgeted):
    """Score: minus the key's Euclidean norm."""

    recent = 0

    def score(self, held: Held) -> Array:
        """See :meth:`Budgeted.score`."""
        keys = jnp.where((held.k_positions == NEVER)[..., None], 0, held.k).astype(accumulator(held.k.dtype))
        return -jnp.sqrt(jnp.sum(keys * keys, -1))

"""Random eviction: the floor that every score has to clear."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from kvsparse_jax.policies.base import Held
from kvsparse_jax.policies.budgeted import Budgeted, register


@register
@dataclass(frozen=True)
class Random(Budgeted):
    """Score: a number drawn when a token enters, by (seed, layer, head, position).

    Attributes:
        seed: of the draws.
    """

    seed: int = 0

    def score(self, held: Held) -> Array:
        """See :meth:`Budgeted.score`."""
        key = jax.random.fold_in(jax.random.key(self.seed), held.layer)
        heads = held.k.shape[1]
        draw = jax.vmap(lambda at: jax.random.uniform(jax.random.fold_in(key, at), (heads,), jnp.float32))
        new = jax.vmap(draw)(jnp.maximum(held.q_positions, 0)).swapaxes(1, 2)
        return jnp.concatenate([held.statistic[:, :, : held.stored], new], 2)

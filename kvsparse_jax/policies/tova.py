"""TOVA (arXiv 2401.06104): what the newest token attends to least is dropped."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from kvsparse_jax.errors import InputError
from kvsparse_jax.policies.base import Held
from kvsparse_jax.policies.budgeted import Budgeted, attention_received, newest_queries, register


@register
@dataclass(frozen=True)
class TOVA(Budgeted):
    """Score: the newest query's attention, averaged over all heads of the layer. The newest token itself stays.

    So the heads of a layer keep the same tokens, and cannot share their budgets. A full cache must not give up entries
    by other rules (``when_full="evict"``): the heads would no longer hold the same.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per != "head":
            raise InputError("TOVA scores all heads of a layer alike: per must be head")

    def score(self, held: Held) -> Array:
        """See :meth:`Budgeted.score`."""
        found = attention_received(held, *newest_queries(held, 1))
        # The same tokens lie in the same columns of all heads, since all selections have been the same.
        return jnp.broadcast_to(found.mean(1, keepdims=True), found.shape)

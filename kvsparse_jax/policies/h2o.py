"""H2O (arXiv 2306.14048): heavy hitters, the tokens that received most attention, beside the newest ones."""

from dataclasses import dataclass

from jax import Array

from kvsparse_jax.policies.base import Held
from kvsparse_jax.policies.budgeted import Budgeted, attention_received, register


@register
@dataclass(frozen=True)
class H2O(Budgeted):
    """Score: the attention received so far from all queries, averaged over the group; half the budget is recent tokens.

    The paper's split; ``recent`` sets another.
    """

    recent: int | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.recent is None:
            object.__setattr__(self, "recent", max(self.budget // 2, 1))
        super().__post_init__()

    def score(self, held: Held) -> Array:
        """See :meth:`Budgeted.score`."""
        return held.statistic + attention_received(held, held.q, held.q_positions)

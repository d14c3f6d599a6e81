"""SnapKV (arXiv 2404.14469): the keys of a prompt that its last queries attend to."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from kvsparse_jax.errors import InputError, whole
from kvsparse_jax.policies.base import Held
from kvsparse_jax.policies.budgeted import Budgeted, attention_received, newest_queries, register


@register
@dataclass(frozen=True)
class SnapKV(Budgeted):
    """Score: the attention of the last ``window`` queries of the prompt, smoothed over neighbours by average pooling.

    These queries' own tokens stay, and so does all that is generated, until more is appended: that is a prompt again,
    and the budget is spent anew on all that is held. A single token that is appended counts as a generated one.

    Attributes:
        window: queries that count.
        kernel: tokens per average, odd.
    """

    window: int = 64
    kernel: int = 5

    while_decoding = False

    @property
    def recent(self) -> int:  # type: ignore[override]
        """The queries that count stay."""
        return self.window

    def __post_init__(self) -> None:
        whole("SnapKV window", self.window, 1)
        whole("SnapKV kernel", self.kernel, 1)
        if self.kernel % 2 == 0:
            raise InputError(f"SnapKV kernel must be odd, not {self.kernel}")
        super().__post_init__()

    def score(self, held: Held) -> Array:
        """See :meth:`Budgeted.score`; columns of the cache have no neighbours and are not pooled."""
        total = attention_received(held, *newest_queries(held, self.window)) / self.window
        stored, side = held.stored, self.kernel // 2
        new = jnp.where(held.recent, 0, total)[:, :, stored:]
        sums = lax.reduce_window(
            new, jnp.zeros((), new.dtype), lax.add, (1, 1, self.kernel), (1, 1, 1), ((0, 0), (0, 0), (side, side))
        )
        return jnp.concatenate([total[:, :, :stored], sums / jnp.asarray(self.kernel, sums.dtype)], 2)

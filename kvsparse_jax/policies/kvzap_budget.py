"""KVzap's surrogate with a fixed ratio in place of the threshold, for comparison (arXiv 2601.07891, section 3.3)."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from kvsparse_jax.errors import InputError
from kvsparse_jax.models.config import ModelConfig
from kvsparse_jax.policies.kvzap import WINDOW, KVzap
from kvsparse_jax.policies.prompted import Prompted, register
from kvsparse_jax.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kvsparse_jax.generation.decode import Model


@dataclass(frozen=True)
class KVzapBudget(Prompted):
    """Keeps as many entries of every prompt, the best by the surrogate's scores, and all that comes after it.

    A threshold lets a prompt with little in it shrink more; this is what that is worth. The scores are those of the
    uncompressed prompt, which takes one more pass over it.

    Attributes:
        surrogate: gives the scores; its threshold, window and sinks do not count.
        newest: as the window of :class:`~kvsparse_jax.policies.kvzap.KVzap`.
    """

    sinks: int = 0
    newest: int = WINDOW
    surrogate: KVzap | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.surrogate is None:
            raise InputError("KVzapBudget needs a surrogate (KVzap.load)")

    def check(self, config: ModelConfig) -> None:
        """See :meth:`KVzap.check`."""
        assert self.surrogate is not None
        self.surrogate.check(config)

    def scores(self, model: "Model", tokenizer: Tokenizer | None, ids: Sequence[int]) -> np.ndarray:
        """The surrogate's, of the prompt with its full cache."""
        from kvsparse_jax.cache.base import bucket  # both import the policies
        from kvsparse_jax.whole import full_hidden

        assert self.surrogate is not None
        length = bucket(len(ids))
        # Nothing goes within a window that is the sequence; the gate is the threshold minus the score.
        policy = dataclasses.replace(self.surrogate, threshold=0.0, window=length, sinks=0, prefill="rule")
        padded = np.zeros((1, length), np.int32)
        padded[0, : len(ids)] = ids
        segments = np.where(np.arange(length)[None] < len(ids), 0, -1).astype(np.int32)
        gates = full_hidden(model.params, model.config, policy, jnp.asarray(padded), jnp.asarray(segments))[1]
        return -np.asarray(gates, np.float32)[..., : len(ids)]


register(KVzapBudget, ("params", "surrogate"))

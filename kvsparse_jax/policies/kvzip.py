"""KVzip (arXiv 2505.23416): the oracle itself decides, by asking the model to repeat the prompt. An upper reference."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from kvsparse_jax.errors import InputError, whole
from kvsparse_jax.policies.prompted import Prompted, register
from kvsparse_jax.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kvsparse_jax.generation.decode import Model


@dataclass(frozen=True)
class KVzip(Prompted):
    """Keeps the best entries of a prompt by the oracle's scores, and all that comes after it.

    Scoring a prompt takes one more pass over it and its repetition, so nothing is saved in time; it shows what a
    surrogate can reach. The method shares its budget over the whole model.

    Attributes:
        kind: "kvzip" or "kvzip+".
        chunk: tokens that the model repeats at once.
        prefix: first tokens that are not scored and go first, but for the sinks (a chat template's).
    """

    kind: Literal["kvzip", "kvzip+"] = "kvzip"
    chunk: int = 2048
    prefix: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("KVzip chunk", self.chunk, 1)
        whole("KVzip prefix", self.prefix, 0)
        if self.kind not in ("kvzip", "kvzip+"):
            raise InputError(f"KVzip kind must be one of kvzip, kvzip+, not {self.kind!r}")

    def scores(self, model: "Model", tokenizer: Tokenizer | None, ids: Sequence[int]) -> np.ndarray:
        """See :func:`kvsparse_jax.oracle.scores_in_chunks`."""
        from kvsparse_jax.oracle import Probe, scores_in_chunks  # imports the policies

        if tokenizer is None:
            raise InputError("KVzip asks the model in words, and this model directory has no tokenizer")
        return scores_in_chunks(
            model,
            np.asarray([ids]),
            Probe.of(tokenizer),
            prefix=self.prefix,
            chunk=self.chunk,
            sinks=min(self.sinks, 16),
            kind=self.kind,
        )


register(KVzip)

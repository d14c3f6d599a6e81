"""What an evaluation finds: figures with their standard errors, one result per method and context length."""

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

DENSE = "dense"
EQUAL_MEMORY = "StreamingLLM, equal memory"

Role = Literal["full", "own", "equal_memory", "other"]
"""What a method stands for: the full cache, which all others are compared with; the model's own policy; StreamingLLM
with the memory of the model's own policy; anything else that was asked for."""


@dataclass(frozen=True)
class Estimate:
    """A mean over sequences.

    Attributes:
        mean: the mean.
        stderr: its standard error; None for a single sequence.
    """

    mean: float
    stderr: float | None

    @classmethod
    def of(cls, values: np.ndarray) -> "Estimate":
        """From one value per sequence."""
        error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
        return cls(float(values.mean()), error)

    def __format__(self, spec: str) -> str:
        return f"{self.mean:{spec}}" + ("" if self.stderr is None else f" ± {self.stderr:{spec.lstrip('+')}}")


@dataclass(frozen=True)
class Quality:
    """Distance from the full cache on the same tokens.

    Attributes:
        kl: KL(dense || compressed) in nats per token, mean over all positions: the headline.
        kl_second_half: the same over the second half of every sequence, where eviction has had time to act.
        reverse_kl, reverse_kl_second_half: KL(compressed || dense).
        perplexity_dense, perplexity: of the text, with the full and with the compressed cache.
        perplexity_change_percent: 100 * (perplexity / perplexity_dense - 1).
    """

    kl: Estimate
    kl_second_half: Estimate
    reverse_kl: Estimate
    reverse_kl_second_half: Estimate
    perplexity_dense: float
    perplexity: float
    perplexity_change_percent: Estimate


@dataclass(frozen=True)
class Memory:
    """What the cache keeps, by decisions and by entries. Kept fractions are averaged first, then inverted.

    Bytes are another matter: a real cache has pages and tables, which a generation's
    :class:`kvsparse_jax.cache.report.CacheReport` counts (``cr_physical``).

    Attributes:
        nominal_kept: keys not flagged for eviction / keys.
        nominal_cr: decision compression ratio, 1 / nominal_kept (infinite where every key is flagged).
        entries_kept: entries live at the end of the sequence / tokens seen.
        entries_cr: physical compression ratio in entries, 1 / entries_kept; the window and the model's own sliding
            window count.
        live_per_head: entries that a KV head holds at the end, mean over layers, heads and sequences.
        seen: tokens of a sequence, mean.
    """

    nominal_kept: Estimate
    nominal_cr: float
    entries_kept: Estimate
    entries_cr: float
    live_per_head: float
    seen: float


@dataclass(frozen=True)
class OfKind:
    """The same for one kind of text; see :class:`Quality` and :class:`Memory`."""

    sequences: int
    quality: Quality
    memory: Memory


@dataclass(frozen=True)
class Curve:
    """Means over sequences by position, in up to 32 bins of equal width.

    Attributes:
        position: last position of each bin.
        kl: KL(dense || compressed) of the queries in the bin, nats per token.
        nominal_kept: keys of the bin that are not flagged / keys of the bin.
        live_per_head: entries that a head holds once the bin's last token is seen.
    """

    position: list[int]
    kl: list[float]
    nominal_kept: list[float]
    live_per_head: list[float]


@dataclass(frozen=True)
class Result:
    """One method at one context length.

    Attributes:
        method: its name.
        role: what it stands for.
        policy: its settings.
        context: tokens of a sequence.
        sequences: how many were evaluated.
        quality, memory: over all of them.
        nominal_kept_by_head, entries_kept_by_head: [L][H], mean over sequences.
        by_kind: kind of text -> the same over its sequences.
        curve: by position.
    """

    method: str
    role: Role
    policy: dict[str, Any]
    context: int
    sequences: int
    quality: Quality
    memory: Memory
    nominal_kept_by_head: list[list[float]]
    entries_kept_by_head: list[list[float]]
    by_kind: dict[str, OfKind]
    curve: Curve


@dataclass(frozen=True)
class Retrieval:
    """Passkey retrieval with one method.

    Attributes:
        method: its name.
        role: what it stands for.
        policy: its settings.
        prompts: how many.
        accuracy: share of prompts of whose answer every token is the likeliest one.
        of_dense_percent: 100 * accuracy / accuracy of the full cache; None where that is 0.
        accuracy_by_depth: share by where the number stands, in five equal ranges from the start to the end of the text;
            None where no prompt falls into a range.
        memory: at the end of prompt and answer.
    """

    method: str
    role: Role
    policy: dict[str, Any]
    prompts: int
    accuracy: Estimate
    of_dense_percent: float | None
    accuracy_by_depth: list[float | None]
    memory: Memory


_DEFINITIONS = {
    "kl": "KL(dense || compressed), nats per token, mean over positions; the headline",
    "reverse_kl": "KL(compressed || dense)",
    "second_half": "positions from T // 2 on",
    "dense": "the full cache: same weights, same dtype, same tokens (or those of the reference, if one is named)",
    "stderr": "standard error of the mean over sequences",
    "nominal": "decisions: 1 / mean share of keys not flagged for eviction, whether or not they are gone yet",
    "entries": "memory in entries: 1 / mean of (entries live at the end of the sequence / tokens seen)",
    EQUAL_MEMORY: "as many entries per head as the model's policy holds at the end of the sequence, on average",
}


@dataclass(frozen=True)
class Report:
    """What :func:`evaluate` and :func:`passkey` found.

    Attributes:
        model: where the model came from.
        reference: where the model that it is compared with came from; None: the same weights.
        dtype: of the weights.
        results: one per context length and method, in the order evaluated.
        retrieval: one per method; empty if it was not asked for.
        notes: what a reader has to know, such as that the model has no eviction policy.
        versions: of the software.
    """

    model: str
    reference: str | None
    dtype: str
    results: tuple[Result, ...]
    retrieval: tuple[Retrieval, ...] = ()
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Everything in terms of what JSON holds; figures that are not finite become None."""
        plain = json.loads(json.dumps(dataclasses.asdict(self)), parse_constant=lambda _: None)
        return {"definitions": _DEFINITIONS, **plain}

    def result(self, method: str, context: int) -> Result:
        """The result of a method at a context length; KeyError if there is none."""
        for result in self.results:
            if (result.method, result.context) == (method, context):
                return result
        raise KeyError(f"no result of {method!r} at {context}")

    def table(self) -> str:
        """Markdown: quality and memory, by kind of text, retrieval, and notes."""
        from kvsparse_jax.evaluate import tables  # which knows the results

        return tables.table(self)

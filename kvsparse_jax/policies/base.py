"""What every eviction policy is: who sets ``evict``, and how late it takes effect."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from jax import Array

from kvsparse_jax.models.config import ModelConfig

Prefill = Literal["rule", "dense"]


class LayerInput(NamedTuple):
    """What a policy may look at when it decides, for one layer and a run of T tokens.

    Attributes:
        residual: [B, T, E], the residual stream before the layer's input norm.
        normed: [B, T, E], the attention's input (after the input norm).
        q: [B, T, Hq, D], queries after the family's own q norm, before the rotation.
        positions: [B, T] int32.
        kv_heads: H.
        rms_eps: epsilon of the model's norms.
    """

    residual: Array
    normed: Array
    q: Array
    positions: Array
    kv_heads: int
    rms_eps: float


class Held(NamedTuple):
    """What a policy may look at when it selects, for one layer: N entries, S that the cache holds and then T new ones.

    Attributes:
        q: [B, Hq, T, D], the new tokens' queries after RoPE.
        k: [B, H, N, D], keys after RoPE; NaN or garbage where there is no entry.
        q_positions: [B, T] int32; -1 for a column that is no token.
        k_positions: [B, H, N] int32; NEVER where there is no entry, 0 for what the cache holds (its order is lost, and
            every query sees it).
        recent: [B, H, N] bool, the newest ``recent`` tokens.
        statistic: [B, H, N] float32, what the policy noted about each entry; 0 for new ones.
        layer: int32 scalar.
        scale: multiplies ``<q, k>``.
    """

    q: Array
    k: Array
    q_positions: Array
    k_positions: Array
    recent: Array
    statistic: Array
    layer: Array
    scale: float

    @property
    def stored(self) -> int:
        """S, how many of the columns are what the cache holds."""
        return self.k.shape[2] - self.q.shape[2]


class Selection(NamedTuple):
    """What a policy selects: which of the entries stay [B, H, N] bool, and what it notes about each [B, H, N]."""

    keep: Array
    statistic: Array


class Policy:
    """Base of all policies.

    A policy is a frozen dataclass registered as a pytree: arrays are data, settings are static. Most decide about a
    token when it arrives (:meth:`gate`); one with a budget selects among all that is held (:meth:`select`).

    Attributes:
        window: delay of the eviction in tokens: a flagged key is visible to this many queries after its own.
        shift: token ``k + shift`` decides about key ``k``; 0 or 1.
        params: learned arrays, a pytree of [L, ...] that the decoder scans together with its layers, or None.
        prefill: "rule": evicted keys are invisible within a prompt too; "dense": the tokens of a prompt see all of it,
            and what is evicted leaves when the prompt ends. (In a session the newest token has not entered yet: it
            comes with the first step, after that.)
        selects: it selects instead of deciding on arrival, and at once: ``window`` and ``shift`` then mean nothing.
        while_decoding: tokens that are generated are compressed, too; else only prompts are, and these stay.
        sinks: first tokens that a policy that selects always keeps.
        prepares: it has to see a prompt before the prompt enters, see :meth:`prepare`.
        recent: for policies that select, how many of the newest tokens they ask to be told of.
    """

    window: int
    shift: int
    params: Any
    prefill: Prefill = "rule"
    selects: bool = False
    while_decoding: bool = True
    sinks: int = 0
    prepares: bool = False
    recent: int = 1

    def check(self, config: ModelConfig) -> None:
        """Raises InputError when the policy was made for a model of another shape."""

    def prepare(self, model: Any, tokenizer: Any, rows: Sequence[Sequence[int]]) -> "Policy":
        """The policy for prompts ``rows`` of token ids, one per row of the batch; asked of those that ``prepares``.

        A row without ids goes on with what was prepared for it before.
        """
        return self

    def of_rows(self, rows: Sequence[int]) -> "Policy":
        """The policy for a batch whose rows are copies of ``rows`` of this one's."""
        return self

    @property
    def holds(self) -> bool:
        """A prompt's tokens see all of it, and what was decided about them takes effect when it ends."""
        return self.prefill == "dense" and not self.selects

    def gate(self, params: Any, layer: LayerInput) -> Array | None:
        """Decision logits [B, H, T] as emitted by each token (positive: evict), or None to keep everything.

        Args:
            params: this layer's slice of ``params``.
            layer: what can be looked at.
        """
        raise NotImplementedError

    def select(self, held: Held) -> Selection:
        """What stays of N entries, after a prompt or a step; asked only of policies that ``selects``."""
        raise NotImplementedError

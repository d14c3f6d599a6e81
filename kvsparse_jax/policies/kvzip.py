"""KVzip (arXiv 2505.23416): the oracle itself decides, by asking the model to repeat the prompt. An upper reference."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvsparse_jax.errors import InputError, whole
from kvsparse_jax.policies.base import LayerInput, Policy
from kvsparse_jax.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kvsparse_jax.generation.decode import Model


@dataclass(frozen=True)
class KVzip(Policy):
    """Keeps the best entries of a prompt by the oracle's scores, and all that comes after it.

    Scoring a prompt takes one more pass over it and its repetition, so nothing is saved in time; it shows what a
    surrogate can reach. Only the first thing that enters a session is a prompt in this sense.

    Attributes:
        params: which tokens go [L, B, H, T] bool, once a prompt was scored (:meth:`prepare`); None before.
        budget: entries per head, on average over what ``per`` says.
        kind: "kvzip" or "kvzip+".
        per: the budgets are shared by the whole "model" (the method's choice), by a "layer", or by none ("head").
        sinks: first tokens that always stay.
        chunk: tokens that the model repeats at once.
        prefix: first tokens that are not scored and go first, but for the sinks (a chat template's).
    """

    params: Any = None
    budget: int = 0
    kind: Literal["kvzip", "kvzip+"] = "kvzip"
    per: Literal["model", "layer", "head"] = "model"
    sinks: int = 4
    chunk: int = 2048
    prefix: int = 0

    window = 0
    shift = 0
    prefill = "dense"
    prepares = True

    def __post_init__(self) -> None:
        whole("KVzip budget", self.budget, 1)
        whole("KVzip sinks", self.sinks, 0)
        whole("KVzip chunk", self.chunk, 1)
        whole("KVzip prefix", self.prefix, 0)
        for name, value, accepted in (
            ("kind", self.kind, ("kvzip", "kvzip+")),
            ("per", self.per, ("model", "layer", "head")),
        ):
            if value not in accepted:
                raise InputError(f"KVzip {name} must be one of {', '.join(accepted)}, not {value!r}")
        if self.budget < self.sinks:
            raise InputError(f"KVzip needs a budget of at least its sinks, not {self.budget} < {self.sinks}")

    def prepare(self, model: "Model", tokenizer: Tokenizer | None, rows: Sequence[Sequence[int]]) -> "KVzip":
        """The policy for these prompts: each is scored, and what goes is decided."""
        from kvsparse_jax.cache.base import bucket
        from kvsparse_jax.oracle import Probe, scores_in_chunks  # both import the policies

        if tokenizer is None:
            raise InputError("KVzip asks the model in words, and this model directory has no tokenizer")
        probe = Probe.of(tokenizer)
        old = np.zeros((1, 1, 1, 0), bool) if self.params is None else np.asarray(self.params)
        longest = bucket(max(1, old.shape[3], *(len(row) for row in rows)))  # so that few programs are compiled
        config = model.config
        gone = np.zeros((config.layers, len(rows), config.kv_heads, longest), bool)
        if self.params is not None:
            gone[..., : old.shape[3]] = old
        for row, ids in enumerate(rows):
            if ids:
                gone[:, row] = False
            if len(ids) <= self.budget:
                continue
            scores = scores_in_chunks(
                model,
                np.asarray([ids]),
                probe,
                prefix=self.prefix,
                chunk=self.chunk,
                sinks=min(self.sinks, 16),
                kind=self.kind,
            )
            layers = list(config.evicting)
            gone[layers, row, :, : len(ids)] = ~best(scores[layers, 0], self.budget, self.per, self.sinks)
        return dataclasses.replace(self, params=jnp.asarray(gone))

    def of_rows(self, rows: Sequence[int]) -> "KVzip":
        """With the decisions of these rows."""
        if self.params is None:
            return self
        return dataclasses.replace(self, params=self.params[:, jnp.asarray(rows, jnp.int32)])

    def gate(self, params: Any, layer: LayerInput) -> Array | None:
        """Positive for the tokens of the prompt that go."""
        if params is None:  # nothing was scored yet: only the shape counts
            shape = (layer.positions.shape[0], layer.kv_heads, layer.positions.shape[1])
            return jnp.full(shape, -1, jnp.float32)
        length = params.shape[2]
        at = jnp.clip(layer.positions, 0, length - 1)[:, None]
        flagged = jnp.take_along_axis(params, jnp.broadcast_to(at, (*params.shape[:2], at.shape[2])), 2)
        return jnp.where(flagged & (layer.positions < length)[:, None], 1.0, -1.0).astype(jnp.float32)


def best(scores: np.ndarray, budget: int, per: str, sinks: int) -> np.ndarray:
    """Which entries stay [L, H, T], of scores [L, H, T]: ``budget`` per head, on average over what ``per`` says."""
    layers, heads, length = scores.shape
    worth = scores.astype(np.float64).copy()
    worth[..., :sinks] = np.inf
    flat = worth.reshape({"model": 1, "layer": layers, "head": layers * heads}[per], -1)
    count = budget * (flat.shape[1] // length)
    order = np.argsort(-flat, -1, kind="stable")[:, :count]
    stay = np.zeros(flat.shape, bool)
    np.put_along_axis(stay, order, True, -1)
    return stay.reshape(scores.shape)


jax.tree_util.register_dataclass(
    KVzip,
    data_fields=["params"],
    meta_fields=[f.name for f in dataclasses.fields(KVzip) if f.name != "params"],
)

"""What policies have in common that score a prompt as a whole and keep a budget of it."""

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
class Prompted(Policy):
    """Keeps the best entries of a prompt, by scores of the subclass, and all that comes after it.

    Only the first thing that enters a session is a prompt in this sense.

    Attributes:
        params: which tokens go [L, B, H, T] bool, once a prompt was scored (:meth:`prepare`); None before.
        budget: entries per head, on average over what ``per`` says.
        per: the budgets are shared by the whole "model", by a "layer", or by none ("head").
        sinks: first tokens that always stay.
        newest: last tokens of the prompt that always stay.
    """

    params: Any = None
    budget: int = 0
    per: Literal["model", "layer", "head"] = "model"
    sinks: int = 4
    newest: int = 0

    window = 0
    shift = 0
    prefill = "dense"
    prepares = True

    def __post_init__(self) -> None:
        name = type(self).__name__
        whole(f"{name} budget", self.budget, 1)
        whole(f"{name} sinks", self.sinks, 0)
        whole(f"{name} newest", self.newest, 0)
        if self.per not in ("model", "layer", "head"):
            raise InputError(f"{name} per must be one of model, layer, head, not {self.per!r}")
        if self.budget < self.sinks + self.newest:
            what = f"{self.sinks}" if not self.newest else f"{self.sinks} + {self.newest}"
            always = "sinks" if not self.newest else "sinks and newest tokens"
            raise InputError(f"{name} needs a budget of at least its {always}, not {self.budget} < {what}")

    def scores(self, model: "Model", tokenizer: Tokenizer | None, ids: Sequence[int]) -> np.ndarray:
        """What each entry of a prompt is worth [L, 1, H, T]; higher is better."""
        raise NotImplementedError

    def prepare(self, model: "Model", tokenizer: Tokenizer | None, rows: Sequence[Sequence[int]]) -> "Prompted":
        """The policy for these prompts: each is scored, and what goes is decided."""
        from kvsparse_jax.cache.base import bucket  # imports the policies

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
            worth = self.scores(model, tokenizer, ids)
            layers = list(config.evicting)
            stay = best(worth[layers, 0], self.budget, self.per, self.sinks, self.newest)
            gone[layers, row, :, : len(ids)] = ~stay
        return dataclasses.replace(self, params=jnp.asarray(gone))

    def of_rows(self, rows: Sequence[int]) -> "Prompted":
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


def best(scores: np.ndarray, budget: int, per: str, sinks: int, newest: int = 0) -> np.ndarray:
    """Which entries stay [L, H, T], of scores [L, H, T]: ``budget`` per head, on average over what ``per`` says."""
    layers, heads, length = scores.shape
    worth = scores.astype(np.float64).copy()
    worth[..., :sinks] = np.inf
    worth[..., length - newest :] = np.inf
    flat = worth.reshape({"model": 1, "layer": layers, "head": layers * heads}[per], -1)
    count = budget * (flat.shape[1] // length)
    order = np.argsort(-flat, -1, kind="stable")[:, :count]
    stay = np.zeros(flat.shape, bool)
    np.put_along_axis(stay, order, True, -1)
    return stay.reshape(scores.shape)


def register[P: Prompted](kind: type[P], data: tuple[str, ...] = ("params",)) -> type[P]:
    """Makes a policy a pytree, whose arrays are in the fields ``data``."""
    names = [field.name for field in dataclasses.fields(kind)]
    return jax.tree_util.register_dataclass(
        kind, data_fields=list(data), meta_fields=[name for name in names if name not in data]
    )

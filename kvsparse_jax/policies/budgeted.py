"""What policies with a budget have in common: each scores what a head holds, and the best stay."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels.received.api import received
from kernels.visibility import NEVER
from kvsparse_jax.errors import InputError, whole
from kvsparse_jax.policies.base import Held, LayerInput, Policy, Selection

FLOOR = 0.2
"""Share of the budget that a head keeps whatever the others' scores, with one budget per layer (AdaKV, arXiv
2407.11550)."""


@dataclass(frozen=True)
class Budgeted(Policy):
    """Keeps the ``budget`` best entries of each head, by a score of the subclass; higher is better.

    The tokens of a prompt see all of it, and the selection follows (as in the methods' own code, and in kvpress); a
    prompt that is prefilled in chunks is selected from after each chunk. Of a sequence that generation continues, the
    last token enters with the first step, so the selection is among the tokens before it.

    Attributes:
        budget: entries per head.
        sinks: first tokens that always stay.
        per: "head", or "layer": the heads of a layer share their budgets, by score (AdaKV).
    """

    budget: int
    sinks: int = 0
    per: Literal["head", "layer"] = "head"

    window = 0
    shift = 0
    params = None
    prefill = "dense"
    selects = True

    def __post_init__(self) -> None:
        name = type(self).__name__
        whole(f"{name} budget", self.budget, 1)
        whole(f"{name} sinks", self.sinks, 0)
        if self.per not in ("head", "layer"):
            raise InputError(f"{name} per must be head or layer, not {self.per!r}")
        if self.budget < self.sinks + self.recent:
            raise InputError(
                f"{name} needs a budget of at least sinks + recent tokens, not {self.budget} < "
                f"{self.sinks} + {self.recent}"
            )

    def gate(self, params: Any, layer: LayerInput) -> Array | None:
        """None: nothing is decided on arrival."""
        return None

    def score(self, held: Held) -> Array:
        """Score of each entry [B, H, N] float32; what it is for an entry that is not there does not matter."""
        raise NotImplementedError

    def select(self, held: Held) -> Selection:
        """The newest tokens, the sinks and the best of the rest. Sinks are noted by an infinite statistic."""
        there = held.k_positions != NEVER
        stored, step = held.stored, held.q.shape[2] == 1
        new_sink = (held.k_positions[:, :, stored:] < self.sinks) & there[:, :, stored:]
        old_sink = jnp.isposinf(held.statistic[:, :, :stored])
        score = self.score(held).astype(jnp.float32)
        statistic = jnp.where(jnp.concatenate([old_sink, new_sink], 2), jnp.inf, score)
        # A step's own token is in use when the selection takes effect: it stays until the next one.
        new = jnp.arange(there.shape[2]) >= (stored if step else there.shape[2])
        worth = jnp.where(held.recent | new[None, None], jnp.inf, statistic)
        worth = jnp.where(there, worth, -jnp.inf)
        return Selection(there & self._best(worth), statistic)

    def _best(self, worth: Array) -> Array:
        """Which entries [B, H, N] the budget is spent on."""
        batch, heads, count = worth.shape
        if self.per == "head":
            return largest(worth, self.budget)
        floor = max(1, math.floor(self.budget * FLOOR))
        worth = jnp.where(largest(worth, floor) & ~jnp.isneginf(worth), jnp.inf, worth)
        return largest(worth.reshape(batch, heads * count), self.budget * heads).reshape(worth.shape)


def largest(x: Array, count: int) -> Array:
    """Which elements of the last axis are the ``count`` largest, bool; of equal ones the first."""
    if count >= x.shape[-1]:
        return jnp.ones(x.shape, bool)
    least = lax.top_k(x, count)[0][..., -1:]
    more, equal = x > least, x == least
    left = count - jnp.sum(more, -1, keepdims=True, dtype=jnp.int32)
    return more | (equal & (jnp.cumsum(equal, -1, dtype=jnp.int32) <= left))


def newest_queries(held: Held, count: int) -> tuple[Array, Array]:
    """The newest ``count`` queries [B, Hq, count, D] of each row and their positions [B, count] (-1: there are fewer).

    A row without a new token has none.
    """
    length = held.q.shape[2]
    last = jnp.argmax(held.q_positions, 1).astype(jnp.int32)
    column = last[:, None] - jnp.arange(count - 1, -1, -1, dtype=jnp.int32)[None]
    at = jnp.take_along_axis(held.q_positions, jnp.clip(column, 0, length - 1), 1)
    at = jnp.where(column >= 0, at, -1)
    return jnp.take_along_axis(held.q, jnp.clip(column, 0, length - 1)[:, None, :, None], 2), at


def attention_received(held: Held, q: Array, q_positions: Array) -> Array:
    """Attention that each entry receives from queries, summed over them and averaged over its group [B, H, N]."""
    found = received(q, held.k, q_positions, held.k_positions, scale=held.scale)
    batch, heads, count = found.shape
    kv_heads = held.k.shape[1]
    return found.reshape(batch, kv_heads, heads // kv_heads, count).mean(2).astype(jnp.float32)


def register[P: Budgeted](kind: type[P]) -> type[P]:
    """Makes a policy a pytree; a class decorator."""
    return jax.tree_util.register_dataclass(
        kind, data_fields=[], meta_fields=[field.name for field in dataclasses.fields(kind)]
    )

"""Who runs, who waits, and what the next step does: plain Python on counts of pages, no arrays of the device.

Order is by priority, then by age. Admission is strict (nobody overtakes the first that waits, so nobody starves) and
counts pages as they are expected to be needed, by the share of old tokens that was measured to stay. That is only a
guess: a step itself is bounded by what it can need at most. From the oldest sequence to the youngest each is given what
its next tokens may need; when that is not there, the youngest is preempted, and when there is none younger, the
sequence waits for a step. So the oldest always goes on.

Pages are counted per shard of the KV heads, [shards], each of which has a pool of its own on a mesh.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvsparse_jax.engine.requests import EngineOptions, Request, pages_for, per_shard
from kvsparse_jax.generation.answer import Answer


@dataclass(eq=False)
class Running:
    """One choice of a request.

    Attributes:
        number: of the request, ascending.
        index: of the choice.
        request: what was asked.
        tokens: the sequence so far; those from ``fed`` on are not in the cache yet.
        goal: tokens to prefill; the one after them is decoded.
        answer: what was generated.
        deadline: on the engine's clock, or None.
        arrived: when, on the engine's clock.
        row: of the cache; None: it waits.
        parcel: its cache in host memory while it waits; None: it starts from nothing.
        lengths: [L, H], entries that its heads hold (also in the parcel).
    """

    number: int
    index: int
    request: Request
    tokens: list[int]
    goal: int
    answer: Answer
    lengths: np.ndarray
    deadline: float | None
    arrived: float
    fed: int = 0
    row: int | None = None
    parcel: Any = None
    announced: bool = False  # its prompt is in, and whoever depends on that knows
    scored: list[Any] = field(default_factory=list)
    kv_read: float = 0.0
    kv_peak: float = 0.0
    started: float | None = None  # time of its first token

    @property
    def key(self) -> tuple[int, int, int]:
        """Its place in the order."""
        return -self.request.priority, self.number, self.index

    @property
    def prefilling(self) -> bool:
        """Some of its prompt is not in the cache yet."""
        return self.fed < self.goal

    @property
    def total(self) -> int:
        """Tokens that it may have at the end."""
        return len(self.tokens) + self.answer.left


@dataclass
class Plan:
    """What a step does.

    Attributes:
        preempt: give their rows up, youngest first.
        prefill: with the number of tokens each.
        decode: take steps.
        steps: how many.
    """

    preempt: list[Running] = field(default_factory=list)
    prefill: list[tuple[Running, int]] = field(default_factory=list)
    decode: list[Running] = field(default_factory=list)
    steps: int = 1


class Scheduler:
    """The queue and the rows."""

    def __init__(self, options: EngineOptions, shards: int, always_kept: int | None):
        """Args:
        options: of the engine.
        shards: of the KV heads.
        always_kept: newest tokens that always stay; None: all do.
        """
        self.options, self.shards, self.always_kept = options, shards, always_kept
        self.waiting: list[Running] = []
        self.running: list[Running] = []
        self.kept = 1.0  # measured: share of the tokens beyond the newest that stay
        self._measured = 0

    def queue(self, one: Running) -> None:
        """Puts a sequence into its place in the queue."""
        self.waiting.append(one)
        self.waiting.sort(key=lambda x: x.key)

    def measure(self, one: Running) -> None:
        """Learns from a sequence how much stays."""
        if self.always_kept is None or one.fed <= 2 * self.always_kept:
            return
        beyond = float(one.lengths.mean()) - self.always_kept
        share = min(max(beyond / (one.fed - self.always_kept), 0.0), 1.0)
        self._measured += 1
        self.kept += (share - self.kept) / min(self._measured, 32)

    def expected(self, one: Running, tokens: int) -> int:
        """Pages of a shard that a sequence is expected to hold at ``tokens`` tokens."""
        page, heads = self.options.page_size, one.lengths.size // self.shards
        newest = tokens if self.always_kept is None else min(tokens, self.always_kept)
        held = newest + self.kept * (tokens - newest)
        # The last page of a head is half full on average.
        return heads * min(-(-tokens // page), int(held / page + 0.5) + 1)

    def _wanted(self, one: Running) -> np.ndarray:
        """Pages beyond those it holds that admission counts for a sequence."""
        tokens = len(one.tokens) + int(self.options.reserve * one.answer.left)
        return np.maximum(self.expected(one, tokens) - self.held(one), 0)

    def held(self, one: Running) -> np.ndarray:
        """Pages that a sequence holds or, in host memory, would."""
        return per_shard(-(-one.lengths // self.options.page_size), self.shards)

    def most(self, one: Running, tokens: int) -> np.ndarray:
        """Pages beyond those that ``tokens`` more may take."""
        return pages_for(one.lengths, tokens, self.options.page_size, self.shards)

    def admit(self, free: np.ndarray) -> list[Running]:
        """Takes those that join now, with ``free`` pages, out of the queue."""
        joined: list[Running] = []
        left = free - sum(self._wanted(one) for one in self.running)
        # What the running may need in the next step at most: a sequence that comes back must not push them out again.
        sure = free - sum(self.most(one, 1) for one in self.running)
        while self.waiting and len(self.running) + len(joined) < self.options.slots:
            one = self.waiting[0]
            held = self.held(one)
            cost, least = held + self._wanted(one), held + self.most(one, 1)
            alone = not self.running and not joined
            if np.any(held > sure) or (not alone and np.any((cost > left) | (least > sure))):
                break
            left, sure = left - cost, sure - least
            joined.append(self.waiting.pop(0))
        return joined

    def plan(self, free: np.ndarray) -> Plan:
        """The next step, with ``free`` pages. A plan of nothing at all: the oldest cannot go on."""
        chunk = self.options.prefill_chunk
        plan = Plan()
        order = sorted(self.running, key=lambda x: x.key)
        position = 0
        budget = chunk
        while position < len(order):
            one = order[position]
            least = self.most(one, 1)
            while np.any(least > free) and len(order) > position + 1:
                youngest = order.pop()
                free = free + self.held(youngest)
                plan.preempt.append(youngest)
            position += 1
            if np.any(least > free):
                continue
            if not one.prefilling:
                plan.decode.append(one)
                free = free - least
            elif budget > 0:
                tokens = min(budget, one.goal - one.fed)
                while np.any(self.most(one, tokens) > free):
                    tokens = (tokens + 1) // 2
                plan.prefill.append((one, tokens))
                budget -= tokens
                free = free - self.most(one, tokens)
        if plan.decode and not plan.prefill:
            plan.steps = self._steps(plan.decode, free)
        return plan

    def _steps(self, decode: list[Running], free: np.ndarray) -> int:
        """Steps that may be taken at a time when ``free`` pages are left beside those of the first step."""
        left = [one.answer.left for one in decode]
        # Someone who waits gets the row of the first that ends at once.
        steps = min(self.options.burst, min(left) if self.waiting else max(left))
        if any(one.request.session is not None and one.request.sampling.stop for one in decode):
            return 1  # the cache of a session ends where its text does

        def more(steps: int) -> np.ndarray:
            pairs = zip(decode, left, strict=True)
            return np.sum([self.most(x, min(steps, n)) - self.most(x, 1) for x, n in pairs], 0)

        while steps > 1 and np.any(more(steps) > free):
            steps //= 2
        return max(steps, 1)

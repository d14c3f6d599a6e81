"""The serving engine: requests join and leave between steps of one batch on one pool of pages."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import jax.numpy as jnp
import numpy as np

from kvsparse_jax.engine.requests import (
    MOST_STOPS,
    BusyError,
    EndReason,
    EngineOptions,
    Logprob,
    Piece,
    Request,
    Usage,
    pages_for,
)
from kvsparse_jax.engine.runner import NOTHING, STOPPED, Parcel, Runner
from kvsparse_jax.engine.scheduler import Running, Scheduler
from kvsparse_jax.errors import InputError
from kvsparse_jax.generation.answer import Answer, FinishReason
from kvsparse_jax.generation.decode import Model, Sampler
from kvsparse_jax.sampling import sampling
from kvsparse_jax.tokenizer import Tokenizer


@dataclass
class Histogram:
    """Counts of seconds in buckets; ``counts`` has one more than ``bounds``."""

    bounds: tuple[float, ...] = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
    counts: list[int] = field(default_factory=lambda: [0] * 14)
    total: float = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Counts a measurement."""
        self.counts[int(np.searchsorted(self.bounds, seconds))] += times
        self.total += seconds * times


@dataclass
class Metrics:
    """Counters since the engine was made; the last two of steps that only decode, in calls of the device and in all."""

    requests: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    swapped_bytes: int = 0
    steps: int = 0
    decode_steps: int = 0
    most_running: int = 0
    runner_seconds: float = 0.0
    step_seconds: float = 0.0
    first_token: Histogram = field(default_factory=Histogram)
    per_token: Histogram = field(default_factory=Histogram)


@dataclass
class _Session:
    parcel: Parcel
    tokens: list[int]
    fed: int


class Engine:
    """Continuous batching over one pool of compressed pages. Not thread-safe: one thread submits, steps and cancels.

    Preempted sequences, forks and idle sessions are one mechanism: the pages of a sequence are copied to host memory as
    they are and later into free pages, so what goes on is exactly what was, whatever the policy.

    Example::

        engine = lm.engine(EngineOptions(pool_bytes=1 << 30))
        number = engine.submit(Request([1, 2, 3], max_new_tokens=100))
        while engine.busy:
            for piece in engine.step():
                print(piece.text)
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None = None,
        options: EngineOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Raises InputError for a policy or a pool that cannot be served."""
        self.options = EngineOptions() if options is None else options
        self.runner = Runner(model, self.options)
        self.tokenizer, self.clock = tokenizer, clock
        spec = self.runner.spec
        kept = None if spec.window is None else spec.always_kept
        self.scheduler = Scheduler(self.options, self.runner.cache.shards, kept)
        self.metrics = Metrics()
        self._eos = {*model.config.eos_token_ids, *(() if tokenizer is None else tokenizer.eos_token_ids)}
        self._numbers = itertools.count()
        self._rows: list[Running | None] = [None] * self.options.slots
        self._cancelled: set[int] = set()
        self._unborn: dict[int, list[Running]] = {}  # other choices of requests whose prompt is being taken in
        self._sessions: dict[str, _Session] = {}  # longest idle first
        self._in_use: set[str] = set()
        self._sampler: tuple[list[Running | None], Sampler] | None = None

    @property
    def busy(self) -> bool:
        """Something runs or waits."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    @property
    def sessions(self) -> list[str]:
        """Names of the idle sessions, longest idle first."""
        return list(self._sessions)

    def submit(self, request: Request) -> int:
        """Queues a request; gives its number.

        Raises:
            InputError: it is out of range, longer than a sequence may be, or sure to outgrow the pool.
            BusyError: too many wait, or its session is in use.
        """
        runner, config = self.runner, self.runner.model.config
        request.check(config.vocab_size, sorted(self._eos), self.tokenizer is not None, self.options.max_choices)
        before = self._sessions.get(request.session) if request.session is not None else None
        if request.session in self._in_use:
            raise BusyError(f"session {request.session!r} is answering another request")
        tokens = [*([] if before is None else before.tokens), *(int(x) for x in request.prompt)]
        if not tokens:
            raise InputError("the prompt is empty: give at least one token")
        if before is not None and before.fed >= len(tokens):
            raise InputError("the session's last answer ended with a stop token: append something")
        if len(tokens) > runner.max_tokens:
            raise InputError(f"the prompt has {len(tokens)} tokens, more than the {runner.max_tokens} of a sequence")
        if request.max_new_tokens == 0 and request.n > 1:
            raise InputError("n above 1 needs max_new_tokens of at least 1")
        room = runner.max_tokens - len(tokens)
        shape = (runner.spec.layers, runner.spec.kv_heads)
        if runner.spec.window is None and not runner.spec.local:
            most = len(tokens) - 1 + min(request.max_new_tokens, room)
            if pages_for(np.zeros(shape, np.int32), most, self.options.page_size)[0] > runner.pages:
                raise InputError(f"{most} tokens do not fit into the pool of {runner.pages} pages")
        if len(self.scheduler.waiting) >= self.options.max_waiting:
            raise BusyError(f"{self.options.max_waiting} requests are waiting already")
        number, now = next(self._numbers), self.clock()
        if request.session is not None:
            self._in_use.add(request.session)
            self._sessions.pop(request.session, None)
        at_limit: FinishReason = "length" if request.max_new_tokens <= room else "context"
        choices = [
            Running(
                number=number,
                index=index,
                request=request,
                tokens=list(tokens),
                goal=len(tokens) - 1,
                answer=Answer(self.tokenizer, request.sampling.stop, min(request.max_new_tokens, room), at_limit),
                lengths=np.zeros(shape, np.int32) if before is None else np.asarray(before.parcel.head.lengths),
                deadline=None if request.timeout is None else now + request.timeout,
                arrived=now,
                fed=0 if before is None else before.fed,
                parcel=None if before is None else before.parcel,
            )
            for index in range(request.n)
        ]
        self.metrics.requests += 1
        self.metrics.prompt_tokens += len(request.prompt)
        self.scheduler.queue(choices[0])
        if request.n > 1:
            self._unborn[number] = choices[1:]
        return number

    def cancel(self, number: int) -> None:
        """Ends a request before the next step; one that has ended already stays as it is."""
        self._cancelled.add(number)

    def step(self) -> list[Piece]:
        """Does what is next: ends what was cancelled, admits, takes in a chunk of prompts, decodes. Gives what came."""
        began, before = time.perf_counter(), self.metrics.runner_seconds
        out: list[Piece] = []
        self._end_early(out)
        for one in self.scheduler.admit(self.runner.room):
            self._join(one, out)
        plan = self.scheduler.plan(self.runner.room)
        for one in plan.preempt:
            self._preempt(one)
        for one, tokens in plan.prefill:
            self._take_in(one, tokens, out)
        if plan.decode:
            self._decode(plan.decode, plan.steps, out)
        if self.scheduler.running and not (plan.prefill or plan.decode or plan.preempt):
            self._end(min(self.scheduler.running, key=lambda x: x.key), "capacity", out)
        gone = [row for row, one in enumerate(self._rows) if one is not None and one.row is None]
        if gone:
            self._run(self.runner.release, gone)
            for row in gone:
                self._rows[row] = None
        self.metrics.steps += 1
        if plan.decode and not plan.prefill:
            self.metrics.step_seconds += time.perf_counter() - began
        else:
            self.metrics.runner_seconds = before
        return out

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls the runner and takes the time."""
        began = time.perf_counter()
        result = function(*args)
        self.metrics.runner_seconds += time.perf_counter() - began
        return result

    def _end_early(self, out: list[Piece]) -> None:
        now = self.clock()
        every = [*self.scheduler.running, *self.scheduler.waiting, *itertools.chain(*self._unborn.values())]
        for one in every:
            if one.number in self._cancelled:
                self._end(one, "cancelled", out)
            elif one.deadline is not None and now >= one.deadline:
                self._end(one, "deadline", out)
        self._cancelled.clear()
        freed = [row for row, one in enumerate(self._rows) if one is not None and one.row is None]
        if freed:
            self._run(self.runner.release, freed)
            for row in freed:
                self._rows[row] = None

    def _join(self, one: Running, out: list[Piece]) -> None:
        one.row = self._rows.index(None)
        self._rows[one.row] = one
        self.scheduler.running.append(one)
        self.metrics.most_running = max(self.metrics.most_running, len(self.scheduler.running))
        if one.parcel is not None:
            self.metrics.swapped_bytes += one.parcel.nbytes
            self._run(self.runner.restore, one.row, one.parcel)
            one.parcel = None
        if not one.prefilling:
            self._prefilled(one, out)

    def _leave(self, one: Running) -> None:
        """Gives up the row; it is emptied at the step's end, or at once by the caller."""
        one.row = None
        self.scheduler.running.remove(one)

    def _preempt(self, one: Running) -> None:
        row = one.row
        assert row is not None
        if one.fed:
            one.parcel = self._run(self.runner.save, row)
            self.metrics.swapped_bytes += one.parcel.nbytes
        self._leave(one)
        self._run(self.runner.release, [row])
        self._rows[row] = None
        self.scheduler.queue(one)
        self.metrics.preemptions += 1

    def _take_in(self, one: Running, count: int, out: list[Piece]) -> None:
        """Stores the next tokens of a prompt."""
        assert one.row is not None
        chunk = one.tokens[one.fed : one.fed + count]
        asked = one.request.prompt_logprobs
        targets = None if asked is None else one.tokens[one.fed + 1 : one.fed + 1 + count]
        hold = one.goal - 1 if self.runner.model.policy.holds else None
        scores = self._run(self.runner.prefill, one.row, chunk, targets, hold)
        if scores is not None:
            one.scored += [_logprob(scores, i, asked) for i in range(count)]
        one.fed += count
        self._lengths()
        one.kv_peak = max(one.kv_peak, float(one.lengths.mean()))  # decoding never shrinks a head, so this is all
        if not one.prefilling:
            if hold is not None:
                self._run(self.runner.sweep, one.row)
                self._lengths()
            self.scheduler.measure(one)
            self._prefilled(one, out)

    def _prefilled(self, one: Running, out: list[Piece]) -> None:
        """Starts the other choices of the request, hands out the prompt's scores, and ends what generates nothing."""
        others = self._unborn.pop(one.number, [])
        if others:
            self._lengths()
            parcel = self._run(self.runner.save, one.row) if one.fed else None
            for other in others:
                other.parcel, other.fed, other.lengths, other.kv_peak = parcel, one.fed, one.lengths, one.kv_peak
                self.scheduler.queue(other)
        if one.request.prompt_logprobs is not None and not one.announced and one.index == 0:
            out.append(Piece(one.number, one.index, prompt_logprobs=tuple(one.scored)))
        one.announced = True
        if one.answer.left == 0:
            one.answer.end(one.answer.at_limit)
            self._end(one, one.answer.at_limit, out)

    def _decode(self, rows: list[Running], steps: int, out: list[Piece]) -> None:
        rows = [one for one in rows if one.row is not None]
        slots = self.options.slots
        token, left = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
        for one in rows:
            assert one.row is not None
            token[one.row], left[one.row] = one.tokens[one.fed], one.answer.left
        present = None
        if any(one.request.sampling.repetition_penalty != 1 for one in rows):
            present = np.zeros((slots, self.runner.model.config.vocab_size), bool)
            for one in rows:
                present[one.row, one.tokens] = True
        score = any(one.request.sampling.logprobs is not None for one in rows)
        began = time.perf_counter()
        emitted, read, scores = self._run(self.runner.decode, self._sampling(), token, left, present, steps, score)
        now = self.clock()
        self._lengths()
        taken = int((emitted != NOTHING).any(0).sum())
        self.metrics.decode_steps += taken
        each = (time.perf_counter() - began) / max(taken, 1)
        for one in rows:
            one.kv_read += float(read[one.row])
            self._emitted(one, emitted[one.row], scores, now, each, out)

    def _emitted(
        self, one: Running, emitted: np.ndarray, scores: Any, now: float, each: float, out: list[Piece]
    ) -> None:
        """Takes what the device emitted for a row."""
        new, text, logprobs = [], "", []
        asked, row, answer = one.request.sampling.logprobs, one.row, one.answer
        if one.started is None:
            one.started = now
            self.metrics.first_token.add(now - one.arrived)
        for i, token in enumerate(emitted.tolist()):
            if token == NOTHING or answer.reason is not None:
                break
            one.fed += 1
            if token == STOPPED:
                text += answer.end("stop")
                break
            text += answer.push(token)
            one.tokens.append(token)
            new.append(token)
            if asked is not None:
                logprobs.append(_logprob(tuple(x[row] for x in scores), i, asked))
        self.metrics.generated_tokens += len(new)
        self.metrics.per_token.add(each, len(new))
        if answer.reason is None:
            if new:
                out.append(Piece(one.number, one.index, tuple(new), text, tuple(logprobs)))
            return
        self.scheduler.measure(one)
        self._end(one, answer.reason, out, tuple(new), text, tuple(logprobs))

    def _end(
        self,
        one: Running,
        reason: EndReason,
        out: list[Piece],
        tokens: tuple[int, ...] = (),
        text: str = "",
        logprobs: tuple[Logprob, ...] = (),
    ) -> None:
        """Ends a choice: keeps its session, frees its pages at the step's end."""
        if one.answer.reason is None:  # not by itself
            text += one.answer.end(cast(FinishReason, reason))
            # A prompt that was not taken in yet is not shared any more: the next choice starts from nothing.
            others = self._unborn.pop(one.number, [])
            if one in others:
                self._unborn[one.number] = [other for other in others if other is not one]
            elif others:
                self.scheduler.queue(others[0])
                self._unborn[one.number] = others[1:]
        name = one.request.session
        if name is not None:
            self._in_use.discard(name)
            parcel = one.parcel
            if one.row is not None and one.fed:
                parcel = self._run(self.runner.save, one.row)
            if parcel is not None:
                self._sessions[name] = _Session(parcel, one.tokens, one.fed)
                while sum(x.parcel.nbytes for x in self._sessions.values()) > self.options.session_bytes:
                    self._sessions.pop(next(iter(self._sessions)))
        held = float(one.lengths.mean())
        usage = Usage(
            prompt_tokens=len(one.tokens) - len(one.answer.tokens),
            completion_tokens=len(one.answer.tokens),
            kv_tokens=held,
            kv_peak=max(one.kv_peak, held),
            kv_read=one.kv_read,
            cr=one.fed / held if held else 1.0,
            pages=int(self.scheduler.held(one).sum()),
        )
        if one.row is not None:
            self._leave(one)
        elif one in self.scheduler.waiting:
            self.scheduler.waiting.remove(one)
        self.metrics.finished[reason] = self.metrics.finished.get(reason, 0) + 1
        out.append(Piece(one.number, one.index, tokens, text, logprobs, None, reason, usage))

    def _lengths(self) -> None:
        """Hands the rows' lengths, as the last step left them, to the sequences."""
        for one in self.scheduler.running:
            one.lengths = self.runner.lengths[:, one.row]

    def _sampling(self) -> Sampler:
        """The settings of all rows, made anew when the rows have changed."""
        if self._sampler is not None and self._sampler[0] == self._rows:
            return self._sampler[1]
        plain = Request([0]).sampling
        every = [plain if one is None else one.request.sampling for one in self._rows]
        stops = np.full((len(every), MOST_STOPS), -1, np.int32)
        for row, one in enumerate(every):
            ids = sorted({*one.stop_ids, *(self._eos if one.eos else ())})
            stops[row, : len(ids)] = ids
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        columns: dict[str, Any] = {name: [getattr(one, name) for one in every] for name in names}
        # An empty row must not make the others draw where all are greedy.
        columns["temperature"] = [0.0 if x is None else x.request.sampling.temperature for x in self._rows]
        seeds = [0 if one is None else (one.request.sampling.seed + one.index) % 2**32 for one in self._rows]
        self._sampler = list(self._rows), Sampler(sampling(len(every), seed=seeds, **columns), jnp.asarray(stops))
        return self._sampler[1]


def _logprob(scores: Any, at: int, top: int | None) -> Logprob:
    value, ids, best = scores
    pairs = zip(ids[at][:top].tolist(), best[at][:top].tolist(), strict=True)
    return Logprob(float(value[at]), tuple(pairs))

"""What the engine takes and gives: requests, settings of their sampling, and the pieces of their answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from kvsparse_jax.cache.base import bucket
from kvsparse_jax.errors import InputError, RunError, whole
from kvsparse_jax.generation.requests import token_ids
from kvsparse_jax.sampling import sampling

EndReason = Literal["stop", "length", "context", "cancelled", "deadline", "capacity"]
"""How a sequence ended: those of generation, or the client cancelled, its time was over, or it outgrew the pool."""

MOST_LOGPROBS = 20
"""Alternatives that are shown beside a token at most."""

MOST_STOPS = 16
"""Stop tokens of a sequence at most, the model's own included; fixed, so that no request compiles a program."""


class BusyError(RunError):
    """The engine takes no more requests now."""


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen and what ends an answer.

    Attributes:
        temperature, top_k, top_p, min_p, repetition_penalty: see :class:`kvsparse_jax.sampling.Sampling`.
        seed: choice i of a request draws from stream 0 of seed + i, whoever shares the batch.
        eos: end at the model's end-of-text tokens.
        stop: strings before which the text ends.
        stop_ids: tokens that end it.
        logprobs: log probabilities of the tokens, and of so many alternatives (0 to 20); None: none.
    """

    temperature: float = 0.6
    top_k: int = 20
    top_p: float = 0.95
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    eos: bool = True
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True)
class Request:
    """Something to generate.

    Attributes:
        prompt: token ids, at least one (of a session that goes on: what is appended, may be empty).
        max_new_tokens: most tokens of each choice; 0 only stores the prompt (and scores it).
        n: choices; the prompt is prefilled once.
        sampling: how.
        priority: higher goes first.
        timeout: seconds from submission after which it ends with what it has; None: never.
        prompt_logprobs: alternatives beside each of the prompt's tokens, and its log probability; None: not asked for.
        session: name under which the cache is kept, in host memory, when the answer has ended, and from which a later
            request of the name goes on; None: the pages are freed.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 256
    n: int = 1
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    priority: int = 0
    timeout: float | None = None
    prompt_logprobs: int | None = None
    session: str | None = None

    def check(self, vocab: int, eos: Sequence[int], text: bool, most_choices: int) -> None:
        """Raises InputError in one line for what is out of range; ``text``: the model has a tokenizer."""
        token_ids(self.prompt, vocab, "prompt")
        if not len(self.prompt) and self.session is None:
            raise InputError("the prompt is empty: give at least one token")
        whole("max_new_tokens", self.max_new_tokens, 0)
        if whole("n", self.n, 1) > most_choices:
            raise InputError(f"n must be at most {most_choices}, not {self.n}")
        if self.session is not None and self.n > 1:
            raise InputError("a session goes on with one answer: n must be 1")
        if self.timeout is not None and not 0 < self.timeout < float("inf"):
            raise InputError(f"timeout must be above 0 seconds, not {self.timeout!r}")
        how = self.sampling
        for name, value in (("logprobs", how.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None and whole(name, value, 0) > MOST_LOGPROBS:
                raise InputError(f"{name} must be at most {MOST_LOGPROBS}, not {value}")
        if any(not isinstance(one, str) or not one for one in how.stop):
            raise InputError("a stop string must be a text that is not empty")
        if how.stop and not text:
            raise InputError("this model has no tokenizer: it can have no stop strings")
        token_ids(how.stop_ids, vocab, "stop_ids")
        if len({*eos, *how.stop_ids}) > MOST_STOPS:
            raise InputError(f"at most {MOST_STOPS} stop tokens, the model's own {len(set(eos))} included")
        sampling(
            1,
            temperature=how.temperature,
            top_k=how.top_k,
            top_p=how.top_p,
            min_p=how.min_p,
            repetition_penalty=how.repetition_penalty,
            seed=how.seed,
        )


@dataclass(frozen=True)
class Logprob:
    """Log probability of a token before temperature and filters, and the most probable ones: (id, log probability)."""

    value: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Usage:
    """What a sequence has cost.

    Attributes:
        prompt_tokens, completion_tokens: tokens.
        kv_tokens: entries that it held at the end, on average over layers and heads.
        kv_peak: most that it held at the end of a step.
        kv_read: sum over the decode steps of the entries held, on average over layers and heads.
        cr: tokens seen per entry held.
        pages: pages that it held at the end.
    """

    prompt_tokens: int
    completion_tokens: int
    kv_tokens: float
    kv_peak: float
    kv_read: float
    cr: float
    pages: int


@dataclass(frozen=True)
class Piece:
    """What a step brought for one choice of a request.

    Attributes:
        request: number that ``submit`` gave.
        index: of the choice.
        tokens: new tokens, without a stop token.
        text: what became certain (see :class:`kvsparse_jax.generation.Piece`).
        logprobs: of the tokens, where asked for.
        prompt_logprobs: of the prompt's tokens from the second on, once, where asked for.
        reason: not None in the last piece of the choice.
        usage: in the last piece.
    """

    request: int
    index: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob, ...] | None = None
    reason: EndReason | None = None
    usage: Usage | None = None


@dataclass(frozen=True)
class EngineOptions:
    """Sizes of an engine; everything is allocated once.

    Attributes:
        slots: sequences that run at a time at most.
        pool_bytes: bytes of the pool of pages.
        page_size: slots per page.
        max_tokens: of a sequence, prompt and answer; None: the model's context.
        prefill_chunk: prompt tokens that a step takes in at most, between decode steps.
        burst: decode steps at a time while no prompt is being taken in, 1 to 64.
        max_waiting: requests that may wait.
        max_choices: largest n.
        reserve: fraction of the tokens that running sequences may still generate that admission keeps pages for: 1
            preempts hardly ever, 0 fills the pool.
        session_bytes: host memory for idle sessions; the longest idle are forgotten first.
        kv_dtype: "int8" or "float8_e4m3" for an 8-bit pool.
    """

    slots: int = 16
    pool_bytes: int = 1 << 30
    page_size: int = 64
    max_tokens: int | None = None
    prefill_chunk: int = 256
    burst: int = 8
    max_waiting: int = 256
    max_choices: int = 16
    reserve: float = 0.5
    session_bytes: int = 1 << 30
    kv_dtype: Literal["int8", "float8_e4m3"] | None = None

    def __post_init__(self) -> None:
        for name in ("slots", "pool_bytes", "page_size", "prefill_chunk", "burst", "max_choices"):
            whole(name, getattr(self, name), 1)
        for name in ("max_waiting", "session_bytes"):
            whole(name, getattr(self, name), 0)
        if self.max_tokens is not None:
            whole("max_tokens", self.max_tokens, 2)
        if self.burst > 64:
            raise InputError(f"burst must be at most 64 steps, not {self.burst}")
        if not 0 <= self.reserve <= 1:
            raise InputError(f"reserve must be from 0 to 1, not {self.reserve!r}")

    @property
    def chunks(self) -> list[int]:
        """Widths of prefill programs, ascending: powers of four from 16 below ``prefill_chunk``, and that."""
        widths, width = [], 16
        while width < self.prefill_chunk:
            widths.append(width)
            width *= 4
        return [*widths, self.prefill_chunk]


def pages_for(lengths: np.ndarray, tokens: int, page: int, shards: int = 1) -> np.ndarray:
    """Pages [shards] that heads of ``lengths`` [L, H] take at most for ``tokens`` more tokens, whatever is decided."""
    return per_shard(-(-(lengths + tokens) // page) - -(-lengths // page), shards)


def per_shard(pages: np.ndarray, shards: int) -> np.ndarray:
    """Sums [shards] of numbers [L, H] over layers and the heads of each shard."""
    return pages.reshape(len(pages), shards, -1).sum((0, 2), dtype=np.int64)


def table_width(tokens: int, page: int) -> int:
    """Entries of the page tables for sequences of ``tokens``."""
    return bucket(-(-tokens // page))

"""Chains of thought through the serving engine: all of a problem from one prefill, side by side."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvsparse_jax.engine import Engine, Piece, Request, SamplingOptions
from kvsparse_jax.errors import InputError, RunError

STRIDE = 1 << 16
"""Between the seeds of two problems: more than chains of one."""


@dataclass(frozen=True)
class Configuration:
    """L-W-CR.

    Attributes:
        length: most tokens of a chain.
        width: chains.
        method: what the cache keeps, as the command names it; "dense": all.
    """

    length: int
    width: int
    method: str

    @classmethod
    def parse(cls, text: str) -> "Configuration":
        """From LENGTH:WIDTH:METHOD. Raises InputError."""
        length, _, rest = text.partition(":")
        width, _, method = rest.partition(":")
        if not (length.isdecimal() and width.isdecimal() and method and int(length) and 0 < int(width) < STRIDE):
            raise InputError(
                f"{text!r} is not LENGTH:WIDTH:METHOD, such as 512:4:dense (at least 1 token, 1 to {STRIDE - 1} chains)"
            )
        return cls(int(length), int(width), method)

    @property
    def name(self) -> str:
        """As it was given."""
        return f"{self.length}:{self.width}:{self.method}"


@dataclass(frozen=True)
class Chain:
    """One chain.

    Attributes:
        text: what was written.
        tokens: of that.
        reason: how it ended.
        read: KV tokens that its decode steps read, on average over layers and heads.
        held: most KV tokens that it held, on average over layers and heads.
        cr: tokens seen per KV token held, at the end.
    """

    text: str
    tokens: int
    reason: str
    read: float
    held: float
    cr: float


def run(
    engine: Engine,
    prompts: Mapping[int, Sequence[int]],
    length: int,
    width: int,
    sampling: SamplingOptions | None = None,
) -> Iterator[tuple[int, list[Chain]]]:
    """Continues every prompt with ``width`` chains.

    Chain i of problem p depends on the prompt, the seed, p and i alone: not on what else runs, and wider configurations
    begin with the chains of narrower ones.

    Args:
        engine: of the model; nothing else is in it.
        prompts: token ids by number of the problem.
        length: most tokens of a chain.
        width: chains.
        sampling: how tokens are drawn.

    Yields:
        Number of a problem and its chains, as they are done.

    Raises:
        InputError: a prompt that the engine refuses.
        RunError: the pool is too small for a chain, which says nothing about its answer.
    """
    how = SamplingOptions() if sampling is None else sampling
    waiting = deque(sorted(prompts.items()))
    numbers: dict[int, int] = {}
    texts: dict[tuple[int, int], str] = {}
    done: dict[int, dict[int, Chain]] = {}
    while waiting or engine.busy:
        while waiting and len(engine.scheduler.waiting) < min(2, engine.options.max_waiting):
            index, prompt = waiting.popleft()
            own = replace(how, seed=(how.seed + STRIDE * index) % 2**32)
            numbers[engine.submit(Request(prompt, length, width, own))] = index
        for piece in engine.step():
            key = piece.request, piece.index
            texts[key] = texts.get(key, "") + piece.text
            if piece.reason is None:
                continue
            chains = done.setdefault(piece.request, {})
            chains[piece.index] = _chain(piece, texts.pop(key))
            if len(chains) == width:
                yield numbers.pop(piece.request), [chains[i] for i in range(width)]
                del done[piece.request]


def _chain(piece: Piece, text: str) -> Chain:
    usage, reason = piece.usage, piece.reason
    assert usage is not None and reason is not None
    if reason == "capacity":
        raise RunError(f"the pool has no room for a chain of {usage.kv_tokens:.0f} KV tokens: make it larger")
    return Chain(text, usage.completion_tokens, reason, usage.kv_read, usage.kv_peak, usage.cr)

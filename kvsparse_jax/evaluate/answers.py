"""How well a model answers questions about a context that its cache has compressed; tasks are in ``tasks``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsparse_jax.errors import InputError, RunError
from kvsparse_jax.evaluate.results import DENSE, Estimate
from kvsparse_jax.evaluate.steps import Steps
from kvsparse_jax.evaluate.tasks import TASKS, Example, Question, encode, score
from kvsparse_jax.lm import LM
from kvsparse_jax.policies import Dense, Policy
from kvsparse_jax.policies.spec import Method, describe


@dataclass(frozen=True)
class Answered:
    """One method on one task.

    Attributes:
        method: its name.
        policy: its settings.
        task: of :data:`kvsparse_jax.evaluate.tasks.TASKS`.
        question: asked "after" the context was compressed, or "before" it as well.
        prompts: how many.
        tokens: of the contexts, mean.
        accuracy: mean score.
        of_dense_percent: 100 * accuracy / that of the full cache; None where that is 0.
        truncated: answers that ended because they were as long as allowed.
        removed: share of the context's entries that are gone when it has entered.
        used: bytes of the cache then, over those of a dense cache of its tokens.
        held: most KV tokens held per layer and head, mean over prompts: those of the context, the question and the
            answer that are still there at the end, or those after the context if that is more.
        read: KV tokens read per layer and head while the answer was generated, mean over prompts.
    """

    method: str
    policy: dict[str, Any]
    task: str
    question: Question
    prompts: int
    tokens: float
    accuracy: Estimate
    of_dense_percent: float | None
    truncated: int
    removed: Estimate
    used: float
    held: float
    read: float


@dataclass
class _Found:
    scores: list[float]
    removed: list[float]
    held: list[float]
    read: list[float]
    bytes: list[tuple[int, int]]
    truncated: int = 0
    policy: Policy | None = None


def answers(
    lm: LM,
    methods: Mapping[str, Method],
    drawn: Sequence[Example],
    question: Question = "after",
    *,
    batch_size: int = 4,
    chat: bool | None = None,
    max_new_tokens: int | None = None,
    progress: bool = False,
    **cache_options: Any,
) -> list[Answered]:
    """Asks every method the same questions, greedily; the full cache is always run, first.

    Args:
        lm: a model with a tokenizer.
        methods: policies by name, or functions from the tokens of a context to one.
        drawn: examples of one task.
        question: where the question stands.
        batch_size: prompts computed together.
        chat: through the chat template; None: where there is one.
        max_new_tokens: most tokens of an answer; None: the task's.
        progress: show a bar.
        **cache_options: see :class:`kvsparse_jax.cache.store.CacheOptions`.

    Raises:
        InputError: no examples, of several tasks, no tokenizer.
        RunError: a method that removed nothing from any context, which is no result.
    """
    kinds = {example.task for example in drawn}
    if len(kinds) != 1:
        raise InputError(f"examples must be of one task, not of {len(kinds)}")
    if lm.tokenizer is None:
        raise InputError("the model directory has no tokenizer, so it can be asked nothing")
    if DENSE in methods:
        raise InputError(f"{DENSE!r} names the full cache")
    task = kinds.pop()
    limit = TASKS[task].max_new_tokens if max_new_tokens is None else max_new_tokens
    parts = [encode(example, lm.tokenizer, question, chat=chat) for example in drawn]
    every: dict[str, Method] = {DENSE: Dense(), **methods}
    found = {name: _Found([], [], [], [], []) for name in every}
    with Steps(len(drawn) * len(every), task, "prompts", progress) as bar:
        for start in range(0, len(drawn), batch_size):
            rows = slice(start, start + batch_size)
            for name, method in every.items():
                bar.show(method=name)
                _ask(lm, method, drawn[rows], parts[rows], limit, found[name], cache_options)
                bar.advance(len(drawn[rows]))
    lengths = [len(first) for first, _ in parts]
    full = float(np.mean(found[DENSE].scores))
    results = []
    for name, f in found.items():
        removed = np.asarray(f.removed)
        if name != DENSE and not (removed > 0).any():
            raise RunError(f"{name} removed nothing from any context of {task}: there is nothing to compare")
        accuracy = Estimate.of(np.asarray(f.scores))
        used = np.asarray(f.bytes, np.float64).sum(0)
        assert f.policy is not None
        results.append(
            Answered(
                method=name,
                policy=describe(f.policy),
                task=task,
                question=question,
                prompts=len(drawn),
                tokens=float(np.mean(lengths)),
                accuracy=accuracy,
                of_dense_percent=100 * accuracy.mean / full if full else None,
                truncated=f.truncated,
                removed=Estimate.of(removed),
                used=float(used[0] / used[1]),
                held=float(np.mean(f.held)),
                read=float(np.mean(f.read)),
            )
        )
    return results


def _ask(
    lm: LM,
    method: Method,
    drawn: Sequence[Example],
    parts: Sequence[tuple[list[int], list[int]]],
    limit: int,
    found: _Found,
    cache_options: Mapping[str, Any],
) -> None:
    """Asks one batch, and notes what came of it."""
    policy = method if isinstance(method, Policy) else method(max(len(first) for first, _ in parts))
    with lm.with_policy(policy).session(len(drawn), **cache_options) as session:
        session.append([first for first, _ in parts])
        compressed = session.report()
        session.append([rest for _, rest in parts])
        asked = np.asarray(session.report().live, np.float64).mean((0, 2))
        out = session.generate(max_new_tokens=limit, temperature=0.0)
    live, seen = np.asarray(compressed.live, np.float64).mean((0, 2)), np.asarray(compressed.seen)
    at_end = np.asarray(out.cache.live, np.float64).mean((0, 2))
    assert out.text is not None
    for row, example in enumerate(drawn):
        found.scores.append(score(example.task, out.text[row], example.answers))
        found.truncated += out.finish_reason[row] in ("length", "context")
        steps = len(out.tokens[row])
        # Entries change by at most one per step, so the mean of both ends is what a step reads on average.
        found.read.append(steps * (asked[row] + at_end[row]) / 2)
    found.removed += (1 - live / seen).tolist()
    found.held += np.maximum(np.maximum(live, asked), at_end).tolist()
    found.bytes.append((compressed.used, compressed.dense_nbytes))
    found.policy = policy

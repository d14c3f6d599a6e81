"""What a compressed prompt does to the text that follows it: the protocol of prompt-compression papers.

A prompt enters the real cache, the policy compresses it, and the next tokens of the text are scored as if they were
being generated. Every method, the full cache among them, goes through the same code in the same run.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvsparse_jax import generation
from kvsparse_jax.errors import InputError, RunError
from kvsparse_jax.evaluate.results import DENSE, Estimate
from kvsparse_jax.evaluate.steps import Steps
from kvsparse_jax.lm import LM
from kvsparse_jax.policies import Dense, Policy
from kvsparse_jax.policies.spec import describe


@dataclass(frozen=True)
class Continued:
    """One method.

    Attributes:
        method: its name.
        policy: its settings.
        context, scored: tokens of the prompt, and after it.
        prompts: how many texts.
        kl: KL(dense || compressed) over the scored tokens, nats per token.
        perplexity_change_percent: of the scored tokens.
        removed: share of the prompt's entries that are gone when it has entered (mean over prompts of the mean over
            layers and heads), and its smallest and largest value.
        used: bytes of the cache when the prompt has entered, over those of a dense cache of its tokens.
        used_at_end: the same after the scored tokens.
    """

    method: str
    policy: dict[str, Any]
    context: int
    scored: int
    prompts: int
    kl: Estimate
    perplexity_change_percent: Estimate
    removed: Estimate
    removed_range: tuple[float, float]
    used: float
    used_at_end: float


@jax.jit
def _compare(dense: Array, logits: Array, targets: Array) -> tuple[Array, Array, Array]:
    """KL(dense || logits) [B, n], and the losses of both [B, n - 1] on the targets."""
    d, c = jax.nn.log_softmax(dense, -1), jax.nn.log_softmax(logits, -1)
    kl = jnp.sum(jnp.exp(d) * (d - c), -1)

    def loss(x: Array) -> Array:
        return -jnp.take_along_axis(x[:, :-1], targets[:, 1:, None], 2)[..., 0]

    return kl, loss(d), loss(c)


def continuations(
    lm: LM,
    methods: Mapping[str, Policy],
    ids: np.ndarray,
    context: int,
    *,
    batch_size: int = 1,
    progress: bool = False,
    **cache_options: Any,
) -> list[Continued]:
    """Compares policies on what follows compressed prompts.

    Args:
        lm: the model.
        methods: policies by name; the full cache is always run, first.
        ids: [N, T] token ids.
        context: tokens of each text that are the prompt; the others are scored.
        batch_size: texts computed together.
        progress: show a bar.
        **cache_options: see :class:`kvsparse_jax.cache.store.CacheOptions`.

    Returns:
        One result per method, the full cache's first.

    Raises:
        InputError: bad shapes, a name that is taken.
        RunError: a policy that removed nothing from any prompt, which is no result.
    """
    if ids.ndim != 2 or len(ids) == 0 or not 0 < context < ids.shape[1] - 1:
        raise InputError(f"ids must be [N, T] with at least two tokens after the {context} of the context")
    if DENSE in methods:
        raise InputError(f"{DENSE!r} names the full cache")
    found: dict[str, list[tuple[np.ndarray, ...]]] = {name: [] for name in (DENSE, *methods)}
    bytes_of: dict[str, list[tuple[int, int, int, int]]] = {name: [] for name in found}
    steps = range(0, len(ids), batch_size)
    with Steps(len(ids) * len(found), "continuations", "texts", progress) as bar:
        for start in steps:
            rows = np.asarray(ids[start : start + batch_size], np.int32)
            checked, segments = lm.check(rows)
            targets = checked[:, context:]
            reference = None
            for name, policy in {DENSE: Dense(), **methods}.items():
                bar.show(method=name)
                model = lm.with_policy(policy).prepared(checked, segments, context)
                out = generation.continuation(model._model, checked, context, **cache_options)
                reference = out.logits if reference is None else reference
                kl, dense, loss = (np.asarray(x, np.float64) for x in _compare(reference, out.logits, targets))
                live = np.asarray(out.prompt.live, np.float64).mean((0, 2)) / context
                found[name].append((kl.mean(1), dense.mean(1), loss.mean(1), 1 - live))
                bytes_of[name].append((out.prompt.used, out.prompt.dense_nbytes, out.end.used, out.end.dense_nbytes))
                bar.advance(len(rows))
    return [
        _result(name, policy, ids.shape[1] - context, context, found[name], bytes_of[name])
        for name, policy in {DENSE: Dense(), **methods}.items()
    ]


def _result(
    name: str,
    policy: Policy,
    scored: int,
    context: int,
    parts: Sequence[tuple[np.ndarray, ...]],
    used: Sequence[tuple[int, int, int, int]],
) -> Continued:
    kl, dense, loss, removed = (np.concatenate(x) for x in zip(*parts, strict=True))
    if not np.isfinite(loss).all():
        raise RunError(f"the loss with {name} is not finite: the weights are not to be trusted")
    if name != DENSE and not (removed > 0).any():
        raise RunError(f"{name} removed nothing from any prompt of {context} tokens: there is nothing to compare")
    change = Estimate.of(loss - dense)
    ratio = math.exp(change.mean)
    totals = np.asarray(used, np.float64).sum(0)
    return Continued(
        method=name,
        policy=describe(policy),
        context=context,
        scored=scored,
        prompts=len(kl),
        kl=Estimate.of(kl),
        perplexity_change_percent=Estimate(
            100 * (ratio - 1), None if change.stderr is None else 100 * ratio * change.stderr
        ),
        removed=Estimate.of(removed),
        removed_range=(float(removed.min()), float(removed.max())),
        used=float(totals[0] / totals[1]),
        used_at_end=float(totals[2] / totals[3]),
    )


def table(results: Sequence[Continued]) -> str:
    """Markdown."""
    lines = [
        "| method | removed (range) | used / dense bytes | KL | perplexity |",
        "|---|---|---|---|---|",
    ]
    for r in results:
        low, high = r.removed_range
        lines.append(
            f"| {r.method} | {100 * r.removed.mean:.1f} % ({100 * low:.0f} to {100 * high:.0f}) | {r.used:.3f} "
            f"| {r.kl:.4f} | {r.perplexity_change_percent:+.2f} % |"
        )
    return "\n".join(lines)


def as_json(results: Sequence[Continued]) -> list[dict[str, Any]]:
    """Plain JSON objects."""
    return [dataclasses.asdict(r) for r in results]

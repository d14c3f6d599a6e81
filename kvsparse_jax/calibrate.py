"""KVzap's threshold, from what one wants: a compression ratio, or a bound of the distance to the full cache."""

import dataclasses
from dataclasses import dataclass

import numpy as np
from jax.typing import ArrayLike

from kvsparse_jax.errors import InputError
from kvsparse_jax.evaluate.continuation import continuations
from kvsparse_jax.lm import LM
from kvsparse_jax.models import decoder
from kvsparse_jax.policies import KVzap
from kvsparse_jax.whole import full_hidden

_ROUNDS = 4
_BISECTIONS = 8


@dataclass(frozen=True)
class Calibrated:
    """What :func:`calibrate` found.

    Attributes:
        policy: with the threshold.
        threshold: the threshold.
        kept: [N], share of the entries that each prompt keeps: a threshold adapts to the prompt, so they differ.
        cr: 1 / mean of ``kept``.
        kl: where it was asked for: KL(dense || compressed) of the last quarter of the prompts after the first three.
    """

    policy: KVzap
    threshold: float
    kept: np.ndarray
    cr: float
    kl: float | None = None

    def __str__(self) -> str:
        spread = f"CR {self.cr:.2f} (prompts from {1 / self.kept.max():.2f} to {1 / self.kept.min():.2f})"
        return f"threshold {self.threshold:.3f}: {spread}" + ("" if self.kl is None else f", KL {self.kl:.4f}")


def calibrate(lm: LM, input_ids: ArrayLike, *, cr: float | None = None, kl: float | None = None) -> Calibrated:
    """The threshold with which the model's KVzap policy compresses given text as wished.

    Args:
        lm: a model with a KVzap policy.
        input_ids: [N, T], prompts.
        cr: compression ratio in entries, at the end of the prompts, on average.
        kl: largest KL(dense || compressed) in nats per token.

    Raises:
        InputError: not exactly one of the two wishes; no KVzap policy; a ratio out of reach.
    """
    policy = lm.policy
    if not isinstance(policy, KVzap):
        raise InputError(f"only a KVzap policy has a threshold to calibrate, not {type(policy).__name__}")
    if (cr is None) == (kl is None):
        raise InputError("say either cr= or kl=")
    ids = np.asarray(input_ids)
    length = ids.shape[1] if ids.ndim == 2 else 0
    newest = policy.window + (0 if policy.prefill == "dense" else 1)
    reachable(policy, length if kl is None else length * 3 // 4, cr)
    free = np.zeros(length, bool)
    free[policy.sinks : length - newest] = True

    def scores(threshold: float) -> np.ndarray:
        """[N, M], scores of the keys that may go, under the effect of a threshold."""
        found = []
        model = lm.with_policy(dataclasses.replace(policy, threshold=threshold))
        for row in ids:
            checked, segments = model.check(row[None])
            gates = full_hidden(model.params, model.config, model.policy, checked, segments)[1]
            gates = np.asarray(decoder.of_evicting(model.config, gates), np.float64)
            found.append((threshold - gates)[:, 0][..., free].ravel())
        return np.stack(found)

    def kept(values: np.ndarray, threshold: float) -> np.ndarray:
        share = free.sum() / length
        return 1 - share * (values < threshold).mean(1)

    lowest = -100.0  # far below any logarithm of a score, and near enough to keep its digits
    start = scores(lowest)
    if kl is not None:
        best = _by_kl(lm, policy, ids, start, kl)
        found = kept(scores(best.threshold), best.threshold)
        return dataclasses.replace(best, kept=found, cr=float(1 / found.mean()))
    assert cr is not None
    wanted = (1 - 1 / cr) * length / free.sum()
    values, threshold = start, lowest
    for _ in range(1 if policy.prefill == "dense" else _ROUNDS):
        threshold = float(np.quantile(values, min(wanted, 1.0)))
        if policy.prefill != "dense":
            values = scores(threshold)
    found = kept(values, threshold)
    return Calibrated(dataclasses.replace(policy, threshold=threshold), threshold, found, float(1 / found.mean()))


def reachable(policy: KVzap, length: int, cr: float | None) -> None:
    """Raises InputError when no threshold gives prompts of ``length`` tokens this ratio (None: any at all)."""
    safe = min(length, policy.window + (0 if policy.prefill == "dense" else 1) + policy.sinks)
    if safe >= length:
        raise InputError(
            f"prompts of {length} tokens are not longer than what is never evicted: a window of {policy.window} and "
            f"{policy.sinks} sinks"
        )
    if cr is not None and not 1 < cr <= length / max(safe, 1):
        raise InputError(
            f"a compression ratio of {cr} cannot be reached: it must be above 1 and at most "
            f"{length / max(safe, 1):.2f}, since {safe} of {length} tokens always stay"
        )


def _by_kl(lm: LM, policy: KVzap, ids: np.ndarray, values: np.ndarray, limit: float) -> Calibrated:
    """The highest threshold, by bisection over the share that is flagged, whose KL stays within the limit."""
    if not limit > 0:
        raise InputError(f"kl must be positive, not {limit}")
    context = ids.shape[1] * 3 // 4
    low, high = 0.0, 1.0
    best: Calibrated | None = None
    for _ in range(_BISECTIONS):
        share = (low + high) / 2
        threshold = float(np.quantile(values, share))
        tried = dataclasses.replace(policy, threshold=threshold)
        result = continuations(lm, {"KVzap": tried}, ids, context)[1]
        if result.kl.mean <= limit:
            low = share
            best = Calibrated(tried, threshold, np.ones(len(ids)), 1.0, result.kl.mean)  # kept: the caller's
        else:
            high = share
    if best is None:
        raise InputError(f"no threshold that evicts anything keeps the KL within {limit}")
    return best

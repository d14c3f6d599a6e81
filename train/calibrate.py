"""Calibration of a DMS policy's offset: the measured share of evicting decisions becomes the wished one."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kernels.visibility import PADDING, decisions_by_key
from kvsparse_jax.distributed import to_host
from kvsparse_jax.models import decoder
from kvsparse_jax.models.config import ModelConfig
from kvsparse_jax.policies import DMS
from kvsparse_jax.whole import attend, positions_of

_ROUNDS = 6
_CLOSE = 1e-3


class Calibration(NamedTuple):
    """Result.

    Attributes:
        policy: with the new offset.
        before: measured evicted fraction with the old offset.
        after: with the new one.
    """

    policy: DMS
    before: float
    after: float


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def _decisions(
    params: decoder.Params, config: ModelConfig, policy: DMS, ids: Array, segments: Array, lift: Array, *, dtype: Any
) -> tuple[Array, Array]:
    """Logit about each key [L, B, H, T] (-inf: kept for want of a decision) under the hard rule, and real keys [B, T].

    L counts the layers in which the policy may evict.
    ``lift`` is subtracted from every logit before it decides, not from what is returned.
    """
    attention = attend(config, policy, segments, decide=lambda gate, _: gate - lift.astype(gate.dtype))
    _, _, gates = decoder.forward(params, config, policy, ids, positions_of(segments), attention, dtype=dtype)
    gates = decoder.of_evicting(config, gates)
    by_key = jax.vmap(lambda gate: decisions_by_key(gate, policy.shift, -jnp.inf, segments))(gates)
    return by_key, segments > PADDING


def calibrate(
    params: decoder.Params,
    config: ModelConfig,
    policy: DMS,
    batches: Sequence[Any],
    *,
    evict_fraction: float,
    dtype: Any = None,
) -> Calibration:
    """Moves the offset until the wished share of all real keys is evicted, without noise and by the hard rule.

    Earlier layers' evictions change the logits of later ones, so the threshold is found anew under its own effect a
    few times. Keys that no token decides about (the last of each segment, with shift 1) count as kept.

    Args:
        params: of the model.
        config: of the model.
        policy: the trained policy.
        batches: have ``input_ids`` and ``segment_ids`` [B, T].
        evict_fraction: wished share, below 1.
        dtype: compute dtype; None is that of the embedding.

    Returns:
        The policy and the measured shares before and after.
    """

    def logits(lift: float) -> np.ndarray:
        found = []
        for batch in batches:
            values, real = _decisions(
                params, config, policy, batch.input_ids, batch.segment_ids, jnp.float32(lift), dtype=dtype
            )
            mask = np.broadcast_to(to_host(real)[None, :, None, :], values.shape)
            found.append(to_host(values)[mask])
        return np.concatenate(found)

    values = logits(0.0)
    before = float((values > 0).mean())
    best, missed, after = 0.0, abs(before - evict_fraction), before
    for _ in range(_ROUNDS):
        if missed < _CLOSE:
            break
        lift = _threshold(values, evict_fraction)
        values = logits(lift)
        measured = float((values > lift).mean())
        if abs(measured - evict_fraction) < missed:
            best, missed, after = lift, abs(measured - evict_fraction), measured
    return Calibration(dataclasses.replace(policy, offset=policy.offset + best), before, after)


def _threshold(values: np.ndarray, fraction: float) -> float:
    """A value that the given share of all values exceeds, halfway between two of them."""
    finite = np.sort(values[np.isfinite(values)].astype(np.float64))[::-1]
    count = min(round(fraction * len(values)), len(finite))
    if count == 0:
        return float(finite[0]) + 1.0
    if count == len(finite):
        return float(finite[-1]) - 1.0
    return float(finite[count - 1] + finite[count]) / 2

"""Warm start of DMS adapters from an attention oracle, so that a retrofit begins with sensible decisions.

Without eviction, each key's importance is what later queries, beyond the window, draw from it: the largest attention
weight times the size of the value it adds to the stream, relative to the stream (the quantity of KVzip+, arXiv
2601.07891, over the text's own future instead of a repetition of it). Its logarithm is regressed (ridge, streamed
normal equations) on what the adapter sees, RMS-normed hidden states; slope and threshold go into the adapter.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kernels.numerics import accumulator
from kernels.visibility import PADDING
from kvsparse_jax.distributed import to_host
from kvsparse_jax.errors import InputError
from kvsparse_jax.lm import LM
from kvsparse_jax.models import decoder
from kvsparse_jax.models.attention import value_projection
from kvsparse_jax.models.config import ModelConfig
from kvsparse_jax.oracle import value_norms
from kvsparse_jax.policies import DMS, Dense, LayerInput, Policy
from kvsparse_jax.whole import attend, full_hidden, positions_of

_FLOOR = 1e-8
"""Smallest importance: keeps the logarithm finite for keys that nothing attends to."""


class _Seen(NamedTuple):
    """What the collecting policy hands on to the attention: features [B, T, E] and the stream's norm [B, T]."""

    features: Array
    norm: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Collect(Policy):
    """Keeps everything and shows what an adapter would see."""

    window = 0
    shift = 0
    params = None

    def gate(self, params: Any, layer: LayerInput) -> Any:
        x = layer.residual.astype(accumulator(layer.residual.dtype))
        square = jnp.mean(x * x, -1)
        features = x * lax.rsqrt(square + jnp.asarray(layer.rms_eps, x.dtype))[..., None]
        return _Seen(features, jnp.sqrt(square * x.shape[-1]))


def future_importance(
    q: Array, k: Array, value_size: Array, stream: Array, segment_ids: Array, *, window: int, scale: float
) -> tuple[Array, Array]:
    """Largest relative contribution of each key to a query of its segment beyond the window.

    Args:
        q: [B, Hq, T, D].
        k: [B, H, T, D].
        value_size: [B, Hq, T], norm of each value after the head's output projection.
        stream: [B, T], norm of the residual stream at the query.
        segment_ids: [B, T] int32.
        window: delay of the eviction in tokens; nearer queries do not count.
        scale: factor on <q, k>.

    Returns:
        [B, H, T] importance (maximum over the queries and over the query heads of the group), and [B, T] int32, how
        many queries could see each key beyond the window. One block of queries at a time, never [T, T].
    """
    batch, heads, length, dim = q.shape
    kv_heads = k.shape[1]
    acc = accumulator(q.dtype)
    block = max(8, min(length, 2**18 // length))
    pad = -length % block
    grouped = jnp.pad(q, [(0, 0), (0, 0), (0, pad), (0, 0)]).reshape(batch, kv_heads, -1, length + pad, dim)
    stream = jnp.pad(stream, [(0, 0), (0, pad)], constant_values=1.0)
    of_q = jnp.pad(segment_ids, [(0, 0), (0, pad)], constant_values=PADDING)
    size = value_size.reshape(batch, kv_heads, -1, length).astype(acc)

    def rows(carry: tuple[Array, Array], i: Array) -> tuple[tuple[Array, Array], None]:
        best, count = carry
        at = i * jnp.int32(block)
        qi = lax.dynamic_slice_in_dim(grouped, at, block, 3)
        scores = jnp.einsum("bhgqd,bhkd->bhgqk", qi, k, preferred_element_type=acc) * jnp.asarray(scale, acc)
        distance = (at + jnp.arange(block, dtype=jnp.int32))[:, None] - jnp.arange(length, dtype=jnp.int32)[None]
        own = lax.dynamic_slice_in_dim(of_q, at, block, 1)
        seen = (own[:, :, None] == segment_ids[:, None]) & (own > PADDING)[:, :, None] & (distance >= 0)[None]
        weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e30), -1)
        late = seen & (distance > window)[None]
        part = weights / lax.dynamic_slice_in_dim(stream, at, block, 1)[:, None, None, :, None]
        part = jnp.where(late[:, None, None], part, jnp.zeros((), acc)).max(3)
        return (jnp.maximum(best, (part * size).max(2)), count + late.sum(1).astype(jnp.int32)), None

    start = (jnp.zeros(k.shape[:3], acc), jnp.zeros((batch, length), jnp.int32))
    return lax.scan(rows, start, jnp.arange((length + pad) // block, dtype=jnp.int32))[0]


class Moments(NamedTuple):
    """Sums over the counted keys for one ridge regression per layer; the last feature is the constant 1.

    Attributes:
        xx: [L, E + 1, E + 1].
        xy: [L, E + 1, H].
        yy: [L, H].
        keys: scalar, how many.
    """

    xx: Array
    xy: Array
    yy: Array
    keys: Array


@functools.partial(jax.jit, static_argnames=("config", "window", "shift", "margin"))
def _moments(
    params: decoder.Params, config: ModelConfig, ids: Array, segments: Array, *, window: int, shift: int, margin: int
) -> Moments:
    everything = attend(config, Dense(), segments)

    def observe(
        state: None, layer: decoder.Layer, q: Array, k: Array, v: Array, gate: Any
    ) -> tuple[Array, None, tuple[Array, ...]]:
        out, _, _ = everything(state, layer, q, k, v, None)
        acc = accumulator(q.dtype)
        size = value_norms(v, value_projection(config, layer.params))
        importance, queries = future_importance(q, k, size, gate.norm, segments, window=window, scale=config.scale)
        # The adapter of token k + shift decides about key k.
        x = jnp.roll(gate.features, -shift, axis=1)
        same = jnp.roll(segments, -shift, axis=1) == segments
        use = (queries >= margin) & same & (jnp.arange(segments.shape[1]) < segments.shape[1] - shift)[None]
        y = jnp.log(jnp.maximum(importance, jnp.asarray(_FLOOR, acc))).swapaxes(1, 2)
        x = jnp.concatenate([x, jnp.ones_like(x[..., :1])], -1)
        x, weight = x.reshape(-1, x.shape[-1]), use.reshape(-1).astype(acc)
        y = y.reshape(-1, y.shape[-1])
        weighted = x * weight[:, None]
        return out, state, (weighted.T @ x, weighted.T @ y, (y * y * weight[:, None]).sum(0), weight.sum())

    _, _, (xx, xy, yy, count) = decoder.forward(params, config, _Collect(), ids, positions_of(segments), observe)
    return Moments(xx, xy, yy, count[0])


class Fit(NamedTuple):
    """Ridge solutions per layer.

    Attributes:
        slope: [L, E, H], ln importance per feature.
        intercept: [L, H].
        one: [L, E], the combination of features nearest to the constant 1 (adapters have no bias).
        r2: [L, H], explained variance on the data of the fit.
    """

    slope: np.ndarray
    intercept: np.ndarray
    one: np.ndarray
    r2: np.ndarray


def solve(moments: Moments, ridge: float) -> Fit:
    """Solves the ridge regressions in float64.

    Args:
        moments: sums over the data.
        ridge: added to each feature's mean square, which is 1 after the RMS norm.
    """
    n = float(moments.keys)
    xx, xy = np.asarray(moments.xx, np.float64) / n, np.asarray(moments.xy, np.float64) / n
    features = xx.shape[1] - 1
    penalty = np.diag([ridge] * features + [0.0])
    solution = np.linalg.solve(xx + penalty, xy)
    variance = np.asarray(moments.yy, np.float64) / n - xy[:, -1] ** 2
    error = variance + xy[:, -1] ** 2 - 2 * (solution * xy).sum(1) + (solution * (xx @ solution)).sum(1)
    one = np.linalg.solve(xx[:, :-1, :-1] + penalty[:-1, :-1], xx[:, :-1, -1:])[..., 0]
    return Fit(solution[:, :-1], solution[:, -1], one, 1 - error / variance)


def fit(
    lm: LM, batches: Sequence[tuple[Any, Any]], *, window: int, shift: int, margin: int = 64, ridge: float = 1e-3
) -> Fit:
    """Regresses ln importance on what the adapters see.

    Args:
        lm: the model before the retrofit.
        batches: (input_ids [B, T], segment_ids [B, T]) pairs.
        window: delay of the eviction in tokens.
        shift: token ``k + shift`` decides about key ``k``.
        margin: keys that fewer queries could see beyond the window are left out: their maximum says little.
        ridge: see :func:`solve`.

    Raises:
        InputError: no key has that many later queries.
    """
    total: Moments | None = None
    for ids, segments in batches:
        new = _moments(
            lm.params, lm.config, jnp.asarray(ids), jnp.asarray(segments), window=window, shift=shift, margin=margin
        )
        new = jax.tree.map(lambda a: to_host(a).astype(np.float64), new)
        total = new if total is None else jax.tree.map(np.add, total, new)
    if total is None or total.keys == 0:
        raise InputError(f"--init oracle needs segments longer than window {window} + {margin} tokens")
    return solve(total, ridge)


def warm_start(
    lm: LM,
    policy: DMS,
    batches: Sequence[Any],
    *,
    evict_fraction: float,
    slope: float = 2.0,
    ridge: float = 1e-3,
) -> DMS:
    """The policy with adapters that evict the given fraction of tokens, the least important ones over all heads.

    Args:
        lm: the model before the retrofit.
        policy: adapter variant; its settings are kept.
        batches: have ``input_ids`` and ``segment_ids`` [B, T] (or leading axes before them).
        evict_fraction: wished fraction of decisions that evict, in (0, 1).
        slope: decision logit per nat of predicted importance; the noise of training has a standard deviation of 1.8.
        ridge: see :func:`solve`.

    Raises:
        InputError: neuron variant, a fraction out of range, or segments too short.
    """
    if policy.variant != "adapter":
        raise InputError("--init oracle fits adapters; the neuron variant has none (use --init zero)")
    if not 0 < evict_fraction < 1:
        raise InputError(f"the fraction to evict must be between 0 and 1, not {evict_fraction:g}")

    def rows(a: Any) -> Array:
        return jnp.asarray(a).reshape(-1, a.shape[-1])

    pairs = [(rows(b.input_ids), rows(b.segment_ids)) for b in batches]
    found = fit(lm, pairs, window=policy.window, shift=policy.shift, ridge=ridge)
    predicted = np.concatenate([_predict(lm, found, *pair) for pair in pairs[:4]])
    threshold = float(np.quantile(predicted, evict_fraction))
    return fold(lm.config, policy, found, threshold, slope)


def fold(config: ModelConfig, policy: DMS, found: Fit, threshold: float, slope: float) -> DMS:
    """Adapters whose logit is ``slope * (threshold - predicted ln importance)``."""
    params = DMS.init(config, variant="adapter").params
    level = policy.offset + slope * (threshold - found.intercept)
    proj = (found.one[:, :, None] * level[:, None] - slope * found.slope) / policy.scale
    if policy.per == "layer":  # KV head 0 decides for all: give it the mean of the heads
        proj = np.broadcast_to(proj.mean(-1, keepdims=True), proj.shape)
    return dataclasses.replace(policy, params={**params, "proj": jnp.asarray(proj, jnp.float32)})


def _predict(lm: LM, found: Fit, ids: Array, segments: Array) -> np.ndarray:
    """Predicted ln importance of all real tokens in the layers in which a policy may evict, flat."""
    policy = fold(lm.config, DMS(None, window=2**30, scale=1.0, offset=0.0, shift=0), found, 0.0, 1.0)
    gates = full_hidden(lm.params, lm.config, policy, ids, segments)[1]
    assert gates is not None
    gates = decoder.of_evicting(lm.config, gates)
    real = np.broadcast_to((to_host(segments) > PADDING)[None, :, None], gates.shape)
    return -to_host(gates)[real]

"""Whole sequences in one pass, without a cache: what evaluation, calibration and training have in common."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.typing import ArrayLike

from kernels import delayed_attention
from kernels.delayed_eviction.api import attention_with_lse
from kernels.visibility import NEVER, PADDING, decisions_by_key, expires, visible
from kvsparse_jax.errors import InputError
from kvsparse_jax.models import decoder
from kvsparse_jax.models.config import ModelConfig
from kvsparse_jax.models.sharding import by_heads, kv_axis
from kvsparse_jax.policies import Held, Policy

if TYPE_CHECKING:
    from kvsparse_jax.lm import LM


def positions_of(segment_ids: Array) -> Array:
    """Positions [B, T] int32 of tokens in their segments of contiguous columns; 0 at padding."""
    column = jnp.broadcast_to(jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None], segment_ids.shape)
    starts = jnp.concatenate(
        [jnp.ones_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1
    )
    first = jax.lax.cummax(jnp.where(starts, column, jnp.zeros_like(column)), axis=1)
    return jnp.where(segment_ids > PADDING, column - first, jnp.zeros_like(column))


def attend(
    config: ModelConfig,
    policy: Policy,
    segment_ids: Array,
    *,
    hard: bool = True,
    decide: Callable[[Array, Any], Array] | None = None,
    mesh: Mesh | None = None,
) -> decoder.Attend:
    """Attention for :func:`kvsparse_jax.models.decoder.forward` whose per-layer result is the gate as it was emitted.

    Args:
        config: of the model.
        policy: of which the window and the shift count.
        segment_ids: [B, T] int32, PADDING where there is no token.
        hard: keys beyond the window are dropped by the sign of the gate; False weighs them by it.
        decide: (gate [B, H, T], this layer's slice of ``per_layer``) -> the gate that takes effect; None: as emitted.
        mesh: rows are divided over its data and fsdp axes, heads over its tensor axis, and each device attends for
            those that it has; None: left to the compiler.

    Raises:
        InputError: KV heads that the mesh does not divide.
    """
    of_kv = ("batch", kv_axis(mesh, config.kv_heads))

    def attention(
        q: Array, k: Array, v: Array, gate: Array | None, segment_ids: Array, local_window: Array | None
    ) -> Array:
        return delayed_attention(
            q,
            k,
            v,
            gate,
            window=policy.window,
            scale=config.scale,
            shift=policy.shift,
            segment_ids=segment_ids,
            local_window=local_window,
            hard=hard,
        )

    divided = by_heads(mesh, attention, [("batch", "heads"), of_kv, of_kv, of_kv, ("batch",), None])

    def of_layer(
        state: Any, layer: decoder.Layer, q: Array, k: Array, v: Array, gate: Array | None
    ) -> tuple[Array, Any, Array | None]:
        # A prompt whose prefill is dense sees all of itself.
        effective = None if policy.prefill == "dense" else gate
        effective = effective if effective is None or decide is None else decide(effective, layer.extra)
        return divided(q, k, v, effective, segment_ids, layer.local_window), state, gate

    return of_layer


def dense_attention(
    config: ModelConfig, segment_ids: Array, mesh: Mesh | None = None
) -> Callable[[decoder.Layer, Array, Array, Array], tuple[Array, Array]]:
    """(layer, q, k, v) -> output and log-sum-exp [B, Hq, T] of attention without eviction, in the layer's window."""
    of_kv = ("batch", kv_axis(mesh, config.kv_heads))

    def attention(q: Array, k: Array, v: Array, segment_ids: Array, local_window: Array | None) -> tuple[Array, Array]:
        return attention_with_lse(q, k, v, scale=config.scale, segment_ids=segment_ids, local_window=local_window)

    divided = by_heads(mesh, attention, [("batch", "heads"), of_kv, of_kv, ("batch",), None])
    return lambda layer, q, k, v: divided(q, k, v, segment_ids, layer.local_window)


@functools.partial(jax.jit, static_argnames="config")
def full_hidden(
    params: decoder.Params, config: ModelConfig, policy: Policy, input_ids: Array, segment_ids: Array
) -> tuple[Array, Array | None]:
    """Final hidden states [B, T, E] under the hard rule, and the decision logits [L, B, H, T] (None: no decisions)."""
    hidden, _, gates = decoder.forward(
        params, config, policy, input_ids, positions_of(segment_ids), attend(config, policy, segment_ids)
    )
    return hidden, gates


@functools.partial(jax.jit, static_argnames="config")
def full_logits(
    params: decoder.Params, config: ModelConfig, policy: Policy, input_ids: Array, segment_ids: Array
) -> Array:
    """Logits [B, T, V] of whole sequences under the hard rule."""
    return decoder.logits(params, full_hidden(params, config, policy, input_ids, segment_ids)[0])


@functools.partial(jax.jit, static_argnames="config")
def _kept(params: decoder.Params, config: ModelConfig, policy: Policy, input_ids: Array, segment_ids: Array) -> Array:
    """See :func:`kept`."""
    positions, real = positions_of(segment_ids), segment_ids > PADDING
    inner = attend(config, policy, segment_ids)
    newest = jnp.max(positions, 1)

    def of_layer(
        state: None, layer: decoder.Layer, q: Array, k: Array, v: Array, gate: Array | None
    ) -> tuple[Array, None, Array]:
        out, state, _ = inner(state, layer, q, k, v, gate)
        shape = k.shape[:3]
        if policy.selects:
            at = jnp.broadcast_to(jnp.where(real, positions, NEVER)[:, None], shape)
            recent = jnp.broadcast_to((real & (positions > (newest - policy.recent)[:, None]))[:, None], shape)
            q_positions = jnp.where(real, positions, -1)
            held = Held(q, k, q_positions, at, recent, jnp.zeros(shape, jnp.float32), layer.number, config.scale)
            keep = policy.select(held).keep
            if layer.local_window is None:
                return out, state, keep
            last = expires(at, jnp.zeros(shape, bool), 0, layer.local_window)
            within = visible((newest + 1)[:, None, None], at, last)
            return out, state, jnp.where(layer.local_window == NEVER, keep, within)
        at = jnp.broadcast_to(positions[:, None], shape)
        if gate is None:
            evict = jnp.zeros(shape, bool)
        else:
            evict = decisions_by_key(gate > 0, policy.shift, False, segment_ids) & real[:, None]
        # Without a delay for the prompt's own queries, what no later query sees is gone when it ends.
        query = newest + 1 if policy.prefill == "dense" else newest
        last = expires(at, evict, policy.window, layer.local_window)
        return out, state, visible(query[:, None, None], at, last) & real[:, None]

    return decoder.forward(params, config, policy, input_ids, positions, of_layer)[2]


def kept(lm: "LM", input_ids: ArrayLike, attention_mask: ArrayLike | None = None) -> Array:
    """Which tokens the policy holds after a prompt was prefilled in one piece.

    Args:
        lm: a model with any policy.
        input_ids: [B, T].
        attention_mask: [B, T] or None.

    Returns:
        [L, B, H, T] bool, False at padding.
    """
    ids, segments = lm.check(input_ids, attention_mask)
    if lm.policy.selects:
        lm.config.needs_full_attention(type(lm.policy).__name__)
    return _kept(lm.params, lm.config, lm.prepared(ids, segments).policy, ids, segments)


def decision_logits(lm: "LM", input_ids: ArrayLike, attention_mask: ArrayLike | None = None) -> Array:
    """The policy's decision logits in evaluation, as each token emits them (positive: evict the key it decides about).

    Args:
        lm: a model whose policy decides by logits (DMS).
        input_ids: [B, T].
        attention_mask: [B, T] or None.

    Returns:
        [L, B, H, T] float32, unshifted; undefined at padding.

    Raises:
        InputError: the policy has no decision logits.
    """
    ids, segments = lm.check(input_ids, attention_mask)
    gates = full_hidden(lm.params, lm.config, lm.policy, ids, segments)[1]
    if gates is None:
        raise InputError(f"the policy {type(lm.policy).__name__} makes no decisions that have logits")
    return gates

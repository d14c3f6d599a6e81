"""What runs on the device: prefill, the teacher-forced step, and the decode loop.

A session's tokens are those in the cache and, per row, one pending token, which enters with the next step. The step
feeds the pending token, attends, and draws the one that is pending next; so a prompt is stored without computing a
single logit, and one compiled loop of that step serves generation and streaming, which only differ in how many steps
they ask for at once. Rows are independent: each has its own length, settings and end, and a row that has ended neither
stores nor counts.
"""

import dataclasses
import functools
import weakref
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from kernels.visibility import NEVER
from kvsparse_jax.cache import paged
from kvsparse_jax.cache.base import Cache
from kvsparse_jax.models import decoder
from kvsparse_jax.models.config import ModelConfig
from kvsparse_jax.policies.base import Policy
from kvsparse_jax.sampling import Sampling, choose

BURST = 64
"""Most steps that the device takes without asking the host. Also the tokens per row that a generation makes room for,
as if none were evicted: the pool grows by buckets, so a long answer grows it seldom."""

NOTHING, STOPPED = -1, -2  # what a step emits in place of a token: the row had ended before; it drew a stop token


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Model:
    """What decoding needs of a model; an argument of compiled functions.

    Attributes:
        params: of the decoder, see :class:`kvsparse_jax.models.decoder.Decoder`.
        policy: decides what the cache keeps.
        config: its shape (static).
        mesh: devices that the parameters are placed on, None for one device (static).
    """

    params: decoder.Params
    policy: Policy
    config: ModelConfig = field(metadata=dict(static=True))
    mesh: Mesh | None = field(default=None, metadata=dict(static=True))

    @property
    def dtype(self) -> jnp.dtype:
        """Of the weights, and so of keys and values."""
        return self.params["embed"].dtype

    @property
    def sharding(self) -> Sharding:
        """Where arrays go that are the same on every device of the model."""
        if self.mesh is not None:
            return NamedSharding(self.mesh, PartitionSpec())
        return SingleDeviceSharding(next(iter(self.params["embed"].devices())))


def _forward(
    model: Model, cache: Cache, ids: Array, valid: Array, hold: Array | None = None, generated: bool = False
) -> tuple[Array, Cache]:
    """Feeds ids [B, T]; gives the hidden states [B, T, E] and the cache.

    A policy that selects does so in every layer, among what the layer holds and what is new, after the new tokens have
    seen all of it. Of several tokens that count as ``generated`` nothing is selected, as of one.
    """
    policy, scale = model.policy, model.config.scale
    chunk = ids.shape[1] > 1 and not generated
    if policy.selects and chunk:
        hold = cache.seen + jnp.sum(valid, 1, dtype=jnp.int32) - 1

    def attend(
        cache: Cache, layer: decoder.Layer, q: Array, k: Array, v: Array, gate: Array | None
    ) -> tuple[Array, Cache, None]:
        evict = None if gate is None else gate > 0
        local = layer.local_window
        if not policy.selects:
            out, cache = cache.attend(layer.number, q, k, v, evict, valid, scale=scale, local_window=local, hold=hold)
            return out, cache, None
        if not isinstance(cache, paged.PagedCache):
            raise NotImplementedError("policies with a budget need the paged cache")
        if not chunk and not policy.while_decoding:
            sink = (cache.positions(valid) < policy.sinks)[:, None]
            noted = jnp.broadcast_to(jnp.where(sink, jnp.inf, 0.0).astype(jnp.float32), k.shape[:3])
            out, cache = cache.attend(
                layer.number, q, k, v, None, valid, scale=scale, local_window=local, statistic=noted
            )
            return out, cache, None
        held = paged.held(cache, layer.number, q, k, valid, scale)
        found, stored = policy.select(held), held.stored
        # XLA does not see that the pools have been read before they are written to, and would copy them.
        found, cache = lax.optimization_barrier((found, cache))
        assert isinstance(cache, paged.PagedCache)
        if local is not None:  # a layer with a sliding window forgets by itself
            found = found._replace(keep=found.keep | (local != NEVER))
        out, cache = cache.attend(
            layer.number,
            q,
            k,
            v,
            ~found.keep[:, :, stored:] & valid[:, None],
            valid,
            scale=scale,
            local_window=local,
            hold=hold,
            statistic=found.statistic[:, :, stored:],
        )
        # A row without new tokens stays as it is.
        there = (held.k_positions[:, :, :stored] != NEVER) & valid.any(1)[:, None, None]
        return out, paged.settle(cache, layer.number, there, found), None

    hidden, cache, _ = decoder.forward(model.params, model.config, policy, ids, cache.positions(valid), attend, cache)
    cache = cache.advance(valid)
    return hidden, cache.sweep() if policy.selects and chunk else cache


@functools.partial(jax.jit, donate_argnames="cache")
def prefill(model: Model, cache: Cache, ids: Array, valid: Array, hold: Array | None = None) -> Cache:
    """Stores a chunk of a prompt. Nothing but the cache is asked for, so XLA drops what follows the last keys.

    ``hold`` [B] is the position of the prompt's last token where the policy's ``prefill`` is "dense"; else None.
    """
    return _forward(model, cache, ids, valid, hold)[1]


@functools.partial(jax.jit, donate_argnames="cache", static_argnames="generated")
def teach(
    model: Model, cache: Cache, ids: Array, valid: Array, hold: Array | None = None, *, generated: bool = False
) -> tuple[Array, Cache]:
    """:func:`prefill`, and the logits [B, T, V] of all the tokens.

    ``generated`` tokens are no prompt: a policy that selects from prompts only leaves them alone.
    """
    hidden, cache = _forward(model, cache, ids, valid, hold, generated)
    return decoder.logits(model.params, hidden), cache


@functools.partial(jax.jit, donate_argnames="cache")
def sweep(cache: Cache) -> Cache:
    """Ends a prompt of a policy whose ``prefill`` is "dense": what it evicts leaves now."""
    return cache.sweep()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampler:
    """How the next token of each row is chosen.

    Attributes:
        settings: of the sampling.
        stops: [B, S] int32, stop tokens of each row, -1 where there are fewer.
    """

    settings: Sampling
    stops: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """What a decode step changes.

    Attributes:
        cache: the tokens that were fed.
        token: [B] int32, pending tokens.
        left: [B] int32, tokens that a row may still draw; 0: it has ended.
        present: [B, V] bool, tokens of a row's history for the repetition penalty; None: no row has one.
    """

    cache: Cache
    token: Array
    left: Array
    present: Array | None


def _step(model: Model, sampler: Sampler, state: State) -> tuple[Array, State]:
    """Feeds each row's pending token and draws the next; what is emitted [B]: a token, STOPPED or NOTHING."""
    active = state.left > 0
    hidden, cache = _forward(model, state.cache, state.token[:, None], active[:, None])
    drawn = choose(decoder.logits(model.params, hidden[:, 0]), sampler.settings, cache.seen, state.present)
    stopped = jnp.any(drawn[:, None] == sampler.stops, 1)
    goes_on = active & ~stopped
    emitted = jnp.where(active, jnp.where(stopped, jnp.int32(STOPPED), drawn), jnp.int32(NOTHING))
    present = state.present
    if present is not None:
        row = jnp.arange(drawn.shape[0], dtype=jnp.int32)
        present = present.at[row, jnp.where(goes_on, drawn, present.shape[1])].set(True, mode="drop")
    token, left = jnp.where(goes_on, drawn, state.token), jnp.where(goes_on, state.left - 1, 0)
    return emitted, State(cache, token, left, present)


@functools.partial(jax.jit, donate_argnames="state")
def decode(model: Model, sampler: Sampler, state: State, steps: Array) -> tuple[Array, State]:
    """Takes :func:`_step` until all rows have ended, ``steps`` (int32 scalar) times at most, and BURST.

    Returns:
        What was emitted [B, BURST], and the new state.
    """

    def body(carry: tuple[Array, Array, State]) -> tuple[Array, Array, State]:
        i, emitted, state = carry
        new, state = _step(model, sampler, state)
        return i + 1, lax.dynamic_update_slice(emitted, new[:, None], (jnp.zeros_like(i), i)), state

    def go_on(carry: tuple[Array, Array, State]) -> Array:
        i, _, state = carry
        return (i < jnp.minimum(steps, BURST)) & jnp.any(state.left > 0)

    emitted = jnp.full((state.token.shape[0], BURST), NOTHING, jnp.int32)
    _, emitted, state = lax.while_loop(go_on, body, (jnp.zeros((), jnp.int32), emitted, state))
    return emitted, state


_heads: dict[int, tuple["weakref.ref[Array]", Array]] = {}  # by the identity of the embedding


def with_head(model: Model) -> Model:
    """The model with the output head stored as [E, V], where a tied embedding would be multiplied transposed.

    XLA:CPU is several times slower at that. The copy is made once and lives as long as the embedding, whichever of the
    models that share it (one per policy) asks.
    """
    embed = model.params["embed"]
    if "head" in model.params or next(iter(embed.devices())).platform != "cpu":
        return model
    key = id(embed)
    if key not in _heads:
        _heads[key] = weakref.ref(embed, lambda _: _heads.pop(key, None)), jax.jit(decoder.transposed)(embed)
    return dataclasses.replace(model, params={**model.params, "head": _heads[key][1]})

"""The decoder of every family: parameters declared once in Flax NNX, and the forward pass as a pure function.

Layers are stacked on a leading axis and scanned, so compile time does not depend on depth. How keys and values are
stored and attended to is the caller's: ``forward`` hands q, k, v and the policy's decisions of each layer to an
``attend`` function, which training, prefill and decode supply.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from kernels.numerics import accumulator
from kernels.visibility import NEVER
from kvsparse_jax.models import attention, rope
from kvsparse_jax.models.config import ModelConfig
from kvsparse_jax.models.experts import mixture
from kvsparse_jax.models.parts import Params as Params
from kvsparse_jax.models.parts import mlp, rms_norm
from kvsparse_jax.models.sharding import collect, constrain
from kvsparse_jax.policies.base import LayerInput, Policy

_INITIAL_STD = 0.02


class _Index(NamedTuple):
    """What the scan over the layers slices for each of them, see :class:`Layer`."""

    number: Array
    local_window: Array | None
    extra: Any


class _Angles(NamedTuple):
    """cos and sin of the rotation; of layers with a sliding window their own, where the model has two bases."""

    full: tuple[Array, Array]
    local: tuple[Array, Array] | None

    def of(self, local_window: Array | None) -> tuple[Array, Array]:
        """Those of a layer."""
        if self.local is None or local_window is None:
            return self.full
        cos, sin = (jnp.where(local_window == NEVER, a, b) for a, b in zip(self.full, self.local, strict=True))
        return cos, sin


class Layer(NamedTuple):
    """What ``attend`` is told of the layer that calls it.

    Attributes:
        number: int32 scalar, from 0.
        local_window: int32 scalar, the layer's sliding window (NEVER: full attention); None when no layer has one.
        extra: this layer's slice of what the caller passed to ``forward`` as ``per_layer``.
        inputs: what a policy may look at in this layer.
        params: this layer's own parameters.
    """

    number: Array
    local_window: Array | None
    extra: Any
    inputs: LayerInput
    params: Params


Attend = Callable[[Any, Layer, Array, Array, Array, Array | None], tuple[Array, Any, Any]]
"""(state, layer, q [B, Hq, T, D], k [B, H, T, D], v [B, H, T, D], gate [B, H, T] or None) -> (out [B, Hq, T, D], state,
per-layer result). The gate is the policy's logit as emitted by each token; positive means evict. In layers in which
nothing is evicted (``ModelConfig.evicting``) it is -inf."""


def _param(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], dtype: DTypeLike, one: bool = False) -> Any:
    if one:
        return nnx.Param(jnp.ones(shape, dtype), out_sharding=axes)
    value = jax.random.normal(rngs.params(), shape, jnp.float32) * jnp.float32(_INITIAL_STD)
    return nnx.Param(value.astype(dtype), out_sharding=axes)


class Linear(nnx.Module):
    """Stacked projections: kernel [*lead, in, out], bias [*lead, out] or absent; lead is [L], or [L, X] for experts."""

    def __init__(
        self,
        lead: tuple[int, ...],
        width: tuple[int, int],
        axes: tuple[str, str],
        bias: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        stack = ("layers", "experts")[: len(lead)]
        self.kernel = _param(rngs, (*lead, *width), (*stack, *axes), dtype)
        if bias:
            value = jnp.zeros((*lead, width[1]), dtype)
            self.bias = nnx.Param(value, out_sharding=(*stack, axes[1]))


class Gated(nnx.Module):
    """Stacked gated MLPs of an intermediate size."""

    def __init__(
        self, lead: tuple[int, ...], hidden: int, width: int, bias: bool, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        # Experts are divided over the devices, not the channels of each.
        inner = "mlp" if len(lead) == 1 else "norm"
        self.gate = Linear(lead, (hidden, width), ("embed", inner), bias, dtype, rngs)
        self.up = Linear(lead, (hidden, width), ("embed", inner), bias, dtype, rngs)
        self.down = Linear(lead, (width, hidden), (inner, "embed"), bias, dtype, rngs)


class Router(nnx.Module):
    """Stacked routers: kernel [L, E, X], correction [L, X] or absent."""

    def __init__(self, layers: int, hidden: int, count: int, correction: bool, dtype: DTypeLike, rngs: nnx.Rngs):
        self.kernel = _param(rngs, (layers, hidden, count), ("layers", "embed", "norm"), dtype)
        if correction:
            self.correction = nnx.Param(jnp.zeros((layers, count), dtype), out_sharding=("layers", "norm"))


class Layers(nnx.Module):
    """Decoder layers that hold the same tensors, stacked on the leading axis."""

    def __init__(self, c: ModelConfig, layers: int, sparse: bool, dtype: DTypeLike, rngs: nnx.Rngs):
        n, e = (layers,), c.hidden_size

        def linear(width: tuple[int, int], axes: tuple[str, str], bias: bool = False) -> Linear:
            return Linear(n, width, axes, bias, dtype, rngs)

        def norm(width: int) -> Any:
            return _param(rngs, (*n, width), ("layers", "norm"), dtype, one=True)

        self.attention_norm = norm(e)
        if c.latent is not None:
            width = c.heads * (c.latent.nope + c.latent.rope)
            if c.latent.q_rank is None:
                self.q = linear((e, width), ("embed", "heads"))
            else:
                self.q_a = linear((e, c.latent.q_rank), ("embed", "norm"), c.attention_bias)
                self.q_a_norm = norm(c.latent.q_rank)
                self.q_b = linear((c.latent.q_rank, width), ("norm", "heads"))
            self.kv_a = linear((e, c.latent.rank + c.latent.rope), ("embed", "norm"), c.attention_bias)
            self.kv_a_norm = norm(c.latent.rank)
            self.kv_b = linear((c.latent.rank, c.heads * (c.latent.nope + c.latent.value)), ("norm", "heads"))
            out = c.heads * c.latent.value
        else:
            out, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
            self.q = linear((e, out), ("embed", "heads"), c.attention_bias)
            self.k = linear((e, kv), ("embed", "kv_heads"), c.attention_bias)
            self.v = linear((e, kv), ("embed", "kv_heads"), c.attention_bias)
        self.o = linear((out, e), ("heads", "embed"), c.output_bias)
        if c.qk_norm:
            self.q_norm, self.k_norm = norm(c.head_dim), norm(c.head_dim)
        if c.post_norms:
            self.post_attention_norm, self.post_mlp_norm = norm(e), norm(e)
        self.mlp_norm = norm(e)
        if c.experts is not None and sparse:
            x = c.experts
            self.router = Router(layers, e, x.count, x.correction, dtype, rngs)
            self.experts = Gated((layers, x.count), e, x.width, False, dtype, rngs)
            if x.shared:
                self.shared = Gated(n, e, x.shared, False, dtype, rngs)
        else:
            self.gate = linear((e, c.intermediate_size), ("embed", "mlp"), c.mlp_bias)
            self.up = linear((e, c.intermediate_size), ("embed", "mlp"), c.mlp_bias)
            self.down = linear((c.intermediate_size, e), ("mlp", "embed"), c.mlp_bias)


class Decoder(nnx.Module):
    """Parameters of a model: shapes, initialisers and logical sharding axes. The computation is :func:`forward`."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        v, e = config.vocab_size, config.hidden_size
        self.embed = _param(rngs, (v, e), ("vocab", "embed"), dtype)
        for name, layers in config.stacks.items():
            setattr(self, name, Layers(config, len(layers), name == "layers", dtype, rngs))
        self.norm = _param(rngs, (e,), ("norm",), dtype, one=True)
        if not config.tie_embeddings:
            self.head = _param(rngs, (e, v), ("embed", "vocab"), dtype)


def _state(config: ModelConfig, dtype: DTypeLike) -> nnx.State:
    with nnx.use_eager_sharding(False):
        return nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype)), nnx.Param)


def abstract_params(config: ModelConfig, dtype: DTypeLike = jnp.float32) -> Params:
    """Shapes and dtypes of all parameters (ShapeDtypeStruct leaves), the single source for loading and compiling."""
    return nnx.to_pure_dict(_state(config, dtype))


def logical_axes(config: ModelConfig) -> Params:
    """Logical axis names of each parameter, same structure as the parameters (tuple leaves)."""
    return nnx.to_pure_dict(
        jax.tree.map(
            lambda p: p.replace(p.get_metadata("out_sharding")),
            _state(config, jnp.float32),
            is_leaf=lambda p: isinstance(p, nnx.Param),
        )
    )


def init_params(config: ModelConfig, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Random parameters (normal, standard deviation 0.02; norms 1; biases 0)."""
    with nnx.use_eager_sharding(False):
        return nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(params=key), dtype=dtype), nnx.Param))


def transposed(x: Array) -> Array:
    """The last two axes swapped in memory, not only in shape (XLA folds a plain transposition into the product)."""
    return lax.optimization_barrier(x.swapaxes(-1, -2))


def _block(
    config: ModelConfig,
    policy: Policy,
    attend: Attend,
    angles: _Angles,
    positions: Array,
    x: Array,
    state: Any,
    index: _Index,
    p: Params,
    policy_params: Any,
    fade: Array | None,
) -> tuple[Array, Any, Any]:
    """One decoder layer on x [B, T, E]."""

    def norm(x: Array, name: str) -> Array:
        return rms_norm(x, p[name], config.rms_eps, config.unit_offset)

    normed = norm(x, "attention_norm")
    found = attention.heads(config, p, normed, angles.of(index.local_window), fade)
    inputs = LayerInput(x, normed, found.plain, positions, config.kv_heads, config.rms_eps)
    gate = policy.gate(policy_params, inputs)
    # (What only collects, as for a warm start, hands on something else than logits.)
    if isinstance(gate, Array) and index.local_window is not None and len(config.evicting) < config.layers:
        gate = jnp.where(index.local_window == NEVER, gate, jnp.asarray(-jnp.inf, gate.dtype))
    layer = Layer(*index, inputs, p)
    q, k, v = (y.swapaxes(1, 2) for y in (found.q, found.k, found.v))
    out, state, result = attend(state, layer, q, k, v, gate)
    out = attention.output(config, p, out.swapaxes(1, 2))
    x = x + (norm(out, "post_attention_norm") if config.post_norms else out)
    normed = norm(x, "mlp_norm")
    if config.experts is not None and "router" in p:
        out = mixture(config.experts, config.activation, p, normed)
    else:
        out = mlp(config.activation, p, normed)
    return x + (norm(out, "post_mlp_norm") if config.post_norms else out), state, result


_RESIDUAL = ("batch", None, None)


def on_mesh(config: ModelConfig, mesh: Mesh | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For ``wrap`` of :func:`forward`: a layer's weights come together for it alone, and rows stay where they are.

    Args:
        config: of the model.
        mesh: rows are divided over its data and fsdp axes; None: nothing happens.
    """
    axes = None if mesh is None else _layer_axes(config)

    def wrap(layer: Callable[..., Any]) -> Callable[..., Any]:
        def placed(x: Array, state: Any, index: Any, p: Params, *rest: Any) -> tuple[Array, Any, Any]:
            x, state, result = layer(constrain(mesh, x, _RESIDUAL), state, index, collect(mesh, p, axes), *rest)
            return constrain(mesh, x, _RESIDUAL), state, result

        return placed

    return wrap


@functools.cache
def _layer_axes(config: ModelConfig) -> Params:
    """Logical axes of the tensors of a layer; those of the same name lie alike in all stacks of layers."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # names are logical: no mesh in use knows them
        axes = logical_axes(config)
    found: Params = {}
    for name in config.stacks:
        found |= jax.tree.map(lambda a: a[1:], axes[name], is_leaf=lambda a: isinstance(a, tuple))
    return found


def forward(
    params: Params,
    config: ModelConfig,
    policy: Policy,
    input_ids: Array,
    positions: Array,
    attend: Attend,
    state: Any = None,
    *,
    per_layer: Any = None,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    dtype: DTypeLike | None = None,
    fade: Array | None = None,
) -> tuple[Array, Any, Any]:
    """Runs the decoder.

    Args:
        params: see :class:`Decoder`.
        config: static.
        policy: decides about eviction; its ``params`` are scanned with the layers.
        input_ids: [B, T] int32.
        positions: [B, T] int32, tokens seen before each one in its own sequence.
        attend: attention and storage, see :data:`Attend`.
        state: handed through all layers by ``attend`` (a cache), any pytree.
        per_layer: pytree of [L, ...] arrays, sliced for ``attend``.
        wrap: applied to the layer function before the scan (``jax.checkpoint`` with a policy).
        dtype: compute dtype; None keeps that of the embedding.
        fade: scalar, what is left of a borrowed channel while the model is taught to do without it, from 1 (untouched
            model) to 0; None: nothing.

    Returns:
        hidden [B, T, E] after the final norm; the last state; the per-layer results stacked [L, ...].
    """
    x = params["embed"][input_ids].astype(dtype or params["embed"].dtype)
    if config.embed_scale != 1:
        x = x * jnp.asarray(config.embed_scale, x.dtype)
    local_rope = None if config.local_rope is None else rope.angles(config.local_rope, positions, x.dtype)
    angles = _Angles(rope.angles(config.rope, positions, x.dtype), local_rope)
    windows = None
    if any(window is not None for window in config.local_windows):
        windows = jnp.asarray([NEVER if w is None else w for w in config.local_windows], jnp.int32)

    def block(x: Array, state: Any, index: _Index, p: Params, policy_params: Any) -> tuple[Array, Any, Any]:
        return _block(config, policy, attend, angles, positions, x, state, index, p, policy_params, fade)

    block = wrap(block) if wrap else block

    def step(carry: tuple[Array, Any], xs: Any) -> tuple[tuple[Array, Any], Any]:
        index, p, policy_params = xs
        x, state, result = block(*carry, index, p, policy_params)
        return (x, state), result

    every = (_Index(jnp.arange(config.layers, dtype=jnp.int32), windows, per_layer), policy.params)
    parts = []
    for name, layers in config.stacks.items():
        index, policy_params = every if len(layers) == config.layers else _slice(every, layers)
        (x, state), results = lax.scan(step, (x, state), (index, params[name], policy_params))
        parts.append(results)
    results = parts[0] if len(parts) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
    return rms_norm(x, params["norm"], config.rms_eps, config.unit_offset), state, results


def _slice(tree: Any, layers: range) -> Any:
    return jax.tree.map(lambda x: x[layers.start : layers.stop], tree)


def of_evicting(config: ModelConfig, per_layer: Array) -> Array:
    """The slices of ``per_layer`` [L, ...] that belong to the layers in which a policy may evict."""
    if len(config.evicting) == config.layers:
        return per_layer
    return per_layer[jnp.asarray(config.evicting)]


def head_kernel(params: Params) -> Array:
    """Output projection [E, V]."""
    return params["head"] if "head" in params else params["embed"].T


def logits(params: Params, hidden: Array) -> Array:
    """Next-token logits [..., V], float32 (float64 for float64 models), of hidden [..., E]."""
    return jnp.matmul(
        hidden, head_kernel(params).astype(hidden.dtype), preferred_element_type=accumulator(hidden.dtype)
    )

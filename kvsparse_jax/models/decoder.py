"""The decoder of every family: parameters declared once in Flax NNX, and the forward pass as a pure function.

Layers are stacked on a leading axis and scanned, so compile time does not depend on depth. How keys and values are
stored and attended to is the caller's: ``forward`` hands q, k, v and the policy's decisions of each layer to an
``attend`` function, which training, prefill and decode supply.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike

from kernels.numerics import accumulator, narrow, widen
from kernels.visibility import NEVER
from kvsparse_jax.models import rope
from kvsparse_jax.models.config import ModelConfig
from kvsparse_jax.policies.base import LayerInput, Policy

Params = dict[str, Any]

_INITIAL_STD = 0.02


class _Index(NamedTuple):
    """What the scan over the layers slices for each of them, see :class:`Layer`."""

    number: Array
    local_window: Array | None
    extra: Any


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
per-layer result). The gate is the policy's logit as emitted by each token; positive means evict."""


def _param(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], dtype: DTypeLike, one: bool = False) -> Any:
    if one:
        return nnx.Param(jnp.ones(shape, dtype), out_sharding=axes)
    value = jax.random.normal(rngs.params(), shape, jnp.float32) * jnp.float32(_INITIAL_STD)
    return nnx.Param(value.astype(dtype), out_sharding=axes)


class Linear(nnx.Module):
    """Stacked projections: kernel [L, in, out], bias [L, out] or absent."""

    def __init__(
        self, layers: int, width: tuple[int, int], axes: tuple[str, str], bias: bool, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        self.kernel = _param(rngs, (layers, *width), ("layers", *axes), dtype)
        if bias:
            value = jnp.zeros((layers, width[1]), dtype)
            self.bias = nnx.Param(value, out_sharding=("layers", axes[1]))


class Layers(nnx.Module):
    """All decoder layers, stacked on the leading axis."""

    def __init__(self, c: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        n, e, f = c.layers, c.hidden_size, c.intermediate_size
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.attention_norm = _param(rngs, (n, e), ("layers", "norm"), dtype, one=True)
        self.q = Linear(n, (e, q), ("embed", "heads"), c.attention_bias, dtype, rngs)
        self.k = Linear(n, (e, kv), ("embed", "kv_heads"), c.attention_bias, dtype, rngs)
        self.v = Linear(n, (e, kv), ("embed", "kv_heads"), c.attention_bias, dtype, rngs)
        self.o = Linear(n, (q, e), ("heads", "embed"), c.output_bias, dtype, rngs)
        if c.qk_norm:
            self.q_norm = _param(rngs, (n, c.head_dim), ("layers", "norm"), dtype, one=True)
            self.k_norm = _param(rngs, (n, c.head_dim), ("layers", "norm"), dtype, one=True)
        self.mlp_norm = _param(rngs, (n, e), ("layers", "norm"), dtype, one=True)
        self.gate = Linear(n, (e, f), ("embed", "mlp"), c.mlp_bias, dtype, rngs)
        self.up = Linear(n, (e, f), ("embed", "mlp"), c.mlp_bias, dtype, rngs)
        self.down = Linear(n, (f, e), ("mlp", "embed"), c.mlp_bias, dtype, rngs)


class Decoder(nnx.Module):
    """Parameters of a model: shapes, initialisers and logical sharding axes. The computation is :func:`forward`."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        v, e = config.vocab_size, config.hidden_size
        self.embed = _param(rngs, (v, e), ("vocab", "embed"), dtype)
        self.layers = Layers(config, dtype, rngs)
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


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """RMS norm over the last axis, computed in float32 and scaled by the weight in the dtype of x."""
    acc = accumulator(x.dtype)
    wide = x.astype(acc)
    normed = wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + jnp.asarray(eps, acc))
    return normed.astype(x.dtype) * weight.astype(x.dtype).reshape((1,) * (x.ndim - 1) + weight.shape)


def dense(p: Params, x: Array) -> Array:
    """``x @ kernel (+ bias) (+ low-rank update)`` for x [B, T, in]; weights are cast to the dtype of x.

    A parameter dict may carry ``lora_a`` [in, r] and ``lora_b`` [r, out], whose product is added (any alpha / r is
    folded into them).
    """
    y = x @ p["kernel"].astype(x.dtype)
    if "bias" in p:
        y = y + p["bias"].astype(x.dtype)[None, None]
    if "lora_a" in p:
        y = y + (x @ p["lora_a"].astype(x.dtype)) @ p["lora_b"].astype(x.dtype)
    return y


def without_borrowed(q: Array, kv_heads: int, left: Array | None = None) -> Array:
    """Queries [B, T, Hq, D] without the channel that decisions are read from, see ``ModelConfig.borrowed_channel``.

    Args:
        q: the queries.
        kv_heads: H.
        left: scalar, the share of the channel that stays; None: nothing.
    """
    group = q.shape[2] // kv_heads
    borrowed = (jnp.arange(q.shape[2]) % group == 0)[:, None] & (jnp.arange(q.shape[3]) == q.shape[3] - 1)[None]
    rest = jnp.zeros_like(q) if left is None else q * left.astype(q.dtype)
    return jnp.where(borrowed[None, None], rest, q)


def transposed(x: Array) -> Array:
    """The last two axes swapped in memory, not only in shape (XLA folds a plain transposition into the product)."""
    return lax.optimization_barrier(x.swapaxes(-1, -2))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}
"""The gate activations of the MLP, as config.json names them."""


def _block(
    config: ModelConfig,
    policy: Policy,
    attend: Attend,
    angles: tuple[Array, Array],
    positions: Array,
    x: Array,
    state: Any,
    index: _Index,
    p: Params,
    policy_params: Any,
    fade: Array | None,
) -> tuple[Array, Any, Any]:
    """One decoder layer on x [B, T, E]."""
    batch, length, _ = x.shape
    normed = rms_norm(x, p["attention_norm"], config.rms_eps)
    q = dense(p["q"], normed).reshape(batch, length, config.heads, config.head_dim)
    k = dense(p["k"], normed).reshape(batch, length, config.kv_heads, config.head_dim)
    v = dense(p["v"], normed).reshape(batch, length, config.kv_heads, config.head_dim)
    if config.qk_norm:
        q, k = rms_norm(q, p["q_norm"], config.rms_eps), rms_norm(k, p["k_norm"], config.rms_eps)
    inputs = LayerInput(x, normed, q, positions, config.kv_heads, config.rms_eps)
    gate = policy.gate(policy_params, inputs)
    if config.borrowed_channel:
        # Before and again after the rotation, which mixes it with its partner (as in the released code).
        q = without_borrowed(rope.rotate(without_borrowed(q, config.kv_heads, fade), *angles), config.kv_heads, fade)
    else:
        q = rope.rotate(q, *angles)
    k = rope.rotate(k, *angles)
    layer = Layer(*index, inputs, p)
    out, state, result = attend(state, layer, q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2), gate)
    x = x + dense(p["o"], out.swapaxes(1, 2).reshape(batch, length, config.heads * config.head_dim))
    normed = rms_norm(x, p["mlp_norm"], config.rms_eps)
    hidden = ACTIVATIONS[config.activation](widen(dense(p["gate"], normed))) * widen(dense(p["up"], normed))
    return x + dense(p["down"], narrow(hidden, x.dtype)), state, result


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
    angles = rope.angles(config.rope, positions, x.dtype)
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

    layers = _Index(jnp.arange(config.layers, dtype=jnp.int32), windows, per_layer)
    (x, state), results = lax.scan(step, (x, state), (layers, params["layers"], policy.params))
    return rms_norm(x, params["norm"], config.rms_eps), state, results


def head_kernel(params: Params) -> Array:
    """Output projection [E, V]."""
    return params["head"] if "head" in params else params["embed"].T


def logits(params: Params, hidden: Array) -> Array:
    """Next-token logits [..., V], float32 (float64 for float64 models), of hidden [..., E]."""
    return jnp.matmul(
        hidden, head_kernel(params).astype(hidden.dtype), preferred_element_type=accumulator(hidden.dtype)
    )

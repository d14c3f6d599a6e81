"""KVzap surrogates (arXiv 2601.07891): what they are fitted to, streamed, and how both kinds are fitted.

One forward pass over "P, repeat it: P" gives, in every layer, the attention inputs of P's tokens and the logarithm of
their KVzip+ (or KVzip) scores. Two things are kept: sums for the normal equations, from which the linear one follows
exactly, and a sample of tokens in a buffer of bounded size, on which the MLP is trained whenever the buffer is full. So
memory does not grow with the number of prompts, and the model sees every prompt once.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import Mesh

from kvsparse_jax import whole
from kvsparse_jax.errors import InputError
from kvsparse_jax.models import decoder
from kvsparse_jax.models.config import ModelConfig
from kvsparse_jax.oracle import ASK_FIRST as REQUEST
from kvsparse_jax.oracle import Kind, Norm, layer_scores
from kvsparse_jax.policies import Dense
from kvsparse_jax.policies.kvzap import predict
from kvsparse_jax.tokenizer import Tokenizer

LEAST_SCORE = -30.0
"""Smallest log score: a probability that underflows would be -inf."""

_MARK = "[the context]"


class Extended(NamedTuple):
    """Token ids around the two copies of a context: before the first one, and between them."""

    before: list[int]
    between: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Extended":
        """By the chat template, or as plain text where there is none.

        Raises:
            InputError: the template shows the context altered, or not twice.
        """
        if not tokenizer.has_chat_template:
            return cls(tokenizer.encode("", add_bos=True), tokenizer.encode(REQUEST + "\n", add_bos=False))
        messages = [{"role": "user", "content": _MARK + REQUEST}, {"role": "assistant", "content": _MARK}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
        pieces = text.split(_MARK)
        if len(pieces) != 3 or REQUEST not in pieces[1]:
            raise InputError(
                "the chat template alters a prompt and its repetition, so the oracle cannot be asked through it: "
                f"of two copies of the context it shows {len(pieces) - 1}"
            )
        return cls(*(tokenizer.encode(piece, add_bos=False) for piece in pieces[:2]))

    def ids(self, contexts: np.ndarray) -> np.ndarray:
        """Extended prompts [B, T] of contexts [B, n]."""
        before, between = (np.tile(np.asarray(x, np.int32), (len(contexts), 1)) for x in self)
        return np.concatenate([before, contexts, between, contexts], 1).astype(np.int32)

    def spans(self, length: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Columns of the context and of its repetition, for contexts of ``length`` tokens."""
        start = len(self.before)
        again = start + length + len(self.between)
        return (start, start + length), (again, again + length)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """Sums over tokens, of which the normal equations are made. Float32; L layers, D features, H KV heads.

    Attributes:
        count: number of tokens, a scalar.
        x, y: [L, D] and [L, H].
        gram: [L, D, D], sum of x x'.
        cross: [L, D, H], sum of x y'.
    """

    count: Array
    x: Array
    y: Array
    gram: Array
    cross: Array

    @classmethod
    def zero(cls, config: ModelConfig) -> "Sums":
        """Of no token."""
        n, d, h = config.layers, config.hidden_size, config.kv_heads
        shapes = ((), (n, d), (n, h), (n, d, d), (n, d, h))
        return cls(*(jnp.zeros(shape, jnp.float32) for shape in shapes))

    def plus(self, layer: Array, x: Array, y: Array) -> "Sums":
        """With tokens x [N, D], y [N, H] of a layer (which are not counted yet)."""
        wide = x.astype(jnp.float32)
        return Sums(
            self.count,
            self.x.at[layer].add(wide.sum(0)),
            self.y.at[layer].add(y.sum(0)),
            self.gram.at[layer].add(jnp.matmul(x.T, x, preferred_element_type=jnp.float32)),
            self.cross.at[layer].add(jnp.matmul(wide.T, y)),
        )


@functools.partial(
    jax.jit, static_argnames=("config", "context", "probe", "kind", "norm", "mesh"), donate_argnames="sums"
)
def collect(
    params: decoder.Params,
    config: ModelConfig,
    ids: Array,
    sums: Sums | None,
    chosen: Array,
    *,
    context: tuple[int, int],
    probe: tuple[int, int],
    kind: Kind = "kvzip+",
    norm: Norm = "input",
    mesh: Mesh | None = None,
) -> tuple[Sums | None, Array, Array]:
    """Runs extended prompts through the model once.

    Args:
        params, config: the model.
        ids: [B, T], see :class:`Extended`.
        sums: what was summed before; every token of the contexts is added. None: nothing is summed.
        chosen: [B, S] int32, tokens of each context to give back.
        context, probe: columns of the two copies.
        kind, norm, mesh: see :func:`kvsparse_jax.oracle.layer_scores`.

    Returns:
        The sums; attention inputs [L, B * S, D] of the chosen tokens, and their log scores [L, B * S, H] float32.
    """
    segments = jnp.zeros_like(ids)
    positions = whole.positions_of(segments)
    attention = whole.dense_attention(config, segments, mesh)

    def attend(
        sums: Sums | None, layer: decoder.Layer, q: Array, k: Array, v: Array, gate: Array | None
    ) -> tuple[Array, Sums | None, tuple[Array, Array]]:
        out, lse = attention(layer, q, k, v)
        scores = layer_scores(
            config,
            layer,
            q,
            k,
            v,
            lse,
            segment_ids=segments,
            context=context,
            probe=probe,
            kind=kind,
            norm=norm,
            mesh=mesh,
        )
        y = jnp.maximum(jnp.log(scores), LEAST_SCORE).astype(jnp.float32).swapaxes(1, 2)  # [B, n, H]
        x = layer.inputs.normed[:, slice(*context)]
        if sums is not None:
            sums = sums.plus(layer.number, x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1]))
        picked = [jnp.take_along_axis(z, chosen[..., None], 1).reshape(-1, z.shape[-1]) for z in (x, y)]
        return out, sums, (picked[0], picked[1])

    wrap = decoder.on_mesh(config, mesh)
    _, sums, (x, y) = decoder.forward(params, config, Dense(), ids, positions, attend, sums, wrap=wrap)
    if sums is not None:
        sums = dataclasses.replace(sums, count=sums.count + chosen.shape[0] * (context[1] - context[0]))
    return sums, x, y


def ridge(sums: Sums, alpha: float) -> Any:
    """The linear surrogate: ridge regression with an intercept that is not penalised, exactly, layer by layer.

    Args:
        sums: over all tokens.
        alpha: weight of the squared coefficients against the sum of squared errors.

    Returns:
        Parameters of a linear :class:`kvsparse_jax.policies.KVzap`.
    """
    count = float(sums.count)
    kernels, biases = [], []
    for n in range(sums.x.shape[0]):
        gram, cross, x, y = (np.asarray(z[n], np.float64) for z in (sums.gram, sums.cross, sums.x, sums.y))
        mean_x, mean_y = x / count, y / count
        gram = (gram + gram.T) / 2 - count * np.outer(mean_x, mean_x)
        cross = cross - count * np.outer(mean_x, mean_y)
        # Without a penalty features that are not independent leave the smallest of many solutions.
        kernel = (
            np.linalg.lstsq(gram + alpha * np.eye(len(gram)), cross, rcond=None)[0]
            if alpha == 0
            else (np.linalg.solve(gram + alpha * np.eye(len(gram)), cross))
        )
        kernels.append(kernel)
        biases.append(mean_y - mean_x @ kernel)
    out = {"kernel": jnp.asarray(np.stack(kernels), jnp.float32), "bias": jnp.asarray(np.stack(biases), jnp.float32)}
    return {"out": out}


class Scale(NamedTuple):
    """Mean and standard deviation of the features [L, D] and targets [L, H], by which the MLP is trained."""

    x_mean: Array
    x_std: Array
    y_mean: Array
    y_std: Array

    @classmethod
    def of(cls, x: np.ndarray, y: np.ndarray) -> "Scale":
        """Over tokens x [L, N, D], y [L, N, H]."""
        found = []
        for values in (x, y):
            mean, std = [], []
            for layer in values:
                wide = layer.astype(np.float32)
                mean.append(wide.mean(0))
                std.append(np.maximum(wide.std(0), 1e-3))
            found += [jnp.asarray(np.stack(mean)), jnp.asarray(np.stack(std))]
        return cls(*found)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mlp:
    """An MLP surrogate of every layer in training, on standardised features and targets.

    Attributes:
        params: see :class:`kvsparse_jax.policies.KVzap`, float32.
        state: of the optimiser, per layer.
        scale: of the first buffer that was filled; kept.
        step: int32 scalar.
    """

    params: Any
    state: Any
    scale: Scale
    step: Array

    @classmethod
    def init(cls, layers: int, features: int, width: int, heads: int, scale: Scale, seed: int) -> "Mlp":
        """Uniform within 1 / sqrt(inputs), as the published ones started."""
        keys = jax.random.split(jax.random.key(seed), 4)

        def part(keys: Array, before: int, after: int) -> dict[str, Array]:
            reach = before**-0.5
            return {
                "kernel": jax.random.uniform(keys[0], (layers, before, after), minval=-reach, maxval=reach),
                "bias": jax.random.uniform(keys[1], (layers, after), minval=-reach, maxval=reach),
            }

        params = {"hidden": part(keys[:2], features, width), "out": part(keys[2:], width, heads)}
        return cls(params, jax.vmap(_optimiser(1.0, 0.0).init)(params), scale, jnp.zeros((), jnp.int32))

    def folded(self) -> Any:
        """Parameters for features and targets as they are."""
        x_mean, x_std, y_mean, y_std = self.scale
        hidden, out = self.params["hidden"], self.params["out"]
        kernel = hidden["kernel"] / x_std[..., None]
        bias = hidden["bias"] - jnp.einsum("ld,ldf->lf", x_mean, kernel, precision="highest")
        return {
            "hidden": {"kernel": kernel, "bias": bias},
            "out": {"kernel": out["kernel"] * y_std[:, None], "bias": out["bias"] * y_std + y_mean},
        }


class Restraint(NamedTuple):
    """What keeps an MLP from learning its sample by heart.

    Attributes:
        dropout: share of hidden units left out of a step.
        input_dropout: the same of (standardised) features.
        weight_decay: AdamW's, of the kernels.
    """

    dropout: float = 0.0
    input_dropout: float = 0.0
    weight_decay: float = 1e-4


def _optimiser(lr: float | Array, weight_decay: float) -> optax.GradientTransformation:
    def kernels(params: Any) -> Any:
        return jax.tree.map(lambda p: p.ndim == 2, params)  # of one layer

    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(lr, weight_decay=weight_decay, mask=kernels))


def _dropped(key: Array, rate: float, x: Array) -> Array:
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), jnp.zeros_like(x))


@functools.partial(jax.jit, donate_argnames="mlp", static_argnames="restraint")
def mlp_step(
    mlp: Mlp, x: Array, y: Array, lr: Array, key: Array, restraint: Restraint | None = None
) -> tuple[Mlp, Array]:
    """One AdamW step of all layers on tokens x [L, b, D], y [L, b, H]; and the mean loss. Products are in x's dtype."""

    restraint = restraint or Restraint()

    def of_layer(params: Any, state: Any, scale: Scale, key: Array, x: Array, y: Array) -> tuple[Any, Any, Array]:
        inputs = (x.astype(jnp.float32) - scale.x_mean[None]) / scale.x_std[None]
        wanted = (y - scale.y_mean[None]) / scale.y_std[None]
        for_inputs, for_hidden = jax.random.split(key)
        if restraint.input_dropout:
            inputs = _dropped(for_inputs, restraint.input_dropout, inputs)
        alter = functools.partial(_dropped, for_hidden, restraint.dropout) if restraint.dropout else None

        def loss(params: Any) -> Array:
            return jnp.mean(jnp.square(predict(params, inputs.astype(x.dtype), alter) - wanted))

        value, grads = jax.value_and_grad(loss)(params)
        # optax counts in int32 and multiplies with float32 without saying so.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, state = _optimiser(lr, restraint.weight_decay).update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params, state, value

    keys = jax.random.split(jax.random.fold_in(key, mlp.step), x.shape[0])
    params, state, losses = jax.vmap(of_layer)(mlp.params, mlp.state, mlp.scale, keys, x, y)
    return Mlp(params, state, mlp.scale, mlp.step + 1), losses.mean()


class Correlation:
    """Squared Pearson correlation per layer and head, over tokens that come in pieces; sums in float64."""

    def __init__(self) -> None:
        self._sums: np.ndarray | None = None

    def add(self, predicted: Array, wanted: Array) -> None:
        """Tokens of predicted and wanted scores [L, N, H]."""
        a, b = np.asarray(predicted, np.float64), np.asarray(wanted, np.float64)
        one = np.ones_like(a)
        new = np.stack([z.sum(1) for z in (one, a, b, a * a, b * b, a * b)])
        self._sums = new if self._sums is None else self._sums + new

    def squared(self) -> np.ndarray:
        """[L, H]; 0 where one of the two does not vary."""
        if self._sums is None:
            raise ValueError("no token was added")
        n, a, b, aa, bb, ab = self._sums
        covariance = ab - a * b / n
        variances = (aa - a * a / n) * (bb - b * b / n)
        return np.where(variances > 0, covariance**2 / np.where(variances > 0, variances, 1.0), 0.0)


@jax.jit
def predict_all(params: Any, x: Array) -> Array:
    """Scores [L, N, H] of attention inputs x [L, N, D]."""
    return lax.map(lambda px: predict(px[0], px[1]), (params, x))

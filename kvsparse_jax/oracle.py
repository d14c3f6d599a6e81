"""Importance oracles: how much attention each key of a context receives while the model repeats that context.

KVzip (arXiv 2505.23416) lets the model read a context, asks it to repeat it, and scores a key by the largest attention
probability that a token of the repetition gives to it; KVzip+ (KVzap, arXiv 2601.07891, section 3.1) weighs each
probability by what it moves: the norm of the value behind the output projection, over the norm of the reading token's
hidden state. Here both are computed in one forward pass over the extended sequence, with the softmax over all of it;
:func:`scores_in_chunks` is KVzip's own form for long contexts.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh
from jax.typing import ArrayLike

from kernels.numerics import accumulator
from kernels.received.api import received
from kernels.visibility import NEVER, PADDING
from kvsparse_jax import errors, whole
from kvsparse_jax.cache.base import bucket
from kvsparse_jax.cache.dense import DenseCache
from kvsparse_jax.cache.dense import init as init_dense
from kvsparse_jax.cache.spec import CacheSpec
from kvsparse_jax.errors import InputError
from kvsparse_jax.generation.decode import Model, prefill, with_head
from kvsparse_jax.models import decoder
from kvsparse_jax.models.attention import value_projection
from kvsparse_jax.models.config import ModelConfig
from kvsparse_jax.models.sharding import by_heads, check_rows, kv_axis
from kvsparse_jax.policies.dense import Dense
from kvsparse_jax.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kvsparse_jax.lm import LM

Kind = Literal["kvzip", "kvzip+"]
Norm = Literal["input", "residual"]


def value_norms(v: Array, projection: Array) -> Array:
    """``||W_O^(h) v||`` of each value and each query head that reads it.

    Args:
        v: [B, H, N, D].
        projection: [Hq, D, E], see :func:`kvsparse_jax.models.attention.value_projection`.

    Returns:
        [B, Hq, N], in the accumulator's dtype.
    """
    acc = accumulator(v.dtype)
    batch, kv_heads, count, dim = v.shape
    heads = projection.shape[0]
    w = projection.astype(acc).reshape(kv_heads, heads // kv_heads, dim, -1)
    # ||W v||^2 = v' (W W') v: the Gram matrices [D, D] are small, the projected values [N, E] would not be.
    gram = jnp.einsum("hgde,hgfe->hgdf", w, w)
    wide = v.astype(acc)
    squares = jnp.einsum("bhnd,hgdf,bhnf->bhgn", wide, gram, wide)
    return jnp.sqrt(jnp.maximum(squares, 0)).reshape(batch, heads, count)


def _over_norm(x: Array) -> Array:
    """1 / ||x|| over the last axis."""
    return 1 / jnp.maximum(jnp.sqrt(jnp.sum(x * x, -1)), jnp.asarray(jnp.finfo(x.dtype).tiny, x.dtype))


def _strongest(config: ModelConfig, mesh: Mesh | None) -> Callable[..., Array]:
    """The maximum over queries, of (q, k, q_positions, k_positions, row_weight, lse), see :func:`received`."""
    of_kv = ("batch", kv_axis(mesh, config.kv_heads))

    def strongest(
        q: Array, k: Array, q_positions: Array, k_positions: Array, row_weight: Array | None, lse: Array | None
    ) -> Array:
        return received(
            q, k, q_positions, k_positions, scale=config.scale, reduce="max", row_weight=row_weight, lse=lse
        )

    return by_heads(mesh, strongest, [("batch", "heads"), of_kv, ("batch",), of_kv, ("batch",), ("batch", "heads")])


def layer_scores(
    config: ModelConfig,
    layer: decoder.Layer,
    q: Array,
    k: Array,
    v: Array,
    lse: Array,
    *,
    segment_ids: Array,
    context: tuple[int, int],
    probe: tuple[int, int],
    kind: Kind,
    norm: Norm = "input",
    mesh: Mesh | None = None,
) -> Array:
    """Scores of one layer, plain probabilities (the logarithm is the caller's).

    Args:
        config: of the model.
        layer: what ``attend`` is told.
        q: [B, Hq, T, D] after RoPE.
        k, v: [B, H, T, D], k after RoPE.
        lse: [B, Hq, T] of the layer's attention, see :func:`kvsparse_jax.whole.dense_attention`.
        segment_ids: [B, T], 0, or PADDING where there is no token.
        context, probe: columns, end exclusive.
        kind: "kvzip" or "kvzip+".
        norm: the hidden state whose norm divides: the attention's "input" (released code) or the "residual" stream
            before its norm (the paper's text).
        mesh: rows and heads are divided over it, see :func:`kvsparse_jax.whole.attend`.

    Returns:
        [B, H, n], n columns of the context.
    """
    acc = accumulator(q.dtype)
    rows, columns = slice(*probe), slice(*context)
    row_weight = None
    if kind == "kvzip+":
        x = (layer.inputs.normed if norm == "input" else layer.inputs.residual)[:, rows].astype(acc)
        row_weight = _over_norm(x)
    positions, real = whole.positions_of(segment_ids), segment_ids > PADDING
    at = jnp.broadcast_to(jnp.where(real, positions, NEVER)[:, None], k.shape[:3])
    asks = jnp.where(real, positions, -1)[:, rows]
    strongest = _strongest(config, mesh)
    if layer.local_window is None:
        scores = strongest(q[:, :, rows], k[:, :, columns], asks, at[:, :, columns], row_weight, lse[:, :, rows])
    else:  # the log-sum-exp is over the keys of a window
        scores = strongest(q[:, :, rows], k, asks, at, row_weight, None)[..., columns]
    if kind == "kvzip+":
        scores = scores * value_norms(v[:, :, columns], value_projection(config, layer.params))
    return scores.reshape(scores.shape[0], config.kv_heads, -1, columns.stop - columns.start).max(2)


@functools.partial(jax.jit, static_argnames=("config", "context", "probe", "kind", "norm", "mesh"))
def _scores(
    params: decoder.Params,
    config: ModelConfig,
    ids: Array,
    segment_ids: Array,
    *,
    context: tuple[int, int],
    probe: tuple[int, int],
    kind: Kind,
    norm: Norm,
    mesh: Mesh | None,
) -> Array:
    policy = Dense()
    attention = whole.dense_attention(config, segment_ids, mesh)
    positions = whole.positions_of(segment_ids)

    def attend(
        state: None, layer: decoder.Layer, q: Array, k: Array, v: Array, gate: Array | None
    ) -> tuple[Array, None, Array]:
        out, lse = attention(layer, q, k, v)
        found = layer_scores(
            config,
            layer,
            q,
            k,
            v,
            lse,
            segment_ids=segment_ids,
            context=context,
            probe=probe,
            kind=kind,
            norm=norm,
            mesh=mesh,
        )
        return out, state, found

    return decoder.forward(params, config, policy, ids, positions, attend, wrap=decoder.on_mesh(config, mesh))[2]


def _span(name: str, span: tuple[int, int], length: int) -> tuple[int, int]:
    try:
        start, end = (int(x) for x in span)
    except (TypeError, ValueError):
        raise InputError(f"{name} must be a pair of columns (start, end), not {span!r}") from None
    if not 0 <= start < end <= length:
        raise InputError(f"{name} must be columns with 0 <= start < end <= {length}, not {(start, end)}")
    return start, end


def _chosen(name: str, value: object, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise InputError(f"{name} must be one of {', '.join(accepted)}, not {value!r}")


def oracle_scores(
    lm: "LM",
    input_ids: ArrayLike,
    context: tuple[int, int],
    probe: tuple[int, int],
    kind: Kind = "kvzip+",
    *,
    attention_mask: ArrayLike | None = None,
    norm: Norm = "input",
) -> Array:
    """What each key of the context is worth to the probe that repeats it; the full cache, whatever the policy.

    Args:
        lm: the model; on a mesh rows are divided over its data and fsdp axes and heads over its tensor axis.
        input_ids: [B, T], context and probe in one sequence.
        context: columns (start, end) of the keys to score, end exclusive.
        probe: columns of the repetition, whose queries count.
        kind: "kvzip", the largest probability; or "kvzip+", weighed by ``||W_O v|| / ||x||``, of which the natural
            logarithm is given.
        attention_mask: [B, T] or None.
        norm: "kvzip+": the hidden state x, the attention's "input" (released code) or the "residual" stream.

    Returns:
        [L, B, H, end - start] float32. Keys that no query of the probe sees have 0, or -inf as a logarithm. Layers with
        a sliding window have scores too, as if all tokens were there; they mean nothing.

    Raises:
        InputError: spans outside the sequence, unknown kind, rows or heads that the mesh does not divide.

    References:
        arXiv 2505.23416, section 3; arXiv 2601.07891, section 3.1.
    """
    _chosen("kind", kind, get_args(Kind))
    _chosen("norm", norm, get_args(Norm))
    lm.config.needs_full_attention("the KVzip oracle")
    ids, segments = lm.check(input_ids, attention_mask)
    length = ids.shape[1]
    spans = {"context": _span("context", context, length), "probe": _span("probe", probe, length)}
    check_rows(lm.mesh, ids.shape[0])
    found = _scores(lm.params, lm.config, ids, segments, kind=kind, norm=norm, mesh=lm.mesh, **spans)
    return jnp.log(found) if kind == "kvzip+" else found


class Probe(NamedTuple):
    """Token ids around the pieces of a long context, of which the model is asked for one repetition each.

    A piece is asked for by ``first`` (the first one) or ``following`` and the last tokens of the piece before it; then
    come ``suffix`` (what ends the user's turn and opens the assistant's) and the piece itself.
    """

    first: Sequence[int]
    following: Sequence[int]
    suffix: Sequence[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Probe":
        """KVzip's words, and the suffix of the tokenizer's chat template (a line break where there is none)."""
        suffix = "\n"
        if tokenizer.has_chat_template:
            mark = "[the context]"
            text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
            before, found, suffix = text.partition(mark)
            if not found:
                raise InputError("the chat template does not show the user's message: KVzip cannot ask through it")
        return cls(*(tokenizer.encode(x, add_bos=False) for x in (ASK_FIRST, ASK_FOLLOWING, suffix)))


ASK_FIRST = "\n\nRepeat the previous context exactly."
ASK_FOLLOWING = "\n\nRepeat the part of the previous context exactly, starting with"
_OVERLAP = 8  # tokens of the piece before that a following piece is announced with


@functools.partial(jax.jit, static_argnames=("piece", "kind"))
def _piece_scores(
    model: Model, cache: DenseCache, probe: Array, start: Array, end: Array, sinks: Array, *, piece: int, kind: Kind
) -> Array:
    """Scores [L, B, H, piece] of the columns from ``start`` to ``end`` (exclusive) of a full cache of the context.

    Args:
        probe: [B, T], padded with -1 at the end.
        start, end, sinks: int32 scalars; the softmax is over the first ``sinks`` columns, the piece and the probe.
    """
    config = model.config
    valid = probe >= 0
    at = cache.positions(valid)

    def attend(
        cache: DenseCache, layer: decoder.Layer, q: Array, k: Array, v: Array, gate: Array | None
    ) -> tuple[Array, DenseCache, Array]:
        out, cache = cache.attend(
            layer.number, q, k, v, None, valid, scale=config.scale, local_window=layer.local_window
        )
        keys, values = cache.entries(layer.number)
        heads = k.shape[:2]

        def columns(x: Array) -> Array:
            return lax.dynamic_slice_in_dim(x, start, piece, 2)

        first = jnp.arange(_SINKS_AT_MOST, dtype=jnp.int32)
        nth = start + jnp.arange(piece, dtype=jnp.int32)
        never, before = jnp.int32(NEVER), jnp.int32(0)
        positions = [
            jnp.broadcast_to(x, (*heads, x.shape[-1]))
            for x in (
                jnp.where(first < jnp.minimum(sinks, start), before, never)[None, None],
                jnp.where(nth < end, before, never)[None, None],
                jnp.where(valid, at, never)[:, None],
            )
        ]
        row_weight = None
        if kind == "kvzip+":
            x = layer.inputs.normed.astype(accumulator(q.dtype))
            row_weight = _over_norm(x)
        # (One row at a time, so there is nothing to divide but heads, which the compiler does.)
        found = _strongest(config, None)(
            q,
            jnp.concatenate([keys[:, :, :_SINKS_AT_MOST], columns(keys), k], 2),
            jnp.where(valid, at, -1),
            jnp.concatenate(positions, 2),
            row_weight,
            None,
        )[..., _SINKS_AT_MOST : _SINKS_AT_MOST + piece]
        if kind == "kvzip+":
            found = found * value_norms(columns(values), value_projection(config, layer.params))
        return out, cache, found.reshape(*heads, -1, piece).max(2)

    return decoder.forward(model.params, config, Dense(), jnp.maximum(probe, 0), at, attend, cache)[2]


_SINKS_AT_MOST = 16


def scores_in_chunks(
    model: Model,
    context: np.ndarray,
    probe: Probe,
    *,
    prefix: int = 0,
    chunk: int = 2048,
    sinks: int = 4,
    kind: Kind = "kvzip",
) -> np.ndarray:
    """KVzip's own form, for long contexts: a full cache of the context, asked for piece by piece.

    The softmax of a piece is over the sinks, the piece and the probe alone, so its scores are not those of
    :func:`oracle_scores`.

    Args:
        model: the model; its policy does not matter.
        context: [B, T] token ids.
        probe: see :class:`Probe`.
        prefix: first tokens that are not scored (a chat template's); their score is 0.
        chunk: tokens of a piece.
        sinks: first tokens that are part of every piece's softmax, at most 16.
        kind: "kvzip" or "kvzip+"; the plain value of either, no logarithm.

    Returns:
        [L, B, H, T] float32; those of layers with a sliding window mean nothing, see :func:`oracle_scores`.

    Raises:
        InputError: settings out of range, or a context that with the largest probe is longer than the model's.
    """
    _chosen("kind", kind, get_args(Kind))
    model.config.needs_full_attention("the KVzip oracle")
    batch, length = context.shape
    errors.whole("chunk", chunk, 1)
    if not 0 <= errors.whole("sinks", sinks, 0) <= _SINKS_AT_MOST:
        raise InputError(f"sinks must be at most {_SINKS_AT_MOST}, not {sinks}")
    if not 0 <= prefix < length:
        raise InputError(f"prefix must be from 0 to {length - 1}, the context being {length} tokens, not {prefix}")
    starts = range(prefix, length, chunk)
    piece = min(chunk, length - prefix)
    asked = []
    for start in starts:
        words = np.asarray([*(probe.first if start == prefix else probe.following)], np.int32)
        before = context[:, max(start - _OVERLAP, prefix) : start]
        rows = [np.tile(words, (batch, 1)), before, np.tile(np.asarray(probe.suffix, np.int32), (batch, 1))]
        asked.append(np.concatenate([*rows, context[:, start : start + piece]], 1))
    width = max(x.shape[1] for x in asked)
    if length + width > model.config.max_positions:
        raise InputError(
            f"a context of {length} tokens and a probe of {width} are more than the model's "
            f"{model.config.max_positions}"
        )
    dense = dataclasses.replace(with_head(model), policy=Dense())
    spec = CacheSpec.of(dense.config, dense.policy, dense.dtype)
    cache = jax.device_put(init_dense(spec, batch, slots=bucket(length + max(width, piece))), dense.sharding)
    for start in range(0, length, chunk):
        ids = context[:, start : start + chunk]
        pad = ((0, 0), (0, min(chunk, length) - ids.shape[1]))
        valid = np.pad(np.ones(ids.shape, bool), pad)
        cache = prefill(dense, cache, jnp.asarray(np.pad(ids, pad), jnp.int32), jnp.asarray(valid))
    found = np.zeros((model.config.layers, batch, model.config.kv_heads, length), np.float32)
    for start, question in zip(starts, asked, strict=True):
        end = min(start + piece, length)
        ids = np.pad(question, ((0, 0), (0, width - question.shape[1])), constant_values=-1)
        scores = _piece_scores(
            dense,
            cache,
            jnp.asarray(ids, jnp.int32),
            *(jnp.int32(x) for x in (start, end, sinks)),
            piece=piece,
            kind=kind,
        )
        found[..., start:end] = np.asarray(scores)[..., : end - start]
    return found

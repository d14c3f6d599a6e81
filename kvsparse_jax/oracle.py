"""Importance oracles: how much attention each key of a context receives while the model repeats that context.

KVzip (arXiv 2505.23416) lets the model read a context, asks it to repeat it, and scores a key by the largest attention
probability that a token of the repetition gives to it; KVzip+ (KVzap, arXiv 2601.07891, section 3.1) weighs each
probability by what it moves: the norm of the value behind the output projection, over the norm of the reading token's
hidden state. Here both are computed in one forward pass over the extended sequence, with the softmax over all of it;
:func:`scores_in_chunks` is KVzip's own form for long contexts.
"""

import functools
from typing import TYPE_CHECKING, Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from kernels.numerics import accumulator
from kernels.received.api import received
from kernels.visibility import NEVER, PADDING
from kvsparse_jax import whole
from kvsparse_jax.errors import InputError
from kvsparse_jax.models import decoder
from kvsparse_jax.models.config import ModelConfig
from kvsparse_jax.policies.dense import Dense

if TYPE_CHECKING:
    from kvsparse_jax.lm import LM

Kind = Literal["kvzip", "kvzip+"]
Norm = Literal["input", "residual"]


def value_norms(v: Array, o_kernel: Array, heads: int) -> Array:
    """``||W_O^(h) v||`` of each value and each query head that reads it.

    Args:
        v: [B, H, N, D].
        o_kernel: [Hq * D, E], the output projection.
        heads: Hq.

    Returns:
        [B, Hq, N], in the accumulator's dtype.
    """
    acc = accumulator(v.dtype)
    batch, kv_heads, count, dim = v.shape
    w = o_kernel.astype(acc).reshape(kv_heads, heads // kv_heads, dim, -1)
    # ||W v||^2 = v' (W W') v: the Gram matrices [D, D] are small, the projected values [N, E] would not be.
    gram = jnp.einsum("hgde,hgfe->hgdf", w, w)
    wide = v.astype(acc)
    squares = jnp.einsum("bhnd,hgdf,bhnf->bhgn", wide, gram, wide)
    return jnp.sqrt(jnp.maximum(squares, 0)).reshape(batch, heads, count)


def layer_scores(
    config: ModelConfig,
    layer: decoder.Layer,
    q: Array,
    k: Array,
    v: Array,
    *,
    q_positions: Array,
    k_positions: Array,
    context: tuple[int, int],
    probe: tuple[int, int],
    kind: Kind,
    norm: Norm = "input",
) -> Array:
    """Scores of one layer, plain probabilities (the logarithm is the caller's).

    Args:
        config: of the model.
        layer: what ``attend`` is told.
        q: [B, Hq, T, D] after RoPE.
        k, v: [B, H, T, D], k after RoPE.
        q_positions, k_positions: [B, T]; a probe's column that does not count has -1, a key outside the softmax NEVER.
        context, probe: columns, end exclusive.
        kind: "kvzip" or "kvzip+".
        norm: the hidden state whose norm divides: the attention's "input" (released code) or the "residual" stream
            before its norm (the paper's text).

    Returns:
        [B, H, n], n columns of the context.
    """
    acc = accumulator(q.dtype)
    start, end = context
    rows = slice(*probe)
    row_weight = None
    if kind == "kvzip+":
        x = (layer.inputs.normed if norm == "input" else layer.inputs.residual)[:, rows].astype(acc)
        row_weight = 1 / jnp.maximum(jnp.sqrt(jnp.sum(x * x, -1)), jnp.asarray(jnp.finfo(acc).tiny, acc))
    at = jnp.broadcast_to(k_positions[:, None], k.shape[:3])
    scores = received(
        q[:, :, rows], k, q_positions[:, rows], at, scale=config.scale, reduce="max", row_weight=row_weight
    )[..., start:end]
    if kind == "kvzip+":
        scores = scores * value_norms(v[:, :, start:end], layer.params["o"]["kernel"], config.heads)
    return scores.reshape(scores.shape[0], config.kv_heads, -1, end - start).max(2)


@functools.partial(jax.jit, static_argnames=("config", "context", "probe", "kind", "norm"))
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
) -> Array:
    policy = Dense()
    inner = whole.attend(config, policy, segment_ids)
    positions = whole.positions_of(segment_ids)
    real = segment_ids > PADDING

    def attend(
        state: None, layer: decoder.Layer, q: Array, k: Array, v: Array, gate: Array | None
    ) -> tuple[Array, None, Array]:
        out, state, _ = inner(state, layer, q, k, v, gate)
        found = layer_scores(
            config,
            layer,
            q,
            k,
            v,
            q_positions=jnp.where(real, positions, -1),
            k_positions=jnp.where(real, positions, NEVER),
            context=context,
            probe=probe,
            kind=kind,
            norm=norm,
        )
        return out, state, found

    return decoder.forward(params, config, policy, ids, positions, attend)[2]


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
        lm: the model.
        input_ids: [B, T], context and probe in one sequence.
        context: columns (start, end) of the keys to score, end exclusive.
        probe: columns of the repetition, whose queries count.
        kind: "kvzip", the largest probability; or "kvzip+", weighed by ``||W_O v|| / ||x||``, of which the natural
            logarithm is given.
        attention_mask: [B, T] or None.
        norm: "kvzip+": the hidden state x, the attention's "input" (released code) or the "residual" stream.

    Returns:
        [L, B, H, end - start] float32. Keys that no query of the probe sees have 0, or -inf as a logarithm.

    Raises:
        InputError: spans outside the sequence, unknown kind.

    References:
        arXiv 2505.23416, section 3; arXiv 2601.07891, section 3.1.
    """
    _chosen("kind", kind, get_args(Kind))
    _chosen("norm", norm, get_args(Norm))
    ids, segments = lm.check(input_ids, attention_mask)
    length = ids.shape[1]
    spans = {"context": _span("context", context, length), "probe": _span("probe", probe, length)}
    found = _scores(lm.params, lm.config, ids, segments, kind=kind, norm=norm, **spans)
    return jnp.log(found) if kind == "kvzip+" else found

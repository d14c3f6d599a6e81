"""Mixture of experts: routing, and the experts' products without a capacity, so that no token is ever dropped."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels.numerics import accumulator
from kvsparse_jax.models.config import Experts
from kvsparse_jax.models.parts import Params, gated, mlp


def route(experts: Experts, p: Params, x: Array) -> tuple[Array, Array]:
    """Which experts each token goes to, and with what weight.

    Scores are computed in float32, as in the original models. DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) chooses by
    corrected scores and weighs by plain ones; what is outside the best groups counts as 0 there.

    Args:
        experts: the settings.
        p: {"kernel": [E, X], "correction": [X] if there is one}.
        x: [N, E].

    Returns:
        Experts [N, K] int32 and weights [N, K] in the accumulator's dtype.
    """
    acc = accumulator(x.dtype)
    logits = x.astype(acc) @ p["kernel"].astype(acc)
    scores = jax.nn.softmax(logits, -1) if experts.scoring == "softmax" else jax.nn.sigmoid(logits)
    choice = scores + p["correction"].astype(acc)[None] if experts.correction else scores
    if experts.groups_kept < experts.groups:
        grouped = choice.reshape(-1, experts.groups, experts.count // experts.groups)
        of_group = grouped.max(-1) if experts.group_score == "max" else lax.top_k(grouped, 2)[0].sum(-1)
        best = lax.top_k(of_group, experts.groups_kept)[1]
        kept = jax.nn.one_hot(best, experts.groups, dtype=jnp.bool_).any(1)
        choice = jnp.where(kept[..., None], grouped, jnp.zeros((), acc)).reshape(choice.shape)
    chosen = lax.top_k(choice, experts.per_token)[1]
    weights = jnp.take_along_axis(scores, chosen, 1)
    if experts.normalise:
        weights = weights / (weights.sum(-1, keepdims=True) + jnp.asarray(1e-20, acc))
    return chosen, weights * jnp.asarray(experts.factor, acc)


def mixture(experts: Experts, activation: str, p: Params, x: Array) -> Array:
    """The mixture on x [B, T, E].

    Tokens are sorted by expert and each expert multiplies its own run of them (``lax.ragged_dot``), so the work is that
    of the chosen experts.

    Args:
        experts, activation: the settings.
        p: "router" (see :func:`route`), "experts" with kernels "gate" and "up" [X, E, F] and "down" [X, F, E], and
            "shared" (an MLP) if there is one.
        x: the tokens.
    """
    batch, length, hidden = x.shape
    tokens = x.reshape(-1, hidden)
    chosen, weights = route(experts, p["router"], tokens)
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    owner = order // jnp.int32(experts.per_token)
    sizes = jnp.zeros((experts.count,), jnp.int32).at[chosen.reshape(-1)].add(1)

    def product(values: Array, name: str) -> Array:
        kernel = p["experts"][name]["kernel"].astype(x.dtype)
        return lax.ragged_dot(values, kernel, sizes, preferred_element_type=values.dtype)

    rows = tokens[owner]
    out = product(gated(activation, product(rows, "gate"), product(rows, "up")), "down")
    acc = accumulator(x.dtype)
    weighted = out.astype(acc) * weights.reshape(-1)[order][:, None]
    total = jnp.zeros(tokens.shape, acc).at[owner].add(weighted).astype(x.dtype).reshape(x.shape)
    return total + mlp(activation, p["shared"], x) if experts.shared else total

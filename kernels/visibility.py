"""The one visibility rule of delayed eviction; every mask in this project derives from it.

Key ``k`` is visible to query ``q`` if and only if ::

    k <= q  and  (not evict[k] or q - k <= window)  and  q - k < local_window

``window`` is the delay of the eviction (DMS, arXiv 2506.05345, section 3): a key flagged for eviction stays visible
to the ``window`` queries after its own. ``local_window`` is the sliding window of the model itself (Mistral, Qwen2), if
any. The rule has two equivalent forms:

* per key, ``expires[k]``: the last query position that may see it (:func:`expires`, :func:`visible`), for hard
  decisions;
* per key, ``bias[k] <= 0``: the log-weight of the key beyond its window (:func:`log_visibility`), 0 for a kept key,
  -inf for an evicted one, and anything between while the decisions are being trained.

A decision is emitted by token ``k + shift`` about key ``k``: shift 1 in NVIDIA's release, 0 in the paper's text.
"""

import jax
import jax.numpy as jnp
from jax import Array

NEVER = 2**31 - 1
"""``expires`` of a key that every later query sees (the largest int32)."""

PADDING = -1
"""Segment id of a column that holds no token; any negative id counts as padding."""


def expires(positions: Array, evict: Array, window: int | Array, local_window: int | Array | None = None) -> Array:
    """Last query position that may see each key.

    Args:
        positions: [...] int32, position of each key in its sequence.
        evict: [...] bool, the decision about each key.
        window: delay of the eviction in tokens, at least 0.
        local_window: the layer's own sliding window in tokens (a key is seen by itself and the ``local_window - 1``
            queries after it); None or NEVER for full attention.

    Returns:
        [...] int32; NEVER where no query is too late.
    """
    last = jnp.where(evict, positions + jnp.asarray(window, jnp.int32), jnp.int32(NEVER))
    if local_window is None:
        return last
    # positions + local_window would overflow for NEVER: compare what is left instead.
    local = jnp.asarray(local_window, jnp.int32)
    reach = jnp.where(positions > jnp.int32(NEVER) - local, jnp.int32(NEVER), positions + local - jnp.int32(1))
    return jnp.minimum(last, reach)


def visible(q_positions: Array, k_positions: Array, k_expires: Array) -> Array:
    """The rule itself, for hard decisions; the arguments broadcast against each other. Returns bool."""
    return (k_positions <= q_positions) & (q_positions <= k_expires)


def decisions_by_key(emitted: Array, shift: int, fill: float | bool, segment_ids: Array | None = None) -> Array:
    """Moves decisions from the token that emits them to the key that they are about.

    Args:
        emitted: [B, H, T], what each token emits.
        shift: 0 or 1; token ``k + shift`` decides about key ``k``.
        fill: what a key gets that no token of its segment decides about (the value that means "keep").
        segment_ids: [B, T] int32 or None; a decision never crosses from one segment into another.

    Returns:
        [B, H, T] of the same dtype.
    """
    if shift == 0:
        return emitted
    if shift != 1:
        raise ValueError(f"shift must be 0 or 1, not {shift}")
    keep = jnp.full_like(emitted[:, :, :1], fill)
    moved = jnp.concatenate([emitted[:, :, 1:], keep], axis=2)
    if segment_ids is None:
        return moved
    last = jnp.zeros((segment_ids.shape[0], 1), bool)
    same = jnp.concatenate([segment_ids[:, 1:] == segment_ids[:, :-1], last], axis=1)
    return jnp.where(same[:, None, :], moved, jnp.full_like(moved, fill))


def log_visibility(
    gate_logits: Array, shift: int = 1, segment_ids: Array | None = None, *, hard: bool = False
) -> Array:
    """Log-weight of each key beyond its window, from the logits that the tokens emit (METHOD: DMS training mask).

    Args:
        gate_logits: [B, H, T], as emitted by each token; positive means evict.
        shift: see :func:`decisions_by_key`.
        segment_ids: [B, T] int32 or None.
        hard: 0 or -inf by the sign of the logit instead of ``logsigmoid(-logit)``.

    Returns:
        [B, H, T], at most 0, in the dtype of the logits; 0 for a key without a decision.
    """
    by_key = decisions_by_key(gate_logits, shift, -jnp.inf, segment_ids)
    if hard:
        return jnp.where(by_key > 0, -jnp.inf, 0.0).astype(gate_logits.dtype)
    # logsigmoid(-x) = -softplus(x); the double where keeps the gradient of an absent decision (-inf) at 0, not NaN.
    absent = jnp.isneginf(by_key)
    safe = jnp.where(absent, jnp.zeros_like(by_key), by_key)
    return jnp.where(absent, jnp.zeros_like(by_key), -jax.nn.softplus(safe))

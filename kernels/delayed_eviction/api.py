"""Entry point of attention under delayed eviction: checks the arguments and chooses an implementation."""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import Array

from kernels.delayed_eviction import mosaic, reference, xla
from kernels.visibility import log_visibility

SAVED = xla.SAVED
"""See :data:`kernels.delayed_eviction.xla.SAVED`."""

IMPLEMENTATIONS = ("mosaic", "reference", "xla")


def delayed_attention(
    q: Array,
    k: Array,
    v: Array,
    gate_logits: Array | None = None,
    *,
    window: int,
    scale: float,
    shift: int = 1,
    segment_ids: Array | None = None,
    local_window: int | Array | None = None,
    hard: bool = False,
    implementation: str | None = None,
) -> Array:
    """Causal grouped-query attention in which a key loses weight ``window`` queries after its own.

    Training form of DMS (arXiv 2506.05345, section 3.2): beyond the window, key ``k`` is scored
    ``scale * <q, k> + logsigmoid(-gate_logits[k + shift])``. With ``hard`` the key is dropped where its gate logit is
    positive. Differentiable in q, k, v and gate_logits (hard: gradient 0 for the gate).

    Args:
        q: [B, Hq, T, D].
        k: [B, H, T, D], H divides Hq; query head ``h`` reads KV head ``h // (Hq // H)``.
        v: [B, H, T, D].
        gate_logits: [B, H, T] as emitted by each token, noise and temperature already in; None evicts nothing.
        window: delay of the eviction in tokens, at least 0; ``window + 1`` keys are always visible.
        scale: multiplies ``<q, k>``.
        shift: token ``k + shift`` decides about key ``k``; 0 or 1.
        segment_ids: [B, T] int32; a query sees keys of its own segment only, columns with a negative id are padding
            and give zeros. None: one segment.
        local_window: sliding window of the layer in tokens (int, int32 scalar or None).
        hard: decide by the sign of the gate instead of weighing by it.
        implementation: "mosaic" (Hopper GPUs, bfloat16), "xla" or "reference"; None takes the best for this device and
            these arguments. A named one never falls back.

    Returns:
        [B, Hq, T, D] in the dtype of q; rows that see no key are zero.

    Raises:
        ValueError: shapes or settings that do not fit.
        NotImplementedError: unknown implementation, or one that cannot do this here.
    """
    out = _attend(
        q, k, v, gate_logits, window=window, scale=scale, shift=shift, segment_ids=segment_ids,
        local_window=local_window, hard=hard, implementation=implementation, with_lse=False,
    )  # fmt: skip
    assert isinstance(out, Array)
    return out


def attention_with_lse(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    segment_ids: Array | None = None,
    local_window: int | Array | None = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """:func:`delayed_attention` without eviction, and the log-sum-exp of each row's scores; not differentiable.

    Returns:
        [B, Hq, T, D], and [B, Hq, T] float32 (float64 for float64 queries), +inf for rows that see no key.
    """
    out = _attend(
        q, k, v, None, window=0, scale=scale, shift=1, segment_ids=segment_ids, local_window=local_window, hard=False,
        implementation=implementation, with_lse=True,
    )  # fmt: skip
    assert isinstance(out, tuple)
    return out


def _attend(
    q: Array,
    k: Array,
    v: Array,
    gate_logits: Array | None,
    *,
    window: int,
    scale: float,
    shift: int,
    segment_ids: Array | None,
    local_window: int | Array | None,
    hard: bool,
    implementation: str | None,
    with_lse: bool,
) -> Array | tuple[Array, Array]:
    """Checks the arguments of :func:`delayed_attention` and hands them to an implementation."""
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or q.shape[::2] != k.shape[::2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q [B, Hq, T, D] and k, v [B, H, T, D] do not fit: {q.shape}, {k.shape}, {v.shape}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot be shared by {k.shape[1]} KV heads")
    if window < 0:
        raise ValueError(f"window must be at least 0 tokens, not {window}")
    expected = (k.shape[0], k.shape[1], k.shape[2])
    if gate_logits is not None and gate_logits.shape != expected:
        raise ValueError(f"gate_logits must be [B, H, T] = {expected}, not {gate_logits.shape}")
    if implementation not in (None, *IMPLEMENTATIONS):
        raise NotImplementedError(
            f"no implementation {implementation!r} of delayed_attention; there are {sorted(IMPLEMENTATIONS)}"
        )
    name = implementation or ("xla" if mosaic.unsupported(q, k) else "mosaic")
    implementations: dict[str, Callable[..., Array | tuple[Array, Array]]] = {
        "mosaic": partial(mosaic.attention, hard=hard),
        "reference": reference.attention,
        "xla": xla.attention,
    }
    bias = None if gate_logits is None else log_visibility(gate_logits, shift, segment_ids, hard=hard)
    local = None if local_window is None else jnp.asarray(local_window, jnp.int32)
    settings = {"window": window, "scale": scale, "with_lse": with_lse}
    return implementations[name](q, k, v, bias, segment_ids, local, **settings)

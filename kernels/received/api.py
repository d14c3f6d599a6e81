"""Entry point of the attention that keys receive: checks the arguments and chooses an implementation."""

from typing import Literal

from jax import Array

from kernels.received import reference, xla

IMPLEMENTATIONS = {"reference": reference.received, "xla": xla.received}


def received(
    q: Array,
    k: Array,
    q_positions: Array,
    k_positions: Array,
    *,
    scale: float,
    reduce: Literal["sum", "max"] = "sum",
    row_weight: Array | None = None,
    lse: Array | None = None,
    implementation: str | None = None,
) -> Array:
    """Probability that queries give to each key, summed over the queries or its maximum over them.

    Query at position p sees the keys at positions up to p; the softmax is over all keys given (but see ``lse``). No
    array grows with queries x keys. Importance scores are made of it: the oracles of KVzip (arXiv 2505.23416) take the
    maximum over the rows of a repeated prompt, H2O (arXiv 2306.14048) the sum over all rows, SnapKV (arXiv 2404.14469)
    over the last.

    Args:
        q: [B, Hq, T, D], the queries that count.
        k: [B, H, S, D]; query head ``h`` reads KV head ``h // (Hq // H)``.
        q_positions: [B, T] int32; -1 for a column that is no query.
        k_positions: [B, H, S] int32; NEVER where there is no key (k may then hold NaN).
        scale: multiplies ``<q, k>``.
        reduce: over the queries.
        row_weight: [B, T], at least 0, factor of each query's probabilities; None: 1.
        lse: [B, Hq, T], log-sum-exp of each query's scores where it is known (+inf for a query without a key, as of
            :func:`kernels.delayed_eviction.api.attention_with_lse`). The softmax is then over all keys that it was
            taken over, of which those given may be a part. None: it is found first.
        implementation: "xla" or "reference"; None takes the best for this device. A named one never falls back.

    Returns:
        [B, Hq, S] float32 (float64 for float64 queries); 0 where there is no key or no query sees it.

    Raises:
        ValueError: shapes or arguments that do not fit.
        NotImplementedError: unknown implementation.
    """
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        raise ValueError(f"q [B, Hq, T, D] and k [B, H, S, D] do not fit: {q.shape}, {k.shape}")
    if q_positions.shape != (q.shape[0], q.shape[2]) or k_positions.shape != k.shape[:3]:
        raise ValueError(
            f"q_positions [B, T] and k_positions [B, H, S] do not fit {q.shape}, {k.shape}: "
            f"{q_positions.shape}, {k_positions.shape}"
        )
    if row_weight is not None and row_weight.shape != q_positions.shape:
        raise ValueError(f"row_weight {row_weight.shape} must be [B, T] like q_positions {q_positions.shape}")
    if lse is not None and lse.shape != q.shape[:3]:
        raise ValueError(f"lse {lse.shape} must be [B, Hq, T] of q {q.shape}")
    if reduce not in ("sum", "max"):
        raise ValueError(f"reduce must be 'sum' or 'max', not {reduce!r}")
    name = implementation or "xla"
    if name not in IMPLEMENTATIONS:
        known = sorted(IMPLEMENTATIONS)
        raise NotImplementedError(f"no implementation {name!r} of received; there are {known}")
    return IMPLEMENTATIONS[name](q, k, q_positions, k_positions, row_weight, lse, scale=scale, reduce=reduce)

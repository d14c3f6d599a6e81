"""Entry point of attention over a paged cache: checks the arguments and chooses an implementation."""

import functools

import jax.numpy as jnp
from jax import Array

from kernels.partial import Partial
from kernels.ragged_decode import mosaic, pallas_tpu, reference, xla

IMPLEMENTATIONS = {
    "reference": reference.attention,
    "xla": xla.attention,
    "mosaic": mosaic.attention,
    "pallas_tpu": pallas_tpu.attention,
}


def ragged_attention(
    q: Array,
    k: Array,
    v: Array,
    tables: Array,
    lengths: Array,
    *,
    scale: float,
    soft_cap: float | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    expires: Array | None = None,
    q_positions: Array | None = None,
    token_major: bool = False,
    implementation: str | None = None,
) -> Partial:
    """Grouped-query attention of T queries over the entries that each (sequence, KV head) holds in a pool of pages.

    Slot ``s`` of a head lies in page ``tables[b, h, s // page]`` at ``s % page``; slots ``0 .. lengths[b, h] - 1`` are
    in use, in any order. Nothing that other slots, pages and table entries hold (NaN, garbage) reaches the result.
    The work is proportional to ``sum(lengths)``.

    Args:
        q: [B, Hq, T, D]; query head ``h`` reads KV head ``h // (Hq // H)``.
        k: [P, D, page], keys after RoPE, channels first: the layout in which scores are a plain product.
        v: [P, page, D], or [P, page, 0]: the keys are the values, too, and are read once (latent attention, where a
            caller uses the leading channels of the output).
        tables: [B, H, width] int32, page numbers.
        lengths: [B, H] int32.
        scale: multiplies ``<q, k>``.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``, as in Gemma 2; None leaves them as they are.
        k_scale, v_scale: [P, page] float, factor of each token's key and value, for pools of int8, or of uint8, which
            means the bits of float8_e4m3fn (XLA:CPU would widen a whole pool of that dtype to write to it).
        expires: [P, page] int32, last query position that may see the entry; with ``q_positions`` [B, T] int32. Without
            them every entry is visible to every query, as in one-token decoding, where expired entries are gone.
        token_major: k is [P, page, D], too; or k and v are [P, page / n, n D], n tokens side by side in a row.
        implementation: "mosaic" (Hopper GPUs; :func:`kernels.ragged_decode.mosaic.unsupported` says why not),
            "pallas_tpu" (TPUs, token_major; :func:`kernels.ragged_decode.pallas_tpu.unsupported`), "xla" or
            "reference"; None takes the best for this device and these arguments. A named one never falls back.

    Returns:
        :class:`Partial` of shapes [B, Hq, T, D], [B, Hq, T], [B, Hq, T] in float32 (float64 for float64 queries), to be
        merged with other parts and normalised.

    Raises:
        ValueError: shapes or arguments that do not fit.
        NotImplementedError: unknown implementation, or one that cannot do this.
    """
    pages, dim, page = k.shape
    if token_major:
        fits = q.ndim == 4 and not k.shape[2] % q.shape[3] and v.shape in (k.shape, (*k.shape[:2], 0))
    else:
        fits = q.ndim == 4 and q.shape[3] == dim and v.shape in ((pages, page, dim), (pages, page, 0))
    if not fits:
        raise ValueError(f"q [B, Hq, T, D], k [P, D, page], v [P, page, D] do not fit: {q.shape}, {k.shape}, {v.shape}")
    if tables.ndim != 3 or lengths.shape != tables.shape[:2] or tables.shape[0] != q.shape[0]:
        raise ValueError(
            f"tables [B, H, width], lengths [B, H] do not fit q {q.shape}: {tables.shape}, {lengths.shape}"
        )
    if q.shape[1] % tables.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot be shared by {tables.shape[1]} KV heads")
    if (k_scale is None) != (v_scale is None) or (expires is None) != (q_positions is None):
        raise ValueError("k_scale and v_scale, expires and q_positions: each pair is given or left out together")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap has to be positive, not {soft_cap}")
    if implementation == "mosaic" and token_major:
        raise NotImplementedError("mosaic reads keys with channels first, not token_major; xla and reference read both")
    if implementation == "pallas_tpu" and not token_major:
        raise NotImplementedError("pallas_tpu reads pages that are token_major; xla and reference read both")
    coded = k_scale is not None
    if token_major:
        best, other = "pallas_tpu", pallas_tpu.unsupported(q, k, v, tables, coded, expires is not None)
    else:
        best, other = "mosaic", mosaic.unsupported(q, k, tables, coded)
    name = implementation or ("xla" if other else best)
    if name not in IMPLEMENTATIONS:
        known = sorted(IMPLEMENTATIONS)
        raise NotImplementedError(f"no implementation {name!r} of ragged_attention; there are {known}")
    attention = IMPLEMENTATIONS[name]
    if token_major and name == "xla":
        attention = functools.partial(xla.attention, token_major=True)
    elif token_major and name != "pallas_tpu":
        k = k.reshape(pages, -1, q.shape[3]).swapaxes(1, 2)
        v = v.reshape(pages, k.shape[2], -1) if v.size else jnp.zeros((pages, k.shape[2], 0), v.dtype)
    return attention(q, k, v, k_scale, v_scale, tables, lengths, expires, q_positions, scale=scale, soft_cap=soft_cap)

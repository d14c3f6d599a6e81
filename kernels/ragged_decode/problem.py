"""Random arguments of ragged attention with everything poisoned that is not in use, for tests and benchmarks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

SPARE = 2
"""Pages, and entries of each page table, that nobody uses."""


def pages_of(lengths: np.ndarray, page: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Pages in random order for heads of the given lengths [B, H].

    Returns:
        Tables [B, H, width], whose unused entries name no page or one of another head, and which slots [P, page] are
        in use.
    """
    count = -(-lengths // page)
    pages, width = int(count.sum()) + SPARE, int(count.max()) + SPARE
    ids = rng.permutation(pages)
    tables = rng.choice([-3, pages + 9, 0], (*lengths.shape, width)).astype(np.int32)
    used = np.zeros((pages, page), bool)
    start = 0
    for at in np.ndindex(*lengths.shape):
        mine = ids[start : start + count[at]]
        start += len(mine)
        tables[at][: len(mine)] = mine
        used[mine] = np.arange(len(mine) * page).reshape(-1, page) < lengths[at]
    return tables, used


def problem(
    lengths: Any,
    group: int,
    dim: int,
    queries: int = 1,
    *,
    code: DTypeLike | None = None,
    masked: bool = False,
    page: int = 64,
    latent: bool = False,
    seed: int = 0,
) -> dict[str, Array]:
    """Arguments of :func:`kernels.ragged_decode.api.ragged_attention` but for ``scale``, by name.

    Args:
        lengths: [B, H] entries per head.
        group: query heads per KV head.
        dim: channels.
        queries: tokens per sequence.
        code: int8 or float8_e4m3fn (as uint8) for pages of 8 bits with scales; None: bfloat16.
        masked: with ``expires`` and ``q_positions``.
        page: slots per page.
        latent: the keys are the values.
        seed: of the random numbers.
    """
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths, np.int32)
    tables, used = pages_of(lengths, page, rng)
    pages = len(used)
    k, v = rng.normal(size=(2, pages, page, dim)) * (1 if code is None else 40)
    given = {}
    if code is not None:
        factors = np.where(used, rng.uniform(0.01, 0.03, (2, pages, page)), np.nan)
        given["k_scale"], given["v_scale"] = (jnp.asarray(x, jnp.float32) for x in factors)
    unused = jnp.asarray(~used)[..., None]
    dtype = jnp.bfloat16 if code is None else jnp.dtype(code)
    k, v = (jnp.asarray(x, jnp.float32).astype(dtype) for x in (k, v))
    if dtype == jnp.int8:
        k, v = (jnp.where(unused, jnp.int8(120), x) for x in (k, v))  # int8 has no NaN: 3 standard deviations
    elif dtype == jnp.bfloat16:
        k, v = (jnp.where(unused, jnp.bfloat16(jnp.nan), x) for x in (k, v))
    else:
        k, v = (jnp.where(unused, jnp.uint8(0x7F), lax.bitcast_convert_type(x, jnp.uint8)) for x in (k, v))
    if masked:
        given["expires"] = jnp.asarray(rng.integers(0, 50, (pages, page)), jnp.int32)
        given["q_positions"] = jnp.asarray(rng.integers(0, 50, (len(lengths), queries)), jnp.int32)
    return {
        "q": jax.random.normal(
            jax.random.key(seed), (len(lengths), lengths.shape[1] * group, queries, dim), jnp.bfloat16
        ),
        "k": k.swapaxes(1, 2),
        "v": v[..., :0] if latent else v,
        "tables": jnp.asarray(tables),
        "lengths": jnp.asarray(lengths),
        **given,
    }

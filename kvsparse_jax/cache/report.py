"""What a cache holds, in entries and bytes: counted from its arrays, never estimated."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvsparse_jax.cache.base import Cache
from kvsparse_jax.models.config import evicting


def nbytes(cache: Cache) -> int:
    """Bytes of all arrays as they are allocated."""
    return sum(x.nbytes for x in jax.tree.leaves(cache))


def page_bytes(cache: Cache) -> int:
    """Bytes of one page with what its slots carry (keys, values, scales, ``expires``); 0 where there are no pages."""
    return sum(x.nbytes for x in cache.pool) // max(cache.pages, 1)


def used_bytes(cache: Cache, pages: int | None = None) -> int:
    """Bytes in use: pages taken (or ``pages`` of them), page tables and all other bookkeeping; dense: everything."""
    if pages is None:
        pages = int(np.asarray(counts(cache)[1]).sum(dtype=np.int64))
    return pages * page_bytes(cache) + nbytes(cache) - sum(x.nbytes for x in cache.pool)


@jax.jit
def counts(cache: Cache) -> tuple[Array, Array]:
    """Keys visible to the newest query, and pages taken, both [L, B, H]."""
    return cache.live(), cache.pages_taken()


@dataclass(frozen=True)
class CacheReport:
    """Entries and bytes of a cache. L layers, B sequences, H KV heads.

    Attributes:
        seen: [B], tokens seen by each sequence.
        live: [L, B, H], keys visible to the newest query.
        pages: [L, B, H], pages taken; None for a dense cache.
        page_size: slots per page; None for a dense cache.
        nbytes: bytes of all arrays as allocated.
        used: bytes of the pages taken, the tables and the metadata.
        dense_nbytes: bytes of the keys and values of all tokens seen, in the model's dtype.
        cr_nominal: 1 / mean(1 - flagged / seen), over heads, sequences that have seen a token, and layers in which a
            policy may evict.
        cr_physical: dense_nbytes / used.
        trimmed: entries given up to make room.
        grown: bytes allocated after each time that the cache grew, in order; empty: it never did.
        lost: entries that found no room: not 0 means that the outputs are not to be trusted.
    """

    seen: np.ndarray
    live: np.ndarray
    pages: np.ndarray | None
    page_size: int | None
    nbytes: int
    used: int
    dense_nbytes: int
    cr_nominal: float
    cr_physical: float
    trimmed: int
    grown: tuple[int, ...]
    lost: int


def report(cache: Cache, dtype: np.dtype | None = None, grown: Sequence[int] = ()) -> CacheReport:
    """Reads a cache (waits for the device).

    Args:
        cache: the state.
        dtype: of the model's keys and values, for ``dense_nbytes``; needed for 8-bit pools, else the pool's.
        grown: see :class:`CacheReport`; the cache itself does not know.
    """
    seen = np.asarray(cache.seen, np.int64)
    flagged = np.asarray(cache.flagged, np.int64)
    layers, _, heads = flagged.shape
    if dtype is None and not jnp.issubdtype(cache.v.dtype, jnp.floating):
        raise ValueError("the dtype of the model is needed to compare an 8-bit cache with a dense one")
    live, pages = (np.asarray(x, np.int64) for x in counts(cache))
    item = np.dtype(cache.v.dtype if dtype is None else dtype).itemsize
    full = int(seen.sum()) * layers * heads * cache.channels * item
    used = used_bytes(cache, int(pages.sum()))
    started = seen > 0
    if cache.local_windows:
        flagged = flagged[list(evicting(cache.local_windows))]
    kept = 1 - flagged[:, started] / seen[started][None, :, None]
    mean_kept = float(kept.mean()) if kept.size else 1.0
    return CacheReport(
        seen=seen,
        live=live,
        pages=None if cache.page is None else pages,
        page_size=cache.page,
        nbytes=nbytes(cache),
        used=used,
        dense_nbytes=full,
        cr_nominal=1 / mean_kept if mean_kept > 0 else float("inf"),
        cr_physical=full / used,
        trimmed=int(np.asarray(cache.trimmed).sum()),
        grown=tuple(grown),
        lost=int(np.asarray(cache.lost).sum()),
    )

"""What a cache holds, in entries and bytes: counted from its arrays, never estimated."""

import dataclasses

import jax
import numpy as np
from jax import Array

from kvsparse_jax.cache import paged
from kvsparse_jax.cache.dense import DenseCache
from kvsparse_jax.cache.paged import PagedCache

Cache = PagedCache | DenseCache


def nbytes(cache: Cache) -> int:
    """Bytes of all arrays as they are allocated."""
    return sum(x.nbytes for x in jax.tree.leaves(cache))


def _pool(cache: PagedCache) -> list[Array]:
    return [x for x in (cache.k, cache.v, cache.k_scale, cache.v_scale, cache.expires) if x is not None]


def page_bytes(cache: PagedCache) -> int:
    """Bytes of one page with what its slots carry (keys, values, scales, ``expires``)."""
    return sum(x.nbytes for x in _pool(cache)) // cache.pages


def used_bytes(cache: Cache, pages: int | None = None) -> int:
    """Bytes in use: pages taken (or ``pages`` of them), page tables and all other bookkeeping; dense: everything."""
    if isinstance(cache, DenseCache):
        return nbytes(cache)
    if pages is None:
        pages = int(np.asarray(paged.pages_taken(cache)).sum(dtype=np.int64))
    return pages * page_bytes(cache) + nbytes(cache) - sum(x.nbytes for x in _pool(cache))


@dataclasses.dataclass(frozen=True)
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
        cr_nominal: 1 / mean(1 - flagged / seen), over layers, heads and sequences that have seen a token.
        cr_physical: dense_nbytes / used.
        trimmed: entries given up to make room.
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
    lost: int


def report(cache: Cache, dtype: np.dtype | None = None) -> CacheReport:
    """Reads a cache (waits for the device).

    Args:
        cache: the state.
        dtype: of the model's keys and values, for ``dense_nbytes``; needed for 8-bit pools, else the pool's.
    """
    seen = np.asarray(cache.seen, np.int64)
    flagged = np.asarray(cache.flagged, np.int64)
    layers, _, heads = flagged.shape
    if isinstance(cache, PagedCache):
        if cache.k_scale is not None and dtype is None:
            raise ValueError("the dtype of the model is needed to compare an 8-bit cache with a dense one")
        live, pages = np.asarray(cache.lengths, np.int64), np.asarray(paged.pages_taken(cache), np.int64)
        page_size, trimmed = cache.page, int(np.asarray(cache.trimmed).sum())
    else:
        live, pages = np.broadcast_to(seen[None, :, None], flagged.shape).copy(), None
        page_size, trimmed = None, 0
    item = np.dtype(cache.v.dtype if dtype is None else dtype).itemsize
    full = int(seen.sum()) * layers * heads * 2 * cache.v.shape[-1] * item
    used = used_bytes(cache)
    started = seen > 0
    kept = 1 - flagged[:, started] / seen[started][None, :, None]
    mean_kept = float(kept.mean()) if kept.size else 1.0
    return CacheReport(
        seen=seen,
        live=live,
        pages=pages,
        page_size=page_size,
        nbytes=nbytes(cache),
        used=used,
        dense_nbytes=full,
        cr_nominal=1 / mean_kept if mean_kept > 0 else float("inf"),
        cr_physical=full / used,
        trimmed=trimmed,
        lost=int(cache.lost),
    )

"""A cache with its capacity: made when first needed, of the size needed; grown, shrunk, forked and released."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Sharding

from kvsparse_jax.cache import capacity, dense, paged
from kvsparse_jax.cache.base import Cache, bucket
from kvsparse_jax.cache.capacity import WhenFull
from kvsparse_jax.cache.quantise import QUANTISATIONS, Quantisation
from kvsparse_jax.cache.report import CacheReport, page_bytes, report
from kvsparse_jax.cache.spec import CacheSpec
from kvsparse_jax.errors import InputError, RunError, whole

TABLE_TOKENS = 4096
"""Tokens that a page table has entries for at least, where the model's context is not shorter."""


@dataclass(frozen=True)
class CacheOptions:
    """How a session stores keys and values.

    Attributes:
        cache: "paged", or "dense": the reference, which masks what is evicted and frees nothing.
        page_size: slots per page.
        capacity: tokens per layer, sequence and KV head, on average, that the pool is made for (a head may take more,
            at the others' expense); None makes it as large as needed and shrinks it after a prompt.
        when_full: "grow" (copy to a larger pool), "evict" (give up entries beyond what the policy evicts) or "error".
        kv_dtype: "int8" or "float8_e4m3" for an 8-bit pool.
    """

    cache: Literal["paged", "dense"] = "paged"
    page_size: int = 64
    capacity: int | None = None
    when_full: WhenFull = "grow"
    kv_dtype: Quantisation | None = None

    def __post_init__(self) -> None:
        choices: tuple[tuple[str, object, tuple[object, ...]], ...] = (
            ("cache", self.cache, ("paged", "dense")),
            ("when_full", self.when_full, ("grow", "evict", "error")),
            ("kv_dtype", self.kv_dtype, (None, *QUANTISATIONS)),
        )
        for name, value, accepted in choices:
            if value not in accepted:
                raise InputError(f"{name} must be one of {', '.join(map(str, accepted))}, not {value!r}")
        whole("page_size", self.page_size, 1)
        if self.capacity is not None:
            whole("capacity", self.capacity, 1)
        if self.cache == "dense" and (self.kv_dtype is not None or self.when_full == "evict"):
            raise InputError("a dense cache has no 8-bit form and gives up nothing: leave out kv_dtype and when_full")


class Store:
    """The cache of ``batch`` rows with its capacity: made when first needed, of the size needed."""

    def __init__(self, spec: CacheSpec, batch: int, options: CacheOptions, sharding: Sharding):
        self.spec, self.batch, self.options, self.sharding = spec, batch, options, sharding
        self.cache: Cache | None = None
        self.room = np.zeros(batch, np.int64)  # tokens that are sure to fit
        self.grown = 0  # times that it was copied to a larger one
        need = spec.always_kept
        if options.capacity is not None and options.capacity < need:
            raise InputError(
                f"capacity of {options.capacity} tokens per head is too small: the newest {need} are never evicted"
            )

    def _make(self, tokens: np.ndarray) -> Cache:
        spec, options = self.spec, self.options
        page, longest = options.page_size, int(tokens.max())
        made: Cache
        if options.cache == "dense":
            slots = longest if options.capacity is None else options.capacity
            made = _new_dense(spec, self.batch, slots=bucket(slots))
        else:
            limit = spec.max_positions or TABLE_TOKENS
            if options.capacity is None:
                pages = bucket(spec.layers * spec.kv_heads * int((-(-tokens // page)).sum()))
                slots = max(longest, min(TABLE_TOKENS, limit))
            else:
                pages = spec.layers * spec.kv_heads * self.batch * -(-options.capacity // page)
                slots = limit
            width = bucket(-(-slots // page))
            made = _new_paged(spec, self.batch, pages=pages, width=width, page=page, quantisation=options.kv_dtype)
        # Committed to their devices, as what the compiled functions hand back is: else the second call compiles anew.
        return jax.device_put(made, self.sharding)

    def reserve(self, tokens: Sequence[int] | np.ndarray, wish: Sequence[int] | np.ndarray | None = None) -> Cache:
        """The cache, with room for ``tokens`` [B] more tokens of each row; for ``wish`` [B] if room has to be made.

        Raises:
            CapacityError: it is full and may not grow.
        """
        least = np.asarray(tokens, np.int64)
        most = least if wish is None else np.maximum(least, np.asarray(wish, np.int64))
        if self.cache is None:
            self.cache = self._make(np.maximum(most, 1))
            if self.options.capacity is None:
                self.room = most
        if (least > self.room).any():
            self.cache, self.room = self._with_room(self.cache, least, most)
        return self.cache

    def _with_room(self, cache: Cache, least: np.ndarray, most: np.ndarray) -> tuple[Cache, np.ndarray]:
        """A cache with room for ``most`` tokens if it is there or may grow, else for ``least``; and which it was."""
        if capacity.fits(cache, most):
            return cache, most
        if self.options.capacity is not None and capacity.fits(cache, least):
            return cache, least
        if self.options.when_full == "grow":
            self.grown += 1
            return capacity.grow(cache, most), most
        return capacity.ensure(cache, least, self.options.when_full), least

    def took(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Counts tokens [B] that were stored."""
        self.room = np.maximum(self.room - np.asarray(tokens, np.int64), 0)

    def shrink(self, ahead: Sequence[int] | np.ndarray) -> None:
        """Gives back the pool's surplus where it is half of it or more, but for room for ``ahead`` [B] more tokens."""
        if self.cache is None or self.cache.page is None or self.options.capacity is not None:
            return
        tokens = np.asarray(ahead, np.int64)
        rows = np.arange(self.batch, dtype=np.int32)
        needed = self.cache.size_for(rows, tokens)
        if 2 * needed[0] <= self.cache.pages:
            self.cache, self.room = capacity.fork(self.cache, rows, size=needed), tokens

    def fork(self, rows: list[int]) -> "Store":
        """A store whose rows are copies of ``rows``; pages are copied, nothing is shared."""
        other = Store(self.spec, len(rows), self.options, self.sharding)
        if self.cache is not None:
            size = None if self.options.capacity is None else self.cache.size_for_batch(len(rows))
            other.cache = capacity.fork(self.cache, rows, size=size)
        return other

    def release(self, rows: Sequence[bool]) -> None:
        """Empties rows; their pages are free again."""
        if self.cache is not None:
            self.cache = _release(self.cache, jnp.asarray(np.asarray(rows, bool)))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page; 0 for a dense cache."""
        return 0 if self.cache is None else page_bytes(self.cache)

    def report(self) -> CacheReport:
        """Entries and bytes. Raises RunError when entries were lost."""
        found = report(self.reserve([0] * self.batch), np.dtype(self.spec.dtype))
        if found.lost:
            raise RunError(f"{found.lost} entries found no room in the cache: the output is not to be trusted")
        return dataclasses.replace(found, grown=self.grown)


_new_dense = jax.jit(dense.init, static_argnames=("spec", "batch", "slots"))
_new_paged = jax.jit(paged.init, static_argnames=("spec", "batch", "pages", "width", "page", "quantisation"))


@functools.partial(jax.jit, donate_argnames="cache")
def _release(cache: Cache, rows: Array) -> Cache:
    return cache.release(rows)

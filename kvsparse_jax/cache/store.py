"""A cache with its capacity: made when first needed, of the size needed; grown, shrunk, forked and released."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, Sharding

from kvsparse_jax.cache import capacity, dense, paged
from kvsparse_jax.cache.base import Cache, bucket
from kvsparse_jax.cache.capacity import Tokens, WhenFull
from kvsparse_jax.cache.quantise import QUANTISATIONS, Quantisation
from kvsparse_jax.cache.report import CacheReport, nbytes, report
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
            at the others' expense); None makes it as large as the next tokens may need, whatever is decided about them,
            lets it grow by buckets, and shrinks it after a prompt.
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
    """The cache of ``batch`` rows with its capacity: made when first needed, of the size needed.

    ``everywhere`` is where arrays go that every device of the model has. On a mesh the cache is divided by KV heads, as
    the projections that fill it are: each device has a pool of pages for its heads. Where the tensor axis does not
    divide them every device holds all of it.
    """

    def __init__(self, spec: CacheSpec, batch: int, options: CacheOptions, everywhere: Sharding):
        self.spec, self.batch, self.options, self.everywhere = spec, batch, options, everywhere
        self.cache: Cache | None = None
        self.room = np.zeros(batch, np.int64)  # tokens of each row that are sure to fit
        self.grown: list[int] = []  # bytes allocated after each growth
        if spec.recent is not None and options.cache == "dense":
            raise InputError("a policy with a budget needs the paged cache: a dense one frees nothing")
        need = spec.always_kept
        if options.capacity is not None and options.capacity < need:
            raise InputError(
                f"capacity of {options.capacity} tokens per head is too small: the newest {need} are never evicted"
            )

    def _make(self, least: np.ndarray, most: np.ndarray) -> Cache:
        spec, options = self.spec, self.options
        page, longest = options.page_size, max(int(most.max()), 1)
        made: Cache
        if options.cache == "dense":
            slots = longest if options.capacity is None else options.capacity
            made = new(dense.init, spec, self.batch, self.everywhere, slots=bucket(slots))
        else:
            limit = spec.max_positions or TABLE_TOKENS
            if options.capacity is None:
                # A prompt is padded to a bucket of tokens, and its pages are a bucket too: prompts that share a
                # program of one kind then share that of the other.
                now, later = (int((-(-x // page)).sum()) for x in (least, most - least))
                pages = max(bucket(now) + later, 1)
                slots = max(longest, min(TABLE_TOKENS, limit))
            else:
                pages = self.batch * -(-options.capacity // page)
                slots = limit
            pages *= spec.layers * spec.kv_heads
            width = bucket(-(-slots // page))
            shape: dict[str, Any] = dict(pages=pages, width=width, page=page, quantisation=options.kv_dtype)
            made = new(paged.init, spec, self.batch, self.everywhere, **shape)
        return made

    def reserve(self, least: Tokens = 0, most: Tokens | None = None) -> Cache:
        """The cache, with room for ``least`` more tokens (of each row, or [B]), and up to ``most`` where it is free.

        Room is made only when ``least`` does not fit, but if it is made by growing, then for ``most``. ``room`` tells
        how many tokens are sure to fit.

        Raises:
            CapacityError: it is full and may not grow; it is as before.
        """
        wanted = np.broadcast_to(np.asarray(least, np.int64), (self.batch,))
        wish = wanted if most is None else np.maximum(wanted, np.asarray(most, np.int64))
        if self.cache is None:
            self.cache = self._make(wanted, wish)
            if self.options.capacity is None:
                self.room = wish
        if (wanted > self.room).any():
            self._make_room(self.cache, wanted, wish)
        return self.cache

    def _make_room(self, cache: Cache, least: np.ndarray, most: np.ndarray) -> None:
        room = most
        while not capacity.fits(cache, room):
            if (room == least).all():
                room = most if self.options.when_full == "grow" else least
                self.cache = capacity.ensure(cache, room, self.options.when_full)
                if self.options.when_full == "grow":
                    self.grown.append(nbytes(self.cache))
                break
            room = np.maximum(least, room // 2)
        self.room = room

    def took(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Counts tokens [B] that were stored."""
        self.room = np.maximum(self.room - np.asarray(tokens, np.int64), 0)

    def shrink(self, ahead: Sequence[int] | np.ndarray) -> None:
        """Gives back the surplus where it is half or more, but for room for ``ahead`` [B] more tokens."""
        if self.cache is None or self.options.capacity is not None:
            return
        tokens, rows = np.asarray(ahead, np.int64), np.arange(self.batch)
        needed = self.cache.size_for(rows, tokens)
        if any(2 * new <= old for new, old in zip(needed, self.cache.size, strict=True)):
            self.cache = capacity.fork(self.cache, rows, size=needed)
            self.room = tokens

    def fork(self, rows: list[int]) -> "Store":
        """A store whose rows are copies of ``rows``; pages are copied, nothing is shared."""
        other = Store(self.spec, len(rows), self.options, self.everywhere)
        if self.cache is None:
            return other
        size = None if self.options.capacity is None else self.cache.size_for_batch(len(rows))
        other.cache = capacity.fork(self.cache, rows, size=size)
        return other

    def release(self, rows: Sequence[bool]) -> None:
        """Empties rows; their pages are free again."""
        if self.cache is not None:
            self.cache = _release(self.cache, jnp.asarray(np.asarray(rows, bool)))

    def report(self) -> CacheReport:
        """Entries and bytes. Raises RunError when entries were lost."""
        found = report(self.reserve(), np.dtype(self.spec.dtype), self.grown)
        if found.lost:
            raise RunError(f"{found.lost} entries found no room in the cache: the output is not to be trusted")
        return found


def mesh_of(everywhere: Sharding) -> Mesh | None:
    """The devices of a mesh; None: there is one device."""
    mesh = everywhere.mesh if isinstance(everywhere, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) else None


def shardings(cache: Cache, everywhere: Sharding) -> Any:
    """Where each array of a cache goes, in place of the arrays."""
    if cache.mesh is None:
        return jax.tree.map(lambda _: everywhere, cache)
    return jax.tree.map(functools.partial(NamedSharding, cache.mesh), cache.specs())


def new[C: Cache](init: Callable[..., C], spec: CacheSpec, batch: int, everywhere: Sharding, **shape: Any) -> C:
    """An empty cache, each shard made where it stays.

    Args:
        init: of the cache's module.
        spec, batch: as there.
        everywhere: where arrays go that every device of the model has.
        **shape: more of ``init``.
    """
    return _program(init, spec, batch, everywhere, tuple(shape.items()))()


@functools.cache
def _program(init: Any, spec: CacheSpec, batch: int, everywhere: Sharding, shape: tuple[tuple[str, Any], ...]) -> Any:
    make = functools.partial(init, spec, batch, mesh=mesh_of(everywhere), **dict(shape))
    # Committed to their devices, as what the compiled functions hand back is: else the second call compiles anew.
    return jax.jit(make, out_shardings=shardings(jax.eval_shape(make), everywhere))


@functools.partial(jax.jit, donate_argnums=(0,))
def _release[C: Cache](cache: C, rows: Array) -> C:
    return cache.release(rows)

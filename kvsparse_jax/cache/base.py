"""What all KV caches have in common: the state that each of them carries, and the operations that generation needs."""

import abc
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from kernels.visibility import PADDING, decisions_by_key
from kernels.visibility import expires as last_query
from kvsparse_jax.models.sharding import KV_AXIS

Size = tuple[int, ...]
"""Capacity of a cache: (pages, entries of a page table), or (slots,) for a dense one."""


def bucket(n: int) -> int:
    """The next capacity of at least ``n``: powers of two and the numbers halfway, so that few programs are compiled."""
    power = 1 << max(n - 1, 0).bit_length()
    return power * 3 // 4 if n <= power * 3 // 4 and power >= 4 else power


class Decisions(NamedTuple):
    """What a chunk decides in one layer.

    Attributes:
        expires: [B, H, T] int32, of the chunk's own tokens.
        pending: [B, H] bool, the chunk's first token flags the newest token before the chunk; None with shift 0.
        pending_expires: [B, H] int32, of that token then.
    """

    expires: Array
    pending: Array | None = None
    pending_expires: Array | None = None


@dataclass(frozen=True)
class Cache(abc.ABC):
    """Keys and values of B sequences in L layers of H KV heads; a frozen pytree, every operation gives a new one.

    A forward pass asks for :meth:`positions`, calls :meth:`attend` once per layer and then :meth:`advance`. All but
    ``size_for`` and ``shortage`` may be called inside jit.

    On a mesh the KV heads are divided over its tensor axis, and all that is theirs with them: every shard is a cache of
    its own, and what is done with it is done by each device alone (:func:`by_shard`). Where the axis does not divide
    the heads there is one shard, which all devices hold and treat alike.

    Attributes:
        k, v: keys (after RoPE) and values; the layout is each cache's own.
        seen: [B] int32, tokens seen = position of the next token.
        flagged: [L, B, H] int32, decisions to evict so far.
        trimmed: [L, B, H] int32, entries given up to make room (capacity outcome "evict").
        lost: int32 scalar, entries that found no room (0, or the results are not to be trusted); on a mesh [shards].
        window, shift, recent, local_windows: static, as in :class:`kvsparse_jax.cache.spec.CacheSpec`.
        mesh: static, the devices; None: one.
    """

    k: Array
    v: Array
    seen: Array
    flagged: Array
    trimmed: Array
    lost: Array
    window: int | None
    shift: int
    recent: int | None
    local_windows: tuple[int | None, ...]
    mesh: Mesh | None

    @property
    @abc.abstractmethod
    def channels(self) -> int:
        """Numbers of a token's key and value, as far as they are stored."""

    @property
    def local(self) -> bool:
        """Some layer has a sliding window of its own."""
        return any(window is not None for window in self.local_windows)

    # On a mesh

    @property
    def shards(self) -> int:
        """Equal parts that the KV heads are divided into."""
        return shards(self.mesh, self.flagged.shape[2])

    def along(self, axis: int) -> PartitionSpec:
        """How an array is divided whose ``axis`` counts KV heads, or what is theirs."""
        return PartitionSpec(*[None] * axis, KV_AXIS) if self.shards > 1 else PartitionSpec()

    def specs(self) -> Self:
        """How each array is divided, in place of the arrays."""
        found = jax.tree.map(lambda _: PartitionSpec(), self)
        return dataclasses.replace(found, **{name: self.along(axis) for name, axis in self.head_axes.items()})

    # Storing and attending

    def positions(self, valid: Array) -> Array:
        """Positions [B, T] of the columns of a chunk, from ``valid`` [B, T]; those of padding mean nothing."""
        return self.seen[:, None] + jnp.maximum(jnp.cumsum(valid, 1, dtype=jnp.int32) - 1, 0)

    @abc.abstractmethod
    def attend(
        self,
        layer: Array,
        q: Array,
        k: Array,
        v: Array,
        evict: Array | None,
        valid: Array,
        *,
        scale: float,
        local_window: Array | None = None,
        hold: Array | None = None,
    ) -> tuple[Array, Self]:
        """Attention of new tokens over what is live in the cache and over each other, exact; and stores them.

        T = 1 is a decode step, T > 1 a chunk of a prompt.

        Args:
            layer: int32 scalar.
            q: [B, Hq, T, D] after RoPE at :meth:`positions`.
            k, v: [B, H, T, D], k after RoPE.
            evict: [B, H, T] bool as emitted by each token (with shift 1 about the token before it, also across calls);
                None keeps everything.
            valid: [B, T] bool, False for padding; the valid columns of a row lie next to each other. A row may have
                none.
            scale: multiplies ``<q, k>``.
            local_window: int32 scalar, the layer's own sliding window (NEVER: full attention), or None.
            hold: [B] int32, position (the last of a prompt) up to which every query sees what is evicted of the prompt
                and what its first query sees of the past; None: by the rule alone. After it :meth:`sweep` is due.

        Returns:
            Output [B, Hq, T, D] in the dtype of q (zeros at padding), and the cache.

        Raises:
            ValueError: decisions or a sliding window that the cache was not made for.
        """

    def advance(self, valid: Array) -> Self:
        """Counts the tokens of a forward pass as seen, after its last layer; valid [B, T]."""
        return dataclasses.replace(self, seen=self.seen + jnp.sum(valid, 1, dtype=jnp.int32))

    def decide(
        self,
        layer: Array,
        evict: Array | None,
        at: Array,
        valid: Array,
        local_window: Array | None,
        hold: Array | None = None,
    ) -> tuple[Self, Decisions]:
        """Turns the decisions that a chunk emits in a layer into expiry dates, and counts them in ``flagged``."""
        if local_window is not None and not self.local:
            raise ValueError("this cache was made for a model without sliding windows")
        if evict is not None and self.window is None:
            raise ValueError("this cache was made for a policy that never evicts (window=None)")
        heads = self.flagged.shape[1:]
        positions = jnp.broadcast_to(at[:, None], (*heads, at.shape[1]))
        if evict is None or self.window is None:
            return self, Decisions(last_query(positions, jnp.zeros_like(positions, bool), 0, local_window))
        by_key = decisions_by_key(evict, self.shift, False, jnp.where(valid, 0, PADDING)) & valid[:, None]
        own = last_query(positions, by_key, _delay(self.window, positions, hold), local_window)
        flagged = jnp.sum(by_key, -1, dtype=jnp.int32)
        decisions = Decisions(own)
        if self.shift == 1:
            first = jnp.argmax(valid, 1).astype(jnp.int32)
            pending = jnp.take_along_axis(evict, first[:, None, None], 2)[..., 0]
            newest = self.seen - 1
            pending = pending & (valid.any(1) & (newest >= 0))[:, None]
            delay = _delay(self.window, newest[:, None, None], hold)
            delay = delay if isinstance(delay, int) else delay[:, 0, 0]
            last = last_query(newest, jnp.ones_like(newest, bool), delay, local_window)
            decisions = Decisions(own, pending, jnp.broadcast_to(last[:, None], heads))
            flagged = flagged + pending.astype(jnp.int32)
        old = lax.dynamic_index_in_dim(self.flagged, layer, 0, False)
        counted = lax.dynamic_update_index_in_dim(self.flagged, old + flagged, layer, 0)
        return dataclasses.replace(self, flagged=counted), decisions

    @abc.abstractmethod
    def sweep(self) -> Self:
        """Drops what no later query sees: what ``hold`` had kept visible until now."""

    @abc.abstractmethod
    def release(self, rows: Array) -> Self:
        """Empties the sequences ``rows`` [B] bool."""

    # What it holds

    @abc.abstractmethod
    def live(self) -> Array:
        """Keys visible to the newest query, [L, B, H] int32."""

    @abc.abstractmethod
    def pages_taken(self) -> Array:
        """Pages that each head holds, [L, B, H] int32; zeros where there are no pages."""

    @property
    @abc.abstractmethod
    def head_axes(self) -> dict[str, int]:
        """Which axis of which array counts KV heads, or what is theirs: those that are divided with the heads."""

    @property
    def counters(self) -> tuple[str, ...]:
        """Scalars of a shard: on a mesh their arrays have one element for each."""
        return ("lost",)

    @property
    def pages(self) -> int:
        """Pages in the pool; 0 where there are none."""
        return 0

    @property
    def page(self) -> int | None:
        """Slots per page; None where there are no pages."""
        return None

    @property
    def pool(self) -> list[Array]:
        """The arrays that the pages are made of."""
        return []

    # Capacity

    @property
    @abc.abstractmethod
    def size(self) -> Size:
        """The capacity."""

    @property
    @abc.abstractmethod
    def slots(self) -> int:
        """Tokens that a head can hold, as far as its page table or its array goes."""

    @abc.abstractmethod
    def fits(self, tokens: Array | int) -> Array:
        """Whether ``tokens`` ([B] or one number) more tokens are sure to find room, whatever is decided; a bool."""

    @abc.abstractmethod
    def size_for(self, rows: np.ndarray, tokens: np.ndarray) -> Size:
        """The capacity, in buckets, that copies of ``rows`` [B'] need for ``tokens`` [B'] more tokens each.

        Slots are never fewer than there are.
        """

    @abc.abstractmethod
    def size_for_batch(self, batch: int) -> Size:
        """The capacity of a cache of ``batch`` sequences that has as much for each of them as this one."""

    @abc.abstractmethod
    def repack(self, rows: Array, size: Size) -> Self:
        """A new cache of another capacity with copies of the sequences ``rows`` [B'] int32, which share nothing.

        Grows and shrinks, forks a sequence into several, reorders and drops rows. Entries that do not fit are lost,
        and counted.
        """

    @abc.abstractmethod
    def shortage(self, tokens: np.ndarray) -> str:
        """One line that says what :meth:`fits` misses for ``tokens`` [B] more tokens."""


def _delay(window: int, positions: Array, hold: Array | None) -> int | Array:
    """Delay of the eviction of keys at positions [B, H, T] that queries up to ``hold`` [B] are to see in any case."""
    if hold is None:
        return window
    return jnp.maximum(jnp.int32(window), hold[:, None, None] - positions)


def held_until(expires: Array, positions: Array, seen: Array, hold: Array, local_window: Array | None) -> Array:
    """``expires`` [B, H, N] of keys at ``positions`` when queries from ``seen`` [B] to ``hold`` [B] see the same past.

    The layer's own sliding window goes on as ever.
    """
    lifted = jnp.where(expires >= seen[:, None, None], jnp.maximum(expires, hold[:, None, None]), expires)
    return jnp.minimum(lifted, last_query(positions, jnp.zeros(positions.shape, bool), 0, local_window))


def shards(mesh: Mesh | None, kv_heads: int) -> int:
    """Equal parts that KV heads are divided into on a mesh; 1 where its tensor axis does not divide them."""
    ways = 1 if mesh is None else mesh.shape[KV_AXIS]
    return 1 if kv_heads % ways else ways


def by_shard[C: Cache](f: Callable[..., Any], cache: C, args: tuple[Any, ...], specs: tuple[Any, ...], out: Any) -> Any:
    """``f(cache, *args)`` run by each device on its shard alone, without collectives; as it is without a mesh.

    Args:
        f: what it is given, and gives back, is a cache without a mesh.
        cache: the whole.
        args: arrays, pytrees of them, or None.
        specs: how each of them is divided, see :meth:`Cache.along`.
        out: how what ``f`` gives back is divided; for a cache :meth:`Cache.specs`.
    """
    mesh = cache.mesh
    if mesh is None:
        return f(cache, *args)

    def is_cache(x: Any) -> bool:
        return isinstance(x, Cache)

    def local(cache: C, *args: Any) -> Any:
        counts: Any = {name: getattr(cache, name)[0] for name in cache.counters}
        return jax.tree.map(whole, f(dataclasses.replace(cache, mesh=None, **counts), *args), is_leaf=is_cache)

    def whole(x: Any) -> Any:
        if not isinstance(x, Cache):
            return x
        counts: Any = {name: getattr(x, name)[None] for name in x.counters}
        return dataclasses.replace(x, mesh=mesh, **counts)

    # A loop's carry starts as zeros, the same everywhere, and ends different: the check of that cannot be satisfied.
    run = jax.shard_map(local, mesh=mesh, in_specs=(cache.specs(), *specs), out_specs=out, check_vma=False)
    return run(cache, *args)


def attend_by_shard[C: Cache](
    f: Callable[..., tuple[Array, C]],
    cache: C,
    layer: Array,
    q: Array,
    k: Array,
    v: Array,
    evict: Array | None,
    valid: Array,
    local_window: Array | None,
    hold: Array | None,
    *of_heads: Array | None,
) -> tuple[Array, C]:
    """A cache's attention by :func:`by_shard`: arguments as of :meth:`Cache.attend`, then others [B, H, ...]."""
    heads, every = cache.along(1), PartitionSpec()
    queries = heads
    if k.shape[1] == 1 and shards(cache.mesh, q.shape[1]) > 1:
        # Latent attention: the one head is everywhere, its queries are divided.
        queries = PartitionSpec(None, KV_AXIS)
    found: tuple[Array, C] = by_shard(
        f,
        cache,
        (jnp.asarray(layer, jnp.int32), q, k, v, evict, valid, local_window, hold, *of_heads),
        (every, queries, heads, heads, heads, every, every, every, *[heads] * len(of_heads)),
        (queries, cache.specs()),
    )
    return found


def register[C: Cache](kind: type[C]) -> type[C]:
    """Makes a cache a pytree; a class decorator."""
    names = [field.name for field in dataclasses.fields(kind)]
    static = {"window", "shift", "recent", "local_windows", "mesh", "token_major"} & set(names)
    arrays = [name for name in names if name not in static]
    return jax.tree_util.register_dataclass(kind, data_fields=arrays, meta_fields=sorted(static))

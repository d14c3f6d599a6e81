"""Which blocks of a score matrix a kernel has to compute, decided in plain JAX from positions, segments and evictions.

Blocks that no query sees are left out: they are neither loaded nor multiplied. Blocks of which every query sees every
key, beyond the window if there is a gate, need no mask.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from kernels.visibility import NEVER, PADDING


class Visits(NamedTuple):
    """For each row of blocks, which columns to visit.

    Attributes:
        order: [B or 1, H or 1, n, m] int32; first the blocks that need no mask, then those that do, then the rest.
        counts: [B or 1, H or 1, n, 2] int32: blocks that need no mask, blocks to visit.
    """

    order: Array
    counts: Array

    @staticmethod
    def of(live: Array, plain: Array) -> "Visits":
        """From what is to be visited and what of it needs no mask, [B or 1, H or 1, n, m] bool each."""
        kind = jnp.where(live, jnp.where(plain, 0, 1), 2).astype(jnp.int8)
        order = jnp.argsort(kind, axis=-1, stable=True).astype(jnp.int32)
        counts = jnp.stack([(kind == 0).sum(-1), (kind < 2).sum(-1)], -1).astype(jnp.int32)
        return Visits(order, counts)


class Bounds(NamedTuple):
    """Smallest and largest value in each block, [B or 1, H or 1, blocks] int32 each."""

    low: Array
    high: Array

    @staticmethod
    def of(values: Array, block: int) -> "Bounds":
        """Of values [B or 1, H or 1, T], in blocks of ``block``."""
        blocks = values.reshape(*values.shape[:2], -1, block)
        return Bounds(blocks.min(-1), blocks.max(-1))

    def rows(self) -> "Bounds":
        """Along the rows of a table of blocks."""
        return Bounds(self.low[..., :, None], self.high[..., :, None])

    def columns(self) -> "Bounds":
        """Along its columns."""
        return Bounds(self.low[..., None, :], self.high[..., None, :])


def positions(length: int) -> Array:
    """[1, 1, T] int32: of keys that lie in order."""
    return jnp.arange(length, dtype=jnp.int32)[None, None]


def reach(local_window: Array | None) -> Array:
    """Largest distance at which a key is seen, scalar int32."""
    return jnp.int32(NEVER) if local_window is None else jnp.asarray(local_window, jnp.int32) - jnp.int32(1)


def pairs(q: Bounds, k: Bounds, nearest: Array | int, furthest: Array | int, plain_from: Array | int) -> "Pairs":
    """Pairs of blocks by the distance from query to key.

    Args:
        q: positions of the queries.
        k: positions of the keys; NEVER for a place that holds none.
        nearest: least distance at which a key is seen.
        furthest: largest such distance.
        plain_from: least distance from which on all keys are treated alike.
    """
    q, k = q.rows(), k.columns()
    least, most = q.low - k.high, q.high - k.low
    live = (most >= nearest) & (least <= furthest)
    return Pairs(live, live & (least >= plain_from) & (most <= furthest))


class Pairs(NamedTuple):
    """Pairs of a query block and a key block, [B or 1, H or 1, query blocks, key blocks] bool each.

    Attributes:
        live: may any query see any key? Judged by the least and largest position and segment of each block.
        plain: does every query see every key, in the same way?
    """

    live: Array
    plain: Array

    def within(self, q: Bounds, k: Bounds) -> "Pairs":
        """Restricted to queries and keys of the same segment, given the bounds of their ids (see :func:`ids`)."""
        q, k = q.rows(), k.columns()
        live = self.live & (q.low <= k.high) & (k.low <= q.high) & (q.high > PADDING)
        return Pairs(live, live & self.plain & (q.low == k.high) & (k.low == q.high))

    def where(self, wanted: Array) -> "Pairs":
        """Restricted to pairs for which ``wanted`` (broadcast against them) holds."""
        return Pairs(self.live & wanted, self.plain & wanted)

    def beside(self, other: "Pairs") -> "Pairs":
        """With the key blocks of ``other`` after one's own."""
        return Pairs(*(_beside(a, b) for a, b in zip(self, other, strict=True)))

    def by_query(self) -> Visits:
        """Key blocks to visit for each query block."""
        return Visits.of(self.live, self.plain)

    def by_key(self) -> Visits:
        """Query blocks to visit for each key block."""
        return Visits.of(self.live.swapaxes(2, 3), self.plain.swapaxes(2, 3))


def _beside(a: Array, b: Array) -> Array:
    lead = jnp.broadcast_shapes(a.shape[:3], b.shape[:3])
    return jnp.concatenate([jnp.broadcast_to(x, (*lead, x.shape[3])) for x in (a, b)], 3)


def ids(segment_ids: Array) -> tuple[Array, Array]:
    """Segment ids [B, T] as queries and as keys have them: equal where both are tokens of one segment, else not."""
    padding = segment_ids <= PADDING
    return jnp.where(padding, jnp.int32(PADDING - 1), segment_ids), jnp.where(padding, jnp.int32(PADDING), segment_ids)


class Kept(NamedTuple):
    """Keys that hard decisions keep, moved together.

    Attributes:
        order: [B, H, T] int32, where each was; the evicted ones follow the kept ones.
        positions: [B, H, T] int32, the same, and NEVER where no kept key is.
    """

    order: Array
    positions: Array

    @staticmethod
    def of(keep: Array) -> "Kept":
        """From which keys are kept, [B, H, T] bool."""
        order = jnp.argsort((~keep).astype(jnp.int8), axis=-1, stable=True).astype(jnp.int32)
        there = positions(keep.shape[2]) < keep.sum(-1, keepdims=True, dtype=jnp.int32)
        return Kept(order, jnp.where(there, order, NEVER))

    def take(self, x: Array) -> Array:
        """Values [B, H or 1, T, ...] in this order, [B, H, T, ...]."""
        x = jnp.broadcast_to(x, (*self.order.shape, *x.shape[3:]))
        return jnp.take_along_axis(x, self.order.reshape(*self.order.shape, *[1] * (x.ndim - 3)), axis=2)

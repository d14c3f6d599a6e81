"""Ragged attention as a Pallas kernel for TPUs: pages are copied by DMA, several tiles ahead of what is computed.

XLA gathers the pages of an iteration before it computes with them, in a few dozen small programs. Here one program
walks the live tiles (up to :data:`KEYS` entries of one head, in whole pages) of a block of heads, numbered through, so
that copies never wait for a head's end: a head that is ten times longer has ten times the tiles. The pages with live
entries are read once, as they are stored, and no others.

A TPU's rows have 128 lanes. Where a head has fewer channels, the pool holds n tokens side by side in a row, and the
queries are repeated n times, each time at the lanes of one of the n tokens and zero at the others: a row of scores then
belongs to every n-th token, and n parts are merged at the end. No page is rearranged.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax._src import config as _config
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu

from kernels import hopper
from kernels.partial import EMPTY, Partial
from kernels.shapes import MODELS, OTHER_DIMS

pltpu: Any = tpu
"""The module with the kernel's primitives; its own types are too incomplete to be checked."""

LANES = 128
"""Numbers in a row of a TPU's memory."""

KEYS = 512
"""Entries of a tile at most, in whole pages."""

ROWS = 128
"""Query rows per KV head (group x queries, n times) that the kernel takes; more are a prefill's."""

HEADS = 2**15
"""KV heads of all sequences that the kernel takes: their lengths are in scalar memory."""

TILES_AT_ONCE = 2
"""Tiles per iteration: they do not depend on each other, so that one's products hide the other's reductions."""

_IN_FLIGHT = 4 * 2**20  # bytes of the buffers that pages are copied to
_TABLES = 2**16  # entries of a block's page tables in scalar memory: 256 KB, twice
_RESULTS = 2 * 2**20  # bytes of a block's queries and results, twice


@dataclass(frozen=True)
class Plan:
    """How the kernel is built for given shapes.

    Attributes:
        dim: channels of a head.
        side_by_side: tokens in a row of the pool (n).
        page: rows of a page, of n tokens each.
        run: pages of a tile.
        rows: query rows of a KV head, padded to a multiple of 8, n times.
        real_rows: of which so many are of one of the n tokens.
        heads: KV heads of all sequences per block.
        blocks: blocks.
        stages: tiles that are copied or computed with at a time.
    """

    dim: int
    side_by_side: int
    page: int
    run: int
    rows: int
    real_rows: int
    heads: int
    blocks: int
    stages: int

    @property
    def width(self) -> int:
        """Numbers in a row of the pool."""
        return self.dim * self.side_by_side

    @property
    def keys(self) -> int:
        """Entries of a tile."""
        return self.run * self.page * self.side_by_side


def plan(k: Array, dim: int, rows: int, heads: int, table: int) -> Plan:
    """Chooses the sizes of the kernel.

    Args:
        k: the keys of the pool, token_major.
        dim: channels of a head.
        rows: query rows per KV head.
        heads: KV heads of all sequences.
        table: entries of a page table.
    """
    page, width = k.shape[1:]
    side_by_side = width // dim
    run = max(1, min(KEYS // (page * side_by_side), table))
    padded = 8 * pl.cdiv(rows * side_by_side, 8)
    tile = 2 * run * page * width * k.dtype.itemsize
    stages = TILES_AT_ONCE * max(2, min(_IN_FLIGHT // (tile * TILES_AT_ONCE), 8))
    most = min(_TABLES // (LANES * pl.cdiv(table, LANES)), _RESULTS // (padded * 4 * (2 * width + LANES)))
    block = heads if heads <= most else 8 * max(1, most // 8)
    return Plan(dim, side_by_side, page, run, padded, rows, block, pl.cdiv(heads, block), stages)


def unsupported(q: Array, k: Array, v: Array, tables: Array, coded: bool = False, masked: bool = False) -> str | None:
    """Why the kernel cannot do this, on this device; None if it can. Arguments as of the entry point, token_major.

    Args:
        q, k, v, tables: as there.
        coded: the pages hold 8-bit codes.
        masked: entries have an ``expires``.
    """
    interpreter = _config.pallas_tpu_interpret_mode_context_manager.value
    if not isinstance(interpreter, pltpu.InterpretParams):
        platform = hopper.device().platform
        if platform != "tpu":
            return f"it needs a TPU, and this is a {platform.upper()}"
    heads, queries, dim = q.shape[1:]
    if coded or k.dtype not in (jnp.bfloat16, jnp.float32):
        return f"its pages are bfloat16 or float32, not {k.dtype}"
    if q.dtype != k.dtype:
        return f"its queries are of the pages' dtype {k.dtype}, not {q.dtype}"
    if masked:
        return "it shows every entry to every query, and these expire"
    if k.shape != v.shape:
        return "its values are not its keys"
    if k.shape[2] % LANES:
        return f"its pages have rows of a multiple of {LANES} numbers, not {k.shape[2]}: XLA would copy such a pool"
    rows = heads // tables.shape[1] * queries * (k.shape[2] // dim)
    if rows > ROWS:
        return f"it takes {ROWS} query rows per KV head (group x queries x tokens in a row), not {rows}"
    tile = 32 // k.dtype.itemsize
    if k.shape[1] % tile:
        return f"its pages have a multiple of {tile} rows, not {k.shape[1]}"
    if tables.shape[0] * tables.shape[1] > HEADS:
        return f"it takes {HEADS} KV heads of all sequences, not {tables.shape[0] * tables.shape[1]}"
    if tables.shape[2] > _TABLES // 8:
        return f"its page tables have at most {_TABLES // 8} entries, not {tables.shape[2]}"
    return None


def _kernel(p: Plan, pool: Any, scale: float, soft_cap: float | None) -> Any:
    """The kernel: (lengths, tables, q, k, v) -> (total, stats).

    total: [N, rows, width]; stats: [N, rows, 128], in its first half the largest score, in its second the weight.
    """
    f32, i32 = jnp.float32, jnp.int32
    n, keys = p.side_by_side, p.keys
    exact = lax.Precision.HIGHEST if pool == f32 else None

    def body(lengths: Any, tables: Any, q: Any, *refs: Any) -> None:
        pools, (total, stats), buffers, arrived = refs[:2], refs[2:4], refs[4:6], refs[6]
        base = pl.program_id(0) * p.heads

        def next_head(head: Any) -> Any:
            """The first head from this one on that holds anything, or ``p.heads``."""
            return lax.while_loop(
                lambda h: (h < p.heads) & (lengths[base + jnp.minimum(h, p.heads - 1)] == 0), lambda h: h + 1, head
            )

        def advance(head: Any, tile: Any) -> tuple[Any, Any]:
            more = (head < p.heads) & ((tile + 1) * keys < lengths[base + jnp.minimum(head, p.heads - 1)])
            return lax.cond(more, lambda: (head, tile + 1), lambda: (next_head(head + 1), i32(0)))

        def room(head: Any, tile: Any) -> Any:
            """Entries from the tile's first to the head's end; 0 past the last head."""
            return jnp.where(head < p.heads, lengths[base + jnp.minimum(head, p.heads - 1)] - tile * keys, 0)

        def pages(head: Any, tile: Any) -> Any:
            return jnp.minimum(lax.div(room(head, tile) + (p.page * n - 1), i32(p.page * n)), p.run)

        def copy(at: Any, slot: Any, j: Any) -> list[Any]:
            return [
                pltpu.make_async_copy(x.at[at], y.at[slot, pl.ds(j * p.page, p.page)], arrived.at[slot])
                for x, y in zip(pools, buffers, strict=True)
            ]

        def start(head: Any, tile: Any, slot: Any) -> None:
            count = pages(head, tile)

            def one(j: Any, _: Any) -> Any:
                for each in copy(tables[head, tile * p.run + j], slot, j):
                    each.start()
                return _

            @pl.when(count == p.run)
            def _() -> None:
                for j in range(p.run):
                    one(j, None)

            @pl.when(count < p.run)
            def _() -> None:
                lax.fori_loop(i32(0), count, one, None)

        def wait(head: Any, tile: Any, slot: Any) -> None:
            count = pages(head, tile)

            @pl.when(count == p.run)
            def _() -> None:
                for buffer in buffers:
                    pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], arrived.at[slot]).wait()

            @pl.when(count < p.run)
            def _() -> None:
                def one(j: Any, _: Any) -> Any:
                    for each in copy(0, slot, j):
                        each.wait()
                    return _

                lax.fori_loop(i32(0), count, one, None)

            @pl.when(room(head, tile) < keys)
            def _() -> None:
                # Slots that nobody uses may hold NaN, and 0 * NaN is NaN: of weights and values, and of a query's zeros
                # and another token's key in the row.
                for buffer in buffers if n > 1 else buffers[1:]:
                    shape = buffer.shape[1:]
                    token = n * lax.broadcasted_iota(i32, shape, 0)
                    if n > 1:
                        token += lax.div(lax.broadcasted_iota(i32, shape, 1), i32(p.dim))
                    buffer[slot] = jnp.where(token < room(head, tile), buffer[slot], jnp.zeros(shape, pool))

        def attend(head: Any, tile: Any, slot: Any) -> tuple[Any, Any, Any]:
            """(total, top, weight) of the tile."""
            s = lax.dot_general(
                q[jnp.minimum(head, p.heads - 1)],
                buffers[0][slot],
                (((1,), (1,)), ((), ())),
                precision=exact,
                preferred_element_type=f32,
            )
            s = s * f32(scale)
            if soft_cap is not None:
                s = f32(soft_cap) * jnp.tanh(s * f32(1 / soft_cap))
            token = n * lax.broadcasted_iota(i32, s.shape, 1)
            if n > 1:
                token += lax.div(lax.broadcasted_iota(i32, s.shape, 0), i32(p.real_rows))
            seen = token < room(head, tile)
            s = jnp.where(seen, s, f32(EMPTY))
            top = s.max(1, keepdims=True)
            e = jnp.where(seen, jnp.exp(s - top), 0.0)
            sums = lax.dot_general(
                e.astype(pool),
                buffers[1][slot],
                (((1,), (0,)), ((), ())),
                precision=exact,
                preferred_element_type=f32,
            )
            return sums, top, e.sum(1, keepdims=True)

        def merge(head: Any, part: tuple[Any, Any, Any]) -> None:
            sums, top, weight = part

            @pl.when(head < p.heads)
            def _() -> None:
                old = stats[head]
                old_top, old_weight = old[:, :1], old[:, LANES // 2 : LANES // 2 + 1]
                new_top = jnp.maximum(old_top, top)
                decay, share = jnp.exp(old_top - new_top), jnp.exp(top - new_top)
                total[head] = total[head] * decay + sums * share
                lane = lax.broadcasted_iota(i32, old.shape, 1)
                stats[head] = jnp.where(lane < LANES // 2, new_top, old_weight * decay + weight * share)

        lane = lax.broadcasted_iota(i32, stats.shape, 2)
        stats[...] = jnp.where(lane < LANES // 2, f32(EMPTY), f32(0))
        total[...] = jnp.zeros(total.shape, f32)

        def fill(slot: Any, ahead: tuple[Any, Any]) -> tuple[Any, Any]:
            start(*ahead, slot)
            return advance(*ahead)

        first = next_head(i32(0)), i32(0)
        ahead = lax.fori_loop(i32(0), i32(p.stages), fill, first)

        def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            i, head, tile, *rest = carry
            ahead = rest[0], rest[1]
            slot = lax.rem(i, i32(p.stages))
            items = []
            for u in range(TILES_AT_ONCE):
                items.append((head, tile, slot + u))
                head, tile = advance(head, tile)
            for item in items:
                wait(*item)
            parts = [attend(*item) for item in items]
            for item in items:
                start(*ahead, item[2])
                ahead = advance(*ahead)
            for item, part in zip(items, parts, strict=True):
                merge(item[0], part)
            return i + TILES_AT_ONCE, head, tile, *ahead

        lax.while_loop(lambda carry: carry[1] < p.heads, step, (i32(0), *first, *ahead))

    def block(*shape: int) -> Any:
        return pl.BlockSpec((p.heads, *shape), lambda i, lengths: (i, *(0,) * len(shape)))

    def build(lengths: Array, tables: Array, q: Array, *pools: Array) -> Any:
        heads, table = tables.shape
        return pl.pallas_call(
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(p.blocks,),
                in_specs=[
                    pl.BlockSpec((p.heads, table), lambda i, lengths: (i, 0), memory_space=pltpu.SMEM),
                    block(p.rows, p.width),
                    *(pl.BlockSpec(memory_space=pltpu.HBM) for _ in pools),
                ],
                out_specs=[block(p.rows, p.width), block(p.rows, LANES)],
                scratch_shapes=[
                    *(pltpu.VMEM((p.stages, p.run * p.page, p.width), pool) for _ in pools),
                    pltpu.SemaphoreType.DMA((p.stages,)),
                ],
            ),
            out_shape=[
                jax.ShapeDtypeStruct((heads, p.rows, p.width), f32),
                jax.ShapeDtypeStruct((heads, p.rows, LANES), f32),
            ],
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), disable_bounds_checks=True),
            name="ragged_decode",
        )(lengths, tables, q, *pools)

    return build


def attention(
    q: Array,
    k: Array,
    v: Array,
    k_scale: Array | None,
    v_scale: Array | None,
    tables: Array,
    lengths: Array,
    expires: Array | None,
    q_positions: Array | None,
    *,
    scale: float,
    soft_cap: float | None = None,
) -> Partial:
    """See :func:`kernels.ragged_decode.api.ragged_attention`, with ``token_major``.

    Raises:
        NotImplementedError: what :func:`unsupported` says.
    """
    reason = unsupported(q, k, v, tables, k_scale is not None or v_scale is not None, expires is not None)
    if reason is not None:
        raise NotImplementedError(f"the TPU kernel of ragged_attention cannot do this: {reason}; 'xla' can")
    batch, heads, queries, dim = q.shape
    kv_heads = tables.shape[1]
    flat, rows = batch * kv_heads, heads // kv_heads * queries
    p = plan(k, dim, rows, flat, tables.shape[2])
    n = p.side_by_side
    # Row a R + r is row r at the lanes of token a of n.
    apart = jnp.eye(n, dtype=q.dtype)[None, :, None, :, None] * q.reshape(flat, 1, rows, 1, dim)
    apart = apart.reshape(flat, n * rows, p.width)
    apart = jnp.pad(apart, ((0, 0), (0, p.rows - n * rows), (0, 0))).astype(k.dtype)
    padded = jnp.pad(lengths.reshape(flat), (0, p.blocks * p.heads - flat))
    kernel = _kernel(p, k.dtype, scale, soft_cap)
    sums, stats = kernel(padded, tables.reshape(flat, -1), apart, k, v)
    sums = sums[:, : n * rows].reshape(flat, n, rows, n, dim)
    top, weight = (stats[:, : n * rows, at].reshape(flat, n, rows) for at in (0, LANES // 2))
    most = top.max(1)
    share = jnp.exp(top - most[:, None])
    mine = jnp.stack([sums[:, a, :, a] for a in range(n)], 1)
    total = (mine * share[..., None]).sum(1)
    shape = (batch, heads, queries)
    weight = (weight * share).sum(1)
    return Partial(total.reshape(*shape, dim), most.reshape(shape), weight.reshape(shape))


def aot_cases() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """One decoding step of each named model that it serves: 32 sequences, a pool of 2 ** 18 slots, long page tables.

    {name: (function, (ShapeDtypeStruct, ...))}; the function takes q, k, v, tables, lengths.
    """
    cases = {}
    for name, shape in {**MODELS, **OTHER_DIMS}.items():
        n = max(1, LANES // shape.head_dim)
        if n * shape.head_dim % LANES:
            continue
        rows = 2**18 // 64, 64 // n, shape.head_dim * n
        arrays = (
            ((32, shape.heads, 1, shape.head_dim), jnp.bfloat16),
            (rows, jnp.bfloat16),
            (rows, jnp.bfloat16),
            ((32, shape.kv_heads, 512), jnp.int32),
            ((32, shape.kv_heads), jnp.int32),
        )

        def run(q: Array, k: Array, v: Array, tables: Array, lengths: Array, dim: int = shape.head_dim) -> Partial:
            return attention(q, k, v, None, None, tables, lengths, None, None, scale=dim**-0.5)

        cases[name] = run, tuple(jax.ShapeDtypeStruct(*array) for array in arrays)
    return cases

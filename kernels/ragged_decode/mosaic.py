"""Ragged attention as a Mosaic GPU kernel for Hopper: asynchronous copies of pages, tensor core products.

Decoding is bound by memory: every live page is read once, and a key meets only ``group x queries`` rows. A tensor core
product has 64 rows at least, so the product is turned round: 64 keys are the rows and the queries, padded to a multiple
of 8, the columns (``scores^T = K^T q^T``, ``total^T = V^T p^T``). Nothing then grows with the padding but the columns.
Both operands come as the pages hold them: wgmma reads 16-bit tiles transposed.

The live tiles (64 keys) of all heads, one after the other, are divided evenly among the resident blocks, whatever heads
they belong to: a head that is ten times longer is spread over ten times the blocks. A block walks its tiles; one
warpgroup copies pages to a ring in shared memory, the other multiplies. Where a block passes from one head to the next
it writes a part, and there are at most ``heads + blocks`` parts (:func:`_schedule`), which a second, small kernel
merges (:func:`_merge`).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from kernels import hopper
from kernels.hopper import plgpu, tiled
from kernels.partial import EMPTY, Partial
from kernels.shapes import LATENT, MODELS, OTHER_DIMS, ModelShape

DIMS = (64, 96, 128, 192, 256, 576)
"""Head dimensions that the kernel serves (576: the latent entries of DeepSeek-V2/V3, which are keys and values)."""

KEYS = 64
"""Keys per tile: the rows of one tensor core product."""

ROWS = 256
"""Query rows per KV head (group x queries) that the kernel takes; more are a prefill's."""

_LOG2E = math.log2(math.e)
_REGISTERS = 65536  # of a multiprocessor


@dataclass(frozen=True)
class Plan:
    """How the kernel is built for given shapes.

    Attributes:
        dim: head dimension.
        page: slots per page.
        rows: query rows per block, a multiple of 8.
        row_blocks: blocks that share a KV head's rows; each reads the pages again.
        coded: the pages hold 8-bit codes, with scales.
        masked: entries have an ``expires``.
        latent: the keys are the values.
        per_core: blocks that a multiprocessor holds.
        stages: tiles that are in flight or in use per block.
        query_buffers: heads whose queries are held at once.
    """

    dim: int
    page: int
    rows: int
    row_blocks: int
    coded: bool
    masked: bool
    latent: bool
    per_core: int = 1
    stages: int = 2
    query_buffers: int = 2

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """(first channel, channels) of the products with the values.

        Their rows are multiples of 64; the last two overlap where the head dimension is none.
        """
        return [(0, self.dim)] if self.dim % 64 == 0 else [(start, 64) for start in _runs(self.dim)]

    def registers(self) -> int:
        """Estimate of the registers per thread: sums, scores and weights."""
        columns = sum(size for _, size in self.pieces) + 2 * KEYS + KEYS // 2
        return 48 + 16 * self.coded + columns * self.rows // hopper.WARPGROUP

    def shared(self) -> int:
        """Bytes of shared memory per block; every array begins at a multiple of 1024."""
        tile = KEYS * self.dim
        sizes = [
            self.query_buffers * self.rows * self.dim * 2,
            self.rows * KEYS * 2,
            1024,  # barriers
            *([self.stages * tile * (1 if self.coded else 2)] * (1 if self.latent else 2)),
            *([tile * 2] * (self.coded * (1 if self.latent else 2))),
            *([self.stages * KEYS * 4] * (2 * self.coded + self.masked)),
            self.query_buffers * self.rows * 4 if self.masked else 0,
        ]
        return sum(1024 * pl.cdiv(size, 1024) for size in sizes) + 2048  # and what Mosaic takes for reductions


def _runs(size: int) -> list[int]:
    """Beginnings of pieces of 64 that cover ``size``; the last two may overlap."""
    return [*range(0, size - 63, 64), *([size - 64] if size % 64 else [])]


def plan(dim: int, page: int, rows: int, coded: bool, masked: bool, latent: bool) -> Plan:
    """Chooses the sizes of the kernel for ``rows`` query rows per KV head.

    Several blocks per multiprocessor hide each other's waits, if registers (few rows) and shared memory allow.
    """
    bare = Plan(dim, page, 8, 1, coded, masked, latent)
    most = max(n for n in range(8, 65, 8) if n == 8 or replace(bare, rows=n).registers() <= 200)
    row_blocks = pl.cdiv(rows, most)
    padded = 8 * pl.cdiv(pl.cdiv(rows, row_blocks), 8)
    for per_core, stages, buffers in (
        *((3, s, b) for s in (5, 4, 3) for b in (2, 1)),
        *((2, s, b) for s in (6, 5, 4, 3) for b in (2, 1)),
        *((1, s, b) for s in (8, 7, 6, 5, 4, 3, 2) for b in (2, 1)),
    ):
        made = Plan(dim, page, padded, row_blocks, coded, masked, latent, per_core, stages, buffers)
        fits = made.shared() <= hopper.SHARED_MEMORY // per_core - 1024 * (per_core > 1)
        if fits and (per_core == 1 or made.registers() * 2 * hopper.WARPGROUP * per_core <= _REGISTERS):
            return made
    raise NotImplementedError(f"no arrangement of the Mosaic kernel fits shared memory: {bare}")


def unsupported(q: Array, k: Array, tables: Array, coded: bool) -> str | None:
    """Why the kernel cannot do this, on this device; None if it can. Arguments as of the entry point."""
    reason = hopper.unavailable()
    if reason is not None:
        return reason
    heads, queries, dim = q.shape[1:]
    page = k.shape[2]
    rows = heads // tables.shape[1] * queries
    if q.dtype != jnp.bfloat16:
        return f"its queries are bfloat16, not {q.dtype}"
    if k.dtype not in ((jnp.int8, jnp.uint8) if coded else (jnp.bfloat16,)):
        return f"its pages are bfloat16, or int8 or uint8 (float8_e4m3) with scales, not {k.dtype}"
    if dim not in DIMS:
        return f"its head dimensions are {DIMS}, not {dim}"
    if page % KEYS:
        return f"its pages hold a multiple of {KEYS} slots, not {page}"
    if rows > ROWS:
        return f"it takes {ROWS} query rows per KV head (group x queries), not {rows}"
    if tables.size >= 2**31 or (tables.shape[0] * tables.shape[1] + 4 * hopper.cores()) * ROWS * 2 * dim >= 2**31:
        return "its offsets within tables and results are 32-bit"
    return None


class _Schedule(NamedTuple):
    """Which block does what. N heads, C blocks, all int32.

    Attributes:
        ends: [N], one past the last tile of each head; the tiles of all heads are numbered through.
        lengths: [N], entries of each head.
        first, last: [C], heads of the block's first and last tile; last <= first where it has none.
    """

    ends: Array
    lengths: Array
    first: Array
    last: Array


def _tiles(length: Any) -> Any:
    """Tiles that so many entries take."""
    return lax.div(length + (KEYS - 1), jnp.int32(KEYS))


def _share(block: Any, tiles: Any, blocks: int) -> tuple[Any, Any]:
    """First tile of a block and one past its last: the tiles are divided evenly."""
    share, rest = lax.div(tiles, jnp.int32(blocks)), lax.rem(tiles, jnp.int32(blocks))
    start = block * share + jnp.minimum(block, rest)
    return start, start + share + (block < rest).astype(jnp.int32)


def _block_of(tile: Any, tiles: Any, blocks: int) -> Any:
    """The block that has the tile: the inverse of :func:`_share`."""
    share, rest = lax.div(tiles, jnp.int32(blocks)), lax.rem(tiles, jnp.int32(blocks))
    large = rest * (share + 1)
    return jnp.where(
        tile < large, lax.div(tile, share + 1), rest + lax.div(tile - large, jnp.maximum(share, jnp.int32(1)))
    )


def _schedule(lengths: Array, blocks: int) -> _Schedule:
    """Divides the tiles of heads with the given lengths [N] evenly among the blocks.

    Going through the tiles, each part begins with the next head or the next block, so ``head + block`` numbers the
    parts, with gaps, and the parts of one head follow each other.
    """
    head = jnp.arange(lengths.shape[0], dtype=jnp.int32)
    # A sum per head is one small program on a GPU; a cumulative sum is three.
    ends = jnp.sum(jnp.where(head[None] <= head[:, None], _tiles(lengths)[None], 0), 1, dtype=jnp.int32)
    start, stop = _share(jnp.arange(blocks, dtype=jnp.int32), ends[-1], blocks)
    first = jnp.sum(ends[None] <= start[:, None], 1, dtype=jnp.int32)
    return _Schedule(ends, lengths, first, jnp.sum(ends[None] < stop[:, None], 1, dtype=jnp.int32))


def _merge(p: Plan, heads: int, blocks: int) -> Any:
    """The kernel that merges each head's parts: (ends, lengths, total, stats) -> (total, stats).

    Of N heads and X row blocks: [N, X, D, R], and [N, X, 2, R] with the largest score (natural units) and the weight.
    """
    f32, layout = jnp.float32, plgpu.Layout.WGMMA
    at_once = max(1, min(8, 64 * hopper.WARPGROUP // (sum(size for _, size in p.pieces) * p.rows)))

    def body(ends: Any, lengths: Any, total: Any, stats: Any, merged: Any, merged_stats: Any) -> None:
        head, row_block = lax.axis_index("head"), lax.axis_index("rows")
        tiles, end, own = ends[heads - 1], ends[head], _tiles(lengths[head])
        first = _block_of(end - own, tiles, blocks)
        count = jnp.where(own > 0, _block_of(end - 1, tiles, blocks) - first + 1, 0)

        def across(x: Any, size: int) -> Any:
            return lax.broadcast_in_dim(x, (size, p.rows), [1])

        def load(ref: Any, layout: Any) -> Any:
            return plgpu.load(ref, layout=layout, optimized=False)

        def some(i: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            sums, top, weight = carry
            nth = [i * at_once + u for u in range(at_once)]
            places = [head + first + jnp.minimum(n, count - 1) for n in nth]
            # What goes past the last part reads that again, with no share.
            tops = [
                load(stats.at[row_block, at, 0], layout.reduce(0)) + jnp.where(n < count, f32(0), f32(EMPTY))
                for n, at in zip(nth, places, strict=True)
            ]
            weights = [load(stats.at[row_block, at, 1], layout.reduce(0)) for at in places]
            parts = [
                [load(total.at[row_block, at, pl.ds(begin, size)], layout) for begin, size in p.pieces] for at in places
            ]
            new_top = functools.reduce(jnp.maximum, tops, top)
            decay = jnp.exp2(top - new_top)
            weight = weight * decay
            sums = [x * across(decay, x.shape[0]) for x in sums]
            for part, top_of, weight_of in zip(parts, tops, weights, strict=True):
                share = jnp.exp2(top_of - new_top)
                weight = weight + weight_of * share
                sums = [x + y * across(share, x.shape[0]) for x, y in zip(sums, part, strict=True)]
            return tuple(sums), new_top, weight

        carry = (
            tuple(plgpu.layout_cast(jnp.zeros((size, p.rows), f32), layout) for _, size in p.pieces),
            plgpu.layout_cast(jnp.full((p.rows,), EMPTY, f32), layout.reduce(0)),
            plgpu.layout_cast(jnp.zeros((p.rows,), f32), layout.reduce(0)),
        )
        steps = lax.div(count + (at_once - 1), jnp.int32(at_once))
        sums, top, weight = lax.fori_loop(jnp.int32(0), steps, some, carry)
        for piece, (begin, size) in zip(sums, p.pieces, strict=True):
            hopper.store(merged.at[head, row_block, pl.ds(begin, size)], piece)
        # A head all of whose entries are hidden has kept EMPTY through the change of base.
        hopper.store(merged_stats.at[head, row_block, 0], jnp.where(top > EMPTY, top * f32(1 / _LOG2E), f32(EMPTY)))
        hopper.store(merged_stats.at[head, row_block, 1], weight)

    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((heads, p.row_blocks, p.dim, p.rows), f32),
            jax.ShapeDtypeStruct((heads, p.row_blocks, 2, p.rows), f32),
        ],
        grid=(heads, p.row_blocks),
        grid_names=("head", "rows"),
        kernel_name="ragged_merge",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )


def _kernel(p: Plan, heads: int, kv_heads: int, blocks: int, scale: float, soft_cap: float | None, code: Any) -> Any:
    """The kernel: (*schedule, tables, q, k[, v][, scales][, expires, positions]) -> (total, stats).

    For each of X row blocks and S places of parts: [X, S, D, R], and [X, S, 2, R] with the largest score (times
    log2(e)) and the weight.
    """
    dim, rows, stages = p.dim, p.rows, p.stages
    per_page = p.page // KEYS
    f32, bf16, i32 = jnp.float32, jnp.bfloat16, jnp.int32
    wgmma = plgpu.Layout.WGMMA
    shape = (KEYS, rows)

    def body(*refs: Any, **smem: Any) -> None:
        inputs = iter(refs)
        ends, lengths, first_head, last_head, tables, q, k = (next(inputs) for _ in range(7))
        v = None if p.latent else next(inputs)
        k_scale, v_scale = (next(inputs), next(inputs)) if p.coded else (None, None)
        expires, positions = (next(inputs), next(inputs)) if p.masked else (None, None)
        total, stats = inputs
        block, row_block = lax.axis_index("block"), lax.axis_index("rows")
        start, stop = _share(block, ends[heads - 1], blocks)

        def each_head(work: Callable[[Any, Any, Any, Any, Any, Any], None]) -> Any:
            """Calls ``work(head, buffer, use, begin, low, high)`` for each head with tiles of the block; how many."""

            def step(head: Any, seen: Any) -> Any:
                end = ends[head]
                begin = end - _tiles(lengths[head])
                low, high = jnp.maximum(begin, start), jnp.minimum(end, stop)

                @pl.when(high > low)
                def _() -> None:
                    work(head, lax.rem(seen, jnp.int32(p.query_buffers)), seen, begin, low, high)

                return seen + (high > low).astype(jnp.int32)

            return lax.fori_loop(first_head[block], last_head[block] + 1, step, jnp.int32(0))

        def copy_head(head: Any, buffer: Any, use: Any, begin: Any, low: Any, high: Any) -> None:
            @pl.when(use >= p.query_buffers)
            def _() -> None:
                plgpu.barrier_wait(smem["q_free"].at[buffer])

            here = pl.ds(row_block * rows, rows)
            plgpu.copy_gmem_to_smem(q.at[head, here], smem["q"].at[buffer], smem["q_full"].at[buffer])
            if positions is not None:
                sequence = lax.div(head, jnp.int32(kv_heads))
                plgpu.copy_gmem_to_smem(
                    positions.at[sequence, here], smem["positions"].at[buffer], smem["q_full"].at[buffer]
                )

            def copy_tile(tile: Any, _: Any) -> Any:
                turn = tile - start
                slot = lax.rem(turn, jnp.int32(stages))
                nth = tile - begin
                at = tables[head, lax.div(nth, jnp.int32(per_page))]
                slots = pl.ds(lax.rem(nth, jnp.int32(per_page)) * KEYS, KEYS) if per_page > 1 else pl.ds(0, KEYS)

                def fetch(name: str, *pairs: tuple[Any, Any]) -> None:
                    @pl.when(turn >= stages)
                    def _() -> None:
                        plgpu.barrier_wait(smem[f"{name}_free"].at[slot])

                    for source, target in pairs:
                        plgpu.copy_gmem_to_smem(source, target.at[slot], smem[f"{name}_full"].at[slot])

                keys, values = [(k.at[at, :, slots], smem["k"])], []
                if v is not None:
                    values.append((v.at[at, slots], smem["v"]))
                if k_scale is not None and v_scale is not None:
                    keys.append((k_scale.at[at, slots], smem["k_scale"]))
                    (keys if p.latent else values).append((v_scale.at[at, slots], smem["v_scale"]))
                if expires is not None:
                    keys.append((expires.at[at, slots], smem["expires"]))
                fetch("k", *keys)
                if values:
                    fetch("v", *values)
                return _

            lax.fori_loop(low, high, copy_tile, None)

        def multiply(a: Any, b: Any, shape: tuple[int, int]) -> Any:
            def run(acc: Any) -> Any:
                step = 192 if a.shape[1] > 256 else a.shape[1]

                def some(i: Any, _: Any) -> Any:
                    here = pl.ds(i * step, step)
                    plgpu.wgmma(acc, a.at[:, here], b.at[here])
                    plgpu.wgmma_wait(0)
                    return _

                # In a loop, since the compiler keeps the descriptors of all its products in registers.
                if step < a.shape[1]:
                    lax.fori_loop(0, a.shape[1] // step, some, None)
                else:
                    plgpu.wgmma(acc, a, b)
                return acc[...]

            return pl.run_scoped(run, plgpu.ACC(shape, f32))

        def add_product(start: Any, a: Any, b: Any) -> Any:
            """``start + a @ b``, in the registers of ``start``; the interpreter knows no such accumulator."""
            if hopper.interpreting():
                return start + multiply(a, b, start.shape)
            return pl.run_state(lambda acc: plgpu.wgmma(acc, a, b))(plgpu.ACC.init(start))

        def across(x: Any, shape: tuple[int, int]) -> Any:
            return lax.broadcast_in_dim(x, shape, [1])

        def down(x: Any, shape: tuple[int, int]) -> Any:
            return lax.broadcast_in_dim(x, shape, [0])

        def load(ref: Any, axis: int) -> Any:
            """A vector of shared memory, as a column or row of the scores."""
            return plgpu.load(ref, layout=wgmma.reduce(axis), optimized=False)

        def pieces_of(ref: Any, work: Callable[[Any, Any], None]) -> None:
            """Calls ``work(slice, first slot)`` for 64 rows x 64 or 32 columns at a time.

            In a loop, whose length the compiler does not know: it would hold many pieces in registers.
            """
            count, across = ref.shape
            wide = 64 if across % 64 == 0 else 32
            down = _runs(count)

            def step(i: Any, _: Any) -> Any:
                row = jnp.minimum(lax.div(i, jnp.int32(across // wide)) * 64, count - 64)
                work((pl.ds(row, 64), pl.ds(lax.rem(i, jnp.int32(across // wide)) * wide, wide)), row)
                return _

            lax.fori_loop(jnp.int32(0), len(down) * (across // wide), step, None)

        def decode(codes: Any, target: Any) -> None:
            """Writes 8-bit codes as bfloat16."""

            def piece(here: Any, _: Any) -> None:
                read = plgpu.load(codes.at[here], layout=plgpu.Layout.WGMMA_UPCAST_2X, optimized=False)
                if read.dtype != jnp.int8:
                    read = read.astype(jnp.float16).astype(f32)
                target.at[here][...] = plgpu.layout_cast(read.astype(bf16), wgmma)

            pieces_of(codes, piece)

        def clear_tail(values: Any, room: Any) -> None:
            """Zeroes the values of slots that nobody uses: they may hold NaN, and 0 * NaN is NaN."""

            def piece(here: Any, _: Any) -> None:
                part = values.at[here]
                slot = plgpu.broadcasted_iota(i32, part.shape, 1 if p.latent else 0, layout=wgmma)
                part[...] = jnp.where(slot < room, part[...], jnp.zeros(part.shape, bf16))

            pieces_of(values, piece)

        def attend_head(head: Any, buffer: Any, use: Any, begin: Any, low: Any, high: Any) -> None:
            del use
            length = lengths[head]
            plgpu.barrier_wait(smem["q_full"].at[buffer])

            def attend_tile(tile: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
                sums, top, weight = carry
                slot = lax.rem(tile - start, jnp.int32(stages))
                room = length - (tile - begin) * KEYS
                seen = plgpu.broadcasted_iota(i32, shape, 0, layout=wgmma) < room
                plgpu.barrier_wait(smem["k_full"].at[slot])
                keys = smem["k"].at[slot]
                last = down(load(smem["expires"].at[slot], 1), shape) if p.masked else None
                factor = down(load(smem["k_scale"].at[slot], 1), shape) if p.coded else None
                if p.coded:
                    decode(keys, smem["keys"])
                    keys = smem["keys"]
                if p.masked or p.coded:
                    # Also lets the next copy overwrite what was just read: copies go by another way to memory.
                    plgpu.commit_smem()
                s = multiply(keys.transpose((1, 0)), smem["q"].at[buffer].transpose((1, 0)), shape)
                if factor is not None:
                    s = s * factor
                if soft_cap is None:
                    s = s * f32(scale * _LOG2E)
                else:
                    # cap * tanh(s / cap), exact where the approximate instruction is not.
                    grown = jnp.exp2(s * f32(2 * scale * _LOG2E / soft_cap))
                    s = f32(soft_cap * _LOG2E) - f32(2 * soft_cap * _LOG2E) / (grown + 1.0)
                if last is not None:
                    seen = seen & (across(load(smem["positions"].at[buffer], 0), shape) <= last)
                if not p.latent:
                    plgpu.barrier_arrive(smem["k_free"].at[slot])
                s = jnp.where(seen, s, EMPTY)
                new_top = jnp.maximum(top, s.max(axis=0))
                decay = jnp.exp2(top - new_top)
                e = jnp.where(seen, jnp.exp2(s - across(new_top, shape)), 0.0)
                weight = weight * across(decay, shape) + e

                if not p.latent:
                    plgpu.barrier_wait(smem["v_full"].at[slot])
                if p.coded:
                    e = jnp.where(seen, e * down(load(smem["v_scale"].at[slot], 1), shape), 0.0)
                smem["p"].transpose((1, 0))[...] = e.astype(bf16)
                values = keys if p.latent else smem["v"].at[slot]
                if p.coded and not p.latent:
                    decode(values, smem["values"])
                    values = smem["values"]
                pl.when(room < KEYS)(lambda: clear_tail(values, room))
                plgpu.commit_smem()
                made = []
                for piece, (first, size) in zip(sums, p.pieces, strict=True):
                    channels = pl.ds(first, size)
                    mine = values.at[channels] if p.latent else values.at[:, channels].transpose((1, 0))
                    made.append(add_product(piece * across(decay, (size, rows)), mine, smem["p"].transpose((1, 0))))
                plgpu.barrier_arrive(smem["k_free" if p.latent else "v_free"].at[slot])
                return tuple(made), new_top, weight

            carry = (
                tuple(plgpu.layout_cast(jnp.zeros((size, rows), f32), wgmma) for _, size in p.pieces),
                plgpu.layout_cast(jnp.full((rows,), EMPTY, f32), wgmma.reduce(0)),
                # Summed over the keys at the end only: a sum over warps is slow.
                plgpu.layout_cast(jnp.zeros(shape, f32), wgmma),
            )
            sums, top, weight = lax.fori_loop(low, high, attend_tile, carry)
            plgpu.barrier_arrive(smem["q_free"].at[buffer])
            place = head + block
            # A thread writes 8 bytes, four of them a sector: nothing is gained by way of shared memory.
            for piece, (first, size) in zip(sums, p.pieces, strict=True):
                hopper.store(total.at[row_block, place, pl.ds(first, size)], piece)
            hopper.store(stats.at[row_block, place, 0], top)
            hopper.store(stats.at[row_block, place, 1], weight.sum(axis=0))

        def drain(name: str, uses: Any, count: int) -> None:
            """Waits for the last use of each of ``count`` buffers: a barrier goes when all its phases were seen."""
            for i in range(count):
                pl.when(i < uses)(functools.partial(plgpu.barrier_wait, smem[f"{name}_free"].at[i]))

        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _() -> None:
            each_head(attend_head)

        @pl.when(warpgroup == 1)
        def _() -> None:
            drain("q", each_head(copy_head), p.query_buffers)
            drain("k", stop - start, stages)
            if not p.latent:
                drain("v", stop - start, stages)

    places = heads + blocks
    # The operands of one product have to be swizzled alike.
    layout = tiled(bf16, 64 if dim % 64 == 0 else 32)
    codes = layout if code == bf16 else tiled(code, KEYS)
    scratch = {
        "q": plgpu.SMEM((p.query_buffers, rows, dim), bf16, transforms=layout),
        "k": plgpu.SMEM((stages, dim, KEYS), code, transforms=codes),
        "p": plgpu.SMEM((rows, KEYS), bf16, transforms=layout),
        "q_full": plgpu.Barrier(num_arrivals=1 + p.masked, num_barriers=p.query_buffers),
        "q_free": plgpu.Barrier(num_barriers=p.query_buffers),
        "k_full": plgpu.Barrier(num_arrivals=1 + p.coded * (1 + p.latent) + p.masked, num_barriers=stages),
        "k_free": plgpu.Barrier(num_barriers=stages),
    }
    if not p.latent:
        scratch |= {
            "v": plgpu.SMEM(
                (stages, KEYS, dim),
                code,
                transforms=layout if code == bf16 else tiled(code, 64 if dim % 64 == 0 else 32),
            ),
            "v_full": plgpu.Barrier(num_arrivals=1 + p.coded, num_barriers=stages),
            "v_free": plgpu.Barrier(num_barriers=stages),
        }
    if p.coded:
        scratch |= {
            "k_scale": plgpu.SMEM((stages, KEYS), f32),
            "v_scale": plgpu.SMEM((stages, KEYS), f32),
            "keys": plgpu.SMEM((dim, KEYS), bf16, transforms=layout),
        }
        if not p.latent:
            scratch["values"] = plgpu.SMEM((KEYS, dim), bf16, transforms=layout)
    if p.masked:
        scratch |= {
            "expires": plgpu.SMEM((stages, KEYS), i32),
            "positions": plgpu.SMEM((p.query_buffers, rows), i32),
        }
    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((p.row_blocks, places, dim, rows), f32),
            jax.ShapeDtypeStruct((p.row_blocks, places, 2, rows), f32),
        ],
        scratch_types=scratch,
        grid=(p.row_blocks, blocks),
        grid_names=("rows", "block"),
        num_threads=2,
        thread_name="warpgroup",
        kernel_name="ragged_decode",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )


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
    """See :func:`kernels.ragged_decode.api.ragged_attention`.

    Raises:
        NotImplementedError: what :func:`unsupported` says.
    """
    coded, masked, latent = k_scale is not None, expires is not None, not v.shape[2]
    reason = unsupported(q, k, tables, coded)
    if reason is not None:
        raise NotImplementedError(f"the Mosaic kernel of ragged_attention cannot do this: {reason}; 'xla' can")
    batch, heads, queries, dim = q.shape
    kv_heads = tables.shape[1]
    flat, rows = batch * kv_heads, heads // kv_heads * queries
    p = plan(dim, k.shape[2], rows, coded, masked, latent)
    blocks = max(1, hopper.cores() * p.per_core // p.row_blocks)
    schedule = _schedule(lengths.reshape(flat), blocks)
    if k.dtype == jnp.uint8:
        k, v = (lax.bitcast_convert_type(x, jnp.float8_e4m3fn) for x in (k, v))

    padding = p.rows * p.row_blocks - rows
    inputs = [
        *schedule,
        tables.reshape(flat, -1),
        jnp.pad(q.reshape(flat, rows, dim), ((0, 0), (0, padding), (0, 0))),
        k,
        *([] if latent else [v]),
    ]
    if k_scale is not None and v_scale is not None:
        inputs += [k_scale, v_scale]
    if expires is not None and q_positions is not None:
        # Row r of a head is query r % T of the group's head r // T.
        inputs += [expires, jnp.pad(jnp.tile(q_positions, (1, heads // kv_heads)), ((0, 0), (0, padding)))]
    sums, stats = _kernel(p, flat, kv_heads, blocks, scale, soft_cap, k.dtype)(*inputs)
    sums, stats = _merge(p, flat, blocks)(schedule.ends, schedule.lengths, sums, stats)

    shape = (batch, heads, queries)
    total = jnp.swapaxes(sums, 2, 3).reshape(flat, -1, dim)[:, :rows].reshape(*shape, dim)
    top, weight = (stats[:, :, i].reshape(flat, -1)[:, :rows].reshape(shape) for i in (0, 1))
    return Partial(total, top, weight)


def aot_cases() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """One decoding step of each named model, and each kind of page and number of queries; see ``kernels.aot_cases``."""
    every = {**MODELS, **OTHER_DIMS}
    cases = {f"decode_{name}": _case(shape) for name, shape in every.items()}
    cases["decode_deepseek-v3"] = _case(LATENT, latent=True)
    for name in ("llama-3.2-1b", "phi-3-mini", "qwen3-8b", "deepseek-v3-keys", "gemma-3-12b"):
        cases[f"decode_{name}_int8"] = _case(every[name], code=jnp.int8)
    cases["decode_deepseek-v3_int8"] = _case(LATENT, code=jnp.int8, latent=True)
    cases["decode_qwen3-8b_float8"] = _case(MODELS["qwen3-8b"], code=jnp.uint8)
    cases["decode_qwen3-8b_4_queries"] = _case(MODELS["qwen3-8b"], queries=4)
    cases["decode_qwen3-8b_16_queries_int8"] = _case(MODELS["qwen3-8b"], queries=16, code=jnp.int8)
    cases["decode_gemma-3-12b_16_queries"] = _case(OTHER_DIMS["gemma-3-12b"], queries=16)
    cases["decode_llama-3.2-1b_16_queries"] = _case(MODELS["llama-3.2-1b"], queries=16)
    cases["decode_qwen3-8b_soft_cap"] = _case(MODELS["qwen3-8b"], soft_cap=50.0)
    cases["decode_qwen3-8b_pages_of_128"] = _case(MODELS["qwen3-8b"], page=128)
    return cases


def _case(
    shape: ModelShape,
    *,
    queries: int = 1,
    code: Any = jnp.bfloat16,
    latent: bool = False,
    soft_cap: float | None = None,
    page: int = 64,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """32 sequences and a pool of 2 ** 20 slots; several queries come with ``expires``."""
    batch, pages, width, dim = 32, 2**20 // page, 128, shape.head_dim

    def array(*dims: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    optional = {}
    if code != jnp.bfloat16:
        optional = {name: array(pages, page, dtype=jnp.float32) for name in ("k_scale", "v_scale")}
    if queries > 1:
        optional |= {"expires": array(pages, page), "q_positions": array(batch, queries)}

    def run(q: Array, k: Array, v: Array, tables: Array, lengths: Array, *rest: Array) -> Partial:
        given = dict.fromkeys(("k_scale", "v_scale", "expires", "q_positions"), None) | dict(
            zip(optional, rest, strict=True)
        )
        return attention(q, k, v, tables=tables, lengths=lengths, scale=dim**-0.5, soft_cap=soft_cap, **given)

    arguments = (
        array(batch, shape.heads, queries, dim, dtype=jnp.bfloat16),
        array(pages, dim, page, dtype=code),
        array(pages, page, 0 if latent else dim, dtype=code),
        array(batch, shape.kv_heads, width),
        array(batch, shape.kv_heads),
    )
    return run, (*arguments, *optional.values())

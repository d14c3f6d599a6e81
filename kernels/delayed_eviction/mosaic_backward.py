"""The backward pass of attention under delayed eviction as Pallas Mosaic GPU kernels for Hopper (sm_90a).

With P the weights and dP = d_out v^T, the scores have the gradient dS = P * (dP - rowsum(d_out * out)), and ::

    dq = scale * dS k        dk = scale * dS^T q        dv = P^T d_out        d_bias[k] = sum of dS[:, k] beyond W

One kernel has the queries of a block along its rows and gives dq; another has the keys there and gives dk, dv and the
gradient of the gate, summed in registers over the queries and the query heads of a group. So nothing is added up in
memory, and results repeat exactly; the price is that P and dP are formed twice, 7 products instead of 5. Both kernels
are the same program: what lies along the rows stays, what lies along the columns passes by. Beyond 128 channels the
sums of dk and dv do not fit the registers together; then dv has a kernel of its own, with one product more.

P is recomputed from the log-sum-exp. Hard decisions are a bias of 0 or -inf like any other: no block is left out for
being evicted, so their backward pass costs as much as without eviction.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from kernels import hopper
from kernels.delayed_eviction import schedule
from kernels.delayed_eviction.schedule import Bounds, Visits
from kernels.delayed_eviction.tiles import (
    BLOCK,
    LOG2E,
    REGISTERS,
    ROWS,
    WARPGROUPS,
    adding,
    along_columns,
    along_rows,
    full,
    leading,
    per_column,
    slot_of,
    spill_buffer,
    tile,
)
from kernels.hopper import plgpu
from kernels.shapes import MODELS, OTHER_DIMS


class _Task(NamedTuple):
    """What a kernel computes, and how.

    Attributes:
        by_key: keys are along the rows, and queries along the columns; else the other way round.
        of_scores: gives the gradient of the row's factor of the scores: k (with the bias), or q.
        of_weights: gives the gradient of the row's factor of dP; v.
        window: of the eviction.
        scale: of the scores.
    """

    by_key: bool
    of_scores: bool
    of_weights: bool
    window: int
    scale: float

    @property
    def name(self) -> str:
        """Of the kernel."""
        return "queries" if not self.by_key else "keys" if self.of_scores else "values"

    def columns(self, dim: int) -> int:
        """Columns of a block: as many as leave registers for the sums."""
        sums = (self.of_scores + self.of_weights) * dim // 2  # registers per thread; S and dP take `columns` together
        return 128 if sums <= 64 else 64

    def stages(self, dim: int) -> tuple[int, int]:
        """Blocks of each factor in shared memory at once."""
        return 2, 1 if dim > 192 and self.of_scores else 2


class _Side(NamedTuple):
    """Queries or keys.

    Attributes:
        scores: [B, N, T, D], their factor of the scores: q or k.
        weights: [B, N, T, D], their factor of dP: d_out or v.
        numbers: [B, N, n, T] float32: of queries the log-sum-exp, times log2(e), and rowsum(d_out * out); of keys the
            bias, times log2(e), if there is one.
        places: [B or 1, n, T] int32, of each its position and, if there are segments, its segment.
    """

    scores: Any
    weights: Any
    numbers: Any
    places: Any


class _Inputs(NamedTuple):
    """Of a kernel.

    Attributes:
        rows: what stays.
        columns: what passes by.
        visits: column blocks of each row block.
        reach: [1] int32, largest distance at which a key is seen.
    """

    rows: _Side
    columns: _Side
    visits: Visits
    reach: Any


def _body(task: _Task, x: _Inputs, out: dict[str, Any], **smem: Any) -> None:
    batch, head, warpgroup = lax.axis_index("batch"), lax.axis_index("heads"), lax.axis_index("warpgroup")
    rows, columns = x.rows, x.columns
    length, dim = rows.scores.shape[2:]
    block = task.columns(dim)
    stages = task.stages(dim)
    shape = (ROWS, block)
    # The longest way is that of the first keys and of the last queries: they start first.
    row_block = lax.axis_index("rows")
    if not task.by_key:
        row_block = jnp.int32(length // BLOCK - 1) - row_block
    # Query heads that pass by a row: those of the group of a key head, one after another; or one key head.
    group = columns.scores.shape[1] // rows.scores.shape[1] if task.by_key else 1
    first_head = (
        head * group if task.by_key else lax.div(head, jnp.int32(rows.scores.shape[1] // columns.scores.shape[1]))
    )
    row = (leading(x.visits.order, batch), leading(x.visits.order, head if task.by_key else first_head, 1), row_block)
    plain, steps = (x.visits.counts[(*row, jnp.int32(i))] * group for i in range(2))
    slots = [functools.partial(slot_of, stages=n) for n in stages]

    def visited(t: Array) -> tuple[Array, Array]:
        """Column block and head of a step."""
        n = lax.div(t, jnp.int32(group))
        return x.visits.order[(*row, n)], first_head + lax.rem(t, jnp.int32(group))

    @pl.when(warpgroup == WARPGROUPS)
    def stream() -> None:
        plgpu.set_max_registers(REGISTERS[1], action="decrease")

        @pl.loop(jnp.int32(0), steps)
        def step(t: Array) -> None:
            index, of = visited(t)
            here = pl.ds(index * block, block)
            slot = slots[0](t)

            @pl.when(t >= stages[0])
            def reuse() -> None:
                plgpu.barrier_wait(smem["scores_free"].at[slot])
                plgpu.commit_smem()  # numbers were read by ordinary loads, and TMA writes by another way

            landed = smem["scores_full"].at[slot]
            plgpu.copy_gmem_to_smem(columns.scores.at[batch, of, here], smem["scores"].at[slot], landed)
            if columns.numbers is not None:
                source = columns.numbers.at[batch, of, :, here]
                plgpu.copy_gmem_to_smem(source, smem["numbers"].at[slot], landed)
            source = columns.places.at[leading(columns.places, batch), :, here]
            plgpu.copy_gmem_to_smem(source, smem["places"].at[slot], landed)
            slot = slots[1](t)
            pl.when(t >= stages[1])(lambda: plgpu.barrier_wait(smem["weights_free"].at[slot]))
            source = columns.weights.at[batch, of, here]
            plgpu.copy_gmem_to_smem(source, smem["weights"].at[slot], smem["weights_full"].at[slot])

    @pl.when(warpgroup < WARPGROUPS)
    def compute() -> None:
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        first = row_block * BLOCK + warpgroup * ROWS
        mine = pl.ds(first, ROWS)
        spill = smem["spill"].at[warpgroup] if "spill" in smem else None
        own = {name: smem[f"own_{name}"].at[warpgroup] for name in ("scores", "weights") if f"own_{name}" in smem}
        landed = smem["own_full"].at[warpgroup]
        for name, ref in own.items():
            plgpu.copy_gmem_to_smem(getattr(rows, name).at[batch, head, mine], ref, landed)

        def read(ref: Any, *lead: Array) -> list[Array]:
            """The numbers of this warpgroup's rows, [..., n, T]."""
            parts = [ref.at[(*lead, i, mine)] for i in range(ref.shape[-2])]
            return [plgpu.load(part, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False) for part in parts]

        own_numbers = [] if rows.numbers is None else read(rows.numbers, batch, head)
        own_places = read(rows.places, leading(rows.places, batch))
        plgpu.barrier_wait(landed)

        def visit(masked: bool, t: Array, state: dict[str, Array]) -> dict[str, Array]:
            # Always 0, which no compiler knows. Addresses that do not change would be kept in registers, a number for
            # each of the products of 16 channels, and push others out; those that seem to change are computed again.
            zero = lax.shift_right_arithmetic(lax.optimization_barrier(t), jnp.int32(31))
            slot, weights_slot = (of(t) + zero for of in slots)
            scores, weights = smem["scores"].at[slot], smem["weights"].at[weights_slot]

            def number(of_keys: bool, i: int, slot: Array) -> Array:
                """The i-th number of each query or key, at its rows or columns."""
                if of_keys == task.by_key:
                    return along_rows(own_numbers[i], shape)
                return along_columns(per_column(smem["numbers"].at[slot, i]), shape)

            def place(i: int, slot: Array) -> tuple[Array, Array]:
                """Position (0) or segment (1) of the rows and of the columns."""
                return along_rows(own_places[i], shape), along_columns(per_column(smem["places"].at[slot, i]), shape)

            def distance(slot: Array) -> Array:
                """From query to key. To compute it from the thread's number would take more registers than to read."""
                mine_of, other = place(0, slot)
                return other - mine_of if task.by_key else mine_of - other

            def weigh(s: Array) -> Array:
                s = s * (task.scale * LOG2E)
                far = distance(slot) if masked else None
                if (rows if task.by_key else columns).numbers is not None:
                    bias = number(True, 0, slot)
                    s = s + (bias if far is None else jnp.where(far > task.window, bias, 0.0))
                if far is not None:
                    s = jnp.where((far >= 0) & (far <= x.reach[0]), s, -jnp.inf)
                    if len(own_places) > 1:
                        mine_of, other = place(1, slot)
                        s = jnp.where(mine_of == other, s, -jnp.inf)
                return jnp.exp2(s - number(False, 0, slot)).astype(jnp.bfloat16)

            def step(add: Callable[..., None], s: Any, dp: Any = None) -> None:
                """The weights are computed during the product for dP, dS during that for dv."""
                plgpu.barrier_wait(smem["scores_full"].at[slot])
                plgpu.wgmma(s, smem["own_scores"].at[warpgroup + zero], scores.transpose((1, 0)))
                plgpu.barrier_wait(smem["weights_full"].at[weights_slot])
                if task.of_scores:
                    plgpu.wgmma(dp, smem["own_weights"].at[warpgroup + zero], weights.transpose((1, 0)))
                p = weigh(plgpu.wgmma_accumulator_load(s, wait_n=int(task.of_scores)))
                # What is read below must not be read before, for want of registers: the address comes with the weights.
                p, later = lax.optimization_barrier((p, slot))
                if task.of_weights:
                    add("weights", p, weights)
                if not task.of_scores:
                    plgpu.barrier_arrive(smem["scores_free"].at[slot])
                    return
                dp = plgpu.wgmma_accumulator_load(dp, wait_n=int(task.of_weights))
                if not task.of_weights:
                    plgpu.barrier_arrive(smem["weights_free"].at[weights_slot])
                ds = p.astype(jnp.float32) * (dp - number(False, 1, later))
                if "bias" in state:
                    add("bias", (jnp.where(distance(later) > task.window, ds, 0.0) if masked else ds).sum(axis=1))
                add("scores", ds.astype(jnp.bfloat16), scores)

            state = adding(state, step, *[shape] * (1 + task.of_scores), spill=spill)
            if task.of_scores:
                plgpu.barrier_arrive(smem["scores_free"].at[slot])
            if task.of_weights:
                plgpu.barrier_arrive(smem["weights_free"].at[weights_slot])
            return state

        state = {name: full((ROWS,) if name == "bias" else (ROWS, dim), 0.0) for name in out}
        state = lax.fori_loop(jnp.int32(0), plain, functools.partial(visit, False), state)
        state = lax.fori_loop(plain, steps, functools.partial(visit, True), state)

        if "bias" in out:
            hopper.store(out["bias"].at[batch, head, mine], state["bias"])
        # Each factor that this warpgroup has read makes room for a gradient.
        for name, room in zip([n for n in out if n != "bias"], own.values(), strict=False):
            room[...] = (state[name] * (task.scale if name == "scores" else 1.0)).astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(room, out[name].at[batch, head, mine])
        plgpu.wait_smem_to_gmem(0)


def _run(task: _Task, queries: _Side, keys: _Side, reach: Array) -> dict[str, Array]:
    """Gradients by name: "scores", "weights" [B, N, T, D], "bias" [B, H, T] float32."""
    rows, columns = (keys, queries) if task.by_key else (queries, keys)
    batch, heads, length, dim = rows.scores.shape
    block, stages = task.columns(dim), task.stages(dim)
    block_q, block_k = (block, BLOCK) if task.by_key else (BLOCK, block)
    at = schedule.positions(length)
    plain_from = 0 if keys.numbers is None else task.window + 1
    pairs = schedule.pairs(Bounds.of(at, block_q), Bounds.of(at, block_k), 0, reach, plain_from)
    if queries.places.shape[1] > 1:
        pairs = pairs.within(Bounds.of(queries.places[:, 1:], block_q), Bounds.of(keys.places[:, 1:], block_k))
    own = ("scores", "weights") if task.of_scores else ("scores",)
    scratch = {f"own_{name}": tile(WARPGROUPS, ROWS, dim) for name in own}
    if columns.numbers is not None:
        scratch["numbers"] = plgpu.SMEM((stages[0], columns.numbers.shape[2], block), jnp.float32)
    out = {}
    if task.of_scores:
        out["scores"] = jax.ShapeDtypeStruct(rows.scores.shape, jnp.bfloat16)
    if task.of_weights:
        out["weights"] = jax.ShapeDtypeStruct(rows.weights.shape, jnp.bfloat16)
    if task.of_scores and task.by_key and keys.numbers is not None:
        out["bias"] = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    found: dict[str, Array] = plgpu.kernel(
        functools.partial(_body, task),
        out_type=out,
        scratch_types={
            **scratch,
            "places": plgpu.SMEM((stages[0], columns.places.shape[1], block), jnp.int32),
            "scores": tile(stages[0], block, dim),
            "weights": tile(stages[1], block, dim),
            **spill_buffer(block),
            "own_full": plgpu.Barrier(num_arrivals=len(own), num_barriers=WARPGROUPS),
            "scores_full": plgpu.Barrier(num_arrivals=2 + (columns.numbers is not None), num_barriers=stages[0]),
            "weights_full": plgpu.Barrier(num_barriers=stages[1]),
            "scores_free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages[0]),
            "weights_free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages[1]),
        },
        grid=(batch, length // BLOCK, heads),
        grid_names=("batch", "rows", "heads"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name=f"delayed_backward_{task.name}",
        # A row of dS lies within a warp: its sum needs no shared memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(_Inputs(rows, columns, pairs.by_key() if task.by_key else pairs.by_query(), reach[None]))
    return found


def backward(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    segment_ids: Array | None,
    local_window: Array | None,
    out: Array,
    lse: Array,
    d_out: Array,
    *,
    window: int,
    scale: float,
) -> tuple[Array, Array, Array, Array | None]:
    """Gradients of q, k, v and the bias, from the arguments and results of the forward kernel.

    Args:
        q: [B, Hq, T, D] bfloat16; T is a multiple of 128, D one of those that the forward kernel serves.
        k: [B, H, T, D] bfloat16.
        v: [B, H, T, D] bfloat16.
        bias: [B, H, T] or None.
        segment_ids: [B, T] int32 or None.
        local_window: int32 scalar or None.
        out: [B, Hq, T, D] bfloat16, the result.
        lse: [B, Hq, T] float32, the log-sum-exp of each row of scores; +inf for rows that see nothing.
        d_out: [B, Hq, T, D] bfloat16.
        window: delay of the eviction in tokens.
        scale: multiplies ``<q, k>``.

    Returns:
        dq, dk, dv in bfloat16 and the gradient of the bias in its dtype (None without one).
    """
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), -1)
    at = schedule.positions(q.shape[2])
    q_places = k_places = at
    if segment_ids is not None:
        q_places, k_places = (
            jnp.concatenate([jnp.broadcast_to(at, ids[:, None].shape), ids[:, None]], 1)
            for ids in schedule.ids(segment_ids)
        )
    queries = _Side(q, d_out, jnp.stack([lse * jnp.float32(LOG2E), delta], 2), q_places)
    weights = None if bias is None else (bias.astype(jnp.float32) * jnp.float32(LOG2E))[:, :, None]
    keys = _Side(k, v, weights, k_places)
    reach = schedule.reach(local_window)
    run = functools.partial(_run, queries=queries, keys=keys, reach=reach)
    task = _Task(True, True, True, window, scale)
    if q.shape[3] <= 128:
        by_key = run(task)
    else:
        by_key = run(task._replace(of_weights=False)) | run(task._replace(of_scores=False))
    dq = run(_Task(False, True, False, window, scale))["scores"]
    d_bias = None if bias is None else by_key["bias"].astype(bias.dtype)
    return dq, by_key["scores"], by_key["weights"], d_bias


def aot_cases() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The shapes that have to compile for Hopper without spilling; see :mod:`kernels.aot_cases`."""

    def case(model: str, mode: str, packed: bool) -> tuple[Any, tuple[Any, ...]]:
        shape = {**MODELS, **OTHER_DIMS}[model]
        length, dim = 8192, shape.head_dim

        def gradients(q: Array, k: Array, v: Array, bias: Array, ids: Array, out: Array, lse: Array, g: Array) -> Any:
            gate, segment_ids = (None if mode == "plain" else bias), (ids if packed else None)
            return backward(q, k, v, gate, segment_ids, None, out, lse, g, window=256, scale=dim**-0.5)

        q, kv = (jax.ShapeDtypeStruct((1, n, length, dim), jnp.bfloat16) for n in (shape.heads, shape.kv_heads))
        bias, lse = (jax.ShapeDtypeStruct((1, n, length), jnp.float32) for n in (shape.kv_heads, shape.heads))
        return gradients, (q, kv, kv, bias, jax.ShapeDtypeStruct((1, length), jnp.int32), q, lse, q)

    # What changes the code is the head dimension and the size of a group: each dimension has all modes.
    everything = ("qwen3-8b", "llama-3.2-1b", *OTHER_DIMS)
    return {
        f"attention_backward_{model}_{mode}{'_packed' if packed else ''}": case(model, mode, packed)
        for model in (*MODELS, *OTHER_DIMS)
        for mode in ("plain", "soft")
        for packed in (False, True)
        if model in everything or (mode == "soft" and packed)
    }

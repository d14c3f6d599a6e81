"""Attention under delayed eviction as a Pallas Mosaic GPU kernel for Hopper (sm_90a).

The forward pass; the backward pass is :mod:`kernels.delayed_eviction.mosaic_backward`.

One warpgroup streams blocks into shared memory (TMA), two multiply (wgmma): each keeps 64 rows of the result in
registers. Which blocks are visited, and which of them need a mask, is decided outside
(:mod:`kernels.delayed_eviction.schedule`).

A gate is a bias per key that applies beyond the window. Hard decisions have no bias: beyond the window a query block
reads the kept keys from a copy in which they lie together, so that its cost falls with the compression even if no block
of the original keys is wholly evicted, and within the window it reads the original keys.

Scores are kept in powers of two: ``exp2`` is the instruction, and log2(e) is part of the scale.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

from kernels import hopper
from kernels.delayed_eviction import mosaic_backward, schedule, xla
from kernels.delayed_eviction.schedule import Bounds, Kept
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
    iota,
    leading,
    per_column,
    per_row,
    product,
    slot_of,
    spill_buffer,
    tile,
)
from kernels.hopper import plgpu
from kernels.shapes import MODELS, OTHER_DIMS
from kernels.visibility import PADDING

DIMS = (64, 96, 128, 192, 256)
"""Head dimensions that the kernels serve; smaller ones are padded to the next."""

_LOWEST = -1e30  # below every score, and finite: the difference of two of them is not NaN


class _Plan(NamedTuple):
    """What the kernels are compiled for."""

    window: int
    scale: float
    hard: bool


def unsupported(q: Array, k: Array) -> str | None:
    """Why the kernels cannot do this, on this device; None if they can. Arguments as of the entry point."""
    reason = hopper.unavailable()
    if reason is not None:
        return reason
    if q.dtype != jnp.bfloat16 or k.dtype != jnp.bfloat16:
        return f"its inputs are bfloat16, not {q.dtype}" + (f" and {k.dtype}" if k.dtype != q.dtype else "")
    if q.shape[3] > DIMS[-1]:
        return f"its head dimensions go up to {DIMS[-1]}, not {q.shape[3]}"
    blocks = q.shape[2] // ROWS + 1
    if k.shape[0] * k.shape[1] * 2 * blocks * blocks >= 2**31:
        return f"its offsets within the table of blocks are 32-bit, too few for {q.shape[2]} tokens"
    return None


def attention(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    segment_ids: Array | None,
    local_window: Array | None,
    *,
    window: int,
    scale: float,
    hard: bool = False,
    with_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Same contract as :func:`kernels.delayed_eviction.reference.attention`; differentiable in q, k, v and bias.

    Args:
        hard: the bias is 0 or -inf.

    Raises:
        NotImplementedError: what :func:`unsupported` says.
    """
    reason = unsupported(q, k)
    if reason is not None:
        raise NotImplementedError(f"the Mosaic kernel of delayed_attention cannot do this: {reason}; 'xla' can")
    length, dim = q.shape[2:]
    more, wider = -length % BLOCK, next(d for d in DIMS if d >= dim) - dim
    if more or wider:
        # Behind every query, so that no mask is needed for them.
        grow = [(0, 0), (0, 0), (0, more), (0, wider)]
        q, k, v = jnp.pad(q, grow), jnp.pad(k, grow), jnp.pad(v, grow)
        bias = None if bias is None else jnp.pad(bias, grow[:3])
        segment_ids = None if segment_ids is None else jnp.pad(segment_ids, grow[1:3], constant_values=PADDING)
    plan = _Plan(window, scale, hard and bias is not None)
    if with_lse:
        out, lse = _forward(plan, q, k, v, bias, segment_ids, local_window)
        return out[:, :, :length, :dim], lse[:, :, :length]
    return _attention(plan, q, k, v, bias, segment_ids, local_window)[:, :, :length, :dim]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    plan: _Plan, q: Array, k: Array, v: Array, bias: Array | None, segment_ids: Array | None, local: Array | None
) -> Array:
    return _forward(plan, q, k, v, bias, segment_ids, local)[0]


def _attention_fwd(
    plan: _Plan, q: Array, k: Array, v: Array, bias: Array | None, segment_ids: Array | None, local: Array | None
) -> tuple[Array, tuple[Array | None, ...]]:
    out, lse = _forward(plan, q, k, v, bias, segment_ids, local)
    out, lse = checkpoint_name(out, xla.SAVED[0]), checkpoint_name(lse, xla.SAVED[1])
    return out, (q, k, v, bias, segment_ids, local, out, lse)


def _attention_bwd(plan: _Plan, residuals: tuple[Array, ...], d_out: Array) -> tuple[Array | None, ...]:
    q, k, v, bias, segment_ids, local, out, lse = residuals
    given = (q, k, v, bias, segment_ids, local, out, lse, d_out)
    return *mosaic_backward.backward(*given, window=plan.window, scale=plan.scale), None, None


_attention.defvjp(_attention_fwd, _attention_bwd)


class _Inputs(NamedTuple):
    """Of the forward kernel. K keys: T of them, or with hard decisions 2 T, the original and the kept ones.

    Attributes:
        q: [B, Hq, T, D].
        k: [B, H, K, D].
        v: [B, H, K, D].
        limits: [2, 2] int32: least and largest distance at which original keys are seen, and kept ones.
        visits: key blocks of each query block.
        bias: [B, H, T] float32, times log2(e).
        k_positions: [B, H, K] int32, of hard decisions.
        q_segments: [B, T] int32.
        k_segments: [B, H or 1, K] int32.
    """

    q: Any
    k: Any
    v: Any
    limits: Any
    visits: Any
    bias: Any = None
    k_positions: Any = None
    q_segments: Any = None
    k_segments: Any = None

    def per_key(self) -> dict[str, Any]:
        """What is loaded beside the keys."""
        names = ("bias", "k_positions", "k_segments")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def _forward_body(plan: _Plan, block_k: int, stages: int, x: _Inputs, out_ref: Any, lse_ref: Any, **smem: Any) -> None:
    batch, head, warpgroup = lax.axis_index("batch"), lax.axis_index("heads"), lax.axis_index("warpgroup")
    length, dim = x.q.shape[2:]
    # The last rows have the longest way: they start first, so that no long one is left alone at the end.
    block = jnp.int32(length // BLOCK - 1) - lax.axis_index("rows")
    kv_head = lax.div(head, jnp.int32(x.q.shape[1] // x.k.shape[1]))
    row = (leading(x.visits.order, batch), leading(x.visits.order, kv_head, 1), block)
    plain, visits = x.visits.counts[(*row, jnp.int32(0))], x.visits.counts[(*row, jnp.int32(1))]

    @pl.when(warpgroup == WARPGROUPS)
    def stream() -> None:
        plgpu.set_max_registers(REGISTERS[1], action="decrease")

        @pl.loop(jnp.int32(0), visits)
        def visit(n: Array) -> None:
            slot = slot_of(n, stages)
            keys = pl.ds(x.visits.order[(*row, n)] * block_k, block_k)

            @pl.when(n >= stages)
            def reuse() -> None:
                plgpu.barrier_wait(smem["k_free"].at[slot])
                if x.per_key():
                    plgpu.commit_smem()  # they were read by ordinary loads, and TMA writes by another way

            landed = smem["k_full"].at[slot]
            plgpu.copy_gmem_to_smem(x.k.at[batch, kv_head, keys], smem["k"].at[slot], landed)
            for name, ref in x.per_key().items():
                plgpu.copy_gmem_to_smem(
                    ref.at[leading(ref, batch), leading(ref, kv_head, 1), keys], smem[name].at[slot], landed
                )
            pl.when(n >= stages)(lambda: plgpu.barrier_wait(smem["v_free"].at[slot]))
            plgpu.copy_gmem_to_smem(x.v.at[batch, kv_head, keys], smem["v"].at[slot], smem["v_full"].at[slot])

    @pl.when(warpgroup < WARPGROUPS)
    def compute() -> None:
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        first = block * BLOCK + warpgroup * ROWS
        rows = pl.ds(first, ROWS)
        q, landed, turn = smem["q"].at[warpgroup], smem["q_full"].at[warpgroup], smem["turn"]
        spill = smem["spill"].at[warpgroup] if "spill" in smem else None
        plgpu.copy_gmem_to_smem(x.q.at[batch, head, rows], q, landed)
        if x.q_segments is not None:
            plgpu.copy_gmem_to_smem(x.q_segments.at[batch, rows], smem["q_segments"].at[warpgroup], landed)
        plgpu.barrier_wait(landed)
        shape = (ROWS, block_k)

        def take_turns() -> None:
            """The warpgroups alternate: while one has the tensor cores, the other computes its softmax."""
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        def visit(masked: bool, n: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            total, top, weight = state
            slot = slot_of(n, stages)
            plgpu.barrier_wait(smem["k_full"].at[slot])
            s = product(q, smem["k"].at[slot].transpose((1, 0)), take_turns) * (plan.scale * LOG2E)
            if x.q_segments is not None and masked:
                of_q = along_rows(per_row(smem["q_segments"].at[warpgroup]), shape)
                s = jnp.where(of_q == along_columns(per_column(smem["k_segments"].at[slot]), shape), s, -jnp.inf)
            bias = None if x.bias is None else along_columns(per_column(smem["bias"].at[slot]), shape)
            if masked:
                at = x.visits.order[(*row, n)]
                if x.k_positions is None:
                    part, position = jnp.int32(0), iota(shape, 1) + at * block_k
                else:
                    part = (at >= length // block_k).astype(jnp.int32)
                    position = along_columns(per_column(smem["k_positions"].at[slot]), shape)
                distance = (iota(shape, 0) + first) - position
                if bias is not None:
                    s = s + jnp.where(distance > plan.window, bias, 0.0)
                s = jnp.where((distance >= x.limits[part, 0]) & (distance <= x.limits[part, 1]), s, -jnp.inf)
            elif bias is not None:
                s = s + bias
            plgpu.barrier_arrive(smem["k_free"].at[slot])

            new_top = jnp.maximum(top, s.max(axis=1))
            p = jnp.exp2(s - along_rows(new_top, shape))
            decay = jnp.exp2(top - new_top)
            total = total * along_rows(decay, (ROWS, dim))
            weight = weight * decay + p.sum(axis=1)
            narrow = p.astype(jnp.bfloat16)
            total, weight, new_top, narrow = lax.optimization_barrier((total, weight, new_top, narrow))
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(smem["v_full"].at[slot])
            plgpu.barrier_wait(turn)
            total = adding({"": total}, lambda add: add("", narrow, smem["v"].at[slot]), spill=spill)[""]
            plgpu.barrier_arrive(smem["v_free"].at[slot])
            return total, new_top, weight

        pl.when(warpgroup == 1)(take_turns)
        state = (full((ROWS, dim), 0.0), full((ROWS,), _LOWEST), full((ROWS,), 0.0))
        state = lax.fori_loop(jnp.int32(0), plain, functools.partial(visit, False), state)
        total, top, weight = lax.fori_loop(plain, visits, functools.partial(visit, True), state)
        pl.when(warpgroup == 0)(take_turns)

        empty = weight == 0.0
        divisor = jnp.where(empty, 1.0, weight)
        q[...] = (total * along_rows(1.0 / divisor, (ROWS, dim))).astype(jnp.bfloat16)
        smem["lse"].at[warpgroup][...] = jnp.where(empty, jnp.inf, top * (1 / LOG2E) + jnp.log(divisor))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q, out_ref.at[batch, head, rows])
        plgpu.copy_smem_to_gmem(smem["lse"].at[warpgroup], lse_ref.at[batch, head, rows])
        plgpu.wait_smem_to_gmem(0)


def _forward(
    plan: _Plan, q: Array, k: Array, v: Array, bias: Array | None, segment_ids: Array | None, local: Array | None
) -> tuple[Array, Array]:
    """Output [B, Hq, T, D] and log-sum-exp [B, Hq, T] float32 (+inf for rows that see nothing)."""
    batch, heads, length, dim = q.shape
    block_k, stages = 128 if dim <= 128 else 64, 2
    reach = schedule.reach(local)
    window = jnp.int32(plan.window)
    q_bounds = Bounds.of(schedule.positions(length), BLOCK)
    k_bounds = Bounds.of(schedule.positions(length), block_k)
    ids = None if segment_ids is None else schedule.ids(segment_ids)
    k_ids = None if ids is None else ids[1][:, None]
    if plan.hard and bias is not None:
        keep = ~jnp.isneginf(bias)
        kept = Kept.of(keep if k_ids is None else keep & (k_ids > PADDING))
        late = window + 1
        pairs = schedule.pairs(q_bounds, k_bounds, 0, jnp.minimum(window, reach), 0)
        pairs = pairs.beside(schedule.pairs(q_bounds, Bounds.of(kept.positions, block_k), late, reach, late))
        limits = [[jnp.int32(0), jnp.minimum(window, reach)], [late, reach]]
        k_positions = jnp.concatenate(
            [jnp.broadcast_to(schedule.positions(length), kept.positions.shape), kept.positions], 2
        )
        k, v = (jnp.concatenate([x, kept.take(x)], 2) for x in (k, v))
        if k_ids is not None:
            k_ids = jnp.concatenate([jnp.broadcast_to(k_ids, keep.shape), kept.take(k_ids)], 2)
        bias = None
    else:
        pairs = schedule.pairs(q_bounds, k_bounds, 0, reach, 0 if bias is None else window + 1)
        limits = [[jnp.int32(0), reach]] * 2
        k_positions = None
    if ids is not None and k_ids is not None:
        pairs = pairs.within(Bounds.of(ids[0][:, None], BLOCK), Bounds.of(k_ids, block_k))
    inputs = _Inputs(
        q=q,
        k=k,
        v=v,
        limits=jnp.asarray(limits, jnp.int32),
        visits=pairs.by_query(),
        bias=None if bias is None else bias.astype(jnp.float32) * jnp.float32(LOG2E),
        k_positions=k_positions,
        q_segments=None if ids is None else ids[0],
        k_segments=k_ids,
    )
    vectors = {
        name: plgpu.SMEM((stages, block_k), jnp.float32 if name == "bias" else jnp.int32) for name in inputs.per_key()
    }
    if ids is not None:
        vectors["q_segments"] = plgpu.SMEM((WARPGROUPS, ROWS), jnp.int32)
    return plgpu.kernel(
        functools.partial(_forward_body, plan, block_k, stages),
        out_type=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),
        ),
        scratch_types={
            "q": tile(WARPGROUPS, ROWS, dim),
            "k": tile(stages, block_k, dim),
            "v": tile(stages, block_k, dim),
            "lse": plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32),
            **vectors,
            **spill_buffer(block_k),
            "q_full": plgpu.Barrier(num_arrivals=1 + (ids is not None), num_barriers=WARPGROUPS),
            "k_full": plgpu.Barrier(num_arrivals=1 + len(inputs.per_key()), num_barriers=stages),
            "v_full": plgpu.Barrier(num_barriers=stages),
            "k_free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
            "v_free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
            "turn": plgpu.Barrier(num_arrivals=WARPGROUPS),
        },
        grid=(batch, length // BLOCK, heads),
        grid_names=("batch", "rows", "heads"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name="delayed_forward",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(inputs)


def aot_cases() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The shapes that have to compile for Hopper without spilling; see :mod:`kernels.aot_cases`."""

    def case(model: str, mode: str, packed: bool) -> tuple[Any, tuple[Any, ...]]:
        shape = {**MODELS, **OTHER_DIMS}[model]
        length, dim = 8192, shape.head_dim

        def forward(q: Array, k: Array, v: Array, bias: Array, segment_ids: Array) -> Array | tuple[Array, Array]:
            return attention(
                q,
                k,
                v,
                None if mode == "plain" else bias,
                segment_ids if packed else None,
                None,
                window=256,
                scale=dim**-0.5,
                hard=mode == "hard",
            )

        q, kv = (jax.ShapeDtypeStruct((1, n, length, dim), jnp.bfloat16) for n in (shape.heads, shape.kv_heads))
        bias = jax.ShapeDtypeStruct((1, shape.kv_heads, length), jnp.float32)
        return forward, (q, kv, kv, bias, jax.ShapeDtypeStruct((1, length), jnp.int32))

    # Heads are the grid; what changes the code is the head dimension: each has all modes, packed and not.
    everything = ("qwen3-8b", "llama-3.2-1b", *OTHER_DIMS)
    return {
        f"attention_{model}_{mode}{'_packed' if packed else ''}": case(model, mode, packed)
        for model in (*MODELS, *OTHER_DIMS)
        for mode in ("plain", "soft", "hard")
        for packed in (False, True)
        if model in everything or (mode != "plain" and packed == (mode == "soft"))
    }

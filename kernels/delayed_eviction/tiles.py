"""What the forward and the backward kernels share: tiles, products of them, numbers per row and per column."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from kernels import hopper
from kernels.hopper import plgpu, tiled

ROWS = 64
"""Rows of a wgmma tile: what one warpgroup computes at a time."""

WARPGROUPS = 2
"""Those of a block of threads that multiply; one more copies."""

BLOCK = ROWS * WARPGROUPS
"""Rows of the result per block of threads; sequences are padded to it."""

LOG2E = math.log2(math.e)

REGISTERS = (240, 24)
"""Per thread of a warpgroup that multiplies, and of the one that copies, after they have traded.

(2 x 240 + 24) x 128 threads is what a block is launched with, 168 x 384. A sum that is larger would wait for ever.
"""


def tile(*shape: int) -> Any:
    """Shared memory for bfloat16 tiles, as TMA and wgmma want them."""
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=tiled(jnp.bfloat16, shape[-1]))


def along_rows(x: Array, shape: tuple[int, int]) -> Array:
    """A number per row."""
    return lax.broadcast_in_dim(x, shape, (0,))


def along_columns(x: Array, shape: tuple[int, int]) -> Array:
    """A number per column."""
    return lax.broadcast_in_dim(x, shape, (1,))


def per_row(ref: Any) -> Array:
    """Reads a number per row of a tile."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1))


def per_column(ref: Any) -> Array:
    """Reads a number per column of a tile."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0))


def full(shape: tuple[int, ...], value: float) -> Array:
    """The same float32 number everywhere, in a tile or per row of one."""
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def iota(shape: tuple[int, int], axis: int) -> Array:
    """Index of each place of a tile along an axis."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def product(a: Any, b: Any, after_issue: Callable[[], None] = lambda: None) -> Array:
    """a @ b of two references to shared memory, in float32; ``after_issue`` runs while it is computed."""

    def multiply(acc: Any) -> Array:
        plgpu.wgmma(acc, a, b)
        after_issue()
        found: Array = acc[...]
        return found

    result: Array = pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))
    return result


def adding(
    totals: dict[str, Array], step: Callable[..., None], *accumulators: tuple[int, int], spill: Any
) -> dict[str, Array]:
    """The totals after ``step(add, *accumulators)``, when all products that it has started are done.

    ``add(name, x)`` adds x to a total, ``add(name, a, b)`` starts to add a @ b, with a in registers and b in shared
    memory. The accumulators are zero at first, and have the shapes given.

    The interpreter of jax 0.12 knows neither an operand in registers nor an accumulator with a start value, so there
    the operand goes through ``spill`` (None outside the interpreter; see :func:`spill_buffer`).
    """
    found: dict[str, Array]

    def scoped(run: Callable[..., Any]) -> Any:
        scratch = [plgpu.ACC(shape, jnp.float32) for shape in accumulators]
        return pl.run_scoped(run, *scratch) if scratch else run()

    if spill is not None:

        def interpreted(*accumulators: Any) -> dict[str, Array]:
            sums = dict(totals)

            def add(name: str, a: Array, b: Any = None) -> None:
                if b is not None:
                    spill[...] = a
                    plgpu.commit_smem()
                    a = product(spill, b)
                sums[name] += a

            step(add, *accumulators)
            return sums

        found = scoped(interpreted)
        return found

    def compiled(sums: dict[str, Any]) -> None:
        def add(name: str, a: Array, b: Any = None) -> None:
            if b is None:
                sums[name][...] += a
            else:
                plgpu.wgmma(sums[name], a, b)

        scoped(functools.partial(step, add))

    start = {name: plgpu.ACC.init(x) if x.ndim == 2 else x for name, x in totals.items()}
    found = pl.run_state(compiled)(start)
    return found


def spill_buffer(columns: int) -> dict[str, Any]:
    """The buffer of :func:`adding`, a tile per warpgroup."""
    return {"spill": tile(WARPGROUPS, ROWS, columns)} if hopper.interpreting() else {}


def leading(ref: Any, index: Array, axis: int = 0) -> Array:
    """Index along an axis of an array whose size may be 1 for all."""
    return index if ref.shape[axis] > 1 else jnp.int32(0)


def slot_of(n: Array, stages: int) -> Array:
    """Where in a ring the n-th block lies."""
    return lax.rem(n, jnp.int32(stages))

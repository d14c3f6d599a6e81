"""Logical axis names of all arrays and the one table that maps them to the mesh."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvsparse_jax.errors import InputError

MESH_AXES = ("data", "fsdp", "tensor")

RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "experts": "tensor",
    "layers": None,
    "norm": None,
}
"""Logical axis -> mesh axes over which it is divided; None is replicated."""


KV_AXIS = "tensor"
"""Mesh axis over which KV heads are divided, with their queries and their cache."""

WHOLE = "fsdp"
"""Mesh axis over which weights are stored in pieces that come together before they are used."""


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Mesh with the axes (data, fsdp, tensor) over ``data * fsdp * tensor`` devices.

    Raises:
        InputError: more devices asked for than there are.
    """
    devices = list(jax.devices() if devices is None else devices)
    size = data * fsdp * tensor
    if size > len(devices):
        raise InputError(f"a {data} x {fsdp} x {tensor} mesh needs {size} devices, there are {len(devices)}")
    return Mesh(np.asarray(devices[:size]).reshape(data, fsdp, tensor), MESH_AXES)


def spec(axes: Sequence[str | None]) -> PartitionSpec:
    """PartitionSpec of an array with these logical axes."""
    return PartitionSpec(*(None if axis is None else RULES[axis] for axis in axes))


def sharding(mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
    """Sharding of an array on the mesh; a dimension that its mesh axes do not divide is replicated."""
    parts = []
    for axis, size in zip(axes, shape, strict=True):
        names: Any = None if axis is None else RULES[axis]
        ways = int(np.prod([mesh.shape[n] for n in ((names,) if isinstance(names, str) else names or ())]))
        parts.append(names if size % ways == 0 else None)
    return NamedSharding(mesh, PartitionSpec(*parts))


def constrain(mesh: Mesh | None, x: Array, axes: Sequence[str | None]) -> Array:
    """``x``, laid out on the mesh by the logical ``axes`` of its dimensions; as it is without a mesh."""
    return x if mesh is None else lax.with_sharding_constraint(x, sharding(mesh, axes, x.shape))


def collect(mesh: Mesh | None, weights: Any, axes: Any) -> Any:
    """Weights in whole along :data:`WHOLE`, as products with activations that are divided by rows need them.

    Without this the compiler is free to leave the weights in pieces and to add up pieces of activations of all rows
    on all devices, and it does.

    Args:
        mesh: None: nothing happens.
        weights: nested dictionaries of arrays.
        axes: dictionaries with the logical axes of these; leaves without (adapters) stay as they are.
    """
    if mesh is None or axes is None:
        return weights
    if isinstance(weights, dict):
        return {name: collect(mesh, value, axes.get(name)) for name, value in weights.items()}
    parts = sharding(mesh, axes, weights.shape).spec
    whole = PartitionSpec(*(None if part == WHOLE else part for part in parts))
    return lax.with_sharding_constraint(weights, NamedSharding(mesh, whole))


def check_heads(mesh: Mesh, kv_heads: int) -> None:
    """Refuses to cut a KV head in two. One head alone (latent attention) goes to every device.

    Raises:
        InputError: with both numbers.
    """
    ways = mesh.shape["tensor"]
    if kv_heads > 1 and kv_heads % ways:
        raise InputError(f"{kv_heads} KV heads cannot be divided over {ways} devices (tensor): take a divisor of them")


def check_rows(mesh: Mesh | None, rows: int) -> None:
    """Refuses rows that the mesh does not divide evenly.

    Raises:
        InputError: with both numbers.
    """
    ways = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
    if rows % ways:
        raise InputError(f"{rows} rows cannot be divided over {ways} devices (data x fsdp): take a multiple of them")


def kv_axis(mesh: Mesh | None, kv_heads: int) -> str | None:
    """Logical axis of KV heads in :func:`by_heads`; see :func:`check_heads`."""
    if mesh is not None:
        check_heads(mesh, kv_heads)
    return "kv_heads" if kv_heads > 1 else None


def by_heads[F: Callable[..., Any]](mesh: Mesh | None, f: F, like: Sequence[Sequence[str | None] | None]) -> F:
    """``f`` run by each device on its rows and heads alone, without collectives; as it is without a mesh.

    Args:
        mesh: devices.
        f: arrays -> one array, or several, with the axes (batch, heads, ...).
        like: logical axes of each argument; None: all devices have the whole of it.
    """
    if mesh is None:
        return f
    specs = tuple(PartitionSpec() if axes is None else spec(axes) for axes in like)
    # A loop's carry starts as zeros, the same everywhere, and ends different: the check of that cannot be satisfied.
    return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=spec(("batch", "heads")), check_vma=False)

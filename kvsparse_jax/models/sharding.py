"""Logical axis names of all arrays and the one table that maps them to the mesh."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
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

"""Several processes as one program, on JAX's own runtime: start, agree, place and fetch.

Every process runs the same program in the same order; only the first one writes files. One file system is shared.
"""

import os
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvsparse_jax.errors import InputError, RunError

DETECT = "auto"
"""Instead of an address: what JAX finds by itself (SLURM, Kubernetes, Cloud TPU, Open MPI)."""


HEARTBEAT = 30
"""Seconds after which a process that gives no sign of life counts as dead, and the others end with an error."""


def start(coordinator: str | None = None, processes: int | None = None, process_id: int | None = None) -> None:
    """Joins the other processes; has to come before anything else that asks JAX for its devices.

    What is None is taken from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. Without an address this is
    a program of one process.

    Args:
        coordinator: HOST:PORT of the first process, or "auto".
        processes: how many there are.
        process_id: which of them this is, from 0.

    Raises:
        InputError: settings that are missing or do not fit each other.
        RunError: the others were not found in time.
    """
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    processes = _number("JAX_NUM_PROCESSES") if processes is None else processes
    process_id = _number("JAX_PROCESS_ID") if process_id is None else process_id
    if coordinator is None:
        if processes is not None or process_id is not None:
            raise InputError("several processes need the address of the first one: coordinator HOST:PORT, or auto")
        return
    if coordinator != DETECT:
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdecimal():
            raise InputError(f"coordinator must be HOST:PORT or {DETECT}, not {coordinator!r}")
        if processes is None or process_id is None:
            raise InputError("with a coordinator's address, say how many processes there are and which one this is")
        if not 0 <= process_id < processes:
            raise InputError(f"process_id must be from 0 to {processes - 1}, not {process_id}")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            None if coordinator == DETECT else coordinator,
            processes,
            process_id,
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=HEARTBEAT,
        )
    except ValueError as error:
        raise InputError(f"nothing here says which processes there are ({error}): give their numbers") from None
    except RuntimeError as error:
        raise RunError(f"the processes did not find each other at {coordinator}: {error}") from None


def _number(name: str) -> int | None:
    value = os.environ.get(name)
    if value is not None and not value.isdecimal():
        raise InputError(f"{name} must be a whole number, not {value!r}")
    return None if value is None else int(value)


def first() -> bool:
    """Whether this is the process that writes files and talks."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Waits until all processes are here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def asked_to_stop(step: int) -> bool:
    """Whether any process was asked to end (SIGTERM); all of them learn of it at the same step.

    With a single process nobody is asked here.
    """
    return jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step)


def replicate(tree: Any, mesh: Mesh) -> Any:
    """The tree with every leaf on the mesh: those that are not yet are copied to all devices."""
    everywhere = NamedSharding(mesh, PartitionSpec())

    def place(leaf: Array) -> Array:
        if isinstance(leaf.sharding, NamedSharding) and leaf.sharding.mesh == mesh:
            return leaf
        if everywhere.is_fully_addressable:
            return jax.device_put(leaf, everywhere)
        value = np.asarray(leaf)
        return jax.make_array_from_callback(value.shape, everywhere, lambda index: value[index])

    return jax.tree.map(place, tree)


def to_host(x: Array) -> np.ndarray:
    """The whole array, on every process; all of them have to ask for it."""
    if x.is_fully_addressable:
        return np.asarray(x)
    if x.is_fully_replicated:
        return np.asarray(x.addressable_data(0))
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def rows_of_process(mesh: Mesh, axes: tuple[str, ...]) -> tuple[int, int]:
    """Which of how many equal slices of the batch this process feeds: (index, count).

    Processes whose devices differ only in other axes feed the same rows.

    Args:
        mesh: devices of all processes.
        axes: of the mesh, over which the batch is divided.

    Raises:
        InputError: processes whose slices overlap without being the same.
    """
    others = [name for name in mesh.axis_names if name not in axes]
    order = [mesh.axis_names.index(name) for name in (*axes, *others)]
    table = mesh.devices.transpose(order).reshape(int(np.prod([mesh.shape[name] for name in axes])), -1)
    rows: dict[int, set[int]] = {}
    for row, devices in enumerate(table):
        for device in devices:
            rows.setdefault(device.process_index, set()).add(row)
    slices = sorted({tuple(sorted(mine)) for mine in rows.values()})
    flat = [row for part in slices for row in part]
    equal = len({len(part) for part in slices}) == 1
    if flat != list(range(len(table))) or not equal:
        raise InputError(
            f"a mesh of {dict(mesh.shape)} does not divide the batch evenly over {jax.process_count()} processes of "
            f"{jax.local_device_count()} devices: make the tensor axis a divisor or a multiple of that"
        )
    mine = rows.get(jax.process_index())
    if mine is None:
        raise InputError(
            f"a mesh of {dict(mesh.shape)} has no device of process {jax.process_index()}: use all devices"
        )
    return slices.index(tuple(sorted(mine))), len(slices)

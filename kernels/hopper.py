"""What the Mosaic GPU kernels share: where they can run, and the layout of their tiles."""

from typing import Any

import jax
from jax._src import config as _config
from jax.experimental.pallas import mosaic_gpu
from jax.typing import DTypeLike

plgpu: Any = mosaic_gpu
"""The module with the kernels' primitives; its own types are too incomplete to be checked."""

WARPGROUP = 128
"""Threads that issue a tensor core product together."""

SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a block can have."""

CORES = 132
"""Multiprocessors of an H100 or H200 (SXM); assumed where the device does not say."""

INTERPRETED_CORES = 1
"""What the interpreter pretends to have: it runs one block after another."""


def interpreting() -> bool:
    """Whether kernels traced now run in the interpreter (``plgpu.force_gpu_interpret_mode``)."""
    return _config.pallas_tpu_interpret_mode_context_manager.value is not None


def device() -> Any:
    """The device that is traced for: of the mesh in use, else the default one."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return abstract
    default = jax.config.jax_default_device
    if default is None or isinstance(default, str):
        return jax.local_devices(backend=default)[0]
    return default


def unavailable() -> str | None:
    """Why a Mosaic kernel for Hopper cannot run on the device that is traced for; None if it can."""
    if interpreting():
        return None
    this = device()
    if this.platform != "gpu":
        return f"it needs a Hopper GPU (H100, H200), and this is a {this.platform.upper()}"
    capability = getattr(this, "compute_capability", None)
    # The device of an abstract mesh has a name only.
    hopper = capability == "9.0" if capability is not None else any(x in this.device_kind for x in ("H100", "H200"))
    return None if hopper else f"it needs a Hopper GPU (H100, H200), and this is {this.device_kind}"


def cores() -> int:
    """Multiprocessors of the device that is traced for."""
    if interpreting():
        return INTERPRETED_CORES
    this = device()
    return getattr(this, "num_cores", None) or getattr(this, "core_count", None) or CORES


def tiled(dtype: DTypeLike, minor: int) -> tuple[Any, ...]:
    """Transforms of a shared memory array whose last axis has ``minor`` elements, as TMA and wgmma want it.

    Raises:
        ValueError: the last axis is not a multiple of 32 bytes.
    """
    size = jax.numpy.dtype(dtype).itemsize
    swizzle = next((s for s in (128, 64, 32) if minor * size % s == 0), None)
    if swizzle is None:
        raise ValueError(f"rows of {minor * size} bytes are not a multiple of 32")
    return plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)


def store(ref: Any, value: Any) -> None:
    """Writes an array to shared or global memory in the layout that it has."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value  # JAX 0.11

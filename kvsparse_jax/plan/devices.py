"""Accelerators by their published numbers, and what a decode step attains of them."""

import dataclasses
import math
from dataclasses import dataclass

from kvsparse_jax.errors import InputError


def _positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not (math.isfinite(value) and value > 0):
        raise InputError(f"{name} must be a number above 0, not {value!r}")


@dataclass(frozen=True)
class Device:
    """One accelerator.

    Attributes:
        name: what it is called.
        memory: bytes.
        bandwidth: of its memory, bytes/s.
        flops: dense bfloat16 products, FLOP/s.
        link: to the other devices of one replica, bytes/s out of a device (half of what vendors call bidirectional).
        rows: query rows of one KV head that a product works on at least; fewer are padded.
        price: dollars per hour.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    link: float
    rows: int
    price: float

    def __post_init__(self) -> None:
        for field in ("memory", "bandwidth", "flops", "link", "rows"):
            _positive(f"{field} of the device", getattr(self, field))
        if not (math.isfinite(self.price) and self.price >= 0):
            raise InputError(f"price of the device must be at least 0, not {self.price!r}")


@dataclass(frozen=True)
class Efficiency:
    """What a step attains of a device's published numbers, and what it costs besides: assumptions, all of them.

    Attributes:
        bandwidth: share of the memory bandwidth at which weights are read.
        kv: the same of keys and values, which lie in pages.
        flops: share of the FLOP/s that products attain.
        overhead: seconds per layer in which neither is busy (starting kernels, small operations).
        latency: seconds until a collective has begun.
        reserve: share of the memory that the planner leaves alone (runtime, fragmentation, what XLA needs besides).
    """

    bandwidth: float = 0.8
    kv: float = 0.8
    flops: float = 0.6
    overhead: float = 10e-6
    latency: float = 8e-6
    reserve: float = 0.1

    def __post_init__(self) -> None:
        for name in ("bandwidth", "kv", "flops"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise InputError(f"the share of the {name} must be above 0 and at most 1, not {value!r}")
        for name in ("overhead", "latency"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"the {name} must be at least 0, not {value!r}")
        if not 0 <= self.reserve < 1:
            raise InputError(f"the reserved share of the memory must be at least 0 and below 1, not {self.reserve!r}")


# The vendors' data sheets: NVIDIA A100 80GB SXM, H100 SXM, H200 SXM and HGX B200 (per GPU, dense bfloat16; NVLink is
# given there in both directions together), Google Cloud TPU v5e and v6e. Prices are round assumptions for on-demand
# use in the United States; TPUs as Google lists them. No price is a quote: give your own.
DEVICES = {
    device.name.lower(): device
    for device in (
        Device("A100", 80e9, 2.039e12, 312e12, 300e9, 64, 1.8),
        Device("H100", 80e9, 3.35e12, 989e12, 450e9, 64, 3.0),
        Device("H200", 141e9, 4.8e12, 989e12, 450e9, 64, 3.8),
        Device("B200", 180e9, 7.7e12, 2250e12, 900e9, 64, 5.5),
        Device("v5e", 16e9, 819e9, 197e12, 200e9, 128, 1.2),
        Device("v6e", 32e9, 1.638e12, 918e12, 400e9, 128, 2.7),
    )
}
"""By name in lower case."""


def find(name: str, **numbers: float | None) -> Device:
    """A device by its name, with other numbers where they are given (not None); "custom" has none of its own.

    Raises:
        InputError: no such device, or a number that is missing or makes no sense.
    """
    given = {key: value for key, value in numbers.items() if value is not None}
    for key, value in given.items():
        if key != "price":
            _positive(f"{key} of the device", value)
    device = DEVICES.get(name.lower())
    if device is not None:
        return dataclasses.replace(device, **given)  # type: ignore[arg-type]  # names are checked by the call
    if name.lower() != "custom":
        known = ", ".join(device.name for device in DEVICES.values())
        raise InputError(f"unknown device {name!r}; there are {known}, and custom with numbers of its own")
    if missing := [key for key in ("memory", "bandwidth", "flops") if key not in given]:
        raise InputError(f"a custom device needs {', '.join(missing)}")
    # Without a link a replica is one device, and what the link is does not matter.
    settings = {"link": given["bandwidth"], "price": 0.0, **given}
    return Device(name="custom", rows=1, **settings)

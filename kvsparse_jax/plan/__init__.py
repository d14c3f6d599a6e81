"""How many sequences a device serves and how fast, dense and compressed, from shapes and data sheets alone.

Example::

    from kvsparse_jax import plan

    p = plan.Plan(plan.model_config("Qwen3-8B"), plan.find("H100"), plan.Workload(context=32768))
    p.estimate().tokens_per_second, p.kv_bytes(), p.fits()
"""

from kvsparse_jax.plan.costs import (
    Estimate,
    Plan,
    SameCost,
    Step,
    Weights,
    Workload,
    four,
    needed_cr,
    replica,
    same_cost,
    weights,
)
from kvsparse_jax.plan.devices import DEVICES, Device, Efficiency, find
from kvsparse_jax.plan.occupancy import KINDS, Compression
from kvsparse_jax.plan.published import PUBLISHED, model_config

__all__ = [
    "DEVICES",
    "KINDS",
    "PUBLISHED",
    "Compression",
    "Device",
    "Efficiency",
    "Estimate",
    "Plan",
    "SameCost",
    "Step",
    "Weights",
    "Workload",
    "find",
    "four",
    "model_config",
    "needed_cr",
    "replica",
    "same_cost",
    "weights",
]

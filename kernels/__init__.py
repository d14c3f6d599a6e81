"""Ground floor: attention and cache operations that know JAX only, one folder per operation."""

from kernels.delayed_eviction.api import delayed_attention

__all__ = ["delayed_attention"]

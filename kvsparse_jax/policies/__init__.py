"""Eviction policies, one file each; all decide through the visibility rule of ``kernels.visibility``."""

from kvsparse_jax.policies.base import LayerInput, Policy
from kvsparse_jax.policies.dense import Dense
from kvsparse_jax.policies.dms import DMS
from kvsparse_jax.policies.streaming import StreamingLLM

__all__ = ["DMS", "Dense", "LayerInput", "Policy", "StreamingLLM"]

"""Eviction policies, one file each; all decide through the visibility rule of ``kernels.visibility``."""

from kvsparse_jax.policies.base import Held, LayerInput, Policy, Selection
from kvsparse_jax.policies.budgeted import Budgeted
from kvsparse_jax.policies.dense import Dense
from kvsparse_jax.policies.dms import DMS
from kvsparse_jax.policies.h2o import H2O
from kvsparse_jax.policies.knorm import Knorm
from kvsparse_jax.policies.kvzap import KVzap
from kvsparse_jax.policies.kvzap_budget import KVzapBudget
from kvsparse_jax.policies.kvzip import KVzip
from kvsparse_jax.policies.random import Random
from kvsparse_jax.policies.snapkv import SnapKV
from kvsparse_jax.policies.streaming import StreamingLLM
from kvsparse_jax.policies.tova import TOVA

__all__ = [
    "DMS",
    "H2O",
    "TOVA",
    "Budgeted",
    "Dense",
    "Held",
    "KVzap",
    "KVzapBudget",
    "KVzip",
    "Knorm",
    "LayerInput",
    "Policy",
    "Random",
    "Selection",
    "SnapKV",
    "StreamingLLM",
]

"""Learned KV-cache sparsification in JAX: DMS and KVzap, from training to serving.

import kvsparse_jax as kvs
lm = kvs.load("smollm2-135m")
lm.logits(input_ids)
"""

from kvsparse_jax.cache.report import CacheReport
from kvsparse_jax.errors import InputError, RunError
from kvsparse_jax.generation import GenerateOutput, Piece, Replay, Session
from kvsparse_jax.lm import LM, load
from kvsparse_jax.policies import DMS, Dense, Policy, StreamingLLM
from kvsparse_jax.whole import decision_logits

__all__ = [
    "DMS",
    "LM",
    "CacheReport",
    "Dense",
    "GenerateOutput",
    "InputError",
    "Piece",
    "Policy",
    "Replay",
    "RunError",
    "Session",
    "StreamingLLM",
    "decision_logits",
    "load",
]

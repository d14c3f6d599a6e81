"""Learned KV-cache sparsification in JAX: DMS and KVzap, from training to serving.

import kvsparse_jax as kvs
lm = kvs.load("smollm2-135m")
lm.logits(input_ids)
"""

try:
    from kvsparse_jax.cache.report import CacheReport
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("kernels."):
        raise
    raise ImportError(
        "another package named `kernels` (Hugging Face's, which transformers 5.25 and newer require) hides the one of "
        'kvsparse-jax: pip uninstall kernels, pip install "transformers<5.25", then install kvsparse-jax again'
    ) from error
from kvsparse_jax.errors import InputError, RunError
from kvsparse_jax.generation import GenerateOutput, Piece, Replay, Session
from kvsparse_jax.lm import LM, load
from kvsparse_jax.oracle import oracle_scores
from kvsparse_jax.policies import (
    DMS,
    H2O,
    TOVA,
    Dense,
    Knorm,
    KVzap,
    KVzapBudget,
    KVzip,
    Policy,
    Random,
    SnapKV,
    StreamingLLM,
)
from kvsparse_jax.whole import decision_logits, kept

__all__ = [
    "DMS",
    "H2O",
    "LM",
    "TOVA",
    "CacheReport",
    "Dense",
    "GenerateOutput",
    "InputError",
    "KVzap",
    "KVzapBudget",
    "KVzip",
    "Knorm",
    "Piece",
    "Policy",
    "Random",
    "Replay",
    "RunError",
    "Session",
    "SnapKV",
    "StreamingLLM",
    "decision_logits",
    "kept",
    "load",
    "oracle_scores",
]

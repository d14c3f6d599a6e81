"""Evaluation that cannot flatter itself: a compressed model against the same model with its full cache.

Everything is teacher-forced over whole held-out sequences with hard decisions, so each figure compares two
distributions on the same context. Every compressed length has StreamingLLM (arXiv 2309.17453) beside it, given the
memory that the policy holds at the end of the sequence. Which key is live comes from ``kernels.visibility`` alone.

    report = evaluate(lm, [held_out_sequences(lm.tokenizer, 1024, 20)])
    print(report.table())

``python -m kvsparse_jax.evaluate --model DIR`` does this and writes JSON, a table and plots.

Rows to evaluate on come from ``sequences``; ``contest`` says who meets whom, ``measure`` how it is measured, ``match``
which budget is equal memory; ``results`` holds what was found, ``tables`` and ``figures`` show it.
"""

from kvsparse_jax.evaluate.contest import evaluate, passkey
from kvsparse_jax.evaluate.figures import plots, write
from kvsparse_jax.evaluate.match import equal_memory_budget
from kvsparse_jax.evaluate.results import (
    DENSE,
    EQUAL_MEMORY,
    Curve,
    Estimate,
    Memory,
    OfKind,
    Quality,
    Report,
    Result,
    Retrieval,
    Role,
)
from kvsparse_jax.evaluate.sequences import (
    DEFAULT_KINDS,
    Content,
    Sequences,
    held_out_sequences,
    read_documents,
    text_sequences,
)

__all__ = [
    "DEFAULT_KINDS",
    "DENSE",
    "EQUAL_MEMORY",
    "Content",
    "Curve",
    "Estimate",
    "Memory",
    "OfKind",
    "Quality",
    "Report",
    "Result",
    "Retrieval",
    "Role",
    "Sequences",
    "equal_memory_budget",
    "evaluate",
    "held_out_sequences",
    "passkey",
    "plots",
    "read_documents",
    "text_sequences",
    "write",
]

"""Inference-time hyper-scaling (arXiv 2506.05345): longer and more chains of thought for the same cache.

A configuration is L-W-CR: tokens of a chain, chains whose majority answers, and the policy that compresses their
caches. It is measured by accuracy against the KV tokens that were read and the most that were held.
"""

from kvsparse_jax.hyperscale.chains import Chain, Configuration, run
from kvsparse_jax.hyperscale.problems import Problem, problems
from kvsparse_jax.hyperscale.results import Interval, figure, frontier, summary, table
from kvsparse_jax.hyperscale.vote import Same, equality, extract, vote

__all__ = [
    "Chain",
    "Configuration",
    "Interval",
    "Problem",
    "Same",
    "equality",
    "extract",
    "figure",
    "frontier",
    "problems",
    "run",
    "summary",
    "table",
    "vote",
]

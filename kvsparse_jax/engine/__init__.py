"""Serving: continuous batching of compressed sequences over one pool of pages."""

from kvsparse_jax.engine.engine import Engine, Histogram, Metrics
from kvsparse_jax.engine.requests import (
    BusyError,
    EndReason,
    EngineOptions,
    Logprob,
    Piece,
    Request,
    SamplingOptions,
    Usage,
)

__all__ = [
    "BusyError",
    "EndReason",
    "Engine",
    "EngineOptions",
    "Histogram",
    "Logprob",
    "Metrics",
    "Piece",
    "Request",
    "SamplingOptions",
    "Usage",
]

"""Text generation on the compressed cache: prefill, decode loop, sessions of many turns, teacher-forced replay."""

from kvsparse_jax.cache.store import CacheOptions
from kvsparse_jax.generation.answer import FinishReason, GenerateOutput, Piece
from kvsparse_jax.generation.decode import BURST, Model
from kvsparse_jax.generation.replay import Continuation, Replay, continuation, replay
from kvsparse_jax.generation.requests import Message, Prompt, Settings
from kvsparse_jax.generation.session import Session, generate

__all__ = [
    "BURST",
    "CacheOptions",
    "Continuation",
    "FinishReason",
    "GenerateOutput",
    "Message",
    "Model",
    "Piece",
    "Prompt",
    "Replay",
    "Session",
    "Settings",
    "continuation",
    "generate",
    "replay",
]

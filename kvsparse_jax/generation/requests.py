"""What a caller may ask for: prompts, settings of a generation, and the checks of both."""

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from kvsparse_jax.cache.base import bucket
from kvsparse_jax.errors import InputError, whole
from kvsparse_jax.generation.decode import Sampler
from kvsparse_jax.models.config import ModelConfig
from kvsparse_jax.sampling import PerRow, per_row, sampling
from kvsparse_jax.tokenizer import Tokenizer

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or chat messages ({"role": ..., "content": ...})."""


def needed(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer of a model that must have one. Raises InputError."""
    if tokenizer is None:
        raise InputError("this model has no tokenizer: give token ids instead of text, and no stop strings")
    return tokenizer


def token_ids(values: Any, vocab: int, name: str) -> list[int]:
    """Token ids as a list. Raises InputError for anything else, and for ids out of range."""
    one_dimensional = isinstance(values, Sequence) or getattr(values, "ndim", 0) == 1
    ids: list[Any] = [*values] if one_dimensional and not isinstance(values, str) else [None]
    for one in ids:
        if isinstance(one, bool) or not isinstance(one, numbers.Integral):
            raise InputError(f"{name} must be whole numbers, not {str(values)[:60]}")
        if not 0 <= int(one) < vocab:
            raise InputError(f"{name}: {one} is out of range (accepted: 0 to {vocab - 1})")
    return [int(one) for one in ids]


def is_messages(content: object) -> TypeGuard[Sequence[Message]]:
    """Whether this is a list of chat messages."""
    return isinstance(content, Sequence) and bool(content) and isinstance(content[0], Mapping)


def is_one(content: Any) -> bool:
    """Whether this is the content of one row (and not a list with one entry per row)."""
    if isinstance(content, str) or is_messages(content):
        return True
    if isinstance(content, np.ndarray | jax.Array):
        return content.ndim == 1
    return isinstance(content, Sequence) and (len(content) == 0 or isinstance(content[0], numbers.Integral))


def _stops(config: ModelConfig, tokenizer: Tokenizer | None, batch: int, eos: bool, stop_ids: Any) -> np.ndarray:
    """Stop tokens of each row [B, S] int32, filled up with -1. S is even and a bucket, so that few shapes arise."""
    ends: set[int] = set()
    if eos:
        ends = {*config.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer is not None else ())}
    given: Any = [stop_ids] if isinstance(stop_ids, numbers.Integral) else stop_ids
    shared = all(isinstance(one, numbers.Integral) for one in given)
    rows = [list(given)] * batch if shared else per_row("stop_ids", given, batch)
    found = [sorted(ends | set(token_ids(row, config.vocab_size, "stop_ids"))) for row in rows]
    width = bucket(max(4, *(len(row) for row in found)))
    return np.asarray([[*row, *[-1] * (width - len(row))] for row in found], np.int32)


def _strings(stop: str | Sequence[str]) -> list[str]:
    strings = [stop] if isinstance(stop, str) else list(stop)
    for one in strings:
        if not isinstance(one, str) or not one:
            raise InputError(f"a stop string must be a text that is not empty, not {one!r}")
    return strings


class Settings(TypedDict, total=False):
    """How the next token is chosen, and what ends an answer. Every number may be a sequence with one for each row.

    Attributes:
        temperature: 0.6 by default; 0 always takes the most probable token.
        top_p: 0.95 by default; 1 is off.
        top_k: 20 by default; 0 is off.
        min_p: 0 (off) by default.
        repetition_penalty: 1 (off) by default; counts the tokens of the whole history.
        seed: 0 by default; the same seed, row and history give the same answer, whoever else is in the batch.
        eos: True by default: end at the model's end-of-text tokens.
        stop: a string or strings that end a row; the text is cut before the first of them.
        stop_ids: tokens that end a row, for all rows or a list for each.
    """

    temperature: PerRow
    top_p: PerRow
    top_k: int | Sequence[int]
    min_p: PerRow
    repetition_penalty: PerRow
    seed: int | Sequence[int]
    eos: bool
    stop: str | Sequence[str]
    stop_ids: Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class Request:
    """The checked settings of a generation."""

    limits: list[int]
    sampler: Sampler
    strings: list[str]


def request(
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    batch: int,
    max_new_tokens: int | Sequence[int],
    *,
    temperature: PerRow = 0.6,
    top_p: PerRow = 0.95,
    top_k: int | Sequence[int] = 20,
    min_p: PerRow = 0.0,
    repetition_penalty: PerRow = 1.0,
    seed: int | Sequence[int] = 0,
    eos: bool = True,
    stop: str | Sequence[str] = (),
    stop_ids: Sequence[int] | Sequence[Sequence[int]] = (),
) -> Request:
    """Checks :class:`Settings` for ``batch`` rows. Raises InputError."""
    strings = _strings(stop)
    if strings:
        needed(tokenizer)
    settings = sampling(
        batch,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    return Request(
        [whole("max_new_tokens", n, 0) for n in per_row("max_new_tokens", max_new_tokens, batch)],
        Sampler(settings, jnp.asarray(_stops(config, tokenizer, batch, eos, stop_ids))),
        strings,
    )

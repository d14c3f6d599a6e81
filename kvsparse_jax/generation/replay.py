"""Teacher forcing through the real cache: given tokens go in, and what the cache holds is shown after every step."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from kernels.visibility import PADDING
from kvsparse_jax.cache.base import Cache
from kvsparse_jax.cache.report import CacheReport, counts, page_bytes, used_bytes
from kvsparse_jax.cache.spec import CacheSpec
from kvsparse_jax.cache.store import CacheOptions, Store
from kvsparse_jax.errors import InputError, whole
from kvsparse_jax.generation import decode
from kvsparse_jax.generation.decode import BURST, Model, sweep, teach, with_head


@dataclass(frozen=True)
class Replay:
    """What :func:`replay` gives. T columns, of which P were prefilled; S = T - P steps.

    Attributes:
        logits: [B, T, V] float32, undefined at padding.
        live: [S + 1, L, B, H], keys visible to the newest query after prefill and after each step.
        pages: [S + 1, L, B, H], pages taken; 0 for a dense cache.
        page_size: slots per page.
        used: [S + 1], bytes of the pages taken, the tables and the metadata.
    """

    logits: np.ndarray
    live: np.ndarray
    pages: np.ndarray
    page_size: int
    used: np.ndarray


def replay(
    model: Model,
    input_ids: Array,
    segment_ids: Array,
    prefill: int | None = None,
    prefill_chunk: int | None = None,
    **cache_options: Any,
) -> Replay:
    """Feeds given tokens through the real cache, and shows the logits and what the cache holds.

    Args:
        model: the model.
        input_ids: [B, T] int32, valid ids.
        segment_ids: [B, T] int32, PADDING at padding, which lies left or right of a row's tokens.
        prefill: number of columns that enter as a prompt, left pads included; the rest enters one column at a time.
            None is all of them.
        prefill_chunk: columns per chunk of the prompt; a chunk may hold only padding for a row. None is one chunk.
        **cache_options: see :class:`CacheOptions`.

    Raises:
        InputError: ``prefill`` out of range.
        CapacityError: the cache is full and may not grow.
    """
    ids, valid = np.asarray(input_ids), np.asarray(segment_ids) != PADDING
    batch, length = valid.shape
    prompt = length if prefill is None else whole("prefill", prefill, 0)
    if prompt > length:
        raise InputError(f"prefill must be at most {length}, the number of columns, not {prompt}")
    chunk = max(prompt, 1) if prefill_chunk is None else whole("prefill_chunk", prefill_chunk, 1)
    spec = CacheSpec.of(model.config, model.policy, model.dtype)
    store = Store(spec, batch, CacheOptions(**cache_options), model.sharding)
    model = with_head(model)
    logits: list[tuple[Array, int]] = []
    states: list[tuple[Array, Array]] = []
    fixed: list[int] = []

    hold = jnp.asarray(valid[:, :prompt].sum(1) - 1, jnp.int32) if model.policy.holds else None

    def feed(start: int, end: int, width: int, hold: Array | None = None) -> None:
        cut = ((0, 0), (0, width - (end - start)))
        new = valid[:, start:end]
        cache = store.reserve(new.sum(1), np.minimum(valid[:, start:].sum(1), max(BURST, width)))
        columns, marks = jnp.asarray(np.pad(ids[:, start:end], cut)), jnp.asarray(np.pad(new, cut))
        out, store.cache = teach(model, cache, columns, marks, hold)
        store.took(new.sum(1))
        logits.append((out, end - start))

    def look() -> None:
        cache = store.reserve()
        states.append(counts(cache))
        fixed.append(used_bytes(cache, 0))

    for start in range(0, prompt, chunk):
        feed(start, min(start + chunk, prompt), chunk, hold)
    if hold is not None:
        store.cache = sweep(store.reserve())
    look()
    for start in range(prompt, length):
        feed(start, start + 1, 1)
        look()
    store.report()  # refuses a cache that has lost something
    live, pages = (np.stack([np.asarray(x) for x in xs]) for xs in zip(*states, strict=True))
    used = np.asarray(fixed) + pages.sum((1, 2, 3)) * page_bytes(store.reserve())
    every = np.concatenate([np.asarray(x)[:, :count] for x, count in logits], 1)
    return Replay(logits=every, live=live, pages=pages, page_size=store.options.page_size, used=used)


@dataclass(frozen=True)
class Continuation:
    """What :func:`continuation` gives, for n columns after a prompt of P.

    Attributes:
        logits: [B, n, V], of the columns after the prompt.
        prompt: report of the cache when the prompt has entered.
        end: report of the cache at the end.
    """

    logits: Array
    prompt: CacheReport
    end: CacheReport


def continuation(
    model: Model, input_ids: Array, context: int, prefill_chunk: int | None = None, **cache_options: Any
) -> Continuation:
    """Stores a prompt as a session would, then feeds given tokens as if they were being generated.

    Args:
        model: the model.
        input_ids: [B, T] int32, no padding.
        context: P, columns that are the prompt; the rest continues it.
        prefill_chunk: columns per chunk of the prompt; None is one chunk.
        **cache_options: see :class:`CacheOptions`.

    Raises:
        InputError: ``context`` out of range.
    """
    ids = np.asarray(input_ids)
    batch, length = ids.shape
    if not 0 < whole("context", context, 1) < length:
        raise InputError(f"context must be from 1 to {length - 1}, the columns being {length}, not {context}")
    policy = model.policy
    hold = jnp.full((batch,), context - 1, jnp.int32) if policy.holds else None
    store = Store(CacheSpec.of(model.config, policy, model.dtype), batch, CacheOptions(**cache_options), model.sharding)
    model = with_head(model)

    def columns(start: int, end: int, width: int) -> tuple[Cache, Array, Array]:
        cache = store.reserve(end - start, max(length - start, width))
        pad = ((0, 0), (0, width - (end - start)))
        marks = np.pad(np.ones((batch, end - start), bool), pad)
        return cache, jnp.asarray(np.pad(ids[:, start:end], pad), jnp.int32), jnp.asarray(marks)

    chunk = context if prefill_chunk is None else whole("prefill_chunk", prefill_chunk, 1)
    for start in range(0, context, chunk):
        end = min(start + chunk, context)
        store.cache = decode.prefill(model, *columns(start, end, chunk), hold)
        store.took([end - start] * batch)
    if hold is not None:
        store.cache = sweep(store.reserve())
    prompt = store.report()
    # Some policies select after every token; for others a chunk is the same as its tokens one by one.
    step = 1 if policy.selects and policy.while_decoding else length - context
    logits = []
    for start in range(context, length, step):
        out, store.cache = teach(model, *columns(start, start + step, step), generated=True)
        store.took([step] * batch)
        logits.append(out)
    return Continuation(jnp.concatenate(logits, 1), prompt, store.report())

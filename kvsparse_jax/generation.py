"""Text generation on the compressed cache: prefill, the decode loop, sessions of many turns, the teacher-forced replay.

A session's tokens are those in the cache and, per row, one pending token, which enters with the next step. The step
feeds the pending token, attends, and draws the one that is pending next; so a prompt is stored without computing a
single logit, and one compiled loop of that step serves generation and streaming, which only differ in how many steps
they ask for at once. Rows are independent: each has its own length, settings and end, and a row that has ended neither
stores nor counts.
"""

import dataclasses
import functools
import inspect
import numbers
import weakref
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from kernels.visibility import PADDING
from kvsparse_jax.cache import capacity, dense, paged
from kvsparse_jax.cache.capacity import WhenFull, bucket
from kvsparse_jax.cache.quantise import QUANTISATIONS, Quantisation
from kvsparse_jax.cache.report import Cache, CacheReport, page_bytes, report, used_bytes
from kvsparse_jax.errors import InputError, RunError
from kvsparse_jax.models import decoder
from kvsparse_jax.models.config import ModelConfig
from kvsparse_jax.policies.base import LayerInput, Policy
from kvsparse_jax.sampling import PerRow, Sampling, choose, per_row, sampling
from kvsparse_jax.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kvsparse_jax.lm import LM

BURST = 64
"""Most steps that the device takes without asking the host."""

AHEAD = 256
"""Most tokens per row that a generation makes room for at a time, so that a long answer grows the pool seldom."""

LEAST_CHUNK = 16
"""Prompts are padded to lengths of this or more (single tokens aside), so that short ones share a compiled program."""

TABLE_TOKENS = 4096
"""Tokens that a page table has entries for at least, where the model's context is not shorter."""

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or chat messages ({"role": ..., "content": ...})."""

FinishReason = Literal["stop", "length", "context"]
"""A stop token or string; max_new_tokens; the model's context is full."""

_NOTHING, _STOPPED = -1, -2  # what a step emits in place of a token: the row had ended before; it drew a stop token


# What is handed back


@dataclass(frozen=True)
class GenerateOutput:
    """What :func:`generate` and :meth:`Session.generate` give, one entry per row.

    Attributes:
        tokens: generated token ids, without the stop token.
        text: their text, cut before a stop string; None without a tokenizer.
        finish_reason: "stop" (stop token or string), "length" (max_new_tokens) or "context" (no room in the context).
        cache: the cache at the end.
    """

    tokens: list[list[int]]
    text: list[str] | None
    finish_reason: list[FinishReason]
    cache: CacheReport


@dataclass(frozen=True)
class Piece:
    """What :meth:`Session.stream` yields.

    Attributes:
        row: which row it belongs to.
        token: the new token; None when the row only ends.
        text: text that became certain, often empty: incomplete characters and what may become a stop string are held
            back.
        finish_reason: not None in a row's last piece.
    """

    row: int
    token: int | None
    text: str
    finish_reason: FinishReason | None = None


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


# The cache: everything that knows more of it than attend and advance


@dataclass(frozen=True)
class CacheOptions:
    """How a session stores keys and values.

    Attributes:
        cache: "paged", or "dense": the reference, which masks what is evicted and frees nothing.
        page_size: slots per page.
        capacity: tokens per layer, sequence and KV head, on average, that the pool is made for (a head may take more,
            at the others' expense); None makes it as large as needed and shrinks it after a prompt.
        when_full: "grow" (copy to a larger pool), "evict" (give up entries beyond what the policy evicts) or "error".
        kv_dtype: "int8" or "float8_e4m3" for an 8-bit pool.
    """

    cache: Literal["paged", "dense"] = "paged"
    page_size: int = 64
    capacity: int | None = None
    when_full: WhenFull = "grow"
    kv_dtype: Quantisation | None = None

    def __post_init__(self) -> None:
        choices: tuple[tuple[str, object, tuple[object, ...]], ...] = (
            ("cache", self.cache, ("paged", "dense")),
            ("when_full", self.when_full, ("grow", "evict", "error")),
            ("kv_dtype", self.kv_dtype, (None, *QUANTISATIONS)),
        )
        for name, value, accepted in choices:
            if value not in accepted:
                raise InputError(f"{name} must be one of {', '.join(map(str, accepted))}, not {value!r}")
        _whole("page_size", self.page_size, 1)
        if self.capacity is not None:
            _whole("capacity", self.capacity, 1)
        if self.cache == "dense" and (self.kv_dtype is not None or self.when_full == "evict"):
            raise InputError("a dense cache has no 8-bit form and gives up nothing: leave out kv_dtype and when_full")


class _Store:
    """The cache of ``batch`` rows with its capacity: made when first needed, of the size needed."""

    def __init__(self, lm: "LM", batch: int, options: CacheOptions):
        self.lm, self.batch, self.options = lm, batch, options
        self.cache: Cache | None = None
        self.room = np.zeros(batch, np.int64)  # tokens that are sure to fit
        self.window = lm.policy.window if _decides(lm.policy, lm.config, lm.params["embed"].dtype) else None
        need = 0 if self.window is None else min(self.window + 1, lm.config.max_positions)
        if options.capacity is not None and options.capacity < need:
            raise InputError(
                f"capacity of {options.capacity} tokens per head is too small: the newest {need} are never evicted"
            )

    def _make(self, tokens: np.ndarray) -> Cache:
        config, options = self.lm.config, self.options
        shape = dict(layers=config.layers, batch=self.batch, kv_heads=config.kv_heads, head_dim=config.head_dim)
        common: dict[str, Any] = shape | dict(
            dtype=self.lm.params["embed"].dtype,
            window=self.window,
            shift=self.lm.policy.shift,
            local_windows=config.local_windows,
        )
        page = options.page_size
        longest = int(tokens.max())
        made: Cache
        if options.cache == "dense":
            made = _new_dense(slots=bucket(longest if options.capacity is None else options.capacity), **common)
        else:
            if options.capacity is None:
                pages = bucket(config.layers * config.kv_heads * int((-(-tokens // page)).sum()))
                slots = max(longest, min(TABLE_TOKENS, config.max_positions))
            else:
                pages = config.layers * config.kv_heads * self.batch * -(-options.capacity // page)
                slots = config.max_positions
            made = _new_paged(
                pages=pages,
                width=bucket(-(-slots // page)),
                page=page,
                max_positions=config.max_positions,
                quantisation=options.kv_dtype,
                **common,
            )
        return _placed(made, self.lm)

    def reserve(self, tokens: Sequence[int] | np.ndarray, wish: Sequence[int] | np.ndarray | None = None) -> Cache:
        """The cache, with room for ``tokens`` [B] more tokens of each row; for ``wish`` [B] if room has to be made.

        Raises:
            CapacityError: it is full and may not grow.
        """
        least = np.asarray(tokens, np.int64)
        most = least if wish is None else np.maximum(least, np.asarray(wish, np.int64))
        if self.cache is None:
            self.cache = self._make(np.maximum(most, 1))
            if self.options.capacity is None:
                self.room = most
        if (least > self.room).any():
            self.cache, self.room = self._with_room(self.cache, least, most)
        return self.cache

    def _with_room(self, cache: Cache, least: np.ndarray, most: np.ndarray) -> tuple[Cache, np.ndarray]:
        """A cache with room for ``most`` tokens if it is there or may grow, else for ``least``; and which it was."""
        when_full = self.options.when_full
        if _fits(cache, jnp.asarray(most, jnp.int32)):
            return cache, most
        if self.options.capacity is not None and _fits(cache, jnp.asarray(least, jnp.int32)):
            return cache, least
        asked = most if when_full == "grow" else least
        count = int(asked.max())
        if isinstance(cache, dense.DenseCache):
            return capacity.ensure(cache, count, when_full), asked
        if when_full == "evict":
            # Not by ensure(), which would leave nothing behind if it failed: trim() donates the cache.
            cache = self.cache = capacity.trim(cache, jnp.int32(count + cache.page), jnp.int32(count))
            when_full = "error"
        return capacity.ensure(cache, count, when_full), asked

    def took(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Counts tokens [B] that were stored."""
        self.room = np.maximum(self.room - np.asarray(tokens, np.int64), 0)

    def shrink(self, ahead: Sequence[int] | np.ndarray) -> None:
        """Gives back the pool's surplus where it is half of it or more, but for room for ``ahead`` [B] more tokens."""
        if not isinstance(self.cache, paged.PagedCache) or self.options.capacity is not None:
            return
        tokens = np.asarray(ahead, np.int64)
        needed = bucket(int(_pages_needed(self.cache, jnp.asarray(tokens, jnp.int32))))
        if 2 * needed <= self.cache.pages:
            self.cache = capacity.fork(self.cache, list(range(self.batch)), int(tokens.max()))
            self.room = tokens

    def fork(self, rows: list[int]) -> "_Store":
        """A store whose rows are copies of ``rows``; pages are copied, nothing is shared."""
        other = _Store(self.lm, len(rows), self.options)
        if self.cache is None:
            return other
        at = jnp.asarray(np.asarray(rows, np.int32))
        if not isinstance(self.cache, paged.PagedCache):
            other.cache = _copy_dense(self.cache, at)
        elif self.options.capacity is None:
            other.cache = capacity.fork(self.cache, rows)
        else:
            pages = self.cache.pages * len(rows) // self.batch
            other.cache = _repack(self.cache, at, pages=pages, width=self.cache.tables.shape[3])
        return other

    def release(self, rows: Sequence[bool]) -> None:
        """Empties rows; their pages are free again."""
        if self.cache is not None:
            self.cache = _release(self.cache, jnp.asarray(np.asarray(rows, bool)))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page; 0 for a dense cache."""
        return page_bytes(self.cache) if isinstance(self.cache, paged.PagedCache) else 0

    def report(self) -> CacheReport:
        """Entries and bytes. Raises RunError when entries were lost."""
        found = report(self.reserve([0] * self.batch), self.lm.params["embed"].dtype)
        if found.lost:
            raise RunError(f"{found.lost} entries found no room in the cache: the output is not to be trusted")
        return found


_new_dense = jax.jit(dense.init, static_argnames=tuple(inspect.signature(dense.init).parameters))
_new_paged = jax.jit(paged.init, static_argnames=tuple(inspect.signature(paged.init).parameters))


def _placed[T](tree: T, lm: "LM") -> T:
    """The arrays where the model is, on every device of its mesh.

    Like what the compiled functions hand back, they are then committed to their devices: else the second call of each
    would compile anew.
    """
    if lm.mesh is not None:
        return jax.device_put(tree, NamedSharding(lm.mesh, PartitionSpec()))
    return jax.device_put(tree, next(iter(lm.params["embed"].devices())))


def _ops(cache: Cache) -> Any:
    """The module with the operations of this kind of cache."""
    return paged if isinstance(cache, paged.PagedCache) else dense


def _decides(policy: Policy, config: ModelConfig, dtype: Any) -> bool:
    """Whether the policy ever flags a token."""

    def gate(params: Any, residual: Array, q: Array, positions: Array) -> Array | None:
        return policy.gate(params, LayerInput(residual, residual, q, positions, config.kv_heads, config.rms_eps))

    def shape(*dims: int, of: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, of)

    one_layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), policy.params)
    residual, q = shape(1, 1, config.hidden_size), shape(1, 1, config.heads, config.head_dim)
    return jax.eval_shape(gate, one_layer, residual, q, shape(1, 1, of=jnp.int32)) is not None


@jax.jit
def _fits(cache: Cache, tokens: Array) -> Array:
    return _ops(cache).fits(cache, tokens)


@jax.jit
def _pages_needed(cache: paged.PagedCache, tokens: Array) -> Array:
    return paged.pages_needed(cache, tokens)


@functools.partial(jax.jit, static_argnames=("pages", "width"))
def _repack(cache: paged.PagedCache, rows: Array, *, pages: int, width: int) -> paged.PagedCache:
    return paged.repack(cache, rows, pages=pages, width=width)


@functools.partial(jax.jit, donate_argnums=(0,))
def _release(cache: Cache, rows: Array) -> Cache:
    return _ops(cache).release(cache, rows)


@jax.jit
def _copy_dense(cache: dense.DenseCache, rows: Array) -> dense.DenseCache:
    expires = None if cache.expires is None else cache.expires[:, rows]
    return dataclasses.replace(
        cache,
        k=cache.k[:, rows],
        v=cache.v[:, rows],
        expires=expires,
        seen=cache.seen[rows],
        flagged=cache.flagged[:, rows],
    )


@functools.partial(jax.jit, static_argnames="config")
def _state(cache: Cache, config: ModelConfig) -> tuple[Array, Array]:
    """Keys visible to the newest query and pages taken, both [L, B, H]; a dense cache holds more keys, and no pages."""
    if isinstance(cache, paged.PagedCache):
        return paged.live(cache), paged.pages_taken(cache)
    slot = jnp.arange(cache.slots, dtype=jnp.int32)[None, None]
    newest = (cache.seen - 1)[None, :, None]
    local = jnp.asarray([config.max_positions if w is None else w for w in config.local_windows], jnp.int32)
    seen = ((slot <= newest) & (newest - slot < local[:, None, None]))[:, :, None]
    if cache.expires is not None:
        seen = seen & (newest[..., None] <= cache.expires)
    live = jnp.sum(seen, -1, dtype=jnp.int32)
    return jnp.broadcast_to(live, cache.flagged.shape), jnp.zeros_like(cache.flagged)


# What runs on the device


def _forward(
    params: decoder.Params, config: ModelConfig, policy: Policy, cache: Cache, ids: Array, valid: Array
) -> tuple[Array, Cache]:
    """Feeds ids [B, T]; gives the hidden states [B, T, E] and the cache."""
    ops = _ops(cache)

    def attend(
        cache: Cache, layer: decoder.Layer, q: Array, k: Array, v: Array, gate: Array | None
    ) -> tuple[Array, Cache, None]:
        evict = None if gate is None else gate > 0
        local = layer.local_window
        out, cache = ops.attend(cache, layer.number, q, k, v, evict, valid, scale=config.scale, local_window=local)
        return out, cache, None

    hidden, cache, _ = decoder.forward(params, config, policy, ids, ops.positions(cache, valid), attend, cache)
    return hidden, ops.advance(cache, valid)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _prefill(
    params: decoder.Params, config: ModelConfig, policy: Policy, cache: Cache, ids: Array, valid: Array
) -> Cache:
    """Stores a chunk of a prompt. Nothing but the cache is asked for, so XLA drops what follows the last keys."""
    return _forward(params, config, policy, cache, ids, valid)[1]


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _teach(
    params: decoder.Params, config: ModelConfig, policy: Policy, cache: Cache, ids: Array, valid: Array
) -> tuple[Array, Cache]:
    """Feeds given tokens and computes the logits [B, T, V] of all of them."""
    hidden, cache = _forward(params, config, policy, cache, ids, valid)
    return decoder.logits(params, hidden), cache


def _step(
    params: decoder.Params,
    config: ModelConfig,
    policy: Policy,
    settings: Sampling,
    stops: Array,
    cache: Cache,
    token: Array,
    left: Array,
    present: Array | None,
) -> tuple[Array, Cache, Array, Array, Array | None]:
    """Feeds each row's pending token and draws the next.

    Args:
        params, config, policy: the model.
        settings: of the sampling.
        stops: [B, S] int32, stop tokens of each row, -1 where there are fewer.
        cache: the state.
        token: [B] int32, pending tokens.
        left: [B] int32, tokens that a row may still draw; 0: it has ended.
        present: [B, V] bool or None, see :func:`kvsparse_jax.sampling.choose`.

    Returns:
        What is emitted [B] (a token, _STOPPED or _NOTHING), and the new cache, token, left and present.
    """
    active = left > 0
    hidden, cache = _forward(params, config, policy, cache, token[:, None], active[:, None])
    drawn = choose(decoder.logits(params, hidden[:, 0]), settings, cache.seen, present)
    stopped = jnp.any(drawn[:, None] == stops, 1)
    goes_on = active & ~stopped
    emitted = jnp.where(active, jnp.where(stopped, jnp.int32(_STOPPED), drawn), jnp.int32(_NOTHING))
    if present is not None:
        row = jnp.arange(drawn.shape[0], dtype=jnp.int32)
        present = present.at[row, jnp.where(goes_on, drawn, present.shape[1])].set(True, mode="drop")
    token = jnp.where(goes_on, drawn, token)
    return emitted, cache, token, jnp.where(goes_on, left - 1, 0), present


@functools.partial(jax.jit, static_argnames="config", donate_argnames=("cache", "present"))
def _decode(
    params: decoder.Params,
    config: ModelConfig,
    policy: Policy,
    settings: Sampling,
    stops: Array,
    cache: Cache,
    token: Array,
    left: Array,
    present: Array | None,
    steps: Array,
) -> tuple[Array, Cache, Array | None]:
    """Takes :func:`_step` until all rows have ended, ``steps`` times at most (and BURST).

    Returns:
        What was emitted [B, BURST], the cache, and present.
    """
    emitted = jnp.full((token.shape[0], BURST), _NOTHING, jnp.int32)

    def body(carry: Any) -> Any:
        i, emitted, cache, token, left, present = carry
        new, *rest = _step(params, config, policy, settings, stops, cache, token, left, present)
        return i + 1, lax.dynamic_update_slice(emitted, new[:, None], (jnp.zeros_like(i), i)), *rest

    def go_on(carry: Any) -> Array:
        return (carry[0] < jnp.minimum(steps, BURST)) & jnp.any(carry[4] > 0)

    start = (jnp.zeros((), jnp.int32), emitted, cache, token, left, present)
    _, emitted, cache, _, _, present = lax.while_loop(go_on, body, start)
    return emitted, cache, present


_heads: dict[int, tuple["weakref.ref[Array]", Array]] = {}


def _with_head(params: decoder.Params) -> decoder.Params:
    """Parameters with the output head stored as [E, V], where a tied embedding would be multiplied transposed.

    XLA:CPU is several times slower at that. The copy is made once and lives as long as the embedding.
    """
    embed = params["embed"]
    if "head" in params or next(iter(embed.devices())).platform != "cpu":
        return params
    key = id(embed)
    if key not in _heads:
        _heads[key] = weakref.ref(embed, lambda _: _heads.pop(key, None)), jax.jit(decoder.transposed)(embed)
    return {**params, "head": _heads[key][1]}


# Input


def _whole(name: str, value: Any, least: int) -> int:
    """A whole number of at least ``least``. Raises InputError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < least:
        raise InputError(f"{name} must be a whole number, at least {least}, not {value!r}")
    return int(value)


def _tokenizer(lm: "LM") -> Tokenizer:
    if lm.tokenizer is None:
        raise InputError("this model has no tokenizer: give token ids instead of text, and no stop strings")
    return lm.tokenizer


def _token_ids(values: Any, vocab: int, name: str) -> list[int]:
    """Token ids as a list. Raises InputError for anything else, and for ids out of range."""
    one_dimensional = isinstance(values, Sequence) or getattr(values, "ndim", 0) == 1
    ids: list[Any] = [*values] if one_dimensional and not isinstance(values, str) else [None]
    for one in ids:
        if isinstance(one, bool) or not isinstance(one, numbers.Integral):
            raise InputError(f"{name} must be whole numbers, not {str(values)[:60]}")
        if not 0 <= int(one) < vocab:
            raise InputError(f"{name}: {one} is out of range (accepted: 0 to {vocab - 1})")
    return [int(one) for one in ids]


def _is_messages(content: object) -> bool:
    return isinstance(content, Sequence) and bool(content) and isinstance(content[0], Mapping)


def _is_one(content: Any) -> bool:
    """Whether this is the content of one row (and not a list with one entry per row)."""
    if isinstance(content, str) or _is_messages(content):
        return True
    if isinstance(content, np.ndarray | jax.Array):
        return content.ndim == 1
    return isinstance(content, Sequence) and (len(content) == 0 or isinstance(content[0], numbers.Integral))


def _stops(lm: "LM", batch: int, eos: bool, stop_ids: Any) -> np.ndarray:
    """Stop tokens of each row [B, S] int32, filled up with -1. S is even and a bucket, so that few shapes arise."""
    ends: set[int] = set()
    if eos:
        ends = {*lm.config.eos_token_ids, *(lm.tokenizer.eos_token_ids if lm.tokenizer is not None else ())}
    given: Any = [stop_ids] if isinstance(stop_ids, numbers.Integral) else stop_ids
    shared = all(isinstance(one, numbers.Integral) for one in given)
    rows = [list(given)] * batch if shared else per_row("stop_ids", given, batch)
    found = [sorted(ends | set(_token_ids(row, lm.config.vocab_size, "stop_ids"))) for row in rows]
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
class _Request:
    """The checked settings of a generation."""

    limits: list[int]
    settings: Sampling
    stops: Array
    strings: list[str]


def _request(
    lm: "LM",
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
) -> _Request:
    """Checks :class:`Settings` for ``batch`` rows. Raises InputError."""
    strings = _strings(stop)
    if strings:
        _tokenizer(lm)
    return _Request(
        [_whole("max_new_tokens", n, 0) for n in per_row("max_new_tokens", max_new_tokens, batch)],
        sampling(
            batch,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
        ),
        jnp.asarray(_stops(lm, batch, eos, stop_ids)),
        strings,
    )


# One row's answer on the host


class _Answer:
    """Collects a row's tokens and text, and sees the stop strings in it."""

    def __init__(self, tokenizer: Tokenizer | None, strings: Sequence[str], limit: int, at_limit: FinishReason):
        self.tokens: list[int] = []
        self.text = ""
        self.reason: FinishReason | None = None
        self._decoder = None if tokenizer is None else tokenizer.stream_decoder()
        self._held = ""  # may turn out to be the start of a stop string
        self._strings = strings
        self.at_limit = at_limit
        self._limit = limit

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return 0 if self.reason is not None else self._limit - len(self.tokens)

    def push(self, token: int) -> str:
        """Takes a token; gives the text that became certain, and sets ``reason`` when it was the last."""
        self.tokens.append(token)
        new = "" if self._decoder is None else self._decoder.push(token)
        return self.end(self.at_limit, new) if len(self.tokens) >= self._limit else self._give(new)

    def end(self, reason: FinishReason, new: str = "") -> str:
        """Ends the answer; gives the text that was held back."""
        text = self._give(new + ("" if self._decoder is None else self._decoder.finish()))
        if self.reason is None:  # else a stop string was complete at the last moment
            self.reason = reason
            text += self._held
            self.text += self._held
        self._held = ""
        return text

    def _give(self, new: str) -> str:
        text = self._held + new
        found = [at for at in (text.find(string) for string in self._strings) if at >= 0]
        if found:
            text, self._held, self.reason = text[: min(found)], "", "stop"
        else:
            # What is held back is the longest end of the text that begins a stop string, so no match can start earlier.
            longest = min(len(text), max((len(string) - 1 for string in self._strings), default=0))
            sizes = range(longest, 0, -1)
            kept = next((n for n in sizes if any(string.startswith(text[-n:]) for string in self._strings)), 0)
            text, self._held = text[: len(text) - kept], text[len(text) - kept :]
        self.text += text
        return text


@dataclass
class _Turn:
    """A generation under way."""

    number: int
    answers: list[_Answer]
    request: _Request
    present: Array | None
    burst: int


# Sessions


_ANSWER = "[the answer so far]"  # stands for what is in the cache when a template renders the messages after it


class Session:
    """Sequences that grow turn by turn on one compressed cache. Made by ``lm.session()``.

    Appended and generated tokens are seen exactly as if the whole had been one prompt. The history of a row is what was
    appended and every generated token; a stop token that ends a turn is not part of it (a chat template writes it anew
    when the next messages are appended). With a stop string the tokens that complete it are part of the history,
    although the text is cut before it. A row that ended with a stop token stays ended until something is appended.

    Example::

        chat = lm.session(chat=True)
        chat.append("What is a cache?")
        print(chat.generate(max_new_tokens=100).text[0])
        chat.append("And a KV cache?")
        for piece in chat.stream(max_new_tokens=100):
            print(piece.text, end="")
    """

    def __init__(
        self, lm: "LM", batch: int = 1, *, chat: bool = False, prefill_chunk: int | None = None, **cache_options: Any
    ):
        """Args:
            lm: the model.
            batch: number of rows (B).
            chat: a plain text that is appended is a user's message, not raw text.
            prefill_chunk: most tokens per row that enter the cache at once; None is all that is appended.
            **cache_options: see :class:`CacheOptions`.

        Raises:
            InputError: a setting is out of range.
        """
        self.lm = lm
        self.batch = _whole("batch", batch, 1)
        self.chat = chat
        self.prefill_chunk = None if prefill_chunk is None else _whole("prefill_chunk", prefill_chunk, 1)
        self.options = CacheOptions(**cache_options)
        self._params = _with_head(lm.params)
        self._open: _Store | None = _Store(lm, self.batch, self.options)
        self._cached: list[list[int]] = [[] for _ in range(self.batch)]
        self._pending: list[int | None] = [None] * self.batch
        self._unread: Array | None = None  # what the device emitted and the host has not looked at yet
        self._turn = 0

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def tokens(self) -> list[list[int]]:
        """The history of each row: all tokens appended and generated."""
        self._store()
        self._read()
        return [[*cached, *([] if p is None else [p])] for cached, p in zip(self._cached, self._pending, strict=True)]

    def append(self, content: Prompt | Sequence[Prompt], *, prefill_chunk: int | None = None) -> None:
        """Adds to the sequences, at the speed of a prompt.

        Args:
            content: for one row: text, token ids or chat messages; for a batch: a list with one of these per row, empty
                where nothing is added. Messages open the assistant's next turn, and close its last one.
            prefill_chunk: overrides the session's.

        Raises:
            InputError: the session was closed; wrong content, ids out of range, or more tokens than the context.
            CapacityError: the cache is full and may not grow; the chunks before stay.
        """
        rows: Any = [content] if self.batch == 1 and _is_one(content) else content
        is_list = isinstance(rows, Sequence | np.ndarray | jax.Array) and not isinstance(rows, str)
        if not is_list or len(rows) != self.batch:
            raise InputError(f"a session of {self.batch} rows takes a list of {self.batch} contents")
        self._append(rows, BURST, prefill_chunk)

    def _append(self, rows: Sequence[Prompt], ahead: int, prefill_chunk: int | None) -> None:
        """:meth:`append`, and makes room for ``ahead`` more tokens."""
        self._begin()
        new = [self._ids_of(one, row) for row, one in enumerate(rows)]
        limit = self.lm.config.max_positions
        for row, ids in enumerate(new):
            total = self._length(row) + len(ids)
            if total > limit:
                raise InputError(f"row {row} would have {total} tokens, more than the model's context of {limit}")
        chunk = self.prefill_chunk if prefill_chunk is None else _whole("prefill_chunk", prefill_chunk, 1)
        for row, pending in enumerate(self._pending):
            if pending is not None:
                new[row].insert(0, pending)
        self._feed(new, chunk, [min(ahead, limit - self._length(row)) for row in range(self.batch)])

    def generate(self, max_new_tokens: int | Sequence[int] = 256, **settings: Unpack[Settings]) -> GenerateOutput:
        """Continues every row until it ends.

        Args:
            max_new_tokens: most tokens to generate, for all rows or for each.
            **settings: see :class:`Settings`.

        Raises:
            InputError: the session was closed, a setting is out of range, or a row is empty and there is no BOS token.
            CapacityError: the cache is full and may not grow; what was generated so far is in the history.
        """
        return self._finish(_request(self.lm, self.batch, max_new_tokens, **settings))

    def stream(
        self, max_new_tokens: int | Sequence[int] = 256, **settings: Unpack[Settings]
    ) -> Generator[Piece, None, None]:
        """:meth:`generate`, token by token: yields a :class:`Piece` per row and step.

        Leaving the loop early leaves the session after the last token that was yielded (in a batch: after the last
        step); it can go on at once. Any other call that changes the session ends the stream.
        """
        turn = self._start(_request(self.lm, self.batch, max_new_tokens, **settings))
        turn.burst = 1
        return self._run(turn)

    def fork(self, copies: int = 1) -> "Session":
        """An independent session whose rows are ``copies`` copies of each of this one's, in order: 0, 0, 1, 1, ...

        Pages are copied, none is shared, so both sessions go on as they like. ``lm.session()``, one prompt and
        ``fork(8)`` give eight parallel continuations; give each its own seed.
        """
        store = self._begin()
        rows = [row for row in range(self.batch) for _ in range(_whole("copies", copies, 1))]
        options = dataclasses.asdict(self.options)
        other = Session(self.lm, len(rows), chat=self.chat, prefill_chunk=self.prefill_chunk, **options)
        other._open = store.fork(rows)
        other._cached = [list(self._cached[row]) for row in rows]
        other._pending = [self._pending[row] for row in rows]
        return other

    def report(self) -> CacheReport:
        """The cache's entries and bytes. A row's newest token enters with the next step and is not counted yet."""
        store = self._store()
        self._read()
        return store.report()

    def release(self, rows: Sequence[int] | None = None) -> None:
        """Empties rows (all by default) for new sequences; their pages go back to the session's pool."""
        store = self._begin()
        chosen = set(range(self.batch) if rows is None else rows)
        if wrong := sorted(chosen - set(range(self.batch))):
            raise InputError(f"there is no row {wrong[0]} in a batch of {self.batch}")
        store.release([row in chosen for row in range(self.batch)])
        for row in chosen:
            self._cached[row], self._pending[row] = [], None

    def close(self) -> None:
        """Gives the cache's memory back. The session cannot be used any more."""
        self._open = self._unread = None
        self._turn += 1

    # What the methods share

    def _store(self) -> _Store:
        if self._open is None:
            raise InputError("this session was closed and its cache released: open a new one with lm.session()")
        return self._open

    def _begin(self) -> _Store:
        """Starts anything that changes the session; a stream under way ends."""
        store = self._store()
        self._read()
        self._turn += 1
        return store

    def _length(self, row: int) -> int:
        return len(self._cached[row]) + (self._pending[row] is not None)

    def _ids_of(self, content: Prompt, row: int) -> list[int]:
        """Token ids of what is appended to a row."""
        if isinstance(content, str) and self.chat:
            content = [{"role": "user", "content": content}]
        if isinstance(content, str):
            return _tokenizer(self.lm).encode(content, add_bos=self._length(row) == 0)
        if not _is_messages(content):
            return _token_ids(content, self.lm.config.vocab_size, f"token ids of row {row}")
        tokenizer = _tokenizer(self.lm)
        messages: Sequence[Message] = content  # type: ignore[assignment]
        if self._length(row) == 0:
            return tokenizer.apply_chat_template(messages)
        before = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _ANSWER}]
        text = tokenizer.apply_chat_template([*before, *messages], tokenize=False)
        _, found, rest = text.partition(_ANSWER)
        if not found:
            raise InputError("the chat template does not show the assistant's messages: append text or token ids")
        return tokenizer.encode(rest, add_bos=False)

    def _feed(self, rows: Sequence[Sequence[int]], chunk: int | None, ahead: Sequence[int], keep: int = 1) -> None:
        """Stores tokens, and leaves the last of each row pending (``keep=0``: none).

        ``rows`` begin with the pending token. The tokens are aligned to the right, so that all rows end together; a
        short row starts in a later chunk. What the host knows is right after every chunk, should one be interrupted.
        """
        store = self._store()
        counts = [max(len(ids) - keep, 0) for ids in rows]
        longest = max(counts)
        if longest:
            self._store_columns(store, rows, counts, chunk, ahead)
        for row, ids in enumerate(rows):
            self._pending[row] = ids[counts[row]] if counts[row] < len(ids) else None

    def _store_columns(
        self, store: _Store, rows: Sequence[Sequence[int]], counts: list[int], chunk: int | None, ahead: Sequence[int]
    ) -> None:
        """Stores the first ``counts`` tokens of ``rows``, chunk by chunk."""
        longest = max(counts)
        whole = longest if chunk is None else chunk
        first = (longest - 1) % whole + 1
        width = 1 if first == 1 else max(LEAST_CHUNK, bucket(first))
        if chunk is not None:
            width = min(width, chunk)
        columns = width + longest - first
        columns_ids, valid = np.zeros((self.batch, columns), np.int32), np.zeros((self.batch, columns), bool)
        for row, count in enumerate(counts):
            columns_ids[row, columns - count :] = rows[row][:count]
            valid[row, columns - count :] = True
        done = [0] * self.batch
        for start, end in zip((0, *range(width, columns, whole)), range(width, columns + 1, whole), strict=True):
            new = valid[:, start:end].sum(1)
            rest = np.asarray(counts) - done - new + np.asarray(ahead)
            cache = store.reserve(new, new + np.minimum(rest, AHEAD))
            chunk_ids, chunk_valid = jnp.asarray(columns_ids[:, start:end]), jnp.asarray(valid[:, start:end])
            store.cache = _prefill(self._params, self.lm.config, self.lm.policy, cache, chunk_ids, chunk_valid)
            store.took(new)
            for row, count in enumerate(new.tolist()):
                fed, done[row] = done[row], done[row] + count
                self._cached[row].extend(rows[row][fed : done[row]])
                self._pending[row] = rows[row][done[row]] if done[row] < len(rows[row]) else None
        store.shrink(ahead)

    def _start(self, request: _Request) -> _Turn:
        """Begins a generation from what is there now."""
        self._begin()
        config, tokenizer = self.lm.config, self.lm.tokenizer
        bos = config.bos_token_id if tokenizer is None or tokenizer.bos_token_id is None else tokenizer.bos_token_id
        empty = [row for row in range(self.batch) if self._length(row) == 0]
        if empty and bos is None:
            raise InputError(f"row {empty[0]} is empty, and the model has no BOS token to start from")
        for row in empty:
            self._pending[row] = bos
        answers = []
        for row, limit in enumerate(request.limits):
            room = config.max_positions - self._length(row)
            at_limit: FinishReason = "length" if limit <= room else "context"
            answer = _Answer(tokenizer, request.strings, min(limit, room), at_limit)
            if self._pending[row] is None or answer.left == 0:
                answer.end("stop" if self._pending[row] is None else at_limit)
            answers.append(answer)
        present = None
        if request.settings.penalised:
            seen = np.zeros((self.batch, config.vocab_size), bool)
            for row, tokens in enumerate(self.tokens):
                seen[row, tokens] = True
            present = _placed(jnp.asarray(seen), self.lm)
        return _Turn(self._turn, answers, request, present, 1 if request.strings else BURST)

    def _finish(self, request: _Request) -> GenerateOutput:
        """Generates all of an answer."""
        turn = self._start(request)
        for _ in self._run(turn):
            pass
        return GenerateOutput(
            tokens=[answer.tokens for answer in turn.answers],
            text=None if self.lm.tokenizer is None else [answer.text for answer in turn.answers],
            finish_reason=[answer.reason or answer.at_limit for answer in turn.answers],
            cache=self.report(),
        )

    def _run(self, turn: _Turn) -> Generator[Piece, None, None]:
        """Decodes in bursts until every row has ended."""
        for row, answer in enumerate(turn.answers):
            if answer.reason is not None:
                yield Piece(row, None, "", answer.reason)
        while any(answer.left for answer in turn.answers):
            if turn.number != self._turn:
                raise InputError("the session was used otherwise meanwhile: this stream has ended")
            left = [answer.left for answer in turn.answers]
            self._burst(turn, left)
            emitted = self._read()
            pieces = []
            for row, answer in enumerate(turn.answers):
                for token in emitted[row]:
                    text = answer.end("stop") if token == _STOPPED else answer.push(token)
                    pieces.append(Piece(row, None if token == _STOPPED else token, text, answer.reason))
            yield from pieces

    def _burst(self, turn: _Turn, left: list[int]) -> None:
        """Lets the device take as many steps as are wanted and sure to fit."""
        store = self._store()
        steps = min(turn.burst, max(left))
        cache = None
        while cache is None:
            try:
                cache = store.reserve([min(steps, n) for n in left], [min(AHEAD, n) for n in left])
            except capacity.CapacityError:
                if steps == 1:
                    raise
                steps //= 2
        pending = [0 if p is None else p for p in self._pending]
        emitted, store.cache, turn.present = _decode(
            self._params,
            self.lm.config,
            self.lm.policy,
            turn.request.settings,
            turn.request.stops,
            cache,
            jnp.asarray(np.asarray(pending, np.int32)),
            jnp.asarray(np.asarray(left, np.int32)),
            turn.present,
            jnp.asarray(np.int32(steps)),
        )
        self._unread = emitted
        store.took([min(steps, n) for n in left])

    def _read(self) -> list[list[int]]:
        """Waits for what the device emitted: the tokens of each row, then _STOPPED if it drew a stop token."""
        if self._unread is None:
            return [[] for _ in range(self.batch)]
        emitted = np.asarray(self._unread)  # an interrupt here changes nothing: the next call reads again
        self._unread = None
        found = [[token for token in row if token != _NOTHING] for row in emitted.tolist()]
        for row, tokens in enumerate(found):
            for token in tokens:
                pending = self._pending[row]
                if pending is not None:
                    self._cached[row].append(pending)
                self._pending[row] = None if token == _STOPPED else token
        return found


# The functions behind lm.generate and lm.replay


def generate(
    lm: "LM",
    prompts: Sequence[Prompt],
    max_new_tokens: int | Sequence[int] = 256,
    *,
    prefill_chunk: int | None = None,
    chat: bool = False,
    **options: Any,
) -> GenerateOutput:
    """Continues prompts of any lengths on the compressed cache.

    Args:
        lm: the model.
        prompts: one entry per row: raw text, token ids, or chat messages. An empty one starts from the BOS token.
        max_new_tokens: most tokens to generate, for all rows or for each. With 0 the prompts are stored and reported.
        prefill_chunk: tokens per row that enter the cache at once: memory then never holds more of a prompt than what
            is left of it, a chunk and the window. None takes the whole prompt.
        chat: texts are users' messages and go through the chat template.
        **options: see :class:`Settings` and :class:`CacheOptions`.

    Raises:
        InputError: no prompts, wrong prompts, a prompt longer than the context, or a setting out of range.
        CapacityError: the cache is full and may not grow.
    """
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence | np.ndarray | jax.Array):
        raise InputError("prompts must be a list with one prompt per row: put a single prompt into a list")
    if len(prompts) == 0:
        raise InputError("prompts is empty: give at least one prompt")
    if isinstance(prompts[0], numbers.Integral | Mapping):
        raise InputError("prompts must be a list of prompts: put this one into a list of its own")
    names = {field.name for field in dataclasses.fields(CacheOptions)}
    cache_options = {name: value for name, value in options.items() if name in names}
    settings = {name: value for name, value in options.items() if name not in names}
    request = _request(lm, len(prompts), max_new_tokens, **settings)
    with Session(lm, len(prompts), chat=chat, prefill_chunk=prefill_chunk, **cache_options) as session:
        session._append(prompts, min(AHEAD, max(request.limits)), None)
        out = session._finish(request)
        if max(request.limits) == 0:
            rest = [[] if token is None else [token] for token in session._pending]
            session._feed(rest, None, [0] * session.batch, keep=0)
            out = dataclasses.replace(out, cache=session.report())
        return out


def replay(
    lm: "LM",
    input_ids: ArrayLike,
    attention_mask: ArrayLike | None = None,
    prefill: int | None = None,
    prefill_chunk: int | None = None,
    **cache_options: Any,
) -> Replay:
    """Feeds given tokens through the real cache, and shows the logits and what the cache holds.

    Args:
        lm: the model.
        input_ids: [B, T].
        attention_mask: [B, T], 0 at padding, left or right of a row's tokens.
        prefill: number of columns that enter as a prompt, left pads included; the rest enters one column at a time.
            None is all of them.
        prefill_chunk: columns per chunk of the prompt; a chunk may hold only padding for a row. None is one chunk.
        **cache_options: see :class:`CacheOptions`.

    Raises:
        InputError: wrong shapes or ids, padding between tokens, or ``prefill`` out of range.
        CapacityError: the cache is full and may not grow.
    """
    ids, segments = map(np.asarray, lm.check(input_ids, attention_mask))
    valid = segments != PADDING
    batch, length = valid.shape
    if (np.abs(np.diff(np.pad(valid, ((0, 0), (1, 1))).astype(np.int8))).sum(1) > 2).any():
        raise InputError("attention_mask has padding between the tokens of a row")
    prompt = length if prefill is None else _whole("prefill", prefill, 0)
    if prompt > length:
        raise InputError(f"prefill must be at most {length}, the number of columns, not {prompt}")
    chunk = max(prompt, 1) if prefill_chunk is None else _whole("prefill_chunk", prefill_chunk, 1)
    store = _Store(lm, batch, CacheOptions(**cache_options))
    params = _with_head(lm.params)
    logits: list[tuple[Array, int]] = []
    states: list[tuple[Array, Array]] = []
    fixed: list[int] = []

    def feed(start: int, end: int, width: int) -> None:
        cut = ((0, 0), (0, width - (end - start)))
        new = valid[:, start:end]
        cache = store.reserve(new.sum(1), np.minimum(valid[:, start:].sum(1), max(AHEAD, width)))
        columns, marks = jnp.asarray(np.pad(ids[:, start:end], cut)), jnp.asarray(np.pad(new, cut))
        out, store.cache = _teach(params, lm.config, lm.policy, cache, columns, marks)
        store.took(new.sum(1))
        logits.append((out, end - start))

    def look() -> None:
        cache = store.reserve([0] * batch)
        states.append(_state(cache, lm.config))
        fixed.append(used_bytes(cache, 0))

    for start in range(0, prompt, chunk):
        feed(start, min(start + chunk, prompt), chunk)
    look()
    for start in range(prompt, length):
        feed(start, start + 1, 1)
        look()
    store.report()  # refuses a cache that has lost something
    live, pages = (np.stack([np.asarray(x) for x in xs]) for xs in zip(*states, strict=True))
    used = np.asarray(fixed) + pages.sum((1, 2, 3)) * store.page_bytes
    every = np.concatenate([np.asarray(x)[:, :count] for x, count in logits], 1)
    return Replay(logits=every, live=live, pages=pages, page_size=store.options.page_size, used=used)

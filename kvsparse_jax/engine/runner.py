"""What runs on the device: one cache of fixed size, and the few programs that work on it.

Rows of the cache are the engine's slots. A prefill chunk runs on one row (the pool is shared, see ``PagedCache.take``),
decode steps on all of them; a row that takes no part has no valid token. Every shape is fixed when the engine is made,
so the programs are compiled once: one per chunk width, two for decoding (with log probabilities or without), and three
that copy a sequence's pages to host memory and back.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec, Sharding

from kvsparse_jax.cache import paged, store
from kvsparse_jax.cache.base import by_shard, shards
from kvsparse_jax.cache.paged import PagedCache, pages_of
from kvsparse_jax.cache.report import nbytes, page_bytes
from kvsparse_jax.cache.spec import CacheSpec
from kvsparse_jax.engine.requests import MOST_LOGPROBS, EngineOptions, per_shard, table_width
from kvsparse_jax.errors import InputError, RunError
from kvsparse_jax.generation.decode import NOTHING, STOPPED, Model, Sampler, _forward, with_head
from kvsparse_jax.models import decoder
from kvsparse_jax.policies import Policy
from kvsparse_jax.sampling import choose

PIECE = 64
"""Pages that are copied between pool and host memory at a time."""


class Scores(NamedTuple):
    """Log probabilities of tokens [...], and ids and log probabilities of the most probable ones [..., K]."""

    value: Array
    ids: Array
    top: Array


def _scores(logits: Array, tokens: Array) -> Scores:
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), -1)
    top, ids = lax.top_k(logprobs, min(MOST_LOGPROBS, logits.shape[-1]))
    return Scores(jnp.take_along_axis(logprobs, tokens[..., None], -1)[..., 0], ids.astype(jnp.int32), top)


class Counts(NamedTuple):
    """What the host knows of the cache after a step: lengths [L, B, H], pages free, entries lost (of each shard)."""

    lengths: Array
    free: Array
    lost: Array


def _counts(cache: PagedCache) -> Counts:
    # Copies, for the cache itself is donated to the next step.
    return Counts(*(jnp.copy(x) for x in (cache.lengths, cache.free_count, cache.lost)))


@functools.partial(jax.jit, donate_argnames="cache", static_argnames="score")
def _prefill(
    model: Model,
    cache: PagedCache,
    row: Array,
    ids: Array,
    targets: Array,
    count: Array,
    hold: Array | None,
    *,
    score: bool,
) -> tuple[PagedCache, Counts, Scores | None]:
    """Stores the first ``count`` of ids [1, T] in ``row`` [1]; with ``score`` also of the targets [1, T] after them."""
    part = cache.take(row)
    valid = jnp.arange(ids.shape[1], dtype=jnp.int32)[None] < count
    hidden, after = _forward(model, part, ids, valid, hold)
    assert isinstance(after, PagedCache)
    cache = cache.put(row, after)
    return cache, _counts(cache), _scores(decoder.logits(model.params, hidden), targets) if score else None


@functools.partial(jax.jit, donate_argnames="cache")
def _sweep(cache: PagedCache, row: Array) -> tuple[PagedCache, Counts]:
    """Ends a prompt of a policy whose ``prefill`` is "dense"."""
    cache = cache.put(row, cache.take(row).sweep())
    return cache, _counts(cache)


@functools.partial(jax.jit, donate_argnames="cache", static_argnames=("burst", "score"))
def _decode(
    model: Model,
    sampler: Sampler,
    cache: PagedCache,
    token: Array,
    left: Array,
    present: Array | None,
    steps: Array,
    *,
    burst: int,
    score: bool,
) -> tuple[PagedCache, Counts, Array, Array, Scores | None]:
    """Feeds the pending tokens [B] of rows with some ``left`` [B], and draws the next, ``steps`` times at most.

    Returns:
        The cache, its counts, what was emitted [B, burst] (a token, STOPPED or NOTHING), the entries that each row's
        steps have read [B] float32 (summed over the steps, averaged over layers and heads), and scores of it.
    """
    batch = token.shape[0]
    row = jnp.arange(batch, dtype=jnp.int32)
    k = min(MOST_LOGPROBS, model.config.vocab_size)
    scores = None
    if score:
        scores = Scores(
            jnp.zeros((batch, burst), jnp.float32),
            jnp.zeros((batch, burst, k), jnp.int32),
            jnp.zeros((batch, burst, k), jnp.float32),
        )
    Carry = tuple[Array, Array, Array, PagedCache, Array, Array, Array | None, Scores | None]

    def body(carry: Carry) -> Carry:
        i, emitted, read, cache, token, left, present, scores = carry
        active = left > 0
        hidden, after = _forward(model, cache, token[:, None], active[:, None])
        assert isinstance(after, PagedCache)
        logits = decoder.logits(model.params, hidden[:, 0])
        drawn = choose(logits, sampler.settings, after.seen, present)
        stopped = jnp.any(drawn[:, None] == sampler.stops, 1)
        goes_on = active & ~stopped
        new = jnp.where(active, jnp.where(stopped, jnp.int32(STOPPED), drawn), jnp.int32(NOTHING))
        emitted = lax.dynamic_update_slice(emitted, new[:, None], (jnp.zeros_like(i), i))
        read = read + jnp.where(active, jnp.mean(after.lengths.astype(jnp.float32), (0, 2)), jnp.float32(0))
        if scores is not None:
            new_scores = _scores(logits, drawn)
            pairs = zip(scores, new_scores, strict=True)
            scores = Scores(*(lax.dynamic_update_index_in_dim(old, x, i, 1) for old, x in pairs))
        if present is not None:
            present = present.at[row, jnp.where(goes_on, drawn, present.shape[1])].set(True, mode="drop")
        left = jnp.where(goes_on, left - 1, 0)
        return i + 1, emitted, read, after, jnp.where(goes_on, drawn, token), left, present, scores

    def go_on(carry: Carry) -> Array:
        return (carry[0] < jnp.minimum(steps, burst)) & jnp.any(carry[5] > 0)

    emitted = jnp.full((batch, burst), NOTHING, jnp.int32)
    start = (jnp.zeros((), jnp.int32), emitted, jnp.zeros(batch, jnp.float32), cache, token, left, present, scores)
    _, emitted, read, cache, _, _, _, scores = lax.while_loop(go_on, body, start)
    return cache, _counts(cache), emitted, read, scores


@functools.partial(jax.jit, donate_argnames="cache")
def _release(cache: PagedCache, rows: Array) -> tuple[PagedCache, Counts]:
    cache = cache.release(rows)
    return cache, _counts(cache)


class Head(NamedTuple):
    """The bookkeeping of a sequence: lengths, flagged, trimmed [L, H], ring [L, H, R], seen scalar."""

    lengths: Array
    flagged: Array
    trimmed: Array
    ring: Array
    seen: Array


@jax.jit
def _look(cache: PagedCache, row: Array) -> tuple[Head, Array]:
    """A sequence's bookkeeping and its page table [L, H, width]."""
    lengths, flagged, trimmed, ring = (x[:, row] for x in (cache.lengths, cache.flagged, cache.trimmed, cache.ring))
    return Head(lengths, flagged, trimmed, ring, cache.seen[row]), cache.tables[:, row]


@functools.partial(jax.jit, donate_argnames="cache")
def _claim(cache: PagedCache, row: Array, head: Head) -> tuple[PagedCache, Counts, Array]:
    """Gives an empty row the bookkeeping of a sequence and pages (there must be enough); and its page table."""
    every, heads = PartitionSpec(), cache.along(1)
    of_head: tuple[Any, ...] = (heads, heads, heads, heads, every)
    args, specs = (row, head), (every, Head(*of_head))
    claimed, table = by_shard(_claim_own, cache, args, specs, (cache.specs(), heads))
    return claimed, _counts(claimed), table


def _claim_own(cache: PagedCache, row: Array, head: Head) -> tuple[PagedCache, Array]:
    """:func:`_claim` of a shard."""
    nth = jnp.arange(cache.tables.shape[3], dtype=jnp.int32)[None, None]
    held = nth < pages_of(cache, head.lengths)[..., None]
    flat = held.reshape(-1).astype(jnp.int32)
    rank = (jnp.cumsum(flat, dtype=jnp.int32) - flat).reshape(held.shape)
    page = cache.free.at[cache.free_count - 1 - rank].get(mode="clip")
    table = jnp.where(held, page, cache.pages)
    cache = dataclasses.replace(
        cache,
        tables=cache.tables.at[:, row].set(table),
        free_count=cache.free_count - jnp.sum(flat, dtype=jnp.int32),
        lengths=cache.lengths.at[:, row].set(head.lengths),
        flagged=cache.flagged.at[:, row].set(head.flagged),
        trimmed=cache.trimmed.at[:, row].set(head.trimmed),
        ring=cache.ring.at[:, row].set(head.ring),
        seen=cache.seen.at[row].set(head.seen),
    )
    return cache, table


_POOL = ("k", "v", "k_scale", "v_scale", "expires", "statistic")


@jax.jit
def _read_pages(cache: PagedCache, ids: Array) -> list[Array]:
    """Pages ``ids`` [PIECE] (of each shard: [shards * PIECE]) of the pool; out of range: anything."""

    def read(cache: PagedCache, ids: Array) -> list[Array]:
        return [x.at[ids].get(mode="clip") for x in cache.pool]

    found: list[Array] = by_shard(read, cache, (ids,), (cache.along(0),), cache.along(0))
    return found


@functools.partial(jax.jit, donate_argnames="cache")
def _write_pages(cache: PagedCache, ids: Array, data: list[Array]) -> PagedCache:
    """Writes pages ``ids`` as :func:`_read_pages` gives them; out of range: nothing."""

    def write(cache: PagedCache, ids: Array, data: list[Array]) -> PagedCache:
        names = [name for name in _POOL if getattr(cache, name) is not None]
        new = {name: getattr(cache, name).at[ids].set(x, mode="drop") for name, x in zip(names, data, strict=True)}
        return dataclasses.replace(cache, **new)

    pool = cache.along(0)
    written: PagedCache = by_shard(write, cache, (ids, data), (pool, pool), cache.specs())
    return written


@dataclass(frozen=True)
class Parcel:
    """The cache of one sequence in host memory (pinned where the device has such memory), compressed as it was.

    Attributes:
        head: its bookkeeping.
        pieces: its pages in the order of its table, PIECE at a time (of each shard).
        pages: how many.
        nbytes: bytes of it all.
    """

    head: Head
    pieces: list[list[Array]]
    pages: int
    nbytes: int


def check_policy(policy: Policy) -> None:
    """Raises InputError for a policy that an engine cannot serve."""
    if policy.selects or policy.prepares:
        raise InputError(
            f"the engine cuts prompts as the load has it, and what {type(policy).__name__} keeps depends on how a "
            "prompt is cut, or on where it ends; it serves Dense, DMS, KVzap (while_decoding) and StreamingLLM"
        )


class Runner:
    """The cache, and the programs on it. Not thread-safe.

    Attributes:
        model, options, spec: what it was made for.
        lengths: [L, B, H], entries that heads hold, as of the last step.
        free: pages that nobody holds, as of the last step.
        room: of each shard, [shards].
    """

    def __init__(self, model: Model, options: EngineOptions):
        """Raises InputError for a policy or a pool that it cannot serve."""
        check_policy(model.policy)
        self.model, self.options = with_head(model), options
        self.spec = CacheSpec.of(model.config, model.policy, model.dtype)
        context = model.config.max_positions
        self.max_tokens = min(context, options.max_tokens or context)
        width = table_width(self.max_tokens, options.page_size)
        shape: dict[str, Any] = dict(width=width, page=options.page_size, quantisation=options.kv_dtype)
        abstract = jax.eval_shape(functools.partial(paged.init, self.spec, 1, pages=1, **shape))
        one = sum(x.size * x.dtype.itemsize for x in abstract.pool)
        parts = shards(store.mesh_of(model.sharding), self.spec.kv_heads)
        self.pages = options.pool_bytes // one // parts * parts
        heads = self.spec.layers * self.spec.kv_heads
        if self.pages < heads:
            raise InputError(
                f"pool_bytes of {options.pool_bytes} is too small: a token takes a page of {one} bytes in each of "
                f"{heads} heads, {one * heads} bytes"
            )
        self.cache: PagedCache = store.new(
            paged.init, self.spec, options.slots, model.sharding, pages=self.pages, **shape
        )
        self.lengths = np.zeros((self.spec.layers, options.slots, self.spec.kv_heads), np.int32)
        self.free, self.room = self.pages, np.full(parts, self.pages // parts, np.int64)
        self._piece = min(PIECE, self.cache.shard_pages)
        self._pool: Sharding = store.shardings(self.cache, model.sharding).expires
        self._host = self._pool.with_memory_kind("pinned_host")

    @property
    def nbytes(self) -> int:
        """Bytes of the cache as allocated."""
        return nbytes(self.cache)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return page_bytes(self.cache)

    def _took(self, counts: Counts) -> None:
        found = jax.device_get(counts)
        if lost := int(found.lost.sum()):
            raise RunError(f"{lost} entries found no room in the cache: a fault of the engine's accounting")
        self.lengths, self.room = found.lengths, found.free.reshape(-1)
        self.free = int(self.room.sum())

    def prefill(
        self, row: int, tokens: list[int], targets: list[int] | None, hold: int | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Stores tokens in a row; with ``targets``, the tokens that follow each, their :class:`Scores`."""
        width = next(x for x in self.options.chunks if x >= len(tokens))
        ids, wanted = np.zeros((1, width), np.int32), np.zeros((1, width), np.int32)
        ids[0, : len(tokens)] = tokens
        if targets is not None:
            wanted[0, : len(tokens)] = targets
        self.cache, counts, scores = _prefill(
            self.model,
            self.cache,
            jnp.asarray(np.asarray([row], np.int32)),
            jnp.asarray(ids),
            jnp.asarray(wanted),
            jnp.asarray(np.int32(len(tokens))),
            None if hold is None else jnp.asarray(np.asarray([hold], np.int32)),
            score=targets is not None,
        )
        self._took(counts)
        if scores is None:
            return None
        value, top_ids, top = (np.asarray(x)[0, : len(tokens)] for x in scores)
        return value, top_ids, top

    def sweep(self, row: int) -> None:
        """Ends a prompt of a policy that ``holds``."""
        self.cache, counts = _sweep(self.cache, jnp.asarray(np.asarray([row], np.int32)))
        self._took(counts)

    def decode(
        self, sampler: Sampler, token: np.ndarray, left: np.ndarray, present: np.ndarray | None, steps: int, score: bool
    ) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray] | None]:
        """Takes decode steps; see :func:`_decode`."""
        self.cache, counts, emitted, read, scores = _decode(
            self.model,
            sampler,
            self.cache,
            jnp.asarray(token),
            jnp.asarray(left),
            None if present is None else jnp.asarray(present),
            jnp.asarray(np.int32(steps)),
            burst=self.options.burst,
            score=score,
        )
        self._took(counts)
        if scores is None:
            return np.asarray(emitted), np.asarray(read), None
        value, ids, top = (np.asarray(x) for x in scores)
        return np.asarray(emitted), np.asarray(read), (value, ids, top)

    def release(self, rows: list[int]) -> None:
        """Empties rows."""
        gone = np.zeros(self.options.slots, bool)
        gone[rows] = True
        self.cache, counts = _release(self.cache, jnp.asarray(gone))
        self._took(counts)

    def _ids(self, table: Array, lengths: Array) -> list[Array]:
        """The pages of a sequence in the order of its table, PIECE at a time, filled up with what is out of range."""
        shards, none = self.cache.shards, self.cache.shard_pages
        there = np.arange(table.shape[-1]) < -(-np.asarray(lengths) // self.options.page_size)[..., None]
        parts = zip(*(np.split(np.asarray(x), shards, 1) for x in (table, there)), strict=True)
        ids = [numbers[held] for numbers, held in parts]
        most = -(-max(map(len, ids)) // self._piece) * self._piece
        every = np.stack([np.pad(x, (0, most - len(x)), constant_values=none) for x in ids]).astype(np.int32)
        starts = range(0, most, self._piece)
        return [jnp.asarray(every[:, start : start + self._piece].reshape(-1)) for start in starts]

    def save(self, row: int) -> Parcel:
        """A copy of a row in host memory."""
        head, table = _look(self.cache, jnp.asarray(np.int32(row)))
        pieces = [jax.device_put(_read_pages(self.cache, ids), self._host) for ids in self._ids(table, head.lengths)]
        head = jax.device_get(head)
        jax.block_until_ready(pieces)
        pages = int((-(-np.asarray(head.lengths) // self.options.page_size)).sum())
        return Parcel(head, pieces, pages, sum(x.nbytes for x in jax.tree.leaves((head, pieces))))

    def restore(self, row: int, parcel: Parcel) -> None:
        """Brings a sequence back into an empty row; there must be ``parcel.pages`` free pages."""
        pages = per_shard(-(-np.asarray(parcel.head.lengths) // self.options.page_size), len(self.room))
        if np.any(pages > self.room):
            raise RunError(f"{parcel.pages} pages do not fit into {self.free}")
        head = jax.tree.map(jnp.asarray, parcel.head)
        self.cache, counts, table = _claim(self.cache, jnp.asarray(np.int32(row)), head)
        for ids, piece in zip(self._ids(table, head.lengths), parcel.pieces, strict=True):
            self.cache = _write_pages(self.cache, ids, jax.device_put(piece, self._pool))
        self._took(counts)

    def check(self) -> None:
        """Raises AssertionError when a page is lost, or held twice. For tests: reads all tables."""
        cache = self.cache
        held = np.arange(cache.tables.shape[3]) < np.asarray(pages_of(cache, cache.lengths))[..., None]
        shards, counts = cache.shards, np.asarray(cache.free_count).reshape(-1)
        split = zip(*(np.split(np.asarray(x), shards, 2) for x in (cache.tables, held)), strict=True)
        for (table, of), free, count in zip(split, np.split(np.asarray(cache.free), shards), counts, strict=True):
            pages = np.concatenate([table[of], free[:count]])
            assert sorted(pages.tolist()) == list(range(cache.shard_pages)), "a page is lost or has two owners"


def programs() -> int:
    """Compiled programs of all engines of the process; does not grow while one serves."""
    jitted: tuple[Any, ...] = (_prefill, _sweep, _decode, _release, _look, _claim, _read_pages, _write_pages)
    return sum(one._cache_size() for one in jitted)


__all__ = ["NOTHING", "STOPPED", "Parcel", "Runner", "check_policy", "programs"]

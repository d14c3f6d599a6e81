"""How fast a decode step is on the compressed cache against the dense cache, and how many bytes each of them holds.

    python -m benchmarks.decode
    python -m benchmarks.decode --model runs/retrofit --retention measured
    python -m benchmarks.decode --hf /path/to/a/python/with/torch/and/transformers

The whole model decodes, greedily, in the on-device loop that generation uses. The caches are not filled by a prefill,
which would take most of the time, but made in the state that one leaves: random keys and values, and lengths, page
tables, ``expires`` and ring exactly as the rule gives them for the decisions of :class:`Uneven`. The same policy
decides during the timed steps, so tokens are appended and overwritten as often as with a real one, and every count can
be foretold. Pages lie in random order, in a pool with room for just what the run needs. A row's context is what has
been seen after its last step.

Questions, each answered by ratios within one run (dense and compressed bursts take turns; medians of their ratios):

* tokens per second and bytes against the dense cache, by batch and context;
* the same where both may take equally many bytes, so that the compressed cache holds more sequences;
* bytes taken at the peak of a chunked prefill, which runs for real;
* with --hf, the dense cache's speed over Hugging Face transformers on PyTorch, the same model in bfloat16.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import kvsparse_jax as kvs
from benchmarks.decode_attention import retention as synthetic_retention
from kernels.visibility import NEVER, decisions_by_key, visible
from kernels.visibility import expires as last_query
from kvsparse_jax import cli
from kvsparse_jax.cache import dense, paged
from kvsparse_jax.cache.quantise import QUANTISATIONS
from kvsparse_jax.cache.report import Cache, report
from kvsparse_jax.cache.spec import CacheSpec
from kvsparse_jax.calibrate import calibrate
from kvsparse_jax.errors import InputError, RunError
from kvsparse_jax.evaluate import held_out_sequences
from kvsparse_jax.generation.decode import BURST, Model, Sampler, State, with_head
from kvsparse_jax.generation.decode import decode as decode_loop
from kvsparse_jax.lm import LM
from kvsparse_jax.models.config import ModelConfig
from kvsparse_jax.policies import DMS, KVzap, LayerInput, Policy
from kvsparse_jax.sampling import sampling

WARM_UP = 2
"""Steps of the first burst of each cache, which compiles and is not timed."""

PAUSE = 0.2
"""Seconds between PyTorch's burst and ours, in which its threads go to sleep."""

Figures = dict[str, Any]


# The policy


@dataclass(frozen=True)
class Uneven(Policy):
    """Keeps a given share of the tokens of each layer and KV head, chosen by a hash of position, row and head.

    It computes the logits of a real policy first, so a step costs what it does with that; only their sign is replaced.

    Attributes:
        params: "base", its parameters; "kept" [L, H] float32, share of tokens that are kept; "salt" [L, H] uint32.
        base: the policy whose logits are computed, without parameters; None: none are.
        window: tokens.
        shift: 0 or 1.
    """

    params: Any
    base: DMS | KVzap | None
    window: int
    shift: int

    @classmethod
    def like(cls, base: DMS | KVzap, kept: np.ndarray) -> Self:
        """A policy with the settings of ``base`` that keeps ``kept`` [L, H] of the tokens."""
        if isinstance(base, DMS) and not base.enabled:
            raise InputError("the DMS policy of this model is disabled: there is no eviction to measure")
        # Odd steps through all of uint32: no two heads share a salt.
        salt = (np.arange(kept.size, dtype=np.uint64) * 2654435761 % 2**32).astype(np.uint32).reshape(kept.shape)
        params = {"base": base.params, "kept": jnp.asarray(kept, jnp.float32), "salt": jnp.asarray(salt)}
        return cls(params, dataclasses.replace(base, params=None), base.window, base.shift)

    def without_scores(self) -> Self:
        """The same decisions, without the cost of making them."""
        return dataclasses.replace(self, params={**self.params, "base": None}, base=None)

    def flags(self, params: Any, positions: Array) -> Array:
        """Decisions to evict [B, H, T] of one layer, as emitted by the tokens at ``positions`` [B, T]."""
        row = jnp.arange(positions.shape[0], dtype=jnp.uint32)[:, None, None]
        x = positions.astype(jnp.uint32)[:, None] * jnp.uint32(0x9E3779B1) + row * jnp.uint32(0x85EBCA77)
        x = x ^ params["salt"][None, :, None]
        for factor in (0x7FEB352D, 0x846CA68B):  # a mixer of 32 bits: shift, xor, multiply
            x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(factor)
        uniform = (x >> jnp.uint32(8)).astype(jnp.float32) * jnp.float32(2.0**-24)
        return uniform >= params["kept"][None, :, None]

    def gate(self, params: Any, layer: LayerInput) -> Array | None:
        """The base's logits with the sign that :meth:`flags` asks for, [B, H, T]."""
        flags = self.flags(params, layer.positions)
        if self.base is None:
            return jnp.where(flags, 1.0, -1.0).astype(jnp.float32)
        logits = self.base.gate(params["base"], layer)
        assert logits is not None  # like() refused what is disabled
        size = jnp.abs(logits) + jnp.ones((), logits.dtype)
        return jnp.where(flags, size, -size)


jax.tree_util.register_dataclass(Uneven, data_fields=["params", "base"], meta_fields=["window", "shift"])


@functools.partial(jax.jit, static_argnames=("batch", "seen"))
def decisions(policy: Uneven, *, batch: int, seen: int) -> Array:
    """What is decided about each key once ``seen`` tokens are there, [L, B, H, seen] bool; True: evict."""
    positions = jnp.broadcast_to(jnp.arange(seen, dtype=jnp.int32)[None], (batch, seen))
    heads = {name: policy.params[name] for name in ("kept", "salt")}
    emitted = jax.lax.map(lambda params: policy.flags(params, positions), heads)
    return jax.vmap(lambda flags: decisions_by_key(flags, policy.shift, False))(emitted)


@functools.partial(jax.jit, static_argnames=("policy_window",))
def _expiry(flags: Array, *, policy_window: int) -> tuple[Array, Array]:
    positions = jnp.broadcast_to(jnp.arange(flags.shape[-1], dtype=jnp.int32), flags.shape)
    last = last_query(positions, flags, policy_window)
    return last, visible(jnp.int32(flags.shape[-1] - 1), positions, last)


def rule(policy: Uneven, batch: int, seen: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the visibility rule says after ``seen`` tokens.

    Returns:
        flags, expires and whether the newest token sees the key; all [L, B, H, seen].
    """
    flags = decisions(policy, batch=batch, seen=seen)
    last, live = _expiry(flags, policy_window=policy.window)
    return np.asarray(flags), np.asarray(last), np.asarray(live)


# The caches


def _spec(config: ModelConfig, policy: Policy, dtype: Any) -> CacheSpec:
    spec = CacheSpec.of(config, policy, dtype)
    if spec.local:
        raise InputError("this benchmark fills caches of models without sliding-window layers only")
    return spec


def _noise(shape: tuple[int, ...], dtype: Any, seed: int) -> Array:
    """Random numbers; for 8-bit pools random codes that are no NaN."""
    key = jax.random.key(seed)
    if jnp.issubdtype(dtype, jnp.floating):
        return jax.random.normal(key, shape, dtype)
    codes = jax.random.randint(key, shape, -100, 100, jnp.int8)
    return codes if dtype == jnp.int8 else jax.lax.bitcast_convert_type(codes, dtype)


def filled_dense(config: ModelConfig, dtype: Any, batch: int, seen: int, slots: int) -> dense.DenseCache:
    """A dense cache after ``seen`` tokens, with room for ``slots``."""
    cache = dense.init(_spec(config, kvs.Dense(), dtype), batch, slots=slots)
    # One layer's noise in all layers: gigabytes of random numbers would take longer than the benchmark.
    k, v = (jnp.broadcast_to(_noise(x.shape[1:], dtype, i)[None], x.shape) for i, x in enumerate((cache.k, cache.v)))
    return dataclasses.replace(cache, k=k, v=v, seen=jnp.full((batch,), seen, jnp.int32))


def filled_paged(
    config: ModelConfig, dtype: Any, policy: Uneven, batch: int, seen: int, end: int, page: int, kv_dtype: Any = None
) -> paged.PagedCache:
    """A paged cache after ``seen`` tokens, with pages for ``end`` tokens.

    Lengths, tables, ``expires`` and ring are those of the rule; pages lie in random order.
    """
    flags, last, live = rule(policy, batch, seen)
    lengths, count = live.sum(-1), -(-live.sum(-1) // page)
    # Heads only grow, so what is needed at the end is needed at most.
    pages = int((-(-rule(policy, batch, end)[2].sum(-1) // page)).sum())
    spec = _spec(config, policy, dtype)
    cache = paged.init(spec, batch, pages=pages, width=-(-end // page), page=page, quantisation=kv_dtype)
    rng = np.random.default_rng(0)
    ids = rng.permutation(pages).astype(np.int32)
    tables = np.full(cache.tables.shape, pages, np.int32)
    expires = np.full((pages, page), NEVER, np.int32)
    ring = np.full(cache.ring.shape, -1, np.int32)
    taken = 0
    for at in np.ndindex(*lengths.shape):
        held = np.flatnonzero(live[at])
        mine = ids[taken : taken + count[at]]
        taken += len(mine)
        tables[at][: len(mine)] = mine
        slot = np.arange(len(held))
        expires[mine[slot // page], slot % page] = last[at][held]
        recent = held >= seen - ring.shape[-1]
        ring[at][held[recent] % ring.shape[-1]] = slot[recent]
    scales = [None if x is None else jnp.full(x.shape, 0.01, x.dtype) for x in (cache.k_scale, cache.v_scale)]
    return dataclasses.replace(
        cache,
        k=_noise(cache.k.shape, cache.k.dtype, 0),
        v=_noise(cache.v.shape, cache.v.dtype, 1),
        k_scale=scales[0],
        v_scale=scales[1],
        expires=jnp.asarray(expires),
        free=jnp.asarray(ids[::-1].copy()),
        free_count=jnp.asarray(pages - taken, jnp.int32),
        tables=jnp.asarray(tables),
        lengths=jnp.asarray(lengths, jnp.int32),
        ring=jnp.asarray(ring),
        seen=jnp.full((batch,), seen, jnp.int32),
        flagged=jnp.asarray(flags.sum(-1), jnp.int32),
    )


def most_sequences(lm: LM, policy: Uneven, tokens: int, page: int, kv_dtype: Any, limit: int) -> int:
    """Sequences of ``tokens`` tokens that a compressed cache of ``limit`` allocated bytes holds, at least 1."""
    spec = _spec(lm.config, policy, lm.params["embed"].dtype)
    pages = np.zeros(0, np.int64)
    while True:
        batch = 2 * len(pages) or 8
        pages = (-(-rule(policy, batch, tokens)[2].sum(-1) // page)).sum((0, 2)).cumsum()

        def size(count: int, pages: np.ndarray = pages) -> int:
            pool = dict(pages=int(pages[count - 1]), width=-(-tokens // page), page=page, quantisation=kv_dtype)
            shapes = jax.eval_shape(lambda: paged.init(spec, count, **pool))
            return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))

        if size(batch) > limit:
            return max(1, next(count for count in range(batch, -1, -1) if count == 0 or size(count) <= limit))


def compressed_in_bytes(
    lm: LM, policy: Uneven, args: argparse.Namespace, limit: int, wanted: int
) -> tuple[Uneven, float] | None:
    """The policy with all heads' shares multiplied by one factor, so that ``limit`` bytes hold ``wanted`` sequences.

    A decision ratio of 8 is less in bytes: the window stays, and pages are whole. None: the window alone takes more.
    """

    def scaled(factor: float) -> Uneven:
        kept = policy.params["kept"] * jnp.float32(factor)
        return dataclasses.replace(policy, params={**policy.params, "kept": kept})

    low, high = 0.0, 1.0
    if most_sequences(lm, scaled(low), args.equal[1], args.page, args.kv_dtype, limit) < wanted:
        return None
    for _ in range(10):
        middle = (low + high) / 2
        enough = most_sequences(lm, scaled(middle), args.equal[1], args.page, args.kv_dtype, limit) >= wanted
        low, high = (middle, high) if enough else (low, middle)
    return scaled(low), low


# Decoding


def _programs() -> int:
    """Programs that the decode loop was compiled to so far."""
    count: int = decode_loop._cache_size()  # type: ignore[attr-defined]
    return count


class Decoder:
    """A cache and the program that decodes on it: what a session does for a burst of tokens."""

    def __init__(self, model: Model, cache: Cache):
        batch = cache.seen.shape[0]
        self._model = with_head(model)
        self._sampler = Sampler(sampling(batch, temperature=0.0), jnp.full((batch, 4), -1, jnp.int32))
        state = State(cache, jnp.ones(batch, jnp.int32), jnp.zeros(batch, jnp.int32), None)
        # Committed to the device, as the parameters are and what the program hands back: else it compiles twice.
        self._state = jax.device_put(state, model.sharding)
        self.compilations = 0

    @property
    def cache(self) -> Cache:
        """As the last burst left it."""
        return self._state.cache

    def burst(self, steps: int) -> float:
        """Decodes ``steps`` tokens per row; the seconds until the host has them."""
        before = _programs()
        start = time.perf_counter()
        state = dataclasses.replace(self._state, left=jnp.full_like(self._state.left, steps))
        emitted, self._state = decode_loop(self._model, self._sampler, state, jnp.asarray(np.int32(steps)))
        np.asarray(emitted)
        seconds = time.perf_counter() - start
        self.compilations += _programs() - before
        return seconds


def in_turn(bursts: dict[str, Callable[[int], float]], steps: int, repeats: int) -> dict[str, np.ndarray]:
    """Seconds of ``repeats`` bursts each, taken in turn so that a noisy machine disturbs all alike."""
    for burst in bursts.values():
        burst(WARM_UP)
    times: dict[str, list[float]] = {name: [] for name in bursts}
    for i in range(repeats):
        for name in sorted(bursts, reverse=bool(i % 2)):
            times[name].append(bursts[name](steps))
    return {name: np.asarray(found) for name, found in times.items()}


def _total(args: argparse.Namespace) -> int:
    """Steps that each cache takes in a row."""
    return int(WARM_UP + args.steps * args.repeats)


def compare(
    lm: LM, policy: Uneven, args: argparse.Namespace, batch: int, context: int, compressed_batch: int | None = None
) -> Figures:
    """One row: dense with ``batch`` sequences against compressed with as many or ``compressed_batch``."""
    other = compressed_batch or batch
    config, dtype, start = lm.config, lm.params["embed"].dtype, context - _total(args)
    full = Decoder(Model(lm.params, kvs.Dense(), config), filled_dense(config, dtype, batch, start, context))
    cache = filled_paged(config, dtype, policy, other, start, context, args.page, args.kv_dtype)
    compressed = Decoder(Model(lm.params, policy, config), cache)
    del cache
    times = in_turn({"dense": full.burst, "compressed": compressed.burst}, args.steps, args.repeats)
    speed = {"dense": batch * args.steps / times["dense"], "compressed": other * args.steps / times["compressed"]}
    reports = {"dense": report(full.cache, dtype), "compressed": report(compressed.cache, dtype)}
    found = reports["compressed"]
    flags, _, live = rule(policy, other, context)
    entry = 2 * config.head_dim * (1 if args.kv_dtype else jnp.dtype(dtype).itemsize)
    checks = {
        "at most one compilation per cache": max(full.compilations, compressed.compilations) <= 1,
        "no entry lost": found.lost == 0 and reports["dense"].lost == 0,
        "live counts are those of the rule": bool((found.live == live.sum(-1)).all()),
        "decisions are those of the policy": bool((np.asarray(compressed.cache.flagged) == flags.sum(-1)).all()),
        "the dense cache has seen the context": bool((reports["dense"].seen == context).all()),
    }
    return {
        "context": context,
        "batch": {"dense": batch, "compressed": other},
        "ratio": float(np.median(speed["compressed"] / speed["dense"])),
        "ratio_range": [
            float((speed["compressed"] / speed["dense"]).min()),
            float((speed["compressed"] / speed["dense"]).max()),
        ],
        "tokens_per_second": {name: float(np.median(values)) for name, values in speed.items()},
        "milliseconds_per_step": {name: 1e3 * float(np.median(x)) / args.steps for name, x in times.items()},
        "used": {name: one.used for name, one in reports.items()},
        "nbytes": {name: one.nbytes for name, one in reports.items()},
        "live_fraction": float(found.live.mean() / context),
        "used_over_live": found.used / (int(found.live.sum()) * entry),
        "cr_nominal": found.cr_nominal,
        "cr_physical": found.cr_physical,
        "checks": checks,
    }


def prefill_peak(lm: LM, policy: Uneven, args: argparse.Namespace) -> Figures:
    """Feeds a long prompt chunk by chunk through a session with reserved capacity; bytes after every chunk."""
    length, chunk = args.prefill, args.chunk
    flags, _, live = rule(policy, 1, length)
    # The mean head at the end, a chunk that may be kept whole, and what page ends waste: enough, whatever is decided.
    capacity = int(live.sum(-1).mean()) + chunk + args.page
    kv_heads = lm.config.layers * lm.config.kv_heads
    full = length * kv_heads * 2 * lm.config.head_dim * lm.params["embed"].dtype.itemsize
    ids = np.random.default_rng(0).integers(0, lm.config.vocab_size, length)
    options: dict[str, Any] = dict(
        page_size=args.page, capacity=capacity, when_full="error", kv_dtype=args.kv_dtype, prefill_chunk=chunk
    )
    used = []
    start = time.perf_counter()
    with lm.with_policy(policy).session(1, **options) as session:
        for begin in range(0, length, chunk):
            session.append(ids[begin : begin + chunk])
            used.append(session.report().used)
        last = session.report()
    seconds = time.perf_counter() - start
    # The newest token is pending: it is stored with the first step of a generation.
    stored = rule(policy, 1, length - 1)
    nominal = 1 / (1 - flags.mean())
    bound = 1 / nominal + (chunk + policy.window + args.page) / length
    return {
        "tokens": length,
        "chunk": chunk,
        "layers": lm.config.layers,
        "cr_nominal": nominal,
        "peak_used": max(used),
        "nbytes": last.nbytes,
        "dense_bytes": full,
        "peak_fraction": max(used) / full,
        "nbytes_fraction": last.nbytes / full,
        "bound": 1.1 * bound,
        "used_by_chunk": used,
        "tokens_per_second": length / seconds,
        "checks": {
            "no entry lost": last.lost == 0,
            "live counts are those of the rule": bool((last.live == stored[2].sum(-1)).all()),
        },
    }


# Hugging Face


class HuggingFace:
    """The PyTorch side: hf_decode.py under another interpreter, which decodes when it is told to."""

    def __init__(self, child: "subprocess.Popen[str]", errors: IO[bytes]):
        self._child, self._errors = child, errors
        hello = self._read()
        self.versions: dict[str, str] = hello["versions"]
        self.variants: list[str] = hello["variants"]

    @classmethod
    @contextlib.contextmanager
    def started(cls, python: str, model: Path, batch: int, start: int, slots: int) -> Iterator[Self]:
        """Starts it, and ends it after use.

        Raises:
            InputError: ``python`` cannot be run.
            RunError: it failed.
        """
        command = [python, str(Path(__file__).with_name("hf_decode.py")), "--model", str(model)]
        command += ["--batch", str(batch), "--start", str(start), "--slots", str(slots)]
        with contextlib.ExitStack() as open_:
            errors = open_.enter_context(tempfile.TemporaryFile())
            try:
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
                )
            except OSError as error:
                raise InputError(f"--hf {python} cannot be run: {error.strerror}") from None
            open_.enter_context(child)  # closes the pipes, which ends it, and waits
            yield cls(child, errors)

    def burst(self, variant: str, steps: int) -> float:
        """Seconds for ``steps`` tokens per row on the cache called ``variant``."""
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # _read says what it died of
            os.write(self._child.stdin.fileno(), f"{variant} {steps}\n".encode())  # leaves nothing in a buffer
        seconds = float(self._read()["seconds"])
        time.sleep(PAUSE)
        return seconds

    def _read(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            self._child.wait()
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip().splitlines()
            raise RunError(f"hf_decode.py ended: {said[-1] if said else 'it said nothing'}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def against_hugging_face(lm: LM, args: argparse.Namespace) -> Figures:
    """Our dense cache against Hugging Face's caches; the fastest of those counts."""
    if lm.source is None:
        raise InputError("--hf needs a model that was loaded from a directory")
    batch, context = args.hf_size
    start = context - _total(args)
    config, dtype = lm.config, lm.params["embed"].dtype
    with HuggingFace.started(args.hf, lm.source, batch, start, context) as other:
        cache = filled_dense(config, dtype, batch, start, context)
        ours = Decoder(Model(lm.params, kvs.Dense(), config), cache)
        del cache
        bursts: dict[str, Callable[[int], float]] = {"ours": ours.burst}
        bursts |= {name: functools.partial(other.burst, name) for name in other.variants}
        times = in_turn(bursts, args.steps, args.repeats)
        ratios = {name: float(np.median(times[name] / times["ours"])) for name in other.variants}
        return {
            "batch": batch,
            "context": context,
            "ratio": min(ratios.values()),
            "ratio_by_cache": ratios,
            "milliseconds_per_step": {name: 1e3 * float(np.median(x)) / args.steps for name, x in times.items()},
            "versions": other.versions,
            "checks": {
                "at most one compilation per cache": ours.compilations <= 1,
                "no entry lost": int(ours.cache.lost) == 0,
            },
        }


# Retention


def measured_retention(lm: LM, length: int, rows: int) -> np.ndarray:
    """Share of the tokens of held-out text that the model's own DMS policy keeps, [L, H]."""
    if not isinstance(lm.policy, DMS):
        raise InputError("--retention measured needs a model with a DMS policy: give a retrofit's directory as --model")
    shift = lm.policy.shift
    kept = np.zeros((lm.config.layers, lm.config.kv_heads))
    for row in held_out_sequences(lm.tokenizer, length, rows).ids:
        evict = np.asarray(kvs.decision_logits(lm, row[None]))[:, 0, :, shift:] > 0
        kept += 1 - evict.mean(-1)
    return kept / rows


def kvzap_retention(lm: LM, policy: KVzap, removed: float, length: int, rows: int) -> tuple[KVzap, np.ndarray]:
    """A surrogate with the threshold that removes a share of held-out text; what it keeps beyond its window."""
    ids = held_out_sequences(lm.tokenizer, length, rows).ids
    found = calibrate(lm.with_policy(policy), ids, cr=1 / (1 - removed)).policy
    kept = np.zeros((lm.config.layers, lm.config.kv_heads))
    for row in ids:
        kept += np.asarray(kvs.kept(lm.with_policy(found), row[None]))[:, 0, :, : -policy.window - 1].mean(-1)
    return found, kept / rows


def scoring_cost(lm: LM, policy: Uneven, args: argparse.Namespace, batch: int, context: int) -> Figures:
    """What making the decisions adds to a decode step: the same step where they are given."""
    config, dtype, start = lm.config, lm.params["embed"].dtype, context - _total(args)
    bursts = {}
    for name, one in (("scored", policy), ("given", policy.without_scores())):
        cache = filled_paged(config, dtype, one, batch, start, context, args.page, args.kv_dtype)
        bursts[name] = Decoder(Model(lm.params, one, config), cache).burst
    times = in_turn(bursts, args.steps, args.repeats)
    return {
        "batch": batch,
        "context": context,
        "ratio": float(np.median(times["scored"] / times["given"])),
        "milliseconds_per_step": {name: 1e3 * float(np.median(x)) / args.steps for name, x in times.items()},
        "checks": {},
    }


def _policy(lm: LM, args: argparse.Namespace) -> tuple[Uneven, np.ndarray]:
    """The policy of the run and the shares [L, H] that it keeps."""
    if args.kvzap:
        surrogate = KVzap.load(args.kvzap, sinks=4, **({} if args.window is None else {"window": args.window}))
        surrogate, kept = kvzap_retention(lm, surrogate, args.removed, args.measure_length, args.measure_rows)
        return Uneven.like(surrogate, kept), kept
    if args.retention == "measured":
        if args.window is not None:
            raise InputError("--window is the retrofit's own with --retention measured: leave it out")
        kept = measured_retention(lm, args.measure_length, args.measure_rows)
        assert isinstance(lm.policy, DMS)
        return Uneven.like(lm.policy, kept), kept
    kept = synthetic_retention(lm.config.layers, lm.config.kv_heads, np.random.default_rng(0))
    dms = DMS.init(lm.config, window=64 if args.window is None else args.window, shift=0)
    return Uneven.like(dms, kept), kept


# What is said


def goals(found: Figures) -> list[Figures]:
    """What the project wants to reach, where this run says something about it."""
    rows: list[Figures] = []

    def at_least(what: str, value: float, least: float, aim: float | None = None) -> None:
        rows.append({"what": what, "value": value, "at_least": least, "aim": aim, "reached": value >= least})

    def at_most(what: str, value: float, most: float) -> None:
        rows.append({"what": what, "value": value, "at_most": most, "reached": value <= most})

    for row in found["rows"]:
        size = (row["batch"]["dense"], row["context"])
        by_size: dict[tuple[int, int], tuple[float, ...]] = {(16, 8192): (2.5, 3.2), (16, 2048): (1.4, 1.8)}
        if found["removed"] == 0.75:
            by_size = {(8, 2048): (1.6,), (8, 6000): (2.2,)}
            if size in by_size:
                bytes_held = row["used"]["compressed"] / row["used"]["dense"]
                at_most(f"used over dense bytes at {size[0]} x {size[1]}", bytes_held, 0.29)
        if size in by_size:
            at_least(f"speed-up at {size[0]} x {size[1]}", row["ratio"], *by_size[size])
        if size[1] >= 4096 and not found["kv_dtype"]:
            at_most(f"used over live bytes at {size[0]} x {size[1]}", row["used_over_live"], 1.15)
    if found.get("equal"):
        at_least("speed-up at equal bytes, decisions as measured", found["equal"]["ratio"], 5.0)
    if found.get("equal_bytes_8x"):
        at_least("speed-up at equal bytes, compressed 8x in bytes", found["equal_bytes_8x"]["ratio"], 5.0)
    if found.get("scoring"):
        at_most("step with scoring over the step without", found["scoring"]["ratio"], 1.03)
    if found.get("prefill"):
        at_most("peak bytes of a prefill over dense", found["prefill"]["peak_fraction"], found["prefill"]["bound"])
    if found.get("hugging_face"):
        at_least("dense over Hugging Face", found["hugging_face"]["ratio"], 1.0)
    return rows


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f}"


HEADER = (
    "dense x context   comp.    speed-up  (min-max)       tokens/s              MB: dense     used   nbytes  "
    "used/live     CR  nominal"
)


def line(row: Figures) -> str:
    """A row of the table."""
    batch, speed, low_high = row["batch"], row["tokens_per_second"], row["ratio_range"]
    size = f"{batch['dense']} x {row['context']}"
    tokens = f"{speed['dense']:.1f} -> {speed['compressed']:.1f}"
    return (
        f"{size:15s} {batch['compressed']:7d} {row['ratio']:10.2f}x  ({low_high[0]:.2f}-{low_high[1]:.2f}) "
        f"{tokens:>20s} {_megabytes(row['used']['dense']):>20s} {_megabytes(row['used']['compressed']):>8s} "
        f"{_megabytes(row['nbytes']['compressed']):>8s} {row['used_over_live']:10.3f} {row['cr_physical']:6.2f} "
        f"{row['cr_nominal']:8.2f}"
    )


def plot(found: Figures) -> Any:
    """Speed-up and bytes of every row, as a figure."""
    from matplotlib.figure import Figure

    rows = [*found["rows"], *(found[key] for key in ("equal", "equal_bytes_8x") if found.get(key))]
    names = []
    for row in rows:
        one, other = row["batch"]["dense"], row["batch"]["compressed"]
        names.append(f"{one if one == other else f'{one}, {other}'} x {row['context']}")
    figure = Figure(figsize=(11, 4.6), dpi=130, layout="constrained")
    title = f"decoding {found['name']}: compressed cache against dense (CR {1 / found['kept_mean']:.1f} nominal)"
    figure.suptitle(title, fontsize=11)
    left, right = figure.subplots(1, 2)
    at = np.arange(len(rows))
    ratio = np.asarray([row["ratio"] for row in rows])
    spread = np.abs(np.asarray([row["ratio_range"] for row in rows]).T - ratio)
    left.bar(at, ratio, color="#0072B2", yerr=spread, capsize=3, ecolor="0.4")
    for x, y in zip(at, ratio, strict=True):
        left.annotate(f"{y:.2f}", (x, y), (3, 2), textcoords="offset points", fontsize=8)
    left.axhline(1, color="0.3", linestyle="--", linewidth=1)
    left.set_ylabel("tokens per second, compressed / dense")
    kinds = (
        ("dense", "used", "dense", "#4D4D4D"),
        ("compressed: used", "used", "compressed", "#0072B2"),
        ("compressed: allocated", "nbytes", "compressed", "#56B4E9"),
    )
    for i, (label, key, which, colour) in enumerate(kinds):
        values = [row[key][which] / 1e6 for row in rows]
        right.bar(at + 0.27 * (i - 1), values, 0.27, color=colour, label=label)
    right.set_yscale("log")
    right.set_ylabel("bytes of the cache (MB)")
    right.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.set_xticks(at, names, rotation=20, ha="right", fontsize=8)
        axes.set_xlabel("sequences x tokens seen (dense, compressed where they differ)")
        axes.grid(True, axis="y", color="0.88", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


# The command


def _size(text: str) -> tuple[int, int]:
    """ "8x2048" -> (8, 2048)."""
    try:
        batch, context = (int(part) for part in text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not BATCHxCONTEXT, such as 8x2048") from None
    return batch, context


def _parser() -> cli.Parser:
    parser = cli.parser("python -m benchmarks.decode", __doc__.partition("Questions")[0].strip())
    parser.add_argument("--model", default="smollm2-135m", help="directory, hub name or smollm2-135m")
    parser.add_argument(
        "--retention",
        default="synthetic",
        choices=("synthetic", "measured"),
        help="share kept by layer and head: as uneven as a trial retrofit's (0.65 of the tokens in one layer, 0.35 in "
        "four, 0.01-0.06 in the rest), or what the model's own DMS policy keeps of held-out text",
    )
    parser.add_argument(
        "--kvzap",
        metavar="DIR",
        help="instead: a KVzap surrogate with the threshold for --removed (its goals are for 0.75 and --batches 8 "
        "--contexts 2048 6000)",
    )
    parser.add_argument("--removed", type=float, default=0.75, help="share of held-out text that it removes")
    parser.add_argument("--measure-length", type=int, default=2048, unit="tokens", help="of that text, per row")
    parser.add_argument("--measure-rows", type=int, default=4, help="rows of that text")
    parser.add_argument("--window", type=int, unit="tokens", help="eviction delay (default: 64, or the retrofit's)")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 16], unit="sequences", help="none: skip")
    parser.add_argument("--contexts", type=int, nargs="*", default=[2048, 8192], unit="tokens", help="none: skip")
    parser.add_argument(
        "--equal", type=_size, default="8x2048", help="dense cache whose bytes both may take; 0x0: skip"
    )
    parser.add_argument("--prefill", type=int, default=8192, unit="tokens", help="of the prompt; 0: skip")
    parser.add_argument("--chunk", type=int, default=512, unit="tokens", help="of the prompt at a time")
    parser.add_argument("--hf", metavar="PYTHON", help="interpreter with torch and transformers to compare with")
    parser.add_argument("--hf-size", type=_size, default="8x2048", help="batch and context of that comparison")
    parser.add_argument("--page", type=int, default=64, unit="tokens", help="slots per page")
    parser.add_argument("--kv-dtype", choices=tuple(QUANTISATIONS), help="8-bit pages (default: the model's dtype)")
    parser.add_argument("--steps", type=int, default=8, help="steps of a burst")
    parser.add_argument("--repeats", type=int, default=7, help="timed bursts of each cache")
    parser.add_argument("--output", default="benchmarks/results", help="directory for decode.json and decode.png")
    return parser


def _check(args: argparse.Namespace, config: ModelConfig) -> None:
    if not 1 <= args.steps <= BURST or args.repeats < 1 or args.page < 1 or args.chunk < 2:
        raise InputError(f"--steps must be 1 to {BURST}, --repeats and --page at least 1, --chunk at least 2")
    sizes = [(batch, context) for batch in args.batches for context in args.contexts]
    sizes += [size for size in (args.equal, args.hf_size if args.hf else (0, 0)) if size != (0, 0)]
    for batch, context in sizes:
        if batch < 1 or not _total(args) < context <= config.max_positions:
            raise InputError(
                f"{batch} x {context} is not possible: at least 1 sequence, and a context from {_total(args) + 1} (the "
                f"steps that are taken) to {config.max_positions} tokens (the model's)"
            )
    if not 0 <= args.prefill <= config.max_positions:
        raise InputError(f"--prefill must be 0 to {config.max_positions} tokens, not {args.prefill}")


def _parts(lm: LM, policy: Uneven, args: argparse.Namespace) -> Iterator[tuple[str, Figures]]:
    """Runs everything that was asked for; yields what was found, part by part, and prints it."""
    if args.batches and args.contexts:
        print(HEADER)
    for context in args.contexts:
        for batch in args.batches:
            row = compare(lm, policy, args, batch, context)
            print(line(row), flush=True)
            yield "rows", row
    if args.equal != (0, 0):
        batch, context = args.equal
        shapes = jax.eval_shape(lambda: filled_dense(lm.config, lm.params["embed"].dtype, batch, 0, context))
        limit = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
        other = most_sequences(lm, policy, context, args.page, args.kv_dtype, limit)
        row = compare(lm, policy, args, batch, context, other)
        print(f"in the same {_megabytes(limit)} MB, {batch} dense sequences against {other} compressed:")
        print(line(row), flush=True)
        yield "equal", row
        tighter = compressed_in_bytes(lm, policy, args, limit, 8 * batch)
        if tighter is None:
            print(f"a window of {policy.window} and pages of {args.page} leave no room for {8 * batch} sequences")
        else:
            row = compare(lm, tighter[0], args, batch, context, 8 * batch) | {"kept_factor": tighter[1]}
            print(f"where heads keep {tighter[1]:.2f} of that, so that the cache is 8 times smaller in bytes:")
            print(line(row), flush=True)
            yield "equal_bytes_8x", row
    if args.kvzap and args.batches and args.contexts:
        row = scoring_cost(lm, policy, args, args.batches[-1], args.contexts[-1])
        print(f"making the decisions: {100 * (row['ratio'] - 1):+.1f} % of a step at {row['batch']} x {row['context']}")
        yield "scoring", row
    if args.prefill:
        row = prefill_peak(lm, policy, args)
        print(
            f"prefill of {row['tokens']} tokens in chunks of {row['chunk']} ({row['layers']} layers): "
            f"{100 * row['peak_fraction']:.1f} % of the dense cache's bytes used at the peak, "
            f"{100 * row['nbytes_fraction']:.1f} % allocated (bound {100 * row['bound']:.1f} %)",
            flush=True,
        )
        yield "prefill", row
    if args.hf:
        row = against_hugging_face(lm, args)
        each = ", ".join(f"{ratio:.2f}x its {name} cache" for name, ratio in row["ratio_by_cache"].items())
        print(f"our dense cache over Hugging Face at {row['batch']} x {row['context']}: {each}", flush=True)
        yield "hugging_face", row


def _run(args: argparse.Namespace) -> int:
    begin = time.perf_counter()
    lm = kvs.load(args.model, dtype="bfloat16")
    _check(args, lm.config)
    policy, kept = _policy(lm, args)
    retention = "kvzap" if args.kvzap else args.retention
    print(
        f"{args.model}, {jnp.dtype(lm.params['embed'].dtype).name} on {jax.devices()[0].device_kind}: keeps "
        f"{100 * kept.mean():.1f} % of the tokens ({retention}), by layer {100 * kept.mean(1).min():.1f} to "
        f"{100 * kept.mean(1).max():.1f} %, window {policy.window}, shift {policy.shift}",
        flush=True,
    )
    found: Figures = {
        "name": Path(args.model).name,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "retention": retention,
        "removed": args.removed if args.kvzap else None,
        "kept": kept.round(4),
        "kept_mean": float(kept.mean()),
        "window": policy.window,
        "shift": policy.shift,
        "page": args.page,
        "kv_dtype": args.kv_dtype,
        "steps": args.steps,
        "repeats": args.repeats,
        "rows": [],
    }
    wrong = []
    for part, row in _parts(lm, policy, args):
        if part == "rows":
            found["rows"].append(row)
        else:
            found[part] = row
        wrong += [f"{part}: {name}" for name, holds in row["checks"].items() if not holds]
    found["goals"] = goals(found)
    for goal in found["goals"]:
        wanted = f"at least {goal['at_least']:g}" if "at_least" in goal else f"at most {goal['at_most']:.3g}"
        aim = f", aim {goal['aim']:g}" if goal.get("aim") else ""
        print(f"{'reached' if goal['reached'] else 'MISSED '}  {goal['what']}: {goal['value']:.3f} ({wanted}{aim})")
    found["seconds"] = time.perf_counter() - begin
    directory = Path(args.output)
    directory.mkdir(parents=True, exist_ok=True)
    print(cli.write_json_atomically(directory / "decode.json", found))
    if found["rows"] or "equal" in found:
        plot(found).savefig(directory / "decode.png")
        print(directory / "decode.png")
    if wrong:
        raise RunError(f"checks failed: {'; '.join(wrong)}")
    missed = sum(not goal["reached"] for goal in found["goals"])
    print(f"counts and bytes are as the rule foretells; goals missed: {missed}; {found['seconds']:.0f} s")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return cli.run(_run, argv, parser=_parser())


if __name__ == "__main__":
    sys.exit(main())

"""What a smaller cache is worth in the serving engine: one pool of given bytes, dense and compressed.

    python -m benchmarks.serving
    python -m benchmarks.serving --check 200 --model tests/data/methods/3_model/adapter
    python -m benchmarks.serving --soak 30 --model tests/data/methods/3_model/adapter

Clients in a closed loop (each sends the next request when its last one has ended) keep two engines busy whose pools
have the same bytes: one keeps everything, one evicts by the model's own DMS policy. Prompts are held-out text of
several kinds. The engines take turns of a minute, so that a noisy machine disturbs both alike; what came before every
client has been answered once is not counted.

A model without a DMS policy gets random prompts and gates as in ``benchmarks.decode``: a fixed share of the tokens of
each head stays, unevenly over layers and heads as a trial retrofit had it, scaled to --cr. What is generated then means
nothing; what is held and computed does.

--check and --soak run nothing of that. --check: random lengths, Poisson arrivals, a pool that is three times too small
for what may run at a time; every stream has to equal the one that the request gives alone, and no page may get lost.
--soak: such a load for minutes, with clients that leave, sessions and deadlines; memory and compiled programs have to
stay as they are.
"""

import argparse
import dataclasses
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvsparse_jax as kvs
from benchmarks.decode import Uneven
from benchmarks.decode_attention import retention
from kvsparse_jax import cli
from kvsparse_jax.engine import Engine, EngineOptions, Piece, Request, SamplingOptions
from kvsparse_jax.engine.runner import programs
from kvsparse_jax.errors import InputError, RunError
from kvsparse_jax.evaluate import held_out_sequences
from kvsparse_jax.lm import LM
from kvsparse_jax.policies import DMS, Dense

Figures = dict[str, Any]

_TEXTS = 24
_KINDS = ("code", "docstrings", "manuals", "readme", "headers", "data")

GREEDY = SamplingOptions(temperature=0.0, eos=False)


class Load(NamedTuple):
    """What is served.

    Attributes:
        policy: of the engine that evicts.
        kept: share of the tokens beyond the window that each head keeps [L, H].
        prompts: token ids [N, T], drawn from at random.
    """

    policy: DMS
    kept: np.ndarray
    prompts: np.ndarray


def load_of(lm: LM, prompt: int, ratio: float, window: int) -> Load:
    """The model's own policy on text, or a fixed share of random tokens."""
    if isinstance(lm.policy, DMS):
        texts = np.asarray(held_out_sequences(lm.tokenizer, prompt, _TEXTS, _KINDS).ids)
        held = np.mean([np.asarray(kvs.kept(lm, row[None])).sum(-1)[:, 0] for row in texts], 0)
        newest = min(prompt, lm.policy.window + 1)
        return Load(lm.policy, np.clip((held - newest) / max(prompt - newest, 1), 0, 1), texts)
    policy, kept = policy_at(lm, ratio, window)
    return Load(policy, kept, np.random.default_rng(0).integers(3, lm.config.vocab_size, (_TEXTS, prompt)))


def policy_at(lm: LM, ratio: float, window: int) -> tuple[Uneven, np.ndarray]:
    """Gates that keep 1 / ratio of the tokens, and the shares [L, H]."""
    kept = retention(lm.config.layers, lm.config.kv_heads, np.random.default_rng(0))
    low, high = 0.0, ratio * lm.config.layers * lm.config.kv_heads
    for _ in range(60):  # no head keeps more than all
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(kept * middle, 1).mean() < 1 / ratio else (low, middle)
    kept = np.minimum(kept * high, 1)
    return Uneven.like(DMS.init(lm.config, window=window, shift=0), kept), kept


class Loop:
    """Clients of one engine, each with one request at a time."""

    def __init__(self, lm: LM, options: EngineOptions, clients: int, prompts: np.ndarray, new: int, seed: int = 0):
        self.engine = lm.engine(options)
        self._rng = np.random.default_rng(seed)
        self._request = lambda: Request(self._rng.choice(prompts).tolist(), new, sampling=GREEDY)
        self.tokens = self.ended = self.decoded = 0
        self.seconds = self.running = self.decoding = 0.0
        self.cr: list[float] = []
        for _ in range(clients):
            self.engine.submit(self._request())

    def turn(self, seconds: float) -> tuple[float, int]:
        """Steps for at least so long; gives the seconds and the tokens generated."""
        began, tokens = time.perf_counter(), self.tokens
        while (now := time.perf_counter()) - began < seconds:
            decoding = not any(one.prefilling for one in self.engine.scheduler.running)
            before = self.tokens
            for piece in self.engine.step():
                self.tokens += len(piece.tokens)
                if piece.reason is not None:
                    if piece.reason != "length":
                        raise RunError(f"a request ended with {piece.reason!r}: the pool is too small for one")
                    assert piece.usage is not None
                    self.ended += 1
                    self.cr.append(piece.usage.cr)
                    self.engine.submit(self._request())
            step = time.perf_counter() - now
            self.running += len(self.engine.scheduler.running) * step
            if decoding and not any(one.prefilling for one in self.engine.scheduler.running):
                self.decoded, self.decoding = self.decoded + self.tokens - before, self.decoding + step
        spent = time.perf_counter() - began
        self.seconds += spent
        return spent, self.tokens - tokens

    def forget(self) -> None:
        """Starts to count."""
        self.tokens = self.ended = self.decoded = 0
        self.seconds = self.running = self.decoding = 0.0
        self.cr.clear()

    def figures(self) -> Figures:
        """Since :meth:`forget`."""
        return {
            "tokens_per_second": self.tokens / self.seconds,
            "decode_tokens_per_second": self.decoded / self.decoding if self.decoding else None,
            "prefill_share": 1 - self.decoding / self.seconds,
            "in_flight": self.running / self.seconds,
            "requests": self.ended,
            "seconds": self.seconds,
            "cr": float(np.mean(self.cr)) if self.cr else None,
            "slots": self.engine.options.slots,
            "pool_bytes": self.engine.runner.pages * self.engine.runner.page_bytes,
            "nbytes": self.engine.runner.nbytes,
            "preemptions": self.engine.metrics.preemptions,
        }


def pages_of_sequence(kept: np.ndarray | None, tokens: int, window: int, page: int, heads: int) -> float:
    """Pages that a sequence is expected to hold; kept [L, H]: shares beyond the window, None: all."""
    if kept is None:
        return heads * -(-tokens // page)
    newest = min(tokens, window + 1)
    return float(np.ceil((newest + kept * (tokens - newest)) / page).sum())


def closed_loop(lm: LM, args: argparse.Namespace) -> Figures:
    """Dense against compressed in pools of the same bytes."""
    policy, kept, prompts = load_of(lm, args.prompt, args.cr, args.window)
    total = args.prompt + args.new
    heads = lm.config.layers * lm.config.kv_heads
    pool = int(args.pool * 2**20)
    one = args.page * (2 * lm.config.head_dim * jnp.dtype(lm.params["embed"].dtype).itemsize + 4)
    loops: dict[str, Loop] = {}
    for name, shares in (("dense", None), ("compressed", kept)):
        fit = pool / one / pages_of_sequence(shares, total, policy.window, args.page, heads)
        if fit < 1:
            raise InputError(f"--pool of {args.pool:g} MiB holds no {name} sequence of {total} tokens")
        # Rows that are never taken are computed all the same: as many as fit, and what younger sequences leave.
        slots = min(args.most, int(1.2 * fit) + 1)
        options = EngineOptions(
            slots=slots,
            pool_bytes=pool,
            page_size=args.page,
            max_tokens=total,
            prefill_chunk=args.chunk,
            burst=args.burst,
            max_waiting=4 * args.most,
            reserve=args.reserve,
        )
        model = lm.with_policy(Dense() if shares is None else policy)
        loops[name] = Loop(model, options, slots + 2, prompts, args.new)
        print(f"{name}: {slots} rows, {loops[name].engine.runner.pages} pages", flush=True)
    with cli.progress(args.rounds, desc="closed loop", unit="rounds") as bar:
        for loop in loops.values():
            while loop.ended < loop.engine.options.slots:
                loop.turn(args.turn)
            loop.forget()
        compiled = programs()
        rounds = []
        for _ in range(args.rounds):
            rounds.append({name: loop.turn(args.turn) for name, loop in loops.items()})
            bar.update()
    found = {name: loop.figures() for name, loop in loops.items()}
    rates = [{name: tokens / seconds for name, (seconds, tokens) in row.items()} for row in rounds]
    ratios = [row["compressed"] / row["dense"] for row in rates if row["dense"]]
    decode = [found[name]["decode_tokens_per_second"] for name in ("compressed", "dense")]
    return {
        **found,
        "decode_ratio": decode[0] / decode[1] if None not in decode and decode[1] else None,
        "ratio": found["compressed"]["tokens_per_second"] / found["dense"]["tokens_per_second"],
        "ratio_of_rounds": [min(ratios), max(ratios)] if ratios else None,
        "in_flight_ratio": found["compressed"]["in_flight"] / found["dense"]["in_flight"],
        "kept_mean": float(kept.mean()),
        "checks": {
            "nothing compiled while it served": programs() == compiled,
            "pools of the same bytes": found["dense"]["pool_bytes"] == found["compressed"]["pool_bytes"],
        },
    }


def overhead(lm: LM, args: argparse.Namespace) -> Figures:
    """Host time of a decode step as a share of the step, where all rows of the batch decode."""
    policy = lm.policy if isinstance(lm.policy, DMS) else policy_at(lm, args.cr, args.window)[0]
    batch, prompt = args.batch, args.overhead_prompt
    new = args.burst * (args.overhead_steps + 2)
    page = args.page * (2 * lm.config.head_dim * jnp.dtype(lm.params["embed"].dtype).itemsize + 4)
    heads = lm.config.layers * lm.config.kv_heads
    options = EngineOptions(
        slots=batch,
        pool_bytes=page * heads * batch * (-(-(prompt + new) // args.page) + 1),
        page_size=args.page,
        max_tokens=prompt + new,
        prefill_chunk=args.chunk,
        burst=args.burst,
    )
    engine = lm.with_policy(policy).engine(options)
    rng = np.random.default_rng(1)
    for _ in range(batch):
        engine.submit(Request(rng.integers(3, lm.config.vocab_size, prompt).tolist(), new, sampling=GREEDY))
    while engine.scheduler.waiting or any(one.prefilling for one in engine.scheduler.running):
        engine.step()
    engine.step()  # compiles and makes the settings of the rows
    metrics = engine.metrics
    metrics.step_seconds = metrics.runner_seconds = 0.0
    steps = metrics.decode_steps
    shares = []
    for _ in range(args.overhead_steps):
        before = metrics.step_seconds, metrics.runner_seconds
        if len(engine.scheduler.running) < batch:
            break
        engine.step()
        shares.append(1 - (metrics.runner_seconds - before[1]) / (metrics.step_seconds - before[0]))
    return {
        "batch": batch,
        "steps": metrics.decode_steps - steps,
        "host_share": 1 - metrics.runner_seconds / metrics.step_seconds,
        "host_share_median": float(np.median(shares)),
        "checks": {"all rows decoded": len(shares) > 0},
    }


def preemption(lm: LM, args: argparse.Namespace) -> Figures:
    """A sequence leaves and comes back: its pages copied to host memory and back, or its prompt taken in again."""
    load = load_of(lm, args.prompt, args.cr, args.window)
    heads = lm.config.layers * lm.config.kv_heads
    page = args.page * (2 * lm.config.head_dim * jnp.dtype(lm.params["embed"].dtype).itemsize + 4)
    options = EngineOptions(
        slots=1,
        pool_bytes=2 * page * heads * (-(-args.prompt // args.page) + 1),
        page_size=args.page,
        max_tokens=args.prompt + 1,
        prefill_chunk=args.chunk,
    )
    found: Figures = {}
    for name, policy in (("dense", Dense()), ("compressed", load.policy)):
        runner = lm.with_policy(policy).engine(options).runner
        copying, again, parcels = [], [], []
        for nth in range(args.swaps + 1):
            row = load.prompts[nth % len(load.prompts)].tolist()
            began = time.perf_counter()
            for start in range(0, len(row), args.chunk):
                runner.prefill(0, row[start : start + args.chunk], None, None)
            middle = time.perf_counter()
            parcel = runner.save(0)
            runner.release([0])
            runner.restore(0, parcel)
            jax.block_until_ready(runner.cache)
            end = time.perf_counter()
            runner.release([0])
            if nth:  # the first compiles
                again.append(middle - began)
                copying.append(end - middle)
                parcels.append(parcel.nbytes)
        found[name] = {
            "seconds_to_recompute": float(np.median(again)),
            "seconds_to_swap": float(np.median(copying)),
            "recompute_over_swap": float(np.median(again) / np.median(copying)),
            "parcel_bytes": float(np.mean(parcels)),
        }
    return found | {"tokens": args.prompt, "times": args.swaps, "checks": {}}


def _own(lm: LM) -> LM:
    """The model's own policy, or gates that flag about half."""
    if not isinstance(lm.policy, Dense):
        return lm
    policy = DMS.init(lm.config, window=8, scale=1.0, offset=0.0)
    params = policy.params | {"proj": jax.random.normal(jax.random.key(5), policy.params["proj"].shape)}
    return lm.with_policy(dataclasses.replace(policy, params=params))


def _small(lm: LM, args: argparse.Namespace, pages_per_head: float, **options: Any) -> Engine:
    """An engine for short sequences."""
    page = 4 * (2 * lm.config.head_dim * jnp.dtype(lm.params["embed"].dtype).itemsize + 4)
    sizes: dict[str, Any] = {"slots": 12, "page_size": 4, "prefill_chunk": 16, "max_tokens": 96, "reserve": 0.0}
    pool = int(page * lm.config.layers * lm.config.kv_heads * pages_per_head)
    return lm.engine(EngineOptions(pool_bytes=pool, **sizes | options))


def _drain(engine: Engine, arrivals: Sequence[tuple[int, Request]]) -> tuple[list[list[int]], list[Piece]]:
    """Runs requests that arrive at a step each, checking the pages at every step; tokens and last pieces in order."""
    waiting, step = list(arrivals), 0
    tokens: dict[int, list[int]] = {}
    last: dict[int, Piece] = {}
    while engine.busy or waiting:
        while waiting and waiting[0][0] <= step:
            tokens[engine.submit(waiting.pop(0)[1])] = []
        for piece in engine.step():
            tokens[piece.request] += piece.tokens
            if piece.reason is not None:
                last[piece.request] = piece
        engine.runner.check()
        step += 1
    return list(tokens.values()), [last[number] for number in tokens]


def check(lm: LM, args: argparse.Namespace) -> Figures:
    """Poisson arrivals against each request alone."""
    lm = _own(lm)
    engine = _small(lm, args, 24)
    rng = np.random.default_rng(args.seed)
    count = args.check
    prompts = [rng.integers(3, lm.config.vocab_size, n).tolist() for n in rng.integers(1, 56, count)]
    news = rng.integers(1, 33, count).tolist()
    arrive = np.cumsum(rng.poisson(0.7, count)).tolist()
    requests = [Request(p, n, sampling=GREEDY) for p, n in zip(prompts, news, strict=True)]
    found, last = _drain(engine, list(zip(arrive, requests, strict=True)))
    alone: list[list[int]] = []
    for start in range(0, count, 20):
        part = slice(start, start + 20)
        out = lm.generate(
            prompts[part], news[part], temperature=0.0, eos=False, capacity=96, page_size=4, prefill_chunk=16
        )
        alone += out.tokens
    wanted = engine.options.slots * float(np.mean([x.usage.pages for x in last if x.usage is not None]))
    wrong = [i for i, (one, other) in enumerate(zip(found, alone, strict=True)) if one != other]
    return {
        "requests": count,
        "preemptions": engine.metrics.preemptions,
        "pages_wanted_over_pool": wanted / engine.runner.pages,
        "wrong": wrong,
        "checks": {
            "every request was answered in full": [x.reason for x in last] == ["length"] * count,
            "every stream is as alone": not wrong,
            "the pool was three times too small": wanted >= 3 * engine.runner.pages,
            "the pool is empty at the end": engine.runner.free == engine.runner.pages,
        },
    }


def _resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _visitors(lm: LM, rng: np.random.Generator) -> Iterator[Request]:
    """Requests of all kinds, for ever."""
    for i in itertools.count():
        length, new = int(rng.integers(1, 40)), int(rng.integers(1, 20))
        kind = rng.integers(5)
        yield Request(
            rng.integers(3, lm.config.vocab_size, length).tolist(),
            new,
            n=3 if kind == 0 else 1,
            sampling=SamplingOptions(
                temperature=float(kind == 1),
                repetition_penalty=1.2 if kind == 2 else 1.0,
                seed=i,
                eos=False,
                logprobs=2 if kind == 3 else None,
            ),
            priority=int(rng.integers(3)),
            timeout=0.05 if rng.random() < 0.1 else None,
            prompt_logprobs=1 if kind == 3 else None,
            session=f"s{i}" if kind == 4 else None,
        )


def soak(lm: LM, args: argparse.Namespace) -> Figures:
    """A load of all kinds for minutes; samples of what must not grow."""
    lm = _own(lm)
    engine = _small(lm, args, 24, session_bytes=1 << 22, max_waiting=64)
    rng = np.random.default_rng(args.seed)
    visitors = _visitors(lm, rng)
    for _ in range(100):  # every kind has come and is compiled before anything is measured
        engine.submit(next(visitors))
        while len(engine.scheduler.waiting) > 8:
            engine.step()
    began, samples, open_ = time.monotonic(), [], []
    length = 60 * args.soak
    with cli.progress(100, desc="soak", unit="%") as bar:
        while (spent := time.monotonic() - began) < length:
            if len(engine.scheduler.waiting) < 24:
                open_.append(engine.submit(next(visitors)))
            if rng.random() < 0.1 and open_:
                engine.cancel(open_.pop(int(rng.integers(len(open_)))))
            del open_[:-32]
            engine.step()
            share = int(100 * spent / length)
            if share > bar.done:
                engine.runner.check()
                samples.append((spent, _resident(), programs(), sum(x.nbytes for x in jax.live_arrays())))
                bar.update(share - bar.done)
    while engine.busy:
        engine.step()
    # The first fifth warms up: every kind of request has come, sessions have filled their share of memory.
    later = np.asarray(samples[len(samples) // 5 :], np.float64)
    third = max(len(later) // 3, 1)
    growth = [float(np.median(later[-third:, i]) / np.median(later[:third, i])) for i in (1, 3)]
    return {
        "minutes": args.soak,
        "requests": engine.metrics.requests,
        "finished": engine.metrics.finished,
        "preemptions": engine.metrics.preemptions,
        "resident_growth": growth[0],
        "array_growth": growth[1],
        "programs": [int(later[0, 2]), int(later[-1, 2])],
        "samples": samples,
        "checks": {
            "memory of the process is flat within 5 %": growth[0] < 1.05,
            "memory of arrays is flat within 5 %": growth[1] < 1.05,
            "no program was compiled later": later[0, 2] == later[-1, 2],
            "the pool is empty at the end": engine.runner.free == engine.runner.pages,
        },
    }


# What is said


def goals(found: Figures) -> list[Figures]:
    """What the project wants to reach, where this run says something about it."""
    rows = []
    if "loop" in found:
        for what, key, least in (
            ("tokens per second over dense, same bytes", "ratio", 4.0),
            ("sequences in flight over dense, same bytes", "in_flight_ratio", 5.0),
        ):
            value = found["loop"][key]
            rows.append({"what": what, "value": value, "at_least": least, "reached": value >= least})
    if "overhead" in found:
        value = found["overhead"]["host_share"]
        what = f"host share of a decode step at batch {found['overhead']['batch']}"
        rows.append({"what": what, "value": value, "at_most": 0.1, "reached": value <= 0.1})
    return rows


def table(loop: Figures) -> str:
    """Markdown."""
    lines = [
        "| cache | tokens/s over dense | of steps that only decode | time in steps with prefill | in flight | rows "
        "| requests ended | CR measured | preempted |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    base = loop["dense"]["tokens_per_second"]
    decode = {"dense": "1.00" if loop["decode_ratio"] else "-", "compressed": "-"}
    if loop["decode_ratio"]:
        decode["compressed"] = f"{loop['decode_ratio']:.2f}"
    for name in ("dense", "compressed"):
        row = loop[name]
        cr = "-" if row["cr"] is None else f"{row['cr']:.2f}"
        lines.append(
            f"| {name} | {row['tokens_per_second'] / base:.2f} | {decode[name]} | {100 * row['prefill_share']:.0f} % "
            f"| {row['in_flight']:.1f} | {row['slots']} | {row['requests']} | {cr} | {row['preemptions']} |"
        )
    return "\n".join(lines)


def plot(found: Figures) -> Any:
    """Speed and sequences in flight, dense and compressed."""
    from matplotlib.figure import Figure

    loop = found["loop"]
    figure = Figure(figsize=(8, 3.6), dpi=130, layout="constrained")
    figure.suptitle(
        f"serving {found['name']}: {found['prompt']} + {found['new']} tokens, one pool of {found['pool_mib']:g} MiB",
        fontsize=11,
    )
    for axes, (key, label) in zip(
        figure.subplots(1, 2),
        (("tokens_per_second", "generated tokens per second, over dense"), ("in_flight", "sequences in flight")),
        strict=True,
    ):
        values = [loop[name][key] for name in ("dense", "compressed")]
        if key == "tokens_per_second":
            values = [value / values[0] for value in values]
        bars = axes.bar(["dense", "compressed"], values, color=["#4D4D4D", "#0072B2"], width=0.6)
        axes.bar_label(bars, fmt="%.2f", fontsize=9)
        axes.set_ylabel(label)
        axes.grid(True, axis="y", color="0.88", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


# The command


def _parser() -> cli.Parser:
    p = cli.parser("python -m benchmarks.serving", __doc__.partition("--check and --soak")[0].strip())
    p.add_argument("--model", default="smollm2-135m-dms-8x", help="directory or name")
    p.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: bfloat16; float32 with --check, --soak")
    p.add_argument("--check", type=int, metavar="COUNT", help="instead: so many requests against each alone")
    p.add_argument("--soak", type=float, metavar="MINUTES", help="instead: a load of all kinds for so long")
    p.add_argument("--seed", type=int, default=0, help="of --check and --soak")
    p.add_argument("--cr", type=float, default=8.0, help="of a model without a DMS policy")
    p.add_argument("--window", type=int, default=64, unit="tokens", help="of a model without a DMS policy")
    p.add_argument("--pool", type=float, default=110.0, unit="MiB", help="of each engine's pool of pages")
    p.add_argument("--prompt", type=int, default=2048, unit="tokens", help="of a request")
    p.add_argument("--new", type=int, default=256, unit="tokens", help="generated for it")
    p.add_argument("--page", type=int, default=64, unit="tokens", help="slots per page")
    p.add_argument("--chunk", type=int, default=256, unit="tokens", help="of prompts that a step takes in")
    p.add_argument("--burst", type=int, default=8, unit="steps", help="of decoding at a time")
    p.add_argument("--reserve", type=float, default=0.5, help="see EngineOptions")
    p.add_argument("--most", type=int, default=64, unit="rows", help="of an engine at most")
    p.add_argument("--rounds", type=int, default=6, help="turns of each engine that count; 0: no closed loop")
    p.add_argument("--turn", type=float, default=60.0, unit="s", help="of an engine before the other")
    p.add_argument("--batch", type=int, default=32, unit="rows", help="of the measurement of the host's share; 0: none")
    p.add_argument("--overhead-prompt", type=int, default=128, unit="tokens", help="of its prompts")
    p.add_argument("--overhead-steps", type=int, default=10, help="bursts that it takes")
    p.add_argument("--swaps", type=int, default=5, help="sequences that leave and come back; 0: none")
    p.add_argument("--output", default="benchmarks/results", help="directory for serving.json and serving.png")
    return p


def _run(args: argparse.Namespace) -> int:
    begin = time.perf_counter()
    alone = args.check is not None or args.soak is not None
    if args.check is not None and args.check < 1:
        raise InputError(f"--check must be at least 1 request, not {args.check}")
    if args.soak is not None and not args.soak > 0:
        raise InputError(f"--soak must be above 0 minutes, not {args.soak:g}")
    if not args.cr >= 1 or not args.turn > 0 or min(args.prompt, args.new, args.page, args.most) < 1:
        raise InputError("--cr must be at least 1, --turn above 0, --prompt, --new, --page and --most at least 1")
    if min(args.rounds, args.batch, args.swaps) < 0 or min(args.overhead_prompt, args.overhead_steps) < 1:
        raise InputError(
            "--rounds, --batch and --swaps must be at least 0, --overhead-prompt and --overhead-steps at least 1"
        )
    lm = kvs.load(args.model, dtype=args.dtype or ("float32" if alone else "bfloat16"))
    if args.prompt + args.new > lm.config.max_positions and not alone:
        raise InputError(f"{args.prompt} + {args.new} tokens are more than the model's {lm.config.max_positions}")
    found: Figures = {
        "name": Path(args.model).name,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "gates": "the model's own"
        if isinstance(lm.policy, DMS)
        else "a fixed share of each head's tokens, not trained",
        **{
            name: getattr(args, name) for name in ("cr", "window", "prompt", "new", "page", "chunk", "burst", "reserve")
        },
        "pool_mib": args.pool,
    }
    if args.check is not None:
        found["check"] = check(lm, args)
        c = found["check"]
        print(f"{c['requests']} requests, {c['preemptions']} preemptions, {len(c['wrong'])} wrong")
        print(f"what may run wants {c['pages_wanted_over_pool']:.1f} pools")
    if args.soak is not None:
        found["soak"] = soak(lm, args)
        s = found["soak"]
        print(f"{s['requests']} requests ({s['finished']}), {s['preemptions']} preemptions in {s['minutes']:g} minutes")
        print(f"memory: process {s['resident_growth']:.3f}x, arrays {s['array_growth']:.3f}x; programs {s['programs']}")
    if not alone and args.rounds:
        found["loop"] = closed_loop(lm, args)
        print(table(found["loop"]))
    if not alone and args.batch:
        found["overhead"] = overhead(lm, args)
    if not alone and args.swaps:
        found["preemption"] = preemption(lm, args)
        for name in ("dense", "compressed"):
            p = found["preemption"][name]
            print(
                f"{name}: taking {args.prompt} tokens in again takes {p['recompute_over_swap']:.0f} times as long as "
                f"copying {p['parcel_bytes'] / 2**20:.1f} MiB"
            )
    found["goals"] = goals(found)
    for goal in found["goals"]:
        wanted = f"at least {goal['at_least']:g}" if "at_least" in goal else f"at most {goal['at_most']:g}"
        print(f"{'reached' if goal['reached'] else 'MISSED '}  {goal['what']}: {goal['value']:.3f} ({wanted})")
    found["seconds"] = time.perf_counter() - begin
    directory = Path(args.output)
    directory.mkdir(parents=True, exist_ok=True)
    # A check or a soak does not write over the measurement.
    stem = "serving_check" if args.check is not None else "serving_soak" if args.soak is not None else "serving"
    print(cli.write_json_atomically(directory / f"{stem}.json", found))
    if "loop" in found:
        plot(found).savefig(directory / "serving.png")
        print(directory / "serving.png")
    parts = ("check", "soak", "loop", "overhead", "preemption")
    wrong = [
        f"{part}: {name}"
        for part in parts
        if part in found
        for name, holds in found[part]["checks"].items()
        if not holds
    ]
    if wrong:
        raise RunError(f"checks failed: {'; '.join(wrong)}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return cli.run(_run, argv, parser=_parser())


if __name__ == "__main__":
    sys.exit(main())

"""What the GPU kernels do on a GPU: first whether they are right, then how fast they are. One command, under 5 minutes.

    python -m benchmarks.gpu --output results

1. Every kernel against the float32 reference on fresh random inputs, NaN in all memory that is not in use, run twice.
2. Bandwidth of a copy, and of decoding on uneven heads: live bytes over time, as a share of the copy's.
3. Training attention: TFLOP/s forward and with backward, beside ``jax.nn.dot_product_attention`` (cuDNN, XLA); prefill
   with 1 of 8 tokens kept against dense.
4. A whole decode step in the shape of Qwen3-8B with random weights: dense against compressed in equally many bytes.

A part that fails is reported with its reason and the others go on; so is one for which no time is left. On a machine
without a GPU ``--tiny`` runs all of it in a minute, with what serves there, to show that the program works.
"""

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

import kvsparse_jax as kvs
from benchmarks import decode
from benchmarks.decode_attention import retention
from kernels import delayed_attention
from kernels.partial import normalise
from kernels.ragged_decode.api import ragged_attention
from kernels.shapes import MODELS, OTHER_DIMS, ModelShape
from kvsparse_jax import cli
from kvsparse_jax.lm import LM
from kvsparse_jax.models.decoder import init_params
from kvsparse_jax.models.families import read_config

TOLERANCE = 1e-2
"""Largest error of a kernel over the largest number of the reference's result, for bfloat16 inputs."""

Figures = dict[str, Any]


def seconds(run: Callable[..., Any], *args: Any, least: float = 0.05, rounds: int = 3) -> float:
    """Best of a few rounds, each of as many calls as take ``least`` seconds; the first call, which compiles, apart."""
    jax.block_until_ready(run(*args))
    start = time.perf_counter()
    jax.block_until_ready(run(*args))
    calls = max(1, int(least / max(time.perf_counter() - start, 1e-6)))
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            out = run(*args)
        jax.block_until_ready(out)
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def error(found: Any, wanted: Any) -> float:
    """Largest difference over the largest number wanted, of arrays or tuples of them; inf where something is NaN."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        one = float(jnp.abs(a - b).max() / jnp.maximum(jnp.abs(b).max(), 1e-3))
        worst = max(worst, one if np.isfinite(one) else float("inf"))
    return worst


# Problems


SPARE = 2
"""Pages, and entries of each page table, that nobody uses."""


def pages_of(lengths: np.ndarray, page: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Pages in random order for heads of the given lengths [B, H].

    Returns:
        Tables [B, H, width], whose unused entries name no page or one of another head, and which slots [P, page] are
        in use.
    """
    count = -(-lengths // page)
    pages, width = int(count.sum()) + SPARE, int(count.max()) + SPARE
    ids = rng.permutation(pages)
    tables = rng.choice([-3, pages + 9, 0], (*lengths.shape, width)).astype(np.int32)
    used = np.zeros((pages, page), bool)
    start = 0
    for at in np.ndindex(*lengths.shape):
        mine = ids[start : start + count[at]]
        start += len(mine)
        tables[at][: len(mine)] = mine
        used[mine] = np.arange(len(mine) * page).reshape(-1, page) < lengths[at]
    return tables, used


def problem(
    lengths: Any,
    group: int,
    dim: int,
    queries: int = 1,
    *,
    code: DTypeLike | None = None,
    masked: bool = False,
    page: int = 64,
    latent: bool = False,
    seed: int = 0,
) -> dict[str, Array]:
    """Arguments of :func:`kernels.ragged_decode.api.ragged_attention` but for ``scale``, by name.

    Everything that is not in use is poisoned.

    Args:
        lengths: [B, H] entries per head.
        group: query heads per KV head.
        dim: channels.
        queries: tokens per sequence.
        code: int8 or float8_e4m3fn (as uint8) for pages of 8 bits with scales; None: bfloat16.
        masked: with ``expires`` and ``q_positions``.
        page: slots per page.
        latent: the keys are the values.
        seed: of the random numbers.
    """
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths, np.int32)
    tables, used = pages_of(lengths, page, rng)
    pages = len(used)
    k, v = rng.normal(size=(2, pages, page, dim)) * (1 if code is None else 40)
    given = {}
    if code is not None:
        factors = np.where(used, rng.uniform(0.01, 0.03, (2, pages, page)), np.nan)
        given["k_scale"], given["v_scale"] = (jnp.asarray(x, jnp.float32) for x in factors)
    unused = jnp.asarray(~used)[..., None]
    dtype = jnp.bfloat16 if code is None else jnp.dtype(code)
    k, v = (jnp.asarray(x, jnp.float32).astype(dtype) for x in (k, v))
    if dtype == jnp.int8:
        k, v = (jnp.where(unused, jnp.int8(120), x) for x in (k, v))  # int8 has no NaN: 3 standard deviations
    elif dtype == jnp.bfloat16:
        k, v = (jnp.where(unused, jnp.bfloat16(jnp.nan), x) for x in (k, v))
    else:
        k, v = (jnp.where(unused, jnp.uint8(0x7F), lax.bitcast_convert_type(x, jnp.uint8)) for x in (k, v))
    if masked:
        given["expires"] = jnp.asarray(rng.integers(0, 50, (pages, page)), jnp.int32)
        given["q_positions"] = jnp.asarray(rng.integers(0, 50, (len(lengths), queries)), jnp.int32)
    return {
        "q": jax.random.normal(
            jax.random.key(seed), (len(lengths), lengths.shape[1] * group, queries, dim), jnp.bfloat16
        ),
        "k": k.swapaxes(1, 2),
        "v": v[..., :0] if latent else v,
        "tables": jnp.asarray(tables),
        "lengths": jnp.asarray(lengths),
        **given,
    }


# Are they right?


@dataclass(frozen=True)
class Case:
    """A problem that a kernel and the reference solve.

    Attributes:
        name: of the row.
        given: from a seed.
        run: of an implementation and what is given.
    """

    name: str
    given: Callable[[int], Any]
    run: Callable[[str | None, Any], Any]

    def compiled(self, implementation: str | None) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        """The programs of the kernel and of the reference."""
        kernel, reference = (
            jax.jit(functools.partial(self.run, name)).lower(self.given(0)).compile()
            for name in (implementation, "reference")
        )
        return kernel, reference


def agreement(cases: Sequence[Case], implementation: str | None) -> Iterator[tuple[str, Figures]]:
    """Each case on two fresh inputs, and each twice. Compiled side by side: that takes nearly all of the time."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = [pool.submit(case.compiled, implementation) for case in cases]
        for case, program in zip(cases, programs, strict=True):
            kernel, reference = program.result()
            errors, same = [], True
            for _ in range(2):
                given = case.given(time.time_ns() % 2**31)
                found, again = (jax.tree.leaves(kernel(given)) for _ in range(2))
                errors.append(error(found, jax.tree.leaves(reference(given))))
                same &= all(bool((a == b).all()) for a, b in zip(found, again, strict=True))
            yield case.name, {"error": max(errors), "right": max(errors) < TOLERANCE, "repeats": same}


def decode_cases(args: argparse.Namespace) -> list[Case]:
    """Ragged decode: head dimensions, groups, tokens, types; lengths about the ends of pages, and empty heads."""
    lengths = [[0, 1, 63, 64], [65, 700, 0, 2048]] if not args.tiny else [[0, 1], [63, 65]]
    problems: dict[str, Figures] = {}
    for dim in (64, 96, 128, 192, 256) if not args.tiny else (64,):
        for name, code in (("bfloat16", None), ("int8", jnp.int8), ("float8", jnp.float8_e4m3fn)):
            problems[f"D{dim} {name}"] = dict(group=4, dim=dim, code=code)
    for group, queries in ((1, 1), (7, 1), (16, 1), (3, 4), (16, 16)) if not args.tiny else ():
        problems[f"group {group}, {queries} tokens"] = dict(group=group, dim=128, queries=queries, masked=queries > 1)
    problems["latent 576"] = dict(group=16, dim=576, latent=True)

    def run(implementation: str | None, given: Any) -> Any:
        part = ragged_attention(**given, scale=0.1, implementation=implementation)
        some = part.weight > 0
        return normalise(part), jnp.where(some, part.top + jnp.log(jnp.where(some, part.weight, 1)), 0)

    return [
        Case(f"decode, {name}", lambda seed, one=one: problem(lengths, **one, seed=seed), run)  # type: ignore[misc]
        for name, one in problems.items()
    ]


def attention_cases(args: argparse.Namespace) -> list[Case]:
    """Training attention, result and gradients: head dimensions; soft, hard, no gate; segments, windows, groups."""
    length = 400 if not args.tiny else 70
    long = 2000 if not args.tiny else 200

    def given(dim: int, group: int, length: int, seed: int) -> Any:
        keys = jax.random.split(jax.random.key(seed), 5)
        q, g = (jax.random.normal(k, (1, 2 * group, length, dim), jnp.bfloat16) for k in keys[:2])
        k, v = (jax.random.normal(k, (1, 2, length, dim), jnp.bfloat16) for k in keys[2:4])
        return q, k, v, 3 * jax.random.normal(keys[4], (1, 2, length), jnp.float32), g

    def run(mode: str, packed: bool, local: int | None, implementation: str | None, given: Any) -> Any:
        length, dim = given[0].shape[2:]
        segments = (jnp.arange(length, dtype=jnp.int32) // (2 * length // 3))[None] if packed else None
        rest: Figures = dict(window=32, scale=dim**-0.5, segment_ids=segments, local_window=local, hard=mode == "hard")

        def attend(q: Array, k: Array, v: Array, gate: Array) -> Array:
            gates = None if mode == "plain" else gate
            return delayed_attention(q, k, v, gates, **rest, implementation=implementation)

        out, back = jax.vjp(attend, *given[:4])
        return out, back(given[4])[: 4 if mode == "soft" else 3]

    def case(dim: int, mode: str, group: int = 2, length: int = length, packed: bool = True, local: Any = None) -> Case:
        return Case(
            f"attention D{dim} {mode}, group {group}, {length} tokens{', packed' if packed else ''}"
            + (f", local window {local}" if local else ""),
            functools.partial(given, dim, group, length),
            functools.partial(run, mode, packed, local),
        )

    every = [
        case(dim, mode) for dim in ((64, 96, 128, 192, 256) if not args.tiny else (64,)) for mode in ("soft", "hard")
    ]
    return [
        *every,
        case(128, "plain", group=1, packed=False),
        case(128, "soft", group=4, length=long, packed=False),
        case(64, "soft", group=4, length=long, local=long // 3),
    ]


# How fast are they?


def copied(args: argparse.Namespace) -> float:
    """Bytes per second, read and written, of adding 1 to a large array."""
    x = jnp.zeros((2**29 if not args.tiny else 2**20,), jnp.bfloat16)
    rounds = 8
    run = jax.jit(lambda x: lax.fori_loop(0, rounds, lambda _, x: x + jnp.bfloat16(1), x))
    return 2 * x.nbytes * rounds / seconds(run, x)


def decode_bandwidth(args: argparse.Namespace, bandwidth: float) -> Iterator[tuple[str, Figures]]:
    """Live bytes over time, at lengths that differ as after a retrofit: one head in eight is ten times longer."""
    shapes: dict[str, ModelShape] = {**MODELS, **OTHER_DIMS}
    names = ("qwen3-8b", "llama-3.2-1b", "gemma-3-12b", "phi-3-mini") if not args.tiny else ("smollm2-135m",)
    batch, mean, inner = (32, 1500, 20) if not args.tiny else (2, 100, 2)
    for name in names:
        shape = shapes[name]
        for code, dtype in (("bfloat16", jnp.bfloat16), ("int8", jnp.int8)):
            rng = np.random.default_rng(0)
            lengths = rng.exponential(mean / 2, (batch, shape.kv_heads)).astype(np.int32) + 1
            lengths.flat[::8] *= 10
            tables, used = pages_of(lengths, 64, rng)
            k, v = (
                jax.random.randint(jax.random.key(i), size, -100, 100, jnp.int8).astype(dtype)
                for i, size in enumerate(((len(used), shape.head_dim, 64), (len(used), 64, shape.head_dim)))
            )
            given = {"k": k, "v": v, "tables": jnp.asarray(tables), "lengths": jnp.asarray(lengths)}
            if dtype == jnp.int8:
                given |= dict.fromkeys(("k_scale", "v_scale"), jnp.full(used.shape, 0.01, jnp.float32))

            def step(q: Array, given: Figures) -> Array:
                part = ragged_attention(q, **given, scale=0.001, implementation=args.implementation)
                # The next call waits for this one.
                return q + (0 * normalise(part)).astype(q.dtype)

            q = jnp.ones((batch, shape.heads, 1, shape.head_dim), jnp.bfloat16)
            many = jax.jit(lambda q, given: lax.fori_loop(0, inner, lambda _, q: step(q, given), q))
            time_of_one = seconds(many, q, given) / inner
            live = int(lengths.sum())
            size = live * (2 * shape.head_dim * k.dtype.itemsize + (8 if dtype == jnp.int8 else 0))
            yield (
                f"decode {name} {code}",
                {
                    "microseconds": 1e6 * time_of_one,
                    "live_bytes": size,
                    "longest_over_mean": float(lengths.max() / lengths.mean()),
                    "bytes_per_second": size / time_of_one,
                    "of_copy": size / time_of_one / bandwidth,
                },
            )


def training_attention(args: argparse.Namespace) -> Iterator[tuple[str, Figures]]:
    """TFLOP/s of causal attention in the shape of Qwen3-8B, with gates that evict nothing and have a gradient."""
    heads, kv_heads, dim = (32, 8, 128) if not args.tiny else (2, 1, 64)
    for length in (4096, 8192, 16384, 32768) if not args.tiny else (128,):
        keys = jax.random.split(jax.random.key(0), 3)
        q = jax.random.normal(keys[0], (1, heads, length, dim), jnp.bfloat16)
        k, v = (jax.random.normal(key, (1, kv_heads, length, dim), jnp.bfloat16) for key in keys[1:])
        gate = jnp.full((1, kv_heads, length), -20.0, jnp.float32)

        def ours(q: Array, k: Array, v: Array, gate: Array) -> Array:
            rest: Figures = dict(window=256, scale=dim**-0.5, implementation=args.implementation)
            return delayed_attention(q, k, v, gate, **rest)

        def theirs(implementation: Any) -> Callable[..., Array]:
            def rival(q: Array, k: Array, v: Array) -> Array:
                q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
                out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
                return out.swapaxes(1, 2)

            return rival

        rivals: dict[str, Callable[..., Array]] = {"ours": ours}
        if jax.default_backend() == "gpu":
            rivals["cudnn"] = theirs("cudnn")
        if length <= 4096:
            rivals["xla"] = theirs("xla")
        # Two products forward, five backward, over half of the square; what a kernel computes twice is not counted.
        flops = 2 * length**2 * dim * heads
        found: Figures = {}
        for name, attend in rivals.items():
            given = (q, k, v, gate) if name == "ours" else (q, k, v)

            def loss(*given: Array, attend: Callable[..., Array] = attend) -> Array:
                return attend(*given).astype(jnp.float32).sum()

            forward = seconds(jax.jit(attend), *given)
            both = seconds(jax.jit(jax.grad(loss, tuple(range(len(given))))), *given)
            found[name] = {
                "forward": flops / forward / 1e12,
                "backward": 2.5 * flops / max(both - forward, 1e-9) / 1e12,
                "forward_backward": 3.5 * flops / both / 1e12,
            }
        for name in rivals.keys() - {"ours"}:
            for kind in ("forward", "backward", "forward_backward"):
                found[f"{kind}_over_{name}"] = found["ours"][kind] / found[name][kind]
        yield f"attention T {length} TFLOP/s", found


def prefill(args: argparse.Namespace) -> Iterator[tuple[str, Figures]]:
    """Hard decisions that keep 1 of 8 tokens, against the same attention without any."""
    heads, kv_heads, dim, length = (32, 8, 128, 32768) if not args.tiny else (2, 1, 64, 256)
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (1, heads, length, dim), jnp.bfloat16)
    k, v = (jax.random.normal(key, (1, kv_heads, length, dim), jnp.bfloat16) for key in keys[1:3])
    gate = jnp.where(jax.random.uniform(keys[3], (1, kv_heads, length)) < 1 / 8, -1.0, 1.0)
    rest: Figures = dict(window=256 if not args.tiny else 16, scale=dim**-0.5, implementation=args.implementation)
    hard = seconds(jax.jit(lambda *given: delayed_attention(*given, hard=True, **rest)), q, k, v, gate)
    dense = seconds(jax.jit(lambda *given: delayed_attention(*given, **rest)), q, k, v)
    yield f"prefill T {length}, 1 of 8 kept", {"milliseconds": 1e3 * hard, "faster_than_dense": dense / hard}


def whole_step(args: argparse.Namespace) -> Iterator[tuple[str, Figures]]:
    """Tokens per second of a model in the shape of Qwen3-8B: dense against compressed in no more bytes."""
    tiny = args.tiny
    config = read_config(
        {
            "model_type": "qwen3",
            "vocab_size": 151936 if not tiny else 512,
            "hidden_size": 4096 if not tiny else 64,
            "intermediate_size": 12288 if not tiny else 128,
            "num_hidden_layers": 36 if not tiny else 5,
            "num_attention_heads": 32 if not tiny else 4,
            "num_key_value_heads": 8 if not tiny else 2,
            "head_dim": 128 if not tiny else 16,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "attention_bias": False,
        }
    )
    params = jax.jit(lambda key: init_params(config, key, jnp.bfloat16))(jax.random.key(0))
    lm = LM(config, params)
    rng = np.random.default_rng(0)
    policy = decode.Uneven.like(
        kvs.DMS.init(config, window=256 if not tiny else 8), retention(config.layers, config.kv_heads, rng)
    )
    batch, context = (16, 4096) if not tiny else (2, 128)
    options = argparse.Namespace(steps=8, repeats=3, page=64 if not tiny else 8, kv_dtype=None, equal=(batch, context))
    entry = 4 * config.head_dim * config.layers * config.kv_heads
    most = decode.most_sequences(lm, policy, context, options.page, None, batch * context * entry)
    yield (
        f"decode step, {batch} against {most} x {context}, equal bytes",
        decode.compare(lm, policy, options, batch, context, most),
    )


def _parser() -> cli.Parser:
    parser = cli.parser("python -m benchmarks.gpu", __doc__.partition("1. Every")[0].strip())
    parser.add_argument("--implementation", help="of both attentions (default: what serves this device best)")
    parser.add_argument("--seconds", type=int, default=270, unit="seconds", help="after which no new part begins")
    parser.add_argument("--tiny", action="store_true", help="tiny problems, to try the program without a GPU")
    parser.add_argument("--output", default="benchmarks/results", help="directory for gpu.json")
    return parser


def _run(args: argparse.Namespace) -> int:
    begin = time.perf_counter()
    device = jax.devices()[0]
    found: Figures = {"jax": jax.__version__, "device": device.device_kind, "tiny": args.tiny}
    found["bandwidth_of_a_copy"] = copied(args)
    print(
        f"{device.device_kind}, jax {jax.__version__}: copies {found['bandwidth_of_a_copy'] / 1e9:.0f} GB/s", flush=True
    )
    results: Figures = {}
    found["results"] = results
    parts: dict[str, Callable[[], Iterator[tuple[str, Figures]]]] = {
        "decode correctness": lambda: agreement(decode_cases(args), args.implementation),
        "attention correctness": lambda: agreement(attention_cases(args), args.implementation),
        "decode bandwidth": lambda: decode_bandwidth(args, found["bandwidth_of_a_copy"]),
        "prefill": lambda: prefill(args),
        "training attention": lambda: training_attention(args),
        "decode step": lambda: whole_step(args),
    }
    for part, run in parts.items():
        try:
            for name, row in run():
                results[name] = row
                print(f"{time.perf_counter() - begin:5.0f} s  {name}: {_line(row)}", flush=True)
                if time.perf_counter() - begin > args.seconds:
                    results[f"{part}, the rest"] = {"failed": f"not run: {args.seconds} seconds are over"}
                    break
        except Exception as problem:  # the reason is part of the result, and the other parts go on
            reason = f"{type(problem).__name__}: {problem}".partition("\n")[0][:500]
            results[f"{part}, the rest"] = {"failed": reason}
            print(f"{time.perf_counter() - begin:5.0f} s  {part} failed: {reason}", flush=True)
    found["seconds"] = time.perf_counter() - begin
    wrong = [name for name, row in results.items() if row.get("right") is False or "failed" in row]
    found["wrong"] = wrong
    directory = Path(args.output)
    directory.mkdir(parents=True, exist_ok=True)
    print(f"{len(results) - len(wrong)} of {len(results)} are right" + (f"; not: {'; '.join(wrong)}" if wrong else ""))
    print(cli.write_json_atomically(directory / "gpu.json", found))
    return 1 if wrong else 0


def _line(row: Figures) -> str:
    def show(x: Any) -> str:
        if isinstance(x, dict):
            return "(" + _line(x) + ")"
        return f"{x:.4g}" if isinstance(x, float) else str(x)

    return ", ".join(f"{name} {show(x)}" for name, x in row.items() if not isinstance(x, list))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return cli.run(_run, argv, parser=_parser())


if __name__ == "__main__":
    sys.exit(main())

"""How well ``kvsparse_jax.plan`` foretells decode steps, on this machine: measured parts in, whole steps compared.

    python -m benchmarks.plan_check

Rates of the machine are measured, none of them with the steps that are foretold:

* bandwidth of weights: a product of one row with weights of the model's size, layer by layer;
* FLOP/s: the same with as many rows as the largest batch has;
* bandwidth of KV pages, of each dtype: attention over a cache alone, of another size than any that is foretold. Two,
  since XLA:CPU widens pages to float32, which takes as long for 8 bits: fewer bytes make nothing faster here;
* overhead of a layer: a decode step of a model as deep with next to no width.

Then the planner gets these as a device, and its steps are compared with measured ones: the whole decode loop, dense and
compressed, in the model's dtype and in 8 bits, by batch and context. Rates and steps are measured in turn, round by
round, and each round's prediction is compared with its own steps, since other programs disturb a shared machine; the
median of the rounds counts.
"""

import dataclasses
import functools
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import kvsparse_jax as kvs
from benchmarks.decode import Decoder, Uneven, filled_paged
from kernels.partial import normalise
from kernels.ragged_decode.api import ragged_attention
from kvsparse_jax import cli, plan
from kvsparse_jax.cache.paged import PagedCache
from kvsparse_jax.errors import InputError, RunError
from kvsparse_jax.generation.decode import Model
from kvsparse_jax.models import decoder
from kvsparse_jax.models.config import ModelConfig

WINDOW = 64
DTYPE = jnp.bfloat16
KINDS = (None, "int8")


def _seconds(f: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(f())
    return time.perf_counter() - start


def _rate(kv_dtype: str | None) -> str:
    return f"kv {kv_dtype or jnp.dtype(DTYPE).name}"


# The rates


def products(config: ModelConfig, rows: int) -> tuple[Callable[[], Any], int]:
    """Products of ``rows`` rows with weights of the model's size, and how many weights these are."""
    width, depth = config.hidden_size, config.layers
    size = plan.weights(config, jnp.dtype(DTYPE)).always // jnp.dtype(DTYPE).itemsize
    inner = size // (2 * width * depth)
    up = jnp.full((depth, width, inner), 1e-3, DTYPE)
    down = jnp.full((depth, inner, width), 1e-3, DTYPE)
    x = jnp.ones((rows, width), DTYPE)

    @jax.jit
    def run(x: Array, up: Array, down: Array) -> Array:
        return lax.scan(lambda x, w: ((x @ w[0]) @ w[1], None), x, (up, down))[0]

    return lambda: run(x, up, down), up.size + down.size


def attention(config: ModelConfig, cache: PagedCache) -> tuple[Callable[[], Any], int]:
    """Attention of one token per sequence over a cache, in all layers, and the bytes of the pages that it reads."""
    batch = cache.seen.shape[0]

    @jax.jit
    def run(cache: PagedCache, q: Array) -> Array:
        def layer(total: Array, of_layer: tuple[Array, Array]) -> tuple[Array, None]:
            part = ragged_attention(
                q, cache.k, cache.v, *of_layer, scale=config.scale, k_scale=cache.k_scale, v_scale=cache.v_scale
            )
            return total + normalise(part), None

        return lax.scan(layer, jnp.zeros(q.shape, jnp.float32), (cache.tables, cache.lengths))[0]

    q = jnp.full((batch, config.heads, 1, config.head_dim), 0.1, DTYPE)
    arrays = [x for x in (cache.k, cache.v, cache.k_scale, cache.v_scale) if x is not None]
    return lambda: run(cache, q), int(cache.pages_taken().sum()) * sum(x.nbytes for x in arrays) // cache.pages


def shallow(config: ModelConfig) -> ModelConfig:
    """A model with as many layers and heads, and next to no width."""
    return dataclasses.replace(config, hidden_size=64, intermediate_size=64, vocab_size=256)


# The steps


def policy_of(config: ModelConfig, cr: float) -> Uneven:
    """Adapters that cost what they cost, and decisions of a given ratio."""
    return Uneven.like(kvs.DMS.init(config, window=WINDOW, shift=0), np.full((config.layers, config.kv_heads), 1 / cr))


def step_of(
    config: ModelConfig, params: Any, cr: float, kv_dtype: str | None, batch: int, end: int, steps: int
) -> Decoder:
    """A decode loop on a paged cache that has room until ``end`` tokens, ``steps`` before that."""
    policy = policy_of(config, cr)
    cache = filled_paged(config, DTYPE, policy, batch, end - steps, end, 64, kv_dtype)
    return Decoder(Model(params, policy, config), cache)


def foretold(config: ModelConfig, rates: dict[str, float], cr: float, kv_dtype: Any, batch: int, context: int) -> float:
    """Seconds of a step by the planner; all of the memory's bandwidth and of the FLOP/s are those measured."""
    fastest = max(rates["bandwidth"], rates[_rate(kv_dtype)])
    device = plan.find("custom", memory=1e12, bandwidth=fastest, flops=rates["flops"])
    shares = plan.Efficiency(
        bandwidth=rates["bandwidth"] / fastest,
        kv=rates[_rate(kv_dtype)] / fastest,
        flops=1.0,
        overhead=rates["overhead"],
        reserve=0.0,
    )
    return (
        plan.Plan(
            config,
            device,
            plan.Workload(context),
            plan.Compression("dms", cr, WINDOW),
            dtype=jnp.dtype(DTYPE),
            kv_dtype=kv_dtype,
            efficiency=shares,
        )
        .step(batch)
        .seconds
    )


def _parser() -> cli.Parser:
    parser = cli.parser("python -m benchmarks.plan_check", __doc__.partition("Rates of")[0].strip())
    parser.add_argument("--model", default="smollm2-135m", help="directory, hub name or smollm2-135m")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], unit="sequences", help="of the steps")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096], unit="tokens", help="of the steps")
    parser.add_argument("--cr", type=float, default=8.0, unit="ratio", help="of the compressed ones")
    parser.add_argument("--steps", type=int, default=4, unit="steps", help="of a burst")
    parser.add_argument("--rounds", type=int, default=9, help="that the median is taken of")
    parser.add_argument("--within", type=float, default=0.25, unit="fraction", help="fails where a step is further off")
    parser.add_argument("--output", default="benchmarks/results", help="directory for plan_check.json")
    return parser


def _run(args: Namespace) -> None:
    if min(args.steps, args.rounds, *args.batches) < 1 or args.within <= 0 or not args.cr >= 1:
        raise InputError("--steps, --rounds, --batches and --cr must be at least 1, --within above 0")
    total = args.steps * (args.rounds + 1)
    lm = kvs.load(args.model, dtype="bfloat16")
    config = lm.config
    if min(args.contexts) <= total + WINDOW or max(args.contexts) > config.max_positions:
        raise InputError(
            f"--contexts must be from {total + WINDOW + 1} (steps and window) to {config.max_positions} tokens"
        )
    one, weights = products(config, 1)
    many, _ = products(config, max(args.batches))
    kv = {
        kind: attention(config, filled_paged(config, DTYPE, policy_of(config, 1.0), 3, 2048, 2112, 64, kind))
        for kind in KINDS
    }
    small = shallow(config)
    narrow = step_of(small, decoder.init_params(small, jax.random.key(0), DTYPE), 8.0, None, 1, 128 + total, total)
    cases = [
        (cr, kv_dtype, batch, context)
        for context in args.contexts
        for batch in args.batches
        for cr in (1.0, args.cr)
        for kv_dtype in KINDS
    ]
    steps = {case: step_of(config, lm.params, *case, total) for case in cases}
    programs: list[Callable[[], Any]] = [one, many, *(run for run, _ in kv.values())]
    programs += [functools.partial(d.burst, args.steps) for d in (narrow, *steps.values())]
    for program in cli.progress(programs, desc="compiling"):
        jax.block_until_ready(program())
    rounds: list[dict[str, float]] = []
    measured: dict[Any, list[float]] = {case: [] for case in cases}
    expected: dict[Any, list[float]] = {case: [] for case in cases}
    for _ in cli.progress(range(args.rounds), desc="rounds"):
        rates = {
            "bandwidth": weights * jnp.dtype(DTYPE).itemsize / _seconds(one),
            "flops": 2 * weights * max(args.batches) / _seconds(many),
            **{_rate(kind): read / _seconds(run) for kind, (run, read) in kv.items()},
            "overhead": narrow.burst(args.steps) / args.steps / config.layers,
        }
        rounds.append(rates)
        for case in cases:
            measured[case].append(steps[case].burst(args.steps) / args.steps)
            expected[case].append(foretold(config, rates, *case))
    rates = {name: float(np.median([x[name] for x in rounds])) for name in rounds[0]}
    print(
        f"measured: weights {rates['bandwidth'] / 1e9:.1f} GB/s, "
        + "".join(f"{_rate(kind)} {rates[_rate(kind)] / 1e9:.1f} GB/s, " for kind in KINDS)
        + f"{rates['flops'] / 1e9:.0f} GFLOP/s, {rates['overhead'] * 1e6:.0f} us per layer"
    )
    print(f"{'cache':16s} {'sequences x tokens':>20s} {'foretold / measured':>20s}   (rounds: 25-75 %)")
    rows = []
    for case in cases:
        cr, kv_dtype, batch, context = case
        ratios = np.asarray(expected[case]) / np.asarray(measured[case])
        low, middle, high = (float(x) for x in np.quantile(ratios, (0.25, 0.5, 0.75)))
        rows.append(
            {
                "cr": cr,
                "kv_dtype": kv_dtype,
                "batch": batch,
                "context": context,
                "ratio": middle,
                "quartiles": [low, high],
                "compilations": steps[case].compilations,
            }
        )
        name = ("dense" if cr == 1 else f"CR {cr:g}") + (f" {kv_dtype}" if kv_dtype else "")
        print(f"{name:16s} {f'{batch} x {context}':>20s} {middle:20.2f}   ({low:.2f}-{high:.2f})")
    worst = max(abs(row["ratio"] - 1) for row in rows)
    found = {
        "model": args.model,
        "jax": jax.__version__,
        "rates": rates,
        "rounds": rounds,
        "rows": rows,
        "worst": worst,
    }
    directory = Path(args.output)
    directory.mkdir(parents=True, exist_ok=True)
    print(cli.write_json_atomically(directory / "plan_check.json", found))
    if worst > args.within:
        raise RunError(f"a step is {100 * worst:.0f} % off what was foretold, more than {100 * args.within:.0f} %")
    print(f"every step is within {100 * worst:.0f} % of what was foretold")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return cli.run(_run, argv, parser=_parser())


if __name__ == "__main__":
    sys.exit(main())

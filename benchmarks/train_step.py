"""What a retrofit step costs: against a straightforward implementation, against no DMS, in memory, and to compile.

    python -m benchmarks.train_step --output benchmarks/results

Questions, each answered by a ratio within one run:

* throughput of the step (teacher included) over `jax.grad` of the masked model written plainly: dense [T, T] attention,
  whole logits, full rematerialisation;
* cost of the step over the same step without DMS (no gates, no noise, no budget), teacher included in both;
* temporaries of the compiled step at T = 8192 over T = 4096;
* time to trace, lower and compile a 64-layer model's step over a 4-layer one's.
"""

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import kvsparse_jax as kvs
from kernels import delayed_attention
from kvsparse_jax import cli
from kvsparse_jax.models import decoder
from kvsparse_jax.models.config import ModelConfig
from kvsparse_jax.whole import positions_of
from train import losses, step

_KEY = jax.random.key(0)


def _policy(config: ModelConfig) -> kvs.DMS:
    policy = kvs.DMS.init(config, window=64, shift=0)
    proj = jax.random.normal(_KEY, policy.params["proj"].shape) * 0.002
    return dataclasses.replace(policy, params={**policy.params, "proj": proj})


def _batch(length: int, vocab: int) -> step.Batch:
    ids = jax.random.randint(_KEY, (1, 1, length), 0, vocab, jnp.int32)
    return step.Batch(ids, jnp.zeros_like(ids), jnp.zeros_like(ids))


def _ours(config: ModelConfig, params: Any, length: int, *, dms: bool, norms: bool, dtype: Any) -> Callable[[], Any]:
    """A function that runs one step; ``norms`` trains the input norms too: a gradient that both sides have."""
    policy = dataclasses.replace(_policy(config), enabled=dms)
    trainable: dict[str, Any] = {"policy": policy.params} if dms else {}
    frozen: dict[str, Any] = {"model": params} if dms else {"model": params, "policy": policy.params}
    if norms:
        trainable["model"] = {"layers": {"attention_norm": params["layers"]["attention_norm"].astype(jnp.float32)}}
    objective = step.Objective(budget="global", dtype=dtype)
    optimizer = optax.adam(1e-5)
    run = step.make_step(config, objective, optimizer, losses.Schedule(4.0, 4.0, 1))
    trainable = jax.tree.map(jnp.array, trainable)
    state = [step.State(trainable, optimizer.init(trainable), jnp.int32(0))]
    batch, settings = _batch(length, config.vocab_size), dataclasses.replace(policy, params=None)

    def once() -> Any:
        state[0], metrics = run(state[0], frozen, params, settings, batch, _KEY)
        return metrics

    once.lower = lambda: run.lower(state[0], frozen, params, settings, batch, _KEY)  # type: ignore[attr-defined]
    return once


def _plain(config: ModelConfig, params: Any, length: int, dtype: Any) -> Callable[[], Any]:
    """The straightforward step: dense masks, whole logits, jax.grad, every layer rematerialised."""
    policy = _policy(config)
    one = jax.tree.map(lambda a: a[0], _batch(length, config.vocab_size))
    noise = step.gumbel_noise(
        _KEY, jnp.int32(0), one.example_ids, positions_of(one.segment_ids), config.layers, config.kv_heads, jnp.float32
    )

    def hidden(adapters: Any, policy: Any, noise: Any) -> tuple[Array, Array | None]:
        def attend(
            state: None, layer: Any, q: Array, k: Array, v: Array, gate: Array | None
        ) -> tuple[Array, None, Any]:
            relaxed = None if gate is None else policy.relax(gate, layer.extra)
            out = delayed_attention(
                q, k, v, relaxed, window=64, scale=config.scale, shift=0, implementation="reference"
            )
            return out, state, gate

        mine = policy if adapters is None else dataclasses.replace(policy, params=adapters)
        wrap = functools.partial(jax.checkpoint, prevent_cse=False)
        out, _, gates = decoder.forward(
            params,
            config,
            mine,
            one.input_ids,
            positions_of(one.segment_ids),
            attend,
            per_layer=noise,
            wrap=wrap,
            dtype=dtype,
        )
        return out, gates

    def loss(adapters: Any) -> Array:
        teacher = jax.lax.stop_gradient(decoder.logits(params, hidden(None, kvs.Dense(), None)[0]))
        student, gates = hidden(adapters, policy, noise)
        assert gates is not None
        decisions = losses.straight_through(policy.relax(gates, noise))
        kl = losses.distillation(decoder.logits(params, student), teacher, jnp.ones(one.input_ids.shape, bool))
        return kl + losses.budget(decisions, 0.75)

    grad = jax.jit(jax.value_and_grad(loss))
    return lambda: grad(policy.params)


def _interleaved(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each function, run in turn so that a noisy machine disturbs all alike; the first round compiles."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for round_ in range(repeats + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function())
            if round_:
                times[name].append(time.perf_counter() - start)
    return times


def _ratio(times: dict[str, list[float]], over: str, under: str) -> float:
    return float(np.median(np.asarray(times[over]) / np.asarray(times[under])))


def _temporaries(config: ModelConfig, params: Any, length: int, dtype: Any) -> int:
    memory = _ours(config, params, length, dms=True, norms=False, dtype=dtype).lower().compile().memory_analysis()  # type: ignore[attr-defined]
    assert memory is not None
    return int(memory.temp_size_in_bytes)


def _compile_seconds(config: ModelConfig, layers: int) -> float:
    small = dataclasses.replace(
        config,
        layers=layers,
        local_windows=(None,) * layers,
        hidden_size=64,
        intermediate_size=128,
        vocab_size=512,
        heads=4,
        kv_heads=2,
        head_dim=16,
        rope=dataclasses.replace(config.rope, dim=16),
    )
    params = decoder.init_params(small, _KEY)
    lowered = _ours(small, params, 256, dms=True, norms=False, dtype=jnp.bfloat16)
    start = time.perf_counter()
    lowered.lower().compile()  # type: ignore[attr-defined]
    return time.perf_counter() - start


def _parser() -> cli.Parser:
    parser = cli.parser("python -m benchmarks.train_step", "Measures what a retrofit step costs, as ratios in one run.")
    parser.add_argument("--model", default="smollm2-135m", help="model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096], unit="tokens", help="row lengths")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds at the first length; fewer at longer ones")
    parser.add_argument("--output", default="benchmarks/results", help="directory for train_step.json")
    return parser


def _run(args: argparse.Namespace) -> int:
    lm = kvs.load(args.model)
    config, params, dtype = lm.config, lm.params, jnp.bfloat16
    found: dict[str, Any] = {"model": args.model, "jax": jax.__version__, "device": jax.devices()[0].device_kind}
    first = args.lengths[0]
    times = _interleaved(
        {
            "ours": _ours(config, params, first, dms=True, norms=False, dtype=dtype),
            "plain": _plain(config, params, first, dtype),
        },
        args.repeats,
    )
    found["throughput_over_plain"] = _ratio(times, "plain", "ours")
    found["tokens_per_second"] = first / float(np.median(times["ours"]))
    print(f"T={first}: {found['throughput_over_plain']:.2f}x a plain jax.grad of the masked model", flush=True)
    for length in args.lengths:
        rounds = max(3, args.repeats * first // length)
        times = _interleaved(
            {
                name: _ours(config, params, length, dms=name == "dms", norms=True, dtype=dtype)
                for name in ("dms", "no_dms")
            },
            rounds,
        )
        found[f"dms_over_no_dms_{length}"] = _ratio(times, "dms", "no_dms")
        print(f"T={length}: {found[f'dms_over_no_dms_{length}']:.2f}x the step without DMS", flush=True)
    short, long = (_temporaries(config, params, n, dtype) for n in (4096, 8192))
    found["temporaries_8192_over_4096"] = long / short
    shallow, deep = (_compile_seconds(config, n) for n in (4, 64))
    found["compile_64_over_4_layers"] = deep / shallow
    print(f"temporaries T=8192 over T=4096: {long / short:.2f}; compile 64 over 4 layers: {deep / shallow:.2f}")
    directory = Path(args.output)
    directory.mkdir(parents=True, exist_ok=True)
    print(cli.write_json_atomically(directory / "train_step.json", found))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return cli.run(_run, argv, parser=_parser())


if __name__ == "__main__":
    sys.exit(main())

"""Says before anything is bought how many sequences fit a device and how fast they decode: ``python -m serve.plan``."""

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvsparse_jax import cli, plan, plot
from kvsparse_jax.cache.quantise import QUANTISATIONS
from kvsparse_jax.errors import InputError, RunError
from kvsparse_jax.models.config import ModelConfig, read_json

_EXAMPLES = f"""models: {", ".join(plan.PUBLISHED)}
devices: {", ".join(device.name for device in plan.DEVICES.values())}, custom

examples:
  python -m serve.plan --model Qwen3-8B --device H100 --cr 8 --context 32768
  python -m serve.plan --model runs/retrofit --devices 8 --latency 30 --plot plan.png --json plan.json
  python -m serve.plan --model Llama-1-65B --context 128000 --devices 8
  python -m serve.plan --model Qwen3-8B --device custom --memory 24 --bandwidth 1000 --flops 165

The model behind it, with its assumptions: docs/planning.md. Prices are assumptions: give your own."""

_SWEEP = 24  # points of a line by batch


def _parser() -> cli.Parser:
    p = cli.parser(
        "python -m serve.plan",
        "Plans the serving of a model: sequences that fit, KV bytes, tokens per second and per dollar, dense against\n"
        "compressed, in the model's dtype and in 8 bits. Nothing is run: shapes and data sheets are enough.",
        epilog=_EXAMPLES,
    )
    p.add_argument("--model", required=True, help="a name (below), or a config.json or a directory with one")
    p.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"), help="of weights and KV")

    where = p.add_argument_group("devices")
    where.add_argument("--device", default="H100", help="a name (below); custom: by the numbers that follow")
    where.add_argument("--devices", type=int, default=1, unit="devices", help="how many there are")
    where.add_argument("--tensor", type=int, unit="devices", help="per replica; most tokens per second if absent")
    numbers = {
        "memory": ("GB", "of a device, instead of the data sheet's"),
        "bandwidth": ("GB/s", "of its memory"),
        "flops": ("TFLOP/s", "dense products in bfloat16"),
        "link": ("GB/s", "to the replica's other devices, out of one"),
        "price": ("dollars per hour", "of a device"),
    }
    for name, (unit, text) in numbers.items():
        where.add_argument(f"--{name}", type=float, unit=unit, help=text)

    what = p.add_argument_group("cache")
    what.add_argument("--policy", default="dms", choices=tuple(plan.KINDS), help="of the compressed cache")
    what.add_argument("--cr", type=float, default=8.0, unit="ratio", help="nominal compression: 1 / share not evicted")
    windows = ", ".join(f"{name} {kind.window}" for name, kind in plan.KINDS.items() if kind.window is not None)
    what.add_argument("--window", type=int, unit="tokens", help=f"newest that stay; if absent {windows}")
    what.add_argument(
        "--kept", type=Path, metavar="FILE", help="JSON with kept shares of heads, [L][H], instead of --cr"
    )
    what.add_argument("--page-size", type=int, default=64, unit="tokens", help="slots of a page")
    what.add_argument("--kv-dtype", default="int8", choices=QUANTISATIONS, help="of the 8-bit rows")

    load = p.add_argument_group("load")
    load.add_argument("--context", type=int, default=32768, unit="tokens", help="seen by a sequence at its end")
    asked = "of these: speed is then the mean over the generation, else that at its end"
    load.add_argument("--prompt", type=int, unit="tokens", help=asked)
    load.add_argument("--latency", type=float, unit="ms per token", help="batches are only as large as this allows")
    load.add_argument("--threads", type=int, default=100, unit="sequences", help="dense ones whose cost is compared")

    assumed = plan.Efficiency()
    how = p.add_argument_group("assumptions")
    how.add_argument("--bandwidth-share", type=float, default=assumed.bandwidth, unit="fraction", help="of weights")
    how.add_argument("--kv-share", type=float, default=assumed.kv, unit="fraction", help="of bandwidth, of KV pages")
    how.add_argument("--flops-share", type=float, default=assumed.flops, unit="fraction", help="attained")
    how.add_argument("--overhead", type=float, default=assumed.overhead * 1e6, unit="us", help="of each layer, besides")
    how.add_argument("--collective", type=float, default=assumed.latency * 1e6, unit="us", help="to start one")
    how.add_argument("--reserve", type=float, default=assumed.reserve, unit="fraction", help="of memory, left alone")

    out = p.add_argument_group("output")
    out.add_argument("--json", type=Path, metavar="FILE", help="write everything there, with the lines of the plot")
    out.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw it there (the name's ending says what: .png, .pdf)"
    )
    return p


def _kept(path: Path) -> tuple[tuple[float, ...], ...]:
    """Shares [L][H] from the key "kept" of a JSON object, such as benchmarks.decode writes."""
    if not path.is_file():
        raise InputError(f"--kept {path} is no file")
    table = read_json(path).get("kept")
    if not isinstance(table, list) or not all(isinstance(row, list) for row in table):
        raise InputError(f"--kept {path} holds no table of shares [L][H] under the key 'kept'")
    try:
        return tuple(tuple(float(share) for share in row) for row in table)
    except (TypeError, ValueError):
        raise InputError(f"--kept {path} holds a share that is no number") from None


def _plan(args: argparse.Namespace, config: ModelConfig) -> plan.Plan:
    """The compressed plan in the model's dtype, on replicas as asked for or as best."""
    units = {"memory": 1e9, "bandwidth": 1e9, "flops": 1e12, "link": 1e9, "price": 1.0}
    given = {name: getattr(args, name) for name in units}
    device = plan.find(args.device, **{name: None if x is None else x * units[name] for name, x in given.items()})
    if device.name == "custom" and args.devices > 1 and args.link is None and args.tensor != 1:
        raise InputError("more than one custom device: give --link, or --tensor 1 for replicas of one device")
    kept = None if args.kept is None else _kept(args.kept)
    compression = plan.Compression(args.policy, args.cr, args.window, kept)
    latency = None if args.latency is None else args.latency / 1e3
    shares = plan.Efficiency(
        bandwidth=args.bandwidth_share,
        kv=args.kv_share,
        flops=args.flops_share,
        overhead=args.overhead / 1e6,
        latency=args.collective / 1e6,
        reserve=args.reserve,
    )

    def made(tensor: int) -> plan.Plan:
        return plan.Plan(
            config=config,
            device=device,
            workload=plan.Workload(args.context, args.prompt, latency),
            compression=compression,
            tensor=tensor,
            dtype=jnp.dtype(args.dtype),
            page=args.page_size,
            efficiency=shares,
        )

    return made(plan.replica(made, args.devices, args.tensor))


def _row(one: plan.Plan, devices: int) -> dict[str, Any]:
    """A plan's figures, for JSON."""
    found = one.estimate()
    step, replicas = found.step, devices // one.tensor
    return {
        "entries_per_head": found.entries,
        "pages_per_sequence": found.pages,
        "kv_bytes_per_sequence": found.kv_bytes,
        "nominal_cr": found.nominal_cr,
        "physical_cr": found.physical_cr,
        "fits": found.fits * replicas,
        "sequences": found.batch * replicas,
        "sequences_per_replica": found.batch,
        "limit": found.limit,
        "milliseconds_per_token": 1e3 * step.seconds if found.batch else None,
        "tokens_per_second": found.tokens_per_second * replicas,
        "tokens_per_second_per_device": found.per_device,
        "tokens_per_dollar": found.per_dollar,
        "milliseconds": {name: 1e3 * value for name, value in dataclasses.asdict(step).items()},
        "shares": step.shares,
        "bottleneck": step.bottleneck,
        "memory_bytes_per_device": one.memory(found.batch),
    }


def _line(one: plan.Plan, found: Mapping[str, Any], context: int) -> dict[str, Any]:
    """What the figure draws of a plan."""
    contexts = sorted({context} | {2**n for n in range(11, 18)})
    at = [dataclasses.replace(one, workload=plan.Workload(tokens, None, one.workload.latency)) for tokens in contexts]
    most = max(one.fits(), 1)
    batches = sorted({round(x) for x in np.geomspace(1, most, _SWEEP)})
    steps = [one.step(batch) for batch in batches]
    return {
        "contexts": contexts,
        "kv_bytes": [x.kv_bytes() * x.shards for x in at],
        "fits": [x.fits() / x.tensor for x in at],
        "batches": batches,
        "milliseconds": [1e3 * step.seconds for step in steps],
        "per_device": [batch / step.seconds / one.tensor for batch, step in zip(batches, steps, strict=True)],
        "parts": {name: share * 1e3 * one.step(max(found["sequences_per_replica"], 1)).seconds
                  for name, share in found["shares"].items()},
    }  # fmt: skip


_HEADER = (
    f"{'':22s} {'entries':>8s} {'KV/seq':>9s} {'CR in':>6s} {'fit':>7s} {'served':>7s} {'limit':>8s} {'ms per':>7s} "
    f"{'tokens/s':>9s} {'million':>8s}\n"
    f"{'':22s} {'per head':>8s} {'MB':>9s} {'bytes':>6s} {'':>7s} {'':>7s} {'':>8s} {'token':>7s} "
    f"{'/device':>9s} {'per $':>8s}  where the time goes"
)


def _table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [_HEADER]
    for label, row in rows.items():
        seconds, dollars = row["milliseconds_per_token"], row["tokens_per_dollar"]
        most = sorted(row["shares"].items(), key=lambda item: -item[1])[:2]
        lines.append(
            f"{label:22s} {row['entries_per_head']:8.0f} {row['kv_bytes_per_sequence'] / 1e6:9.1f} "
            f"{row['physical_cr']:6.2f} {row['fits']:7d} {row['sequences']:7d} {row['limit']:>8s} "
            f"{'-' if seconds is None else f'{seconds:.1f}':>7s} {row['tokens_per_second_per_device']:9.0f} "
            f"{'-' if dollars is None else f'{dollars / 1e6:.2f}':>8s}  "
            + ", ".join(f"{name} {100 * share:.0f} %" for name, share in most if share > 0.005)
        )
    return "\n".join(lines)


def _same_cost(plans: Mapping[str, plan.Plan], threads: int) -> dict[str, Any]:
    """Sequences for the price of dense ones, and the ratio that gives as many more as its name says."""
    dense = plans["dense"]
    found: dict[str, Any] = {}
    for label, one in plans.items():
        if label == "dense":
            continue
        same = plan.same_cost(dense, one, threads)
        found[label] = dataclasses.asdict(same) | {"bottleneck": same.step.bottleneck}
        if one.compression.policy != "dense":
            wanted = round(threads * one.compression.nominal_cr)
            needed = plan.needed_cr(dense, one, threads, wanted)
            found[label] |= {"wanted": wanted, "nominal_cr_for_wanted": needed}
    return found


def _said(same: Mapping[str, Any], threads: int) -> str:
    """The same in words."""
    first = next(iter(same.values()))
    lines = [
        f"for the cost of {threads} dense sequences ({first['devices']} devices, {1e3 * first['seconds']:.1f} ms per "
        "token):"
    ]
    for label, row in same.items():
        text = f"  {label:22s} {row['meets']:6d} in the same time, bound by {row['binds']}; memory holds {row['fits']}"
        if "wanted" in row:
            needed = row["nominal_cr_for_wanted"]
            how = "no ratio gives" if needed is None else f"a nominal CR of {needed:.1f} gives"
            text += f"; {how} {row['wanted']}"
        lines.append(text)
    return "\n".join(lines)


def _run(args: argparse.Namespace) -> None:
    for name in ("json", "plot"):
        path = getattr(args, name)
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise InputError(f"--{name} {path}: give a file in a directory that exists")
    config = plan.model_config(args.model)
    compressed = _plan(args, config)
    device, shares = compressed.device, compressed.efficiency
    shown = vars(args) | dataclasses.asdict(device) | {"tensor": compressed.tensor, "device": device.name}
    shown |= {"window": compressed.compression.delay, "cr": compressed.compression.nominal_cr}
    shown = {name: value for name, value in shown.items() if name not in ("name", "rows")}
    for name, unit in (("memory", 1e9), ("bandwidth", 1e9), ("link", 1e9), ("flops", 1e12)):
        shown[name] = shown[name] / unit
    cli.show_configuration(shown)
    plans = plan.four(compressed, args.kv_dtype)
    rows = {label: _row(one, args.devices) for label, one in plans.items()}
    dense = plans["dense"]
    print(
        f"{args.model} in {args.dtype} on {args.devices} x {device.name} (replicas of {compressed.tensor}): "
        f"{dense.weights.nbytes / 1e9:.2f} GB of weights per device of {device.memory / 1e9:g} GB; keys and values of "
        f"{args.context} tokens: {dense.plain_kv_bytes() / 1e9:.2f} GB"
    )
    print(_table(rows))
    if args.context > config.max_positions:
        print(f"note: the model's own context is {config.max_positions} tokens", file=sys.stderr)
    same = _same_cost(plans, args.threads) if len(plans) > 2 and dense.fits() else {}
    if same:
        print(_said(same, args.threads))
    lines = {label: _line(one, rows[label], args.context) for label, one in plans.items()}
    if args.json is not None:
        whole = {
            "configuration": shown,
            "device": device,
            "assumptions": shares,
            "model": {
                "weight_bytes_per_device": dense.weights.nbytes,
                "kv_bytes_per_token": dense.plain_kv_bytes(1),
                "kv_bytes_of_context": dense.plain_kv_bytes(),
            },
            "rows": rows,
            "same_cost": same,
            "lines": lines,
        }
        print(cli.write_json_atomically(args.json, whole))
    if args.plot is not None:
        title = f"{args.model} on {args.devices} x {device.name}, {args.context} tokens, page {args.page_size}"
        try:
            plot.serving_plan(lines, title=title).savefig(args.plot)
        except ValueError as error:  # an ending that matplotlib does not know
            raise InputError(f"--plot {args.plot}: {error}") from None
        print(args.plot)
    if not any(row["sequences"] for row in rows.values()):
        best = min(one.step(1).seconds for one in plans.values())
        raise RunError(
            f"no sequence can be served in {args.latency:g} ms per token: one alone takes {1e3 * best:.1f} ms"
            if any(row["fits"] for row in rows.values())
            else f"not one sequence of {args.context} tokens fits beside {dense.weights.nbytes / 1e9:.1f} GB of weights"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; see :func:`kvsparse_jax.cli.run` for the exit status."""
    return cli.run(_run, argv, parser=_parser(), show=False)


if __name__ == "__main__":
    sys.exit(main())

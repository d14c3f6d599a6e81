"""Weak scaling on paper: what a training step computes and sends, against what links and products are said to attain.

    python -m benchmarks.weak_scaling                      # from benchmarks/results/compile_proof.json

Bytes and numbers of collectives are those of the compiled steps (``python -m benchmarks.compile_proof``), one row of
32768 tokens per GPU. FLOPs are counted from the model's shape: teacher, student and its recomputation go forward, then
gradients go back to the activations (the base is frozen); attention is causal, and its backward pass makes five
products where the forward pass makes two.

The efficiency is the share of the time in which products run: if collectives wait for them and they for collectives
(the lower number), and if whatever can overlap does (the upper). Nothing of this was measured.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compile_proof import CASES, HOST, ROOT, Case
from kvsparse_jax import cli, plan
from kvsparse_jax.errors import InputError

FORWARD, BACKWARD, ATTENTION_BACKWARD = 3, 1, 2.5
"""Passes of a step whose base is frozen; a backward pass of attention in forward passes."""


@dataclass(frozen=True)
class Scaling:
    """A step on paper, of one GPU.

    Attributes:
        devices: all of them.
        flops: that it computes.
        host_bytes, network_bytes: that it sends within its host and to others.
        seconds_products, seconds_host, seconds_network: what these take.
    """

    devices: int
    flops: float
    host_bytes: float
    network_bytes: float
    seconds_products: float
    seconds_host: float
    seconds_network: float

    @property
    def apart(self) -> float:
        """Efficiency where nothing overlaps."""
        return self.seconds_products / (self.seconds_products + self.seconds_host + self.seconds_network)

    @property
    def overlapped(self) -> float:
        """Efficiency where all overlaps."""
        return self.seconds_products / max(self.seconds_products, self.seconds_host + self.seconds_network)


def flops(case: Case) -> float:
    """Of a training step, per device."""
    config = plan.model_config(case.model)
    devices = case.mesh[0] * case.mesh[1] * case.mesh[2]
    tokens, c = case.rows * case.length / devices, config
    products = plan.weights(c, "bfloat16").flops * tokens * (FORWARD + BACKWARD)
    # Scores and their product with values, of half of all pairs.
    attention = 4 * case.length / 2 * c.heads * c.head_dim * c.layers * tokens * (FORWARD + ATTENTION_BACKWARD)
    return products + attention


def scaling(
    case: Case, collectives: Mapping[str, Mapping[str, float]], device: plan.Device, network: float, attained: Any
) -> Scaling:
    """A step.

    Args:
        case: the step.
        collectives: of its report, by kind.
        device: a GPU, with its link to others of its host.
        network: bytes/s out of a GPU to other hosts.
        attained: shares of these numbers.
    """
    host, outside = (sum(one[key] for one in collectives.values()) for key in ("sent", "sent_between_hosts"))
    runs = sum(one["runs"] for one in collectives.values())
    return Scaling(
        devices=case.mesh[0] * case.mesh[1] * case.mesh[2],
        flops=flops(case),
        host_bytes=host,
        network_bytes=outside,
        seconds_products=flops(case) / (device.flops * attained.flops),
        seconds_host=host / (device.link * attained.bandwidth) + runs * attained.latency,
        seconds_network=outside / (network * attained.bandwidth),
    )


def _run(args: argparse.Namespace) -> None:
    if not args.report.is_file():
        raise InputError(f"there is no {args.report}: write it with python -m benchmarks.compile_proof --json FILE")
    reported = json.loads(args.report.read_text(encoding="utf-8"))["cases"]
    attained = plan.Efficiency(bandwidth=args.link_share, flops=args.flops_share)
    device = plan.find("H100", link=args.link * 1e9)
    found = {}
    print(f"{'':24}{'PFLOP':>8}{'GB in a host':>14}{'GB outside':>12}{'s products':>12}{'s links':>9}  efficiency")
    for name, case in CASES.items():
        if case.preset is None or case.target != "h100" or case.length != args.length or name not in reported:
            continue
        if case.mesh[0] * case.mesh[1] < HOST:
            continue
        one = scaling(case, reported[name]["collectives"], device, args.network * 1e9, attained)
        found[name] = dataclasses.asdict(one) | {"apart": one.apart, "overlapped": one.overlapped}
        links = one.seconds_host + one.seconds_network
        print(
            f"{name:24}{one.flops / 1e15:8.2f}{one.host_bytes / 1e9:14.1f}{one.network_bytes / 1e9:12.2f}"
            f"{one.seconds_products:12.2f}{links:9.2f}  {one.apart:.1%} to {one.overlapped:.1%}"
        )
    if not found:
        raise InputError(f"{args.report} has no training step of {args.length} tokens on 8 or more H100")
    if args.json is not None:
        print(cli.write_json_atomically(args.json, found))


def _parser() -> cli.Parser:
    parser = cli.parser("python -m benchmarks.weak_scaling", (__doc__ or "").partition("Bytes and")[0].strip())
    report = ROOT / "benchmarks" / "results" / "compile_proof.json"
    parser.add_argument("--report", type=Path, default=report, help="of benchmarks.compile_proof (default: the stored)")
    parser.add_argument("--length", type=int, default=32768, help="tokens of a row (default: 32768)")
    parser.add_argument("--link", type=float, default=450.0, help="GB/s out of a GPU within its host (default: 450)")
    parser.add_argument("--network", type=float, default=50.0, help="GB/s out of a GPU to other hosts (default: 50)")
    parser.add_argument("--link-share", type=float, default=0.8, help="that links attain (default: 0.8)")
    parser.add_argument("--flops-share", type=float, default=0.6, help="that products attain (default: 0.6)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return cli.run(_run, argv, parser=_parser())


if __name__ == "__main__":
    sys.exit(main())

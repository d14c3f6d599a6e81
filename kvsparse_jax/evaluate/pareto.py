"""``python -m kvsparse_jax.evaluate.pareto``: policies x compression ratios x tasks, in one table and two plots.

Every cell is a line of results.jsonl, written when it is done, so that a run that was interrupted goes on where it was.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvsparse_jax import cli, plot
from kvsparse_jax.calibrate import calibrate, reachable
from kvsparse_jax.errors import InputError
from kvsparse_jax.evaluate.answers import answers
from kvsparse_jax.evaluate.continuation import continuations
from kvsparse_jax.evaluate.results import DENSE
from kvsparse_jax.evaluate.sequences import DEFAULT_KINDS, held_out_sequences
from kvsparse_jax.evaluate.tasks import TASKS, examples
from kvsparse_jax.lm import LM, load
from kvsparse_jax.policies import KVzap, Policy, spec

TEXT = "text"
"""The task that is no task: KL over what follows a compressed prompt."""


def _parser() -> cli.Parser:
    p = cli.parser(
        "python -m kvsparse_jax.evaluate.pareto",
        "Runs policies at several compression ratios on tasks, each beside the full cache in the same run.\n"
        "Writes results.jsonl, results.md, and for each task its quality against KV tokens held and read.",
        epilog="example:\n"
        "  python -m kvsparse_jax.evaluate.pareto --model smollm2-135m --policy snapkv tova kvzip \\\n"
        "      kvzap:path=runs/kvzap/mlp,sinks=4,window=64 --cr 2 4 8 --task text niah_single --output runs/pareto",
    )
    p.add_argument("--model", required=True, help="directory, hub name or smollm2-135m")
    p.add_argument("--output", required=True, type=Path, help="directory of the results")
    p.add_argument(
        "--policy", nargs="+", required=True, metavar="NAME:KEY=VALUE",
        help="without a size, which --cr gives (kvzap gets the threshold that it takes): "
        + "; ".join(kind.help for name, kind in spec.KINDS.items() if name not in ("masked", "own")),
    )  # fmt: skip
    p.add_argument("--cr", type=float, nargs="+", default=[2.0, 4.0, 8.0], help="compression ratios of the context")
    p.add_argument(
        "--task", nargs="+", default=[TEXT, "niah_single"], help=f"of {', '.join((TEXT, *TASKS))}"
    )  # fmt: skip
    p.add_argument(
        "--question", choices=("after", "before"), default="after", help="asked after compression, or before"
    )
    p.add_argument("--length", type=int, default=1024, unit="tokens", help="of a context")
    p.add_argument("--next", type=int, default=256, unit="tokens", help="scored after the context, of the task text")
    p.add_argument("--count", type=int, default=20, help="prompts of each task")
    p.add_argument("--batch-size", type=int, default=1, unit="prompts", help="computed together")
    p.add_argument("--dtype", default="stored", choices=("stored", "bfloat16", "float32"), help="of the weights")
    p.add_argument("--seed", type=int, default=0, help="of the tasks and texts")
    return p


@dataclasses.dataclass(frozen=True)
class _Cells:
    """The cells of the table, and how each is measured."""

    lm: LM
    args: argparse.Namespace

    def texts(self, seed: int) -> np.ndarray:
        """Held-out texts [N, length + next]."""
        args = self.args
        return held_out_sequences(self.lm.tokenizer, args.length + args.next, args.count, DEFAULT_KINDS, seed).ids

    def method(self, name: str, ratio: float) -> Policy:
        """A policy at a ratio; KVzap's threshold is found on texts of another seed."""
        if name.split(":")[0] != "kvzap":
            found = spec.parse(f"{name}{',' if ':' in name else ':'}cr={ratio}", self.lm.policy)
            return found if isinstance(found, Policy) else found(self.args.length)
        policy = self.surrogate(name)
        sample = self.texts(self.args.seed + 1)[:8, : self.args.length]
        return calibrate(self.lm.with_policy(policy), sample, cr=ratio).policy

    def surrogate(self, name: str) -> KVzap:
        """A KVzap policy without its threshold."""
        policy = spec.parse(f"{name}{',' if ':' in name else ':'}threshold=0", self.lm.policy)
        assert isinstance(policy, KVzap)
        return policy

    def run(self, task: str, methods: dict[str, Policy]) -> Iterator[dict[str, Any]]:
        """Rows of the table: the full cache, then the methods."""
        args = self.args
        if task == TEXT:
            found = continuations(
                self.lm, methods, self.texts(args.seed), args.length, batch_size=args.batch_size, progress=True
            )
            for r in found:
                yield {
                    "quality": r.kl.mean, "stderr": r.kl.stderr, "removed": r.removed.mean, "used": r.used,
                    "held": args.length * (1 - r.removed.mean), "read": args.next * args.length * (1 - r.removed.mean),
                    "truncated": 0, "prompts": r.prompts, "method": r.method, "policy": r.policy,
                }  # fmt: skip
            return
        drawn = examples(task, self.lm.tokenizer, length=args.length, count=args.count, seed=args.seed)
        for a in answers(self.lm, methods, drawn, args.question, batch_size=args.batch_size, progress=True):
            yield {
                "quality": a.accuracy.mean, "stderr": a.accuracy.stderr, "removed": a.removed.mean, "used": a.used,
                "held": a.held, "read": a.read, "truncated": a.truncated, "prompts": a.prompts, "method": a.method,
                "policy": a.policy,
            }  # fmt: skip


def _read(file: Path) -> list[dict[str, Any]]:
    """Rows that are done; half a line at the end, of a run that was killed, is left out."""
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown, a table per task."""
    parts = []
    for task in dict.fromkeys(row["task"] for row in rows):
        what = "KL" if task == TEXT else "accuracy"
        lines = [
            f"**{task}**",
            "",
            f"| policy | CR asked | removed | used / dense bytes | {what} | truncated answers |",
            "|---|---|---|---|---|---|",
        ]
        for row in rows:
            if row["task"] != task:
                continue
            error = "" if row["stderr"] is None else f" ± {row['stderr']:.4f}"
            asked = "-" if row["cr"] is None else f"{row['cr']:g}"
            lines.append(
                f"| {row['method']} | {asked} | {100 * row['removed']:.1f} % | {row['used']:.3f} "
                f"| {row['quality']:.4f}{error} | {row['truncated']} of {row['prompts']} |"
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _plots(rows: Sequence[dict[str, Any]], output: Path) -> list[Path]:
    files = []
    for task in dict.fromkeys(row["task"] for row in rows):
        for cost, label in (("held", "KV tokens held per head"), ("read", "KV tokens read per head")):
            points: dict[str, list[tuple[float, float, float | None]]] = {}
            for row in rows:
                if row["task"] == task:
                    points.setdefault(row["method"], []).append((row[cost], row["quality"], row["stderr"]))
            figure = plot.pareto(
                points,
                x_label=label,
                y_label="KL(dense || compressed), nats" if task == TEXT else "accuracy",
                title=task,
                higher_is_better=task != TEXT,
            )
            files.append(output / f"{task}_{cost}.png")
            figure.savefig(files[-1], dpi=110)
    return files


def _run(args: argparse.Namespace) -> None:
    if unknown := [task for task in args.task if task not in (TEXT, *TASKS)]:
        raise InputError(f"unknown task {unknown[0]!r}; there are {', '.join((TEXT, *TASKS))}")
    if low := [x for x in args.cr if not x > 1]:
        raise InputError(f"--cr must be above 1, not {low[0]:g}")
    if sized := [x for x in args.policy if any(f"{key}=" in x for key in ("cr", "budget", "threshold"))]:
        raise InputError(f"--policy {sized[0]!r} has a size already, and --cr gives it: leave it out")
    if wrong := [x for x in args.policy if x.split(":")[0] in ("masked", "own")]:
        raise InputError(f"--policy {wrong[0]!r} has no compression ratio to set")
    for name, least in (("length", 2), ("next", 2), ("count", 1), ("batch_size", 1)):
        if getattr(args, name) < least:
            raise InputError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(args, name)}")
    settings = {
        k: v for k, v in vars(args).items() if k in ("model", "question", "length", "next", "count", "dtype", "seed")
    }
    output = cli.fresh_directory(args.output, "pareto")
    known_settings = output / "settings.json"
    if known_settings.exists() and json.loads(known_settings.read_text()) != settings:
        raise InputError(f"{output} holds results of other settings: choose another --output")
    lm = load(args.model, dtype=None if args.dtype == "stored" else args.dtype)
    if lm.tokenizer is None:
        raise InputError("the model directory has no tokenizer, so no text and no task can be made")
    cli.write_json_atomically(known_settings, settings)
    cells, file = _Cells(lm, args), output / "results.jsonl"
    rows = _read(file)
    done = {(row["task"], row["method"], row["cr"]) for row in rows}
    policies: dict[tuple[str, float], Policy] = {}

    def policy(name: str, ratio: float) -> Policy:
        if (name, ratio) not in policies:
            policies[name, ratio] = cells.method(name, ratio)
        return policies[name, ratio]

    for name in args.policy:  # a wrong one is told before the work
        for ratio in args.cr:
            if name.split(":")[0] != "kvzap":
                policy(name, ratio)
            else:
                reachable(cells.surrogate(name), args.length, ratio)
    if rows:  # without the half line that a killed run may have left
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with file.open("a", encoding="utf-8") as out:
        for task in args.task:
            for ratio in args.cr:
                wanted = {name: policy(name, ratio) for name in args.policy if (task, name, ratio) not in done}
                if not wanted:
                    continue
                for row in cells.run(task, wanted):
                    full = row["method"] == DENSE
                    row = {"task": task, "cr": None if full else ratio, **row}
                    if full and (task, DENSE, None) in done:
                        continue
                    done.add((task, row["method"], row["cr"]))
                    rows.append(row)
                    out.write(json.dumps(row) + "\n")
                    out.flush()
    text = table(rows)
    (output / "results.md").write_text(text)
    print(text)
    for path in [file, output / "results.md", *_plots(rows, output)]:
        print(f"written: {path}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    return cli.run(_run, argv, parser=_parser())


if __name__ == "__main__":
    sys.exit(main())

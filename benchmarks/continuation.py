"""What compressed prompts do to the text that follows, beside kvpress on the same texts and model.

A context of 1024 tokens is prefilled densely, each policy removes a share of it, and the next 256 tokens are scored:
KL(dense || compressed), in float32. Held-out text of several kinds. Of the tokens that follow nothing is evicted, as in
kvpress, but by KVzap with its rule everywhere and by TOVA and H2O. kvpress runs in an environment of its own, given by
the interpreter of ``--kvpress``.

    python -m train.kvzap --model smollm2-135m --output runs/kvzap
    python -m benchmarks.continuation --surrogate runs/kvzap/mlp runs/kvzap/linear --kvpress PYTHON --json OUT
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import kvsparse_jax as kvs
from kvsparse_jax import evaluate
from kvsparse_jax.calibrate import calibrate
from kvsparse_jax.evaluate.continuation import as_json, continuations, table
from kvsparse_jax.policies import Policy

KINDS = ("code", "docstrings", "manuals", "readme", "headers", "data")


def methods(
    lm: kvs.LM, ids: np.ndarray, context: int, removed: float, window: int, surrogates: dict[str, Path]
) -> dict[str, Policy]:
    """Policies that remove a share of the context; the window is KVzap's."""
    budget = round(context * (1 - removed))
    found: dict[str, Policy] = {
        "KVzip": kvs.KVzip(budget=budget),
        "KVzip+": kvs.KVzip(budget=budget, kind="kvzip+"),
        "SnapKV": kvs.SnapKV(budget=budget),
        "SnapKV, budget per layer": kvs.SnapKV(budget=budget, per="layer", sinks=4),
        "TOVA": kvs.TOVA(budget=budget),
        "H2O": kvs.H2O(budget=budget),
        "Knorm": kvs.Knorm(budget=budget),
        "Random": kvs.Random(budget=budget, sinks=4),
        "StreamingLLM": kvs.StreamingLLM(budget=budget),
    }
    for name, path in surrogates.items():
        for sinks in (0, 4):
            policy = kvs.KVzap.load(path, window=window, sinks=sinks, prefill="dense", while_decoding=False)
            aimed = calibrate(lm.with_policy(policy), ids[:, :context], cr=1 / (1 - removed)).policy
            found[f"KVzap {name}, {sinks} sinks"] = aimed
            if sinks:
                found[f"KVzap {name}, {sinks} sinks, fixed ratio"] = kvs.KVzapBudget(
                    budget=budget, sinks=sinks, newest=min(window, budget - sinks), surrogate=policy
                )
                rule = dataclasses.replace(policy, prefill="rule", while_decoding=True)
                aimed = calibrate(lm.with_policy(rule), ids[:, :context], cr=1 / (1 - removed)).policy
                found[f"KVzap {name}, {sinks} sinks, rule everywhere"] = aimed
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="default %(default)s")
    parser.add_argument("--surrogate", nargs="*", type=Path, default=[], help="directories of KVzap surrogates")
    parser.add_argument("--texts", type=int, default=12, help="default %(default)s")
    parser.add_argument("--context", type=int, default=1024, help="tokens (default %(default)s)")
    parser.add_argument("--next", type=int, default=256, help="tokens that are scored (default %(default)s)")
    parser.add_argument("--removed", type=float, nargs="+", default=[0.5, 0.75, 0.875], help="default %(default)s")
    parser.add_argument(
        "--window",
        type=int,
        nargs="+",
        default=[64],
        help="of KVzap, in tokens: one, or one for each share removed (default 64)",
    )
    parser.add_argument("--kvpress", help="interpreter with torch and kvpress")
    parser.add_argument("--only", nargs="+", help="policies whose names start like this")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    windows = args.window * len(args.removed) if len(args.window) == 1 else args.window
    if len(windows) != len(args.removed):
        parser.error(f"--window must be one or {len(args.removed)}, as --removed is, not {len(windows)}")

    lm = kvs.load(args.model, dtype="float32").with_policy(kvs.Dense())
    texts = evaluate.held_out_sequences(lm.tokenizer, args.context + args.next, args.texts, KINDS)
    ids = np.asarray(texts.ids)
    surrogates = {path.name: path for path in args.surrogate}
    figures: dict[str, Any] = {"context": args.context, "next": args.next, "windows": windows, "ours": {}}
    thresholds: dict[int, list[float]] = {0: [], 4: []}
    for removed, window in zip(args.removed, windows, strict=True):
        chosen = methods(lm, ids, args.context, removed, window, surrogates)
        for sinks, of in thresholds.items() if surrogates else ():
            of.append(chosen[f"KVzap {next(iter(surrogates))}, {sinks} sinks"].threshold)  # type: ignore[attr-defined]
        if args.only:
            chosen = {k: v for k, v in chosen.items() if k.startswith(tuple(args.only))}
        results = continuations(lm, chosen, ids, args.context, progress=True)
        print(f"\n{100 * removed:.1f} % removed\n{table(results)}", flush=True)
        figures["ours"][str(removed)] = as_json(results)
    if args.kvpress:
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "ids.npz"
            np.savez(file, ids=ids)
            command = [
                args.kvpress,
                str(Path(__file__).with_name("kvpress_continuation.py")),
                "--model",
                str(lm.source),
            ]
            command += ["--ids", str(file), "--context", str(args.context)]
            command += ["--window", *map(str, windows), "--removed", *map(str, args.removed)]
            if surrogates:
                first = next(iter(surrogates.values()))
                command += ["--surrogate", str(first), "--thresholds", json.dumps(thresholds)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        theirs = json.loads(done.stdout)
        figures["kvpress"] = theirs
        print("\n| kvpress | " + " | ".join(f"{100 * x:.1f} %" for x in args.removed) + " |")
        print("|---" * (1 + len(args.removed)) + "|")
        for name, by_ratio in theirs["kl"].items():
            cells = [evaluate.Estimate.of(np.asarray(by_ratio[str(x)])) for x in args.removed]
            print(f"| {name} | " + " | ".join(f"{cell:.4f}" for cell in cells) + " |")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
        print(f"written: {args.json}", file=sys.stderr)


if __name__ == "__main__":
    main()

"""H2O and TOVA (4 sinks each) beside a DMS model, token by token, with as many entries per head as DMS holds.

Held-out text of several kinds is fed through the real cache one token at a time, as in decoding: each policy evicts by
its own rule after every token, and KL(dense || compressed) is averaged over all positions. Each gets as its budget what
DMS holds per head (mean over heads, layers and sequences) at the end of the sequence, so its bytes are the same there.
On two CPU cores a step of six sequences takes 0.3 s, so the default takes half an hour.

    python -m benchmarks.attention_baselines --model runs/cr8 --lengths 1024:6,2048:6 --json OUT
    python -m benchmarks.attention_baselines --model smollm2-135m --lengths 1024:6,2048:6 --entries 191 305 --json OUT

The second form measures the baselines alone, with the entries that an earlier evaluation of a DMS model found.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvsparse_jax as kvs
from kvsparse_jax import evaluate, generation
from kvsparse_jax.evaluate.__main__ import parse_lengths
from kvsparse_jax.evaluate.results import Estimate
from kvsparse_jax.policies import Policy

KINDS = ("code", "docstrings", "manuals", "readme", "headers", "data")


@jax.jit
def _kl(dense: jax.Array, logits: jax.Array) -> jax.Array:
    """KL(dense || logits) [B, n] in nats."""

    def row(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        d, c = (jax.nn.log_softmax(x, -1) for x in pair)
        return jnp.sum(jnp.exp(d) * (d - c), -1)

    # Row by row: the intermediate arrays of a batch would need several times the logits' own memory.
    return jax.lax.map(row, (dense, logits))


def divergence(lm: kvs.LM, policy: Policy, ids: np.ndarray, first: int) -> np.ndarray:
    """KL(dense || policy) [B, T - 1], token by token; the first ``first`` tokens enter at once (nothing is evicted)."""
    dense = lm.with_policy(kvs.Dense()).logits(ids)
    checked, segments = lm.check(ids)
    model = lm.with_policy(policy).prepared(checked, segments, first)
    out = generation.continuation(model._model, checked, first)
    found = np.zeros((ids.shape[0], ids.shape[1] - 1))
    found[:, first:] = np.asarray(_kl(dense[:, first:-1], out.logits[:, :-1]), np.float64)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a DMS retrofit's output directory")
    parser.add_argument("--lengths", default="1024:6,2048:6", help="tokens:sequences,... (default %(default)s)")
    parser.add_argument("--entries", type=int, nargs="*", help="per head, for each length; where there is no DMS model")
    parser.add_argument("--batch-size", type=int, default=6, help="default %(default)s")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()

    lm = kvs.load(args.model)
    lengths = list(parse_lengths(args.lengths))
    if args.entries is not None and len(args.entries) != len(lengths):
        parser.error(f"--entries needs a number for each of {len(lengths)} lengths")
    if args.entries is None and not isinstance(lm.policy, kvs.DMS):
        parser.error(f"{args.model} is no DMS model: give --entries")
    figures: list[dict[str, Any]] = []
    for nth, (length, count) in enumerate(lengths):
        texts = evaluate.held_out_sequences(lm.tokenizer, length, count, KINDS)
        found: dict[str, Estimate] = {}
        decision_cr = None
        if args.entries is None:
            results = {result.role: result for result in evaluate.evaluate(lm, [texts]).results}
            found["DMS"], found["StreamingLLM"] = (results[role].quality.kl for role in ("own", "equal_memory"))
            budget, decision_cr = round(results["own"].memory.live_per_head), results["own"].memory.nominal_cr
        else:
            budget = args.entries[nth]
            streaming = evaluate.evaluate(lm.with_policy(kvs.StreamingLLM(budget)), [texts], equal_memory=False)
            found["StreamingLLM"] = next(r for r in streaming.results if r.role == "own").quality.kl
        for name, policy in {
            "H2O": kvs.H2O(budget=budget, sinks=4),
            "TOVA": kvs.TOVA(budget=budget, sinks=4),
        }.items():
            ids = np.asarray(texts.ids)
            rows = [
                divergence(lm, policy, ids[i : i + args.batch_size], budget // 2).mean(1)
                for i in range(0, count, args.batch_size)
            ]
            found[name] = Estimate.of(np.concatenate(rows))
            print(f"{length} x {count}, {budget} entries per head, {name}: KL {found[name]:.4f}", flush=True)
        for name, kl in found.items():
            figures.append(
                {
                    "length": length,
                    "sequences": count,
                    "decision_cr": decision_cr,
                    "entries_per_head": budget,
                    "method": name,
                    "kl": kl.mean,
                    "stderr": kl.stderr,
                    "times_dms": kl.mean / found["DMS"].mean if "DMS" in found else None,
                }
            )
            times = f", {kl.mean / found['DMS'].mean:.2f} times DMS" if "DMS" in found else ""
            print(f"{length} x {count}: {name:15} KL {kl:.4f}{times}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""H2O and TOVA (4 sinks each) beside a DMS model, token by token, with as many entries per head as DMS holds.

Held-out text of several kinds is fed through the real cache one token at a time, as in decoding: each policy evicts by
its own rule after every token, and KL(dense || compressed) is averaged over all positions. Each gets as its budget what
DMS holds per head (mean over heads, layers and sequences) at the end of the sequence, so its bytes are the same there.
On two CPU cores a step of six sequences takes 0.3 s, so the default takes half an hour.

    python -m benchmarks.attention_baselines --model runs/cr8 --lengths 1024:6,2048:6 --json OUT
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
    parser.add_argument("--batch-size", type=int, default=6, help="default %(default)s")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()

    lm = kvs.load(args.model)
    figures: list[dict[str, Any]] = []
    for length, count in parse_lengths(args.lengths):
        texts = evaluate.held_out_sequences(lm.tokenizer, length, count, KINDS)
        report = evaluate.evaluate(lm, [texts])
        by_role = {result.role: result for result in report.results}
        own, streaming = by_role["own"], by_role["equal_memory"]
        budget = round(own.memory.live_per_head)
        found = {"DMS": own.quality.kl, "StreamingLLM": streaming.quality.kl}
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
                    "decision_cr": own.memory.nominal_cr,
                    "entries_per_head": budget,
                    "method": name,
                    "kl": kl.mean,
                    "stderr": kl.stderr,
                    "times_dms": kl.mean / own.quality.kl.mean,
                }
            )
            print(
                f"{length} x {count}: {name:15} KL {kl:.4f}, {kl.mean / own.quality.kl.mean:.2f} times DMS", flush=True
            )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

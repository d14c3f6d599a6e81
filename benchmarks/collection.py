"""What a KVzap surrogate is trained on, collected by this library and by the original PyTorch code, in turn.

    python -m benchmarks.collection --kvpress PYTHON --checkout DIRECTORY

Every held-out prompt of 750 to 1250 tokens goes through one and then through the other: both run "P, repeat it: P" once
and take 500 tokens of P; ours adds all of P to the sums of the linear surrogate as well, as ``python -m train.kvzap``
does. PYTHON has torch, transformers, triton, pandas and kvpress; DIRECTORY is a checkout of kvpress, whose
kvzap/data.py is run as it is, attention eager as it needs. The mean score of every layer and head is compared, too.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvsparse_jax as kvs
from kvsparse_jax import corpus
from train import surrogate
from train.data import Loader, Source
from train.kvzap import Contexts, lengths

SAMPLE = 500


class Theirs:
    """kvpress_collection.py under another interpreter."""

    def __init__(self, python: str, checkout: str, model: Path, texts: list[str]):
        script = str(Path(__file__).with_name("kvpress_collection.py"))
        self._child = subprocess.Popen(
            [python, script, "--checkout", checkout, "--model", str(model), "--sample", str(SAMPLE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.versions = self._ask(texts)

    def _ask(self, what: Any) -> Any:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(json.dumps(what) + "\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        if not line:
            raise kvs.RunError(f"kvpress_collection.py ended with status {self._child.wait()}")
        return json.loads(line)

    def collect(self, number: int) -> dict[str, Any]:
        """Seconds, tokens and mean scores [L, H] of one text."""
        found: dict[str, Any] = self._ask(number)
        return found

    def close(self) -> None:
        """Ends it."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="default %(default)s")
    parser.add_argument("--kvpress", required=True, help="interpreter with torch and kvpress")
    parser.add_argument("--checkout", required=True, help="checkout of kvpress")
    parser.add_argument("--prompts", type=int, default=15, help="default %(default)s")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()

    lm = kvs.load(args.model, dtype="bfloat16").with_policy(kvs.Dense())
    assert lm.tokenizer is not None and lm.source is not None
    sources = [Source.parse(f"builtin:{kind}") for kind in corpus.KINDS]
    sizes = lengths(750, 1250)
    loader = Loader(sources, lm.tokenizer, batch_size=1, sequence_length=sizes[-1], split="heldout")
    contexts = Contexts(loader, sizes, 1)
    prompts = [next(contexts) for _ in range(args.prompts)]
    extended = surrogate.Extended.of(lm.tokenizer)
    sums: Any = surrogate.Sums.zero(lm.config)

    def ours(prompt: np.ndarray, rng: np.random.Generator) -> tuple[float, np.ndarray]:
        nonlocal sums
        before = np.asarray(sums.y)
        start = time.perf_counter()
        context, probe = extended.spans(prompt.shape[1])
        chosen = np.sort(rng.choice(prompt.shape[1], SAMPLE, replace=False))[None]
        sums, x, y = surrogate.collect(
            lm.params,
            lm.config,
            jnp.asarray(extended.ids(prompt)),
            sums,
            jnp.asarray(chosen, jnp.int32),
            context=context,
            probe=probe,
        )
        np.asarray(x), np.asarray(y)
        jax.block_until_ready(sums)
        seconds = time.perf_counter() - start
        return seconds, (np.asarray(sums.y) - before) / prompt.shape[1]

    rng = np.random.default_rng(0)
    for prompt in prompts[: len(sizes)]:  # every length is compiled once
        ours(prompt, rng)
    theirs = Theirs(args.kvpress, args.checkout, lm.source, [lm.tokenizer.decode(p[0].tolist()) for p in prompts])
    theirs.collect(0)
    rows = []
    for number, prompt in enumerate(prompts):
        seconds, scores = ours(prompt, rng)
        other = theirs.collect(number)
        same = other["tokens"] == prompt.shape[1]  # the original strips white space around the text
        apart = float(np.abs(scores - np.asarray(other["scores"])).max()) if same else None
        rows.append(
            {
                "tokens": [prompt.shape[1], other["tokens"]],
                "seconds": [seconds, other["seconds"]],
                "largest difference of a head's mean score": apart,
            }
        )
        print(f"prompt {number + 1} of {len(prompts)}: {rows[-1]}", file=sys.stderr, flush=True)
    theirs.close()
    each = [row["tokens"][0] / row["seconds"][0] * row["seconds"][1] / row["tokens"][1] for row in rows]  # type: ignore[index]
    figures = {
        "versions": {"jax": jax.__version__, **theirs.versions},
        "tokens per second, ours over theirs": {
            "median": float(np.median(each)),
            "quartiles": [float(x) for x in np.quantile(each, (0.25, 0.75))],
        },
        "prompts": rows,
    }
    print(json.dumps({k: v for k, v in figures.items() if k != "prompts"}, indent=2))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()

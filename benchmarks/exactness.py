"""Whether generation on the compressed cache is exact on a real model: token for token, over several turns.

    python -m benchmarks.exactness --model runs/retrofit

Layers amplify rounding, and a decision logit near 0 may fall on either side of it; so decisions are recorded first, in
one pass over whole sequences, and then given to both sides: the paged cache, which generates greedily in ragged rows
and several turns, and masked attention over whole sequences, which never saw a cache. Every token must be the likeliest
of the reference, given the history. Float32.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import kvsparse_jax as kvs
from kvsparse_jax import cli
from kvsparse_jax.errors import InputError, RunError
from kvsparse_jax.evaluate import held_out_sequences
from kvsparse_jax.policies import DMS, LayerInput, Policy

TEXT, LONGEST = 1024, 220
"""Tokens of text that a row has to say, and that it says at most in a turn."""

CLOSE = 2e-3
"""Logits nearer to 0 than this may decide either way when sums are taken in another order."""


@dataclass(frozen=True)
class Recorded(Policy):
    """Gives the decisions that it was made with.

    Attributes:
        params: [L, B, H, S] bool, whether the token at each position of each row flags.
        window: tokens.
        shift: 0 or 1.
    """

    params: Any
    window: int = 0
    shift: int = 0

    def gate(self, params: Any, layer: LayerInput) -> Array:
        """[B, H, T], 1 or -1."""
        at = jnp.minimum(layer.positions, params.shape[2] - 1)[:, None]
        at = jnp.broadcast_to(at, (*params.shape[:2], at.shape[2]))
        return jnp.where(jnp.take_along_axis(params, at, 2), 1.0, -1.0).astype(layer.residual.dtype)


jax.tree_util.register_dataclass(Recorded, data_fields=["params"], meta_fields=["window", "shift"])


def _converse(lm: kvs.LM, turns: Sequence[Sequence[list[int]]], new: int) -> list[list[int]]:
    """History of each row after all turns of an appended text and ``new`` greedy tokens."""
    session = lm.session(len(turns[0]), prefill_chunk=64)
    with session:
        for turn in turns:
            session.append(turn)
            session.generate(new, temperature=0.0, eos=False)
        return session.tokens


def _padded(histories: Sequence[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    length = max(len(h) for h in histories)
    ids = np.asarray([[*h, *[0] * (length - len(h))] for h in histories], np.int32)
    return ids, np.arange(length)[None] < np.asarray([len(h) for h in histories])[:, None]


def texts(lm: kvs.LM, rows: int, turns: int, seed: int) -> list[list[list[int]]]:
    """Token ids that each row says in each turn: held-out text, of other lengths in every row."""
    text = held_out_sequences(lm.tokenizer, TEXT, rows, seed=seed).ids
    rng = np.random.default_rng(seed)
    said: list[list[list[int]]] = []
    used = np.zeros(rows, int)
    for _ in range(turns):
        sizes = rng.integers(20, LONGEST, rows)
        said.append([text[r, used[r] : used[r] + n].tolist() for r, n in enumerate(sizes)])
        used += sizes
    return said


def check(lm: kvs.LM, said: Sequence[Sequence[list[int]]], new: int) -> dict[str, Any]:
    """One conversation: what is said [turn][row], and ``new`` tokens drawn after it. RunError where a token differs."""
    policy = lm.policy
    if not isinstance(policy, DMS):
        raise InputError("this needs a model with a DMS policy")
    rows, turns = len(said[0]), len(said)
    ids, real = _padded(_converse(lm, said, new))
    flags = np.asarray(kvs.decision_logits(lm, ids, real))
    given = lm.with_policy(Recorded(jnp.asarray(flags > 0), policy.window, policy.shift))
    histories = _converse(given, said, new)
    ids, real = _padded(histories)
    reference = np.asarray(given.logits(ids, real))
    drawn = wrong = 0
    margin = np.inf
    for r, history in enumerate(histories):
        at = 0
        for turn in said:
            at += len(turn[r])
            for position in range(at - 1, at + new - 1):
                best = int(reference[r, position].argmax())
                drawn, wrong = drawn + 1, wrong + (best != history[position + 1])
                margin = min(margin, float(np.diff(np.sort(reference[r, position])[-2:])[0]))
            at += new
    replay = given.replay(ids, real, prefill=max(ids.shape[1] - 16, 1), prefill_chunk=64)
    error = float(np.abs(replay.logits - reference)[real].max())
    result = {
        "rows": rows,
        "turns": turns,
        "prompt_tokens": [[len(t) for t in turn] for turn in said],
        "tokens_drawn": drawn,
        "tokens_that_differ": wrong,
        "smallest_margin": margin,
        "largest_logit_error": error,
        "largest_logit": float(np.abs(reference[real]).max()),
        "kept_fraction": float((replay.live[-1] / real.sum(1)[None, :, None]).mean()),
        "share_of_decisions_near_0": float((np.abs(flags) <= CLOSE).mean()),
    }
    if wrong:
        raise RunError(f"{wrong} of {drawn} tokens are not the reference's: {result}")
    return result


def _parser() -> cli.Parser:
    parser = cli.parser("python -m benchmarks.exactness", __doc__.strip())
    parser.add_argument("--model", required=True, help="directory of a retrofit")
    parser.add_argument("--rows", type=int, default=4, help="ragged rows")
    parser.add_argument("--turns", type=int, default=3, help="texts appended to each")
    parser.add_argument("--new", type=int, default=24, unit="tokens", help="drawn after each of them")
    parser.add_argument("--seed", type=int, default=0, help="which texts")
    parser.add_argument("--output", default="benchmarks/results", help="directory for exactness.json")
    return parser


def _run(args: argparse.Namespace) -> None:
    if min(args.rows, args.turns, args.new) < 1 or args.turns * LONGEST > TEXT:
        raise InputError(f"--rows, --turns and --new must be at least 1, and --turns at most {TEXT // LONGEST}")
    lm = kvs.load(args.model, dtype="float32")
    found = check(lm, texts(lm, args.rows, args.turns, args.seed), args.new)
    for name, value in found.items():
        print(f"{name}: {value}")
    target = Path(args.output) / "exactness.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    cli.write_json_atomically(target, found)
    print(f"wrote {target}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; see :func:`kvsparse_jax.cli.run` for the exit status."""
    return cli.run(_run, argv, parser=_parser())


if __name__ == "__main__":
    sys.exit(main())

"""``python -m kvsparse_jax.evaluate``: evaluates a model and writes the report, a table and plots."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from kvsparse_jax import cli, corpus
from kvsparse_jax.errors import InputError
from kvsparse_jax.evaluate.contest import evaluate, passkey, report_of
from kvsparse_jax.evaluate.continuation import as_json, continuations, table
from kvsparse_jax.evaluate.figures import write
from kvsparse_jax.evaluate.sequences import (
    DEFAULT_KINDS,
    Sequences,
    held_out_sequences,
    read_documents,
    text_sequences,
)
from kvsparse_jax.lm import LM, load
from kvsparse_jax.policies import Dense, Policy, spec
from kvsparse_jax.policies.streaming import SINKS

DEFAULT_LENGTHS = ((1024, 20), (2048, 10))


def parse_lengths(text: str) -> list[tuple[int, int]]:
    """``1024:20,2048:10`` as (tokens, sequences); ``none`` is an empty list."""
    if text == "none":
        return []
    found = []
    for part in text.split(","):
        length, colon, count = part.partition(":")
        try:
            pair = (int(length), int(count) if colon else DEFAULT_LENGTHS[0][1])
        except ValueError:
            raise InputError(f"lengths {text!r}: {part!r} is not of the form TOKENS:SEQUENCES") from None
        if pair[0] < 2 or pair[1] < 1:
            raise InputError(f"lengths {text!r}: {part!r} needs at least 2 tokens and 1 sequence")
        found.append(pair)
    if len({length for length, _ in found}) < len(found):
        raise InputError(f"lengths {text!r} name a length twice")
    return found


def _parser() -> cli.Parser:
    p = cli.parser(
        "python -m kvsparse_jax.evaluate",
        "Measures what a compressed model loses against the same model with its full cache: KL and perplexity on\n"
        "held-out text, teacher-forced with hard eviction, at each context length, beside StreamingLLM with the same\n"
        "memory.",
        epilog="Examples:\n"
        "  python -m kvsparse_jax.evaluate --model runs/demo/final --passkey 100 --output runs/demo/evaluation\n"
        "  python -m kvsparse_jax.evaluate --model smollm2-135m --policy streaming:cr=4 streaming:cr=8 masked",
    )
    p.add_argument(
        "--model", required=True, help="directory, hub name or smollm2-135m, with the policy it was trained with"
    )
    p.add_argument(
        "--reference", help="compare with this model instead of the same weights (if all weights were trained)"
    )
    p.add_argument("--output", default="evaluation", help="directory for the report, the table and the plots")
    p.add_argument("--overwrite", action="store_true", help="replace an evaluation that is there already")
    p.add_argument("--dtype", default="stored", choices=("stored", "bfloat16", "float32"), help="of the weights")
    p.add_argument("--batch-size", type=int, default=1, unit="sequences", help="computed together")
    p.add_argument(
        "--policy",
        nargs="+",
        metavar="NAME:KEY=VALUE",
        help="further policies to compare: " + "; ".join(kind.help for kind in spec.KINDS.values()),
    )
    p.add_argument(
        "--equal-memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=("StreamingLLM with the memory that the model's policy holds at the end of a sequence"),
    )
    p.add_argument("--sinks", type=int, default=SINKS, unit="tokens", help="of that StreamingLLM")
    text = p.add_argument_group("text")
    text.add_argument(
        "--data",
        nargs="+",
        help=(
            "one's own text instead of the built-in: files, directories or patterns; .json and .jsonl hold messages or "
            "text"
        ),
    )
    text.add_argument("--text-column", default="text", help="where a JSON object has its text")
    text.add_argument(
        "--kinds",
        nargs="+",
        metavar="KIND",
        help=(f"kinds of built-in held-out text, of {', '.join(corpus.KINDS)}; default: {' '.join(DEFAULT_KINDS)}"),
    )
    text.add_argument(
        "--lengths",
        default=",".join(f"{n}:{count}" for n, count in DEFAULT_LENGTHS),
        help=(
            "TOKENS:SEQUENCES of each context length, sequences spread over the kinds of text; none for retrieval alone"
        ),
    )
    text.add_argument(
        "--after",
        type=int,
        unit="tokens",
        help=(
            "compare on what follows a compressed prompt instead: the last so many tokens of each sequence are scored, "
            "the others are a prompt that the policies compress"
        ),
    )
    text.add_argument("--seed", type=int, default=0, help="which held-out files and retrieval prompts")
    text.add_argument("--passkey", type=int, default=0, unit="prompts", help="retrieval prompts; 0: none")
    text.add_argument("--passkey-length", type=int, default=1000, unit="tokens", help="of a retrieval prompt, about")
    return p


def _run(args: argparse.Namespace) -> int:
    lengths = parse_lengths(args.lengths)
    if args.passkey < 0:
        raise InputError(f"--passkey must be at least 0, not {args.passkey}")
    if args.after is not None and (args.passkey or args.reference):
        raise InputError("--after is a comparison of its own: leave out --passkey and --reference")
    if not lengths and not args.passkey:
        raise InputError("nothing to evaluate: --lengths is none and --passkey is 0")
    if args.data and args.kinds:
        raise InputError("--kinds is about the built-in text: leave it out, or leave out --data")
    documents = read_documents(args.data, args.text_column) if args.data else None
    kinds = args.kinds or DEFAULT_KINDS
    output = cli.fresh_directory(args.output, "evaluation")
    if not args.overwrite and any((output / x).exists() for x in ("report.json", "continuations.json")):
        raise InputError(f"{output} holds an evaluation already; choose another --output or pass --overwrite")
    lm = load(args.model, dtype=None if args.dtype == "stored" else args.dtype)
    reference = load(args.reference, dtype=jnp.dtype(lm.params["embed"].dtype)) if args.reference else None
    specs = args.policy or []
    methods = {text: spec.parse(text, lm.policy) for text in specs}
    if len(methods) < len(specs):
        raise InputError("a policy is named twice")
    settings: dict[str, Any] = {
        "methods": methods,
        "reference": reference,
        "equal_memory": args.equal_memory,
        "sinks": args.sinks,
        "batch_size": args.batch_size,
        "progress": True,
    }
    limit = lm.config.max_positions
    if too_long := [length for length, _ in lengths if length > limit]:
        raise InputError(f"--lengths asks for {too_long[0]} tokens; the model's context is {limit}")
    groups = [
        held_out_sequences(lm.tokenizer, length, count, kinds, args.seed)
        if documents is None
        else text_sequences(lm.tokenizer, documents, length, count)
        for length, count in lengths
    ]
    prompts = []
    if args.passkey:
        if lm.tokenizer is None:
            raise InputError("the model directory has no tokenizer, so there can be no retrieval prompts")
        prompts = corpus.passkey_prompts(lm.tokenizer, args.passkey, args.passkey_length, args.seed)
        longest = max(len(p.prompt_ids) + len(p.answer_ids) for p in prompts)
        if longest > lm.config.max_positions:
            raise InputError(
                f"retrieval prompts of {longest} tokens exceed the model's context of {lm.config.max_positions}"
            )
    if args.after is not None:
        print(_continuations(lm, groups, methods, args, output))
        return 0
    report = evaluate(lm, groups, **settings) if groups else report_of(lm, reference)
    if prompts:
        report = dataclasses.replace(report, retrieval=passkey(lm, prompts, **settings))
    files = write(report, output)
    print(report.table())
    print("written: " + " ".join(map(str, files)), file=sys.stderr)
    return 0


def _continuations(
    lm: LM, groups: Sequence[Sequences], methods: dict[str, spec.Method], args: argparse.Namespace, output: Path
) -> str:
    """Compares the policies on what follows compressed prompts, and writes the results; returns the tables."""
    tables, found = [], []
    for group in groups:
        length = group.ids.shape[1]
        if not 2 <= args.after < length:
            raise InputError(
                f"--after must be from 2 to {length - 1}, tokens of a sequence of {length}, not {args.after}"
            )
        context = length - args.after
        own = {} if isinstance(lm.policy, Dense) else {type(lm.policy).__name__: lm.policy}
        chosen = own | {name: m if isinstance(m, Policy) else m(context) for name, m in methods.items()}
        results = continuations(lm, chosen, group.ids, context, batch_size=args.batch_size, progress=True)
        found += as_json(results)
        tables.append(f"{args.after} tokens after {context}, {len(group.ids)} texts\n\n{table(results)}")
    text = "\n\n".join(tables) + "\n"
    cli.write_json_atomically(output / "continuations.json", found)
    (output / "continuations.md").write_text(text)
    print(f"written: {output / 'continuations.json'} {output / 'continuations.md'}", file=sys.stderr)
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; see :mod:`kvsparse_jax.cli` for the exit status."""
    return cli.run(_run, argv, parser=_parser())


if __name__ == "__main__":
    sys.exit(main())

"""Generates text with a compressed KV cache: ``python -m serve.generate --model DIR --prompt TEXT``."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kvsparse_jax as kvs
from kvsparse_jax import cli
from kvsparse_jax.cache.quantise import QUANTISATIONS
from kvsparse_jax.cache.report import CacheReport
from kvsparse_jax.errors import InputError
from kvsparse_jax.generation import GenerateOutput, Session
from kvsparse_jax.policies import Policy, spec

_EXAMPLES = """examples:
  python -m serve.generate --model smollm2-135m --chat --prompt "What is a KV cache?" --stream
  python -m serve.generate --model out/retrofit --prompt-file long.txt --prefill-chunk 512 --json
  echo "Once upon a time" | python -m serve.generate --model out/retrofit --temperature 0
"""


def _parser() -> cli.Parser:
    p = cli.parser(
        "python -m serve.generate",
        "Continues a prompt. The text goes to the standard output, everything else to the standard error.",
        epilog=_EXAMPLES,
    )
    p.add_argument("--model", required=True, help="hub name, Hugging Face directory or a retrofit's output directory")
    dtypes = ("float32", "bfloat16", "float16")
    p.add_argument("--dtype", choices=dtypes, help="of weights and cache; the stored one by default")

    source = p.add_argument_group("prompt (the standard input, where neither is given)")
    source.add_argument("--prompt", action="append", help="the text; several make a batch")
    source.add_argument("--prompt-file", action="append", type=Path, help="a file that holds a text; may be repeated")
    kind = source.add_mutually_exclusive_group()
    kind.add_argument("--chat", action="store_true", help="a prompt is a user's message for the chat template")
    kind.add_argument("--raw", action="store_true", help="a prompt is continued as it is (the default)")

    how = p.add_argument_group("sampling")
    how.add_argument("--max-new-tokens", type=int, default=256, unit="tokens", help="most to generate for a prompt")
    how.add_argument("--temperature", type=float, default=0.6, help="0 always takes the most probable token")
    how.add_argument("--top-k", type=int, default=20, unit="tokens", help="most probable tokens to choose from; 0: all")
    how.add_argument("--top-p", type=float, default=0.95, help="probability of those to choose from, above 0; 1: all")
    how.add_argument("--min-p", type=float, default=0.0, help="least probability, as a fraction of the largest; 0: off")
    how.add_argument("--repetition-penalty", type=float, default=1.0, help="divides logits of tokens seen; 1: off")
    how.add_argument("--seed", type=int, default=0, help="the same seed gives the same text")
    how.add_argument("--stop", action="append", default=[], help="text before which to end; may be repeated")
    how.add_argument("--no-eos", action="store_true", help="go on at the model's end-of-text tokens")

    cache = p.add_argument_group("cache")
    cache.add_argument(
        "--policy",
        metavar="NAME:KEY=VALUE",
        help="instead of the model's own: " + "; ".join(kind.help for kind in spec.KINDS.values()),
    )
    cache.add_argument("--prefill-chunk", type=int, unit="tokens", help="of a prompt taken in at once; all by default")
    cache.add_argument("--cache", default="paged", choices=("paged", "dense"), help="dense frees nothing: the baseline")
    cache.add_argument("--page-size", type=int, default=64, unit="tokens", help="slots of a page")
    cache.add_argument("--capacity", type=int, unit="tokens per head", help="average size of the pool; grown if absent")
    cache.add_argument("--when-full", default="grow", choices=("grow", "evict", "error"), help="what a full pool does")
    cache.add_argument("--kv-dtype", choices=QUANTISATIONS, help="8-bit keys and values; the model's dtype by default")

    out = p.add_argument_group("output")
    out.add_argument("--stream", action="store_true", help="show the text as it arrives (one prompt)")
    out.add_argument("--json", action="store_true", help="print one JSON object: texts, tokens, cache report")
    return p


def _prompts(args: argparse.Namespace) -> list[str]:
    texts = list(args.prompt or [])
    for path in args.prompt_file or []:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            raise InputError(f"{path} is not UTF-8 text") from None
        except OSError as error:
            raise InputError(f"--prompt-file {path}: {error.strerror}") from None
        except ValueError as error:  # a path with a null byte
            raise InputError(f"--prompt-file {str(path)!r}: {error}") from None
    if not texts:
        try:
            texts = [sys.stdin.buffer.read().decode("utf-8")]
        except UnicodeDecodeError:
            raise InputError("the standard input is not UTF-8 text") from None
        if not texts[0]:
            raise InputError("the standard input is empty: give --prompt, --prompt-file or text on the standard input")
    return texts


def _cache_summary(report: CacheReport) -> dict[str, Any]:
    """The report with the counts of its heads summed up, for JSON."""
    plain = {field.name: getattr(report, field.name) for field in dataclasses.fields(report)}
    shown = {name: value for name, value in plain.items() if not isinstance(value, np.ndarray)}
    shown |= {"seen": report.seen.tolist(), "live": report.live.tolist()}
    # A cache in which every counted token is flagged has no finite nominal ratio, and JSON has no infinity.
    return {k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in shown.items()}


def _show(args: argparse.Namespace, prompts: list[str], out: GenerateOutput) -> None:
    report = out.cache
    if args.json:
        texts = out.text or [""] * len(out.tokens)
        rows = [
            {"prompt": prompt, "text": text, "tokens": tokens, "finish_reason": reason}
            for prompt, text, tokens, reason in zip(prompts, texts, out.tokens, out.finish_reason, strict=True)
        ]
        print(json.dumps({"outputs": rows, "cache": _cache_summary(report)}, ensure_ascii=False, allow_nan=False))
    elif not args.stream:
        for number, text in enumerate(out.text or []):
            if len(prompts) > 1:
                print(f"--- {number + 1} ---")
            print(text)
    print(
        f"cache: {report.used / 2**20:.2f} MiB used of {report.nbytes / 2**20:.2f} MiB allocated for "
        f"{int(report.seen.sum())} tokens seen; dense {report.dense_nbytes / 2**20:.2f} MiB; "
        f"CR physical {report.cr_physical:.2f}, nominal {report.cr_nominal:.2f}"
        + (f"; grown {len(report.grown)} times" if report.grown else ""),
        file=sys.stderr,
    )


def _stream(session: Session, prompt: str, settings: dict[str, Any]) -> GenerateOutput:
    session.append([prompt])
    tokens, text, reason = [], "", None
    for piece in session.stream(**settings):
        tokens += [] if piece.token is None else [piece.token]
        text, reason = text + piece.text, piece.finish_reason
        print(piece.text, end="", flush=True)
    print()
    return GenerateOutput([tokens], [text], [reason or "length"], session.report())


def _run(args: argparse.Namespace) -> None:
    if args.stream and args.json:
        raise InputError("--stream shows the text as it arrives and --json all at the end: give one of them")
    prompts = _prompts(args)
    if args.stream and len(prompts) > 1:
        raise InputError(f"--stream takes one prompt, not {len(prompts)}")
    lm = kvs.load(args.model, dtype=args.dtype)
    if args.policy:
        method = spec.parse(args.policy, lm.policy)
        if not isinstance(method, Policy):
            if lm.tokenizer is None:
                raise InputError("a policy with cr= needs the length of the prompts, and this model has no tokenizer")
            method = method(max(len(lm.tokenizer.encode(prompt)) for prompt in prompts))
        lm = lm.with_policy(method)
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop")
    settings = {name: getattr(args, name) for name in names} | {"eos": not args.no_eos}
    storage = ("chat", "prefill_chunk", "cache", "page_size", "capacity", "when_full", "kv_dtype")
    options = {name: getattr(args, name) for name in storage}
    if args.stream:
        with lm.session(**options) as session:
            out = _stream(session, prompts[0], settings)
    else:
        out = lm.generate(prompts, **settings, **options)
    _show(args, prompts, out)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; see :func:`kvsparse_jax.cli.run` for the exit status."""
    return cli.run(_run, argv, parser=_parser())


if __name__ == "__main__":
    sys.exit(main())

"""Accuracy against KV tokens read and held, over lengths, widths and compressions: ``python -m serve.hyperscale``."""

import argparse
import dataclasses
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvsparse_jax as kvs
from kvsparse_jax import cli, hyperscale
from kvsparse_jax.cache.quantise import QUANTISATIONS
from kvsparse_jax.engine import Engine, EngineOptions, SamplingOptions
from kvsparse_jax.engine.runner import check_policy
from kvsparse_jax.errors import InputError
from kvsparse_jax.hyperscale import Chain, Configuration, Problem
from kvsparse_jax.hyperscale.problems import KINDS
from kvsparse_jax.hyperscale.results import DENSE
from kvsparse_jax.lm import LM
from kvsparse_jax.policies import Dense, Policy, spec

_EXAMPLES = """examples:
  python -m serve.hyperscale --model runs/qwen3-8b --problems aime24.jsonl --output runs/scaling \\
      --config 8192:1:dense 16384:1:dense 8192:4:dense 8192:4:own 16384:4:own 8192:16:own
  python -m serve.hyperscale --model smollm2-135m --problems arithmetic:count=40 --output runs/toy \\
      --config 64:1:dense 64:4:dense 64:4:streaming:cr=4 64:8:streaming:cr=4
"""


def _parser() -> cli.Parser:
    p = cli.parser(
        "python -m serve.hyperscale",
        "Answers problems by the majority of parallel chains, and shows accuracy against KV tokens read and held.\n"
        "Writes chains.jsonl (as they are done: a run that was interrupted goes on), hyperscale.json, .md and .png.",
        epilog=_EXAMPLES,
    )
    p.add_argument("--model", required=True, help="hub name, Hugging Face directory or a retrofit's output directory")
    kinds = "; ".join(f"{name}: {kind.help}" for name, kind in KINDS.items())
    p.add_argument(
        "--problems", required=True, metavar="FILE|KIND",
        help='JSONL of {"prompt": ..., "answer": ...}, or KIND:count=50,steps=4,seed=0 of ' + kinds,
    )  # fmt: skip
    p.add_argument("--output", required=True, type=Path, help="directory of the results")
    p.add_argument(
        "--config", required=True, nargs="+", metavar="LENGTH:WIDTH:METHOD",
        help="tokens of a chain, chains, and what the cache keeps: dense, own (the model's own policy), a directory "
        "(the same model compressed otherwise: exports/cr-4), or "
        + "; ".join(kind.help for name, kind in spec.KINDS.items() if name in ("streaming", "kvzap", "own")),
    )  # fmt: skip
    p.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of weights and cache; default: stored")

    how = p.add_argument_group("chains")
    how.add_argument("--raw", action="store_true", help="prompts as they are, without the model's chat template")
    how.add_argument("--temperature", type=float, default=0.6, help="0: the most probable token, for widths of 1")
    how.add_argument("--top-k", type=int, default=20, unit="tokens", help="most probable to choose from; 0: all")
    how.add_argument("--top-p", type=float, default=0.95, help="probability of those to choose from, above 0; 1: all")
    how.add_argument("--seed", type=int, default=0, help="of the chains")
    how.add_argument("--stop", action="append", default=[], help="text before which a chain ends; may be repeated")

    answer = p.add_argument_group("answers")
    answer.add_argument("--pattern", help=r"regular expression of an answer; else \boxed{}, 'answer: ', a number")
    answer.add_argument(
        "--match", choices=("auto", "exact", "math"), default="auto",
        help="equal answers: as texts and numbers, or as mathematics (math-verify); auto: that, where it is installed",
    )  # fmt: skip

    engine = p.add_argument_group("engine")
    engine.add_argument("--slots", type=int, default=16, unit="chains", help="most that run at a time")
    engine.add_argument("--pool", type=float, default=1.0, unit="GiB", help="of the pool of pages")
    engine.add_argument("--page-size", type=int, default=64, unit="tokens", help="slots of a page")
    engine.add_argument("--prefill-chunk", type=int, default=256, unit="tokens", help="of prompts that a step takes in")
    engine.add_argument("--kv-dtype", choices=QUANTISATIONS, help="8-bit keys and values; default: the model's dtype")
    return p


def _method(lm: LM, name: str, tokens: int, dtype: str | None) -> LM:
    """The model with what a method keeps; ``tokens``: of a prompt and its chain."""
    if name == DENSE:
        return lm.with_policy(Dense())
    if name == "own":
        if isinstance(lm.policy, Dense):
            raise InputError("method 'own': the model has no policy of its own")
        return lm
    if Path(name).is_dir():
        other = kvs.load(name, dtype=dtype)
        if other.config.vocab_size != lm.config.vocab_size:
            raise InputError(f"method {name!r} is another model: {other.config.vocab_size} tokens in its vocabulary")
        return other
    found = spec.parse(name, lm.policy)
    return lm.with_policy(found if isinstance(found, Policy) else found(tokens))


def _encoded(lm: LM, problems: Sequence[Problem], raw: bool) -> list[list[int]]:
    tokenizer = lm.tokenizer
    if tokenizer is None:
        raise InputError("this model has no tokenizer, so it can be asked nothing")
    if raw or not tokenizer.has_chat_template:
        return [tokenizer.encode(one.prompt) for one in problems]
    return [tokenizer.apply_chat_template([{"role": "user", "content": one.prompt}]) for one in problems]


def _read(file: Path) -> dict[tuple[str, int], list[Chain]]:
    """Chains that are done; half a line at the end, of a run that was killed, is left out."""
    found = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            row = json.loads(line)
            found[row["config"], row["problem"]] = [Chain(**one) for one in row["chains"]]
        except (ValueError, KeyError, TypeError):
            continue
    return found


def _row(config: str, problem: int, chains: Sequence[Chain]) -> str:
    row = {"config": config, "problem": problem, "chains": [dataclasses.asdict(one) for one in chains]}
    return json.dumps(row, ensure_ascii=False) + "\n"


def _settings(args: argparse.Namespace, problems: Sequence[Problem]) -> dict[str, Any]:
    """What the chains depend on."""
    names = ("model", "dtype", "raw", "temperature", "top_k", "top_p", "seed", "stop", "kv_dtype")
    text = json.dumps([dataclasses.astuple(one) for one in problems])
    return {name: getattr(args, name) for name in names} | {"problems": hashlib.sha256(text.encode()).hexdigest()}


def _run(args: argparse.Namespace) -> None:
    configs = list(dict.fromkeys(Configuration.parse(text) for text in args.config))
    if args.temperature == 0 and (wide := [one.name for one in configs if one.width > 1]):
        raise InputError(f"--temperature 0 makes all chains of {wide[0]} the same: give it a width of 1")
    if not 0 < args.pool < 2**20:
        raise InputError(f"--pool must be above 0 GiB, not {args.pool}")
    problems, same = hyperscale.problems(args.problems), hyperscale.equality(args.match)
    hyperscale.extract("", args.pattern)
    sampling = SamplingOptions(args.temperature, args.top_k, args.top_p, seed=args.seed, stop=tuple(args.stop))
    output = cli.fresh_directory(args.output, "hyperscale")
    settings, known = _settings(args, problems), output / "settings.json"
    if known.exists() and json.loads(known.read_text(encoding="utf-8")) != settings:
        raise InputError(f"{output} holds chains of other settings: choose another --output")
    lm = kvs.load(args.model, dtype=args.dtype)
    prompts = _encoded(lm, problems, args.raw)
    longest = max(map(len, prompts))
    if longest + max(one.length for one in configs) > lm.config.max_positions:
        raise InputError(
            f"the longest prompt has {longest} tokens, so {max(one.length for one in configs)} more do not fit into "
            f"the model's context of {lm.config.max_positions}"
        )
    for one in configs:  # a wrong one is told before the work; directories are loaded when their turn comes
        if not Path(one.method).is_dir():
            check_policy(_method(lm, one.method, longest + one.length, args.dtype).policy)
    cli.write_json_atomically(known, settings)

    file = output / "chains.jsonl"
    done = _read(file)
    if done:
        file.write_text("".join(_row(*key, chains) for key, chains in done.items()), encoding="utf-8")
    options = EngineOptions(
        slots=args.slots,
        pool_bytes=int(args.pool * 2**30),
        page_size=args.page_size,
        max_tokens=longest + max(one.length for one in configs),
        prefill_chunk=args.prefill_chunk,
        max_choices=max(one.width for one in configs),
        kv_dtype=args.kv_dtype,
    )
    engine: Engine | None = None
    made = ""
    total = len(configs) * len(problems)
    before = sum((one.name, i) in done for one in configs for i in range(len(problems)))
    with (
        cli.progress(total=total, initial=before, desc="hyperscale", unit="problems") as bar,
        file.open("a", encoding="utf-8") as out,
    ):
        for one in configs:
            missing = {i: prompt for i, prompt in enumerate(prompts) if (one.name, i) not in done}
            if not missing:
                continue
            bar.set_postfix(config=one.name)
            if engine is None or made != one.method or "cr=" in one.method:
                engine = None  # its pool goes before another is made
                model = _method(lm, one.method, longest + one.length, args.dtype)
                engine, made = model.engine(options), one.method
            for index, chains in hyperscale.run(engine, missing, one.length, one.width, sampling):
                done[one.name, index] = chains
                out.write(_row(one.name, index, chains))
                out.flush()
                bar.update()
    found = {one: [done[one.name, i] for i in range(len(problems))] for one in configs}
    rows = hyperscale.summary(problems, found, same, args.pattern)
    report = {"model": args.model, "problems": args.problems, "settings": settings, "rows": rows}
    files = [file, cli.write_json_atomically(output / "hyperscale.json", report)]
    text = hyperscale.table(rows)
    files += [output / "hyperscale.md", output / "hyperscale.png"]
    files[2].write_text(text, encoding="utf-8")
    hyperscale.figure(rows, f"{Path(args.model).name}, {len(problems)} problems").savefig(files[3])
    print(text)
    for path in files:
        print(f"written: {path}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; see :func:`kvsparse_jax.cli.run` for the exit status."""
    return cli.run(_run, argv, parser=_parser())


if __name__ == "__main__":
    sys.exit(main())

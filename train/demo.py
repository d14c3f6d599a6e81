"""The project's main job on a real model in one command: retrofit SmolLM2-135M with DMS, evaluate it, use it.

python -m train.demo            about 10 minutes on 2 CPU cores
python -m train.demo --quick    about 2 minutes
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvsparse_jax as kvs
from kvsparse_jax import cli, evaluate, plot
from train.config import RetrofitConfig, load_preset
from train.trainer import train

_QUESTION = "What is a cache in a computer, and why does it help?"

# What differs in two minutes: fewer rows for the oracle, fewer steps, fewer sequences.
_QUICK = {"init_rows": 8, "steps": 12, "warmup_steps": 2, "calibrate_rows": 4}


def _parser() -> cli.Parser:
    parser = cli.parser(
        "python -m train.demo",
        "Trains DMS eviction into a small model, shows that its KV cache is smaller and the model as good.",
    )
    parser.add_argument("--output", default=None, help="directory for everything (default: demo, or demo-quick)")
    parser.add_argument("--quick", action="store_true", help="two minutes: less training and less evaluation")
    parser.add_argument("--model", default="smollm2-135m", help="model to retrofit")
    parser.add_argument("--target-cr", type=float, default=4.0, help="compression ratio to train for")
    parser.add_argument("--sequences", type=int, default=None, help="held-out sequences (default: 14, quick 5)")
    parser.add_argument("--max-new-tokens", type=int, default=100, unit="tokens", help="length of the answers")
    return parser


def _configuration(args: argparse.Namespace, output: Path) -> RetrofitConfig:
    preset = load_preset("demo")
    changes: dict[str, Any] = _QUICK if args.quick else {}
    values = {**preset, **changes, "model": args.model, "output": str(output / "run"), "target_cr": args.target_cr}
    return RetrofitConfig(
        **{**values, "initial_cr": args.target_cr, "data": tuple(preset["data"]), "resume": "auto", "preset": "demo"}
    )


def _answers(lm: kvs.LM, question: str, length: int) -> list[tuple[str, kvs.generation.GenerateOutput]]:
    assert lm.tokenizer is not None
    chat = lm.tokenizer.has_chat_template
    found = []
    for name, policy in (("full cache", kvs.Dense()), ("compressed", lm.policy)):
        model = lm.with_policy(policy)
        found.append((name, model.generate([question], length, temperature=0.0, repetition_penalty=1.1, chat=chat)))
    return found


def _run(args: argparse.Namespace) -> int:
    output = Path(args.output or ("demo-quick" if args.quick else "demo"))
    config = _configuration(args, output)
    result = train(config)
    lm = kvs.load(result.model)
    count = args.sequences or (5 if args.quick else 14)
    sequences = evaluate.held_out_sequences(lm.tokenizer, config.sequence_length, count)
    report = evaluate.evaluate(lm, [sequences], progress=True)
    directory = output / "evaluation"
    directory.mkdir(parents=True, exist_ok=True)
    files = evaluate.write(report, directory)
    rows = [json.loads(line) for line in (result.output / "metrics.jsonl").read_text().splitlines()]
    curves = output / "training.png"
    plot.training_curves(rows, title=f"DMS retrofit of {args.model} to CR {args.target_cr:g}").savefig(curves)
    print(report.table())
    print(f"Prompt: {_QUESTION}\n")
    answers = _answers(lm, _QUESTION, args.max_new_tokens)
    for name, out in answers:
        cache = out.cache
        held = f"{cache.live.mean():.0f} of {cache.seen.mean():.0f} entries held per head"
        print(f"--- {name} ({held}, decisions {cache.cr_nominal:.1f}x)\n{(out.text or [''])[0].strip()}\n")
    cli.write_json_atomically(
        output / "answers.json",
        {"prompt": _QUESTION, "answers": {name: (out.text or [""])[0] for name, out in answers}},
    )
    print("Files:")
    for file in (curves, *files, output / "answers.json", result.model):
        print(f"  {file}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return cli.run(_run, argv, parser=_parser())


if __name__ == "__main__":
    sys.exit(main())

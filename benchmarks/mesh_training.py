"""Training does not depend on the devices: losses of every mesh, checkpoints on other meshes, a process that is killed.

    python -m benchmarks.mesh_training --json mesh_training.json       # ten minutes on two cores

A tiny model of eight KV heads is trained for 20 steps, in float32, on virtual CPU devices:

* in one process on every mesh whose size divides 8, against one device;
* in 4 real processes of 2 devices on every mesh of 8 (gloo between them);
* for half of the steps on 8 devices, and from that checkpoint to the end on 1, 2, 4 and 8;
* in 4 processes one of which is killed: the others have to end within a minute and name it, and the run goes on.

The learning rate is of the size that the recipes use. Training with a hundred times that is chaotic: a last digit
decides the sign of Adam's first step where a gradient is nearly zero, and the losses part within ten steps.
"""

import argparse
import dataclasses
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import kvsparse_jax as kvs
from kvsparse_jax import cli, distributed
from kvsparse_jax.errors import RunError
from kvsparse_jax.models import decoder
from train import trainer
from train.config import RetrofitConfig

ROOT = Path(__file__).resolve().parent.parent

STEPS, HEADS, CLOSE = 20, 8, 1e-5

Shape = tuple[int, int, int]


def shapes(devices: int) -> list[Shape]:
    """All meshes (data, fsdp, tensor) of so many devices."""
    ways = [n for n in range(1, devices + 1) if devices % n == 0]
    return [(d, f, t) for d in ways for f in ways for t in ways if d * f * t == devices]


def _name(shape: Shape) -> str:
    return "x".join(map(str, shape))


def prepare(root: Path) -> None:
    """Writes a model with random weights, and text."""
    source = ROOT / "tests" / "data" / "models" / "llama_tied"
    lm = kvs.load(source, dtype="float32")
    config = dataclasses.replace(lm.config, heads=HEADS, kv_heads=HEADS)
    # Larger weights than at the start of a training, or attention would be the same whatever it sees.
    params = jax.tree.map(lambda x: x * 3 if x.ndim > 2 else x, decoder.init_params(config, jax.random.key(0)))
    raw = lm.hf_config | {"num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    dataclasses.replace(lm, config=config, params=params, hf_config=raw, source=source).save(root / "model")
    words = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split()
    lines = (json.dumps({"text": " ".join(words[i : i + 90])}) for i in range(0, len(words) - 90, 20))
    (root / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")


def settings(root: Path, output: Path, shape: Shape, **more: Any) -> RetrofitConfig:
    """Of a run."""
    given: dict[str, Any] = dict(
        model=str(root / "model"),
        data=(str(root / "text.jsonl"),),
        output=str(output),
        target_cr=3.0,
        initial_cr=2.0,
        init="oracle",
        window=6,
        steps=STEPS,
        batch_size=8,
        sequence_length=96,
        lr=1e-4,
        dtype="float32",
        tensorboard=False,
        export_each_cr=False,
        mesh_data=shape[0],
        mesh_fsdp=shape[1],
        mesh_tensor=shape[2],
    )
    return RetrofitConfig(**given | more)


def rows(output: Path) -> list[dict[str, Any]]:
    """What a run wrote about its steps."""
    path = output / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def apart(output: Path, reference: list[dict[str, Any]]) -> float:
    """Largest difference of a loss from the reference; infinite where steps are missing."""
    found = {row["step"]: row["loss"] for row in rows(output)}
    return max(abs(found.get(row["step"], float("inf")) - row["loss"]) for row in reference)


# In the processes


def _work(
    root: str,
    name: str,
    meshes: Sequence[Sequence[int]],
    join: Sequence[Any],
    stop: int | None = None,
    **more: Any,
) -> None:
    distributed.start(*join)
    for data, fsdp, tensor in meshes:
        shape = data, fsdp, tensor
        config = settings(Path(root), Path(root) / f"{name}-{_name(shape)}", shape, **more)
        try:
            trainer.train(config, stop=None if stop is None else lambda step: bool(step == stop))
        except RunError as error:
            if stop is None or "stopped by request" not in str(error):
                raise


def start(
    root: Path, name: str, meshes: Sequence[Shape], processes: int = 1, **more: Any
) -> list[subprocess.Popen[str]]:
    """Processes that train on meshes, one after the other, of 8 devices together."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={8 // processes} --xla_backend_optimization_level=0",
        "JAX_PLATFORMS": "cpu",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    }
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    run = []
    for i in range(processes):
        join = [f"localhost:{port}", processes, i] if processes > 1 else []
        work = json.dumps({"root": str(root), "name": name, "meshes": meshes, "join": join} | more)
        command = [sys.executable, "-m", "benchmarks.mesh_training", "--work", work]
        run.append(subprocess.Popen(command, cwd=ROOT, env=environment, **pipes))
    return run


def finish(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Waits for all of them. Raises RunError with the output of one that failed."""
    for process in processes:
        out, _ = process.communicate(timeout=3600)
        if process.returncode:
            print(out, file=sys.stderr)
            raise RunError("a process of those above failed")


# The checks


def losses(root: Path, report: dict[str, Any]) -> list[dict[str, Any]]:
    """Every mesh, in one process and in four; the steps of one device."""
    finish(start(root, "one", [shape for n in (1, 2, 4, 8) for shape in shapes(n)]))
    reference = rows(root / "one-1x1x1")
    report["reference"] = {key: [row[key] for row in reference] for key in ("loss", "distillation", "evicted_fraction")}
    finish(start(root, "four", shapes(8), 4))
    for name in ("one", "four"):
        found = {path.name.partition("-")[2]: apart(path, reference) for path in sorted(root.glob(f"{name}-*"))}
        report[f"{name}_process_loss_difference"] = found
    return reference


def checkpoints(root: Path, report: dict[str, Any], reference: list[dict[str, Any]]) -> None:
    """Half of the steps on 8 devices, the rest on fewer."""
    half = STEPS // 2
    finish(start(root, "half", [(2, 2, 2)], stop=half))
    found = {}
    for shape in ((1, 1, 1), (1, 2, 1), (1, 2, 2), (2, 1, 4)):
        shutil.copytree(root / "half-2x2x2", root / f"rest-{_name(shape)}")
        finish(start(root, "rest", [shape], resume="auto"))
        found[_name(shape)] = apart(root / f"rest-{_name(shape)}", reference)
    report["restored_after_half_loss_difference"] = found


def killed(root: Path, report: dict[str, Any]) -> None:
    """One of four processes dies at a random step; what is left goes on in a single one."""
    draw = random.Random(0)
    after, victim = draw.randrange(6, 14), draw.randrange(1, 4)
    run = start(root, "killed", [(4, 2, 1)], 4, steps=4000, save_every=5)
    output = root / "killed-4x2x1"
    while len(rows(output)) < after:
        if any(process.poll() is not None for process in run):
            finish(run)
        time.sleep(0.1)
    run[victim].kill()
    began = time.monotonic()
    texts = [process.communicate(timeout=600)[0] for process in run]
    seconds = time.monotonic() - began
    others = [i for i in range(4) if i != victim]
    named = [i for i in others if re.search(rf"tasks are unhealthy[^\n]*:\n{victim}\n", texts[i])]
    stopped = len(rows(output))
    finish(start(root, "killed", [(4, 2, 1)], 1, steps=4000, save_every=5, resume="auto", stop=stopped + 5))
    report["killed"] = {
        "process": victim,
        "after_step": stopped,
        "seconds_until_all_ended": seconds,
        "ended_with_an_error": all(run[i].returncode for i in others),
        "named_by": named,
        "steps_after_going_on": [row["step"] for row in rows(output)] == list(range(1, stopped + 6)),
    }


def _run(args: argparse.Namespace) -> None:
    if args.work is not None:
        return _work(**json.loads(args.work))
    report: dict[str, Any] = {"jax": jax.__version__, "steps": STEPS}
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        prepare(root)
        killed(root, report)
        checkpoints(root, report, losses(root, report))
    wrong = []
    for key, found in report.items():
        if key.endswith("loss_difference"):
            print(f"{key}: {max(found.values()):.1e} at most, of {', '.join(found)}")
            wrong += [f"{key} of {name}" for name, value in found.items() if not value <= CLOSE]
    dead = report["killed"]
    print(f"killed: {dead}")
    if dead["seconds_until_all_ended"] > 60 or len(dead["named_by"]) < 3 or not dead["ended_with_an_error"]:
        wrong.append("killed")
    if not dead["steps_after_going_on"]:
        wrong.append("going on after a process was killed")
    if args.json is not None:
        print(cli.write_json_atomically(args.json, report))
    if wrong:
        raise RunError(f"not as they should be: {', '.join(wrong)}")


def _parser() -> cli.Parser:
    parser = cli.parser("python -m benchmarks.mesh_training", (__doc__ or "").partition("A tiny")[0].strip())
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--work", help=argparse.SUPPRESS)  # of the processes that it starts itself
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return cli.run(_run, argv, parser=_parser())


if __name__ == "__main__":
    sys.exit(main())

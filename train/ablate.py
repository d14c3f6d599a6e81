"""``python -m train.ablate``: a study, that is a grid or a list of runs, each trained and measured, in one table.

A study is a TOML file::

    title = "Immediate against delayed eviction"
    question = "..."
    paper = "arXiv 2506.05345, ..."
    fit = "retrofit"                       # train.retrofit, or "kvzap" (train.kvzap)
    seeds = 3
    measure = ["--lengths", "1024:12"]     # arguments of kvsparse_jax.evaluate; {fit} is the fit's directory
    [settings]                             # of every fit
    preset = "smollm2-135m"
    steps = 80
    [axes]                                 # all combinations; a value may be a table of several settings with a "name"
    window = [0, 16, 64, 256]

or, in place of ``[axes]``, a list of ``[[cells]]``. A name of an axis that stands in ``measure`` as {name} belongs to
the measurement; any other is a setting of the fit. Cells that differ in their measurement alone share a fit.

The fits of a study are its jobs: they run one after the other, or ``--job N`` runs one of them (``--job auto``: the one
that SLURM's or Kubernetes' array index names). What is done already is not done again, and an interrupted fit goes on
from its checkpoint. Whatever order they end in, the tables are those of all that is there.
"""

import contextlib
import csv
import dataclasses
import hashlib
import io
import itertools
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
import tomllib
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsparse_jax import cli
from kvsparse_jax.errors import InputError, RunError

KIND = "ablation study"
STUDIES = Path(__file__).parent / "studies"
_ARRAYS = ("SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX")
_FITS = {"retrofit": ("train.retrofit", "model"), "kvzap": ("train.kvzap", "results.json")}
"""Module of each kind of fit, and what is there when it is done."""

_KEYS = ("title", "question", "paper", "fit", "seeds", "measure", "settings", "axes", "cells")
_FIGURES = (
    "kl", "kl_second_half", "perplexity_change_percent", "nominal_cr", "entries_cr", "removed", "used",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
        number: from 0.
        values: of the axes, by name, the seed among them; what tables and plots show.
        settings: of the fit.
        measure: arguments of the evaluation, without model and output.
    """

    number: int
    values: dict[str, Any]
    settings: dict[str, Any]
    measure: tuple[str, ...]

    @property
    def fit(self) -> str:
        """Name of the fit's directory: the same for the same settings."""
        text = json.dumps(self.settings, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


@dataclass(frozen=True)
class Study:
    """What a study file says.

    Attributes:
        name: of the file.
        title, question, paper: for the reader.
        fit: "retrofit" or "kvzap".
        axes: names of what differs, in order, without the seed.
        cells: in order.
    """

    name: str
    title: str
    question: str
    paper: str
    fit: str
    axes: tuple[str, ...]
    cells: tuple[Cell, ...]

    @property
    def jobs(self) -> list[list[Cell]]:
        """Cells by fit."""
        found: dict[str, list[Cell]] = {}
        for cell in self.cells:
            found.setdefault(cell.fit, []).append(cell)
        return list(found.values())


def read(name: str, changes: Sequence[str] = ()) -> Study:
    """Reads a study and checks every command that it comes to.

    Args:
        name: a file in train/studies without its ending, or the path of a .toml file.
        changes: ``setting=value`` (TOML) of all fits.

    Raises:
        InputError: there is none, or something in it makes no sense.
    """
    path = STUDIES / f"{name}.toml"
    path = path if path.is_file() else Path(name).expanduser()
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in STUDIES.glob("*.toml")))
        raise InputError(f"there is no study {name!r}: known are {known}, or give the path of a .toml file")
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"study {path} is no TOML: {error}") from None
    if unknown := [key for key in found if key not in _KEYS]:
        raise InputError(f"study {path}: unknown key {unknown[0]!r}; there are {', '.join(_KEYS)}")
    fit = found.get("fit", "retrofit")
    if fit not in _FITS:
        raise InputError(f"study {path}: fit must be one of {', '.join(_FITS)}, not {fit!r}")
    if ("axes" in found) == ("cells" in found):
        raise InputError(f"study {path}: give either [axes] or a list of [[cells]]")
    common = dict(_tables(path, found, "settings"))
    for change in changes:
        common |= _change(change)
    rows = [dict(row) for row in found["cells"]] if "cells" in found else _grid(_tables(path, found, "axes"))
    if not rows:
        raise InputError(f"study {path} has no cells")
    seeds = found.get("seeds", 1)
    if not isinstance(seeds, int) or seeds < 1:
        raise InputError(f"study {path}: seeds must be a whole number of at least 1, not {seeds!r}")
    measure = found.get("measure", [])
    if not isinstance(measure, list) or not all(isinstance(x, str) for x in measure):
        raise InputError(f"study {path}: measure must be a list of texts")
    axes = tuple(dict.fromkeys(name for row in rows for name in row))
    cells: list[Cell] = []
    for row, seed in itertools.product(rows, range(seeds)):
        shown = {name: value["name"] if isinstance(value, Mapping) else value for name, value in row.items()}
        settings, fields = dict(common), {"fit": "{fit}"}
        for name, value in row.items():
            if any(f"{{{name}}}" in text for text in measure):
                fields[name] = str(shown[name])
            elif isinstance(value, Mapping):
                settings |= {key: x for key, x in value.items() if key != "name"}
            else:
                settings[name] = value
        settings["seed"] = common.get("seed", 0) + seed
        try:
            arguments = tuple(text.format_map(fields) for text in measure)
        except (KeyError, ValueError, IndexError) as error:
            raise InputError(f"study {path}: measure names {error}, which is no axis") from None
        cells.append(Cell(len(cells), {**shown, "seed": settings["seed"]}, settings, arguments))
    title, question, paper = (str(found.get(key, "")) for key in ("title", "question", "paper"))
    study = Study(path.stem, title, question, paper, fit, axes, tuple(cells))
    _check(path, study)
    return study


def _tables(path: Path, found: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = found.get(key, {})
    if not isinstance(table, Mapping):
        raise InputError(f"study {path}: [{key}] must be a table")
    return table


def _grid(axes: Mapping[str, Any]) -> list[dict[str, Any]]:
    for name, values in axes.items():
        if not isinstance(values, list) or not values:
            raise InputError(f"axis {name} must be a list of values, not {values!r}")
        if any(isinstance(value, Mapping) and not isinstance(value.get("name"), str) for value in values):
            raise InputError(f"axis {name}: a table of settings needs a name")
    return [dict(zip(axes, row, strict=True)) for row in itertools.product(*axes.values())]


def _change(text: str) -> dict[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InputError(f"--set must be setting=value, not {text!r}")
    try:
        return {name: tomllib.loads(f"x = {value}")["x"]}
    except tomllib.TOMLDecodeError:
        return {name: value}  # a bare word


def _flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as a command line spells them."""
    found: list[str] = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            found.append(flag if value else "--no-" + name.replace("_", "-"))
        elif name == "data" and isinstance(value, list):
            found += [x for source in value for x in (flag, source)]
        elif isinstance(value, list):
            found += [flag, *map(str, value)]
        else:
            found += [flag, str(value)]
    return found


def _check(path: Path, study: Study) -> None:
    """InputError for a command that its own parser refuses."""
    from kvsparse_jax.evaluate.__main__ import _parser as evaluation
    from train import config, kvzap

    for cell in study.cells:
        flags = _flags(cell.settings)
        preset = cell.settings.get("preset") if study.fit == "retrofit" else None
        fit: Any = (
            kvzap._parser() if study.fit == "kvzap" else config.parser(config.load_preset(preset) if preset else {})
        )
        for parser, arguments in (
            (fit, [*flags, "--output", "x"]),
            (evaluation(), ["--model", "x", *cell.measure]),
        ):
            said = io.StringIO()
            try:
                with contextlib.redirect_stderr(said):
                    parsed = parser.parse_args(arguments)
                if parser is fit and study.fit == "retrofit":
                    config.from_arguments(vars(parsed))
            except SystemExit:
                why = said.getvalue().strip().splitlines()[-1:] or ["refused"]
                raise InputError(
                    f"study {path}, cell {cell.number}: {why[0].partition('error: ')[2] or why[0]}"
                ) from None
            except InputError as error:
                raise InputError(f"study {path}, cell {cell.number}: {error}") from None


# Running


def _run_job(study: Study, cells: Sequence[Cell], output: Path) -> list[str]:
    """Fits once and measures every cell of the job; gives what failed."""
    module, made = _FITS[study.fit]
    directory = output / "fits" / cells[0].fit
    if not (directory / made).exists():
        flags = [*_flags(cells[0].settings), "--output", str(directory), "--resume", "auto"]
        wrong = _call([module, *flags], output / "fits" / f"{cells[0].fit}.log")
        if wrong:
            return [f"fit {cells[0].fit} ({_shown(cells[0].values)}): {wrong}"]
    failed = []
    for cell in cells:
        target = output / "cells" / f"{cell.number:03d}"
        if (target / "result.json").exists():
            continue
        model = str(directory) if study.fit == "retrofit" else str(cell.settings["model"])
        measure = [x.replace("{fit}", str(directory)) for x in cell.measure]
        arguments = ["--model", model, "--output", str(target / "evaluation"), "--overwrite", *measure]
        target.mkdir(parents=True, exist_ok=True)
        wrong = _call(["kvsparse_jax.evaluate", *arguments], target / "log.txt")
        if wrong:
            failed.append(f"cell {cell.number} ({_shown(cell.values)}): {wrong}")
            continue
        rows = [{**cell.values, **row} for row in _figures(target / "evaluation")]
        found = {"study": study.name, "cell": cell.number, "fit": cell.fit, "settings": cell.settings, "rows": rows}
        cli.write_json_atomically(target / "result.json", {**found, "measure": list(cell.measure)})
    return failed


def _call(command: Sequence[str], log: Path) -> str | None:
    """Runs a module of this environment; in one line what went wrong, or None."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8") as file:
        file.write(f"$ python -m {shlex.join(command)}\n")
        file.flush()
        status = subprocess.run([sys.executable, "-m", *command], stdout=file, stderr=file, check=False).returncode
    if status == 130:
        raise KeyboardInterrupt
    if status == 0:
        return None
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"{lines[-1] if status > 0 else f'ended by signal {-status}'} (log: {log})"


def _figures(evaluation: Path) -> list[dict[str, Any]]:
    """What an evaluation found, one row per method and context."""
    rows: list[dict[str, Any]] = []
    after = evaluation / "continuations.json"
    if after.exists():
        for found in json.loads(after.read_text(encoding="utf-8")):
            rows.append(
                {
                    "context": found["context"],
                    "method": found["method"].partition(":")[0],
                    "kl": found["kl"]["mean"],
                    "kl_stderr": found["kl"]["stderr"],
                    "perplexity_change_percent": found["perplexity_change_percent"]["mean"],
                    "removed": found["removed"]["mean"],
                    "used": found["used"],
                }
            )
        return rows
    report = json.loads((evaluation / "report.json").read_text(encoding="utf-8"))
    for found in report["results"]:
        if found["role"] == "full":
            continue
        quality, memory = found["quality"], found["memory"]
        rows.append(
            {
                "context": found["context"],
                "method": {"own": "DMS", "equal_memory": "StreamingLLM"}.get(found["role"], found["method"]),
                "kl": quality["kl"]["mean"],
                "kl_stderr": quality["kl"]["stderr"],
                "kl_second_half": quality["kl_second_half"]["mean"],
                "perplexity_change_percent": quality["perplexity_change_percent"]["mean"],
                "nominal_cr": memory["nominal_cr"],
                "entries_cr": memory["entries_cr"],
            }
        )
    return rows


# Tables


def collect(output: Path) -> list[dict[str, Any]]:
    """All rows that are there, in the order of the cells."""
    rows = []
    for path in sorted((output / "cells").glob("*/result.json")):
        rows += json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def summary(rows: Sequence[Mapping[str, Any]], axes: Sequence[str]) -> list[dict[str, Any]]:
    """Rows over seeds: mean of every figure, standard deviation of KL over seeds, how many seeds."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((*(row.get(name) for name in axes), row["context"], row["method"]), []).append(row)
    found = []
    for key, group in groups.items():
        line: dict[str, Any] = dict(zip((*axes, "context", "method"), key, strict=True)) | {"seeds": len(group)}
        for figure in _FIGURES:
            values = [row[figure] for row in group if row.get(figure) is not None]
            if values:
                line[figure] = statistics.fmean(values)
        spread = [row["kl"] for row in group if row["kl"] is not None]
        line["kl_deviation"] = statistics.stdev(spread) if len(spread) > 1 else None
        found.append(line)
    return found


def write(study: Study, output: Path) -> list[Path]:
    """results.jsonl, results.csv, results.md and results.png of what is there."""
    from kvsparse_jax import plot

    rows = collect(output)
    lines = summary(rows, study.axes)
    names = [*study.axes, "seed", "context", "method", "kl", "kl_stderr", *_FIGURES[1:]]
    names = [name for name in names if any(name in row for row in rows)]
    table = io.StringIO()
    writer = csv.DictWriter(table, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    paths = [output / f"results.{ending}" for ending in ("jsonl", "csv", "md", "png")]
    _replace(paths[0], "".join(json.dumps(row) + "\n" for row in rows))
    _replace(paths[1], table.getvalue())
    _replace(paths[2], markdown(study, lines))
    points: dict[str, list[tuple[Any, float, float | None]]] = {}
    for line in lines:
        rest = [f"{name} {line[name]}" for name in study.axes[1:]]
        label = ", ".join([line["method"], *rest, f"{line['context']} tokens"])
        points.setdefault(label, []).append((line[study.axes[0]], line["kl"], line["kl_deviation"]))
    figure = plot.ablation(
        points, x_label=study.axes[0], y_label="KL(dense || compressed), nats per token", title=study.title
    )
    scratch = paths[3].with_name(".results.tmp.png")
    figure.savefig(scratch)
    os.replace(scratch, paths[3])
    return paths


def markdown(study: Study, lines: Sequence[Mapping[str, Any]]) -> str:
    """The study as a section: question, table over seeds, what is missing."""
    figures = [name for name in _FIGURES if any(name in line for line in lines)]
    header = [*study.axes, "context", "method", "seeds", *figures]
    text = [f"## {study.title}", "", study.question, "", f"Paper: {study.paper}", ""]
    text += ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for line in lines:
        cells = [str(line.get(name)) for name in header[: -len(figures) or None]]
        for name in figures:
            value = line.get(name)
            shown = "-" if value is None else f"{value:.4f}" if name.startswith("kl") else f"{value:.2f}"
            if name == "kl" and line["kl_deviation"] is not None:
                shown += f" ± {line['kl_deviation']:.4f}"
            cells.append(shown)
        text.append("| " + " | ".join(cells) + " |")
    return "\n".join(text) + "\n"


def _replace(path: Path, text: str) -> None:
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)


def _shown(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


# The command


def _parser() -> cli.Parser:
    known = ", ".join(sorted(p.stem for p in STUDIES.glob("*.toml")))
    p = cli.parser(
        "python -m train.ablate",
        "Runs a study: trains and measures every cell of a grid, then writes results.jsonl, .csv, .md and .png.\n"
        "What is done already is not done again.",
        epilog=f"studies: {known}\n\nexample:\n  python -m train.ablate window --output runs/window --set steps=20",
    )
    p.add_argument("study", help="a name (below), or the path of a .toml file")
    p.add_argument("--output", type=Path, required=True, help="directory of the study")
    p.add_argument("--set", dest="changes", action="append", default=[], metavar="SETTING=VALUE", help="of all fits")
    p.add_argument("--job", help="run this job alone: its number, or auto (SLURM's or Kubernetes' array index)")
    p.add_argument("--list", action="store_true", help="say what would be run, and run nothing")
    return p


def _job(text: str, count: int) -> int:
    if text == "auto":
        text = next((os.environ[name] for name in _ARRAYS if name in os.environ), "")
        if not text:
            raise InputError(f"--job auto needs one of {', '.join(_ARRAYS)} in the environment")
    if not text.isdecimal() or int(text) >= count:
        raise InputError(f"--job must be auto or a number from 0 to {count - 1}, not {text!r}")
    return int(text)


def _run(args: Namespace) -> None:
    study = read(args.study, args.changes)
    jobs = study.jobs
    chosen = list(range(len(jobs))) if args.job is None else [_job(args.job, len(jobs))]
    if args.list:
        for number in chosen:
            for cell in jobs[number]:
                print(f"job {number}, cell {cell.number}: {_shown(cell.values)}")
        return
    output = cli.fresh_directory(args.output, KIND)
    _claim(output, study)
    failed: list[str] = []
    for number in chosen:
        began = time.monotonic()
        print(f"job {number} of {len(jobs)}: {'; '.join(_shown(cell.values) for cell in jobs[number])}", flush=True)
        wrong = _run_job(study, jobs[number], output)
        for line in wrong:
            print(line, file=sys.stderr, flush=True)
        failed += wrong
        if collect(output):
            write(study, output)
        print(f"job {number}: {math.ceil(time.monotonic() - began)} s", flush=True)
    if collect(output):
        print(markdown(study, summary(collect(output), study.axes)))
        print("written: " + " ".join(map(str, write(study, output))), file=sys.stderr)
    if failed:
        raise RunError(f"{len(failed)} of {len(study.cells)} cells failed; the first: {failed[0]}")


def _claim(output: Path, study: Study) -> None:
    """Notes what the directory is for; InputError if it is for something else."""
    path = output / "study.json"
    mine = json.loads(json.dumps([dataclasses.asdict(cell) for cell in study.cells]))
    if path.exists():
        other = json.loads(path.read_text(encoding="utf-8"))["cells"]
        if other != mine:
            raise InputError(f"{output} holds another study, or this one with other settings: choose another --output")
    else:
        cli.write_json_atomically(path, {"study": study.name, "title": study.title, "cells": mine})


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    return cli.run(_run, argv, parser=_parser(), show=False)


if __name__ == "__main__":
    sys.exit(main())

"""Tests of what the command lines share."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvsparse_jax import cli
from kvsparse_jax.errors import InputError, RunError


def _example() -> cli.Parser:
    p = cli.parser("python -m example", "Does one thing.\nAnd a second.", epilog="Example:\n  python -m example")
    p.add_argument("--window", type=int, default=64, unit="tokens", help="newest keys that stay")
    p.add_argument("--data", nargs="+", required=True, help="where from")
    p.add_argument("--fraction", type=float, default=0.5, help="a share of 100 %%")
    p.add_argument("--cr", type=float, nargs="+", default=[2.0, 4.0], help="targets")
    p.add_argument("--quick", action="store_true", help="less of it")
    p.add_argument("--name", help="no default")
    group = p.add_argument_group("saving")
    group.add_argument("--every", type=int, default=100, unit="steps", help="time between checkpoints")
    return p


def test_help_shows_units_and_defaults(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = " ".join(_example().format_help().split())
    assert " --window WINDOW newest keys that stay (unit: tokens, default: 64) " in text
    assert " --data DATA [DATA ...] where from (required) " in text
    assert " --fraction FRACTION a share of 100 % (default: 0.5) " in text
    assert " --cr CR [CR ...] targets (default: 2.0 4.0) " in text
    assert " --quick less of it --name NAME no default " in text
    assert " --every EVERY time between checkpoints (unit: steps, default: 100) " in text
    assert "Does one thing.\nAnd a second." in _example().format_help()


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        ([], "--data"),
        (["--data", "a", "--window", "many"], "many"),
        (["--data", "a", "--windo", "3"], "--windo"),
        (["--data", "a", "--wat"], "--wat"),
    ],
)
def test_usage_errors_are_one_line_and_status_2(argv, names, capsys):
    assert cli.run(lambda args: None, argv, parser=_example()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1 and names in err and err.startswith("python -m example: error: ")


def test_help_is_status_0(capsys):
    assert cli.run(lambda args: None, ["--help"], parser=_example()) == 0
    assert "usage: python -m example" in capsys.readouterr().out


def test_run_shows_the_effective_configuration(capsys):
    seen: list = []
    assert cli.run(seen.append, ["--data", "a.txt", "b.txt", "--window", "7"], parser=_example()) == 0
    assert seen[0].window == 7 and seen[0].data == ["a.txt", "b.txt"]
    out, err = capsys.readouterr()
    assert out == ""
    rows = [line.split(maxsplit=1) for line in err.splitlines()[1:]]
    assert ["window:", "7"] in rows and ["data:", "a.txt b.txt"] in rows and ["name:", "none"] in rows
    assert cli.run(seen.append, ["--data", "a"], parser=_example(), show=False) == 0
    assert capsys.readouterr().err == ""


def test_run_without_a_parser_passes_argv():
    seen: list = []
    assert cli.run(seen.append, ["x", "-y"]) == 0
    assert seen == [["x", "-y"]]
    assert cli.run(lambda argv: 3, []) == 3


def _raise(error):
    def main(argv):
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (InputError("window -1: needs 0 or more"), 2, "error: window -1: needs 0 or more"),
        (RunError("loss is not finite at step 3"), 1, "error: loss is not finite at step 3"),
        (FileNotFoundError(2, "No such file or directory", "x.json"), 1, "error: No such file or directory: x.json"),
        (OSError("hub:\n  not reachable"), 1, "error: hub: not reachable"),
        (NotImplementedError("no Hopper GPU here"), 1, "error: no Hopper GPU here"),
        (MemoryError("3 GiB wanted"), 1, "error: out of memory 3 GiB wanted"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: x" + "\nbuf" * 999), 1, "error: RESOURCE_EXHAUSTED: x buf"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
        (SystemExit("gave up"), 1, "error: gave up"),
        (SystemExit(5), 5, ""),
        (SystemExit(), 0, ""),
    ],
)
def test_expected_failures_are_one_line(error, status, text, capsys, monkeypatch):
    monkeypatch.delenv("KVSPARSE_TRACEBACK", raising=False)
    assert cli.run(_raise(error), []) == status
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == bool(text) and err.startswith(text) and len(err) < 600


def test_traceback_on_request(capsys, monkeypatch):
    monkeypatch.setenv("KVSPARSE_TRACEBACK", "1")
    assert cli.run(_raise(InputError("bad")), []) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err and err.splitlines()[-1] == "error: bad"


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        cli.run(lambda argv: 1 // 0, [])


def test_closed_pipe_is_quiet():
    program = (
        "import sys; from kvsparse_jax import cli\n"
        "sys.exit(cli.run(lambda argv: [print('x' * 100) for _ in range(10000)] and None, []))"
    )
    root = Path(__file__).parent.parent
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 1
    assert error == b""


@dataclasses.dataclass
class _Inner:
    rate: float
    path: Path


def test_show_configuration_flattens(capsys):
    config = {"model": "m", "optimizer": _Inner(0.5, Path("a/b")), "layers": (1, 2), "none": {}}
    cli.show_configuration(config, title="run")
    assert capsys.readouterr().err.splitlines() == [
        "run:",
        "  model:          m",
        "  optimizer.rate: 0.5",
        "  optimizer.path: a/b",
        "  layers:         1 2",
        "  none:           none",
    ]


def test_write_json(tmp_path):
    path = tmp_path / "result.json"
    written = cli.write_json_atomically(
        path,
        {
            "path": Path("a"),
            "numpy": np.float32(0.5),
            "array": np.arange(3),
            "jax": jnp.ones(2, jnp.bfloat16),
            "scalar": jnp.int32(4),
            "set": {3, 1},
            "inner": _Inner(float("nan"), Path("b")),
            "inf": np.array([1.0, np.inf]),
            "flag": np.bool_(True),
            7: None,
        },
    )
    assert written == path
    assert json.loads(path.read_text()) == {
        "path": "a",
        "numpy": 0.5,
        "array": [0, 1, 2],
        "jax": [1.0, 1.0],
        "scalar": 4,
        "set": [1, 3],
        "inner": {"rate": None, "path": "b"},
        "inf": [1.0, None],
        "flag": True,
        "7": None,
    }


def test_write_json_keeps_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    cli.write_json_atomically(path, {"a": 1})
    with pytest.raises(TypeError, match="object has no form in JSON"):
        cli.write_json_atomically(path, {"a": object()})

    def no_space(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        cli.write_json_atomically(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


def test_progress_off_a_terminal_prints_lines(capsys):
    assert list(cli.progress([1, 2, 3], desc="reading", unit="files", seconds=0)) == [1, 2, 3]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" [")[0] for line in lines] == ["reading: 1/3", "reading: 2/3", "reading: 3/3"]
    assert "\r" not in "".join(lines)


def test_progress_prints_seldom_and_ends_with_the_final_state(capsys):
    with cli.progress(1000, desc="training", initial=10, seconds=3600) as bar:
        for _ in range(90):
            bar.update()
        bar.set_postfix(loss=0.123456, step=100)
        bar.write("a word")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "a word"
    assert len(lines) == 2
    assert lines[1].startswith("training: 100/1000 [") and lines[1].endswith(", loss=0.1235, step=100]")
    assert bar.done == 100


def test_progress_over_a_generator_has_no_total(capsys):
    assert sum(cli.progress((i for i in range(4)), desc="x", seconds=0)) == 6
    assert capsys.readouterr().err.splitlines()[-1].startswith("x: 4/? [")


def test_progress_that_counts_is_not_iterable():
    with pytest.raises(TypeError, match="call update"):
        list(cli.progress(3))


def test_progress_on_a_terminal_is_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with cli.progress(2, desc="training", unit="steps") as bar:
        bar.set_postfix(loss=1.5)
        bar.update(2)
    err = capsys.readouterr().err
    assert "\r" in err and "training: 100%" in err and "loss=1.5" in err


def test_fresh_directory(tmp_path):
    path = tmp_path / "a" / "run"
    assert cli.fresh_directory(path, "retrofit run") == path and path.is_dir()
    (path / "metrics.jsonl").write_text("")
    assert cli.fresh_directory(path, "retrofit run") == path  # its own output, an earlier one
    with pytest.raises(InputError, match=r"holds output of another kind \(retrofit run\); the demo needs"):
        cli.fresh_directory(path, "demo")


def test_fresh_directory_refuses_other_contents(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(InputError, match=r"is not empty \(it holds thesis.tex\)"):
        cli.fresh_directory(tmp_path, "demo")
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(InputError, match="is a file"):
        cli.fresh_directory(tmp_path / "thesis.tex", "demo")


def test_fresh_directory_while_another_process_makes_it(tmp_path):
    (tmp_path / "..kvsparse.json.4711.tmp").write_text("{")
    assert cli.fresh_directory(tmp_path, "retrofit run") == tmp_path


def test_fresh_directory_with_a_damaged_marker(tmp_path):
    (tmp_path / ".kvsparse.json").write_text("{")
    with pytest.raises(InputError, match="unreadable"):
        cli.fresh_directory(tmp_path, "demo")

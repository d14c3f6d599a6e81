"""``python -m train.ablate``: studies as files, runs that resume, tables over seeds."""

import csv
import json
from pathlib import Path

import pytest

from kvsparse_jax import plot
from kvsparse_jax.errors import InputError
from train import ablate

SHIPPED = sorted(path.stem for path in ablate.STUDIES.glob("*.toml"))


@pytest.fixture
def text(tmp_path):
    words = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8").split()
    lines = (json.dumps({"text": " ".join(words[i : i + 60])}) for i in range(0, len(words) - 60, 20))
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def study(tmp_path, golden_models, text):
    path = tmp_path / "small.toml"
    path.write_text(
        f"""
title = "A small study"
measure = ["--lengths", "48:2", "--data", "{text}"]
[settings]
model = "{golden_models / "llama_tied"}"
data = ["{text}"]
steps = 2
batch_size = 2
sequence_length = 48
target_cr = 2.0
dtype = "float32"
tensorboard = false
mesh_data = 1
[axes]
window = [4, 8]
"""
    )
    return path


def test_runs_measures_and_goes_on(tmp_path, study, capsys):
    output = tmp_path / "out"
    assert ablate.main([str(study), "--output", str(output), "--job", "1"]) == 0
    assert [row["window"] for row in ablate.collect(output)] == [8, 8]  # DMS and StreamingLLM
    made = (output / "cells" / "001" / "result.json").stat().st_mtime_ns
    assert ablate.main([str(study), "--output", str(output)]) == 0
    assert (output / "cells" / "001" / "result.json").stat().st_mtime_ns == made
    rows = [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]
    assert [(row["window"], row["method"]) for row in rows] == [
        (4, "DMS"), (4, "StreamingLLM"), (8, "DMS"), (8, "StreamingLLM"),
    ]  # fmt: skip
    with open(output / "results.csv", encoding="utf-8") as file:
        assert [float(row["kl"]) for row in csv.DictReader(file)] == [row["kl"] for row in rows]
    report = json.loads((output / "cells" / "000" / "evaluation" / "report.json").read_text())
    own = next(result for result in report["results"] if result["role"] == "own")
    assert rows[0]["kl"] == own["quality"]["kl"]["mean"] and rows[0]["entries_cr"] == own["memory"]["entries_cr"]
    assert f"{rows[0]['kl']:.4f}" in (output / "results.md").read_text()
    assert (output / "results.png").stat().st_size > 5000
    capsys.readouterr()
    assert ablate.main([str(study), "--output", str(output), "--set", "steps=3"]) == 2
    assert "with other settings" in capsys.readouterr().err


def test_a_failed_cell_is_named(tmp_path, study, capsys):
    wrong = study.with_name("wrong.toml")
    wrong.write_text(study.read_text().replace("llama_tied", "nowhere"))
    assert ablate.main([str(wrong), "--output", str(tmp_path / "out"), "--job", "0"]) == 1
    told = capsys.readouterr().err
    assert "window 4" in told and "nowhere" in told and "log:" in told


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_studies_are_valid(name):
    study = ablate.read(name)
    assert study.title and study.question and study.paper and len(study.cells) >= 2


def test_cells_that_differ_in_measuring_share_a_fit():
    study = ablate.read("kvzap_surrogate")
    assert len(study.jobs) == 1 and len(study.cells) == 4
    assert "kvzap:path={fit}/mlp,threshold=-6,window=128,sinks=4" in study.cells[1].measure
    variants = ablate.read("variant").cells
    assert [cell.values["variant"] for cell in variants] == ["adapter", "neuron"]
    assert variants[1].settings["train"] == "all" and "name" not in variants[1].settings


def test_seeds_become_error_bars():
    rows = [
        {"window": window, "seed": seed, "context": 8, "method": "DMS", "kl": window + seed, "nominal_cr": 2.0}
        for window in (1, 2)
        for seed in (0, 1, 2)
    ]
    lines = ablate.summary(rows, ("window",))
    assert [(x["window"], x["kl"], x["kl_deviation"], x["seeds"]) for x in lines] == [(1, 2, 1, 3), (2, 3, 1, 3)]
    figure = plot.ablation(
        {"DMS": [(x["window"], x["kl"], x["kl_deviation"]) for x in lines]}, x_label="window", y_label="KL", title="t"
    )
    (bars,) = figure.axes[0].containers
    assert bars.lines[0].get_xydata().tolist() == [[1, 2], [2, 3]]
    named = plot.ablation({"DMS": [("b", 1.0, None), ("a", 2.0, None)]}, x_label="x", y_label="y", title="t")
    assert [label.get_text() for label in named.axes[0].get_xticklabels()] == ["b", "a"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (("window = [4, 8]", "window = 4"), "must be a list of values"),
        (("window = [4, 8]", "widow = [4, 8]"), "unrecognized arguments: --widow"),
        (("window = [4, 8]", "window = [4, -8]"), "cell 1: window"),
        (("window = [4, 8]", "window = [{ window = 4 }]"), "needs a name"),
        (('title = "A', 'tittle = "A'), "unknown key 'tittle'"),
        (("[axes]", "[other]"), "unknown key 'other'"),
        (('"48:2"', '"{size}:2"'), "which is no axis"),
        (('"--lengths"', '"--length"'), "--length"),
        (("title", 'fit = "magic"\ntitle'), "fit must be one of"),
    ],
)
def test_bad_studies(study, changed, words):
    study.write_text(study.read_text().replace(*changed))
    with pytest.raises(InputError, match=words):
        ablate.read(str(study))


def test_bad_commands(study, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    for arguments, words in (
        (["none"], "there is no study 'none'"),
        ([str(study), "--set", "steps"], "setting=value"),
        ([str(study), "--job", "2"], "from 0 to 1"),
        ([str(study), "--job", "auto"], "SLURM_ARRAY_TASK_ID"),
    ):
        assert ablate.main([*arguments, "--output", str(tmp_path / "out")]) == 2
        assert words in capsys.readouterr().err
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    assert ablate.main([str(study), "--output", str(tmp_path / "out"), "--job", "auto", "--list"]) == 0
    assert capsys.readouterr().out == "job 1, cell 1: window 8, seed 0\n"
    assert not (tmp_path / "out").exists()

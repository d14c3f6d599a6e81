"""Questions about compressed contexts, and the table of policies, ratios and tasks."""

import json

import numpy as np
import pytest

import kvsparse_jax as kvs
from kvsparse_jax.evaluate import pareto
from kvsparse_jax.evaluate.answers import answers
from kvsparse_jax.evaluate.tasks import TASKS, encode, examples, score


@pytest.fixture(scope="module")
def model(golden_models, tmp_path_factory):
    """A directory of a tiny model with a tokenizer and room for a task."""
    directory = kvs.load(golden_models / "llama_tied").save(tmp_path_factory.mktemp("model") / "model")
    config = json.loads((directory / "config.json").read_text())
    config["max_position_embeddings"] = 4096
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_answers_are_those_of_sessions(model):
    """Scores, truncation and entries, against sessions driven by hand, one prompt at a time."""
    lm = kvs.load(model, dtype="float32")
    drawn = examples("niah_single", lm.tokenizer, length=700, count=2)
    methods = {"H2O": kvs.H2O(budget=64), "quarter": lambda length: kvs.TOVA(budget=length // 4)}
    found = answers(lm, methods, drawn, "after", batch_size=2, max_new_tokens=3)
    assert [a.method for a in found] == ["dense", "H2O", "quarter"]
    dense, h2o, quarter = found
    assert dense.removed.mean == 0
    assert dense.prompts == 2
    contexts = [encode(example, lm.tokenizer)[0] for example in drawn]
    assert dense.tokens == np.mean([len(context) for context in contexts])
    # A session holds the newest token back, so one entry less has been seen.
    assert h2o.removed.mean == pytest.approx(1 - np.mean([64 / (len(context) - 1) for context in contexts]))
    assert quarter.removed.mean == pytest.approx(0.75, abs=0.01)
    assert h2o.held == 64
    assert h2o.used < dense.used
    scores, lengths = [], []
    for example in drawn:
        first, rest = encode(example, lm.tokenizer)
        with lm.with_policy(kvs.H2O(budget=64)).session() as session:
            session.append(first)
            session.append(rest)
            out = session.generate(max_new_tokens=3, temperature=0.0)
        scores.append(score("niah_single", out.text[0], example.answers))
        lengths.append(len(out.tokens[0]))
    assert h2o.accuracy.mean == np.mean(scores)
    assert h2o.read == pytest.approx(64 * np.mean(lengths))
    assert h2o.truncated == sum(n == 3 for n in lengths)
    with pytest.raises(kvs.RunError, match="removed nothing"):
        answers(lm, {"H2O": kvs.H2O(budget=4000)}, drawn[:1], max_new_tokens=1)
    with pytest.raises(kvs.InputError, match="of one task, not of 0"):
        answers(lm, {}, [])


def test_the_table_and_its_resume(model, golden_methods, tmp_path, capsys):
    argv = ["--model", str(model), "--output", str(tmp_path / "out"), "--policy", "tova", "snapkv:window=8"]
    argv += ["--cr", "4", "--task", "text", "--length", "64", "--next", "8", "--count", "2"]
    assert pareto.main(argv) == 0
    out = capsys.readouterr().out
    assert "| tova | 4 | 75.0 % |" in out
    file = tmp_path / "out" / "results.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(r["method"], r["cr"]) for r in rows] == [("dense", None), ("tova", 4.0), ("snapkv:window=8", 4.0)]
    assert {p.name for p in (tmp_path / "out").glob("*.png")} == {"text_held.png", "text_read.png"}
    # Killed in the middle of a line: what was whole is not computed again.
    file.write_text("\n".join(file.read_text().splitlines()[:2]) + '\n{"task": "te')
    assert pareto.main(argv) == 0
    again = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    assert {(r["method"], r["quality"]) for r in again} == {(r["method"], r["quality"]) for r in rows}
    assert pareto.main([*argv, "--seed", "3"]) == 2
    assert "results of other settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--task", "poems"], f"unknown task 'poems'; there are text, {next(iter(TASKS))}"),
        (["--cr", "1"], "--cr must be above 1"),
        (["--policy", "masked"], "has no compression ratio to set"),
        (["--policy", "quest"], "unknown policy 'quest'"),
        (["--policy", "snapkv"], "budget of at least sinks"),
        (["--policy", "tova:cr=4"], "has a size already"),
        (["--policy", "kvzap"], "needs path=DIRECTORY"),
        (["--policy", "h2o:sinks=20", "--cr", "2", "8"], "budget of at least sinks"),
        (["--count", "0"], "--count must be at least 1"),
    ],
)
def test_bad_input(model, tmp_path, capsys, change, message):
    argv = ["--model", str(model), "--output", str(tmp_path / "out"), "--policy", "tova", "--length", "64", *change]
    assert pareto.main(argv) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]

"""Hyper-scaling on a tiny model that is trained here, to an accuracy that its own logits tell."""

import collections
import itertools
import json
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvsparse_jax as kvs
from kvsparse_jax import hyperscale
from kvsparse_jax.errors import InputError
from kvsparse_jax.hyperscale import Chain, Configuration, Interval, Problem
from kvsparse_jax.hyperscale.problems import KINDS
from kvsparse_jax.policies import Dense
from kvsparse_jax.whole import full_logits
from serve import hyperscale as command

RIGHT = 0.6  # share of the training rows of a problem that give its answer; the others are spread evenly
DIGITS = 5
BUDGET = 6


def problem(a, b):
    return Problem(f"{a} and {b}?", str((2 * a + b) % DIGITS))


@pytest.fixture(scope="module")
def trained(golden_models, tmp_path_factory):
    """A model that thinks for a few tokens and is right with a probability near RIGHT; its directory and problems."""
    lm = kvs.load(golden_models / "llama_tied", dtype="float32").with_policy(Dense())
    every = [problem(a, b) for a, b in itertools.product(range(3), repeat=2)]
    ids, weights, prompts = [], [], []
    for one in every:
        prompt = lm.tokenizer.encode(one.prompt)
        for digit in map(str, range(DIGITS)):
            chain = lm.tokenizer.encode(f"so. Answer: {digit}", add_bos=False)
            ids.append([*prompt, *chain, *lm.tokenizer.eos_token_ids])
            weights.append(RIGHT if digit == one.answer else (1 - RIGHT) / (DIGITS - 1))
        prompts.append(len(prompt))
    assert len({*map(len, ids)}) == 1 == len({*prompts})
    ids, weights, segments = (
        jnp.asarray(ids),
        jnp.asarray(weights, jnp.float32),
        jnp.zeros((len(ids), len(ids[0])), int),
    )
    optimiser = optax.adam(3e-3)

    def loss(params):
        logprobs = jax.nn.log_softmax(full_logits(params, lm.config, lm.policy, ids, segments)[:, :-1])
        value = jnp.take_along_axis(logprobs, ids[:, 1:, None], -1)[..., 0][:, prompts[0] - 1 :]
        return -jnp.mean(weights * jnp.sum(value, 1))

    @jax.jit
    def train(params):
        def step(carry, _):
            params, state = carry
            value, gradient = jax.value_and_grad(loss)(params)
            updates, state = optimiser.update(gradient, state)
            return (optax.apply_updates(params, updates), state), value

        (params, _), values = jax.lax.scan(step, (params, optimiser.init(params)), length=90)
        return params, values

    with jax.numpy_dtype_promotion("standard"):  # optax counts in integers
        params, _ = train(lm.params)
    lm = kvs.LM(lm.config, params, lm.policy, lm.tokenizer, lm.hf_config, lm.source)
    logprobs = jax.nn.log_softmax(lm.logits(ids)[:, :-1])
    value = np.asarray(jnp.take_along_axis(logprobs, ids[:, 1:, None], -1))[:, prompts[0] - 1 :, 0].sum(1)
    known = float(np.exp(value)[np.asarray(weights) == np.float32(RIGHT)].mean())
    directory = tmp_path_factory.mktemp("trained") / "model"
    lm.save(directory)
    return directory, every, known, (prompts[0], ids.shape[1] - prompts[0] - 1)


@pytest.fixture(scope="module")
def finished(trained, tmp_path_factory):
    """The command's output directory and arguments."""
    directory, every, _, (_, chain) = trained
    root = tmp_path_factory.mktemp("hyperscale")
    lines = [json.dumps({"prompt": one.prompt, "answer": one.answer}) for one in every]
    (root / "problems.jsonl").write_text("\n".join(lines) + "\n")
    arguments = ["--model", str(directory), "--problems", str(root / "problems.jsonl"), "--output", str(root / "out")]
    arguments += "--raw --temperature 1 --top-k 0 --top-p 1 --pool 0.002 --page-size 4 --prefill-chunk 16".split()
    small = f"streaming:budget={BUDGET},sinks=1"
    length = chain + 1
    configs = [f"{length}:1:dense", f"{length}:9:dense", "2:3:dense", f"{length}:9:{small}"]
    assert command.main([*arguments, "--config", *configs]) == 0
    return root / "out", arguments, configs


def chains_of(out):
    rows = [json.loads(line) for line in (out / "chains.jsonl").read_text().splitlines()]
    return {(row["config"], row["problem"]): row["chains"] for row in rows}


def test_accuracy_is_what_the_logits_tell(trained, finished):
    _, every, known, _ = trained
    out, _, configs = finished
    assert 0.5 < known < 0.7
    one, nine, short, small = json.loads((out / "hyperscale.json").read_text())["rows"]
    assert [row["config"] for row in (one, nine, short, small)] == configs
    draws = 9 * len(every)
    assert abs(nine["single"]["mean"] - known) < 3 * (known * (1 - known) / draws) ** 0.5
    assert one["accuracy"] == one["single"] and nine["accuracy"]["mean"] > nine["single"]["mean"] + 0.15
    # The majority, counted from the texts by other means.
    found = chains_of(out)
    won = 0
    for index, problem in enumerate(every):
        said = [chain["text"].rpartition("Answer: ")[2] for chain in found[configs[1], index]]
        won += collections.Counter(said).most_common(1)[0][0] == problem.answer
    assert nine["accuracy"]["mean"] == pytest.approx(won / len(every))
    assert nine["accuracy"]["low"] <= nine["accuracy"]["mean"] <= nine["accuracy"]["high"]
    # Wider configurations begin with the chains of narrower ones.
    assert all(found[configs[0], i] == found[configs[1], i][:1] for i in range(len(every)))
    # Chains that are cut before their answer give none; a cache without the question guesses.
    assert short["accuracy"]["mean"] == 0 and short["cut"] == 1
    assert small["single"]["mean"] < nine["single"]["mean"] - 0.15


def test_costs_are_those_of_the_rule(trained, finished):
    _, every, _, (prompt, _) = trained
    out, _, configs = finished
    found = chains_of(out)
    rows = {row["config"]: row for row in json.loads((out / "hyperscale.json").read_text())["rows"]}
    for config in configs:
        most = BUDGET if "streaming" in config else 999
        read = held = 0
        for index in range(len(every)):
            for chain in found[config, index]:
                steps = chain["tokens"] + (chain["reason"] == "stop")
                # The first step stores the prompt's last token.
                each = [min(prompt + i, most) for i in range(steps)]
                assert chain["read"] == pytest.approx(sum(each), rel=1e-6)
                assert chain["held"] == pytest.approx(max(each)), chain
                read, held = read + sum(each), held + max(each)
        assert rows[config]["read"]["mean"] == pytest.approx(read / len(every))
        assert rows[config]["held"]["mean"] == pytest.approx(held / len(every))
    one, nine, short, small = (rows[config] for config in configs)
    assert small["cr"] > 1.5 > one["cr"] >= 1
    assert one["frontier"] == nine["frontier"] == {"read": True, "held": True} and small["over_dense"]
    assert small["over_dense"]["read"]["config"] != configs[1]  # that one costs more


def test_a_run_goes_on_where_it_was(finished, capsys):
    out, arguments, configs = finished
    lines = (out / "chains.jsonl").read_text().splitlines(keepends=True)
    report = json.loads((out / "hyperscale.json").read_text())
    cut = [line for line in lines if json.loads(line)["config"] != configs[3]]
    (out / "chains.jsonl").write_text("".join(cut[:-3]) + cut[-3][:40])
    assert command.main([*arguments, "--config", *configs[:3]]) == 0
    assert sorted((out / "chains.jsonl").read_text().splitlines()) == sorted(x.strip() for x in cut)
    found = json.loads((out / "hyperscale.json").read_text())["rows"]
    assert [row["accuracy"] for row in found] == [row["accuracy"] for row in report["rows"][:3]]
    assert (out / "hyperscale.png").stat().st_size > 5000
    assert "9:dense" in capsys.readouterr().out
    assert command.main([*arguments, "--config", configs[0], "--seed", "1"]) == 2
    assert "other settings" in capsys.readouterr().err
    for wrong, what in [
        (["--config", "5:dense"], "LENGTH:WIDTH:METHOD"),
        (["--config", "5:1:h2o:budget=8"], "serves Dense, DMS"),
        (["--config", "5:1:own"], "no policy of its own"),
        (["--config", "500:1:dense"], "do not fit into the model's context"),
        (["--config", "5:2:dense", "--temperature", "0"], "the same"),
        (["--config", "5:1:dense", "--pattern", "("], "regular expression"),
    ]:
        assert command.main([*arguments[:5], str(out.parent / "new"), *wrong]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert what in error, error


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_generated_problems(kind):
    found = hyperscale.problems(f"{kind}:count=40,steps=5,seed=3")
    assert found == hyperscale.problems(f"{kind}:count=40,steps=5,seed=3") and len(found) == 40
    assert found[:9] == hyperscale.problems(f"{kind}:count=9,steps=5,seed=3")
    assert len({one.answer for one in found}) > 5
    for one in found:
        asked = one.prompt.rpartition("Problem: ")[2]
        if kind == "arithmetic":
            words = asked.removeprefix("What is ").removesuffix("?\n").split()
            total = int(words[0]) + sum(
                int(n) * (1 if sign == "+" else -1) for sign, n in itertools.batched(words[1:], 2)
            )
        else:
            thing = asked.rpartition("How many ")[2].split()[0]
            total = 0
            for part in asked.replace(" and ", ". ").split("."):
                words = part.split()
                if thing in words and "many" not in words:
                    total += int(words[words.index(thing) - 1]) * (-1 if "takes" in words else 1)
        assert str(total) == one.answer


def test_problems_of_a_file(tmp_path):
    file = tmp_path / "problems.jsonl"
    for text, what in [
        ("", "holds no problem"),
        ('{"prompt": "a"}', "line 1"),
        ('{"prompt": "a", "answer": 3}\n\n[]', "line 3"),
        ('{"prompt": "", "answer": "3"}', "not empty"),
    ]:
        file.write_text(text)
        with pytest.raises(InputError, match=what):
            hyperscale.problems(file)
    file.write_text('{"prompt": "a", "answer": 3}\n')
    assert hyperscale.problems(file) == [Problem("a", "3")]
    for source, what in [("nowhere.jsonl", "JSONL file or one of"), ("arithmetic:size=3", "count=N")]:
        with pytest.raises(InputError, match=what):
            hyperscale.problems(source)


@pytest.mark.parametrize(
    ("text", "pattern", "want"),
    [
        (r"so \boxed{1} or \boxed{\frac{1}{2}}.", None, r"\frac{1}{2}"),
        ("The answer is **12**.\nBye 3", None, "12"),
        ("Answer: 4\nno, Answer: 5", None, "5"),
        ("first 3, then 1,234.5", None, "1,234.5"),
        ("nothing", None, None),
        (r"\boxed{1", None, "1"),
        ("(A) no (C)", r"\(([A-D])\)", "C"),
        ("none here", r"\(([A-D])\)", None),
    ],
)
def test_extract(text, pattern, want):
    assert hyperscale.extract(text, pattern) == want


def test_vote_and_equality():
    exact, maths = hyperscale.equality("exact"), hyperscale.equality("math")
    for one, other, as_text, as_maths in [
        ("7", "7.0", True, True),
        ("1,000", "1000", True, True),
        ("1/2", "0.5", True, True),
        ("Paris ", "paris", True, True),
        ("7", "8", False, False),
        (r"\frac{1}{2}", "0.5", False, True),
        ("x+1", "1+x", False, True),
        (r"\sqrt{8}", r"2\sqrt{2}", False, True),
        ("x+1", "x+2", False, False),
    ]:
        assert exact(one, other) is as_text, (one, other)
        assert maths(one, other) is as_maths, (one, other)
    assert hyperscale.vote(["3", None, "2", "3.0", "2"], exact) == "3"
    assert hyperscale.vote(["3", "2", "2"], exact) == "2"
    assert hyperscale.vote([r"\frac12", "1", "0.5"], maths) == r"\frac12"
    assert hyperscale.vote([None, None]) is None


def test_summary_of_known_chains():
    """Frontier, differences and intervals of a handful of made-up chains."""
    problems = [Problem("", "1"), Problem("", "2"), Problem("", "3"), Problem("", "4")]

    def chain(answer, read, held):
        return Chain(f"Answer: {answer}", 3, "stop", read, held, 1.0)

    good = [[chain(i + 1, 10.0, 4.0)] for i in range(4)]
    half = [[chain(1, 5.0, 4.0)], [chain(2, 5.0, 4.0)], [chain(0, 5.0, 4.0)], [chain(0, 5.0, 4.0)]]
    twice = [[chain(i + 1, 2.0, 1.0), chain(9, 2.0, 1.0)] for i in range(4)]
    found = {
        Configuration(8, 1, "dense"): half,
        Configuration(9, 1, "dense"): half,
        Configuration(16, 1, "dense"): good,
        Configuration(8, 2, "own"): twice,
        Configuration(9, 1, "own"): good,
    }
    first, again, full, wide, deep = hyperscale.summary(problems, found, hyperscale.equality("exact"))
    assert [row["accuracy"]["mean"] for row in (first, full, wide)] == [0.5, 1.0, 1.0]
    assert wide["single"]["mean"] == 0.5 and wide["any"]["mean"] == 1  # of two equal votes the first
    assert wide["read"] == {"mean": 4.0, "low": 4.0, "high": 4.0} and wide["held"]["mean"] == 2
    assert first["frontier"]["read"] and full["frontier"]["read"] and wide["frontier"]["read"]
    assert not again["frontier"]["read"] and not deep["frontier"]["read"]
    assert wide["over_dense"] == {} and deep["over_dense"]["read"]["mean"] == 0
    assert deep["over_dense"]["read"]["config"] == "16:1:dense"
    # Resampled means of half right ones of four: binomial(4, 1/2) / 4.
    assert (first["accuracy"]["low"], first["accuracy"]["high"]) == (0.0, 1.0)
    many = np.arange(400) % 2
    assert Interval.of(many).high - 0.5 == pytest.approx(1.96 * 0.5 / 20, rel=0.1)
    assert Fraction(hyperscale.extract("x = 3/6")) == Fraction(1, 2)

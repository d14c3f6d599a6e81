"""Training of KVzap surrogates: sums and ridge against numpy, the MLP, the command with resume, calibration."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvsparse_jax as kvs
from kvsparse_jax import generation
from kvsparse_jax.calibrate import calibrate
from kvsparse_jax.evaluate.continuation import as_json, continuations, table
from train import kvzap, surrogate


@pytest.fixture(scope="module")
def lm(golden_methods):
    return kvs.load(golden_methods / "5_kvzip" / "llama", dtype="float32")


def extended_prompt(rng, batch, length):
    parts = surrogate.Extended([5, 6], [7, 8, 9])
    contexts = rng.integers(10, 97, (batch, length)).astype(np.int32)
    return parts, contexts


@pytest.mark.parametrize("kind", ["kvzip+", "kvzip"])
def test_collecting_gives_the_oracles_scores_and_their_sums(lm, kind):
    rng = np.random.default_rng(0)
    parts, contexts = extended_prompt(rng, 2, 20)
    ids = parts.ids(contexts)
    context, probe = parts.spans(20)
    assert (ids[:, slice(*context)] == ids[:, slice(*probe)]).all()
    chosen = jnp.asarray([[0, 3, 19], [1, 2, 4]], jnp.int32)
    sums = surrogate.Sums.zero(lm.config)
    for _ in range(2):
        sums, x, y = surrogate.collect(
            lm.params, lm.config, jnp.asarray(ids), sums, chosen, context=context, probe=probe, kind=kind, norm="input"
        )
    want = np.asarray(kvs.oracle_scores(lm, ids, context, probe, kind=kind))  # [L, B, H, n]
    want = want if kind == "kvzip+" else np.log(want)
    picked = np.concatenate([want[:, b][..., np.asarray(chosen[b])] for b in range(2)], -1).swapaxes(1, 2)
    np.testing.assert_allclose(y, picked, atol=1e-5)
    every = jnp.tile(jnp.arange(20, dtype=jnp.int32)[None], (2, 1))
    _, x, y = surrogate.collect(
        lm.params, lm.config, jnp.asarray(ids), None, every, context=context, probe=probe, kind=kind, norm="input"
    )
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    assert float(sums.count) == 2 * 40
    np.testing.assert_allclose(sums.gram, 2 * np.einsum("lnd,lne->lde", x, x), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(sums.cross, 2 * np.einsum("lnd,lnh->ldh", x, y), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(sums.x, 2 * x.sum(1), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(sums.y, 2 * y.sum(1), rtol=1e-4, atol=1e-4)


def test_ridge_is_exact():
    """Against least squares on augmented rows, which is another way to the same minimum."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(2, 1, (2, 50, 6)), rng.normal(-5, 1, (2, 50, 3))
    sums = surrogate.Sums(
        jnp.float32(50),
        *(jnp.asarray(z, jnp.float32) for z in (
            x.sum(1), y.sum(1), np.einsum("lnd,lne->lde", x, x), np.einsum("lnd,lnh->ldh", x, y)
        )),
    )  # fmt: skip
    found = surrogate.ridge(sums, 3.0)["out"]
    for n in range(2):
        rows = np.concatenate([np.c_[x[n], np.ones(50)], np.c_[np.sqrt(3.0) * np.eye(6), np.zeros(6)]])
        want = np.linalg.lstsq(rows, np.concatenate([y[n], np.zeros((6, 3))]), rcond=None)[0]
        np.testing.assert_allclose(found["kernel"][n], want[:6], atol=2e-4)
        np.testing.assert_allclose(found["bias"][n], want[6], atol=2e-3)


def test_the_mlp_learns_what_no_line_can():
    rng = np.random.default_rng(2)
    x = rng.normal(3, 2, (2, 2000, 8)).astype(np.float32)
    y = (np.abs(x[..., :2] - 3) * 2 - 6).astype(np.float32)
    scale = surrogate.Scale.of(x, y)
    mlp = surrogate.Mlp.init(2, 8, 32, 2, scale, 0)
    losses = []
    for step in range(400):
        rows = rng.permutation(2000)[:256]
        batch = jnp.asarray(x[:, rows]), jnp.asarray(y[:, rows])
        mlp, loss = surrogate.mlp_step(mlp, *batch, jnp.float32(5e-3 * (1 - step / 400)), jax.random.key(0))
        losses.append(float(loss))
    assert losses[-1] < 0.05 < 0.5 < losses[0]
    folded = mlp.folded()
    correlation = surrogate.Correlation()
    for part in np.array_split(np.arange(2000), 3):
        correlation.add(surrogate.predict_all(folded, jnp.asarray(x[:, part])), jnp.asarray(y[:, part]))
    squared = correlation.squared()
    assert squared.shape == (2, 2)
    assert (squared > 0.9).all()
    predicted = np.asarray(surrogate.predict_all(folded, jnp.asarray(x)))
    assert np.abs(predicted - y).mean() < 0.6  # on the targets' own scale
    want = np.corrcoef(predicted[1, :, 0], y[1, :, 0])[0, 1] ** 2
    assert squared[1, 0] == pytest.approx(want, abs=1e-6)


def test_dropout_and_decay_restrain_the_mlp():
    """Fewer tokens than weights, targets of noise: without restraint they are learned by heart."""
    rng = np.random.default_rng(3)
    x, y = (rng.normal(0, 1, (1, 64, n)).astype(np.float32) for n in (32, 1))

    def error(restraint):
        mlp = surrogate.Mlp.init(1, 32, 64, 1, surrogate.Scale.of(x, y), 0)
        for _ in range(300):
            mlp, _ = surrogate.mlp_step(
                mlp, jnp.asarray(x), jnp.asarray(y), jnp.float32(5e-3), jax.random.key(0), restraint
            )
        return float(np.square(np.asarray(surrogate.predict_all(mlp.folded(), jnp.asarray(x))) - y).mean() / y.var())

    free = error(surrogate.Restraint())
    assert free < 0.01
    for restraint in (surrogate.Restraint(dropout=0.5), surrogate.Restraint(input_dropout=0.5)):
        assert error(restraint) > 10 * free
    assert error(surrogate.Restraint(weight_decay=5.0)) > 10 * free


def test_templates_that_alter_the_prompt_are_refused():
    class Template:
        has_chat_template = True

        def __init__(self, render):
            self.render = render

        def apply_chat_template(self, messages, **_):
            return self.render(messages)

        def encode(self, text, add_bos=False):
            return [ord(c) for c in text]

    good = Template(lambda m: f"<u>{m[0]['content']}</u><a>{m[1]['content']}</a>")
    parts = surrogate.Extended.of(good)
    assert parts.before == [ord(c) for c in "<u>"]
    assert parts.between == [ord(c) for c in surrogate.REQUEST + "</u><a>"]
    for render in (
        lambda m: f"<u>{m[0]['content'].upper()}</u><a>{m[1]['content']}</a>",
        lambda m: f"<u>{m[0]['content']}</u>",
        lambda m: f"<u>{m[0]['content'].strip('.')[:-5]}</u><a>{m[1]['content']}</a>",
    ):
        with pytest.raises(kvs.InputError, match="chat template alters a prompt"):
            surrogate.Extended.of(Template(render))


ARGUMENTS = [
    "--data", "builtin:code", "--prompts", "6", "--heldout-prompts", "2", "--min-tokens", "20", "--max-tokens", "24",
    "--sample", "16", "--mlp-batch", "8", "--epochs", "2", "--dtype", "float32", "--save-every", "2",
]  # fmt: skip


@pytest.fixture(scope="module")
def small(golden_models):
    """A model with a tokenizer."""
    return str(golden_models / "llama_tied")


def test_the_command_and_its_resume(small, tmp_path, monkeypatch, capsys):
    """Interrupted after four prompts and gone on with: the same surrogates as in one go; both load."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    base = ["--model", small, *ARGUMENTS, "--buffer-gb", "0.00002"]
    assert kvzap.main([*base, "--output", str(whole)]) == 0
    printed = capsys.readouterr().out
    assert "squared Pearson correlation on held-out prompts" in printed
    calls = []
    original = surrogate.collect

    def stops(*args, **kwargs):
        calls.append(1)
        if len(calls) == 5:
            raise kvs.RunError("the power failed")
        return original(*args, **kwargs)

    monkeypatch.setattr(surrogate, "collect", stops)
    assert kvzap.main([*base, "--output", str(cut)]) == 1
    monkeypatch.setattr(surrogate, "collect", original)
    assert kvzap.main([*base, "--output", str(cut)]) == 2
    assert "holds another run" in capsys.readouterr().err
    changed = [x if x != "16" else "12" for x in base]
    assert kvzap.main([*changed, "--output", str(cut), "--resume", "auto"]) == 2
    assert "different configuration: sample 16 -> 12" in capsys.readouterr().err
    assert kvzap.main([*base, "--output", str(cut), "--resume", "auto"]) == 0
    assert "going on after 4 prompts" in capsys.readouterr().out
    for kind in ("linear", "mlp"):
        a, b = (kvs.KVzap.load(run / kind) for run in (whole, cut))
        jax.tree.map(np.testing.assert_array_equal, a.params, b.params)
        lm = kvs.load(small, policy=dataclasses.replace(a, threshold=-4.0, window=4))
        assert lm.generate([[5, 6, 7]], max_new_tokens=3, eos=False).tokens[0]
    results = json.loads((whole / "results.json").read_text())
    assert np.asarray(results["squared_pearson"]["mlp"]["by_layer_and_head"]).ndim == 2
    assert (whole / "correlation.png").stat().st_size > 1000


def test_on_a_mesh(small, tmp_path, monkeypatch, capsys):
    """Prompts over two devices and heads over two others, interrupted and gone on with: what one device finds."""
    base = ["--model", small, *ARGUMENTS, "--batch-size", "2"]
    assert kvzap.main([*base, "--output", str(tmp_path / "one")]) == 0
    mesh = [*base, "--mesh-data", "2", "--mesh-tensor", "2", "--output", str(tmp_path / "mesh")]
    original, calls = surrogate.collect, []

    def stops(*args, **kwargs):
        calls.append(kwargs["mesh"])
        if len(calls) == 3:
            raise kvs.RunError("the power failed")
        return original(*args, **kwargs)

    monkeypatch.setattr(surrogate, "collect", stops)
    assert kvzap.main(mesh) == 1
    assert dict(calls[0].shape) == {"data": 2, "fsdp": 1, "tensor": 2}
    monkeypatch.setattr(surrogate, "collect", original)
    fewer = [x if x != "--mesh-tensor" else "--mesh-fsdp" for x in mesh]
    fewer[fewer.index("--mesh-data") + 1] = "1"
    assert kvzap.main([*fewer, "--resume", "auto"]) == 0  # on other devices than before
    assert "going on after 4 prompts" in capsys.readouterr().out
    for kind in ("linear", "mlp"):
        a, b = (kvs.KVzap.load(tmp_path / run / kind) for run in ("one", "mesh"))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-3), a.params, b.params)
    other = ["--output", str(tmp_path / "other")]
    assert kvzap.main([*base, "--mesh-data", "4", *other]) == 2
    assert "--batch-size 2 cannot be divided over 4 devices" in capsys.readouterr().err
    assert kvzap.main([*base, "--mesh-tensor", "4", *other]) == 2
    assert "2 KV heads cannot be divided over 4 devices" in capsys.readouterr().err
    assert not (tmp_path / "other" / "run.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--prompts", "0"], "--prompts must be a whole number, at least 1"),
        (["--min-tokens", "30"], "2 <= --min-tokens <= --max-tokens"),
        (["--max-tokens", "4000"], "more than the model's context"),
        (["--ridge", "-1"], "--ridge must be at least 0"),
        (["--lr", "nan"], "--lr must be positive"),
        (["--dropout", "1"], "--dropout must be at least 0 and below 1"),
        (["--input-dropout", "nan"], "--input-dropout must be at least 0 and below 1"),
        (["--weight-decay", "-1"], "--weight-decay must be at least 0"),
        (["--buffer-gb", "0.000001"], "fewer than the --mlp-batch"),
        (["--prompts", "7", "--batch-size", "2"], "cannot be cut into batches of 2"),
        (["--data", "builtin:nothing"], "nothing"),
    ],
)
def test_bad_input(small, tmp_path, capsys, change, message):
    arguments = ["--model", small, "--output", str(tmp_path / "run"), *ARGUMENTS]
    assert kvzap.main([*arguments, *change]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error
    assert error.startswith("python -m train.kvzap: error: ")


def test_help_answers_without_loading_anything():
    done = subprocess.run(
        [sys.executable, "-m", "train.kvzap", "--help"], capture_output=True, text=True, check=True, timeout=120
    )
    assert "--ridge" in done.stdout


def test_continuations_compare_on_what_follows(lm, golden_methods):
    ids = np.random.default_rng(3).integers(3, 97, (2, 60))
    policy = kvs.KVzap.load(golden_methods / "6_kvzap" / "mlp", threshold=0.1, window=4, prefill="dense")
    methods = {
        "KVzap": policy,
        "SnapKV": kvs.SnapKV(budget=20, window=8),
        "H2O": kvs.H2O(budget=20),
    }
    results = continuations(lm, methods, ids, 48, page_size=4)
    assert [r.method for r in results] == ["dense", *methods]
    dense = results[0]
    assert dense.kl.mean == dense.removed.mean == 0
    for r in results[1:]:
        assert r.kl.mean > 1e-6
    assert results[2].removed.mean == pytest.approx(1 - 20 / 48)
    assert results[3].removed.mean == pytest.approx(1 - 20 / 48)
    # By hand for one row: the tokens kept after the prompt, dense attention over them.
    row = ids[:1]
    live = np.asarray(kvs.kept(lm.with_policy(policy), row[:, :48])).mean()
    alone = continuations(lm, {"KVzap": policy}, row, 48, page_size=4)[1]
    assert alone.removed.mean == pytest.approx(1 - live)
    replayed = lm.with_policy(policy).replay(row, prefill=48, page_size=4).logits[0, 48:]
    full = np.asarray(lm.logits(row))[0, 48:]
    p, q = (np.asarray(jax.nn.log_softmax(jnp.asarray(x, jnp.float32))) for x in (full, replayed))
    assert alone.kl.mean == pytest.approx(float((np.exp(p) * (p - q)).sum(-1).mean()), rel=1e-3)
    # Generated tokens in one piece are the same as one by one, for a policy that selects from prompts only, too.
    snap = lm.with_policy(methods["SnapKV"])
    together = generation.continuation(snap._model, jnp.asarray(row, jnp.int32), 48, page_size=4)
    replayed = snap.replay(row, prefill=48, page_size=4)
    np.testing.assert_allclose(together.logits[0], replayed.logits[0, 48:], atol=2e-5)
    np.testing.assert_array_equal(together.end.live, replayed.live[-1])
    assert "| KVzap |" in table(results)
    assert json.loads(json.dumps(as_json(results)))[1]["method"] == "KVzap"
    with pytest.raises(kvs.RunError, match="removed nothing"):
        continuations(lm, {"H2O": kvs.H2O(budget=100)}, ids, 48)
    with pytest.raises(kvs.InputError, match="at least two tokens after"):
        continuations(lm, {}, ids, 59)


def test_calibration_reaches_its_aim(lm, golden_methods):
    ids = np.random.default_rng(4).integers(3, 97, (4, 60))
    policy = kvs.KVzap.load(golden_methods / "6_kvzap" / "mlp", window=4, sinks=2)
    for prefill in ("rule", "dense"):
        model = lm.with_policy(dataclasses.replace(policy, prefill=prefill))
        found = calibrate(model, ids, cr=2.0)
        assert found.cr == pytest.approx(2.0, abs=0.06)
        kept = np.asarray(kvs.kept(lm.with_policy(found.policy), ids)).mean((0, 2, 3))
        np.testing.assert_allclose(found.kept, kept, atol=0.01)
        assert found.kept.max() > found.kept.min()
        assert "prompts from" in str(found)
    found = calibrate(model, ids, kl=0.5)
    assert found.kl <= 0.5
    assert found.cr > 1.05
    for settings, message in (
        (dict(), "either cr= or kl="),
        (dict(cr=2.0, kl=1.0), "either cr= or kl="),
        (dict(cr=1.0), "cannot be reached"),
        (dict(cr=50.0), "cannot be reached: it must be above 1 and at most"),
    ):
        with pytest.raises(kvs.InputError, match=message):
            calibrate(model, ids, **settings)
    with pytest.raises(kvs.InputError, match="prompts of 45 tokens are not longer"):
        calibrate(lm.with_policy(dataclasses.replace(policy, window=50)), ids, kl=0.1)
    with pytest.raises(kvs.InputError, match="only a KVzap policy"):
        calibrate(lm, ids, cr=2.0)
    with pytest.raises(kvs.InputError, match="not longer than what is never evicted"):
        calibrate(lm.with_policy(dataclasses.replace(policy, window=100)), ids, cr=2.0)

"""``python -m train.retrofit``: runs of tiny models from the command line's settings to the exported model."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from safetensors import safe_open

import kvsparse_jax as kvs
from kernels.visibility import decisions_by_key
from kvsparse_jax import distributed
from train import config as settings
from train import data, lora, retrofit, trainer
from train.calibrate import calibrate
from train.config import RetrofitConfig, load_preset
from train.step import State, merge
from train.store import Store

ROOT = Path(__file__).resolve().parent.parent
VOLATILE = ("tokens_per_second", "seconds")


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """60 documents of differing lengths."""
    rng = np.random.default_rng(0)
    words = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split()
    path = tmp_path_factory.mktemp("text") / "documents.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(60):
            start = int(rng.integers(0, len(words) - 80))
            file.write(json.dumps({"text": " ".join(words[start : start + int(rng.integers(5, 60))])}) + "\n")
    return path


@pytest.fixture(scope="session")
def make(text, golden_models):
    """Settings of a run of seconds."""

    def make(output, **changes):
        base = dict(
            model=str(golden_models / "llama_tied"),
            data=(str(text),),
            output=str(output),
            target_cr=3.0,
            window=6,
            steps=6,
            batch_size=2,
            sequence_length=48,
            lr=2e-3,
            dtype="float32",
            mesh_data=1,
            tensorboard=False,
            save_every=0,
        )
        return RetrofitConfig(**{**base, **changes})

    return make


@pytest.fixture(scope="session")
def straight(make, tmp_path_factory):
    """10 steps without a stop."""
    return trainer.train(make(tmp_path_factory.mktemp("straight") / "run", steps=10, tensorboard=True))


def rows(output):
    found = [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in VOLATILE} for row in found]


def tensors(directory):
    found: dict[str, np.ndarray] = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(file, framework="numpy") as handle:
            found |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    return found


def same_model(one, other):
    first, second = tensors(one), tensors(other)
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].tobytes() == second[name].tobytes(), name
    assert (Path(one) / "config.json").read_text() == (Path(other) / "config.json").read_text()


# --- a run -----------------------------------------------------------------------------------------------------------


def test_run_leaves_what_it_promises(straight):
    logged = [json.loads(line) for line in (straight.output / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in logged] == list(range(1, 11))
    keys = (
        "step loss distillation budget target_cr target_fraction closed_fraction evicted_fraction nominal_cr grad_norm "
        "lr tokens tokens_per_second seconds"
    )
    assert all(set(row) == set(keys.split()) for row in logged)
    assert logged[0]["target_cr"] == 1 and logged[9]["target_cr"] == pytest.approx(2.8)
    assert logged[-1]["evicted_fraction"] > logged[0]["evicted_fraction"] == 0
    assert logged[-1]["nominal_cr"] == pytest.approx(1 / (1 - logged[-1]["evicted_fraction"]))
    assert 10 * 2 * 24 < logged[-1]["tokens"] <= 10 * 2 * 48
    run = json.loads((straight.output / "run.json").read_text())
    assert run["config"]["target_cr"] == 3 and run["versions"]["jax"] == jax.__version__
    assert list((straight.output / "tensorboard").glob("events*"))
    assert [path.name for path in straight.exports] == ["cr-2", "cr-3"]


def test_output_directory_opens_as_a_model(straight, make):
    """Through the released names and keys; logits equal those of the trained state put together in memory."""
    lm = kvs.load(straight.output)
    assert lm.source == straight.output / "model"
    assert isinstance(lm.policy, kvs.DMS) and (lm.policy.window, lm.policy.target_cr) == (6, 3.0)
    with Store(straight.output / "checkpoints", keep=2) as store:
        state = store.restore(10, trained(make(straight.output, steps=10)))
    base = kvs.load(make("x").model)
    ids = np.random.default_rng(0).integers(3, 300, (2, 40))
    policy = dataclasses.replace(lm.policy, params=state.trainable["policy"])
    np.testing.assert_array_equal(lm.logits(ids), base.with_policy(policy).logits(ids))
    assert np.abs(np.asarray(lm.logits(ids)) - np.asarray(base.logits(ids))).max() > 1e-3


def trained(config):
    """The state of a run before its first step."""
    mesh = trainer.make_mesh_for(config)
    parts = trainer.make_parts(config, Path(config.model), mesh, None)
    optimizer = trainer.make_optimizer(config)
    return distributed.replicate(State(parts.trainable, optimizer.init(parts.trainable), jnp.int32(0)), mesh)


@pytest.mark.parametrize("where", ["model", "exports/cr-2"])
def test_base_weights_are_untouched(straight, make, where):
    base, written = tensors(make("x").model), tensors(straight.output / where)
    added = written.keys() - base.keys()
    assert all("self_attn.dms_proj_alpha" in name for name in added) and added
    for name in base:
        assert base[name].tobytes() == written[name].tobytes(), name


def test_exports_share_the_base_on_disk(straight):
    inodes = [{f.stat().st_ino for f in d.glob("*.safetensors")} for d in (*straight.exports, straight.model)]
    assert set.intersection(*inodes)


def test_frozen_weights_have_no_optimiser_state(make):
    """Two moments for each trained weight and a few counters, and nothing of the size of the base."""
    state = trained(make("x"))
    weights = sum(leaf.size for leaf in jax.tree.leaves(state.trainable))
    moments = sum(leaf.size for leaf in jax.tree.leaves(state.optimizer))
    assert 2 * weights <= moments < 2 * weights + 10
    assert set(state.trainable) == {"policy"}


def test_data_parallel_run_equals_one_device(make, tmp_path):
    """Rows over two mesh axes, weights divided over one of them.

    Two steps only: a last digit decides the sign of Adam's first step where a gradient is nearly zero, and with it
    single decisions later on.
    """
    config = make(tmp_path / "run", steps=2, batch_size=4, initial_cr=2.0, export_each_cr=False)
    one = trainer.train(config)
    other = trainer.train(dataclasses.replace(config, output=str(tmp_path / "other"), mesh_data=2, mesh_fsdp=2))
    for a, b in zip(rows(one.output), rows(other.output), strict=True):
        assert a == pytest.approx(b, rel=2e-3, abs=1e-5)


def test_seed_and_nothing_else_decides(straight, make, tmp_path):
    again = trainer.train(make(tmp_path / "run", steps=3, cr_steps=10, export_each_cr=False))
    assert rows(again.output) == rows(straight.output)[:3]


# --- resuming --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def halved(make, tmp_path_factory):
    """The same 10 steps, stopped after 7, with checkpoints 5 and 7."""
    config = make(tmp_path_factory.mktemp("halved") / "run", steps=10, save_every=5)
    with pytest.raises(kvs.RunError, match="stopped by request after step 7 of 10"):
        trainer.train(config, stop=lambda step: step == 7)
    return config


def copy(config, target, **changes):
    shutil.copytree(config.output, target)
    return dataclasses.replace(config, output=str(target), **changes)


def test_resumed_run_equals_the_straight_one(straight, halved, tmp_path):
    """Bit for bit: losses, data order, noise, weights, exports."""
    config = copy(halved, tmp_path / "run", resume="auto", log_every=1, save_every=3, calibrate=False)
    assert [row["step"] for row in rows(config.output)] == list(range(1, 8))
    result = trainer.train(config)
    assert rows(result.output) == rows(straight.output)
    same_model(result.model, straight.model)
    for one, other in zip(result.exports, straight.exports, strict=True):
        same_model(one, other)
    # A finished run is left as it is.
    before = {path: path.stat().st_mtime_ns for path in result.model.iterdir()}
    assert trainer.train(config).last["step"] == 10
    assert before == {path: path.stat().st_mtime_ns for path in result.model.iterdir()}


def test_damaged_newest_checkpoint_is_passed_over(straight, halved, tmp_path, caplog):
    """Then metrics.jsonl is cut back to the one before."""
    config = copy(halved, tmp_path / "run", resume="auto")
    for file in (tmp_path / "run" / "checkpoints" / "7" / "state").rglob("manifest.ocdbt"):
        file.write_bytes(b"")
    result = trainer.train(config)
    assert "checkpoints/7 is damaged and passed over" in caplog.text
    assert rows(result.output) == rows(straight.output)
    same_model(result.model, straight.model)


def test_resume_from_a_named_checkpoint_in_another_directory(straight, halved, tmp_path):
    source = Path(halved.output) / "checkpoints" / "5"
    config = dataclasses.replace(halved, output=str(tmp_path / "run"), resume=str(source))
    result = trainer.train(config)
    assert rows(result.output) == rows(straight.output)[5:]
    same_model(result.model, straight.model)


def test_resume_lists_the_differences(halved, tmp_path, make):
    config = copy(halved, tmp_path / "run", resume="auto")
    with pytest.raises(kvs.InputError, match=r"different configuration: lr 0.002 -> 0.1; train adapter -> lora"):
        trainer.train(dataclasses.replace(config, lr=0.1, train="lora"))
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "something else entirely"}\n')
    with pytest.raises(kvs.InputError, match=r"different configuration: sources.0.content"):
        trainer.train(dataclasses.replace(config, data=(str(other),)))
    with pytest.raises(kvs.InputError, match="there is no whole checkpoint .*; there are 5, 7"):
        trainer.train(dataclasses.replace(config, resume=str(tmp_path / "run" / "checkpoints" / "6")))
    with pytest.raises(kvs.InputError, match="neither auto, never, a checkpoint"):
        trainer.train(dataclasses.replace(config, resume=str(tmp_path / "nothing")))
    with pytest.raises(kvs.InputError, match="holds another run"):
        trainer.train(dataclasses.replace(config, resume="never"))


def test_resume_auto_starts_where_there_is_nothing(make, tmp_path):
    result = trainer.train(make(tmp_path / "run", steps=1, resume="auto", export_each_cr=False))
    assert result.steps == 1


def test_sigterm_saves_and_says_so(make, tmp_path):
    """A real process: checkpoint, exit status 1, one line; then the run goes on from there."""
    config = make(tmp_path / "run", steps=100_000, log_every=1)
    arguments = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in settings.plain(config).items()
        if name in ("model", "output", "target_cr", "window", "steps", "batch_size", "sequence_length", "dtype", "lr")
    ]
    arguments += [f"--data={config.data[0]}", "--no-tensorboard", "--mesh-data=1", "--save-every=0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "train.retrofit", *arguments],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XLA_FLAGS": ""},
    )
    log = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while process.poll() is None and not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    assert errors.splitlines()[-1].startswith("python -m train.retrofit: error: stopped by SIGTERM after step ")
    done = rows(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run" / "checkpoints" / str(done)).is_dir()
    going_on = dataclasses.replace(config, resume="auto")
    with pytest.raises(kvs.RunError, match=f"stopped by request after step {done + 1} "):
        trainer.train(going_on, stop=lambda step: True)


def test_loss_that_is_not_finite_stops_the_run(make, tmp_path):
    """The first step's weights explode, the second step's loss is not finite, the state after the first is kept."""
    config = make(tmp_path / "run", steps=6, lr=1e38, clip=0.0)
    with pytest.raises(
        kvs.RunError, match=r"not finite in step 2 \(loss .*batch with examples \d+ to \d+\); the state"
    ):
        trainer.train(config)
    with Store(tmp_path / "run" / "checkpoints", keep=2) as store:
        assert store.steps() == [1]
        assert int(store.restore(1, trained(config)).step) == 1
        assert store.meta(1)["loader"]["batches"] == 1
    assert [row["step"] for row in rows(config.output)] == [1]


# --- what can be trained ---------------------------------------------------------------------------------------------


def test_lora_is_merged_at_export(make, tmp_path):
    config = make(tmp_path / "run", train="lora", lora_rank=2, lora_targets=("q", "down"), export_each_cr=False)
    result = trainer.train(config)
    base, written = tensors(config.model), tensors(result.model)
    changed = {name for name in base if base[name].tobytes() != written[name].tobytes()}
    assert changed == {
        f"model.layers.{layer}.{name}.weight" for layer in (0, 1) for name in ("self_attn.q_proj", "mlp.down_proj")
    }
    for name in changed:
        assert np.linalg.matrix_rank(written[name] - base[name], tol=1e-5) <= 2
    # The export is what was trained: the same logits as with the update beside the kernels.
    with Store(result.output / "checkpoints", keep=2) as store:
        state = store.restore(config.steps, trained(config))
    lm = kvs.load(result.output)
    beside = dataclasses.replace(lm, params=merge(kvs.load(config.model).params, state.trainable["model"]))
    ids = np.random.default_rng(0).integers(3, 300, (1, 30))
    np.testing.assert_allclose(lm.logits(ids), beside.logits(ids), atol=2e-4)


def test_lora_starts_at_zero_and_merges_to_the_same(make):
    lm = kvs.load(make("x").model)
    update = lora.init(lm.params, jax.random.key(0), rank=4, alpha=8.0, targets=lora.TARGETS)
    merged = lora.merge(lm.params, update)
    assert all(
        (np.asarray(a) == np.asarray(b)).all()
        for a, b in zip(jax.tree.leaves(merged), jax.tree.leaves(lm.params), strict=True)
    )


def test_all_weights_can_be_trained(make, tmp_path):
    config = make(tmp_path / "run", train="all", steps=3, direction="teacher_student", export_each_cr=False)
    result = trainer.train(config)
    base, written = tensors(config.model), tensors(result.model)
    assert all(base[name].tobytes() != written[name].tobytes() for name in base)
    # One set of originals is the teacher: it does not drift along, so the distillation is not zero at CR 1.
    assert rows(result.output)[1]["distillation"] > 1e-6
    assert kvs.load(result.output).logits(np.ones((1, 8), int)).shape == (1, 8, 384)


def test_neuron_variant_fades_before_it_evicts(make, tmp_path):
    config = make(tmp_path / "run", variant="neuron", train="all", fade_steps=3, steps=3, initial_cr=2.0, scale=20.0)
    result = trainer.train(config)
    logged = rows(result.output)
    assert len(logged) == 6
    for row in logged[:3]:
        assert (row["evicted_fraction"], row["closed_fraction"], row["budget"]) == (0, 0, 0)
        assert row["distillation"] > 0 and row["target_cr"] == 2
    assert any(row["closed_fraction"] > 0 for row in logged[3:])
    assert logged[-1]["target_cr"] == pytest.approx(2 + 2 / 3)
    lm = kvs.load(result.output)
    assert isinstance(lm.policy, kvs.DMS) and lm.policy.variant == "neuron" and lm.policy.params is None
    assert json.loads((result.model / "config.json").read_text())["dms_separate_alpha"] is False
    assert not any("dms" in name for name in tensors(result.model))


def test_oracle_starts_at_the_wished_ratio(make, tmp_path):
    config = make(
        tmp_path / "run", init="oracle", init_rows=8, steps=1, target_cr=2.0, sequence_length=160, window=8,
        packing=False, data=("builtin:code",), model=make("x").model, lr=1e-6,
    )  # fmt: skip
    result = trainer.train(config)
    assert 1.4 < rows(result.output)[0]["nominal_cr"] < 3.0
    assert config.start_cr == 2.0


def test_calibration_reaches_the_ratio(make):
    lm = kvs.load(make("x").model)
    policy = kvs.DMS.init(lm.config, window=4, scale=3.0, offset=2.0)
    proj = jax.random.normal(jax.random.key(0), policy.params["proj"].shape) * 0.1
    policy = dataclasses.replace(policy, params={**policy.params, "proj": proj})
    ids = jax.random.randint(jax.random.key(1), (2, 60), 3, 300, jnp.int32)
    batch = data.Batch(ids, jnp.zeros_like(ids), jnp.zeros_like(ids), jnp.zeros_like(ids))  # type: ignore[arg-type]
    done = calibrate(lm.params, lm.config, policy, [batch], evict_fraction=0.6)
    assert done.after == pytest.approx(0.6, abs=0.01) and abs(done.before - 0.6) > 0.05
    logits = kvs.decision_logits(lm.with_policy(done.policy), np.asarray(ids))
    about = jnp.stack([decisions_by_key(layer, 1, -jnp.inf) for layer in logits])
    assert float((about > 0).mean()) == pytest.approx(done.after, abs=2e-3)
    assert dataclasses.replace(done.policy, offset=policy.offset) == policy or done.policy.params is policy.params


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_learning_rate(make, schedule):
    config = make("x", steps=10, warmup_steps=4, lr_schedule=schedule, lr=0.5)
    host = [float(trainer.learning_rate(config, step)) for step in range(12)]
    traced = [float(trainer.learning_rate(config, jnp.int32(step))) for step in range(12)]
    np.testing.assert_allclose(host, traced, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(host[:4], [0.125, 0.25, 0.375, 0.5])
    assert host[9] == 0.5 if schedule == "constant" else 0 < host[9] < 0.05


@pytest.mark.parametrize("name", ["qwen3-8b", "llama-3.2-1b", "r1-distill-qwen-1.5b", "demo"])
def test_presets_are_valid(name):
    config = RetrofitConfig(**{"output": "x", **load_preset(name)})
    config.require()
    for spec in config.data:
        data.Source.parse(spec)


def test_released_recipe():
    """The Qwen3-8B preset is the published one: CR 8 at step 238 of a ramp from 1 to 16 over 510."""
    config = RetrofitConfig(**load_preset("qwen3-8b"))
    assert (config.window, config.scale, config.offset, config.tau) == (512, 100, 5, 0.1)
    assert (config.batch_size, config.sequence_length, config.lr, config.clip) == (8, 32768, 3e-5, 1.0)
    assert (config.beta1, config.beta2, config.weight_decay, config.lr_schedule) == (0.9, 0.95, 0, "constant")
    from train.losses import cr_schedule

    assert cr_schedule(238, *config.schedule)[1] == pytest.approx(8)


def parse(*argv):
    preset = settings.preset_of(argv)
    parser = settings.parser(load_preset(preset) if preset else {})
    return settings.from_arguments(vars(parser.parse_args(argv)))


def test_flags_win_over_the_preset(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('model = "m"\ndata = ["a:2", "b"]\noutput = "o"\nlr = 1\npacking = false\nwindow = 32\n')
    config = parse("--preset", str(file))
    assert (config.data, config.lr, config.packing, config.window) == (("a:2", "b"), 1.0, False, 32)
    config = parse(
        f"--preset={file}", "--data", "c", "--data", "d", "--packing", "--window", "8", "--lora-targets", "q,up"
    )
    assert (config.data, config.lr, config.packing, config.window) == (("c", "d"), 1.0, True, 8)
    assert config.lora_targets == ("q", "up")


def test_help_shows_units_and_defaults(capsys):
    assert retrofit.main(["--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "(unit: tokens, default: 256)" in shown and "--target-cr" in shown
    assert retrofit.main(["--preset", "qwen3-8b", "--help"]) == 0
    assert "(unit: tokens, default: 512)" in " ".join(capsys.readouterr().out.split())


# --- bad input -------------------------------------------------------------------------------------------------------

BAD = {
    "--target-cr 0.5": "target_cr must be at least 1",
    "--target-cr nan": "target_cr must be at least 1",
    "--target-cr 9": r"T/\(W\+1\) = 6.86",
    "--window 60": r"the newest 61 always stay.*T/\(W\+1\) = 0.787",
    "--initial-cr 4": "initial_cr must be between 1 and target_cr 3",
    "--window -1": "window must be at least 0",
    "--steps 0": "steps must be at least 1",
    "--sequence-length 512": "more than the model's context of 256",
    "--batch-size 3 --accumulate 2": "3 rows cannot be cut into 2",
    "--batch-size 3 --mesh-data 2": "3 rows .* cannot be divided over 2 devices",
    "--mesh-data 64": "needs 64 devices",
    "--mesh-tensor 4": "2 KV heads cannot be divided over 4 devices",
    "--lr 0": "lr must be positive",
    "--tau 0": "tau must be positive",
    "--beta2 1": r"beta2 must be in \[0, 1\)",
    "--variant neuron": "neuron variant has no adapter",
    "--variant neuron --train all --init oracle": "adapter variant",
    "--fade-steps 3": "fade_steps is for the neuron variant",
    "--variant neuron --train all --fade-steps 3 --teacher self": "teacher original",
    "--init oracle --initial-cr 1": "init oracle needs an initial_cr above 1",
    "--train lora --lora-targets q,nose": "lora_targets must be some of",
    "--preset nothing": "no preset 'nothing': known are demo",
    "--data /nothing/here.jsonl": "matches nothing",
    "--model /nothing/here": "is not a directory",
    "--heldout-fraction 1": "heldout_fraction must be in",
    "--direction sideways": "invalid choice",
    "--data-set x": "unrecognized arguments",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_input_is_one_line(make, tmp_path, capsys, flags):
    config = make(tmp_path / "run")
    argv = ["--model", config.model, "--output", config.output, "--data", config.data[0], "--target-cr", "3"]
    argv += ["--window", "6", "--sequence-length", "48", "--batch-size", "2", "--mesh-data", "1", *flags.split()]
    if "--data " in flags:
        argv = [argument for argument in argv if argument not in ("--data", config.data[0])]
        argv.insert(argv.index("/nothing/here.jsonl"), "--data")
    assert retrofit.main(argv) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert len(error) == 1 and re.search(BAD[flags], error[0]), error
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize("missing", ["model", "data", "output"])
def test_required_flags(capsys, missing):
    argv = [f"--{name}={name}" for name in ("model", "data", "output") if name != missing]
    assert retrofit.main(argv) == 2
    assert f"--{missing} is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [("windw = 3", "unknown setting 'windw'"), ("window = 'x'", "window must be int"), ("window = ", "is no TOML")],
)
def test_bad_presets(tmp_path, content, message):
    (tmp_path / "p.toml").write_text(content)
    with pytest.raises(kvs.InputError, match=message):
        load_preset(str(tmp_path / "p.toml"))


def test_model_without_tokenizer(make, tmp_path, golden_models):
    bare = tmp_path / "bare"
    shutil.copytree(golden_models / "llama_tied", bare)
    for file in bare.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(kvs.InputError, match="has no tokenizer"):
        trainer.train(make(tmp_path / "run", model=str(bare)))


def test_output_that_is_somebody_elses(make, tmp_path):
    (tmp_path / "photo.png").write_bytes(b"")
    with pytest.raises(kvs.InputError, match="is not empty"):
        trainer.train(make(tmp_path))


def test_exports_carry_a_card(straight, make):
    text = (straight.model / "README.md").read_text(encoding="utf-8")
    front = yaml.safe_load(text.split("---\n")[1])
    config = make(straight.output)
    assert front["base_model"] == config.model and "dms" in front["tags"]
    last = json.loads((straight.output / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"| KL of the last training batch, soft decisions | {last['distillation']:.4f} nats per token |" in text
    assert "| steps | 10 |" in text and "| window | 6 |" in text and "calibration" not in text
    assert "3 times smaller" in text and "each\nKV head decides" in text

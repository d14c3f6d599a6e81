"""Every benchmark runs on a tiny model; and decode.py's made-up caches are what a real prefill leaves."""

import functools
import importlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvsparse_jax as kvs
from benchmarks import decode, decode_attention, exactness, train_step
from kvsparse_jax.errors import RunError
from kvsparse_jax.evaluate import Sequences

FOLDER = Path(decode.__file__).parent
TINY = "--page 8 --window 8 --steps 3 --repeats 2 --batches --equal 0x0 --prefill 0".split()


@functools.cache
def load(directory):
    return kvs.load(directory, dtype="float32")


@pytest.fixture
def llama(golden_models):
    return load(golden_models / "llama_tied")


def uneven(lm, window=8, shift=0, seed=0):
    kept = np.random.default_rng(seed).uniform(0.1, 0.7, (lm.config.layers, lm.config.kv_heads))
    return decode.Uneven.like(kvs.DMS.init(lm.config, window=window, shift=shift), kept), kept


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_every_benchmark_is_a_command(path):
    """All have a main; --help is asked of those that this interpreter can run."""
    if "import torch\n" in path.read_text():
        assert "def main() -> None:" in path.read_text()
    else:
        assert callable(importlib.import_module(f"benchmarks.{path.stem}").main)


# decode.py


@pytest.fixture
def fake_hugging_face(tmp_path):
    """An "interpreter" that answers as hf_decode.py does, at any speed."""
    script = tmp_path / "fake.py"
    script.write_text(
        "import json, sys\n"
        "print(json.dumps({'versions': {'torch': '0'}, 'variants': ['dynamic', 'static']}), flush=True)\n"
        "for line in sys.stdin:\n"
        "    seconds = {'dynamic': 4.0, 'static': 2.0}[line.split()[0]] * int(line.split()[1])\n"
        "    print(json.dumps({'seconds': seconds}), flush=True)\n"
    )
    return command(tmp_path / "python", f'exec {sys.executable} {script} "$@"')


def command(path, body):
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return str(path)


def test_decode(golden_models, fake_hugging_face, tmp_path, capsys):
    options = "--batches 3 --contexts 128 --equal 3x128 --prefill 60 --chunk 16 --hf-size 3x128".split()
    model = ["--model", str(golden_models / "llama_tied")]
    output = ["--output", str(tmp_path / "out"), "--hf", fake_hugging_face]
    assert decode.main([*model, *TINY, *options, *output]) == 0, "a check failed"
    found = json.loads((tmp_path / "out" / "decode.json").read_text())
    assert [(row["batch"], row["context"]) for row in found["rows"]] == [({"dense": 3, "compressed": 3}, 128)]
    for row in [*found["rows"], found["equal"]]:
        assert row["ratio"] > 0 and all(row["checks"].values())
        assert row["used"]["compressed"] <= row["nbytes"]["compressed"]
    equal = found["equal"]
    one, room = equal["nbytes"]["compressed"] / equal["batch"]["compressed"], equal["nbytes"]["dense"]
    assert room - 1.1 * one < equal["nbytes"]["compressed"] <= room, "one more would fit"
    assert equal["batch"]["compressed"] > 3
    assert found["prefill"]["peak_fraction"] <= found["prefill"]["nbytes_fraction"]
    assert len(found["prefill"]["used_by_chunk"]) == 4
    by_cache = found["hugging_face"]["ratio_by_cache"]
    assert by_cache["dynamic"] == pytest.approx(2 * by_cache["static"])
    assert found["hugging_face"]["ratio"] == by_cache["static"]
    goals = {goal["what"] for goal in found["goals"]}
    assert goals >= {"speed-up at equal bytes, decisions as measured", "dense over Hugging Face"}
    assert (tmp_path / "out" / "decode.png").read_bytes().startswith(b"\x89PNG")
    assert "3 x 128" in capsys.readouterr().out


def test_retention_for_a_ratio_in_bytes(golden_models):
    """The largest share of what is kept with which so many sequences fit; none where the window alone is too much."""
    lm = kvs.load(golden_models / "llama_tied")
    args = decode._parser().parse_args([*TINY, "--page", "4", "--window", "4", "--equal", "2x128"])
    policy, kept = decode._policy(lm, args)
    shapes = jax.eval_shape(lambda: decode.filled_dense(lm.config, jnp.float32, 2, 0, 128))
    limit = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    wanted = 2 * decode.most_sequences(lm, policy, 128, 4, None, limit)
    tighter, factor = decode.compressed_in_bytes(lm, policy, args, limit, wanted)
    assert 0 < factor < 1
    np.testing.assert_allclose(tighter.params["kept"], factor * kept, rtol=1e-5)
    assert decode.most_sequences(lm, tighter, 128, 4, None, limit) >= wanted
    assert decode.compressed_in_bytes(lm, policy, args, limit, 1000) is None


def test_decode_eight_bit(golden_models, tmp_path):
    options = "--batches 3 --contexts 128 --kv-dtype float8_e4m3".split()
    model = ["--model", str(golden_models / "llama_tied"), "--output", str(tmp_path)]
    assert decode.main([*model, *TINY, *options]) == 0


@pytest.mark.parametrize("shift,window", [(1, 5), (0, 0)])
def test_made_up_cache_is_what_a_prefill_leaves(llama, shift, window):
    """Lengths, decisions, and for every entry when it expires and where it is: as after feeding the tokens."""
    policy, _ = uneven(llama, window, shift)
    seen, batch = 37, 2
    session = llama.with_policy(policy).session(batch, page_size=4, prefill_chunk=9)
    session.append(np.random.default_rng(0).integers(3, 300, (batch, seen + 1)).tolist())  # the last one is pending
    real = session._store().cache
    made = decode.filled_paged(llama.config, jnp.float32, policy, batch, seen, seen + 9, 4)
    for name in ("lengths", "flagged", "seen"):
        np.testing.assert_array_equal(getattr(real, name), getattr(made, name), err_msg=name)
    assert (real.ring.shape, real.window, real.shift, real.local) == (
        made.ring.shape,
        made.window,
        made.shift,
        made.local,
    )

    def expiry(cache, at, slots):
        table = np.asarray(cache.tables)[at]
        return np.asarray(cache.expires)[table[slots // cache.page], slots % cache.page]

    for at in np.ndindex(*real.lengths.shape):
        every = np.arange(np.asarray(real.lengths)[at])
        assert sorted(expiry(real, at, every)) == sorted(expiry(made, at, every))
        old, new = np.asarray(real.ring)[at], np.asarray(made.ring)[at]
        np.testing.assert_array_equal(old >= 0, new >= 0)
        np.testing.assert_array_equal(expiry(real, at, old[old >= 0]), expiry(made, at, new[new >= 0]))
    taken = np.asarray(made.tables)[np.asarray(made.tables) < made.pages]
    free = np.asarray(made.free)[: int(made.free_count)]
    assert sorted([*taken, *free]) == list(range(made.pages))


def test_policy_keeps_what_it_is_told(llama):
    policy, kept = uneven(llama)
    flags = np.asarray(decode.decisions(policy, batch=3, seen=4000))
    np.testing.assert_allclose(1 - flags.mean((1, 3)), kept, atol=0.02)
    assert len({flags[0, row, 0].tobytes() for row in range(3)}) == 3, "rows decide alike"
    # The real gate's logits have the same signs.
    logits = np.asarray(kvs.decision_logits(llama.with_policy(policy), np.full((3, 50), 7)))
    np.testing.assert_array_equal(logits > 0, flags[..., :50])


def test_measured_retention(golden_methods, monkeypatch):
    lm = load(golden_methods / "3_model" / "adapter")
    ids = np.random.default_rng(0).integers(3, lm.config.vocab_size, (2, 40))
    monkeypatch.setattr(decode, "held_out_sequences", lambda *_: Sequences(ids, ("code", "code")))
    kept = decode.measured_retention(lm, 40, 2)
    assert kept.shape == (lm.config.layers, lm.config.kv_heads)
    logits = np.asarray(kvs.decision_logits(lm, ids))[..., lm.policy.shift :]
    np.testing.assert_allclose(kept, 1 - (logits > 0).mean((1, 3)))
    assert 0 < kept.mean() < 1


@pytest.mark.parametrize(
    "options,status,said",
    [
        ("--batches 1 --contexts 512", 2, "1 x 512 is not possible"),
        ("--batches 1 --contexts 8", 2, "context from 9"),
        ("--equal 8-64", 2, "not BATCHxCONTEXT"),
        ("--prefill 300", 2, "--prefill must be 0 to 256"),
        ("--steps 65", 2, "--steps must be 1 to 64"),
        ("--retention measured", 2, "--window is the retrofit's own"),
        ("--hf /no/such/python --hf-size 1x32", 2, "cannot be run: No such file"),
        ("--hf FAILING --hf-size 1x32", 1, "hf_decode.py ended: no torch here"),
    ],
)
def test_decode_bad_input(golden_models, tmp_path, capsys, options, status, said):
    options = options.replace("FAILING", command(tmp_path / "failing", "echo no torch here >&2; exit 3"))
    arguments = [*TINY, *options.split(), "--model", str(golden_models / "llama_tied"), "--output", str(tmp_path)]
    assert decode.main(arguments) == status
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_measured_needs_a_retrofit(golden_models, capsys):
    arguments = ["--retention", "measured", "--contexts", "--equal", "0x0", "--prefill", "0"]
    assert decode.main([*arguments, "--model", str(golden_models / "llama_tied")]) == 2
    assert "a model with a DMS policy" in capsys.readouterr().err


def test_hugging_face_for_real(golden_models):
    """hf_decode.py itself, where KVSPARSE_TORCH_PYTHON names an interpreter with torch and transformers."""
    python = os.environ.get("KVSPARSE_TORCH_PYTHON")
    if not python:
        pytest.skip("needs another interpreter with torch: set KVSPARSE_TORCH_PYTHON")
    options = ["--model", str(golden_models / "llama_tied"), "--batch", "2", "--start", "20", "--slots", "32"]
    done = subprocess.run(
        [python, str(FOLDER / "hf_decode.py"), *options], input="dynamic 2\nstatic 2\n", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-1000:]
    hello, *answers = map(json.loads, done.stdout.splitlines())
    assert hello["variants"] == ["dynamic", "static"] and len(answers) == 2
    assert all(answer["seconds"] > 0 for answer in answers)


# The others


def test_decode_attention(tmp_path, monkeypatch):
    shape = "--context 48 --batch 2 --layers 5 --heads 2 --kv-heads 1 --head-dim 8 --window 8 --page 8 --repeats 2"
    figures = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["decode_attention", *shape.split(), "--json", str(figures)])
    decode_attention.main()
    found = json.loads(figures.read_text())
    assert found["speedup"] > 0 and found["paged_pool_copies"] == [] == found["dense_pool_copies"]


def test_train_step(golden_models, tmp_path, monkeypatch):
    lm = load(golden_models / "llama_tied")
    # Compiling takes longest: one step with DMS stands for all of them, and what is only compiled is left out.
    ours = train_step._ours
    once = functools.cache(lambda dms: ours(lm.config, lm.params, 32, dms=dms, norms=True, dtype=jnp.bfloat16))
    monkeypatch.setattr(train_step, "_ours", lambda *_, dms, **__: once(dms))
    monkeypatch.setattr(train_step, "_temporaries", lambda config, params, length, dtype: length)
    monkeypatch.setattr(train_step, "_compile_seconds", lambda config, layers: float(layers))
    options = ["--lengths", "32", "--repeats", "1", "--output", str(tmp_path)]
    assert train_step.main(["--model", str(golden_models / "llama_tied"), *options]) == 0
    found = json.loads((tmp_path / "train_step.json").read_text())
    assert found["throughput_over_plain"] > 0 and found["dms_over_no_dms_32"] > 0
    assert found["temporaries_8192_over_4096"] == 2 and found["compile_64_over_4_layers"] == 16


def test_exactness(golden_methods, monkeypatch):
    """Three turns of four ragged rows; and a cache that drops what it should keep is found out."""
    lm = kvs.load(golden_methods / "3_model" / "adapter", dtype="float32")
    rng = np.random.default_rng(0)
    said = [[rng.integers(3, 101, n).tolist() for n in sizes] for sizes in ((5, 17, 9, 1), (3, 1, 12, 6), (2, 8, 4, 9))]
    found = exactness.check(lm, said, 4)
    assert (found["tokens_drawn"], found["tokens_that_differ"]) == (48, 0)
    assert found["largest_logit_error"] < 1e-4 and found["kept_fraction"] < 0.9
    gate = exactness.Recorded.gate

    def forgetful(self, params, layer):
        return gate(self, params, layer) if layer.positions.shape[1] > 1 else jnp.ones_like(gate(self, params, layer))

    monkeypatch.setattr(exactness.Recorded, "gate", forgetful)
    jax.clear_caches()
    with pytest.raises(RunError, match="tokens are not the reference's"):
        exactness.check(lm, said, 20)

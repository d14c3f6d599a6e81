"""Several processes: real ones, joined by JAX's runtime over gloo, against one process of as many devices."""

import dataclasses
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvsparse_jax as kvs
from benchmarks.compile_proof import collectives
from kvsparse_jax import distributed
from kvsparse_jax.cache.store import CacheOptions
from kvsparse_jax.engine import EngineOptions, Request, SamplingOptions
from kvsparse_jax.errors import InputError
from kvsparse_jax.generation import decode as decoding
from kvsparse_jax.models.sharding import make_mesh
from kvsparse_jax.policies import DMS, H2O, StreamingLLM
from kvsparse_jax.sampling import sampling

ROOT = Path(__file__).resolve().parent.parent


def settings(model, text, output):
    return [
        "--model", str(model), "--data", str(text), "--output", str(output), "--target-cr", "3", "--window", "6",
        "--steps", "6", "--batch-size", "4", "--sequence-length", "48", "--lr", "2e-4", "--dtype", "float32",
        "--no-tensorboard", "--calibrate-rows", "4",
    ]  # fmt: skip


def start(arguments, devices, number=None, of=None, port=None):
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    more = (
        []
        if number is None
        else ["--coordinator", f"localhost:{port}", "--processes", str(of), "--process-id", str(number)]
    )
    return subprocess.Popen(
        [sys.executable, "-m", "train.retrofit", *arguments, *more],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def together(arguments, processes, devices):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return [start(arguments, devices, i, processes, port) for i in range(processes)]


def done(processes, status=0, seconds=300):
    told = [p.communicate(timeout=seconds) for p in processes]
    for process, (out, err) in zip(processes, told, strict=True):
        assert process.returncode == status, f"{out}\n{err}"
    return told


def rows(output):
    found = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("tokens_per_second", "seconds", "tokens")} for row in found]


def close(one, other):
    assert [row["step"] for row in one] == [row["step"] for row in other]
    for a, b in zip(one, other, strict=True):
        for key in a:
            assert a[key] == pytest.approx(b[key], rel=2e-3, abs=1e-6), key


@pytest.fixture(scope="module")
def alone(golden_models, tmp_path_factory):
    """One process of four devices."""
    root = tmp_path_factory.mktemp("alone")
    text = root / "text.jsonl"
    words = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split()
    lines = (json.dumps({"text": " ".join(words[i : i + 90])}) for i in range(0, len(words) - 90, 20))
    text.write_text("\n".join(lines), encoding="utf-8")
    done([start(settings(golden_models / "llama_tied", text, root / "run"), 4)])
    return text, root / "run"


@pytest.mark.parametrize("mesh", [("--mesh-data", "4"), ("--mesh-data", "1", "--mesh-fsdp", "2", "--mesh-tensor", "2")])
def test_two_processes_train_as_one_does(golden_models, tmp_path, alone, mesh):
    """Data over both; then weights, divided over both, gathered for the export by the one that writes it."""
    text, run = alone
    arguments = [*settings(golden_models / "llama_tied", text, tmp_path / "run"), *mesh]
    if mesh[1] == "1":
        arguments += ["--init", "oracle", "--initial-cr", "3", "--train", "lora", "--sequence-length", "96"]
        done([start([*arguments[:4], "--output", str(tmp_path / "one"), *arguments[6:]], 4)])
        run = tmp_path / "one"
    told = done(together(arguments, 2, 2))
    assert "model:" in told[0][0] and "model:" not in told[1][0]  # one of them talks
    close(rows(tmp_path / "run"), rows(run))
    for file in (run / "model").iterdir():
        assert (tmp_path / "run" / "model" / file.name).stat().st_size == file.stat().st_size


def test_all_stop_at_the_same_step_and_go_on_with_fewer(golden_models, tmp_path, alone):
    """SIGTERM to one of two processes; what they saved is read by a single one."""
    text, run = alone
    arguments = [*settings(golden_models / "llama_tied", text, tmp_path / "run"), "--save-every", "0"]
    pair = together([*arguments, "--steps", "4000"], 2, 1)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        assert time.monotonic() < deadline and all(p.poll() is None for p in pair), done(pair)
        time.sleep(0.2)
    pair[1].send_signal(signal.SIGTERM)
    told = done(pair, status=1)
    assert "stopped by request after step" in told[0][1]
    saved = int(told[0][1].split("stopped by request after step ")[1].split()[0])
    assert [int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir() if p.name.isdecimal()] == [saved]
    state = start([*arguments, "--steps", "4000", "--resume", "auto"], 1)
    while metrics.read_text().count("\n") < saved + 2:
        assert time.monotonic() < deadline + 120 and state.poll() is None
        time.sleep(0.2)
    state.send_signal(signal.SIGTERM)
    assert "resumed after step" in done([state], status=1)[0][1]
    assert [row["step"] for row in rows(tmp_path / "run")][: saved + 2] == list(range(1, saved + 3))


def test_wrong_addresses():
    for arguments, words in (
        (("host", 2, 0), "HOST:PORT"),
        (("host:1", None, 0), "how many processes"),
        (("host:1", 2, 2), "from 0 to 1"),
        ((None, 2, None), "address of the first"),
    ):
        with pytest.raises(InputError, match=words):
            distributed.start(*arguments)


class Device:
    """Stands for a device of a process."""

    def __init__(self, number, process_index):
        self.id, self.process_index = number, process_index


@pytest.mark.parametrize(
    ("shape", "found"),
    [((4, 1, 1), [(0, 2), (1, 2)]), ((1, 2, 2), [(0, 2), (1, 2)]), ((1, 1, 4), [(0, 1), (0, 1)])],
)
def test_which_rows_a_process_feeds(monkeypatch, shape, found):
    devices = np.asarray([Device(i, i // 2) for i in range(4)]).reshape(shape)
    fake = type("M", (), {"axis_names": ("data", "fsdp", "tensor"), "devices": devices})()
    fake.shape = dict(zip(fake.axis_names, shape, strict=True))
    for process, wanted in enumerate(found):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        assert distributed.rows_of_process(fake, ("data", "fsdp")) == wanted


# Decoding on a mesh, in this process


@functools.cache
def of_mesh(directory, tensor):
    """A model of 4 KV heads under DMS with random decisions, over ``tensor`` devices."""
    lm = kvs.load(directory, dtype="float32", mesh=make_mesh(tensor=tensor))
    rng = np.random.default_rng(0)
    shapes = DMS(None, window=6).abstract_params(lm.config)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), shapes)
    return lm.with_policy(DMS(params, window=6, scale=1.0, offset=0.0))


def answer(lm, **more):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, lm.config.vocab_size, n).tolist() for n in (20, 3, 9)]
    options = GREEDY | {"page_size": 4} | more
    session = lm.session(len(prompts), **{name: options.pop(name) for name in list(options) if name in CACHE})
    session.append(prompts)
    session.generate(12, **options)
    return session.tokens, session


GREEDY = {"temperature": 0.0, "eos": False}
CACHE = {field.name for field in dataclasses.fields(CacheOptions)}


@pytest.mark.parametrize(("tensor", "more"), [(2, {}), (4, {}), (4, {"cache": "dense"})])
def test_tokens_do_not_depend_on_the_devices(golden_models, tensor, more):
    directory = golden_models / "llama_rope_yarn"
    want, one = answer(of_mesh(directory, 1), **more)
    got, session = answer(of_mesh(directory, tensor), **more)
    assert got == want
    assert session.fork(2).generate(3, **GREEDY).tokens == one.fork(2).generate(3, **GREEDY).tokens
    cache, alone = session._store().cache, one._store().cache
    # All arrays but the sequences' lengths are divided; what differs more is that pages come in buckets per device.
    own = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(cache))
    assert own <= sum(x.nbytes for x in jax.tree.leaves(alone)) / tensor * 1.5 + 64
    assert {x.sharding.shard_shape(x.shape)[0] * tensor for x in cache.pool} <= {cache.pages}


def test_policies_that_select_and_a_pool_that_is_full(golden_models):
    """What runs on each device beside attention: selection, trimming, sweeping."""
    directory = golden_models / "llama_rope_yarn"
    for policy, more in (
        (H2O(budget=8), {}),
        (None, {"when_full": "evict", "capacity": 24, "kv_dtype": "int8"}),
    ):
        lms = [of_mesh(directory, n) for n in (1, 2)]
        want, got = (answer(lm if policy is None else lm.with_policy(policy), **more)[0] for lm in lms)
        assert got == want, policy


def test_latent_attention_divides_the_queries(golden_models):
    """The one KV head is on every device, and so is its pool."""
    directory = golden_models / "deepseek_v2"
    want, got = (
        answer(kvs.load(directory, dtype="float32", mesh=mesh).with_policy(StreamingLLM(8, sinks=2)))
        for mesh in (None, make_mesh(tensor=2))
    )
    assert got[0] == want[0]
    assert all(x.sharding.is_fully_replicated for x in got[1]._store().cache.pool)


def test_decode_step_moves_no_cache_between_devices(golden_models):
    lm = of_mesh(golden_models / "llama_rope_yarn", 4)
    session = answer(lm)[1]
    model, cache = session.model, session._store().cache
    token = jnp.ones(3, jnp.int32)
    sampler = decoding.Sampler(sampling(3, temperature=0.0), jnp.full((3, 1), -1, jnp.int32))
    state = decoding.State(cache, token, token, None)
    hlo = decoding.decode.lower(model, sampler, state, jnp.int32(1)).compile().as_text()
    moved = {one.shape for one in collectives(hlo)}
    arrays = (*cache.pool, cache.free, cache.tables, cache.ring)
    names = {"float32": "f32", "int32": "s32"}
    shapes = [(names[x.dtype.name], shape) for x in arrays for shape in (x.shape, x.sharding.shard_shape(x.shape))]
    assert moved and not moved & {f"{name}{list(shape)}" for name, shape in shapes}
    assert max(one.nbytes for one in collectives(hlo)) <= 3 * lm.config.vocab_size * 4


def test_engine_on_a_mesh(golden_models):
    """Preempted, brought back from host memory, forked: as on one device, and no page is lost on any."""
    told = []
    for tensor in (1, 2):
        lm = of_mesh(golden_models / "llama_rope_yarn", tensor)
        page = 4 * (2 * lm.config.head_dim * 4 + 4) * lm.config.layers * lm.config.kv_heads
        sizes = dict(slots=3, page_size=4, prefill_chunk=16, burst=4, max_tokens=64, pool_bytes=page * 14)
        engine = lm.engine(EngineOptions(**sizes))
        rng = np.random.default_rng(2)
        for n in (30, 11, 24, 5):
            prompt = rng.integers(3, lm.config.vocab_size, n).tolist()
            engine.submit(
                Request(prompt, 16, n=2 if n == 11 else 1, sampling=SamplingOptions(temperature=0.0, eos=False))
            )
        tokens = {}
        while engine.busy:
            for piece in engine.step():
                tokens.setdefault((piece.request, piece.index), []).extend(piece.tokens)
            engine.runner.check()
        assert engine.metrics.preemptions and engine.runner.free == engine.runner.pages
        told.append(tokens)
    assert told[0] == told[1]

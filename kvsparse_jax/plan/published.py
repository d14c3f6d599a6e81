"""Shapes of well-known models, as their public config.json files give them, for planning without a hub."""

from pathlib import Path
from typing import Any

from kvsparse_jax.errors import InputError
from kvsparse_jax.models.config import ModelConfig, read_json
from kvsparse_jax.models.families import read_config


def _config(
    model_type: str,
    shape: tuple[int, int, int, int, int, int],
    positions: int,
    theta: float,
    *,
    eps: float = 1e-6,
    tie: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """config.json of a model; shape: (vocabulary, hidden, intermediate, layers, query heads, KV heads)."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    heads = ("num_attention_heads", "num_key_value_heads")
    return {
        "model_type": model_type,
        **dict(zip((*names, *heads), shape, strict=True)),
        "max_position_embeddings": positions,
        "rope_theta": theta,
        "rms_norm_eps": eps,
        "tie_word_embeddings": tie,
        "hidden_act": "silu",
        **more,
    }


def _llama3(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-8B": _config("qwen3", (151936, 4096, 12288, 36, 32, 8), 40960, 1e6, head_dim=128),
    "Qwen3-32B": _config("qwen3", (151936, 5120, 25600, 64, 64, 8), 40960, 1e6, head_dim=128),
    "Llama-3.2-1B": _config(
        "llama",
        (128256, 2048, 8192, 16, 32, 8),
        131072,
        5e5,
        eps=1e-5,
        tie=True,
        head_dim=64,
        rope_scaling=_llama3(32.0),
    ),
    "Llama-3.1-8B": _config(
        "llama", (128256, 4096, 14336, 32, 32, 8), 131072, 5e5, eps=1e-5, rope_scaling=_llama3(8.0)
    ),
    "Llama-1-65B": _config("llama", (32000, 8192, 22016, 80, 64, 64), 2048, 1e4, eps=1e-5),
    "R1-distill-Qwen-1.5B": _config("qwen2", (151936, 1536, 8960, 28, 12, 2), 131072, 1e4),
    "R1-distill-Qwen-7B": _config("qwen2", (152064, 3584, 18944, 28, 28, 4), 131072, 1e4),
    "R1-distill-Qwen-32B": _config("qwen2", (152064, 5120, 27648, 64, 40, 8), 131072, 1e6, eps=1e-5),
    "SmolLM2-135M": _config("llama", (49152, 576, 1536, 30, 9, 3), 8192, 1e5, eps=1e-5, tie=True),
}
"""By name; only what decides about shapes and speed."""


def model_config(name: str) -> ModelConfig:
    """The shape of a model.

    Args:
        name: of :data:`PUBLISHED` (in any case; as a hub spells it, too), or path of a config.json or of a directory
            that holds one.

    Raises:
        InputError: there is none.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        # As the loader does: a retrofit's output holds its model in a folder.
        inner = path / "model"
        path = inner if not (path / "config.json").exists() and (inner / "config.json").exists() else path
        return read_config(read_json(path / "config.json"))
    if path.is_file():
        return read_config(read_json(path))
    known = {key.lower(): config for key, config in PUBLISHED.items()}
    found = known.get(name.rsplit("/", 1)[-1].lower().removeprefix("deepseek-").removesuffix("-instruct"))
    if found is None:
        raise InputError(
            f"model {name!r} is neither a config.json, nor a directory with one, nor one of {', '.join(PUBLISHED)}"
        )
    return read_config(found)

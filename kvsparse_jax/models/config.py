"""Shape of a model, read from a Hugging Face config.json."""

import json
import pathlib
from dataclasses import dataclass
from typing import Any

from kvsparse_jax.errors import InputError
from kvsparse_jax.models.rope import Rope


@dataclass(frozen=True)
class ModelConfig:
    """What the decoder needs to know of a model; hashable, so that it can be a static argument of jitted functions.

    Attributes:
        model_type: the Hugging Face name of the family.
        vocab_size, hidden_size, intermediate_size: as in config.json.
        layers: number of decoder layers (L).
        heads: query heads (Hq).
        kv_heads: key/value heads (H); query head h reads KV head h // (Hq // H).
        head_dim: channels of a head (D).
        max_positions: context length in tokens.
        rms_eps: epsilon of the RMS norms.
        rope: rotary embedding.
        activation: name of the gate activation of the MLP.
        tie_embeddings: the output head is the embedding matrix.
        attention_bias: biases on q, k and v.
        output_bias: bias on the attention's output projection.
        mlp_bias: biases in the MLP.
        qk_norm: RMS norm of each head's q and k before the rotation.
        local_windows: per layer, the sliding window in tokens, or None for full attention.
        borrowed_channel: the weights were trained without the last channel of the first query head of each group, so it
            takes no part in attention, whatever the policy (the neuron variant of DMS reads its decisions from it).
        bos_token_id: None where the model has none.
        eos_token_ids: every id that ends a text.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    rms_eps: float
    rope: Rope
    activation: str
    tie_embeddings: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    local_windows: tuple[int | None, ...]
    borrowed_channel: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def groups(self) -> int:
        """Query heads that share a KV head (G)."""
        return self.heads // self.kv_heads

    @property
    def scale(self) -> float:
        """Factor on <q, k>."""
        return float(self.head_dim**-0.5)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON object; InputError names the file when it is missing or broken."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path.parent} holds no {path.name}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} holds no JSON object")
    return found


def token_ids(value: Any) -> tuple[int, ...]:
    """A token id, a list of them or None, as a tuple."""
    if value is None:
        return ()
    return tuple(int(i) for i in value) if isinstance(value, list | tuple) else (int(value),)

"""Model families: how each reads its config.json. The decoder and the weight table follow from the result.

To add a family, add a row to FAMILIES; if it stores other tensors, extend ``kvsparse_jax.models.weights.table``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from kvsparse_jax.errors import InputError
from kvsparse_jax.models.config import ModelConfig, token_ids
from kvsparse_jax.models.decoder import ACTIVATIONS
from kvsparse_jax.models.rope import Rope

Windows = Callable[[dict[str, Any], int], list[int | None]]


class Family(NamedTuple):
    """What distinguishes one family's config.json.

    Attributes:
        attention_bias: bias on q, k, v; None reads ``attention_bias`` (absent: no bias).
        output_bias: bias on the output projection; None means as ``attention_bias``.
        qk_norm: RMS norms on q and k.
        local_windows: (config, layers) -> sliding window of each layer.
        absent_theta: rope base of checkpoints older than the key ``rope_theta``; None refuses those.
        absent_head_dim: head_dim where the key is absent; None derives hidden_size / heads.
    """

    attention_bias: bool | None
    output_bias: bool | None
    qk_norm: bool
    local_windows: Windows
    absent_theta: float | None = None
    absent_head_dim: int | None = None


def _full(config: dict[str, Any], layers: int) -> list[int | None]:
    return [None] * layers


def _sliding(config: dict[str, Any], layers: int) -> list[int | None]:
    """Mistral: every layer, unless ``layer_types`` says which."""
    return _by_layer_types(config, [config.get("sliding_window")] * layers)


def _sliding_upper(config: dict[str, Any], layers: int) -> list[int | None]:
    """Qwen: only with ``use_sliding_window``, and then from layer ``max_window_layers`` on."""
    if not config.get("use_sliding_window"):
        return [None] * layers
    window, first = config.get("sliding_window"), config.get("max_window_layers", 0)
    return _by_layer_types(config, [window if i >= first else None for i in range(layers)])


def _by_layer_types(config: dict[str, Any], windows: list[int | None]) -> list[int | None]:
    types = config.get("layer_types")
    if types is None:
        return windows
    if len(types) != len(windows):
        raise InputError(f"config.json names {len(types)} layer_types for {len(windows)} layers")
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise InputError(f"unknown layer type {sorted(unknown)[0]!r} (accepted: full_attention, sliding_attention)")
    return [config.get("sliding_window") if kind == "sliding_attention" else None for kind in types]


FAMILIES: dict[str, Family] = {
    "llama": Family(None, None, qk_norm=False, local_windows=_full, absent_theta=10000.0),
    "mistral": Family(False, False, qk_norm=False, local_windows=_sliding),
    "qwen2": Family(True, False, qk_norm=False, local_windows=_sliding_upper),
    "qwen3": Family(None, None, qk_norm=True, local_windows=_sliding_upper, absent_head_dim=128),
}

BORROWED_CHANNEL = "borrowed_channel"
"""Our own key of config.json, for weights that lack a query channel and come without a policy that says so."""


def read_config(config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """Turns a config.json (and generation_config.json, for the stop tokens) into a ModelConfig.

    Raises:
        InputError: a family, activation, rope type or layer type that is not supported, or a key that is missing.
    """
    try:
        return _read(config, generation)
    except InputError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, ArithmeticError) as error:
        raise InputError(f"config.json holds a value of the wrong kind: {error}") from error


def _read(config: dict[str, Any], generation: dict[str, Any] | None) -> ModelConfig:
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        named = ", ".join(config.get("architectures") or []) or "no architecture named"
        raise InputError(f"model_type {model_type!r} ({named}) is not supported (supported: {', '.join(FAMILIES)})")
    family = FAMILIES[model_type]

    def need(name: str) -> Any:
        if config.get(name) is None:
            raise InputError(f"config.json has no {name!r}, which a {model_type} model needs")
        return config[name]

    def count(name: str, value: Any) -> int:
        """A size; 4.0 is one, 4.5, "4" and true are not."""
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 1:
            raise InputError(f"config.json: {name} must be a whole number of at least 1, not {value!r}")
        return int(value)

    names = ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size")
    hidden, heads, layers, intermediate, vocab = (count(name, need(name)) for name in names)
    kv_heads = count("num_key_value_heads", config.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise InputError(f"config.json: {heads} attention heads cannot share {kv_heads} key/value heads evenly")
    head_dim = config.get("head_dim") or family.absent_head_dim
    if head_dim is None:
        if hidden % heads:
            raise InputError(f"config.json gives no head_dim, and hidden_size {hidden} / {heads} heads is no integer")
        head_dim = hidden // heads
    head_dim = count("head_dim", head_dim)
    activation = config.get("hidden_act") or config.get("hidden_activation") or need("hidden_act")
    if activation not in ACTIVATIONS:
        raise InputError(f"activation {activation!r} is not supported (supported: {', '.join(ACTIVATIONS)})")
    attention_bias = bool(config.get("attention_bias")) if family.attention_bias is None else family.attention_bias
    max_positions = count("max_position_embeddings", need("max_position_embeddings"))
    windows = family.local_windows(config, layers)
    eos = dict.fromkeys((*token_ids(config.get("eos_token_id")), *token_ids((generation or {}).get("eos_token_id"))))
    return ModelConfig(
        model_type=model_type,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        rms_eps=float(need("rms_norm_eps")),
        rope=Rope.read(config, head_dim, max_positions, family.absent_theta),
        activation=activation,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=attention_bias,
        output_bias=attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        local_windows=tuple(None if window is None else int(window) for window in windows),
        borrowed_channel=bool(config.get(BORROWED_CHANNEL)),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=tuple(eos),
    )

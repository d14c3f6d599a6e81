"""Model families: how each reads its config.json. The decoder and the weight table follow from the result.

To add a family, add a row to FAMILIES; if it stores other tensors, extend ``kvsparse_jax.models.weights.table``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from kvsparse_jax.errors import InputError
from kvsparse_jax.models.config import Experts, Latent, ModelConfig, token_ids
from kvsparse_jax.models.parts import ACTIVATIONS
from kvsparse_jax.models.rope import Rope

Fields = dict[str, Any]
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
        absent_tie: ``tie_word_embeddings`` where the key is absent.
        more: (config, fields of ModelConfig so far) -> the fields that differ for this family.
    """

    attention_bias: bool | None
    output_bias: bool | None
    qk_norm: bool
    local_windows: Windows
    absent_theta: float | None = None
    absent_head_dim: int | None = None
    absent_tie: bool = False
    more: Callable[[dict[str, Any], Fields], Fields] | None = None


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


def _sliding_if_used(config: dict[str, Any], layers: int) -> list[int | None]:
    """Qwen3-MoE: every layer, only with ``use_sliding_window``."""
    return _sliding(config, layers) if config.get("use_sliding_window") else [None] * layers


def _sliding_but_every_nth(config: dict[str, Any], layers: int) -> list[int | None]:
    """Gemma 3: ``layer_types``, or every layer but each ``sliding_window_pattern``-th."""
    window, every = _need(config, "sliding_window"), _count("sliding_window_pattern", _pattern(config))
    return _by_layer_types(config, [window if (i + 1) % every else None for i in range(layers)])


def _pattern(config: dict[str, Any]) -> Any:
    given = (config.get(name) for name in ("sliding_window_pattern", "_sliding_window_pattern"))
    return next((value for value in given if value is not None), 6)


def _gemma3(config: dict[str, Any], fields: Fields) -> Fields:
    """Two rope bases, scaled embeddings, norms of 1 + weight before and after each part."""
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if config.get(name):
            raise InputError(f"config.json asks for {name}, which is not supported")
    of_type = config.get("rope_parameters") or {}
    full, local = (of_type.get(kind) for kind in ("full_attention", "sliding_attention"))
    size = fields["head_dim"], fields["max_positions"]
    return {
        "rope": Rope.read({"rope_parameters": full} if full else config, *size),
        "local_rope": Rope.read(
            {"rope_parameters": local} if local else {"rope_theta": _need(config, "rope_local_base_freq")}, *size
        ),
        "query_scale": float(_need(config, "query_pre_attn_scalar")) ** -0.5,
        "embed_scale": float(fields["hidden_size"]) ** 0.5,
        "unit_offset": True,
        "post_norms": True,
    }


def _phi3(config: dict[str, Any], fields: Fields) -> Fields:
    """Fused projections; some channels of a head may stay unrotated."""
    given = {**config, **(config.get("rope_parameters") or {})}
    share = float(given.get("partial_rotary_factor") or 1.0)
    rotated = int(fields["head_dim"] * share)
    if rotated < 2 or rotated % 2 or share > 1:
        raise InputError(
            f"config.json: partial_rotary_factor {share} of {fields['head_dim']} channels is no even number from 2 on"
        )
    return {"fused": True, "rope": Rope.read(config, rotated, fields["max_positions"])}


def _experts(config: dict[str, Any], count: str, **settings: Any) -> Experts:
    """Mixture settings; those that all families have are read here."""
    found = Experts(
        count=_count(count, _need(config, count)),
        per_token=_count("num_experts_per_tok", _need(config, "num_experts_per_tok")),
        width=_count("moe_intermediate_size", _need(config, "moe_intermediate_size")),
        normalise=bool(_need(config, "norm_topk_prob")),
        **settings,
    )
    if found.per_token > found.count * found.groups_kept // found.groups or found.count % found.groups:
        raise InputError(
            f"config.json: {found.per_token} experts per token cannot be chosen from {found.groups_kept} of "
            f"{found.groups} groups of {found.count} experts"
        )
    return found


def _qwen3_moe(config: dict[str, Any], fields: Fields) -> Fields:
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise InputError("config.json: mlp_only_layers and decoder_sparse_step other than 1 are not supported")
    count = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    plain = {"scoring": "softmax", "correction": False, "factor": 1.0, "groups": 1, "groups_kept": 1}
    return {"experts": _experts(config, count, **plain, group_score="max", shared=0, first=0)}


def _deepseek(config: dict[str, Any], fields: Fields) -> Fields:
    """Latent attention, and experts after some plain layers (DeepSeek-V2, arXiv 2405.04434; V3, arXiv 2412.19437)."""
    third = config["model_type"] == "deepseek_v3"
    if config.get("moe_layer_freq", 1) != 1:
        raise InputError("config.json: moe_layer_freq other than 1 is not supported")
    scoring = config.get("scoring_func") or ("sigmoid" if third else "softmax")
    method = config.get("topk_method") or ("noaux_tc" if third else "greedy")
    if scoring not in ("sigmoid", "softmax") or method not in ("noaux_tc", "group_limited_greedy", "greedy"):
        raise InputError(
            f"config.json: scoring_func {scoring!r} with topk_method {method!r} is not supported (supported: sigmoid "
            "and softmax; noaux_tc, group_limited_greedy and greedy)"
        )
    q_rank = config.get("q_lora_rank")
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    rank, nope, rotated, value = (_count(name, _need(config, name)) for name in names)
    latent = Latent(
        q_rank=None if q_rank is None else _count("q_lora_rank", q_rank),
        rank=rank,
        nope=nope,
        rope=rotated,
        value=value,
        interleaved=bool(config.get("rope_interleave", True)),
    )
    groups = 1 if method == "greedy" else _count("n_group", _need(config, "n_group"))
    width = _need(config, "moe_intermediate_size")
    experts = _experts(
        config,
        "n_routed_experts",
        scoring=scoring,
        correction=method == "noaux_tc",
        factor=float(config.get("routed_scaling_factor", 1.0)),
        groups=groups,
        groups_kept=groups if groups == 1 else _count("topk_group", _need(config, "topk_group")),
        group_score="two" if method == "noaux_tc" else "max",
        shared=_count("n_shared_experts", config.get("n_shared_experts") or 0, 0) * int(width),
        first=min(_count("first_k_dense_replace", config.get("first_k_dense_replace", 0), 0), fields["layers"]),
    )
    rope = Rope.read(config, latent.rope, fields["max_positions"])
    return {
        "latent": latent,
        "experts": experts if experts.first < fields["layers"] else None,
        "kv_heads": 1,
        "head_dim": latent.rank + latent.rope,
        "rope": rope,
        "query_scale": float((latent.nope + latent.rope) ** -0.5) * rope.softmax_factor**2,
    }


FAMILIES: dict[str, Family] = {
    "llama": Family(None, None, qk_norm=False, local_windows=_full, absent_theta=10000.0),
    "mistral": Family(False, False, qk_norm=False, local_windows=_sliding),
    "qwen2": Family(True, False, qk_norm=False, local_windows=_sliding_upper),
    "qwen3": Family(None, None, qk_norm=True, local_windows=_sliding_upper, absent_head_dim=128),
    "qwen3_moe": Family(None, None, qk_norm=True, local_windows=_sliding_if_used, more=_qwen3_moe),
    "phi3": Family(False, False, qk_norm=False, local_windows=_sliding, more=_phi3),
    "gemma3_text": Family(
        None,
        None,
        qk_norm=True,
        local_windows=_sliding_but_every_nth,
        absent_head_dim=256,
        absent_tie=True,
        more=_gemma3,
    ),
    # head_dim follows from the latent.
    "deepseek_v2": Family(None, None, qk_norm=False, local_windows=_full, absent_head_dim=1, more=_deepseek),
    "deepseek_v3": Family(None, None, qk_norm=False, local_windows=_full, absent_head_dim=1, more=_deepseek),
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


def _need(config: dict[str, Any], name: str) -> Any:
    if config.get(name) is None:
        raise InputError(f"config.json has no {name!r}, which a {config['model_type']} model needs")
    return config[name]


def _count(name: str, value: Any, least: int = 1) -> int:
    """A size; 4.0 is one, 4.5, "4" and true are not."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < least:
        raise InputError(f"config.json: {name} must be a whole number of at least {least}, not {value!r}")
    return int(value)


def _read(config: dict[str, Any], generation: dict[str, Any] | None) -> ModelConfig:
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        named = ", ".join(config.get("architectures") or []) or "no architecture named"
        raise InputError(f"model_type {model_type!r} ({named}) is not supported (supported: {', '.join(FAMILIES)})")
    family = FAMILIES[model_type]

    def need(name: str) -> Any:
        return _need(config, name)

    names = ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size")
    hidden, heads, layers, intermediate, vocab = (_count(name, need(name)) for name in names)
    kv_heads = _count("num_key_value_heads", config.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise InputError(f"config.json: {heads} attention heads cannot share {kv_heads} key/value heads evenly")
    head_dim = config.get("head_dim") or family.absent_head_dim
    if head_dim is None:
        if hidden % heads:
            raise InputError(f"config.json gives no head_dim, and hidden_size {hidden} / {heads} heads is no integer")
        head_dim = hidden // heads
    head_dim = _count("head_dim", head_dim)
    activation = config.get("hidden_act") or config.get("hidden_activation") or need("hidden_act")
    if activation not in ACTIVATIONS:
        raise InputError(f"activation {activation!r} is not supported (supported: {', '.join(ACTIVATIONS)})")
    attention_bias = bool(config.get("attention_bias")) if family.attention_bias is None else family.attention_bias
    max_positions = _count("max_position_embeddings", need("max_position_embeddings"))
    windows = family.local_windows(config, layers)
    eos = dict.fromkeys((*token_ids(config.get("eos_token_id")), *token_ids((generation or {}).get("eos_token_id"))))
    fields: Fields = {
        "model_type": model_type,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_positions": max_positions,
        "rms_eps": float(need("rms_norm_eps")),
        "rope": None,
        "local_rope": None,
        "activation": activation,
        "tie_embeddings": bool(config.get("tie_word_embeddings", family.absent_tie)),
        "attention_bias": attention_bias,
        "output_bias": attention_bias if family.output_bias is None else family.output_bias,
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "qk_norm": family.qk_norm,
        "query_scale": None,
        "embed_scale": 1.0,
        "unit_offset": False,
        "post_norms": False,
        "fused": False,
        "latent": None,
        "experts": None,
        "local_windows": tuple(None if window is None else int(window) for window in windows),
        "borrowed_channel": bool(config.get(BORROWED_CHANNEL)),
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_ids": tuple(eos),
    }
    if family.more is not None:
        fields |= family.more(config, fields)
    if fields["local_rope"] is None:
        # A window over the whole context is none (layers with a rotation of their own are told apart by it).
        windows = [None if window is None or window >= max_positions else window for window in fields["local_windows"]]
        fields["local_windows"] = tuple(windows)
    if not isinstance(fields["rope"], Rope):
        fields["rope"] = Rope.read(config, fields["head_dim"], max_positions, family.absent_theta)
    return ModelConfig(**fields)

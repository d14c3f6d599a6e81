"""Families, logits and decisions against the goldens of the original code; configuration mistakes by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvsparse_jax as kvs
from kernels.visibility import PADDING
from kvsparse_jax.errors import InputError
from kvsparse_jax.models import attention, decoder, parts, rope
from kvsparse_jax.models.config import ModelConfig
from kvsparse_jax.models.families import FAMILIES, read_config
from kvsparse_jax.policies import LayerInput
from kvsparse_jax.whole import positions_of

MODELS = (
    "llama_tied",
    "llama_rope_llama3",
    "llama_rope_yarn",
    "qwen2_bias",
    "qwen3_sharded",
    "mistral_sliding",
    "qwen3_moe",
    "phi3_fused",
    "phi3_partial",
    "phi3_longrope",
    "gemma3_text",
    "deepseek_v2",
    "deepseek_v3",
)
DMS_MODELS = ("adapter", "adapter_layer", "borrowed")


@pytest.mark.parametrize("name", MODELS)
def test_logits(golden_models: Path, name: str) -> None:
    golden = np.load(golden_models / name / "golden.npz")
    lm = kvs.load(golden_models / name, dtype="float32")
    np.testing.assert_allclose(lm.logits(golden["input_ids"]), golden["logits"], rtol=0, atol=1e-4)
    real = golden["padded_attention_mask"].astype(bool)
    padded = np.asarray(lm.logits(golden["padded_input_ids"], golden["padded_attention_mask"]))
    np.testing.assert_allclose(padded[real], golden["padded_logits"][real], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_both_spellings_of_a_config_mean_the_same(golden_models: Path, name: str) -> None:
    read = lambda file: read_config(json.loads((golden_models / name / file).read_text()))  # noqa: E731
    assert read("config.json") == read("config_alt.json")


@pytest.mark.parametrize("name", DMS_MODELS)
def test_dms_model(golden_methods: Path, name: str) -> None:
    golden = np.load(golden_methods / "3_model" / f"{name}_golden.npz")
    lm = kvs.load(golden_methods / "3_model" / name, dtype="float32")
    assert isinstance(lm.policy, kvs.DMS) and lm.policy.window == int(golden["window"])
    np.testing.assert_allclose(lm.logits(golden["input_ids"]), golden["logits_masked"], rtol=0, atol=1e-4)
    decisions = np.asarray(kvs.decision_logits(lm, golden["input_ids"]))
    np.testing.assert_allclose(decisions, golden["decision_logits"], rtol=1e-5, atol=2e-3)
    np.testing.assert_array_equal(decisions > 0, golden["decisions"])
    off = lm.with_policy(kvs.DMS(lm.policy.params, variant=lm.policy.variant, enabled=False))
    np.testing.assert_allclose(off.logits(golden["input_ids"]), golden["logits_no_eviction"], rtol=0, atol=1e-4)
    padded = np.load(golden_methods / "3_model" / f"{name}_golden_padded.npz")
    mask = padded["attention_mask"]
    got = np.asarray(lm.logits(padded["input_ids"], mask))
    np.testing.assert_allclose(got[mask], padded["logits_masked"][mask], rtol=0, atol=1e-4)


def test_dms_model_in_float64(golden_methods: Path) -> None:
    golden = np.load(golden_methods / "3_model" / "adapter_golden.npz")
    with jax.enable_x64(True):
        lm = kvs.load(golden_methods / "3_model" / "adapter", dtype="float64")
        # The goldens' rotary frequencies are exact in float64, ours are rounded to float32 as in the original models.
        np.testing.assert_allclose(lm.logits(golden["input_ids"]), golden["logits_masked"], rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["borrowed", "adapter"])
@pytest.mark.parametrize("mode", ["eval_head", "eval_layer", "train_head", "train_mild_head", "train_layer"])
def test_decisions(golden_methods: Path, name: str, mode: str) -> None:
    """Logits, decisions, queries and their gradients from given hidden states (2_decisions)."""
    g = np.load(golden_methods / "2_decisions" / f"{name}.npz")
    heads, dim = int(g["num_kv_heads"]), int(g["head_dim"])
    mild = "mild_" if "mild" in mode else ""
    with jax.enable_x64(True):
        params: Any = None
        if name == "adapter":
            params = {"norm": jnp.asarray(g["alpha_norm_w"]), "proj": jnp.asarray(g["alpha_proj_w"]).T}
        weights = {key: jnp.asarray(g[key]) for key in ("h_pre", "h_post", "q_proj_w", "q_norm_w")}

        def decide(weights: dict[str, jax.Array], params: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
            policy = kvs.DMS(
                params,
                scale=float(g[f"{mild}scale"]),
                offset=float(g[f"{mild}offset"]),
                tau=float(g[f"{mild}tau"]),
                variant="adapter" if name == "adapter" else "neuron",
                per="layer" if "layer" in mode else "head",
            )
            h = weights["h_post"]
            q = (h @ weights["q_proj_w"].T).reshape(*h.shape[:2], -1, dim)
            q = parts.rms_norm(q, weights["q_norm_w"], float(g["rms_eps"]))
            seen = LayerInput(weights["h_pre"], h, q, jnp.asarray(g["positions"]), heads, float(g["rms_eps"]))
            gate = policy.gate(params, seen)
            assert gate is not None
            if mode.startswith("train"):
                gate = policy.relax(gate, jnp.asarray(g["noise"]))
            half = dim // 2
            cos, sin = (jnp.asarray(g[key])[:, :, None, :half] for key in ("cos", "sin"))
            drop = attention.without_borrowed if policy.variant == "neuron" else lambda q, heads: q
            return gate, drop(rope.rotate(drop(q, heads), cos, sin), heads).swapaxes(1, 2), q

        gate, q, _ = decide(weights, params)
        np.testing.assert_allclose(gate, g[f"{mode}_logit"], rtol=1e-9, atol=1e-9)
        np.testing.assert_array_equal(np.asarray(gate) > 0, g[f"{mode}_dec"].round() == 1)
        np.testing.assert_allclose(q, g["eval_head_q"], rtol=1e-9, atol=1e-9)
        if not mode.startswith("train"):
            return

        from train.losses import straight_through

        def loss(weights: dict[str, jax.Array], params: Any) -> jax.Array:
            gate, q, _ = decide(weights, params)
            decisions = straight_through(gate)
            parts = ((q, "cot_q"), (decisions, "cot_dec"), (gate, "cot_logit"))
            return sum((jnp.sum(x * jnp.asarray(g[key])) for x, key in parts), start=jnp.zeros(()))

        grads, policy_grads = jax.grad(loss, (0, 1))(weights, params)
        # k does not depend on the query projection or the adapter, so these gradients are complete.
        np.testing.assert_allclose(grads["q_proj_w"], g[f"{mode}_grad_q_proj"], rtol=1e-8, atol=1e-8)
        np.testing.assert_allclose(grads["q_norm_w"], g[f"{mode}_grad_q_norm"], rtol=1e-8, atol=1e-8)
        if name == "adapter":
            np.testing.assert_allclose(grads["h_pre"], g[f"{mode}_grad_h_pre"], rtol=1e-8, atol=1e-8)
            np.testing.assert_allclose(policy_grads["norm"], g[f"{mode}_grad_alpha_norm"], rtol=1e-8, atol=1e-8)
            np.testing.assert_allclose(policy_grads["proj"].T, g[f"{mode}_grad_alpha_proj"], rtol=1e-8, atol=1e-8)


def test_fading_channel() -> None:
    """fade 1 is the untouched model, 0 the released one; only the borrowed channel changes."""
    q = jax.random.normal(jax.random.key(0), (1, 3, 6, 4))
    keep, half, gone = (attention.without_borrowed(q, 2, jnp.asarray(left)) for left in (1.0, 0.5, 0.0))
    np.testing.assert_array_equal(keep, q)
    np.testing.assert_array_equal(gone, attention.without_borrowed(q, 2))
    np.testing.assert_allclose(2 * half, keep + gone)
    changed = np.asarray(gone != q).any((0, 1))
    wanted = np.zeros((6, 4), bool)
    wanted[[0, 3], -1] = True
    np.testing.assert_array_equal(changed, wanted)


def test_streaming_budget_is_what_is_visible() -> None:
    policy = kvs.StreamingLLM(budget=10, sinks=3)
    visible = [k for k in range(50) if k < 3 or 49 - k <= policy.window]
    assert len(visible) == 10
    with pytest.raises(kvs.InputError, match="budget > sinks"):
        kvs.StreamingLLM(budget=3, sinks=3)


def test_positions_start_anew_in_each_segment() -> None:
    segments = jnp.asarray([[PADDING, PADDING, 0, 0, 0, 1, 1], [0, 0, 0, 0, 2, PADDING, PADDING]])
    np.testing.assert_array_equal(positions_of(segments), [[0, 0, 0, 1, 2, 0, 1], [0, 1, 2, 3, 0, 0, 0]])


def _config(**changes: Any) -> dict[str, Any]:
    base = dict(
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        hidden_act="silu",
    )
    return {key: value for key, value in {**base, **changes}.items() if value is not ...}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(model_type="gpt2", architectures=["GPT2LMHeadModel"]),
            "'gpt2' .GPT2LMHeadModel. is not supported .supported: llama",
        ),
        (dict(rope_scaling={"rope_type": "wobbly", "factor": 2.0}), "unknown rope type 'wobbly'.*default, linear"),
        (dict(rope_scaling={"rope_type": "llama3", "factor": 2.0}), "needs 'low_freq_factor'"),
        (dict(hidden_act="tanh"), "activation 'tanh' is not supported"),
        (dict(hidden_act=...), "has no 'hidden_act'"),
        (dict(hidden_size=...), "has no 'hidden_size'"),
        (dict(num_key_value_heads=3), "4 attention heads cannot share 3"),
        (dict(model_type="mistral", rope_theta=...), "no rope_theta"),
        (
            dict(model_type="qwen3", use_sliding_window=True, sliding_window=4, layer_types=["full_attention"]),
            "1 layer_types for 4",
        ),
    ],
)
def test_bad_config(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(kvs.InputError, match=message):
        read_config(_config(**changes))


def test_sliding_windows_per_layer() -> None:
    sliding = dict(sliding_window=8)
    assert read_config(_config(**sliding)).local_windows == (None,) * 4
    assert read_config(_config(model_type="mistral", **sliding)).local_windows == (8,) * 4
    upper = dict(model_type="qwen2", max_window_layers=3, **sliding)
    assert read_config(_config(**upper)).local_windows == (None,) * 4
    assert read_config(_config(use_sliding_window=True, **upper)).local_windows == (None, None, None, 8)
    types = ["sliding_attention", "full_attention"] * 2
    assert read_config(_config(use_sliding_window=True, layer_types=types, **upper)).local_windows == (8, None) * 2


def test_eos_is_a_set_over_both_files() -> None:
    config = read_config(_config(eos_token_id=[3, 4]), {"eos_token_id": 5})
    assert config.eos_token_ids == (3, 4, 5)


def _tiny(layers: int) -> ModelConfig:
    return read_config(_config(num_hidden_layers=layers))


def test_parameters_are_declared_once() -> None:
    config = _tiny(2)
    params = decoder.init_params(config, jax.random.key(0), jnp.bfloat16)
    abstract, axes = decoder.abstract_params(config, jnp.bfloat16), decoder.logical_axes(config)
    shapes = jax.tree.map(lambda a: (a.shape, a.dtype), params)
    assert shapes == jax.tree.map(lambda a: (a.shape, a.dtype), abstract)
    named = jax.tree.map(lambda a, names: a.ndim == len(names), abstract, axes, is_leaf=lambda x: isinstance(x, tuple))
    assert all(jax.tree.leaves(named))


def test_program_size_does_not_grow_with_depth() -> None:
    def lines(layers: int) -> int:
        config = _tiny(layers)
        lm = kvs.LM(config, decoder.init_params(config, jax.random.key(0)))
        from kvsparse_jax.whole import full_logits

        ids = jnp.zeros((1, 8), jnp.int32)
        return full_logits.lower(lm.params, config, lm.policy, ids, ids).as_text().count("\n")

    assert lines(64) == lines(4)


def test_every_family_runs(golden_models: Path) -> None:
    assert set(FAMILIES) == {json.loads((golden_models / m / "config.json").read_text())["model_type"] for m in MODELS}


def test_bad_input_to_logits(golden_models: Path, tmp_path: Path) -> None:
    lm = kvs.load(golden_models / "llama_tied", dtype="float32")
    for ids, message in (
        ([[1, 2, lm.config.vocab_size]], "token id .* is out of range"),
        ([[1, -1]], "token id -1 is out of range"),
        ([1, 2], r"must be integers \[B, T\]"),
        ([[0.5]], r"must be integers \[B, T\]"),
        (np.ones((1, lm.config.max_positions + 1), int), "more than the model's context"),
    ):
        with pytest.raises(kvs.InputError, match=message):
            lm.logits(np.asarray(ids))
    with pytest.raises(kvs.InputError, match="does not fit input_ids"):
        lm.logits(np.ones((1, 4), int), np.ones((1, 3), int))
    with pytest.raises(kvs.InputError, match="no decisions that have logits"):
        kvs.decision_logits(lm, np.ones((1, 4), int))
    shutil.copytree(golden_models / "llama_tied", tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{broken")
    with pytest.raises(kvs.InputError, match="is not valid JSON"):
        kvs.load(tmp_path / "model")


def test_a_window_over_the_whole_context_is_none(golden_models: Path) -> None:
    config = json.loads((golden_models / "mistral_sliding" / "config.json").read_text())
    for window, found in ((127, 127), (128, None), (None, None)):
        read = read_config(config | {"sliding_window": window, "max_position_embeddings": 128})
        assert set(read.local_windows) == {found}


def test_longrope_for_long_texts(golden_models: Path, tmp_path: Path) -> None:
    """Long factors from the first token on are what Hugging Face computes in one call over a longer text."""
    source = golden_models / "phi3_longrope"
    golden = np.load(source / "golden.npz")
    shutil.copytree(source, tmp_path / "long")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "long" / "config.json").write_text(json.dumps(config | {rope.ALWAYS_LONG: True}))
    lm = kvs.load(tmp_path / "long", dtype="float32")
    np.testing.assert_allclose(lm.logits(golden["long_input_ids"]), golden["long_logits"], rtol=0, atol=1e-4)
    saved = json.loads((lm.save(tmp_path / "saved") / "config.json").read_text())
    assert saved[rope.ALWAYS_LONG]
    # Without it positions have frequencies of their own: the first ones are those of a short text.
    short = kvs.load(source, dtype="float32").logits(golden["long_input_ids"])
    alone = kvs.load(source, dtype="float32").logits(golden["long_input_ids"][:, :24])
    np.testing.assert_allclose(short[:, :24], alone, rtol=0, atol=1e-5)
    assert np.abs(short - golden["long_logits"]).max() > 1e-2


def test_bad_longrope(golden_models: Path) -> None:
    config = json.loads((golden_models / "phi3_longrope" / "config.json").read_text())
    for name, value, words in (
        ("short_factor", [1.0], "'short_factor' in config.json: 6 numbers"),
        ("long_factor", [1.0, 1.0, 1.0, 1.0, 1.0, -1.0], "'long_factor'"),
        ("long_factor", None, "'long_factor'"),
    ):
        with pytest.raises(InputError, match=words):
            read_config(config | {"rope_parameters": config["rope_parameters"] | {name: value}})
    bare = {key: value for key, value in config.items() if key != "original_max_position_embeddings"}
    del bare["rope_parameters"]["original_max_position_embeddings"]
    with pytest.raises(InputError, match="original_max_position_embeddings"):
        read_config(bare)

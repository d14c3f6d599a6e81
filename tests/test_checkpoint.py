"""Loading and saving Hugging Face directories: exactness, sharding, memory, and every way a directory can be wrong."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import kvsparse_jax as kvs
from kvsparse_jax.models import sharding, weights
from kvsparse_jax.models.families import read_config

STORED = (
    "llama_tied",
    "qwen2_bias",
    "qwen3_sharded",
    "mistral_sliding",
    "qwen3_moe",
    "phi3_fused",
    "gemma3_text",
    "deepseek_v2",
    "deepseek_v3",
)

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def copy(golden_models: Path, golden_methods: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copies a golden model to where a test may damage it."""

    def make(name: str) -> Path:
        source = golden_models / name if (golden_models / name).exists() else golden_methods / "3_model" / name
        return Path(shutil.copytree(source, tmp_path / name))

    return make


def tensors(directory: Path) -> dict[str, np.ndarray]:
    """All tensors of a directory."""
    found: dict[str, np.ndarray] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def edit(directory: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Rewrites a single-file checkpoint."""
    content = tensors(directory)
    change(content)
    save_file(content, directory / "model.safetensors")


def config(directory: Path, **changes: Any) -> None:
    """Rewrites config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("name", [*STORED, "adapter", "borrowed"])
def test_round_trip_is_byte_equal(copy: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    source = copy(name)
    saved = kvs.load(source).save(tmp_path / "saved")
    old, new = tensors(source), tensors(saved)
    assert old.keys() == new.keys()
    for key, value in old.items():
        assert value.dtype == new[key].dtype and value.tobytes() == new[key].tobytes(), key
    again = kvs.load(saved)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), again.params, kvs.load(source).params))
    assert (saved / "generation_config.json").exists() == (source / "generation_config.json").exists()


def test_changed_tensors_are_written_and_others_keep_their_bytes(copy: Callable[[str], Path], tmp_path: Path) -> None:
    source = copy("qwen3_sharded")
    lm = kvs.load(source)
    norm = lm.params["norm"] + 1
    saved = dataclasses.replace(lm, params={**lm.params, "norm": norm}).save(tmp_path / "saved")
    old, new = tensors(source), tensors(saved)
    changed = {key for key in old if old[key].tobytes() != new[key].tobytes()}
    assert changed == {"model.norm.weight"}
    np.testing.assert_array_equal(new["model.norm.weight"], old["model.norm.weight"] + 1)
    with pytest.raises(kvs.InputError, match="exists already"):
        lm.save(saved)


def test_adapters_get_their_own_file_and_released_names(copy: Callable[[str], Path], tmp_path: Path) -> None:
    source = copy("qwen3_sharded")
    lm = kvs.load(source)
    policy = kvs.DMS.init(lm.config, window=3, target_cr=4.0)
    policy = dataclasses.replace(policy, params=jax.tree.map(lambda a: a + 0.25, policy.params))
    saved = lm.with_policy(policy).save(tmp_path / "saved")
    raw = json.loads((saved / "config.json").read_text())
    assert raw["dms_separate_alpha"] and raw["dms_window_size"] == 3 and raw["architectures"] == ["Qwen3ForCausalLMDMS"]
    added = tensors(saved).keys() - tensors(source).keys()
    layers = range(lm.config.layers)
    alpha = "model.layers.{}.self_attn.dms_proj_alpha"
    assert added == {alpha.format(i) + end for i in layers for end in (".weight", "_norm.weight")}
    again = kvs.load(saved)
    assert isinstance(again.policy, kvs.DMS) and again.policy.target_cr == 4.0
    ids = np.arange(24).reshape(2, 12)
    np.testing.assert_array_equal(again.logits(ids), lm.with_policy(policy).logits(ids))
    # A second export of the same run shares the unchanged files.
    other = again.save(tmp_path / "other", like=saved)
    shared = [f.name for f in other.glob("*.safetensors") if f.stat().st_ino == (saved / f.name).stat().st_ino]
    assert len(shared) >= 4


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
def test_stored_and_loaded_dtypes(copy: Callable[[str], Path], stored: Any) -> None:
    source = copy("llama_tied")
    edit(source, lambda t: t.update({k: v.astype(stored) for k, v in t.items()}))
    assert kvs.load(source).params["embed"].dtype == stored
    wide = kvs.load(source, dtype="float32").params["layers"]["q"]["kernel"]
    assert wide.dtype == jnp.float32
    name = "model.layers.1.self_attn.q_proj.weight"
    np.testing.assert_array_equal(wide[1], tensors(source)[name].astype(np.float32).T)
    assert kvs.load(source, dtype="bfloat16").params["norm"].dtype == jnp.bfloat16


def test_loads_straight_to_its_sharding(golden_models: Path) -> None:
    mesh = sharding.make_mesh(fsdp=2, tensor=2)
    lm = kvs.load(golden_models / "qwen2_bias", dtype="float32", mesh=mesh)
    kernel = lm.params["layers"]["q"]["kernel"]
    assert kernel.sharding.spec == jax.sharding.PartitionSpec(None, "fsdp", "tensor")
    assert kernel.addressable_shards[0].data.shape == (kernel.shape[0], kernel.shape[1] // 2, kernel.shape[2] // 2)
    golden = np.load(golden_models / "qwen2_bias" / "golden.npz")
    np.testing.assert_allclose(lm.logits(golden["input_ids"]), golden["logits"], rtol=0, atol=1e-4)
    with pytest.raises(kvs.InputError, match="needs 8 devices, there are 4"):
        sharding.make_mesh(data=8)


def test_reads_one_tensor_at_a_time(golden_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the final arrays the host never holds more than the tensor that is being placed."""
    import weakref

    from kvsparse_jax import checkpoint

    held: list[weakref.ref[np.ndarray]] = []
    most = 0
    real = checkpoint.Tensors.slice

    class Lazy:
        def __init__(self, inner: Any):
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def __getitem__(self, index: Any) -> np.ndarray:
            nonlocal most
            found = self.inner[index].view(_Tracked)
            held.append(weakref.ref(found))
            most = max(most, sum(ref() is not None for ref in held))
            return found

    class _Tracked(np.ndarray):
        pass

    monkeypatch.setattr(checkpoint.Tensors, "slice", lambda self, name: Lazy(real(self, name)))
    kvs.load(golden_models / "qwen3_sharded")
    assert len(held) == len(tensors(golden_models / "qwen3_sharded"))
    assert most <= 2  # the one being read and, for a moment, the one before it


def test_equal_stored_head_is_accepted_and_a_different_one_refused(copy: Callable[[str], Path]) -> None:
    source = copy("llama_tied")
    edit(source, lambda t: t.update({HEAD: t[EMBED].copy()}))
    kvs.load(source)
    edit(source, lambda t: t.update({HEAD: t[EMBED] + 1}))
    with pytest.raises(kvs.InputError, match="ties the head to the embedding, but lm_head.weight differs"):
        kvs.load(source)
    edit(source, lambda t: t.pop(HEAD))
    config(source, tie_word_embeddings=False)
    with pytest.raises(kvs.InputError, match="lm_head.weight is missing .config.json says that the head is not tied"):
        kvs.load(source)


def test_missing_unused_and_misshapen_tensors(copy: Callable[[str], Path]) -> None:
    source = copy("llama_tied")
    name = "model.layers.0.mlp.up_proj.weight"
    kept = tensors(source)
    edit(source, lambda t: t.pop(name))
    with pytest.raises(kvs.InputError, match=f"{name} is missing"):
        kvs.load(source)
    save_file({**kept, "model.layers.0.self_attn.q_norm.weight": np.ones(3, np.float32)}, source / "model.safetensors")
    with pytest.raises(kvs.InputError, match="q_norm.weight has no place in the model"):
        kvs.load(source)
    save_file({**kept, name: kept[name][:, :-1].copy()}, source / "model.safetensors")
    with pytest.raises(kvs.InputError, match=f"{name} has shape"):
        kvs.load(source)
    save_file({**kept, name: kept[name].astype(np.int8)}, source / "model.safetensors")
    with pytest.raises(kvs.InputError, match="stored as I8"):
        kvs.load(source)
    save_file(
        {**kept, "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}, source / "model.safetensors"
    )
    kvs.load(source)


def test_missing_and_damaged_files(copy: Callable[[str], Path], tmp_path: Path) -> None:
    source = copy("qwen3_sharded")
    shard = source / "model-00002-of-00004.safetensors"
    content = shard.read_bytes()
    shard.unlink()
    with pytest.raises(kvs.InputError, match="shard model-00002-of-00004.safetensors .* is missing"):
        kvs.load(source)
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(kvs.InputError, match="model-00002-of-00004.safetensors is damaged"):
        kvs.load(source)
    shutil.copy(source / "model-00001-of-00004.safetensors", shard)
    with pytest.raises(kvs.InputError, match="which does not hold it"):
        kvs.load(source)
    for file in source.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(kvs.InputError, match="holds no model.safetensors"):
        kvs.load(source)
    (source / "config.json").unlink()
    with pytest.raises(kvs.InputError, match="holds no config.json"):
        kvs.load(source)


def test_a_failed_save_leaves_nothing(golden_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvsparse_jax import checkpoint

    lm = kvs.load(golden_models / "llama_tied")
    monkeypatch.setattr(checkpoint, "_write_json", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        lm.save(tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_gradients_carry_checkpoint_names(golden_models: Path) -> None:
    lm = kvs.load(golden_models / "qwen2_bias", dtype="float32")
    table = weights.table(lm.config)
    named = weights.by_name(table, {"model": lm.params})
    stored = tensors(golden_models / "qwen2_bias")
    assert named.keys() == stored.keys()
    for name, value in named.items():
        np.testing.assert_array_equal(value, stored[name])
    with pytest.raises(ValueError, match=r"two parameters are stored as model\.norm\.weight"):
        weights.by_name([*table, weights.Weight(("model", "embed"), "model.norm.weight")], {"model": lm.params})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": "x"}, "hidden_size must be a whole number of at least 1, not 'x'"),
        ({"hidden_size": 96.5}, "hidden_size must be a whole number"),
        ({"num_hidden_layers": [2]}, "num_hidden_layers must be a whole number"),
        ({"num_key_value_heads": -2}, "num_key_value_heads must be a whole number"),
        ({"head_dim": -16}, "head_dim must be a whole number"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be a whole number of at least 1"),
        ({"max_position_embeddings": float("inf")}, "value of the wrong kind"),
        ({"rope_scaling": "linear"}, "value of the wrong kind"),
        ({"rms_norm_eps": {}}, "value of the wrong kind"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, "a rope for each layer type .full_attention."),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(change, words, golden_models):
    config = json.loads((golden_models / "llama_tied" / "config.json").read_text())
    with pytest.raises(kvs.InputError, match=rf"^config\.json.*{words}"):
        read_config(config | change)


@pytest.mark.parametrize(
    "change",
    [{"dms_window_size": "x"}, {"dms_shift": [1]}, {"dms_tau": float("nan")}, {"dms_window_size": float("inf")}],
)
def test_a_dms_key_of_the_wrong_kind_is_named(change):
    with pytest.raises(kvs.InputError, match=rf"^config\.json: {next(iter(change))} must be a"):
        kvs.DMS.from_config({"dms_alpha_scale": 100} | change)

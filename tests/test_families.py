"""Every family through everything: compressed generation, budgets, KVzap and its oracle, retrofit, evaluation."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import kvsparse_jax as kvs
from kvsparse_jax import evaluate, whole
from kvsparse_jax.errors import InputError
from kvsparse_jax.models import decoder
from kvsparse_jax.models.attention import value_projection
from kvsparse_jax.models.sharding import make_mesh
from serve import generate
from train import kvzap, trainer
from train.config import RetrofitConfig
from train.step import Batch
from train.warm_start import warm_start

FAMILIES = ["mistral_sliding", "qwen3_moe", "phi3_partial", "gemma3_text", "deepseek_v2", "deepseek_v3"]
GREEDY = {"temperature": 0.0, "eos": False}
CACHE = {"capacity": 96, "page_size": 4, "prefill_chunk": 8}
WINDOW = 5
WORDS = ["cache", "token", "layer", "head", "key", "value", "page", "window"]


@functools.cache
def load(directory, name):
    return kvs.load(directory / name, dtype="float32")


def with_random_dms(lm, window=WINDOW, **settings):
    """Adapters that flag about half of the tokens, each head in its own way."""
    policy = kvs.DMS.init(lm.config, window=window, scale=1.0, offset=0.0, **settings)
    key = jax.random.key(5)
    params = policy.params | {"proj": jax.random.normal(key, policy.params["proj"].shape)}
    return lm.with_policy(kvs.DMS(**{**vars(policy), "params": params}))


@pytest.fixture(scope="module")
def directories(golden_models, tmp_path_factory):
    """The checkpoints, with a tokenizer of as many words as they know."""
    root = tmp_path_factory.mktemp("families")
    vocabulary = ["<unk>", "<bos>", "<eos>", *WORDS, *(f"word{i}" for i in range(253 - len(WORDS)))]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    for name in ("qwen3_sharded", *FAMILIES):
        shutil.copytree(golden_models / name, root / name)
        tokenizer.save(str(root / name / "tokenizer.json"))
        (root / name / "tokenizer_config.json").write_text(
            json.dumps(special | {"tokenizer_class": "PreTrainedTokenizerFast"})
        )
    # Without its windows, as Phi-4 is: then there is something for the oracle to choose among.
    config = json.loads((root / "phi3_partial" / "config.json").read_text())
    (root / "phi3_partial" / "config.json").write_text(json.dumps(config | {"sliding_window": None}))
    return root


def documents(path):
    """40 documents of a few words."""
    rng = np.random.default_rng(0)
    path.write_text("".join(json.dumps({"text": " ".join(rng.choice(WORDS, 60))}) + "\n" for _ in range(40)))
    return path


def rows_of(lm, lengths, seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, lm.config.vocab_size, n).tolist() for n in lengths]


def assert_greedy(lm, histories, answers):
    """Every answer's tokens are the best ones by the masked full-sequence forward, given what comes before them."""
    ids, mask = np.zeros((len(histories), 80), int), np.zeros((len(histories), 80), int)
    for row, (history, answer) in enumerate(zip(histories, answers, strict=True)):
        tokens = [*history, *answer]
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
    logits = np.asarray(lm.logits(ids, mask))
    for row, (history, answer) in enumerate(zip(histories, answers, strict=True)):
        found = logits[row, len(history) - 1 : len(history) + len(answer) - 1]
        chosen = np.take_along_axis(found, np.asarray(answer)[:, None], 1)[:, 0]
        assert (found.max(-1) - chosen < 1e-4).all()  # the tie of two tokens may go either way


@pytest.mark.parametrize("name", FAMILIES)
def test_three_turns_equal_the_masked_reference(golden_models, name):
    lm = with_random_dms(load(golden_models, name))
    config = lm.config
    full = [w is None for w in config.local_windows]
    history = [[], [], []]
    with lm.session(3, **CACHE) as session:
        for turn, lengths in enumerate([(19, 1, 30), (2, 0, 11), (1, 3, 0)]):
            new = rows_of(lm, lengths, turn)
            session.append(new)
            out = session.generate([6, 5, 6], **GREEDY)
            history = [[*old, *more] for old, more in zip(history, new, strict=True)]
            assert_greedy(lm, history, out.tokens)
            history = [[*old, *more] for old, more in zip(history, out.tokens, strict=True)]
        cache = out.cache
    live = cache.live
    for layer, window in enumerate(config.local_windows):
        if any(full) and window is not None:  # a ring of the window, whatever the policy decides
            np.testing.assert_array_equal(live[layer], np.minimum(cache.seen, window)[:, None] + 0 * live[layer])
        else:
            assert (live[layer] <= np.minimum(cache.seen, window or 999)[:, None]).all()
            assert live[layer].min() < min(cache.seen.max(), window or 999)
    assert cache.cr_nominal > 1.2
    # What is stored of a token is the key and the value, or the latent with its rotated channels, once.
    channels = 2 * config.head_dim if config.latent is None else config.latent.rank + config.latent.rope
    assert cache.dense_nbytes == cache.seen.sum() * config.layers * config.kv_heads * channels * 4
    ids = np.asarray([history[2][:48]])
    replayed = lm.replay(ids, prefill=30, prefill_chunk=7, page_size=4)
    np.testing.assert_allclose(replayed.logits, lm.logits(ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma3_text", "deepseek_v3"])
def test_eight_bits(golden_models, name):
    lm = with_random_dms(load(golden_models, name))
    ids = np.asarray(rows_of(lm, (40, 40), 3))
    exact = lm.replay(ids, prefill=20, page_size=4)
    for dtype, limit in (("int8", 0.05), ("float8_e4m3", 0.2)):
        out = lm.replay(ids, prefill=20, page_size=4, kv_dtype=dtype)
        error = np.abs(out.logits - exact.logits).mean() / np.abs(exact.logits).mean()
        assert 0 < error < limit, dtype
        assert out.used[-1] < exact.used[-1]


def test_only_layers_with_full_attention_evict(golden_models):
    """Gemma: the gate is closed in local layers, and ratios of decisions leave them out."""
    lm = with_random_dms(load(golden_models, "gemma3_text"))
    assert lm.config.evicting == (3,)
    ids = np.asarray(rows_of(lm, (40, 40), 4))
    gates = np.asarray(kvs.decision_logits(lm, ids))
    assert np.isneginf(gates[:3]).all() and np.isfinite(gates[3]).all()
    texts = evaluate.Sequences(ids, ("a", "a"))
    own = next(r for r in evaluate.evaluate(lm, [texts]).results if r.role == "own")
    flagged = gates[3, :, :, 1:] > 0  # shift 1: the token after a key decides about it
    assert own.memory.nominal_kept.mean == pytest.approx(1 - flagged.sum(-1).mean() / 40)
    by_head = np.asarray(own.nominal_kept_by_head)
    assert (by_head[:3] == 1).all() and (by_head[3] < 0.9).all()
    report = lm.generate(ids.tolist(), 1, **GREEDY, **CACHE).cache
    assert report.cr_nominal == pytest.approx(own.memory.nominal_cr)
    # Mistral has a window in every layer, so all of them evict.
    assert load(golden_models, "mistral_sliding").config.evicting == tuple(
        range(load(golden_models, "mistral_sliding").config.layers)
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_kvzap_and_its_oracle(directories, tmp_path, name, capsys):
    lm = kvs.load(directories / name, dtype="float32")
    ids = np.asarray(rows_of(lm, (24,), 6))
    probed = np.concatenate([ids, ids], 1)
    if name == "mistral_sliding":
        with pytest.raises(InputError, match="every layer has a sliding window"):
            kvs.oracle_scores(lm, probed, (0, 24), (24, 48))
        return
    scores = np.asarray(kvs.oracle_scores(lm, probed, (0, 24), (24, 48)))
    assert scores.shape == (lm.config.layers, 1, lm.config.kv_heads, 24) and np.isfinite(scores).all()
    np.testing.assert_allclose(scores, kvzip_plus(lm, probed, 24), atol=2e-4)
    text = documents(tmp_path / "text.jsonl")
    arguments = ["--model", str(directories / name), "--data", str(text), "--output", str(tmp_path / "zap")]
    arguments += [
        "--prompts",
        "6",
        "--heldout-prompts",
        "2",
        "--min-tokens",
        "24",
        "--max-tokens",
        "32",
        "--epochs",
        "1",
    ]
    arguments += ["--dtype", "float32", "--save-every", "0", "--heldout-fraction", "0.2", "--kinds", "linear"]
    assert kvzap.main(arguments) == 0, capsys.readouterr().err
    policy = kvs.KVzap.load(tmp_path / "zap" / "linear", threshold=float(np.median(scores)), window=4)
    lm = lm.with_policy(policy)
    replayed = lm.replay(ids, prefill=12, page_size=4)
    np.testing.assert_allclose(replayed.logits, lm.logits(ids), rtol=0, atol=1e-4)
    assert replayed.live[-1][list(lm.config.evicting)].min() < 24


def kvzip_plus(lm, ids, n):
    """ln max over queries of the repetition and heads of a group of p ||W_O v|| / ||x||, with all per head made."""

    def attend(state, layer, q, k, v, gate):
        out, state, _ = whole.attend(lm.config, kvs.Dense(), jnp.zeros(ids.shape, jnp.int32))(
            state, layer, q, k, v, gate
        )
        heads, group = q.shape[1], q.shape[1] // k.shape[1]
        keys, values = (jnp.repeat(x, group, 1) for x in (k, v))
        s = jnp.einsum("bhtd,bhsd->bhts", q, keys) * jnp.float32(lm.config.scale)
        s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool))[None, None], s, -jnp.inf)
        p = jax.nn.softmax(s, -1)[:, :, n:, :n]
        projected = jnp.einsum("bhsd,hde->bhse", values[:, :, :n], value_projection(lm.config, layer.params))
        norm = jnp.linalg.norm(layer.inputs.normed[:, n:], axis=-1)
        worth = (p / norm[:, None, :, None]).max(2) * jnp.linalg.norm(projected, axis=-1)
        return out, state, jnp.log(worth.reshape(len(ids), heads // group, group, n).max(2))

    at = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32)[None], ids.shape)
    found = decoder.forward(lm.params, lm.config, kvs.Dense(), jnp.asarray(ids, jnp.int32), at, attend)[2]
    return np.asarray(found)


def retrofit(directory, tmp_path, **settings):
    """Three steps of two rows of 32 tokens; the saved model, and the one before."""
    config = RetrofitConfig(
        model=str(directory),
        data=(str(documents(tmp_path / "text.jsonl")),),
        output=str(tmp_path / "run"),
        target_cr=2.0,
        window=4,
        steps=3,
        batch_size=2,
        sequence_length=32,
        lr=1e-2,
        dtype="float32",
        init="zero",
        mesh_data=1,
        tensorboard=False,
        save_every=0,
        calibrate_rows=4,
        **settings,
    )
    output = trainer.train(config).output
    lm, before = (kvs.load(path, dtype="float32") for path in (output, directory))
    assert isinstance(lm.policy, kvs.DMS) and lm.config.evicting == before.config.evicting
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), lm.params, before.params)
    return lm, {jax.tree_util.keystr(path) for path, moved in jax.tree.leaves_with_path(changed) if moved}, output


@pytest.mark.parametrize("name", FAMILIES)
def test_retrofit_evaluate_and_load_again(directories, tmp_path, name, capsys):
    lm, changed, output = retrofit(directories / name, tmp_path, train="adapter")
    assert not changed
    ids = np.asarray(rows_of(lm, (32, 32), 7))
    report = evaluate.evaluate(lm, [evaluate.Sequences(ids, ("a", "b"))])
    assert {r.role for r in report.results} >= {"own", "equal_memory"}
    assert all(np.isfinite(r.quality.kl.mean) for r in report.results)
    replayed = lm.replay(ids, prefill=20, page_size=4)
    np.testing.assert_allclose(replayed.logits, lm.logits(ids), rtol=0, atol=1e-4)
    asked = ["--prompt", "cache token head", "--max-new-tokens", "4", "--temperature", "0", "--raw"]
    assert generate.main(["--model", str(output), *asked]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("name", ["qwen3_sharded", *FAMILIES])
def test_lora(directories, tmp_path, name):
    """Projections change; experts, routers, norms and embeddings are frozen."""
    lm, changed, _ = retrofit(directories / name, tmp_path, train="lora")
    frozen = ("experts", "router", "norm", "embed")
    assert changed and not any(word in path for path in changed for word in frozen)
    assert np.isfinite(lm.logits(np.asarray(rows_of(lm, (32,), 7)))).all()


def test_a_warm_start_evicts_the_wished_share_where_it_may(golden_models):
    lm = load(golden_models, "gemma3_text")
    ids = np.asarray(rows_of(lm, (120,) * 6, 9), np.int32)
    batch = Batch(ids, np.zeros_like(ids), np.zeros_like(ids))
    policy = warm_start(lm, kvs.DMS.init(lm.config, window=4, shift=0), [batch], evict_fraction=0.6)
    gates = np.asarray(kvs.decision_logits(lm.with_policy(policy), ids))
    # About: of 48 features of random weights no combination is constant, as the threshold wants it to be.
    assert 0.3 < (gates[3] > 0).mean() < 0.9 and np.isneginf(gates[:3]).all()


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_experts_on_a_mesh(golden_models, name):
    """Experts are divided over the tensor axis, and nothing changes."""
    one = load(golden_models, name)
    mesh = make_mesh(tensor=2, devices=jax.devices()[:2])
    lm = kvs.load(golden_models / name, dtype="float32", mesh=mesh)
    kernel = lm.params["layers"]["experts"]["up"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape)[1] == lm.config.experts.count // 2
    ids = np.asarray(rows_of(one, (24, 24), 8))
    np.testing.assert_allclose(lm.logits(ids), one.logits(ids), rtol=0, atol=1e-4)
    prompts = ids.tolist()
    assert lm.generate(prompts, 4, **GREEDY, **CACHE).tokens == one.generate(prompts, 4, **GREEDY, **CACHE).tokens

"""The KVzip oracles, against the original code's numbers; and the policy that keeps what they find best."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvsparse_jax as kvs
from kvsparse_jax import whole
from kvsparse_jax.models import decoder
from kvsparse_jax.models.sharding import make_mesh
from kvsparse_jax.oracle import Probe, scores_in_chunks
from kvsparse_jax.policies import Dense
from kvsparse_jax.policies.prompted import best

PRESSES = [f"{m}_{p}_{c}" for m in ("llama", "qwen3") for p in ("prefix", "noprefix") for c in ("1chunk", "chunked")]


@pytest.fixture(scope="module")
def models(golden_methods):
    return {name: kvs.load(golden_methods / "5_kvzip" / name, dtype="float32") for name in ("llama", "qwen3")}


def spans(gold):
    context = int(gold["start_prompt"]), int(gold["end_prompt"])
    return context, (int(gold["start_repeated_prompt"]), int(gold["end_repeated_prompt"]))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_scores_equal_the_reference(golden_methods, models, name):
    gold = np.load(golden_methods / "5_kvzip" / f"kvzip_plus_{name}.npz")
    for kind, key in (("kvzip+", "log_splus"), ("kvzip", "kvzip_score")):
        got = kvs.oracle_scores(models[name], gold["input_ids"], *spans(gold), kind=kind)
        np.testing.assert_allclose(got[:, 0], gold[key], atol=1e-4)


def test_rows_and_padding_do_not_show(golden_methods, models):
    """A padded row of a batch has the scores that it has alone."""
    gold = np.load(golden_methods / "5_kvzip" / "kvzip_plus_llama.npz")
    ids = gold["input_ids"]
    batch = np.concatenate([np.roll(ids, 1, 1), ids])
    batch = np.pad(batch, ((0, 0), (2, 0)), constant_values=7)
    mask = np.ones(batch.shape, bool)
    mask[:, :2] = False
    context, probe = (tuple(x + 2 for x in span) for span in spans(gold))
    got = kvs.oracle_scores(models["llama"], batch, context, probe, attention_mask=mask)
    np.testing.assert_allclose(got[:, 1], gold["log_splus"], atol=1e-4)


def test_the_norm_is_a_choice(golden_methods, models):
    """kvzip+ divides every row by a norm that does not depend on the head: the other norm moves layers, not ranks."""
    gold = np.load(golden_methods / "5_kvzip" / "kvzip_plus_llama.npz")
    got = [kvs.oracle_scores(models["llama"], gold["input_ids"], *spans(gold), norm=n) for n in ("input", "residual")]
    assert float(jnp.abs(got[0] - got[1]).max()) > 0.1


@pytest.mark.parametrize("case", PRESSES)
@pytest.mark.parametrize(("kind", "key"), [("kvzip", "plain"), ("kvzip+", "plus")])
def test_chunked_scores_equal_the_reference(golden_methods, models, case, kind, key):
    gold = np.load(golden_methods / "5_kvzip" / f"kvzip_press_{case}.npz")
    probe = Probe(*(gold[x].tolist() for x in ("question_first", "question_next", "suffix_ids")))
    got = scores_in_chunks(
        models[case.split("_")[0]]._model,
        gold["context_ids"],
        probe,
        prefix=int(gold["prefix_length"]),
        chunk=int(gold["chunk_size"]),
        sinks=int(gold["n_sink"]),
        kind=kind,
    )
    np.testing.assert_allclose(got[:, 0], gold[f"score_{key}"], atol=5e-5)
    for per, evicted in (("model", "global"), ("layer", "layerwise")):
        want = ~gold[f"evicted_{key}_{evicted}"]
        # Half of all entries stay; with an odd number of them the count is no multiple of the heads.
        groups = got[:, 0].shape[0] * got[:, 0].shape[1] if per == "model" else got[:, 0].shape[1]
        kept = int(want.sum()) if per == "model" else int(want[0].sum())
        if kept % groups == 0:
            np.testing.assert_array_equal(best(got[:, 0], kept // groups, per, int(gold["n_sink"])), want)


class Words:
    """A tokenizer of one word per id."""

    has_chat_template = False

    def encode(self, text, add_bos=False):
        return [3 + (ord(c) % 90) for c in text[:6]]


def test_the_policy_keeps_what_the_oracle_finds_best(models):
    lm = dataclasses.replace(models["llama"], tokenizer=Words(), policy=kvs.KVzip(budget=10, sinks=2, chunk=16))
    rng = np.random.default_rng(0)
    ids = rng.integers(3, 97, (2, 40))
    mask = np.ones(ids.shape, bool)
    mask[1, :11] = False
    kept = np.asarray(kvs.kept(lm, ids, mask))
    for row in range(2):
        tokens = ids[row][mask[row]]
        scores = scores_in_chunks(lm._model, tokens[None], Probe.of(Words()), chunk=16, sinks=2)[:, 0]
        np.testing.assert_array_equal(kept[:, row][..., mask[row]], best(scores, 10, "model", 2))
        assert kept[:, row].sum() == 10 * 3 * 2
        assert kept[:, row][..., mask[row]][..., :2].all()
    out = lm.replay(ids, mask, prefill=40, page_size=4)
    np.testing.assert_array_equal(out.live[0], kept.sum(-1))
    # The prompt sees all of itself; what is generated stays, and sees what was kept.
    np.testing.assert_allclose(out.logits[mask], np.asarray(models["llama"].logits(ids, mask))[mask], atol=2e-5)
    longer = np.concatenate([ids, rng.integers(3, 97, (2, 5))], 1)
    out = lm.replay(longer, np.pad(mask, ((0, 0), (0, 5)), constant_values=True), prefill=40, page_size=4)
    np.testing.assert_array_equal(out.live[-1], kept.sum(-1) + 5)


@pytest.mark.parametrize("per", ["model", "layer", "head"])
def test_a_surrogate_with_a_fixed_ratio_keeps_what_it_scores_best(golden_models, per):
    """The scores are those of the full cache, computed here from the hidden states; the newest and the sinks stay."""
    full = kvs.load(golden_models / "llama_tied", dtype="float32")
    config = full.config
    rng = np.random.default_rng(3)
    shape = (config.layers, config.hidden_size, config.kv_heads)
    kernel = jnp.asarray(rng.normal(size=shape), jnp.float32)
    surrogate = kvs.KVzap({"out": {"kernel": kernel, "bias": jnp.zeros(shape[::2], jnp.float32)}})
    lm = full.with_policy(kvs.KVzapBudget(budget=12, per=per, sinks=2, newest=5, surrogate=surrogate))
    ids = rng.integers(5, 60, (2, 40))
    mask = np.ones(ids.shape, bool)
    mask[1, :11] = False
    kept = np.asarray(kvs.kept(lm, ids, mask))
    for row in range(2):
        tokens = ids[row][mask[row]]
        inputs = _attention_inputs(full, tokens[None])[:, 0]  # [L, T, E]
        scores = np.einsum("lte,leh->lht", inputs, kernel)
        np.testing.assert_array_equal(kept[:, row][..., mask[row]], best(scores, 12, per, 2, 5))
        assert kept[:, row][..., mask[row]][..., [0, 1, -5, -4, -3, -2, -1]].all()
        assert kept[:, row].sum() == 12 * config.layers * config.kv_heads
    out = lm.replay(ids, mask, prefill=40, page_size=4)
    np.testing.assert_array_equal(out.live[0], kept.sum(-1))


def _attention_inputs(lm, ids):
    """[L, B, T, E]"""
    inner = whole.attend(lm.config, Dense(), jnp.zeros(ids.shape, jnp.int32))

    def attend(state, layer, q, k, v, gate):
        out, state, _ = inner(state, layer, q, k, v, gate)
        return out, state, layer.inputs.normed

    ids = jnp.asarray(ids, jnp.int32)
    at = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    return np.asarray(decoder.forward(lm.params, lm.config, Dense(), ids, at, attend)[2])


def test_a_session_scores_its_first_prompt(golden_models):
    """Rows of a batch are scored one by one; what is appended later and generated stays."""
    lm = kvs.load(golden_models / "llama_tied", dtype="float32", policy=kvs.KVzip(budget=8, chunk=16, sinks=2))
    rng = np.random.default_rng(1)
    rows = [rng.integers(5, 60, n).tolist() for n in (40, 21)]
    with lm.session(2, page_size=4) as session:
        session.append(rows)
        session.generate(max_new_tokens=3, eos=False)
        session.append([[7, 8, 9, 10], []])
        live = np.asarray(session.report().live)
    # The newest token of a row has not entered yet.
    for row, later in ((0, 3 + 3), (1, 2)):
        kept = np.asarray(kvs.kept(lm, np.asarray([rows[row]])))[:, 0].sum(-1)
        assert kept.sum() == 8 * lm.config.layers * lm.config.kv_heads
        np.testing.assert_array_equal(live[:, row], kept + later)


def test_forks_and_released_rows_have_their_own_decisions(golden_models):
    lm = kvs.load(golden_models / "llama_tied", dtype="float32", policy=kvs.KVzip(budget=8, chunk=16, sinks=2))
    rng = np.random.default_rng(2)
    rows = [rng.integers(5, 60, 30).tolist() for _ in range(3)]

    def alone(row, policy=lm):
        return np.asarray(kvs.kept(policy, np.asarray([row])))[:, 0].sum(-1)

    with lm.session(2, page_size=4) as session:
        session.append(rows[:2])
        with session.fork(2) as copies:
            copies.generate(max_new_tokens=2, eos=False)
            live = np.asarray(copies.report().live)
            for copy, row in enumerate((0, 0, 1, 1)):
                np.testing.assert_array_equal(live[:, copy], alone(rows[row]) + 1)
        session.release([0])
        session.append([rows[2], []])  # another prompt in row 0, while row 1 goes on
        session.generate(max_new_tokens=2, eos=False)
        live = np.asarray(session.report().live)
        np.testing.assert_array_equal(live[:, 0], alone(rows[2]) + 1)
        np.testing.assert_array_equal(live[:, 1], alone(rows[1]) + 1)


def test_sliding_windows_are_refused(golden_models):
    lm = kvs.load(golden_models / "mistral_sliding", dtype="float32")
    with pytest.raises(kvs.InputError, match="sliding window"):
        kvs.oracle_scores(lm, np.arange(3, 40)[None], (0, 10), (20, 30))
    with pytest.raises(kvs.InputError, match="sliding window"):
        scores_in_chunks(lm._model, np.arange(3, 40)[None], Probe([5], [6], [7]))
    for policy in (kvs.TOVA(budget=8), kvs.H2O(budget=8)):
        with pytest.raises(kvs.InputError, match="sliding window"):
            kvs.kept(lm.with_policy(policy), np.arange(3, 40)[None])
        with pytest.raises(kvs.InputError, match="sliding window"):
            lm.with_policy(policy).generate([[5, 6, 7]])


def test_bad_input(models):
    lm = models["llama"]
    ids = np.arange(3, 40)[None]
    for span, other in (((5, 5), (20, 30)), ((-1, 5), (20, 30)), ((0, 5), (20, 90))):
        with pytest.raises(kvs.InputError, match="must be columns with 0 <= start < end <= 37"):
            kvs.oracle_scores(lm, ids, span, other)
    with pytest.raises(kvs.InputError, match="must be a pair"):
        kvs.oracle_scores(lm, ids, 5, (20, 30))
    with pytest.raises(kvs.InputError, match="kind must be one of kvzip, kvzip"):
        kvs.oracle_scores(lm, ids, (0, 5), (20, 30), kind="h2o")
    with pytest.raises(kvs.InputError, match="no tokenizer"):
        kvs.kept(lm.with_policy(kvs.KVzip(budget=9)), ids)
    with pytest.raises(kvs.InputError, match="budget must be a whole number"):
        kvs.KVzip()
    with pytest.raises(kvs.InputError, match="at least its sinks"):
        kvs.KVzip(budget=3)
    with pytest.raises(kvs.InputError, match=r"sinks and newest tokens, not 100 < 0 \+ 128"):
        kvs.KVzapBudget(budget=100)
    with pytest.raises(kvs.InputError, match="needs a surrogate"):
        kvs.KVzapBudget(budget=200)
    probe = Probe([5], [6], [7])
    with pytest.raises(kvs.InputError, match="prefix must be from 0 to 36"):
        scores_in_chunks(lm._model, ids, probe, prefix=37)
    limit = lm.config.max_positions
    with pytest.raises(kvs.InputError, match=f"more than the model's {limit}"):
        scores_in_chunks(lm._model, np.full((1, limit - 3), 5), probe)


def test_on_a_mesh(golden_methods, models):
    """Rows over two devices, heads over two others; the weights in pieces, too."""
    gold = np.load(golden_methods / "5_kvzip" / "kvzip_plus_llama.npz")
    ids = np.concatenate([gold["input_ids"], np.roll(gold["input_ids"], 1, 1)])
    want = kvs.oracle_scores(models["llama"], ids, *spans(gold))
    np.testing.assert_allclose(want[:, 0], gold["log_splus"], atol=1e-4)
    directory = golden_methods / "5_kvzip" / "llama"
    for mesh in (make_mesh(data=2, tensor=2), make_mesh(fsdp=2)):
        lm = kvs.load(directory, dtype="float32", mesh=mesh)
        got = kvs.oracle_scores(lm, ids, *spans(gold))
        np.testing.assert_allclose(got, want, atol=2e-5)
    with pytest.raises(kvs.InputError, match="1 rows cannot be divided over 2 devices"):
        kvs.oracle_scores(lm, ids[:1], *spans(gold))
    lm = kvs.load(directory, dtype="float32", mesh=make_mesh(tensor=2))
    probe = Probe([5], [6], [7])
    want = scores_in_chunks(models["llama"]._model, ids[:1], probe, chunk=16)
    np.testing.assert_allclose(scores_in_chunks(lm._model, ids[:1], probe, chunk=16), want, atol=2e-5)
    lm = kvs.load(directory, dtype="float32", mesh=make_mesh(fsdp=2))  # one row, where rows would be divided
    np.testing.assert_allclose(scores_in_chunks(lm._model, ids[:1], probe, chunk=16), want, atol=2e-5)

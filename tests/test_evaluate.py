"""Tests of the evaluation against plain numpy, a Python model of the visibility rule and the original's numbers."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvsparse_jax as kvs
from kvsparse_jax import corpus, evaluate
from kvsparse_jax.errors import InputError
from kvsparse_jax.evaluate import DENSE, EQUAL_MEMORY, Sequences, contest, measure
from kvsparse_jax.evaluate.__main__ import DEFAULT_LENGTHS, main, parse_lengths
from kvsparse_jax.policies import spec as policy_spec
from kvsparse_jax.whole import full_hidden

NAMES = ("adapter", "adapter_layer", "borrowed")


# --- the same figures, computed another way ---------------------------------------------------------------------------


def rule(evict, q, k, window, local=None) -> bool:
    """METHOD's (V) for one query and one key, with the model's own sliding window."""
    return q >= k and (not evict or q - k <= window) and (local is None or q - k < local)


def live_at_end(decisions, window, shift, length, locals_=None):
    """Live entries [L, H] of one row from its decisions [L, H, T] as emitted, by the rule, key by key."""
    layers, heads, _ = decisions.shape
    out = np.zeros((layers, heads))
    for i in range(layers):
        for h in range(heads):
            for k in range(length):
                evict = bool(decisions[i, h, k + shift]) if k + shift < length else False
                out[i, h] += rule(evict, length - 1, k, window, None if locals_ is None else locals_[i])
    return out


def flagged(decisions, shift, length):
    """Keys [L, H] of one row that a token decides to evict."""
    return decisions[:, :, shift:length].astype(float).sum(-1)


def log_softmax(x):
    x = np.asarray(x, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def divergence(dense, compressed):
    """KL(dense || compressed) per token of logits [..., V]."""
    a, b = log_softmax(dense), log_softmax(compressed)
    return (np.exp(a) * (a - b)).sum(-1)


def losses(logits, ids):
    """Loss [T - 1] of one row."""
    return -np.take_along_axis(log_softmax(logits)[:-1], ids[1:, None], -1)[:, 0]


def mean_and_error(values):
    return np.mean(values), np.std(values, ddof=1) / math.sqrt(len(values))


def close(estimate, values, tolerance):
    mean, error = mean_and_error(values)
    assert estimate.mean == pytest.approx(mean, abs=tolerance)
    assert estimate.stderr == pytest.approx(error, abs=tolerance)


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(golden_methods):
    return {name: kvs.load(golden_methods / "3_model" / name) for name in NAMES}


@pytest.fixture(scope="module")
def golden(golden_methods):
    return {name: dict(np.load(golden_methods / "3_model" / f"{name}_golden.npz")) for name in NAMES}


@pytest.fixture(scope="module")
def reports(models, golden):
    """Each golden model on the golden tokens, both rows a kind of their own."""
    return {
        name: evaluate.evaluate(models[name], [Sequences(golden[name]["input_ids"], ("one", "two"))]) for name in NAMES
    }


@pytest.fixture(scope="module")
def retrofit(golden_models, tmp_path_factory):
    """A directory with tokenizer, random DMS adapters and room for a retrieval prompt."""
    base = kvs.load(golden_models / "llama_tied")
    policy = kvs.DMS.init(base.config, window=16, offset=0.0)
    noise = jax.random.normal(jax.random.key(0), policy.params["proj"].shape) * 0.1
    policy = dataclasses.replace(policy, params={**policy.params, "proj": noise})
    directory = base.with_policy(policy).save(tmp_path_factory.mktemp("retrofit") / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    return directory


# --- quality and memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_quality_equals_numpy_on_the_originals_logits(name, reports, golden):
    data, result = golden[name], reports[name].result("DMS", 48)
    dense, hard, ids = data["logits_no_eviction"], data["logits_masked"], data["input_ids"]
    q = result.quality
    kl, reverse = divergence(dense, hard), divergence(hard, dense)
    assert kl.mean() > 0.05  # the rule makes a difference here
    close(q.kl, kl.mean(1), 2e-5)
    close(q.kl_second_half, kl[:, 24:].mean(1), 2e-5)
    close(q.reverse_kl, reverse.mean(1), 2e-5)
    close(q.reverse_kl_second_half, reverse[:, 24:].mean(1), 2e-5)
    loss_dense, loss = ([losses(x, i).mean() for x, i in zip(y, ids, strict=True)] for y in (dense, hard))
    assert q.perplexity_dense == pytest.approx(np.exp(np.mean(loss_dense)), rel=1e-5)
    assert q.perplexity == pytest.approx(np.exp(np.mean(loss)), rel=1e-5)
    difference, error = mean_and_error(np.subtract(loss, loss_dense))
    assert q.perplexity_change_percent.mean == pytest.approx(100 * (np.exp(difference) - 1), abs=2e-3)
    assert q.perplexity_change_percent.stderr == pytest.approx(100 * np.exp(difference) * error, abs=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_memory_equals_a_python_model_of_the_rule(name, reports, golden):
    data, result = golden[name], reports[name].result("DMS", 48)
    decisions, window = data["decisions"].astype(bool), int(data["window"])
    rows = [decisions[:, b] for b in range(2)]
    live = np.stack([live_at_end(row, window, 1, 48) for row in rows])
    np.testing.assert_array_equal(live.swapaxes(0, 1), data["live_lengths"][-1])  # the original's own count
    kept = np.stack([1 - flagged(row, 1, 48) / 48 for row in rows])
    np.testing.assert_allclose(result.nominal_kept_by_head, kept.mean(0), atol=1e-12)
    np.testing.assert_allclose(result.entries_kept_by_head, (live / 48).mean(0), atol=1e-12)
    memory = result.memory
    close(memory.nominal_kept, kept.mean((1, 2)), 1e-12)
    close(memory.entries_kept, (live / 48).mean((1, 2)), 1e-12)
    assert memory.nominal_cr == pytest.approx(1 / kept.mean()) and memory.entries_cr == pytest.approx(48 / live.mean())
    assert memory.live_per_head == pytest.approx(live.mean()) and memory.seen == 48
    assert memory.nominal_cr > memory.entries_cr > 1.1  # the window is memory


@pytest.mark.parametrize("name", NAMES)
def test_kinds_are_the_rows_and_dense_is_itself(name, reports):
    report = reports[name]
    result, dense = report.result("DMS", 48), report.result(DENSE, 48)
    assert [r.method for r in report.results] == [DENSE, "DMS", EQUAL_MEMORY]
    assert [r.role for r in report.results] == ["full", "own", "equal_memory"]
    parts = [result.by_kind[kind] for kind in ("one", "two")]
    assert np.mean([p.quality.kl.mean for p in parts]) == pytest.approx(result.quality.kl.mean)
    assert np.mean([p.memory.live_per_head for p in parts]) == pytest.approx(result.memory.live_per_head)
    assert [p.sequences for p in parts] == [1, 1] and parts[0].quality.kl.stderr is None
    assert dense.quality.kl.mean == 0 and dense.quality.perplexity == dense.quality.perplexity_dense
    assert dense.quality.perplexity == result.quality.perplexity_dense
    assert (dense.memory.nominal_cr, dense.memory.entries_cr, dense.memory.live_per_head) == (1, 1, 48)


@pytest.mark.parametrize("name", NAMES)
def test_streaming_has_the_memory_of_the_policy(name, reports, models, golden):
    """The baseline's numbers, too, are those of the masked reference (the borrowed channel stays out of attention)."""
    own, result = (reports[name].result(method, 48) for method in ("DMS", EQUAL_MEMORY))
    budget = result.policy["budget"]
    assert budget == round(own.memory.live_per_head) and result.memory.live_per_head == budget
    assert result.policy["sinks"] == 4 and result.policy["window"] == budget - 5
    np.testing.assert_allclose(result.entries_kept_by_head, budget / 48, atol=1e-12)
    np.testing.assert_allclose(result.nominal_kept_by_head, 4 / 48, atol=1e-7)
    if name != "borrowed":
        streaming = models[name].with_policy(kvs.StreamingLLM(budget=budget)).logits(golden[name]["input_ids"])
        close(result.quality.kl, divergence(golden[name]["logits_no_eviction"], streaming).mean(1), 5e-5)


def test_no_policy_gives_a_borrowed_channel_back(models, golden):
    """The weights were trained without that channel: a baseline that used it would be made to look bad."""
    ids = golden["borrowed"]["input_ids"]
    group = Sequences(ids, ("a", "b"))
    lm = models["borrowed"]
    methods = {"all": kvs.StreamingLLM(budget=49)}
    result = evaluate.evaluate(lm, [group], methods=methods, equal_memory=False).result("all", 48)
    assert abs(result.quality.kl.mean) < 1e-6
    full = golden["borrowed"]["logits_no_eviction"]
    assert divergence(full, lm.with_policy(kvs.Dense()).logits(ids)).max() < 1e-6
    untouched = dataclasses.replace(
        lm, config=dataclasses.replace(lm.config, borrowed_channel=False), policy=kvs.Dense()
    )
    assert divergence(full, untouched.logits(ids)).mean() > 1e-3


def test_curves_are_the_same_figures_by_position(reports, golden):
    data = golden["adapter"]
    curve = reports["adapter"].result("DMS", 48).curve
    decisions, window = data["decisions"].astype(bool), int(data["window"])
    assert curve.position[-1] == 47 and len(curve.position) == len(set(curve.position)) == 32
    kl = divergence(data["logits_no_eviction"], data["logits_masked"])
    start = 0
    for i, end in enumerate(curve.position):
        assert curve.kl[i] == pytest.approx(kl[:, start : end + 1].mean(), abs=2e-5)
        flags = decisions[..., start + 1 : end + 2] if end < 47 else decisions[..., start + 1 :]
        assert curve.nominal_kept[i] == pytest.approx(1 - flags.sum() / (12 * (end + 1 - start)), abs=1e-6)
        start = end + 1
    for i in (0, 7, 15, 31):
        length = curve.position[i] + 1
        # A key's decision comes one token later, but before its window ends: looking back from the end is the same.
        rows = [live_at_end(np.concatenate([decisions[:, b], decisions[:, b, :, :1] & False], 2), window, 1, length)
                for b in range(2)]  # fmt: skip
        assert curve.live_per_head[i] == pytest.approx(np.mean(rows), abs=1e-5)


def test_a_padded_row_gives_what_it_gives_alone(models, golden):
    lm, ids = models["adapter"], golden["adapter"]["input_ids"]
    lengths = (48, 31)
    alone = [
        evaluate.evaluate(lm, [Sequences(ids[i : i + 1, :n], ("x",))], equal_memory=False)
        for i, n in enumerate(lengths)
    ]
    for left in (False, True):
        padded, mask = np.full((2, 48), 99), np.zeros((2, 48), bool)
        for i, n in enumerate(lengths):
            where = slice(48 - n, 48) if left else slice(0, n)
            padded[i, where], mask[i, where] = ids[i, :n], True
        both = evaluate.evaluate(lm, [Sequences(padded, ("a", "b"), mask)], batch_size=2, equal_memory=False)
        for kind, n, single in zip("ab", lengths, alone, strict=True):
            expected, found = single.result("DMS", n), both.result("DMS", 48).by_kind[kind]
            for field in dataclasses.fields(expected.quality):
                ours, theirs = getattr(found.quality, field.name), getattr(expected.quality, field.name)
                ours, theirs = (getattr(x, "mean", x) for x in (ours, theirs))
                assert ours == pytest.approx(theirs, rel=1e-4, abs=2e-6), field.name
            assert found.memory == expected.memory


def test_the_batch_size_changes_nothing(models, golden):
    lm, ids = models["adapter"], golden["adapter"]["input_ids"]
    group = Sequences(np.concatenate([ids, ids[:, ::-1]])[:3], ("a", "a", "b"))
    one, two = (evaluate.evaluate(lm, [group], batch_size=n, equal_memory=False).to_json() for n in (1, 2))

    def compare(a, b):
        assert type(a) is type(b)
        if isinstance(a, dict):
            assert a.keys() == b.keys()
            for key in a:
                compare(a[key], b[key])
        elif isinstance(a, list):
            assert len(a) == len(b)
            for x, y in zip(a, b, strict=True):
                compare(x, y)
        elif isinstance(a, float):
            assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
        else:
            assert a == b

    compare(one, two)


def test_a_model_with_sliding_windows_counts_them(golden_models):
    """Layers of the model that see 16 tokens hold no more, whoever decides; the baseline gets the same memory."""
    lm = kvs.load(golden_models / "mistral_sliding")
    policy = kvs.DMS.init(lm.config, window=6, shift=0, offset=0.0)
    noise = jax.random.normal(jax.random.key(1), policy.params["proj"].shape) * 0.1
    lm = lm.with_policy(dataclasses.replace(policy, params={**policy.params, "proj": noise}))
    ids = np.load(golden_models / "mistral_sliding" / "golden.npz")["input_ids"]
    report = evaluate.evaluate(lm, [Sequences(ids, ("x", "x"))])
    assert report.result(DENSE, 64).memory.live_per_head == 16
    gates = np.asarray(kvs.decision_logits(lm, ids)) > 0
    live = np.stack([live_at_end(gates[:, b], 6, 0, 64, lm.config.local_windows) for b in range(2)])
    result = report.result("DMS", 64)
    np.testing.assert_allclose(result.entries_kept_by_head, live.mean(0) / 64, atol=1e-12)
    assert abs(report.result(EQUAL_MEMORY, 64).memory.live_per_head - live.mean()) <= 0.5
    assert result.memory.nominal_kept.mean == pytest.approx(1 - gates.mean(), abs=1e-6)


@pytest.mark.parametrize("locals_", [(None, None), (16, 16), (None, 10, 30)])
@pytest.mark.parametrize("live", [1.0, 7.4, 7.6, 15.5, 33.0, 100.0])
def test_equal_memory_budget_is_the_nearest(locals_, live):
    # Beside layers with full attention nothing is evicted in those with a window of their own.
    acts = [local is None or None not in locals_ for local in locals_]

    def held(budget, sinks=2):
        window = budget - sinks - 1
        counts = [
            sum(rule(act and k >= sinks, 39, k, window, local) for k in range(40))
            for local, act in zip(locals_, acts, strict=True)
        ]
        return np.mean(counts)

    budget = evaluate.equal_memory_budget(live, 40, locals_, sinks=2)
    assert 3 <= budget <= 40
    assert abs(held(budget) - live) == pytest.approx(min(abs(held(b) - live) for b in range(3, 41)))


def test_a_reference_is_what_everything_is_compared_with(models, golden):
    """Weights that were trained too far cannot hide behind their own full cache."""
    lm, other = models["adapter"], models["borrowed"]
    ids = golden["adapter"]["input_ids"]
    trained = dataclasses.replace(lm, params={**lm.params, "norm": lm.params["norm"] * 1.5})
    report = evaluate.evaluate(trained, [Sequences(ids, ("a", "b"))], reference=lm, equal_memory=False)
    expected = divergence(golden["adapter"]["logits_no_eviction"], trained.logits(ids))
    close(report.result("DMS", 48).quality.kl, expected.mean(1), 5e-5)
    own = evaluate.evaluate(trained, [Sequences(ids, ("a", "b"))], equal_memory=False)
    changes = [r.result("DMS", 48).quality.perplexity_change_percent.mean for r in (report, own)]
    assert changes[0] > 100 and changes[1] < 10
    assert report.reference == str(lm.source) and str(lm.source) in report.table()
    small = dataclasses.replace(other, config=dataclasses.replace(other.config, vocab_size=7))
    with pytest.raises(InputError, match="the reference has 7 tokens, the model 101"):
        evaluate.evaluate(lm, [Sequences(ids, ("a", "b"))], reference=small)


def test_more_policies_and_functions_of_the_length(models, golden):
    lm = models["adapter"]
    ids = golden["adapter"]["input_ids"]
    methods = {name: policy_spec.parse(name, lm.policy) for name in ("streaming:cr=4", "masked", "own:offset=1000")}
    report = evaluate.evaluate(lm, [Sequences(ids, ("a", "b"))], methods=methods, equal_memory=False)
    assert [r.method for r in report.results] == [DENSE, "DMS", "streaming:cr=4", "masked", "own:offset=1000"]
    assert report.result("streaming:cr=4", 48).memory.entries_cr == 4
    for name in ("masked", "own:offset=1000"):
        result = report.result(name, 48)
        assert abs(result.quality.kl.mean) < 1e-6 and result.memory.entries_cr == result.memory.nominal_cr == 1


# --- how it is computed -----------------------------------------------------------------------------------------------


def test_comparison_in_chunks_equals_numpy():
    keys = jax.random.split(jax.random.key(0), 4)
    dense, hidden = (jax.random.normal(k, (2, 13, 8)) for k in keys[:2])
    heads = [np.asarray(jax.random.normal(k, (8, 31))) for k in keys[2:]]
    targets = np.arange(26, dtype=np.int32).reshape(2, 13)
    found = measure.compare({"head": heads[0]}, {"head": heads[1]}, dense, hidden, jnp.asarray(targets), 4)
    alone = measure.loss({"head": heads[0]}, dense, jnp.asarray(targets), 4)
    a, b = np.asarray(dense) @ heads[0], np.asarray(hidden) @ heads[1]
    loss = [-np.take_along_axis(log_softmax(x), targets[..., None], -1)[..., 0] for x in (b, a)]
    for ours, theirs in zip((*found, alone), (divergence(a, b), divergence(b, a), *loss), strict=True):
        assert ours.shape == (2, 13)
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def test_logits_of_a_whole_sequence_never_exist():
    vocab, length = 50_000, 2048
    chunk = measure.chunk_of(1, vocab)
    assert 64 <= chunk <= 256 and measure.chunk_of(1, 256_000) >= 8
    shape = jax.ShapeDtypeStruct((1, length, 16), jnp.float32)
    head = {"head": jax.ShapeDtypeStruct((16, vocab), jnp.float32)}
    targets = jax.ShapeDtypeStruct((1, length), jnp.int32)
    compiled = measure.compare.lower(head, head, shape, shape, targets, chunk).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.6 * vocab * length * 4


def test_a_length_compiles_once_per_policy(models, golden):
    lm = models["adapter"].with_policy(dataclasses.replace(models["adapter"].policy, window=5))
    ids = np.concatenate([golden["adapter"]["input_ids"]] * 2)
    before = full_hidden._cache_size()
    evaluate.evaluate(lm, [Sequences(ids, tuple("aabb"))], batch_size=1)
    after = full_hidden._cache_size()
    assert 1 <= after - before <= 3  # DMS with this window; StreamingLLM and the full cache if no test ran them
    evaluate.evaluate(lm, [Sequences(ids[::-1], tuple("aabb"))], batch_size=1)
    assert full_hidden._cache_size() == after


def test_the_full_cache_is_computed_again_where_it_does_not_fit(models, golden, monkeypatch):
    group = Sequences(golden["adapter"]["input_ids"], ("a", "b"))
    kept = evaluate.evaluate(models["adapter"], [group])
    monkeypatch.setattr(contest, "_DENSE_BYTES", 0)
    assert evaluate.evaluate(models["adapter"], [group]).to_json() == kept.to_json()


# --- retrieval --------------------------------------------------------------------------------------------------------


def test_passkey_counts_answers_whose_every_token_is_the_likeliest(models):
    lm = models["adapter"]
    rng = np.random.default_rng(0)
    dense = lm.with_policy(kvs.Dense())
    prompts = []

    def after(model, tokens):
        """Logits [n, V] of a text, padded so that one compilation does for all."""
        n = len(tokens)
        ids, mask = np.zeros((1, 48), np.int32), np.arange(48)[None] < n
        ids[0, :n] = tokens
        return np.asarray(model.logits(ids, mask))[0, :n]

    for i in range(6):
        prompt = rng.integers(3, 101, 30 + i).tolist()
        answer: list[int] = []
        for _ in range(2 + i % 2):
            answer.append(int(after(dense, prompt + answer)[-1].argmax()))
        if i == 5:
            answer[0] = (answer[0] + 1) % 101  # the dense model is wrong here, whatever comes after
        prompts.append(corpus.PasskeyPrompt(prompt, answer, "", "", i / 6))

    def correct(model):
        found = []
        for p in prompts:
            chosen = after(model, p.prompt_ids + p.answer_ids)[len(p.prompt_ids) - 1 : -1].argmax(-1)
            found.append(float((chosen == p.answer_ids).all()))
        return np.asarray(found)

    results = evaluate.passkey(lm, prompts, batch_size=4)
    assert [r.method for r in results] == [DENSE, "DMS", EQUAL_MEMORY]
    streaming = kvs.StreamingLLM(budget=results[2].policy["budget"])
    for result, model in zip(results, (dense, lm, lm.with_policy(streaming)), strict=True):
        values = correct(model)
        assert result.prompts == 6
        close(result.accuracy, values, 1e-9)
        assert result.of_dense_percent == pytest.approx(100 * values.mean() / (5 / 6))
        assert result.accuracy_by_depth == [values[[0, 1]].mean(), *values[2:6]]
    assert results[0].accuracy.mean == pytest.approx(5 / 6)
    assert results[0].memory.entries_cr == 1 and results[0].memory.seen == np.mean(
        [len(p.prompt_ids) + len(p.answer_ids) for p in prompts]
    )
    assert abs(results[2].memory.live_per_head - results[1].memory.live_per_head) <= 0.5
    with pytest.raises(InputError, match="no retrieval prompts"):
        evaluate.passkey(lm, [])


# --- text -------------------------------------------------------------------------------------------------------------


def test_held_out_sequences_are_spread_over_the_kinds(golden_models):
    tokenizer = kvs.load(golden_models / "llama_tied").tokenizer
    found = evaluate.held_out_sequences(tokenizer, 64, 5, ("code", "readme"))
    assert found.ids.shape == (5, 64) and found.kinds == ("code",) * 3 + ("readme",) * 2 and found.real.all()
    np.testing.assert_array_equal(found.ids[:3], corpus.token_rows(tokenizer, "code", "heldout", 3, 64))
    assert evaluate.held_out_sequences(tokenizer, 64, 1, ("code", "readme")).kinds == ("code",)
    assert len(evaluate.DEFAULT_KINDS) >= 5 and set(evaluate.DEFAULT_KINDS) <= set(corpus.KINDS)
    for arguments, message in (
        ((None, 64, 1), "no tokenizer"),
        ((tokenizer, 64, 0), "at least 1 sequence"),
        ((tokenizer, 64, 1, ()), "no kind of text"),
        ((tokenizer, 64, 1, ("poems",)), "unknown kind of built-in text 'poems'; there are code,"),
        ((tokenizer, 64, 2, ("code", "code")), "named twice"),
    ):
        with pytest.raises(InputError, match=message):
            evaluate.held_out_sequences(*arguments)


def test_text_of_ones_own(golden_models, tmp_path):
    tokenizer = kvs.load(golden_models / "llama_tied").tokenizer
    (tmp_path / "plain.txt").write_text("word " * 200)
    chat = [{"role": "user", "content": "a" * 40}, {"role": "assistant", "content": "b" * 40}]
    lines = [json.dumps({"messages": chat}), json.dumps({"text": "short"}), "", json.dumps("long " * 100)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "one.json").write_text(json.dumps({"body": "x" * 300}))
    documents = evaluate.read_documents([str(tmp_path / "*.txt"), str(tmp_path / "rows.jsonl")])
    assert list(documents) == ["*.txt", "rows.jsonl"]
    assert documents["rows.jsonl"] == [chat, "short", "long " * 100]
    assert evaluate.read_documents([str(tmp_path / "deep")], "body") == {"deep": ["x" * 300]}

    found = evaluate.text_sequences(tokenizer, documents, 50, 3)
    assert found.ids.shape == (3, 50) and found.kinds == ("*.txt", "*.txt", "rows.jsonl")
    assert (found.ids[:, 0] == tokenizer.bos_token_id).all()
    whole = tokenizer.encode("word " * 200, add_bos=False)
    assert found.ids[0, 1:].tolist() == whole[:49] and found.ids[1, 1:].tolist() == whole[49:98]
    assert found.ids[2].tolist() == tokenizer.apply_chat_template(chat, add_generation_prompt=False)[:50]

    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "other.json").write_text(json.dumps([{"prompt": 1}]))
    (tmp_path / "numbers.json").write_text("[1]")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty.txt").write_text("\n")
    for name, message in (
        ("none-*.txt", "matches no file"),
        ("bad.json", "is not valid JSON"),
        ("other.json", "an object with 'prompt', not 'messages' or a text column 'text'"),
        ("numbers.json", "holds a int"),
        ("binary.txt", "is not UTF-8"),
        ("empty.txt", "holds no text"),
    ):
        with pytest.raises(InputError, match=message):
            evaluate.read_documents([str(tmp_path / name)])
    with pytest.raises(InputError, match=r"plain.txt gives only \d+ sequences of 50 tokens; 90 were asked for"):
        evaluate.text_sequences(tokenizer, evaluate.read_documents([str(tmp_path / "plain.txt")]), 50, 90)
    with pytest.raises(InputError, match="no tokenizer"):
        evaluate.text_sequences(None, documents, 50, 3)


# --- bad input --------------------------------------------------------------------------------------------------------


def test_sequences_that_do_not_fit(models):
    lm = models["adapter"]
    row = np.ones((1, 8), np.int32)
    for groups, message in (
        ([], "no sequences"),
        ([Sequences(np.ones((1, 513), np.int32), ("x",))], "513 tokens are longer than the model's context of 512"),
        ([Sequences(row, ("x",)), Sequences(row, ("y",))], "same length"),
        ([Sequences(row[:, :1], ("x",))], "at least 2 tokens"),
        ([Sequences(row * 101, ("x",))], "token id 101 is out of range"),
    ):
        with pytest.raises(InputError, match=message):
            evaluate.evaluate(lm, groups)
    with pytest.raises(InputError, match="two methods are called 'DMS'"):
        evaluate.evaluate(lm, [Sequences(row, ("x",))], methods={"DMS": kvs.Dense()})
    with pytest.raises(InputError, match="batch size"):
        evaluate.evaluate(lm, [Sequences(row, ("x",))], batch_size=0)
    for ids, kinds, mask in (
        (row[0], ("x",), None),
        (row, ("x", "y"), None),
        (row, ("x",), np.ones((1, 7), bool)),
        (row, ("x",), np.asarray([[1, 1, 0, 1, 1, 1, 1, 1]], bool)),
        (row, ("x",), np.zeros((1, 8), bool)),
    ):
        with pytest.raises(InputError, match="sequences|mask"):
            Sequences(ids, kinds, mask)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "quest",
            "unknown policy 'quest'; there are streaming, kvzap, kvzip, h2o",
        ),
        ("streaming", "needs either budget=ENTRIES or cr=RATIO"),
        ("streaming:budget=4,cr=2", "needs either"),
        ("streaming:budget", "not of the form key=number"),
        ("streaming:budget=many", "not of the form key=number"),
        ("streaming:budget=nan", "not of the form key=number"),
        ("streaming:budget=4.5", "budget must be a whole number"),
        ("streaming:budget=3", "budget > sinks"),
        ("streaming:cr=0.5", "cr must be at least 1"),
        ("streaming:size=3", "has no setting 'size'"),
        ("own:tau=3", "has no setting 'tau'"),
        ("h2o", "needs either budget=ENTRIES or cr=RATIO"),
        ("h2o:budget=9,per=tail", "per must be head or layer"),
        ("h2o:budget=9,kernel=3", r"has no setting 'kernel' \(it takes budget, cr, per, recent, sinks\)"),
        ("snapkv:budget=9", "budget of at least sinks"),
        ("kvzap:threshold=1", "needs path=DIRECTORY"),
        ("kvzap:path=nowhere", "needs either threshold=NUMBER"),
        ("kvzap:path=nowhere,threshold=1,cr=4", "needs either threshold=NUMBER"),
        ("kvzap:path=nowhere,threshold=1,per=head", "per= goes with a fixed ratio"),
        ("kvzap:path=nowhere,cr=4,prefill=dense", "prefill= goes with a threshold"),
        ("kvzap:path=nowhere,cr=4,decoding=false", "decoding= goes with a threshold"),
        ("kvzap:path=nowhere,threshold=1,decoding=no", "decoding must be true or false"),
        ("kvzap:path=nowhere,threshold=1", "'nowhere' is not a directory"),
        ("kvzip:budget=9,kind=h2o", "kind must be one of kvzip"),
    ],
)
def test_policies_of_the_command_line_are_checked(spec, message, models):
    with pytest.raises(InputError, match=message):
        policy_spec.parse(spec, models["adapter"].policy)


def test_policies_of_the_command_line_are_made(golden_methods):
    own = kvs.Dense()
    surrogate = golden_methods / "6_kvzap" / "mlp"
    for spec, policy in {
        "h2o:budget=20,recent=3,per=layer": kvs.H2O(budget=20, recent=3, per="layer"),
        "snapkv:budget=20,window=4": kvs.SnapKV(budget=20, window=4),
        "tova:budget=9,sinks=2": kvs.TOVA(budget=9, sinks=2),
        "random:budget=9,seed=3": kvs.Random(budget=9, seed=3),
        "kvzip:budget=9,kind=kvzip+,per=layer": kvs.KVzip(budget=9, kind="kvzip+", per="layer"),
    }.items():
        assert policy_spec.parse(spec, own) == policy
    assert policy_spec.parse("knorm:cr=4", own)(100) == kvs.Knorm(budget=25)
    zap = policy_spec.parse(f"kvzap:path={surrogate},threshold=-4.5,window=9,sinks=2,prefill=dense", own)
    assert (zap.threshold, zap.window, zap.sinks, zap.prefill) == (-4.5, 9, 2, "dense") and zap.while_decoding
    assert not policy_spec.parse(f"kvzap:path={surrogate},threshold=-4.5,decoding=false", own).while_decoding
    zap = policy_spec.parse(f"kvzap:path={surrogate},cr=4,window=9,sinks=2,per=head", own)(100)
    assert isinstance(zap, kvs.KVzapBudget) and zap.surrogate is not None
    assert (zap.budget, zap.newest, zap.sinks, zap.per) == (25, 9, 2, "head")


def test_own_needs_a_policy():
    with pytest.raises(InputError, match="no DMS policy"):
        policy_spec.parse("own:offset=1", kvs.Dense())


def test_lengths_are_parsed():
    assert parse_lengths("1024:20,2048:10") == list(DEFAULT_LENGTHS)
    assert parse_lengths("64") == [(64, 20)] and parse_lengths("none") == []
    for text in ("", "x", "64:y", "1:5", "64:0", "64:1,64:2"):
        with pytest.raises(InputError, match="lengths"):
            parse_lengths(text)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_report_table_and_plots(retrofit, tmp_path, capsys):
    output = tmp_path / "out"
    argv = ["--model", str(retrofit), "--output", str(output), "--kinds", "code", "readme", "--batch-size", "2"]
    argv += ["--lengths", "96:3", "--passkey", "2", "--passkey-length", "1500"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert out.strip() == (output / "report.md").read_text().strip()
    for words in (
        "| 96 x 3 ",
        "| DMS ",
        EQUAL_MEMORY,
        "(nominal)",
        "(physical)",
        "KL, 2nd half",
        "passkey",
        "times that",
    ):
        assert words in out, words
    report = json.loads((output / "report.json").read_text())
    assert [(r["method"], r["context"]) for r in report["results"]] == [
        (method, 96) for method in (DENSE, "DMS", EQUAL_MEMORY)
    ]
    own = report["results"][1]
    assert np.shape(own["entries_kept_by_head"]) == (2, 2) and set(own["by_kind"]) == {"code", "readme"}
    assert own["policy"]["name"] == "DMS" and own["policy"]["window"] == 16
    assert [r["method"] for r in report["retrieval"]] == [DENSE, "DMS", EQUAL_MEMORY]
    assert report["definitions"]["kl"].startswith("KL(dense || compressed)") and report["notes"] == []
    images = {path.name for path in output.glob("*.png")}
    assert images >= {"quality.png", "kept_96.png", "kl_by_position.png", "live_over_time.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in output.glob("*.png"))
    assert "report.json" in err.splitlines()[-1]

    # An evaluation is not replaced unless that is asked for.
    assert main(argv) == 2
    assert "holds an evaluation already" in capsys.readouterr().err


def test_a_model_without_a_policy_is_measured_against_the_baselines_asked_for(golden_models, tmp_path, capsys):
    argv = ["--model", str(golden_models / "llama_tied"), "--output", str(tmp_path / "out"), "--kinds", "code"]
    argv += ["--lengths", "64:1"]
    assert main([*argv, "--policy", "streaming:budget=16"]) == 0
    assert "no eviction policy: only streaming:budget=16 can be compared" in capsys.readouterr().out
    assert main([*argv, "--overwrite", "--dtype", "bfloat16"]) == 0
    out = capsys.readouterr().out
    assert "no eviction policy: only its full cache is measured" in out and "(bfloat16)" in out
    (result,) = json.loads((tmp_path / "out" / "report.json").read_text())["results"]
    assert result["method"] == DENSE and result["quality"]["perplexity"] > 1


def test_policies_are_compared_on_what_follows(retrofit, tmp_path, capsys):
    argv = ["--model", str(retrofit), "--output", str(tmp_path / "out"), "--kinds", "code", "--lengths", "96:2"]
    assert main([*argv, "--policy", "tova:cr=4"]) == 2
    assert "compare it on what follows (--after)" in capsys.readouterr().err
    assert main([*argv, "--after", "16", "--policy", "tova:cr=4", "snapkv:budget=30,window=8"]) == 0
    out = capsys.readouterr().out
    assert "16 tokens after 80, 2 texts" in out
    found = json.loads((tmp_path / "out" / "continuations.json").read_text())
    assert [r["method"] for r in found] == [DENSE, "DMS", "tova:cr=4", "snapkv:budget=30,window=8"]
    assert found[2]["removed"]["mean"] == pytest.approx(0.75)
    assert main([*argv, "--after", "16"]) == 2
    assert "holds an evaluation already" in capsys.readouterr().err
    assert main([*argv, "--overwrite", "--after", "96"]) == 2
    assert "--after must be from 2 to 95" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--after", "9", "--passkey", "3"], "--after is a comparison of its own"),
        (["--lengths", "64:1", "--kinds", "poems"], "unknown kind of built-in text 'poems'"),
        (["--lengths", "300:1"], "300 tokens; the model's context is 256"),
        (["--lengths", "none"], "nothing to evaluate"),
        (["--data", "no-such-file.txt"], "no-such-file.txt matches no file"),
        (["--data", "x", "--kinds", "code"], "--kinds is about the built-in text"),
        (["--policy", "masked", "masked"], "named twice"),
        (["--passkey", "-1"], "--passkey must be at least 0"),
        (["--dtype", "int4"], "invalid choice"),
    ],
)
def test_bad_input_is_one_line_and_status_2(extra, message, golden_models, tmp_path, capsys):
    argv = ["--model", str(golden_models / "llama_tied"), "--output", str(tmp_path / "out"), *extra]
    assert main(argv) == 2
    lines = capsys.readouterr().err.splitlines()
    assert message in lines[-1] and "error: " in lines[-1]
    assert not any("Traceback" in line for line in lines)


def test_a_model_without_a_tokenizer(golden_methods, tmp_path, capsys):
    argv = ["--model", str(golden_methods / "3_model" / "adapter"), "--output", str(tmp_path / "out")]
    assert main([*argv, "--lengths", "64:1"]) == 2
    assert "no tokenizer" in capsys.readouterr().err
    assert main([*argv, "--lengths", "none", "--passkey", "2"]) == 2
    assert "no tokenizer" in capsys.readouterr().err


def test_figures_that_json_cannot_hold_become_null(models, golden):
    lm = models["adapter"]
    none_kept = dataclasses.replace(lm.policy, shift=0, offset=-1e6)
    report = evaluate.evaluate(lm.with_policy(none_kept), [Sequences(golden["adapter"]["input_ids"], ("a", "b"))])
    result = report.result("DMS", 48)
    assert math.isinf(result.memory.nominal_cr) and result.memory.entries_cr == pytest.approx(48 / 5)
    assert report.to_json()["results"][1]["memory"]["nominal_cr"] is None
    json.dumps(report.to_json(), allow_nan=False)
    assert "all flagged" in report.table()

"""KVzap and the policies with a budget: against the original code's numbers, and against a dense reference."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvsparse_jax as kvs
from kvsparse_jax.cache.spec import CacheSpec
from kvsparse_jax.cache.store import CacheOptions, Store
from kvsparse_jax.generation.decode import sweep, teach
from kvsparse_jax.models import decoder
from kvsparse_jax.policies.base import Policy

PRESSES = {
    "streaming_llm": lambda n, g: kvs.StreamingLLM(budget=n, sinks=int(g["n_sink"])),
    "snapkv": lambda n, g: kvs.SnapKV(budget=n, window=int(g["snapkv_window"]), kernel=int(g["snapkv_kernel"])),
    "tova": lambda n, g: kvs.TOVA(budget=n),
    "knorm": lambda n, g: kvs.Knorm(budget=n),
}


@pytest.fixture(scope="module")
def models(golden_methods):
    return {name: kvs.load(golden_methods / "5_kvzip" / name, dtype="float32") for name in ("llama", "qwen3")}


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("press", PRESSES)
def test_kept_sets_equal_the_reference(golden_methods, models, name, press):
    gold = np.load(golden_methods / "7_baselines" / f"{name}.npz")
    n = gold["snapkv_kept"].shape[-1]
    got = np.asarray(kvs.kept(models[name].with_policy(PRESSES[press](n, gold)), gold["input_ids"]))
    want = np.zeros(got.shape, bool)
    np.put_along_axis(want, gold[f"{press}_kept"].astype(int), True, -1)
    np.testing.assert_array_equal(got, want)


# KVzap


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_surrogates_load_and_save(golden_methods, tmp_path, kind):
    gold = np.load(golden_methods / "6_kvzap" / f"io_{kind}.npz")
    policy = kvs.KVzap.load(golden_methods / "6_kvzap" / kind)
    np.testing.assert_allclose(policy.scores(gold["x"]), gold["y"], atol=1e-5)
    again = kvs.KVzap.load(policy.save(tmp_path / "surrogate"))
    jax.tree.map(np.testing.assert_array_equal, policy.params, again.params)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "surrogate" / file).exists()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Given(Policy):
    """KVzap with scores [L, B, H, T] that are given."""

    params: Any
    threshold: float = dataclasses.field(metadata=dict(static=True))
    window: int = dataclasses.field(metadata=dict(static=True))
    prefill: str = dataclasses.field(default="dense", metadata=dict(static=True))
    decoding: bool = dataclasses.field(default=True, metadata=dict(static=True))
    prompt: int = dataclasses.field(default=0, metadata=dict(static=True))

    shift = 0

    def gate(self, params, layer):
        gate = self.threshold - jnp.take_along_axis(params, layer.positions[:, None], 2)
        held = layer.positions < self.prompt - self.window
        return gate if self.decoding else jnp.where(held[:, None], gate, -1.0)


@pytest.mark.parametrize("case", ["decode", "exact_window", "prefill_only", "question_chunk", "short_prompt"])
@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("cache", ["paged", "dense"])
def test_dense_prefill_equals_the_reference(golden_methods, models, case, chunk, cache):
    """Prompts and later chunks see all of themselves; after each of them, what is below the threshold is gone."""
    gold = np.load(golden_methods / "6_kvzap" / f"dmspress_{case}.npz")
    lm = models[str(gold["model"])]
    policy = Given(jnp.asarray(gold["scores"]), float(gold["threshold"]), int(gold["window"]))
    if case == "prefill_only":
        policy = dataclasses.replace(policy, decoding=False, prompt=int(gold["schedule"][0]))
    lm = lm.with_policy(policy)
    ids, schedule = gold["input_ids"], gold["schedule"]
    batch = len(ids)
    found, start = [], 0
    spec = CacheSpec.of(lm.config, policy, lm.params["embed"].dtype)
    store = Store(spec, batch, CacheOptions(cache=cache, page_size=4), lm._model.sharding)
    for count in schedule.tolist():
        end = start + count
        hold = None if count == 1 else jnp.full((batch,), end - 1, jnp.int32)
        step = count if chunk is None else chunk
        for at in range(start, end, step):
            columns = jnp.asarray(ids[:, at : min(at + step, end)], jnp.int32)
            new = columns.shape[1]
            logits, store.cache = teach(lm._model, store.reserve(new), columns, jnp.ones((batch, new), bool), hold)
            store.took([new] * batch)
            found.append(np.asarray(logits))
        if hold is not None:
            store.cache = sweep(store.cache)
        start = end
    np.testing.assert_allclose(np.concatenate(found, 1), gold["logits"], atol=2e-4)
    with lm.session(batch, prefill_chunk=chunk, page_size=4, cache=cache) as session:
        start = 0
        for step, count in enumerate(schedule):
            session._feed([row[start : start + count].tolist() for row in ids], chunk, [0] * batch, keep=0)
            start += int(count)
            held = start - gold["masked"][step][..., :start].sum(-1)
            np.testing.assert_array_equal(np.asarray(session.report().live), held)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_end_to_end_equals_the_reference(golden_methods, models, kind):
    gold = np.load(golden_methods / "6_kvzap" / f"dmspress_kvzap_{kind}_end2end.npz")
    policy = kvs.KVzap.load(
        golden_methods / "6_kvzap" / kind,
        threshold=float(gold["threshold"]),
        window=int(gold["window"]),
        prefill="dense",
    )
    lm = models[str(gold["model"])].with_policy(policy)
    out = lm.replay(gold["input_ids"], prefill=int(gold["schedule"][0]))
    np.testing.assert_allclose(out.logits, gold["logits"], atol=2e-4)


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("window", [0, 3])
def test_rule_holds_everywhere(golden_methods, models, window, sinks):
    """One-shot, chunked and token by token give the logits of the whole sequence under the visibility rule."""
    lm = models["llama"]
    policy = kvs.KVzap.load(golden_methods / "6_kvzap" / "mlp", threshold=0.1, window=window, sinks=sinks)
    lm = lm.with_policy(policy)
    ids = np.random.default_rng(0).integers(3, 97, (2, 40))
    mask = np.ones(ids.shape, bool)
    mask[1, :9] = False
    want = np.asarray(lm.logits(ids, mask))
    kept = np.asarray(kvs.kept(lm, ids, mask))
    assert 0.2 < kept[:, 0].mean() < 0.9
    assert kept[:, 0, :, :sinks].all()
    assert kept[:, 1, :, 9 : 9 + sinks].all()
    for prefill, chunk in ((40, None), (40, 7), (29, 5), (0, None)):
        out = lm.replay(ids, mask, prefill=prefill, prefill_chunk=chunk, page_size=4)
        np.testing.assert_allclose(out.logits[mask], want[mask], atol=2e-5)
        np.testing.assert_array_equal(out.live[-1], kept.sum(-1))


@pytest.mark.parametrize("window", [0, 3, 50])
def test_only_the_prompt_is_compressed(golden_methods, models, window):
    """while_decoding=False: what the rule evicts of a prompt before its last ``window`` tokens, and nothing after."""
    policy = kvs.KVzap.load(golden_methods / "6_kvzap" / "mlp", threshold=0.1, window=window, sinks=2)
    lm = models["llama"].with_policy(policy)
    ids = np.random.default_rng(0).integers(3, 97, (2, 40))
    mask = np.ones(ids.shape, bool)
    mask[1, :9] = False
    want = np.array(kvs.kept(lm, ids, mask))
    want[..., max(29 - window, 0) :] = True
    assert 0.2 < want[..., 9:26].mean() < 0.9 or (window == 50 and want.all())
    only = lm.with_policy(dataclasses.replace(policy, while_decoding=False))
    for chunk in (None, 5):
        out = only.replay(ids, mask, prefill=29, prefill_chunk=chunk, page_size=4)
        np.testing.assert_array_equal(out.live[-1], (want & mask[:, None]).sum(-1))
    with only.session(page_size=4) as session:
        session.append(ids[0, :29].tolist())
        session.append(ids[0, 29:34].tolist())
        session.generate(max_new_tokens=7, temperature=0.0, eos=False)
        for one in (session, session.fork()):
            np.testing.assert_array_equal(np.asarray(one.report().live)[:, 0], want[:, 0].sum(-1))
    with pytest.raises(kvs.InputError, match="where it ends"):
        only.engine()


def test_threshold_is_data(golden_methods, models):
    """Thresholds share a compilation."""
    from kvsparse_jax.whole import full_logits

    policy = kvs.KVzap.load(golden_methods / "6_kvzap" / "linear")
    ids = np.random.default_rng(0).integers(3, 97, (1, 12))
    lm = models["llama"]
    found = []
    before = full_logits._cache_size()
    for threshold in (-9.0, 0.0, 0.2):
        found.append(np.asarray(lm.with_policy(dataclasses.replace(policy, window=1, threshold=threshold)).logits(ids)))
    assert full_logits._cache_size() == before + 1
    assert np.abs(found[0] - found[2]).max() > 1e-3


def test_bad_surrogates(golden_methods, models, tmp_path):
    linear = golden_methods / "6_kvzap" / "linear"
    policy = kvs.KVzap.load(linear)
    with pytest.raises(kvs.InputError, match="model_type is 'llama'"):
        kvs.KVzap.load(golden_methods / "5_kvzip" / "llama")
    narrow = jax.tree.map(lambda x: x[:2], policy.params)
    with pytest.raises(kvs.InputError, match="2 layers of width 32 with 2 KV heads, the model has 3 layers"):
        models["llama"].with_policy(dataclasses.replace(policy, params=narrow))
    with pytest.raises(kvs.InputError, match="prefill must be rule or dense"):
        dataclasses.replace(policy, prefill="sparse")
    with pytest.raises(kvs.InputError, match="threshold must be a number"):
        dataclasses.replace(policy, threshold=float("nan"))
    with pytest.raises(kvs.InputError, match=r"must be \[\.\.\., 3, 32\]"):
        policy.scores(np.zeros((4, 32)))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(kvs.InputError, match="holds something other"):
        policy.save(tmp_path / "other")
    assert (tmp_path / "other" / "notes.txt").read_text() == "mine"
    target = policy.save(tmp_path / "cut")
    config = (target / "config.json").read_text()
    (target / "config.json").write_text(config.replace('"n_modules": 3', '"n_modules": 4'))
    with pytest.raises(kvs.InputError, match="tensor layers.3.bias is missing"):
        kvs.KVzap.load(target)
    (target / "config.json").write_text(config.replace('"input_dim": 32', '"input_dim": 31'))
    with pytest.raises(kvs.InputError, match="config.json asks for"):
        kvs.KVzap.load(target)


# Policies with a budget


def noted(kind, settings, statistic, p, held, queries, keys, now):
    """Score of every token [H, T] in numpy. p [Hq, rows, T] are the newest rows' probabilities, one per query."""
    group = p.shape[0] // held.shape[0]
    by_group = p.reshape(held.shape[0], group, *p.shape[1:]).mean(1)
    if kind is kvs.TOVA:
        return np.broadcast_to(p[:, -1].mean(0), held.shape).copy()
    if kind is kvs.H2O:
        return statistic + by_group.sum(1)
    if kind is kvs.Knorm:
        return -np.sqrt((keys**2).sum(-1))
    window, side = settings["window"], settings["kernel"] // 2
    total = by_group[:, -window:].sum(1) / window
    total[:, now - window + 1 :] = 0
    padded = np.pad(total, ((0, 0), (side, side)))
    return np.stack([padded[:, i : i + total.shape[1]] for i in range(settings["kernel"])]).mean(0)


def replayed(lm, kind, settings, ids, prompt):
    """A dense model, one row, that holds a set of tokens per layer and head: logits and how many after each step."""
    config = lm.config
    layers, heads, length = config.layers, config.kv_heads, len(ids)
    budget, sinks = settings["budget"], settings.get("sinks", 0)
    recent = {kvs.H2O: settings.get("recent", max(budget // 2, 1)), kvs.SnapKV: settings.get("window"), kvs.Knorm: 0}
    recent = recent.get(kind, 1)
    keys = np.zeros((layers, heads, length, config.head_dim), np.float32)
    values = keys.copy()
    held = np.zeros((layers, heads, length), bool)
    statistic = np.zeros((layers, heads, length))
    logits, live = [], []

    def layer_of(number, q, k, v, start):
        """Attention of one layer on the host, and the selection after it."""
        number, start = int(number), int(start)
        q, k, v = (np.asarray(x)[0] for x in (q, k, v))
        end = start + q.shape[1]
        keys[number, :, start:end], values[number, :, start:end] = k, v
        held[number, :, start:end] = True
        group = q.shape[0] // heads
        behind = np.arange(start, end)[None, :, None] - np.arange(length)[None, None]
        window = config.local_windows[number]
        mask = np.repeat(held[number], group, 0)[:, None] & (behind >= 0) & (behind < (window or length))
        s = np.einsum("htd,hsd->hts", q, np.repeat(keys[number], group, 0)) * config.scale
        s = np.where(mask, s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        p = p / p.sum(-1, keepdims=True)
        out = np.einsum("hts,hsd->htd", p, np.repeat(values[number], group, 0))
        one = end - start == 1
        if window is not None:
            # After a prompt what no later token sees goes, too.
            held[number, :, : max(0, end - window + (not one))] = False
        if window is not None or (kind is kvs.SnapKV and one):
            return out[None].astype(np.float32)
        score = noted(kind, settings, statistic[number], p, held[number], q, keys[number], end - 1)
        statistic[number] = score
        worth = score.copy()
        worth[:, :sinks] = np.inf
        worth[:, max(end - max(recent, int(one)), 0) : end] = np.inf
        worth[~held[number]] = -np.inf
        if settings.get("per") == "layer":
            floor = max(1, int(0.2 * budget))
            order = np.argsort(-worth, -1, kind="stable")
            for h in range(heads):
                top = [i for i in order[h][:floor] if held[number, h, i]]
                worth[h, top] = np.inf
            flat = np.argsort(-worth.reshape(-1), kind="stable")[: budget * heads]
            chosen = np.zeros(worth.size, bool)
            chosen[flat] = True
            held[number] &= chosen.reshape(worth.shape)
        else:
            order = np.argsort(-worth, -1, kind="stable")[:, :budget]
            chosen = np.zeros(worth.shape, bool)
            np.put_along_axis(chosen, order, True, -1)
            held[number] &= chosen
        return out[None].astype(np.float32)

    @jax.jit
    def run(tokens, at):
        def attend(state, layer, q, k, v, gate):
            shape = jax.ShapeDtypeStruct(q.shape, jnp.float32)
            return jax.pure_callback(layer_of, shape, layer.number, q, k, v, at[0, 0]), state, None

        hidden, _, _ = decoder.forward(lm.params, config, kvs.Dense(), tokens, at, attend)
        return decoder.logits(lm.params, hidden)

    def feed(start, end):
        at = jnp.arange(start, end, dtype=jnp.int32)[None]
        logits.append(np.asarray(run(jnp.asarray(ids[None, start:end], jnp.int32), at))[0])
        live.append(held.sum(-1))

    feed(0, prompt)
    for t in range(prompt, length):
        feed(t, t + 1)
    return np.concatenate(logits), np.stack(live)


BUDGETED = [
    (kvs.TOVA, dict(budget=9)),
    (kvs.TOVA, dict(budget=9, sinks=3)),
    (kvs.H2O, dict(budget=10)),
    (kvs.H2O, dict(budget=10, recent=3, sinks=2)),
    (kvs.H2O, dict(budget=10, recent=2, per="layer")),
    (kvs.Knorm, dict(budget=8, sinks=1)),
    (kvs.Knorm, dict(budget=8, per="layer")),
    (kvs.SnapKV, dict(budget=12, window=4, kernel=3)),
    (kvs.SnapKV, dict(budget=12, window=4, kernel=5, sinks=2, per="layer")),
]


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [*(("qwen3", *case) for case in BUDGETED), *(("gemma3_text", *BUDGETED[i]) for i in (1, 4, 7))],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_budgets_equal_a_dense_model_that_forgets(golden_models, models, name, kind, settings):
    """The real cache, whose pages are poisoned where nothing is stored, against held sets kept by hand.

    Gemma's layers with a sliding window forget by themselves, and nothing is selected there.
    """
    ids = np.random.default_rng(3).integers(3, 97, 44)
    lm = models[name] if name in models else kvs.load(golden_models / name, dtype="float32")
    lm = lm.with_policy(kind(**settings))
    want, live = replayed(lm, kind, settings, ids, 26)
    out = lm.replay(ids[None], prefill=26, page_size=4)
    np.testing.assert_allclose(out.logits[0], want, atol=2e-5)
    np.testing.assert_array_equal(out.live[:, :, 0], live)
    heads = lm.config.kv_heads
    total = live[:, list(lm.config.evicting)].sum(-1)
    if kind is not kvs.SnapKV:
        assert (total == settings["budget"] * heads).all()
    assert (out.pages[:, :, 0] == -(-live // 4)).all()
    kept = np.asarray(kvs.kept(lm, ids[None, :26]))
    np.testing.assert_array_equal(kept.sum(-1)[:, 0], live[0])


@pytest.mark.parametrize("kind", [kvs.H2O, kvs.SnapKV])
def test_rows_with_a_budget_are_independent(models, kind):
    """Rows of a ragged batch, padded left or right, give what each gives alone; so do forked sessions."""
    settings = dict(budget=8, window=3) if kind is kvs.SnapKV else dict(budget=8, sinks=2)
    lm = models["llama"].with_policy(kind(**settings))
    rng = np.random.default_rng(4)
    rows = [rng.integers(3, 97, n).tolist() for n in (30, 17)]
    together = lm.generate(rows, max_new_tokens=12, temperature=0.0, eos=False, page_size=4)
    for row, tokens in zip(rows, together.tokens, strict=True):
        alone = lm.generate([row], max_new_tokens=12, temperature=0.0, eos=False, page_size=4)
        assert alone.tokens[0] == tokens
    ids, mask = np.zeros((2, 30), int), np.zeros((2, 30), bool)
    ids[0], mask[0] = rows[0], True
    ids[1, :17], mask[1, :17] = rows[1], True
    padded = lm.replay(ids, mask, prefill=30, page_size=4)
    alone = lm.replay(np.asarray([rows[1]]), prefill=17, page_size=4)
    np.testing.assert_allclose(padded.logits[1, :17], alone.logits[0], atol=2e-5)
    np.testing.assert_array_equal(padded.live[:, :, 1], alone.live[:, :, 0])


def test_random_keeps_what_it_drew(models):
    lm = models["llama"]
    ids = np.random.default_rng(5).integers(3, 97, (1, 40))
    first, second = (np.asarray(kvs.kept(lm.with_policy(kvs.Random(budget=10, seed=s)), ids)) for s in (0, 1))
    assert (first.sum(-1) == 10).all()
    assert (first != second).any()
    assert (first[0] != first[1]).any()
    assert first[..., -1].all()  # the newest


def test_budgets_hold_over_turns(models):
    """Each append is a prompt of its own: it sees all that is held, and the budget is spent anew."""
    lm = models["llama"].with_policy(kvs.H2O(budget=12, sinks=2))
    rng = np.random.default_rng(6)
    with lm.session(page_size=4) as session:
        for count in (30, 3, 18):
            session.append(rng.integers(3, 97, count).tolist())
            session.generate(max_new_tokens=5, eos=False)
            assert (np.asarray(session.report().live) <= 12).all()
        assert (np.asarray(session.report().live) == 12).all()


def test_what_a_budget_drops_is_counted(models):
    """The nominal ratio is that of the decisions, whenever they were taken."""
    lm = models["llama"].with_policy(kvs.TOVA(budget=8))
    with lm.session(page_size=4) as session:
        session.append(np.random.default_rng(7).integers(3, 97, 60).tolist())
        session.generate(max_new_tokens=20, eos=False)
        found = session.report()
    seen = int(found.seen[0])
    assert found.cr_nominal == pytest.approx(seen / 8)


def test_budgets_need_the_paged_cache_and_room(models):
    lm = models["llama"].with_policy(kvs.SnapKV(budget=40, window=32))
    ids = np.arange(3, 60)[None]
    for use in (lambda: lm.session(cache="dense"), lambda: lm.replay(ids, cache="dense")):
        with pytest.raises(kvs.InputError, match="needs the paged cache"):
            use()
    with pytest.raises(kvs.InputError, match="the newest 32 are never evicted"):
        lm.session(capacity=16)


def test_bad_budgets(models):
    with pytest.raises(kvs.InputError, match="budget of at least sinks"):
        kvs.TOVA(budget=4, sinks=4)
    with pytest.raises(kvs.InputError, match="kernel must be odd"):
        kvs.SnapKV(budget=100, kernel=4)
    with pytest.raises(kvs.InputError, match="per must be head or layer"):
        kvs.Knorm(budget=4, per="model")
    with pytest.raises(kvs.InputError, match="scores all heads of a layer alike"):
        kvs.TOVA(budget=4, per="layer")
    with pytest.raises(kvs.InputError, match="budget must be a whole number"):
        kvs.H2O(budget=0)


def test_scoring_costs_what_the_paper_says():
    """Floating-point operations of the compiled surrogate over those of a layer, at Qwen3-8B shapes."""
    from kvsparse_jax.policies.kvzap import predict

    features, heads, width, mlp = 4096, 8, 512, 12288

    def shape(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16)

    def part(before, after):
        return {"kernel": shape(before, after), "bias": shape(after)}

    def flops(function, *arguments):
        return jax.jit(function).lower(*arguments).compile().cost_analysis()["flops"]

    x = shape(1, 1, features)
    kernels = [(features, 4096), (features, 1024), (features, 1024), (4096, features)]
    kernels += [(features, mlp), (features, mlp), (mlp, features)]
    layer = sum(flops(lambda x, w: x @ w, shape(1, 1, a), shape(a, b)) for a, b in kernels)
    assert flops(predict, {"out": part(features, heads)}, x) / layer < 0.0003
    assert flops(predict, {"hidden": part(features, width), "out": part(width, heads)}, x) / layer < 0.0115

"""The serving engine: every stream as alone, no page lost, whatever arrives, leaves or is preempted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvsparse_jax as kvs
from kvsparse_jax.engine import BusyError, Engine, EngineOptions, Request, SamplingOptions
from kvsparse_jax.engine.runner import programs
from kvsparse_jax.errors import InputError
from kvsparse_jax.models.sharding import make_mesh
from kvsparse_jax.policies import DMS, SnapKV
from kvsparse_jax.sampling import choose, sampling

GREEDY = SamplingOptions(temperature=0.0, eos=False)
DRAWN = SamplingOptions(temperature=1.0, seed=5, eos=False)
PENALISED = SamplingOptions(temperature=0.0, repetition_penalty=1.5, eos=False)
COUNT, SLOTS, LONGEST, NEW = 60, 12, 56, 32
POOL = 24
"""Pages per head: little more than the longest sequence may take, so that the oldest can always go on."""


@functools.cache
def load(directory, name, **options):
    return kvs.load(directory / name, dtype="float32", **options)


@pytest.fixture(scope="module")
def dms(golden_methods):
    return load(golden_methods, "3_model/adapter")


def options_for(lm, pool=POOL, **options):
    """All engines of a model have the same shapes, so they share their programs."""
    config, channels = lm.config, lm._model.config.head_dim * 2
    if config.latent is not None:
        channels = config.latent.rank + config.latent.rope
    page = 4 * (channels * 4 + 4) * config.layers * config.kv_heads
    sizes = {"slots": SLOTS, "page_size": 4, "prefill_chunk": 16, "burst": 4, "max_tokens": 96, "reserve": 0.0}
    return EngineOptions(pool_bytes=int(page * pool), **sizes | options)


def engine_of(lm, *, clock=None, **options):
    return Engine(lm._model, lm.tokenizer, options_for(lm, **options), **{} if clock is None else {"clock": clock})


def run(engine, arrivals):
    """Steps until all is done, with requests (step, Request) arriving; tokens and last piece by (request, index)."""
    tokens, last, numbers = {}, {}, []
    arrivals, step = sorted(arrivals, key=lambda x: x[0]), 0
    while engine.busy or arrivals:
        while arrivals and arrivals[0][0] <= step:
            numbers.append(engine.submit(arrivals.pop(0)[1]))
        for piece in engine.step():
            key = piece.request, piece.index
            assert key not in last
            tokens.setdefault(key, []).extend(piece.tokens)
            if piece.reason is not None:
                last[key] = piece
        engine.runner.check()
        step += 1
        assert step < 5000
    assert engine.runner.free == engine.runner.pages
    assert all(key in last for key in tokens)
    return tokens, last, numbers


def prompts_of(lm, lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, lm.config.vocab_size, n).tolist() for n in lengths]


def assert_alone(lm, prompts, answers, how=GREEDY):
    """Every token is what ``how`` takes from the masked full-sequence forward, which has neither cache nor batch.

    Row i is choice i, where tokens are drawn.
    """
    for start in range(0, len(prompts), 8):
        rows = list(zip(prompts[start : start + 8], answers[start : start + 8], strict=True))
        ids, mask = np.zeros((8, 96), int), np.zeros((8, 96), int)
        mask[len(rows) :, 0] = 1
        for row, tokens in enumerate(rows):
            tokens = [*tokens[0], *tokens[1]]
            ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        logits = np.asarray(lm.logits(ids, mask))
        for row, (prompt, answer) in enumerate(rows):
            found = logits[row, len(prompt) - 1 : len(prompt) + len(answer) - 1]
            if how.temperature:
                names = ("temperature", "top_k", "top_p")
                seeds = [how.seed + start + row] * len(answer)
                settings = sampling(len(answer), seed=seeds, **{name: getattr(how, name) for name in names})
                at = jnp.arange(len(prompt), len(prompt) + len(answer), dtype=jnp.int32)
                assert choose(jnp.asarray(found), settings, at).tolist() == answer
                continue
            found = found.copy()
            for i in range(len(answer)):
                seen = sorted({*prompt, *answer[:i]})
                values = found[i, seen]
                found[i, seen] = np.where(values > 0, values / how.repetition_penalty, values * how.repetition_penalty)
            chosen = np.take_along_axis(found, np.asarray(answer)[:, None], 1)[:, 0]
            assert (found.max(-1) - chosen < 1e-4).all()  # the tie of two tokens may go either way


@pytest.fixture(scope="module")
def engine(dms):
    return engine_of(dms)


def test_poisson_arrivals_in_a_pool_too_small(dms, engine):
    """Streams are as alone, and no page is lost, where what may run at a time wants three times the pool."""
    rng = np.random.default_rng(1)
    prompts = prompts_of(dms, rng.integers(1, LONGEST, COUNT), 1)
    news, steps = rng.integers(1, NEW + 1, COUNT).tolist(), np.cumsum(rng.poisson(0.7, COUNT)).tolist()
    requests = [Request(p, n, sampling=GREEDY) for p, n in zip(prompts, news, strict=True)]
    tokens, last, numbers = run(engine, list(zip(steps, requests, strict=True)))
    found = [tokens[n, 0] for n in numbers]
    assert [len(one) for one in found] == news and {piece.reason for piece in last.values()} == {"length"}
    assert_alone(dms, prompts, found)
    for at in range(0, COUNT, 12):
        tokens, _, (number,) = run(engine, [(0, requests[at])])
        assert tokens[number, 0] == found[at]
    wanted = SLOTS * np.mean([piece.usage.pages for piece in last.values()])
    assert wanted > 3 * engine.runner.pages and engine.metrics.preemptions > COUNT / 10
    assert engine.metrics.most_running > 2


def test_choices_of_one_prompt_and_a_penalty(dms, engine):
    """The prompt is prefilled once, choice i draws with seed + i; rows of other settings share the batch."""
    (prompt,), choices = prompts_of(dms, (40,), 2), 6
    taken = engine.metrics.prompt_tokens
    requests = [Request(prompt, 12, n=choices, sampling=DRAWN), Request(prompt, NEW, sampling=PENALISED)]
    tokens, last, (number, penalised) = run(engine, [(0, one) for one in requests])
    found = [tokens[number, i] for i in range(choices)]
    assert_alone(dms, [prompt] * choices, found, DRAWN)
    assert len({*map(tuple, found)}) > 1
    assert_alone(dms, [prompt], [tokens[penalised, 0]], PENALISED)
    assert last[number, 3].usage.prompt_tokens == 40 and last[number, 3].usage.completion_tokens == 12
    assert engine.metrics.prompt_tokens == taken + 2 * 40
    usage = last[number, 0].usage
    assert usage.kv_peak >= usage.kv_tokens and 12 < usage.kv_read < 12 * usage.kv_peak


def test_sessions(dms):
    """A session goes on from host memory exactly, while others use its pages; the longest idle are forgotten."""
    prompt, more = prompts_of(dms, (40, 9), 4)
    engine = engine_of(dms)

    def answer(content, name):
        tokens, _, (number,) = run(engine, [(0, Request(content, 8, sampling=GREEDY, session=name))])
        return tokens[number, 0]

    first = answer(prompt, "s")
    assert engine.sessions == ["s"]
    run(engine, [(0, Request(p, 8, sampling=GREEDY)) for p in prompts_of(dms, (50, 30, 20, 40), 5)])
    second = answer(more, "s")
    assert_alone(dms, [prompt, [*prompt, *first, *more]], [first, second])

    nbytes = engine._sessions["s"].parcel.nbytes
    engine = engine_of(dms, session_bytes=int(1.5 * nbytes))
    assert answer(prompt, "a") == first
    answer(prompt, "b")
    assert engine.sessions == ["b"]
    assert answer(more, "a") == answer(more, "c")  # nothing is left of it
    assert sum(one.parcel.nbytes for one in engine._sessions.values()) <= engine.options.session_bytes
    number = engine.submit(Request(more, 8, sampling=GREEDY, session="c"))
    with pytest.raises(BusyError, match="'c' is answering"):
        engine.submit(Request(more, 8, sampling=GREEDY, session="c"))
    engine.cancel(number)
    engine.step()
    assert not engine.busy and engine.runner.free == engine.runner.pages


def test_leaving_early_frees_pages_within_a_step(dms):
    now = [0.0]
    engine = engine_of(dms, clock=lambda: now[0])
    before = None
    prompt = prompts_of(dms, (30,))[0]
    for early in (0, 1, 6):  # in the queue, while the prompt is taken in, while it answers
        cancelled = engine.submit(Request(prompt, 60, n=2, sampling=GREEDY))
        late = engine.submit(Request(prompt, 60, sampling=GREEDY, timeout=5.0))
        for _ in range(early):
            engine.step()
        assert (engine.runner.free < engine.runner.pages) == bool(early)
        engine.cancel(cancelled)
        now[0] += 6.0
        reasons = sorted((p.request == late, p.index, p.reason) for p in engine.step() if p.reason)
        assert reasons == [(False, 0, "cancelled"), (False, 1, "cancelled"), (True, 0, "deadline")]
        assert engine.runner.free == engine.runner.pages and not engine.busy
        engine.runner.check()
        if early:
            assert programs() == (before or programs())  # nothing is compiled twice
            before = programs()


def test_order(dms):
    engine = engine_of(dms, max_waiting=3)
    for new in range(SLOTS):  # one row gets free after the other
        engine.submit(Request([5, 6], 4 + 6 * new, sampling=GREEDY, priority=5))
        engine.step()
    numbers = [engine.submit(Request([5, 6], 40, sampling=GREEDY, priority=p)) for p in (0, 0, 1)]
    with pytest.raises(BusyError, match="3 requests are waiting"):
        engine.submit(Request([5, 6], 2))
    began = []
    while engine.busy:
        began += [piece.request for piece in engine.step() if piece.request in numbers]
    assert list(dict.fromkeys(began)) == [numbers[2], numbers[0], numbers[1]]


def test_what_is_refused(dms, engine):
    waiting = engine.metrics.requests
    for wrong, what in [
        (Request([5] * 97), "97 tokens, more than the 96"),
        (Request([]), "empty"),
        (Request([5000]), "out of range"),
        (Request([5], n=17), "n must"),
        (Request([5], -1), "max_new_tokens"),
        (Request([5], sampling=SamplingOptions(temperature=-1)), "temperature"),
        (Request([5], sampling=SamplingOptions(logprobs=21)), "logprobs"),
        (Request([5], timeout=0), "timeout"),
    ]:
        with pytest.raises(InputError, match=what):
            engine.submit(wrong)
    assert engine.metrics.requests == waiting and not engine.busy
    with pytest.raises(InputError, match="do not fit into the pool"):
        engine_of(dms.with_policy(kvs.Dense()), pool=8).submit(Request([5] * 40, 20))
    with pytest.raises(InputError, match="pool_bytes"):
        engine_of(dms, pool=0.5)
    with pytest.raises(InputError, match="serves Dense, DMS, KVzap"):
        engine_of(dms.with_policy(SnapKV(budget=96)))


def random_dms(lm):
    policy = DMS.init(lm.config, window=5, scale=1.0, offset=0.0)
    params = policy.params | {"proj": jax.random.normal(jax.random.key(5), policy.params["proj"].shape)}
    return DMS(**{**vars(policy), "params": params})


def random_kvzap(lm, prefill):
    config = lm.config
    kernel = jax.random.normal(jax.random.key(6), (config.layers, config.hidden_size, config.kv_heads))
    params = {"out": {"kernel": kernel, "bias": jnp.zeros((config.layers, config.kv_heads))}}
    return kvs.KVzap(params, threshold=0.0, window=5, sinks=1, prefill=prefill)


PROMPTS, TOKENS = (30, 1, 45, 17, 40), (1, 1, 1, 1, 1)
"""Lengths; those of a token need no prefill, whose compilation is most of what a family costs here."""


@pytest.mark.parametrize(
    ("name", "policy", "devices", "lengths"),
    [
        ("mistral_sliding", random_dms, 2, PROMPTS),
        ("qwen3_moe", functools.partial(random_kvzap, prefill="dense"), 1, PROMPTS),
        ("phi3_partial", functools.partial(random_kvzap, prefill="rule"), 1, TOKENS),
        ("gemma3_text", random_dms, 1, PROMPTS),
        ("deepseek_v2", random_dms, 1, TOKENS),
        ("deepseek_v3", lambda lm: kvs.Dense(), 1, PROMPTS),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_families(golden_models, name, policy, devices, lengths):
    """Every family, KVzap with both of its prefills, no policy, and heads and pool on two devices."""
    plain = load(golden_models, name)
    plain = lm = plain.with_policy(policy(plain))
    if devices > 1:
        lm = kvs.load(golden_models / name, dtype="float32", policy=lm.policy, mesh=make_mesh(tensor=devices))
    engine = engine_of(lm, pool=5 * 24)
    assert len(engine.runner.cache.k.sharding.device_set) == devices
    prompts, new = prompts_of(lm, lengths, 7), 60 - max(lengths)
    tokens, last, numbers = run(engine, [(i, Request(p, new, sampling=GREEDY)) for i, p in enumerate(prompts)])
    found = [tokens[n, 0] for n in numbers]
    assert [len(one) for one in found] == [new] * 5 and engine.metrics.most_running == 5
    if lm.policy.holds:
        # A prompt sees all of itself, which the masked forward does not know of.
        tokens, last, numbers = run(
            engine, [(0, Request(prompts[-1], 0)), (99, Request(prompts[-1], new, sampling=GREEDY))]
        )
        kept = np.asarray(kvs.kept(lm, [prompts[-1][:-1]]))
        assert last[numbers[0], 0].usage.kv_tokens == pytest.approx(kept.sum(-1).mean()) and not kept.all()
        assert last[numbers[0], 0].usage.kv_peak == kept.shape[-1]
        assert tokens[numbers[1], 0] == found[-1]
    else:
        assert_alone(plain, prompts, found)
    most = max(piece.usage.cr for piece in last.values())
    assert most > 1.1 if name != "deepseek_v3" else most == 1

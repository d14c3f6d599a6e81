"""The serving engine: every stream as alone, no page lost, whatever arrives, leaves or is preempted."""

import functools

import numpy as np
import pytest

import kvsparse_jax as kvs
from kvsparse_jax.engine import BusyError, Engine, EngineOptions, Request, SamplingOptions
from kvsparse_jax.engine.runner import programs
from kvsparse_jax.errors import InputError
from kvsparse_jax.policies import Dense, StreamingLLM

GREEDY = SamplingOptions(temperature=0.0, eos=False)
ALONE = {"capacity": 256, "page_size": 4, "prefill_chunk": 8, "temperature": 0.0, "eos": False}


@functools.cache
def load(directory, name="adapter"):
    return kvs.load(directory / "3_model" / name, dtype="float32")


@pytest.fixture
def dms(golden_methods):
    return load(golden_methods)


def page_bytes(lm, page=4):
    c = lm.config
    return page * (2 * c.head_dim * 4 + 4), c.layers * c.kv_heads


def engine_of(lm, pages_per_head, **options):
    one, heads = page_bytes(lm)
    sizes = {"slots": 4, "page_size": 4, "prefill_chunk": 16, "burst": 4, "max_tokens": 96} | options
    return Engine(lm._model, lm.tokenizer, EngineOptions(pool_bytes=int(one * heads * pages_per_head), **sizes))


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


def ragged(lm, count, seed, longest=56):
    rng = np.random.default_rng(seed)
    prompts = prompts_of(lm, rng.integers(1, longest, count), seed)
    news = rng.integers(1, 33, count).tolist()
    steps = np.cumsum(rng.poisson(1.5, count)).tolist()
    return prompts, news, steps


def alone(lm, prompts, news):
    return lm.generate(prompts, news, **ALONE | {"capacity": 96}).tokens


@pytest.mark.parametrize("kind", ["dms", "dense", "streaming"])
def test_streams_are_as_alone_in_a_pool_too_small(dms, kind):
    lm = {
        "dms": dms,
        "dense": dms.with_policy(Dense()),
        "streaming": dms.with_policy(StreamingLLM(sinks=2, budget=12)),
    }[kind]
    prompts, news, steps = ragged(dms, 16, 1)
    engine = engine_of(lm, 30, reserve=0.0)
    requests = [Request(p, n, sampling=GREEDY) for p, n in zip(prompts, news, strict=True)]
    tokens, last, numbers = run(engine, list(zip(steps, requests, strict=True)))
    assert [tokens[n, 0] for n in numbers] == alone(lm, prompts, news)
    assert {piece.reason for piece in last.values()} == {"length"}
    if kind == "dense":
        assert engine.metrics.preemptions > 0


@pytest.fixture(scope="module")
def engine(golden_methods):
    return engine_of(load(golden_methods), 96)


def test_choices_of_one_prompt_sessions_and_scores(dms, engine):
    (prompt, more), drawn = prompts_of(dms, (40, 9), 2), SamplingOptions(temperature=1.0, seed=5, eos=False)
    # Several choices: the prompt is prefilled once, and choice i is what seed + i gives alone.
    tokens, last, (number,) = run(engine, [(0, Request(prompt, 12, n=6, sampling=drawn))])
    settings = ALONE | {"temperature": 1.0, "top_k": 20, "top_p": 0.95}
    want = dms.generate([prompt] * 6, 12, seed=[5 + i for i in range(6)], **settings).tokens
    assert [tokens[number, i] for i in range(6)] == want and len({*map(tuple, want)}) > 1
    assert last[number, 3].usage.prompt_tokens == 40 and last[number, 3].usage.completion_tokens == 12

    # A session goes on from host memory exactly, while others use its pages.
    first, _, (number,) = run(engine, [(0, Request(prompt, 8, sampling=GREEDY, session="s"))])
    assert engine.sessions == ["s"]
    run(engine, [(0, Request(more, 8, sampling=GREEDY))] * 3)
    second, _, (again,) = run(engine, [(0, Request(more, 8, sampling=GREEDY, session="s"))])
    session = dms.session(**{k: ALONE[k] for k in ("capacity", "page_size", "prefill_chunk")})
    answers = []
    for content in (prompt, more):
        session.append(content)
        answers.append(session.generate(8, temperature=0.0, eos=False).tokens[0])
    assert [first[number, 0], second[again, 0]] == answers

    # Scores of prompt and answer are those of the whole sequence.
    how = SamplingOptions(temperature=0.0, eos=False, logprobs=2)
    number = engine.submit(Request(prompt, 6, sampling=how, prompt_logprobs=1))
    pieces = []
    while engine.busy:
        pieces += engine.step()
    ids = prompt + [t for piece in pieces for t in piece.tokens]
    logits = np.asarray(dms.logits([ids]))[0].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    found = [*next(p.prompt_logprobs for p in pieces if p.prompt_logprobs), *(x for p in pieces for x in p.logprobs)]
    assert [len(x.top) for x in found] == [1] * 39 + [2] * 6
    for at, one in enumerate(found):
        np.testing.assert_allclose(one.value, logprobs[at, ids[at + 1]], atol=2e-4)
        assert one.top[0][0] == logprobs[at].argmax()


def test_leaving_early_frees_pages_within_a_step(dms):
    now = [0.0]
    one, heads = page_bytes(dms)
    sizes = dict(slots=4, page_size=4, prefill_chunk=16, burst=4, max_tokens=96, pool_bytes=one * heads * 96)
    engine = Engine(dms._model, dms.tokenizer, EngineOptions(**sizes), clock=lambda: now[0])
    before = None
    for _ in range(2):
        prompt = prompts_of(dms, (30,))[0]
        cancelled = engine.submit(Request(prompt, 60, n=2, sampling=GREEDY))
        late = engine.submit(Request(prompt, 60, sampling=GREEDY, timeout=5.0))
        for _ in range(6):
            engine.step()
        assert engine.runner.free < engine.runner.pages
        engine.cancel(cancelled)
        now[0] += 6.0
        reasons = sorted((p.request == late, p.index, p.reason) for p in engine.step() if p.reason)
        assert reasons == [(False, 0, "cancelled"), (False, 1, "cancelled"), (True, 0, "deadline")]
        assert engine.runner.free == engine.runner.pages and not engine.busy
        before = before or programs()
    assert programs() == before  # nothing is compiled twice


def test_order_and_limits(dms, engine):
    with pytest.raises(InputError, match="97 tokens, more than the 96"):
        engine.submit(Request([5] * 97))
    for wrong, what in [
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
    small = engine_of(dms, 30, slots=1, max_waiting=3)
    numbers = [small.submit(Request([5, 6], 2, sampling=GREEDY, priority=p)) for p in (0, 0, 1)]
    with pytest.raises(BusyError):
        small.submit(Request([5, 6], 2))
    ended = []
    while small.busy:
        ended += [piece.request for piece in small.step() if piece.reason]
    assert ended == [numbers[2], numbers[0], numbers[1]]
    with pytest.raises(InputError, match="do not fit into the pool"):
        engine_of(dms.with_policy(Dense()), 8).submit(Request([5] * 40, 20))
    with pytest.raises(InputError, match="pool_bytes"):
        engine_of(dms, 0.5)

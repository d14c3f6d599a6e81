"""Generation on the real cache against full-sequence references, and everything a session promises."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvsparse_jax as kvs
from kvsparse_jax.errors import InputError, RunError
from kvsparse_jax.generation.answer import Answer
from kvsparse_jax.generation.decode import BURST, Model, State, decode, prefill, with_head
from kvsparse_jax.generation.requests import request
from kvsparse_jax.models import decoder
from kvsparse_jax.models.sharding import make_mesh
from kvsparse_jax.tokenizer import StreamDecoder

DMS_MODELS = ["adapter", "adapter_layer", "borrowed"]
GREEDY = {"temperature": 0.0, "eos": False}
# Nearly all tests share these sizes, for compiling takes nearly all of their time.
CACHE = {"capacity": 256, "page_size": 4, "prefill_chunk": 8}


@functools.cache
def load(directory, name):
    return kvs.load(directory / name, dtype="float32")


@pytest.fixture
def llama(golden_models):
    return load(golden_models, "llama_tied")


@pytest.fixture
def dms(golden_methods):
    return load(golden_methods / "3_model", "adapter")


def prompts_of(lm, lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, lm.config.vocab_size, n).tolist() for n in lengths]


def assert_greedy(lm, histories, answers):
    """Every answer's tokens are the best ones by the masked full-sequence forward, given what comes before them."""
    size = 96 if len(histories) == 4 else max(len(h) + len(a) for h, a in zip(histories, answers, strict=True))
    ids, mask = np.zeros((len(histories), size), int), np.zeros((len(histories), size), int)
    for row, (history, answer) in enumerate(zip(histories, answers, strict=True)):
        tokens = [*history, *answer]
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
    best = np.asarray(lm.logits(ids, mask)).argmax(-1)
    for row, (history, answer) in enumerate(zip(histories, answers, strict=True)):
        assert best[row, len(history) - 1 : len(history) + len(answer) - 1].tolist() == answer


# Exactness


@pytest.mark.parametrize(
    "name", ["llama_tied", "mistral_sliding", "qwen3_moe", "phi3_fused", "phi3_longrope", "gemma3_text", "deepseek_v3"]
)
def test_hugging_face_greedy(golden_models, name):
    lm, data = load(golden_models, name), np.load(golden_models / name / "golden.npz")
    masks = data["padded_attention_mask"].astype(bool)
    padded = [ids[mask].tolist() for ids, mask in zip(data["padded_input_ids"], masks, strict=True)]
    prompts = [*data["input_ids"].tolist(), *padded]
    want = [*data["greedy"].tolist(), *data["padded_greedy"].tolist()]
    one_shot = [CACHE | {"prefill_chunk": None}, CACHE | {"cache": "dense"}] if name == "llama_tied" else []
    for options in (CACHE, *one_shot):
        assert lm.generate(prompts, 16, **GREEDY, **options).tokens == want


@pytest.mark.parametrize(
    ("name", "chunks", "cache"),
    [("adapter", (None, 1, 7), "paged"), ("adapter_layer", (7,), "paged"), ("borrowed", (7,), "dense")],
)
def test_replay_of_the_original(golden_methods, name, chunks, cache):
    """Logits, live counts and pages of the original's cache; a dense cache sees the same keys."""
    lm = load(golden_methods / "3_model", name)
    for padded in ("", "_padded"):
        data = np.load(golden_methods / "3_model" / f"{name}_golden{padded}.npz")
        mask = data["attention_mask"] if padded else np.ones(data["input_ids"].shape, int)
        for chunk in chunks:
            options = {"cache": cache, "page_size": 4, "capacity": 48}
            rep = lm.replay(data["input_ids"], mask, prefill=29, prefill_chunk=chunk, **options)
            seen = mask.astype(bool)
            np.testing.assert_allclose(rep.logits[seen], data["logits_masked"][seen], rtol=0, atol=1e-4)
            np.testing.assert_array_equal(rep.live, data["live_lengths"])
            assert rep.used.shape == (20,)
            if cache == "paged":
                np.testing.assert_array_equal(rep.pages, -(-rep.live // rep.page_size))
                per_page = (2 * lm.config.head_dim + 1) * 4 * rep.page_size
                assert (np.diff(rep.used) == np.diff(rep.pages.sum((1, 2, 3))) * per_page).all()


@pytest.mark.parametrize("name", DMS_MODELS)
def test_three_turns_equal_the_masked_reference(golden_methods, name):
    """A ragged batch of 4 under hard DMS, three turns, token for token."""
    lm = load(golden_methods / "3_model", name)
    history = [[] for _ in range(4)]
    first, last = prompts_of(lm, (9, 1, 30, 17), 1), prompts_of(lm, (2, 3, 4, 1), 2)
    session = lm.session(4, **CACHE)
    for new in (first, [[5, 6, 7], [], [8], [9, 10, 11, 12, 13]], last):
        session.append(new)
        out = session.generate([8, 9, 8, 7], **GREEDY)
        history = [[*old, *more] for old, more in zip(history, new, strict=True)]
        assert [len(row) for row in out.tokens] == [8, 9, 8, 7]
        assert_greedy(lm, history, out.tokens)
        history = [[*old, *more] for old, more in zip(history, out.tokens, strict=True)]
        assert session.tokens == history
        assert out.cache.seen.tolist() == [len(row) - 1 for row in history]
    assert out.cache.live.max() < 65, "nothing was evicted"


def test_eight_bit_cache(dms):
    prompts = prompts_of(dms, (28, 12))
    exact = dms.generate(prompts, 8, **GREEDY, **CACHE)
    out = dms.generate(prompts, 8, **GREEDY, **CACHE, kv_dtype="int8")
    same = [a == b for x, y in zip(out.tokens, exact.tokens, strict=True) for a, b in zip(x, y, strict=True)]
    assert np.mean(same) > 0.5  # a near tie may go the other way
    assert out.cache.dense_nbytes == exact.cache.dense_nbytes and out.cache.used < exact.cache.used


# Rows that end


def test_rows_end_independently(llama):
    """Each row gives in a batch what it gives alone, and one that has ended neither stores nor counts."""
    prompts = prompts_of(llama, (20, 5, 33, 11))
    free = llama.generate(prompts, 12, **GREEDY, **CACHE)
    stop_ids = [[], [free.tokens[1][3]], [free.tokens[2][0]], []]
    out = llama.generate(prompts, [12, 9, 12, 4], **GREEDY, **CACHE, stop_ids=stop_ids)
    first = free.tokens[1].index(free.tokens[1][3])
    assert out.tokens == [free.tokens[0], free.tokens[1][:first], [], free.tokens[3][:4]]
    assert out.finish_reason == ["length", "stop", "stop", "length"]
    # What was fed: all but the last token, and all where a stop token was drawn.
    assert out.cache.seen.tolist() == [20 + 12 - 1, 5 + first, 33, 11 + 4 - 1]
    for row, prompt in enumerate(prompts):
        alone = llama.generate([prompt], [12, 9, 12, 4][row], **GREEDY, **CACHE, stop_ids=stop_ids[row])
        assert alone.tokens[0] == out.tokens[row]
        np.testing.assert_array_equal(alone.cache.live[:, 0], out.cache.live[:, row])


def test_eos(llama):
    """The model's end token ends a row and is not part of the answer; eos=False goes on."""
    prompts = prompts_of(llama, (20,))
    first, second = llama.generate(prompts, 2, **GREEDY, **CACHE).tokens[0]
    ending = dataclasses.replace(llama, tokenizer=Bytes(eos=second))
    out = ending.generate(prompts, 5, temperature=0.0, **CACHE)
    assert (out.tokens, out.finish_reason) == ([[first]], ["stop"])
    assert len(ending.generate(prompts, 5, **GREEDY, **CACHE).tokens[0]) == 5
    session = ending.session(**CACHE)
    session.append(prompts[0])
    assert session.generate(5, temperature=0.0).tokens == [[first]]
    again = session.generate(5, temperature=0.0)
    assert (again.tokens, again.finish_reason) == ([[]], ["stop"]), "a row that has ended waits for more input"
    session.append([7])
    assert session.tokens == [[*prompts[0], first, 7]]
    assert len(session.generate(5, **GREEDY).tokens[0]) == 5


def test_context_is_full(llama):
    limit = llama.config.max_positions
    prompts = prompts_of(llama, (limit - 3, limit))
    out = llama.generate(prompts, [5, 5], **GREEDY, **CACHE)
    assert [len(row) for row in out.tokens] == [3, 0]
    assert out.finish_reason == ["context", "context"]
    with pytest.raises(InputError, match=f"row 0 would have {limit + 1} tokens"):
        llama.generate([[5] * (limit + 1)], 1)


# Sampling in the loop


def test_seeds(llama):
    prompts = prompts_of(llama, (12, 12, 7, 9))
    hot = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "eos": False} | CACHE
    one = llama.generate(prompts, 10, seed=3, **hot)
    assert llama.generate(prompts, 10, seed=3, **hot).tokens == one.tokens
    assert llama.generate(prompts, 10, seed=4, **hot).tokens != one.tokens
    assert llama.generate(prompts[:1], 10, seed=3, **hot).tokens == one.tokens[:1]
    own = llama.generate(prompts, 10, seed=[8, 3, 9, 1], **hot)
    assert llama.generate(prompts[1:2], 10, seed=3, **hot).tokens == own.tokens[1:2]
    mixed = llama.generate(prompts, 10, seed=[8, 3, 9, 1], **hot | {"temperature": [1.5, 0.0, 1.5, 1.5]})
    greedy = llama.generate(prompts[1:2], 10, **GREEDY, **CACHE)
    assert mixed.tokens == [own.tokens[0], greedy.tokens[0], *own.tokens[2:]]


def test_repetition_penalty(llama):
    prompts = prompts_of(llama, (30, 4))
    out = llama.generate(prompts, 40, **GREEDY, **CACHE, repetition_penalty=[1e6, 1.0])
    assert len({*prompts[0], *out.tokens[0]}) == len(set(prompts[0])) + 40
    assert out.tokens[1] == llama.generate(prompts[1:], 40, **GREEDY, **CACHE).tokens[0]


# Streams, turns, forks


def test_stream_equals_generate(llama):
    prompts = prompts_of(llama, (12, 30))
    whole = llama.generate(prompts, [10, 4], **GREEDY, **CACHE)
    session = llama.session(2, **CACHE)
    session.append(prompts)
    pieces = list(session.stream([10, 4], **GREEDY))
    for row in range(2):
        mine = [piece for piece in pieces if piece.row == row]
        assert [piece.token for piece in mine] == whole.tokens[row]
        assert "".join(piece.text for piece in mine) == whole.text[row]
        assert [piece.finish_reason for piece in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == "length"


def test_interrupted_stream(dms):
    """Leaving a stream early leaves a session that goes on as if it had been one answer."""
    prompt = prompts_of(dms, (25,))[0]
    whole = dms.generate([prompt], 14, **GREEDY, **CACHE).tokens[0]
    session = dms.session(**CACHE)
    session.append(prompt)
    got = []
    for piece in session.stream(14, **GREEDY):
        got.append(piece.token)
        if len(got) == 5:
            break
    assert session.tokens == [prompt + whole[:5]]
    stream = session.stream(14, **GREEDY)
    got.append(next(stream).token)
    assert session.generate(3, **GREEDY).tokens == [whole[6:9]]
    with pytest.raises(InputError, match="this stream has ended"):
        next(stream)
    assert got == whole[:6]
    session.append([5, 6])
    after = dms.generate([[*prompt, *whole[:9], 5, 6]], 4, **GREEDY, **CACHE)
    assert session.generate(4, **GREEDY).tokens == after.tokens


def test_interrupt_while_waiting(dms, monkeypatch):
    """Ctrl-C in the middle of a burst loses nothing that the device did."""
    prompt = prompts_of(dms, (25,))[0]
    whole = dms.generate([prompt], 10, **GREEDY, **CACHE).tokens[0]
    session = dms.session(**CACHE)
    session.append(prompt)

    def interrupted(self):
        if self._unread is not None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kvs.Session, "_read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.generate(6, **GREEDY)
    assert session.tokens == [prompt + whole[:6]]
    assert session.generate(4, **GREEDY).tokens == [whole[6:]]


def test_fork(dms, llama):
    """Copies go on independently and exactly; the original does not notice."""
    prompt = prompts_of(dms, (25,))[0]
    session = dms.session(**CACHE)
    session.append(prompt)
    start = session.generate(3, **GREEDY).tokens[0]
    before = session.report()
    many = session.fork(2)
    assert many.report().nbytes > 1.5 * before.nbytes, "a pool of fixed capacity is made larger with the batch"
    many.append([[5, 6], []])
    out = many.generate(6, **GREEDY)
    longer = [[*prompt, *start, 5, 6], [*prompt, *start]]
    assert out.tokens == dms.generate(longer, 6, **GREEDY, **CACHE).tokens
    after = session.report()
    np.testing.assert_array_equal(before.live, after.live)
    assert session.generate(6, **GREEDY).tokens[0] == out.tokens[1]
    assert dms.session().fork(2).batch == 2
    dense = llama.session(4, **CACHE, cache="dense")
    prompts = prompts_of(llama, (20, 3, 5, 6))
    dense.append(prompts)
    assert dense.fork().generate(16, **GREEDY).tokens == dense.generate(16, **GREEDY).tokens


def test_release_and_close(dms):
    prompts = prompts_of(dms, (25, 8))
    with dms.session(2, **CACHE) as session:
        session.append(prompts)
        first = session.generate(5, **GREEDY)
        session.release([0])
        assert session.tokens[0] == []
        report = session.report()
        assert report.seen.tolist() == [0, 12] and report.live[:, 0].sum() == 0
        session.append([prompts[1], []])
        assert session.generate(5, **GREEDY).tokens[0] == first.tokens[1]
        session.release()
        assert session.report().pages.sum() == 0
        with pytest.raises(InputError, match="no row 2"):
            session.release([2])
    for use in (
        lambda: session.append([[1], [2]]),
        lambda: session.generate(1),
        lambda: session.stream(1),
        lambda: session.report(),
        lambda: session.fork(),
        lambda: session.release(),
        lambda: session.tokens,
    ):
        with pytest.raises(InputError, match="this session was closed"):
            use()
    session.close()  # twice does no harm


# Text


def test_text_and_stop_strings(llama):
    tokenizer = llama.tokenizer
    options = GREEDY | CACHE
    out = llama.generate(["Hello", "a b"], 30, **options)
    for row, prompt in enumerate(("Hello", "a b")):
        assert out.text[row] == tokenizer.decode(out.tokens[row])
        assert llama.generate([tokenizer.encode(prompt)], 30, **options).tokens[0] == out.tokens[row]
    text = out.text[0]
    stop = text[7:10]
    cut = llama.generate(["Hello"], 30, **options, stop=["not in there", stop])
    assert cut.finish_reason == ["stop"]
    assert cut.text[0] == text[: text.index(stop)]
    session = llama.session(**CACHE)
    session.append("Hello")
    pieces = list(session.stream(30, **GREEDY, stop=stop))
    assert "".join(piece.text for piece in pieces) == cut.text[0]
    # The history ends with the token that completes the stop string: the device went no further.
    assert [piece.token for piece in pieces] == cut.tokens[0] == out.tokens[0][: len(pieces)]
    assert session.report().seen.tolist() == [len(tokenizer.encode("Hello")) + len(pieces) - 1]
    assert llama.generate(["Hello"], 30, **options, stop=text[-1] * 50).text == [text]


class Bytes:
    """A tokenizer whose tokens are bytes."""

    bos_token_id = None

    def __init__(self, eos=0):
        self.eos_token_ids = frozenset({eos})

    def decode(self, ids, skip_special=True):
        return bytes(i % 256 for i in ids).decode("utf-8", "replace")

    def stream_decoder(self):
        return StreamDecoder(self)


@pytest.mark.parametrize("stop", ["é!", "€", "xy", "aab"])
def test_answers_hold_back(stop):
    """Whatever was given out stays: no half characters, no beginning of a stop string, and nothing after it."""
    for text in ("caf\u00e9?\u00e9!x", "ax\u20acx\u20ac", "xxyxy", "aaab", "x"):
        answer = Answer(Bytes(), [stop, "no such"], 100, "length")
        given = ""
        for byte in text.encode():
            if answer.reason is None:
                given += answer.push(byte)
                assert "\ufffd" not in given and text.startswith(given)
        if answer.reason is None:
            given += answer.end("length")
        assert given == answer.text == text.partition(stop)[0]
        assert answer.reason == ("stop" if stop in text else "length")
    cut = Answer(Bytes(), [], 1, "length")
    assert cut.push("é".encode()[0]) == "\ufffd" and cut.reason == "length"


def test_chat_turns_extend_the_template(llama):
    """The second turn's tokens are what the template writes after the first answer."""
    tokenizer = llama.tokenizer
    session = llama.session(chat=True, **CACHE)
    session.append("Hi")
    first = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert session.tokens == [first]
    answer = session.generate(4, **GREEDY).tokens[0]
    session.append([{"role": "user", "content": "Why?"}])
    rest = tokenizer.encode("<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n", add_bos=False)
    assert session.tokens == [[*first, *answer, *rest]]
    assert llama.generate(["Hi"], 4, **GREEDY, **CACHE, chat=True).tokens == [answer]
    assert llama.generate([[{"role": "user", "content": "Hi"}]], 4, **GREEDY, **CACHE).tokens == [answer]


# Compilations and copies


def test_compilations(llama):
    """100 steps, streamed or not, are one program; prompts of 20 lengths are one for each bucket."""
    options = {"capacity": 248, "page_size": 4}  # used by no other test
    prefills, loops = prefill._cache_size(), decode._cache_size()
    for n in range(27, 67, 2):
        llama.generate(prompts_of(llama, (n,)), 2, **GREEDY, **options)
    assert prefill._cache_size() - prefills == len({32, 48, 64})
    session = llama.session(**options)
    session.append(prompts_of(llama, (33,))[0])
    session.generate(100, **GREEDY)
    for _ in session.stream(20, temperature=[1.0], top_p=0.5, stop="no such", stop_ids=[3]):
        pass
    assert decode._cache_size() - loops == 1


def test_compilations_without_capacity(llama):
    """Prompts of 20 lengths are one program for each bucket also when the pool is made to measure."""
    prefills, loops = prefill._cache_size(), decode._cache_size()
    for n in range(27, 67, 2):
        out = llama.generate(prompts_of(llama, (n,)), 2, **GREEDY, page_size=4)
        assert out.cache.grown == ()
    assert prefill._cache_size() - prefills == len({32, 48, 64})
    assert decode._cache_size() - loops <= len({32, 48, 64})


@pytest.mark.parametrize("tokens", [None, 4, 64])
@pytest.mark.parametrize("policy", ["Dense", "DMS", "H2O"])
def test_the_pool_is_not_copied(dms, policy, tokens):
    """Decoding (None) and chunks of a prompt update the cache in place.

    What XLA needs besides the arguments is far less than the pool.
    """
    lm = {"Dense": dms.with_policy(kvs.Dense()), "DMS": dms, "H2O": dms.with_policy(kvs.H2O(budget=32))}[policy]
    session = lm.session(capacity=128)
    session.append([5, 6, 7])
    turn = session._start(request(lm.config, lm.tokenizer, 1, 4))
    tree = (session.model, turn.request.sampler, session._store().cache)
    model, sampler, cache = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    pages = 100_000  # never allocated, only compiled for
    names = ("k", "v", "expires", "free", *(["statistic"] if cache.statistic is not None else []))
    large = {
        name: jax.ShapeDtypeStruct((pages, *getattr(cache, name).shape[1:]), getattr(cache, name).dtype)
        for name in names
    }
    cache = dataclasses.replace(cache, **large)
    if tokens is None:
        row, step = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
        lowered = decode.lower(model, sampler, State(cache, row, row, None), step)
    else:
        ids, valid = (jax.ShapeDtypeStruct((1, tokens), dtype) for dtype in (jnp.int32, bool))
        lowered = prefill.lower(model, cache, ids, valid)
    memory = lowered.compile().memory_analysis()
    pool = 2 * pages * 64 * lm.config.head_dim * 4
    assert memory.alias_size_in_bytes > pool
    assert memory.temp_size_in_bytes < pool / 50


def test_tied_head_is_transposed_once(llama):
    model = with_head(Model(llama.params, llama.policy, llama.config))
    assert model.params["head"] is with_head(Model(dict(llama.params), kvs.Dense(), llama.config)).params["head"]
    np.testing.assert_array_equal(model.params["head"], decoder.head_kernel(llama.params))


# Reports and capacity


def test_report(dms):
    prompts = prompts_of(dms, (60, 20))
    out = dms.generate(prompts, 10, **GREEDY, **CACHE)
    report, config = out.cache, dms.config
    assert report.seen.tolist() == [69, 29]
    # Against the rule, from the recorded decisions of the whole history.
    histories = [[*prompt, *tokens[:-1]] for prompt, tokens in zip(prompts, out.tokens, strict=True)]
    ids = np.asarray([[*history, *[0] * (69 - len(history))] for history in histories])
    gates = np.asarray(kvs.decision_logits(dms, ids, np.arange(69)[None] < report.seen[:, None]))
    for row, history in enumerate(histories):
        evict = gates[:, row, :, 1 : len(history)] > 0
        age = len(history) - 1 - np.arange(len(history) - 1)
        np.testing.assert_array_equal(report.live[:, row], 1 + (~evict | (age <= dms.policy.window)).sum(-1))
    assert report.dense_nbytes == 98 * config.layers * config.kv_heads * 2 * config.head_dim * 4
    assert report.cr_physical == report.dense_nbytes / report.used
    assert report.used <= report.nbytes
    assert report.cr_nominal > 1.2


def test_streaming_llm_and_the_pool(llama):
    """A cache of 9 tokens: exact, and as small as that, by giving back the surplus or by taking chunks."""
    lm = llama.with_policy(kvs.StreamingLLM(budget=9, sinks=2))
    prompt = prompts_of(lm, (150,))[0]
    whole = lm.session(page_size=4)
    whole.append(prompt)
    entry = 2 * lm.config.head_dim * 4 * lm.config.layers * lm.config.kv_heads
    before = whole.report().nbytes
    assert before < 110 * entry  # room for the window and for BURST tokens to come, in a bucket of pages
    tiny = lm.session(page_size=4, prefill_chunk=16, capacity=32, when_full="error")
    tiny.append(prompt)
    np.testing.assert_array_equal(whole.report().live, 9)
    np.testing.assert_array_equal(tiny.report().live, 9)
    out = whole.generate(90, **GREEDY)
    assert tiny.generate(90, **GREEDY).tokens == out.tokens
    assert_greedy(lm, [prompt], out.tokens)


def test_a_pool_to_measure(dms):
    """Without ``capacity`` no more is allocated than a bucket of what the next tokens may need; growth is counted."""
    prompt = prompts_of(dms, (60,))[0]
    want = dms.generate([prompt], 300, **GREEDY, **CACHE | {"capacity": 400}).tokens
    session = dms.session(page_size=4)
    session.append(prompt)
    heads, sizes = dms.config.layers * dms.config.kv_heads, []
    for n in (0, 60, 120, 120):
        session.generate(n, **GREEDY)
        cache = session._store().cache
        ahead = int(cache.pages_taken().sum()) + heads * -(-BURST // 4)
        assert cache.pages <= 1.5 * ahead
        sizes.append(cache.pages)
    assert session.tokens[0][60:] == want[0]
    report = session.report()
    assert sizes == sorted(sizes) and len(set(sizes)) - 1 == len(report.grown) > 0
    assert report.grown[-1] == report.nbytes


def test_when_full(llama):
    prompt = prompts_of(llama, (40,))[0]
    heads = llama.config.layers * llama.config.kv_heads
    small = CACHE | {"capacity": 48}
    free = llama.generate([prompt], 60, **GREEDY, **CACHE)
    grown = llama.generate([prompt], 60, **GREEDY, **small, when_full="grow")
    assert grown.tokens == free.tokens and grown.cache.pages.sum() == heads * 25
    assert free.cache.grown == () and grown.cache.grown[-1] == grown.cache.nbytes
    session = llama.session(**small, when_full="error")
    session.append(prompt)
    with pytest.raises(RunError, match="the cache is full"):
        session.generate(60, **GREEDY)
    kept = session.tokens[0][40:]
    assert kept == free.tokens[0][:9], "it goes on as long as there is room, and stays exact"
    with pytest.raises(RunError, match="the cache is full"):
        session.append([5] * 60)
    assert session.tokens[0] == [*prompt, *kept]
    trimmed = llama.generate([prompt], 60, **GREEDY, **small, when_full="evict")
    assert len(trimmed.tokens[0]) == 60 and trimmed.cache.trimmed > 0
    assert trimmed.cache.live.sum() + trimmed.cache.trimmed == 99 * heads
    assert trimmed.cache.pages.sum() <= heads * 12
    session = llama.session(**small, when_full="evict")
    session.append(prompt)
    with pytest.raises(RunError, match="nothing outside the window is left"):
        session.append([5] * 60, prefill_chunk=60)
    assert session.tokens == [prompt], "what cannot be made room for changes nothing"
    assert session.generate(5, **GREEDY).tokens[0] == free.tokens[0][:5]
    assert session.report().trimmed == 0
    with pytest.raises(RunError, match="the dense cache is full"):
        llama.session(cache="dense", capacity=16, when_full="error").append(prompt)


@pytest.mark.parametrize("cache", ["dense", "paged"])
def test_mesh(golden_models, llama, cache):
    """Two devices answer as one does; they share a dense cache by KV heads."""
    lm = kvs.load(golden_models / "llama_tied", dtype="float32", mesh=make_mesh(tensor=2))
    prompts, options = prompts_of(llama, (20, 3, 9, 33)), CACHE | {"cache": cache}
    session = lm.session(4, **options)
    session.append(prompts)
    assert session.generate(8, **GREEDY).tokens == llama.generate(prompts, 8, **GREEDY, **options).tokens
    if cache == "dense":
        k = session._store().cache.k
        assert k.addressable_shards[0].data.shape[2] == 1 == lm.config.kv_heads // 2


# Bad input


def test_empty_prompt_starts_from_bos(llama, golden_models):
    bos = llama.tokenizer.bos_token_id
    want = llama.generate([[bos]], 5, **GREEDY, **CACHE).tokens
    for empty in ("", []):
        assert llama.generate([empty], 5, **GREEDY, **CACHE).tokens == want
    session = llama.session(**CACHE)
    assert session.generate(5, **GREEDY).tokens == want
    assert session.tokens == [[bos, *want[0]]]
    qwen = load(golden_models, "qwen3_sharded")
    with pytest.raises(InputError, match="row 1 is empty, and the model has no BOS token"):
        qwen.generate([[5], []], 5)


def test_no_new_tokens(llama):
    """max_new_tokens=0 stores the prompts and reports the cache."""
    out = llama.generate(prompts_of(llama, (20, 1)), 0, **CACHE)
    assert (out.tokens, out.text, out.finish_reason) == ([[], []], ["", ""], ["length", "length"])
    assert out.cache.seen.tolist() == [20, 1]


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([], {}, "prompts is empty"),
        ("text", {}, "prompts must be a list"),
        ([1, 2], {}, "list of prompts"),
        ([{"role": "user", "content": "x"}], {}, "list of prompts"),
        ([[5, 384]], {}, r"384 is out of range \(accepted: 0 to 383\)"),
        ([[-1]], {}, "-1 is out of range"),
        ([[1.5]], {}, "whole numbers"),
        ([[1, [2]]], {}, "whole numbers"),
        ([None], {}, "whole numbers"),
        ([[5]], {"top_p": 0}, "top_p must be above 0"),
        ([[5]], {"top_p": 1.1}, "top_p must be above 0"),
        ([[5]], {"max_new_tokens": -1}, "max_new_tokens"),
        ([[5]], {"max_new_tokens": 2.0}, "max_new_tokens"),
        ([[5]], {"max_new_tokens": [1, 2]}, "max_new_tokens has 2 values for a batch of 1"),
        ([[5]], {"prefill_chunk": 0}, "prefill_chunk"),
        ([[5]], {"page_size": 0}, "page_size"),
        ([[5]], {"capacity": 0}, "capacity"),
        ([[5]], {"capacity": 10**12}, "capacity must be at most 2147483647"),
        ([[5]], {"cache": "disk"}, "cache must be one of paged, dense"),
        ([[5]], {"when_full": "panic"}, "when_full must be one of"),
        ([[5]], {"kv_dtype": "int4"}, "kv_dtype must be one of"),
        ([[5]], {"kv_dtype": "int8", "cache": "dense"}, "dense cache"),
        ([[5]], {"stop": ""}, "stop string"),
        ([[5]], {"stop": [3]}, "stop string"),
        ([[5]], {"stop_ids": [500]}, "500 is out of range"),
        ([[5], [6]], {"stop_ids": [[1]]}, "stop_ids has 1 values for a batch of 2"),
    ],
)
def test_bad_input(llama, prompts, options, words):
    with pytest.raises(InputError, match=words) as caught:
        llama.generate(prompts, **options)
    assert "\n" not in str(caught.value)


def test_more_bad_input(dms, llama):
    knows_more = types.SimpleNamespace(encode=lambda text, add_bos: [5, llama.config.vocab_size])
    with pytest.raises(InputError, match="token ids of row 0: .* is out of range"):
        dataclasses.replace(llama, tokenizer=knows_more).session().append("text")
    with pytest.raises(InputError, match="no tokenizer"):
        dms.generate(["text"])
    with pytest.raises(InputError, match="no tokenizer"):
        dms.generate([[5]], stop="x")
    with pytest.raises(InputError, match="capacity of 4 tokens per head is too small: the newest 5 are never evicted"):
        dms.generate([[5]], capacity=4)
    with pytest.raises(InputError, match="2 rows takes a list of 2"):
        llama.session(2).append("text")
    with pytest.raises(InputError, match="2 rows takes a list of 2"):
        llama.session(2).append([[1]])
    ids = np.ones((1, 6), int)
    with pytest.raises(InputError, match="prefill must be at most 6"):
        dms.replay(ids, prefill=7)
    with pytest.raises(InputError, match="prefill"):
        dms.replay(ids, prefill=-1)
    with pytest.raises(InputError, match="padding between"):
        dms.replay(ids, [[1, 0, 1, 1, 1, 1]], prefill=3)


def test_replay_without_prefill_or_steps(dms):
    ids = np.asarray(prompts_of(dms, (9, 9)))
    options = {"page_size": 4, "capacity": 48}
    whole, steps = dms.replay(ids, **options), dms.replay(ids, prefill=0, **options)
    np.testing.assert_allclose(whole.logits, steps.logits, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(whole.live[0], steps.live[-1])
    assert steps.live.shape[0] == 10 and not steps.live[0].any()

"""lm-evaluation-harness on the library: every answer against lm.logits, through tasks that are made here."""

import dataclasses
import functools
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import kvsparse_jax as kvs
from kvsparse_jax.errors import InputError, RunError
from kvsparse_jax.evaluate import measure
from kvsparse_jax.policies import TOVA, Dense, StreamingLLM
from kvsparse_jax.tokenizer import Tokenizer
from kvsparse_jax.whole import full_hidden

ROOT = Path(__file__).resolve().parent.parent
STREAMING = "streaming:budget=12,sinks=2"
WORDS = "the cat sat on a mat and then it ran off to see what the dog had found in the old red barn by the river"


def harness():
    """The module, where lm_eval is installed."""
    pytest.importorskip("lm_eval")
    from kvsparse_jax.evaluate import harness

    return harness


@pytest.fixture
def make():
    """KVSparse."""
    return harness().KVSparse


@functools.cache
def load(directory):
    return kvs.load(directory / "llama_tied", dtype="float32")


@pytest.fixture
def lm(golden_models):
    return load(golden_models)


@pytest.fixture(scope="module")
def dms(golden_methods, tmp_path_factory):
    """A model that evicts by decisions of its own, with a tokenizer of single characters and no BOS token."""
    characters = sorted({*"abcdefghijklmnopqrstuvwxyz .,"})
    vocab = {"<unk>": 0, "<eos>": 2} | {one: number for number, one in enumerate(characters, 3)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    folder = tmp_path_factory.mktemp("characters")
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "bos_token": None}))
    lm = kvs.load(golden_methods / "3_model" / "adapter", dtype="float32")
    # The stored offset of this model flags nearly nothing of such short texts.
    policy = dataclasses.replace(lm.policy, offset=0.0)
    return dataclasses.replace(lm, tokenizer=Tokenizer.load(folder), policy=policy)


@functools.cache
def manager():
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=False)


def run(model, *configs, **options):
    """simple_evaluate on tasks that are made here."""
    import lm_eval

    return lm_eval.simple_evaluate(
        model=model, tasks=list(configs), task_manager=manager(), bootstrap_iters=0, **options
    )


def task(name, kind, docs, **config):
    def dataset(**_):
        return datasets.DatasetDict({"test": datasets.Dataset.from_list(docs)})

    return {"task": name, "output_type": kind, "custom_dataset": dataset, "test_split": "test", **config}


def asked(*arguments):
    """Requests, as far as a model class looks at them."""
    return [SimpleNamespace(args=one) for one in arguments]


def logits_of(lm, tokens):
    """Logits [T, V] of one sequence, padded to few lengths."""
    size = -(-len(tokens) // 64) * 64
    mask = np.arange(size)[None] < len(tokens)
    ids = np.zeros((1, size), int)
    ids[0, : len(tokens)] = tokens
    return np.asarray(lm.logits(ids, mask), np.float64)[0, : len(tokens)]


def scored(lm, tokens, count):
    """Log-probability of the last tokens after those before them, and whether each is the likeliest."""
    logits = logits_of(lm, tokens)[-count - 1 : -1]
    shifted = logits - logits.max(-1, keepdims=True)
    logprob = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    targets = np.asarray(tokens[-count:])
    return logprob[np.arange(count), targets].sum(), bool((logits.argmax(-1) == targets).all())


def pair(lm, context, continuation):
    """scored() of a continuation: the text is encoded as a whole, spaces between the two belong to the second."""
    text, stripped = context + continuation, context.rstrip()
    tokens = lm.tokenizer.encode(text)
    return scored(lm, tokens, len(tokens) - len(lm.tokenizer.encode(stripped)))


def greedy(lm, prompt, limit):
    """Likeliest tokens by the whole sequence, until the model ends."""
    tokens = []
    while len(tokens) < limit:
        token = int(logits_of(lm, [*prompt, *tokens])[-1].argmax())
        if token in (*lm.config.eos_token_ids, *lm.tokenizer.eos_token_ids):
            break
        tokens.append(token)
    return tokens


def close(found, want):
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in want]
    np.testing.assert_allclose([x for x, _ in found], [x for x, _ in want], rtol=0, atol=2e-4)


# --- the optional dependency ------------------------------------------------------------------------------------------


def python(program):
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_library_does_not_import_the_harness():
    done = python("import sys, kvsparse_jax, kvsparse_jax.evaluate; assert 'lm_eval' not in sys.modules, 'imported'")
    assert done.returncode == 0, done.stderr


def test_without_lm_eval_the_extra_is_named():
    done = python("import sys; sys.modules['lm_eval'] = None; import kvsparse_jax.evaluate.harness")
    assert done.returncode == 1
    wanted = "ImportError: kvsparse_jax.evaluate.harness needs lm_eval: pip install 'kvsparse-jax[harness]'"
    assert done.stderr.splitlines()[-1] == wanted
    assert "During handling" not in done.stderr and "direct cause" not in done.stderr


def test_no_torch_although_it_seems_to_be_installed():
    harness()
    done = python("""
import importlib.abc, importlib.machinery, os, sys, traceback
class Torch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name.split(".")[0] == "torch" else None
    def create_module(self, spec):
        traceback.print_stack(limit=12)
        sys.stderr.flush()
        os._exit(3)
sys.meta_path.insert(0, Torch())
import kvsparse_jax.evaluate.harness
print("lm_eval" in sys.modules, "torch" in sys.modules)
""")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["True", "False"]


# --- log-likelihood ---------------------------------------------------------------------------------------------------

QUESTIONS = [
    {"question": "The cat sat on a", "choices": ["mat", "river and then the barn", "7"], "answer": 0},
    {
        "question": "Then it ran off to see what the old red dog had found",
        "choices": ["in", "by the", "x y"],
        "answer": 2,
    },
    {"question": "?", "choices": ["a", "b", "c"], "answer": 1},
]
CHOICE = {
    "doc_to_text": "{{question}}",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}],
}


@pytest.mark.parametrize("policy", [None, STREAMING])
def test_multiple_choice(lm, golden_models, make, policy):
    """From the command line's arguments: log-likelihoods, accuracy, and what the results say about the run."""
    arguments = f"pretrained={golden_models / 'llama_tied'},batch_size=2,dtype=float32"
    results = run(
        "kvsparse", task("choice", "multiple_choice", QUESTIONS, **CHOICE),
        model_args=arguments + (f",policy={policy}" if policy else ""),
    )  # fmt: skip
    reference = lm if policy is None else lm.with_policy(StreamingLLM(12, 2))
    right = []
    for question, sample in zip(QUESTIONS, results["samples"]["choice"], strict=True):
        want = [pair(reference, question["question"], " " + choice) for choice in question["choices"]]
        close([answer for (answer,) in sample["resps"]], want)
        right.append(int(np.argmax([x for x, _ in want])) == question["answer"])
    assert results["results"]["choice"]["acc,none"] == pytest.approx(np.mean(right))
    assert results["config"]["policy"]["name"] == ("Dense" if policy is None else "StreamingLLM")
    assert results["config"]["model_dtype"] == "float32"
    counts = results["config"]["counts"]
    assert list(counts) == ["loglikelihood"]
    assert counts["loglikelihood"]["requests"] == 9 and counts["loglikelihood"]["truncated"] == 0
    json.dumps(results["config"], allow_nan=False)


def test_the_policy_changes_the_scores(lm, make):
    """Else the test above would hold with a policy that is ignored."""
    request = asked((WORDS, " and the cat"))
    found = {policy: make(lm, policy=policy).loglikelihood(request)[0][0] for policy in ("dense", "masked", STREAMING)}
    assert found["masked"] == pytest.approx(found["dense"], abs=2e-4)
    assert abs(found[STREAMING] - found["dense"]) > 0.01
    close([(found[STREAMING], False)], [pair(lm.with_policy(StreamingLLM(12, 2)), WORDS, " and the cat")])


def test_learned_eviction(dms, make):
    """DMS, whose own decisions are the default, in ragged batches."""
    requests = [(WORDS[:n], WORDS[n : n + k]) for n, k in ((5, 3), (40, 1), (90, 8), (91, 4), (30, 12))]
    model = make(dms, batch_size=2)
    found = model.loglikelihood(asked(*requests))
    close(found, [pair(dms, *one) for one in requests])
    dense = make(dms, policy="dense").loglikelihood(asked(*requests))
    assert max(abs(a - b) for (a, _), (b, _) in zip(found, dense, strict=True)) > 0.01
    assert model.counts["loglikelihood"].cr_entries > 1.2 and model.counts["loglikelihood"].cr_nominal > 1.2


def test_edges_of_the_tokens(lm, dms, make):
    """Spaces between the parts, none at all, no context, a context of spaces; a text that starts with BOS."""
    requests = [("The cat ", "sat"), ("The cat", " sat"), ("The c", "at"), ("<|bos|>The", " cat")]
    model = make(lm)
    close(model.loglikelihood(asked(*requests)), [pair(lm, *one) for one in requests])
    cat = lm.tokenizer.encode("cat", add_bos=False)
    # BOS as the context of nothing, also where the continuation brings its own.
    empty = model.loglikelihood(asked(("", "cat"), ("", "<|bos|>cat")))
    close(empty, [scored(lm, [0, *cat], len(cat))] * 2)
    # No BOS token: the token that ends a text.
    spaces, text = dms.tokenizer.encode(" cat"), dms.tokenizer.encode("cat")
    found = make(dms).loglikelihood(asked(("", "cat"), (" ", "cat")))
    close(found, [scored(dms, [2, *text], 3), scored(dms, [2, *spaces], 4)])


def test_greedy_continuations_are_recognised(lm, make):
    """Of the likeliest continuation, and of one that differs in its last token only."""
    model = make(lm, policy=STREAMING)
    prompt = lm.tokenizer.encode(WORDS)
    best = greedy(model.lm, prompt, 6)
    assert len(best) == 6
    other = [*best[:-1], best[-1] + 1]
    answers = model._loglikelihood_tokens([(("", ""), prompt, best), (("", ""), prompt, other)])
    close(answers, [scored(model.lm, [*prompt, *best], 6), scored(model.lm, [*prompt, *other], 6)])
    assert [is_greedy for _, is_greedy in answers] == [True, False]


def test_long_contexts_are_cut_from_the_left(lm, make, caplog):
    model = make(lm, policy=STREAMING, max_length=32)
    long = " ".join([WORDS] * 3)
    tokens = lm.tokenizer.encode(long + " and so on")
    count = len(tokens) - len(lm.tokenizer.encode(long))
    fits = lm.tokenizer.encode(long)[1:33]
    requests = [(("", ""), tokens[:-count], tokens[-count:]), (("", ""), fits, [7]), (("", ""), fits[:4], [7, 8])]
    found = model._loglikelihood_tokens(requests)
    want = [
        scored(model.lm, tokens[-33:], count),
        scored(model.lm, [*fits, 7], 1),
        scored(model.lm, [*fits[:4], 7, 8], 2),
    ]
    close(found, want)
    assert (model.counts["loglikelihood"].truncated, model.truncated) == (1, 1)
    assert "1 of 3 loglikelihood requests" in caplog.text
    with pytest.raises(InputError, match="a continuation of 33 tokens does not fit into 32"):
        model._loglikelihood_tokens([(("", ""), [5], [7] * 33)])


def test_equal_inputs_share_a_sequence(lm, make):
    """Answers of one token: the context goes through the model once."""
    model = make(lm, batch_size=2)
    requests = [(("", ""), [0, 50, 60, 70], [token]) for token in (9, 10, 11)] + [(("", ""), [0, 50, 60], [70, 9])]
    close(model._loglikelihood_tokens(requests), [scored(lm, [*a, *b], len(b)) for _, a, b in requests])
    assert model.counts["loglikelihood"].requests == 4 and model.counts["loglikelihood"].sequences == 1


def test_few_programs_and_any_batch_size(lm, make):
    """24 lengths, 2 programs; the batches do not show in the answers."""
    rng = np.random.default_rng(0)
    requests = [(("", ""), rng.integers(5, 384, n).tolist(), [9, 10]) for n in range(8, 32)]
    before = full_hidden._cache_size()
    found = make(lm, batch_size=5)._loglikelihood_tokens(requests)
    assert full_hidden._cache_size() - before == 3  # 16, 24 and 32 columns
    close(make(lm, batch_size=3)._loglikelihood_tokens(requests), found)
    close(found, [scored(lm, [*a, *b], 2) for _, a, b in requests])


def test_logits_exist_in_chunks_only(lm, make, monkeypatch):
    """Chunks give the same numbers, and no array has the size of all logits."""
    module = harness()
    request = [(("", ""), [0], lm.tokenizer.encode(" ".join([WORDS] * 2)))]
    whole = make(lm)._loglikelihood_tokens(request)
    monkeypatch.setattr(module, "chunk_of", lambda batch, vocab: 16)
    close(make(lm)._loglikelihood_tokens(request), whole)

    def sizes(jaxpr):
        for equation in jaxpr.eqns:
            yield from (variable.aval.size for variable in equation.outvars)
            for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from sizes(inner)

    index, hidden = jnp.zeros(1024, jnp.int32), jnp.zeros((2, 512, lm.config.hidden_size), jnp.float32)
    traced = jax.make_jaxpr(functools.partial(module._scores, chunk=16))(lm.params, hidden, index, index, index)
    assert 16 * 384 in list(sizes(traced.jaxpr))  # a chunk's logits were seen, so all of them would be
    assert max(sizes(traced.jaxpr)) <= 1024 * lm.config.hidden_size < 1024 * 384


def test_what_is_not_finite_is_an_error(lm, make):
    params = lm.params | {"embed": lm.params["embed"] * float("nan")}
    with pytest.raises(RunError, match="not finite"):
        make(dataclasses.replace(lm, params=params)).loglikelihood(asked(("a", " b")))


# --- rolling log-likelihood -------------------------------------------------------------------------------------------


def rolling(lm, text, length):
    """Every token of a text once: windows as long as the context, the last with as much context as fits."""
    tokens = [0, *lm.tokenizer.encode(text, add_bos=False)]
    total, windows = 0.0, 0
    for start in range(1, len(tokens), length):
        end = min(start + length, len(tokens))
        total += scored(lm, tokens[max(0, end - length - 1) : end], end - start)[0]
        windows += 1
    return total, windows


def test_rolling_perplexity(lm, make):
    docs = [{"text": WORDS[:20]}, {"text": " ".join([WORDS] * 2)}, {"text": WORDS[5:60]}]
    model = make(lm, policy="streaming", budget=12, sinks=2, max_length=48, batch_size=2)
    perplexity = {"metric_list": [{"metric": "word_perplexity"}], "doc_to_text": "", "doc_to_target": "{{text}}"}
    results = run(model, task("perplexity", "loglikelihood_rolling", docs, **perplexity))
    want = [rolling(model.lm, doc["text"], 48) for doc in docs]
    for sample, (total, _) in zip(results["samples"]["perplexity"], want, strict=True):
        assert sample["resps"][0][0] == pytest.approx(total, abs=1e-3)
    words = sum(len(doc["text"].split()) for doc in docs)
    perplexity = math.exp(-sum(total for total, _ in want) / words)
    assert results["results"]["perplexity"]["word_perplexity,none"] == pytest.approx(perplexity, rel=1e-4)
    counts = results["config"]["counts"]["loglikelihood_rolling"]
    assert counts["requests"] == 3 and counts["truncated"] == 0
    assert counts["windows"] == sum(windows for _, windows in want) > 3
    assert make(lm).loglikelihood_rolling(asked(("",))) == [0.0]


def test_compression_of_scores_is_counted(lm, make):
    """StreamingLLM holds min(T, budget) keys of every head, and flags all but the sinks."""
    model = make(lm, policy=STREAMING, batch_size=2)
    lengths = (5, 40, 70)
    model._loglikelihood_tokens([(("", ""), [9] * length, [7]) for length in lengths])
    counts = model.counts["loglikelihood"]
    heads = lm.config.layers * lm.config.kv_heads
    assert (counts.seen, counts.live) == (heads * sum(lengths), heads * (5 + 12 + 12))
    assert counts.cr_entries == pytest.approx(115 / 29)
    assert counts.cr_nominal == pytest.approx(3 / (2 / 5 + 2 / 40 + 2 / 70))
    assert counts.cr_physical is None


# --- generation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["dense", STREAMING])
def test_generate_until(lm, make, policy):
    """Ragged prompts in batches, against the likeliest tokens of whole sequences; cut before the stop string."""
    docs = [{"prompt": WORDS[:n], "answer": "-"} for n in (60, 3, 25)]
    model = make(lm, policy=policy, batch_size=2, page_size=8)
    prompts = [lm.tokenizer.encode(doc["prompt"]) for doc in docs]
    tokens = [greedy(model.lm, prompt, 12) for prompt in prompts]
    texts = [lm.tokenizer.decode(one) for one in tokens]
    stop = texts[0][4:6]  # ends the first answer early
    settings = {"until": [stop, ""], "max_gen_toks": 12, "do_sample": False}
    config = {"doc_to_text": "{{prompt}}", "doc_to_target": "answer", "generation_kwargs": settings}
    results = run(model, task("answers", "generate_until", docs, metric_list=[{"metric": "exact_match"}], **config))
    found = [sample["resps"][0][0] for sample in results["samples"]["answers"]]
    assert found == [text.partition(stop)[0] for text in texts]
    assert found[0] == texts[0][: texts[0].find(stop)] and len(found[0]) < len(texts[0])
    counts = model.counts["generate_until"]
    complete = [len(one) == 12 and stop not in text for one, text in zip(tokens, texts, strict=True)]
    assert (counts.requests, counts.length_limited, counts.truncated) == (3, sum(complete), 0)
    assert results["config"]["counts"]["generate_until"]["cr_physical"] == counts.cr_physical > 0
    assert (counts.cr_entries > 1.5) == (policy == STREAMING)


def test_generation_counts_the_cache(lm, make):
    """The same figures as the report of the one batch that there is."""
    model = make(lm, policy=STREAMING, page_size=8)
    model.generate_until(asked((WORDS, {"max_gen_toks": 8}), (WORDS[:30], {"max_gen_toks": 8})))
    prompts = [lm.tokenizer.encode(WORDS), lm.tokenizer.encode(WORDS[:30])]
    report = model.lm.generate(prompts, 8, temperature=0.0, page_size=8).cache
    counts = model.counts["generate_until"]
    assert counts.cr_physical == pytest.approx(report.cr_physical)
    assert counts.cr_nominal == pytest.approx(report.cr_nominal)
    heads = lm.config.layers * lm.config.kv_heads
    assert (counts.seen, counts.live) == (heads * report.seen.sum(), report.live.sum())
    assert counts.live == heads * sum(min(12, int(n)) for n in report.seen)


def test_long_prompts_are_cut_from_the_left(lm, make):
    model = make(lm, policy=STREAMING, max_length=40)
    (text,) = model.generate_until(asked((WORDS, {"max_gen_toks": 8, "until": []})))
    prompt = lm.tokenizer.encode(WORDS)
    assert len(prompt) > 32
    assert text == lm.tokenizer.decode(greedy(model.lm, prompt[-32:], 8))
    assert text != lm.tokenizer.decode(greedy(model.lm, prompt, 8))
    assert (model.counts["generate_until"].truncated, model.truncated) == (1, 1)
    with pytest.raises(InputError, match="max_gen_toks of 40 leaves no room"):
        model.generate_until(asked(("a", {"max_gen_toks": 40})))


def test_generation_from_nothing_and_special_stops(lm, dms, make):
    """No context starts from the prefix token; a special token among the stop strings ends the answer."""
    (text,) = make(dms, policy="dense").generate_until(asked(("", {"max_gen_toks": 5})))
    assert text == dms.tokenizer.decode(greedy(dms.with_policy(Dense()), [2], 5))
    asks = make(lm)._asked({"until": ["<|im_end|>", "\n"], "max_gen_toks": 5})
    assert (asks.stop, asks.stop_ids) == (("\n",), tuple(lm.tokenizer.encode("<|im_end|>", add_bos=False)))


def test_sampling(lm, make):
    """Follows temperature and seed, whatever the batches are; repeats of a request differ."""
    settings = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 8, "until": []}
    requests = asked((WORDS[:20], settings), (WORDS[:9], settings), (WORDS[:20], settings))
    first = make(lm, batch_size=3).generate_until(requests)
    assert first == make(lm, batch_size=1).generate_until(requests)
    assert first[0] != first[2]
    assert first != make(lm, seed=10).generate_until(requests)
    model = make(lm, max_gen_toks=20)
    assert model._asked({"do_sample": True}).temperature == 1.0
    assert model._asked({"do_sample": False, "temperature": 0.7}).temperature == 0.0
    assert model._asked({"temperature": 0.7}).temperature == 0.7
    nothing = make(lm, max_gen_toks=9)._asked({})
    assert (nothing.temperature, nothing.limit, nothing.stop) == (0.0, 9, ())
    one = model._asked({"do_sample": True, "top_p": 0.9, "top_k": 5, "num_beams": 1, "max_new_tokens": 3})
    assert dict(one.sampling) == {"top_p": 0.9, "top_k": 5, "min_p": 0.0, "repetition_penalty": 1.0}
    assert one.limit == 3
    with pytest.raises(InputError, match="generation has no setting 'num_beams'; there are until, max_gen_toks"):
        model._asked({"num_beams": 4})


def test_policies_that_evict_after_the_prompt_only_generate(lm, make):
    """One pass over a whole sequence shows them nothing but the full cache, which is not to pass for theirs."""
    policy = TOVA(budget=12)
    model = make(lm, policy=policy)
    (text,) = model.generate_until(asked((WORDS, {"max_gen_toks": 8})))
    out = lm.with_policy(policy).generate([lm.tokenizer.encode(WORDS)], 8, temperature=0.0)
    assert [text] == out.text
    ratio = model.counts["generate_until"].cr_entries
    assert ratio > 2 and ratio == pytest.approx(out.cache.seen[0] / out.cache.live.mean())
    assert model.get_model_info()["policy"]["name"] == "TOVA"
    for score, request in ((model.loglikelihood, ("a", " b")), (model.loglikelihood_rolling, (WORDS,))):
        with pytest.raises(InputError, match="TOVA evicts when a prompt has ended"):
            score(asked(request))


# --- chat, caching, arguments -----------------------------------------------------------------------------------------


def test_chat_template(lm, make):
    """The harness renders prompts with it; an answer that is begun stays open."""
    model = make(lm)
    opened = {
        "gen_prefix": "So: ",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
    }
    for prefix, end in (("", "<|im_start|>assistant\n"), ("So:", "<|im_start|>assistant\nSo:")):
        config = opened | {"gen_prefix": prefix, "metric_list": [{"metric": "acc"}]}
        results = run(model, task("chat", "multiple_choice", QUESTIONS[:1], **config), apply_chat_template=True)
        sample = results["samples"]["chat"][0]
        context, continuation = sample["arguments"][0]
        assert context == f"<|bos|><|im_start|>user\nThe cat sat on a<|im_end|>\n{end}"
        close([sample["resps"][0][0]], [pair(lm, context, continuation)])
        assert lm.tokenizer.encode(context)[:2] != [0, 0]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi "}]
    assert model.apply_chat_template(messages, add_generation_prompt=False).endswith("<|im_start|>assistant\nHi")
    assert "im_start" in model.chat_template(True) and model.chat_template(False) is None
    assert "llama_tied" in model.tokenizer_name and "/" not in model.tokenizer_name
    with pytest.raises(InputError, match="'default', not 'rag'"):
        model.chat_template("rag")


def test_answers_reach_the_cache_of_the_harness(lm, make):
    """Each under its request, so that an interrupted run goes on where it was."""
    model, seen = make(lm, batch_size=1), []
    model.set_cache_hook(
        SimpleNamespace(add_partial=lambda kind, request, answer: seen.append((kind, request, answer)))
    )
    pairs = [("The cat", " sat"), ("A", " mat and a dog")]
    texts = [(WORDS[:9],), (WORDS[:5],)]
    prompts = [(text, {"until": ["."], "max_gen_toks": 4}) for (text,) in texts]
    answers = [("loglikelihood", *x) for x in zip(pairs, model.loglikelihood(asked(*pairs)), strict=True)]
    answers += [
        ("loglikelihood_rolling", *x) for x in zip(texts, model.loglikelihood_rolling(asked(*texts)), strict=True)
    ]
    answers += [("generate_until", *x) for x in zip(prompts, model.generate_until(asked(*prompts)), strict=True)]
    assert sorted(seen, key=str) == sorted(answers, key=str) and len(seen) == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "streaming:cr=4"}, "policy 'streaming:cr=4' depends on the length"),
        ({"policy": "nonsense"}, "unknown policy 'nonsense'"),
        ({"policy": "own"}, "the model has no DMS policy"),
        ({"budget": 8}, "budget is a setting of a policy"),
        ({"policy": "streaming", "budget": 8, "window": 2}, "no setting 'window'"),
        ({"polcy": "dense"}, "kvsparse has no setting 'polcy'"),
        ({"max_batch_size": 4}, "leave out max_batch_size"),
        ({"batch_size": "auto"}, "batch_size must be a whole number"),
        ({"batch_size": 0}, "batch_size must be a whole number, at least 1"),
        ({"dtype": "bfloat16"}, "load this one with that dtype"),
        ({"dtype": "int4"}, "dtype must be one of float32, bfloat16, float16, not 'int4'"),
        ({"max_length": 300}, "max_length of 300 tokens is more than the model's context of 256"),
        ({"max_gen_toks": 0}, "max_gen_toks must be a whole number"),
        ({"kv_dtype": "int3"}, "kv_dtype must be one of"),
        ({"prefill_chunk": 0}, "prefill_chunk must be"),
    ],
)
def test_bad_arguments_in_one_line(lm, make, arguments, message):
    with pytest.raises(InputError, match=message) as failure:
        make(lm, **arguments)
    assert "\n" not in str(failure.value)


def test_bad_requests_in_one_line(lm, make):
    model = make(lm)
    with pytest.raises(InputError, match="a continuation is empty, after 'a'"):
        model.loglikelihood(asked(("a", "")))
    with pytest.raises(InputError, match="adds no tokens to its context"):
        model.loglikelihood(asked(("", "<|bos|>")))
    with pytest.raises(InputError, match="the continuation 'b' adds no tokens"):
        model.loglikelihood(asked(("a", "b")))  # one token together
    with pytest.raises(InputError, match="no tokenizer"):
        make(dataclasses.replace(lm, tokenizer=None))
    small = dataclasses.replace(lm, config=dataclasses.replace(lm.config, vocab_size=40))
    with pytest.raises(InputError, match=r"the tokenizer gives token \d+, and the model has 40"):
        make(small).loglikelihood(asked(("Hello", " world")))


def test_policy_arguments_are_put_together(lm, dms, make):
    """The harness divides its arguments at commas."""
    assert make(lm, policy="streaming:budget=9", sinks=3).lm.policy == StreamingLLM(9, 3)
    assert make(lm, policy="streaming", budget=9).lm.policy == StreamingLLM(9, 4)
    assert make(lm, policy=StreamingLLM(7)).lm.policy == StreamingLLM(7)
    assert make(dms).lm.policy is dms.policy
    assert make(dms, policy="own", window=2, offset=1).lm.policy == dataclasses.replace(
        dms.policy, window=2, offset=1.0
    )
    made = make.create_from_arg_string(
        f"pretrained={lm.source},policy=streaming:budget=9,sinks=3,kv_dtype=int8",
        {"batch_size": "4", "device": "cuda:0"},
    )
    assert (made.lm.policy, made.batch_size) == (StreamingLLM(9, 3), 4)
    assert made.get_model_info()["cache_options"] == {"kv_dtype": "int8", "prefill_chunk": None}
    assert measure.describe(made.lm.policy) == made.get_model_info()["policy"]

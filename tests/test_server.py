"""The HTTP server through the official client, EleutherAI's harness, and bodies that nobody should send."""

import asyncio
import contextlib
import http.client
import json
import os
import random
import signal
import socket
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import openai
import pytest
import uvicorn

import kvsparse_jax as kvs
from kvsparse_jax.engine import Engine, EngineOptions, Request
from kvsparse_jax.policies import StreamingLLM
from serve import server as command
from serve.server import Server

GREEDY = {"temperature": 0.0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def lm(golden_models):
    return kvs.load(golden_models / "llama_tied", dtype="float32", policy=StreamingLLM(budget=48, sinks=2))


@pytest.fixture(scope="module")
def server(lm):
    options = EngineOptions(slots=4, pool_bytes=1 << 20, page_size=4, max_tokens=96, prefill_chunk=16)
    served = Server(lm, options, "tiny", "secret")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        config = uvicorn.Config(served.app, log_level="error", timeout_graceful_shutdown=10)
        web = uvicorn.Server(config)
        thread = threading.Thread(target=web.run, kwargs={"sockets": [listening]})
        thread.start()
        while not web.started:
            time.sleep(0.01)
        served.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        yield served
        web.should_exit = True
        thread.join()
    assert not served.worker._thread.is_alive() and not served.worker.failed


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0) as client:
        yield client


def post(server, path, body, key="secret"):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Authorization": f"Bearer {key}"}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def empty(server):
    engine, end = server.worker.engine, time.monotonic() + 30
    while engine.busy or engine.runner.free != engine.runner.pages:
        assert time.monotonic() < end, "pages are still held"
        time.sleep(0.01)


def logprobs_of(lm, ids):
    """Log probabilities [96, V] of what follows each token, by the full-sequence forward."""
    mask = np.arange(96) < len(ids)
    logits = np.asarray(lm.logits(np.where(mask, np.resize(ids, 96), 0)[None], mask[None]))[0].astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_the_official_client(lm, server, client):
    text = "The cache holds what the model has seen"
    ids, values = lm.tokenizer.encode(text), []
    start = len(ids)
    for _ in range(12):
        last = logprobs_of(lm, ids)[len(ids) - 1]
        ids.append(int(last.argmax()))
        values.append(last.max())
    want = lm.tokenizer.decode(ids[start:])
    out = client.completions.create(model="tiny", prompt=text, max_tokens=12, logprobs=2, **GREEDY)
    assert out.choices[0].text == want and out.choices[0].finish_reason == "length"
    np.testing.assert_allclose(out.choices[0].logprobs.token_logprobs, values, atol=2e-4)
    assert [max(top.values()) for top in out.choices[0].logprobs.top_logprobs] == pytest.approx(values, abs=2e-4)
    assert out.usage.completion_tokens == 12 and out.usage.cache["kv_tokens"] > 0
    chunks = list(client.completions.create(model="tiny", prompt=text, max_tokens=12, stream=True, **GREEDY))
    assert "".join(c.choices[0].text for c in chunks) == want and len(chunks) > 1

    messages = [{"role": "user", "content": "hello"}]
    whole = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=8, n=3, seed=7, logprobs=True, top_logprobs=2
    )
    assert [c.index for c in whole.choices] == [0, 1, 2] and len({c.message.content for c in whole.choices}) > 1
    assert all(len(one.top_logprobs) == 2 for c in whole.choices for one in c.logprobs.content)
    parts = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=8, n=3, seed=7, stream=True, stream_options={"include_usage": True}
    )
    texts, usage = ["", "", ""], None
    for part in parts:
        usage = part.usage or usage
        for choice in part.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [c.message.content for c in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert [one.id for one in client.models.list()] == ["tiny"]
    with pytest.raises(openai.BadRequestError, match="more than the 96"):
        client.completions.create(model="tiny", prompt=[5] * 97)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    empty(server)


def test_a_client_that_leaves_frees_its_pages(server, client):
    cancelled = server.worker.engine.metrics.finished.get("cancelled", 0)
    for _ in range(3):
        with client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=90, stream=True, **GREEDY) as stream:
            next(iter(stream))
    empty(server)
    assert server.worker.engine.metrics.finished.get("cancelled", 0) > cancelled
    with urllib.request.urlopen(server.url + "/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    assert "kvsparse_running 0.0" in lines and any(x.startswith("kvsparse_time_per_token_seconds_count") for x in lines)
    with urllib.request.urlopen(server.url + "/health", timeout=10) as answer:
        assert json.load(answer) == {"status": "ok"}


def ended(server):
    """Nothing is left of any request, on the engine's side and on the server's."""
    empty(server)
    end = time.monotonic() + 10
    while server.worker._streams:
        assert time.monotonic() < end, "a stream is still there"
        time.sleep(0.01)
    assert not server.worker.failed and server.worker._thread.is_alive()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_before_the_first_event(server, stream):
    body = json.dumps({"prompt": [5, 6, 7], "max_tokens": 90, "stream": stream, "ignore_eos": True}).encode()
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions", "root_path": "",
        "query_string": b"", "headers": [(b"authorization", b"Bearer secret")], "asgi": {"spec_version": "2.3"},
    }  # fmt: skip
    sent = []

    async def visit():
        messages = [{"type": "http.request", "body": body, "more_body": False}, {"type": "http.disconnect"}]

        async def receive():
            return messages.pop(0)

        async def send(message):
            await asyncio.sleep(0.01)  # the client is gone before the headers are out
            sent.append(message)

        await server.app(scope, receive, send)

    cancelled = server.worker.engine.metrics.finished.get("cancelled", 0)
    asyncio.run(visit())
    ended(server)
    assert server.worker.engine.metrics.finished["cancelled"] == cancelled + 1
    assert not any(b"data:" in message.get("body", b"") for message in sent)


def test_who_gives_up_before_the_number_is_there(server):
    async def visit():
        for _ in range(20):
            waiting = asyncio.ensure_future(server.worker.submit(Request([5, 6, 7], 90)))
            await asyncio.sleep(0)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting

    asyncio.run(visit())
    ended(server)


def test_sigterm_lets_running_requests_end(golden_models, server, monkeypatch):
    """The command itself: a stream goes on to its end, nobody new is let in, and the process ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = f"--policy streaming:budget=48,sinks=2 --dtype float32 --slots 4 --pool {2**-10} --page-size 4".split()
    arguments += f"--max-tokens 96 --prefill-chunk 16 --port {port} --model {golden_models / 'llama_tied'}".split()
    body = {"prompt": [5, 6, 7], "max_tokens": 90, "stream": True, "ignore_eos": True}
    found, signals = {}, []

    def visit():
        end = time.monotonic() + 60
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            try:
                connection.request(
                    "POST", "/v1/completions", json.dumps(body | {"stream_options": {"include_usage": True}})
                )
                break
            except ConnectionRefusedError:
                assert time.monotonic() < end
                time.sleep(0.05)
        answer = connection.getresponse()
        first = answer.readline()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.4)
        with socket.socket() as late:
            found["late"] = late.connect_ex(("127.0.0.1", port))
        found["events"] = [x for x in (first + answer.read()).decode().split("\n\n") if x]
        connection.close()

    step = Engine.step

    def slow(engine):
        time.sleep(0.1)
        return step(engine)

    monkeypatch.setattr(Engine, "step", slow)
    monkeypatch.delenv("KVSPARSE_API_KEY", raising=False)
    before = signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    client = threading.Thread(target=visit)
    client.start()
    try:
        assert command.main(arguments) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
        client.join()
    assert signals == [signal.SIGTERM] and found["late"] != 0
    assert found["events"][-1] == "data: [DONE]"
    usage = json.loads(found["events"][-2].removeprefix("data: "))["usage"]
    assert usage["completion_tokens"] == 90


def test_bodies_that_nobody_should_send(server):
    assert post(server, "/v1/completions", {"prompt": "x"}, key="wrong")[0] == 401
    assert post(server, "/v1/completions", b" " * (5 << 20))[0] == 413
    rng = random.Random(0)
    junk = [None, -1, 1e400, "", [], {}, [[]], [["a"]], [-5], "\ud800", True, 10**30, [1e9], {"role": 3}, "x" * 5000]
    good = {"prompt": [5, 6], "max_tokens": 1, "messages": [{"role": "user", "content": "x"}], "ignore_eos": True}
    names = (
        "prompt messages n stop seed temperature top_p top_k max_tokens logprobs top_logprobs stream priority".split()
    )
    seen = set()
    for _ in range(500):
        path = rng.choice(["/v1/completions", "/v1/chat/completions"])
        body = good | {name: rng.choice(junk) for name in rng.sample(names, rng.randint(1, 4))} | {"stream": False}
        data = json.dumps(body).encode()
        if rng.random() < 0.3:
            at = rng.randrange(len(data))
            data = data[:at] + bytes(rng.randrange(256) for _ in range(3)) + data[at + rng.randint(0, 5) :]
        status, answer = post(server, path, data)
        seen.add(status)
        assert status == 200 or (400 <= status < 500 and set(answer) == {"error"}), (status, data, answer)
        assert "Traceback" not in json.dumps(answer)
    assert {200, 400} <= seen
    empty(server)


def test_the_harness(lm, server, monkeypatch):
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    model = LocalCompletionsAPI(
        base_url=server.url + "/v1/completions",
        model="tiny",
        tokenizer=str(lm.source),
        tokenizer_backend="huggingface",
        max_length=95,
        seed=0,
    )
    context, rest = (
        lm.tokenizer.encode("The cache holds what"),
        lm.tokenizer.encode(" the model has seen", add_bos=False),
    )
    found = model._loglikelihood_tokens([(("a", "b"), context, rest)], disable_tqdm=True)
    logprobs = logprobs_of(lm, context + rest)
    want = sum(logprobs[len(context) + i - 1, token] for i, token in enumerate(rest))
    np.testing.assert_allclose(found[0][0], want, atol=1e-3)
    empty(server)

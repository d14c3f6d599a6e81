"""OpenAI-compatible HTTP server on the compressed cache: ``python -m serve.server --model DIR``."""

import argparse
import asyncio
import contextlib
import functools
import hmac
import itertools
import json
import logging
import os
import queue
import secrets
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Annotated, Any

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import kvsparse_jax as kvs
from kvsparse_jax import cli
from kvsparse_jax.cache.quantise import QUANTISATIONS
from kvsparse_jax.engine import BusyError, Engine, EngineOptions, Histogram, Logprob, Piece, Request, SamplingOptions
from kvsparse_jax.errors import InputError
from kvsparse_jax.lm import LM
from kvsparse_jax.policies import Policy, spec

_log = logging.getLogger(__name__)

MOST_BODY = 4 << 20
"""Bytes of a request's body at most."""

MOST_PROMPTS = 64
"""Prompts of one completion request at most."""


class _Refused(Exception):
    """An answer with a status and one line."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


# What clients send

_Unit = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Ids = list[Annotated[int, Field(strict=True, ge=0)]]


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    n: Annotated[int, Field(ge=1)] = 1
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    seed: int | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = 1.0
    top_p: _Unit | None = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: _Unit = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    ignore_eos: bool = False
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    def sampling(self, logprobs: int | None) -> SamplingOptions:
        """The engine's settings."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingOptions(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=secrets.randbits(32) if self.seed is None else self.seed % 2**32,
            eos=not self.ignore_eos,
            stop=stop,
            logprobs=logprobs,
        )


class _Completion(_Body):
    prompt: str | _Ids | list[str] | list[_Ids]
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False


class _Chat(_Body):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


# The thread that owns the engine


@dataclass
class _Stream:
    """Where the pieces of a request go."""

    loop: asyncio.AbstractEventLoop
    pieces: "asyncio.Queue[Piece | None]" = field(default_factory=asyncio.Queue)

    def put(self, piece: Piece | None) -> None:
        """From the engine's thread; None: the engine has failed. A loop that is gone needs no pieces."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)


class Worker:
    """One thread steps the engine; others hand it requests and cancellations."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.failed = False
        self._inbox: queue.SimpleQueue[tuple[Request, _Stream, Future[int]] | int | None] = queue.SimpleQueue()
        self._streams: dict[int, _Stream] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its step."""
        self._inbox.put(None)
        self._thread.join()

    async def submit(self, request: Request) -> tuple[int, _Stream]:
        """Hands a request over; giving up the wait cancels it. Raises what ``Engine.submit`` raises."""
        stream, future = _Stream(asyncio.get_running_loop()), Future[int]()
        self._inbox.put((request, stream, future))
        if self.failed:  # after the engine's thread has answered all that had come in
            raise _Refused(503, "the engine has failed")
        try:
            return await asyncio.wrap_future(future), stream
        except asyncio.CancelledError:
            future.add_done_callback(self._unwanted)
            raise

    def _unwanted(self, future: "Future[int]") -> None:
        if not future.cancelled() and future.exception() is None:
            self.cancel(future.result())

    def cancel(self, number: int) -> None:
        """Ends a request; one that has ended already stays as it is."""
        self._inbox.put(number)

    def _run(self) -> None:
        try:
            while self._read():
                if not self.engine.busy:
                    continue
                for piece in self.engine.step():
                    stream = self._streams.get(piece.request)
                    if stream is not None:
                        stream.put(piece)
        except Exception:
            _log.exception("the engine has failed")
            self.failed = True
            for stream in self._streams.values():
                stream.put(None)
            with contextlib.suppress(queue.Empty):
                while True:
                    item = self._inbox.get_nowait()
                    if isinstance(item, tuple) and item[2].set_running_or_notify_cancel():
                        item[2].set_exception(_Refused(503, "the engine has failed"))

    def _read(self) -> bool:
        """Takes what has come in, and waits for something when there is nothing to do; False: stop."""
        while True:
            try:
                item = self._inbox.get(block=not self.engine.busy)
            except queue.Empty:
                return True
            if item is None:
                return False
            if isinstance(item, int):
                self.engine.cancel(item)
                self._streams.pop(item, None)
                continue
            request, stream, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                number = self.engine.submit(request)
            except (InputError, BusyError) as error:
                future.set_exception(error)
                continue
            self._streams[number] = stream
            future.set_result(number)


# HTTP


class Server:
    """The application's state and its routes."""

    def __init__(self, lm: LM, options: EngineOptions, name: str, api_key: str | None = None):
        self.lm, self.name, self._key = lm, name, api_key
        self.worker = Worker(lm.engine(options))
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self._guarded(self._completions), methods=["POST"]),
                Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
                Route("/v1/models", self._guarded(self._models)),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ],
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(self.worker.stop)

    def _guarded(self, handler: Any) -> Any:
        """Checks the key; turns what may go wrong into one line of JSON, never a stack trace."""

        async def guarded(http: HTTPRequest) -> Response:
            try:
                given = http.headers.get("authorization", "").removeprefix("Bearer ")
                if self._key is not None and not hmac.compare_digest(given.encode(), self._key.encode()):
                    return _error(401, "a wrong API key, or none")
                return await handler(http)
            except _Refused as error:
                return _error(error.status, str(error))
            except InputError as error:
                return _error(400, str(error))
            except BusyError as error:
                return _error(429, str(error))
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception:
                _log.exception("a request failed")
                return _error(500, "an internal error")

        return guarded

    async def _health(self, http: HTTPRequest) -> Response:
        failed = self.worker.failed
        return JSONResponse({"status": "failed" if failed else "ok"}, 503 if failed else 200)

    async def _models(self, http: HTTPRequest) -> Response:
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "kvsparse-jax"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _metrics(self, http: HTTPRequest) -> Response:
        return Response(generate_latest(self._registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    def collect(self) -> Iterator[Metric]:
        """The engine's figures for Prometheus."""
        engine = self.worker.engine
        m, scheduler, runner = engine.metrics, engine.scheduler, engine.runner
        running = list(scheduler.running)
        held = sum(float(one.lengths.mean()) for one in running)
        gauges = {
            "waiting": ("requests that wait", len(scheduler.waiting)),
            "running": ("sequences that run", len(running)),
            "pages": ("pages in the pool", runner.pages),
            "pages_used": ("pages held", runner.pages - runner.free),
            "compression_ratio": ("tokens seen per entry held", sum(x.fed for x in running) / held if held else 1.0),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"kvsparse_{name}", text, value)
        counters = {
            "requests": ("requests taken", m.requests),
            "prompt_tokens": ("tokens of prompts", m.prompt_tokens),
            "generated_tokens": ("tokens generated", m.generated_tokens),
            "preemptions": ("sequences preempted", m.preemptions),
            "swapped_bytes": ("bytes copied to and from host memory", m.swapped_bytes),
        }
        for name, (text, count) in counters.items():
            yield CounterMetricFamily(f"kvsparse_{name}", text, count)
        ended = CounterMetricFamily("kvsparse_finished", "choices ended", labels=["reason"])
        for reason, count in sorted(m.finished.items()):
            ended.add_metric([reason], count)
        yield ended
        yield _histogram("kvsparse_time_to_first_token_seconds", "from arrival to the first token", m.first_token)
        yield _histogram("kvsparse_time_per_token_seconds", "of a decode step", m.per_token)

    async def _body[B: _Body](self, http: HTTPRequest, kind: type[B]) -> B:
        content = bytearray()
        async for part in http.stream():
            content += part
            if len(content) > MOST_BODY:
                raise _Refused(413, f"the body is larger than {MOST_BODY} bytes")
        try:
            body = kind.model_validate_json(bytes(content))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = ".".join(str(x) for x in first["loc"])
            raise _Refused(400, f"{where}: {first['msg']}" if where else first["msg"]) from None
        if body.model not in (None, self.name):
            raise _Refused(404, f"there is no model {body.model[:80]!r}: this server has {self.name!r}")
        return body

    def _encode(self, text: str) -> list[int]:
        if self.lm.tokenizer is None:
            raise InputError("this model has no tokenizer: give token ids")
        return self.lm.tokenizer.encode(text)

    async def _completions(self, http: HTTPRequest) -> Response:
        body = await self._body(http, _Completion)
        given: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
        prompts = [given] if given and isinstance(given[0], int) else given
        if not 1 <= len(prompts) <= MOST_PROMPTS:
            raise _Refused(400, f"prompt: give 1 to {MOST_PROMPTS} prompts")
        new = 16 if body.max_tokens is None else body.max_tokens
        if new == 0 and not body.echo:
            raise _Refused(400, "max_tokens: 0 needs echo")
        if body.echo and body.stream:
            raise _Refused(400, "echo: not with stream")
        ids = [self._encode(one) if isinstance(one, str) else one for one in prompts]
        requests = [
            Request(
                one,
                new,
                body.n,
                body.sampling(body.logprobs),
                body.priority,
                body.timeout,
                body.logprobs if body.echo else None,
            )
            for one in ids
        ]
        return await self._answer(http, body, requests, _Text(self, body, ids))

    async def _chat(self, http: HTTPRequest) -> Response:
        body = await self._body(http, _Chat)
        if self.lm.tokenizer is None:
            raise InputError("this model has no tokenizer, and so no chat template")
        ids = self.lm.tokenizer.apply_chat_template(body.messages)
        limit = self.worker.engine.runner.max_tokens
        new = body.max_completion_tokens or body.max_tokens or limit
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        request = Request(ids, min(new, limit), body.n, body.sampling(logprobs), body.priority, body.timeout)
        return await self._answer(http, body, [request], _Turn(self, body, [ids]))

    async def _answer(self, http: HTTPRequest, body: _Body, requests: list[Request], shown: "_Shown") -> Response:
        streams: list[tuple[int, _Stream]] = []
        try:
            for request in requests:
                streams.append(await self.worker.submit(request))
        except BaseException:
            self._cancel(streams)
            raise
        if body.stream:
            return _EventStream(self._events(body, streams, shown), functools.partial(self._cancel, streams))
        reading = asyncio.ensure_future(self._all(streams, body.n))
        leaving = asyncio.ensure_future(_left(http))
        try:
            await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise ClientDisconnect
            return JSONResponse(shown.whole(reading.result()))
        finally:
            reading.cancel()
            leaving.cancel()
            self._cancel(streams)

    def _cancel(self, streams: list[tuple[int, _Stream]]) -> None:
        for number, _ in streams:
            self.worker.cancel(number)

    async def _pieces(self, at: int, stream: _Stream, n: int) -> AsyncIterator[tuple[int, Piece]]:
        """The pieces of a request with the index of their choice among those of all prompts."""
        open_choices = n
        while open_choices:
            piece = await stream.pieces.get()
            if piece is None:
                raise _Refused(500, "the engine has failed")
            open_choices -= piece.reason is not None
            yield at * n + piece.index, piece

    async def _all(self, streams: list[tuple[int, _Stream]], n: int) -> list[list[Piece]]:
        found: list[list[Piece]] = [[] for _ in range(len(streams) * n)]
        for at, (_, stream) in enumerate(streams):
            async for index, piece in self._pieces(at, stream, n):
                found[index].append(piece)
        return found

    async def _events(self, body: _Body, streams: list[tuple[int, _Stream]], shown: "_Shown") -> AsyncIterator[str]:
        """Server-sent events."""
        merged: asyncio.Queue[tuple[int, Piece] | BaseException | None] = asyncio.Queue()

        async def forward(at: int, stream: _Stream) -> None:
            try:
                async for pair in self._pieces(at, stream, body.n):
                    merged.put_nowait(pair)
                merged.put_nowait(None)
            except _Refused as error:
                merged.put_nowait(error)

        tasks = [asyncio.ensure_future(forward(at, stream)) for at, (_, stream) in enumerate(streams)]
        last: list[Piece] = []
        try:
            for first in shown.opening(len(streams) * body.n):
                yield _event(first)
            left = len(tasks)
            while left:
                item = await merged.get()
                if item is None:
                    left -= 1
                elif isinstance(item, BaseException):
                    yield _event({"error": {"message": str(item), "type": "server_error"}})
                    return
                else:
                    if item[1].usage is not None:
                        last.append(item[1])
                    yield _event(shown.part(*item))
            if (body.stream_options or {}).get("include_usage"):
                yield _event(shown.frame([]) | {"usage": shown.usage(last)})
            yield "data: [DONE]\n\n"
        finally:
            for task in tasks:
                task.cancel()


class _EventStream(StreamingResponse):
    """Server-sent events; ``end`` is called when they are over, also where the client left before the first."""

    def __init__(self, events: AsyncIterator[str], end: Callable[[], None]):
        super().__init__(events, media_type="text/event-stream")
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


class _Shown:
    """The JSON of an answer; one kind per route."""

    object_whole = object_part = prefix = ""

    def __init__(self, server: Server, body: Any, prompts: list[list[int]]):
        self.server, self.body, self.prompts = server, body, prompts
        self.id, self.created = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time())

    def frame(self, choices: list[dict[str, Any]], whole: bool = False) -> dict[str, Any]:
        """What is around the choices."""
        kind = self.object_whole if whole else self.object_part
        return {"id": self.id, "object": kind, "created": self.created, "model": self.server.name, "choices": choices}

    def usage(self, last: list[Piece]) -> dict[str, Any]:
        """Tokens, and what the cache held."""
        every = [piece.usage for piece in last if piece.usage is not None]
        prompt, new = sum(map(len, self.prompts)), sum(one.completion_tokens for one in every)
        cache = {
            "kv_tokens": sum(one.kv_tokens for one in every),
            "kv_tokens_read": sum(one.kv_read for one in every),
            "pages": sum(one.pages for one in every),
            "compression_ratio": sum(one.cr for one in every) / max(len(every), 1),
        }
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new, "cache": cache}

    def token(self, one: int) -> str:
        """Text of a token by itself."""
        tokenizer = self.server.lm.tokenizer
        return str(one) if tokenizer is None else tokenizer.decode([one], False)

    def opening(self, choices: int) -> list[dict[str, Any]]:
        """Events before the first piece."""
        return []

    def part(self, index: int, piece: Piece) -> dict[str, Any]:
        """An event."""
        raise NotImplementedError

    def choice(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        """A finished choice."""
        raise NotImplementedError

    def whole(self, found: list[list[Piece]]) -> dict[str, Any]:
        """The answer at once."""
        choices = [self.choice(index, pieces) for index, pieces in enumerate(found)]
        return self.frame(choices, True) | {"usage": self.usage([pieces[-1] for pieces in found])}


class _Text(_Shown):
    object_whole = object_part = "text_completion"
    prefix = "cmpl"

    def _logprobs(self, ids: Sequence[int], scores: Sequence[Logprob | None]) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        tokens = [self.token(one) for one in ids]
        # Tokens that are no text by themselves look alike; the most probable one stays.
        top = [None if s is None else {self.token(i): value for i, value in reversed(s.top)} for s in scores]
        return {
            "tokens": tokens,
            "token_logprobs": [None if s is None else s.value for s in scores],
            "top_logprobs": top,
            "text_offset": [0, *itertools.accumulate(map(len, tokens[:-1]))] if tokens else [],
        }

    def part(self, index: int, piece: Piece) -> dict[str, Any]:
        logprobs = self._logprobs(piece.tokens, piece.logprobs)
        choice = {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": _reason(piece)}
        return self.frame([choice])

    def choice(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        ids = [one for piece in pieces for one in piece.tokens]
        scores: list[Logprob | None] = [one for piece in pieces for one in piece.logprobs]
        if self.body.echo:
            prompt = self.prompts[index // self.body.n]
            given = next((piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs is not None), ())
            scores = [None, *(given or [None] * (len(prompt) - 1)), *scores]
            ids = [*prompt, *ids]
            tokenizer = self.server.lm.tokenizer
            text = ("" if tokenizer is None else tokenizer.decode(prompt)) + text
        logprobs = self._logprobs(ids, scores)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": _reason(pieces[-1])}


class _Turn(_Shown):
    object_whole, object_part, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def _one(self, token: int, value: float) -> dict[str, Any]:
        text = self.token(token)
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    def _logprobs(self, pieces: list[Piece]) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        pairs = [pair for piece in pieces for pair in zip(piece.tokens, piece.logprobs, strict=True)]
        content = [
            self._one(token, score.value) | {"top_logprobs": [self._one(*pair) for pair in score.top]}
            for token, score in pairs
        ]
        return {"content": content, "refusal": None}

    def opening(self, choices: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [
            self.frame([{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}]) for i in range(choices)
        ]

    def part(self, index: int, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        logprobs = self._logprobs([piece])
        return self.frame([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": _reason(piece)}])

    def choice(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(piece.text for piece in pieces), "refusal": None}
        logprobs = self._logprobs(pieces)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": _reason(pieces[-1])}


def _reason(piece: Piece) -> str | None:
    """The API knows "stop" and "length"; all other ends cut the answer short."""
    return piece.reason if piece.reason in (None, "stop") else "length"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def _error(status: int, message: str) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    text = " ".join(message.split())[:500].encode("utf-8", "replace").decode()
    return JSONResponse({"error": {"message": text, "type": kind, "param": None, "code": None}}, status)


async def _left(http: HTTPRequest) -> None:
    """Returns when the client has gone."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _histogram(name: str, text: str, found: Histogram) -> HistogramMetricFamily:
    sums = list(itertools.accumulate(found.counts))
    bounds = [*map(str, found.bounds), "+Inf"]
    return HistogramMetricFamily(name, text, list(zip(bounds, sums, strict=True)), found.total)


# The command


def _parser() -> cli.Parser:
    p = cli.parser("python -m serve.server", "Serves a model with the OpenAI API; KVSPARSE_API_KEY sets a key.")
    p.add_argument("--model", required=True, help="hub name, Hugging Face directory or a retrofit's output directory")
    p.add_argument("--name", help="of the model for clients; what --model says by default")
    p.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of weights and cache; default: stored")
    p.add_argument(
        "--policy",
        metavar="NAME:KEY=VALUE",
        help="instead of the model's own: " + "; ".join(kind.help for kind in spec.KINDS.values()),
    )
    p.add_argument("--host", default="127.0.0.1", help="address to listen on; the default is this machine alone")
    p.add_argument("--port", type=int, default=8000, help="port to listen on")
    p.add_argument("--slots", type=int, default=16, unit="sequences", help="most that run at a time")
    p.add_argument("--pool", type=float, default=1.0, unit="GiB", help="of the pool of pages, made once")
    p.add_argument("--page-size", type=int, default=64, unit="tokens", help="slots of a page")
    p.add_argument("--max-tokens", type=int, unit="tokens", help="of a prompt with its answer; default: the context")
    p.add_argument("--prefill-chunk", type=int, default=256, unit="tokens", help="of prompts that a step takes in")
    p.add_argument("--max-waiting", type=int, default=256, unit="requests", help="that may wait; more get status 429")
    p.add_argument("--kv-dtype", choices=QUANTISATIONS, help="8-bit keys and values; the model's dtype by default")
    p.add_argument("--drain", type=int, default=60, unit="s", help="for running requests to end after SIGTERM")
    return p


def _run(args: argparse.Namespace) -> None:
    if not 0 <= args.port < 2**16:
        raise InputError(f"--port must be from 0 to {2**16 - 1}, not {args.port}")
    if not 0 < args.pool < 2**20:
        raise InputError(f"--pool must be above 0 GiB, not {args.pool}")
    options = EngineOptions(
        slots=args.slots,
        pool_bytes=int(args.pool * 2**30),
        page_size=args.page_size,
        max_tokens=args.max_tokens,
        prefill_chunk=args.prefill_chunk,
        max_waiting=args.max_waiting,
        kv_dtype=args.kv_dtype,
    )
    lm = kvs.load(args.model, dtype=args.dtype)
    if args.policy:
        policy = spec.parse(args.policy, lm.policy)
        if not isinstance(policy, Policy):
            raise InputError("a policy with cr= depends on the length of the prompt: give its budget instead")
        lm = lm.with_policy(policy)
    server = Server(lm, options, args.name or args.model, os.environ.get("KVSPARSE_API_KEY") or None)
    uvicorn.run(server.app, host=args.host, port=args.port, timeout_graceful_shutdown=args.drain, log_level="info")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; see :func:`kvsparse_jax.cli.run` for the exit status."""
    return cli.run(_run, argv, parser=_parser())


if __name__ == "__main__":
    sys.exit(main())

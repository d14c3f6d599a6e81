"""Sequences that grow on one compressed cache, turn by turn: append, generate, stream, fork, release."""

import dataclasses
import numbers
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvsparse_jax.cache import capacity
from kvsparse_jax.cache.base import bucket
from kvsparse_jax.cache.report import CacheReport
from kvsparse_jax.cache.spec import CacheSpec
from kvsparse_jax.cache.store import CacheOptions, Store
from kvsparse_jax.errors import InputError, whole
from kvsparse_jax.generation.answer import Answer, FinishReason, GenerateOutput, Piece
from kvsparse_jax.generation.decode import BURST, NOTHING, STOPPED, Model, State, decode, prefill, sweep, with_head
from kvsparse_jax.generation.requests import (
    Prompt,
    Request,
    Settings,
    is_messages,
    is_one,
    needed,
    request,
    token_ids,
)
from kvsparse_jax.tokenizer import Tokenizer

LEAST_BURST = 16
"""Fewest steps at a time while a cache may grow: as long as so many fit, shorter bursts are taken instead."""

LEAST_CHUNK = 16
"""Prompts are padded to lengths of this or more (single tokens aside), so that short ones share a compiled program."""


@dataclass
class _Turn:
    """A generation under way."""

    number: int
    answers: list[Answer]
    request: Request
    present: Array | None
    burst: int


_ANSWER = "[the answer so far]"  # stands for what is in the cache when a template renders the messages after it


class Session:
    """Sequences that grow turn by turn on one compressed cache. Made by ``lm.session()``.

    Appended and generated tokens are seen exactly as if the whole had been one prompt. The history of a row is what was
    appended and every generated token; a stop token that ends a turn is not part of it (a chat template writes it anew
    when the next messages are appended). With a stop string the tokens that complete it are part of the history,
    although the text is cut before it. A row that ended with a stop token stays ended until something is appended.

    Example::

        chat = lm.session(chat=True)
        chat.append("What is a cache?")
        print(chat.generate(max_new_tokens=100).text[0])
        chat.append("And a KV cache?")
        for piece in chat.stream(max_new_tokens=100):
            print(piece.text, end="")
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None,
        batch: int = 1,
        *,
        chat: bool = False,
        prefill_chunk: int | None = None,
        **cache_options: Any,
    ):
        """Args:
            model: the model.
            tokenizer: for text, chat and stop strings; None: token ids only.
            batch: number of rows (B).
            chat: a plain text that is appended is a user's message, not raw text.
            prefill_chunk: most tokens per row that enter the cache at once; None is all that is appended.
            **cache_options: see :class:`CacheOptions`.

        Raises:
            InputError: a setting is out of range.
        """
        self.model, self.tokenizer = with_head(model), tokenizer
        self.batch = whole("batch", batch, 1)
        self.chat = chat
        self.prefill_chunk = None if prefill_chunk is None else whole("prefill_chunk", prefill_chunk, 1)
        self.options = CacheOptions(**cache_options)
        self._open: Store | None = Store(
            CacheSpec.of(model.config, model.policy, model.dtype), self.batch, self.options, model.sharding
        )
        self._cached: list[list[int]] = [[] for _ in range(self.batch)]
        self._pending: list[int | None] = [None] * self.batch
        self._unread: Array | None = None  # what the device emitted and the host has not looked at yet
        self._turn = 0

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def tokens(self) -> list[list[int]]:
        """The history of each row: all tokens appended and generated."""
        self._store()
        self._read()
        return [[*cached, *([] if p is None else [p])] for cached, p in zip(self._cached, self._pending, strict=True)]

    def append(self, content: Prompt | Sequence[Prompt], *, prefill_chunk: int | None = None) -> None:
        """Adds to the sequences, at the speed of a prompt.

        Args:
            content: for one row: text, token ids or chat messages; for a batch: a list with one of these per row, empty
                where nothing is added. Messages open the assistant's next turn, and close its last one.
            prefill_chunk: overrides the session's.

        Raises:
            InputError: the session was closed; wrong content, ids out of range, or more tokens than the context.
            CapacityError: the cache is full and may not grow; the chunks before stay.
        """
        rows: Any = [content] if self.batch == 1 and is_one(content) else content
        is_list = isinstance(rows, Sequence | np.ndarray | jax.Array) and not isinstance(rows, str)
        if not is_list or len(rows) != self.batch:
            raise InputError(f"a session of {self.batch} rows takes a list of {self.batch} contents")
        self._append(rows, BURST, prefill_chunk)

    def _append(self, rows: Sequence[Prompt], ahead: int, prefill_chunk: int | None) -> None:
        """:meth:`append`, and makes room for ``ahead`` more tokens."""
        self._begin()
        vocab = self.model.config.vocab_size  # a tokenizer may know more than the model
        new = [token_ids(self._encoded(one, row), vocab, f"token ids of row {row}") for row, one in enumerate(rows)]
        limit = self.model.config.max_positions
        for row, ids in enumerate(new):
            total = self._length(row) + len(ids)
            if total > limit:
                raise InputError(f"row {row} would have {total} tokens, more than the model's context of {limit}")
        if self.model.policy.prepares:
            first = [ids if self._length(row) == 0 else [] for row, ids in enumerate(new)]
            if any(first):
                policy = self.model.policy.prepare(self.model, self.tokenizer, first)
                self.model = dataclasses.replace(self.model, policy=policy)
        chunk = self.prefill_chunk if prefill_chunk is None else whole("prefill_chunk", prefill_chunk, 1)
        for row, pending in enumerate(self._pending):
            if pending is not None:
                new[row].insert(0, pending)
        self._feed(new, chunk, [min(ahead, limit - self._length(row)) for row in range(self.batch)])

    def generate(self, max_new_tokens: int | Sequence[int] = 256, **settings: Unpack[Settings]) -> GenerateOutput:
        """Continues every row until it ends.

        Args:
            max_new_tokens: most tokens to generate, for all rows or for each.
            **settings: see :class:`Settings`.

        Raises:
            InputError: the session was closed, a setting is out of range, or a row is empty and there is no BOS token.
            CapacityError: the cache is full and may not grow; what was generated so far is in the history.
        """
        return self._finish(request(self.model.config, self.tokenizer, self.batch, max_new_tokens, **settings))

    def stream(
        self, max_new_tokens: int | Sequence[int] = 256, **settings: Unpack[Settings]
    ) -> Generator[Piece, None, None]:
        """:meth:`generate`, token by token: yields a :class:`Piece` per row and step.

        Leaving the loop early leaves the session after the last token that was yielded (in a batch: after the last
        step); it can go on at once. Any other call that changes the session ends the stream.
        """
        turn = self._start(request(self.model.config, self.tokenizer, self.batch, max_new_tokens, **settings))
        turn.burst = 1
        return self._run(turn)

    def fork(self, copies: int = 1) -> "Session":
        """An independent session whose rows are ``copies`` copies of each of this one's, in order: 0, 0, 1, 1, ...

        Pages are copied, none is shared, so both sessions go on as they like. ``lm.session()``, one prompt and
        ``fork(8)`` give eight parallel continuations; give each its own seed.
        """
        store = self._begin()
        rows = [row for row in range(self.batch) for _ in range(whole("copies", copies, 1))]
        options = dataclasses.asdict(self.options)
        model = dataclasses.replace(self.model, policy=self.model.policy.of_rows(rows))
        other = Session(model, self.tokenizer, len(rows), chat=self.chat, prefill_chunk=self.prefill_chunk, **options)
        other._open = store.fork(rows)
        other._cached = [list(self._cached[row]) for row in rows]
        other._pending = [self._pending[row] for row in rows]
        return other

    def report(self) -> CacheReport:
        """The cache's entries and bytes. A row's newest token enters with the next step and is not counted yet."""
        store = self._store()
        self._read()
        return store.report()

    def release(self, rows: Sequence[int] | None = None) -> None:
        """Empties rows (all by default) for new sequences; their pages go back to the session's pool."""
        store = self._begin()
        chosen = set(range(self.batch) if rows is None else rows)
        if wrong := sorted(chosen - set(range(self.batch))):
            raise InputError(f"there is no row {wrong[0]} in a batch of {self.batch}")
        store.release([row in chosen for row in range(self.batch)])
        for row in chosen:
            self._cached[row], self._pending[row] = [], None

    def close(self) -> None:
        """Gives the cache's memory back. The session cannot be used any more."""
        self._open = self._unread = None
        self._turn += 1

    # What the methods share

    def _store(self) -> Store:
        if self._open is None:
            raise InputError("this session was closed and its cache released: open a new one with lm.session()")
        return self._open

    def _begin(self) -> Store:
        """Starts anything that changes the session; a stream under way ends."""
        store = self._store()
        self._read()
        self._turn += 1
        return store

    def _length(self, row: int) -> int:
        return len(self._cached[row]) + (self._pending[row] is not None)

    def _encoded(self, content: Prompt, row: int) -> Sequence[Any]:
        """Token ids of what is appended to a row; ids that were given are not checked."""
        if isinstance(content, str) and self.chat:
            content = [{"role": "user", "content": content}]
        if isinstance(content, str):
            return needed(self.tokenizer).encode(content, add_bos=self._length(row) == 0)
        if not is_messages(content):
            return content
        tokenizer = needed(self.tokenizer)
        if self._length(row) == 0:
            return tokenizer.apply_chat_template(content)
        before = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _ANSWER}]
        text = tokenizer.apply_chat_template([*before, *content], tokenize=False)
        _, found, rest = text.partition(_ANSWER)
        if not found:
            raise InputError("the chat template does not show the assistant's messages: append text or token ids")
        return tokenizer.encode(rest, add_bos=False)

    def _feed(self, rows: Sequence[Sequence[int]], chunk: int | None, ahead: Sequence[int], keep: int = 1) -> None:
        """Stores tokens, and leaves the last of each row pending (``keep=0``: none).

        ``rows`` begin with the pending token. The tokens are aligned to the right, so that all rows end together; a
        short row starts in a later chunk. What the host knows is right after every chunk, should one be interrupted.
        """
        store = self._store()
        counts = [max(len(ids) - keep, 0) for ids in rows]
        longest = max(counts)
        if longest:
            self._store_columns(store, rows, counts, chunk, ahead)
        for row, ids in enumerate(rows):
            self._pending[row] = ids[counts[row]] if counts[row] < len(ids) else None

    def _store_columns(
        self, store: Store, rows: Sequence[Sequence[int]], counts: list[int], chunk: int | None, ahead: Sequence[int]
    ) -> None:
        """Stores the first ``counts`` tokens of ``rows``, chunk by chunk."""
        longest = max(counts)
        whole = longest if chunk is None else chunk
        first = (longest - 1) % whole + 1
        width = 1 if first == 1 else max(LEAST_CHUNK, bucket(first))
        if chunk is not None:
            width = min(width, chunk)
        columns = width + longest - first
        columns_ids, valid = np.zeros((self.batch, columns), np.int32), np.zeros((self.batch, columns), bool)
        for row, count in enumerate(counts):
            columns_ids[row, columns - count :] = rows[row][:count]
            valid[row, columns - count :] = True
        done = [0] * self.batch
        hold = None
        if self.model.policy.holds:
            last = [len(self._cached[row]) + count - 1 for row, count in enumerate(counts)]
            hold = jnp.asarray(last, jnp.int32)
        for start, end in zip((0, *range(width, columns, whole)), range(width, columns + 1, whole), strict=True):
            new = valid[:, start:end].sum(1)
            rest = np.asarray(counts) - done - new + np.asarray(ahead)
            cache = store.reserve(new, new + np.minimum(rest, BURST))
            chunk_ids, chunk_valid = jnp.asarray(columns_ids[:, start:end]), jnp.asarray(valid[:, start:end])
            store.cache = prefill(self.model, cache, chunk_ids, chunk_valid, hold)
            store.took(new)
            for row, count in enumerate(new.tolist()):
                fed, done[row] = done[row], done[row] + count
                self._cached[row].extend(rows[row][fed : done[row]])
                self._pending[row] = rows[row][done[row]] if done[row] < len(rows[row]) else None
        if hold is not None:
            store.cache = sweep(store.reserve())
        store.shrink(ahead)

    def _start(self, asked: Request) -> _Turn:
        """Begins a generation from what is there now."""
        self._begin()
        config, tokenizer = self.model.config, self.tokenizer
        bos = config.bos_token_id if tokenizer is None or tokenizer.bos_token_id is None else tokenizer.bos_token_id
        empty = [row for row in range(self.batch) if self._length(row) == 0]
        if empty and bos is None:
            raise InputError(f"row {empty[0]} is empty, and the model has no BOS token to start from")
        for row in empty:
            self._pending[row] = bos
        answers = []
        for row, limit in enumerate(asked.limits):
            room = config.max_positions - self._length(row)
            at_limit: FinishReason = "length" if limit <= room else "context"
            answer = Answer(tokenizer, asked.strings, min(limit, room), at_limit)
            if self._pending[row] is None or answer.left == 0:
                answer.end("stop" if self._pending[row] is None else at_limit)
            answers.append(answer)
        present = None
        if asked.sampler.settings.penalised:
            seen = np.zeros((self.batch, config.vocab_size), bool)
            for row, tokens in enumerate(self.tokens):
                seen[row, tokens] = True
            present = jax.device_put(jnp.asarray(seen), self.model.sharding)
        return _Turn(self._turn, answers, asked, present, 1 if asked.strings else BURST)

    def _finish(self, asked: Request) -> GenerateOutput:
        """Generates all of an answer."""
        turn = self._start(asked)
        for _ in self._run(turn):
            pass
        return GenerateOutput(
            tokens=[answer.tokens for answer in turn.answers],
            text=None if self.tokenizer is None else [answer.text for answer in turn.answers],
            finish_reason=[answer.reason or answer.at_limit for answer in turn.answers],
            cache=self.report(),
        )

    def _run(self, turn: _Turn) -> Generator[Piece, None, None]:
        """Decodes in bursts until every row has ended."""
        for row, answer in enumerate(turn.answers):
            if answer.reason is not None:
                yield Piece(row, None, "", answer.reason)
        while any(answer.left for answer in turn.answers):
            if turn.number != self._turn:
                raise InputError("the session was used otherwise meanwhile: this stream has ended")
            left = [answer.left for answer in turn.answers]
            self._burst(turn, left)
            emitted = self._read()
            pieces = []
            for row, answer in enumerate(turn.answers):
                for token in emitted[row]:
                    text = answer.end("stop") if token == STOPPED else answer.push(token)
                    pieces.append(Piece(row, None if token == STOPPED else token, text, answer.reason))
            yield from pieces

    def _burst(self, turn: _Turn, left: list[int]) -> None:
        """Lets the device take as many steps as are wanted and sure to fit."""
        store = self._store()
        steps = min(turn.burst, max(left))
        least = min(steps, LEAST_BURST)
        cache = None
        while cache is None:
            try:
                cache = store.reserve([min(least, n) for n in left], [min(BURST, n) for n in left])
            except capacity.CapacityError:
                if least == 1:
                    raise
                least //= 2
        steps = min([steps, *(room for room, n in zip(store.room.tolist(), left, strict=True) if room < n)])
        pending = [0 if p is None else p for p in self._pending]
        state = State(
            cache, jnp.asarray(np.asarray(pending, np.int32)), jnp.asarray(np.asarray(left, np.int32)), turn.present
        )
        emitted, state = decode(self.model, turn.request.sampler, state, jnp.asarray(np.int32(steps)))
        store.cache, turn.present = state.cache, state.present
        self._unread = emitted
        store.took([min(steps, n) for n in left])

    def _read(self) -> list[list[int]]:
        """Waits for what the device emitted: the tokens of each row, then STOPPED if it drew a stop token."""
        if self._unread is None:
            return [[] for _ in range(self.batch)]
        emitted = np.asarray(self._unread)  # an interrupt here changes nothing: the next call reads again
        self._unread = None
        found = [[token for token in row if token != NOTHING] for row in emitted.tolist()]
        for row, tokens in enumerate(found):
            for token in tokens:
                pending = self._pending[row]
                if pending is not None:
                    self._cached[row].append(pending)
                self._pending[row] = None if token == STOPPED else token
        return found


def generate(
    model: Model,
    tokenizer: Tokenizer | None,
    prompts: Sequence[Prompt],
    max_new_tokens: int | Sequence[int] = 256,
    *,
    prefill_chunk: int | None = None,
    chat: bool = False,
    **options: Any,
) -> GenerateOutput:
    """Continues prompts of any lengths on the compressed cache.

    Args:
        model: the model.
        tokenizer: as in :class:`Session`.
        prompts: one entry per row: raw text, token ids, or chat messages. An empty one starts from the BOS token.
        max_new_tokens: most tokens to generate, for all rows or for each. With 0 the prompts are stored and reported.
        prefill_chunk: tokens per row that enter the cache at once: memory then never holds more of a prompt than what
            is left of it, a chunk and the window. None takes the whole prompt.
        chat: texts are users' messages and go through the chat template.
        **options: see :class:`Settings` and :class:`CacheOptions`.

    Raises:
        InputError: no prompts, wrong prompts, a prompt longer than the context, or a setting out of range.
        CapacityError: the cache is full and may not grow.
    """
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence | np.ndarray | jax.Array):
        raise InputError("prompts must be a list with one prompt per row: put a single prompt into a list")
    if len(prompts) == 0:
        raise InputError("prompts is empty: give at least one prompt")
    if isinstance(prompts[0], numbers.Integral | Mapping):
        raise InputError("prompts must be a list of prompts: put this one into a list of its own")
    names = {field.name for field in dataclasses.fields(CacheOptions)}
    cache_options = {name: value for name, value in options.items() if name in names}
    settings = {name: value for name, value in options.items() if name not in names}
    asked = request(model.config, tokenizer, len(prompts), max_new_tokens, **settings)
    with Session(model, tokenizer, len(prompts), chat=chat, prefill_chunk=prefill_chunk, **cache_options) as session:
        session._append(prompts, min(BURST, max(asked.limits)), None)
        out = session._finish(asked)
        if max(asked.limits) == 0:
            rest = [[] if token is None else [token] for token in session._pending]
            session._feed(rest, None, [0] * session.batch, keep=0)
            out = dataclasses.replace(out, cache=session.report())
        return out

"""Training data: documents from files, the hub or the built-in corpus, mixed by weight and packed into rows.

    sources = [Source.parse("chats.jsonl:0.7"), Source.parse("builtin:code:0.3")]
    loader = Loader(sources, tokenizer, batch_size=8, sequence_length=1024, seed=0)
    for batch in loader:
        ...
    state = loader.state()          # JSON-able; a new Loader of the same settings continues after loader.restore(state)

How documents become batches, each step a pure function of the settings and the seed:

1. A source's usable documents (not empty, in the wished split, at most `max_documents`) are permuted for every epoch.
2. Each document is tokenised and cut into pieces of at most a row, each with the BOS token if the document has it. Cuts
   do not depend on packing, so a token's `example_ids` entry and its position name it whatever it is packed with.
3. A source deals out the pieces of several open documents at random, so that no long document fills many batches.
4. Sources take turns: the one that is furthest behind its share of the tokens goes next.
5. Pieces wait in a pool; a row starts with the one that waited longest and is filled with the longest that still fit.
6. A batch is the next `batch_size` rows; of several processes each takes its own slice of them. All of them tokenise
   all documents, since mixing and packing need every length.
"""

import glob
import hashlib
import json
import logging
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol, Self

import numpy as np

from kvsparse_jax import corpus
from kvsparse_jax.corpus import Tokenizer
from kvsparse_jax.errors import InputError

FILE_TYPES = (".json", ".jsonl", ".parquet", ".txt")
TEXT_COLUMNS = ("text", "content", "document", "body", "article", "prompt", "question", "problem", "input")
CHAT_COLUMNS = ("messages", "conversations", "conversation", "chat")
PADDING = -1
"""Segment and example id where a row has no token."""

_BUILTIN = "builtin:"
_HUB = "hub:"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names
_STATE_VERSION = 1
_INT32_MAX = 2**31 - 1

_log = logging.getLogger(__name__)

Content = str | list[dict[str, str]]
Split = Literal["train", "heldout"]


class Batch(NamedTuple):
    """Rows of packed segments, numpy int32 arrays [B, T].

    Attributes:
        input_ids: token ids; 0 where there is no token.
        segment_ids: 0, 1, ... along a row; PADDING where there is no token. Attention must not cross segments.
        positions: 0 at the start of each segment; 0 where there is no token.
        example_ids: stable number of the piece of a document that a token belongs to; PADDING where there is none.
    """

    input_ids: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray
    example_ids: np.ndarray

    @property
    def tokens(self) -> int:
        """Tokens that are no padding."""
        return int(np.count_nonzero(self.segment_ids != PADDING))


@dataclass(frozen=True)
class Source:
    """Where documents come from.

    Attributes:
        path: A file (.json, .jsonl, .parquet, .txt), a glob, a directory of such files or one that
            `datasets.Dataset.save_to_disk` wrote, the name of a dataset on the hub ("hub:" before it if a local path is
            in the way), or "builtin:" and a kind of `kvsparse_jax.corpus`.
        weight: Share of the tokens, relative to the other sources.
        column: Column with the text or the messages; None finds it by its name.
        split: Split of a hub or saved dataset. Local files have none.
        kind: "text", "chat", or "auto", which looks at the column.
        name: Configuration of a hub dataset.
        sample_by: What a document is in a .txt file: the whole "document", a "paragraph" or a "line".
        max_documents: Use the first so many usable documents only.
    """

    path: str
    weight: float = 1.0
    column: str | None = None
    split: str = "train"
    kind: Literal["auto", "text", "chat"] = "auto"
    name: str | None = None
    sample_by: Literal["document", "paragraph", "line"] = "document"
    max_documents: int | None = None

    def __post_init__(self) -> None:
        if not self.path:
            raise InputError("a data source needs a path, the name of a dataset or builtin:KIND")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise InputError(f"the weight of data source {self.path!r} must be positive, got {self.weight:g}")
        for value, known in (
            (self.kind, ("auto", "text", "chat")),
            (self.sample_by, ("document", "paragraph", "line")),
        ):
            if value not in known:
                raise InputError(f"data source {self.path!r}: {value!r} is none of {', '.join(known)}")
        if self.max_documents is not None and self.max_documents < 1:
            raise InputError(f"data source {self.path!r}: max_documents must be at least 1, got {self.max_documents}")

    @classmethod
    def parse(cls, spec: str) -> Self:
        """Reads PATH[#key=value,...][:WEIGHT], such as "a.jsonl:0.3" or "org/name#split=test,column=answer:2".

        Args:
            spec: The text; keys are the other attributes of this class.

        Raises:
            InputError: A weight that is not positive, an unknown key, or a value that does not fit it.
        """
        path, weight, options = spec, 1.0, ""
        if not Path(spec).exists():
            head, _, tail = spec.rpartition(":")
            with suppress(ValueError):  # no number after the last colon: it belongs to the path
                path, weight = (head, float(tail)) if head else (spec, 1.0)
            head, _, tail = path.rpartition("#")
            if head and "=" in tail:
                path, options = head, tail
        known = [f.name for f in fields(cls) if f.name not in ("path", "weight")]
        values: dict[str, Any] = {}
        for option in filter(None, options.split(",")):
            key, _, value = option.partition("=")
            if key not in known or not value:
                raise InputError(
                    f"data source {spec!r}: option {option!r} is not key=value with key in {', '.join(known)}"
                )
            if key == "max_documents" and not value.isdecimal():
                raise InputError(f"data source {spec!r}: max_documents must be a number, got {value!r}")
            values[key] = int(value) if key == "max_documents" else value
        return cls(path, weight, **values)


@dataclass(frozen=True)
class SourceReport:
    """What a source holds and what was used.

    Attributes:
        path: As given.
        column: The column that is read, "messages" or "text" for built-in kinds.
        documents: Documents looked at (all, or up to the last one that `max_documents` allows).
        empty: Documents dropped because they hold no text.
        other_split: Documents that belong to the other split.
        used: Documents that are used.
        share: Wished share of the tokens.
        tokens: Tokens dealt out so far, over all processes.
        epochs: Whole passes so far.
    """

    path: str
    column: str
    documents: int
    empty: int
    other_split: int
    used: int
    share: float
    tokens: int
    epochs: int

    def __str__(self) -> str:
        dropped = [f"{self.empty} empty dropped"] if self.empty else []
        dropped += [f"{self.other_split} in the other split"] if self.other_split else []
        notes = f" ({', '.join(dropped)})" if dropped else ""
        return f"{self.path} [{self.column}]: {self.used} documents{notes}, share {self.share:.3g}"


class Loader(Iterator[Batch]):
    """Deterministic, resumable batches of packed rows. See the module's text for the order.

    Args:
        sources: One or more sources.
        tokenizer: Encodes text and renders conversations.
        batch_size: Rows of the global batch.
        sequence_length: Tokens of a row.
        seed: Decides the order of the documents, and the contents of synthetic built-in ones.
        packing: Fill rows with several segments; otherwise one document per row, cut at the row's end.
        split: "train" or "heldout". Documents of files and hub datasets are assigned by a hash of their content,
            built-in ones by their file.
        heldout_fraction: Share of the documents of files and hub datasets that the held-out split has.
        max_documents: Limit for every source that has none of its own.
        repeat: Go on with the next epoch of a source when one is over. Otherwise each document comes once; the last
            batch is completed with rows of padding.
        process_index: Which slice of each global batch this process gets.
        process_count: Number of slices.
        prefetch: Batches made ahead in a thread; 0 for none. Changes neither batches nor state.
        interleave: Documents of a source that are open at once.
        lookahead: Pieces that wait to be packed; more fill rows better.

    Raises:
        InputError: Bad settings, a path that matches nothing, a file of an unknown type, a column that is not there,
            chat without a chat template, nothing but empty documents, nothing in the wished split.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        sequence_length: int,
        seed: int = 0,
        packing: bool = True,
        split: Split = "train",
        heldout_fraction: float = 0.0,
        max_documents: int | None = None,
        repeat: bool = True,
        process_index: int = 0,
        process_count: int = 1,
        prefetch: int = 0,
        interleave: int = 16,
        lookahead: int = 64,
    ) -> None:
        if not sources:
            raise InputError("no data source was given")
        if batch_size < 1:
            raise InputError(f"the batch size must be at least 1, got {batch_size}")
        if sequence_length < 2:
            raise InputError(f"the sequence length must be at least 2 tokens, got {sequence_length}")
        if process_count < 1 or not 0 <= process_index < process_count:
            raise InputError(f"process {process_index} of {process_count}: the index must be below the count")
        if batch_size % process_count:
            raise InputError(f"a batch of {batch_size} rows cannot be divided over {process_count} processes")
        if split not in corpus.SPLITS:
            raise InputError(f"unknown split {split!r}; there are {', '.join(corpus.SPLITS)}")
        if not 0 <= heldout_fraction < 1:
            raise InputError(f"the held-out fraction must be in [0, 1), got {heldout_fraction:g}")
        if max_documents is not None and max_documents < 1:
            raise InputError(f"max_documents must be at least 1, got {max_documents}")
        if interleave < 1 or lookahead < 1 or prefetch < 0:
            raise InputError("interleave and lookahead must be at least 1 and prefetch at least 0")
        if seed < 0:
            raise InputError(f"the seed must not be negative, got {seed}")
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        self._first_row = process_index * (batch_size // process_count)
        self._local_rows = batch_size // process_count
        self._sources = tuple(sources)
        self._packing = packing
        self._lookahead = lookahead if packing else 1
        bos = tokenizer.encode("", add_bos=True)
        if sequence_length <= len(bos):
            raise InputError(f"the sequence length must be above {len(bos)}, got {sequence_length}")

        tables = [_open(source, tokenizer, seed, split, sequence_length) for source in sources]
        self._streams: list[_Stream] = []
        self._selected: list[_Selection] = []
        for index, (source, table) in enumerate(zip(sources, tables, strict=True)):
            selected = _select(source, table, split, heldout_fraction, source.max_documents or max_documents)
            if selected.empty:
                _log.warning("%s: %d of %d documents are empty and dropped", source.path, selected.empty, selected.seen)
            cut = _Cutter(table, tokenizer, bos, sequence_length, first_only=not packing)
            self._selected.append(selected)
            self._streams.append(_Stream(source.path, index, cut, selected.kept, seed, interleave, repeat))
        # Exact shares: all comparisons are between integers.
        weights = [Fraction(str(source.weight)) for source in sources]
        scale = math.lcm(*(weight.denominator for weight in weights))
        self._weights = [int(weight * scale) for weight in weights]
        self._offsets = [sum(len(table) for table in tables[:index]) for index in range(len(tables))]
        self._pieces_per_document = max(_INT32_MAX // sum(len(table) for table in tables), 1)

        self._config: dict[str, Any] = {
            "seed": seed,
            "batch_size": batch_size,
            "sequence_length": sequence_length,
            "packing": packing,
            "split": split,
            "heldout_fraction": heldout_fraction,
            "repeat": repeat,
            "interleave": interleave,
            "lookahead": lookahead,
            "tokenizer": _digest([str(tokenizer.encode("The 12 quick brown\n\tfoxes, caf\u00e9 (x += 1)."))]),
        }
        for index, (source, table, selected) in enumerate(zip(sources, tables, self._selected, strict=True)):
            # The path is left out: data may move.
            self._config[f"sources.{index}.weight"] = source.weight
            self._config[f"sources.{index}.column"] = table.column
            self._config[f"sources.{index}.documents"] = len(selected.kept)
            self._config[f"sources.{index}.content"] = selected.digest
        self._pool: list[_Piece] = []
        self._taken = [0] * len(sources)
        self._batches = 0
        self._state = self._snapshot()
        self._prefetch = prefetch
        self._executor = ThreadPoolExecutor(1, "data") if prefetch else None
        self._ahead: deque[Future[tuple[Batch | None, dict[str, Any]]]] = deque()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._executor is None:
            batch, self._state = self._produce()
        else:
            while len(self._ahead) <= self._prefetch:
                self._ahead.append(self._executor.submit(self._produce))
            batch, self._state = self._ahead.popleft().result()
        if batch is None:
            raise StopIteration
        return batch

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops the prefetching thread; batches can still be taken, made on demand."""
        if self._executor is not None:
            state = self._state
            self._settle()
            self._executor.shutdown()
            self._executor = None
            self._load(state)

    def report(self) -> list[SourceReport]:
        """What each source holds and how much of it was dealt out; `tokens` and `epochs` as of `state()`."""
        total = sum(self._weights)
        return [
            SourceReport(
                path=source.path,
                column=stream.cut.table.column,
                documents=selected.seen,
                empty=selected.empty,
                other_split=selected.other,
                used=len(selected.kept),
                share=weight / total,
                tokens=self._state["taken"][index],
                epochs=self._state["streams"][index]["epoch"],
            )
            for index, (source, stream, selected, weight) in enumerate(
                zip(self._sources, self._streams, self._selected, self._weights, strict=True)
            )
        ]

    def state(self) -> dict[str, Any]:
        """Where the loader stands after the batches handed out so far; plain JSON, equal on all processes."""
        return json.loads(json.dumps(self._state))

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues after the batches that were handed out when `state` was taken, on any number of processes.

        Args:
            state: What `state()` returned.

        Raises:
            InputError: The state is of a loader with other settings or other data; the differences are listed.
        """
        if state.get("version") != _STATE_VERSION:
            raise InputError(f"the data state has version {state.get('version')}, this code reads {_STATE_VERSION}")
        theirs = state["config"]
        changed = [
            f"{key} {theirs.get(key, 'missing')} -> {self._config.get(key, 'missing')}"
            for key in sorted(theirs.keys() | self._config.keys())
            if theirs.get(key) != self._config.get(key)
        ]
        if changed:
            raise InputError(f"the data state is of a different configuration: {'; '.join(changed)}")
        self._settle()
        self._load(json.loads(json.dumps(dict(state))))

    def _settle(self) -> None:
        """Lets the prefetching thread finish and forgets what it made."""
        for future in self._ahead:
            future.cancel()
        wait(self._ahead)
        self._ahead.clear()

    def _snapshot(self) -> dict[str, Any]:
        return {
            "version": _STATE_VERSION,
            "config": self._config,
            "batches": self._batches,
            "taken": list(self._taken),
            "streams": [stream.state() for stream in self._streams],
            "pool": [[piece.source, piece.document, piece.number] for piece in self._pool],
        }

    def _load(self, state: dict[str, Any]) -> None:
        self._state = state
        self._batches = state["batches"]
        self._taken = list(state["taken"])
        for stream, position in zip(self._streams, state["streams"], strict=True):
            stream.restore(position)
        self._pool = [self._streams[source].piece(document, number) for source, document, number in state["pool"]]

    def _produce(self) -> tuple[Batch | None, dict[str, Any]]:
        """The next batch, None at the end, and the state after it."""
        rows: list[list[_Piece]] = []
        while len(rows) < self.batch_size and (row := self._row()):
            rows.append(row)
        if not rows:
            return None, self._snapshot()
        self._batches += 1
        return self._fill(rows[self._first_row : self._first_row + self._local_rows]), self._snapshot()

    def _row(self) -> "list[_Piece]":
        """The pieces of the next row; none at the end."""
        self._top_up()
        if not self._pool:
            return []
        row = [self._pool.pop(0)]
        room = self.sequence_length - len(row[0].tokens)
        while self._packing and room > 0:
            self._top_up()
            # max takes the first of equals, which is the one that waited longest
            best = max((p for p in self._pool if len(p.tokens) <= room), key=lambda p: len(p.tokens), default=None)
            if best is None:
                break
            self._pool = [p for p in self._pool if p is not best]
            row.append(best)
            room -= len(best.tokens)
        return row

    def _top_up(self) -> None:
        """Draws pieces until `lookahead` wait."""
        while len(self._pool) < self._lookahead and (piece := self._draw()):
            self._pool.append(piece)

    def _draw(self) -> "_Piece | None":
        """The next piece of the source that is furthest behind its share; None when all are exhausted."""
        waiting = set(range(len(self._streams)))
        while waiting:
            total = sum(self._taken)
            everything = sum(self._weights)
            index = max(waiting, key=lambda i: (self._weights[i] * total - self._taken[i] * everything, -i))
            piece = self._streams[index].next()
            if piece is not None:
                self._taken[index] += len(piece.tokens)
                return piece
            waiting.discard(index)
        return None

    def _fill(self, rows: "list[list[_Piece]]") -> Batch:
        """Arrays of this process's rows; those that are missing at the very end are padding."""
        shape = (self._local_rows, self.sequence_length)
        ids, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        segments, examples = np.full(shape, PADDING, np.int32), np.full(shape, PADDING, np.int32)
        for r, row in enumerate(rows):
            start = 0
            for s, piece in enumerate(row):
                stop = start + len(piece.tokens)
                ids[r, start:stop] = piece.tokens
                segments[r, start:stop] = s
                positions[r, start:stop] = np.arange(stop - start)
                examples[r, start:stop] = self._example(piece)
                start = stop
        return Batch(ids, segments, positions, examples)

    def _example(self, piece: "_Piece") -> int:
        """Stable number of a piece, in the order (source, document, piece).

        Each document has the same span of numbers. A document with more pieces than that (only possible with
        hundreds of millions of documents) reuses those of the following ones.
        """
        document = self._offsets[piece.source] + piece.document
        return (document * self._pieces_per_document + piece.number) % _INT32_MAX


# --- pieces ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Piece:
    source: int
    document: int
    number: int
    tokens: np.ndarray


@dataclass
class _Cutter:
    """Cuts the documents of a table into pieces of at most a row."""

    table: "_Table"
    tokenizer: Tokenizer
    bos: list[int]
    length: int
    first_only: bool

    def __call__(self, document: int) -> list[np.ndarray]:
        """The pieces of a document, int32; none when it has no token but BOS."""
        try:
            content = self.table.content(document)
            if isinstance(content, str):
                ids = self.tokenizer.encode(content, add_bos=True)
            else:
                # Both arguments are spelt out: implementations differ in what they take for granted.
                ids = list(self.tokenizer.apply_chat_template(content, add_generation_prompt=False, tokenize=True))
        except UnicodeDecodeError as error:
            raise InputError(f"{self.table.path}, document {document} is not UTF-8 text") from error
        except InputError as error:
            raise InputError(f"{self.table.path}, document {document}: {error}") from error
        # A piece from the middle starts as the first one does: models expect their BOS.
        head = self.bos if self.bos and ids[: len(self.bos)] == self.bos else []
        body = ids[len(head) :]
        step = self.length - len(head)
        stop = min(step, len(body)) if self.first_only else len(body)
        return [np.asarray(head + body[start : start + step], np.int32) for start in range(0, stop, step)]


class _Stream:
    """The pieces of one source, epoch after epoch; where it stands is a few numbers."""

    def __init__(
        self, path: str, index: int, cut: _Cutter, kept: np.ndarray, seed: int, interleave: int, repeat: bool
    ) -> None:
        self.cut = cut
        self._path = path
        self._index = index
        self._kept = kept
        self._seed = seed
        self._interleave = 1 if cut.first_only else interleave
        self._repeat = repeat
        self._cache: dict[int, list[np.ndarray]] = {}
        self.restore({"epoch": 0, "started": 0, "dealt": 0, "open": []})

    def state(self) -> dict[str, Any]:
        """The position: epoch, documents opened and pieces dealt in it, and the next piece of every open document."""
        opened = [list(lane) for lane in self._open]
        return {"epoch": self._epoch, "started": self._started, "dealt": self._dealt, "open": opened}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._epoch = int(state["epoch"])
        self._started = int(state["started"])
        self._dealt = int(state["dealt"])
        self._open = [list(lane) for lane in state["open"]]
        self._order = self._permutation()
        self._cache.clear()

    def piece(self, document: int, number: int) -> _Piece:
        """One piece by name."""
        return _Piece(self._index, document, number, self._pieces(document)[number])

    def next(self) -> _Piece | None:
        """The next piece; None when there is no further epoch."""
        while True:
            while len(self._open) < self._interleave and self._started < len(self._order):
                document = int(self._order[self._started])
                self._started += 1
                if self._pieces(document):
                    self._open.append([document, 0])
                else:
                    del self._cache[document]
            if self._open:
                break
            if not self._dealt:
                raise InputError(f"all documents of {self._path} are empty after tokenisation")
            if not self._repeat:
                return None
            self._epoch, self._started, self._dealt = self._epoch + 1, 0, 0
            self._order = self._permutation()
        lane = self._number("lane", self._dealt) % len(self._open)
        document, number = self._open[lane]
        found = self.piece(document, number)
        if number + 1 < len(self._pieces(document)):
            self._open[lane][1] += 1
        else:
            del self._open[lane], self._cache[document]
        self._dealt += 1
        return found

    def _pieces(self, document: int) -> list[np.ndarray]:
        if document not in self._cache:
            self._cache[document] = self.cut(document)
        return self._cache[document]

    def _number(self, *what: Any) -> int:
        text = f"{self._seed}/{self._index}/{self._epoch}/{'/'.join(map(str, what))}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")

    def _permutation(self) -> np.ndarray:
        """The documents in the order of this epoch, from raw bits: numpy keeps those the same in all versions."""
        bits = np.random.PCG64(self._number("order")).random_raw(len(self._kept))
        return self._kept[np.argsort(bits, kind="stable")]


# --- documents -------------------------------------------------------------------------------------------------------


class _Table(Protocol):
    """Documents by number."""

    path: str
    column: str
    builtin: bool

    def __len__(self) -> int: ...

    def content(self, index: int) -> Content: ...

    def contents(self) -> Iterator[Content]:
        """All of them, in order."""
        ...


@dataclass
class _Builtin:
    path: str
    documents: Sequence[corpus.Document]
    column: str
    builtin: bool = True

    def __len__(self) -> int:
        return len(self.documents)

    def content(self, index: int) -> Content:
        return self.documents[index].content

    def contents(self) -> Iterator[Content]:
        return (self.content(index) for index in range(len(self)))


@dataclass
class _Column:
    """One column of a dataset, or of several one after the other."""

    path: str
    parts: list[Any]
    column: str
    chat: bool
    builtin: bool = False
    _starts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.parts = [part.select_columns([self.column]) for part in self.parts]
        self._starts = [0]
        for part in self.parts:
            self._starts.append(self._starts[-1] + len(part))

    def __len__(self) -> int:
        return self._starts[-1]

    def content(self, index: int) -> Content:
        part = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._plain(self.parts[part][index - self._starts[part]][self.column], index)

    def contents(self) -> Iterator[Content]:
        index = 0
        try:
            for part in self.parts:
                for rows in part.iter(batch_size=1000):
                    for value in rows[self.column]:
                        yield self._plain(value, index)
                        index += 1
        except UnicodeDecodeError as error:  # found when a batch is read, so not known for which of its documents
            raise InputError(f"{self.path} is not UTF-8 text, at or after document {index}") from error

    def _plain(self, value: Any, index: int) -> Content:
        where = f"{self.path}, document {index}, column {self.column!r}"
        if self.chat:
            return _messages(value, where)
        if value is not None and not isinstance(value, str):
            raise InputError(f"{where}: expected text, found {type(value).__name__}")
        return value or ""


def _messages(value: Any, where: str) -> list[dict[str, str]]:
    """Chat messages as role and content, from the usual forms; empty for a missing conversation.

    Raises:
        InputError: The value is no list of messages, or a message has no role.
    """
    if isinstance(value, Mapping):  # a column of structs of lists
        value = [dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True)]
    if value is not None and not isinstance(value, Sequence) or isinstance(value, str):
        raise InputError(f"{where}: expected a list of messages, found {type(value).__name__}")
    found = []
    for message in value or ():
        if not isinstance(message, Mapping):
            raise InputError(f"{where}: expected messages with role and content, found {type(message).__name__}")
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if isinstance(content, Sequence) and not isinstance(content, str):
            parts = [part for part in content if isinstance(part, Mapping)]
            content = "".join(str(part.get("text") or "") for part in parts)
        if not isinstance(role, str) or not (content is None or isinstance(content, str)):
            keys = ", ".join(map(str, message)) or "none"
            raise InputError(f"{where}: a message needs text in role and content (or from and value); its keys: {keys}")
        found.append({"role": _ROLES.get(role, role), "content": content or ""})
    return found


def _is_empty(content: Content) -> bool:
    if isinstance(content, str):
        return not content.strip()
    return not any(message["content"].strip() for message in content)


class _Selection(NamedTuple):
    kept: np.ndarray  # [N] int64, numbers of the documents to use
    seen: int
    empty: int
    other: int
    digest: str


def _select(source: Source, table: _Table, split: Split, fraction: float, limit: int | None) -> _Selection:
    """Which documents of a table to use."""
    if table.builtin:
        # Split by file already, and never empty; synthetic ones are not made before they are needed.
        count = min(len(table), limit or len(table))
        natural = source.path.removeprefix(_BUILTIN) in corpus.NATURAL_KINDS
        looked_at = range(count) if natural else (0, count - 1)
        return _Selection(np.arange(count), count, 0, 0, _digest(str(table.content(i)) for i in looked_at))
    if split == "heldout" and not fraction:
        raise InputError(f"{source.path} has no held-out split: the held-out fraction is 0")
    kept: list[int] = []
    hashes = hashlib.blake2b(digest_size=8)
    empty = other = seen = 0
    for seen, content in enumerate(table.contents(), start=1):
        if _is_empty(content):
            empty += 1
            continue
        digest = hashlib.blake2b(
            (content if isinstance(content, str) else json.dumps(content)).encode(), digest_size=8
        ).digest()
        if fraction and (int.from_bytes(digest, "big") < fraction * 2**64) != (split == "heldout"):
            other += 1
            continue
        kept.append(seen - 1)
        hashes.update(digest)
        if len(kept) == limit:
            break
    if not kept:
        if not seen:
            raise InputError(f"{source.path} holds no documents")
        if empty == seen:
            raise InputError(f"all {seen} documents of {source.path} are empty (column {table.column!r})")
        raise InputError(
            f"none of the {seen} documents of {source.path} is in the {split} split (held out: {fraction:g})"
        )
    return _Selection(np.asarray(kept, np.int64), seen, empty, other, hashes.hexdigest())


def _digest(texts: Iterable[str]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for text in texts:
        found.update(text.encode())
    return found.hexdigest()


# --- opening sources -------------------------------------------------------------------------------------------------


def _open(source: Source, tokenizer: Tokenizer, seed: int, split: Split, length: int) -> _Table:
    """The documents of a source, not yet selected."""
    table: _Table
    if source.path.startswith(_BUILTIN):
        documents = corpus.documents(
            source.path.removeprefix(_BUILTIN), split, seed, tokens=length, measure=corpus.counter(tokenizer)
        )
        chat = documents[0].messages is not None
        table = _Builtin(source.path, documents, "messages" if chat else "text")
    else:
        parts = _datasets(source)
        try:
            column, chat = _column(source, parts)
        except UnicodeDecodeError as error:
            raise InputError(f"{source.path} is not UTF-8 text") from error
        table = _Column(source.path, parts, column, chat)
    if chat and not tokenizer.has_chat_template:
        hint = "" if table.builtin else "; name a text column (#column=NAME) or use a model with one"
        raise InputError(
            f"{source.path} is chat (column {table.column!r}) and the tokenizer has no chat template{hint}"
        )
    return table


def _column(source: Source, parts: list[Any]) -> tuple[str, bool]:
    """The column to read and whether it holds conversations."""
    shared = [c for c in parts[0].column_names if all(c in part.column_names for part in parts)]
    listed = ", ".join(shared) or "none"
    kinds = {name: _column_kind(parts, name) for name in shared}
    if source.column is not None:
        if source.column not in shared:
            raise InputError(f"{source.path} has no column {source.column!r}; columns: {listed}")
        column = source.column
    else:
        candidates = [c for c in CHAT_COLUMNS if kinds.get(c) == "chat"] if source.kind != "text" else []
        candidates += [c for c in TEXT_COLUMNS if kinds.get(c) == "text"] if source.kind != "chat" else []
        wished = ("text", "chat") if source.kind == "auto" else (source.kind,)
        usable = [c for c in shared if kinds[c] in wished]
        if not candidates and len(usable) == 1:
            candidates = usable
        if not candidates:
            what = {"auto": "text or chat", "text": "text", "chat": "chat"}[source.kind]
            raise InputError(f"{source.path} has no {what} column that can be told by its name; columns: {listed}")
        column = candidates[0]
    kind = kinds[column]
    if kind == "other" or source.kind not in ("auto", kind):
        wished_kind = "text or a list of messages" if source.kind == "auto" else source.kind
        raise InputError(f"column {column!r} of {source.path} does not hold {wished_kind}; columns: {listed}")
    return column, kind == "chat"


def _column_kind(parts: list[Any], name: str) -> Literal["text", "chat", "other"]:
    """What a column holds, judged by its first value that is there."""
    for part in parts:
        for rows in part.select_columns([name]).iter(batch_size=100):
            for value in rows[name]:
                if isinstance(value, str):
                    return "text"
                if isinstance(value, Mapping) and (("role" in value) or ("from" in value)):
                    return "chat"
                if isinstance(value, list) and value:
                    keys = set(value[0]) if isinstance(value[0], Mapping) else set()
                    return "chat" if keys & {"role", "from"} else "other"
                if value is not None and value != []:
                    return "other"
    # Nothing but missing values: the name decides, and the documents count as empty.
    return "chat" if name in CHAT_COLUMNS else "text"


def _datasets(source: Source) -> list[Any]:
    """The dataset of a source, in parts where files of several types belong to it."""
    import datasets  # type: ignore[import-untyped] # here, because it takes most of a second

    path = Path(source.path).expanduser()
    with _no_bars(datasets):
        if source.path.startswith(_HUB):
            return [_hub(datasets, source, source.path.removeprefix(_HUB))]
        if path.is_dir() and any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
            return [_saved(datasets, source, path)]
        files = _files(source, path)
        if files is None:
            return [_hub(datasets, source, source.path)]
        readers: dict[str, Callable[[list[str]], Any]] = {
            "json": lambda names: datasets.Dataset.from_json(names),
            "parquet": lambda names: datasets.Dataset.from_parquet(names),
            "txt": lambda names: datasets.Dataset.from_text(names, sample_by=source.sample_by),
        }
        groups: dict[str, list[str]] = {}
        for file in files:
            if file.stat().st_size:  # readers stumble over empty files
                groups.setdefault(file.suffix.lower()[1:].replace("jsonl", "json"), []).append(str(file))
        if not groups:
            raise InputError(f"all documents of {source.path} are empty: {len(files)} file(s) without content")
        parts = []
        for kind, names in sorted(groups.items()):
            try:
                parts.append(readers[kind](names))
            except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
                shown = names[0] if len(names) == 1 else f"{len(names)} {kind} files of {source.path}"
                raise InputError(f"cannot read {shown}: {_one_line(error.__cause__ or error)}") from error
        return parts


def _files(source: Source, path: Path) -> list[Path] | None:
    """The local files of a source, sorted; None when it is a name for the hub."""
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and p.suffix.lower() in FILE_TYPES)
        if not files:
            raise InputError(f"{source.path} is a directory without data files ({', '.join(FILE_TYPES)})")
    else:
        files = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())
        # A name without a local parent folder and without a file's ending may be a dataset on the hub.
        hub = _HUB_NAME.fullmatch(source.path) and path.suffix.lower() not in FILE_TYPES
        if not files and hub and not (path.parent != Path(".") and path.parent.exists()):
            return None
        if not files:
            raise InputError(
                f"{source.path} matches nothing; accepted are files ({', '.join(FILE_TYPES)}), globs and directories "
                f"of them, hub names (hub:ORG/NAME) and builtin:KIND (KIND: {', '.join(corpus.KINDS)})"
            )
    for file in files:
        if file.suffix.lower() not in FILE_TYPES:
            raise InputError(f"{file} is of an unknown type; accepted are {', '.join(FILE_TYPES)}")
    return files


def _hub(datasets: Any, source: Source, name: str) -> Any:
    try:
        found = datasets.load_dataset(name, source.name, split=source.split)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise InputError(
            f"{source.path} is no local file, and the hub gives no dataset {name!r}: {_one_line(error)}"
        ) from error
    return found


def _saved(datasets: Any, source: Source, path: Path) -> Any:
    try:
        found = datasets.load_from_disk(str(path))
    except (datasets.exceptions.DatasetsError, OSError, ValueError, KeyError) as error:
        raise InputError(f"cannot read the saved dataset {source.path}: {_one_line(error)}") from error
    if isinstance(found, datasets.DatasetDict):
        if source.split not in found:
            raise InputError(f"{source.path} has no split {source.split!r}; splits: {', '.join(found)}")
        found = found[source.split]
    return found


@contextmanager
def _no_bars(datasets: Any) -> Iterator[None]:
    """Without the progress bars and the error log of `datasets`; errors are reported by whoever catches them."""
    quiet = datasets.utils.are_progress_bars_disabled()
    verbosity = datasets.utils.logging.get_verbosity()
    datasets.utils.disable_progress_bars()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.utils.logging.set_verbosity(verbosity)
        if not quiet:
            datasets.utils.enable_progress_bars()


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."

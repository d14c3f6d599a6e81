"""Token rows that are evaluated together: built-in held-out text, or one's own files."""

import glob
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvsparse_jax import corpus
from kvsparse_jax.errors import InputError
from kvsparse_jax.tokenizer import Tokenizer

DEFAULT_KINDS = ("code", "manuals", "readme", "headers", "data")


@dataclass(frozen=True)
class Sequences:
    """Token rows that are evaluated together, as one context length.

    Attributes:
        ids: [N, T] integers.
        kinds: N labels of what each row is.
        mask: [N, T] bool, false at padding (left or right); None: no padding.
    """

    ids: np.ndarray
    kinds: tuple[str, ...]
    mask: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.ids.ndim != 2 or self.ids.size == 0 or len(self.kinds) != len(self.ids):
            raise InputError(f"sequences must be [N, T] with N kinds, not {list(self.ids.shape)} and {len(self.kinds)}")
        if self.mask is None:
            return
        if self.mask.shape != self.ids.shape:
            raise InputError(f"mask {list(self.mask.shape)} does not fit sequences {list(self.ids.shape)}")
        edges = np.diff(np.pad(self.mask.astype(np.int8), ((0, 0), (1, 1))), axis=1)
        if ((edges == 1).sum(1) != 1).any():
            raise InputError("every row of the mask must be one run of tokens, padded on the left or the right")

    @property
    def real(self) -> np.ndarray:
        """[N, T] bool, true where there is a token."""
        return np.ones(self.ids.shape, bool) if self.mask is None else self.mask.astype(bool)


def _shares(count: int, names: Sequence[str]) -> dict[str, int]:
    """`count` rows spread evenly over the names, the first ones getting what is left over."""
    return {
        name: count // len(names) + (i < count % len(names))
        for i, name in enumerate(names)
        if count // len(names) + (i < count % len(names))
    }


def held_out_sequences(
    tokenizer: Tokenizer | None, length: int, count: int, kinds: Sequence[str] = DEFAULT_KINDS, seed: int = 0
) -> Sequences:
    """Rows of built-in held-out text, whose files no training split holds; each row from another file while they last.

    Args:
        tokenizer: of the model.
        length: tokens of a row.
        count: rows, spread evenly over the kinds.
        kinds: of :data:`kvsparse_jax.corpus.KINDS`.
        seed: which files, and in which order.

    Raises:
        InputError: no tokenizer, unknown kind, or less text than asked for.
    """
    if tokenizer is None:
        raise InputError("the model directory has no tokenizer, so no text can be evaluated: pass token ids")
    if count < 1:
        raise InputError(f"at least 1 sequence is needed, not {count}")
    if not kinds:
        raise InputError(f"no kind of text; there are {', '.join(corpus.KINDS)}")
    for kind in kinds:
        if kind not in corpus.KINDS:
            raise InputError(f"unknown kind of built-in text {kind!r}; there are {', '.join(corpus.KINDS)}")
    if len(set(kinds)) < len(kinds):
        raise InputError(f"a kind of text is named twice in {', '.join(kinds)}")
    shares = _shares(count, kinds)
    rows = [corpus.token_rows(tokenizer, kind, "heldout", n, length, seed) for kind, n in shares.items()]
    return Sequences(np.concatenate(rows), tuple(kind for kind, n in shares.items() for _ in range(n)))


Content = str | list[dict[str, str]]


def read_documents(paths: Iterable[str], text_column: str = "text") -> dict[str, list[Content]]:
    """Texts and conversations of local files, by the argument that named them.

    Args:
        paths: files, directories or glob patterns. ``.json`` and ``.jsonl`` hold objects with ``messages`` or the text
            column; any other file is one text.
        text_column: where the text of a JSON object is.

    Raises:
        InputError: nothing found, a file that cannot be read, or an object without text.
    """
    found: dict[str, list[Content]] = {}
    for path in paths:
        matches = sorted(Path(match) for match in glob.glob(path, recursive=True))
        files = [file for match in matches for file in (sorted(match.rglob("*")) if match.is_dir() else [match])]
        files = [file for file in files if file.is_file() and not file.name.startswith(".")]
        if not files:
            raise InputError(f"{path} matches no file")
        texts = [text for file in files for text in _read_file(file, text_column)]
        if not texts:
            raise InputError(f"{path} holds no text")
        found.setdefault(Path(path).name or path, []).extend(texts)
    return found


def _read_file(file: Path, column: str) -> list[Content]:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{file} is not UTF-8 text") from None
    if file.suffix not in (".json", ".jsonl"):
        return [text] if text.strip() else []
    try:
        if file.suffix == ".jsonl":
            # Only "\n" ends a line: JSON strings may hold what str.splitlines takes for an end.
            objects = []
            for number, line in enumerate(text.split("\n"), 1):
                try:
                    objects += [json.loads(line)] if line.strip() else []
                except json.JSONDecodeError as error:
                    raise InputError(f"{file}, line {number} is not valid JSON: {error}") from None
        else:
            content = json.loads(text)
            objects = content if isinstance(content, list) else [content]
    except json.JSONDecodeError as error:
        raise InputError(f"{file} is not valid JSON: {error}") from None
    out: list[Content] = []
    for row in objects:
        if isinstance(row, str):
            content = row
        elif isinstance(row, dict) and isinstance(row.get("messages"), list):
            content = row["messages"]
        elif isinstance(row, dict) and isinstance(row.get(column), str):
            content = row[column]
        else:
            has = f"an object with {', '.join(map(repr, row))}" if isinstance(row, dict) else f"a {type(row).__name__}"
            raise InputError(f"{file} holds {has}, not 'messages' or a text column {column!r}")
        if content:
            out.append(content)
    return out


def text_sequences(
    tokenizer: Tokenizer | None, documents: Mapping[str, Sequence[Content]], length: int, count: int
) -> Sequences:
    """Rows of one's own text; whether the model was trained on it is the caller's to know.

    Args:
        tokenizer: of the model; conversations go through its chat template.
        documents: kind -> texts or conversations.
        length: tokens of a row; a document shorter than that is continued with the next one.
        count: rows, spread evenly over the kinds; the first row of every document comes before the second of any.

    Raises:
        InputError: no tokenizer, or less text than asked for.
    """
    if tokenizer is None:
        raise InputError("the model directory has no tokenizer, so no text can be evaluated: pass token ids")
    if count < 1 or length < 2:
        raise InputError(f"at least 1 sequence of at least 2 tokens is needed, not {count} of {length}")
    bos = tokenizer.encode("", add_bos=True)
    gap = tokenizer.encode("\n\n", add_bos=False)
    body = length - len(bos)
    rows: list[list[int]] = []
    kinds: list[str] = []
    for kind, wanted in _shares(count, list(documents)).items():
        first: list[list[int]] = []
        later: list[list[int]] = []
        pending: list[int] = []
        for content in documents[kind]:
            if isinstance(content, str):
                ids = tokenizer.encode(content, add_bos=False)
            else:
                ids = tokenizer.apply_chat_template(content, add_generation_prompt=False)
                ids = ids[len(bos) :] if bos and ids[: len(bos)] == bos else ids
            ids = pending + (gap if pending else []) + ids
            whole = [bos + ids[start : start + body] for start in range(0, len(ids) - body + 1, body)]
            pending = ids if not whole else []
            first += whole[:1]
            later += whole[1:]
        found = (first + later)[:wanted]
        if len(found) < wanted:
            raise InputError(f"{kind} gives only {len(found)} sequences of {length} tokens; {wanted} were asked for")
        rows += found
        kinds += [kind] * wanted
    return Sequences(np.asarray(rows, np.int32), tuple(kinds))

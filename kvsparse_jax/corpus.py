"""Text that is on every machine: real files of the Python installation, and synthetic prompts made from them.

Natural kinds (`NATURAL_KINDS`) are read from the standard library, from the C headers and from the distributions that
this library requires. Every file belongs to one split only, decided by a hash of its stable name (a path without
version or machine), so the outline of a module, its docstrings and its source always fall on the same side; texts of
the held-out split that repeat training text are dropped. Synthetic kinds (`SYNTHETIC_KINDS`) hide facts in the
natural text of the same split and ask for them, or do small sums and list exercises.

`passkey_prompts` makes the retrieval evaluation. Its wording (`RESERVED`) never occurs in what `documents` returns.

Everything is a pure function of its arguments and of the installed files; nothing is downloaded or imported.
"""

import ast
import hashlib
import html
import importlib.metadata
import json
import random
import re
import sysconfig
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol, overload
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from kvsparse_jax.errors import InputError

NATURAL_KINDS = ("code", "docstrings", "manuals", "readme", "headers", "data", "tables", "logs")
SYNTHETIC_KINDS = ("retrieval", "retrieval_chat", "exercises")
KINDS = NATURAL_KINDS + SYNTHETIC_KINDS
SPLITS = ("train", "heldout")

RESERVED = re.compile(r"magic[\s_-]*numbers?|\bpass[\s_-]?keys?\b", re.IGNORECASE)
"""Wording that is kept for evaluation: no document of either split matches it."""

_HELD_OUT_FRACTION = 0.2
_SALT = "kvsparse-corpus-2"  # chosen so that pydoc_data/topics.py, one long file of prose, is training text
_MIN_CHARS = 400
_MAX_CHARS = 100_000
_REPEATED = 0.3  # a held-out file with more of its long paragraphs in training files than this share is dropped
_GENERATED = {"train": 8192, "heldout": 1024}  # documents of each synthetic kind


class Tokenizer(Protocol):
    """What this module and the data loader need of a tokenizer."""

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, add_bos: bool = True) -> list[int]: ...

    def apply_chat_template(
        self, messages: list[dict[str, str]], add_generation_prompt: bool = False, tokenize: bool = True
    ) -> Any: ...


@dataclass(frozen=True)
class Document:
    """A text or a conversation.

    Attributes:
      text: Plain text; None when there are messages.
      messages: Chat messages, dictionaries with `role` and `content`; None when there is text.
      source: Stable name of where it comes from.
    """

    text: str | None
    messages: tuple[dict[str, str], ...] | None
    source: str

    @property
    def content(self) -> str | list[dict[str, str]]:
        """The text, or the messages as a list."""
        if self.text is not None:
            return self.text
        return [dict(message) for message in self.messages or ()]


def documents(
    kind: str,
    split: str = "train",
    seed: int = 0,
    *,
    tokens: int = 1000,
    measure: Callable[[str], int] | None = None,
) -> Sequence[Document]:
    """The documents of one kind.

    Args:
      kind: One of `KINDS`.
      split: "train" or "heldout"; no file is in both.
      seed: Decides the order of natural documents and the contents of synthetic ones.
      tokens: Largest length of a retrieval document with its question and answer, in what `measure` counts.
      measure: Number of tokens of a text; None estimates one token for three characters.

    Returns:
      A sequence; synthetic documents are made when they are indexed.

    Raises:
      InputError: Unknown kind or split, no text of this kind on this machine, or `tokens` too small for a question.
    """
    if kind not in KINDS:
        raise InputError(f"unknown kind of built-in text {kind!r}; there are {', '.join(KINDS)}")
    if split not in SPLITS:
        raise InputError(f"unknown split {split!r}; there are {', '.join(SPLITS)}")
    if kind in NATURAL_KINDS:
        found = list(_natural(kind, split))
        if not found:
            raise InputError(f"no built-in text of kind {kind!r} in this Python installation ({split} split)")
        return _shuffled(found, seed)
    if kind == "exercises":
        return _Generated(_GENERATED[split], lambda index: _exercise(split, seed, index))
    if tokens < _MIN_RETRIEVAL:
        raise InputError(f"retrieval documents need at least {_MIN_RETRIEVAL} tokens, got {tokens}")
    count = measure or estimated_tokens
    haystacks = _haystacks(split)
    return _Generated(
        _GENERATED[split],
        lambda index: _retrieval(haystacks, kind == "retrieval_chat", split, seed, index, tokens, count),
    )


def estimated_tokens(text: str) -> int:
    """About how many tokens `text` has, on the high side: one for three characters."""
    return -(-len(text) // 3)


def counter(tokenizer: Tokenizer) -> Callable[[str], int]:
    """The function that counts the tokens of a text, without BOS."""
    return lambda text: len(tokenizer.encode(text, add_bos=False))


def token_rows(tokenizer: Tokenizer, kind: str, split: str, rows: int, length: int, seed: int = 0) -> np.ndarray:
    """Full rows of one kind of text, for evaluation: no padding, BOS first where the tokenizer has one.

    The first row of every document comes before the second row of any. A document shorter than a row is continued
    with the next one, a blank line between them.

    Args:
      tokenizer: Encodes the text; conversations go through its chat template.
      kind: One of `KINDS`.
      split: "train" or "heldout".
      rows: How many rows.
      length: Tokens of a row.
      seed: Order of the documents.

    Returns:
      Token ids [rows, length] int32.

    Raises:
      InputError: There is less text of this kind than asked for; the message says how much.
    """
    if rows < 1 or length < 2:
        raise InputError(f"at least 1 row of at least 2 tokens, got {rows} rows of {length}")
    measure = counter(tokenizer)
    bos = tokenizer.encode("", add_bos=True)
    body = length - len(bos)
    separator = tokenizer.encode("\n\n", add_bos=False)
    first: list[list[int]] = []
    later: list[list[int]] = []
    pending: list[int] = []
    for document in documents(kind, split, seed, tokens=max(length, _MIN_RETRIEVAL), measure=measure):
        if document.text is None:
            if not tokenizer.has_chat_template:
                raise InputError(f"kind {kind!r} is chat, and the tokenizer has no chat template")
            ids = tokenizer.apply_chat_template(document.content)  # type: ignore[arg-type]
            ids = list(ids[len(bos) :] if bos and list(ids[: len(bos)]) == bos else ids)
        else:
            ids = tokenizer.encode(document.text, add_bos=False)
        ids = pending + (separator if pending else []) + ids
        cut = [ids[start : start + body] for start in range(0, len(ids), body)]
        pending = cut.pop() if len(cut[-1]) < body and len(cut) == 1 else []
        whole = [bos + part for part in cut if len(part) == body]
        first += whole[:1]
        later += whole[1:]
        if len(first) >= rows:
            break
    found = (first + later)[:rows]
    if len(found) < rows:
        raise InputError(f"only {len(found)} rows of {length} tokens of kind {kind!r} ({split}); {rows} were asked for")
    return np.asarray(found, np.int32)


# --- splitting by file ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _File:
    """A file, or a text that stands for one: its stable name decides its split."""

    name: str
    read: Callable[[], str]
    part: str = ""  # names one text of a file that holds several

    @property
    def source(self) -> str:
        return f"{self.name}#{self.part}" if self.part else self.name


def is_held_out(name: str) -> bool:
    """Whether the file of this stable name belongs to the held-out split."""
    digest = hashlib.sha256(f"{_SALT}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < _HELD_OUT_FRACTION * 2**64


@cache
def _natural(kind: str, split: str) -> tuple[Document, ...]:
    """All documents of a natural kind in one split, in name order, repeats and reserved wording left out."""
    files = _FILES[kind]()
    known = set().union(*(_paragraphs(d.text or "") for d in _natural(kind, "train"))) if split == "heldout" else set()
    found = []
    for file in files:
        if is_held_out(file.name) != (split == "heldout"):
            continue
        text = _clean(file.read())
        if len(text) < _MIN_CHARS or RESERVED.search(text):
            continue
        paragraphs = _paragraphs(text)
        repeated = sum(len(paragraph) for paragraph in paragraphs & known)
        # Within training text only whole copies matter (one licence in forty distributions).
        allowed = _REPEATED if split == "heldout" else 0.8
        if paragraphs and repeated > allowed * sum(map(len, paragraphs)):
            continue
        known |= paragraphs
        found.append(Document(text=text, messages=None, source=file.source))
    return tuple(sorted(found, key=lambda document: document.source))


def _clean(text: str) -> str:
    """Universal newlines, no trailing blanks, at most `_MAX_CHARS` up to a line's end."""
    text = re.sub(r"[ \t]+$", "", text.replace("\r\n", "\n").replace("\r", "\n"), flags=re.MULTILINE).strip("\n")
    if len(text) > _MAX_CHARS:
        text = text[: text.rfind("\n", 1, _MAX_CHARS) + 1 or _MAX_CHARS]
    return text


def _paragraphs(text: str) -> set[str]:
    """The paragraphs that are long enough to tell a copy by, white space normalised."""
    parts = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return {part for part in parts if len(part) >= 80}


def _shuffled(items: list[Document], seed: int) -> list[Document]:
    return sorted(items, key=lambda item: hashlib.sha256(f"{seed}/{item.source}".encode()).digest())


def _read(path: Path) -> str:
    """The text of a file, empty when it is not UTF-8 text."""
    try:
        text = path.read_bytes().decode("utf-8")
    except (UnicodeDecodeError, OSError):
        return ""
    return "" if "\0" in text else text


# --- where the files are ----------------------------------------------------------------------------------------------

# Parts of the standard library that Linux distributions package apart, and tables that are no code.
_NOT_CODE = {
    "__pycache__",
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "tkinter",
    "ensurepip",
    "pydoc_data",
    "encodings",
    "lib-dynload",
}
# Named one by one, so that what else is installed beside the library does not change the text.
_DISTRIBUTIONS = (
    "absl-py",
    "datasets",
    "dill",
    "etils",
    "filelock",
    "flax",
    "fonttools",
    "fsspec",
    "gguf",
    "httpx",
    "huggingface_hub",
    "humanize",
    "idna",
    "jax",
    "jaxlib",
    "Jinja2",
    "kiwisolver",
    "markdown-it-py",
    "MarkupSafe",
    "matplotlib",
    "ml_dtypes",
    "msgpack",
    "multiprocess",
    "numpy",
    "opt_einsum",
    "optax",
    "orbax-checkpoint",
    "packaging",
    "pandas",
    "pillow",
    "protobuf",
    "psutil",
    "pyarrow",
    "Pygments",
    "pyparsing",
    "python-dateutil",
    "PyYAML",
    "regex",
    "requests",
    "rich",
    "safetensors",
    "scipy",
    "simplejson",
    "tensorboardX",
    "tensorstore",
    "tokenizers",
    "tqdm",
    "transformers",
    "treescope",
    "typer",
    "typing_extensions",
    "tzdata",
    "urllib3",
    "xxhash",
    "zipp",
)
# Their docstrings are manuals; the files are taken in the order of a hash until there are enough.
_MANUALS = ("numpy", "scipy", "pandas", "matplotlib", "optax", "flax")
_MANUAL_FILES = 150


@cache
def _stdlib() -> dict[str, Path]:
    """Sources of the standard library by stable name."""
    root = Path(sysconfig.get_path("stdlib"))
    found = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if not _NOT_CODE.intersection(parts[:-1]) and not path.name.startswith("_sysconfigdata"):
            found["python/" + "/".join(parts)] = path
    return found


@cache
def _distribution_files() -> dict[str, Path]:
    """Files of the named distributions that are installed, by a name without versions."""
    found: dict[str, Path] = {}
    for name in _DISTRIBUTIONS:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for entry in distribution.files or ():
            parts = entry.parts
            if ".." in parts or "__pycache__" in parts or "_vendor" in parts:
                continue
            if parts[0].endswith(".dist-info"):
                parts = (f"{name}.dist-info", *parts[1:])
            found["/".join(parts)] = Path(str(entry.locate()))
    return found


def _with_suffix(suffixes: Iterable[str]) -> Iterator[tuple[str, Path]]:
    suffixes = tuple(suffixes)
    for name, path in sorted(_distribution_files().items()):
        if name.endswith(suffixes):
            yield name, path


def _code_files() -> list[_File]:
    return [_File(name, partial(_read, path)) for name, path in sorted(_stdlib().items())]


def _docstring_files() -> list[_File]:
    return [_File(name, partial(_prose_of, name)) for name in sorted(_stdlib())]


def _manual_files() -> list[_File]:
    roots = tuple(f"{name}/" for name in _MANUALS)
    names = [
        name
        for name, path in _with_suffix([".py"])
        if name.startswith(roots) and "/test" not in name and path.is_file() and path.stat().st_size > 12_000
    ]
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    files = [_File(name, partial(_prose_of, name)) for name in sorted(names[:_MANUAL_FILES])]
    topics = Path(sysconfig.get_path("stdlib")) / "pydoc_data" / "topics.py"
    if topics.is_file():
        # One file, hence one split; each topic is a document of its own.
        for label, text in _topics(topics):
            files.append(_File(_TOPICS, partial(str, f"{label}\n\n{text}"), label))
    return files


_TOPICS = "python/pydoc_data/topics.py"


def _topics(path: Path) -> list[tuple[str, str]]:
    """The language reference as pydoc carries it: (label, text), longest first so that excerpts come as repeats."""
    for node in ast.parse(_read(path)).body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Dict):
            topics: dict[str, str] = ast.literal_eval(value)
            return sorted(topics.items(), key=lambda item: (-len(item[1]), item[0]))
    return []


def _readme_files() -> list[_File]:
    found = []
    for name, path in _with_suffix([".md", ".rst", ".txt", "/METADATA", "/LICENSE", "/NOTICE", "/AUTHORS", "/COPYING"]):
        if "/test" not in name and "/data/" not in name:
            found.append(_File(name, partial(_description if name.endswith("/METADATA") else _read, path)))
    return found


def _description(metadata: Path) -> str:
    """The long description of a distribution: what follows the header fields."""
    return _read(metadata).partition("\n\n")[2]


def _header_files() -> list[_File]:
    found = {name: path for name, path in _with_suffix([".h", ".hpp"]) if "/test" not in name}
    root = Path(sysconfig.get_path("include"))
    if root.is_dir():
        found |= {f"include/{path.relative_to(root).as_posix()}": path for path in root.rglob("*.h")}
    return [_File(name, partial(_without_licence, path)) for name, path in sorted(found.items())]


def _without_licence(path: Path) -> str:
    """C text without the licence comments at its top, which repeat from file to file."""
    text = _read(path)
    pattern = re.compile(r"\s*(/\*.*?\*/|(?://[^\n]*\n)+)", re.DOTALL)
    while (match := pattern.match(text)) and re.search(r"licen[sc]e|copyright", match[0], re.IGNORECASE):
        text = text[match.end() :]
    return text


def _data_files() -> list[_File]:
    suffixes = [".json", ".html", ".xml", ".svg", ".toml", ".yaml", ".proto", ".css", ".js"]
    real = [
        _File(name, partial(_read, path))
        for name, path in _with_suffix(suffixes)
        if ".dist-info/" not in name and not name.endswith(".min.js")
    ]
    return real + [_File(name, partial(_outline_text, name)) for name in sorted(_stdlib())]


def _table_files() -> list[_File]:
    suffixes = [".csv", ".tsv", ".tab", ".afm", ".arff", ".zi", ".mplstyle", ".dat"]
    found = [
        _File(name, partial(_some_lines, path))
        for name, path in sorted(_distribution_files().items())
        if name.endswith(tuple(suffixes)) or (name.endswith(".txt") and "/test" in name and "/data/" in name)
    ]
    encodings = Path(sysconfig.get_path("stdlib")) / "encodings"
    for path in sorted(encodings.glob("*.py")):
        found.append(_File(f"python/encodings/{path.name}", partial(_some_lines, path)))
    for start in range(0, 0x3000, 0x100):
        found.append(_File(f"unicode/{start:04X}", partial(_unicode_block, start)))
    return found


def _some_lines(path: Path) -> str:
    """Tables are long and alike: the first 20 000 characters of one, whole lines."""
    text = _read(path)
    return text if len(text) <= 20_000 else text[: text.rfind("\n", 0, 20_000) + 1]


def _unicode_block(start: int) -> str:
    rows = ["code;name;category;bidirectional;combining;decomposition;numeric;mirrored"]
    for code in range(start, start + 0x100):
        char = chr(code)
        name = unicodedata.name(char, "")
        if name:
            numeric = unicodedata.numeric(char, None)
            rows.append(
                f"{code:04X};{name};{unicodedata.category(char)};{unicodedata.bidirectional(char)};"
                f"{unicodedata.combining(char)};{unicodedata.decomposition(char)};"
                f"{'' if numeric is None else f'{numeric:g}'};{'Y' if unicodedata.mirrored(char) else 'N'}"
            )
    return "\n".join(rows) + "\n"


def _log_files() -> list[_File]:
    return [_File(name, partial(_log_text, name)) for name in sorted(_stdlib())]


_FILES: dict[str, Callable[[], list[_File]]] = {
    "code": _code_files,
    "docstrings": _docstring_files,
    "manuals": _manual_files,
    "readme": _readme_files,
    "headers": _header_files,
    "data": _data_files,
    "tables": _table_files,
    "logs": _log_files,
}


# --- texts derived from one source file -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Symbol:
    kind: str  # module, class, function or async function
    name: str  # qualified
    line: int
    arguments: tuple[str, ...]
    doc: str


@cache
def _outline(name: str) -> tuple[_Symbol, ...]:
    """The module, classes and functions of a source file; empty when it does not parse."""
    path = _stdlib().get(name) or _distribution_files()[name]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            tree = ast.parse(_read(path))
    except (SyntaxError, ValueError):
        return ()
    found = [_Symbol("module", name.removesuffix(".py").replace("/", "."), 1, (), ast.get_docstring(tree) or "")]

    def walk(statements: Sequence[ast.stmt], prefix: str) -> None:
        for child in statements:
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                arguments: tuple[str, ...] = ()
                if isinstance(child, ast.ClassDef):
                    kind = "class"
                else:
                    kind = "async function" if isinstance(child, ast.AsyncFunctionDef) else "function"
                    spec = child.args
                    arguments = tuple(a.arg for a in [*spec.posonlyargs, *spec.args, *spec.kwonlyargs])
                doc = ast.get_docstring(child) or ""
                found.append(_Symbol(kind, prefix + child.name, child.lineno, arguments, doc))
                walk(child.body, f"{prefix}{child.name}.")
            elif isinstance(child, ast.If | ast.Try):
                walk([*child.body, *child.orelse], prefix)

    walk(tree.body, "")
    return tuple(found)


def _prose_of(name: str) -> str:
    """The docstrings of a file, one after the other under the names they belong to."""
    parts = [
        f"{symbol.name}({', '.join(symbol.arguments)})\n\n{symbol.doc}"
        if "function" in symbol.kind
        else f"{symbol.name}\n\n{symbol.doc}"
        for symbol in _outline(name)
        if len(symbol.doc) >= 60
    ]
    return "\n\n\n".join(parts)


def _outline_text(name: str) -> str:
    """The outline of a file as JSON, XML, HTML or INI; which one depends on the name."""
    symbols = _outline(name)[:120]
    if not symbols:
        return ""
    style = hashlib.sha256(f"style/{name}".encode()).digest()[0] % 4
    if style == 0:
        entries = [
            {"kind": s.kind, "name": s.name, "line": s.line, "arguments": list(s.arguments), "summary": _summary(s.doc)}
            for s in symbols
        ]
        return json.dumps({"file": name, "symbols": entries}, indent=2, ensure_ascii=False) + "\n"
    if style == 1:
        lines = ['<?xml version="1.0" encoding="utf-8"?>', f"<module file={quoteattr(name)}>"]
        for s in symbols:
            lines.append(f'  <symbol kind="{s.kind}" line="{s.line}">')
            lines.append(f"    <name>{escape(s.name)}</name>")
            lines += [f'    <argument index="{i}">{escape(a)}</argument>' for i, a in enumerate(s.arguments)]
            if s.doc:
                lines.append(f"    <summary>{escape(_summary(s.doc))}</summary>")
            lines.append("  </symbol>")
        return "\n".join([*lines, "</module>", ""])
    if style == 2:
        lines = ["<!DOCTYPE html>", "<html>", f"<head><title>{html.escape(name)}</title></head>", "<body>"]
        for s in symbols:
            lines.append(f'<h3 id="{html.escape(s.name)}">{s.kind} <code>{html.escape(s.name)}</code></h3>')
            if s.arguments:
                items = "".join(f"<li>{html.escape(a)}</li>" for a in s.arguments)
                lines.append(f'<ul class="arguments">{items}</ul>')
            if s.doc:
                lines.append(f"<p>{html.escape(_summary(s.doc))}</p>")
        return "\n".join([*lines, "</body>", "</html>", ""])
    lines = [f"# symbols of {name}"]
    for s in symbols:
        lines += ["", f"[{s.name}]", f"kind = {s.kind}", f"line = {s.line}"]
        lines += [f"arguments = {', '.join(s.arguments)}"] if s.arguments else []
        lines += [f"summary = {_summary(s.doc)}"] if s.doc else []
    return "\n".join([*lines, ""])


def _summary(doc: str) -> str:
    return " ".join(doc.split("\n\n")[0].split())[:200]


_LEVELS = ("DEBUG", "INFO", "INFO", "INFO", "WARNING", "ERROR")
_OUTCOMES = ("ok", "ok", "ok", "retry", "cached", "skipped", "timeout", "failed: permission denied")


def _log_text(name: str) -> str:
    """A log that calls into the functions of one source file would have written; the style depends on the name."""
    rng = random.Random(f"log/{name}")
    symbols = [s for s in _outline(name) if "function" in s.kind]
    if len(symbols) < 3:
        return ""
    module = name.removeprefix("python/").removesuffix(".py").replace("/", ".")
    clock = datetime(2021, 1, 1) + timedelta(seconds=rng.random() * 1e8)
    style = rng.randrange(3)
    process, request = rng.randrange(300, 40_000), rng.randrange(1000, 90_000)
    lines = []
    for _ in range(rng.randrange(60, 240)):
        clock += timedelta(milliseconds=rng.expovariate(1 / 400))
        symbol = rng.choice(symbols)
        request += rng.random() < 0.3
        outcome, took = rng.choice(_OUTCOMES), rng.expovariate(1 / 25)
        values = " ".join(f"{a}={rng.randrange(10 ** rng.randrange(1, 6))}" for a in symbol.arguments if a != "self")
        note = _summary(symbol.doc)[:80] or outcome
        level = rng.choice(_LEVELS)
        if style == 0:
            stamp = clock.isoformat(" ", "milliseconds").replace(".", ",")
            lines.append(f"{stamp} {level:<7} {module}:{symbol.line} {symbol.name} {values} - {note}")
        elif style == 1:
            lines.append(
                f"10.{process % 256}.{symbol.line % 256}.{request % 256} - - [{clock:%d/%b/%Y:%H:%M:%S} +0000] "
                f'"GET /{module.replace(".", "/")}/{symbol.name}?{values.replace(" ", "&")} HTTP/1.1" '
                f"{rng.choice((200, 200, 200, 304, 404, 500))} {rng.randrange(90, 60_000)}"
            )
        else:
            lines.append(
                f"{clock:%b %d %H:%M:%S} host{process % 9} {module}[{process}]: request {request} "
                f"{symbol.name}({values.replace(' ', ', ')}) {outcome} in {took:.1f} ms"
            )
    return "\n".join(lines) + "\n"


# --- synthetic documents ----------------------------------------------------------------------------------------------


class _Generated(Sequence[Document]):
    """Documents that are made when they are asked for."""

    def __init__(self, count: int, make: Callable[[int], Document]) -> None:
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Document: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Document]: ...

    def __getitem__(self, index: int | slice) -> Document | Sequence[Document]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        return self._make(index % self._count)


_ADJECTIVES = (
    "amber ancient blue brass bright broken calm cedar clever cobalt copper coral crimson crystal curious distant "
    "dusty early eastern emerald empty faded fallen frozen gentle gilded golden granite green grey hidden hollow "
    "humble indigo iron ivory jade lonely lucky marble misty narrow northern olive orange pale patient plain polished "
    "proud purple quiet rapid restless rusty scarlet secret silent silver slender solar southern stormy sunny tidal "
    "twin velvet violet wandering western white wild winter wooden yellow young"
).split()
_NOUNS = (
    "anchor apple arrow badger balcony barrel basket beacon bell bicycle bridge candle canyon castle cathedral "
    "cellar chapel circus comet compass cottage crane dolphin dragon drum eagle engine falcon feather ferry forest "
    "fountain fox garden gate glacier guitar hammer harbour hawk heron hill horse island kettle kitchen lake lantern "
    "library lighthouse lion market meadow mill mirror mountain museum needle oak ocean orchard otter owl palace "
    "panther piano pilot planet pyramid quarry rabbit raven reservoir river robin rocket saddle salmon school "
    "shepherd ship sparrow station statue stone summit sundial swan temple theatre tiger tower tractor tunnel turtle "
    "valley village violin wagon walnut waterfall whale willow window wolf workshop"
).split()
_FIRST = (
    "Ada Amir Beatriz Chen Clara Daniel Elif Emeka Farah Felix Grace Hana Igor Jonas Kofi Leila Mei Nadia Omar Priya "
    "Quentin Rosa Samuel Tara Umar Vera Wanda Yusuf Zoe"
).split()
_LAST = (
    "Abara Brandt Castillo Dubois Eriksen Fischer Garcia Haddad Ivanova Jansen Kim Lindgren Moreau Nakamura Okafor "
    "Petrov Rossi Silva Tanaka Ueda Varga Weber Yilmaz Zhang"
).split()
_MONTHS = "January February March April May June July August September October November December".split()


def _digits(rng: random.Random) -> str:
    return str(rng.randrange(10 ** (low := rng.randrange(3, 8)), 10 ** (low + 1)))


def _code(rng: random.Random) -> str:
    letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(rng.randrange(1, 4)))
    return f"{letters}-{rng.randrange(10, 10_000)}" + (f"-{rng.choice('ABCDXYZ')}" if rng.random() < 0.3 else "")


def _words(rng: random.Random) -> str:
    return f"{rng.choice(_ADJECTIVES)}-{rng.choice(_NOUNS)}"


def _date(rng: random.Random) -> str:
    return f"{rng.randrange(1, 29)} {rng.choice(_MONTHS)} {rng.randrange(1900, 2040)}"


def _time(rng: random.Random) -> str:
    return f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"


def _name(rng: random.Random) -> str:
    return f"{rng.choice(_FIRST)} {rng.choice(_LAST)}"


def _amount(rng: random.Random) -> str:
    return (
        f"{rng.randrange(3, 90_000):,}.{rng.randrange(100):02d} {rng.choice(('euros', 'dollars', 'crowns', 'pounds'))}"
    )


def _combination(rng: random.Random) -> str:
    return "-".join(f"{rng.randrange(100):02d}" for _ in range(rng.randrange(3, 5)))


_THINGS: tuple[tuple[str, Callable[[random.Random], str]], ...] = (
    ("access code", _digits),
    ("account number", _digits),
    ("alarm code", _digits),
    ("badge number", _digits),
    ("batch number", _digits),
    ("catalogue number", _digits),
    ("door code", _digits),
    ("extension", _digits),
    ("identification number", _digits),
    ("invoice number", _digits),
    ("locker number", _digits),
    ("PIN", _digits),
    ("population", _digits),
    ("registration number", _digits),
    ("secret number", _digits),
    ("security code", _digits),
    ("telephone number", _digits),
    ("ticket number", _digits),
    ("unlock code", _digits),
    ("verification code", _digits),
    ("flight number", _code),
    ("licence plate", _code),
    ("model number", _code),
    ("order reference", _code),
    ("serial number", _code),
    ("tracking number", _code),
    ("call sign", _words),
    ("code name", _words),
    ("password", _words),
    ("project name", _words),
    ("wireless network", _words),
    ("deadline", _date),
    ("founding date", _date),
    ("inspection date", _date),
    ("departure time", _time),
    ("meeting time", _time),
    ("contact person", _name),
    ("owner", _name),
    ("inventor", _name),
    ("budget", _amount),
    ("price", _amount),
    ("vault combination", _combination),
    ("safe combination", _combination),
    ("map coordinates", _combination),
)
_STATEMENTS = (
    "The {thing} for {owner} is {value}.",
    "The {thing} of {owner} is {value}.",
    "Note: the {thing} for {owner} is {value}.",
    "Remember that the {thing} of {owner} is {value}.",
    "For {owner}, the {thing} was set to {value}.",
    "It was written down that {owner} has the {thing} {value}.",
    "{thing} ({owner}): {value}",
    "One of the {thing}s on the list, the one for {owner}, is {value}.",
)
_QUESTIONS = (
    "What is the {thing} for {owner}?",
    "What is the {thing} of {owner}?",
    "According to the text above, what is the {thing} for {owner}?",
    "Which {thing} does the text give for {owner}?",
    "What is the {thing} for {owner} mentioned in the text?",
    "Find the {thing} of {owner}.",
)
_ANSWERS = (
    "{value}",
    "The {thing} for {owner} is {value}.",
    "The {thing} of {owner} is {value}.",
    "According to the text, it is {value}.",
    "The {thing} for {owner} mentioned in the text is {value}.",
)
_OPENINGS = (
    "Read the following text carefully. Some facts in it will be asked for afterwards.",
    "Below is a long text with a few facts hidden in it. Remember them.",
    "Here is a document. Answer the question that follows it.",
    "I will give you a text, then ask about details in it.",
    "Study this text; there is a short question at the end.",
)
_MIN_RETRIEVAL = 256


@dataclass(frozen=True)
class _Fact:
    thing: str
    owner: str
    value: str

    def say(self, pattern: str) -> str:
        text = pattern.format(thing=self.thing, owner=self.owner, value=self.value)
        return text if pattern.startswith("{value}") else text[0].upper() + text[1:]


def _fact(rng: random.Random, thing: tuple[str, Callable[[random.Random], str]] | None = None) -> _Fact:
    name, value = thing or rng.choice(_THINGS)
    owner = rng.choice((f"the {rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)}", rng.choice(_NOUNS), _name(rng)))
    return _Fact(name, owner, value(rng))


@cache
def _haystacks(split: str) -> tuple[Document, ...]:
    """Documents to hide facts in: mostly prose, some code."""
    kinds = ("manuals", "docstrings", "readme", "code")
    found = tuple(document for kind in kinds for document in _natural(kind, split))
    if not found:
        raise InputError(f"no built-in text to hide facts in on this machine ({split} split)")
    return found


def _blocks(document: Document) -> list[str]:
    """Paragraphs of a document, none of them longer than about 600 characters."""
    found = []
    for paragraph in re.split(r"\n\s*\n", document.text or ""):
        lines: list[str] = []
        for line in paragraph.split("\n"):
            lines.append(line[:600])
            if sum(map(len, lines)) > 500:
                found.append("\n".join(lines))
                lines = []
        if any(line.strip() for line in lines):
            found.append("\n".join(lines))
    return found


def _fill(
    rng: random.Random, haystacks: Sequence[Document], room: int, measure: Callable[[str], int]
) -> Iterator[tuple[str, int]]:
    """Consecutive paragraphs and their lengths from random documents, together at most `room` long."""
    misses = 0
    while room > 0 and misses < 20:
        blocks = _blocks(rng.choice(haystacks))
        start = rng.randrange(len(blocks) // 2) if len(blocks) > 8 else 0
        for block in blocks[start:]:
            size = measure(block + "\n\n")
            if size > room:
                misses += 1
                break
            room -= size
            yield block, size


def _retrieval(
    haystacks: Sequence[Document],
    chat: bool,
    split: str,
    seed: int,
    index: int,
    tokens: int,
    measure: Callable[[str], int],
) -> Document:
    """One retrieval document: text with facts at random depths, then questions about some of them, answered."""
    rng = random.Random(f"retrieval/{chat}/{split}/{seed}/{index}")
    # Often the same thing of several owners, so that only the owner tells them apart.
    shared = rng.choice(_THINGS) if rng.random() < 0.5 else None
    room = int((tokens - 48) * rng.uniform(0.4, 1.0))  # 48: what a chat template adds, and joins of tokens
    facts: dict[str, _Fact] = {}
    listing = rng.random() < 0.15  # nothing but facts
    wanted = 10_000 if listing else rng.choice((1, 1, 1, 2, 3, 5, 8))
    while len(facts) < wanted:
        fact = _fact(rng, shared)
        if fact.owner in facts:
            if listing:
                break
            continue
        cost = measure(fact.say(_STATEMENTS[0]) + "\n\n") + 8
        if facts and room - cost < (90 if listing else tokens // 3):
            break
        facts[fact.owner] = fact
        room -= cost
    asked = rng.sample(list(facts.values()), min(len(facts), rng.choice((1, 1, 2, 3))))
    opening = rng.choice(_OPENINGS)
    turns: list[tuple[str, str]] = []
    room -= measure(opening)
    for fact in asked:
        question, answer = fact.say(rng.choice(_QUESTIONS)), fact.say(rng.choice(_ANSWERS))
        cost = measure(f"Question: {question}\nAnswer: {answer}\n\n") + (12 if chat else 0)
        if turns and cost > room:
            break
        turns.append((question, answer))
        room -= cost
    parts = [] if listing else [block for block, _ in _fill(rng, haystacks, room, measure)]
    for fact in facts.values():
        parts.insert(rng.randrange(len(parts) + 1), fact.say(rng.choice(_STATEMENTS)))
    body = "\n\n".join(parts)
    source = f"retrieval/{split}/{index}"
    if not chat:
        tail = "".join(f"\n\nQuestion: {question}\nAnswer: {answer}" for question, answer in turns)
        return Document(text=f"{opening}\n\n{body}{tail}\n", messages=None, source=source)
    first = f"{opening}\n\n{body}\n\n{turns[0][0]}"
    messages = [{"role": "user", "content": first}, {"role": "assistant", "content": turns[0][1]}]
    for question, answer in turns[1:]:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Document(text=None, messages=tuple(messages), source=source)


def _exercise(split: str, seed: int, index: int) -> Document:
    """A short conversation of sums and list exercises."""
    rng = random.Random(f"exercises/{split}/{seed}/{index}")
    messages: list[dict[str, str]] = []
    for _ in range(rng.randrange(2, 9)):
        question, answer = rng.choice((_sum, _sum, _copy, _order, _pick))(rng)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Document(text=None, messages=tuple(messages), source=f"exercises/{split}/{index}")


def _sum(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randrange(2, 1000), rng.randrange(2, 1000)
    sign = rng.choice("+-*")
    if sign == "*":
        a, b = a % 50 + 2, b % 20 + 2
    value = {"+": a + b, "-": a - b, "*": a * b}[sign]
    asked = rng.choice(("What is {0} {1} {2}?", "Calculate {0} {1} {2}.", "{0} {1} {2} = ?")).format(a, sign, b)
    return asked, rng.choice((f"{a} {sign} {b} = {value}", f"{value}", f"The result is {value}."))


def _list(rng: random.Random) -> list[str]:
    pool = rng.choice((_NOUNS, _ADJECTIVES, _FIRST, [str(n) for n in range(10, 100)]))
    return rng.sample(pool, rng.randrange(4, 13))


def _copy(rng: random.Random) -> tuple[str, str]:
    items = _list(rng)
    if rng.random() < 0.3:
        return f"Repeat this list in reverse order: {', '.join(items)}", ", ".join(reversed(items))
    asked = rng.choice(("Repeat this list", "Copy this list exactly", "Write these items again, one per line"))
    return f"{asked}: {', '.join(items)}", ("\n" if "line" in asked else ", ").join(items)


def _order(rng: random.Random) -> tuple[str, str]:
    items = _list(rng)
    return f"Sort this list: {', '.join(items)}", ", ".join(sorted(items))


def _pick(rng: random.Random) -> tuple[str, str]:
    items = _list(rng)
    place = rng.randrange(len(items))
    ordinal = ("first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth").split()[place]
    return f"Here is a list: {', '.join(items)}. What is the {ordinal} item?", items[place]


# --- evaluation -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PasskeyPrompt:
    """A retrieval prompt for evaluation.

    Attributes:
      prompt_ids: The prompt, ready for the model (BOS or chat template included).
      answer_ids: The number's tokens. With a begun answer they are what a model that knows it predicts next; without
        one, look for `answer` in the generated text.
      answer: The number as text, without the space before it.
      word: What the number belongs to.
      depth: Where the sentence stands in the text, 0 (start) to 1 (end).
    """

    prompt_ids: list[int]
    answer_ids: list[int]
    answer: str
    word: str
    depth: float


def _continued(tokenizer: Tokenizer, begin: str, number: str, space: str) -> tuple[list[int], list[int]]:
    """The tokens of the begun answer and of the number after it, as they come when encoded together.

    A space that is a token of its own goes with the first part: a model that knows the number may still put a quotation
    mark or a colon there (the dense SmolLM2-135M does so in 17 of 100 prompts and never has a wrong digit).
    """
    if not begin:
        return [], tokenizer.encode(space + number, add_bos=False)
    whole = tokenizer.encode(f"{begin}{space}{number}", add_bos=False)
    for text in (begin + space, begin):
        head = tokenizer.encode(text, add_bos=False)
        if whole[: len(head)] == head and len(head) < len(whole):
            return head, whole[len(head) :]
    return tokenizer.encode(begin, add_bos=False), tokenizer.encode(space + number, add_bos=False)


def passkey_prompts(
    tokenizer: Tokenizer,
    n: int,
    length: int,
    seed: int = 0,
    *,
    chat: bool | None = None,
    answer_prefix: bool = True,
    split: str = "heldout",
) -> list[PasskeyPrompt]:
    """Single-needle retrieval prompts in the wording that no training document has.

    The needle and question follow the single-needle task of RULER (arXiv 2404.06654): a number of seven digits for a
    word, in held-out text. Depths are spread evenly over the text.

    Args:
      tokenizer: Encodes the prompts.
      n: How many.
      length: Tokens of a prompt; each is at most this long and shorter by one paragraph at most (about 150 tokens).
      seed: Words, numbers, text and order of the depths.
      chat: Use the chat template; None where there is one.
      answer_prefix: Begin the answer ("The special magic number for ... is"), so that the number comes next.
      split: Which split's text hides the needle.

    Returns:
      `n` prompts.

    Raises:
      InputError: `n` below 1, or `length` too small for the question.
    """
    if n < 1:
        raise InputError(f"the number of retrieval prompts must be at least 1, got {n}")
    chat = tokenizer.has_chat_template if chat is None else chat
    if chat and not tokenizer.has_chat_template:
        raise InputError("the tokenizer has no chat template; ask for plain retrieval prompts")
    rng = random.Random(f"passkey/{split}/{seed}")
    depths = [(i + 0.5) / n for i in range(n)]
    rng.shuffle(depths)
    haystacks = [d for d in _haystacks(split) if not d.source.startswith("python/")] or list(_haystacks(split))
    measure = counter(tokenizer)
    found = []
    for depth in depths:
        word, number = rng.choice(_NOUNS), str(rng.randrange(10**6, 10**7))
        lead = f"The special magic number for {word} mentioned in the provided text is"

        def prompt(parts: Sequence[str], word: str = word, number: str = number, depth: float = depth) -> list[int]:
            place = round(depth * len(parts))
            needle = f"One of the special magic numbers for {word} is: {number}."
            text = "\n\n".join([*parts[:place], needle, *parts[place:]])
            user = (
                "A special magic number is hidden within the following text. Make sure to memorize it. "
                f"I will quiz you about the number afterwards.\n\n{text}\n\n"
                f"What is the special magic number for {word} mentioned in the provided text?"
            )
            if chat:
                return list(tokenizer.apply_chat_template([{"role": "user", "content": user}], True))
            return tokenizer.encode(f"{user}\nAnswer:", add_bos=True)

        begin = (lead if chat else f" {lead}") if answer_prefix else ""
        tail, answer = _continued(tokenizer, begin, number, " " if begin or not chat else "")
        room = length - len(prompt([])) - len(tail)
        if room < 0:
            raise InputError(f"retrieval prompts need at least {length - room} tokens, got {length}")
        parts = [block for block, _ in _fill(rng, haystacks, room, measure)]
        while parts and len(prompt(parts)) + len(tail) > length:  # joins can cost a token each
            parts.pop()
        place = round(depth * len(parts)) / max(len(parts), 1)
        found.append(PasskeyPrompt(prompt(parts) + tail, answer, number, word, place))
    return found

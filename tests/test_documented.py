"""What README.md, CONTRIBUTING.md and docs/ tell a reader to type: code is run, commands are run or at least parsed.

The pages name models that a hub has and files that a reader has. Here they are tiny ones, in a directory where they
have these very names (``place``), so a name that is not there fails as it would for the reader. Numbers that would take
too long are made smaller by tables (``CODE``, ``COMMANDS``) and by nothing else.
"""

import argparse
import contextlib
import glob
import importlib
import json
import os
import re
import shlex
import shutil
import socket
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import uvicorn

import kvsparse_jax as kvs
from kvsparse_jax.engine import EngineOptions
from serve.server import Server
from train import config as retrofit

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

CODE = {"1 << 30": "1 << 20", "1024, 8": "1024, 2", '"smollm2-135m"': '"Qwen/Qwen3-8B"'}
"""In code blocks: a pool that is made at once, prompts to calibrate on, a model that takes seconds to load."""

SHORT = ["--dtype", "float32"]
COMMANDS = {
    "kvsparse_jax.evaluate": (
        {r"^[\d:,]+:[\d:,]+$": "320:6", r"^(100|256)$": "2"},
        [*SHORT, "--batch-size", "6", "--lengths", "320:6", "--passkey-length", "256", "--overwrite"],
    ),
    "serve.generate": ({}, [*SHORT, "--max-new-tokens", "4"]),
    "serve.hyperscale": ({r"^\d+:\d+:": "8:2:"}, [*SHORT, "--pool", "0.001", "--slots", "2", "--page-size", "8"]),
    "serve.plan": ({}, []),
    "train.ablate": ({}, ["--list"]),
}
"""Commands that are run, not only parsed: what is replaced in their arguments, and what is put before them."""

MODELS = {"smollm2-135m", "smollm2-135m-dms-8x"}
"""Models without a directory: what a package index has."""

PLACEHOLDERS = {"RUN", "DIR", "PYTHON"}
"""Names that stand for a reader's own."""

PACKAGES = {"jupyterlab"}
"""Packages of others that a reader is told to install."""

SHELL = {"sh", "bash", "shell"}


@dataclass(frozen=True)
class Block:
    """A code block of a page: its language (empty where it is indented), where it starts, its text."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def _read(page: Path) -> tuple[list[Block], str]:
    """The code blocks of a page, and what is left of it."""
    blocks, prose, lines = [], [], page.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        start = at
        if lines[at].startswith("```"):
            at = lines.index("```", at + 1)
            blocks.append(Block(page, start + 2, lines[start][3:].strip(), "\n".join(lines[start + 1 : at])))
        elif lines[at].startswith("    ") and (at == 0 or not lines[at - 1].strip()):
            while at + 1 < len(lines) and (lines[at + 1].startswith("    ") or not lines[at + 1].strip()):
                at += 1
            text = "\n".join(line[4:] for line in lines[start : at + 1])
            blocks.append(Block(page, start + 1, "", text.rstrip()))
        else:
            prose.append(lines[at])
        at += 1
    return blocks, "\n".join(prose)


READ = {page: _read(page) for page in PAGES}
BLOCKS = [block for blocks, _ in READ.values() for block in blocks]
INLINE = {
    page: [" ".join(found[1].split()) for found in re.finditer(r"(?<!`)`([^`]+)`(?!`)", prose)]
    for page, (_, prose) in READ.items()
}


def _is_layout(block: Block) -> bool:
    """Whether it is a table of the repository's folders."""
    first = block.text.split()[0]
    return not block.language and "/" in first and (ROOT / first).exists()


def _lines(block: Block) -> Iterator[tuple[int, str]]:
    """The commands of a block, continued ones joined, with their lines."""
    start, command = 0, ""
    for number, line in enumerate(block.text.splitlines()):
        if not command:
            start = number
        command += line.removesuffix("\\")
        if not line.endswith("\\"):
            if command.strip():
                yield block.line + start, command
            command = ""


def _commands() -> Iterator[tuple[str, str]]:
    for block in BLOCKS:
        if block.language in {"", *SHELL} and not _is_layout(block):
            yield from ((f"{block.page.name}:{number}", line) for number, line in _lines(block))
    for page, spans in INLINE.items():
        for span in spans:
            if re.match(r"(\w+=\S+ )*(python -m|make|%?pip install|\.venv/bin/pip install) ", span):
                yield f"{page.name}: {span}", span


def _words(command: str) -> list[str]:
    """Its words, without a comment and the variables that are set for it."""
    words = shlex.split(command, comments=True)
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    return words


LINES = {name: _words(line) for name, line in _commands()}
PROGRAMS = {name: words[2:] for name, words in LINES.items() if words[:2] == ["python", "-m"]}


@pytest.fixture(scope="module")
def place(golden_models, tmp_path_factory):
    """A directory with all that the pages name."""
    root = tmp_path_factory.mktemp("reader")
    lm = kvs.load(golden_models / "llama_tied")
    policy = kvs.DMS.init(lm.config, window=8, scale=1.0, offset=0.0)
    proj = jax.random.normal(jax.random.key(5), policy.params["proj"].shape)
    dms = lm.with_policy(kvs.DMS(**{**vars(policy), "params": policy.params | {"proj": proj}}))
    for name, model in {"Qwen/Qwen3-8B": lm, "demo/run": dms, "runs/qwen3-8b": dms, "runs/cr8": dms}.items():
        directory = model.save(root / name)
        for file in lm.source.iterdir():
            if not (directory / file.name).exists() and "golden" not in file.name:
                shutil.copy(file, directory)
        settings = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 8192}))
    layers, hidden, heads = lm.config.layers, lm.config.hidden_size, lm.config.kv_heads
    kernel = jax.random.normal(jax.random.key(6), (layers, hidden, heads))
    surrogate = {"out": {"kernel": kernel, "bias": jnp.zeros((layers, heads))}}
    kvs.KVzap(surrogate).save(root / "runs" / "kvzap" / "mlp")
    (root / "my_texts.jsonl").write_text(json.dumps({"text": "The cache holds what was seen."}) + "\n")
    (root / "aime24.jsonl").write_text(json.dumps({"prompt": "1 + 1", "answer": "2"}) + "\n")
    shutil.copy(ROOT / "train" / "studies" / "window.toml", root / "my_study.toml")
    return root


@contextlib.contextmanager
def _served(directory, name):
    """The address of a server of a model, as its command makes it."""
    lm = kvs.load(directory, dtype="float32")
    served = Server(lm, EngineOptions(slots=4, pool_bytes=1 << 20, page_size=8, max_tokens=64), name, None)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        # Without log_config, which closes all handlers of the process and with them pytest's own stream.
        web = uvicorn.Server(uvicorn.Config(served.app, log_config=None, timeout_graceful_shutdown=10))
        thread = threading.Thread(target=web.run, kwargs={"sockets": [listening]})
        thread.start()
        while not web.started and thread.is_alive():
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            web.should_exit = True
            thread.join()


PYTHON = [page for page in PAGES if any(block.language == "python" for block in READ[page][0])]


@pytest.mark.parametrize("page", PYTHON, ids=lambda page: page.name)
def test_code_runs(page, place, monkeypatch, capsys):
    """The code of a page from its first block to its last, in one namespace."""
    monkeypatch.chdir(place)
    with contextlib.ExitStack() as stack:
        replaced, names = dict(CODE), {"__name__": "documented"}
        for block in READ[page][0]:
            if block.language != "python":
                continue
            address = "http://127.0.0.1:8000"
            if address in block.text and address not in replaced:
                replaced[address] = stack.enter_context(_served(place / "runs" / "qwen3-8b", "runs/qwen3-8b"))
            text = block.text
            for old, new in replaced.items():
                text = text.replace(old, new)
            # Empty lines before it, so that an error names the line of the page.
            exec(compile("\n" * (block.line - 1) + text, str(page), "exec"), names)
        for value in names.values():
            if callable(close := getattr(value, "close", None)):
                close()


class _Parsed(BaseException):
    """Carries what a command made of its arguments out of it, past its handlers of errors."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_command(name, place, monkeypatch, capsys):
    """A module with its arguments: run, or parsed by its own parser."""
    module, *arguments = PROGRAMS[name]
    monkeypatch.chdir(place)
    target = importlib.import_module(module)
    if hasattr(target, "__path__"):
        target = importlib.import_module(f"{module}.__main__")
    if module in COMMANDS and not {"--help", "-h"} & set(arguments):
        smaller, added = COMMANDS[module]
        for pattern, new in smaller.items():
            arguments = [re.sub(pattern, new, word) for word in arguments]
        assert target.main([*added, *arguments]) == 0, capsys.readouterr().err
        return
    parse = argparse.ArgumentParser.parse_args

    def stop(self, args=None, namespace=None):
        raise _Parsed(parse(self, args, namespace))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    try:
        status = target.main()
    except _Parsed as found:
        parsed = vars(found.args[0])
    else:
        assert status == 0 and "--help" in arguments, capsys.readouterr().err
        return
    if module == "train.retrofit":
        retrofit.from_arguments(parsed)
    for option in ("model", "data"):
        values = parsed.get(option) or []
        for value in [values] if isinstance(values, str | os.PathLike) else values:
            known = str(value) in MODELS | PLACEHOLDERS or Path(value).exists()
            assert known, f"--{option} {value}: not a file of the reader's"


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
EXTRAS = set(PROJECT["optional-dependencies"])
WHEEL = f"kvsparse_jax-{PROJECT['version']}-py3-none-any.whl"


@pytest.mark.parametrize("name", [name for name in LINES if name not in PROGRAMS])
def test_other_command(name):
    """`make` has the target, and what pip is to install is there."""
    words = LINES[name]
    if words[0] == "make":
        asked = {word for word in words[1:] if "=" not in word}
        assert asked and asked <= TARGETS, f"no such target: {' '.join(sorted(asked - TARGETS))}"
    elif words[0].lstrip("%") in ("pip", ".venv/bin/pip") and words[1] == "install":
        for package in words[2:]:
            found = re.fullmatch(r"(kvsparse-jax|\.)(?:\[([\w,-]+)\])?", package)
            assert found or package in PACKAGES | {"-e", WHEEL}, f"not a package of ours: {package}"
            if found and found[2]:
                assert set(found[2].split(",")) <= EXTRAS, f"no such extra: {package}"
    else:
        pytest.fail(f"no check for a command like {shlex.join(words)}")


def test_every_block_is_of_a_known_kind():
    """Nothing is passed over: code, commands, or a table of folders that are there."""
    for block in BLOCKS:
        assert block.language in {"", "python", *SHELL}, f"{block}: no check for {block.language}"
        if _is_layout(block):
            for line in block.text.splitlines():
                path = line.split(" ")[0]
                assert "/" not in path or (ROOT / path).exists(), f"{block}: no {path}"
    readme = {word for name, words in LINES.items() if name.startswith("README.md") for word in words}
    assert {"demo", "test"} <= readme, "the README's two commands"
    assert len(PROGRAMS) > 30 and len(PYTHON) > 2, "the pages were not read as they are written"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_exist(page):
    """Links within the repository, and files named in the text."""
    prose = READ[page][1]
    links = {link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", prose) if "://" not in link}
    made = {f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.ipynb")}  # when the site is built
    missing = {link for link in links - made if not (page.parent / link).exists()}
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in ("runs", "demo", "build")}
    for span in INLINE[page]:
        path = span.partition("(")[0]
        if re.fullmatch(r"[\w.*-]+(/[\w.*-]*)+", path) and path.split("/")[0] in folders:
            missing |= set() if glob.glob(str(ROOT / path)) else {path}
    assert not missing

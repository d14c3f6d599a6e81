"""The command line of text generation."""

import io
import json
import subprocess
import sys

import pytest

import kvsparse_jax as kvs
from serve import generate

SIZES = ["--page-size", "4", "--capacity", "256", "--prefill-chunk", "8"]
GREEDY = {"temperature": 0.0, "page_size": 4, "capacity": 256, "prefill_chunk": 8}


@pytest.fixture
def model(golden_models):
    return str(golden_models / "llama_tied")


@pytest.fixture
def command(model, capsys):
    """Runs the command with a model; gives the exit status, the standard output and the standard error."""

    def run(*options):
        arguments = ["--model", model, "--dtype", "float32", "--max-new-tokens", "12", "--temperature", "0", *SIZES]
        status = generate.main([*arguments, *options])
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def want(model):
    lm = kvs.load(model, dtype="float32")
    return lm.generate(["Hello"], 12, **GREEDY)


def test_text_from_everywhere(command, want, tmp_path, monkeypatch):
    text = want.text[0]
    status, out, err = command("--prompt", "Hello")
    assert (status, out) == (0, text + "\n")
    assert "configuration:" in err and "max_new_tokens:" in err
    assert f"{want.cache.seen.sum()} tokens seen" in err and "CR physical" in err
    assert command("--prompt", "Hello", "--stream")[:2] == (0, text + "\n")
    assert command("--prompt", "Hello", "--raw")[:2] == (0, text + "\n")
    (tmp_path / "prompt.txt").write_text("Hello")
    assert command("--prompt-file", str(tmp_path / "prompt.txt"))[:2] == (0, text + "\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello")))
    assert command()[:2] == (0, text + "\n")
    stop = text[5]
    assert command("--prompt", "Hello", "--stop", stop)[1] == text.partition(stop)[0] + "\n"


def test_json(command, want, model):
    status, out, _ = command("--prompt", "Hello", "--prompt", "Hi", "--chat", "--json")
    assert status == 0
    found = json.loads(out)
    lm = kvs.load(model, dtype="float32")
    chats = lm.generate(["Hello", "Hi"], 12, **GREEDY, chat=True)
    assert [row["prompt"] for row in found["outputs"]] == ["Hello", "Hi"]
    assert [row["tokens"] for row in found["outputs"]] == chats.tokens
    assert [row["text"] for row in found["outputs"]] == chats.text
    assert [row["finish_reason"] for row in found["outputs"]] == chats.finish_reason
    cache = found["cache"]
    assert cache["seen"] == chats.cache.seen.tolist()
    assert cache["live"] == chats.cache.live.tolist()
    for name in ("used", "nbytes", "dense_nbytes", "cr_nominal", "cr_physical", "page_size"):
        assert cache[name] == getattr(chats.cache, name)
    assert cache["grown"] == list(chats.cache.grown) == []


def test_growth_is_said(command):
    """How often the cache grew and to how many bytes: in the JSON, and in a word on the standard error."""
    _, out, err = command("--prompt", "Hello", "--capacity", "8", "--max-new-tokens", "40", "--json")
    cache = json.loads(out)["cache"]
    assert cache["grown"] == sorted(cache["grown"]) and cache["grown"][-1] == cache["nbytes"]
    assert f"grown {len(cache['grown'])} times" in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt", "x", "--top-p", "0"], "top_p must be above 0"),
        (["--prompt", "x", "--temperature", "-1"], "temperature must be at least 0"),
        (["--prompt", "x", "--capacity", "0"], "capacity must be a whole number, at least 1"),
        (["--prompt", "x", "--prompt", "y", "--stream"], "--stream takes one prompt, not 2"),
        (["--prompt", "x", "--json", "--stream"], "give one of them"),
        (["--prompt", "x", "--chat", "--raw"], "not allowed with"),
        (["--prompt-file", "missing.txt"], "missing.txt: No such file"),
        (["--prompt", "x" * 2000], "more than the model's context of 256"),
        (["--prompt", "x", "--model", "no/such/model"], "no/such/model"),
    ],
)
def test_bad_input(command, options, words):
    status, out, err = command(*options)
    assert status == 2 and out == ""
    last = err.splitlines()[-1]
    assert words in last and last.startswith("python -m serve.generate: error:")
    assert "Traceback" not in err


def test_empty_standard_input(command, monkeypatch):
    for data, words in ((b"", "the standard input is empty"), (b"\xff", "not UTF-8")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        status, _, err = command()
        assert status == 2 and words in err


def test_full_cache_is_a_failed_run(command):
    status, _, err = command("--prompt", "Hello", "--capacity", "4", "--when-full", "error")
    assert status == 1 and "the cache is full" in err.splitlines()[-1]


def test_help():
    done = subprocess.run(
        [sys.executable, "-m", "serve.generate", "--help"], capture_output=True, text=True, check=True
    )
    for flag in ("--model", "--max-new-tokens", "--chat", "--stream", "--prefill-chunk", "--json", "default: 0.95"):
        assert flag in done.stdout

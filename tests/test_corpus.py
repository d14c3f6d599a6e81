"""The built-in text: split by file, deterministic, free of the wording that evaluation uses."""

import operator
import os
import re
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from kvsparse_jax import corpus
from kvsparse_jax.corpus import Document, documents, passkey_prompts, token_rows
from kvsparse_jax.errors import InputError

BOS = 1


class FakeTokenizer:
    """Four characters are a token; a chat is its messages in brackets."""

    def __init__(self, chat: bool = True) -> None:
        self.has_chat_template = chat
        self.seen: dict[int, str] = {}

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        parts = [text[i : i + 4] for i in range(0, len(text), 4)]
        ids = [2 + hash(part) % 10**9 for part in parts]
        self.seen.update(zip(ids, parts, strict=True))
        return [BOS] * add_bos + ids

    def apply_chat_template(
        self, messages: list[dict[str, str]], add_generation_prompt: bool = False, tokenize: bool = True
    ) -> list[int] | str:
        text = "".join(f"<{message['role']}>{message['content']}</>" for message in messages)
        text += "<assistant>" * add_generation_prompt
        return self.encode(text, add_bos=False) if tokenize else text

    def decode(self, ids: list[int]) -> str:
        return "".join(self.seen.get(token, "") for token in ids)


def text_of(document: Document) -> str:
    return document.text or "\n".join(message["content"] for message in document.messages or ())


def test_kinds() -> None:
    assert len(corpus.NATURAL_KINDS) >= 5
    assert corpus.KINDS == corpus.NATURAL_KINDS + corpus.SYNTHETIC_KINDS


@pytest.mark.parametrize("kind", corpus.NATURAL_KINDS)
def test_natural_kind(kind: str) -> None:
    train, heldout = documents(kind, "train"), documents(kind, "heldout")
    for split in (train, heldout):
        assert len(split) >= 10
        assert len({document.source for document in split}) == len(split)
        assert all(400 <= len(document.text or "") <= 100_000 for document in split)
        assert not any(corpus.RESERVED.search(document.text or "") for document in split)
    files = [{document.source.partition("#")[0] for document in split} for split in (train, heldout)]
    assert not files[0] & files[1]

    known = set().union(*(corpus._paragraphs(document.text or "") for document in train))
    for document in heldout:
        own = corpus._paragraphs(document.text or "")
        assert sum(map(len, own & known)) <= 0.3 * sum(map(len, own)) or not own

    rows = token_rows(FakeTokenizer(), kind, "heldout", rows=4, length=2048, seed=3)
    assert rows.shape == (4, 2048) and rows.dtype == np.int32 and (rows[:, 0] == BOS).all()
    assert len({row.tobytes() for row in rows}) == 4


def test_a_file_is_in_the_same_split_for_every_kind_made_from_it() -> None:
    derived = ("code", "docstrings", "data", "logs")
    train = {document.source for kind in derived for document in documents(kind, "train")}
    heldout = {document.source for kind in derived for document in documents(kind, "heldout")}
    assert not train & heldout
    assert corpus.is_held_out("python/argparse.py") == corpus.is_held_out("python/argparse.py")
    shares = [corpus.is_held_out(f"file{i}") for i in range(2000)]
    assert 0.17 < sum(shares) / len(shares) < 0.23


def test_seed_orders_natural_documents() -> None:
    first, same, other = (documents("code", "train", seed) for seed in (0, 0, 1))
    assert list(first) == list(same) and list(first) != list(other)
    assert sorted(d.source for d in first) == sorted(d.source for d in other)


def test_equal_in_another_process() -> None:
    program = (
        "import zlib; from kvsparse_jax.corpus import documents; "
        "print([zlib.crc32(repr(documents(k, 'train', 5)[3]).encode()) for k in ('tables', 'exercises')])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "123"}
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment,
        cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    expected = [zlib.crc32(repr(documents(kind, "train", 5)[3]).encode()) for kind in ("tables", "exercises")]
    assert found.stdout.strip() == str(expected)


@pytest.mark.parametrize("kind", ["retrieval", "retrieval_chat"])
@pytest.mark.parametrize("split", corpus.SPLITS)
def test_retrieval(kind: str, split: str) -> None:
    tokenizer = FakeTokenizer()
    found = documents(kind, split, 7, tokens=600, measure=corpus.counter(tokenizer))
    again = documents(kind, split, 7, tokens=600, measure=corpus.counter(tokenizer))
    assert len(found) >= 1000
    lengths, depths = [], []
    things: Counter[str] = Counter()
    for index in range(150):
        document = found[index]
        assert document == again[index]
        text = text_of(document)
        assert not corpus.RESERVED.search(text)
        if document.messages is None:
            ids = tokenizer.encode(text)
            body, _, rest = text.partition("\n\nQuestion: ")
            turns = re.findall(r"(?:^|Question: )(.*)\nAnswer: (.*)", rest)
        else:
            assert [message["role"] for message in document.messages[:2]] == ["user", "assistant"]
            ids = tokenizer.apply_chat_template(list(document.messages))  # type: ignore[assignment]
            contents = [message["content"] for message in document.messages]
            body, _, contents[0] = contents[0].rpartition("\n\n")
            turns = list(zip(contents[::2], contents[1::2], strict=True))
        lengths.append(len(ids))
        assert turns
        for question, answer in turns:
            facts = [
                (thing, body.index(value))
                for thing, _ in corpus._THINGS
                if thing in question
                for value in re.findall(r"[\w-]+", answer)
                if value in body and value not in question and len(value) >= 2
            ]
            assert facts, (question, answer)
            things[facts[0][0]] += 1
            depths.append(facts[-1][1] / len(body))
    assert max(lengths) <= 600 and np.mean(lengths) > 300
    assert len(things) >= 25
    assert min(depths) < 0.1 and max(depths) > 0.85
    assert found[0] != documents(kind, split, 8, tokens=600)[0]
    assert len(found[2:5]) == 3 and found[-1] == found[len(found) - 1]
    with pytest.raises(IndexError):
        found[len(found)]


def test_exercises_are_right() -> None:
    operators = {"+": operator.add, "-": operator.sub, "*": operator.mul}
    sums = lists = 0
    for document in documents("exercises", "train", 2)[:80]:
        messages = document.messages or ()
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        for question, answer in zip(messages[::2], messages[1::2], strict=True):
            if match := re.search(r"(\d+) ([-+*]) (\d+)", question["content"]):
                sums += 1
                value = operators[match[2]](int(match[1]), int(match[3]))
                assert re.findall(r"-?\d+", answer["content"])[-1] == str(value)
            elif match := re.match(r"Sort this list: (.*)", question["content"]):
                lists += 1
                assert answer["content"] == ", ".join(sorted(match[1].split(", ")))
    assert sums > 50 and lists > 10
    assert not any(corpus.RESERVED.search(text_of(d)) for d in documents("exercises")[:200])


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("answer_prefix", [True, False])
def test_passkey_prompts(chat: bool, answer_prefix: bool) -> None:
    tokenizer = FakeTokenizer(chat)
    found = passkey_prompts(tokenizer, 20, 1000, seed=4, answer_prefix=answer_prefix)
    assert found == passkey_prompts(tokenizer, 20, 1000, seed=4, answer_prefix=answer_prefix)
    assert found != passkey_prompts(tokenizer, 20, 1000, seed=5, answer_prefix=answer_prefix)
    assert len(found) == 20
    for item in found:
        assert 800 <= len(item.prompt_ids) <= 1000
        text = tokenizer.decode(item.prompt_ids)
        assert text.count(item.answer) == 1
        assert f"One of the special magic numbers for {item.word} is: {item.answer}." in text
        assert re.fullmatch(r"\d{7}", item.answer)
        assert tokenizer.decode(item.answer_ids).strip().endswith(item.answer[-1])
        assert (item.prompt_ids[0] == BOS) == (not chat)
        assert text.rstrip().endswith("is" if answer_prefix else ("<assistant>", "Answer:"))
    depths = sorted(item.depth for item in found)
    assert depths[0] < 0.15 and depths[-1] > 0.85 and 0.4 < np.mean(depths) < 0.6


@pytest.mark.parametrize(("pattern", "answer_space"), [(r"\s?[^\s\d]+|\s?\d|\s", " "), (r"\s?[^\s\d]+|\d|\s", "")])
def test_passkey_answer_continues_the_prompt(pattern: str, answer_space: str) -> None:
    """Where the space before a number belongs to its first digit, and where it is a token of its own."""

    class Words(FakeTokenizer):
        def encode(self, text: str, add_bos: bool = True) -> list[int]:
            parts = re.findall(pattern, text)
            ids = [2 + zlib.crc32(part.encode()) % 10**9 for part in parts]
            self.seen.update(zip(ids, parts, strict=True))
            return [BOS] * add_bos + ids

    tokenizer = Words()
    for item in passkey_prompts(tokenizer, 5, 700):
        assert tokenizer.decode(item.answer_ids) == answer_space + item.answer
        assert tokenizer.decode(item.prompt_ids).endswith("is" if answer_space else "is ")
        assert len(item.prompt_ids) <= 700


def test_bad_input() -> None:
    tokenizer = FakeTokenizer(chat=False)
    with pytest.raises(InputError, match=r"unknown kind of built-in text 'poems'; there are code, "):
        documents("poems")
    with pytest.raises(InputError, match=r"unknown split 'test'; there are train, heldout"):
        documents("code", "test")
    with pytest.raises(InputError, match="at least 256 tokens, got 100"):
        documents("retrieval", tokens=100)
    with pytest.raises(InputError, match="need at least .* tokens, got 20"):
        passkey_prompts(tokenizer, 1, 20)
    with pytest.raises(InputError, match="must be at least 1, got 0"):
        passkey_prompts(tokenizer, 0, 1000)
    with pytest.raises(InputError, match="no chat template"):
        passkey_prompts(tokenizer, 1, 1000, chat=True)
    with pytest.raises(InputError, match="no chat template"):
        token_rows(tokenizer, "exercises", "train", 1, 64)
    with pytest.raises(InputError, match=r"only \d+ rows of 30000 tokens of kind 'readme' \(heldout\); 99 were asked"):
        token_rows(tokenizer, "readme", "heldout", 99, 30_000)
    with pytest.raises(InputError, match="at least 1 row"):
        token_rows(tokenizer, "code", "train", 0, 64)


def test_kind_without_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(corpus._FILES, "headers", lambda: [])
    corpus._natural.cache_clear()
    try:
        with pytest.raises(InputError, match="no built-in text of kind 'headers' in this Python installation"):
            documents("headers", "heldout")
    finally:
        corpus._natural.cache_clear()

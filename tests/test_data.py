"""The data loader: order, mixing, packing, resuming, hosts, sources and bad input."""

import json
import socket
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import numpy as np
import pytest

from kvsparse_jax.errors import InputError
from train.data import PADDING, Batch, Loader, Source

ROOT = Path(__file__).resolve().parent.parent
BOS = 1


class FakeTokenizer:
    """A character is a token; a chat is its messages in brackets."""

    def __init__(self, bos: bool = True, chat: bool = True) -> None:
        self.has_chat_template = chat
        self.bos = [BOS] * bos

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        return self.bos * add_bos + [10 + ord(char) for char in text]

    def apply_chat_template(
        self, messages: list[dict[str, str]], add_generation_prompt: bool = True, tokenize: bool = True
    ) -> list[int] | str:
        text = "".join(f"<{message['role']}>{message['content']}</>" for message in messages)
        text += "<assistant>" * add_generation_prompt
        return self.encode(text, add_bos=True) if tokenize else text


def text_of(ids: np.ndarray) -> str:
    return "".join(chr(token - 10) for token in ids if token != BOS)


@pytest.fixture(autouse=True)
def _isolated(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, and no network."""

    def refuse(*arguments: Any, **_: Any) -> None:
        raise AssertionError(f"network access: {arguments}")

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def write(path: Path, rows: list[Any]) -> str:
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def texts(count: int, letter: str, longest: int = 90) -> list[dict[str, str]]:
    """Documents that name themselves in every character position: 'a12a12a12...'."""
    return [{"text": (f"{letter}{i}." * 60)[: 5 + (i * 37) % longest]} for i in range(count)]


def loader(sources: Any, *, tokenizer: Any = None, **settings: Any) -> Loader:
    if isinstance(sources, str):
        sources = [Source(sources)]
    settings = {"batch_size": 4, "sequence_length": 32, **settings}
    return Loader(sources, tokenizer or FakeTokenizer(), **settings)


def take(data: Iterator[Batch], count: int) -> list[Batch]:
    return [next(data) for _ in range(count)]


def equal(a: list[Batch], b: list[Batch]) -> bool:
    return len(a) == len(b) and all(
        np.array_equal(x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True)
    )


def segments(batches: list[Batch]) -> Iterator[tuple[int, np.ndarray]]:
    """(example id, token ids) of every segment, in order."""
    for batch in batches:
        for row in range(batch.input_ids.shape[0]):
            for segment in range(batch.segment_ids[row].max() + 1):
                place = batch.segment_ids[row] == segment
                examples = set(batch.example_ids[row, place].tolist())
                assert len(examples) == 1
                assert np.array_equal(batch.positions[row, place], np.arange(place.sum()))
                yield examples.pop(), batch.input_ids[row, place]


# --- order and packing ------------------------------------------------------------------------------------------------


def test_every_document_once_and_whole(tmp_path: Path) -> None:
    rows = texts(50, "a")
    path = write(tmp_path / "a.jsonl", rows)
    batches = list(loader(path, repeat=False))
    found = defaultdict(str)
    for example, ids in segments(batches):
        assert ids[0] == BOS and (ids[1:] != BOS).all()
        found[example] = text_of(ids)
    # Ascending example ids are (document, piece) order.
    assert "".join(found[example] for example in sorted(found)) == "".join(row["text"] for row in rows)
    for batch in batches:
        assert all(array.shape == (4, 32) and array.dtype == np.int32 for array in batch)
        padding = batch.segment_ids == PADDING
        for array, value in ((batch.input_ids, 0), (batch.positions, 0), (batch.example_ids, PADDING)):
            assert (array[padding] == value).all()
        assert (np.diff(padding.astype(int), axis=1) >= 0).all()  # padding is at the end of a row
        assert batch.tokens == (~padding).sum()


def test_packing_fills_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", texts(200, "a", 40))
    packed = take(loader(path, sequence_length=64), 10)
    assert sum(batch.tokens for batch in packed) > 0.97 * 10 * 4 * 64
    assert max(batch.segment_ids.max() for batch in packed) >= 2
    in_order = take(loader(path, sequence_length=64, lookahead=1), 10)  # still several in a row
    assert max(batch.segment_ids.max() for batch in in_order) >= 1


def test_without_packing_one_truncated_document_per_row(tmp_path: Path) -> None:
    rows = texts(10, "a")
    path = write(tmp_path / "a.jsonl", rows)
    batches = list(loader(path, packing=False, repeat=False))
    assert len(batches) == 3
    found = sorted(text_of(ids) for _, ids in segments(batches))
    assert found == sorted(row["text"][:31] for row in rows)
    assert max(batch.segment_ids.max() for batch in batches) == 0
    assert (batches[-1].segment_ids[2:] == PADDING).all()


def test_example_ids_do_not_depend_on_packing_or_order(tmp_path: Path) -> None:
    sources = [Source(write(tmp_path / f"{letter}.jsonl", texts(30, letter))) for letter in "ab"]
    first = {example: text_of(ids) for example, ids in segments(list(loader(sources, repeat=False)))}
    for settings in ({"seed": 9, "lookahead": 3, "interleave": 2}, {"batch_size": 1}, {"packing": False}):
        other = {example: text_of(ids) for example, ids in segments(list(loader(sources, repeat=False, **settings)))}
        assert other.items() <= first.items()
    assert len(first) == len(set(first))
    assert min(first) == 0 and max(first) < 2**31


def test_order_depends_on_seed_and_epoch_only(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", texts(24, "a", 20))
    batches = take(loader(path), 30)
    assert equal(batches, take(loader(path), 30))
    assert not equal(batches[:3], take(loader(path, seed=1), 3))
    order = [example for example, _ in segments(take(loader(path, lookahead=1, interleave=1, seed=3), 100))]
    epochs = [order[start : start + 24] for start in range(0, 72, 24)]
    assert all(len(set(epoch)) == 24 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_pieces_of_long_documents_are_spread(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": letter * 320} for letter in "abcdefgh"])
    firsts = take(loader(path, tokenizer=FakeTokenizer(bos=False), interleave=8), 4)
    assert max(Counter(text_of(ids)[0] for _, ids in segments(firsts)).values()) < 8  # of 16 rows
    together = take(loader(path, tokenizer=FakeTokenizer(bos=False), interleave=1, lookahead=1), 2)
    assert len({text_of(ids)[0] for _, ids in segments(together)}) == 1


def test_documents_without_bos_stay_without(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "x" * 70}])
    found = list(segments(list(loader(path, tokenizer=FakeTokenizer(bos=False), repeat=False))))
    assert sorted(len(ids) for _, ids in found) == [6, 32, 32]
    assert all((ids == 10 + ord("x")).all() for _, ids in found)


# --- mixing -----------------------------------------------------------------------------------------------------------


def test_sources_mix_by_tokens(tmp_path: Path) -> None:
    sources = [
        Source(write(tmp_path / "a.jsonl", texts(20, "a", 30)), 0.5),
        Source(write(tmp_path / "b.jsonl", texts(30, "b", 300)), 0.3),
        Source(write(tmp_path / "c.jsonl", texts(5, "c", 10)), 0.2),
    ]
    data = loader(sources, batch_size=1)
    for _ in range(60):
        next(data)
        taken = [report.tokens for report in data.report()]
        # Nobody is further off than the pieces of the others allow.
        assert all(abs(share * sum(taken) - got) <= 2 * 32 for share, got in zip((0.5, 0.3, 0.2), taken, strict=True))
    assert data.report()[2].epochs > data.report()[1].epochs
    assert [report.share for report in data.report()] == [0.5, 0.3, 0.2]


def test_exhausted_source_leaves_the_mix(tmp_path: Path) -> None:
    sources = [Source(write(tmp_path / f"{letter}.jsonl", texts(n, letter))) for letter, n in (("a", 3), ("b", 20))]
    found = Counter(text_of(ids)[0] for _, ids in segments(list(loader(sources, repeat=False))))
    assert found["a"] >= 3 and found["b"] >= 20


# --- resuming and hosts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("packing", [True, False])
def test_restore_continues_bit_for_bit(tmp_path: Path, prefetch: int, packing: bool) -> None:
    sources = [
        Source(write(tmp_path / "a.jsonl", texts(40, "a", 200)), 0.7),
        Source(write(tmp_path / "b.jsonl", texts(7, "b")), 0.3),
    ]
    whole = take(loader(sources, packing=packing), 20)
    for done in (0, 1, 5, 13):
        with loader(sources, packing=packing, prefetch=prefetch) as data:
            assert equal(take(data, done), whole[:done])
            state = json.loads(json.dumps(data.state()))
        with loader(sources, packing=packing, prefetch=prefetch) as resumed:
            take(resumed, 3)  # a loader that is already on its way
            resumed.restore(state)
            assert resumed.state() == state
            assert equal(take(resumed, 20 - done), whole[done:])


def test_state_is_of_what_was_handed_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", texts(40, "a", 200))
    plain, ahead = loader(path), loader(path, prefetch=4)
    for _ in range(6):
        assert equal([next(plain)], [next(ahead)])
        assert plain.state() == ahead.state() and plain.report() == ahead.report()
    ahead.close()
    assert equal(take(plain, 4), take(ahead, 4))


def test_end_of_data_with_prefetch(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", texts(9, "a"))
    with loader(path, repeat=False, prefetch=2) as data:
        assert equal(list(data), list(loader(path, repeat=False)))
        assert list(data) == []


def test_restore_names_what_differs(tmp_path: Path) -> None:
    rows = texts(10, "a")
    path = write(tmp_path / "a.jsonl", rows)
    state = loader(path, seed=1).state()
    with pytest.raises(InputError, match="different configuration: batch_size 4 -> 2; seed 1 -> 2$"):
        loader(path, seed=2, batch_size=2).restore(state)
    moved = write(tmp_path / "moved.jsonl", rows)
    loader(moved, seed=1).restore(state)
    changed = write(tmp_path / "changed.jsonl", [*rows[:-1], {"text": "other"}])
    with pytest.raises(InputError, match=r"different configuration: sources\.0\.content \w+ -> \w+$"):
        loader(changed, seed=1).restore(state)
    with pytest.raises(InputError, match="sources.1.weight missing -> 1.0"):
        loader([Source(path), Source(path)], seed=1).restore(state)
    with pytest.raises(InputError, match="different configuration: tokenizer"):
        loader(path, seed=1, tokenizer=FakeTokenizer(bos=False)).restore(state)
    with pytest.raises(InputError, match="version None"):
        loader(path).restore({})


@pytest.mark.parametrize("processes", [2, 4])
def test_hosts_share_the_global_batch(tmp_path: Path, processes: int) -> None:
    path = write(tmp_path / "a.jsonl", texts(40, "a", 200))
    one = loader(path)
    whole = take(one, 6)
    hosts = [loader(path, process_index=i, process_count=processes) for i in range(processes)]
    slices = [take(host, 6) for host in hosts]
    joined = [
        Batch(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True))) for parts in zip(*slices, strict=True)
    ]
    assert equal(joined, whole)
    assert all(host.state() == one.state() for host in hosts)
    fewer = loader(path, process_index=0, process_count=1)
    fewer.restore(hosts[-1].state())
    assert equal(take(fewer, 2), take(one, 2))


# --- filters ----------------------------------------------------------------------------------------------------------


def test_empty_documents_are_dropped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"text": text} for text in ("one", "", "  \n", None, "two")]
    data = loader(write(tmp_path / "a.jsonl", rows), repeat=False)
    assert sorted(text_of(ids) for _, ids in segments(list(data))) == ["one", "two"]
    report = data.report()[0]
    assert (report.documents, report.empty, report.used) == (5, 3, 2)
    assert "3 of 5 documents are empty and dropped" in caplog.text
    assert str(report) == f"{tmp_path}/a.jsonl [text]: 2 documents (3 empty dropped), share 1"


def test_max_documents(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": ""}, *texts(20, "a", 10)])
    for sources, limit in (
        ([Source(path)], 3),
        ([Source(path, max_documents=3)], 9),
        ([Source(path, max_documents=3)], None),
    ):
        data = loader(sources, max_documents=limit, repeat=False)
        assert {text_of(ids)[:2] for _, ids in segments(list(data))} == {"a0", "a1", "a2"}
        assert data.report()[0].used == 3 and data.report()[0].empty == 1


def test_heldout_split_is_disjoint_and_complete(tmp_path: Path) -> None:
    rows = texts(300, "a", 25)
    path = write(tmp_path / "a.jsonl", rows)
    parts = [loader(path, split=split, heldout_fraction=0.25, repeat=False) for split in ("train", "heldout")]
    found = [sorted(text_of(ids) for _, ids in segments(list(data))) for data in parts]
    assert sorted(found[0] + found[1]) == sorted(row["text"] for row in rows)
    assert not set(found[0]) & set(found[1])
    assert 0.15 * 300 < len(found[1]) < 0.35 * 300
    assert parts[0].report()[0].other_split == len(found[1])
    # By content: the order of the file does not matter.
    backwards = write(tmp_path / "b.jsonl", rows[::-1])
    again = loader(backwards, split="heldout", heldout_fraction=0.25, repeat=False)
    assert sorted(text_of(ids) for _, ids in segments(list(again))) == found[1]


# --- sources ----------------------------------------------------------------------------------------------------------


def documents_of(sources: Any, **settings: Any) -> list[str]:
    data = loader(sources, packing=False, repeat=False, sequence_length=200, **settings)
    return sorted(text_of(ids) for _, ids in segments(list(data)))


@pytest.mark.parametrize("ending", [".json", ".jsonl", ".parquet"])
def test_file_types(tmp_path: Path, ending: str) -> None:
    assert documents_of(write(tmp_path / f"a{ending}", [{"text": "one"}, {"text": "two"}])) == ["one", "two"]


def test_text_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n")
    path = str(tmp_path / "a.txt")
    assert documents_of(path) == ["one\ntwo\n\nthree\n"]
    assert documents_of([Source(path, sample_by="line")]) == ["one", "three", "two"]
    assert [text.strip() for text in documents_of([Source(path, sample_by="paragraph")])] == ["one\ntwo", "three"]


def test_globs_and_directories(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path / "a.jsonl", [{"text": "a"}])
    write(tmp_path / "deep" / "b.json", [{"text": "b"}])
    (tmp_path / "c.txt").write_text("c")
    (tmp_path / "empty.txt").write_text("")
    assert documents_of(f"{tmp_path}/*.jsonl") == ["a"]
    assert documents_of(f"{tmp_path}/**/*.json") == ["b"]
    assert documents_of(str(tmp_path)) == ["a", "b", "c"]
    (tmp_path / "README.md").write_text("not data")
    assert documents_of(str(tmp_path)) == ["a", "b", "c"]


def test_saved_dataset(tmp_path: Path) -> None:
    saved = datasets.DatasetDict({name: datasets.Dataset.from_list([{"text": name}]) for name in ("train", "test")})
    saved.save_to_disk(str(tmp_path / "saved"))
    assert documents_of(str(tmp_path / "saved")) == ["train"]
    assert documents_of([Source(str(tmp_path / "saved"), split="test")]) == ["test"]
    with pytest.raises(InputError, match="no split 'dev'; splits: train, test"):
        loader([Source(str(tmp_path / "saved"), split="dev")])


def test_hub_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def load_dataset(path: str, name: str | None, *, split: str) -> datasets.Dataset:
        asked.append((path, name, split))
        return datasets.Dataset.from_list([{"text": "from the hub"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert documents_of("some-org/some.set") == ["from the hub"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some-org").mkdir()
    with pytest.raises(InputError, match="some-org/some.set matches nothing"):
        loader("some-org/some.set")
    assert documents_of([Source.parse("hub:some-org/some.set#name=main,split=test")]) == ["from the hub"]
    assert asked == [("some-org/some.set", None, "train"), ("some-org/some.set", "main", "test")]


def test_hub_out_of_reach() -> None:
    message = "nobody/nothing is no local file, and the hub gives no dataset 'nobody/nothing': "
    with pytest.raises(InputError, match=message) as error:
        loader("nobody/nothing")
    assert "\n" not in str(error.value)


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
RENDERED = "<user>hi</><assistant>yes</>"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT},
        {"text": "plain", "messages": CHAT},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
        {"messages": [CHAT[0], {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}]},
        {"dialogue": CHAT},
    ],
)
@pytest.mark.parametrize("ending", [".json", ".parquet"])
def test_chat(tmp_path: Path, row: dict[str, Any], ending: str) -> None:
    if ending == ".parquet" and not isinstance(row.get("messages", CHAT)[-1]["content"], str):
        # a column of parquet has one type
        parts = [[{"type": "text", "text": message["content"]}] for message in CHAT]
        row = {"messages": [{**message, "content": part} for message, part in zip(CHAT, parts, strict=True)]}
    assert documents_of(write(tmp_path / f"a{ending}", [row])) == [RENDERED]


def test_empty_chats_are_dropped(tmp_path: Path) -> None:
    rows: list[Any] = [{"messages": CHAT}, {"messages": []}, {"messages": [{"role": "user", "content": " "}]}]
    assert documents_of(write(tmp_path / "a.jsonl", rows)) == [RENDERED]


@pytest.mark.parametrize(
    ("row", "options", "found"),
    [
        ({"id": "7", "text": "yes", "content": "no"}, {}, "yes"),
        ({"n": 7, "content": "yes", "prompt": "no"}, {}, "yes"),
        ({"n": 7, "essay": "yes"}, {}, "yes"),
        ({"text": "no", "essay": "yes"}, {"column": "essay"}, "yes"),
        ({"text": "yes", "messages": CHAT}, {"kind": "text"}, "yes"),
        ({"text": "yes", "messages": CHAT}, {"column": "text"}, "yes"),
        ({"text": "no", "messages": CHAT}, {"column": "messages"}, RENDERED),
        ({"prompt": CHAT, "text": "no"}, {"kind": "chat"}, RENDERED),
    ],
)
def test_column_choice(tmp_path: Path, row: dict[str, Any], options: dict[str, Any], found: str) -> None:
    assert documents_of([Source(write(tmp_path / "a.json", [row]), **options)]) == [found]


@pytest.mark.parametrize(
    ("spec", "source"),
    [
        ("a.jsonl", Source("a.jsonl")),
        ("a.jsonl:0.3", Source("a.jsonl", 0.3)),
        ("builtin:code", Source("builtin:code")),
        ("builtin:code:2", Source("builtin:code", 2.0)),
        ("org/name#split=test,column=answer:2", Source("org/name", 2.0, column="answer", split="test")),
        ("hub:org/name#name=main,kind=chat", Source("hub:org/name", name="main", kind="chat")),
        ("a#b.txt#sample_by=line,max_documents=5", Source("a#b.txt", sample_by="line", max_documents=5)),
        ("c:/data/a.txt", Source("c:/data/a.txt")),
    ],
)
def test_parse(spec: str, source: Source) -> None:
    assert Source.parse(spec) == source


def test_parse_prefers_a_file_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "odd:2").write_text("")
    assert Source.parse(f"{tmp_path}/odd:2") == Source(f"{tmp_path}/odd:2")


def test_builtin_sources() -> None:
    sources = [Source.parse(spec) for spec in ("builtin:readme:0.5", "builtin:exercises:0.5")]
    first = take(loader(sources, sequence_length=256), 4)
    assert equal(first, take(loader(sources, sequence_length=256), 4))
    rendered = [text_of(ids) for _, ids in segments(first)]
    assert any(text.startswith("<user>") for text in rendered) and any("<user>" not in text for text in rendered)
    train, heldout = (
        {
            text_of(ids)
            for _, ids in segments(list(loader("builtin:readme", split=split, repeat=False, sequence_length=4096)))
        }
        for split in ("train", "heldout")
    )
    assert train and heldout and not train & heldout


def test_builtin_retrieval_fits_a_row() -> None:
    data = loader([Source("builtin:retrieval", max_documents=5)], sequence_length=2000, packing=True, repeat=False)
    found = [text_of(ids) for _, ids in segments(list(data))]
    assert len(found) == 5 and all("\n\nQuestion: " in text and "\nAnswer: " in text for text in found)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch size must be at least 1, got 0"),
        ({"sequence_length": 1}, "sequence length must be at least 2 tokens, got 1"),
        ({"process_count": 3}, "batch of 4 rows cannot be divided over 3 processes"),
        ({"process_index": 2, "process_count": 2}, "process 2 of 2"),
        ({"split": "test"}, "unknown split 'test'; there are train, heldout"),
        ({"split": "heldout"}, "has no held-out split: the held-out fraction is 0"),
        ({"heldout_fraction": 1.0}, r"held-out fraction must be in \[0, 1\), got 1"),
        ({"max_documents": 0}, "max_documents must be at least 1, got 0"),
        ({"interleave": 0}, "interleave and lookahead must be at least 1"),
        ({"seed": -1}, "seed must not be negative"),
    ],
)
def test_bad_settings(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        loader(write(tmp_path / "a.jsonl", texts(3, "a")), **settings)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("a.jsonl:0", "weight of data source 'a.jsonl' must be positive, got 0"),
        ("a.jsonl:-1", "must be positive, got -1"),
        ("a.jsonl:nan", "must be positive, got nan"),
        ("a.jsonl:inf", "must be positive, got inf"),
        ("a.jsonl#colour=red", "option 'colour=red' is not key=value with key in column, split, kind"),
        ("a.jsonl#kind=poem", "'poem' is none of auto, text, chat"),
        ("a.txt#sample_by=word", "'word' is none of document, paragraph, line"),
        ("a.txt#max_documents=many", "max_documents must be a number, got 'many'"),
        ("a.txt#max_documents=0", "max_documents must be at least 1, got 0"),
        ("", "needs a path"),
    ],
)
def test_bad_specs(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Source.parse(spec)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"text": "x", "n": 1}], {"column": "body"}, r"a\.json has no column 'body'; columns: text, n"),
        ([{"n": 1, "m": 2}], {}, r"a\.json has no text or chat column that can be told by its name; columns: n, m"),
        ([{"p": "x", "q": "y"}], {}, "no text or chat column that can be told by its name; columns: p, q"),
        ([{"text": "x"}], {"kind": "chat"}, "no chat column that can be told by its name; columns: text"),
        ([{"text": "x"}], {"column": "text", "kind": "chat"}, "column 'text' of .* does not hold chat; columns: text"),
        ([{"text": "x", "n": 1}], {"column": "n"}, "column 'n' of .* does not hold text or a list of messages"),
        ([{"text": " "}, {"text": ""}], {}, r"all 2 documents of .*a\.json are empty \(column 'text'\)"),
        ([{"messages": []}], {}, r"all 1 documents of .*a\.json are empty \(column 'messages'\)"),
        (
            [{"messages": [{"role": "user", "text": "x"}]}, {"messages": [{"content": "x"}]}],
            {},
            "document 1, column 'messages': a message needs text in role and content .*; its keys: content",
        ),
    ],
)
def test_bad_columns(tmp_path: Path, rows: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        loader([Source(write(tmp_path / "a.json", rows), **options)])


def test_chat_without_template(tmp_path: Path) -> None:
    tokenizer = FakeTokenizer(chat=False)
    path = write(tmp_path / "a.json", [{"text": "plain", "messages": CHAT}])
    with pytest.raises(InputError, match="is chat .*'messages'.* and the tokenizer has no chat template; name a text"):
        loader(path, tokenizer=tokenizer)
    assert documents_of([Source(path, column="text")], tokenizer=tokenizer) == ["plain"]
    with pytest.raises(InputError, match="builtin:exercises is chat .* no chat template$"):
        loader("builtin:exercises", tokenizer=tokenizer)


def test_refused_chat_is_named(tmp_path: Path) -> None:
    class Strict(FakeTokenizer):
        def apply_chat_template(self, messages: Any, *_: Any, **__: Any) -> list[int]:
            raise InputError("the chat template refuses these messages: roles must alternate")

    data = loader(write(tmp_path / "a.json", [{"messages": CHAT}]), tokenizer=Strict())
    with pytest.raises(InputError, match=r"a\.json, document 0: the chat template refuses"):
        next(data)


def test_documents_that_have_no_tokens(tmp_path: Path) -> None:
    class Deaf(FakeTokenizer):
        def encode(self, text: str, add_bos: bool = True) -> list[int]:
            return self.bos * add_bos

    data = loader(write(tmp_path / "a.json", texts(3, "a")), tokenizer=Deaf())
    with pytest.raises(InputError, match=r"all documents of .*a\.json are empty after tokenisation"):
        next(data)


def test_bad_paths(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b")
    (tmp_path / "empty").mkdir()
    (tmp_path / "nothing.txt").write_text("")
    (tmp_path / "broken.json").write_text('[{"text": ')
    (tmp_path / "broken.parquet").write_text("no parquet")
    cases = {
        "missing.jsonl": r"missing\.jsonl matches nothing; accepted are files \(\.json, \.jsonl, \.parquet, \.txt\)",
        "*.jsonl": r"\*\.jsonl matches nothing; accepted are",
        "a.csv": r"a\.csv is of an unknown type; accepted are \.json, \.jsonl, \.parquet, \.txt",
        "*.csv": r"a\.csv is of an unknown type",
        "empty": r"empty is a directory without data files",
        "nothing.txt": r"all documents of .*nothing\.txt are empty",
        "broken.json": r"cannot read .*broken\.json: ",
        "broken.parquet": r"cannot read .*broken\.parquet: ",
    }
    for name, message in cases.items():
        with pytest.raises(InputError, match=message) as error:
            loader(f"{tmp_path}/{name}")
        assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="unknown kind of built-in text 'poems'; there are code, "):
        loader("builtin:poems")
    with pytest.raises(InputError, match="no data source was given"):
        loader([])


def test_nothing_in_the_split(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", [{"text": "only one"}])
    found = []
    for split in ("train", "heldout"):
        try:
            found.append(documents_of(path, split=split, heldout_fraction=0.5))
        except InputError as error:
            assert f"none of the 1 documents of {path} is in the {split} split (held out: 0.5)" == str(error)
    assert found == [["only one"]]


def test_torch_is_not_imported(tmp_path: Path) -> None:
    """With a torch that can be found but not imported."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('torch was imported')\n")
    (tmp_path / "torch-2.9.0.dist-info").mkdir()
    (tmp_path / "torch-2.9.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n")
    path = write(tmp_path / "a.jsonl", texts(5, "a"))
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import importlib.metadata
assert importlib.metadata.version("torch") == "2.9.0"
from train.data import Loader, Source
assert "datasets" not in sys.modules
class Tokenizer:
    has_chat_template = False
    def encode(self, text, add_bos=True): return [1] * add_bos + list(text.encode())
import datasets; datasets.config.HF_DATASETS_CACHE = {str(tmp_path / "cache")!r}
assert next(Loader([Source({path!r})], Tokenizer(), batch_size=1, sequence_length=16)).tokens
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no progress bars, no warnings


@pytest.mark.parametrize("bad", [0, 30, 300])
def test_text_that_is_not_utf8_is_named(bad, tmp_path):
    """In the first document or in a later one, which only the reading finds."""
    path = tmp_path / "latin.jsonl"
    lines = [b'{"text": "caf\xe9"}' if i == bad else b'{"text": "a few words of text"}' for i in range(400)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(InputError, match="latin.jsonl"):
        documents_of(str(path))

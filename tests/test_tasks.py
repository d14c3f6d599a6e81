"""The long-context tasks: what is asked for is in the context, at its depth, and scores are as a person would give."""

import dataclasses
import itertools
import os
import random
import re
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvsparse_jax.corpus import RESERVED
from kvsparse_jax.errors import InputError
from kvsparse_jax.evaluate import tasks
from kvsparse_jax.evaluate.tasks import TASKS, Example, Question, encode, examples, messages, prompt, score
from kvsparse_jax.tokenizer import Tokenizer

BOS = 1
HIDDEN = ("niah_single", "niah_multikey", "niah_multivalue", "niah_multiquery", "vt", "aggregation")
LENGTH = 1500


class FakeTokenizer:
    """Up to four letters are a token, a digit is one, and so are punctuation and the line breaks after it."""

    def __init__(self, chat: bool = True) -> None:
        self.has_chat_template = chat
        self.seen: dict[int, str] = {}

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        parts = re.findall(r" ?[^\W\d]{1,4}|\d|[^\w\s]\n*|\s+", text)
        assert "".join(parts) == text
        ids = [2 + zlib.crc32(part.encode()) for part in parts]
        self.seen.update(zip(ids, parts, strict=True))
        return [BOS] * add_bos + ids

    def decode(self, ids: list[int]) -> str:
        return "".join(self.seen[token] for token in ids if token != BOS)

    def apply_chat_template(
        self, messages: list[dict[str, str]], add_generation_prompt: bool = False, tokenize: bool = True
    ) -> Any:
        text = "".join(f"[{message['role']}]\n{message['content']}[end]\n" for message in messages)
        text = f"[system]\nBe kind.[end]\n{text}" + "[assistant]\n" * add_generation_prompt
        return self.encode(text, add_bos=False) if tokenize else text


def hay(text: str, example: Example) -> str:
    """A part of the context without its needles."""
    for needle in example.needles:
        text = text.replace(needle.text, "")
    return text


@pytest.fixture(scope="module")
def made() -> dict[str, list[Example]]:
    return {task: examples(task, FakeTokenizer(), length=LENGTH, count=4, seed=3) for task in TASKS}


# --- scores -----------------------------------------------------------------------------------------------------------

NUMBER = ("1234567",)
THREE = ("alpha", "beta", "gamma")


@pytest.mark.parametrize(
    ("text", "answers", "expected"),
    [
        # right
        ("1234567", NUMBER, 1.0),
        (" 1234567.", NUMBER, 1.0),
        ('It is "1234567", I think', NUMBER, 1.0),
        ("**1234567**\n", NUMBER, 1.0),
        ("_1234567_", NUMBER, 1.0),
        ("is:1234567", NUMBER, 1.0),
        ("1,234,567", NUMBER, 1.0),
        ("about 1,234,567.", NUMBER, 1.0),
        ("7654321,1234567,1111111", NUMBER, 1.0),
        ("12 + 30 + 50 = 92 crates", ("92",), 1.0),
        ("kqtuv", ("KQTUV",), 1.0),
        ("Blue-Falcon", ("blue falcon",), 1.0),
        # wrong
        ("", NUMBER, 0.0),
        ("I do not know.", NUMBER, 0.0),
        ("1234568", NUMBER, 0.0),
        ("12345678", NUMBER, 0.0),
        ("01234567", NUMBER, 0.0),
        ("123456 7", NUMBER, 0.0),
        ("1234567.5", NUMBER, 0.0),
        ("12,345", ("345",), 0.0),
        ("12,345", ("12",), 0.0),
        ("1,234,567", ("234",), 0.0),
        ("x1234567", NUMBER, 0.0),
        ("1234567th", NUMBER, 0.0),
        ("a_1234567", NUMBER, 0.0),
        ("alphabet", ("alpha",), 0.0),
        ("falcon blue", ("blue falcon",), 0.0),
        # partly right
        ("Gamma, beta and ALPHA", THREE, 1.0),
        ("1. alpha\n2. gamma\n3. delta", THREE, 2 / 3),
        ("beta beta beta", THREE, 1 / 3),
        ("alphabeta gammas", THREE, 0.0),
        ("1111111, 2222222, 3333333", ("1111111", "4444444", "3333333", "5555555"), 0.5),
        ("11111112222222", ("1111111", "2222222"), 0.0),
    ],
)
def test_score(text: str, answers: tuple[str, ...], expected: float) -> None:
    assert score("niah_multivalue", text, answers) == pytest.approx(expected)


@pytest.mark.parametrize("task", TASKS)
def test_every_task_scores_its_own_answers(task: str, made: dict[str, list[Example]]) -> None:
    first, second = made[task][:2]
    assert score(task, f" {', '.join(first.answers)}.", first.answers) == 1
    assert score(task, ", ".join(second.answers), first.answers) == 0
    assert score(task, first.answers[0], first.answers) == pytest.approx(1 / len(first.answers))
    # Room for the answers as a list of lines, where every digit and every four letters are a token.
    needed = FakeTokenizer().encode("".join(f"\n1. {answer}" for answer in first.answers))
    assert len(needed) <= TASKS[task].max_new_tokens


# --- what is asked is in the context ----------------------------------------------------------------------------------


@pytest.mark.parametrize("task", HIDDEN)
def test_needles_are_in_the_context_once(task: str, made: dict[str, list[Example]]) -> None:
    for example in made[task]:
        assert len(example.needles) == {"niah_single": 1, "vt": 5}.get(task, 4)
        for needle in example.needles:
            assert example.context.count(needle.text) == 1
            assert example.context[needle.start :].startswith(needle.text)
            before, after = example.context[: needle.start], example.context[needle.start + len(needle.text) :]
            assert before.endswith("\n\n") and (after.startswith("\n\n") or not after)
            opening = len(before.partition("\n\n")[0])
            share = (len(hay(before, example)) - opening) / (len(hay(example.context, example)) - opening)
            assert needle.depth == pytest.approx(share, abs=0.02)
        assert [needle.start for needle in example.needles] == sorted(needle.start for needle in example.needles)
        _, _, body = hay(example.context, example).partition("\n\n")
        assert len(body) > LENGTH and not RESERVED.search(body)


@pytest.mark.parametrize("task", [task for task in HIDDEN if task.startswith("niah")])
def test_numbers_belong_to_the_names_that_are_asked_for(task: str, made: dict[str, list[Example]]) -> None:
    for example in made[task]:
        pairs = re.findall(r"^One of the special magic numbers for (\w+) is: (\d{7})\.$", example.context, re.MULTILINE)
        assert len(pairs) == len(example.needles) == len({number for _, number in pairs})
        assert all(example.context.count(number) == 1 for _, number in pairs)
        asked = re.fullmatch(
            r"What (?:is|are all) the special magic numbers? for (.*) mentioned in the text\?", example.question
        )
        assert asked
        names = re.split(r", and |, ", asked[1])
        assert list(example.answers) == [number for name in names for key, number in pairs if key == name]
        plural = ("numbers", "are") if len(example.answers) > 1 else ("number", "is")
        assert example.answer_prefix == (
            f" The special magic {plural[0]} for {asked[1]} mentioned in the text {plural[1]}"
        )
        expected = {"niah_single": (1, 1, 1), "niah_multikey": (4, 1, 1), "niah_multivalue": (1, 1, 4)}
        keys = len({name for name, _ in pairs})
        assert (keys, len(names), len(example.answers)) == expected.get(task, (4, 4, 4))


def test_variables_are_the_chain_of_the_text(made: dict[str, list[Example]]) -> None:
    for example in made["vt"]:
        value = re.search(r"assigned the value (\d{5}) in the text", example.question)
        assert value
        found = {value[1]}
        # One pass is enough only if a variable is assigned before it is used.
        for name, source in re.findall(r"^VAR ([A-Z]{5}) = (?:VAR )?(\w+)$", example.context, re.MULTILINE):
            assert source in found
            found.add(name)
        assert found == {value[1], *example.answers} and len(example.answers) == 5
        assert example.context.count(value[1]) == 1


def test_sum_is_of_the_numbers_of_the_text(made: dict[str, list[Example]]) -> None:
    for example in made["aggregation"]:
        amounts = re.findall(r"^The \w+ depot holds (\d+) special magic crates\.$", example.context, re.MULTILINE)
        assert len(amounts) == 4 and example.answers == (str(sum(map(int, amounts))),)


@pytest.mark.parametrize("length", [600, 1500, 20_000])
def test_common_words_are_the_most_common(length: int) -> None:
    (example,) = examples("cwe", FakeTokenizer(), length=length, count=1)
    _, _, listed = example.context.partition("\n\n")
    numbers, words = zip(*re.findall(r"(\d+)\. (\w+)(?: |$)", listed), strict=True)
    assert listed == " ".join(f"{number}. {word}" for number, word in zip(numbers, words, strict=True))
    assert list(map(int, numbers)) == list(range(1, len(words) + 1))
    counts = Counter(words)
    assert {word for word, _ in counts.most_common(10)} == set(example.answers) and len(example.answers) == 10
    rest = max(count for word, count in counts.items() if word not in example.answers)
    assert min(counts[word] for word in example.answers) >= 3 * rest


@pytest.mark.parametrize("size", [*range(120, 140), 1000])
def test_frequent_words_are_the_most_frequent(size: int, made: dict[str, list[Example]]) -> None:
    del made  # the held-out text is read by now
    example = TASKS["fwe"].generate("fwe", random.Random(size), 0.5).build(size)
    ranked = Counter(example.context.partition("\n\n")[2].split()).most_common()
    assert [word for word, _ in ranked[:4]] == ["...", *example.answers]
    assert all(one > other for (_, one), (_, other) in itertools.pairwise(ranked[:5]))


@pytest.mark.parametrize("task", ["niah_single", "niah_multikey"])
@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_depth_that_was_asked_for(task: str, depth: float) -> None:
    for example in examples(task, FakeTokenizer(), length=3000, count=2, depth=depth):
        (needle,) = (needle for needle in example.needles if example.answers[0] in needle.text)
        assert example.depth == needle.depth == pytest.approx(depth, abs=0.04)
        others = [other.text for other in example.needles if other is not needle]
        before, _, after = (hay(part, example) for part in example.context.partition(needle.text))
        if depth == 0:
            assert before.count("\n\n") == 1 + sum(text in example.context[: needle.start] for text in others)
        if depth == 1:
            assert not after.strip()


def test_values_are_new_to_the_text_and_differ() -> None:
    drawn = iter(["The", "qzxjqzxj", "qzxjqzxj", "PARAMETERS", "zqjxzqjx"])
    assert tasks._new(random.Random(0), lambda _: next(drawn), 2) == ["qzxjqzxj", "zqjxzqjx"]


def test_depths_are_spread_evenly() -> None:
    found = examples("niah_single", FakeTokenizer(), length=3000, count=12, seed=1)
    depths = sorted(example.depth for example in found if example.depth is not None)
    assert len(depths) == 12 and depths[0] < 0.2 and depths[-1] > 0.8
    assert max(after - before for before, after in itertools.pairwise(depths)) < 0.25


@pytest.mark.parametrize("task", sorted(set(TASKS) - {"niah_single", "niah_multikey"}))
def test_no_depth_without_a_single_needle(task: str, made: dict[str, list[Example]]) -> None:
    assert all(example.depth is None for example in made[task])
    with pytest.raises(InputError, match=f"task '{task}' asks for no single needle.*; niah_single, niah_multikey do"):
        examples(task, FakeTokenizer(), length=LENGTH, count=1, depth=0.5)


# --- length and seed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("length", [700, 4000])
@pytest.mark.parametrize("task", TASKS)
def test_length_is_kept(task: str, length: int, chat: bool) -> None:
    tokenizer = FakeTokenizer(chat)
    for example in examples(task, tokenizer, length=length, count=2, seed=5):
        assert example.task == task
        lengths = [
            sum(map(len, encode(example, tokenizer, question, chat=form)))
            for question in ("before", "after")
            for form in {False, chat}
        ]
        assert length - 20 <= max(lengths) <= length
        assert min(lengths) >= length - 100  # the question and the template


def test_length_is_kept_with_a_real_tokenizer(golden_models: Path) -> None:
    tokenizer = Tokenizer.load(golden_models / "llama_tied")
    assert tokenizer is not None and tokenizer.has_chat_template
    (example,) = examples("niah_multikey", tokenizer, length=LENGTH, count=1)
    forms: list[Question] = ["before", "after"]
    lengths = [sum(map(len, encode(example, tokenizer, q, chat=c))) for q in forms for c in (True, False)]
    assert LENGTH - 20 <= max(lengths) <= LENGTH


@pytest.mark.parametrize("task", TASKS)
def test_example_depends_on_its_own_index_only(task: str, made: dict[str, list[Example]]) -> None:
    tokenizer = FakeTokenizer()
    assert examples(task, tokenizer, length=LENGTH, count=2, seed=3) == made[task][:2]
    assert len({example.context for example in made[task]}) == 4
    (other,) = examples(task, tokenizer, length=LENGTH, count=1, seed=4)
    assert other.answers != made[task][0].answers and other.context != made[task][0].context


@pytest.mark.parametrize("task", HIDDEN)
def test_facts_are_the_same_at_every_length(task: str, made: dict[str, list[Example]]) -> None:
    (longer,) = examples(task, FakeTokenizer(), length=2 * LENGTH, count=1, seed=3)
    shorter = made[task][0]
    assert (longer.question, longer.answers) == (shorter.question, shorter.answers)
    assert len(longer.context) > 1.5 * len(shorter.context)


def test_equal_in_another_process(made: dict[str, list[Example]]) -> None:
    program = (
        "import zlib, test_tasks as t; from kvsparse_jax.evaluate.tasks import TASKS, examples; "
        f"made = [examples(task, t.FakeTokenizer(), length={LENGTH}, count=1, seed=3)[0] for task in TASKS]; "
        "print([zlib.crc32(repr(example).encode()) for example in made])"
    )
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent)])
    environment = {**os.environ, "PYTHONHASHSEED": "123", "PYTHONPATH": path}
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    ).stdout
    assert found.strip() == str([zlib.crc32(repr(made[task][0]).encode()) for task in TASKS])


# --- question before and after ----------------------------------------------------------------------------------------

EXAMPLE = Example("niah_single", "Read this.\n\nThe sky is green.", "Which colour?", " It is", ("green",))


def test_prompt() -> None:
    rest = "\n\nWhich colour?\nAnswer: It is"
    assert prompt(EXAMPLE) == prompt(EXAMPLE, "after") == ("Read this.\n\nThe sky is green.", rest)
    assert prompt(EXAMPLE, "before") == ("Which colour?\n\nRead this.\n\nThe sky is green.", rest)
    assert prompt(dataclasses.replace(EXAMPLE, answer_prefix=""))[1].endswith("\nAnswer:")


def test_messages() -> None:
    after = "Read this.\n\nThe sky is green.\n\nWhich colour?"
    assert messages(EXAMPLE) == [{"role": "user", "content": after}]
    assert messages(EXAMPLE, "before") == [{"role": "user", "content": f"Which colour?\n\n{after}"}]


@pytest.mark.parametrize("question", ["before", "after"])
def test_plain_ids(question: Question) -> None:
    tokenizer = FakeTokenizer()
    first, rest = encode(EXAMPLE, tokenizer, question, chat=False)
    assert first + rest == tokenizer.encode("".join(prompt(EXAMPLE, question)))
    # The full stop and the line breaks after it are one token, which belongs to the second part.
    assert tokenizer.decode(first) + "." == prompt(EXAMPLE, question)[0]
    assert first[0] == BOS and BOS not in rest
    assert encode(EXAMPLE, FakeTokenizer(chat=False), question) == (first, rest)


@pytest.mark.parametrize("question", ["before", "after"])
def test_chat_ids(question: Question) -> None:
    tokenizer = FakeTokenizer()
    first, rest = encode(EXAMPLE, tokenizer, question)
    assert first + rest == [
        *tokenizer.apply_chat_template(messages(EXAMPLE, question), True),
        *tokenizer.encode("It is", add_bos=False),
    ]
    asked = "Which colour?\n\n" if question == "before" else ""
    assert tokenizer.decode(first) == f"[system]\nBe kind.[end]\n[user]\n{asked}Read this.\n\nThe sky is green"
    assert tokenizer.decode(rest) == ".\n\nWhich colour?[end]\n[assistant]\nIt is"


@pytest.mark.parametrize("chat", [True, False])
def test_ids_of_a_real_tokenizer(chat: bool, golden_models: Path) -> None:
    tokenizer = Tokenizer.load(golden_models / "llama_tied")
    assert tokenizer is not None
    other = dataclasses.replace(EXAMPLE, question="How many birds were there?", answer_prefix=" There were")
    first, rest = encode(EXAMPLE, tokenizer, chat=chat)
    if chat:
        text = tokenizer.apply_chat_template(messages(EXAMPLE), True, tokenize=False) + "It is"
    else:
        text = "".join(prompt(EXAMPLE))
    assert first + rest == tokenizer.encode(text)
    assert (first + rest).count(tokenizer.bos_token_id or 0) == 1
    assert "The sky is gre" in tokenizer.decode(first) and "colour" not in tokenizer.decode(first)
    assert tokenizer.decode(rest).endswith("It is")
    # What is compressed does not know the question, unless that stands before it.
    assert encode(other, tokenizer, chat=chat)[0] == first
    assert encode(other, tokenizer, "before", chat=chat)[0] != encode(EXAMPLE, tokenizer, "before", chat=chat)[0]


# --- bad input --------------------------------------------------------------------------------------------------------


def test_bad_input() -> None:
    tokenizer = FakeTokenizer(chat=False)
    with pytest.raises(InputError, match=r"unknown task 'needle'; there are niah_single, .*, aggregation$"):
        examples("needle", tokenizer, length=1000, count=1)
    with pytest.raises(InputError, match="unknown task 'needle'; there are niah_single"):
        score("needle", "text", ["answer"])
    with pytest.raises(InputError, match="has no tokenizer, so no task can be made"):
        examples("vt", None, length=1000, count=1)
    with pytest.raises(InputError, match="has no tokenizer, so no task can be encoded"):
        encode(EXAMPLE, None)
    for count in (0, -1, 1.5, True):
        with pytest.raises(InputError, match="count must be a whole number, at least 1"):
            examples("vt", tokenizer, length=1000, count=count)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="length must be a whole number, at least 1, not 0"):
        examples("vt", tokenizer, length=0, count=1)
    for depth in (-0.1, 1.1, float("nan")):
        with pytest.raises(InputError, match=r"depth must be from 0 \(start\) to 1 \(end\)"):
            examples("niah_single", tokenizer, length=1000, count=1, depth=depth)
    for answers in ([], "green", ["green", "..."]):
        with pytest.raises(InputError, match="at least one text with a letter or digit"):
            score("vt", "green", answers)
    with pytest.raises(InputError, match="before or after the context, not 'between'"):
        prompt(EXAMPLE, "between")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="before or after the context, not 'between'"):
        encode(EXAMPLE, tokenizer, "between")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no chat template; ask for plain prompts"):
        encode(EXAMPLE, tokenizer, chat=True)


@pytest.mark.parametrize("task", TASKS)
def test_least_length(task: str) -> None:
    """The message names a length that is enough, and one token less is not."""
    tokenizer = FakeTokenizer()
    with pytest.raises(
        InputError, match=rf"task '{task}' needs at least \d+ tokens with this tokenizer, got 50"
    ) as told:
        examples(task, tokenizer, length=50, count=1)
    least = int(re.findall(r"\d+", str(told.value))[0])
    assert len(examples(task, tokenizer, length=least, count=1)) == 1
    with pytest.raises(InputError, match=f"needs at least {least} tokens"):
        examples(task, tokenizer, length=least - 1, count=1)


def test_template_that_changes_the_text() -> None:
    class Shouting(FakeTokenizer):
        def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
            return super().apply_chat_template(*args, **kwargs).upper()

    with pytest.raises(InputError, match="the chat template changes the text"):
        encode(EXAMPLE, Shouting())

"""Tasks that need the whole context: needles in a haystack and their relatives, after RULER (arXiv 2404.06654).

Every example is made here, at any length, from a seed: facts hidden in the held-out text of ``corpus``, or lists of
words. Context and question are apart, so that a question can be asked of a cache that was compressed without knowing
it (``"after"``, the hard case) or be put in front of the context as well (``"before"``).

    for example in examples("niah_single", lm.tokenizer, length=2048, count=20):
        context_ids, question_ids = encode(example, lm.tokenizer, "after")
        ...  # prefill context_ids, compress, append question_ids, generate TASKS[example.task].max_new_tokens
        score(example.task, generated_text, example.answers)

Questions, prefixes and scores are RULER's, with these differences: facts stand between paragraphs of built-in text,
there is no worked example before ``vt`` and ``cwe``, no wording says that the text is "above" its question, and an
answer counts only as a whole word. The needles' wording is the one that ``corpus`` reserves for evaluation
(``RESERVED``). ``aggregation`` is not of RULER.
"""

import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple, get_args

from kvsparse_jax.corpus import Tokenizer, documents
from kvsparse_jax.errors import InputError, whole

Question = Literal["before", "after"]
"""Where a question stands: after the context only, or before it as well."""


@dataclass(frozen=True)
class Needle:
    """A sentence that the answer depends on, or that distracts from it.

    Attributes:
      text: The sentence.
      start: Its first character in the context.
      depth: Share of the haystack before it, 0 to 1.
    """

    text: str
    start: int
    depth: float


@dataclass(frozen=True)
class Example:
    """A context and a question about it. ``dataclasses.replace(example, answer_prefix="")`` leaves the answer unbegun.

    Attributes:
      task: One of `TASKS`.
      context: What to do in one sentence, then the text.
      question: Asks for the answers.
      answer_prefix: How the answer begins, with a space in front; the answers come next.
      answers: What has to be found.
      depth: Of the one needle that is asked for; None where there are several or none.
      needles: All hidden sentences, in the order of the context.
    """

    task: str
    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    depth: float | None = None
    needles: tuple[Needle, ...] = ()


class Draft(NamedTuple):
    """An example whose length is still open.

    Attributes:
      build: Makes it of that many characters of haystack, or words of a list.
      least: Fewest that make sense.
      step: As many as show how many tokens one costs.
    """

    build: Callable[[int], Example]
    least: int
    step: int


class Kind(NamedTuple):
    """What a name of `TASKS` stands for.

    Attributes:
      help: What it is, for ``--help``.
      generate: Makes a draft from the name, a random generator and the depth of the needle.
      scorer: From the generated text and the answers to 0 (wrong) ... 1 (right).
      max_new_tokens: Enough to give the answers after `answer_prefix`.
      one_needle: Whether one needle is asked for, so that a depth can be chosen.
    """

    help: str
    generate: Callable[[str, random.Random, float], Draft]
    scorer: Callable[[str, Sequence[str]], float]
    max_new_tokens: int
    one_needle: bool = False


def examples(
    task: str,
    tokenizer: Tokenizer | None,
    *,
    length: int,
    count: int,
    seed: int = 0,
    depth: float | None = None,
) -> list[Example]:
    """Examples of one task.

    An example depends on task, length, seed, depth, its own index and the tokenizer, not on how many there are. Facts
    and answers do not depend on the length either (but those of word lists do), so lengths can be compared in pairs.

    Args:
      task: One of `TASKS`.
      tokenizer: Of the model; measures the length.
      length: Tokens of context, question and answer prefix at most, in the longest way to put them together: question
        before and after, with or without the chat template. Leave room for the answer in the model's context.
      count: How many.
      seed: Facts, text and order of the depths.
      depth: Where the needle of `niah_single` and `niah_multikey` stands, 0 (start) to 1 (end), at the nearest end of a
        paragraph; None spreads the depths evenly, however many examples there are.

    Returns:
      `count` examples.

    Raises:
      InputError: Unknown task, no tokenizer, `length` too small, or a depth that cannot be had.
    """
    kind = _kind(task)
    if tokenizer is None:
        raise InputError("the model directory has no tokenizer, so no task can be made")
    whole("length", length, 1)
    whole("count", count, 1)
    if depth is not None and not kind.one_needle:
        single = ", ".join(name for name, other in TASKS.items() if other.one_needle)
        raise InputError(f"task {task!r} asks for no single needle, so it takes no depth; {single} do")
    if depth is not None and not 0 <= depth <= 1:
        raise InputError(f"depth must be from 0 (start) to 1 (end), not {depth!r}")
    spread = random.Random(f"tasks/{task}/{seed}/depths").random()
    found = []
    for index in range(count):
        rng = random.Random(f"tasks/{task}/{seed}/{index}")
        # Multiples of the golden ratio lie evenly in the unit interval wherever one stops.
        wanted = (spread + index * (math.sqrt(5) - 1) / 2) % 1 if depth is None else depth
        found.append(_fit(kind.generate(task, rng, wanted), tokenizer, length))
    return found


def prompt(example: Example, question: Question = "after") -> tuple[str, str]:
    """Plain text of an example in two parts.

    Args:
      example: What to ask.
      question: "after": the question follows the context. "before": it stands in front of the context as well.

    Returns:
      What is prefilled first, and what is appended afterwards.

    Raises:
      InputError: `question` is neither.
    """
    return _before(example, question), f"\n\n{example.question}\nAnswer:{example.answer_prefix}"


def messages(example: Example, question: Question = "after") -> list[dict[str, str]]:
    """The user's message of an example, for a chat template; the answer is not begun.

    Args:
      example: What to ask.
      question: As for `prompt`.
    """
    return [{"role": "user", "content": f"{_before(example, question)}\n\n{example.question}"}]


def encode(
    example: Example, tokenizer: Tokenizer | None, question: Question = "after", *, chat: bool | None = None
) -> tuple[list[int], list[int]]:
    """Token ids of an example in two parts, which together are the ids of the whole prompt.

    The first part ends with the context, or up to a token earlier where the context's last characters share a token
    with what follows. It does not depend on the question unless that stands before it.

    Args:
      example: What to ask.
      tokenizer: Of the model.
      question: As for `prompt`.
      chat: Use the chat template, and begin the assistant's turn with the answer prefix; None where there is one.

    Returns:
      What is prefilled first (BOS or the template's beginning included), and what is appended afterwards.

    Raises:
      InputError: No tokenizer, no chat template, or one that changes the text.
    """
    if tokenizer is None:
        raise InputError("the model directory has no tokenizer, so no task can be encoded")
    chat = tokenizer.has_chat_template if chat is None else chat
    first, rest = _texts(example, tokenizer, question, chat)
    ids = tokenizer.encode(first + rest, add_bos=not chat)
    head = tokenizer.encode(first, add_bos=not chat)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, head, strict=False)))
    return ids[:same], ids[same:]


def score(task: str, text: str, answers: Sequence[str]) -> float:
    """How right a generated text is.

    Args:
      task: One of `TASKS`.
      text: What the model wrote, without the answer prefix.
      answers: Of the example.

    Returns:
      The share of the answers that the text contains: 0 or 1 where there is one answer. Case and punctuation do not
      matter, nor do commas in "1,234,567"; part of a word or of a longer number is not the answer.

    Raises:
      InputError: Unknown task, or no answers.
    """
    kind = _kind(task)
    if isinstance(answers, str) or not answers or not all(_words(answer) for answer in answers):
        raise InputError(f"answers must be at least one text with a letter or digit, not {answers!r}")
    return kind.scorer(text, answers)


def _kind(task: str) -> Kind:
    if task not in TASKS:
        raise InputError(f"unknown task {task!r}; there are {', '.join(TASKS)}")
    return TASKS[task]


# --- putting the parts together ---------------------------------------------------------------------------------------


def _before(example: Example, question: Question) -> str:
    """What comes before the last question."""
    if question not in get_args(Question):
        raise InputError(f"a question stands {' or '.join(get_args(Question))} the context, not {question!r}")
    return example.context if question == "after" else f"{example.question}\n\n{example.context}"


def _texts(example: Example, tokenizer: Tokenizer, question: Question, chat: bool) -> tuple[str, str]:
    """The two parts as text, special tokens of the chat template written out."""
    if not chat:
        return prompt(example, question)
    if not tokenizer.has_chat_template:
        raise InputError("the tokenizer has no chat template; ask for plain prompts")
    conversation = messages(example, question)
    rendered: str = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    start = rendered.rfind(conversation[0]["content"])
    if start < 0:
        raise InputError("the chat template changes the text of a message; ask for plain prompts")
    end = start + len(_before(example, question))
    # The assistant's turn begins after the template's own white space.
    return rendered[:end], rendered[end:] + example.answer_prefix.lstrip()


def _tokens(example: Example, tokenizer: Tokenizer) -> int:
    """Tokens of the longest form of an example: the question twice, with or without the chat template."""
    forms = (False, True) if tokenizer.has_chat_template else (False,)
    texts = [("".join(_texts(example, tokenizer, "before", chat)), chat) for chat in forms]
    return max(len(tokenizer.encode(text, add_bos=not chat)) for text, chat in texts)


_NEAR = 8  # tokens that may be missing from the length
_TRIES = 20


def _fit(draft: Draft, tokenizer: Tokenizer, length: int) -> Example:
    """The example that comes near `length` tokens and has no more.

    Tokens grow about in line with characters or words, so each try is where the line through the last measurements
    meets the length, away from the ends of the interval that is left. Only what was measured is returned.
    """
    best = draft.build(draft.least)
    low, at_low = draft.least, _tokens(best, tokenizer)
    if at_low > length:
        raise InputError(f"task {best.task!r} needs at least {at_low} tokens with this tokenizer, got {length}")
    high, at_high = low, at_low  # an upper end once at_high exceeds the length
    rate = max((_tokens(draft.build(low + draft.step), tokenizer) - at_low) / draft.step, 1e-3)
    for _ in range(_TRIES):
        if length - at_low <= _NEAR or high - low == 1:
            break
        size = low + max(1, round((length - at_low) / rate))
        if at_high > length:
            margin = (high - low) // 10 or 1
            size = min(max(size, low + margin), high - margin)
        example = draft.build(size)
        tokens = _tokens(example, tokenizer)
        if tokens <= length:
            if at_high <= length and tokens > at_low:
                rate = (tokens - at_low) / (size - low)
            best, low, at_low = example, size, tokens
        else:
            high, at_high = size, tokens
        if at_high > length:
            rate = (at_high - at_low) / (high - low)
    return best


# --- scores -----------------------------------------------------------------------------------------------------------

# Numbers with commas between thousands, numbers with decimals, words.
_WORD = re.compile(r"\d{1,3}(?:,\d{3})+(?!\w|,\d)(?:\.\d+)?|\d+\.\d+|\w+")


def _words(text: str) -> list[str]:
    found = (word.replace(",", "").strip("_") for word in _WORD.findall(text.casefold()))
    return [word for word in found if word]


def _contained(text: str, answers: Sequence[str]) -> float:
    """Share of the answers that are in the text, as whole words."""
    said = f" {' '.join(_words(text))} "
    return sum(f" {' '.join(_words(answer))} " in said for answer in answers) / len(answers)


# --- the haystack -----------------------------------------------------------------------------------------------------

_KINDS = ("manuals", "readme", "docstrings")  # held-out text that is mostly prose
_BLOCK = 400  # characters of a block, about; needles stand between blocks
_LEAST = 600  # characters of the smallest haystack


@cache
def _sources() -> tuple[tuple[str, ...], ...]:
    """The blocks of every held-out document."""
    return tuple(
        tuple(_blocks(document.text or "")) for kind in _KINDS for document in documents(kind, split="heldout")
    )


def _blocks(text: str) -> Iterator[str]:
    """The paragraphs of a text, long ones cut at the end of a line."""
    for paragraph in re.split(r"\n\s*\n", text):
        lines: list[str] = []
        for line in paragraph.strip("\n").split("\n"):
            if lines and sum(map(len, lines)) + len(line) > _BLOCK:
                yield "\n".join(lines)
                lines = []
            lines.append(line[:_BLOCK])
        if any(line.strip() for line in lines):
            yield "\n".join(lines)


@cache
def _everything() -> str:
    """All text that a haystack can be made of, in small letters."""
    return "\n".join(itertools.chain.from_iterable(_sources())).casefold()


@cache
def _vocabulary() -> tuple[str, ...]:
    """Plain words that several documents have: a word of one document is often a name in its code."""
    found = Counter(
        itertools.chain.from_iterable(
            set(re.findall(r"(?<![\w'.])[a-z]{4,10}(?![\w'(])", "\n".join(blocks))) for blocks in _sources()
        )
    )
    return tuple(sorted(word for word, count in found.items() if count > 1))


class _Haystack:
    """Held-out text in an order of its own, from the start again when all of it (about 200,000 tokens) was read."""

    def __init__(self, rng: random.Random) -> None:
        sources = rng.sample(_sources(), len(_sources()))
        sources[0] = sources[0][rng.randrange(len(sources[0])) :]
        self._stream = itertools.cycle(itertools.chain.from_iterable(sources))
        self._read: list[str] = []

    def cut(self, size: int) -> list[str]:
        """The blocks of the first `size` characters, the last one cut between words (or within one like "-----")."""
        found: list[str] = []
        for index in itertools.count():
            if index == len(self._read):
                self._read.append(next(self._stream))
            block = self._read[index]
            if len(block) >= size:
                last = block if len(block) == size else re.sub(r"\s*\S{0,20}$", "", block[: size + 1])
                return [*found, last] if last.strip() else found
            found.append(block)
            size -= len(block)
        raise AssertionError("a cycle has no end")


class _Fact(NamedTuple):
    """A sentence, and the depth where it is to be hidden."""

    text: str
    depth: float


def _hide(opening: str, blocks: Sequence[str], facts: Sequence[_Fact]) -> tuple[str, tuple[Needle, ...]]:
    """The context of an opening and blocks with facts between them, each as near as can be to its depth."""
    ends = [0, *itertools.accumulate(map(len, blocks))]
    total = ends[-1]
    places: dict[int, list[str]] = {}
    for fact in sorted(facts, key=lambda fact: fact.depth):
        place = min(range(len(ends)), key=lambda i: abs(ends[i] - fact.depth * total))
        places.setdefault(place, []).append(fact.text)
    parts, needles, start = [opening], [], len(opening)
    for place, end in enumerate(ends):
        for text in places.get(place, ()):
            needles.append(Needle(text, start + 2, end / total))
            parts.append(text)
            start += 2 + len(text)
        if place < len(blocks):
            parts.append(blocks[place])
            start += 2 + len(blocks[place])
    return "\n\n".join(parts), tuple(needles)


def _hidden(
    task: str,
    rng: random.Random,
    opening: str,
    facts: Sequence[_Fact],
    question: str,
    answer_prefix: str,
    answers: Sequence[str],
    asked: str | None = None,
) -> Draft:
    """A draft of facts in a haystack; `asked` is the fact whose depth is told."""
    haystack = _Haystack(rng)

    def build(size: int) -> Example:
        context, needles = _hide(opening, haystack.cut(size), facts)
        depth = next((needle.depth for needle in needles if needle.text == asked), None)
        return Example(task, context, question, answer_prefix, tuple(answers), depth, needles)

    return Draft(build, _LEAST, 2000)


def _new(rng: random.Random, draw: Callable[[random.Random], str], count: int) -> list[str]:
    """Different values that the text of no haystack contains."""
    found: list[str] = []
    while len(found) < count:
        value = draw(rng)
        if value not in found and value.casefold() not in _everything():
            found.append(value)
    return found


def _depths(rng: random.Random, count: int) -> list[float]:
    return sorted(rng.random() for _ in range(count))


# --- needles ----------------------------------------------------------------------------------------------------------

_NAMES = (
    "anchor apple arrow badger balcony barrel beacon bicycle bridge candle canyon castle chapel comet compass cottage "
    "dolphin dragon eagle engine falcon feather ferry forest fountain garden glacier guitar hammer harbour heron "
    "island kettle kitchen lantern lighthouse meadow mirror mountain museum orchard otter palace panther piano planet "
    "pyramid rabbit raven river rocket saddle salmon shepherd sparrow station statue summit temple tiger tractor "
    "turtle valley village violin walnut whale willow window workshop"
).split()
_SEVERAL = 4  # needles, as in RULER


def _number(rng: random.Random) -> str:
    return str(rng.randrange(10**6, 10**7))


def _needle(name: str, number: str) -> str:
    return f"One of the special magic numbers for {name} is: {number}."


_ONE_HIDDEN = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards."
)
_SOME_HIDDEN = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards."
)


def _one(name: str) -> tuple[str, str]:
    """Question and answer prefix for one number."""
    return (
        f"What is the special magic number for {name} mentioned in the text?",
        f" The special magic number for {name} mentioned in the text is",
    )


def _all(names: str) -> tuple[str, str]:
    """Question and answer prefix for several numbers."""
    return (
        f"What are all the special magic numbers for {names} mentioned in the text?",
        f" The special magic numbers for {names} mentioned in the text are",
    )


def _niah_single(task: str, rng: random.Random, depth: float) -> Draft:
    name, (number,) = rng.choice(_NAMES), _new(rng, _number, 1)
    needle = _needle(name, number)
    return _hidden(task, rng, _ONE_HIDDEN, [_Fact(needle, depth)], *_one(name), [number], needle)


def _niah_multikey(task: str, rng: random.Random, depth: float) -> Draft:
    """Numbers of several names; the first is asked for."""
    names, numbers = rng.sample(_NAMES, _SEVERAL), _new(rng, _number, _SEVERAL)
    needles = list(map(_needle, names, numbers))
    facts = list(map(_Fact, needles, [depth, *_depths(rng, _SEVERAL - 1)]))
    return _hidden(task, rng, _SOME_HIDDEN, facts, *_one(names[0]), numbers[:1], needles[0])


def _niah_multivalue(task: str, rng: random.Random, depth: float) -> Draft:
    """Several numbers of one name."""
    name, numbers = rng.choice(_NAMES), _new(rng, _number, _SEVERAL)
    facts = [_Fact(_needle(name, number), at) for number, at in zip(numbers, _depths(rng, _SEVERAL), strict=True)]
    return _hidden(task, rng, _SOME_HIDDEN, facts, *_all(name), numbers)


def _niah_multiquery(task: str, rng: random.Random, depth: float) -> Draft:
    """Numbers of several names, all asked for."""
    names, numbers = rng.sample(_NAMES, _SEVERAL), _new(rng, _number, _SEVERAL)
    facts = list(map(_Fact, map(_needle, names, numbers), _depths(rng, _SEVERAL)))
    order = rng.sample(names, _SEVERAL)  # asked in another order than the text has
    asked = f"{', '.join(order[:-1])}, and {order[-1]}"
    return _hidden(task, rng, _SOME_HIDDEN, facts, *_all(asked), [numbers[names.index(name)] for name in order])


# --- the other tasks --------------------------------------------------------------------------------------------------

_HOPS = 4  # variables that take their value from another one, as in RULER


def _vt(task: str, rng: random.Random, depth: float) -> Draft:
    names = _new(rng, lambda r: "".join(r.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5)), _HOPS + 1)
    (value,) = _new(rng, lambda r: str(r.randrange(10**4, 10**5)), 1)
    lines = [f"VAR {names[0]} = {value}"]
    lines += [f"VAR {name} = VAR {source}" for source, name in itertools.pairwise(names)]
    return _hidden(
        task,
        rng,
        "Memorize and track the chain of variable assignment hidden in the following text.",
        list(map(_Fact, lines, _depths(rng, len(lines)))),
        f"Find all variables that are assigned the value {value} in the text.",
        f" According to the chain of variable assignment in the text, {len(names)} variables are assigned the value "
        f"{value}, they are:",
        names,
    )


_COMMON = 10


def _cwe(task: str, rng: random.Random, depth: float) -> Draft:
    """A list where ten words occur 30 times and all others 3 times; fewer in a short list, more in a very long one."""
    words = rng.sample(_vocabulary(), len(_vocabulary()))
    common, others = words[:_COMMON], words[_COMMON:]
    salt = rng.random()

    def build(size: int) -> Example:
        often = min(30, size // (2 * _COMMON))
        seldom = max(often // 10, -(-size // len(others)), 1)
        often = max(often, 10 * seldom) if seldom > 1 else often
        rest = itertools.chain.from_iterable(itertools.repeat(word, seldom) for word in others)
        items = common * often + list(itertools.islice(rest, size - often * _COMMON))
        random.Random(f"{salt}/{size}").shuffle(items)
        listed = " ".join(f"{number}. {word}" for number, word in enumerate(items, 1))
        return Example(
            task,
            "Below is a numbered list of words. In these words, some appear more often than others. "
            f"Memorize the ones that appear most often.\n\n{listed}",
            f"What are the {_COMMON} most common words in the list?",
            f" The top {_COMMON} words that appear most often in the list are:",
            tuple(common),
        )

    return Draft(build, 60, 200)


_RANKED = 3


def _fwe(task: str, rng: random.Random, depth: float) -> Draft:
    """Made-up words whose frequency falls with the square of the rank; the first rank is dots."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["...", *_new(rng, lambda r: "".join(r.choices(letters, k=6)), _RANKED)]
    salt = rng.random()

    def build(size: int) -> Example:
        order = random.Random(salt)
        counts = [round(size / (rank**2 * math.pi**2 / 6)) for rank in range(1, math.isqrt(2 * size))]
        counts = [count for count in counts if count]
        known = [*words, *("".join(order.choices(letters, k=6)) for _ in counts[len(words) :])]
        items = [word for word, count in zip(known, counts, strict=True) for _ in range(count)]
        order.shuffle(items)
        return Example(
            task,
            "Read the following coded text and track the frequency of each coded word. "
            f"Find the three most frequently appeared coded words.\n\n{' '.join(items)}",
            "Do not provide any explanation. Please ignore the dots '...'. "
            "What are the three most frequently appeared words in the coded text?",
            " According to the coded text, the three most frequently appeared words are:",
            tuple(words[1:]),
        )

    return Draft(build, 120, 200)


def _aggregation(task: str, rng: random.Random, depth: float) -> Draft:
    """Numbers of several names whose sum is asked for."""
    names, amounts = rng.sample(_NAMES, _SEVERAL), rng.sample(range(11, 60), _SEVERAL)
    lines = [
        f"The {name} depot holds {amount} special magic crates." for name, amount in zip(names, amounts, strict=True)
    ]
    return _hidden(
        task,
        rng,
        "Some depots that hold special magic crates are mentioned within the following text. Make sure to memorize how "
        "many crates each of them holds. I will quiz you about their sum afterwards.",
        list(map(_Fact, lines, _depths(rng, _SEVERAL))),
        "How many special magic crates do all the depots mentioned in the text hold together?",
        " The number of special magic crates that all the depots hold together is",
        [str(sum(amounts))],
    )


TASKS: Mapping[str, Kind] = {
    "niah_single": Kind("one needle: a number hidden in text", _niah_single, _contained, 32, one_needle=True),
    "niah_multikey": Kind("numbers of several names, one asked for", _niah_multikey, _contained, 32, one_needle=True),
    "niah_multivalue": Kind("several numbers of one name, all asked for", _niah_multivalue, _contained, 128),
    "niah_multiquery": Kind("numbers of several names, all asked for", _niah_multiquery, _contained, 128),
    "vt": Kind("variable tracking: all variables of a chain of assignments", _vt, _contained, 64),
    "cwe": Kind("common words extraction: the ten most common words of a list", _cwe, _contained, 120),
    "fwe": Kind("frequent words extraction: the three most frequent made-up words", _fwe, _contained, 64),
    "aggregation": Kind("the sum of numbers scattered over the text", _aggregation, _contained, 32),
}
"""The tasks by name."""

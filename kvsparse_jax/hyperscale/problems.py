"""Problems with a known answer: from a file, or made here from a seed."""

import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvsparse_jax.errors import InputError, whole


@dataclass(frozen=True)
class Problem:
    """A question.

    Attributes:
        prompt: what the model is given.
        answer: what has to come out.
    """

    prompt: str
    answer: str


class Kind(NamedTuple):
    """Problems that are made here.

    Attributes:
        help: what they are.
        make: one, from a random generator and its size.
        size: steps of one where none are asked for.
    """

    help: str
    make: Callable[[random.Random, int], Problem]
    size: int


def _question(text: str, worked: str) -> str:
    return (
        "Solve the problem step by step, one short line for each step. "
        f"End with a line that says 'Answer: ' and the number.\n\n{worked}\n\nProblem: {text}\n"
    )


_SUM = "Problem: What is 5 + 8 - 2?\n5 + 8 = 13\n13 - 2 = 11\nAnswer: 11"


def _arithmetic(rng: random.Random, steps: int) -> Problem:
    total = rng.randint(2, 9)
    text = str(total)
    for _ in range(steps):
        add = rng.random() < 0.5 or total < 2
        number = rng.randint(1, 9) if add else rng.randint(1, min(total, 9))
        total += number if add else -number
        text += f" {'+' if add else '-'} {number}"
    return Problem(_question(f"What is {text}?", _SUM), str(total))


_BOX = (
    "Problem: A box holds 4 pens and 6 cups. Ann puts 3 pens in. Tom takes 2 cups out. How many pens are in the box?\n"
    "pens: 4\nAnn puts 3 pens in: 4 + 3 = 7\nTom takes cups, the pens stay 7\nAnswer: 7"
)
_NAMES = ("Ann", "Tom", "Eva", "Ben", "Mia", "Leo")
_THINGS = ("pens", "cups", "books", "keys", "coins", "shells")


def _objects(rng: random.Random, steps: int) -> Problem:
    things = rng.sample(_THINGS, 2)
    held = {thing: rng.randint(3, 9) for thing in things}
    parts = [f"A box holds {held[things[0]]} {things[0]} and {held[things[1]]} {things[1]}."]
    for _ in range(steps):
        thing, who = rng.choice(things), rng.choice(_NAMES)
        add = rng.random() < 0.5 or held[thing] < 2
        number = rng.randint(1, 9) if add else rng.randint(1, min(held[thing], 9))
        held[thing] += number if add else -number
        parts.append(f"{who} {'puts' if add else 'takes'} {number} {thing} {'in' if add else 'out'}.")
    asked = rng.choice(things)
    return Problem(_question(f"{' '.join(parts)} How many {asked} are in the box?", _BOX), str(held[asked]))


KINDS: dict[str, Kind] = {
    "arithmetic": Kind("sums and differences of small numbers", _arithmetic, 4),
    "objects": Kind("what is put into a box and taken out, with things that nobody asks for", _objects, 4),
}
"""Problems that need no file."""


def problems(source: str | os.PathLike[str]) -> list[Problem]:
    """Problems of a file, or generated ones.

    Args:
        source: a JSONL file of {"prompt": ..., "answer": ...}, or ``KIND`` or ``KIND:count=50,steps=4,seed=0`` with a
            kind of :data:`KINDS`.

    Raises:
        InputError: what is wrong, with its line.
    """
    name, _, rest = os.fspath(source).partition(":")
    return _generated(name, rest) if name in KINDS else _read(Path(source))


def _generated(name: str, rest: str) -> list[Problem]:
    kind = KINDS[name]
    settings = {"count": 50, "steps": kind.size, "seed": 0}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key not in settings or not value.isdecimal():
            raise InputError(f"problems {name}: {part!r} is none of count=N, steps=N, seed=N")
        settings[key] = whole(key, int(value), 0 if key == "seed" else 1)
    count, steps, seed = settings.values()
    return [kind.make(random.Random(f"{name}/{steps}/{seed}/{index}"), steps) for index in range(count)]


def _read(path: Path) -> list[Problem]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        kinds = ", ".join(KINDS)
        raise InputError(f"{path}: {error.strerror} (problems are a JSONL file or one of {kinds})") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt, answer = row["prompt"], row["answer"]
        except (ValueError, KeyError, TypeError):
            raise InputError(f'{path}, line {number}: not a JSON object with "prompt" and "answer"') from None
        if isinstance(answer, int | float) and not isinstance(answer, bool):
            answer = str(answer)
        if not isinstance(prompt, str) or not isinstance(answer, str) or not prompt or not answer.strip():
            raise InputError(f"{path}, line {number}: prompt and answer must be texts that are not empty")
        found.append(Problem(prompt, answer))
    if not found:
        raise InputError(f"{path} holds no problem")
    return found

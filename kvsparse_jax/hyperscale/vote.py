"""What a chain of thought answers, when two answers are the same, and what most chains say."""

import importlib.util
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Literal

from kvsparse_jax.errors import InputError

Same = Callable[[str, str], bool]
"""Whether two answers are the same."""

Match = Literal["auto", "exact", "math"]

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?(?:/\d+)?")
_SAID = re.compile(r"\banswer\b(?: is)?\s*[:=]?\s*(.+)", re.IGNORECASE)


def extract(text: str, pattern: str | None = None) -> str | None:
    r"""The answer that a text ends with.

    Args:
        text: what the model wrote.
        pattern: a regular expression; the answer is its first group (or all of it) where it matches last. None: the
            last ``\boxed{...}``, else what follows the last "answer" in its line, else the last number.

    Returns:
        The answer, or None where there is none.

    Raises:
        InputError: no regular expression.
    """
    if pattern is not None:
        try:
            found = list(re.finditer(pattern, text))
        except re.error as error:
            raise InputError(f"{pattern!r} is no regular expression: {error}") from None
        return None if not found else _clean(found[-1].group(1 if found[-1].re.groups else 0) or "")
    boxed = _boxed(text)
    if boxed is not None:
        return _clean(boxed)
    said = [match for line in text.splitlines() for match in _SAID.finditer(line)]
    if said:
        return _clean(said[-1].group(1))
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def _clean(answer: str) -> str | None:
    return answer.lstrip("*$ \t").rstrip("*$. \t\r\n") or None


def _boxed(text: str) -> str | None:
    r"""What the last closed ``\boxed{`` holds."""
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\{", text)]):
        depth = 1
        for at in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if depth == 0:
                return text[start:at]
    return None


def _exact(one: str, other: str) -> bool:
    """Equal texts, whatever their case and white space; equal numbers, however they are written."""
    numbers = [_value(x) for x in (one, other)]
    if None not in numbers:
        return numbers[0] == numbers[1]
    return " ".join(one.casefold().split()) == " ".join(other.casefold().split())


def _value(text: str) -> Fraction | None:
    text = text.strip()
    if not _NUMBER.fullmatch(text):
        return None
    whole, _, part = text.replace(",", "").partition("/")
    return Fraction(whole) / int(part) if part and int(part) else None if part else Fraction(whole)


def _math(one: str, other: str) -> bool:
    """Equal as mathematics, by math-verify; its time limits need the main thread."""
    from math_verify import parse, verify

    if _exact(one, other):
        return True
    parsed = [parse(rf"\boxed{{{x}}}") for x in (one, other)]
    # The comparison is not symmetric for sets and inequalities; the vote needs one that is.
    return all(parsed) and bool(verify(*parsed) or verify(*reversed(parsed)))


def equality(match: Match = "auto") -> Same:
    """How answers are compared.

    Args:
        match: "exact": as texts or numbers; "math": as mathematics too, with the package math-verify (the extra
            ``maths``); "auto": "math" where that is installed.

    Raises:
        InputError: "math" without the package.
    """
    there = importlib.util.find_spec("math_verify") is not None
    if match == "math" and not there:
        raise InputError("comparing as mathematics needs the package math-verify: pip install 'kvsparse-jax[maths]'")
    return _math if match != "exact" and there else _exact


def vote(answers: Sequence[str | None], same: Same = _exact) -> str | None:
    """The answer that most chains give; of several the one that came first. Chains without an answer do not vote."""
    groups: list[tuple[str, list[str]]] = []
    for answer in answers:
        if answer is None:
            continue
        group = next((members for first, members in groups if answer in members or same(first, answer)), None)
        if group is None:
            groups.append((answer, [answer]))
        else:
            group.append(answer)
    return max(groups, key=lambda x: len(x[1]), default=(None, []))[0]

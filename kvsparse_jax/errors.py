"""The two kinds of failure that a command reports in one line instead of a traceback."""

import numbers
from typing import Any


class InputError(ValueError):
    """Bad input. The message is one line that names what is wrong and what is accepted (exit status 2)."""


class RunError(RuntimeError):
    """A run that cannot go on, such as a loss that is not finite. The message is one line (exit status 1)."""


LARGEST = 2**31 - 1
"""Largest count that arrays can be indexed with."""


def whole(name: str, value: Any, least: int) -> int:
    """A whole number from ``least`` to :data:`LARGEST`. Raises InputError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < least:
        raise InputError(f"{name} must be a whole number, at least {least}, not {value!r}")
    if int(value) > LARGEST:
        raise InputError(f"{name} must be at most {LARGEST}, not {value!r}")
    return int(value)

"""Policies as a command line names them, ``name`` or ``name:key=value,key=value``, and as a report describes them."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from kvsparse_jax.errors import InputError
from kvsparse_jax.policies.base import Policy
from kvsparse_jax.policies.dms import DMS
from kvsparse_jax.policies.streaming import SINKS, StreamingLLM

Method = Policy | Callable[[int], Policy]
"""A policy, or a function from the number of tokens of a sequence to one."""


class Settings(NamedTuple):
    """What a specification gives.

    Attributes:
        spec: its text.
        values: number of each key.
    """

    spec: str
    values: dict[str, float]

    def whole(self, key: str, default: float | None = None) -> int:
        """A whole number; InputError for another one, or for none where there is no default."""
        value = self.values.get(key, default)
        if value is None or value != int(value):
            raise InputError(f"policy {self.spec!r}: {key} must be a whole number")
        return int(value)


class Kind(NamedTuple):
    """What a name stands for.

    Attributes:
        keys: settings that it takes.
        help: what it is, for ``--help``.
        make: the method, from the settings and the policy that the model was loaded with.
    """

    keys: tuple[str, ...]
    help: str
    make: Callable[[Settings, Policy], Method]


def _streaming(given: Settings, own: Policy) -> Method:
    sinks = given.whole("sinks", SINKS)
    if ("budget" in given.values) == ("cr" in given.values):
        raise InputError(f"policy {given.spec!r}: streaming needs either budget=ENTRIES or cr=RATIO")
    if "budget" in given.values:
        return StreamingLLM(budget=given.whole("budget"), sinks=sinks)
    ratio = given.values["cr"]
    if ratio < 1:
        raise InputError(f"policy {given.spec!r}: cr must be at least 1")
    return lambda length: StreamingLLM(budget=round(length / ratio), sinks=sinks)


def _masked(given: Settings, own: Policy) -> Method:
    return lambda length: StreamingLLM(budget=length + 1, sinks=length)


def _own(given: Settings, own: Policy) -> Method:
    if not isinstance(own, DMS):
        raise InputError(f"policy {given.spec!r}: the model has no DMS policy")
    changes: dict[str, Any] = {k: given.whole(k) if k == "window" else value for k, value in given.values.items()}
    return dataclasses.replace(own, **changes)


KINDS: dict[str, Kind] = {
    "streaming": Kind(
        ("budget", "cr", "sinks"),
        f"streaming:budget=N (entries per head) or streaming:cr=X (sinks={SINKS}): StreamingLLM",
        _streaming,
    ),
    "masked": Kind((), "masked: evicts nothing, but runs the masked attention: the noise floor of rounding", _masked),
    "own": Kind(
        ("offset", "scale", "window"), "own:offset=X: the model's DMS policy with another offset, scale or window", _own
    ),
}
"""Everything that can be named. A policy joins by a row here."""


def parse(spec: str, own: Policy) -> Method:
    """The method that a specification names.

    Args:
        spec: ``name`` or ``name:key=value,key=value``, see :data:`KINDS`.
        own: the policy that the model was loaded with.

    Raises:
        InputError: what is unknown or missing.
    """
    name, _, rest = spec.partition(":")
    given: dict[str, float] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        try:
            given[key] = float(value)
        except ValueError:
            equals = ""
        if not equals or not math.isfinite(given[key]):
            raise InputError(f"policy {spec!r}: {part!r} is not of the form key=number")
    if name not in KINDS:
        raise InputError(f"unknown policy {name!r}; there are {', '.join(KINDS)}")
    kind = KINDS[name]
    if unknown := sorted(given.keys() - set(kind.keys)):
        takes = ", ".join(sorted(kind.keys)) or "no settings"
        raise InputError(f"policy {spec!r}: {name} has no setting {unknown[0]!r} (it takes {takes})")
    return kind.make(Settings(spec, given), own)


def describe(policy: Policy) -> dict[str, Any]:
    """Name and settings of a policy, without its arrays."""
    settings = {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)}  # type: ignore[arg-type]
    plain = {name: value for name, value in settings.items() if isinstance(value, str | int | float | None)}
    return {"name": type(policy).__name__, **plain, "window": policy.window, "shift": policy.shift}

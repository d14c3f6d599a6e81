"""Policies as a command line names them, ``name`` or ``name:key=value,key=value``, and as a report describes them."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from kvsparse_jax.errors import InputError
from kvsparse_jax.policies.base import Policy
from kvsparse_jax.policies.dms import DMS
from kvsparse_jax.policies.h2o import H2O
from kvsparse_jax.policies.knorm import Knorm
from kvsparse_jax.policies.kvzap import KVzap
from kvsparse_jax.policies.kvzap_budget import KVzapBudget
from kvsparse_jax.policies.kvzip import KVzip
from kvsparse_jax.policies.random import Random
from kvsparse_jax.policies.snapkv import SnapKV
from kvsparse_jax.policies.streaming import SINKS, StreamingLLM
from kvsparse_jax.policies.tova import TOVA

Method = Policy | Callable[[int], Policy]
"""A policy, or a function from the number of tokens of a sequence to one."""


class Settings(NamedTuple):
    """What a specification gives.

    Attributes:
        spec: its text.
        values: number of each key.
        texts: text of each key that is one.
    """

    spec: str
    values: dict[str, float]
    texts: dict[str, str]

    def whole(self, key: str, default: float | None = None) -> int:
        """A whole number; InputError for another one, or for none where there is no default."""
        value = self.values.get(key, default)
        if value is None or value != int(value):
            raise InputError(f"policy {self.spec!r}: {key} must be a whole number")
        return int(value)


class Kind(NamedTuple):
    """What a name stands for.

    Attributes:
        keys: settings that are numbers.
        help: what it is, for ``--help``.
        make: the method, from the settings and the policy that the model was loaded with.
        texts: settings that are texts.
    """

    keys: tuple[str, ...]
    help: str
    make: Callable[[Settings, Policy], Method]
    texts: tuple[str, ...] = ()


def _budgeted(kind: Callable[..., Policy], defaults: dict[str, Any]) -> Callable[[Settings, Policy], Method]:
    """Makes policies with a budget, given as entries per head or as a ratio of the length; all settings are whole."""

    def make(given: Settings, own: Policy) -> Method:
        settings: dict[str, Any] = {**defaults, **given.texts}
        settings |= {key: given.whole(key) for key in given.values if key not in ("budget", "cr")}
        if ("budget" in given.values) == ("cr" in given.values):
            raise InputError(f"policy {given.spec!r}: it needs either budget=ENTRIES or cr=RATIO")
        if "budget" in given.values:
            return kind(budget=given.whole("budget"), **settings)
        ratio = given.values["cr"]
        if ratio < 1:
            raise InputError(f"policy {given.spec!r}: cr must be at least 1")
        return lambda length: kind(budget=round(length / ratio), **settings)

    return make


def _kvzap(given: Settings, own: Policy) -> Method:
    if "path" not in given.texts:
        raise InputError(f"policy {given.spec!r}: kvzap needs path=DIRECTORY of a surrogate (or a hub name)")
    fixed = bool({"budget", "cr"} & given.values.keys())
    if ("threshold" in given.values) == fixed:
        raise InputError(
            f"policy {given.spec!r}: kvzap needs either threshold=NUMBER or a fixed ratio, cr=X or budget=N"
        )
    if fixed and (wrong := {"prefill", "decoding"} & given.texts.keys()):
        raise InputError(f"policy {given.spec!r}: {sorted(wrong)[0]}= goes with a threshold")
    if not fixed and "per" in given.texts:
        raise InputError(f"policy {given.spec!r}: per= goes with a fixed ratio")
    if fixed:
        values = {"newest" if key == "window" else key: value for key, value in given.values.items()}
        texts = {key: value for key, value in given.texts.items() if key != "path"}
        make = _budgeted(KVzapBudget, {"surrogate": KVzap.load(given.texts["path"])})
        return make(given._replace(values=values, texts=texts), own)
    settings: dict[str, Any] = {key: given.whole(key) for key in ("window", "sinks") if key in given.values}
    settings |= {key: given.texts[key] for key in ("prefill",) if key in given.texts}
    if (decoding := given.texts.get("decoding", "true")) not in ("true", "false"):
        raise InputError(f"policy {given.spec!r}: decoding must be true or false, not {decoding!r}")
    settings["while_decoding"] = decoding == "true"
    return KVzap.load(given.texts["path"], threshold=given.values["threshold"], **settings)


def _masked(given: Settings, own: Policy) -> Method:
    return lambda length: StreamingLLM(budget=length + 1, sinks=length)


def _own(given: Settings, own: Policy) -> Method:
    if not isinstance(own, DMS):
        raise InputError(f"policy {given.spec!r}: the model has no DMS policy")
    changes: dict[str, Any] = {k: given.whole(k) if k == "window" else value for k, value in given.values.items()}
    return dataclasses.replace(own, **changes)


_SIZE = "budget=N (entries per head) or cr=X"

KINDS: dict[str, Kind] = {
    "streaming": Kind(
        ("budget", "cr", "sinks"), f"streaming:{_SIZE} (sinks={SINKS}): StreamingLLM",
        _budgeted(StreamingLLM, {"sinks": SINKS}),
    ),
    "kvzap": Kind(
        ("threshold", "budget", "cr", "window", "sinks"),
        "kvzap:path=DIR,threshold=X (window=128, sinks=0, prefill=rule, decoding=true): a KVzap surrogate; with cr=X "
        "or budget=N (per=model) in place of the threshold the same share of every prompt",
        _kvzap, ("path", "prefill", "per", "decoding"),
    ),
    "kvzip": Kind(
        ("budget", "cr", "sinks", "chunk", "prefix"), f"kvzip:{_SIZE} (kind=kvzip, per=model): the KVzip oracle",
        _budgeted(KVzip, {}), ("kind", "per"),
    ),
    "h2o": Kind(("budget", "cr", "sinks", "recent"), f"h2o:{_SIZE} (per=head): H2O", _budgeted(H2O, {}), ("per",)),
    "tova": Kind(("budget", "cr", "sinks"), f"tova:{_SIZE}: TOVA", _budgeted(TOVA, {})),
    "snapkv": Kind(
        ("budget", "cr", "sinks", "window", "kernel"), f"snapkv:{_SIZE} (window=64, kernel=5, per=head): SnapKV",
        _budgeted(SnapKV, {}), ("per",),
    ),
    "knorm": Kind(("budget", "cr", "sinks"), f"knorm:{_SIZE} (per=head): Knorm", _budgeted(Knorm, {}), ("per",)),
    "random": Kind(
        ("budget", "cr", "sinks", "seed"), f"random:{_SIZE} (per=head): random eviction", _budgeted(Random, {}),
        ("per",),
    ),
    "masked": Kind((), "masked: evicts nothing, but runs the masked attention: the noise floor of rounding", _masked),
    "own": Kind(
        ("offset", "scale", "window"), "own:offset=X: the model's DMS policy with another offset, scale or window", _own
    ),
}  # fmt: skip
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
    if name not in KINDS:
        raise InputError(f"unknown policy {name!r}; there are {', '.join(KINDS)}")
    kind = KINDS[name]
    given: dict[str, float] = {}
    texts: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if key in kind.texts and value:
            texts[key] = value
            continue
        try:
            given[key] = float(value)
        except ValueError:
            equals = ""
        if not equals or not math.isfinite(given[key]):
            raise InputError(f"policy {spec!r}: {part!r} is not of the form key=number")
    if unknown := sorted(given.keys() - set(kind.keys)):
        takes = ", ".join(sorted((*kind.keys, *kind.texts))) or "no settings"
        raise InputError(f"policy {spec!r}: {name} has no setting {unknown[0]!r} (it takes {takes})")
    return kind.make(Settings(spec, given, texts), own)


def describe(policy: Policy) -> dict[str, Any]:
    """Name and settings of a policy, without its arrays."""
    settings = {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)}  # type: ignore[arg-type]
    plain = {name: value for name, value in settings.items() if isinstance(value, str | int | float | None)}
    return {"name": type(policy).__name__, **plain, "window": policy.window, "shift": policy.shift}

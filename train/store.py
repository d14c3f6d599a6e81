"""Checkpoints of a training run: Orbax, asynchronous, the newest few kept, damaged ones passed over.

A checkpoint holds the training state (a pytree of arrays) and a JSON object of everything else. Orbax writes into a
temporary directory and renames it when all is there, so a half-written checkpoint is never taken for a whole one; a
list of the files' checksums, written after that, tells when one was damaged later.
"""

import contextlib
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import jax
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]

from kvsparse_jax import cli, distributed
from kvsparse_jax.errors import InputError

_SEAL = "seal-{}.json"

_log = logging.getLogger(__name__)


class Saved(NamedTuple):
    """A checkpoint that was read.

    Attributes:
        step: its number.
        state: the arrays, placed like the template.
        meta: the JSON object.
    """

    step: int
    state: Any
    meta: dict[str, Any]


Check = Callable[[dict[str, Any]], None]


class Store:
    """The checkpoints of one directory.

    Args:
        directory: made if it is not there.
        keep: newest checkpoints that are kept.
    """

    def __init__(self, directory: Path, keep: int):
        self.directory = directory.absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._keep = keep
        self._manager = self._open()
        self._executor = ThreadPoolExecutor(1, "seal")
        self._sealing: list[Future[None]] = []
        self._unsealed: int | None = None

    def _open(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(max_to_keep=self._keep, enable_async_checkpointing=True)
        with _quiet():
            return ocp.CheckpointManager(self.directory, options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Numbers of the whole checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> None:
        """Writes a checkpoint in the background; the arrays are copied before this returns, so they may be donated.

        A checkpoint of that number that is there already is left as it is.
        """
        self.wait()
        if step in self._manager.all_steps():
            return
        with _quiet():
            self._manager.save(
                step,
                args=ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(dict(meta))),
                force=True,
            )
        self._unsealed = step

    def wait(self) -> None:
        """Until what was saved is on the disk (its checksums may follow)."""
        self._manager.wait_until_finished()
        if self._unsealed is not None:
            step, self._unsealed = self._unsealed, None
            self._sealing.append(self._executor.submit(self._seal, step))
        for sealed in [f for f in self._sealing if f.done()]:
            self._sealing.remove(sealed)
            sealed.result()

    def _seal(self, step: int) -> None:
        if not distributed.first():
            return
        cli.write_json_atomically(self.directory / _SEAL.format(step), _checksums(self.directory / str(step)))
        kept = {_SEAL.format(s) for s in self._manager.all_steps()}
        for old in self.directory.glob(_SEAL.format("*")):
            if old.name not in kept:
                old.unlink(missing_ok=True)

    def meta(self, step: int) -> dict[str, Any]:
        """The JSON object of a checkpoint, without its arrays."""
        with _quiet():
            found = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))
        return dict(found.meta)

    def damage(self, step: int) -> str | None:
        """What is wrong with the files of a checkpoint; None if nothing is, as far as its checksums tell."""
        seal = self.directory / _SEAL.format(step)
        if not seal.is_file():
            return None
        try:
            wanted = json.loads(seal.read_text(encoding="utf-8"))
        except ValueError:
            return f"{seal.name} is not readable"
        found = _checksums(self.directory / str(step))
        changed = sorted(name for name in wanted if wanted[name] != found.get(name))
        return f"{changed[0]} is {'damaged' if changed[0] in found else 'missing'}" if changed else None

    def restore(self, step: int, like: Any) -> Any:
        """The arrays of a checkpoint, placed like those of the template (arrays or ShapeDtypeStruct with sharding).

        NumPy arrays stay in host memory.
        """

        def abstract_of(a: Any) -> Any:
            return a if isinstance(a, np.ndarray) else jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)

        abstract = jax.tree.map(abstract_of, like)
        with _quiet():
            found = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract)))
        return found.state

    def newest(self, like: Any, check: Check) -> Saved | None:
        """The newest checkpoint that can be read; None if there is none at all.

        Damaged ones after it are put aside, with a word in the log; if none can be read nothing is touched.

        Args:
            like: see :meth:`restore`.
            check: called with the JSON object of a checkpoint before its arrays are read; may refuse it.

        Raises:
            InputError: there are checkpoints, and none can be read.
        """
        steps = self.steps()
        damaged: list[int] = []
        for step in reversed(steps):
            saved = self.read(step, like, check)
            if isinstance(saved, Saved):
                for number in damaged:
                    self._put_aside(number)
                return saved
            _log.warning("checkpoint %s is damaged and passed over: %s", self.directory / str(step), saved)
            damaged.append(step)
        if steps:
            raise InputError(f"none of the {len(steps)} checkpoints in {self.directory} can be read")
        return None

    def read(self, step: int, like: Any, check: Check) -> Saved | str:
        """A checkpoint, or in one line why it cannot be read; see :meth:`newest`."""
        if wrong := self.damage(step):
            return wrong
        # What a missing or cut file gives depends on the file: JSON, TensorStore and Orbax have errors of their own.
        expected = (ValueError, KeyError, TypeError, AttributeError, OSError, RuntimeError)
        try:
            meta = self.meta(step)
        except expected as error:
            return _reason(error)
        if not meta:
            return "its metadata is empty"
        check(meta)
        try:
            return Saved(step, self.restore(step, like), meta)
        except expected as error:
            return _reason(error)

    def discard_after(self, step: int) -> None:
        """Deletes the checkpoints after a step: a run that goes on from there writes them anew."""
        for later in self.steps():
            if later > step:
                self._manager.delete(later)
                (self.directory / _SEAL.format(later)).unlink(missing_ok=True)

    def _put_aside(self, step: int) -> None:
        self._manager.close()
        distributed.barrier(f"damaged checkpoint {step}")
        if distributed.first():
            self._set_aside(step)
        distributed.barrier(f"checkpoint {step} put aside")
        self._manager = self._open()

    def _set_aside(self, step: int) -> None:
        target = self.directory / f"damaged-{step}"
        number = 1
        while target.exists():
            number += 1
            target = self.directory / f"damaged-{step}-{number}"
        os.replace(self.directory / str(step), target)
        (self.directory / _SEAL.format(step)).unlink(missing_ok=True)

    def close(self) -> None:
        """Waits for what is being written, then lets go of the directory."""
        try:
            self.wait()
            for sealed in self._sealing:
                sealed.result()
        finally:
            self._executor.shutdown()
            self._manager.close()


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _checksums(directory: Path) -> dict[str, list[int]]:
    """Size and CRC-32 of every file below a directory."""
    found: dict[str, list[int]] = {}
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        crc, size = 0, 0
        with open(path, "rb") as file:
            while block := file.read(1 << 22):
                crc, size = zlib.crc32(block, crc), size + len(block)
        found[path.relative_to(directory).as_posix()] = [size, crc]
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without Orbax's log of every step it takes."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)

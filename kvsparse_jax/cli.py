"""What every command line of this project shares.

A command is a parser and a function of the parsed arguments:

    def _parser():
        p = cli.parser("python -m train.example", "Trains an example.")
        p.add_argument("--window", type=int, default=64, unit="tokens", help="newest keys that are never evicted")
        return p

    def main(argv: Sequence[str] | None = None) -> int:
        return cli.run(_run, argv, parser=_parser())

    if __name__ == "__main__":
        sys.exit(main())

Exit status: 0 done, 1 failed, 2 bad input, 130 interrupted. Each failure is one line on stderr, so that a script can
show it; KVSPARSE_TRACEBACK=1 in the environment adds the traceback. An exception that no command foresees is a bug of
ours and keeps its traceback.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, NoReturn, Self

import jax
import numpy as np
from tqdm import tqdm

from kvsparse_jax.errors import InputError, RunError

__all__ = [
    "Parser",
    "Progress",
    "fresh_directory",
    "parser",
    "progress",
    "run",
    "show_configuration",
    "write_json_atomically",
]


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Adds the unit and the default to each option's help; keeps the line breaks of the description."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        notes = []
        if unit := getattr(action, "unit", None):
            notes.append(f"unit: {unit}")
        if action.required and action.option_strings:
            notes.append("required")
        elif isinstance(action, argparse.BooleanOptionalAction):
            notes.append("default: " + ("--no-" if not action.default else "--") + action.dest.replace("_", "-"))
        elif action.nargs == 0 or action.default is argparse.SUPPRESS:
            pass  # a switch: absent by default
        elif action.default is not None and "%(default)" not in text:
            default = action.default
            if isinstance(default, (list, tuple)):
                default = " ".join(map(str, default))
            notes.append("default: " + str(default).replace("%", "%%"))
        return f"{text} ({', '.join(notes)})" if notes else text


class _Group(argparse._ArgumentGroup):
    """An argument group whose add_argument takes `unit` too."""

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        unit = kwargs.pop("unit", None)
        action = super().add_argument(*args, **kwargs)
        action.unit = unit  # type: ignore[attr-defined]
        return action


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose add_argument takes `unit="tokens"`, and whose errors are one line."""

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """argparse's add_argument; `unit` (str) is what the value counts, shown in the help."""
        unit = kwargs.pop("unit", None)
        action = super().add_argument(*args, **kwargs)
        action.unit = unit  # type: ignore[attr-defined]
        return action

    def add_argument_group(self, *args: Any, **kwargs: Any) -> _Group:
        """argparse's add_argument_group; the group's add_argument takes `unit` as well."""
        group = _Group(self, *args, **kwargs)
        self._action_groups.append(group)
        return group

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2 and one line that names the mistake."""
        self.exit(2, f"{self.prog}: error: {_one_line(message)} (--help lists the options)\n")


def parser(prog: str, description: str, *, epilog: str | None = None) -> Parser:
    """Makes a command's parser.

    Args:
      prog: How the command is called, such as "python -m train.retrofit".
      description: What it does; line breaks are kept.
      epilog: Shown after the options, such as examples; line breaks are kept.

    Returns:
      A parser that shows units and defaults. Options cannot be abbreviated, so that adding one never changes what a
      script means.
    """
    return Parser(prog=prog, description=description, epilog=epilog, formatter_class=_HelpFormatter, allow_abbrev=False)


def show_configuration(config: argparse.Namespace | Mapping[str, Any] | Any, title: str = "configuration") -> None:
    """Prints the effective configuration on stderr, one `key: value` line each.

    Args:
      config: A namespace, a mapping or a dataclass instance; nested ones are shown as `outer.inner: value`.
      title: The heading.
    """
    rows = list(_flatten("", config))
    width = max((len(key) for key, _ in rows), default=0) + 1
    lines = [f"{title}:"] + [f"  {key + ':':<{width}} {value}" for key, value in rows]
    print("\n".join(lines), file=sys.stderr, flush=True)


def _flatten(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping) and (value or not prefix):
        for key, inner in value.items():
            yield from _flatten(f"{prefix}.{key}" if prefix else str(key), inner)
    elif isinstance(value, (list, tuple)):
        yield prefix, " ".join(map(str, value)) or "none"
    else:
        yield prefix, "none" if value is None or value == {} else str(value)


def _one_line(message: object) -> str:
    return " ".join(str(message).split())


def run(
    main_fn: Callable[[Any], int | None],
    argv: Sequence[str] | None = None,
    *,
    parser: Parser | None = None,
    show: bool = True,
) -> int:
    """Runs a command and turns what may go wrong into an exit status and one line.

    Args:
      main_fn: The command. Gets the parsed arguments, or `argv` itself if there is no parser. What it returns is the
        exit status; None is 0.
      argv: The command line without the program's name; None takes the process's.
      parser: Parses argv.
      show: Whether to print what the parser made of argv as the effective configuration. False where a preset or a
        checkpoint completes it: then the command calls `show_configuration` itself.

    Returns:
      0 done; 1 failed (RunError, OSError, NotImplementedError, MemoryError, an error of XLA's runtime such as no memory
      left on the device); 2 bad input (InputError, a mistake in argv); 130 interrupted.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    name = "error" if parser is None else f"{parser.prog}: error"
    try:
        if parser is None:
            status = main_fn(argv)
        else:
            args = parser.parse_args(argv)
            if show:
                show_configuration(args)
            status = main_fn(args)
        sys.stdout.flush()  # here, where a closed pipe can still be answered
        return 0 if status is None else int(status)
    except SystemExit as error:  # argparse: --help, or a mistake that it has already reported
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(f"{name}: {_one_line(error.code)}", file=sys.stderr)
        return 1
    except InputError as error:
        _report(name, error)
        return 2
    except KeyboardInterrupt as error:
        _report(name, error, "interrupted")
        return 130
    except BrokenPipeError:
        # Whoever read our output went away (`| head`). Nothing is left to say, and the interpreter must not try to.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except MemoryError as error:
        _report(name, error, f"out of memory {error}")
        return 1
    except (RunError, OSError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        _report(name, error)
        return 1


def _report(name: str, error: BaseException, text: str | None = None) -> None:
    if os.environ.get("KVSPARSE_TRACEBACK", "0") not in ("", "0"):
        traceback.print_exception(error, file=sys.stderr)
    if text is None:
        text = str(error)
        if isinstance(error, OSError) and error.strerror and error.filename is not None:
            text = f"{error.strerror}: {os.fsdecode(error.filename)}"  # without "[Errno 2]"
    text = _one_line(text) or type(error).__name__
    print(f"{name}: {text[:500]}", file=sys.stderr, flush=True)  # XLA lists every buffer when memory runs out


def write_json_atomically(path: str | os.PathLike[str], obj: Any) -> Path:
    """Writes JSON so that the file is either the old one or the whole new one, whatever happens meanwhile.

    Args:
      path: The file; its directory has to exist.
      obj: Anything JSON can hold, and besides: paths, dataclasses, numpy and JAX scalars and arrays, sets (sorted). A
        number that is not finite has no spelling in JSON and becomes null.

    Returns:
      The path.

    Raises:
      TypeError: If `obj` holds something else.
    """
    path = Path(path)
    text = json.dumps(_plain(obj), indent=2, allow_nan=False) + "\n"
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(scratch, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    return path


def _plain(obj: Any) -> Any:
    """`obj` in terms of dict, list, str, int, float, bool and None only."""
    if obj is None or isinstance(obj, (str, bool, int)):
        return obj
    if isinstance(obj, float):
        return obj if math.isfinite(obj) else None
    if isinstance(obj, os.PathLike):
        return os.fspath(obj)
    if isinstance(obj, Mapping):
        return {str(key): _plain(value) for key, value in obj.items()}
    if isinstance(obj, (set, frozenset)):
        return [_plain(value) for value in sorted(obj)]
    if isinstance(obj, (list, tuple)):
        return [_plain(value) for value in obj]
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return {field.name: _plain(getattr(obj, field.name)) for field in dataclasses.fields(obj)}
    if isinstance(obj, (np.ndarray, np.generic, jax.Array)):
        return _plain(np.asarray(obj).tolist())
    raise TypeError(f"{type(obj).__name__} has no form in JSON")


class Progress:
    """A progress bar on a terminal; anywhere else (a log, CI, a notebook's captured stderr) a line every few seconds.

    Made by `progress`. Iterate over it, or call `update`; `set_postfix` shows figures beside it.
    """

    def __init__(
        self,
        iterable: Iterable[Any] | None,
        total: int | None,
        desc: str,
        unit: str,
        initial: int,
        seconds: float,
    ) -> None:
        self._iterable = iterable
        self._seconds = seconds
        self._terminal = sys.stderr.isatty()
        self._bar: tqdm[Any] = tqdm(
            total=total,
            desc=desc,
            unit=" " + unit,
            initial=initial,
            file=sys.stderr,
            disable=not self._terminal,
            dynamic_ncols=True,
        )
        self._desc, self._unit, self._total, self._initial = desc, unit, total, initial
        self._done = initial
        self._start = self._last = time.monotonic()
        self._printed: int | None = None
        self._postfix = ""

    @property
    def done(self) -> int:
        """Steps done so far."""
        return self._done

    def update(self, n: int = 1) -> None:
        """Counts n more steps."""
        self._done += n
        if self._terminal:
            self._bar.update(n)
        elif time.monotonic() - self._last >= self._seconds:
            self._print()

    def set_postfix(self, **figures: Any) -> None:
        """Shows these figures from now on; floats with four digits."""
        self._postfix = ", ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in figures.items())
        if self._terminal:
            self._bar.set_postfix_str(self._postfix, refresh=False)

    def write(self, line: str) -> None:
        """Prints a line on stderr without tearing the bar."""
        if self._terminal:
            self._bar.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leaves the final state on the screen."""
        if self._terminal:
            self._bar.close()
        elif self._printed != self._done:
            self._print()

    def _print(self) -> None:
        now = time.monotonic()
        self._last, self._printed = now, self._done
        text = tqdm.format_meter(
            self._done,
            self._total,
            now - self._start,
            prefix=f"{self._desc}: " if self._desc else "",
            unit=" " + self._unit,
            initial=self._initial,
            postfix=self._postfix,
            bar_format="{desc}{n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]",
        )
        print(text, file=sys.stderr, flush=True)

    def __iter__(self) -> Iterator[Any]:
        if self._iterable is None:
            raise TypeError("this progress bar counts steps: call update(), there is nothing to iterate over")
        with self:
            for item in self._iterable:
                yield item
                self.update()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def progress(
    work: Iterable[Any] | int | None = None,
    *,
    total: int | None = None,
    desc: str = "",
    unit: str = "steps",
    initial: int = 0,
    seconds: float = 5.0,
) -> Progress:
    """Shows how far long work is.

    Args:
      work: What to iterate over, or how many steps there are, or None.
      total: Number of steps, where `work` does not tell.
      desc: What is being done.
      unit: What is counted.
      initial: Steps done before, by a run that this one resumes.
      seconds: Off a terminal, the time between two lines.

    Returns:
      Something to iterate over, or a context manager with `update(n)`; both have `set_postfix(**figures)`.

    Example:
      >>> [x * x for x in progress(range(3), desc="squares", seconds=60)]
      [0, 1, 4]
    """
    iterable: Iterable[Any] | None = None
    if isinstance(work, int):
        total = work
    elif work is not None:
        iterable = work
        if total is None and isinstance(work, Sized):
            total = len(work)
    return Progress(iterable, total, desc, unit, initial, seconds)


_MARKER = ".kvsparse.json"


def fresh_directory(path: str | os.PathLike[str], kind: str) -> Path:
    """Makes an output directory, or takes one that holds the same kind of output; refuses any other.

    The kind is noted in the directory, so that a later run can tell its own output from somebody's files. Whether an
    earlier output of the same kind is resumed, overwritten or refused is the caller's decision.

    Args:
      path: The directory; parents are made too.
      kind: What will be written, such as "retrofit run".

    Returns:
      The path.

    Raises:
      InputError: If the path is a file, or a directory with other contents.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file; the {kind} needs a directory that is new or empty")
    path.mkdir(parents=True, exist_ok=True)
    marker = path / _MARKER
    if marker.is_file():
        try:
            holds = json.loads(marker.read_text(encoding="utf-8"))["kind"]
        except (ValueError, KeyError, TypeError):
            holds = f"unreadable {_MARKER}"
        if holds != kind:
            raise InputError(
                f"{path} holds output of another kind ({holds}); the {kind} needs a directory that is new or empty"
            )
        return path
    # The note itself may be in the making: several processes of one run come here at once.
    if entries := sorted(entry.name for entry in path.iterdir() if _MARKER not in entry.name):
        shown = ", ".join(entries[:3]) + (", ..." if len(entries) > 3 else "")
        raise InputError(f"{path} is not empty (it holds {shown}); the {kind} needs a directory that is new or empty")
    write_json_atomically(marker, {"kind": kind})
    return path

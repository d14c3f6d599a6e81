"""Progress of an evaluation."""

from typing import Any

from kvsparse_jax import cli


class Steps:
    """A progress bar, or nothing where none is wanted."""

    def __init__(self, total: int, desc: str, unit: str, wanted: bool) -> None:
        self._bar = cli.progress(total, desc=desc, unit=unit) if wanted else None

    def show(self, **figures: Any) -> None:
        """What is being done now."""
        if self._bar is not None:
            self._bar.set_postfix(**figures)

    def advance(self, count: int) -> None:
        """So many steps are done."""
        if self._bar is not None:
            self._bar.update(count)

    def __enter__(self) -> "Steps":
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()

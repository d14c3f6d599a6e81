"""The two kinds of failure that a command reports in one line instead of a traceback."""


class InputError(ValueError):
    """Bad input. The message is one line that names what is wrong and what is accepted (exit status 2)."""


class RunError(RuntimeError):
    """A run that cannot go on, such as a loss that is not finite. The message is one line (exit status 1)."""

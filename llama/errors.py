"""The one exception of the package, and the checks that raise it everywhere."""

from __future__ import annotations

import os
from pathlib import Path


class LlamaError(AssertionError, ValueError):
    """Raised for invalid arguments and files. States the value, the limit and how to fix it.

    It is an `AssertionError`, which callers of the original code catch, and a `ValueError`, which
    everybody else expects; unlike an `assert` it is raised under `python -O` as well.
    """


def require(condition: bool, message: str) -> None:
    """Raise `LlamaError(message)` unless `condition` holds."""
    if not condition:
        raise LlamaError(message)


def checked_path(path: str | Path, name: str) -> Path:
    """A path that may exist, and that is not an option in the wrong place."""
    require(
        isinstance(path, (str, Path)),
        f"{name} {path!r:.80} is a {type(path).__name__}: pass a path",
    )
    require(
        not str(path).lstrip().startswith("--"),
        f"{name} is {str(path)!r:.80}, which looks like an option: a backslash at a line's end may "
        "be left in a command that was pasted as one line: remove it",
    )
    try:
        os.stat(path)
    except FileNotFoundError:
        pass  # the caller reports a missing path, or makes it
    except (OSError, ValueError) as error:  # a zero byte, half a character, a name too long
        why = error.strerror if isinstance(error, OSError) else error
        raise LlamaError(
            f"{name} {str(path)!r:.80} cannot be a path ({why}): choose another"
        ) from error
    return Path(path)

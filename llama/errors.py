"""The one exception of the package. A leaf of its own, since every module raises it."""

from __future__ import annotations


class LlamaError(AssertionError, ValueError):
    """A caller's mistake in one sentence: the value, the limit, the remedy.

    It is an `AssertionError`, which callers of the original code catch, and a `ValueError`, which
    everybody else expects; unlike an `assert` it is raised under `python -O` too.
    """


def require(condition: bool, message: str) -> None:
    """Raise `LlamaError(message)` unless `condition` holds."""
    if not condition:
        raise LlamaError(message)

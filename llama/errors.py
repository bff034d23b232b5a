"""The one exception of the package, and the checks that raise it everywhere."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class LlamaError(AssertionError, ValueError):
    """A caller's mistake in one sentence: the value, the limit, the remedy.

    It is an `AssertionError`, which callers of the original code catch, and a `ValueError`, which
    everybody else expects; unlike an `assert` it is raised under `python -O` too.
    """


def require(condition: bool, message: str) -> None:
    """Raise `LlamaError(message)` unless `condition` holds."""
    if not condition:
        raise LlamaError(message)


def checked_list(values: Iterable[Any], name: str) -> list[Any]:
    """`values` as a list; a text or a single number in its place is refused."""
    require(
        isinstance(values, Iterable) and not isinstance(values, (str, bytes, dict)),
        f"{name} is {values!r:.80}: pass a list",
    )
    return list(values)


def whole(value: Any) -> int | None:
    """`value` as an int, if it is a whole number of whatever type; a truth value is none."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def checked_whole(value: Any, name: str, least: int = 0) -> int:
    """`value` as an int of at least `least`."""
    number = whole(value)
    if number is None or number < least:
        raise LlamaError(f"{name} {value!r:.80}: it must be a whole number from {least} on")
    return number


def checked_ids(ids: Iterable[int], name: str, vocab_size: int) -> list[int]:
    """Token ids as a list of ints."""
    checked = []
    for i, id in enumerate(checked_list(ids, name)):
        number = whole(id)
        if number is None or not 0 <= number < vocab_size:
            raise LlamaError(
                f"token {i} of {name} is {id!r:.40}: pass whole numbers from 0 to {vocab_size - 1}"
            )
        checked.append(number)
    return checked


def checked_path(path: str | Path, name: str) -> Path:
    """A path that is not an option in the wrong place."""
    require(
        isinstance(path, (str, Path)), f"{name} {path!r} is a {type(path).__name__}: pass a path"
    )
    require(
        not str(path).lstrip().startswith("--"),
        f"{name} is {str(path)!r}, which looks like an option: a backslash for a line's end may be "
        "left in a command that was pasted as one line: remove it",
    )
    return Path(path)

"""The one exception of the package, and the checks that raise it everywhere."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable
from numbers import Real
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


def shown(value: Any, width: int = 80) -> str:
    """The beginning of `repr(value)`, for a message; or its type, where it has none."""
    try:
        return repr(value).replace("\n", " ")[:width]
    except Exception:  # such as of a whole number of more digits than Python writes
        return f"a {type(value).__name__} that cannot be shown"


def checked_list(values: Iterable[Any], name: str) -> list[Any]:
    """`values` as a list; a text or a single number in its place is refused."""
    try:
        listed = None if isinstance(values, (str, bytes, dict)) else list(values)
    except TypeError:  # also of arrays that have no dimensions
        listed = None
    if listed is None:
        raise LlamaError(f"{name} is {shown(values)}: pass a list")
    return listed


def checked_flag(value: Any, name: str) -> bool:
    """Whatever is true or false, as a bool."""
    try:
        return bool(value)
    except Exception as error:  # what arrays raise has no common class
        raise LlamaError(f"{name} is {shown(value)}: pass True or False") from error


def whole(value: Any) -> int | None:
    """`value` as an int, if it is a whole number of whatever type; a truth value is none."""
    if type(value) is int:
        return value
    dtype = str(getattr(value, "dtype", type(value).__name__))
    try:
        return None if dtype in ("bool", "torch.bool") else operator.index(value)
    except TypeError:
        return None


def checked_whole(value: Any, name: str, least: int = 0) -> int:
    """`value` as an int of at least `least`, and one that a tensor can hold."""
    number = whole(value)
    if number is None or not least <= number < 2**63:
        raise LlamaError(
            f"{name} {shown(value)}: it must be a whole number from {least} to 2**63 - 1"
        )
    return number


def real(value: Any) -> float:
    """`value` as a float; NaN if it is no number, and a truth value is none."""
    try:
        return math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        return math.inf


def checked_ids(ids: Iterable[int], name: str, vocab_size: int) -> list[int]:
    """Token ids as a list of ints."""
    checked = []
    for i, id in enumerate(checked_list(ids, name)):
        number = whole(id)
        if number is None or not 0 <= number < vocab_size:
            raise LlamaError(
                f"token {i} of {name} is {shown(id, 40)}: "
                f"pass whole numbers from 0 to {vocab_size - 1}"
            )
        checked.append(number)
    return checked


def checked_path(path: str | Path, name: str) -> Path:
    """A path that may lead somewhere, and that is not an option in the wrong place."""
    require(
        isinstance(path, (str, Path)),
        f"{name} {shown(path)} is a {type(path).__name__}: pass a path",
    )
    require(
        not str(path).lstrip().startswith("--"),
        f"{name} is {str(path)!r}, which looks like an option: a backslash for a line's end may be "
        "left in a command that was pasted as one line: remove it",
    )
    try:
        os.stat(path)
    except FileNotFoundError:
        pass  # what is missing, the caller says, or makes
    except (OSError, ValueError) as error:  # a zero byte, half a character, a name too long
        why = error.strerror if isinstance(error, OSError) else error
        raise LlamaError(f"{name} {shown(str(path))} is no path ({why}): choose another") from error
    return Path(path)

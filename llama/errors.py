"""The one exception of the package, and the checks that raise it everywhere."""

from __future__ import annotations

import operator
from collections.abc import Iterable
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


def checked_ids(ids: Iterable[int], name: str, vocab_size: int) -> list[int]:
    """Token ids as a list of ints."""
    checked = checked_list(ids, name)
    for i, id in enumerate(checked):
        require(
            hasattr(id, "__index__") and 0 <= operator.index(id) < vocab_size,
            f"token {i} of {name} is {id!r:.40}: pass whole numbers from 0 to {vocab_size - 1}",
        )
    return [operator.index(id) for id in checked]

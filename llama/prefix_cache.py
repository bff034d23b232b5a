"""What the cache still holds from earlier calls, so that it need not be read again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from llama.errors import LlamaError, require
from llama.model import Transformer


class CacheRecord:
    """The tokens whose keys and values each row of the cache holds, from position 0 on.

    It is right as long as nobody else writes the cache or the weights; `watch` finds out.
    """

    def __init__(self) -> None:
        self._rows: dict[int, list[int]] = {}
        self._fingerprint: object = None
        self._buffers: list[torch.Tensor] = []
        self._versions: list[int] = []  # of the buffers, after our last write

    @contextmanager
    def watch(self, model: Transformer) -> Iterator[None]:
        """Surround what uses the cache: forget all that was written elsewhere since last time.

        After an error nothing is certain: a ring that was about to turn may have lost its start.
        """
        if self._fingerprint is None or self._fingerprint != _fingerprint(model):
            self.forget()
        self._buffers = list(model.buffers())
        self._versions = _versions(self._buffers)
        try:
            yield
        except (GeneratorExit, LlamaError):  # an early close or a refusal comes between two writes
            raise
        except BaseException:
            self.forget()
            raise
        finally:
            if self._versions != _versions(self._buffers):
                self.forget()
            self._fingerprint = _fingerprint(model)

    @contextmanager
    def write(self) -> Iterator[None]:
        """Surround each write, within `watch`; others may have written between two steps."""
        require(
            self._versions == _versions(self._buffers),
            "the cache was written while a stream was open, which cannot go on: begin it anew",
        )
        yield
        self._versions = _versions(self._buffers)

    def forget(self) -> None:
        self._rows.clear()

    @property
    def rows(self) -> list[int]:
        """The rows that hold something."""
        return [row for row, tokens in self._rows.items() if tokens]

    def tokens(self, row: int) -> list[int]:
        return self._rows.get(row, [])

    def reusable(self, row: int, prompt: Sequence[int], n_slots: int) -> int:
        """How many of the prompt's tokens the row holds; at least one is left to be read.

        A row longer than its `n_slots` has lost its beginning, and can only be continued.
        """
        held = self.tokens(row)
        pairs = zip(held, prompt, strict=False)
        common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(held), len(prompt)))
        if len(held) > n_slots and common < len(held):
            return 0
        return min(common, len(prompt) - 1)

    def truncate(self, row: int, length: int) -> None:
        """Before a write from position `length` on."""
        self._rows[row] = self.tokens(row)[:length]

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """After the write."""
        self._rows.setdefault(row, []).extend(tokens)


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each was written, where torch counts it."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _fingerprint(model: Transformer) -> object:
    """Changes with every write to a parameter or a buffer; None where torch does not count them."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_inference() for tensor in tensors):
        return None
    return [(tensor.data_ptr(), tensor._version) for tensor in tensors]

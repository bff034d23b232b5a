"""What the cache still holds from earlier calls, so that it need not be read again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from llama.errors import LlamaError
from llama.model import Transformer


class CacheRecord:
    """The tokens whose keys and values each row of the cache holds, from position 0 on.

    It is right as long as nobody else writes the cache or the weights; `watch` finds out.
    """

    def __init__(self) -> None:
        self._rows: dict[int, list[int]] = {}
        self._fingerprint: object = None

    @contextmanager
    def watch(self, model: Transformer) -> Iterator[None]:
        """Surround what uses the cache: forget all that was written elsewhere since last time.

        After an error nothing is certain: a ring that was about to turn may have lost its start.
        """
        if self._fingerprint is None or self._fingerprint != _fingerprint(model):
            self.forget()
        try:
            yield
        except (GeneratorExit, LlamaError):  # an early close or a refusal comes between two writes
            raise
        except BaseException:
            self.forget()
            raise
        finally:
            self._fingerprint = _fingerprint(model)

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


def _fingerprint(model: Transformer) -> object:
    """Changes with every write to a parameter or a buffer; None where torch does not count them."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_inference() for tensor in tensors):
        return None
    return [(tensor.data_ptr(), tensor._version) for tensor in tensors]

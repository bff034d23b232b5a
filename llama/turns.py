"""Threads that share an instance take turns; an open stream keeps its turn until it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import GeneratorType
from typing import TypeVar, cast

from llama.errors import require

Step = TypeVar("Step")


class Turns:
    """One call at a time uses the model and its cache."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None  # that has the turn
        self._stream: GeneratorType | None = None  # that keeps it between two steps, if one does

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for other threads, and keep them waiting."""
        thread = threading.get_ident()
        require(
            self._thread != thread,
            "a stream of this instance is still open in this thread: exhaust it, or close() it",
        )
        with self._lock:
            try:
                self._thread = thread
                yield
            finally:
                self._thread = self._stream = None

    def stream(self, steps: Iterator[Step], require_open: Callable[[], None]) -> Iterator[Step]:
        """Pass `steps` on, within `turn`, until `require_open` raises."""
        self._stream = cast(GeneratorType, steps)
        del steps  # `turn` gives up the last reference, which ends it
        for step in self._stream:
            require_open()  # whoever closes may wait for this step, and the reader may never return
            yield step
            self._thread = threading.get_ident()  # another thread may have gone on with it
        require_open()  # and not at its end because it was ended

    def end_stream(self) -> bool:
        """End the open stream, which keeps its turn; False if there is none between two steps."""
        if self._stream is None or self._stream.gi_running:
            return False
        self._stream.close()
        return True

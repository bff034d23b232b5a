"""Tokens of one row to its text, piece by piece, up to a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llama.errors import checked_list, require, shown
from llama.tokenizer import StreamDecoder, Tokenizer


def checked_stops(stop: Iterable[str] | None) -> list[str]:
    """Stop strings as a list."""
    strings = [] if stop is None else checked_list(stop, "stop")
    for i, string in enumerate(strings):
        require(
            isinstance(string, str) and string != "",
            f"stop string {i} is {shown(string)}: pass texts of at least one character",
        )
    return strings


class StopFinder:
    """Passes text on up to the first stop string, holding back what may be the start of one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = list(stop)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The part of the text so far that is certain to come before any stop string."""
        if self.found:
            return ""
        self._held += text
        ends = [self._held.find(s) for s in self._stop]
        if any(end >= 0 for end in ends):
            self.found = True
            passed, self._held = self._held[: min(end for end in ends if end >= 0)], ""
            return passed
        cut = len(self._held) - max((_overlap(self._held, s) for s in self._stop), default=0)
        passed, self._held = self._held[:cut], self._held[cut:]
        return passed

    def finish(self) -> str:
        """What was held back for nothing."""
        passed, self._held = self._held, ""
        return passed


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class RowText:
    """The text of one row, as its tokens come in.

    `echoed` are the tokens in front of the generated ones that are a part of the text. Once
    `finish` has been called, `pieces` holds a string for each token, and joins to `text`.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], echoed: Sequence[int]) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._finder = StopFinder(stop)
        self._echoed = [self._decoder.push(token) for token in echoed]
        self._generated: list[str] = []
        self.text = "".join(self._echoed)

    @property
    def pieces(self) -> list[str]:
        return self._echoed + self._generated

    @property
    def stopped(self) -> bool:
        """Has a stop string been found?"""
        return self._finder.found

    def push(self, token: int) -> str:
        """The text that has become certain; "" once a stop string has been found."""
        self._generated.append(self._decoder.push(token))
        passed = self._finder.push(self._generated[-1])
        self.text += passed
        return passed

    def finish(self) -> str:
        """The text that was held back. Cuts the pieces where the text ends."""
        tail = self._decoder.finish()
        if tail and not self._generated:  # the echoed text ends within a character
            self._echoed[-1] += tail
            self.text += tail
            return tail
        if tail:
            self._generated[-1] += tail
        passed = self._finder.push(tail) + self._finder.finish()
        self.text += passed
        room = len(self.text) - sum(map(len, self._echoed))
        for i, piece in enumerate(self._generated):
            self._generated[i] = piece[:room]
            room -= len(self._generated[i])
        while self.stopped and self._generated and not self._generated[-1]:
            self._generated.pop()
        return passed

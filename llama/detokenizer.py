"""Token ids to text, one id at a time, up to a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from llama.errors import require
from llama.tokenizer import BaseTokenizer


def check_stop(stop: Iterable[str] | None) -> tuple[str, ...]:
    """Stop strings as a tuple. LlamaError: one of them is empty, or they are not in a list."""
    require(not isinstance(stop, (str, bytes)), f"stop is {stop!r:.80}: pass a list of strings")
    strings = () if stop is None else tuple(stop)
    for i, string in enumerate(strings):
        require(
            isinstance(string, str) and string != "",
            f"stop string {i} is {string!r:.80}: pass strings of at least one character",
        )
    return strings


class Detokenizer:
    """The text of one request, built as its tokens come in.

    `echoed` are prompt tokens with which the text begins, except for BOS; stop strings are not
    searched there.
    `pieces` holds one string per token, echoed tokens first. After `finish` they join to `text`,
    which ends before the stop string and otherwise equals `tokenizer.decode` of all tokens.
    That drops the space in front of a SentencePiece text, unless `keep_space`; stop strings are
    matched on the text with its space.
    """

    def __init__(
        self,
        tokenizer: BaseTokenizer,
        stop: Sequence[str] = (),
        echoed: Sequence[int] = (),
        *,
        keep_space: bool = False,
    ) -> None:
        self._tokenizer, self._stop_strings = tokenizer, tuple(stop)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(tokenizer.decode_errors)
        self._at_start = not keep_space  # no token had text yet, so a first space is to be dropped
        self._n_dropped = 0  # characters in front of `_held` that `text` does not get
        self._held = ""  # text that may be the beginning of a stop string
        self.stop: str | None = None
        bos = len(echoed) > 0 and echoed[0] == tokenizer.bos_id
        echo = [piece[dropped:] for piece, dropped in map(self._decode, echoed[bos:])]
        self.pieces = [""] * bos + echo
        self._n_echoed = len(self.pieces)
        self._final = list(self.pieces)
        self._n_taken = 0

    @property
    def text(self) -> str:
        """The text that is final so far."""
        return "".join(self._final)

    def take(self) -> str:
        """The text that became final since the last call; another thread may push meanwhile."""
        n = len(self._final)
        text = "".join(self._final[self._n_taken : n])
        self._n_taken = n
        return text

    def push(self, token: int) -> str:
        """The text that became final with `token`; "" once a stop string was found."""
        piece, dropped = self._decode(token)
        self.pieces.append(piece[dropped:])
        self._n_dropped += dropped
        return self._release(piece)

    def finish(self) -> str:
        """The text that was held back. Cuts `pieces` at the end of the text."""
        tail = self._utf8.decode(b"", final=True)
        if tail:
            self.pieces[-1] += tail
        if len(self.pieces) == self._n_echoed:  # a prompt that ends within a character
            self._final.append(tail)
            return tail
        released = self._release(tail, is_last=True)
        if self.stop is not None:
            room = len(self.text)
            for i, piece in enumerate(self.pieces):
                self.pieces[i] = piece[:room]
                room -= len(self.pieces[i])
            while len(self.pieces) > self._n_echoed and not self.pieces[-1]:
                self.pieces.pop()
        return released

    def _decode(self, token: int) -> tuple[str, int]:
        """The text that `token` completes, and the number of characters to drop in front."""
        data = self._tokenizer.token_bytes(token)
        dropped = 0
        if data and self._at_start:
            dropped = len(data) - len(self._tokenizer.token_bytes(token, first=True))
            self._at_start = False
        # SentencePiece ends a sequence of bytes at a token without text.
        return self._utf8.decode(data, final=not data), dropped

    def _release(self, piece: str, is_last: bool = False) -> str:
        """Add `piece`, and pass on what cannot be part of a stop string."""
        if self.stop is not None:
            return ""
        self._held += piece
        found = [(at, s) for s in self._stop_strings if (at := self._held.find(s)) >= 0]
        if found:
            end, self.stop = min(found, key=lambda pair: pair[0])
        else:
            n_held = 0 if is_last else max(map(self._overlap, self._stop_strings), default=0)
            end = len(self._held) - n_held
        text, self._held = self._held[:end], self._held[end:]
        if text:
            text, self._n_dropped = text[self._n_dropped :], 0
        self._final.append(text)
        return text

    def _overlap(self, stop: str) -> int:
        """The length of the longest end of `_held` that begins `stop`."""
        longest = min(len(self._held), len(stop) - 1)
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)

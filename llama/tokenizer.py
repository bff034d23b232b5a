"""Text to token ids and back: SentencePiece, whole or one token at a time."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path

from sentencepiece import SentencePieceProcessor

from llama.checkpoints.files import looks_like
from llama.errors import LlamaError, checked_flag, checked_ids, checked_path, require, shown


class Tokenizer:
    """A SentencePiece model, `tokenizer.model`."""

    def __init__(self, model_path: str | Path) -> None:
        path = checked_path(model_path, "model_path")
        require(
            path.is_file(),
            f"{str(path)!r} is not a file: pass the path of the checkpoint's tokenizer.model",
        )
        try:
            self.sp_model = SentencePieceProcessor(model_file=str(path))
        except Exception as error:  # also of Unicode, where its own message is no text
            found = looks_like(path) or "not a SentencePiece model, or a damaged one"
            raise LlamaError(
                f"{str(path)!r} is {found}: pass the tokenizer.model that came with the checkpoint"
            ) from error
        self.n_words: int = self.sp_model.vocab_size()
        self.bos_id: int = self.sp_model.bos_id()
        self.eos_id: int = self.sp_model.eos_id()
        self.pad_id: int = self.sp_model.pad_id()
        require(
            min(self.bos_id, self.eos_id) >= 0,
            f"{str(path)!r} has no BOS or no EOS: pass the tokenizer.model that came with the "
            "checkpoint",
        )

    def encode(self, s: str, bos: bool = False, eos: bool = False) -> list[int]:
        """The ids of `s`, between BOS and EOS if asked for. Text never becomes a control id."""
        require(isinstance(s, str), f"{shown(s)} is a {type(s).__name__}: the text must be a str")
        try:
            s.encode("utf-8")
        except UnicodeEncodeError as error:
            raise LlamaError(
                f"the text holds {s[error.start]!r} at index {error.start}, half of a character: "
                "decode the input with errors='replace'"
            ) from error
        ids = self.sp_model.encode(s)
        before, after = checked_flag(bos, "bos"), checked_flag(eos, "eos")
        return [self.bos_id] * before + ids + [self.eos_id] * after

    def decode(self, t: Sequence[int]) -> str:
        """The text of ids; BOS and EOS have none, and an incomplete character is U+FFFD."""
        return self.sp_model.decode(checked_ids(t, "the ids", self.n_words))


class StreamDecoder:
    """Turns ids into text one by one; the pieces join to exactly what `Tokenizer.decode` gives.

    Two things make a token's text depend on its neighbours: a character may be spelled by several
    byte pieces, and the space in front of the first word is dropped.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        sp = tokenizer.sp_model
        byte_ids = {sp.piece_to_id(f"<0x{byte:02X}>"): bytes([byte]) for byte in range(256)}
        self._byte_of = {id: byte for id, byte in byte_ids.items() if sp.is_byte(id)}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending: list[int] = []  # tokens whose text is not certain yet
        self._context: list[int] = []  # tokens to decode in front of them
        self._context_text = ""

    def push(self, token: int) -> str:
        """The text that is certain now that `token` is known."""
        self._pending.append(token)
        if token in self._byte_of:
            self._utf8.decode(self._byte_of[token])
            if self._utf8.getstate()[0]:
                return ""
        return self.finish()

    def finish(self) -> str:
        """The text of what is still pending, as it stands."""
        self._utf8.reset()
        tokens, self._pending = self._context + self._pending, []
        text = self._tokenizer.decode(tokens)[len(self._context_text) :]
        # One token with text is context enough: no space is dropped behind it. Until there is one,
        # all that came before is the context.
        last = self._tokenizer.decode(tokens[-1:])
        if last:
            self._context, self._context_text = tokens[-1:], last
        elif not self._context_text:
            self._context, self._context_text = tokens, text
        return text

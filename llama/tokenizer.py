"""Text to token ids and back: SentencePiece."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path

from sentencepiece import SentencePieceProcessor

from llama.checkpoints.files import looks_like
from llama.errors import LlamaError, checked_path, require

# SentencePiece writes one U+FFFD for each byte of a broken character, Python one for all of them.
EACH_BYTE = "llama.each_byte"
codecs.register_error(EACH_BYTE, lambda e: ("\ufffd", e.start + 1))  # type: ignore[attr-defined]


class Tokenizer:
    """A SentencePiece model, `tokenizer.model`."""

    decode_errors = EACH_BYTE

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
        require(isinstance(s, str), f"{s!r:.80} is a {type(s).__name__}: the text must be a str")
        try:
            s.encode("utf-8")
        except UnicodeEncodeError as error:
            raise LlamaError(
                f"the text holds {s[error.start]!r} at index {error.start}, half of a character: "
                "decode the input with errors='replace'"
            ) from error
        return [self.bos_id] * bool(bos) + self.sp_model.encode(s) + [self.eos_id] * bool(eos)

    def decode(self, t: Sequence[int]) -> str:
        """The text of ids; BOS and EOS have none, and an incomplete character is U+FFFD."""
        return self.sp_model.decode(list(t))

    def token_bytes(self, id: int, *, first: bool = False) -> bytes:
        """The UTF-8 bytes of one id, empty for control ids.

        The text of ids is their joined bytes; the `first` one with bytes loses its space.
        """
        sp = self.sp_model
        piece = sp.id_to_piece(id)
        if sp.is_byte(id):
            return bytes([int(piece[3:-1], 16)])
        if sp.is_control(id):
            return b""
        if sp.is_unknown(id):
            return sp.decode([id]).encode()
        return piece.removeprefix("▁" * first).replace("▁", " ").encode()

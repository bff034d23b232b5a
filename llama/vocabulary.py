"""Lists of tokens to the models that the libraries `sentencepiece` and `tokenizers` read."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama.errors import LlamaError, require

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)  # token types, also of GGUF

# A SentencePiece model is a protobuf message. Its field 1 is a piece (text, score, type), field 2
# holds the trainer's settings, field 3 the normalizer's. Concatenated messages are merged.


def sentencepiece_model(
    pieces: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    bos_id: int,
    eos_id: int,
    add_space_prefix: bool,
) -> bytes:
    """The model with these pieces, such as those of a GGUF vocabulary of the kind `llama`."""
    unknown = types.index(UNKNOWN) if UNKNOWN in types else 0
    trainer = field(3, 2) + field(35, 1)  # BPE, and bytes for characters that have no piece
    for number, id in ((45, unknown), (46, bos_id), (47, eos_id)):
        trainer += field(number, pieces[id].encode())
    normalizer = field(1, b"identity") + field(3, int(add_space_prefix)) + field(4, 0)
    table = b"".join(map(sentencepiece_piece, pieces, scores, types))
    return table + field(2, trainer) + field(3, normalizer)


def sentencepiece_piece(text: str, score: float, type: int) -> bytes:
    """A piece as a field of the model."""
    return field(1, field(1, text.encode()) + field(2, float(score)) + field(3, type))


def field(number: int, value: int | float | bytes) -> bytes:
    """A field of a protobuf message."""
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(n: int) -> bytes:
    return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + _varint(n >> 7)


# The byte-level alphabet of GPT-2: printable bytes are themselves, the others come after 255.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHER = [byte for byte in range(256) if byte not in _PRINTABLE]
_TO_CHAR = {byte: byte for byte in _PRINTABLE} | {byte: 256 + i for i, byte in enumerate(_OTHER)}
TO_BYTE = {chr(char): bytes([byte]) for byte, char in _TO_CHAR.items()}

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# How a byte-level vocabulary splits text into words, by its name in GGUF files.
SPLITS = {
    "llama-bpe": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
    ],
    "gpt-2": [_GPT2],
    "smollm": [r"\p{N}", _GPT2],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
    "tekken": [
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|"
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
    ],
}


def byte_level_spec(
    tokens: Sequence[str],
    merges: Sequence[str | tuple[str, str]],
    types: Sequence[int],
    split: str,
    bos: str | None,
) -> dict[str, Any]:
    """The `tokenizer.json` of a byte-level BPE, such as a GGUF vocabulary of the kind `gpt2`.

    `split` names how text is split into words. With `bos`, prompts begin with that token.
    """
    require(
        split in SPLITS,
        f"the tokenizer splits text as {split!r:.40}, and only {', '.join(SPLITS)} are supported: "
        "pass the tokenizer.json of the original model as tokenizer_path",
    )
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    words = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in SPLITS[split]
    ]
    by_byte = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    by_byte["use_regex"] = False
    front: dict[str, Any] = {"SpecialToken": {"id": bos, "type_id": 0}}
    first, second = ({"Sequence": {"id": id, "type_id": 0}} for id in "AB")
    begin_with_bos = {
        "type": "TemplateProcessing",
        "single": [front, first],
        "pair": [front, first, second],
        "special_tokens": bos and {bos: {"id": bos, "ids": [tokens.index(bos)], "tokens": [bos]}},
    }
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": id, "content": text, "special": type == CONTROL, **flags}
            for id, (text, type) in enumerate(zip(tokens, types, strict=True))
            if type in (CONTROL, USER_DEFINED)
        ],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*words, by_byte]},
        "post_processor": begin_with_bos if bos else None,
        "decoder": by_byte,
        "model": {
            "type": "BPE",
            "vocab": {text: id for id, text in enumerate(tokens)},
            "merges": list(merges),
            "ignore_merges": split in ("llama-bpe", "tekken"),
        },
    }


def tiktoken_spec(path: Path) -> dict[str, Any]:
    """The `tokenizer.json` of Llama 3, from Meta's file with a token in base64 on each line."""
    try:
        words = [
            base64.b64decode(line.split()[0], validate=True)
            for line in path.read_bytes().splitlines()
        ]
    except (ValueError, IndexError) as error:
        raise LlamaError(f"{path} is a damaged tiktoken file: download it again") from error
    vocab = dict.fromkeys(word.decode("latin-1").translate(_TO_CHAR) for word in words)
    # The file has no merges: two tokens merge if their joined text is a token, early ones first.
    merges = [
        (token[:i], token[i:])
        for token in vocab
        for i in range(1, len(token))
        if token[:i] in vocab and token[i:] in vocab
    ]
    reserved = [f"reserved_special_token_{i}" for i in range(251)]
    names = ["begin_of_text", "end_of_text", *reserved[:4], "start_header_id", "end_header_id"]
    special = [f"<|{name}|>" for name in (*names, reserved[4], "eot_id", *reserved[5:])]
    types = [NORMAL] * len(vocab) + [CONTROL] * len(special)
    return byte_level_spec([*vocab, *special], merges, types, "llama-bpe", special[0])

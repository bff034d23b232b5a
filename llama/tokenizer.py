"""Text to token ids and back: SentencePiece, the tiktoken file of Llama 3, tokenizer.json."""

from __future__ import annotations

import codecs
import functools
import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor

from llama import vocabulary
from llama.checkpoints.files import looks_like, read_json
from llama.errors import LlamaError, checked_path, require
from llama.vocabulary import CONTROL, UNUSED, USER_DEFINED

# SentencePiece writes one U+FFFD for each byte of a broken character, Python one for all of them.
EACH_BYTE = "llama.each_byte"
codecs.register_error(EACH_BYTE, lambda e: ("\ufffd", e.start + 1))  # type: ignore[attr-defined]


class BaseTokenizer(ABC):
    """Text to token ids and back.

    Attributes:
        n_words: ids from 0 to n_words - 1 have a meaning, those of added tokens included.
        bos_id, eos_id, pad_id: -1 if there is none.
        eos_ids: the ids that end an answer.
        adds_bos: whether the text of a prompt follows BOS.
        special: the text of each control token and its id. Text becomes such an id only with
            `parse_special`.
        decode_errors: the codec error handler for bytes that are not UTF-8.
    """

    n_words: int
    bos_id: int
    eos_id: int
    pad_id: int
    eos_ids: tuple[int, ...]
    adds_bos: bool = True
    special: Mapping[str, int]
    decode_errors: str = "replace"

    @property
    @abstractmethod
    def file(self) -> tuple[str, bytes]:
        """The name and the content of the file that holds this tokenizer, added tokens included."""

    @abstractmethod
    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """The ids of texts and control ids in the order of `parts`."""

    @abstractmethod
    def token_bytes(self, id: int, *, first: bool = False) -> bytes:
        """The UTF-8 bytes of one id.

        The text of ids is their joined bytes; the `first` one with bytes may lose its space.
        """

    def encode(
        self, s: str, bos: bool = False, eos: bool = False, *, parse_special: bool = False
    ) -> list[int]:
        """The ids of `s`, with BOS in front and EOS behind if asked for.

        The text of a control token is encoded as any other text, unless `parse_special`.
        """
        require(isinstance(s, str), f"{s!r:.80} is a {type(s).__name__}: the text must be a str")
        try:
            s.encode("utf-8")
        except UnicodeEncodeError as error:
            raise LlamaError(
                f"the text holds {s[error.start]!r} at index {error.start}, half of a character: "
                "decode the input with errors='replace'"
            ) from error
        ids = self.encode_parts(self.split_special(s) if parse_special else [s])
        before = [self.bos_id] * bool(bos and self.bos_id >= 0)
        return before + ids + [self.eos_id] * bool(eos and self.eos_id >= 0)

    def decode(self, t: Sequence[int]) -> str:
        """The text of ids; bytes that are not UTF-8 become U+FFFD."""
        data = [self.token_bytes(id) for id in t]
        start = next((i for i, found in enumerate(data) if found), None)
        if start is not None:
            data[start] = self.token_bytes(t[start], first=True)
        return b"".join(data).decode("utf-8", self.decode_errors)

    def split_special(self, s: str) -> list[str | int]:
        """`s` as texts and the ids of the control tokens in it."""
        return [self.special.get(part, part) for part in self.special_pattern.split(s) if part]

    @functools.cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Matches the text of any control token."""
        longest_first = sorted(self.special, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def special_text(self, id: int) -> str:
        """The text of a control token, "" if `id` is none."""
        return next((text for text, found in self.special.items() if found == id), "")


def is_control(text: str, special: bool) -> bool:
    """Some checkpoints do not mark the tokens between messages, such as <｜User｜>, as special."""
    return special or re.fullmatch(r"[<\[][|｜].*[|｜][>\]]", text) is not None


class Tokenizer(BaseTokenizer):
    """A SentencePiece model.

    Args:
        model_path: `tokenizer.model`, or its bytes.
        added: tokens that the checkpoint adds to the model, id -> (text, whether it is special).
        prefix_parts: whether text behind a control token begins with a space, as all text does.
    """

    decode_errors = EACH_BYTE

    def __init__(
        self,
        model_path: str | Path | bytes,
        *,
        added: Mapping[int, tuple[str, bool]] | None = None,
        prefix_parts: bool = False,
    ) -> None:
        name, found, model = "the tokenizer", None, model_path
        if not isinstance(model, bytes):
            path = checked_path(model, "model_path")
            name = repr(str(path))
            require(path.is_file(), f"{name} is not a file: pass the checkpoint's tokenizer.model")
            found, model = looks_like(path), path.read_bytes()
        try:
            n = SentencePieceProcessor(model_proto=model).vocab_size()
            model += _added_pieces(n, added or {})
            self.sp_model = sp = SentencePieceProcessor(model_proto=model)
            # Of a field that is there twice the second one counts.
            no_prefix = vocabulary.field(3, vocabulary.field(3, 0))
            self._unprefixed = SentencePieceProcessor(model_proto=model + no_prefix)
        except Exception as error:  # sentencepiece raises many types
            raise LlamaError(
                f"{name} is {found or 'not a SentencePiece model, or a damaged one'}: "
                "pass the tokenizer.model that came with the checkpoint"
            ) from error
        self.n_words: int = sp.vocab_size()
        self.bos_id: int = sp.bos_id()
        self.eos_id: int = sp.eos_id()
        self.pad_id: int = sp.pad_id()
        require(
            min(self.bos_id, self.eos_id) >= 0,
            f"{name} has no BOS or no EOS: pass the tokenizer.model that came with the checkpoint",
        )
        self.eos_ids = (self.eos_id,)
        control = {id for id in range(self.n_words) if sp.is_control(id) or sp.is_unknown(id)}
        # Control tokens to the checkpoint that the model finds in text.
        self._cut = {id for id, token in (added or {}).items() if is_control(*token)} - control
        self.special = {sp.id_to_piece(id): id for id in sorted(control | self._cut)}
        self._prefix_parts = prefix_parts

    @property
    def file(self) -> tuple[str, bytes]:
        return "tokenizer.model", self.sp_model.serialized_model_proto()

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        ids: list[int] = []
        for i, part in enumerate(parts):
            if isinstance(part, int):
                ids.append(part)
                continue
            sp = self.sp_model if i == 0 or self._prefix_parts else self._unprefixed
            for id in sp.encode(part):
                if id in self._cut:
                    piece = sp.id_to_piece(id)
                    for half in (piece[:1], piece[1:]):
                        ids += self._unprefixed.encode(half)
                else:
                    ids.append(id)
        return ids

    def decode(self, t: Sequence[int]) -> str:
        """The text of ids; control tokens have none, and an incomplete character is U+FFFD."""
        return self.sp_model.decode(list(t))

    def token_bytes(self, id: int, *, first: bool = False) -> bytes:
        sp = self.sp_model
        piece = sp.id_to_piece(id)
        if sp.is_byte(id):
            return bytes([int(piece[3:-1], 16)])
        if sp.is_control(id):
            return b""
        if sp.is_unknown(id):
            return sp.decode([id]).encode()
        return piece.removeprefix("▁" * first).replace("▁", " ").encode()


def _added_pieces(n: int, added: Mapping[int, tuple[str, bool]]) -> bytes:
    """Pieces to append to a SentencePiece model with `n` of them."""
    pieces = {id: (f"<unused {id}>", UNUSED) for id in range(n, max(added, default=0))}
    for id, (text, special) in added.items():
        if id >= n:
            kind = CONTROL if is_control(text, special) else USER_DEFINED
            pieces[id] = (text.replace(" ", "▁"), kind)
    return b"".join(
        vocabulary.sentencepiece_piece(text, 0, kind) for id, (text, kind) in sorted(pieces.items())
    )


# Control tokens are found in text by this in front, which no text from outside can contain.
_MARK = str(secrets.randbits(96))


class JsonTokenizer(BaseTokenizer):
    """The content of a `tokenizer.json`, run by the library `tokenizers`.

    `bos`, `eos` and `pad` are the texts of these tokens. Without `bos` it is the token with which
    the file says that text begins.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        *,
        bos: str | None = None,
        eos: str | None = None,
        pad: str | None = None,
    ) -> None:
        try:
            from tokenizers import Tokenizer as Library
        except ImportError as error:
            raise LlamaError(
                "this tokenizer needs the package tokenizers: pip install tokenizers"
            ) from error
        try:
            added = [(t["id"], t["content"], t["special"]) for t in spec["added_tokens"]]
            self.special = {text: id for id, text, special in added if is_control(text, special)}
            self._library = Library.from_str(json.dumps(_marked(spec, self.special)))
            front = self._library.encode("").ids  # what the file puts in front of all text
            ids = self._library.get_vocab() | self.special
            known = {ids.get(_MARK + text) for text in self.special}
            if known != {*self.special.values()} or not known.issuperset(front):
                raise ValueError("the ids of its added tokens do not fit its vocabulary")
        except Exception as error:  # tokenizers raises Exception itself
            raise LlamaError(
                f"tokenizer.json cannot be read ({error!s:.80}): download it again, or update the "
                "package tokenizers"
            ) from error
        self._added = {id: text.encode() for id, text, _ in added}
        self.n_words = max(ids.values(), default=-1) + 1
        self._is_byte_level = '"ByteLevel"' in json.dumps(spec.get("decoder"))
        word = next((id for text, id in ids.items() if "▁a" <= text < "▁{"), None)
        self._drops_space = word is not None and self._library.decode([word])[:1] != " "
        self.adds_bos = len(front) > 0
        self.bos_id, self.eos_id, self.pad_id = (
            ids.get(text or "", -1) for text in (bos, eos, pad)
        )
        if bos is None and front:
            self.bos_id = front[0]
        self.eos_ids = (self.eos_id,) if self.eos_id >= 0 else ()

    @property
    def file(self) -> tuple[str, bytes]:
        return "tokenizer.json", self._library.to_str().replace(_MARK, "").encode()

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        texts = [p if isinstance(p, str) else _MARK + self.special_text(p) for p in parts]
        return self._library.encode("".join(texts), add_special_tokens=False).ids

    def token_bytes(self, id: int, *, first: bool = False) -> bytes:
        if not 0 <= id < self.n_words:
            raise IndexError(f"the id {id} is not from 0 to {self.n_words - 1}")
        if id in self._added:
            return self._added[id]
        token = self._library.id_to_token(id) or ""
        if self._is_byte_level:
            return b"".join(vocabulary.TO_BYTE.get(char) or char.encode() for char in token)
        if re.fullmatch("<0x[0-9A-F]{2}>", token):
            return bytes([int(token[3:-1], 16)])
        text = token.replace("▁", " ")
        return text.removeprefix(" " * (first and self._drops_space)).encode()


def _marked(spec: Mapping[str, Any], special: Mapping[str, int]) -> dict[str, Any]:
    """`spec` with the mark in the names of control tokens, so that their text is ordinary text."""
    names = {text: _MARK + text for text in special}
    tokens = [
        {**token, "content": names[token["content"]], "special": True, "normalized": False}
        if token["content"] in names
        else token
        for token in spec["added_tokens"]
    ]
    model = dict(spec["model"])
    if model.get("continuing_subword_prefix"):  # on which tokenizers 0.23 may abort the process
        raise ValueError("its subwords have a prefix")
    model["vocab"] = {names.get(text, text): id for text, id in model["vocab"].items()}
    unknown = model.get("unk_token")
    model["unk_token"] = names.get(str(unknown), unknown)
    return {**spec, "added_tokens": tokens, "model": model, "truncation": None, "padding": None}


TOKENIZER_FILES = ("tokenizer.model", "tokenizer.model.v3", "tokenizer.json")


def open_tokenizer(path: str | Path, *, eos_ids: Sequence[int] = ()) -> BaseTokenizer:
    """The tokenizer of a checkpoint.

    Args:
        path: the checkpoint's folder, or the file of the tokenizer.
        eos_ids: ids that end an answer, besides the tokenizer's own EOS.
    """
    path = checked_path(path, "tokenizer_path")
    if path.is_dir():
        found = [path / name for name in TOKENIZER_FILES if (path / name).is_file()]
        require(
            len(found) > 0,
            f"{str(path)!r} holds none of {', '.join(TOKENIZER_FILES)}: download one as well",
        )
        path = found[0]
    config, added = _text_config(path.parent)
    bos, eos, pad = (config[f"{name}_token"] for name in ("bos", "eos", "pad"))
    kind = looks_like(path) if path.is_file() else None
    tokenizer: BaseTokenizer
    if kind == "a tiktoken file":
        tokenizer = JsonTokenizer(vocabulary.tiktoken_spec(path), eos="<|end_of_text|>")
        # Meta's models also end an answer with <|eom_id|> and <|eot_id|>.
        eos_ids = [*eos_ids, tokenizer.eos_id + 7, tokenizer.eos_id + 8]
    elif kind == "JSON":
        tokenizer = JsonTokenizer(read_json(path), bos=bos, eos=eos, pad=pad)
    else:
        tokenizer = Tokenizer(path, added=added, prefix_parts=config.get("legacy") is True)
        tokenizer.bos_id = tokenizer.special.get(bos, tokenizer.bos_id)
        tokenizer.eos_id = tokenizer.special.get(eos, tokenizer.eos_id)
        eos_ids = [*eos_ids, tokenizer.eos_id]
    return _with_eos(tokenizer, eos_ids)


def _text_config(folder: Path) -> tuple[dict[str, Any], dict[int, tuple[str, bool]]]:
    """What tokenizer_config.json says, and the added tokens as id -> (text, is special)."""
    paths = folder / "added_tokens.json", folder / "tokenizer_config.json"
    added_tokens, config = (read_json(path) if path.is_file() else {} for path in paths)
    try:
        for name in ("bos_token", "eos_token", "pad_token"):
            token = config.get(name)
            config[name] = token["content"] if isinstance(token, dict) else token
        added = {id: (text, text in config.values()) for text, id in added_tokens.items()}
        for id, token in config.get("added_tokens_decoder", {}).items():
            added[int(id)] = (token["content"], token["special"])
        if not all(0 <= id < 2**20 and text for id, (text, _) in added.items()):
            raise ValueError("an id is out of range, or a text is empty")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise LlamaError(
            f"the added tokens in {str(folder)!r} cannot be read ({error!r:.80}): download "
            "tokenizer_config.json and added_tokens.json again"
        ) from error
    return config, added


def gguf_tokenizer(
    model: str,
    tokens: Sequence[str],
    types: Sequence[int],
    *,
    scores: Sequence[float] = (),
    merges: Sequence[str] = (),
    pre: str = "",
    bos_id: int = -1,
    eos_ids: Sequence[int] = (),
    adds_bos: bool = True,
    add_space_prefix: bool = True,
) -> BaseTokenizer:
    """The tokenizer of a GGUF file; the arguments are its fields `tokenizer.ggml.*`.

    `scores` and `add_space_prefix` belong to the `model` "llama", `merges` and `pre` to "gpt2".
    The first of `eos_ids` is EOS.
    """
    n, n_scores = len(tokens), len(scores) if model == "llama" else len(tokens)
    special = {*eos_ids, *[bos_id] * (bos_id >= 0 or model == "llama")}
    require(
        n == len(types) == n_scores
        and len(eos_ids) > 0
        and 0 <= min(special) <= max(special) < n
        and min(types) >= 0,
        f"the tokenizer has {n} tokens, {len(types)} types, {n_scores} scores, BOS {bos_id} and "
        f"EOS {list(eos_ids)!r:.80}, which do not fit together: download the file again",
    )
    types = [
        CONTROL if id in special or (type == USER_DEFINED and is_control(text, False)) else type
        for id, (text, type) in enumerate(zip(tokens, types, strict=True))
    ]
    tokenizer: BaseTokenizer
    if model == "llama":
        tokenizer = Tokenizer(
            vocabulary.sentencepiece_model(
                tokens, scores, types, bos_id, eos_ids[0], add_space_prefix
            ),
            prefix_parts=add_space_prefix,  # as llama.cpp
        )
        tokenizer.adds_bos = adds_bos
    else:
        require(
            model == "gpt2",
            f"a tokenizer of the kind {model!r:.40} is not supported: pass the "
            "tokenizer of the original model as tokenizer_path",
        )
        bos = tokens[bos_id] if bos_id >= 0 else None
        spec = vocabulary.byte_level_spec(tokens, merges, types, pre, bos if adds_bos else None)
        tokenizer = JsonTokenizer(spec, bos=bos, eos=tokens[eos_ids[0]])
    return _with_eos(tokenizer, eos_ids)


def _with_eos(tokenizer: BaseTokenizer, eos_ids: Sequence[int]) -> BaseTokenizer:
    outside = [id for id in eos_ids if not 0 <= id < tokenizer.n_words]
    require(
        not outside,
        f"the EOS id {outside[:1]} is not among the {tokenizer.n_words} ids of the tokenizer: pass "
        "the tokenizer that belongs to the checkpoint as tokenizer_path",
    )
    tokenizer.eos_ids = tuple(dict.fromkeys((*tokenizer.eos_ids, *eos_ids)))
    if tokenizer.eos_id < 0 and eos_ids:
        tokenizer.eos_id = eos_ids[0]
    return tokenizer

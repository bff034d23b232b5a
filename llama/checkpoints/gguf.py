"""GGUF, the format of llama.cpp: one file, or several parts, with weights in blocks.

The header is read here, within the bounds of the file; the package gguf decodes the blocks.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from llama.checkpoints.config import Config, TextFacts, checked_config
from llama.checkpoints.reader import Checkpoint, Part
from llama.errors import LlamaError, require
from llama.model import ModelArgs, rope_frequencies
from llama.parameters import EMBEDDING, OUTPUT, parameters
from llama.tokenizer import BaseTokenizer, gguf_tokenizer

_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # codes of `struct`
_STRING, _ARRAY = 8, 9
_PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_MAX_VALUES = 10_000_000  # of one header: the largest vocabularies have under a million
# What the metadata calls a field of ModelArgs, behind the name of the architecture.
_KEYS = {
    "dim": "embedding_length",
    "n_layers": "block_count",
    "n_heads": "attention.head_count",
    "hidden_dim": "feed_forward_length",
    "n_kv_heads": "attention.head_count_kv",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "head_dim": "attention.key_length",
}
_ARCHITECTURES = ("llama", "mistral")
_ROPE_FACTORS = "rope_freqs.weight"
_TILE_ROWS = 1024  # decoded at a time


def open_gguf(path: Path) -> Checkpoint | None:
    """The checkpoint in a file, or in a folder; None if there is none."""
    found = [path]
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        firsts = [f for f in found if (m := _SPLIT.fullmatch(f.name)) is None or int(m[2]) == 1]
        names = ", ".join(f.name for f in firsts)
        require(len(firsts) < 2, f"{path} holds several models: pass one of {names:.300}")
        if not found:
            return None
    files = _all_parts(found[0])
    headers = [_read_header(file) for file in files]
    values = headers[0].values
    parts: dict[str, list[Part]] = {}
    for header in headers:
        for name, part in header.parts:
            parts.setdefault(name, []).append(part)
    config = _config(files[0], values, parts)
    table = parameters(ModelArgs(**config.params))
    names_in_file = {name: parameter.gguf_name for name, parameter in table.items()}
    if config.tied:
        names_in_file[OUTPUT] = names_in_file[EMBEDDING]
    template = values.get("tokenizer.chat_template")
    text = TextFacts(
        "gguf",
        _eos_ids(values),
        values.get("tokenizer.ggml.add_bos_token"),
        template if isinstance(template, str) else None,
    )
    return Checkpoint(path, "gguf", files, config, text, parts, names_in_file, metadata=values)


def _all_parts(file: Path) -> list[Path]:
    match = _SPLIT.fullmatch(file.name)
    if match is None:
        return [file]
    n = int(match[3])
    files = [file.with_name(f"{match[1]}-{i + 1:05}-of-{n:05}.gguf") for i in range(n)]
    missing = [f.name for f in files if not f.is_file()]
    require(not missing, f"{missing[:1]} is missing next to {file}: download it as well")
    return files


def _config(file: Path, values: dict[str, Any], parts: dict[str, list[Part]]) -> Config:
    architecture = values.get("general.architecture")
    require(
        architecture in _ARCHITECTURES,
        f"{file}: the architecture {architecture!r:.80} is not supported: it must be one of "
        f"{', '.join(_ARCHITECTURES)}",
    )

    def value(key: str) -> Any:
        return values.get(f"{architecture}.{key}")

    for key in ("expert_count", "attention.clamp_kqv", "rope.scaling.attn_factor"):
        require(not value(key), f"{file}: {key} {value(key)!r:.80} is not supported")
    params = {ours: value(theirs) for ours, theirs in _KEYS.items()}
    for ours in ("dim", "n_layers", "n_heads", "hidden_dim"):
        require(params[ours] is not None, f"{file} has no {_KEYS[ours]}: download it again")
    if architecture == "mistral":
        params["sliding_window"] = value("attention.sliding_window")
    scaling = value("rope.scaling.type")
    if scaling not in (None, "none"):
        params["rope_scaling"] = {"rope_type": scaling, "factor": value("rope.scaling.factor")}
    factors, tied = parts.pop(_ROPE_FACTORS, None), "output.weight" not in parts
    config = checked_config(params, file, context=value("context_length"), tied=tied)
    head_dim = ModelArgs(**config.params).head_dim
    for key in ("rope.dimension_count", "attention.value_length"):
        require(
            value(key) in (None, head_dim),
            f"{file}: {key} {value(key)!r:.80} is not supported: it must be {head_dim}",
        )
    if factors is not None:
        config.params["rope_scaling"] = _llama3_scaling(factors[0], head_dim, config)
    return config


def _llama3_scaling(factors: Part, head_dim: int, config: Config) -> dict[str, Any]:
    """The rope scaling whose factors the file holds: those of Llama 3 are told by their values."""
    found = factors.tensor[:].float()
    theta = config.params.get("rope_theta", 10000.0)
    plain = rope_frequencies(head_dim, theta)
    if found.shape == plain.shape:
        for context in [2**i for i in range(5, 21)]:
            scaling = {"rope_type": "llama3", "factor": float(found.max())}
            scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
            scaling["original_max_position_embeddings"] = context
            scaled = rope_frequencies(head_dim, theta, scaling)
            if torch.allclose(plain / found, scaled, rtol=1e-5, atol=0):
                return scaling
    raise LlamaError(
        f"{factors.file}: its {_ROPE_FACTORS} is not that of Llama 3, and others are not supported"
    )


def _eos_ids(values: dict[str, Any]) -> tuple[int, ...]:
    ids = (values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(id for id in ids if isinstance(id, int)))


def metadata_tokenizer(checkpoint: Checkpoint) -> BaseTokenizer:
    """The tokenizer that the file itself holds."""
    values = checkpoint.metadata

    def value(key: str, default: Any) -> Any:
        found = values.get(f"tokenizer.ggml.{key}", default)
        fits = type(found) is type(default)
        require(
            fits, f"{checkpoint.path}: tokenizer.ggml.{key} is {found!r:.80}: download it again"
        )
        return found

    model = value("model", "")
    require(model != "", f"{checkpoint.path} holds no tokenizer: pass tokenizer_path")
    tokens, pre = value("tokens", []), value("pre", "")
    return gguf_tokenizer(
        model,
        tokens,
        value("token_type", [1] * len(tokens)),
        scores=value("scores", []),
        merges=value("merges", []),
        pre=pre,
        bos_id=value("bos_token_id", -1),
        eos_ids=checkpoint.text.eos_ids,
        adds_bos=value("add_bos_token", model == "llama" or pre in ("llama-bpe", "tekken")),
        add_space_prefix=value("add_space_prefix", True),
    )


@dataclass(frozen=True)
class Blocks:
    """A tensor in quantized blocks. Indexing decodes what is asked for, in float32."""

    data: torch.Tensor  # uint8 (rows, bytes of a row), a view of the mapped file
    shape: torch.Size
    type: Any  # of the package gguf
    block: int  # numbers in a block
    dtype: torch.dtype = torch.float32

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()

    def __getitem__(self, index: Any) -> torch.Tensor:
        from gguf.quants import dequantize

        rows, columns = (
            (*index, slice(None))[:2] if isinstance(index, tuple) else (index, slice(None))
        )
        start, stop, _ = columns.indices(self.shape[-1])
        first, last = start // self.block, -(-stop // self.block)
        nbytes = self.data.shape[1] * self.block // self.shape[-1]
        data = self.data[rows, first * nbytes : last * nbytes]
        out = torch.empty(len(data), stop - start, dtype=torch.float32, device="cpu")
        skipped = start - first * self.block
        for i in range(0, len(data), _TILE_ROWS):
            tile = dequantize(data[i : i + _TILE_ROWS].contiguous().numpy(), self.type)
            wide = torch.from_numpy(tile)[:, skipped : skipped + stop - start]
            out[i : i + _TILE_ROWS] = wide
        return out


@dataclass
class _Header:
    values: dict[str, Any]
    parts: list[tuple[str, Part]]


def _read_header(file: Path) -> _Header:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise LlamaError(f"{file}: to read GGUF files, pip install gguf") from error
    try:
        with open(file, "rb") as opened:
            require(opened.read(4) == b"GGUF", f"{file} is not a GGUF file: download it again")
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        return _Cursor(mapped, file).header()
    except OSError as error:
        raise LlamaError(f"{file} cannot be read: {error.strerror}") from error
    except (struct.error, ValueError, RuntimeError) as error:
        if isinstance(error, LlamaError):
            raise
        raise LlamaError(f"{file} is truncated or damaged ({error}): download it again") from error


class _Cursor:
    """Reads a header from front to back. Whatever a count says, nothing beyond the file is read."""

    def __init__(self, data: mmap.mmap, file: Path) -> None:
        self.data, self.file, self.at, self.n_values = data, file, 4, 0

    def scalar(self, code: str) -> Any:
        self.at += (size := struct.calcsize(f"<{code}"))
        return struct.unpack_from(f"<{code}", self.data, self.at - size)[0]

    def string(self) -> str:
        n = self.scalar("Q")
        require(self.at + n <= len(self.data), f"{self.file} is truncated: download it again")
        self.at += n
        return self.data[self.at - n : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind != _ARRAY:
            return self.string() if kind == _STRING else self.scalar(_SCALARS.get(kind, "unknown"))
        inner, n = self.scalar("I"), self.scalar("Q")
        self.n_values += n
        fits = inner != _ARRAY and self.n_values < _MAX_VALUES
        require(fits, f"{self.file} has a list that no model has: download it again")
        if inner == _STRING:
            return [self.string() for _ in range(n)]
        code = f"<{n}{_SCALARS.get(inner, 'unknown')}"
        self.at += (size := struct.calcsize(code))
        require(self.at <= len(self.data), f"{self.file} is truncated: download it again")
        return list(struct.unpack_from(code, self.data, self.at - size))

    def header(self) -> _Header:
        version, n_tensors, n_values = (self.scalar(code) for code in "IQQ")
        require(version in (2, 3), f"{self.file}: version {version} of GGUF is not supported")
        values: dict[str, Any] = {}
        for _ in range(n_values):
            key = self.string()
            values[key] = self.value(self.scalar("I"))
        infos = []
        for _ in range(n_tensors):
            name = self.string()
            shape = [self.scalar("Q") for _ in range(min(self.scalar("I"), 9))]
            infos.append((name, shape[::-1], self.scalar("I"), self.scalar("Q")))
        alignment = values.get("general.alignment", 32)
        fits = type(alignment) is int and alignment > 0 and alignment % 8 == 0
        require(fits, f"{self.file}: general.alignment is {alignment!r:.80}: download it again")
        start = -(-self.at // alignment) * alignment
        tensors = [(info[0], Part(self.tensor(*info, start), self.file)) for info in infos]
        return _Header(values, tensors)

    def tensor(
        self, name: str, shape: list[int], type: int, offset: int, start: int
    ) -> torch.Tensor | Blocks:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        where = f"{self.file}: {name!r:.80}"
        try:
            kind = GGMLQuantizationType(type)
            block, nbytes = GGML_QUANT_SIZES[kind]
        except (KeyError, ValueError) as error:
            raise LlamaError(f"{where} has the unknown type {type}: update gguf") from error
        total = prod(shape) // block * nbytes
        begin, whole = start + offset, 0 < len(shape) < 3 and shape[-1] % block == 0
        fits = whole and 0 < total <= len(self.data) - begin and begin % 8 == 0
        require(
            fits, f"{where} does not lie in the file: it is truncated or damaged: download it again"
        )
        if type in _PLAIN:
            count = prod(shape)
            flat = torch.frombuffer(self.data, dtype=_PLAIN[type], count=count, offset=begin)
            return flat.view(shape)
        flat = torch.frombuffer(self.data, dtype=torch.uint8, count=total, offset=begin)
        found = Blocks(flat.view(-1, shape[-1] // block * nbytes), torch.Size(shape), kind, block)
        try:
            found[:1]
        except NotImplementedError as error:
            raise LlamaError(
                f"{where} has the type {kind.name}, which gguf cannot decode"
            ) from error
        return found

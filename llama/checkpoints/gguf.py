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

from llama.checkpoints.config import (
    GGUF,
    Config,
    checked_config,
    named_params,
    require_supported,
)
from llama.checkpoints.reader import Checkpoint, Part
from llama.checkpoints.text import TextFacts
from llama.errors import LlamaError, require
from llama.model import ModelArgs, rope_frequencies
from llama.parameters import EMBEDDING, OUTPUT, parameters
from llama.tokenizer import BaseTokenizer, gguf_tokenizer

_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # codes of `struct`
_STRING, _ARRAY = 8, 9
_PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_MAX_VALUES = (
    10_000_000  # in the lists of one header: the largest vocabularies have under a million
)
_ROPE_FACTORS = "rope_freqs.weight"
_TILE_ROWS = 1024  # decoded at a time


def open_gguf(path: Path) -> Checkpoint | None:
    """The checkpoint in a file, or in a folder; None if there is none."""
    found = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    firsts = [f for f in found if (m := _SPLIT.fullmatch(f.name)) is None or int(m[2]) == 1]
    names = ", ".join(f.name for f in firsts)
    require(len(firsts) < 2, f"{path} holds several models: pass one of {names:.300}")
    if not found:
        return None
    files = _all_parts(found[0])
    values: dict[str, Any] = {}
    parts: dict[str, list[Part]] = {}
    for file in files:
        found_values, tensors = _read_header(file)
        values = {**found_values, **values}
        for name, tensor in tensors:
            parts.setdefault(name, []).append(Part(tensor, file))
    config = _config(files[0], values, parts)
    table = parameters(ModelArgs(**config.params))
    stored = {name: parameter.gguf_name for name, parameter in table.items()}
    if config.tied:
        stored[OUTPUT] = stored[EMBEDDING]
    eos = (values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    eos_ids = tuple(dict.fromkeys(id for id in eos if isinstance(id, int)))
    template = values.get("tokenizer.chat_template")
    template = template if isinstance(template, str) else None
    text = TextFacts("gguf", eos_ids, values.get("tokenizer.ggml.add_bos_token"), template)
    return Checkpoint(path, "gguf", files, config, text, parts, stored, metadata=values)


def _all_parts(file: Path) -> list[Path]:
    match = _SPLIT.fullmatch(file.name)
    if match is None:
        return [file]
    names = (f"{match[1]}-{i + 1:05}-of-{match[3]}.gguf" for i in range(int(match[3])))
    files = [file.with_name(name) for name in names]
    missing = [f.name for f in files if not f.is_file()]
    require(not missing, f"{missing[:1]} is missing next to {file}: download it as well")
    return files


def _config(file: Path, values: dict[str, Any], parts: dict[str, list[Part]]) -> Config:
    require_supported(values, {"general.architecture": ("llama", "mistral")}, file)
    prefix = f"{values['general.architecture']}."
    facts = {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}
    params = named_params(facts.get, GGUF, file)
    if facts.get("rope.scaling.type", "none") != "none":
        kind, factor = facts["rope.scaling.type"], facts.get("rope.scaling.factor")
        params["rope_scaling"] = {"rope_type": kind, "factor": factor}
    config = checked_config(params, file, context=facts.get("context_length"))
    head_dim = ModelArgs(**config.params).head_dim
    supported = dict.fromkeys(("rope.dimension_count", "attention.value_length"), (None, head_dim))
    require_supported(facts, {**supported, "expert_count": (None, 0)}, file)
    factors = parts.pop(_ROPE_FACTORS, None)
    if factors is not None:
        config.params["rope_scaling"] = _llama3_scaling(factors[0], head_dim, config)
    return config._replace(tied="output.weight" not in parts)


def _llama3_scaling(factors: Part, head_dim: int, config: Config) -> dict[str, Any]:
    """The rope scaling from which the factors in the file come: Llama 3's rule."""
    found, theta = factors.tensor[:].float(), config.params.get("rope_theta", 10000.0)
    plain = rope_frequencies(head_dim, theta)
    for context in [2**i for i in range(5, 21)]:
        scaling = {"rope_type": "llama3", "factor": float(found.max()), "low_freq_factor": 1.0}
        scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": context}
        scaled = rope_frequencies(head_dim, theta, scaling)
        if found.shape == plain.shape and torch.allclose(plain / found, scaled, 1e-5, 0):
            return scaling
    raise LlamaError(f"{factors.file}: only a {_ROPE_FACTORS} that follows Llama 3 is supported")


def metadata_tokenizer(checkpoint: Checkpoint) -> BaseTokenizer:
    """The tokenizer that the file itself holds."""

    def value(key: str, default: Any) -> Any:
        found = checkpoint.metadata.get(f"tokenizer.ggml.{key}", default)
        rule = f"{checkpoint.path}: tokenizer.ggml.{key} is {found!r:.80}: download it again"
        require(type(found) is type(default), rule)
        return found

    model, tokens = value("model", ""), value("tokens", [])
    require(model != "", f"{checkpoint.path} holds no tokenizer: pass tokenizer_path")
    pre = value("pre", "")
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
    kind: Any  # a GGMLQuantizationType
    block: int  # numbers in a block
    dtype: torch.dtype = torch.float32

    def __getitem__(self, index: Any) -> torch.Tensor:
        from gguf.quants import dequantize

        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        start, stop, _ = columns.indices(self.shape[-1])
        first, last = start // self.block, -(-stop // self.block)
        nbytes = self.data.shape[1] * self.block // self.shape[-1]
        data = self.data[rows, first * nbytes : last * nbytes]
        out = torch.empty(len(data), stop - start, dtype=torch.float32, device="cpu")
        begin = start - first * self.block
        for i in range(0, len(data), _TILE_ROWS):
            tile = dequantize(data[i : i + _TILE_ROWS].contiguous().numpy(), self.kind)
            out[i : i + _TILE_ROWS] = torch.from_numpy(tile)[:, begin : begin + stop - start]
        return out


Header = tuple[dict[str, Any], list[tuple[str, torch.Tensor | Blocks]]]


def _read_header(file: Path) -> Header:
    """The metadata, and the tensors by name."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise LlamaError(f"{file}: to read GGUF files, pip install gguf") from error
    try:
        with open(file, "rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        require(mapped[:4] == b"GGUF", f"{file} is not a GGUF file: download it again")
        return _Cursor(mapped, file).header()
    except OSError as error:
        raise LlamaError(f"{file} cannot be read: {error.strerror}") from error
    except (struct.error, ValueError, RuntimeError) as error:
        if isinstance(error, LlamaError):
            raise
        raise LlamaError(
            f"{file} is truncated or damaged ({error!s:.80}): download it again"
        ) from error


class _Cursor:
    """Reads a header from front to back. Whatever a count says, nothing beyond the file is read."""

    def __init__(self, data: mmap.mmap, file: Path) -> None:
        self.data, self.file, self.at, self.n_values = data, file, 4, 0

    def take(self, n: int) -> int:
        """Go `n` bytes on; returns where they begin."""
        require(n <= len(self.data) - self.at, f"{self.file} is truncated: download it again")
        self.at += n
        return self.at - n

    def scalars(self, code: str) -> tuple[Any, ...]:
        code = f"<{code}"
        return struct.unpack_from(code, self.data, self.take(struct.calcsize(code)))

    def string(self) -> str:
        start = self.take(self.scalars("Q")[0])
        return self.data[start : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalars(_SCALARS.get(kind, "unknown"))[0]
        inner, n = self.scalars("IQ")
        self.n_values += n
        require(self.n_values < _MAX_VALUES, f"{self.file} has too long a list: download it again")
        if inner == _STRING:
            return [self.string() for _ in range(n)]
        return list(self.scalars(f"{n}{_SCALARS.get(inner, 'unknown')}"))

    def header(self) -> Header:
        version, n_tensors, n_values = self.scalars("IQQ")
        require(version in (2, 3), f"{self.file}: version {version} of GGUF is not supported")
        values: dict[str, Any] = {}
        for _ in range(n_values):
            key = self.string()
            values[key] = self.value(*self.scalars("I"))
        infos = [self.info() for _ in range(n_tensors)]
        alignment = values.get("general.alignment", 32)
        fits = type(alignment) is int and alignment > 0 and alignment % 8 == 0
        require(fits, f"{self.file}: general.alignment is {alignment!r:.80}: download it again")
        start = -(-self.at // alignment) * alignment
        return values, [(info[0], self.tensor(*info, start)) for info in infos]

    def info(self) -> tuple[str, tuple[int, ...], int, int]:
        """A tensor's name, shape, type and offset."""
        name, n_dims = self.string(), self.scalars("I")[0]
        require(
            0 < n_dims < 3, f"{self.file}: {name!r:.80} has {n_dims} dimensions: 1 or 2 are usual"
        )
        shape, (type, offset) = self.scalars(f"{n_dims}Q")[::-1], self.scalars("IQ")
        return name, shape, type, offset

    def tensor(
        self, name: str, shape: tuple[int, ...], type: int, offset: int, start: int
    ) -> torch.Tensor | Blocks:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        where, begin = f"{self.file}: {name!r:.80}", start + offset
        try:
            kind = GGMLQuantizationType(type)
            block, nbytes = GGML_QUANT_SIZES[kind]
        except (KeyError, ValueError) as error:
            raise LlamaError(f"{where} has the unknown type {type}: update gguf") from error
        total = prod(shape) // block * nbytes
        fits = shape[-1] % block == 0 and 0 < total <= len(self.data) - begin and begin % 8 == 0
        require(fits, f"{where} does not lie in the file: download it again")
        dtype = _PLAIN.get(type, torch.uint8)
        count = total // dtype.itemsize
        flat = torch.frombuffer(self.data, dtype=dtype, count=count, offset=begin)
        if type in _PLAIN:
            return flat.view(shape)
        found = Blocks(flat.view(-1, shape[-1] // block * nbytes), torch.Size(shape), kind, block)
        try:
            found[:1]
        except NotImplementedError as error:
            raise LlamaError(f"{where} is {kind.name}, which gguf does not decode") from error
        return found

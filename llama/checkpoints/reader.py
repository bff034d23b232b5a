"""An opened checkpoint of any format, and how a rank reads its part of each parameter.

Of each parameter a rank needs an interval along one axis, and each file holds a known interval.
Where the two overlap is copied once, into the requested dtype and onto the device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from llama import quantize as quant
from llama.checkpoints.adapter import Adapter
from llama.checkpoints.config import Config
from llama.checkpoints.files import DTYPES, map_tensors
from llama.checkpoints.text import TextFacts
from llama.errors import require
from llama.model import ModelArgs
from llama.parameters import EMBEDDING, Parameter, parameters, permute_heads

_COMPUTED = re.compile(r"(.*\.)?rope\.freqs|.*\.rotary_emb\.inv_freq")  # stored, but not parameters


class Part(NamedTuple):
    """What one file holds of a parameter."""

    tensor: Any  # a view of the mapped file, or what decodes a slice of it
    file: Path


class Expected(NamedTuple):
    """What each file must hold of a parameter."""

    shape: list[int]
    dtypes: list[torch.dtype]  # any of them
    total: int  # numbers in all files together


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: its facts, and where its bytes are. No weight has been read yet."""

    path: Path
    format: str  # "meta", "hf", "gguf" or "quantized"
    files: list[Path]
    config: Config
    text: TextFacts
    parts: dict[str, list[Part]]  # by stored name: one for each file that has some of it, in order
    names: dict[str, str] = field(default_factory=dict)  # what the files call a parameter, if else
    quantized: str | None = None  # the kind, if the files are
    metadata: dict[str, Any] = field(default_factory=dict)  # of a GGUF file
    adapter: Adapter | None = None

    @cached_property
    def vocab_size(self) -> int:
        """The rows of the embedding. Llama 3's shards split them, Llama 2's do not."""
        name = EMBEDDING if self.quantized is None else f"{EMBEDDING}.{quant.PARTS[0]}"
        name = self.stored_name(name)
        require(name in self.parts, f"{self.path} has no {name}: download its files again")
        (rows, *columns), file = self.parts[name][0].tensor.shape, self.parts[name][0].file
        require(len(columns) == 1 and rows > 0, f"{file}: {name} is empty or not a matrix")
        rows *= self.n_parts if self._splits_rows(columns[0]) else 1
        stated = (
            f"{self.path}: vocab_size is {self.config.vocab_size}, but the embedding has {rows}"
        )
        require(self.config.vocab_size in (None, rows), f"{stated} rows: download the files again")
        return rows

    @property
    def params(self) -> dict[str, Any]:
        """Fields of ModelArgs."""
        return {**self.config.params, "vocab_size": self.vocab_size}

    @property
    def context(self) -> int | None:
        """How many positions the model was trained on, if the checkpoint states it."""
        return self.config.context

    @cached_property
    def args(self) -> ModelArgs:
        return ModelArgs(**self.params)

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        return parameters(self.args)

    def stored_name(self, name: str) -> str:
        """What the files call a parameter."""
        return self.names.get(name, name)

    @property
    def n_parts(self) -> int:
        """How many files each parameter is split over."""
        return len(self.files) if self.format in ("meta", "quantized") else 1

    def _splits_rows(self, columns: int) -> bool:
        return self.format == "meta" and columns == ModelArgs(**self.config.params).dim

    def stored_axis(self, name: str) -> int | None:
        """The axis along which the files split a parameter."""
        parts = self.parts.get(self.stored_name(name))
        if name == EMBEDDING and parts and self._splits_rows(parts[0].tensor.shape[-1]):
            return 0
        return self.parameters[name].axis

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype in which a parameter is stored; float32 if it has to be decoded."""
        return self.parts[self.stored_name(name)][0].tensor.dtype

    def expected(self) -> dict[str, Expected]:
        """What each file must hold, by stored name."""
        found: dict[str, Expected] = {}
        for name, parameter in self.parameters.items():
            shape, axis = list(parameter.shape), self.stored_axis(name)
            if axis is not None:
                shape[axis] //= self.n_parts
            if self.quantized is not None and len(shape) == 2:
                stored = quant.stored(name, (shape[0], shape[1]), self.quantized)
                for key, (size, dtype) in stored.items():
                    found[key] = Expected(list(size), [dtype], math.prod(size) * self.n_parts)
            else:
                total = math.prod(parameter.shape)
                found[self.stored_name(name)] = Expected(shape, list(DTYPES.values()), total)
        return found

    def read(
        self,
        name: str,
        rank: int = 0,
        ranks: int = 1,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """What `rank` of `ranks` needs of a parameter, in `dtype` (None: as it is stored).

        If nothing has to change, this is a view of the mapped file.
        """
        parameter = self.parameters[name]
        need = parameter.interval(rank, ranks)
        overlaps = list(self._overlaps(name, need))
        device, dtype = torch.device(device), dtype or self.dtype_of(name)
        permuted = parameter.rotary and self.format == "hf"
        delta = None if self.adapter is None else self.adapter.delta(name, need)
        shape = [len(n) for n in need]
        if len(overlaps) == 1 and not permuted and delta is None:
            tensor = overlaps[0][1]
            fits = list(tensor.shape) == shape and tensor.is_contiguous()
            if fits and (tensor.device, tensor.dtype) == (device, dtype):
                return tensor
        # Zeros: the rows of a vocabulary that was padded for the ranks.
        kept = dtype if delta is None else torch.float32
        out = torch.zeros(shape, dtype=kept, device=device)
        for place, tensor in overlaps:
            if permuted:
                tensor = permute_heads(tensor, 2, self.args.head_dim // 2)
            out[place].view(tensor.shape).copy_(tensor)
        return out if delta is None else out.add_(delta.to(device)).to(dtype)

    def read_quantized(
        self, name: str, kind: str, rank: int = 0, ranks: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The values and scales of what `rank` of `ranks` needs of a matrix."""
        if self.quantized is None:
            return quant.quantize(name, self.read(name, rank, ranks), kind)
        values, scales = (self.parts[f"{name}.{part}"][rank].tensor[:] for part in quant.PARTS)
        return values, scales

    def check_quantize(self, kind: str | None, ranks: int = 1) -> str | None:
        """The kind to build with on `ranks` ranks; None: not quantized."""
        quant.check_kind(kind)
        if self.quantized is None:
            return kind
        is_so, n = f"{self.path} is quantized to {self.quantized}", len(self.files)
        remedy = "leave quantize out, or build from the full checkpoint"
        require(kind in (None, self.quantized), f"{is_so}, not {kind!r}: {remedy}")
        remedy = f"start {n}, or convert the full checkpoint with --shards {ranks}"
        require(ranks == n, f"{is_so} for {n} ranks, and there are {ranks}: {remedy}")
        return self.quantized

    def _overlaps(
        self, name: str, need: list[range]
    ) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
        """For each file that has some of the box `need`: where in the box, and that view of it."""
        axis, start = self.stored_axis(name), 0
        parts = self.parts[self.stored_name(name)]
        for part in parts if axis is not None else parts[:1]:
            have = [range(n) for n in self.parameters[name].shape]
            if axis is not None:
                have[axis] = range(start, start + part.tensor.shape[axis])
                start = have[axis].stop
            both = [_common(h, n) for h, n in zip(have, need, strict=True)]
            if all(both):
                yield _index(both, need), part.tensor[_index(both, have)]


def _common(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def _index(box: list[range], outer: list[range]) -> tuple[slice, ...]:
    """The index of `box` in a tensor that fills `outer`."""
    pairs = zip(box, outer, strict=True)
    return tuple(slice(b.start - o.start, b.stop - o.start) for b, o in pairs)


def map_parts(files: list[Path]) -> dict[str, list[Part]]:
    """What the files hold of each tensor, by name."""
    parts: dict[str, list[Part]] = {}
    for file in files:
        for name, tensor in map_tensors(file).items():
            if not _COMPUTED.fullmatch(name):
                parts.setdefault(name, []).append(Part(tensor, file))
    return parts


def file_errors(checkpoint: Checkpoint) -> list[str]:
    """Why the files are not the model that they describe, one sentence for each mistake."""
    expected, vocab_size, path = checkpoint.expected(), checkpoint.vocab_size, checkpoint.path
    beyond = [id for id in checkpoint.text.eos_ids if id >= vocab_size]
    found = [
        f"{path}: eos_token_id is {id}, and must be a token id below {vocab_size}" for id in beyond
    ]
    for name in dict.fromkeys([*checkpoint.parts, *expected]):
        parts, n = checkpoint.parts.get(name, []), checkpoint.n_parts
        if name not in expected:
            found.append(f"{parts[0].file} has {name!r:.80}, which is not part of this model")
        elif not parts:
            hint = ", or set tie_word_embeddings to true" * (name == "lm_head.weight")
            found.append(f"{name} is missing from {path}: download it again{hint}")
        elif len(parts) != n:
            names = ", ".join(part.file.name for part in parts[:4])
            where = f"{len(parts)} files of {path} ({names})"
            found.append(f"{name} is in {where}, and must be in {n}: download its files again")
        else:
            faults = (_fault(part, parts[0], expected[name], n) for part in parts)
            found += [f"{parts[i].file}: {name} {f}" for i, f in enumerate(faults) if f is not None]
    return found


def _fault(part: Part, first: Part, expected: Expected, n_parts: int) -> str | None:
    a, b, shape = part.tensor, first.tensor, list(part.tensor.shape)
    if a.dtype not in expected.dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in expected.dtypes)
        return f"is {a.dtype}, and must be {wanted}"
    if shape != expected.shape:
        shards, rest = divmod(expected.total, max(math.prod(shape), 1))
        missing = 0 if rest else shards - n_parts
        hint = f": it is one of {shards} shards, and {missing} may be missing" * (missing > 0)
        return f"has the shape {shape}, and the model needs {expected.shape}{hint}"
    same = a.shape == b.shape and a.dtype == b.dtype
    if same and len(shape) == 1 and n_parts > 1:
        # The norms of Llama 3's shards differ, but only in the third digit.
        same = torch.allclose(a.float(), b.float(), 0.01, 0.01, equal_nan=True)
    mixed = f"differs from {first.file.name}: the files of two checkpoints are mixed"
    return None if same else mixed

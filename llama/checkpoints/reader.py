"""Any checkpoint of the Llama 2 family -> this rank's tensors.

One way for every format, number of files and number of ranks: of each parameter a rank needs an
interval along one axis. The files are mapped, each of them holds a known part of the whole tensor,
and where the two overlap is copied once, straight into the wanted dtype and onto the device.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairscale.nn.model_parallel import initialize as groups
from torch import nn
from tqdm import tqdm

from llama import quantize as quant
from llama.checkpoints.config import Config, read_config, read_params
from llama.checkpoints.files import map_tensors, read_json
from llama.errors import LlamaError, require, shown
from llama.model import ModelArgs, Transformer
from llama.parameters import (
    EMBEDDING,
    OUTPUT,
    Parameter,
    hf_name,
    parameters,
    permute_heads,
    require_split,
)

_COMPUTED = re.compile(r"rope\.freqs|.*\.rotary_emb\.inv_freq")  # stored, but no parameters
# What `convert --quantize` writes: its kind, and for which of how many ranks a file is.
_QUANTIZED = re.compile(rf"quantized\.({'|'.join(quant.KINDS)})\.(\d\d)-of-(\d\d)\.safetensors")
_META_SHARD = re.compile(r"consolidated\.\d\d\.(pth|safetensors)")
# Any file with weights, or that says which has which.
WEIGHT_FILE = re.compile(
    rf"{_META_SHARD.pattern}|{_QUANTIZED.pattern}"
    r"|(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?"
)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Part(NamedTuple):
    """What one file holds of a parameter."""

    tensor: torch.Tensor  # a view of the mapped file
    file: Path


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: its facts, and where its bytes are. No weight has been read yet."""

    path: Path
    format: str  # "meta", "hf" or "quantized"
    files: list[Path]
    config: Config
    vocab_size: int  # the rows of the embedding
    parts: dict[str, list[Part]]  # one for each file that has some of the parameter, in order
    quantized: str | None = None  # the kind, if the files are

    @property
    def params(self) -> dict[str, Any]:
        """Fields of ModelArgs."""
        return {**self.config.params, "vocab_size": self.vocab_size}

    @property
    def context(self) -> int | None:
        """How many positions the model was trained on, if the checkpoint says so."""
        return self.config.context

    @cached_property
    def args(self) -> ModelArgs:
        return ModelArgs(**self.params)

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        return parameters(self.args)

    def stored_name(self, name: str) -> str:
        """What the files call a parameter."""
        return self.parameters[name].hf_name if self.format == "hf" else name

    def stored_axis(self, name: str) -> int | None:
        """The axis along which the files split a parameter."""
        if name == EMBEDDING and self.parts[name][0].tensor.shape[-1] == self.args.dim:
            return 0  # Llama 3 splits the vocabulary, Llama 2 the embedding dimension
        return self.parameters[name].axis

    def read(
        self,
        name: str,
        rank: int = 0,
        ranks: int = 1,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        copy: bool = False,
    ) -> torch.Tensor:
        """What `rank` of `ranks` needs of a parameter, in `dtype` (None: as it is stored).

        Where nothing has to change, this is a view of the mapped file, unless `copy`.
        """
        shape, axis, _, rotary = self.parameters[name]
        need = [range(n) for n in shape]
        if axis is not None:
            n = shape[axis] // ranks
            need[axis] = range(rank * n, (rank + 1) * n)
        overlaps = list(self._overlaps(name, need))
        tensor = overlaps[0][1]
        device, dtype = torch.device(device), dtype or tensor.dtype
        permuted = rotary and self.format == "hf"
        fits = len(overlaps) == 1 and tensor.is_contiguous() and not permuted
        if fits and not copy and (tensor.device, tensor.dtype) == (device, dtype):
            return tensor
        out = torch.empty([len(n) for n in need], dtype=dtype, device=device)
        for place, tensor in overlaps:
            if permuted:
                tensor = permute_heads(tensor, 2, self.args.head_dim // 2)
            out[place].view(tensor.shape).copy_(tensor)
        return out

    def read_quantized(
        self, name: str, kind: str, rank: int = 0, ranks: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The values and scales of what `rank` of `ranks` needs of a matrix."""
        if self.quantized is None:
            return quant.quantize(name, self.read(name, rank, ranks), kind)
        values, scales = (self.parts[f"{name}.{part}"][rank].tensor for part in quant.PARTS)
        return values, scales

    def check_quantize(self, kind: str | None, ranks: int = 1) -> str | None:
        """The kind to build with on `ranks` ranks; None: not quantized."""
        quant.check_kind(kind)
        if self.quantized is None:
            return kind
        require(
            kind in (None, self.quantized),
            f"quantize {kind!r}, and {self.path} is quantized to {self.quantized}: "
            "leave quantize out, or build from the checkpoint that it was made of",
        )
        require(
            ranks == len(self.files),
            f"{self.path} was quantized for {len(self.files)} ranks, and there are {ranks}: start "
            f"{len(self.files)}, or convert the full checkpoint with --shards {ranks}",
        )
        return self.quantized

    def _overlaps(
        self, name: str, need: list[range]
    ) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
        """Of each file that has some of the box `need`: where in the box, and that view of it."""
        axis, start = self.stored_axis(name), 0
        for part in self.parts[name] if axis is not None else self.parts[name][:1]:
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


def open_checkpoint(ckpt_dir: Path | str) -> Checkpoint:
    """Recognise a folder by what is in it, and check it against what it says of itself.

    Reads JSON and the headers of the weight files; of the weights, the norms, and an output layer
    that is stored though it is said to be tied.

    Raises:
        LlamaError: the folder holds no checkpoint, or not one whole and consistent checkpoint.
    """
    checkpoint = find_checkpoint(ckpt_dir)
    found = problems(checkpoint)
    if found:
        more = f" ({len(found) - 1} more: python -m llama inspect {checkpoint.path})"
        raise LlamaError(found[0] + more * (len(found) > 1))
    return checkpoint


def find_checkpoint(ckpt_dir: Path | str) -> Checkpoint:
    """`open_checkpoint` without the comparison of tensors, which is `problems`."""
    path = Path(ckpt_dir)
    require(
        path.is_dir() and os.access(path, os.R_OK | os.X_OK),
        f"{shown(str(path))} is no folder that can be read: pass the one that holds the checkpoint",
    )
    shards = sorted(f for f in path.iterdir() if _META_SHARD.fullmatch(f.name))
    if shards and (path / "params.json").is_file():
        return _open_meta(path, shards)
    if (path / "config.json").is_file():
        return _open_hf(path)
    quantized = sorted(f for f in path.iterdir() if _QUANTIZED.fullmatch(f.name))
    if quantized and (path / "params.json").is_file():
        return _open_quantized(path, quantized)
    missing = "params.json" if shards else "consolidated.00.pth"
    require(
        not shards and not (path / "params.json").is_file(),
        f"{path / missing} is missing: download it too",
    )
    inner = sorted(f.parent for name in ("params", "config") for f in path.glob(f"*/{name}.json"))
    hint = f"; did you mean {inner[0]}?" if inner else ""
    held = sorted(f.name for f in path.iterdir())
    listed = ", ".join(held[:8]) + ", ..." * (len(held) > 8) if held else "nothing"
    raise LlamaError(
        f"{path} holds no checkpoint, neither params.json with consolidated.00.pth (Meta) nor "
        f"config.json with model.safetensors (Hugging Face), but {listed}{hint}"
    )


def _open_meta(path: Path, shards: list[Path]) -> Checkpoint:
    files = [f for f in shards if f.suffix == shards[0].suffix]
    for i in range(int(files[-1].name.split(".")[1])):
        file = path / f"consolidated.{i:02d}{files[0].suffix}"
        require(file in files, f"{file} is missing, and there is {files[-1].name}: download it too")
    config, parts = read_params(path / "params.json"), _map_all(files)
    rows, columns = _embedding_shape(parts, EMBEDDING, path)
    split_rows = columns == ModelArgs(**config.params).dim
    return Checkpoint(path, "meta", files, config, rows * len(files) if split_rows else rows, parts)


def _open_quantized(path: Path, files: list[Path]) -> Checkpoint:
    kind, _, ranks = _QUANTIZED.fullmatch(files[-1].name).groups()  # type: ignore[union-attr]
    for i in range(int(ranks)):
        file = path / f"quantized.{kind}.{i:02d}-of-{ranks}.safetensors"
        require(file in files, f"{file} is missing, and there is {files[-1].name}: copy it too")
    config, parts = read_params(path / "params.json"), _map_all(files)
    rows, _ = _embedding_shape(parts, f"{EMBEDDING}.{quant.PARTS[0]}", path)
    return Checkpoint(path, "quantized", files, config, rows, parts, kind)


def _open_hf(path: Path) -> Checkpoint:
    config, files = read_config(path / "config.json"), _hf_files(path)
    by_hf_name = _map_all(files)
    vocab_size, _ = _embedding_shape(by_hf_name, hf_name(EMBEDDING), path)
    named = parameters(ModelArgs(**config.params))
    ours = {parameter.hf_name: name for name, parameter in named.items()}
    parts = {ours.get(name, name): part for name, part in by_hf_name.items()}
    require(
        config.vocab_size in (None, vocab_size),
        f"{path / 'config.json'}: vocab_size is {config.vocab_size}, and the embedding has "
        f"{vocab_size} rows: download both again, or set vocab_size to {vocab_size}",
    )
    if config.tied and OUTPUT in parts and not equal(parts[OUTPUT][0][0], parts[EMBEDDING][0][0]):
        config = config._replace(tied=False)  # transformers too goes by what is stored
    if config.tied:
        parts[OUTPUT] = parts[EMBEDDING]
    return Checkpoint(path, "hf", files, config, vocab_size, parts)


def _hf_files(path: Path) -> list[Path]:
    for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        single, index = path / f"{stem}{suffix}", path / f"{stem}{suffix}.index.json"
        if single.is_file():
            return [single]
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise LlamaError(f"{index} has no weight_map: download it again")
            return sorted({path / str(name) for name in weight_map.values()})
        require(
            not any(path.glob(f"{stem}-*{suffix}")),
            f"{index} is missing, and its weights are there: download it too",
        )
    raise LlamaError(
        f"{path} has a config.json and no weights: download model.safetensors too, or the files "
        "that model.safetensors.index.json names"
    )


def _map_all(files: list[Path]) -> dict[str, list[Part]]:
    parts: dict[str, list[Part]] = {}
    for file in files:
        for name, tensor in map_tensors(file).items():
            if not _COMPUTED.fullmatch(name):
                parts.setdefault(name, []).append(Part(tensor, file))
    return parts


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """`torch.equal`, which takes no two dtypes."""
    return a.dtype == b.dtype and torch.equal(a, b)


def _embedding_shape(parts: dict[str, list[Part]], name: str, path: Path) -> tuple[int, int]:
    require(name in parts, f"{name} is missing from {path}: download its files again")
    tensor, file = parts[name][0]
    require(tensor.ndim == 2, f"{file}: {name} has {tensor.ndim} dimensions, and must have 2")
    require(tensor.numel() > 0, f"{file}: {name} is empty: download it again")
    return tensor.shape[0], tensor.shape[1]


def problems(checkpoint: Checkpoint) -> list[str]:
    """What keeps the files from being the model that they say they are, a sentence each."""
    found: list[str] = []
    if checkpoint.quantized is not None:
        return list(_quantized_misfits(checkpoint, checkpoint.quantized))
    for name, parts in checkpoint.parts.items():
        if name in checkpoint.parameters:
            found += _misfits(checkpoint, name, parts)
        else:
            found.append(f"{parts[0].file} has {name}, which is not of this model")
    missing = [name for name in checkpoint.parameters if name not in checkpoint.parts]
    return found + [
        f"{checkpoint.stored_name(name)} is missing from {checkpoint.path}: download it again"
        for name in missing
    ]


def _quantized_misfits(checkpoint: Checkpoint, kind: str) -> Iterator[str]:
    """What is wrong with the files that `convert --quantize` wrote."""
    ranks = len(checkpoint.files)
    needed: dict[str, tuple[tuple[int, ...], torch.dtype | None]] = {}
    for name, parameter in checkpoint.parameters.items():
        shape = parameter.local_shape(ranks)
        if len(shape) == 2:
            needed.update(quant.stored(name, shape, kind))
        else:
            needed[name] = (shape, None)
    for name, (shape, dtype) in needed.items():
        dtypes = list(DTYPES.values()) if dtype is None else [dtype]
        found = [tensor for tensor, _ in checkpoint.parts.get(name, [])]
        if [tuple(t.shape) == shape and t.dtype in dtypes for t in found] != [True] * ranks:
            wanted = "" if dtype is None else f"{str(dtype).removeprefix('torch.')} "
            yield (
                f"{name} is not {wanted}{list(shape)} in each of the {ranks} files of "
                f"{checkpoint.path}: convert the full checkpoint again"
            )
    for name, parts in checkpoint.parts.items():
        if name not in needed:
            yield f"{parts[0].file} has {name}, which is not of this model"


def _misfits(checkpoint: Checkpoint, name: str, parts: list[Part]) -> Iterator[str]:
    """What is wrong with what the files have of one parameter."""
    shown, axis = checkpoint.stored_name(name), checkpoint.stored_axis(name)
    n_parts = len(checkpoint.files) if checkpoint.format == "meta" else 1
    if len(parts) != n_parts:
        having = ", ".join(part.file.name for part in parts)
        files = "1 file" if n_parts == 1 else f"{n_parts} files"
        yield f"{shown} is in {having} of {checkpoint.path}: it must be in {files}"
        return
    needed, first = list(checkpoint.parameters[name].shape), parts[0].tensor
    if axis is not None:
        needed[axis] //= n_parts
    for tensor, file in parts:
        shape = list(tensor.shape)
        mixed = f"as in {parts[0].file.name}: the files of two checkpoints are mixed"
        if tensor.dtype not in DTYPES.values():
            yield f"{file}: {shown} is {tensor.dtype}, and must be one of {', '.join(DTYPES)}"
        elif shape != list(first.shape):
            yield f"{file}: {shown} has the shape {shape}, not {list(first.shape)} {mixed}"
        elif tensor.dtype != first.dtype:
            yield f"{file}: {shown} is {tensor.dtype}, not {first.dtype} {mixed}"
        elif shape != needed:
            shards = f" in each of {n_parts} shards" * (n_parts > 1)
            shards += _missing_shards(checkpoint, name, tensor)
            yield f"{file}: {shown} has the shape {shape}, and the model needs {needed}{shards}"
        # The norms of Llama 3's shards do differ, but only in the third digit.
        elif axis is None and not torch.allclose(
            tensor.float(), first.float(), 0.01, 0.01, equal_nan=True
        ):
            yield f"{file}: {shown} has not the values {mixed}"


def _missing_shards(checkpoint: Checkpoint, name: str, tensor: torch.Tensor) -> str:
    """A hint, if a shard has its part for more shards than there are."""
    axis, whole = checkpoint.stored_axis(name), checkpoint.parameters[name].shape
    if checkpoint.format != "meta" or axis is None or tensor.ndim != len(whole):
        return ""
    shards, rest = divmod(whole[axis], max(tensor.shape[axis], 1))
    missing = shards - len(checkpoint.files)
    few = rest == 0 and missing > 0
    return f": it is one of {shards} shards, of which {missing} may be missing" if few else ""


def load(
    model: Transformer,
    checkpoint: Checkpoint,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    quantize: str | None = None,
    progress: bool = True,
) -> None:
    """Give `model`, built under `torch.device("meta")`, this rank's weights.

    With `quantize`, each is quantized before the next is read.

    The caller then makes what is in no checkpoint: `model.allocate_state(device, dtype)`.
    """
    rank, ranks = groups.get_model_parallel_rank(), groups.get_model_parallel_world_size()
    require_split(checkpoint.args, ranks)
    kind = checkpoint.check_quantize(quantize, ranks)
    total = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    with progress_bar(
        "loading", total, shown=progress and torch.distributed.get_rank() == 0
    ) as bar:
        named = list(model.named_parameters())
        if kind is not None:  # the largest first, since each is there twice while it is quantized
            named.sort(key=lambda item: -item[1].numel())
        for name, parameter in named:
            module = model.get_submodule(name.removesuffix(".weight"))
            bar.update(parameter.numel() * dtype.itemsize)
            if kind is not None and parameter.ndim == 2:
                parts = checkpoint.read_quantized(name, kind, rank, ranks)
                quant.install(name, module, parts, torch.device(device))
                continue
            if name == OUTPUT and checkpoint.config.tied and ranks == 1:
                tensor = model.tok_embeddings.weight.data
            else:
                tensor = checkpoint.read(name, rank, ranks, device=device, dtype=dtype)
            assert tensor.shape == parameter.shape, (name, tensor.shape, parameter.shape)
            module.weight = nn.Parameter(tensor, requires_grad=False)


def progress_bar(what: str, total_bytes: int, *, shown: bool = True) -> tqdm:
    """A bar on standard error, once it has lasted a second, if that is a terminal."""
    # tqdm's `disable=None` stands for: unless it is a terminal.
    hidden = None if shown else True
    return tqdm(desc=what, total=total_bytes, unit="B", unit_scale=True, delay=1, disable=hidden)

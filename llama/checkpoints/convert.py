"""A checkpoint written in another format, in another dtype, or in another number of files.

It is read through `Checkpoint.read`, as a number of ranks would, one rank for each file.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tqdm import tqdm

from llama import quantize as quant
from llama.checkpoints.config import to_config, to_params
from llama.checkpoints.files import read_json
from llama.checkpoints.reader import (
    DTYPES,
    WEIGHT_FILE,
    Checkpoint,
    equal,
    open_checkpoint,
    progress_bar,
)
from llama.errors import LlamaError, checked_flag, checked_path, checked_whole, require, shown
from llama.parameters import EMBEDDING, OUTPUT, permute_heads, require_split
from llama.sizes import format_bytes

_FACTS = ("params.json", "config.json")
# What lies beside the weights, and is the same in both formats.
_COMPANIONS = [
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
]
# What else a downloaded folder may hold, and --force may remove.
_PAPERS = [
    "checklist.chk",
    "chat_template.jinja",
    "README.md",
    "LICENSE",
    "LICENSE.txt",
    "USE_POLICY.md",
    ".gitattributes",
]


def convert(
    src: str,
    dst: str,
    *,
    to: str,
    shards: int = 1,
    dtype: str | None = None,
    quantize: str | None = None,
    force: bool = False,
) -> None:
    """Write the checkpoint in SRC to the folder DST.

    Needs memory for the largest of the files that it writes.

    Args:
        src: a folder in Meta's or Hugging Face's layout.
        dst: the folder to make; whoever sees it sees the whole checkpoint.
        to: the layout to write, meta or hf.
        shards: how many weight files to write.
        dtype: float32, float16 or bfloat16; default: each tensor as it is stored.
        quantize: int8 or int4; a layout of its own beside Meta's params.json, for as many ranks as
            there are shards.
        force: replace a checkpoint that is in DST, all of the folder.
    """
    known = isinstance(to, str) and to in _WRITERS
    require(known, f"--to {shown(to)}: it must be one of {', '.join(_WRITERS)}")
    shards = checked_whole(shards, "--shards", 1)
    known = dtype is None or (isinstance(dtype, str) and dtype in DTYPES)
    require(known, f"--dtype {shown(dtype)}: it must be one of {', '.join(DTYPES)}")
    quant.check_kind(quantize)
    require(quantize is None or to == "meta", f"--to {to} has no quantized layout: use --to meta")
    checkpoint = open_checkpoint(checked_path(str(src), "src"))
    target = checked_path(str(dst), "dst").resolve()
    require(
        checkpoint.quantized is None,
        f"{checkpoint.path} is quantized, and cannot be converted: convert what it was made of",
    )
    _require_replaceable(target, checked_flag(force, "--force"))
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    job = _Job(checkpoint, partial, shards, None if dtype is None else DTYPES[dtype], quantize)
    try:
        partial.mkdir(parents=True)
        _require_disk(partial, job.total_bytes)
        with progress_bar("writing", job.total_bytes) as bar:
            _WRITERS[to](job, bar)
        _copy_companions(checkpoint.path, partial)
        _swap_in(partial, target)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch.save: a RuntimeError
        raise LlamaError(
            f"{target} could not be written, and nothing was changed: check that the folder is "
            f"yours and that there is room for {format_bytes(job.total_bytes)}"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class _Job(NamedTuple):
    checkpoint: Checkpoint
    folder: Path
    shards: int
    dtype: torch.dtype | None
    quantize: str | None

    @property
    def total_bytes(self) -> int:
        if self.quantize is not None:
            shapes = {n: p.local_shape(self.shards) for n, p in self.checkpoint.parameters.items()}
            return self.shards * quant.total_bytes(shapes, self.quantize, torch.float32)
        parameters = self.checkpoint.parameters.items()
        return sum(math.prod(p.shape) * self.dtype_of(name).itemsize for name, p in parameters)

    def dtype_of(self, name: str) -> torch.dtype:
        return self.dtype or self.checkpoint.parts[name][0].tensor.dtype

    def read(self, name: str, rank: int = 0, ranks: int = 1, *, copy: bool = False) -> torch.Tensor:
        """In the wanted dtype, whose range must hold what is stored."""
        tensor = self.checkpoint.read(name, rank, ranks, dtype=self.dtype, copy=copy)
        if self.dtype is not None and tensor.isinf().any():
            stored = self.checkpoint.read(name, rank, ranks)
            require(
                not (tensor.isinf() & stored.isfinite()).any(),
                f"{self.checkpoint.stored_name(name)} of {self.checkpoint.path} has values above "
                f"{torch.finfo(self.dtype).max:g}, the largest in {str(self.dtype)[6:]}: "
                "use --dtype bfloat16, or leave --dtype out",
            )
        return tensor


def _write_meta(job: _Job, bar: tqdm) -> None:
    checkpoint, config = job.checkpoint, job.checkpoint.config
    require_split(checkpoint.args, job.shards, "shards")
    if checkpoint.format == "meta":
        shutil.copyfile(checkpoint.path / "params.json", job.folder / "params.json")
    else:
        _write_json(job.folder / "params.json", to_params(checkpoint.params, config.context))
    for rank in range(job.shards):
        if job.quantize is not None:
            _write_quantized(job, job.quantize, rank, bar)
            continue
        shard = {}
        for name in checkpoint.parameters:
            # A copy, since torch.save would write all of the file that a view belongs to.
            shard[name] = job.read(name, rank, job.shards, copy=True)
            bar.update(shard[name].nbytes)
        torch.save(shard, job.folder / f"consolidated.{rank:02d}.pth")


def _write_quantized(job: _Job, kind: str, rank: int, bar: tqdm) -> None:
    shard: dict[str, torch.Tensor] = {}
    for name, parameter in job.checkpoint.parameters.items():
        if len(parameter.shape) == 2:
            parts = job.checkpoint.read_quantized(name, kind, rank, job.shards)
            named = {f"{name}.{part}": t for part, t in zip(quant.PARTS, parts, strict=True)}
        else:
            named = {name: job.read(name, copy=True)}
        shard |= {name: tensor.contiguous() for name, tensor in named.items()}
        bar.update(sum(tensor.nbytes for tensor in named.values()))
    file = job.folder / f"quantized.{kind}.{rank:02d}-of-{job.shards:02d}.safetensors"
    save_file(shard, file)
    shutil.copymode(job.folder / "params.json", file)  # not for the owner alone


def _write_hf(job: _Job, bar: tqdm) -> None:
    checkpoint = job.checkpoint
    tied = checkpoint.config.tied
    if checkpoint.format == "meta":  # which has no word for it: the two are equal
        tied = equal(checkpoint.read(EMBEDDING), checkpoint.read(OUTPUT))
    names = [name for name in checkpoint.parameters if not (tied and name == OUTPUT)]
    n = job.shards
    require(n <= len(names), f"--shards {n}: there are {len(names)} tensors")
    _write_json(job.folder / "config.json", _config(job, tied))
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for i in range(n):
        file = "model.safetensors" if n == 1 else f"model-{i + 1:05}-of-{n:05}.safetensors"
        shard = {}
        for name in names[i * len(names) // n : (i + 1) * len(names) // n]:
            hf_name = checkpoint.parameters[name].hf_name
            shard[hf_name] = _hf_tensor(job, name)
            weight_map[hf_name] = file
            total_bytes += shard[hf_name].nbytes
            bar.update(shard[hf_name].nbytes)
        save_file(shard, job.folder / file, metadata={"format": "pt"})
        shutil.copymode(job.folder / "config.json", job.folder / file)  # not for the owner alone
    if n > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        _write_json(job.folder / "model.safetensors.index.json", index)


_WRITERS = {"meta": _write_meta, "hf": _write_hf}


def _hf_tensor(job: _Job, name: str) -> torch.Tensor:
    tensor = job.read(name)
    if job.checkpoint.parameters[name].rotary:
        return permute_heads(tensor, job.checkpoint.args.head_dim // 2, 2).flatten(0, 2)
    return tensor


def _config(job: _Job, tied: bool) -> dict[str, Any]:
    checkpoint = job.checkpoint
    dtype = str(job.dtype_of(EMBEDDING)).removeprefix("torch.")
    if checkpoint.format == "meta":
        return to_config(checkpoint.params, checkpoint.context, tied=tied, dtype=dtype)
    return read_json(checkpoint.path / "config.json") | {
        "vocab_size": checkpoint.vocab_size,
        "tie_word_embeddings": tied,
        "dtype": dtype,
        "torch_dtype": dtype,  # the same, for transformers before 4.56
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _copy_companions(src: Path, dst: Path) -> None:
    for name in _COMPANIONS:
        # Meta's folders share the tokenizer of the folder above them.
        for folder in (src, src.parent) if name == "tokenizer.model" else (src,):
            if (folder / name).is_file():
                shutil.copyfile(folder / name, dst / name)
                break


def _require_replaceable(target: Path, force: bool) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    require(force, f"{target} exists: choose another folder, or replace it with --force")
    held = sorted(target.iterdir()) if target.is_dir() else []
    weights = [f for f in held if WEIGHT_FILE.fullmatch(f.name)]
    require(
        bool(weights) and any((target / f).is_file() for f in _FACTS),
        f"{target} is no checkpoint's folder, and --force would remove it: choose another folder",
    )
    known = [*weights, *(target / name for name in (*_FACTS, *_COMPANIONS, *_PAPERS))]
    other = next((f.name for f in held if f not in known or not f.is_file()), None)
    require(
        other is None,
        f"{target} is more than a checkpoint's folder, and --force would remove {other} too: "
        "choose another folder",
    )


def _require_disk(folder: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    require(
        needed_bytes <= free,
        f"{folder.parent} has {format_bytes(free)} of room, and {format_bytes(needed_bytes)} are "
        "needed: make room, choose another disk, or a smaller --dtype",
    )


def _swap_in(partial: Path, target: Path) -> None:
    """Rename, never write over: somebody may have the old files mapped."""
    old = partial.with_suffix(".old")
    try:
        if target.exists():
            target.rename(old)
        partial.rename(target)
    finally:  # an interrupt may come between the two, or behind them
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(old, ignore_errors=True)

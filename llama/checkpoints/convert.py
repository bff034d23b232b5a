"""Write a checkpoint in another layout, in another dtype, or in another number of files.

Each file is read as a rank would read its part, through `Checkpoint.read`.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tqdm import tqdm

from llama import quantize as quant
from llama.chat import TEMPLATES, choose_chat_format
from llama.checkpoints import hf, meta, quantized
from llama.checkpoints.config import to_config, to_params
from llama.checkpoints.files import DTYPES, looks_like, read_json
from llama.checkpoints.load import find_tokenizer, load_tokenizer, open_checkpoint
from llama.checkpoints.reader import Checkpoint
from llama.errors import LlamaError, checked_path, require
from llama.parameters import EMBEDDING, OUTPUT, permute_heads, require_split
from llama.sizes import format_bytes
from llama.tokenizer import TOKENIZER_FILES, BaseTokenizer

_FACTS = ("params.json", "config.json")
_COMPANIONS = (  # copied along: the same in every layout
    *TOKENIZER_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
)
# A file's name, and its tensors one by one.
Files: TypeAlias = Iterator[tuple[str, Iterator[tuple[str, torch.Tensor]]]]


def convert(
    src: str,
    dst: str,
    *,
    to: str,
    shards: int = 1,
    dtype: str | None = None,
    quantize: str | None = None,
    adapter: str | None = None,
    force: bool = False,
) -> None:
    """Write the checkpoint in SRC to the folder DST.

    Needs memory for the largest of the files that it writes.

    Args:
        src: a folder in Meta's or Hugging Face's layout, or a GGUF file.
        dst: output folder, written atomically.
        to: the layout to write, meta or hf.
        shards: how many weight files to write.
        dtype: float32, float16 or bfloat16; default: each tensor as it is stored.
        quantize: int8 or int4; a layout of its own with Meta's params.json, for as many ranks as
            there are shards.
        adapter: a folder with LoRA, as PEFT saves it, to add to the weights.
        force: replace the checkpoint that is in DST, the whole folder.
    """
    for option, value, known in (("to", to, [*_LAYOUTS]), ("dtype", dtype, [None, *DTYPES])):
        require(
            value in known,
            f"--{option} {value!r:.80}: it must be one of {', '.join(filter(None, known))}",
        )
    whole = type(shards) is int and shards > 0
    require(whole, f"--shards {shards!r:.80}: it must be a whole number from 1 on")
    quant.check_kind(quantize)
    require(quantize is None or to == "meta", f"--to {to} has no quantized layout: use --to meta")
    checkpoint = open_checkpoint(checked_path(src, "src"), adapter=adapter)
    target = checked_path(dst, "dst").resolve()
    full = f"{checkpoint.path} is quantized and cannot be converted: convert the full checkpoint"
    require(checkpoint.quantized is None, full)
    _remove_leftovers(target)
    _require_replaceable(target, force)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    job = _Job(checkpoint, partial, shards, None if dtype is None else DTYPES[dtype], quantize)
    try:
        partial.mkdir(parents=True)
        free, needed = shutil.disk_usage(partial).free, job.total_bytes
        room = f"{partial.parent} has {format_bytes(free)} of room, and {format_bytes(needed)} are"
        require(needed <= free, f"{room} needed: choose another disk, or a smaller --dtype")
        _LAYOUTS[to](job)
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
        parameters = self.checkpoint.parameters
        if self.quantize is not None:
            shapes = {name: p.local_shape(self.shards) for name, p in parameters.items()}
            return self.shards * quant.total_bytes(shapes, self.quantize, torch.float32)
        return sum(math.prod(p.shape) * self.dtype_of(n).itemsize for n, p in parameters.items())

    def dtype_of(self, name: str) -> torch.dtype:
        return self.dtype or self.checkpoint.dtype_of(name)

    def read(self, name: str, rank: int = 0, ranks: int = 1) -> torch.Tensor:
        """In the requested dtype, whose range must hold what is stored."""
        tensor = self.checkpoint.read(name, rank, ranks, dtype=self.dtype)
        if self.dtype is not None and tensor.isinf().any():
            stored = self.checkpoint.read(name, rank, ranks)
            overflows = bool((tensor.isinf() & stored.isfinite()).any())
            most = f"{torch.finfo(self.dtype).max:g}, the largest in {str(self.dtype)[6:]}"
            what = f"{self.checkpoint.stored_name(name)} of {self.checkpoint.path}"
            require(not overflows, f"{what} has values above {most}: use --dtype bfloat16")
        return tensor

    def write(self, files: Files) -> dict[str, str]:
        """Write weight files one after the other; returns which file holds which tensor."""
        weight_map: dict[str, str] = {}
        total = self.total_bytes
        with tqdm(None, "writing", total, unit="B", unit_scale=True, delay=1, disable=None) as bar:
            for file, tensors in files:
                shard = {}
                for name, tensor in tensors:
                    # A copy: torch.save would write the whole file that a view belongs to.
                    shard[name] = tensor.clone(memory_format=torch.contiguous_format)
                    bar.update(tensor.nbytes)
                path = self.folder / file
                if path.suffix == ".pth":
                    torch.save(shard, path)
                else:
                    path.touch()
                    mode = path.stat().st_mode
                    save_file(shard, path, metadata={"format": "pt"})
                    path.chmod(mode)  # safetensors writes for the owner only
                weight_map |= dict.fromkeys(shard, file)
        return weight_map


def _write_meta(job: _Job) -> None:
    checkpoint = job.checkpoint
    require_split(checkpoint.args, job.shards, "shards")
    if checkpoint.format == "meta":
        shutil.copyfile(checkpoint.path / "params.json", job.folder / "params.json")
    else:
        params = to_params(checkpoint.params, checkpoint.context)
        _write_json(job.folder / "params.json", params)
    job.write(_meta_files(job) if job.quantize is None else _quantized_files(job, job.quantize))
    _write_text(job, like_hf=checkpoint.text.layout != "meta")


def _meta_files(job: _Job) -> Files:
    for rank in range(job.shards):
        tensors = ((name, job.read(name, rank, job.shards)) for name in job.checkpoint.parameters)
        yield f"consolidated.{rank:02d}.pth", tensors


def _quantized_files(job: _Job, kind: str) -> Files:
    def tensors(rank: int) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in job.checkpoint.parameters.items():
            if len(parameter.shape) == 2:
                parts = job.checkpoint.read_quantized(name, kind, rank, job.shards)
                yield from zip((f"{name}.{part}" for part in quant.PARTS), parts, strict=True)
            else:
                yield name, job.read(name)

    for rank in range(job.shards):
        yield quantized.file_name(kind, rank, job.shards), tensors(rank)


def _write_hf(job: _Job) -> None:
    checkpoint = job.checkpoint
    tied = checkpoint.config.tied
    if checkpoint.format == "meta":  # which cannot state it: the two are equal
        a, b = checkpoint.read(EMBEDDING), checkpoint.read(OUTPUT)
        tied = a.dtype == b.dtype and torch.equal(a, b)
    names = [name for name in checkpoint.parameters if not (tied and name == OUTPUT)]
    require(job.shards <= len(names), f"--shards {job.shards}: there are {len(names)} tensors")
    weight_map = job.write(_hf_files(job, names))
    if job.shards > 1:
        sizes = (
            math.prod(p.shape) * job.dtype_of(n).itemsize
            for n, p in checkpoint.parameters.items()
            if n in names
        )
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        _write_json(job.folder / "model.safetensors.index.json", index)
    _write_text(job, like_hf=True)
    if checkpoint.format == "hf":
        config = read_json(checkpoint.path / "config.json")
    else:
        config = to_config(checkpoint.params, checkpoint.context)
        generation = job.folder / "generation_config.json"
        config |= read_json(generation) if generation.is_file() else {}
    dtype = str(job.dtype_of(EMBEDDING)).removeprefix("torch.")
    config |= {"vocab_size": checkpoint.vocab_size, "tie_word_embeddings": tied}
    config |= {"dtype": dtype, "torch_dtype": dtype}  # the same, before transformers 4.56
    _write_json(job.folder / "config.json", config)


def _hf_files(job: _Job, names: list[str]) -> Files:
    n, parameters = job.shards, job.checkpoint.parameters
    for i in range(n):
        file = "model.safetensors" if n == 1 else f"model-{i + 1:05}-of-{n:05}.safetensors"
        chosen = names[i * len(names) // n : (i + 1) * len(names) // n]
        yield file, ((parameters[name].hf_name, _hf_tensor(job, name)) for name in chosen)


def _hf_tensor(job: _Job, name: str) -> torch.Tensor:
    tensor = job.read(name)
    if job.checkpoint.parameters[name].rotary:
        return permute_heads(tensor, job.checkpoint.args.head_dim // 2, 2).flatten(0, 2)
    return tensor


def _write_text(job: _Job, *, like_hf: bool) -> None:
    """The tokenizer, and if `like_hf` the facts of the text as transformers reads them."""
    checkpoint, folder = job.checkpoint, job.folder
    sources = [checkpoint.path / name for name in _COMPANIONS]
    tokenizer: BaseTokenizer | None = None
    with suppress(LlamaError):  # without one the weights are written all the same
        if checkpoint.format != "gguf":
            sources.append(find_tokenizer(checkpoint.path))
        tokenizer = load_tokenizer(checkpoint)
    for source in sources:
        # transformers reads a tiktoken file through a package that few have.
        if source.is_file() and not (like_hf and looks_like(source) == "a tiktoken file"):
            shutil.copyfile(source, folder / source.name)
    if tokenizer is None:
        return
    name, content = tokenizer.file
    if not any((folder / file).exists() for file in TOKENIZER_FILES):
        (folder / name).write_bytes(content)
    if not like_hf:
        return
    eos = list(tokenizer.eos_ids)
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": eos[0] if len(eos) == 1 else eos}
    sentencepiece = name == "tokenizer.model"
    chat = choose_chat_format(tokenizer, checkpoint.text).name
    facts = {
        "tokenizer_class": "LlamaTokenizer" if sentencepiece else "PreTrainedTokenizerFast",
        "bos_token": tokenizer.special_text(tokenizer.bos_id) or None,
        "eos_token": tokenizer.special_text(tokenizer.eos_id),
        "add_bos_token": tokenizer.adds_bos,
        "chat_template": checkpoint.text.chat_template or TEMPLATES.get(chat),
    }
    if sentencepiece:
        facts |= {"unk_token": tokenizer.special_text(0), "legacy": True}
    for file, known in (("generation_config.json", ids), ("tokenizer_config.json", facts)):
        if not (folder / file).exists():
            _write_json(folder / file, known)


_LAYOUTS: dict[str, Callable[[_Job], None]] = {"meta": _write_meta, "hf": _write_hf}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _require_replaceable(target: Path, force: bool) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    require(force, f"{target} exists: choose another folder, or replace it with --force")
    held = sorted(target.iterdir()) if target.is_dir() else []
    patterns = (meta.SHARD, hf.WEIGHTS, quantized.FILE)
    weights = [f for f in held if any(pattern.fullmatch(f.name) for pattern in patterns)]
    whole = bool(weights) and any((target / name).is_file() for name in _FACTS)
    removed = "and --force would remove it: choose another folder"
    require(whole, f"{target} does not hold a checkpoint, {removed}")
    known = [*weights, *(target / name for name in (*_FACTS, *_COMPANIONS))]
    other = next((f.name for f in held if f not in known or not f.is_file()), None)
    require(other is None, f"{target} also holds {other!r:.80}, {removed}")


def _swap_in(partial: Path, target: Path) -> None:
    """Rename, never write over: another process may have the old files mapped."""
    old = partial.with_suffix(".old")
    if not target.exists():
        partial.rename(target)
    elif not _exchanged(partial, target):
        try:
            target.rename(old)
            partial.rename(target)
        finally:  # an interrupt may come between the two, or after them
            if old.exists() and not target.exists():
                old.rename(target)
            shutil.rmtree(old, ignore_errors=True)


def _exchanged(a: Path, b: Path) -> bool:
    """Swap two folders in one step, on the systems that can."""
    libc: Any = ctypes.CDLL(None) if os.name == "posix" else None
    x, y = os.fsencode(a), os.fsencode(b)
    if hasattr(libc, "renameat2"):
        return bool(libc.renameat2(-100, x, -100, y, 2) == 0)
    return hasattr(libc, "renamex_np") and bool(libc.renamex_np(x, y, 2) == 0)


def _remove_leftovers(target: Path) -> None:
    """Of runs that were killed. A target that was being replaced is put back."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.\d+\.(partial|old)")
    for path in target.parent.iterdir() if target.parent.is_dir() else ():
        match = pattern.fullmatch(path.name)
        if match and match[1] == "old" and not target.exists():
            path.rename(target)
        elif match:
            shutil.rmtree(path, ignore_errors=True)

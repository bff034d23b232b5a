"""What the rows of a cache hold: shown in order of position, and kept in a file.

A file holds, for each row, its tokens and the filled slots of each layer's buffers as they are.
Each rank writes and reads a file of its own.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fairscale.nn.model_parallel import initialize as groups
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from llama import kv_cache, quantize
from llama.checkpoints.files import looks_like
from llama.errors import LlamaError, checked_path, checked_whole, require
from llama.model import Transformer
from llama.prefix_cache import CacheRecord


@dataclass(frozen=True)
class CachedRow:
    """What one row of the cache holds, in order of position."""

    tokens: list[int]
    start: int  # the position of the first of them: above 0 once the ring has turned
    keys: list[torch.Tensor]  # of each layer, (len(tokens), n_local_kv_heads, head_dim)
    values: list[torch.Tensor]


def read_row(model: Transformer, record: CacheRecord, row: int) -> CachedRow:
    """Views of the buffers, or copies if the ring has turned or the cache is in int8."""
    args, row = model.params, checked_whole(row, "row")
    require(
        row < args.max_batch_size,
        f"row {row}, and the cache has {args.max_batch_size}: rows go from 0 on",
    )
    tokens = record.tokens(row)
    start = max(0, len(tokens) - args.n_slots)
    slots = kv_cache.slot_of(torch.arange(start, len(tokens)), args.n_slots)

    def in_order(cache: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        dtype = cache.dtype if scales is None else model.norm.weight.dtype
        scales = None if scales is None else scales[row : row + 1]
        x = kv_cache.read(cache[row : row + 1], scales, 1, len(slots), dtype)[0].transpose(0, 1)
        return x if start == 0 else x[slots.to(x.device)]

    attentions = model.attentions
    return CachedRow(
        tokens=tokens[start:],
        start=start,
        keys=[in_order(attention.cache_k, attention.scale_k) for attention in attentions],
        values=[in_order(attention.cache_v, attention.scale_v) for attention in attentions],
    )


def save(model: Transformer, record: CacheRecord, path: str | Path) -> None:
    """Write what every row holds; a file of that name is replaced once the new one is whole."""
    path = _of_this_rank(path)
    tensors = {}
    for row in record.rows:
        tokens = record.tokens(row)
        tensors[f"{row}.tokens"] = torch.tensor(tokens)
        for name, buffer in _buffers(model).items():
            tensors[f"{row}.{name}"] = buffer[row, : min(len(tokens), model.params.n_slots)]
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        save_file(tensors, unfinished, _identity(model) | {"contents": _checksum(tensors)})
        os.replace(unfinished, path)
    except (OSError, SafetensorError) as error:
        raise LlamaError(f"{path} cannot be written: {error}") from error
    finally:
        with suppress(OSError):  # a disk that is read-only refuses this too
            unfinished.unlink()


def load(model: Transformer, record: CacheRecord, path: str | Path) -> None:
    """Fill the rows that the file holds; the others stay as they are.

    Raises:
        LlamaError: the file is damaged, or of another model, dtype or window; nothing is changed.
    """
    path = _of_this_rank(path)
    found, tensors = _read(path)
    for name, ours in _identity(model).items():
        require(
            found.get(name) == ours,
            f"{path} was written with {name} {found.get(name)}, and here it is {ours}: "
            "build as for the file, or read the prompt anew",
        )
    require(
        found.get("contents") == _checksum(tensors),
        f"{path} is damaged: its contents are not those that were written; read the prompt anew",
    )
    args, buffers = model.params, _buffers(model)
    rows = {int(name.split(".")[0]): t.tolist() for name, t in tensors.items() if "tokens" in name}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for row, tokens in rows.items():
        held = min(len(tokens), args.n_slots)
        needed = {f"{row}.{name}": (held, *b.shape[2:]) for name, b in buffers.items()}
        require(
            row < args.max_batch_size and needed.items() <= shapes.items(),
            f"row {row} of {path} holds {len(tokens)} tokens, and does not fit "
            f"{args.max_batch_size} rows of {args.n_slots} slots: build with the max_batch_size, "
            "max_seq_len and prefill_chunk that it was written with",
        )
    for row, tokens in rows.items():
        record.truncate(row, 0)
        with record.write():
            for name, buffer in buffers.items():
                kept = tensors[f"{row}.{name}"]
                buffer[row, : len(kept)] = kept.to(buffer.device)
        record.extend(row, tokens)


def _of_this_rank(path: str | Path) -> Path:
    path, ranks = checked_path(path, "path"), groups.get_model_parallel_world_size()
    path = path if ranks == 1 else Path(f"{path}.{groups.get_model_parallel_rank()}")
    require(
        path.is_file() or not path.exists(), f"'{path}' is no file: pass the path of a cache file"
    )
    return path


def _read(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """The metadata and the tensors of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise LlamaError(f"{path} is missing: write it with save_cache") from error
    except (OSError, SafetensorError) as error:
        raise LlamaError(
            f"{path} is cut short or no cache file ({looks_like(path)}; {error}): "
            "write it with save_cache"
        ) from error


def _buffers(model: Transformer) -> dict[str, torch.Tensor]:
    return {
        f"layers.{i}.{name}": buffer
        for i, attention in enumerate(model.attentions)
        for name, buffer in attention.named_buffers(recurse=False)
    }


def _identity(model: Transformer) -> dict[str, str]:
    """All that the keys and values depend on beside the tokens."""
    rank, ranks = groups.get_model_parallel_rank(), groups.get_model_parallel_world_size()
    return {
        "format": "llama-kv-cache-1",
        "rank": f"{rank} of {ranks}",
        "dtype": str(model.norm.weight.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(model.attentions[0].cache_k.dtype).removeprefix("torch."),
        "sliding_window": str(model.params.sliding_window),
        "model": _digest(model),
    }


def _digest(model: Transformer) -> str:
    """Of this rank's weights, rotary frequencies, heads and epsilon."""
    args = model.params
    quantized = [tensor for weight in quantize.weights(model) for tensor in weight.tensors()]
    tensors = [model.rope_freqs, *model.parameters(), *quantized]
    shape = f"{args.n_heads} {args.kv_heads} {args.norm_eps} "
    return _checksum({shape + str(i): tensor for i, tensor in enumerate(tensors)})


def _checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """Of names, shapes, dtypes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        raw: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {zlib.crc32(raw)}\n".encode())
    return digest.hexdigest()[:16]

"""Where a model computes: device, dtype, free memory."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

from llama.errors import LlamaError, require, shown

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


def resolve_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """`dtype`, or what `device` is good at. The same on every CPU, so that answers are too."""
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.float16
    known = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if not isinstance(known, torch.dtype) or known not in DTYPES.values():
        raise LlamaError(f"dtype {shown(dtype)} is unknown: pass one of {', '.join(DTYPES)}")
    return known


def resolve_device(device: str | torch.device | None, *, alone: bool = True) -> torch.device:
    """`device`, or the best that is here; `cuda` is the one that LOCAL_RANK counts to.

    `alone`: whether this is the only rank. MPS tensors cannot be sent to another one.
    """
    if device is None:
        mps = alone and torch.backends.mps.is_available()
        device = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise LlamaError(
            f"device {shown(device)} is unknown: pass 'cpu', 'mps', 'cuda' or 'cuda:N'"
        ) from error
    require(
        found.type in ("cpu", "cuda", "mps"),
        f"device {str(device)!r} is not supported: pass 'cpu', 'mps', 'cuda' or 'cuda:N'",
    )
    if found.type == "cuda":
        return _cuda_device(found)
    if found.type == "mps":
        require(torch.backends.mps.is_available(), "device 'mps' is not available here: pass 'cpu'")
        require(alone, "device 'mps' serves one process alone: pass 'cpu' to use several")
    return torch.device(found.type)


def _cuda_device(device: torch.device) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    require(count > 0, f"device '{device}' is not available: torch finds no GPU: pass 'cpu'")
    index = int(os.environ.get("LOCAL_RANK", 0)) if device.index is None else device.index
    require(
        index < count,
        f"device 'cuda:{index}', and this machine has {count}: start at most {count} processes "
        "on it, or pass device='cpu'",
    )
    return torch.device("cuda", index)


def available_bytes(device: torch.device) -> int | None:
    """Memory that can still be had on `device`; None where nobody tells."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    try:
        available = 1024 * _number("MemAvailable:", Path("/proc/meminfo"))
    except OSError:
        return None  # not Linux
    for limit, stat, used in _CGROUPS:
        with suppress(OSError, ValueError):  # the other version, or no limit
            at_most = int((_CGROUP / limit).read_text()) - _number(used, _CGROUP / stat)
            available = min(available, at_most)
    return max(0, available)


# How much Linux lets a container use, and what it does use: control groups, version 2 and 1.
_CGROUP = Path("/sys/fs/cgroup")
_CGROUPS = [
    ("memory.max", "memory.stat", "anon"),
    ("memory/memory.limit_in_bytes", "memory/memory.stat", "total_rss"),
]


def _number(word: str, file: Path) -> int:
    """The number that follows `word` in a file of Linux's."""
    lines = (line.split() for line in file.read_text().splitlines())
    return next(int(line[1]) for line in lines if line[0] == word)

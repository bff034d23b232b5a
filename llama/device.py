"""Device, dtype and free memory."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path
from typing import cast

import torch

from llama.errors import LlamaError, require

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


def resolve_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """`dtype`, or the default of `device`, which is the same on every CPU."""
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.float16
    known = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if known not in DTYPES.values():
        raise LlamaError(f"dtype {dtype!r:.80} is unknown: pass one of {', '.join(DTYPES)}")
    return cast(torch.dtype, known)


def resolve_device(device: str | torch.device | None, *, alone: bool = True) -> torch.device:
    """`device`, or the best one available. `cuda` means number LOCAL_RANK.

    `alone`: this process is the only rank. Gloo cannot send MPS tensors.
    """
    if device is None:
        mps = alone and torch.backends.mps.is_available()
        device = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError:
        found = torch.device("meta")  # an unknown name
    require(
        found.type in ("cpu", "cuda", "mps"),
        f"device {device!r:.80} is not supported: pass 'cpu', 'mps', 'cuda' or 'cuda:N'",
    )
    if found.type == "cuda":
        return _cuda_device(found)
    if found.type == "mps":
        require(torch.backends.mps.is_available(), "device 'mps' is not available: pass 'cpu'")
        require(alone, "device 'mps' serves a single process: pass 'cpu' to use several")
    return torch.device(found.type)


def _cuda_device(device: torch.device) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(os.environ.get("LOCAL_RANK", 0)) if device.index is None else device.index
    require(
        index < count,
        f"device 'cuda:{index}' is not available, torch finds {count} GPUs: pass device='cpu', or "
        "start at most one process for each GPU",
    )
    return torch.device("cuda", index)


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on `device`; None if the system does not say.

    On a GPU this includes what torch's allocator has reserved and not allocated.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    try:
        available = 1024 * _number("MemAvailable:", Path("/proc/meminfo"))
    except OSError:
        return None  # not Linux
    for limit, stat, used in _CGROUPS:
        with suppress(OSError, ValueError):  # the other version, or no limit
            at_most = int((_CGROUP / limit).read_text()) - _number(used, _CGROUP / stat)
            available = min(available, at_most)
    return max(0, available)


# A Linux container's memory limit and usage: control groups, version 2 and 1.
_CGROUP = Path("/sys/fs/cgroup")
_CGROUPS = [
    ("memory.max", "memory.stat", "anon"),
    ("memory/memory.limit_in_bytes", "memory/memory.stat", "total_rss"),
]


def _number(word: str, file: Path) -> int:
    """The number after `word` in a file of /proc or /sys."""
    lines = (line.split() for line in file.read_text().splitlines())
    return next(int(line[1]) for line in lines if line[0] == word)


def trim_memory() -> None:
    """Give freed memory back to the system, where the C library keeps it (glibc)."""
    if os.name == "posix" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)

"""Opening files that may be anything: a wrong or damaged file is named, with what it really is."""

from __future__ import annotations

import json
import math
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from llama.errors import LlamaError, require

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_ZIP, _PICKLE, _SAFETENSORS = "a zip archive", "a pickle", "a safetensors file"
# What a file is, by its beginning. The first match counts.
_BEGINNINGS = {
    _SAFETENSORS: rb".{6}\x00\x00\s*\{\s*\"",  # any length, then JSON
    "a git-lfs pointer (`git lfs pull` gets the file)": rb"version https://git-lfs",
    "an HTML page (a failed download)": rb"(?i)\s*<(!doctype|html|\?xml)",
    "a GGUF file": rb"GGUF",
    _ZIP: rb"PK\x03\x04",
    _PICKLE: rb"\x80[\x02-\x05]",
    "a tiktoken file": rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n",
    "JSON": rb"(\xef\xbb\xbf)?\s*[\[{]\s*[\"{\[\]}]",
}


def looks_like(path: Path | str) -> str | None:
    """What a file seems to be, as a phrase such as "an HTML page", or None if it is unknown."""
    try:
        with open(path, "rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise LlamaError(f"{path} cannot be read: {error.strerror}") from error
    if not head.strip():
        return "an empty file"
    return next((what for what, p in _BEGINNINGS.items() if re.match(p, head, re.DOTALL)), None)


def read_text(path: Path) -> str:
    """The text of a file, in which U+FFFD stands for what is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise LlamaError(f"{path} cannot be read: {error.strerror}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        found = json.loads(read_text(path).removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, LlamaError):
            raise
        what = looks_like(path) or "of an unknown kind"
        what = "damaged JSON" if what == "JSON" else f"{what} and not JSON"
        raise LlamaError(f"{path} is {what}: download it again") from error
    require(isinstance(found, dict), f"{path} holds a {type(found).__name__}: it must be an object")
    return found


def map_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors in a .safetensors file or one written by torch.save, mapped, not read.

    Only tensors are taken from a pickle; whatever else is in it does not run. No tensor is larger
    than what the file holds of it.
    """
    lost = "is a link to a file that is missing" if path.is_symlink() else "is missing"
    require(path.is_file(), f"{path} {lost}: download it as well")
    expected = [_SAFETENSORS] if path.suffix == ".safetensors" else [_ZIP, _PICKLE]
    what = looks_like(path) or "of an unknown kind"
    rule = f"{path} is {what} and not {' or '.join(expected)}: download it again"
    require(what in expected, rule)
    try:
        found = _load_mapped(path, what)
    except Exception as error:  # the parsers' errors for a damaged file have no common class
        raise LlamaError(f"{path} {_fault(path, error)}") from error
    if not isinstance(found, dict) or not all(isinstance(t, torch.Tensor) for t in found.values()):
        held = ", ".join(map(str, found)) if isinstance(found, dict) else type(found).__name__
        raise LlamaError(f"{path} holds {held:.80} and not only tensors: save only the state dict")
    for name, tensor in found.items():
        fault = _fault_of_tensor(name, tensor)
        require(fault is None, f"{path}: {name!r:.80} {fault}")
    return {name: tensor.detach() for name, tensor in found.items()}


def _load_mapped(path: Path, what: str) -> Any:
    if what == _SAFETENSORS:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if what == _ZIP:
        size = path.stat().st_size
        with zipfile.ZipFile(path) as archive:
            # torch.save does not compress; a small file could unpack to anything.
            if any(e.compress_type or e.file_size > size for e in archive.infolist()):
                raise zipfile.LargeZipFile
    # A pickle outside an archive (PyTorch before 1.6) cannot be mapped.
    return torch.load(path, map_location="cpu", mmap=what == _ZIP, weights_only=True)


def _fault(path: Path, error: Exception) -> str:
    if isinstance(error, zipfile.LargeZipFile):
        return "is a compressed archive: write it again with torch.save"
    refused = re.search(r"(?i)unsupported (?:global: )?GLOBAL (\S+)", str(error))
    if refused:
        return (
            f"holds {refused[1]:.80}, which is not a tensor and might run code, so it was not "
            "read: save only the state dict, preferably as .safetensors"
        )
    if isinstance(error, pickle.UnpicklingError):
        return "is damaged or holds more than tensors, and was not read: download it again"
    return f"is truncated or damaged at {path.stat().st_size:,} bytes: download it again"


def _fault_of_tensor(name: object, tensor: torch.Tensor) -> str | None:
    if not isinstance(name, str):
        return "is not the name of a parameter: save only the state dict"
    if tensor.is_meta:
        return "has a shape but no values: save the model after its weights are loaded"
    if tensor.is_nested or tensor.layout != torch.strided:
        return "is a sparse or nested tensor: save it dense"
    if math.prod(tensor.shape) * tensor.element_size() > tensor.untyped_storage().nbytes():
        return "is larger than what the file holds of it: save it with .contiguous()"
    return None

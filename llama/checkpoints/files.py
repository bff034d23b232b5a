"""Opening files that may be anything: a wrong or damaged one is named, and said what it is."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from llama.errors import LlamaError, require

# What a file looks like, by how it begins. The first match counts.
_ZIP, _PICKLE, _SAFETENSORS = "a zip archive", "a pickle", "a safetensors file"
_BEGINNINGS = {
    _SAFETENSORS: rb".{6}\x00\x00\s*\{\s*\"",  # any length, and then JSON
    "a git-lfs pointer (`git lfs pull` gets the file)": rb"version https://git-lfs",
    "an HTML page (a failed download)": rb"(?i)\s*<(!doctype|html|\?xml)",
    _ZIP: rb"PK\x03\x04",
    _PICKLE: rb"\x80[\x02-\x05]",
    "a tiktoken file": rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n",
    "JSON": rb"(\xef\xbb\xbf)?\s*[\[{]\s*[\"{\[\]}]",
    "a file of zeros (an unfinished download)": rb"\x00{16}",
    "plain text": rb"[\t\r\n -~]+\Z",
}


def looks_like(path: Path | str) -> str | None:
    """What a file seems to be, as a phrase such as "an HTML page", or None if it is unknown."""
    with open(path, "rb") as file:
        head = file.read(4096)
    if not head.strip():
        return "an empty file"
    return next((what for what, p in _BEGINNINGS.items() if re.match(p, head, re.DOTALL)), None)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LlamaError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        what = looks_like(path) or "of an unknown kind"
        what = "damaged JSON" if what == "JSON" else f"{what} and not JSON"
        raise LlamaError(f"{path} is {what}: download it again") from error
    require(isinstance(found, dict), f"{path} holds a {type(found).__name__}: it must be an object")
    return found


def map_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors in a .safetensors file or in one that torch.save wrote, mapped and not read.

    Nothing but tensors is taken from a pickle: whatever else is in it does not run.
    """
    require(path.is_file(), f"{path} is missing: download it too")
    expected = [_SAFETENSORS] if path.suffix == ".safetensors" else [_ZIP, _PICKLE]
    try:
        what = looks_like(path)
    except OSError as error:
        raise LlamaError(f"{path} cannot be read: {error.strerror}") from error
    require(
        what in expected,
        f"{path} is {what or 'of an unknown kind'} and not {' or '.join(expected)}: "
        "download it again",
    )
    try:
        if what == _SAFETENSORS:
            with safe_open(path, framework="pt") as file:
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        else:
            # A pickle that is not in an archive (PyTorch before 1.6) cannot be mapped.
            found = torch.load(path, map_location="cpu", mmap=what == _ZIP, weights_only=True)
    except Exception as error:  # what the parsers raise on a damaged file has no common class
        raise LlamaError(f"{path} {_fault(path, error)}") from error
    if not isinstance(found, dict) or not all(isinstance(t, torch.Tensor) for t in found.values()):
        held = ", ".join(map(str, found)) if isinstance(found, dict) else type(found).__name__
        raise LlamaError(
            f"{path} holds {held:.80} and not tensors alone: save the state dict alone"
        )
    for name, tensor in found.items():
        fault = _fault_of_tensor(name, tensor)
        require(fault is None, f"{path}: {name!r:.80} {fault}")
    return {name: tensor.detach() for name, tensor in found.items()}


def _fault_of_tensor(name: object, tensor: torch.Tensor) -> str | None:
    if not isinstance(name, str):
        return "is no parameter's name: save the state dict alone"
    if tensor.is_meta:
        return "has no values, only a shape: save the model after its weights are loaded"
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        return f"is a {kind} tensor: save it dense"
    return None


def _fault(path: Path, error: Exception) -> str:
    refused = re.search(r"(?i)unsupported (?:global: )?GLOBAL (\S+)", str(error))
    if refused:
        return (
            f"holds {refused[1]}, which is no tensor and might run code, so it was not read: "
            "save the state dict alone, best as .safetensors"
        )
    if isinstance(error, pickle.UnpicklingError):
        return "is damaged, or holds more than tensors, and was not read: download it again"
    return f"is truncated or damaged at {path.stat().st_size:,} bytes: download it again"

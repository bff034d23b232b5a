"""Any checkpoint of the Llama 2 family -> this rank's tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fairscale.nn.model_parallel import initialize as groups
from torch import nn

from llama.errors import require
from llama.model import ModelArgs, Transformer


@dataclass(frozen=True)
class Checkpoint:
    params: dict[str, Any]  # ModelArgs fields
    context: int | None  # the context that the checkpoint names
    tensors: dict[str, torch.Tensor]


def open_checkpoint(ckpt_dir: Path | str) -> Checkpoint:
    """Recognise the format and read headers only."""
    path = Path(ckpt_dir)
    require(path.is_dir(), f"{path} is no folder: pass the folder that holds the checkpoint")
    file = path / "consolidated.00.pth"
    require(file.exists(), f"{path} has no checkpoint")
    params = json.loads((path / "params.json").read_text())
    tensors = torch.load(file, mmap=True, weights_only=True, map_location="cpu")
    tensors.pop("rope.freqs", None)
    params["vocab_size"] = len(tensors["tok_embeddings.weight"])
    return Checkpoint(params, params.pop("max_seq_len", None), tensors)


def require_room(
    args: ModelArgs, *, device: torch.device, dtype: torch.dtype, ranks: int = 1
) -> None:
    """Refuse weights and a cache that cannot fit."""


def load(
    model: Transformer,
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    dtype: torch.dtype,
    progress: bool = True,
) -> None:
    """Give `model`, built under `torch.device("meta")`, this rank's weights."""
    rank, ranks = groups.get_model_parallel_rank(), groups.get_model_parallel_world_size()
    for name, meta in list(model.named_parameters()):
        tensor = checkpoint.tensors[name]
        for axis in range(tensor.ndim):
            if meta.shape[axis] != tensor.shape[axis]:
                n = tensor.shape[axis] // ranks
                tensor = tensor.narrow(axis, rank * n, n)
        module = model.get_submodule(name.rpartition(".")[0])
        tensor = tensor.contiguous().to(device=device, dtype=dtype)
        module.weight = nn.Parameter(tensor, requires_grad=False)

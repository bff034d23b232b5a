"""fairscale's parallel layers in their inference form.

fairscale partitions the weights and owns the groups. Its forward passes go through autograd
functions that `torch.compile(fullgraph=True)` refuses, and its constructors allocate with
`torch.Tensor(...)`, which ignores `torch.device("meta")`. The subclasses here keep the attributes
and the weight layouts, make their weights on the default device, and run a matrix product followed,
when the group has more than one rank, by a functional collective, which traces.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from fairscale.nn.model_parallel import initialize as groups
from fairscale.nn.model_parallel import layers as fairscale_layers
from fairscale.nn.model_parallel.utils import divide_and_check_no_remainder
from torch import nn

from llama import quantize
from llama.errors import LlamaError

SMALL = 2**18  # a weight of fewer numbers is read faster than another operator is called


def linear(x: torch.Tensor, weight: torch.Tensor | nn.Module) -> torch.Tensor:
    """x (..., in_features) times weight (out_features, in_features): the only matrix product.

    `weight` may be a module of `llama.quantize`.
    """
    if not isinstance(weight, torch.Tensor):
        return weight(x)
    return F.linear(x, weight) if weight.numel() < SMALL else quantize.linear(x, weight, None)


def all_reduce(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """The sum of every rank's `x`, same shape."""
    summed = torch.ops._c10d_functional.all_reduce(x, "sum", group_name)
    return torch.ops._c10d_functional.wait_tensor(summed)


def all_gather(x: torch.Tensor, group_name: str, world_size: int) -> torch.Tensor:
    """Every rank's `x` (..., n) side by side, (..., world_size * n)."""
    stacked = torch.ops._c10d_functional.all_gather_into_tensor(
        x.contiguous().flatten(), world_size, group_name
    )
    stacked = torch.ops._c10d_functional.wait_tensor(stacked).view(world_size, *x.shape)
    return stacked.movedim(0, -2).flatten(-2)


def _make_weight(layer: nn.Module, out_features: int, in_features: int, *, axis: int) -> int:
    """Give `layer` this rank's part of a weight split along `axis`; returns the part's size."""
    group = groups.get_model_parallel_group()
    # The group's name and not the group: it traces, and it can be copied with the module.
    layer.group_name, layer.world_size = group.group_name, group.size()
    shape = [out_features, in_features]
    shape[axis] = divide_and_check_no_remainder(shape[axis], layer.world_size)
    layer.weight = nn.Parameter(torch.empty(shape), requires_grad=False)
    return shape[axis]


class WeightError(LlamaError, AttributeError):
    """There is no such attribute, and a caller can know why."""


def _weight(layer: nn.Module) -> Any:
    """This rank's part of the weight, or the module of `llama.quantize` that replaced it."""
    quantized = layer._modules.get("quantized")
    return layer.weight if quantized is None else quantized


def _getattr(layer: nn.Module, name: str) -> Any:
    """What `nn.Module` finds, and one sentence where a weight is quantized."""
    if name == "weight" and "quantized" in layer._modules:
        raise WeightError(
            "this weight is quantized, and its tensor is gone: build without quantize to have it"
        )
    return nn.Module.__getattr__(layer, name)


class ColumnParallelLinear(fairscale_layers.ColumnParallelLinear):
    """y = x Wᵀ with the rows of W (the columns of Wᵀ) split over the ranks."""

    __getattr__ = _getattr

    def __init__(self, in_features: int, out_features: int, *, gather_output: bool) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.gather_output = gather_output
        self.output_size_per_partition = _make_weight(self, out_features, in_features, axis=0)
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = linear(x, _weight(self))
        if self.gather_output and self.world_size > 1:
            y = all_gather(y, self.group_name, self.world_size)
        return y


class RowParallelLinear(fairscale_layers.RowParallelLinear):
    """y = x Wᵀ with the columns of W split over the ranks, as its input already is."""

    __getattr__ = _getattr

    def __init__(self, in_features: int, out_features: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.input_is_parallel = True
        self.input_size_per_partition = _make_weight(self, out_features, in_features, axis=1)
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = linear(x, _weight(self))
        return all_reduce(y, self.group_name) if self.world_size > 1 else y


class ParallelEmbedding(fairscale_layers.ParallelEmbedding):
    """A table (num_embeddings, embedding_dim) split along the embedding dimension."""

    __getattr__ = _getattr

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.embedding_dim_per_partition = _make_weight(self, num_embeddings, embedding_dim, axis=1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weight = _weight(self)
        plain = isinstance(weight, torch.Tensor)
        h = F.embedding(tokens, weight) if plain else weight.rows(tokens)
        return all_gather(h, self.group_name, self.world_size) if self.world_size > 1 else h

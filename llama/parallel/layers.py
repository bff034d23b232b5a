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

from llama.errors import LlamaError
from llama.quantize import TILE_ROWS

SMALL = 2**18  # a weight of fewer numbers is read faster than another operator is called
_HAS_ONEDNN = torch.backends.mkldnn.is_available()
# Without instructions for a dtype of 16 bits, its products of several rows are up to hundreds of
# times slower than those of float32; a single row is bound by memory, and is not.
_SLOW_DTYPES = {
    dtype
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"))
    if _HAS_ONEDNN and not getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")()
}


def linear(x: torch.Tensor, weight: torch.Tensor | nn.Module) -> torch.Tensor:
    """x (..., in_features) times weight (out_features, in_features): the only matrix product.

    `weight` may be a module of `llama.quantize`.
    """
    if not isinstance(weight, torch.Tensor):
        return weight(x)
    trains = weight.requires_grad or x.requires_grad  # the operators below have no gradient
    if x.device.type != "cpu" or trains or not _HAS_ONEDNN or weight.numel() < SMALL:
        return F.linear(x, weight)
    product = _traced_cpu_linear if torch.compiler.is_compiling() else _cpu_linear
    return product(x, weight)


def _cpu_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.float32:
        return _onednn_linear(x, weight)
    if x.dtype in _SLOW_DTYPES and x.numel() // x.shape[-1] >= 4:
        tiles = [_onednn_linear(x.float(), tile.float()) for tile in weight.split(TILE_ROWS)]
        return torch.cat(tiles, dim=-1).to(x.dtype)
    return F.linear(x, weight)


def _onednn_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x Wᵀ in float32 by oneDNN, which reads a plain weight as fast as one packed for it.

    At one row it is 1.2 times as fast as the BLAS that F.linear calls, at a few rows twice, at many
    1.2 to 1.5 times. It rearranges its second factor: at 8 to 32 rows W xᵀ takes a fifth less.
    """
    product = torch.ops.mkldnn._linear_pointwise
    n_rows = x.numel() // x.shape[-1]
    if not 8 <= n_rows <= 32:
        return product(x, weight, None, "none", [], "")
    y = product(weight, x.reshape(n_rows, -1), None, "none", [], "")  # (out_features, n_rows)
    return y.t().contiguous().view(*x.shape[:-1], -1)


# One operator in a graph: Inductor takes oneDNN's for constants only, and the number of rows, which
# decides here, may be a symbol there.
_traced_cpu_linear = torch.library.custom_op("llama::cpu_linear", _cpu_linear, mutates_args=())


@_traced_cpu_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


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
    """This rank's part of the weight, or what `llama.quantize` put in its place."""
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

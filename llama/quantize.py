"""Weights in 8 or 4 bits: how they are made, kept, multiplied with, and written to files.

int8: a row of a weight (n, k), which makes one output, is integers from -127 to 127 times a scale,
float32 (n,).
int4: each group of a row's numbers is code * scale + zero with codes from 0 to 15. Two codes share
a byte (n, k / 2): the first half of a group in the low bits, the second half in the high. Scales
and zeros are bfloat16 (2, n, k / group). The output layer stays in int8: the embedding, which has
its size, bears 4 bits better.

A layer keeps such a weight as a module in place of its parameter. On a CPU the products are those
of `llama.kernels`; elsewhere the weight is dequantized where it is used, which a compiler fuses
with the product.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from llama import kernels
from llama.errors import LlamaError, require

KINDS = ("int8", "int4")
PARTS = ("values", "scales")  # names in a file, behind the parameter's
GROUPS = (64, 32, 16)
MIN_GROUPS = 8  # in a row: the weights of small models lose more by 4 bits
# Candidates for the range of a group: which parts of its own range are cut off at either end.
CUTS = ((0, 0), (0.03, 0.03), (0.06, 0.06), (0.1, 0.1), (0.07, 0), (0, 0.07))
REFITS = 3
BUCKETS = (16, 32, 48, 64, 96, 128, 192, 256)  # numbers of rows
TILE_ROWS = 1024  # of a weight that is converted in pieces: a few MB of float32 at a time
TINY = 2.0**-100  # the least scale, of a row of zeros

Parts: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # values and scales


def check_kind(kind: str | None) -> None:
    """Refuse what is not known."""
    require(
        kind is None or kind in KINDS,
        f"quantize {kind!r:.80}: it must be one of {', '.join(KINDS)}, or None",
    )


def group_size(in_features: int) -> int:
    """How many neighbours in a row share a scale in int4."""
    groups = [g for g in GROUPS if in_features % g == 0]
    require(
        bool(groups),
        f"a row of {in_features} weights does not divide into groups of "
        f"{', '.join(map(str, GROUPS))}: use quantize='int8', or fewer ranks",
    )
    return next((g for g in groups if in_features >= MIN_GROUPS * g), groups[-1])


def to_int8(weight: torch.Tensor) -> Parts:
    """weight (n, k) as values (n, k) and scales (n,)."""
    values, scales = [], []
    for tile in weight.split(TILE_ROWS):
        wide = tile.float()
        scales.append((wide.abs().amax(1) / 127).clamp_min(TINY))
        values.append((wide / scales[-1][:, None]).round_().to(torch.int8))
    return torch.cat(values), torch.cat(scales)


def to_int4(weight: torch.Tensor) -> Parts:
    """weight (n, k) as values (n, k / 2) and scales (2, n, k / group)."""
    values, scales = [], []
    for tile in weight.split(TILE_ROWS // 16):
        codes, scale, zero = _fit_int4(tile.float().unflatten(1, (-1, group_size(weight.shape[1]))))
        low, high = codes.to(torch.uint8).chunk(2, dim=-1)
        values.append((low | high << 4).flatten(1))
        scales.append(torch.stack((scale, zero)).bfloat16())
    return torch.cat(values), torch.cat(scales, dim=1)


def _fit_int4(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (n, n_groups, group), scales and zeros (n, n_groups) of groups of a weight.

    Of several ranges the one with the smallest squared error, then improved by least squares.
    """
    low, high = groups.aminmax(dim=-1)
    span = high - low
    best = (torch.full_like(low, torch.inf), torch.zeros_like(groups), span, low)
    for step in range(len(CUTS) + REFITS):
        if step < len(CUTS):
            start, end = CUTS[step]
            scale, zero = (1 - start - end) * span / 15, low + start * span
        else:
            codes = best[1]
            spread = codes - codes.mean(-1, keepdim=True)
            scale = (spread * groups).sum(-1) / spread.square().sum(-1).clamp_min(TINY)
            zero = groups.mean(-1) - scale * codes.mean(-1)
        # As they are stored: rounded.
        scale, zero = scale.clamp_min(TINY).bfloat16().float(), zero.bfloat16().float()
        codes = ((groups - zero[..., None]) / scale[..., None]).round_().clamp_(0, 15)
        error = (codes * scale[..., None]).add_(zero[..., None]).sub_(groups).square_().sum(-1)
        better = error < best[0]
        best = (
            torch.where(better, error, best[0]),
            torch.where(better[..., None], codes, best[1]),
            torch.where(better, scale, best[2]),
            torch.where(better, zero, best[3]),
        )
    return best[1:]


def dequantize(
    values: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The numbers (n, k) that values and scales stand for; plain values have no scales."""
    if scales is None:
        return values.to(dtype)
    if values.dtype == torch.int8:
        return values * scales.to(dtype)[:, None]
    scale, zero = scales.float()[..., None]
    pairs = values.unflatten(1, (scale.shape[1], -1))
    codes = torch.cat((pairs & 15, pairs >> 4), dim=-1)
    return (codes * scale + zero).flatten(1).to(dtype)


def kind_of(name: str, kind: str) -> str:
    """What a parameter is kept in where the model is in `kind`."""
    return "int8" if name == "output.weight" else kind


def quantize(name: str, weight: torch.Tensor, kind: str) -> Parts:
    """The values and scales of a parameter."""
    return to_int8(weight) if kind_of(name, kind) == "int8" else to_int4(weight)


def stored(
    name: str, shape: tuple[int, ...], kind: str
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What a file holds in place of a parameter (n, k): names, shapes and dtypes."""
    n, k = shape
    values, scales = (f"{name}.{part}" for part in PARTS)
    if kind_of(name, kind) == "int8":
        return {values: ((n, k), torch.int8), scales: ((n,), torch.float32)}
    pairs = (2, n, k // group_size(k))
    return {values: ((n, k // 2), torch.uint8), scales: (pairs, torch.bfloat16)}


def nbytes(shape: tuple[int, ...], kind: str) -> int:
    """Bytes of a quantized weight (n, k)."""
    n, k = shape
    return n * k + 4 * n if kind == "int8" else n * k // 2 + 4 * n * k // group_size(k)


# Without instructions for a dtype of 16 bits, its products of several rows are up to hundreds of
# times slower than those of float32.
SLOW_DTYPES = {
    dtype
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"))
    if not torch.backends.mkldnn.is_available()
    or not getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")()
}


def cpu_linear(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """x (..., k) times a weight (n, k) on a CPU; a plain one has no scales."""
    n_rows = x.numel() // x.shape[-1]
    few = n_rows <= kernels.FEW_ROWS
    known = values.dtype in kernels.KINDS and kernels.available()
    if known and (few or values.dtype == torch.int8):
        return kernels.linear(x, values, scales)
    rows = x.reshape(n_rows, x.shape[-1])
    if scales is None and (values.dtype not in SLOW_DTYPES or n_rows < 4):
        y = _product(rows, values)
    else:
        wide, tiles = rows.float(), []
        for i, tile in enumerate(values.split(TILE_ROWS)):
            at = slice(i * TILE_ROWS, (i + 1) * TILE_ROWS)
            scale = scales if scales is None else scales[at] if scales.ndim == 1 else scales[:, at]
            tiles.append(_product(wide, dequantize(tile, scale, torch.float32)))
        y = torch.cat(tiles, dim=-1).to(x.dtype)
    return y.view(*x.shape[:-1], y.shape[-1])


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x (n_rows, k) times weight (n, k), by oneDNN where there are many rows.

    oneDNN keeps memory for each number of rows that it has seen: it sees only BUCKETS.
    """
    if len(x) <= kernels.FEW_ROWS or not torch.backends.mkldnn.is_available():
        return F.linear(x, weight)
    ys = []
    for part in x.split(BUCKETS[-1]):
        n = next(n for n in BUCKETS if n >= len(part))
        padded = F.pad(part, (0, 0, 0, n - len(part)))
        if x.dtype == torch.float32:  # a quarter to a half faster than the BLAS of F.linear
            y = torch.ops.mkldnn._linear_pointwise(padded, weight, None, "none", [], "")
        else:
            y = F.linear(padded, weight)
        ys.append(y[: len(part)])
    return torch.cat(ys)


# One operator in a graph: the number of rows, which decides here, may be a symbol there.
_traced_linear = torch.library.custom_op("llama::linear", cpu_linear, mutates_args=())


@_traced_linear.register_fake
def _(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], values.shape[0])  # len() makes a symbol a constant


def linear(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """x (..., k) times a weight (n, k) on any device."""
    trains = values.requires_grad or x.requires_grad  # the kernels have no gradient
    if x.device.type == "cpu" and not trains:
        return (_traced_linear if torch.compiler.is_compiling() else cpu_linear)(x, values, scales)
    if values.dtype == torch.int8 and scales is not None:
        return F.linear(x, values.to(x.dtype)) * scales.to(x.dtype)
    return F.linear(x, dequantize(values, scales, x.dtype))


class QuantizedWeight(nn.Module):
    """What a layer has in place of its weight."""

    values: torch.Tensor
    scales: torch.Tensor

    def __init__(self, values: torch.Tensor, scales: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("values", values, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.values, self.scales)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of an embedding, in float32: ids (...) to (..., k)."""
        flat = ids.flatten()
        scales = self.scales[flat] if self.scales.ndim == 1 else self.scales[:, flat]
        return dequantize(self.values[flat], scales, torch.float32).view(*ids.shape, -1)

    def tensors(self) -> Parts:
        return self.values, self.scales

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizedWeight:
        """`.to(dtype)` would round the scales, and the kernels know them in one dtype."""
        scales = self.scales
        super()._apply(fn, recurse)
        self.scales = scales.to(self.scales.device)
        return self

    def _save_to_state_dict(self, *_: Any) -> None:
        raise LlamaError(
            "a quantized model has no state dict: save it with python -m llama convert --quantize"
        )

    def _load_from_state_dict(self, *_: Any) -> None:
        raise LlamaError(
            "a quantized model takes no state dict: build from the checkpoint that has the weights"
        )


def install(layer: nn.Module, parts: Parts, device: torch.device) -> None:
    """Give `layer` a quantized weight in place of its parameter."""
    values, scales = (part.to(device).contiguous() for part in parts)
    del layer.weight
    layer.quantized = QuantizedWeight(values, scales)


def weights(model: nn.Module) -> list[QuantizedWeight]:
    """The quantized weights of a model."""
    return [module for module in model.modules() if isinstance(module, QuantizedWeight)]


def total_bytes(shapes: dict[str, tuple[int, ...]], kind: str, dtype: torch.dtype) -> int:
    """Bytes of parameters by name, the norms in `dtype`."""
    matrices = sum(nbytes(s, kind_of(name, kind)) for name, s in shapes.items() if len(s) == 2)
    return matrices + sum(s[0] * dtype.itemsize for s in shapes.values() if len(s) == 1)

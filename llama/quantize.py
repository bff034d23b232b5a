"""Weights in 8 or 4 bits: how they are made, kept, multiplied with, and written to files.

int8: a row of a weight (n, k), which makes one output, is whole numbers from -127 to 127 times a
scale of its own, float32 (n,).
int4: each group of a row's numbers is (code - 8) * step + middle with codes from 0 to 15, two in a
byte (n, k / 2); steps and middles are bfloat16 (k / group, n, 2). The output layer stays in int8:
the embedding, which has its size, bears 4 bits better.

A layer keeps such a weight as a module in the place of its parameter. On a CPU the products are
those of FBGEMM (int8; x is rounded too, row by row, to 8 or 15 bits) and of ATen's packed int4;
elsewhere the weight is widened where it is used, which a compiler fuses with the product.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import nn

from llama.errors import LlamaError, require

KINDS = ("int8", "int4")
PARTS = ("values", "scales")  # names in a file, behind the parameter's
GROUPS = (128, 64, 32)  # the first that divides a row
HAS_FBGEMM = "fbgemm" in torch.backends.quantized.supported_engines
# Half of all weights, whose inputs bear being rounded to 8 bits: see benchmarks/README.md.
ONE_DIGIT = ("w1.weight", "w3.weight")
TILE_ROWS = 1024  # of a weight that is converted in pieces: a few MB of float32 at a time
TINY = 2.0**-100  # the least scale, of a row of zeros
# glibc keeps what was freed while weights are made, in all as much as they; others have no need.
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
# Without VNNI, sums of two products of 8 bits overflow: x gets 7.
LEVELS = 127 if torch.cpu._is_vnni_supported() else 63

Parts: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # values and scales
Product: TypeAlias = Callable[..., torch.Tensor]


def check_kind(kind: str | None) -> None:
    """Refuse what is not known."""
    require(
        kind is None or (isinstance(kind, str) and kind in KINDS),
        f"quantize {kind!r:.80}: it must be one of {', '.join(KINDS)}, or None",
    )


def group_size(in_features: int) -> int:
    """How many neighbours in a row share a scale in int4."""
    group = next((g for g in GROUPS if in_features % g == 0), None)
    if group is None:
        raise LlamaError(
            f"a row of {in_features} weights does not divide into groups of "
            f"{', '.join(map(str, GROUPS))}: use quantize='int8', or fewer ranks"
        )
    return group


def to_int8(weight: torch.Tensor) -> Parts:
    """weight (n, k) as values (n, k) and scales (n,)."""
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), device=weight.device)
    for i, tile in enumerate(weight.split(TILE_ROWS)):
        wide, rows = tile.float(), slice(i * TILE_ROWS, i * TILE_ROWS + len(tile))
        scales[rows] = (wide.abs().amax(1) / 127).clamp_min(TINY)
        values[rows] = (wide / scales[rows, None]).round_()
    return values, scales


def to_int4(weight: torch.Tensor) -> Parts:
    """weight (n, k) as values (n, k / 2) and scales (k / group, n, 2)."""
    (n, k), device = weight.shape, weight.device
    group = group_size(k)
    values = torch.empty(n, k // 2, dtype=torch.uint8, device=device)
    scales = torch.empty(k // group, n, 2, dtype=torch.bfloat16, device=device)
    for i, tile in enumerate(weight.split(TILE_ROWS)):
        wide = tile.float().unflatten(1, (-1, group))
        rows = slice(i * TILE_ROWS, i * TILE_ROWS + len(tile))
        low, high = wide.aminmax(dim=-1)
        # Codes are chosen for step and middle as they are stored, rounded.
        step = ((high - low) / 15).clamp_min(TINY).bfloat16()
        middle = (low + 8 * step.float()).bfloat16()
        codes = (wide - middle.float()[..., None]) / step.float()[..., None] + 8
        codes = codes.round_().clamp_(0, 15).to(torch.uint8).flatten(1)
        values[rows] = codes[:, ::2] | codes[:, 1::2] << 4
        scales[:, rows] = torch.stack((step, middle), dim=-1).transpose(0, 1)
    return values, scales


def codes_of(values: torch.Tensor) -> torch.Tensor:
    """The codes (n, k) that lie two in a byte."""
    return torch.stack((values & 15, values >> 4), dim=-1).flatten(1)


def widen(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers (n, k) that values and scales of either kind stand for."""
    if values.dtype == torch.int8:
        return values * scales.to(dtype)[:, None]
    step, middle = scales.to(dtype).transpose(0, 1)[..., None].unbind(2)  # (n, k / group, 1)
    codes = codes_of(values).unflatten(1, (step.shape[1], -1)).to(dtype)
    return ((codes - 8) * step + middle).flatten(1)


def kind_of(name: str, kind: str) -> str:
    """What a parameter is kept in where the model is in `kind`."""
    return "int8" if name == "output.weight" else kind


def quantize(name: str, weight: torch.Tensor, kind: str) -> Parts:
    """The values and scales of a parameter."""
    return to_int8(weight) if kind_of(name, kind) == "int8" else to_int4(weight)


def stored(
    name: str, shape: tuple[int, ...], kind: str
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What a file holds in the place of a parameter (n, k): names, shapes and dtypes."""
    n, k = shape
    values, scales = (f"{name}.{part}" for part in PARTS)
    if kind_of(name, kind) == "int8":
        return {values: ((n, k), torch.int8), scales: ((n,), torch.float32)}
    steps = (k // group_size(k), n, 2)
    return {values: ((n, k // 2), torch.uint8), scales: (steps, torch.bfloat16)}


def nbytes(shape: tuple[int, ...], kind: str) -> int:
    """Bytes of a quantized weight (n, k)."""
    n, k = shape
    return n * k + 4 * n if kind == "int8" else n * k // 2 + 4 * n * k // group_size(k)


def int8_linear(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The product where no kernel is known."""
    return F.linear(x, values.to(x.dtype)) * scales.to(x.dtype)


def int4_linear(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The product where no kernel is known."""
    return F.linear(x, widen(values, scales, x.dtype))


def packed_int4_linear(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """ATen's kernel for CPUs, which computes in bfloat16."""
    group = x.shape[-1] // len(scales)
    rows = x.reshape(-1, x.shape[-1]).bfloat16().contiguous()
    y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed, group, scales.bfloat16())
    return y.to(x.dtype).view(*x.shape[:-1], y.shape[-1])


class Packed:
    """An int8 weight as FBGEMM wants it. Graphs, which cannot hold that, know it by a number."""

    alive: ClassVar[WeakValueDictionary[int, Packed]] = WeakValueDictionary()
    numbers = itertools.count()

    def __init__(self, values: torch.Tensor, scales: torch.Tensor) -> None:
        zeros, engine = torch.zeros_like(scales).long(), torch.backends.quantized.engine
        with warnings.catch_warnings():
            # The class of quantized tensors is to go; FBGEMM takes its weights in no other.
            warnings.simplefilter("ignore", UserWarning)
            q = torch._make_per_channel_quantized_tensor(values, scales, zeros, 0)
        try:
            torch.backends.quantized.engine = "fbgemm"
            self.object = torch.ops.quantized.linear_prepack(q, None)
        finally:
            torch.backends.quantized.engine = engine
        self.shape, self.number = tuple(values.shape), next(self.numbers)
        self.alive[self.number] = self

    def tensors(self) -> Parts:
        q = torch.ops.quantized.linear_unpack(self.object)[0]
        return q.int_repr(), q.q_per_channel_scales().float()

    def __deepcopy__(self, memo: object) -> Packed:
        return self  # nothing in it changes

    def __reduce__(self) -> tuple[Any, ...]:
        return Packed, self.tensors()


def packed_int8_linear(
    x: torch.Tensor, number: int, out_features: int, digits: int = 2
) -> torch.Tensor:
    """FBGEMM's product, which takes whole numbers: x rounded to `digits` of them, most of it first.

    Each row of x has a scale of its own, so that no row depends on another.
    """
    require(
        x.device.type == "cpu",
        f"x is on {x.device}, and the weights were quantized for a CPU: build with device=",
    )
    rows = x.reshape(-1, x.shape[-1]).float()
    scales = (rows.abs().amax(-1, keepdim=True) / LEVELS).clamp_min(TINY)
    product = _traced_fbgemm if torch.compiler.is_compiling() else _fbgemm
    steps = rows / scales
    if digits == 1:
        y = product(steps, number, out_features)
    else:
        # What is left is at most a half. Beside its row it costs little where a product is bound by
        # reading the weight, and as much again where it is not. Not by `cat`, which Inductor's C++
        # does number by number.
        whole = steps.round()
        rest = (steps - whole) * (2 * LEVELS)
        both = torch.where(_SECOND, rest, whole).flatten(0, 1)
        y, y_rest = product(both, number, out_features).unflatten(0, (2, -1)).unbind()
        y = y + y_rest / (2 * LEVELS)
    return (y * scales).to(x.dtype).view(*x.shape[:-1], out_features)


_SECOND = torch.tensor([False, True], device="cpu")[:, None, None]


def _fbgemm(rows: torch.Tensor, number: int, out_features: int) -> torch.Tensor:
    return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
        rows, 1.0, LEVELS + 1, Packed.alive[number].object
    )


_traced_fbgemm = torch.library.custom_op("llama::fbgemm", _fbgemm, mutates_args=())


@_traced_fbgemm.register_fake
def _(rows: torch.Tensor, number: int, out_features: int) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], out_features)  # len() makes a symbol a constant


class QuantizedWeight(nn.Module):
    """What a layer has in the place of its weight: values and scales, or the two packed."""

    values: torch.Tensor
    scales: torch.Tensor

    def __init__(self, product: Product, parts: Parts | None, packed: Packed | None) -> None:
        super().__init__()
        self.product, self.packed = product, packed
        for name, tensor in zip(PARTS, parts or (None, None), strict=True):
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is None:
            return self.product(x, self.values, self.scales)
        return self.product(x, self.packed.number, self.packed.shape[0])

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Those of an embedding, in float32: ids (...) to (..., k)."""
        flat = ids.flatten()
        scales = self.scales[flat] if self.scales.ndim == 1 else self.scales[:, flat]
        return widen(self.values[flat], scales, torch.float32).view(*ids.shape, -1)

    def tensors(self) -> Parts:
        return (self.values, self.scales) if self.packed is None else self.packed.tensors()

    @property
    def nbytes(self) -> int:
        if self.packed is None:
            return self.values.nbytes + self.scales.nbytes
        return nbytes(self.packed.shape, "int8")

    def _save_to_state_dict(self, *_: Any) -> None:
        raise LlamaError(
            "a quantized model has no state dict: save it with python -m llama convert --quantize"
        )

    def _load_from_state_dict(self, *_: Any) -> None:
        raise LlamaError(
            "a quantized model takes no state dict: build from the checkpoint that has the weights"
        )


def install(name: str, layer: nn.Module, parts: Parts, device: torch.device) -> None:
    """Give `layer` a quantized weight in the place of its parameter, as the device wants it."""
    values, scales = (part.to(device) for part in parts)
    is_int8 = values.dtype == torch.int8
    has_kernel = device.type == "cpu" and not hasattr(layer, "num_embeddings")
    if has_kernel and is_int8 and HAS_FBGEMM:
        digits = 1 if name.endswith(ONE_DIGIT) else 2
        product = functools.partial(packed_int8_linear, digits=digits)
        weight = QuantizedWeight(product, None, Packed(values, scales))
    elif has_kernel and not is_int8 and len(values) % 32 == 0:
        pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu  # of codes in 32 bits: by tiles
        packed = torch.cat([pack(codes_of(v).int(), 1) for v in values.split(TILE_ROWS)])
        weight = QuantizedWeight(packed_int4_linear, (packed, scales.contiguous()), None)
    else:
        weight = QuantizedWeight(int8_linear if is_int8 else int4_linear, (values, scales), None)
    del layer.weight
    layer.quantized = weight
    if _trim is not None:
        _trim(0)


def weights(model: nn.Module) -> list[QuantizedWeight]:
    """Those of a model; none if it is not quantized."""
    return [module for module in model.modules() if isinstance(module, QuantizedWeight)]


def total_bytes(shapes: dict[str, tuple[int, ...]], kind: str, dtype: torch.dtype) -> int:
    """Bytes of parameters by name, the norms in `dtype`."""
    matrices = sum(nbytes(s, kind_of(name, kind)) for name, s in shapes.items() if len(s) == 2)
    return matrices + sum(s[0] * dtype.itemsize for s in shapes.values() if len(s) == 1)

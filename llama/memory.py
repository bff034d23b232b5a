"""What a model needs in memory, and what fits: `python -m llama memory`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from llama import kv_cache, sizes
from llama.checkpoints.config import CONTEXT
from llama.checkpoints.load import open_checkpoint
from llama.device import available_bytes, resolve_device, resolve_dtype
from llama.errors import LlamaError, checked_path, require
from llama.model import ModelArgs
from llama.parameters import require_split
from llama.quantize import check_kind
from llama.sizes import BINARY_UNITS, DECIMAL_UNITS, format_bytes

_FIELDS = ("dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "vocab_size", "max_seq_len")
# max_seq_len is the context length of the training.
ARCHITECTURES = {
    "llama-2-7b": (4096, 32, 32, 32, 11008, 32000, 4096),
    "llama-2-13b": (5120, 40, 40, 40, 13824, 32000, 4096),
    "llama-2-70b": (8192, 80, 64, 8, 28672, 32000, 4096),
    "code-llama-34b": (8192, 48, 64, 8, 22016, 32000, 16384),
    "tinyllama-1.1b": (2048, 22, 32, 4, 5632, 32000, 2048),
    "mistral-7b": (4096, 32, 32, 8, 14336, 32000, 32768),
    "llama-3.1-8b": (4096, 32, 32, 8, 14336, 128256, 131072),
    "llama-3.1-70b": (8192, 80, 64, 8, 28672, 128256, 131072),
    "llama-3.1-405b": (16384, 126, 128, 8, 53248, 128256, 131072),
}
WINDOWS = {"mistral-7b": 4096}


def architecture(model: str) -> tuple[ModelArgs, bool, str | None]:
    """The shape, with one cache row of the model's context; whether tied; how quantized.

    Args:
        model: a known name, or the folder of a checkpoint.
    """
    if model in ARCHITECTURES:
        shape: dict[str, Any] = dict(zip(_FIELDS, ARCHITECTURES[model], strict=True))
        return ModelArgs(**shape, sliding_window=WINDOWS.get(model), max_batch_size=1), False, None
    require(
        checked_path(model, "model").is_dir(),
        f"{model!r:.80} is neither a folder nor a known model: {', '.join(ARCHITECTURES)}",
    )
    return checkpoint_shape(model)


def checkpoint_shape(folder: str | Path) -> tuple[ModelArgs, bool, str | None]:
    """As `architecture`, of the checkpoint in a folder."""
    checkpoint = open_checkpoint(folder)
    args = replace(checkpoint.args, max_seq_len=checkpoint.context or CONTEXT, max_batch_size=1)
    return args, checkpoint.config.tied, checkpoint.quantized


@dataclass(frozen=True)
class Plan:
    """A model to build; the sizes are those of one rank."""

    args: ModelArgs
    dtype: torch.dtype = torch.float16
    cache_dtype: torch.dtype = torch.float16
    ranks: int = 1
    tied: bool = False
    quantize: str | None = None

    @property
    def weights_bytes(self) -> int:
        return sizes.weights_bytes(
            self.args, dtype=self.dtype, ranks=self.ranks, tied=self.tied, quantize=self.quantize
        )

    @property
    def cache_bytes(self) -> int:
        return sizes.cache_bytes(self.args, self.cache_dtype, self.ranks)

    @property
    def token_bytes(self) -> int:
        """Bytes of one position in one row."""
        return self.cache_bytes // (self.args.max_batch_size * self.args.n_slots)

    @property
    def activation_bytes(self) -> int:
        count = getattr(sizes, "activation_bytes", lambda *_: 0)
        return count(self.args, self.dtype, self.ranks)


def memory(
    model: str,
    *,
    max_seq_len: int | None = None,
    max_batch_size: int = 1,
    dtype: str = "float16",
    kv_cache_dtype: str | None = None,
    quantize: str | None = None,
    model_parallel_size: int = 1,
    sliding_window: int | None = None,
    prefill_chunk: int | None = None,
    budget: str | None = None,
    plot: str | None = None,
) -> None:
    """Print what a model needs in memory.

    Args:
        model: a known model, or the folder of a checkpoint.
        max_seq_len: positions in each cache row; default: the model's context.
        max_batch_size: cache rows.
        dtype: dtype of the weights: float32, bfloat16 or float16.
        kv_cache_dtype: dtype of the cache, one of these or int8; default: as the weights.
        quantize: int8 or int4 weights.
        model_parallel_size: ranks that share the model.
        sliding_window: attention window in tokens; default: the model's own.
        prefill_chunk: prefill prompts in chunks of at most this many tokens.
        budget: memory of one rank, such as 24GiB: print what fits as well.
        plot: an image file: draw the cache and the weights over the context length.
    """
    weights_dtype = resolve_dtype(dtype, torch.device("cpu"))
    cache_dtype = kv_cache.checked_dtype(
        weights_dtype if kv_cache_dtype is None else kv_cache_dtype
    )
    check_kind(quantize)
    args, tied, quantized = architecture(model)
    context = args.max_seq_len
    max_seq_len = context if max_seq_len is None else max_seq_len
    for name, value in (
        ("max_seq_len", max_seq_len),
        ("max_batch_size", max_batch_size),
        ("model_parallel_size", model_parallel_size),
    ):
        require(value >= 1, f"{name} {value}: it must be at least 1")
    args = replace(
        args,
        max_seq_len=max_seq_len,
        max_batch_size=max_batch_size,
        sliding_window=args.sliding_window if sliding_window is None else sliding_window,
        prefill_chunk=prefill_chunk,
    )
    require_split(args, model_parallel_size)
    plan = Plan(args, weights_dtype, cache_dtype, model_parallel_size, tied, quantized or quantize)
    print("\n".join(report(plan, title=model)))
    if budget is not None:
        print("\n".join(what_fits(plan, parse_bytes(budget), context)))
    if plot is not None:
        draw(plan, plot, title=model)
        print(f"plot: {plot}")


def report(plan: Plan, *, title: str) -> Iterator[str]:
    """The table of sizes, line by line."""
    args, ranks = plan.args, plan.ranks
    yield (
        f"{title}: {args.n_layers} layers, {args.n_heads} heads of {args.head_dim}, "
        f"{args.kv_heads} for keys and values"
    )
    rows = {
        f"weights, {plan.quantize or _name(plan.dtype)}": plan.weights_bytes,
        f"cache per token, {_name(plan.cache_dtype)}": plan.token_bytes,
        f"cache per sequence, {args.n_slots} slots": plan.cache_bytes // args.max_batch_size,
        f"cache, batch of {args.max_batch_size}": plan.cache_bytes,
        "activations of a prefill": plan.activation_bytes,
        "in all": plan.weights_bytes + plan.cache_bytes + plan.activation_bytes,
    }
    columns = [ranks, 1] if ranks > 1 else [1]
    if ranks > 1:
        yield _line("", "all ranks", f"each of {ranks} ranks")
    for label, n_bytes in rows.items():
        yield _line(label, *[format_bytes(n * n_bytes) for n in columns])
    yield _line("cache / weights", f"{plan.cache_bytes / plan.weights_bytes:.2f}")


def what_fits(plan: Plan, budget_bytes: int, context: int) -> Iterator[str]:
    """The longest context, up to the model's own, and the largest batch on a rank.

    Raises:
        LlamaError: the weights and activations alone exceed `budget_bytes`.
    """
    args, fixed = plan.args, plan.weights_bytes + plan.activation_bytes
    left = budget_bytes - fixed
    require(
        left >= 0,
        f"a budget of {format_bytes(budget_bytes)} is {format_bytes(-left)} less than the weights "
        f"and activations, {format_bytes(fixed)}: use more ranks, a smaller dtype, or quantize",
    )
    n_slots, window = left // (plan.token_bytes * args.max_batch_size), args.sliding_window
    longest = f"{n_slots} tokens" if n_slots < context else f"{context} tokens, the model's own"
    if window is not None and n_slots >= window + (args.prefill_chunk or 1) - 1:
        longest = "unlimited: the window fits"
    n_rows = left // (plan.token_bytes * args.n_slots)
    yield _line("budget", format_bytes(budget_bytes))
    yield _line("left for the cache", format_bytes(left))
    yield _line(f"longest context, batch of {args.max_batch_size}", longest)
    yield _line(f"largest batch, {args.n_slots} slots each", f"{n_rows} rows")


def draw(plan: Plan, path: str, *, title: str) -> None:
    """Plot the cache of one sequence, and the weights, over the context length."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LlamaError("a plot needs matplotlib: pip install matplotlib") from error
    args = plan.args
    grouped = args.kv_heads if 1 < args.kv_heads < args.n_heads else max(1, args.n_heads // 4)
    window = args.sliding_window or 4096
    curves = {
        f"multi-head ({args.n_heads})": (args.n_heads, None),
        f"grouped-query ({grouped})": (grouped, None),
        f"grouped-query ({grouped}), window {window}": (grouped, window),
        "multi-query (1)": (1, None),
    }
    lengths = [2**i for i in range(10, 21)]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for label, (n_kv_heads, w) in curves.items():
        row = replace(
            args, n_kv_heads=n_kv_heads, max_batch_size=1, sliding_window=w, prefill_chunk=1
        )
        gigabytes = [
            sizes.cache_bytes(replace(row, max_seq_len=length), plan.cache_dtype) / 1e9
            for length in lengths
        ]
        axes.plot(lengths, gigabytes, marker=".", label=label)
    weights = replace(plan, ranks=1).weights_bytes / 1e9
    axes.axhline(
        weights,
        color="black",
        linestyle="--",
        label=f"weights, {plan.quantize or _name(plan.dtype)}",
    )
    axes.set(xlabel="tokens", ylabel="GB", title=f"{title}: cache of one sequence")
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(lengths, [f"{length // 1024}K" for length in lengths])
    axes.legend()
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise LlamaError(f"the plot {str(path)!r} cannot be written: {error}") from error


def fitting_context(
    folder: str | Path,
    max_batch_size: int,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    kv_cache_dtype: str | torch.dtype | None = None,
    quantize: str | None = None,
    sliding_window: int | None = None,
    prefill_chunk: int | None = None,
) -> int:
    """The context length of a checkpoint, or as much of it as fits the free memory.

    Several ranks have to agree on it, so there it is at most 4096 and nothing is measured.
    """
    args, tied, quantized = checkpoint_shape(folder)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        return min(args.max_seq_len, CONTEXT)
    place = resolve_device(device)
    weights_dtype = resolve_dtype(dtype, place)
    cache_dtype = kv_cache.checked_dtype(kv_cache_dtype or weights_dtype)
    window = args.sliding_window if sliding_window is None else sliding_window
    args = replace(
        args, max_batch_size=max_batch_size, sliding_window=window, prefill_chunk=prefill_chunk
    )
    plan = Plan(args, weights_dtype, cache_dtype, tied=tied, quantize=quantized or quantize)
    free = available_bytes(place)
    if free is None:
        return args.max_seq_len
    n_slots = (free * 9 // 10 - plan.weights_bytes - plan.activation_bytes) // plan.token_bytes
    # If not even this fits, `build` says so.
    return min(args.max_seq_len, max(n_slots // max_batch_size, 512))


def parse_bytes(size: str) -> int:
    """Bytes in a size such as 24GiB, 24G (the same) or 24 GB.

    Raises:
        LlamaError: no number, or no unit.
    """
    units = {"b": 1} | {unit[0].lower(): n for unit, n in BINARY_UNITS.items()}
    units |= {unit.lower(): n for unit, n in (DECIMAL_UNITS | BINARY_UNITS).items()}
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d*)?)\s*([a-z]+)\s*", size.lower())
    if match is None or match[2] not in units:
        raise LlamaError(f"{size!r:.80} is not a size: write a number and a unit, such as 24GiB")
    return round(float(match[1]) * units[match[2]])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _line(label: str, *columns: str) -> str:
    return f"{label:34}" + "".join(f"{column:28}" for column in columns).rstrip()

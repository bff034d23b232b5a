"""What a model needs in memory, and what fits: `python -m llama memory`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch

from llama import kv_cache
from llama.checkpoints.config import CONTEXT
from llama.checkpoints.load import open_checkpoint
from llama.device import resolve_dtype
from llama.errors import LlamaError, checked_path, checked_whole, require, shown
from llama.model import ModelArgs
from llama.parameters import require_split
from llama.quantize import check_kind
from llama.sizes import BINARY_UNITS, DECIMAL_UNITS, cache_bytes, format_bytes, weights_bytes

_FIELDS = ("dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "vocab_size", "max_seq_len")
# By name; the last number is the context that the model was trained on.
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
    """A model's shape with one row of its context, if its output is tied, and how it is quantized.

    `model` is a known name, or the folder of a checkpoint.
    """
    if model in ARCHITECTURES:
        shape: dict[str, Any] = dict(zip(_FIELDS, ARCHITECTURES[model], strict=True))
        return ModelArgs(**shape, sliding_window=WINDOWS.get(model), max_batch_size=1), False, None
    require(
        checked_path(model, "model").is_dir(),
        f"{shown(model)} is neither a folder nor a known model: {', '.join(ARCHITECTURES)}",
    )
    checkpoint = open_checkpoint(model)
    args = replace(checkpoint.args, max_seq_len=checkpoint.context or CONTEXT, max_batch_size=1)
    return args, checkpoint.config.tied, checkpoint.quantized


@dataclass(frozen=True)
class Plan:
    """A model as it is to be built; the sizes are those of one rank."""

    args: ModelArgs
    dtype: torch.dtype = torch.float16
    cache_dtype: torch.dtype = torch.float16
    ranks: int = 1
    tied: bool = False
    quantize: str | None = None

    def __post_init__(self) -> None:
        require_split(self.args, self.ranks)

    @property
    def weights_bytes(self) -> int:
        return weights_bytes(
            self.args, dtype=self.dtype, ranks=self.ranks, tied=self.tied, quantize=self.quantize
        )

    @property
    def weights_name(self) -> str:
        return self.quantize or _name(self.dtype)

    @property
    def cache_bytes(self) -> int:
        return cache_bytes(self.args, self.cache_dtype, self.ranks)

    @property
    def row_bytes(self) -> int:
        return self.cache_bytes // self.args.max_batch_size

    @property
    def token_bytes(self) -> int:
        """Of one position in one row."""
        return self.row_bytes // self.args.n_slots


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
    budget: str | int | None = None,
    plot: str | None = None,
) -> None:
    """Print what a model needs in memory.

    Args:
        model: the name of a model, or the folder of a checkpoint.
        max_seq_len: positions in each row of the cache; default: the model's context.
        max_batch_size: rows of the cache.
        dtype: of the weights, float32, bfloat16 or float16.
        kv_cache_dtype: of the cache, one of these or int8; default: as the weights.
        quantize: int8 or int4, for the weights.
        model_parallel_size: ranks that share the model.
        sliding_window: how many positions a query sees; default: what the model says.
        prefill_chunk: prompts are read in pieces of at most this many tokens.
        budget: of one rank, such as 24GiB: print also what fits.
        plot: a file to draw the cache against the weights into, over the length of the context.
    """
    model = str(model)  # the command line makes a number of a folder named 7
    weights_dtype = resolve_dtype(dtype, torch.device("cpu"))
    cache_dtype = kv_cache.checked_dtype(
        weights_dtype if kv_cache_dtype is None else kv_cache_dtype
    )
    plot = None if plot is None else str(checked_path(plot, "plot"))
    check_kind(quantize)
    args, tied, quantized = architecture(model)
    max_seq_len = args.max_seq_len if max_seq_len is None else max_seq_len
    args = replace(
        args,
        max_seq_len=checked_whole(max_seq_len, "max_seq_len", 1),
        max_batch_size=checked_whole(max_batch_size, "max_batch_size", 1),
        sliding_window=args.sliding_window if sliding_window is None else sliding_window,
        prefill_chunk=prefill_chunk,
    )
    ranks = checked_whole(model_parallel_size, "model_parallel_size", 1)
    plan = Plan(args, weights_dtype, cache_dtype, ranks, tied, quantized or quantize)
    budget_bytes = None if budget is None else parse_bytes(budget)
    print("\n".join(report(plan, title=model)))
    if budget_bytes is not None:
        print("\n".join(what_fits(plan, budget_bytes)))
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
    sizes = {
        f"weights, {plan.weights_name}": plan.weights_bytes,
        f"cache per token, {_name(plan.cache_dtype)}": plan.token_bytes,
        f"cache per sequence, {args.n_slots} slots": plan.row_bytes,
        f"cache, batch of {args.max_batch_size}": plan.cache_bytes,
        "weights and cache": plan.weights_bytes + plan.cache_bytes,
    }
    whole_first = [ranks, 1] if ranks > 1 else [1]
    if ranks > 1:
        yield _line("", "in all", f"on each of {ranks} ranks")
    for label, n_bytes in sizes.items():
        yield _line(label, *[format_bytes(n * n_bytes) for n in whole_first])
    yield _line("cache against weights", f"{plan.cache_bytes / plan.weights_bytes:.2f}")


def what_fits(plan: Plan, budget_bytes: int) -> Iterator[str]:
    """The longest context and the largest batch on a rank with `budget_bytes`.

    Raises:
        LlamaError: not even the weights fit.
    """
    args, left = plan.args, budget_bytes - plan.weights_bytes
    require(
        left >= 0,
        f"a budget of {format_bytes(budget_bytes)} is {format_bytes(-left)} less than the weights, "
        f"{format_bytes(plan.weights_bytes)}: more ranks, or a narrower dtype",
    )
    slots, window = left // (plan.token_bytes * args.max_batch_size), args.sliding_window
    endless = window is not None and slots >= window + (args.prefill_chunk or 1) - 1
    yield _line("budget", format_bytes(budget_bytes))
    yield _line("left for the cache", format_bytes(left))
    yield _line(
        f"longest context, batch of {args.max_batch_size}",
        "without end: the window fits" if endless else f"{slots} tokens",
    )
    yield _line(
        f"largest batch, {args.n_slots} slots each",
        f"{left // plan.row_bytes} rows",
    )


def draw(plan: Plan, path: str, *, title: str) -> None:
    """Plot one sequence's cache against the weights, over the context's length."""
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
        sizes = [
            cache_bytes(
                replace(
                    args,
                    n_kv_heads=n_kv_heads,
                    max_seq_len=length,
                    max_batch_size=1,
                    sliding_window=w,
                    prefill_chunk=1,
                ),
                plan.cache_dtype,
            )
            for length in lengths
        ]
        axes.plot(lengths, [size / 1e9 for size in sizes], marker=".", label=label)
    weights = replace(plan, ranks=1).weights_bytes / 1e9
    axes.axhline(weights, color="black", linestyle="--", label=f"weights, {plan.weights_name}")
    axes.set(xlabel="tokens", ylabel="GB", title=f"{title}: cache of one sequence")
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(lengths, [f"{length // 1024}K" for length in lengths])
    axes.legend()
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise LlamaError(f"the plot {str(path)!r} cannot be written: {error}") from error


def parse_bytes(size: str | int) -> int:
    """24GiB, 24 GB, 1.5tib or a plain number of bytes."""
    units = {"": 1, "b": 1}
    units |= {u.lower(): n for u, n in (DECIMAL_UNITS | BINARY_UNITS).items()}
    text = size if isinstance(size, str) else shown(size)
    match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{0,30})?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in units:
        raise LlamaError(
            f"{shown(size)} is no size: write a number and a unit, such as 24GiB or 24GB"
        )
    return int(Fraction(match[1]) * units[match[2]])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _line(label: str, *columns: str) -> str:
    return f"{label:34}" + "".join(f"{column:28}" for column in columns).rstrip()

"""Bytes of weights, cache and activations on one rank, and what fits."""

from __future__ import annotations

import os

import torch
from fairscale.nn.model_parallel import initialize as groups

from llama import quantize as quant
from llama.device import available_bytes
from llama.errors import require
from llama.kv_cache import PREFILL_TOKENS, SCALE_DTYPE
from llama.model import ModelArgs, Transformer
from llama.parameters import OUTPUT, parameters, require_split

DECIMAL_UNITS = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "kB": 10**3}
BINARY_UNITS = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


def weights_bytes(
    args: ModelArgs,
    *,
    dtype: torch.dtype,
    ranks: int = 1,
    tied: bool = False,
    quantize: str | None = None,
) -> int:
    """Bytes of the parameters on one rank. Matrices are split over the ranks, norms are not.

    `tied`: one matrix serves as embedding and as output. On several ranks each is split along
    another axis, and a quantized output has its own format, so nothing is shared there.
    """
    shapes = {name: p.local_shape(ranks) for name, p in parameters(args).items()}
    if quantize is not None:
        return quant.total_bytes(shapes, quantize, dtype)
    if tied and ranks == 1:
        del shapes[OUTPUT]
    return sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize


def cache_bytes(args: ModelArgs, dtype: torch.dtype, ranks: int = 1) -> int:
    """2 (K and V) * layers * local heads * slots * rows * bytes of a head."""
    heads = args.n_layers * (args.kv_heads // ranks)
    return 2 * heads * args.n_slots * args.max_batch_size * head_bytes(args.head_dim, dtype)


def head_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one head's key, or value, at one position; int8 adds a scale."""
    return head_dim * dtype.itemsize + (SCALE_DTYPE.itemsize if dtype == torch.int8 else 0)


def activation_bytes(args: ModelArgs, dtype: torch.dtype, ranks: int = 1) -> int:
    """An upper bound of what one pass allocates: hidden states, queries, keys, gates, logits."""
    tokens = min(args.prefill_chunk or PREFILL_TOKENS, args.n_slots * args.max_batch_size)
    heads = (args.n_heads + 2 * args.kv_heads) * args.head_dim // ranks
    # The feed-forward layer has three of its width at once; attention its heads, rotated in
    # float32, and its output. Sines and cosines are there all the time.
    attention = heads * (2 * dtype.itemsize + 8)
    feed_forward = 3 * args.ffn_dim // ranks * dtype.itemsize
    hidden = 3 * args.dim * dtype.itemsize + 2 * args.head_dim * 4
    logits = args.vocab_size * args.max_batch_size * 4 * 4  # and what sampling makes of them
    return tokens * (hidden + max(attention, feed_forward)) + logits


def usage(model: Transformer, held_tokens: int) -> dict[str, int]:
    """Bytes of a model on this rank: `weights_bytes`, `cache_bytes`, and `used_bytes` of it."""
    args, attention = model.params, model.attentions[0]
    # By address: a tied output layer shares the embedding's memory.
    weights = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    ranks = args.kv_heads // attention.n_local_kv_heads
    cache = cache_bytes(args, attention.cache_k.dtype, ranks)
    return {
        "weights_bytes": sum(weights.values()) + sum(w.nbytes for w in quant.weights(model)),
        "cache_bytes": cache,
        "used_bytes": cache // (args.max_batch_size * args.n_slots) * held_tokens,
    }


def require_room(
    args: ModelArgs,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
    ranks: int = 1,
    tied: bool = False,
    quantize: str | None = None,
) -> None:
    """Refuse a model that `ranks` cannot share, or whose weights and cache do not fit.

    Every rank has to call it: the rank with the least memory decides for all.
    """
    require_split(args, ranks)
    device = torch.device(device)
    available = available_bytes(device)
    if available is None:
        return
    if ranks > 1:
        least = torch.tensor(available, device=device)
        minimum = torch.distributed.ReduceOp.MIN
        torch.distributed.all_reduce(least, minimum, groups.get_model_parallel_group())
        on_this_host = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        available = int(least) // (min(ranks, on_this_host) if device.type == "cpu" else 1)
    weights = weights_bytes(args, dtype=dtype, ranks=ranks, tied=tied, quantize=quantize)
    cache = cache_bytes(args, cache_dtype or dtype, ranks)
    activations = activation_bytes(args, dtype, ranks)
    require(
        weights + cache + activations <= available,
        f"the weights need {format_bytes(weights)}, the cache {format_bytes(cache)} and a pass "
        f"{format_bytes(activations)} on each of {ranks} ranks, and {device} has "
        f"{format_bytes(available)} for each: lower max_seq_len ({args.max_seq_len}), "
        f"max_batch_size ({args.max_batch_size}) or prefill_chunk, choose a smaller dtype than "
        f"{str(dtype).removeprefix('torch.')}, or quantize",
    )


def format_bytes(n_bytes: int) -> str:
    """A size in decimal and in binary units, such as 1.07 GB (1.00 GiB)."""
    return f"{_in_units(n_bytes, DECIMAL_UNITS)} ({_in_units(n_bytes, BINARY_UNITS)})"


def _in_units(n_bytes: int, units: dict[str, int]) -> str:
    unit = next((name for name, size in units.items() if n_bytes >= size), "B")
    return f"{n_bytes} B" if unit == "B" else f"{n_bytes / units[unit]:.2f} {unit}"

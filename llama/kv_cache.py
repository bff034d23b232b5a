"""The KV cache as arithmetic: which slot a position takes, which slots a query sees, what it costs.

Every row of a cache buffer is a ring of `n_slots` slots. The key and value of position p lie in
slot p % n_slots. Without a sliding window there are `max_seq_len` slots and the ring never turns.
"""

from __future__ import annotations

import torch

from llama.errors import require, shown, whole

DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (torch.float32, torch.bfloat16, torch.float16, torch.int8)
}
SCALE_DTYPE = torch.float16  # of the scales of an int8 cache
DECIMAL_UNITS = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "kB": 10**3}
BINARY_UNITS = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


def slot_of(positions: torch.Tensor, n_slots: int) -> torch.Tensor:
    """The slot that each position is written to; any shape."""
    return positions % n_slots


def held_positions(last: torch.Tensor, n_slots: int, kv_len: int) -> torch.Tensor:
    """The position that each of the first `kv_len` slots holds once `last` has been written.

    A negative number means that the slot is empty. `last`: (bsz,); returns (bsz, kv_len).

    Example, a ring of 4 slots: after position 2 the slots hold 0 1 2 and nothing; after
    position 5 they hold 4 5 2 3.

    >>> held_positions(torch.tensor([2, 5]), 4, 4)
    tensor([[ 0,  1,  2, -1],
            [ 4,  5,  2,  3]])
    """
    last = last[:, None]
    slots = torch.arange(kv_len, device=last.device)
    return last - (last - slots) % n_slots


def visible(
    positions: torch.Tensor, n_slots: int, kv_len: int, window: int | None = None
) -> torch.Tensor:
    """The mask rule: may the query at each position see the key in each slot?

    It may if the slot is filled, if its position is not later than the query's, and if it lies
    within the window. What an earlier call left in a slot is therefore never seen.

    `positions`: (bsz, seqlen), not decreasing along a row; returns bool (bsz, seqlen, kv_len).
    """
    held = held_positions(positions[:, -1], n_slots, kv_len)[:, None, :]
    query = positions[:, :, None]
    seen = (held >= 0) & (held <= query)
    if window is not None:
        seen &= held > query - window
    return seen


def n_slots(max_seq_len: int, window: int | None = None, chunk: int | None = None) -> int:
    """The length of a row: with a window no longer than the window and one chunk need."""
    if window is None:
        return max_seq_len
    return min(max_seq_len, window + (chunk or max_seq_len) - 1)


def longest_chunk(n_slots: int, window: int | None) -> int:
    """How many positions one pass may write once the ring turns, so that none is lost too early.

    The first of c queries looks window - 1 positions back, and the last of them has to be there.
    Without a window the ring must not turn: 0.
    """
    return 0 if window is None else max(0, n_slots - window + 1)


# What is in a slot: a key or a value as it is, or in int8 with a scale for each head and position.


def write(
    cache: torch.Tensor,
    scales: torch.Tensor | None,
    x: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Put x (bsz, seqlen, n_kv_heads, head_dim) into a cache buffer, in its dtype.

    `cache`: (max_batch_size, n_slots, n_kv_heads, head_dim); `scales`: without the last axis;
    `rows`, `slots`: broadcastable to (bsz, seqlen).
    """
    if scales is not None:
        scales[rows, slots] = scale_of(x, scales.dtype)
        # Read from the cache, since a compiler that has the number at hand leaves its rounding out.
        x = quantize(x, scales[rows, slots])
    cache[rows, slots] = x.to(cache.dtype)


def read(
    cache: torch.Tensor, scales: torch.Tensor | None, bsz: int, kv_len: int, dtype: torch.dtype
) -> torch.Tensor:
    """The first slots of the first rows, (bsz, n_kv_heads, kv_len, head_dim).

    A view of the buffer, if that has the dtype.
    """
    x = cache[:bsz, :kv_len].to(dtype)
    if scales is not None:
        x *= scales[:bsz, :kv_len, :, None].to(dtype)
    return x.transpose(1, 2)


def scale_of(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What to multiply whole numbers up to 127 by to get heads x (..., head_dim) back, (...,)."""
    # The smallest scale is the smallest float16 above 0: a head of zeros has no scale of its own.
    return (x.abs().amax(-1).float() / 127).clamp_min(2**-24).to(dtype)


def quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x (..., head_dim) as whole numbers from -127 to 127, to be multiplied by scale (...,)."""
    return (x / scale[..., None].float()).round().clamp(-127, 127)


def check_window(max_seq_len: int, window: int | None, chunk: int | None) -> None:
    """Refuse what makes no ring."""
    require(
        window is None or 1 <= (whole(window) or 0) < 2**63,
        f"sliding_window {shown(window)}: it must be a whole number above 0 and below 2**63, "
        "or None for full attention",
    )
    require(
        chunk is None or 1 <= (whole(chunk) or 0) <= max_seq_len,
        f"prefill_chunk {shown(chunk)}: it must be a whole number from 1 to max_seq_len "
        f"({max_seq_len}), or None to read a prompt in one piece",
    )


def checked_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A dtype that a cache can have, by its name too."""
    name = (dtype if isinstance(dtype, str) else shown(dtype)).removeprefix("torch.")
    require(name in DTYPES, f"kv_cache_dtype {shown(name)}: it must be one of {', '.join(DTYPES)}")
    return DTYPES[name]


# What it costs. Everything is counted for one rank.


def cache_bytes(
    n_layers: int,
    n_kv_heads: int,
    head_dim: int,
    *,
    length: int = 1,
    batch: int = 1,
    dtype: torch.dtype = torch.float16,
    ranks: int = 1,
    window: int | None = None,
    chunk: int | None = None,
) -> int:
    """Bytes of the cache: 2 * layers * heads * slots * batch * bytes of a head, for K and V.

    It is a product, so each factor can be left out: per layer with `n_layers=1`, per token without
    a length, per row without a batch.

    Llama 2 7B at 2048 tokens in float16, one layer, then all of them:

    >>> cache_bytes(1, 32, 128, length=2048)
    33554432
    >>> format_bytes(cache_bytes(32, 32, 128, length=2048))
    '1.07 GB (1.00 GiB)'
    """
    slots = n_slots(length, window, chunk)
    return 2 * n_layers * (n_kv_heads // ranks) * slots * batch * head_bytes(head_dim, dtype)


def head_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one head's key, or value, at one position; int8 has a scale beside it."""
    return head_dim * dtype.itemsize + (SCALE_DTYPE.itemsize if dtype == torch.int8 else 0)


def longest_context(
    budget_bytes: int, token_bytes: int, window: int | None = None, chunk: int | None = None
) -> int | None:
    """How many tokens a row can hold; `token_bytes`: of one position in all rows.

    None: with a window that fits there is no end.
    """
    slots = budget_bytes // token_bytes
    return None if window is not None and slots >= window + (chunk or 1) - 1 else slots


def largest_batch(budget_bytes: int, row_bytes: int) -> int:
    """How many rows of this size fit."""
    return budget_bytes // row_bytes


def weights_bytes(
    dim: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    ffn_dim: int,
    vocab_size: int,
    *,
    dtype: torch.dtype = torch.float16,
    ranks: int = 1,
    tied: bool = False,
) -> int:
    """Bytes of a model's parameters. Matrices are split over the ranks, norms are whole on each.

    `tied`: embedding and output are one matrix; on several ranks it is split in two ways, so that
    nothing is shared.
    """
    kv_dim = n_kv_heads * (dim // n_heads)
    layer = 2 * dim * dim + 2 * dim * kv_dim + 3 * dim * ffn_dim
    vocabulary = vocab_size * dim * (1 if tied and ranks == 1 else 2)
    norms = (2 * n_layers + 1) * dim
    return ((n_layers * layer + vocabulary) // ranks + norms) * dtype.itemsize


def format_bytes(n_bytes: int) -> str:
    """A size in decimal and in binary units, such as 1.07 GB (1.00 GiB)."""
    return f"{_in_units(n_bytes, DECIMAL_UNITS)} ({_in_units(n_bytes, BINARY_UNITS)})"


def _in_units(n_bytes: int, units: dict[str, int]) -> str:
    unit = next((name for name, size in units.items() if n_bytes >= size), "B")
    return f"{n_bytes} B" if unit == "B" else f"{n_bytes / units[unit]:.2f} {unit}"

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

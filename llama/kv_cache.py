"""The KV cache as arithmetic: the slot of a position, the slots that a query sees, int8 slots.

Every row of a cache buffer is a ring buffer of `n_slots` slots. Position p is stored in slot
p % n_slots. Without an attention window there are `max_seq_len` slots and the ring never wraps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from llama.errors import require

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8)
}
PREFILL_TOKENS = 2048  # of one pass, if prefill_chunk is not set: bounds activations
SCALE_DTYPE = torch.float16  # of the scales of an int8 cache


def slot_index(positions: torch.Tensor, n_slots: int) -> torch.Tensor:
    """The slot that each position is written to; any shape."""
    return positions % n_slots


def slot_positions(last: torch.Tensor, n_slots: int, kv_len: int) -> torch.Tensor:
    """The position in each of the first `kv_len` slots once position `last` has been written.

    A negative number means that the slot is empty. `last`: (bsz,); returns (bsz, kv_len).

    Example, a ring of 4 slots: after position 2 the slots hold 0 1 2 and nothing; after
    position 5 they hold 4 5 2 3.

    >>> slot_positions(torch.tensor([2, 5]), 4, 4)
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

    It may if the slot is filled, if the key's position is not later than the query's, and if it
    lies within the window. So no query ever sees what an earlier request left in a slot.

    `positions`: (bsz, seqlen), not decreasing along a row; returns bool (bsz, seqlen, kv_len).
    """
    key = slot_positions(positions[:, -1], n_slots, kv_len)[:, None, :]
    query = positions[:, :, None]
    seen = (key >= 0) & (key <= query)
    if window is not None:
        seen &= key > query - window
    return seen


class Segment(NamedTuple):
    """New tokens of one cache row, in a pass that packs several rows."""

    row: int
    start_pos: int
    length: int

    @property
    def end(self) -> int:
        return self.start_pos + self.length


def is_causal(end: int, n_slots: int, window: int | None) -> bool:
    """Is `visible` plain causal attention for all positions below `end`?

    It is if neither the ring has wrapped nor the window hides anything.
    """
    return end <= n_slots and (window is None or end <= window)


def n_slots(max_seq_len: int, window: int | None = None, chunk: int | None = None) -> int:
    """The length of a row: with a window, no longer than the window and one chunk need."""
    if window is None:
        return max_seq_len
    return min(max_seq_len, window + (chunk or max_seq_len) - 1)


def longest_chunk(n_slots: int, window: int | None) -> int:
    """How many positions one pass may write once the ring wraps, so that none is lost too early.

    The first of c queries looks window - 1 positions back, and the last of these must still be
    there. Without a window the ring must not wrap: 0.
    """
    return 0 if window is None else max(0, n_slots - window + 1)


# A slot holds a key or a value as it is, or in int8 with a scale for each head and position.


def write(
    cache: torch.Tensor,
    scales: torch.Tensor | None,
    x: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    active: torch.Tensor | None = None,
) -> None:
    """Put x (bsz, seqlen, n_kv_heads, head_dim) into a cache buffer, in its dtype.

    `cache`: (max_batch_size, n_slots, n_kv_heads, head_dim); `scales`: without the last axis;
    `rows`, `slots`: broadcastable to (bsz, seqlen). Rows that are not `active` (bsz, 1) get back
    what they hold, bit by bit.
    """
    if scales is not None:
        scale = scale_of(x, scales.dtype)
        if active is not None:
            scale = torch.where(active[..., None], scale, scales[rows, slots])
        scales[rows, slots] = scale
        # Read it back: a compiler that has the number at hand skips the rounding.
        x = quantize(x, scales[rows, slots])
    x = x.to(cache.dtype)
    if active is not None:
        x = torch.where(active[..., None, None], x, cache[rows, slots])
    cache[rows, slots] = x


def read(
    cache: torch.Tensor,
    scales: torch.Tensor | None,
    rows: slice | torch.Tensor,
    kv_len: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The first slots of some rows, (bsz, n_kv_heads, kv_len, head_dim).

    A view of the buffer if `rows` is a slice and the cache has the dtype, else a copy.
    """
    x = cache[rows, :kv_len].to(dtype)
    if scales is not None:
        x *= scales[rows, :kv_len, :, None].to(dtype)
    return x.transpose(1, 2)


def scale_of(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The factor that maps integers up to 127 back to heads x (..., head_dim): (...,)."""
    # The smallest scale is the smallest float16 above 0, which a head of zeros gets.
    return (x.abs().amax(-1).float() / 127).clamp_min(2**-24).to(dtype)


def quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x (..., head_dim) as integers from -127 to 127, to be multiplied by scale (...,)."""
    return (x / scale[..., None].float()).round().clamp(-127, 127)


def check_sizes(
    max_batch_size: int, max_seq_len: int, window: int | None, chunk: int | None
) -> None:
    """Refuse sizes that make no cache."""
    for name, size in (("max_batch_size", max_batch_size), ("max_seq_len", max_seq_len)):
        require(1 <= size < 2**63, f"{name} {size!r:.80}: it must be an integer above 0")
    require(
        window is None or 1 <= window < 2**63,
        f"sliding_window {window!r:.80}: it must be an integer above 0 and below 2**63, "
        "or None for full attention",
    )
    require(
        chunk is None or 1 <= chunk <= max_seq_len,
        f"prefill_chunk {chunk!r:.80}: it must be an integer from 1 to max_seq_len "
        f"({max_seq_len}), or None for the default",
    )


def checked_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A dtype that a cache can have, also by its name."""
    name = str(dtype).removeprefix("torch.")
    require(name in DTYPES, f"kv_cache_dtype {name!r:.80}: it must be one of {', '.join(DTYPES)}")
    return DTYPES[name]

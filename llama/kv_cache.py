"""The KV cache as arithmetic: which slot a position takes, and which slots a query sees.

Every row of a cache buffer is a ring of `n_slots` slots. The key and value of position p lie in
slot p % n_slots. Without a sliding window there are `max_seq_len` slots and the ring never turns.
"""

from __future__ import annotations

import torch


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

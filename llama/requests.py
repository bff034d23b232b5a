"""What a call asks for, checked: prompts as rows of a batch, with a limit for each."""

from __future__ import annotations

from collections.abc import Sequence

from llama.engine import Row
from llama.errors import checked_ids, checked_list, checked_whole, require
from llama.model import ModelArgs


def checked_limit(max_gen_len: int | None) -> int | None:
    """`max_gen_len` as a number of new tokens; None: as many as there is room for."""
    return None if max_gen_len is None else checked_whole(max_gen_len, "max_gen_len")


def batch_rows(
    prompts: Sequence[Sequence[int]], max_gen_len: int | None, args: ModelArgs
) -> list[Row]:
    """The rows of one batch."""
    prompts = [
        checked_list(ids, f"prompt {i}")
        for i, ids in enumerate(checked_list(prompts, "prompt_tokens"))
    ]
    require(len(prompts) > 0, "there are no prompts: pass at least one list of token ids")
    require(
        len(prompts) <= args.max_batch_size,
        f"{len(prompts)} prompts, and max_batch_size is {args.max_batch_size}: "
        "pass fewer at a time, or build with a larger max_batch_size",
    )
    return [prompt_row(f"prompt {i}", ids, max_gen_len, args) for i, ids in enumerate(prompts)]


def prompt_row(name: str, ids: Sequence[int], max_gen_len: int | None, args: ModelArgs) -> Row:
    """A prompt that fits, and how many tokens may follow it."""
    prompt = checked_ids(ids, name, args.vocab_size)
    require(len(prompt) > 0, f"{name} is empty: it needs at least one token, such as BOS")
    max_gen_len = checked_limit(max_gen_len)
    if args.longest_chunk > 0:  # the ring may turn: there is no bound
        return Row(prompt, args.max_seq_len if max_gen_len is None else max_gen_len)
    room = args.max_seq_len - len(prompt)
    require(
        room >= 0,
        f"{name} has {len(prompt)} tokens, and max_seq_len is {args.max_seq_len}: "
        "shorten it, or build with a larger max_seq_len",
    )
    require(
        args.sliding_window is None or (max_gen_len or 0) <= room,
        f"{name} has {len(prompt)} tokens and max_gen_len is {max_gen_len}, and a window of "
        f"{args.sliding_window} does not slide in a max_seq_len of {args.max_seq_len}: "
        "build with a larger max_seq_len, or a smaller sliding_window",
    )
    return Row(prompt, room if max_gen_len is None else min(max_gen_len, room))

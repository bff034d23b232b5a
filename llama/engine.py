"""The loop: prefill the prompts, then sample a token for each row, advance, feed, and again.

A batch is a list of `Row`s. Row i lies in row i of the cache, at its own position; what a `Row`
becomes is written into it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from llama import sampling
from llama.errors import LlamaError
from llama.model import ModelArgs, Transformer
from llama.prefix_cache import CacheRecord

FinishReason = Literal["stop", "length"]


@dataclass
class Row:
    """One prompt of a batch, and what has become of it."""

    prompt: list[int]
    limit: int  # how many tokens may be generated
    tokens: list[int] = field(default_factory=list)  # generated, without the one that stopped it
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=lambda: [0.0])  # position 0 has none
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self._end_at_limit()

    def advance(self, token: int, logprob: float | None, stop_tokens: frozenset[int]) -> int | None:
        """Take the token in; returns it, or None if the row has ended, with it or before."""
        if not self.is_running:
            return None
        if token in stop_tokens:
            self.finish_reason = "stop"
            return None
        self.tokens.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        self._end_at_limit()
        return token

    def _end_at_limit(self) -> None:
        if len(self.tokens) >= self.limit:
            self.finish_reason = "length"

    def score(self, start: int, logits: torch.Tensor) -> None:
        """Take in the logits (seqlen, vocab_size) of the prompt from position `start` on."""
        targets = self.prompt[start + 1 : start + 1 + len(logits)]
        if targets:
            ids = torch.tensor(targets, device=logits.device)
            self.prompt_logprobs += sampling.token_logprobs(logits[: len(ids)], ids).tolist()

    @property
    def is_running(self) -> bool:
        return self.finish_reason is None

    def all_logprobs(self, echo: bool) -> list[float]:
        return self.prompt_logprobs * echo + self.logprobs

    @property
    def has_finite_prompt(self) -> bool:
        return all(math.isfinite(value) for value in self.prompt_logprobs)


@dataclass(frozen=True)
class Sampling:
    """How a call draws its tokens."""

    temperature: float
    top_p: float
    generator: torch.Generator


@torch.inference_mode()
def decode(
    model: Transformer,
    record: CacheRecord,
    rows: Sequence[Row],
    how: Sampling,
    *,
    n_words: int,
    stop_tokens: frozenset[int],
    logprobs: bool = False,
    score: bool = False,
    agree: Callable[[torch.Tensor], None] | None = None,
    step: Callable[..., torch.Tensor] | None = None,
) -> Iterator[list[int | None]]:
    """Generate for a batch: fill in its rows, and yield the new token of each after each step.

    A row that has ended yields None; the caller may end one between two steps by giving it a
    finish reason. Only ids below `n_words` are drawn. `logprobs`, `score`: fill in those of the
    generated tokens, and those of the prompts. `step`: the model, compiled for one new token.
    """
    with record.watch(model):
        logits = prefill(model, record, rows, score=score)
        # A row that has ended reads its last token again at its own position, which changes
        # nothing, until all have ended.
        device = logits.device
        tokens = torch.tensor([row.prompt[-1] for row in rows], device=device)
        positions = torch.tensor([len(row.prompt) - 1 for row in rows], device=device)
        running = [row.is_running for row in rows]
        advance = torch.tensor(running, device=device)
        while any(running):
            chosen = sampling.sample(logits[:, :n_words], how.temperature, how.top_p, how.generator)
            if agree is not None:
                agree(chosen)
            ids = chosen.tolist()  # the one time that a step waits for the device
            check_finite(model, record, sampling.NOT_FINITE not in ids)
            values: Sequence[float | None] = [None] * len(rows)
            if logprobs:
                values = sampling.token_logprobs(logits, chosen).tolist()
            news = zip(rows, ids, values, strict=True)
            yield [row.advance(id, value, stop_tokens) for row, id, value in news]
            still = [row.is_running for row in rows]
            if still != running:
                running, advance = still, torch.tensor(still, device=device)
            if any(running):
                tokens = torch.where(advance, chosen, tokens)
                positions = positions + advance
                logits = feed(model, record, rows, tokens, positions, step or model)


def prefill(
    model: Transformer, record: CacheRecord, rows: Sequence[Row], *, score: bool
) -> torch.Tensor:
    """Read the prompts, all rows at once, each from where its cache ends.

    Returns the logits of each row's last token, (bsz, vocab_size).
    """
    args, prompts = model.params, [row.prompt for row in rows]
    starts = [0 if score else record.reusable(i, p, args.n_slots) for i, p in enumerate(prompts)]
    while True:
        pieces = [p[s : s + chunk_len(args, s)] for p, s in zip(prompts, starts, strict=True)]
        logits = read(model, record, starts, pieces, only_last=not score)
        if score:
            for row, s, row_logits in zip(rows, starts, logits, strict=True):
                row.score(s, row_logits)
        ends = [s + len(piece) for s, piece in zip(starts, pieces, strict=True)]
        if all(end == len(row.prompt) for end, row in zip(ends, rows, strict=True)):
            check_finite(model, record, all(row.has_finite_prompt for row in rows))
            return logits[:, -1]
        # A row that is through with its prompt reads the last token again meanwhile.
        starts = [min(end, len(row.prompt) - 1) for end, row in zip(ends, rows, strict=True)]


def chunk_len(args: ModelArgs, start: int) -> int:
    """How many tokens of a prompt one pass may read from position `start` on."""
    return min(args.prefill_chunk or args.n_slots, max(args.n_slots - start, args.longest_chunk))


def read(
    model: Transformer,
    record: CacheRecord,
    starts: Sequence[int],
    pieces: Sequence[Sequence[int]],
    *,
    only_last: bool,
) -> torch.Tensor:
    """One pass over a piece of each row's prompt; the record follows what the cache holds."""
    for i, start in enumerate(starts):
        record.truncate(i, start)
    device = model.rope_freqs.device
    lengths = [len(piece) for piece in pieces]
    width = max(lengths)
    padded = [[*piece, *[0] * (width - len(piece))] for piece in pieces]
    with record.write():
        logits = model(
            torch.tensor(padded, device=device),
            torch.tensor(starts, device=device),
            lengths=None if min(lengths) == width else torch.tensor(lengths, device=device),
            kv_len=min(max(map(operator.add, starts, lengths)), model.params.n_slots),
            only_last=only_last,
        )
    for i, piece in enumerate(pieces):
        record.extend(i, piece)
    return logits


def feed(
    model: Transformer,
    record: CacheRecord,
    rows: Sequence[Row],
    tokens: torch.Tensor,
    positions: torch.Tensor,
    step: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """One pass over the newest token of each row: the next logits, (bsz, vocab_size)."""
    longest = max(len(row.prompt) + len(row.tokens) for row in rows)
    kv_len = min(longest, model.params.n_slots)
    with record.write():
        logits = step(tokens[:, None], positions, kv_len=kv_len, only_last=True)
    for i, row in enumerate(rows):
        if row.is_running:
            record.extend(i, row.tokens[-1:])
    return logits[:, -1]


def clear_cache(model: Transformer, record: CacheRecord) -> None:
    """Zero the cache and forget what it held."""
    record.forget()
    for attention in model.attentions:
        attention.clear_cache()


def check_finite(model: Transformer, record: CacheRecord, finite: bool) -> None:
    """Refuse to go on with infinities or NaNs, and clear the cache, whose mask they get through."""
    if not finite:
        clear_cache(model, record)
        raise LlamaError(
            f"the logits are not finite in {model.norm.weight.dtype}: the checkpoint may be "
            "damaged, or the dtype too narrow for it: try dtype='float32' (or 'bfloat16')"
        )

"""A request: one prompt within bounds, how to continue it, and what becomes known of its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Literal

import torch

from llama.detokenizer import Detokenizer
from llama.errors import LlamaError, require
from llama.model import ModelArgs
from llama.sampling import Draws, SamplingParams, top_logprobs

FinishReason = Literal["stop", "length"]

READ_AHEAD = 16  # tokens that a stream may be ahead of its reader


@dataclass(eq=False)
class Request:
    """One prompt, and what becomes known of its answer."""

    prompt: list[int]
    params: SamplingParams
    limit: int  # tokens that may be generated
    draws: Draws | Callable[[], Draws]  # made when it is first needed
    index: int = 0  # its row in the draws
    stop_tokens: frozenset[int] = frozenset()  # EOS excluded
    detokenizer: Detokenizer | None = None
    read_ahead: int | None = None  # unread tokens at which the request pauses; None: never
    wants_hidden_states: bool = False

    tokens: list[int] = field(default_factory=list)  # without the one that ended the answer
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=lambda: [0.0])  # position 0 has none
    prompt_top_logprobs: list[dict[int, float]] = field(default_factory=lambda: [{}])
    hidden_states: list[torch.Tensor] = field(default_factory=list)
    n_reused: int = 0  # tokens of the prompt that the cache held already
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop id or stop string; None for EOS and length
    error: Exception | None = None
    row: int | None = None
    n_read: int = 0  # tokens that the reader has taken
    paused_at: int = 0

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.tokens

    @property
    def newest(self) -> int:
        return self.tokens[-1] if self.tokens else self.prompt[-1]

    def draw(self, n_words: int) -> torch.Tensor:
        """The random numbers of its next token, (n_words,)."""
        if not isinstance(self.draws, Draws):
            self.draws = self.draws()
        return self.draws.row(len(self.tokens), self.index, n_words)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def is_paused(self) -> bool:
        return self.read_ahead is not None and len(self.tokens) - self.n_read >= self.read_ahead

    @property
    def reads_every_position(self) -> bool:
        """Does it need a result for each token of the prompt?"""
        return not self.tokens and (self.params.prompt_logprobs or self.wants_hidden_states)

    def push(self, token: int, logprob: float | None, logits: torch.Tensor) -> None:
        """Take in a token of the answer, its log-probability, and the logits (n_words,)."""
        self.tokens.append(token)
        if logprob is not None and self.params.logprobs:
            self.logprobs.append(logprob)
        if self.params.top_logprobs:
            self.top_logprobs += top_logprobs(logits[None], self.params.top_logprobs)
        if self.detokenizer is not None:
            self.detokenizer.push(token)

    def finish(self, reason: FinishReason, stop: int | str | None = None) -> None:
        if self.detokenizer is not None:
            self.detokenizer.finish()
            if self.detokenizer.stop is not None:  # perhaps only in the text that was held back
                reason, stop = "stop", self.detokenizer.stop
        self.draws = _no_draws  # of a vocabulary each, and there may be many requests
        self.stop_reason, self.finish_reason = stop, reason  # readers look at the last one

    def raise_error(self) -> None:
        """Raise what went wrong, in the caller's own thread."""
        if self.error is not None:
            raise self.error

    def all_logprobs(self, echo: bool) -> list[float]:
        return (self.prompt_logprobs if echo else []) + self.logprobs

    def all_top_logprobs(self, echo: bool) -> list[dict[int, float]]:
        return (self.prompt_top_logprobs if echo else []) + self.top_logprobs


def _no_draws() -> Draws:
    raise AssertionError("the request has ended")


def checked_ids(ids: Iterable[int], name: str, vocab_size: int) -> list[int]:
    """Token ids as a list of ints; tensors and arrays are welcome."""
    try:
        checked = [index(id) for id in ids]
    except TypeError as error:  # a list in a list, or a text
        raise LlamaError(f"{name} holds more than integers: pass a list of token ids") from error
    wrong = next((id for id in checked if not 0 <= id < vocab_size), None)
    require(
        wrong is None, f"token {wrong!r:.40} of {name}: pass integers from 0 to {vocab_size - 1}"
    )
    return checked


def answer_limit(name: str, n_tokens: int, max_gen_len: int | None, args: ModelArgs) -> int:
    """How many tokens may follow a prompt of `n_tokens`, which must fit."""
    require(n_tokens > 0, f"{name} is empty: it needs at least one token, such as BOS")
    if args.longest_chunk > 0:  # the ring may wrap: there is no limit
        return args.max_seq_len if max_gen_len is None else max_gen_len
    room = args.max_seq_len - n_tokens
    require(
        room >= 0,
        f"{name} has {n_tokens} tokens, and max_seq_len is {args.max_seq_len}: "
        "shorten it, or build with a larger max_seq_len",
    )
    require(
        args.sliding_window is None or (max_gen_len or 0) <= room,
        f"{name} has {n_tokens} tokens and max_gen_len is {max_gen_len}, and a window of "
        f"{args.sliding_window} does not slide in a max_seq_len of {args.max_seq_len}: "
        "build with a larger max_seq_len, or a smaller sliding_window",
    )
    return room if max_gen_len is None else min(max_gen_len, room)


def chunk_len(args: ModelArgs, start_pos: int) -> int:
    """How many tokens of one prompt a pass may read from position `start_pos` on."""
    return min(
        args.prefill_chunk or args.n_slots, max(args.n_slots - start_pos, args.longest_chunk)
    )


def draw_waits(requests: Sequence[Request], logits: torch.Tensor) -> torch.Tensor | None:
    """The waiting times of each request's next draw (len(requests), n); None if all are greedy."""
    if all(request.params.temperature == 0 for request in requests):
        return None
    unused = torch.ones_like(logits[0])
    return torch.stack(
        [
            unused if request.params.temperature == 0 else request.draw(logits.shape[-1])
            for request in requests
        ]
    )

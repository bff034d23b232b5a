"""What the calls return."""

from __future__ import annotations

from typing import TypedDict

from llama.chat import UNSAFE_ERROR, Message
from llama.requests import FinishReason, Request


class Details(TypedDict, total=False):
    """What a prediction says besides its text."""

    finish_reason: FinishReason | None
    stop_reason: int | str | None  # the stop string that ended it
    tokens: list[str]  # with logprobs=True; they join to the generated text
    logprobs: list[float]  # with logprobs=True; one for each of `tokens`


class CompletionPrediction(Details, total=False):
    """A text continued."""

    generation: str


class ChatPrediction(Details, total=False):
    """A dialog answered."""

    generation: Message


class StreamResult(TypedDict):
    """What `stream` returns at its end, for each prompt."""

    finish_reasons: list[FinishReason | None]
    stop_reasons: list[int | str | None]
    logprobs: list[list[float]] | None


def prediction(request: Request, *, echo: bool = False) -> CompletionPrediction:
    """What a finished request of text returns."""
    assert request.detokenizer is not None
    found: CompletionPrediction = {
        "generation": request.detokenizer.text,
        "finish_reason": request.finish_reason,
        "stop_reason": request.stop_reason,
    }
    if request.params.logprobs:
        pieces = request.detokenizer.pieces
        found |= {"tokens": pieces, "logprobs": request.all_logprobs(echo)[: len(pieces)]}
    return found


def refusal(*, logprobs: bool) -> CompletionPrediction:
    """An answer that the model was not asked for."""
    found: CompletionPrediction = {"generation": UNSAFE_ERROR, "finish_reason": "stop"}
    return {**found, "tokens": [], "logprobs": []} if logprobs else found

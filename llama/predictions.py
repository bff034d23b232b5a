"""What the calls return."""

from __future__ import annotations

from typing import TypedDict

from llama.chat import Message
from llama.detokenizer import Detokenizer
from llama.engine import FinishReason, Row


class Details(TypedDict, total=False):
    """What a prediction has beside its text."""

    finish_reason: FinishReason | None
    tokens: list[str]  # with logprobs=True; they join to the generated text
    logprobs: list[float]  # with logprobs=True; one for each of `tokens`


class CompletionPrediction(Details, total=False):
    """A text continued."""

    generation: str


class ChatPrediction(Details, total=False):
    """A dialog answered."""

    generation: Message


class StreamResult(TypedDict):
    """What `stream` returns at its end, for each row."""

    finish_reasons: list[FinishReason | None]
    logprobs: list[list[float]] | None


def prediction(
    row: Row, text: Detokenizer, *, logprobs: bool = False, echo: bool = False
) -> CompletionPrediction:
    """What has become of a row."""
    found: CompletionPrediction = {"generation": text.text, "finish_reason": row.finish_reason}
    if logprobs:
        pieces = text.pieces
        found |= {"tokens": pieces, "logprobs": row.all_logprobs(echo)[: len(pieces)]}
    return found


def refusal(text: str, *, logprobs: bool = False) -> CompletionPrediction:
    """An answer for which the model was not asked."""
    found: CompletionPrediction = {"generation": text, "finish_reason": "stop"}
    if logprobs:
        found |= {"tokens": [], "logprobs": []}
    return found

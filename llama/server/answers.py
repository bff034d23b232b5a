"""Finished and unfinished requests as OpenAI's JSON."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from llama.requests import Request
from llama.tokenizer import BaseTokenizer

LEAST_LOGPROB = -9999.0  # JSON has no infinity


class Answer:
    """The choices of one call, whole or in chunks. `is_chat`: of chat completions."""

    def __init__(
        self,
        requests: Sequence[Request],
        tokenizer: BaseTokenizer,
        model: str,
        *,
        is_chat: bool,
        n: int,
        echo: bool = False,
    ) -> None:
        self.requests, self._tokenizer, self._n = requests, tokenizer, n
        self._is_chat, self._echo = is_chat, echo
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        # Of each choice: characters and tokens that chunks have had, and whether it has ended.
        self._sent = [(0, 0, False)] * len(requests)

    def whole(self) -> dict[str, Any]:
        choices = []
        for i, request in enumerate(self.requests):
            text = _text(request)
            body = (
                {"message": {"role": "assistant", "content": text}}
                if self._is_chat
                else {"text": text}
            )
            logprobs = self._logprobs(request, 0, None)
            reason = request.finish_reason
            choices.append({"index": i, **body, "logprobs": logprobs, "finish_reason": reason})
        return {**self._head, "choices": choices, "usage": self.usage()}

    def first_chunks(self) -> Iterator[str]:
        """What a chat's stream begins with."""
        for i in range(len(self.requests)) if self._is_chat else ():
            yield self._chunk(i, {"delta": {"role": "assistant", "content": ""}}, None, None)

    def chunks(self) -> Iterator[str]:
        """An event for each choice that has something new."""
        for i, request in enumerate(self.requests):
            n_chars, n_tokens, has_ended = self._sent[i]
            if has_ended:
                continue
            is_finished = request.is_finished  # looked at before the text, which it completes
            text = _text(request)
            until = _n_released(request, len(text), is_finished)
            piece = text[n_chars:]
            if piece or is_finished:
                body = (
                    {"delta": {"content": piece} if piece else {}}
                    if self._is_chat
                    else {"text": piece}
                )
                reason = request.finish_reason if is_finished else None
                yield self._chunk(i, body, self._logprobs(request, n_tokens, until), reason)
                self._sent[i] = len(text), until, is_finished

    def usage_chunk(self) -> str:
        return _event({**self._chunk_head, "choices": [], "usage": self.usage()})

    def usage(self) -> dict[str, Any]:
        """Token counts; a prompt with several choices counts once."""
        prompts = self.requests[:: self._n]
        prompt = sum(len(request.prompt) for request in prompts)
        completion = sum(len(request.tokens) for request in self.requests)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(r.n_reused for r in prompts)},
        }

    @property
    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"} if self._is_chat else self._head

    def _chunk(self, i: int, body: dict[str, Any], logprobs: Any, reason: str | None) -> str:
        choice = {"index": i, **body, "logprobs": logprobs, "finish_reason": reason}
        return _event({**self._chunk_head, "choices": [choice]})

    def _logprobs(self, request: Request, start: int, end: int | None) -> dict[str, Any] | None:
        """Of the tokens from `start` to `end`, prompt included where it is echoed."""
        if not request.params.logprobs:
            return None
        assert request.detokenizer is not None
        pieces = list(request.detokenizer.pieces)
        ids = request.ids if self._echo else request.tokens
        values: list[float | None] = list(request.all_logprobs(self._echo))
        tops: list[dict[int, float] | None] = list(request.all_top_logprobs(self._echo))
        if self._echo:
            values[0] = tops[0] = None
        if not request.params.top_logprobs:
            tops = [None] * len(ids)
        part = slice(start, len(pieces) if end is None else end)
        if self._is_chat:
            found = zip(ids[part], values[part], tops[part], strict=False)
            return {"content": [self._token(*facts) for facts in found], "refusal": None}
        offsets = [0]
        for piece in pieces:
            offsets.append(offsets[-1] + len(piece))
        return {
            "tokens": pieces[part],
            "token_logprobs": [None if v is None else max(v, LEAST_LOGPROB) for v in values[part]],
            "top_logprobs": [top and self._by_text(top) for top in tops[part]],
            "text_offset": offsets[:-1][part],
        }

    def _by_text(self, top: dict[int, float]) -> dict[str, float]:
        by_text: dict[str, float] = {}
        for id, value in top.items():  # the most likely first
            by_text.setdefault(self._token_text(id), max(value, LEAST_LOGPROB))
        return by_text

    def _token(self, id: int, value: float | None, top: dict[int, float] | None) -> dict[str, Any]:
        entry = {
            "token": self._token_text(id),
            "logprob": max(value or 0.0, LEAST_LOGPROB),
            "bytes": list(self._tokenizer.token_bytes(id)),
        }
        if top is None:
            return entry
        tops = [self._token(other, logprob, None) for other, logprob in top.items()]
        return {**entry, "top_logprobs": tops}

    def _token_text(self, id: int) -> str:
        return self._tokenizer.token_bytes(id).decode("utf-8", "replace")


def _text(request: Request) -> str:
    assert request.detokenizer is not None
    return request.detokenizer.text


def _n_released(request: Request, n_chars: int, is_finished: bool) -> int:
    """How many tokens lie within the first `n_chars` of the text."""
    assert request.detokenizer is not None
    pieces = list(request.detokenizer.pieces)
    if is_finished or not request.params.logprobs:
        return len(pieces)
    total = 0
    for i, piece in enumerate(pieces):
        total += len(piece)
        if total > n_chars:
            return i
    return len(pieces)


def _event(payload: dict[str, Any]) -> str:
    return f"data: {json.dumps(payload)}\n\n"


def error_body(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def error_event(message: str) -> str:
    """An error in the middle of a stream, as a server-sent event."""
    return _event(error_body(500, message))

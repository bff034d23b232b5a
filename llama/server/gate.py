"""What a call passes before the app sees it: its key, its size, its time; and its count."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Callable
from typing import Any

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llama.server.answers import error_body

OPEN_PATHS = ("/", "/health")  # without a key
BODY_TIMEOUT_S = 30


class Gate:
    """ASGI middleware. `count(path, status)` is called for each answer."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str | None,
        max_body_bytes: int,
        count: Callable[[str, int], None],
    ) -> None:
        self.app, self.count = app, count
        self.key = None if api_key is None else f"Bearer {api_key}".encode()
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.count(scope["path"], message["status"])
            await send(message)

        headers = dict(scope["headers"])
        key = headers.get(b"authorization", b"")
        if self.key and scope["path"] not in OPEN_PATHS and not hmac.compare_digest(key, self.key):
            text = "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'"
            return await _refuse(counted, 401, text, "invalid_api_key")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > self.max_body_bytes:
            return await _refuse(counted, 413, self._too_large())
        return await self.app(scope, self._bounded(receive), counted)

    def _bounded(self, receive: Receive) -> Receive:
        n_bytes, is_complete = 0, False

        async def bounded() -> Message:
            nonlocal n_bytes, is_complete
            if is_complete:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), BODY_TIMEOUT_S)
            except asyncio.TimeoutError as error:
                text = f"no part of the body came within {BODY_TIMEOUT_S} s: send it again"
                raise HTTPException(408, text) from error
            n_bytes += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            if n_bytes > self.max_body_bytes:
                raise HTTPException(413, self._too_large())
            return message

        return bounded

    def _too_large(self) -> str:
        return f"the body is larger than {self.max_body_bytes} bytes: send less"


async def _refuse(send: Send, status: int, message: str, code: str | None = None) -> None:
    body = json.dumps(error_body(status, message, code)).encode()
    headers: list[tuple[bytes, Any]] = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

"""An HTTP server with OpenAI's API, and a page to chat with: `python -m llama serve`."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import struct
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import prometheus_client as prometheus
import torch
from fastapi import FastAPI, HTTPException
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException as AnyHTTPException

from llama.chat import UNSAFE_ERROR
from llama.errors import LlamaError, require
from llama.generation import Llama
from llama.requests import Request
from llama.sampling import SamplingParams
from llama.server import schema
from llama.server.answers import Answer, error_body, error_event
from llama.server.gate import Gate
from llama.server.metrics import Metrics
from llama.server.runner import Job, QueueFull, Runner

PAGE = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
MAX_BODY_BYTES = 8 * 2**20
SSE_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class Json(Response):
    """Without characters that UTF-8 lacks, which a client's text may hold."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


class ApiError(HTTPException):
    """An answer other than 200, with OpenAI's code for it."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str) -> None:
        super().__init__(status, message, headers or None)
        self.code = code


class Server:
    """The calls of the API, on one model."""

    def __init__(self, llama: Llama, name: str, *, max_queue: int, timeout_s: float = 600) -> None:
        self.llama, self.name = llama, name
        self.args, self.tokenizer = llama.model.params, llama.tokenizer
        self.runner = Runner(llama, max_queue=max_queue, timeout_s=timeout_s)
        self.metrics = Metrics(self.runner)
        self.started = int(time.time())

    @property
    def context(self) -> int | None:
        """The most tokens of prompt and answer; None: no limit."""
        return None if self.args.longest_chunk else self.args.max_seq_len

    def model(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self.started,
            "owned_by": "llama",
            "max_model_len": self.args.max_seq_len,
        }

    async def chat(self, body: schema.Chat, http: HttpRequest) -> Response:
        dialog = [message.message() for message in body.messages]
        n, seed = body.n or 1, body.first_seed()
        limit = (
            body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        )
        asked = {"max_gen_len": limit, "logprobs": bool(body.logprobs)}
        if body.logprobs:
            asked["top_logprobs"] = body.top_logprobs or 0

        def jobs() -> list[Job]:
            chat_format = self.llama.chat_format
            chat_format.check(dialog, 0)
            require(not chat_format.has_tags(dialog), UNSAFE_ERROR)
            ids = self.fitting(chat_format.encode(dialog), limit)
            return [
                Job("the dialog", ids, body.params(i, seed, **asked), is_stream=bool(body.stream))
                for i in range(n)
            ]

        return await self._answer(body, http, jobs, is_chat=True, n=n)

    async def complete(self, body: schema.Completion, http: HttpRequest) -> Response:
        n, seed, echo = body.n or 1, body.first_seed(), bool(body.echo)
        require(body.best_of in (None, n), f"best_of {body.best_of}: it must equal n ({n})")
        limit = 16 if body.max_tokens is None else body.max_tokens
        asked: dict[str, Any] = {"max_gen_len": limit}
        if body.logprobs is not None:
            asked |= {"logprobs": True, "top_logprobs": body.logprobs, "prompt_logprobs": echo}

        def jobs() -> list[Job]:
            prompts = [self.fitting(ids, limit) for ids in self.encode(body.prompt)]
            return [
                Job(
                    f"prompt {i}",
                    ids,
                    body.params(i * n + j, seed, **asked),
                    echo=echo,
                    keep_space=not echo,
                    is_stream=bool(body.stream),
                )
                for i, ids in enumerate(prompts)
                for j in range(n)
            ]

        return await self._answer(body, http, jobs, is_chat=False, n=n, echo=echo)

    async def embed(self, body: schema.Embeddings, http: HttpRequest) -> Response:
        """The final hidden states of each input: their mean or the last, of length 1."""
        self.require_model(body.model)
        params = SamplingParams(temperature=0, max_gen_len=0)

        def jobs() -> list[Job]:
            inputs = [self.fitting(ids, 0) for ids in self.encode(body.input)]
            return [
                Job(f"input {i}", ids, params, wants_hidden_states=True)
                for i, ids in enumerate(inputs)
            ]

        requests = await self._run(http, *await self._prepare(jobs))
        data = []
        for i, request in enumerate(requests):
            h = torch.cat(request.hidden_states)
            pooled = h.mean(0) if body.pooling == "mean" else h[-1]
            values: Any = torch.nn.functional.normalize(pooled, dim=0).tolist()
            if body.encoding_format == "base64":
                values = base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
            data.append({"object": "embedding", "index": i, "embedding": values})
        n_tokens = sum(len(request.prompt) for request in requests)
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        return Json({"object": "list", "data": data, "model": self.name, "usage": usage})

    def encode(self, prompt: str | list[Any]) -> list[list[int]]:
        """Texts, or ids, or a list of either, as lists of ids."""
        prompts = prompt if isinstance(prompt, list) and not _is_ids(prompt) else [prompt]
        return [p if isinstance(p, list) else self.tokenizer.encode(p, bos=True) for p in prompts]

    def fitting(self, ids: list[int], limit: int | None) -> list[int]:
        """`ids`, which leave room for at least one token, unless none is wanted."""
        most = self.context
        if most is not None and len(ids) > most - (limit != 0):
            raise ApiError(
                400,
                f"the prompt has {len(ids)} tokens, and the context {most}: shorten it, or start "
                "the server with a larger --max_seq_len",
                "context_length_exceeded",
            )
        return ids

    def require_model(self, name: str | None) -> None:
        if name not in (None, self.name):
            raise ApiError(
                404, f"the model {name!r:.80} does not exist: use {self.name!r}", "model_not_found"
            )

    async def _answer(
        self,
        body: schema.Generation,
        http: HttpRequest,
        jobs: Callable[[], list[Job]],
        *,
        is_chat: bool,
        n: int,
        echo: bool = False,
    ) -> Response:
        self.require_model(body.model)
        prepared, requests = await self._prepare(jobs)
        answer = Answer(requests, self.tokenizer, self.name, is_chat=is_chat, n=n, echo=echo)
        if body.stream:
            has_usage = body.stream_options is not None and body.stream_options.include_usage
            progress = self.metrics.observed(prepared, requests)
            await anext(progress)  # queued, or refused
            events = self._events(progress, answer, has_usage)
            return StreamingResponse(events, media_type="text/event-stream", headers=SSE_HEADERS)
        await self._run(http, prepared, requests)
        return Json(answer.whole())

    async def _prepare(self, jobs: Callable[[], list[Job]]) -> tuple[list[Job], list[Request]]:
        """Encode and check, in a thread: a long text takes a while."""
        if self.runner.failure is not None:
            raise ApiError(503, "the server has failed: restart it")

        def both() -> tuple[list[Job], list[Request]]:
            made = jobs()
            return made, [job.request(self.llama) for job in made]

        return await asyncio.to_thread(both)

    async def _run(
        self, http: HttpRequest, jobs: Sequence[Job], requests: list[Request]
    ) -> list[Request]:
        """Run requests to their end, or until the client leaves."""

        async def run() -> None:
            async for _ in self.metrics.observed(jobs, requests):
                pass

        async def leave() -> None:
            while (await http.receive())["type"] != "http.disconnect":
                pass

        tasks = asyncio.create_task(run()), asyncio.create_task(leave())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():
                raise ApiError(499, "the client has left")
            error = tasks[0].exception()
            if error is not None and not isinstance(error, QueueFull):
                raise ApiError(500, str(error)) from error  # the engine's, not the caller's
            tasks[0].result()
            return requests
        finally:
            for task in tasks:
                task.cancel()

    async def _events(
        self, progress: AsyncIterator[None], answer: Answer, has_usage: bool
    ) -> AsyncIterator[str]:
        for chunk in answer.first_chunks():
            yield chunk
        try:
            async for _ in progress:
                for chunk in answer.chunks():
                    yield chunk
        except Exception as error:
            yield error_event(str(error))
            return
        if has_usage:
            yield answer.usage_chunk()
        yield "data: [DONE]\n\n"


def _is_ids(prompt: list[Any]) -> bool:
    return not prompt or isinstance(prompt[0], int)


def page_response() -> HTMLResponse:
    """The chat page, which may load nothing from elsewhere and run no script but its own."""
    script = re.search(r"<script>(.*)</script>", PAGE, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
    return HTMLResponse(PAGE, headers=headers)


def make_app(
    server: Server,
    *,
    api_key: str | None = None,
    cors: str | None = None,
    on_failure: Callable[[], None] = lambda: None,
) -> FastAPI:
    """The routes of a server."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        thread = server.runner.start(on_failure)
        yield
        server.runner.close()
        await asyncio.to_thread(thread.join)

    app = FastAPI(
        title="llama", lifespan=lifespan, docs_url=None, redoc_url=None, default_response_class=Json
    )
    paths = {"/", "/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/embeddings"}

    def count(path: str, status: int) -> None:
        server.metrics.requests.labels(path if path in paths else "other", status).inc()

    app.add_middleware(Gate, api_key=api_key, max_body_bytes=MAX_BODY_BYTES, count=count)
    if cors is not None:
        app.add_middleware(
            CORSMiddleware, allow_origins=[cors], allow_methods=["*"], allow_headers=["*"]
        )
    _add_routes(app, server)
    _add_errors(app)
    return app


def _add_routes(app: FastAPI, server: Server) -> None:
    app.post("/v1/chat/completions", response_model=None)(server.chat)
    app.post("/v1/completions", response_model=None)(server.complete)
    app.post("/v1/embeddings", response_model=None)(server.embed)

    @app.get("/", include_in_schema=False)
    def page() -> HTMLResponse:
        return page_response()

    @app.get("/v1/models")
    def models() -> Any:
        return {"object": "list", "data": [server.model()]}

    @app.get("/v1/models/{name}")
    def model(name: str) -> Any:
        server.require_model(name)
        return server.model()

    @app.post("/tokenize")
    def tokenize(body: schema.Tokenize) -> Any:
        ids = server.tokenizer.encode(body.prompt, bos=body.add_special_tokens)
        return {"tokens": ids, "count": len(ids), "max_model_len": server.args.max_seq_len}

    @app.post("/detokenize")
    def detokenize(body: schema.Detokenize) -> Any:
        n_words = server.tokenizer.n_words
        wrong = next((id for id in body.tokens if id >= n_words), None)
        require(wrong is None, f"token {wrong}: ids are below {n_words}")
        return {"prompt": server.tokenizer.decode(body.tokens)}

    @app.get("/health")
    def health() -> Any:
        failed = server.runner.failure is not None
        return Json({"status": "failed" if failed else "ok"}, 503 if failed else 200)

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(server.metrics.text(), media_type=prometheus.CONTENT_TYPE_LATEST)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(AnyHTTPException)
    async def http_error(_: HttpRequest, error: AnyHTTPException) -> Response:
        code = getattr(error, "code", None)
        body = error_body(error.status_code, str(error.detail), code)
        return Json(body, error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: HttpRequest, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"][1:])) or "the body"
        return Json(error_body(400, f"{where}: {first['msg']}"), 400)

    @app.exception_handler(QueueFull)
    async def full(_: HttpRequest, error: QueueFull) -> Response:
        body = error_body(429, "too many calls are waiting: try again", "rate_limit_exceeded")
        return Json(body, 429, {"Retry-After": "1"})

    @app.exception_handler(LlamaError)
    async def mistake(_: HttpRequest, error: LlamaError) -> Response:
        return Json(error_body(400, str(error)), 400)

    @app.exception_handler(Exception)
    async def failure(_: HttpRequest, error: Exception) -> Response:
        return Json(error_body(500, f"internal error: {type(error).__name__}"), 500)

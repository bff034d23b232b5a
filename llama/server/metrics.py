"""What a server counts and measures, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from llama.generation import Llama
from llama.requests import Request
from llama.server.runner import Job, Runner

PATHS = ("/", "/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/embeddings")
BUCKETS = [0.001 * 2**i for i in range(18)]  # 1 ms to 2 minutes


class Metrics:
    """The counters of one server."""

    def __init__(self, llama: Llama, runner: Runner) -> None:
        self._runner, self._registry = runner, CollectorRegistry()
        within = {"registry": self._registry}
        self._requests = Counter("llama_requests", "HTTP calls", ["path", "status"], **within)
        self._prompt = Counter("llama_prompt_tokens", "tokens of prompts", **within)
        self._reused = Counter("llama_reused_tokens", "tokens of prompts found cached", **within)
        self._generated = Counter("llama_generated_tokens", "tokens of answers", **within)
        self._first = Histogram(
            "llama_first_token_seconds", "from a call to its first token", buckets=BUCKETS, **within
        )
        self._token = Histogram(
            "llama_token_seconds", "between two tokens of an answer", buckets=BUCKETS, **within
        )
        engine, n_rows = llama.engine, llama.model.params.max_batch_size
        gauges = {
            "llama_rows": ("rows of the cache", lambda: n_rows),
            "llama_rows_running": ("rows that serve a request", lambda: len(engine.running)),
            "llama_queue": (
                "requests that wait for a row",
                lambda: max(0, runner.n_active - len(engine.running)),
            ),
            "llama_cached_tokens": (
                "tokens that the cache holds",
                lambda: engine.cache.held_tokens,
            ),
        }
        for name, (about, value) in gauges.items():
            Gauge(name, about, **within).set_function(value)

    def count(self, path: str, status: int) -> None:
        self._requests.labels(path if path in PATHS else "other", status).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)

    async def observed(
        self, jobs: Sequence[Job], requests: Sequence[Request]
    ) -> AsyncIterator[None]:
        """`Runner.progress`, measured."""
        start, first_s, n_tokens = time.monotonic(), None, 0
        try:
            async for _ in self._runner.progress(jobs, requests):
                n_tokens = sum(len(request.tokens) for request in requests)
                if first_s is None and n_tokens:
                    first_s = time.monotonic() - start
                    self._first.observe(first_s)
                yield
        finally:
            self._prompt.inc(sum(len(request.prompt) for request in requests))
            self._reused.inc(sum(request.n_reused for request in requests))
            self._generated.inc(n_tokens)
            if first_s is not None and n_tokens > len(requests):
                per_request = (n_tokens - len(requests)) / len(requests)
                self._token.observe((time.monotonic() - start - first_s) / per_request)

"""What a server counts and measures, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from llama.requests import Request
from llama.server.runner import Job, Runner

BUCKETS = [0.001 * 2**i for i in range(18)]  # 1 ms to 2 minutes


class Metrics:
    """The counters of one server."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self.registry = runner, CollectorRegistry()
        engine, at = runner.llama.engine, self.registry
        self.requests = Counter("llama_requests", "HTTP calls", ["path", "status"], registry=at)
        self.prompt = Counter("llama_prompt_tokens", "tokens of prompts", registry=at)
        self.reused = Counter("llama_reused_tokens", "of these, found in the cache", registry=at)
        self.made = Counter("llama_generated_tokens", "tokens of answers", registry=at)
        self.first, self.next = (
            Histogram(f"llama_{name}_seconds", about, buckets=BUCKETS, registry=at)
            for name, about in (
                ("first_token", "from call to token"),
                ("token", "from one to next"),
            )
        )
        gauges: dict[str, Callable[[], int]] = {
            "rows": lambda: len(engine.cache.rows),
            "rows_running": lambda: len(engine.running),
            "queue": lambda: max(0, runner.n_active - len(engine.running)),
            "cached_tokens": lambda: engine.cache.held_tokens,
        }
        for name, value in gauges.items():
            Gauge(f"llama_{name}", name.replace("_", " "), registry=at).set_function(value)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    async def observed(
        self, jobs: Sequence[Job], requests: Sequence[Request]
    ) -> AsyncIterator[None]:
        """`Runner.progress`, measured."""
        start, first_s, n_tokens = time.monotonic(), 0.0, 0
        try:
            async for _ in self._runner.progress(jobs, requests):
                n_tokens = sum(len(request.tokens) for request in requests)
                if n_tokens and not first_s:
                    first_s = time.monotonic() - start
                    self.first.observe(first_s)
                yield
        finally:
            self.prompt.inc(sum(len(request.prompt) for request in requests))
            self.reused.inc(sum(request.n_reused for request in requests))
            self.made.inc(n_tokens)
            if n_tokens > len(requests):
                steps = n_tokens / len(requests) - 1
                self.next.observe((time.monotonic() - start - first_s) / steps)

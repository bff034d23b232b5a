"""The engine in a thread of its own, on rank 0, and in step with it on the other ranks."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias

from llama.detokenizer import Detokenizer
from llama.errors import LlamaError
from llama.generation import Llama
from llama.parallel import ranks
from llama.requests import Request
from llama.sampling import SamplingParams


@dataclass(frozen=True)
class Job:
    """What every rank is told of a request."""

    name: str  # for messages
    ids: list[int]
    params: SamplingParams
    echo: bool = False  # the text begins with the prompt's
    keep_space: bool = False  # that SentencePiece puts in front
    is_stream: bool = False
    wants_hidden_states: bool = False

    def request(self, llama: Llama) -> Request:
        (request,) = llama._requests(
            {self.name: self.ids}, self.params, streams=self.is_stream, is_text=True
        )
        request.detokenizer = Detokenizer(
            llama.tokenizer,
            self.params.stop or (),
            self.ids if self.echo else (),
            keep_space=self.keep_space,
        )
        request.wants_hidden_states = self.wants_hidden_states
        return request


class QueueFull(Exception):
    """Too many requests are waiting."""


Work: TypeAlias = tuple[list[tuple[int, Job]], list[int]]  # new jobs, and the numbers of ended ones


class Runner:
    """Steps the engine while it has requests, and wakes the tasks that wait for them."""

    def __init__(self, llama: Llama, *, max_queue: int = 0, timeout_s: float = 600) -> None:
        self.llama = llama
        self._max_active = llama.model.params.max_batch_size + max_queue
        self.failure: BaseException | None = None
        self._timeout_s = timeout_s
        self._events = ranks.Events(timeout_s) if llama._ranks > 1 else None
        self._numbers = count()
        self._active: dict[int, tuple[Request, asyncio.Event]] = {}
        self._added: queue.SimpleQueue[tuple[int, Job, Request]] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._held: dict[int, Request] = {}  # by number, on every rank
        self._wake = threading.Event()
        self._is_closing = False

    @property
    def n_active(self) -> int:
        """Requests that are running or waiting."""
        return len(self._active)

    def start(self, on_failure: Callable[[], None]) -> threading.Thread:
        """Run in a thread; call it inside the event loop whose tasks use `progress`."""
        self._loop, self._on_failure = asyncio.get_running_loop(), on_failure
        thread = threading.Thread(target=self._run_or_fail, name="engine", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Let `run` return, on every rank."""
        self._is_closing = True
        self._wake.set()

    def run(self) -> None:
        """Take in requests and step until rank 0 closes. Other ranks call it directly.

        Raises:
            RuntimeError: another rank has ended.
        """
        with ranks.waiting(self.llama._runtime):
            while (work := self._next_work()) is not None:
                self._step(*work)

    def _run_or_fail(self) -> None:
        try:
            self.run()
        except BaseException as error:
            self.failure = error
            for request, _ in list(self._active.values()):
                request.error = request.error or LlamaError("the server has failed: restart it")
            self._loop.call_soon_threadsafe(self._tell)
            self._loop.call_soon_threadsafe(self._on_failure)

    def _step(self, jobs: list[tuple[int, Job]], ended: list[int]) -> None:
        for number, job in jobs:
            if number not in self._held:  # rank 0 has it already
                self._held[number] = job.request(self.llama)
        engine = self.llama.engine
        engine.add([self._held[number] for number, _ in jobs])
        engine.cancel([self._held.pop(number) for number in ended])
        engine.advance()
        if self.llama.rank == 0:
            self._loop.call_soon_threadsafe(self._tell)

    def _next_work(self) -> Work | None:
        """New requests and ended ones, when there is something to do; None at the end."""
        if self.llama.rank != 0:
            assert self._events is not None
            return self._events.receive()
        work = self._await_work()
        if self._events is not None:
            self._events.send(work)
        return work

    def _await_work(self) -> Work | None:
        while not self._is_closing:
            self._wake.clear()
            jobs = []
            for number, job, request in _drain(self._added):
                self._held[number] = request
                jobs.append((number, job))
            ended = [number for number in _drain(self._ended) if number in self._held]
            held = self._held.values()
            if jobs or ended or any(not r.is_finished and not r.is_paused for r in held):
                return jobs, ended
            if not self._wake.wait(self._timeout_s / 2):
                return [], []  # an empty step, which fails if another rank has ended
        return None

    def _tell(self) -> None:
        for request, event in self._active.values():
            if request.is_finished or len(request.tokens) > request.n_read:
                event.set()

    async def progress(
        self, jobs: Sequence[Job], requests: Sequence[Request]
    ) -> AsyncIterator[None]:
        """Run requests: yields once they are queued, and whenever they have new tokens or ended.

        Whatever ends the iteration gives up the requests.

        Raises:
            QueueFull: before the first yield.
        """
        if self.n_active >= self._max_active:
            raise QueueFull
        event, numbers = asyncio.Event(), []
        for job, request in zip(jobs, requests, strict=True):
            numbers.append(next(self._numbers))
            self._active[numbers[-1]] = request, event
            self._added.put((numbers[-1], job, request))
        self._wake.set()
        try:
            is_finished = False
            yield
            while not is_finished:
                await event.wait()
                event.clear()
                is_finished = all(request.is_finished for request in requests)
                for request in requests:
                    request.raise_error()
                    request.n_read = len(request.tokens)
                yield
                self._wake.set()  # who was paused may go on
        finally:
            for number in numbers:
                del self._active[number]
                self._ended.put(number)
            self._wake.set()


def _drain(items: queue.SimpleQueue) -> Iterator:
    with contextlib.suppress(queue.Empty):
        while True:
            yield items.get_nowait()

"""The engine: requests in, tokens out, one pass of the model at a time (continuous batching).

A request has a row of the cache while it runs. `start_pos` is its position there: how many of its
tokens the row holds. Each step admits requests, runs one pass over tokens that are not in the
cache yet (a chunk of prompts, or the newest token of each answer), and samples for every request
that has been read to its end.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch

from llama.errors import LlamaError, require
from llama.kv_cache import PREFILL_TOKENS, Segment
from llama.model import Transformer
from llama.prefix_cache import PrefixCache, common_prefix
from llama.requests import FinishReason, Request, chunk_len, draw_waits
from llama.sampling import NOT_FINITE, reshape_logits, sample, token_logprobs, top_logprobs

PREFILL_TOKENS_SHARED = 512  # of one pass while others decode: bounds their latency
MIN_SHARED = 16  # tokens of a prefix that are worth waiting for
LOGITS_PER_PASS = 2**24  # numbers, 64 MB, where a pass returns the logits of all tokens


class Engine:
    """The rows of the cache, the requests, and the step that serves them.

    Any thread may `add`, `cancel` and `advance`; one of them at a time steps for all.
    """

    def __init__(self, model: Transformer, *, n_words: int, eos_ids: Iterable[int]) -> None:
        self.model, self.cache = model, PrefixCache(model)
        self.n_words, self.eos_ids = n_words, frozenset(eos_ids)
        self.decode_step: Callable[..., torch.Tensor] = model  # or its compiled form
        self.broadcast: Callable[[torch.Tensor], torch.Tensor] | None = None  # rank 0's tokens
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}  # by row, in the order of admission
        self.passes: deque[tuple[str, int]] = deque(maxlen=4096)  # kind and tokens, for metrics
        self._added: deque[Request] = deque()
        self._cancelled: deque[Request] = deque()
        self._just_prefilled = False
        self._n_steps = 0
        self._stepper: int | None = None  # the thread that makes a step
        self._n_exclusive = 0  # threads that wait for `exclusive`
        self._process = os.getpid()
        self._closed: LlamaError | None = None
        self._changed = threading.Condition()

    # What any thread may call.

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests; the next step sees them."""
        self._added.extend(requests)

    def cancel(self, requests: Iterable[Request]) -> None:
        """Give up requests; takes no lock, since a finalizer may call it inside a step."""
        self._cancelled.extend(request for request in requests if not request.is_finished)

    @property
    def has_work(self) -> bool:
        """Would a step do anything?"""
        held = any(not request.is_paused for request in [*self.running.values(), *self.waiting])
        return held or bool(self._added or self._cancelled)

    def advance(self) -> None:
        """Make one step, or wait for the end of the one that another thread makes."""
        self.refuse_forked()
        thread, n_steps = threading.get_ident(), self._n_steps
        try:
            with self._changed:
                if self._n_exclusive or self._stepper not in (None, thread):
                    self._changed.wait_for(
                        lambda: self._n_steps != n_steps or not (self._stepper or self._n_exclusive)
                    )
                    return
                self._stepper = thread
            self.step()
        finally:
            self._let_others_step()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep others from stepping, between two steps."""
        self.refuse_forked()
        thread = threading.get_ident()
        try:
            with self._changed:
                self._n_exclusive += 1  # whoever steps again and again leaves no gap otherwise
                try:
                    self._changed.wait_for(lambda: self._stepper in (None, thread))
                    self._stepper = thread
                finally:
                    self._n_exclusive -= 1
                    self._changed.notify_all()
            self._take_in()
            yield
        finally:
            self._let_others_step()

    def _let_others_step(self) -> None:
        """Give back the right to step, if this thread has it: an interrupt may come at any time."""
        if self._stepper == threading.get_ident():
            with self._changed:
                self._n_steps += 1
                self._stepper = None
                self._changed.notify_all()

    def refuse_forked(self) -> None:
        # Without a look at the lock, which may have been held when the process was forked.
        require(
            self._process == os.getpid(),
            "this process was forked from the one that built this instance, and torch's threads do "
            "not survive that: start it with the method 'spawn'",
        )

    def shut_down(self, error: LlamaError) -> None:
        """End all requests with an error, and let go of the model; within `exclusive`."""
        self._closed = error
        self._refuse_all()
        self.model = self.cache = self.decode_step = None  # type: ignore[assignment]

    def _refuse_all(self) -> None:
        for request in [*self.running.values(), *self.waiting]:
            request.error, request.row = self._closed, None
        self.running.clear()
        self.waiting.clear()

    # One step, for whoever has the right to.

    @torch.inference_mode()
    def step(self) -> None:
        """Admit, prefill or decode, sample, finish."""
        self._take_in()
        if self._closed is not None:
            self._refuse_all()
            return
        self._admit()
        requests, segments = self._next_pass()
        if not requests:
            return
        try:
            logits = self._prefill(requests, segments) if segments else self._decode(requests)
            self.cache.written()
            read = [i for i, request in enumerate(requests) if self._is_read(request)]
            if read:
                rows = logits if len(read) == len(requests) else logits[read]
                self._sample([requests[i] for i in read], rows)
        except Exception as error:
            self._fail(requests, error)

    def _take_in(self) -> None:
        """Take in what other threads queued: new requests, and cancelled ones."""
        while self._added:
            self.waiting.append(self._added[0])  # in this order: an interrupt loses nobody
            self._added.popleft()
        if not self._cancelled:
            return
        while self._cancelled:
            request = self._cancelled.popleft()
            self._release(request)
            if not request.is_finished:
                request.error = LlamaError("the request was cancelled: start it again")
        self.waiting = deque(request for request in self.waiting if not request.is_finished)

    def _admit(self) -> None:
        """Give rows to waiting requests: free ones, or those of streams that nobody reads."""
        has_row = len(self.running) < len(self.cache.rows) or any(
            request.is_paused for request in self.running.values()
        )
        if not (self.waiting and has_row) and not self.cache.was_written_elsewhere():
            return
        if self.cache.invalidate_on_external_write():
            self.preempt(self.running.values())
        unpaused = (request for request in self.waiting if not request.is_paused)
        for request in list(islice(unpaused, 4 * len(self.cache.rows))):
            if request.is_finished or self._is_running(request):  # after an interrupt
                self.waiting.remove(request)
                continue
            if self._shares_a_prefill(request):
                continue
            free = self._free_rows()
            if not free:
                break
            reuse = not request.reads_every_position
            request.row, start_pos = self.cache.assign(request.ids, free, reuse=reuse)
            request.n_reused = request.n_reused or min(start_pos, len(request.prompt))
            self.running[request.row] = request
            self.waiting.remove(request)

    def _free_rows(self) -> list[int]:
        """The rows without a request; if there are none, that of the longest-paused stream."""
        free = [row for row in range(len(self.cache.rows)) if row not in self.running]
        paused = [request for request in self.running.values() if request.is_paused]
        if not free and paused:
            evicted = min(paused, key=lambda request: request.paused_at)
            free = [evicted.row or 0]
            self.preempt([evicted])
        return free

    def _shares_a_prefill(self, request: Request) -> bool:
        """Will a prompt that is being read soon spare this one a pass over a common prefix?"""
        ids = request.ids
        reading = [r for r in self.running.values() if self._n_pending(r) > 1]
        if not reading or request.reads_every_position:
            return False
        shared = max(common_prefix(r.ids, ids) for r in reading)
        return shared - self.cache.longest(ids)[0] >= MIN_SHARED

    def preempt(self, requests: Iterable[Request]) -> None:
        """Take the rows of running requests, which are admitted again later."""
        for request in list(requests):
            if request.reads_every_position:  # it starts again
                del request.prompt_logprobs[1:], request.prompt_top_logprobs[1:]
                del request.hidden_states[:]
            self.waiting.appendleft(request)
            self._release(request)

    def _release(self, request: Request) -> None:
        if self._is_running(request):
            del self.running[request.row or 0]
        request.row = None

    def _is_running(self, request: Request) -> bool:
        return request.row is not None and self.running.get(request.row) is request

    def _n_pending(self, request: Request) -> int:
        """Tokens of a running request that are not in the cache yet."""
        return len(request.prompt) + len(request.tokens) - self._start_pos(request)

    def _start_pos(self, request: Request) -> int:
        assert request.row is not None
        return len(self.cache.rows[request.row])

    def _is_read(self, request: Request) -> bool:
        """Is it in the cache to its end, so that the next token can be drawn?"""
        return not request.is_finished and self._n_pending(request) == 0

    def _next_pass(self) -> tuple[list[Request], list[Segment]]:
        """The requests of the next pass, and the chunks of their prompts if it is a prefill."""
        prefilling, decoding = [], []
        for request in self.running.values():
            if self._is_read(request):  # an interrupt came before its token was drawn
                self.cache.rows[request.row or 0].pop()
            if self._n_pending(request) > 1 or (
                request.reads_every_position and not request.tokens
            ):
                prefilling.append(request)
            elif not request.is_paused:
                decoding.append(request)
        # In alternation, so that a long prompt delays the others by one chunk at most.
        self._just_prefilled = bool(prefilling) and not (decoding and self._just_prefilled)
        if not self._just_prefilled:
            return decoding, []
        args, every_position = self.model.params, prefilling[0].reads_every_position
        room = args.prefill_chunk or (PREFILL_TOKENS_SHARED if decoding else PREFILL_TOKENS)
        if every_position:
            room = min(room, max(1, LOGITS_PER_PASS // args.vocab_size))
        requests, segments = [], []
        for request in prefilling:
            start_pos = self._start_pos(request)
            n = min(self._n_pending(request), chunk_len(args, start_pos), room)
            if n > 0 and request.reads_every_position == every_position:
                requests.append(request)
                segments.append(Segment(request.row or 0, start_pos, n))
                room -= n
        return requests, segments

    def _prefill(self, requests: list[Request], segments: list[Segment]) -> torch.Tensor:
        """Read a chunk of each prompt: the logits of each last token, (len(requests), n)."""
        model, device = self.model, self.model.rope_freqs.device
        chunks = [r.ids[s.start_pos : s.end] for r, s in zip(requests, segments, strict=True)]
        tokens = [token for chunk in chunks for token in chunk]
        self.passes.append(("prefill", len(tokens)))
        context = model.segment_context(segments)
        h = model.hidden_states(torch.tensor([tokens], device=device), context)[0]
        pieces = h.split([len(chunk) for chunk in chunks])
        for request, segment, chunk, piece in zip(requests, segments, chunks, pieces, strict=True):
            self.cache.rows[segment.row] += chunk
            if request.reads_every_position:
                self._read_positions(request, segment, piece)
        return model.logits(torch.stack([piece[-1] for piece in pieces]))

    def _read_positions(self, request: Request, segment: Segment, h: torch.Tensor) -> None:
        """Take in the final hidden states (n, dim) of a part of a prompt."""
        if request.wants_hidden_states:
            request.hidden_states.append(h.float())
        targets = request.prompt[segment.start_pos + 1 : segment.end + 1]
        if targets and request.params.prompt_logprobs:
            logits = self.model.logits(h[: len(targets)])
            values = token_logprobs(logits, torch.tensor(targets, device=h.device)).tolist()
            request.prompt_logprobs += values
            if request.params.top_logprobs:
                request.prompt_top_logprobs += top_logprobs(logits, request.params.top_logprobs)
            if not all(map(math.isfinite, values)):
                self._fail([request], self._not_finite())

    def _decode(self, requests: list[Request]) -> torch.Tensor:
        """Read the newest token of each request: the next logits, (len(requests), n).

        The pass covers a contiguous range of rows; those in between that it does not serve stay
        as they are.
        """
        self.passes.append(("decode", len(requests)))
        args, device = self.model.params, self.model.rope_freqs.device
        compiled = self.decode_step is not self.model
        by_row = {request.row or 0: request for request in requests}
        first, last = min(by_row), max(by_row)
        if compiled and first != last:
            first = 0  # a graph is for the rows from 0 on, or for any one row
        served = [by_row.get(row) for row in range(first, last + 1)]
        starts = [0 if request is None else self._start_pos(request) for request in served]
        start_pos: int | torch.Tensor = starts[0]
        if compiled or len(set(starts)) > 1:
            start_pos = torch.tensor(starts, device=device)
        active = None
        if compiled or None in served:
            active = torch.tensor([request is not None for request in served], device=device)
        newest = [[0 if request is None else request.newest] for request in served]
        logits = self.decode_step(
            torch.tensor(newest, device=device),
            start_pos,
            first_row=torch.tensor(first, device=device) if compiled and first == last else first,
            active=active,
            kv_len=min(max(starts) + 1, args.n_slots),
            only_last=True,
        )[:, -1]
        for row, request in by_row.items():
            self.cache.rows[row].append(request.newest)
        in_batch = [row - first for row in by_row]
        return logits if in_batch == list(range(len(logits))) else logits[in_batch]

    def _sample(self, requests: list[Request], logits: torch.Tensor) -> None:
        """Draw the next token of each request from logits (len(requests), vocab_size)."""
        reshaped = self._reshape(requests, logits[:, : self.n_words])
        drawing = [request for request in requests if not request.is_finished]
        if not drawing:
            return
        if len(drawing) < len(requests):
            rows = [i for i, request in enumerate(requests) if not request.is_finished]
            logits, reshaped = logits[rows], reshaped[rows]
        params = [request.params for request in drawing]
        tokens = sample(reshaped, params, draw_waits(drawing, reshaped))
        tokens = torch.where(logits.amin(-1).isfinite(), tokens, NOT_FINITE)
        if self.broadcast is not None:
            tokens = self.broadcast(tokens)
        ids = tokens.tolist()  # the only host sync per step
        values: Sequence[float | None] = [None] * len(ids)
        if any(p.logprobs for p in params):
            values = token_logprobs(logits, tokens.clamp_min(0)).tolist()
        for request, id, value, row in zip(drawing, ids, values, logits, strict=True):
            self._advance(request, id, value, row)

    def _reshape(self, requests: list[Request], logits: torch.Tensor) -> torch.Tensor:
        """The logits after each request's penalties and processor; ends those that cannot draw."""
        if any(request.params.reshapes for request in requests):
            logits = logits.clone()
        for request, row in zip(requests, logits, strict=True):
            if request.limit == 0:
                self._finish(request, "length")
            elif request.params.reshapes:
                try:
                    row.copy_(reshape_logits(request.params, request.prompt, request.tokens, row))
                except Exception as error:  # a processor's: it ends this request alone
                    self._fail([request], error)
        return logits

    def _advance(
        self, request: Request, token: int, logprob: float | None, logits: torch.Tensor
    ) -> None:
        """Take in a drawn token, and finish the request if it ends there."""
        if token == NOT_FINITE:
            self._fail([request], self._not_finite())
        elif token in self.eos_ids:
            self._finish(request, "stop")
        elif token in request.stop_tokens:
            self._finish(request, "stop", token)
        else:
            request.push(token, logprob, logits)
            if request.detokenizer is not None and request.detokenizer.stop is not None:
                self._finish(request, "stop", request.detokenizer.stop)
            elif len(request.tokens) >= request.limit:
                self._finish(request, "length")
            elif request.is_paused:
                request.paused_at = self._n_steps

    def _finish(
        self, request: Request, reason: FinishReason, stop: int | str | None = None
    ) -> None:
        """End a request; its row keeps what it holds, for whoever shares a prefix with it."""
        request.finish(reason, stop)
        self._release(request)

    def _fail(self, requests: Iterable[Request], error: Exception) -> None:
        """End requests with an error, and zero their rows: NaN gets through any mask."""
        for request in requests:
            if request.row is not None:
                self.cache.clear(request.row)
            self._release(request)
            request.error = request.error or error

    def _not_finite(self) -> LlamaError:
        return LlamaError(
            f"the logits are not finite in {self.model.norm.weight.dtype}: the checkpoint may be "
            "damaged, or the dtype too narrow for it: try dtype='float32' (or 'bfloat16')"
        )

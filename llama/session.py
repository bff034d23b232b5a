"""A session: a model, its tokenizer, an engine, and what every call needs of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from fairscale.nn.model_parallel.initialize import get_model_parallel_group
from tqdm import tqdm
from typing_extensions import Self

from llama.chat import ChatFormat, Llama2Format
from llama.detokenizer import Detokenizer
from llama.device import trim_memory
from llama.engine import Engine
from llama.errors import LlamaError, require
from llama.model import Transformer
from llama.parallel import groups, ranks
from llama.prefix_cache import CachedRow
from llama.requests import READ_AHEAD, Request, answer_limit, checked_ids
from llama.sampling import Draws, SamplingParams, derived_seed, make_generator
from llama.sizes import usage
from llama.tokenizer import BaseTokenizer

_CLOSED = "this instance is closed: build another"


class Session:
    """An open model: its lifetime, its cache, and requests within bounds."""

    def __init__(
        self, model: Transformer, tokenizer: BaseTokenizer, *, seed: int = 1, replica: int = 0
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_format: ChatFormat = Llama2Format(tokenizer)
        self.engine = Engine(model, n_words=tokenizer.n_words, eos_ids=tokenizer.eos_ids)
        self._runtime: groups.Runtime | None = None
        self._check_ranks = False
        self._seed, self._replica = seed, replica
        self._generator = make_generator(self._device, seed, replica)

    def attach(self, runtime: groups.Runtime, *, check_ranks: bool) -> None:
        """Take over the process groups of a runtime, until `close`."""
        self._runtime, self._check_ranks = runtime, check_ranks
        if runtime.model_parallel_size > 1:
            group = get_model_parallel_group()
            self.engine.broadcast = partial(ranks.broadcast_tokens, group=group)

    @property
    def model(self) -> Transformer:
        """May be replaced by a compiled form of it; None after `close`."""
        return self.engine.model

    @model.setter
    def model(self, model: Transformer) -> None:
        self.engine.model = self.engine.cache.model = self.engine.decode_step = model

    @property
    def rank(self) -> int:
        """This process among all that were started; 0 is the one that prints."""
        return 0 if self._runtime is None else self._runtime.rank

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the weights, the cache, and the groups that `build` made. May be called twice.

        Requests that are still running end, each with an error in its own caller.
        """
        if self.model is None:
            return
        with self.engine.exclusive():
            if self.model is None:  # another thread was first
                return
            self.engine.shut_down(LlamaError(_CLOSED))
            if self._runtime is not None:
                groups.teardown(self._runtime)
        trim_memory()

    # The cache, between two steps.

    def reset(self) -> None:
        """Zero the cache and forget what it held.

        Needed after writes to the weights or the cache that torch does not count: through `.data`
        or a NumPy view.
        """
        with self._exclusive() as engine:
            engine.preempt(engine.running.values())
            engine.cache.clear()

    def cache(self, row: int = 0) -> CachedRow:
        """What a row of the cache holds: tokens, and keys and values of each layer."""
        with self._exclusive() as engine:
            return engine.cache.read_row(row)

    def memory(self) -> dict[str, int]:
        """Bytes on this rank: of the weights, of the cache, and of what is used of the cache."""
        with self._exclusive() as engine:
            return usage(self.model, engine.cache.held_tokens)

    def save_cache(self, path: str | Path) -> None:
        """Write what the cache holds to a safetensors file, for `load_cache`."""
        with self._exclusive() as engine:
            engine.cache.save(path)

    def load_cache(self, path: str | Path) -> None:
        """Read what `save_cache` wrote for the same model, so that prompts re-use it."""
        with self._exclusive() as engine:
            engine.preempt(engine.running.values())  # their rows may be overwritten
            engine.cache.load(path)

    # Requests.

    def _requests(
        self,
        prompts: Mapping[str, Sequence[int]],
        params: SamplingParams,
        *,
        seeds: Sequence[int] | None = None,
        streams: bool = False,
        is_text: bool = False,
        echo: bool = False,
    ) -> list[Request]:
        """A request for each of the named prompts, all within bounds."""
        self._require_usable()
        require(len(prompts) > 0, "there are no prompts: pass at least one")
        args, limit, n_ids = self.model.params, params.max_gen_len, self.model.vocab_size
        if echo and params.logprobs:
            params = replace(params, prompt_logprobs=True)
        stop = frozenset(checked_ids(params.stop_tokens or (), "stop_tokens", n_ids))
        checked_ids(params.logit_bias, "logit_bias", self.tokenizer.n_words)
        ids = [checked_ids(prompt, name, n_ids) for name, prompt in prompts.items()]
        limits = [answer_limit(n, len(i), limit, args) for n, i in zip(prompts, ids, strict=True)]
        # Under several ranks all do the same: none may run ahead of another's reader.
        read_ahead = READ_AHEAD if streams and self._ranks == 1 else None
        shared = seeds is None and len(ids) <= args.max_batch_size
        return [
            Request(
                ids[i],
                params,
                limits[i],
                draws,
                index=i if shared else 0,
                stop_tokens=stop,
                detokenizer=self._detokenizer(params, ids[i] if echo else ()) if is_text else None,
                read_ahead=read_ahead,
            )
            for i, draws in enumerate(self._draws(len(ids), params.seed, seeds))
        ]

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, *, echo: bool = False
    ) -> Request:
        """Queue one prompt for whoever steps: `engine.advance()` in a loop, in any thread."""
        (request,) = self._requests({"the prompt": prompt}, params, is_text=True, echo=echo)
        self.engine.add([request])
        return request

    def _detokenizer(self, params: SamplingParams, echoed: Sequence[int]) -> Detokenizer:
        return Detokenizer(self.tokenizer, params.stop or (), echoed)

    def _draws(
        self, n: int, seed: int | None, seeds: Sequence[int] | None
    ) -> Sequence[Draws | Callable[[], Draws]]:
        """Where the random numbers of each of n prompts come from."""
        if seeds is not None:
            require(
                len(seeds) == n, f"seed has {len(seeds)} numbers for {n} prompts: pass one each"
            )
            for own in seeds:
                SamplingParams(seed=own)  # checks it
            return [partial(self._own_draws, own) for own in seeds]
        if self._generator.device != self._device:  # the caller has moved the model
            self._generator = self._seeded(self._seed)
        generator = self._generator if seed is None else self._seeded(seed)
        if n <= self.model.params.max_batch_size:
            return [Draws(generator, n)] * n
        if seed is None:
            seed = int(torch.randint(2**62, (), device=generator.device, generator=generator))
        return [partial(self._own_draws, derived_seed(seed, i)) for i in range(n)]

    def _own_draws(self, seed: int) -> Draws:
        return Draws(self._seeded(seed))

    def _seeded(self, seed: int) -> torch.Generator:
        return make_generator(self._device, seed, self._replica)

    @contextmanager
    def _serving(self, requests: Sequence[Request]) -> Iterator[Callable[[], None]]:
        """Run the body with `requests` in the engine; whatever ends it ends them.

        Yields what shows the progress, on a terminal and if there are more requests than rows.
        """
        self._require_usable()
        # An interrupt inside tqdm would keep the lock that all its bars share: only if it is seen.
        show = len(requests) > self.model.params.max_batch_size and sys.stderr.isatty()
        bar = tqdm(total=len(requests), unit="prompt") if show and self.rank == 0 else None
        with ranks.waiting(self._runtime), bar or nullcontext():

            def show_progress() -> None:
                if bar is not None:
                    bar.update(sum(request.is_finished for request in requests) - bar.n)

            if self._ranks > 1:
                self._compare_ranks(requests)
            self.engine.add(requests)
            try:
                yield show_progress
                for request in requests:
                    request.raise_error()
            finally:
                self.engine.cancel(requests)

    def _compare_ranks(self, requests: Sequence[Request]) -> None:
        """Refuse a call that other ranks make otherwise; re-use only what every rank holds."""
        with self._exclusive() as engine:
            require(
                not engine.running and not engine.waiting,
                "a stream of this instance is still open: exhaust it, or close() it",
            )
            params = replace(requests[0].params, logits_processor=None)  # its repr is local
            call = {"prompts": [r.prompt for r in requests], **vars(params)}
            group, n_slots = get_model_parallel_group(), self.model.params.n_slots
            held = ranks.compare_call(
                call if self._check_ranks else {}, engine.cache.rows, group, n_slots=n_slots
            )
            for row, length in enumerate(held):
                engine.cache.truncate(row, length)

    def _run(self, requests: Sequence[Request]) -> None:
        with self._serving(requests) as show_progress:
            for request in requests:
                while not request.is_finished:
                    self.engine.advance()
                    show_progress()

    # What a call needs.

    @contextmanager
    def _exclusive(self) -> Iterator[Engine]:
        self._require_usable()
        with self.engine.exclusive():
            self._require_usable()
            if self.engine.cache.invalidate_on_external_write():
                self.engine.preempt(self.engine.running.values())
            yield self.engine

    def _require_usable(self) -> None:
        require(self.model is not None, _CLOSED)
        self.engine.refuse_forked()

    @property
    def _device(self) -> torch.device:
        self._require_usable()
        return self.model.rope_freqs.device

    @property
    def _ranks(self) -> int:
        return 1 if self._runtime is None else self._runtime.model_parallel_size

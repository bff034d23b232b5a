"""Llama: build an instance, then prompts in, tokens or text out.

Every call is a client of the engine: check the bounds, encode, add requests, step until they have
finished, return.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from operator import index
from pathlib import Path
from typing import TypedDict

import torch
from tqdm import tqdm

from llama.chat import (  # noqa: F401 (callers of the original import these from here)
    B_INST,
    B_SYS,
    E_INST,
    E_SYS,
    SPECIAL_TAGS,
    UNSAFE_ERROR,
    ChatFormat,
    Dialog,
    Message,
    Role,
)
from llama.checkpoints import reader as checkpoints
from llama.checkpoints.load import load_model, load_tokenizer
from llama.compile import compile_step
from llama.detokenizer import Detokenizer
from llama.engine import READ_AHEAD, Engine, FinishReason, Request
from llama.errors import LlamaError, checked_path, require
from llama.model import ModelArgs, Transformer
from llama.parallel import groups as runtimes
from llama.parallel import ranks
from llama.prefix_cache import CachedRow
from llama.sampling import (
    Draws,
    SamplingParams,
    derived_seed,
    make_generator,
    sample_top_p,  # noqa: F401 (the original has it here)
)
from llama.sizes import usage
from llama.tokenizer import Tokenizer

STORIES = Path(__file__).parent / "stories"  # the checkpoint that ships with the package


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


class Llama:
    """A model, its tokenizer, and the engine that serves requests to them.

    Threads and tasks may share an instance: their requests run together. `close()`, or leaving a
    `with` block, frees the weights, the cache, and the process group if `build` made it.

    The arguments that the calls share (`llama.sampling.SamplingParams` explains all of them):
        max_gen_len: new tokens for each prompt; None: as many as fit `max_seq_len`.
        temperature: 0 always takes the most likely token.
        top_p: draw from the smallest set of tokens whose cumulative probability exceeds it.
        logprobs: return natural logarithms of the model's probabilities, before temperature and
            top_p; position 0 of a prompt has none, and gets 0.
        echo: begin each answer with its prompt.
        stop, stop_tokens: texts, or ids, that end an answer as EOS does; not a part of it.
        seed: of this call's draws; None: the instance's own generator goes on.
        params: all of these and more at once, in place of the single arguments.
    All raise LlamaError for invalid arguments, with the value, the limit and the remedy.
    """

    @staticmethod
    def build(
        ckpt_dir: str | Path | None = None,
        tokenizer_path: str | Path | None = None,
        max_seq_len: int | None = None,
        max_batch_size: int | None = None,
        model_parallel_size: int | None = None,
        seed: int = 1,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        sliding_window: int | None = None,
        prefill_chunk: int | None = None,
        kv_cache_dtype: str | torch.dtype | None = None,
        quantize: str | None = None,
        compile: bool = False,
        timeout_s: float = 600,
        check_ranks: bool = True,
        verbose: bool = True,
    ) -> Llama:
        """Load a checkpoint onto this rank.

        Args:
            ckpt_dir: a folder in Meta's or Hugging Face's layout; None: the one that ships.
            tokenizer_path: None: the tokenizer in that folder, or in the one above it.
            max_seq_len: positions in each row of the cache, prompt and answer; None: 512.
            max_batch_size: rows of the cache; None: 8.
            model_parallel_size: ranks that share one copy of the model; None: all there are.
            seed: of the instance's own generator; the global random state is not touched.
            device: None: CUDA if there is any, else MPS, else the CPU.
            dtype: None: float16 on CUDA and MPS, float32 on a CPU.
            sliding_window: attention window in tokens; None: as the checkpoint says. With a window
                no longer than `max_seq_len`, prompts and answers have no limit of length, and the
                cache has `window + prefill_chunk - 1` slots at most.
            prefill_chunk: tokens of prompts that one pass reads; None: 2048, or 512 while other
                requests decode.
            kv_cache_dtype: float32, bfloat16, float16 or int8; None: as the weights.
            quantize: int8 (a scale for each output) or int4 (for each group of at most 128 inputs);
                None: as the checkpoint is.
            compile: make one graph of a decoding step, here and now, which takes a while.
            timeout_s: how long a rank waits for another one.
            check_ranks: compare at each call what the ranks were asked and what their caches hold.
            verbose: say on rank 0 how long it took.
        """
        start = time.monotonic()
        ckpt_dir = STORIES if ckpt_dir is None else checked_path(ckpt_dir, "ckpt_dir")
        checkpoint = checkpoints.open_checkpoint(ckpt_dir)
        window = {} if sliding_window is None else {"sliding_window": sliding_window}
        args = ModelArgs(
            **{**checkpoint.params, **window},
            prefill_chunk=prefill_chunk,
            max_seq_len=_size(max_seq_len, "max_seq_len", 512),
            max_batch_size=_size(max_batch_size, "max_batch_size", 8),
        )
        tokenizer = load_tokenizer(ckpt_dir, tokenizer_path, args.vocab_size)
        runtime = runtimes.setup(
            device=device,
            dtype=dtype,
            model_parallel_size=model_parallel_size,
            timeout_s=timeout_s,
            arguments={
                **vars(args),
                "kv_cache_dtype": kv_cache_dtype,
                "quantize": quantize,
                "compile": compile,
                "seed": seed,
                "check_ranks": check_ranks,
            },
        )
        try:
            with ranks.waiting_to_load(runtime):
                model = load_model(args, checkpoint, runtime, kv_cache_dtype, quantize)
                llama = Llama(model, tokenizer, seed=seed, replica=runtime.replica)
                if compile:
                    shown = verbose and runtime.rank == 0
                    llama.engine.decode_step = compile_step(model, verbose=shown)
        except BaseException:
            runtimes.teardown(runtime)
            raise
        llama._runtime, llama._check_ranks = runtime, check_ranks
        if runtime.model_parallel_size > 1:
            llama.engine.broadcast = ranks.broadcast_tokens
        if runtime.rank == 0:
            _warn_beyond_context(args.max_seq_len, checkpoint.context)
            if verbose:
                print(f"Loaded in {time.monotonic() - start:.2f} seconds")
        return llama

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer, *, seed: int = 1, replica: int = 0
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.chat_format = ChatFormat(tokenizer)
        self.engine = Engine(model, n_words=tokenizer.n_words, eos_ids=[tokenizer.eos_id])
        self._runtime: runtimes.Runtime | None = None
        self._check_ranks = False
        self._process = os.getpid()
        self._seed, self._replica = seed, replica
        self._generator = make_generator(self._device, seed, replica)

    @property
    def rank(self) -> int:
        """This process among all that were started; 0 is the one that prints."""
        return 0 if self._runtime is None else self._runtime.rank

    def __enter__(self) -> Llama:
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
            self.engine.shut_down(LlamaError(_CLOSED))
            self.model = None  # type: ignore[assignment]  # whoever needs it calls _require_usable
            if self._runtime is not None:
                runtimes.teardown(self._runtime)

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
            engine.cache.load(path)

    # Tokens.

    def generate(
        self,
        prompt_tokens: Sequence[Sequence[int]],
        max_gen_len: int | None = None,
        temperature: float = 0.6,
        top_p: float = 0.9,
        logprobs: bool = False,
        echo: bool = False,
        *,
        stop_tokens: Sequence[int] | None = None,
        seed: int | Sequence[int] | None = None,
        params: SamplingParams | None = None,
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """Continue lists of ids, any number of them; `seed` may have one for each.

        Returns the answers' ids, and their logprobs or None.
        """
        seeds = None if seed is None or isinstance(seed, int) else list(seed)
        params = _sampling(
            params,
            temperature,
            top_p,
            max_gen_len,
            seed if isinstance(seed, int) else None,
            logprobs=logprobs,
            echo=echo,
            stop_tokens=stop_tokens,
        )
        # The bounds are checked here, before any work.
        requests = self._requests(_named("prompt", prompt_tokens), params, seeds=seeds)
        with self._serving(requests), self._progress(requests) as show:
            while not all(request.is_finished for request in requests):
                self.engine.advance()  # one step: prefill or decode, sample, advance start_pos
                show()
        tokens = [request.prompt * echo + request.tokens for request in requests]
        return tokens, [r.all_logprobs(echo) for r in requests] if params.logprobs else None

    def stream(
        self,
        prompt_tokens: Sequence[Sequence[int]],
        max_gen_len: int | None = None,
        temperature: float = 0.6,
        top_p: float = 0.9,
        *,
        logprobs: bool = False,
        stop_tokens: Sequence[int] | None = None,
        seed: int | None = None,
        params: SamplingParams | None = None,
    ) -> Generator[list[int | None], None, StreamResult]:
        """As `generate`, one token of each answer at a time.

        None stands for an answer that has ended; EOS and stop tokens are not yielded. The
        iterator's return value tells why each answer ended.
        """
        params = _sampling(params, temperature, top_p, max_gen_len, seed, logprobs=logprobs, stop_tokens=stop_tokens)
        return self._stream(self._requests(_named("prompt", prompt_tokens), params, streams=True))

    @torch.inference_mode()
    def hidden_states(self, prompt_tokens: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """The final norm's output at each position of each prompt, float32 (len, dim)."""
        params = SamplingParams(temperature=0, max_gen_len=0)
        requests = self._requests(_named("prompt", prompt_tokens), params)
        for request in requests:
            request.wants_hidden_states = True
        self._run(requests)
        return [torch.cat(request.hidden_states) for request in requests]

    # Text.

    def text_completion(
        self,
        prompts: Sequence[str],
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        logprobs: bool = False,
        echo: bool = False,
        *,
        stop: Sequence[str] | None = None,
        seed: int | None = None,
        params: SamplingParams | None = None,
    ) -> list[CompletionPrediction]:
        """Continue texts, any number of them."""
        params = _sampling(params, temperature, top_p, max_gen_len, seed, logprobs=logprobs, echo=echo, stop=stop)
        require(not isinstance(prompts, str), f"prompts is {prompts!r:.80}: pass a list of texts")
        named = {
            f"prompt {i}": self.tokenizer.encode(prompt, bos=True)
            for i, prompt in enumerate(prompts)
        }
        return self._complete(named, params, echo=echo)

    def chat_completion(
        self,
        dialogs: Sequence[Dialog],
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        logprobs: bool = False,
        *,
        stop: Sequence[str] | None = None,
        seed: int | None = None,
        allow_tags: bool = False,
        params: SamplingParams | None = None,
    ) -> list[ChatPrediction]:
        """Answer dialogs, any number of them.

        A dialog with a tag of the chat format in a message is answered with UNSAFE_ERROR, unless
        `allow_tags`.
        """
        params = _sampling(params, temperature, top_p, max_gen_len, seed, logprobs=logprobs, stop=stop)
        require(len(dialogs) > 0, "there are no dialogs: pass at least one list of messages")
        named = {
            f"dialog {i}": self.chat_format.encode(dialog)
            for i, dialog in enumerate(dialogs)
            if self._is_safe(dialog, i, allow_tags)
        }
        texts = self._complete(named, params) if named else []
        predictions = dict(zip(named, texts, strict=True))
        refused = _refusal(logprobs=params.logprobs)
        answers = [predictions.get(f"dialog {i}", refused) for i in range(len(dialogs))]
        return [
            {**answer, "generation": {"role": "assistant", "content": answer["generation"]}}
            for answer in answers
        ]

    def stream_text(
        self,
        prompt: str,
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        *,
        stop: Sequence[str] | None = None,
        seed: int | None = None,
        params: SamplingParams | None = None,
    ) -> Generator[str, None, CompletionPrediction]:
        """As `text_completion` for one prompt, yielding text as soon as it is final.

        Concatenated, the pieces equal the generated text. The iterator's return value is the
        prediction.
        """
        params = _sampling(params, temperature, top_p, max_gen_len, seed, stop=stop)
        return self._stream_text("the prompt", self.tokenizer.encode(prompt, bos=True), params)

    def stream_chat(
        self,
        dialog: Dialog,
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        *,
        stop: Sequence[str] | None = None,
        seed: int | None = None,
        allow_tags: bool = False,
        params: SamplingParams | None = None,
    ) -> Generator[str, None, CompletionPrediction]:
        """As `chat_completion` for one dialog, yielding text as soon as it is final."""
        params = _sampling(params, temperature, top_p, max_gen_len, seed, stop=stop)
        if not self._is_safe(dialog, 0, allow_tags):
            return _stream_refusal()
        return self._stream_text("the dialog", self.chat_format.encode(dialog), params)

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
        n, args, n_words = len(prompts), self.model.params, self.tokenizer.n_words
        stop_tokens = frozenset(_checked_ids(params.stop_tokens, "stop_tokens", args.vocab_size))
        _checked_ids(params.logit_bias, "logit_bias", n_words)
        draws = self._draws(n, params.seed, seeds)
        # Under several ranks all do the same: none may run ahead of another's reader.
        read_ahead = READ_AHEAD if streams and self._ranks == 1 else None
        requests = []
        for i, (name, prompt) in enumerate(prompts.items()):
            ids = _checked_ids(prompt, name, args.vocab_size)
            text = Detokenizer(self.tokenizer, params.stop, ids if echo else ()) if is_text else None
            requests.append(
                Request(
                    ids,
                    params,
                    limit=_answer_limit(name, len(ids), params.max_gen_len, args),
                    draws=draws[i],
                    index=i if seeds is None and n <= args.max_batch_size else 0,
                    stop_tokens=stop_tokens,
                    detokenizer=text,
                    read_ahead=read_ahead,
                )
            )
        return requests

    def _draws(
        self, n: int, seed: int | None, seeds: Sequence[int] | None
    ) -> Sequence[Draws | Callable[[], Draws]]:
        """Where the random numbers of each of n prompts come from."""
        if seeds is not None:
            require(
                len(seeds) == n, f"seed has {len(seeds)} numbers, and there are {n} prompts: one each"
            )
            return [Draws(self._seeded(own)) for own in seeds]
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
    def _serving(self, requests: Sequence[Request]) -> Iterator[None]:
        """Run the body with `requests` in the engine; whatever ends it ends them."""
        self._require_usable()
        with ranks.waiting(self._runtime):
            if self._ranks > 1:
                self._compare_ranks(requests)
            self.engine.add(requests)
            try:
                yield
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
            engine.cache.invalidate_on_external_write()
            if self._check_ranks:
                call = {"prompts": [r.prompt for r in requests], "params": requests[0].params}
                held = ranks.compare_call(call | {"limits": [r.limit for r in requests]}, engine.cache.rows)
                for row, length in enumerate(held):
                    engine.cache.truncate(row, length)

    def _run(self, requests: Sequence[Request]) -> None:
        with self._serving(requests), self._progress(requests) as show:
            while not all(request.is_finished for request in requests):
                self.engine.advance()
                show()

    @contextmanager
    def _progress(self, requests: Sequence[Request]) -> Iterator[Callable[[], None]]:
        """A bar on a terminal, if there are more requests than rows."""
        few = len(requests) <= self.model.params.max_batch_size or self.rank != 0
        with tqdm(total=len(requests), unit="prompt", disable=True if few else None) as bar:

            def show() -> None:
                if not bar.disable:
                    bar.update(sum(request.is_finished for request in requests) - bar.n)

            yield show

    def _complete(
        self, prompts: Mapping[str, Sequence[int]], params: SamplingParams, *, echo: bool = False
    ) -> list[CompletionPrediction]:
        """Continue any number of prompts, on this copy of the model or on all of them."""
        requests = self._requests(prompts, params, is_text=True, echo=echo)

        def answer(part: Sequence[Request]) -> list[CompletionPrediction]:
            if part:
                self._run(part)
            return [_prediction(request, echo=echo) for request in part]

        if self._runtime is None or self._runtime.replicas == 1:
            return answer(requests)
        call = {"prompts": list(prompts.values()), "params": params}
        return ranks.run_data_parallel(self._runtime, requests, call, answer)

    def _stream(self, requests: Sequence[Request]) -> Generator[list[int | None], None, StreamResult]:
        with self._serving(requests):
            for t in count():
                while not all(len(r.tokens) > t or r.is_finished for r in requests):
                    self.engine.advance()
                for request in requests:
                    request.raise_error()
                    request.n_read = t + 1
                newest = [r.tokens[t] if len(r.tokens) > t else None for r in requests]
                if newest.count(None) == len(newest):
                    break
                yield newest
        return {
            "finish_reasons": [request.finish_reason for request in requests],
            "stop_reasons": [request.stop_reason for request in requests],
            "logprobs": [r.logprobs for r in requests] if requests[0].params.logprobs else None,
        }

    def _stream_text(
        self, name: str, ids: Sequence[int], params: SamplingParams
    ) -> Generator[str, None, CompletionPrediction]:
        (request,) = self._requests({name: ids}, params, streams=True, is_text=True)
        return self._pieces(request)

    def _pieces(self, request: Request) -> Generator[str, None, CompletionPrediction]:
        assert request.detokenizer is not None
        with self._serving([request]):
            while not request.is_finished:
                request.n_read = len(request.tokens)
                self.engine.advance()
                if piece := request.detokenizer.take():
                    yield piece
            if piece := request.detokenizer.take():
                yield piece
        return _prediction(request)

    # What a call needs.

    @contextmanager
    def _exclusive(self) -> Iterator[Engine]:
        self._require_usable()
        with self.engine.exclusive():
            self._require_usable()
            yield self.engine

    def _require_usable(self) -> None:
        require(self.model is not None, _CLOSED)
        require(
            self._process == os.getpid(),
            "this process was forked from the one that built this instance, and torch's threads do "
            "not survive that: start it with the method 'spawn'",
        )

    @property
    def _device(self) -> torch.device:
        self._require_usable()
        return self.model.rope_freqs.device

    @property
    def _ranks(self) -> int:
        return 1 if self._runtime is None else self._runtime.model_parallel_size

    def _is_safe(self, dialog: Dialog, i: int, allow_tags: bool) -> bool:
        self.chat_format.check(dialog, i)
        return allow_tags or not self.chat_format.has_tags(dialog)


_CLOSED = "this instance is closed: build another"


def _size(size: int | None, name: str, default: int) -> int:
    size = default if size is None else index(size)
    require(size >= 1, f"{name} {size}: it must be an integer above 0")
    return size


def _named(what: str, prompts: Sequence[Sequence[int]]) -> dict[str, Sequence[int]]:
    require(not isinstance(prompts, str), f"the prompts are {prompts!r:.80}: pass lists of token ids")
    return {f"{what} {i}": prompt for i, prompt in enumerate(prompts)}


def _checked_ids(ids: Iterable[int], name: str, vocab_size: int) -> list[int]:
    """Token ids as a list of ints; tensors and arrays are welcome."""
    checked = [index(id) for id in ids]
    wrong = next((id for id in checked if not 0 <= id < vocab_size), None)
    require(
        wrong is None, f"token {wrong!r:.40} of {name}: pass integers from 0 to {vocab_size - 1}"
    )
    return checked


def _answer_limit(name: str, n_tokens: int, max_gen_len: int | None, args: ModelArgs) -> int:
    """How many tokens may follow a prompt of `n_tokens`, which must fit."""
    require(n_tokens > 0, f"{name} is empty: it needs at least one token, such as BOS")
    if args.longest_chunk > 0:  # the ring may wrap: there is no limit
        return args.max_seq_len if max_gen_len is None else max_gen_len
    room = args.max_seq_len - n_tokens
    require(
        room >= 0,
        f"{name} has {n_tokens} tokens, and max_seq_len is {args.max_seq_len}: "
        "shorten it, or build with a larger max_seq_len",
    )
    require(
        args.sliding_window is None or (max_gen_len or 0) <= room,
        f"{name} has {n_tokens} tokens and max_gen_len is {max_gen_len}, and a window of "
        f"{args.sliding_window} does not slide in a max_seq_len of {args.max_seq_len}: "
        "build with a larger max_seq_len, or a smaller sliding_window",
    )
    return room if max_gen_len is None else min(max_gen_len, room)


def _sampling(
    params: SamplingParams | None,
    temperature: float,
    top_p: float,
    max_gen_len: int | None,
    seed: int | None,
    *,
    logprobs: bool = False,
    echo: bool = False,
    stop: Sequence[str] | None = None,
    stop_tokens: Sequence[int] | None = None,
) -> SamplingParams:
    """`params`, or those that a call's own arguments make."""
    if params is not None:
        return replace(params, prompt_logprobs=params.logprobs and echo)
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        max_gen_len=max_gen_len,
        seed=seed,
        stop=() if stop is None else stop,
        stop_tokens=() if stop_tokens is None else stop_tokens,
        logprobs=logprobs,
        prompt_logprobs=logprobs and echo,
    )


def _prediction(request: Request, *, echo: bool = False) -> CompletionPrediction:
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


def _refusal(*, logprobs: bool) -> CompletionPrediction:
    """An answer that the model was not asked for."""
    found: CompletionPrediction = {"generation": UNSAFE_ERROR, "finish_reason": "stop"}
    return {**found, "tokens": [], "logprobs": []} if logprobs else found


def _stream_refusal() -> Generator[str, None, CompletionPrediction]:
    yield UNSAFE_ERROR
    return _refusal(logprobs=False)


def _warn_beyond_context(max_seq_len: int, context: int | None) -> None:
    if max_seq_len > (context or max_seq_len):
        warnings.warn(
            f"max_seq_len {max_seq_len} is beyond the {context} positions that the model was "
            "trained on: answers that reach there are likely to be poor",
            stacklevel=3,
        )

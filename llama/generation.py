"""Llama: build an instance, then prompts in, tokens or text out.

`_decode` is the only way to the loop in `decoding.py`. `generate` collects it, `stream` passes it
on, and the text-level calls turn its tokens into text as they come.
"""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from llama import cache_file
from llama import engine as decoding
from llama.cache_file import CachedRow
from llama.chat import (  # noqa: F401 (callers of the original import these from here)
    B_INST,
    B_SYS,
    E_INST,
    E_SYS,
    SPECIAL_TAGS,
    UNSAFE_ERROR,
    Dialog,
    Llama2Format,
    Message,
    Role,
)
from llama.checkpoints import reader as checkpoints
from llama.checkpoints.load import load_model, load_tokenizer
from llama.compile import CompiledStep, compile_step
from llama.detokenizer import Detokenizer, check_stop
from llama.engine import Row, Sampling
from llama.errors import (
    checked_flag,
    checked_ids,
    checked_list,
    checked_path,
    checked_whole,
    require,
)
from llama.model import ModelArgs, Transformer
from llama.parallel import groups as runtimes
from llama.parallel import ranks
from llama.predictions import (
    ChatPrediction,
    CompletionPrediction,
    StreamResult,
    prediction,
    refusal,
)
from llama.prefix_cache import CacheRecord
from llama.requests import batch_rows, checked_limit, prompt_row
from llama.sampling import checked_temperature, checked_top_p, make_generator, sample_top_p  # noqa: F401
from llama.sizes import usage
from llama.tokenizer import Tokenizer
from llama.turns import Turns

STORIES = Path(__file__).parent / "stories"  # the checkpoint that ships with the package


class Llama:
    """A model, its tokenizer, and the record of what each row of the cache holds.

    Threads that share an instance take turns. `close()`, or leaving a `with` block, frees the
    weights, the cache, and the process group if `build` made it.

    The arguments that the calls share:
        max_gen_len: new tokens for each prompt; None: as many as fit `max_seq_len`.
        temperature: 0 always takes the most likely token.
        top_p: draw from the smallest set of tokens whose probability exceeds it.
        logprobs: return natural logarithms of the model's probabilities, before temperature and
            top_p; position 0 of a prompt has none, and gets 0.
        echo: begin each answer with its prompt.
        stop, stop_tokens: texts, or ids, that end an answer as EOS does; not a part of it.
        seed: of this call's draws; None: the instance's own generator goes on.
    All raise LlamaError for what they cannot do, with the value, the limit and the remedy.
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
            tokenizer_path: None: `tokenizer.model` in that folder, or in the one above it.
            max_seq_len: positions in each row of the cache, prompt and answer; None: 512.
            max_batch_size: rows of the cache; None: 8.
            model_parallel_size: ranks that share one copy of the model; None: all there are.
            seed: of the instance's own generator; the global random state is not touched.
            device: None: CUDA if there is any, else MPS, else the CPU.
            dtype: None: float16 on CUDA and MPS, float32 on a CPU.
            sliding_window: positions that a query sees, its own included; None: as the checkpoint
                says. With a window no longer than `max_seq_len` there is no bound on the length of
                prompts and answers, and the cache has `window + prefill_chunk - 1` slots at most.
            prefill_chunk: prompts are read in pieces of at most this many tokens; None: whole.
            kv_cache_dtype: float32, bfloat16, float16 or int8; None: as the weights.
            quantize: int8 (a scale for each output) or int4 (for each group of at most 128 inputs);
                None: as the checkpoint is. On a CPU int8 rounds the activations too.
            compile: make one graph of a decoding step, here and now, which takes a while.
            timeout_s: how long a rank waits for another one.
            check_ranks: compare the calls of the ranks, and the tokens that they draw, at the price
                of one more small gather for each token.
            verbose: say on rank 0 how long it took.
        """
        start = time.monotonic()
        check_ranks = checked_flag(check_ranks, "check_ranks")
        compile, verbose = checked_flag(compile, "compile"), checked_flag(verbose, "verbose")
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
                step = (
                    compile_step(model, verbose=verbose and runtime.rank == 0) if compile else None
                )
            llama = Llama(model, tokenizer, seed=seed, replica=runtime.replica)
        except BaseException:
            runtimes.teardown(runtime)
            raise
        llama._runtime, llama._check_ranks, llama._step = runtime, check_ranks, step
        if runtime.rank == 0 and args.max_seq_len > (checkpoint.context or args.max_seq_len):
            warnings.warn(
                f"max_seq_len {args.max_seq_len} is beyond the {checkpoint.context} positions that "
                "the model was made for: answers that reach there are likely to be poor",
                stacklevel=2,
            )
        if verbose and runtime.rank == 0:
            print(f"Loaded in {time.monotonic() - start:.2f} seconds")
        return llama

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer, *, seed: int = 1, replica: int = 0
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._runtime: runtimes.Runtime | None = None
        self._check_ranks = False
        self._step: CompiledStep | None = None  # of the loop; None: the model itself
        self._closed, self._process = False, os.getpid()
        self._seed, self._replica = seed, replica
        self._generator = self._seeded(seed)
        self._record = CacheRecord()
        self._turns = Turns()

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

        What is under way in another thread ends with its present step, and says so there.
        """
        if self.model is None:
            return
        self._closed = True
        if self._turns.end_stream():
            self._free()
            return
        with self._turns.turn():
            self._free()

    def _free(self) -> None:
        self._step = None
        self.model = None  # type: ignore[assignment]  # what needs it asks _require_open first
        if self._runtime is not None:
            runtimes.teardown(self._runtime)

    def reset(self) -> None:
        """Zero the cache and forget what it held."""
        with self._turn():
            decoding.clear_cache(self.model, self._record)

    def cache(self, row: int = 0) -> CachedRow:
        """What a row of the cache holds: tokens, and keys and values of each layer."""
        with self._cache_turn():
            return cache_file.read_row(self.model, self._record, row)

    def memory(self) -> dict[str, int]:
        """Bytes on this rank: of the weights, of the cache, and of what is used of the cache."""
        with self._cache_turn():
            args, record = self.model.params, self._record
            held = sum(min(len(record.tokens(row)), args.n_slots) for row in record.rows)
            return usage(self.model, held)

    def save_cache(self, path: str | Path) -> None:
        """Write what the cache holds to a safetensors file, so that `load_cache` can go on."""
        with self._cache_turn():
            cache_file.save(self.model, self._record, path)

    def load_cache(self, path: str | Path) -> None:
        """Read what `save_cache` wrote for the same model; prompts that begin so go on from it."""
        with self._cache_turn():
            cache_file.load(self.model, self._record, path)

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
        seed: int | None = None,
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """Continue each of at most `max_batch_size` lists of ids.

        Returns the answers' ids, and their logprobs or None.
        """
        rows = batch_rows(prompt_tokens, max_gen_len, self._args)
        logprobs, echo = checked_flag(logprobs, "logprobs"), checked_flag(echo, "echo")
        how = self._sampling(temperature, top_p, seed)
        stop = self._stop_tokens(stop_tokens)
        for _ in self._decode(rows, how, stop, logprobs=logprobs, score=logprobs and echo):
            pass
        tokens = [row.prompt * echo + row.tokens for row in rows]
        return tokens, [row.all_logprobs(echo) for row in rows] if logprobs else None

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
    ) -> Generator[list[int | None], None, StreamResult]:
        """As `generate`, one step at a time: yields the new token of each row.

        None stands for a row that has ended; EOS and stop tokens are not yielded. The iterator's
        return value tells why each row ended. Until it is exhausted or closed, other threads wait.
        """
        rows = batch_rows(prompt_tokens, max_gen_len, self._args)
        how = self._sampling(temperature, top_p, seed)
        logprobs = checked_flag(logprobs, "logprobs")
        return self._stream(rows, how, self._stop_tokens(stop_tokens), logprobs)

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
    ) -> list[CompletionPrediction]:
        """Continue texts, any number of them, in batches of `max_batch_size`."""
        rows = [
            self._text_row(f"prompt {i}", prompt, max_gen_len)
            for i, prompt in enumerate(checked_list(prompts, "prompts"))
        ]
        require(len(rows) > 0, "there are no prompts: pass at least one text")
        how = self._sampling(temperature, top_p, seed)
        stop = check_stop(stop)
        logprobs, echo = checked_flag(logprobs, "logprobs"), checked_flag(echo, "echo")
        return self._complete(rows, how, stop, logprobs=logprobs, echo=echo)

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
    ) -> list[ChatPrediction]:
        """Answer dialogs, any number of them, in batches of `max_batch_size`.

        A dialog with a tag of the chat format in a message is answered with UNSAFE_ERROR, unless
        `allow_tags`.
        """
        dialogs, max_gen_len = checked_list(dialogs, "dialogs"), checked_limit(max_gen_len)
        logprobs = checked_flag(logprobs, "logprobs")
        require(len(dialogs) > 0, "there are no dialogs: pass at least one list of messages")
        rows = {
            i: self._dialog_row(i, dialog, max_gen_len)
            for i, dialog in enumerate(dialogs)
            if self._is_safe(dialog, i, allow_tags)
        }
        how, stop = self._sampling(temperature, top_p, seed), check_stop(stop)
        texts = self._complete(list(rows.values()), how, stop, logprobs=logprobs, echo=False)
        answers = [refusal(UNSAFE_ERROR, logprobs=logprobs) for _ in dialogs]
        for i, answer in zip(rows, texts, strict=True):
            answers[i] = answer
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
    ) -> Generator[str, None, CompletionPrediction]:
        """As `text_completion` for one prompt, in pieces, each as soon as it is certain.

        The pieces join to the generated text; the iterator's return value is the prediction.
        """
        row = self._text_row("the prompt", prompt, max_gen_len)
        return self._stream_row(row, self._sampling(temperature, top_p, seed), check_stop(stop))

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
    ) -> Generator[str, None, CompletionPrediction]:
        """As `chat_completion` for one dialog, in pieces, each as soon as it is certain."""
        how, stop = self._sampling(temperature, top_p, seed), check_stop(stop)
        max_gen_len = checked_limit(max_gen_len)
        if not self._is_safe(dialog, 0, allow_tags):
            return _stream_refusal()
        return self._stream_row(self._dialog_row(0, dialog, max_gen_len), how, stop)

    # From tokens to text.

    def _decode(
        self,
        rows: Sequence[Row],
        how: Sampling,
        stop_tokens: frozenset[int],
        *,
        logprobs: bool,
        score: bool = False,
    ) -> Iterator[list[int | None]]:
        agree, runtime = None, self._runtime
        with self._turn(), ranks.waiting(runtime):
            if self._check_ranks and runtime is not None and runtime.model_parallel_size > 1:
                ranks.check_call(rows, how, logprobs=logprobs, score=score, stop_tokens=stop_tokens)
                agree = ranks.check_tokens
            yield from self._turns.stream(
                decoding.decode(
                    self.model,
                    self._record,
                    rows,
                    how,
                    n_words=self.tokenizer.n_words,
                    stop_tokens=stop_tokens,
                    logprobs=logprobs,
                    score=score,
                    agree=agree,
                    step=self._step,
                ),
                self._require_open,
            )

    def _decode_text(
        self,
        rows: Sequence[Row],
        texts: Sequence[Detokenizer],
        how: Sampling,
        *,
        logprobs: bool,
        score: bool,
    ) -> Iterator[list[str]]:
        """Yields the text of each row that has become certain, and last what was held back."""
        stop_tokens = self._stop_tokens(None)
        for step in self._decode(rows, how, stop_tokens, logprobs=logprobs, score=score):
            pieces = []
            for text, token in zip(texts, step, strict=True):
                pieces.append("" if token is None else text.push(token))
            _end_stopped(rows, texts)
            yield pieces
        tails = [text.finish() for text in texts]
        _end_stopped(rows, texts)
        yield tails

    def _complete(
        self, rows: Sequence[Row], how: Sampling, stop: Sequence[str], *, logprobs: bool, echo: bool
    ) -> list[CompletionPrediction]:
        """Continue any number of rows, on this copy of the model or on all of them."""
        answer = functools.partial(self._answer, how=how, stop=stop, logprobs=logprobs, echo=echo)
        if self._runtime is None or self._runtime.replicas == 1:
            return answer(rows)
        return ranks.share(self._runtime, rows, how, answer)

    def _answer(
        self, rows: Sequence[Row], how: Sampling, stop: Sequence[str], *, logprobs: bool, echo: bool
    ) -> list[CompletionPrediction]:
        """As `_complete`, on this copy of the model."""
        texts = [Detokenizer(self.tokenizer, stop, row.prompt * echo) for row in rows]
        size = self._args.max_batch_size
        for i in range(0, len(rows), size):
            batch = rows[i : i + size], texts[i : i + size]
            for _ in self._decode_text(*batch, how, logprobs=logprobs, score=logprobs and echo):
                pass
        pairs = zip(rows, texts, strict=True)
        return [prediction(row, text, logprobs=logprobs, echo=echo) for row, text in pairs]

    def _stream(
        self, rows: Sequence[Row], how: Sampling, stop_tokens: frozenset[int], logprobs: bool
    ) -> Generator[list[int | None], None, StreamResult]:
        yield from self._decode(rows, how, stop_tokens, logprobs=logprobs)
        return {
            "finish_reasons": [row.finish_reason for row in rows],
            "logprobs": [row.logprobs for row in rows] if logprobs else None,
        }

    def _stream_row(
        self, row: Row, how: Sampling, stop: Sequence[str]
    ) -> Generator[str, None, CompletionPrediction]:
        text = Detokenizer(self.tokenizer, stop, [])
        for (piece,) in self._decode_text([row], [text], how, logprobs=False, score=False):
            if piece:
                yield piece
        return prediction(row, text)

    # What a call asks for, checked.

    def _require_open(self) -> None:
        require(not self._closed, "this instance is closed: build another")

    @property
    def _args(self) -> ModelArgs:
        self._require_open()
        return self.model.params

    @property
    def _device(self) -> torch.device:
        self._require_open()
        return self.model.rope_freqs.device

    def _text_row(self, name: str, text: str, max_gen_len: int | None) -> Row:
        ids = self.tokenizer.encode(text, bos=True)
        return prompt_row(name, ids, max_gen_len, self._args)

    def _dialog_row(self, i: int, dialog: Dialog, max_gen_len: int | None) -> Row:
        ids = Llama2Format(self.tokenizer).encode(dialog)
        return prompt_row(f"dialog {i}", ids, max_gen_len, self._args)

    def _is_safe(self, dialog: Dialog, i: int, allow_tags: bool) -> bool:
        chat = Llama2Format(self.tokenizer)
        chat.check(dialog, i)
        return checked_flag(allow_tags, "allow_tags") or not chat.has_tags(dialog)

    def _sampling(self, temperature: float, top_p: float, seed: int | None) -> Sampling:
        temperature, top_p = checked_temperature(temperature), checked_top_p(top_p)
        if seed is not None:
            return Sampling(temperature, top_p, self._seeded(seed))
        if self._generator.device != self._device:  # the caller has moved the model
            self._generator = self._seeded(self._seed)
        return Sampling(temperature, top_p, self._generator)

    def _seeded(self, seed: int) -> torch.Generator:
        return make_generator(self._device, seed, self._replica)

    def _stop_tokens(self, stop_tokens: Sequence[int] | None) -> frozenset[int]:
        ids = [] if stop_tokens is None else stop_tokens
        return frozenset(checked_ids(ids, "stop_tokens", self._args.vocab_size)) | {
            self.tokenizer.eos_id
        }

    @contextmanager
    def _turn(self) -> Iterator[None]:
        require(
            self._process == os.getpid() or torch.get_num_threads() == 1,
            "this process was forked from the one that built this instance, and torch's threads do "
            "not outlive that: start it with the method 'spawn', or call torch.set_num_threads(1)",
        )
        with self._turns.turn():
            self._require_open()
            yield

    @contextmanager
    def _cache_turn(self) -> Iterator[None]:
        with self._turn(), self._record.watch(self.model):
            yield


def _size(size: int | None, name: str, default: int) -> int:
    return default if size is None else checked_whole(size, name, 1)


def _end_stopped(rows: Sequence[Row], texts: Sequence[Detokenizer]) -> None:
    """End the rows in whose text a stop string was found."""
    for row, text in zip(rows, texts, strict=True):
        if text.stop is not None:
            row.finish_reason = "stop"


def _stream_refusal() -> Generator[str, None, CompletionPrediction]:
    yield UNSAFE_ERROR
    return refusal(UNSAFE_ERROR)

"""Llama: build an instance, then prompts in, tokens or text out.

Every call is a client of the engine: check the bounds, encode, add requests, step until they have
finished, return.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Generator, Mapping, Sequence
from itertools import count
from pathlib import Path

import torch

from llama.chat import (  # noqa: F401 (callers of the original import these from here)
    B_INST,
    B_SYS,
    E_INST,
    E_SYS,
    SPECIAL_TAGS,
    UNSAFE_ERROR,
    Dialog,
    Message,
    Role,
    choose_chat_format,
)
from llama.checkpoints.load import load_model, load_tokenizer, open_checkpoint
from llama.compile import compile_step
from llama.engine import Request
from llama.errors import checked_path, require
from llama.model import ModelArgs
from llama.parallel import groups, ranks
from llama.predictions import (
    ChatPrediction,
    CompletionPrediction,
    StreamResult,
    prediction,
    refusal,
)
from llama.sampling import (
    SamplingParams,
    sample_top_p,  # noqa: F401 (the original has it here)
)
from llama.session import Session

STORIES = Path(__file__).parent / "stories"  # the checkpoint that ships with the package


class Llama(Session):
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
        adapter: str | Path | None = None,
        chat_format: str | None = None,
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
            adapter: a folder with LoRA, as PEFT saves it, which is added to the weights.
            chat_format: llama2, llama3, mistral, or a Jinja template; None: as the checkpoint says.
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
            check_ranks: compare the arguments of each call between the ranks.
            verbose: say on rank 0 how long it took.
        """
        start = time.monotonic()
        ckpt_dir = STORIES if ckpt_dir is None else checked_path(ckpt_dir, "ckpt_dir")
        checkpoint = open_checkpoint(ckpt_dir, adapter=adapter)
        given = {"max_seq_len": max_seq_len, "max_batch_size": max_batch_size}
        given |= {"sliding_window": sliding_window, "prefill_chunk": prefill_chunk}
        given = {name: value for name, value in given.items() if value is not None}
        args = ModelArgs(**{**checkpoint.params, "max_seq_len": 512, "max_batch_size": 8, **given})
        tokenizer = load_tokenizer(checkpoint, tokenizer_path)
        dialogs = choose_chat_format(tokenizer, checkpoint.text, chat_format)
        runtime = groups.setup(
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
                "adapter": adapter is not None,
                "chat_format": chat_format,
            },
        )
        try:
            with ranks.waiting_to_load(runtime):
                model = load_model(args, checkpoint, runtime, kv_cache_dtype, quantize)
                llama = Llama(model, tokenizer, seed=seed, replica=runtime.replica)
                llama.chat_format = dialogs
                if compile:
                    announce = verbose and runtime.rank == 0
                    llama.engine.decode_step = compile_step(model, verbose=announce)
        except BaseException:
            groups.teardown(runtime)
            raise
        llama.attach(runtime, check_ranks=check_ranks)
        if runtime.rank == 0:
            _warn_beyond_context(args.max_seq_len, checkpoint.context)
            if verbose:
                print(f"Loaded in {time.monotonic() - start:.2f} seconds")
        return llama

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
        seed, seeds = (None, seed) if isinstance(seed, Sequence) else (seed, None)
        params = params or SamplingParams(
            temperature, top_p, max_gen_len, seed, None, stop_tokens, logprobs
        )
        # The bounds are checked here, before any work.
        requests = self._requests(_named("prompt", prompt_tokens), params, seeds=seeds, echo=echo)
        with self._serving(requests) as show_progress:
            for request in requests:
                while not request.is_finished:
                    self.engine.advance()  # one step: prefill or decode, sample, for all requests
                    show_progress()
        tokens = [(request.prompt if echo else []) + request.tokens for request in requests]
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
        params = params or SamplingParams(
            temperature, top_p, max_gen_len, seed, None, stop_tokens, logprobs
        )
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
        params = params or SamplingParams(
            temperature, top_p, max_gen_len, seed, stop, logprobs=logprobs
        )
        require(not isinstance(prompts, str), f"prompts is {prompts!r:.80}: pass a list of texts")
        named = {
            f"prompt {i}": self.tokenizer.encode(prompt, bos=self.tokenizer.adds_bos)
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
        params = params or SamplingParams(
            temperature, top_p, max_gen_len, seed, stop, logprobs=logprobs
        )
        require(len(dialogs) > 0, "there are no dialogs: pass at least one list of messages")
        named = {
            f"dialog {i}": self.chat_format.encode(dialog)
            for i, dialog in enumerate(dialogs)
            if self._is_safe(dialog, i, allow_tags)
        }
        texts = self._complete(named, params) if named else []
        predictions = dict(zip(named, texts, strict=True))
        refused = refusal(logprobs=params.logprobs)
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
        params = params or SamplingParams(temperature, top_p, max_gen_len, seed, stop)
        ids = self.tokenizer.encode(prompt, bos=self.tokenizer.adds_bos)
        return self._stream_text("the prompt", ids, params)

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
        params = params or SamplingParams(temperature, top_p, max_gen_len, seed, stop)
        if not self._is_safe(dialog, 0, allow_tags):
            return _stream_refusal()
        return self._stream_text("the dialog", self.chat_format.encode(dialog), params)

    # From requests to answers.

    def _complete(
        self, prompts: Mapping[str, Sequence[int]], params: SamplingParams, *, echo: bool = False
    ) -> list[CompletionPrediction]:
        """Continue any number of prompts, on this copy of the model or on all of them."""
        requests = self._requests(prompts, params, is_text=True, echo=echo)

        def answer(part: Sequence[Request]) -> list[CompletionPrediction]:
            if part:
                self._run(part)
            return [prediction(request, echo=echo) for request in part]

        if self._runtime is None or self._runtime.replicas == 1:
            return answer(requests)
        call = {"prompts": list(prompts.values()), **vars(params)}
        return ranks.run_data_parallel(self._runtime, requests, call, answer)

    def _stream(
        self, requests: Sequence[Request]
    ) -> Generator[list[int | None], None, StreamResult]:
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
        return prediction(request)

    def _is_safe(self, dialog: Dialog, i: int, allow_tags: bool) -> bool:
        self.chat_format.check(dialog, i)
        return allow_tags or not self.chat_format.has_tags(dialog)


def _named(what: str, prompts: Sequence[Sequence[int]]) -> dict[str, Sequence[int]]:
    require(
        not isinstance(prompts, str), f"the prompts are {prompts!r:.80}: pass lists of token ids"
    )
    return {f"{what} {i}": prompt for i, prompt in enumerate(prompts)}


def _stream_refusal() -> Generator[str, None, CompletionPrediction]:
    yield UNSAFE_ERROR
    return refusal(logprobs=False)


def _warn_beyond_context(max_seq_len: int, context: int | None) -> None:
    if max_seq_len > (context or max_seq_len):
        warnings.warn(
            f"max_seq_len {max_seq_len} is beyond the {context} positions that the model was "
            "trained on: answers that reach there are likely to be poor",
            stacklevel=3,
        )

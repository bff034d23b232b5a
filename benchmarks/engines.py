"""The engines that speed.py compares, each in a process of its own, which answers on its output.

Each reads the same weights; `run(prompts, gen_len)` yields the first token of each row as soon as
it is there, and then each further one.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from loading import Peak

from llama.checkpoints.files import DTYPES
from llama.checkpoints.load import load_model, open_checkpoint
from llama.compile import compile_step
from llama.engine import Engine
from llama.model import ModelArgs
from llama.parallel import groups
from llama.requests import Request
from llama.sampling import Draws, SamplingParams


class Ours:
    """This library, from the folder to the engine that every call of `Llama` is a client of."""

    def __init__(self, case: dict[str, Any]) -> None:
        setup = groups.setup(device=case["device"], dtype=case["dtype"])
        checkpoint = open_checkpoint(case["folder"])
        args = ModelArgs(
            **checkpoint.params, max_seq_len=case["max_seq_len"], max_batch_size=case["batch"]
        )
        self.model = load_model(args, checkpoint, setup, None, case["quantize"])
        self.engine = Engine(self.model, n_words=args.vocab_size, eos_ids=())
        if case["compile"]:
            self.engine.decode_step = compile_step(self.model, verbose=False)

    def run(
        self, prompts: list[list[int]], gen_len: int, *, keep_cache: bool = False
    ) -> Iterator[list[int]]:
        if not keep_cache:
            self.engine.cache.forget()
        requests = [greedy(prompt, gen_len) for prompt in prompts]
        self.engine.add(requests)
        for t in range(gen_len):
            while any(len(request.tokens) <= t for request in requests):
                self.engine.advance()
            yield [request.tokens[t] for request in requests]


def greedy(prompt: list[int], gen_len: int) -> Request:
    """A request for exactly `gen_len` tokens."""
    return Request(prompt, SamplingParams(temperature=0), gen_len, unused_draws)


def unused_draws() -> Draws:
    raise AssertionError("temperature 0 draws nothing")


class Transformers:
    """A loop over the model of transformers, with its own cache; rows are padded on the left."""

    def __init__(self, case: dict[str, Any]) -> None:
        from transformers import AutoModelForCausalLM, DynamicCache

        self.model = AutoModelForCausalLM.from_pretrained(
            case["folder"] + "-hf", dtype=DTYPES[case["dtype"]], attn_implementation="sdpa"
        ).to(case["device"])
        self.new_cache = DynamicCache
        arguments = inspect.signature(type(self.model).forward).parameters
        self.cache_name = "cache" if "cache" in arguments else "past_key_values"  # of old versions

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], gen_len: int) -> Iterator[list[int]]:
        width, cache = max(map(len, prompts)), {self.cache_name: self.new_cache()}
        device = self.model.device
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        is_ragged = bool((mask == 0).any())
        for _ in range(gen_len):
            out = self.model(
                ids,
                attention_mask=mask if is_ragged else None,
                position_ids=positions,
                **cache,
                use_cache=True,
                logits_to_keep=1,
            )
            ids = out.logits[:, -1:].argmax(-1)
            positions = positions[:, -1:] + 1
            mask = F.pad(mask, (0, 1), value=1)
            yield ids[:, 0].tolist()


class LlamaCpp:
    """llama.cpp through its Python binding, one row."""

    def __init__(self, case: dict[str, Any]) -> None:
        import llama_cpp

        self.model = llama_cpp.Llama(
            f"{case['folder']}.{case['gguf']}.gguf",
            n_ctx=case["max_seq_len"],
            n_batch=case["max_seq_len"],
            n_threads=case["threads"],
            n_threads_batch=case["threads"],
            verbose=False,
        )

    def run(self, prompts: list[list[int]], gen_len: int) -> Iterator[list[int]]:
        self.model.reset()
        token, (feed,) = 0, prompts
        for _ in range(gen_len):
            self.model.eval(feed)
            logits = self.model._ctx.get_logits_ith(-1)
            token = max_of(logits, self.model.n_vocab())
            feed = [token]
            yield feed


def max_of(logits: Any, n: int) -> int:
    import numpy

    return int(numpy.ctypeslib.as_array(logits, shape=(n,)).argmax())


class OriginalLoop:
    """A plain decoder in the manner of the original code: complex rotary embedding, repeated heads,
    softmax written out, every product on its own, logits for every position.
    """

    def __init__(self, case: dict[str, Any]) -> None:
        checkpoint = open_checkpoint(case["folder"])
        dtype = DTYPES[case["dtype"]]
        self.args, self.device = checkpoint.args, torch.device(case["device"])
        self.weights = {
            name: checkpoint.read(name, dtype=dtype, device=self.device)
            for name in checkpoint.parameters
        }
        args = self.args
        shape = (case["batch"], case["max_seq_len"], args.kv_heads, args.head_dim)
        self.caches = [
            [torch.zeros(shape, dtype=dtype, device=self.device) for _ in "kv"]
            for _ in range(args.n_layers)
        ]
        frequencies = 10000.0 ** (-torch.arange(0, args.head_dim, 2) / args.head_dim)
        angles = torch.outer(torch.arange(case["max_seq_len"]), frequencies)
        self.turns = torch.polar(torch.ones_like(angles), angles).to(self.device)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.args.norm_eps)
        return wide.type_as(x) * self.weights[name]

    def turn(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turns[None, :, None]).flatten(-2).type_as(x)

    def forward(self, tokens: torch.Tensor, start: int) -> torch.Tensor:
        args, w, (bsz, n) = self.args, self.weights, tokens.shape
        h, turns = F.embedding(tokens, w["tok_embeddings.weight"]), self.turns[start : start + n]
        mask = torch.full((n, start + n), float("-inf"), device=self.device).triu(start + 1)
        for i, (cache_k, cache_v) in enumerate(self.caches):
            name = f"layers.{i}."
            x = self.norm(h, name + "attention_norm.weight")
            q, k, v = (
                F.linear(x, w[f"{name}attention.w{c}.weight"]).view(bsz, n, -1, args.head_dim)
                for c in "qkv"
            )
            q, k = self.turn(q, turns), self.turn(k, turns)
            cache_k[:bsz, start : start + n], cache_v[:bsz, start : start + n] = k, v
            repeat = args.n_heads // args.kv_heads
            k, v = (
                c[:bsz, : start + n].repeat_interleave(repeat, 2).transpose(1, 2)
                for c in (cache_k, cache_v)
            )
            scores = q.transpose(1, 2) @ k.transpose(2, 3) / args.head_dim**0.5 + mask
            y = (scores.float().softmax(-1).type_as(q) @ v).transpose(1, 2).flatten(2)
            h = h + F.linear(y, w[name + "attention.wo.weight"])
            x = self.norm(h, name + "ffn_norm.weight")
            gate = F.silu(F.linear(x, w[name + "feed_forward.w1.weight"]))
            up = F.linear(x, w[name + "feed_forward.w3.weight"])
            h = h + F.linear(gate * up, w[name + "feed_forward.w2.weight"])
        return F.linear(self.norm(h, "norm.weight"), w["output.weight"]).float()

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], gen_len: int) -> Iterator[list[int]]:
        """In the original's order: the shortest prompt first, then longer ones fed by the token."""
        start, end = 0, min(map(len, prompts))
        tokens = torch.zeros(len(prompts), max(map(len, prompts)) + gen_len, dtype=torch.int64)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        tokens = tokens.to(self.device)
        for position in range(end, tokens.shape[1]):
            logits = self.forward(tokens[:, start:position], start)
            chosen = logits[:, -1].argmax(-1)
            given = torch.tensor([position < len(p) for p in prompts], device=self.device)
            tokens[:, position] = torch.where(given, tokens[:, position], chosen)
            start = position
            yield chosen.tolist()


ENGINES: dict[str, Any] = {
    "ours": Ours,
    "transformers": Transformers,
    "llama-cpp": LlamaCpp,
    "original-loop": OriginalLoop,
}


def main(case: dict[str, Any]) -> None:
    torch.set_num_threads(case["threads"])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an engine prints is not an answer
    synchronize = torch.cuda.synchronize if case["device"] == "cuda" else lambda: None
    start = time.perf_counter()
    with Peak() as peak:
        engine = ENGINES[case["engine"]](case)
    loaded = {"load_s": time.perf_counter() - start, "peak_gb": peak.bytes / 1e9}
    print(json.dumps(loaded), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        times = [time.perf_counter()]
        for _ in engine.run(asked["prompts"], asked["gen_len"]):
            synchronize()
            times.append(time.perf_counter())
        print(json.dumps([b - a for a, b in pairwise(times)]), file=answers)
        answers.flush()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(json.loads(sys.argv[1]))

"""Throughput of many requests of random lengths: continuous batching against fixed groups.

python benchmarks/throughput.py --peers transformers
python benchmarks/throughput.py --quantize int8

64 requests, prompts and answers of 16 to 256 random tokens, 8 rows, EOS ignored, shape 110m. In
turn in one run: this engine; the same engine with fixed groups of 8, each waiting for its slowest;
`generate` of transformers with padded groups of 8; and transformers' own continuous batching.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import speed_weights as weights
import torch
from engines import Ours, greedy

from llama.cli import run

N_REQUESTS, N_ROWS, SHORTEST, LONGEST = 64, 8, 16, 256
VOCAB = 32000


def requests() -> list[tuple[list[int], int]]:
    """Prompts, and how many tokens to answer each with."""
    rng = random.Random(0)
    prompt_lengths = [rng.randint(SHORTEST, LONGEST) for _ in range(N_REQUESTS)]
    answer_lengths = [rng.randint(SHORTEST, LONGEST) for _ in range(N_REQUESTS)]
    return [
        ([rng.randrange(3, VOCAB) for _ in range(n)], m)
        for n, m in zip(prompt_lengths, answer_lengths, strict=True)
    ]


def serve(ours: Ours, group: int) -> None:
    """Give the engine the requests in groups of this size."""
    asked = [greedy(prompt, n) for prompt, n in requests()]
    ours.engine.cache.forget()
    for i in range(0, len(asked), group):
        part = asked[i : i + group]
        ours.engine.add(part)
        while not all(request.is_finished for request in part):
            ours.engine.advance()
    assert all(len(request.tokens) == request.limit for request in asked)


class Transformers:
    """The same weights in transformers."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            folder + "-hf", dtype=torch.float32, attn_implementation="sdpa"
        )

    @torch.inference_mode()
    def padded_groups(self) -> None:
        """Groups of 8, padded on the left; each generates as much as its longest answer."""
        asked = requests()
        for i in range(0, len(asked), N_ROWS):
            group = asked[i : i + N_ROWS]
            width = max(len(prompt) for prompt, _ in group)
            ids = torch.tensor([[0] * (width - len(p)) + p for p, _ in group])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in group])
            n = max(n for _, n in group)
            self.model.generate(
                ids, attention_mask=mask, min_new_tokens=n, max_new_tokens=n, do_sample=False
            )

    @torch.inference_mode()
    def continuous_batching(self) -> None:
        """Its own engine; every request gets the longest answer's limit, which it has one of."""
        from transformers import GenerationConfig

        asked = requests()
        config = GenerationConfig(max_new_tokens=LONGEST, eos_token_id=-1, do_sample=False)
        self.model.generate_batch([prompt for prompt, _ in asked], generation_config=config)


def main(rounds: int = 3, threads: int = 2, quantize: str | None = None, peers: str = "") -> None:
    """Print new tokens per second of each engine, the median of the rounds, and the ratios."""
    torch.set_num_threads(threads)
    path = weights.meta("110m", "float32")
    weights.hugging_face(path)
    folder = str(path)
    case: dict[str, Any] = {"device": "cpu", "dtype": "float32", "folder": folder}
    case |= {"max_seq_len": 2 * LONGEST, "batch": N_ROWS, "quantize": quantize, "compile": False}
    ours = Ours(case)
    runs: dict[str, Callable[[], None]] = {
        "ours": lambda: serve(ours, N_REQUESTS),
        "fixed groups": lambda: serve(ours, N_ROWS),
    }
    if "transformers" in peers:
        theirs = Transformers(folder)
        runs["transformers, padded groups"] = theirs.padded_groups
        runs["transformers, continuous"] = theirs.continuous_batching
    n_new = sum(n for _, n in requests())
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, serve_all in runs.items():
            start = time.perf_counter()
            serve_all()
            speeds[name].append(n_new / (time.perf_counter() - start))
    for name, values in speeds.items():
        ratio = median(a / b for a, b in zip(speeds["ours"], values, strict=True))
        print(f"{name:30} {median(values):8.1f} tokens/s   ours / it: {ratio:.2f}")


if __name__ == "__main__":
    run(main)

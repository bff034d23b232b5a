"""How cost grows, on random weights: as measured, and as counting bytes and products says.

python benchmarks/growth.py --shape 110m --plot growth.png

Decoding over the context and over the batch, prefill over the length, and ten turns of a chat with
and without the memory of what the cache holds. A pass is expected to take as long as reading its
weights and its part of the cache takes, or multiplying, whichever is longer, at the rates of a
threaded read and of a product of large matrices, which are measured in the same run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import pairwise
from json import dumps
from pathlib import Path
from statistics import median
from typing import Any

import speed_weights as weights
import torch
from engines import Ours
from speed import cpu_name, machine_limits, random_prompts

from llama.cli import run
from llama.memory import usage

CONTEXTS = (128, 256, 512, 1024, 2048, 4096)
BATCHES = (1, 2, 4, 8, 16, 32)
GEN_LEN = 16
ROUNDS = 3
TURNS, FIRST_TURN, NEXT_TURN = 10, 128, 64  # tokens that each turn of the chat brings


class Costs:
    """The time that bytes and products take, by the machine's limits."""

    def __init__(self, engine: Ours, limits: dict[str, float]) -> None:
        model, self.limits = engine.model, limits
        self.args = model.params
        held = [p for p in model.parameters() if p is not model.tok_embeddings.weight]
        self.weight_bytes = sum(p.nbytes for p in held)
        self.numbers = sum(p.numel() for p in held)
        one_row = self.args.cache_bytes(torch.float32) / self.args.max_batch_size
        self.token_bytes = one_row / self.args.n_slots

    def ms(self, *, new: int, context: int, batch: int = 1) -> float:
        """Of one pass over `new` tokens of each row, the last of which sees `context` ones."""
        args, logits = self.args, self.args.vocab_size * self.args.dim
        products = (
            new * (self.numbers - logits) + logits + 2 * args.n_layers * args.dim * (new * context)
        )
        n_bytes = self.weight_bytes + batch * context * self.token_bytes
        reading = n_bytes / self.limits["read_gb_per_s"] / 1e6
        return max(reading, 2 * batch * products / self.limits["matrix_gflop_per_s"] / 1e6)


def times_ms(engine: Ours, prompts: list[list[int]], *, keep_cache: bool = False) -> Any:
    """Milliseconds to the first token, and of each further one."""
    times = [time.perf_counter()]
    for _ in engine.run(prompts, GEN_LEN, keep_cache=keep_cache):
        times.append(time.perf_counter())
    first, *rest = (1e3 * (b - a) for a, b in pairwise(times))
    return first, median(rest)


def medians(engine: Ours, prompts: list[list[int]]) -> tuple[float, float]:
    rounds = [times_ms(engine, prompts) for _ in range(ROUNDS)]
    return median(first for first, _ in rounds), median(rest for _, rest in rounds)


def over_context(engine: Ours, folder: Path, costs: Costs) -> dict[str, dict[str, list[float]]]:
    found = [medians(engine, random_prompts(folder, [n])) for n in CONTEXTS]
    return {
        "prefill": {
            "measured": [first for first, _ in found],
            "expected": [costs.ms(new=n, context=n) for n in CONTEXTS],
        },
        "decode": {
            "measured": [rest for _, rest in found],
            "expected": [costs.ms(new=1, context=n) for n in CONTEXTS],
        },
    }


def over_batch(engine: Ours, folder: Path, costs: Costs) -> dict[str, list[float]]:
    return {
        "measured": [medians(engine, random_prompts(folder, [128] * n))[1] for n in BATCHES],
        "expected": [costs.ms(new=1, context=128, batch=n) for n in BATCHES],
    }


def over_turns(engine: Ours, folder: Path, costs: Costs) -> dict[str, list[float]]:
    """Milliseconds to the first token of each turn, and MB of the cache that are in use."""
    found: dict[str, list[float]] = {"reuse": [], "expected": [], "used_mb": []}
    chats, cache = random_prompts(folder, [FIRST_TURN]), engine.engine.cache
    cache.forget()
    for turn in random_prompts(folder, [NEXT_TURN] * TURNS):
        chat, held = chats[-1], cache.longest(chats[-1])[0]
        found["reuse"].append(times_ms(engine, [chat], keep_cache=True)[0])
        found["expected"].append(costs.ms(new=len(chat) - held, context=len(chat)))
        found["used_mb"].append(usage(engine.model, cache.held_tokens)["used_bytes"] / 1e6)
        chats.append([*max(cache.rows, key=len), *turn])
    found["anew"] = [times_ms(engine, [chat])[0] for chat in chats[:TURNS]]
    return found


def main(shape: str = "110m", threads: int = 2, plot: str | None = None) -> None:
    """Print tables; the last line is JSON."""
    torch.set_num_threads(threads)
    limits = machine_limits("cpu", torch.float32)
    folder = weights.meta(shape, "float32")
    common = {"folder": str(folder), "device": "cpu", "dtype": "float32", "quantize": None}
    common["compile"] = False
    long = Ours({**common, "max_seq_len": CONTEXTS[-1] + GEN_LEN, "batch": 1})
    wide = Ours({**common, "max_seq_len": 128 + GEN_LEN, "batch": BATCHES[-1]})
    costs = Costs(long, limits)
    found: dict[str, Any] = over_context(long, folder, costs)
    found["batch"] = over_batch(wide, folder, costs)
    found["turns"] = over_turns(long, folder, costs)
    report(found)
    if plot is not None:
        draw(found, plot)
    machine = {"cpu": cpu_name(), "threads": threads, "load_average": os.getloadavg()[0]}
    print(dumps(found | limits | machine))


def report(found: dict[str, Any]) -> None:
    for name, xs in (("prefill", CONTEXTS), ("decode", CONTEXTS), ("batch", BATCHES)):
        line(name, xs)
        for kind, values in found[name].items():
            line(f"{kind}, ms", values)
    line("turn", range(1, TURNS + 1))
    for kind, values in found["turns"].items():
        line(kind if kind.endswith("mb") else f"{kind}, ms", values)


def line(name: str, values: Sequence[float]) -> None:
    print(f"{name:14}" + "".join(f"{value:>9,.5g}" for value in values))


def draw(found: dict[str, Any], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    panels = [
        ("prefill", CONTEXTS, "tokens in the prompt", "ms to the first token"),
        ("decode", CONTEXTS, "tokens in the cache", "ms per token"),
        ("batch", BATCHES, "rows in the batch", "ms per step"),
        ("turns", range(1, TURNS + 1), "turn of a chat", "ms to the first token"),
    ]
    for axes, (name, xs, x_label, y_label) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        curves = dict(found[name])
        used = curves.pop("used_mb", None)
        for kind, values in curves.items():
            axes.plot(xs, values, "--" if kind == "expected" else "o-", markersize=3, label=kind)
        axes.set(xlabel=x_label, ylabel=y_label, ylim=0)
        if used is not None:
            memory = axes.twinx()
            memory.plot(xs, used, ":", color="black")
            memory.set(ylabel="MB of the cache in use (dotted)", ylim=0)
        axes.legend(loc="upper left")
    figure.savefig(path)


if __name__ == "__main__":
    run(main)

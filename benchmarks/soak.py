"""Does anything grow, or change, while an instance is used for long?

    python benchmarks/soak.py --seconds 600

A mix of calls, drawn by a seed: texts, chats, streams that are left half way, stop strings, batches
of every size, mistakes, saved caches, and further instances that are built (quantized too) and
closed. The first third is for warming up. The medians of memory, threads and open files over the
last third are compared with those over the second one, and the first call is made once more.

At the end it prints a line of figures, and exits with status 1 if the anonymous memory has grown by
more than `GROWTH_BYTES`, if there are more threads or files, or if the answer is another one.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median

import torch

from llama import Llama, LlamaError
from llama.cli import run
from llama.device import trim_memory
from llama.generation import STORIES
from llama.model import ModelArgs
from llama.parameters import parameters

GROWTH_BYTES = 16 * 2**20  # what the allocator may keep; an instance of the shipped model takes 14
BATCH = 4
PROMPTS = [
    "Once upon a time",
    "One day, a little girl named Lily",
    "Tom",
    "",
    "The bird \U0001f426",
]
FIRST = {"temperature": 0, "max_gen_len": 24, "logprobs": True}


def say(llama: Llama, rng: random.Random) -> None:
    """Texts, more of them than rows at times."""
    prompts = [rng.choice(PROMPTS) * rng.randint(1, 4) for _ in range(rng.randint(1, BATCH + 2))]
    options = {"logprobs": rng.random() < 0.5, "echo": rng.random() < 0.3}
    stop = rng.choice([None, ["."], ["dog", "\n", "a very long text that never comes"]])
    llama.text_completion(
        prompts, rng.choice([0, 0.6, 2]), max_gen_len=rng.randint(0, 30), stop=stop, **options
    )


def chat(llama: Llama, rng: random.Random) -> None:
    """A dialog of a few turns, each of which goes on from the cache."""
    dialog = []
    for _ in range(rng.randint(1, 4)):
        dialog.append({"role": "user", "content": rng.choice(PROMPTS) + "?"})
        dialog.append(llama.chat_completion([dialog], max_gen_len=12)[0]["generation"])


def generate(llama: Llama, rng: random.Random) -> None:
    """Ids, in a ragged batch."""
    ids = [[1, *(rng.randrange(3, 1000) for _ in range(rng.randint(0, 40)))] for _ in range(BATCH)]
    llama.generate(ids[: rng.randint(1, BATCH)], rng.randint(0, 20), seed=rng.randrange(9))


def leave_a_stream(llama: Llama, rng: random.Random) -> None:
    """Closed, or left to the garbage collector."""
    stream = llama.stream_text(rng.choice(PROMPTS), stop=["xyz"])
    for _ in range(rng.randint(0, 8)):
        next(stream, None)
    if rng.random() < 0.5:
        stream.close()


def be_mistaken(llama: Llama, rng: random.Random) -> None:
    """None of these can be answered."""
    calls: list[Callable[[], object]] = [
        lambda: llama.generate([[10**9]]),
        lambda: llama.generate([[1], []]),
        lambda: llama.text_completion(["a" * 5000]),
        lambda: llama.text_completion(["\ud800"]),
        lambda: llama.chat_completion([[]]),
        lambda: llama.load_cache(__file__),
        lambda: Llama.build(os.devnull, verbose=False),
        lambda: Llama.build(max_seq_len=2**60, verbose=False),
    ]
    try:
        rng.choice(calls)()
    except LlamaError:
        return
    raise RuntimeError("a mistake was answered")


def keep_the_cache(llama: Llama, rng: random.Random) -> None:
    """Save it, forget it, and go on from the file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cache.safetensors"
        llama.save_cache(file)
        if rng.random() < 0.5:
            llama.reset()
        llama.load_cache(file)
        say(llama, rng)


def build_another(llama: Llama, rng: random.Random) -> None:
    """Of any kind, beside the first; one is closed with its stream still open."""
    kind = rng.choice([{}, {"quantize": "int8"}, {"quantize": "int4"}, {"kv_cache_dtype": "int8"}])
    window = rng.choice([{}, {"sliding_window": 16, "prefill_chunk": 8}])
    with Llama.build(max_seq_len=64, max_batch_size=2, verbose=False, **kind, **window) as other:
        other.text_completion(PROMPTS[:2], max_gen_len=8)
        stream = other.stream_text("Tom")
        next(stream)
    with suppress(LlamaError):
        next(stream)


STEPS = [say, say, chat, generate, leave_a_stream, be_mistaken, keep_the_cache, build_another]


def figures() -> dict[str, int]:
    """What must not grow."""
    gc.collect()
    trim_memory()
    status = Path("/proc/self/status").read_text().splitlines()
    fields = {name: value.split() for name, _, value in (line.partition(":") for line in status)}
    return {
        "memory_bytes": 1024 * int(fields["RssAnon"][0]),
        "threads": int(fields["Threads"][0]),
        "files": len(os.listdir("/proc/self/fd")),
    }


def soak(seconds: float, seed: int) -> tuple[list[str], dict[str, object]]:
    """What is wrong, and the figures."""
    rng, start = random.Random(seed), time.monotonic()
    before: list[dict[str, int]] = []  # in the second third; the first one is for warming up
    after: list[dict[str, int]] = []  # in the last
    calls = dict.fromkeys((step.__name__ for step in STEPS), 0)
    with Llama.build(max_seq_len=256, max_batch_size=BATCH, verbose=False) as llama:
        first = llama.text_completion(PROMPTS[:2], **FIRST)
        while (share := (time.monotonic() - start) / seconds) < 1:
            step = rng.choice(STEPS)
            step(llama, rng)
            calls[step.__name__] += 1
            if share > 1 / 3:
                (before if share < 2 / 3 else after).append(figures())
        llama.reset()
        is_same = llama.text_completion(PROMPTS[:2], **FIRST) == first
    means = [{key: median(f[key] for f in found) for key in found[0]} for found in (before, after)]
    growth = {key: means[1][key] - means[0][key] for key in means[0]}
    wrong = [f"{key}: {growth[key]:+g}" for key in ("threads", "files") if growth[key] > 0]
    if growth["memory_bytes"] > GROWTH_BYTES:
        wrong.append(f"memory: {growth['memory_bytes'] / 1e6:+.1f} MB")
    if not is_same:
        wrong.append("the first call has another answer at the end")
    facts = {
        "seconds": round(time.monotonic() - start),
        "calls": sum(calls.values()),
        "built": calls["build_another"],
        "memory_mb": f"{means[1]['memory_bytes'] / 1e6:.1f} ({growth['memory_bytes'] / 1e6:+.1f})",
        "threads": f"{means[1]['threads']:g} ({growth['threads']:+g})",
        "files": f"{means[1]['files']:g} ({growth['files']:+g})",
        "first_answer": "the same" if is_same else "another",
    }
    return wrong, facts


def growth_over_lengths(n_lengths: int, **options: object) -> tuple[float, float]:
    """MB of memory that prompts of so many lengths add, and that are left after `close()`."""
    args = ModelArgs(
        dim=512, n_layers=2, n_heads=8, vocab_size=1024, hidden_dim=2048, norm_eps=1e-5
    )
    generator = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        write_random(Path(folder), args, generator)
        gc.collect()
        start = figures()["memory_bytes"]
        llama = Llama.build(folder, max_seq_len=1664, max_batch_size=1, verbose=False, **options)
        lengths = torch.linspace(33, 1632, n_lengths).int().tolist()
        for length in lengths[:: max(1, n_lengths // 10)]:  # every kind of buffer once
            llama.reset()
            llama.generate([[1] * length], 1, 0)
        before = figures()["memory_bytes"]
        for length in lengths:
            llama.reset()  # or each prompt would be a prefix of the next
            llama.generate([[1] * length], 1, 0)
        after = figures()["memory_bytes"]
        llama.close()
        del llama
        left = figures()["memory_bytes"]
    return (after - before) / 1e6, (left - start) / 1e6


def write_random(folder: Path, args: ModelArgs, generator: torch.Generator) -> None:
    """A checkpoint of this shape, with the shipped tokenizer."""
    state = {
        name: torch.randn(p.shape, generator=generator) / p.shape[-1] ** 0.5
        for name, p in parameters(args).items()
    }
    torch.save(state, folder / "consolidated.00.pth")
    keys = ("dim", "n_layers", "n_heads", "vocab_size", "hidden_dim", "norm_eps")
    (folder / "params.json").write_text(json.dumps({key: getattr(args, key) for key in keys}))
    shutil.copy(STORIES / "tokenizer.model", folder)


def main(seconds: float = 600, seed: int = 0, lengths: int = 100, limit_mb: float = 10) -> None:
    """Use an instance for so long, then prompts of so many lengths in each width, and report."""
    torch.set_num_threads(1)
    wrong, facts = soak(seconds, seed)
    for name, options in {
        "float32": {},
        "bfloat16": {"dtype": "bfloat16"},
        "int8": {"quantize": "int8"},
    }.items():
        growth_mb, left_mb = growth_over_lengths(lengths, **options)
        facts[f"{lengths} lengths in {name}"] = f"{growth_mb:+.1f} MB, {left_mb:+.1f} after close"
        if growth_mb > limit_mb:
            wrong.append(f"{lengths} prompt lengths in {name}: {growth_mb:+.1f} MB")
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    if wrong:
        sys.exit("; ".join(wrong))


if __name__ == "__main__":
    run(main)

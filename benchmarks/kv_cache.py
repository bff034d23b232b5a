"""What the cache does to time and memory, on this machine's CPU.

python benchmarks/kv_cache.py growth --plot growth.png   this cache, one grown by torch.cat, none
python benchmarks/kv_cache.py window --plot window.png   latency over the position, with a window
python benchmarks/kv_cache.py prefill                    4096 tokens, whole and in chunks
python benchmarks/kv_cache.py dtypes                     bytes, logits and perplexity

All but the last use random weights. Times are those that one thread computes, so that other work
on the machine does not count; peaks are those of the resident set, in a process of its own (Linux).
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from llama import Llama, kv_cache
from llama import cli as terminal
from llama.model import ModelArgs, Transformer
from llama.parallel import groups as runtime

SHAPE = {"dim": 512, "n_layers": 8, "n_heads": 8, "hidden_dim": 1376, "vocab_size": 1024}
KINDS = ("pre-allocated", "torch.cat", "none")
LENGTHS = [128, 256, 512, 1024, 2048]
STEPS = 12
# What is freed goes back to the kernel at once: else a peak is also what was kept for later.
FREE_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def random_model(**args: Any) -> Transformer:
    runtime.setup(device="cpu", dtype="float32")
    model = Transformer(ModelArgs(**{**SHAPE, "max_batch_size": 1, **args}))
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    model.layers[0].feed_forward(torch.zeros(1, 64, model.params.dim))  # loads libraries
    return model.eval()


def random_tokens(n: int) -> torch.Tensor:
    return torch.randint(SHAPE["vocab_size"], (1, n), generator=torch.Generator().manual_seed(0))


def peak_bytes(run: Callable[[], None]) -> int:
    """The largest resident set during `run`, over that before it."""

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))

    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to VmRSS
    before = status("VmRSS")
    run()
    return status("VmHWM") - before


def in_new_process(command: str, *args: object, env: dict[str, str] | None = None) -> Any:
    """The JSON in the last line that a command of this file prints."""
    process = subprocess.run(
        [sys.executable, __file__, command, *map(str, args)],
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(process.stdout.splitlines()[-1])


# Three ways to know the past.


def use_another_cache(kind: str) -> None:
    """Replace this library's cache by one that grows with every token, or by none."""
    held: dict[int, torch.Tensor] = {}

    def write(cache: torch.Tensor, scales: None, x: torch.Tensor, *_: torch.Tensor) -> None:
        past = held.get(id(cache), x[:, :0])
        held[id(cache)] = torch.cat([past, x], dim=1) if kind == "torch.cat" else x

    def read(cache: torch.Tensor, *_: object) -> torch.Tensor:
        x = held[id(cache)] if kind == "torch.cat" else held.pop(id(cache))
        return x.transpose(1, 2)

    kv_cache.write, kv_cache.read = write, read


@torch.inference_mode()
def at_length(kind: str, n: int, measure: str) -> None:
    """Print the `ms` of a token after n tokens, or the `peak_mb` on the way there."""
    torch.manual_seed(0)
    model, tokens = random_model(max_seq_len=1), random_tokens(n + STEPS)
    model.params.max_seq_len = LENGTHS[-1] + STEPS
    times = []

    def run() -> None:
        if kind == "pre-allocated":
            model.allocate_state()
        else:
            use_another_cache(kind)
        if kind != "none":
            for start in range(0, n, 64):
                model(tokens[:, start : start + 64], start, only_last=True)
        for i in range(n, n + (3 if kind == "none" else STEPS)):
            start = time.thread_time()
            first = 0 if kind == "none" else i
            model(tokens[:, first : i + 1], first, only_last=True)
            times.append(1e3 * (time.thread_time() - start))

    peak = peak_bytes(run)
    print(json.dumps({"ms": min(times), "peak_mb": peak / 1e6}[measure]))


def growth(plot: str | None = None) -> None:
    """Time per token and peak memory over the length."""
    figures: dict[str, dict[str, list[float]]] = {"ms": {}, "peak_mb": {}}
    for measure, curves in figures.items():
        env = FREE_AT_ONCE if measure == "peak_mb" else {}
        print(f"{measure:12}" + "".join(f"{kind:>16}" for kind in KINDS))
        for n in LENGTHS:
            values = [in_new_process("at_length", kind, n, measure, env=env) for kind in KINDS]
            for kind, value in zip(KINDS, values, strict=True):
                curves.setdefault(kind, []).append(value)
            print(f"{n:<12}" + "".join(f"{value:16,.1f}" for value in values))
        slopes = [math.log2(curves[kind][-1] / curves[kind][-2]) for kind in KINDS]
        print(f"{'last slope':12}" + "".join(f"{slope:16.2f}" for slope in slopes))
    if plot is not None:
        draw(
            plot,
            [
                ("ms per token", LENGTHS, figures["ms"]),
                ("peak MB beside the weights", LENGTHS, figures["peak_mb"]),
            ],
        )


# A window, chunks, dtypes.


@torch.inference_mode()
def window(plot: str | None = None, window: int = 256, length: int = 2048) -> None:
    """Decode latency over the position, with and without a sliding window."""
    tokens, curves = random_tokens(length), {}
    bins = range(0, length, 128)
    for label, options in {
        f"window {window}": {"sliding_window": window, "prefill_chunk": 1},
        "full attention": {},
    }.items():
        model, times = random_model(max_seq_len=length, **options), []
        for i in range(length):
            start = time.thread_time()
            model(tokens[:, i : i + 1], i, only_last=True)
            times.append(1e3 * (time.thread_time() - start))
        curves[label] = [median(times[b : b + 128]) for b in bins]
    print(f"{'position':12}" + "".join(f"{label:>20}" for label in curves))
    for i, b in enumerate(bins):
        if i % 3 == 2:
            print(f"{b:<12}" + "".join(f"{c[i]:17.2f} ms" for c in curves.values()))
    if plot is not None:
        draw(plot, [("ms per token", bins, curves)], log=False)


@torch.inference_mode()
def prefill_once(n: int, chunk: int) -> None:
    torch.manual_seed(0)
    shape = {"dim": 1024, "n_layers": 6, "n_heads": 16, "n_kv_heads": 4, "hidden_dim": 2816}
    model, tokens = random_model(**shape, max_seq_len=n), random_tokens(n)
    result: dict[str, float] = {}

    def run() -> None:
        start = time.thread_time()
        for i in range(0, n, chunk):
            logits = model(tokens[:, i : i + chunk], i, only_last=True)
        result.update(seconds=time.thread_time() - start, logit=logits[0, 0, 0].item())

    result["peak_bytes"] = peak_bytes(run)
    print(json.dumps(result))


def prefill(n: int = 4096) -> None:
    """Peak memory, beside weights and cache, of reading a prompt whole and in chunks."""
    print(f"{'chunk':12}{'peak':28}{'seconds':12}first logit")
    for chunk in (n, 1024, 256, 64):
        found = in_new_process("prefill_once", n, chunk, env=FREE_AT_ONCE)
        peak = kv_cache.format_bytes(int(found["peak_bytes"]))
        print(f"{chunk:<12}{peak:28}{found['seconds']:<12.1f}{found['logit']:.5f}")


def dtypes() -> None:
    """What a narrower cache saves and costs, on stories that the shipped model tells."""
    options = {"max_seq_len": 384, "max_batch_size": 8, "dtype": "float32", "verbose": False}
    exact = Llama.build(**options)
    stories, _ = exact.generate([[1]] * 8, temperature=1.0, top_p=1.0, seed=7, echo=True)
    lengths = torch.tensor([len(story) for story in stories])
    padded = torch.tensor([story + [0] * (int(lengths.max()) - len(story)) for story in stories])
    zeros = torch.zeros(8, dtype=torch.long)
    expected = exact.model(padded, zeros, lengths=lengths)
    print(f"{int(lengths.sum())} tokens; logits' standard deviation {expected.std():.2f}")
    print(f"{'dtype':12}{'cache':28}{'of float16':12}{'largest':12}{'rms':12}perplexity")
    for dtype in kv_cache.DTYPES:
        llama = Llama.build(**options, kv_cache_dtype=dtype)
        error = llama.model(padded, zeros, lengths=lengths) - expected
        _, logprobs = llama.generate(stories, 0, logprobs=True, echo=True)
        values = torch.tensor([value for row in logprobs for value in row[1:]])
        cache = llama.memory()["cache_bytes"]
        ratio = cache / llama.model.params.cache_bytes(torch.float16)
        print(
            f"{dtype:12}{kv_cache.format_bytes(cache):28}{ratio:<12.3f}{error.abs().max():<12.4f}"
            f"{error.square().mean().sqrt():<12.4f}{(-values.mean()).exp():.4f}"
        )


def draw(path: str, panels: list[tuple], *, log: bool = True) -> None:
    """panels: (what is on the y axis, lengths, label -> values)."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(5.5 * len(panels), 4), layout="constrained")
    for axes, (ylabel, lengths, curves) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        for label, values in curves.items():
            axes.plot(lengths, values, marker=".", label=label)
        axes.set(xlabel="tokens", ylabel=ylabel)
        if log:
            axes.set(xscale="log", yscale="log")
            axes.set_xticks(lengths, [str(n) for n in lengths])
            axes.minorticks_off()
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            # What is expected: no growth, and growth with the length.
            least = min(values[0] for values in curves.values())
            for slope in (0, 1):
                line = [least * (n / lengths[0]) ** slope for n in lengths]
                axes.plot(lengths, line, color="gray", linestyle=":", label=f"slope {slope}")
        else:
            axes.set_ylim(bottom=0)
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path)
    print(f"plot: {path}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    commands = (growth, window, prefill, dtypes, at_length, prefill_once)
    terminal.run({command.__name__: command for command in commands})

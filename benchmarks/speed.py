"""Speed beside other engines: the same weights, threads and lengths, in turns, in one run.

python benchmarks/speed.py --shape 1b --peers transformers,llama-cpp,original-loop --json OUT.json
python benchmarks/speed.py --shape 110m --batch 8 --peers transformers
python benchmarks/speed.py --shape 1b --prompt_len 8,400 --peers transformers       (a ragged batch)

The last line is JSON. `decode` counts the tokens of all rows after the first one, `prefill` those
of the prompts up to the first one, `total` the new tokens of the whole run, all per second. What
the machine allows is measured in the same run: a read of a large buffer, a copy (bytes read and
written), and a product of two large matrices.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable
from json import dumps, loads
from pathlib import Path
from statistics import median
from typing import Any

import speed_weights as weights
import torch

from llama import quantize as quant
from llama.checkpoints.files import DTYPES
from llama.checkpoints.load import open_checkpoint
from llama.cli import run
from llama.parallel.groups import resolve_device
from llama.parallel.layers import linear

GGUF = {None: {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}, "int8": "Q8_0"}
GGUF |= {"int4": "Q4_0"}
MODULES = {"transformers": "transformers", "llama-cpp": "llama_cpp"}
PEERS = ("transformers", "llama-cpp", "original-loop")
FIGURES = ("prefill", "first_token_ms", "decode", "total")
SLOWER_IS_LARGER = ("first_token_ms",)
CONTEXTS = (128, 256, 512, 1024, 2048)  # of the plot
LATENCY_STEPS = 16


class Worker:
    """An engine in a process of its own, loaded."""

    def __init__(self, case: dict[str, Any]) -> None:
        engine = Path(__file__).with_name("engines.py")
        environment = {**os.environ, "OMP_NUM_THREADS": str(case["threads"])}
        self.process = subprocess.Popen(
            [sys.executable, engine, dumps(case)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self.loaded = self._answer()

    def _answer(self) -> Any:
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise SystemExit(f"{self.process.args[2]:.200} has ended with {self.process.wait()}")
        return loads(line)

    def measure(self, prompts: list[list[int]], gen_len: int) -> dict[str, float]:
        print(dumps({"prompts": prompts, "gen_len": gen_len}), file=self.process.stdin)
        self.process.stdin.flush()  # type: ignore[union-attr]
        first, *rest = self._answer()
        new, read = len(prompts) * gen_len, sum(map(len, prompts))
        figures = {"prefill": read / first, "first_token_ms": 1e3 * first}
        if len({len(prompt) for prompt in prompts}) == 1:
            figures["decode"] = len(prompts) * len(rest) / sum(rest)
        return figures | {"total": new / (first + sum(rest))}

    def close(self) -> None:
        self.process.stdin.close()  # type: ignore[union-attr]
        self.process.wait()


def fastest(run: Callable[[], object], device: str) -> float:
    """Seconds of the fastest of some runs."""
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        if device != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def machine_limits(device: str, dtype: torch.dtype) -> dict[str, float]:
    """GB/s of a read and of a copy of 1 GiB, and GFLOP/s of a product of matrices in `dtype`."""
    buffer = torch.ones(2**28, device=device)
    target = torch.empty_like(buffer)
    n = 2048 if device == "cpu" else 8192
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return {
        "read_gb_per_s": buffer.nbytes / fastest(buffer.sum, device) / 1e9,
        "copy_gb_per_s": 2 * buffer.nbytes / fastest(lambda: target.copy_(buffer), device) / 1e9,
        "matrix_gflop_per_s": 2 * n**3 / fastest(lambda: linear(a, b), device) / 1e9,
    }


def step_cost(folder: Path, dtype: str, quantize: str | None) -> tuple[int, int]:
    """Bytes that a step reads, which are those of all weights but the embedding, and the products
    for a token of a prompt, of which only the last one needs the output layer.
    """
    shapes = {name: p.shape for name, p in open_checkpoint(folder).parameters.items()}
    del shapes["tok_embeddings.weight"]
    numbers = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    products = sum(numbers.values()) - numbers["output.weight"]
    if quantize is not None:
        return quant.total_bytes(shapes, quantize, DTYPES[dtype]), products
    return sum(numbers.values()) * DTYPES[dtype].itemsize, products


def cases(
    peers: str, folder: Path, common: dict[str, Any], quantize: str | None, compile: bool
) -> dict[str, dict[str, Any]]:
    """What each engine is asked to load; an engine that is not there is left out, and says so."""
    ours = {**common, "engine": "ours", "quantize": quantize, "compile": compile}
    found = {"ours": ours}
    for peer in filter(None, peers.split(",")):
        if peer not in PEERS:
            raise SystemExit(f"{peer!r} is none of the peers: {', '.join(PEERS)}")
        if peer in MODULES and importlib.util.find_spec(MODULES[peer]) is None:
            print(f"{peer}: not installed, left out (pip install {MODULES[peer]})")
        elif peer == "llama-cpp" and importlib.util.find_spec("gguf") is None:
            print(f"{peer}: gguf is not installed, left out (pip install gguf)")
        elif peer == "llama-cpp" and common["batch"] > 1:
            print(f"{peer}: its binding runs one row, left out")
        else:
            kinds = GGUF[quantize]
            kind = kinds if isinstance(kinds, str) else kinds[common["dtype"]]
            found[peer] = {**common, "engine": peer, "gguf": kind}
            if peer == "transformers":
                weights.hugging_face(folder)
            if peer == "llama-cpp":
                weights.gguf(folder, kind)
    return found


def summary(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians, spreads (largest less smallest, over the median), and ours over theirs."""
    medians, spreads = {}, {}
    for name, rounds in runs.items():
        columns = {f: [r[f] for r in rounds] for f in FIGURES if f in rounds[0]}
        medians[name] = {f: median(values) for f, values in columns.items()}
        spreads[name] = {f: (max(v) - min(v)) / median(v) for f, v in columns.items()}
    ratios: dict[str, dict[str, float]] = {}
    for figure, ours in medians["ours"].items():
        if figure not in SLOWER_IS_LARGER:
            peers = {name: m[figure] for name, m in medians.items() if name != "ours"}
            ratios[figure] = {name: ours / theirs for name, theirs in peers.items()}
    return {"median": medians, "spread": spreads, "ratios": ratios}


def main(
    shape: str = "1b",
    dtype: str = "float32",
    quantize: str | None = None,
    compile: bool = False,
    batch: int = 1,
    prompt_len: int | tuple[int, ...] = 128,
    gen_len: int = 64,
    peers: str | tuple[str, ...] = "",
    rounds: int = 5,
    threads: int = 2,
    device: str = "cpu",
    shards: int = 1,
    weights_dtype: str | None = None,
    json: str | None = None,
    plot: str | None = None,
) -> None:
    """Measure; `--json FILE` keeps what the last line says.

    Args:
        shape: 110m, 1b or 7b.
        prompt_len: one length, or one for each row of a ragged batch.
        weights_dtype: of the files, where it is not `dtype`.
        plot: draw decoding against the limit, and over the context, which is measured for it.
    """
    lengths = [prompt_len] * batch if isinstance(prompt_len, int) else list(prompt_len)
    check(dtype, quantize, batch, lengths, gen_len, rounds, threads, plot)
    device = str(resolve_device(device))
    folder = weights.meta(shape, weights_dtype or dtype, shards)
    longest = max(max(lengths) + gen_len, 0 if plot is None else CONTEXTS[-1] + LATENCY_STEPS)
    common = {"folder": str(folder), "dtype": dtype, "device": device, "threads": threads}
    common |= {"batch": len(lengths), "max_seq_len": longest}
    joined = peers if isinstance(peers, str) else ",".join(peers)
    asked = cases(joined, folder, common, quantize, compile)
    torch.set_num_threads(threads)
    load_before, limits = os.getloadavg()[0], machine_limits(device, DTYPES[dtype])
    workers = {name: Worker(case) for name, case in asked.items()}
    runs = measure_in_turns(workers, random_prompts(folder, lengths), gen_len, rounds)
    found = summary(runs) | {"loaded": {name: worker.loaded for name, worker in workers.items()}}
    if plot is not None:
        found["contexts"] = {n: latencies(worker, folder) for n, worker in workers.items()}
    for worker in workers.values():
        worker.close()
    found |= limits | shares(found, limits, step_cost(folder, dtype, quantize), len(lengths))
    found |= {
        "machine": {"cpu": cpu_name(), "threads": threads, "torch": torch.__version__},
        "load_average": [round(load_before, 1), round(os.getloadavg()[0], 1)],
    }
    report(found)
    if plot is not None:
        draw(found, plot)
    if json is not None:
        Path(json).write_text(dumps(found) + "\n")
    print(dumps(found))


def check(
    dtype: str,
    quantize: str | None,
    batch: int,
    lengths: list[int],
    gen_len: int,
    rounds: int,
    threads: int,
    plot: str | None,
) -> None:
    """Refuse what could not be measured before anything is made."""
    refused = [
        (dtype not in DTYPES, f"--dtype {dtype}: it must be one of {', '.join(DTYPES)}"),
        (
            quantize not in (None, *quant.KINDS),
            f"--quantize {quantize}: it must be one of {', '.join(quant.KINDS)}",
        ),
        (
            not lengths or min(lengths) < 1 or batch not in (1, len(lengths)),
            f"{batch} rows with --prompt_len {lengths}: each row has one length, above 0",
        ),
        (gen_len < 2, f"--gen_len {gen_len}: decoding begins with the second token"),
        (rounds < 1, f"--rounds {rounds}: it must be above 0"),
        (threads < 1, f"--threads {threads}: it must be above 0"),
        (
            plot is not None and len(set(lengths)) > 1,
            "--plot shows decoding alone, which a ragged batch does not: leave one of them out",
        ),
    ]
    for is_refused, why in refused:
        if is_refused:
            raise SystemExit(why)


def random_prompts(folder: Path, lengths: list[int]) -> list[list[int]]:
    generator, vocab = random.Random(0), open_checkpoint(folder).vocab_size
    return [[generator.randrange(vocab) for _ in range(n)] for n in lengths]


def measure_in_turns(
    workers: dict[str, Worker], prompts: list[list[int]], gen_len: int, rounds: int
) -> dict[str, list[dict[str, float]]]:
    """The figures of each engine in each round, after one that only warms up."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in workers}
    for worker in workers.values():
        worker.measure(prompts, 3)
    for _ in range(rounds):
        for name, worker in workers.items():
            runs[name].append(worker.measure(prompts, gen_len))
    return runs


def latencies(worker: Worker, folder: Path) -> list[float]:
    """Milliseconds of a token of one row, after each of the CONTEXTS."""
    prompts = [random_prompts(folder, [n]) for n in CONTEXTS]
    return [1e3 / worker.measure(prompt, LATENCY_STEPS)["decode"] for prompt in prompts]


def shares(
    found: dict[str, Any], limits: dict[str, float], cost: tuple[int, int], batch: int
) -> dict[str, float]:
    """Our speeds as shares of what the machine allows; a ragged batch has none in decoding."""
    (n_bytes, products), ours = cost, found["median"]["ours"]
    share = 2e-9 * products * ours["prefill"] / limits["matrix_gflop_per_s"]
    shares = {"step_bytes": n_bytes, "prefill_share_of_matrix": share}
    if "decode" in ours:
        achieved = ours["decode"] / batch * n_bytes / 1e9
        shares |= {
            "achieved_gb_per_s": achieved,
            "share_of_read": achieved / limits["read_gb_per_s"],
            "share_of_copy": achieved / limits["copy_gb_per_s"],
        }
    return shares


def cpu_name() -> str:
    """What the kernel says, or what Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))


def report(found: dict[str, Any]) -> None:
    """A table of the medians; the ratios are ours over theirs."""
    compared = "decode" if "decode" in found["ratios"] else "total"
    columns = " | ".join((*FIGURES, "load s", "load peak GB", f"{compared}, ours over it"))
    print(f"| engine | {columns} |")
    print("|---" * (len(FIGURES) + 4) + "|")
    for name, medians in found["median"].items():
        cells = [
            f"{medians[f]:.2f} ±{50 * found['spread'][name][f]:.0f} %" if f in medians else ""
            for f in FIGURES
        ]
        loaded = found["loaded"][name]
        ratio = found["ratios"][compared].get(name)
        cells += [f"{loaded['load_s']:.1f}", f"{loaded['peak_gb']:.2f}"]
        print(f"| {name} | {' | '.join(cells)} | {'' if ratio is None else f'{ratio:.2f}'} |")
    achieved = found.get("achieved_gb_per_s")
    print(
        f"{found['step_bytes'] / 1e9:.2f} GB a step"
        + ("; " if achieved is None else f", {achieved:.1f} GB/s; ")
        + f"read {found['read_gb_per_s']:.1f}, copy {found['copy_gb_per_s']:.1f} GB/s; prefill at "
        f"{found['prefill_share_of_matrix']:.2f} of {found['matrix_gflop_per_s']:.0f} GFLOP/s; "
        f"load average {found['load_average']}"
    )


def draw(found: dict[str, Any], path: str) -> None:
    """Decoding as a share of what reading our weights allows, and its latency over the context."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    share, latency = figure.subplots(1, 2)
    speeds = {name: medians["decode"] for name, medians in found["median"].items()}
    limit = found["read_gb_per_s"] * 1e9 / found["step_bytes"]
    share.barh(list(speeds), [speed / limit for speed in speeds.values()])
    share.axvline(1, color="black", linestyle="--")
    share.set(xlabel="decoding speed over that of one read of our weights for each token")
    for name, values in found["contexts"].items():
        latency.plot(CONTEXTS, values, marker="o", label=name)
    latency.axhline(1e3 / limit, color="black", linestyle="--", label="one read of our weights")
    latency.set(xlabel="tokens in the cache", ylabel="ms per token", ylim=0)
    latency.legend(loc="lower left")
    figure.savefig(path)


if __name__ == "__main__":
    run(main)

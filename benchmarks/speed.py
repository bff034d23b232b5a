"""Speed beside other engines: the same weights, threads and lengths, in turns, in one run.

python benchmarks/speed.py --shape 1b --peers transformers,llama-cpp,original-loop --json OUT.json
python benchmarks/speed.py --shape 110m --batch 8 --peers transformers
python benchmarks/speed.py --shape 1b --prompt_len 8,400 --peers transformers       (a ragged batch)

The last line is JSON. `decode` counts the tokens of all rows after the first one, `prefill` those
of the prompts up to the first one, `total` the new tokens of the whole run, all per second.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import fire
import speed_weights as weights
import torch

from llama import quantize as quant
from llama.checkpoint import DTYPES, open_checkpoint

GGUF = {None: {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}, "int8": "Q8_0"}
GGUF |= {"int4": "Q4_0"}
MODULES = {"transformers": "transformers", "llama-cpp": "llama_cpp"}
FIGURES = ("prefill", "first_token_ms", "decode", "total")
SLOWER_IS_LARGER = ("first_token_ms",)


class Worker:
    """An engine in a process of its own, loaded."""

    def __init__(self, case: dict[str, Any]) -> None:
        engine = Path(__file__).with_name("engines.py")
        environment = {**os.environ, "OMP_NUM_THREADS": str(case["threads"])}
        self.process = subprocess.Popen(
            [sys.executable, engine, json.dumps(case)],
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
        return json.loads(line)

    def measure(self, prompts: list[list[int]], gen_len: int) -> dict[str, float]:
        print(json.dumps({"prompts": prompts, "gen_len": gen_len}), file=self.process.stdin)
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


def read_bandwidth(device: str) -> float:
    """GB/s of the fastest of some reads of a large buffer."""
    buffer, seconds = torch.ones(2**28, device=device), []  # 1 GiB
    for _ in range(5):
        start = time.perf_counter()
        buffer.sum().item()
        seconds.append(time.perf_counter() - start)
    return buffer.nbytes / min(seconds) / 1e9


def step_bytes(folder: Path, dtype: str, quantize: str | None) -> int:
    """Bytes of the weights that one step reads: all but the embedding."""
    shapes = {name: p.shape for name, p in open_checkpoint(folder).parameters.items()}
    del shapes["tok_embeddings.weight"]
    if quantize is not None:
        return quant.total_bytes(shapes, quantize, DTYPES[dtype])
    return sum(torch.Size(s).numel() for s in shapes.values()) * DTYPES[dtype].itemsize


def cases(
    peers: str, folder: Path, common: dict[str, Any], quantize: str | None, compile: bool
) -> dict[str, dict[str, Any]]:
    """What each engine is asked to load; an engine that is not there is left out, and says so."""
    ours = {**common, "engine": "ours", "quantize": quantize, "compile": compile}
    found = {"ours": ours}
    for peer in filter(None, peers.split(",")):
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
    json_file: str | None = None,
    plot: str | None = None,
    **named: str,
) -> None:
    """Measure; `--json FILE` keeps what the last line says.

    Args:
        shape: 110m, 1b or 7b.
        prompt_len: one length, or one for each row of a ragged batch.
        weights_dtype: of the files, where it is not `dtype`.
    """
    lengths = [prompt_len] * batch if isinstance(prompt_len, int) else list(prompt_len)
    folder = weights.meta(shape, weights_dtype or dtype, shards)
    common = {"folder": str(folder), "dtype": dtype, "device": device, "threads": threads}
    common |= {"batch": len(lengths), "max_seq_len": max(lengths) + gen_len}
    joined = peers if isinstance(peers, str) else ",".join(peers)
    torch.set_num_threads(threads)
    load_before, bandwidth = os.getloadavg()[0], read_bandwidth(device)
    workers = {n: Worker(c) for n, c in cases(joined, folder, common, quantize, compile).items()}
    generator = random.Random(0)
    vocab = open_checkpoint(folder).vocab_size
    prompts = [[generator.randrange(vocab) for _ in range(n)] for n in lengths]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in workers}
    for i in range(rounds + 1):
        for name, worker in workers.items():
            figures = worker.measure(prompts, gen_len if i else 3)
            if i:  # the first one only warms up
                runs[name].append(figures)
    n_bytes = step_bytes(folder, dtype, quantize)
    found = summary(runs) | {"loaded": {name: worker.loaded for name, worker in workers.items()}}
    for worker in workers.values():
        worker.close()
    steps = found["median"]["ours"].get("decode", 0) / len(lengths)
    found |= {
        "machine": {"cpu": cpu_name(), "threads": threads, "torch": torch.__version__},
        "load_average": [round(load_before, 1), round(os.getloadavg()[0], 1)],
        "step_bytes": n_bytes,
        "read_gb_per_s": bandwidth,
        "achieved_gb_per_s": steps * n_bytes / 1e9,
        "share_of_read": steps * n_bytes / 1e9 / bandwidth,
    }
    report(found)
    if plot is not None:
        draw(found, plot)
    if (named.get("json") or json_file) is not None:
        Path(named.get("json") or str(json_file)).write_text(json.dumps(found) + "\n")
    print(json.dumps(found))


def cpu_name() -> str:
    """What the kernel says, or what Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))


def report(found: dict[str, Any]) -> None:
    """A table of the medians; the ratios are ours over theirs."""
    print(f"| engine | {' | '.join(FIGURES)} | load s | load peak GB | decode, ours over it |")
    print("|---" * (len(FIGURES) + 4) + "|")
    for name, medians in found["median"].items():
        cells = [
            f"{medians[f]:.2f} ±{50 * found['spread'][name][f]:.0f} %" if f in medians else ""
            for f in FIGURES
        ]
        loaded = found["loaded"][name]
        ratio = found["ratios"].get("decode", found["ratios"]["total"]).get(name)
        cells += [f"{loaded['load_s']:.1f}", f"{loaded['peak_gb']:.2f}"]
        print(f"| {name} | {' | '.join(cells)} | {'' if ratio is None else f'{ratio:.2f}'} |")
    print(
        f"{found['step_bytes'] / 1e9:.2f} GB a step, {found['achieved_gb_per_s']:.1f} GB/s of "
        f"{found['read_gb_per_s']:.1f} read; load average {found['load_average']}"
    )


def draw(found: dict[str, Any], path: str) -> None:
    """Decoding speed of each engine as a share of what reading its weights allows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    speeds = {name: medians["decode"] for name, medians in found["median"].items()}
    limit = found["read_gb_per_s"] * 1e9 / found["step_bytes"]
    axes.barh(list(speeds), [speed / limit for speed in speeds.values()])
    axes.axvline(1, color="black", linestyle="--")
    axes.set(xlabel="decoding speed over that of one read of our weights for each step")
    figure.savefig(path)


if __name__ == "__main__":
    fire.Fire(main)

"""Load time and peak anonymous memory of checkpoints, beside a plain read of the same files.

    python benchmarks/loading.py DIR:float32 DIR2:bfloat16

Each figure is the median of several processes that start with the files out of the page cache:
read    the files are read from end to end, into one buffer
copy    `copy_` of each tensor, from memory into new memory of the target dtype
load    from the folder to a model whose weights are there
token   the first forward pass, which has to page in what the load has only mapped
peak    the largest RssAnon during the load, less what there was before it
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median

import torch

from llama import cli as terminal
from llama.checkpoints.files import DTYPES
from llama.checkpoints.load import load, open_checkpoint
from llama.model import ModelArgs, Transformer
from llama.parallel import groups as runtime


def anonymous_bytes() -> int:
    """Memory of this process that the kernel cannot drop and read again from a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


class Peak:
    """The largest `anonymous_bytes` inside a `with` block, over that at its beginning."""

    def __enter__(self) -> Peak:
        self._before = self._most = anonymous_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._done.wait(0.002):
            self._most = max(self._most, anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.bytes = max(self._most, anonymous_bytes()) - self._before


def forget(files: list[Path]) -> None:
    """Have the kernel drop what it keeps of the files."""
    for file in files:
        with file.open("rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_read(folder: str, dtype: str) -> dict[str, float]:
    files, buffer = open_checkpoint(folder).files, bytearray(16 << 20)
    forget(files)
    start = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as f:
            while f.readinto(buffer):
                pass
    return {"read_s": time.perf_counter() - start}


def measure_copy(folder: str, dtype: str) -> dict[str, float]:
    seconds, copies = 0.0, []  # kept, as a model keeps them: new memory is not free
    for parts in open_checkpoint(folder).parts.values():
        for tensor, _ in parts:
            source = tensor.clone()
            start = time.perf_counter()
            copies.append(torch.empty(source.shape, dtype=DTYPES[dtype]).copy_(source))
            seconds += time.perf_counter() - start
    return {"copy_s": seconds}


def measure_load(folder: str, dtype: str) -> dict[str, float]:
    forget(open_checkpoint(folder).files)
    setup = runtime.setup(device="cpu", dtype=dtype)
    start = time.perf_counter()
    with Peak() as peak:
        checkpoint = open_checkpoint(folder)
        with torch.device("meta"):
            model = Transformer(ModelArgs(**checkpoint.params, max_seq_len=8, max_batch_size=1))
        load(model, checkpoint, device=setup.device, dtype=setup.dtype)
    load_s = time.perf_counter() - start
    model.allocate_state(setup.device, setup.dtype)
    start = time.perf_counter()
    with torch.inference_mode():
        model(torch.tensor([[1]]), 0)
    token_s = time.perf_counter() - start
    weights = sum(parameter.nbytes for parameter in model.parameters())
    files = sum(file.stat().st_size for file in checkpoint.files)
    sizes = {"file_gb": files / 1e9, "weights_gb": weights / 1e9, "peak_gb": peak.bytes / 1e9}
    return {"load_s": load_s, "token_s": token_s, **sizes}


MEASURES = {"read": measure_read, "copy": measure_copy, "load": measure_load}
COLUMNS = ("file_gb", "read_s", "copy_s", "load_s", "token_s", "weights_gb", "peak_gb")


def main(*cases: str, repeat: int = 3) -> None:
    """Print a table with a line for each case FOLDER:DTYPE."""
    print("| into dtype | files |" + "".join(f" {c} |" for c in COLUMNS))
    print("|---" * (len(COLUMNS) + 2) + "|")
    for case in cases:
        folder, _, dtype = case.rpartition(":")
        runs = [in_a_process(name, folder, dtype) for _ in range(repeat) for name in MEASURES]
        figures = {c: median(run[c] for run in runs if c in run) for c in COLUMNS}
        names = f"{open_checkpoint(folder).files[0].suffix}"
        print(f"| {dtype} | {names} |" + "".join(f" {figures[c]:.2f} |" for c in COLUMNS))


def in_a_process(name: str, folder: str, dtype: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", name, folder, dtype]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(MEASURES[sys.argv[2]](*sys.argv[3:])))
    else:
        terminal.run(main)

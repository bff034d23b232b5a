from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llama import Llama

# The models here are tiny: a second thread is no gain, and costs much where cores are shared.
torch.set_num_threads(1)

GOLDEN = Path(__file__).parent / "golden"
# Checkpoints that may not be redistributed lie in a folder of their own.
MORE_GOLDEN = Path(os.environ.get("LLAMA_GOLDEN_DIR", "/nonexistent"))
NAMES = ["rand_mha", "rand_gqa", "rand_mqa", "stories", "stories260K"]

# Against recorded answers: float32 sums in another order differ by about 1e-5 in the logits.
ATOL = 2e-4


def drain(stream: Generator) -> tuple[list, Any]:
    """All that a generator yields, and what it returns."""
    yielded = []
    while True:
        try:
            yielded.append(next(stream))
        except StopIteration as end:
            return yielded, end.value


def golden(name: str) -> tuple[Path, dict]:
    """A checkpoint folder and what the original code answers for it."""
    folder = next((f / name for f in (GOLDEN, MORE_GOLDEN) if (f / name).is_dir()), None)
    if folder is None:
        pytest.skip(f"LLAMA_GOLDEN_DIR does not lead to {name}")
    expected = json.loads((folder / "expected.json").read_text())
    return folder, expected


@pytest.fixture(scope="session")
def llama() -> Iterator[Llama]:
    """The shipped model; tests leave no state in it that another could notice."""
    with Llama.build(max_seq_len=512, max_batch_size=8, dtype="float32", verbose=False) as llama:
        yield llama


@pytest.fixture
def fresh() -> Iterator[Llama]:
    """A new instance of the shipped model, small enough to be made for a test."""
    with Llama.build(max_seq_len=256, max_batch_size=4, dtype="float32", verbose=False) as llama:
        yield llama

"""Make a random checkpoint of about 1.1 billion parameters, the shape of TinyLlama, to measure on.

python benchmarks/make_checkpoint.py DIR --dtype float16
python -m llama convert DIR DIR-hf --to hf --dtype bfloat16
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from llama.checkpoints.files import DTYPES
from llama.cli import run
from llama.model import ModelArgs
from llama.parameters import parameters

PARAMS = {
    "dim": 2048,
    "n_layers": 22,
    "n_heads": 32,
    "n_kv_heads": 4,
    "hidden_dim": 5632,
    "vocab_size": 32000,
    "norm_eps": 1e-5,
}


def make(folder: str, dtype: str = "float32", seed: int = 0) -> None:
    """Write a Meta folder of one shard."""
    generator, state = torch.Generator().manual_seed(seed), {}
    for name, parameter in parameters(ModelArgs(**PARAMS)).items():
        weight = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
        state[name] = (
            weight.to(DTYPES[dtype])
            if weight.ndim == 2
            else weight.new_ones(weight.shape, dtype=DTYPES[dtype])
        )
    path = Path(folder)
    path.mkdir(parents=True)
    (path / "params.json").write_text(json.dumps(PARAMS))
    torch.save(state, path / "consolidated.00.pth")


if __name__ == "__main__":
    run(make)

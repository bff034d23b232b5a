"""Meta's layout: params.json and consolidated.NN.pth, one file for each rank of the training.

Mistral's consolidated.safetensors is the same, in one file.
"""

from __future__ import annotations

import re
from pathlib import Path

from llama.checkpoints.config import read_params
from llama.checkpoints.reader import Checkpoint, map_parts
from llama.checkpoints.text import read_text_facts
from llama.errors import require
from llama.parameters import unwrapped

MISTRAL = "consolidated.safetensors"
SHARD = re.compile(rf"consolidated\.\d\d\.(pth|safetensors)|{re.escape(MISTRAL)}")


def open_meta(path: Path) -> Checkpoint | None:
    """The checkpoint in a folder; None if the folder has another layout."""
    shards = sorted(f for f in path.iterdir() if SHARD.fullmatch(f.name))
    if not shards or not (path / "params.json").is_file():
        return None
    numbered = [f for f in shards if f.name != MISTRAL and f.suffix == shards[0].suffix]
    files = numbered or shards
    for i in range(int(numbered[-1].name.split(".")[1]) if numbered else 0):
        file = path / f"consolidated.{i:02d}{files[0].suffix}"
        beyond = f"{file} is missing, but there is {files[-1].name}: download it as well"
        require(file in files, beyond)
    config, parts = read_params(path / "params.json"), map_parts(files)
    return Checkpoint(path, "meta", files, config, read_text_facts(path), parts, unwrapped(parts))

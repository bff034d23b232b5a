"""The layout that `convert --quantize` writes: params.json and one file for each rank."""

from __future__ import annotations

import re
from pathlib import Path

from llama import quantize as quant
from llama.checkpoints.config import read_params
from llama.checkpoints.reader import Checkpoint, map_parts
from llama.checkpoints.text import read_text_facts
from llama.errors import require

FILE = re.compile(rf"quantized\.({'|'.join(quant.KINDS)})\.(\d\d)-of-(\d\d)\.safetensors")


def file_name(kind: str, rank: int, ranks: int) -> str:
    """The name of the file of one rank."""
    return f"quantized.{kind}.{rank:02d}-of-{ranks:02d}.safetensors"


def open_quantized(path: Path) -> Checkpoint | None:
    """The checkpoint in a folder; None if the folder has another layout."""
    found = [match for f in sorted(path.iterdir()) if (match := FILE.fullmatch(f.name))]
    if not found or not (path / "params.json").is_file():
        return None
    kind, ranks = found[-1][1], int(found[-1][3])
    files = [path / file_name(kind, i, ranks) for i in range(ranks)]
    for file in files:
        require(file.is_file(), f"{file} is missing, but there is {found[-1][0]}: copy it as well")
    facts = read_params(path / "params.json"), read_text_facts(path)
    return Checkpoint(path, "quantized", files, *facts, map_parts(files), quantized=kind)

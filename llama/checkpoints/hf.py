"""Hugging Face's layout: config.json, and weights in one or several files."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from llama.checkpoints.config import read_config
from llama.checkpoints.files import read_json
from llama.checkpoints.reader import Checkpoint, map_parts
from llama.checkpoints.text import read_text_facts
from llama.errors import LlamaError, require
from llama.model import ModelArgs
from llama.parameters import EMBEDDING, OUTPUT, parameters, unwrapped

WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")


def open_hf(path: Path) -> Checkpoint | None:
    """The checkpoint in a folder; None if the folder has another layout."""
    if not (path / "config.json").is_file():
        return None
    config, files = read_config(path / "config.json"), _weight_files(path)
    parts = map_parts(files)
    plain = unwrapped(parts)
    if not any(name.startswith("model.") for name in plain):  # of a model without its head
        plain = {n if n.startswith("lm_head.") else f"model.{n}": s for n, s in plain.items()}
    table = parameters(ModelArgs(**config.params)).items()
    names = {name: plain.get(p.hf_name, p.hf_name) for name, p in table}
    embedding, output = (parts.get(names[name]) for name in (EMBEDDING, OUTPUT))
    if config.tied and embedding and output:  # transformers too prefers what is stored
        a, b = embedding[0].tensor, output[0].tensor
        config = config._replace(tied=a.dtype == b.dtype and torch.equal(a[:], b[:]))
    if config.tied:
        parts.pop(names[OUTPUT], None)
        names[OUTPUT] = names[EMBEDDING]
    return Checkpoint(path, "hf", files, config, read_text_facts(path), parts, names)


def _weight_files(path: Path) -> list[Path]:
    held = {file.name for file in path.iterdir()}
    for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        single, index = f"{stem}{suffix}", f"{stem}{suffix}.index.json"
        if single in held:
            return [path / single]
        if index in held:
            return _indexed_files(path / index, held)
        lost = f"{path / index} is missing, but its weights are there: download it as well"
        require(not any(path.glob(f"{stem}-*{suffix}")), lost)
    remedy = "download model.safetensors as well, or the files that its index names"
    if "adapter_config.json" in held:
        remedy = "pass the folder of the base model, and this one as adapter="
    if "quantize_config.json" in held:
        remedy = "those of GPTQ are not supported: download the model's unquantized weights"
    raise LlamaError(f"{path} has a config.json and no weights: {remedy}")


def _indexed_files(index: Path, held: set[str]) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise LlamaError(f"{index} has no weight_map: download it again")
    names = sorted(set(map(str, weight_map.values())))
    for name in names:
        # Also refuses a path that leads out of the folder.
        where = f"which {index} names, is not a file in {index.parent}"
        require(name in held, f"{name!r:.80}, {where}: download it as well")
    return [index.parent / name for name in names]

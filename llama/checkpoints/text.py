"""What a checkpoint's files say of its text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama.checkpoints.files import read_json, read_text
from llama.errors import require


@dataclass(frozen=True)
class TextFacts:
    """What a checkpoint says of its text."""

    layout: str  # meta, hf or gguf
    eos_ids: tuple[int, ...] = ()
    bos: bool | None = None  # whether a prompt begins with BOS; None: not stated
    chat_template: str | None = None


def read_text_facts(path: Path) -> TextFacts:
    """What the files in a folder say of its text; each of them may be absent."""
    names = ("config.json", "generation_config.json", "tokenizer_config.json")
    config, generation, tokenizer = found = [
        read_json(path / name) if (path / name).is_file() else {} for name in names
    ]
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    eos_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    rule = f"{path}: eos_token_id is {eos!r:.80}, and must be a token id or a list of them"
    require(all(type(id) is int and id >= 0 for id in eos_ids), rule)
    template = _chat_template(path / "chat_template.jinja", tokenizer)
    layout = "hf" if any(found) or template else "meta"
    bos = tokenizer.get("add_bos_token")
    return TextFacts(layout, tuple(eos_ids), bos if isinstance(bos, bool) else None, template)


def _chat_template(file: Path, tokenizer: dict[str, Any]) -> str | None:
    if file.is_file():
        return read_text(file)
    found = tokenizer.get("chat_template")
    if isinstance(found, list):  # several, by name
        found = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = found.get("default")
    return found if isinstance(found, str) else None

"""What a file is, told from its first bytes, for messages about a wrong file."""

from __future__ import annotations

import re
from pathlib import Path

# What a file looks like, by how it begins. The first match counts.
_BEGINNINGS = [
    ("a git-lfs pointer (run `git lfs pull`)", rb"version https://git-lfs"),
    ("an HTML page (a failed download)", rb"(?i)\s*(<!doctype html|<html|<\?xml)"),
    ("a zip file (as torch.save writes)", rb"PK\x03\x04"),
    ("a safetensors file", rb".{8}\s*\{\s*\""),
    ("a pickle", rb"\x80[\x02-\x05]"),
    ("a tiktoken file", rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n"),
    ("JSON", rb"(\xef\xbb\xbf)?\s*[\[{]\s*[\"{\[\]}]"),
    ("a file of zeros (an unfinished download)", rb"\x00{16}"),
    ("plain text", rb"[\t\r\n -~]+\Z"),
]


def looks_like(path: Path | str) -> str | None:
    """What the file seems to be, as a phrase ("an HTML page ..."), or None if nothing known."""
    with open(path, "rb") as file:
        head = file.read(4096)
    if not head.strip():
        return "an empty file"
    for phrase, pattern in _BEGINNINGS:
        if re.match(pattern, head, re.DOTALL):
            return phrase
    return None

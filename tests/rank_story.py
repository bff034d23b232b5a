"""Generates a story, which each rank writes down; a file tells when the first tokens are there."""

from __future__ import annotations

import sys
from pathlib import Path

from llama import Llama


def main(prompt: str, n_tokens: str, folder: str) -> None:
    with Llama.build(dtype="float32", timeout_s=5) as llama:
        ids = llama.tokenizer.encode(prompt, bos=True)
        tokens: list[int] = []
        while len(tokens) < int(n_tokens):
            n = min(int(n_tokens) - len(tokens), 400)
            for step in llama.stream([ids], n, temperature=0):
                tokens += [token for token in step if token is not None]
                if len(tokens) == 5 and llama.rank == 0:
                    (Path(folder) / "generating").touch()
        (Path(folder) / f"{llama.rank}.txt").write_text(llama.tokenizer.decode(tokens))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What the package answers in the cases of the parity suite, here or on each rank of a run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from llama import Llama

Case = dict[str, Any]  # an option's name and its value, and the folder of the checkpoint

TOKENIZER = Path(__file__).parent / "golden" / "rand_gqa" / "tokenizer.model"
VOCAB, WINDOW, CHUNK, NEW = 1024, 12, 5, 12
LENGTHS = (40, 9, 25)  # of the prompts: with the answers no more than 64 positions


def prompts(case: Case) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]
    return rows[: case["batch"]]


def build(case: Case) -> Llama:
    """Where there is a window, the cache is so short that its ring wraps."""
    return Llama.build(
        case["folder"],
        TOKENIZER,
        max_seq_len=64 if case["window"] is None else 2 * WINDOW,
        max_batch_size=case["batch"],
        dtype=case["dtype"],
        prefill_chunk=case["chunk"],
        kv_cache_dtype=case["cache"],
        quantize=case["quantize"],
        compile=case["compile"],
        timeout_s=60,
        verbose=False,
    )


def answers(case: Case) -> list[dict]:
    """Of each prompt all tokens, how many of them were given, and the logprobs of the last ones."""
    params: Any = {"temperature": 0, "logprobs": True}
    with build(case) as llama:
        given = prompts(case)
        if case["reuse"] == "cold":
            found, logprobs = llama.generate(given, NEW, **params, echo=True)
            return payload(given, found, [row[1:] for row in logprobs or []])
        heads = [row[: len(row) // 2] for row in given]
        first, logprobs = llama.generate(heads, 3, **params)
        before = [head + row for head, row in zip(heads, first, strict=True)]
        result = payload(heads, before, logprobs or [])
        longer = [b + row[len(row) // 2 :] for b, row in zip(before, given, strict=True)]
        for i, row in enumerate(longer):  # all but the answer's last token, which was not read
            assert llama.engine.cache.longest(row)[0] == len(before[i]) - 1
        second, logprobs = llama.generate(longer, NEW, **params)
        after = [row + answer for row, answer in zip(longer, second, strict=True)]
        return result + payload(longer, after, logprobs or [])


def payload(
    given: list[list[int]], found: list[list[int]], logprobs: list[list[float]]
) -> list[dict]:
    return [
        {"tokens": tokens, "given": len(prompt), "logprobs": values}
        for prompt, tokens, values in zip(given, found, logprobs, strict=True)
    ]


def main(cases: str, folder: str) -> None:
    found = [answers(case) for case in json.loads(Path(cases).read_text())]
    (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])

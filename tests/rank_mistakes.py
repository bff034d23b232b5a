"""Two ranks that are not started or called alike: the sentence that each of them gets."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from rank_answers import sentence

from llama import Llama
from llama.parallel.ranks import read_on_rank_0

RANK = int(os.environ["RANK"])


def build(**arguments: object) -> Llama:
    return Llama.build(dtype="float32", verbose=False, timeout_s=20, **arguments)


def main(folder: str, other_shape: str, other_weights: str, one_kv_head: str) -> None:
    found = {
        "seed": sentence(build, seed=RANK),
        "max_seq_len": sentence(build, max_seq_len=256 + RANK),
        "dtype": sentence(Llama.build, dtype=["float32", "bfloat16"][RANK]),
        "shape": sentence(build, ckpt_dir=other_shape if RANK else None),
        "weights": sentence(build, ckpt_dir=other_weights if RANK else None),
        "heads": sentence(build, ckpt_dir=one_kv_head),
        "too many": sentence(build, model_parallel_size=4),
    }
    with build() as llama:
        found["other size"] = sentence(build, model_parallel_size=1)
        found["prompts"] = sentence(llama.generate, [[1, 300 + RANK]], 4)
        found["temperature"] = sentence(llama.generate, [[1, 300]], 4, temperature=0.5 + RANK)
        found["drawn"] = sentence(llama.generate, [[1, 300]], 9, temperature=1, seed=RANK)
        stream = llama.stream([[1, 300]], 4)
        next(stream)
        found["stream"] = sentence(llama.generate, [[1, 300]], 4)
        stream.close()
        found["still right"] = llama.generate([[1, 300]], 4, temperature=0)[0]
        lines = iter(["first", "second"] if RANK == 0 else ["never asked for"])
        found["read"] = [read_on_rank_0(lambda: next(lines)) for _ in range(2)]
        try:
            read_on_rank_0(end_of_input)
        except EOFError:
            found["read"].append("end")
    with Llama.build(timeout_s=1):
        found["read"].append(read_on_rank_0(slow_input))
    (Path(folder) / f"{RANK}.json").write_text(json.dumps(found))


def slow_input() -> str:
    time.sleep(2)  # longer than a rank may stay silent
    return "slow"


def end_of_input() -> str:
    raise EOFError


if __name__ == "__main__":
    main(*sys.argv[1:])

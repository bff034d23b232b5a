"""Two ranks without a model: what the functions of `llama.parallel.ranks` give on each."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from fairscale.nn.model_parallel import initialize as groups

from llama import LlamaError
from llama.parallel import ranks
from llama.parallel.groups import setup, teardown

RANK = int(os.environ["RANK"])
HELD = [  # of rank 0 and of rank 1, in rows of 4 slots
    ([1, 2, 3], [1, 2, 4]),
    ([5, 6], [5, 6]),
    ([], [7]),
    ([1, 2, 3], [1, 2, 3, 4]),
    ([1, 2, 3, 4], [1, 2, 3, 4, 5]),  # the row of rank 1 has wrapped
    ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5]),
]


class Gathers:
    """Counts the object gathers within a `with` block."""

    def __enter__(self) -> Gathers:
        self.n, self._gather = 0, dist.all_gather_object
        dist.all_gather_object = self._count
        return self

    def _count(self, *arguments: object, **options: object) -> None:
        self.n += 1
        self._gather(*arguments, **options)

    def __exit__(self, *_: object) -> None:
        dist.all_gather_object = self._gather


def error(call: object, *arguments: object, **options: object) -> str:
    try:
        return f"no error: {call(*arguments, **options)}"
    except (LlamaError, RuntimeError) as error:
        return str(error)


def caches() -> dict:
    group, found = groups.get_model_parallel_group(), {}
    for name, rank in (("equal", 0), ("different", RANK)):
        with Gathers() as gathers:
            held = [pair[rank] for pair in HELD]
            shared = ranks.compare_call({"top_p": 0.9}, held, group, n_slots=4)
        found[name] = [shared, gathers.n]
    call = {"prompts": [[1, RANK]], "top_p": 0.9 + RANK}
    found["call"] = error(ranks.compare_call, call, [[]], group, n_slots=4)
    drawn = ranks.broadcast_tokens(torch.tensor([10 + RANK, 20 + RANK]), group)
    return found | {"drawn": drawn.tolist()}


def replicas(runtime: object) -> dict:
    def double(items: list[int]) -> list[int]:
        if 13 in items:
            raise LlamaError(f"13 is unlucky, says rank {RANK}")
        return [2 * item for item in items]

    def run(items: list[int], call: dict) -> list[int]:
        return ranks.run_data_parallel(runtime, items, call, double)

    return {
        "doubled": run(list(range(5)), {"seed": 1}),
        "unlucky": error(run, [1, 13], {"seed": 1}),
        "other seed": error(run, [1, 2], {"seed": RANK}),
    }


def events() -> dict:
    """Rank 0 idles for longer than the timeout, then falls silent, and at last ends."""
    found = {}
    with ranks.Events(timeout_s=1) as channel:
        if RANK == 0:
            for payload in ({"text": "first"}, None, "last"):
                time.sleep(1.5)
                channel.send(payload)
        else:
            found["received"] = [channel.receive() for _ in range(3)]
    channel = ranks.Events(timeout_s=1)
    if RANK == 0:
        channel._closed.set()
        time.sleep(2)
    else:
        found["silent"] = error(channel.receive)
    channel = ranks.Events(timeout_s=60)
    if RANK == 1:
        start = time.monotonic()
        found["ended"] = error(channel.receive)
        found["soon"] = time.monotonic() - start < 30
    return found


def main(folder: str) -> None:
    runtime = setup(device="cpu", timeout_s=20)
    found = caches()
    teardown(runtime)
    runtime = setup(device="cpu", timeout_s=20, model_parallel_size=1)
    found |= replicas(runtime)
    found["impossible"] = error(setup, device="cpu", model_parallel_size=2)
    found |= events()
    (Path(folder) / f"{RANK}.json").write_text(json.dumps(found))
    if RANK == 0:
        os._exit(0)  # without a word to rank 1


if __name__ == "__main__":
    main(sys.argv[1])

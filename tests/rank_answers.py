"""What a model answers, of every kind that there is, written down by each rank of a run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llama import Llama, LlamaError

PROMPTS = ["Once upon a time", "The little dog was very happy because it had a new", "Lily", ""]
DIALOG = [{"role": "user", "content": "Tell me a story about a dog."}]


def answers(llama: Llama) -> dict:
    """One of each: ragged, echoed, scored, sampled, stopped, streamed, and continued."""
    ids = [llama.tokenizer.encode(prompt, bos=True) for prompt in PROMPTS]
    found = {
        "greedy": llama.generate(ids, 16, temperature=0, logprobs=True, echo=True),
        "sampled": llama.generate(ids, 16, temperature=0.9, top_p=0.95, seed=7),
        "own": [llama.generate(ids, 4, temperature=1.0) for _ in range(2)],
        "stopped": llama.text_completion(
            PROMPTS, 0, max_gen_len=24, logprobs=True, stop=["little", " her"]
        ),
        "streamed": list(llama.stream_text(PROMPTS[0], seed=3, max_gen_len=8)),
    }
    first = llama.chat_completion([DIALOG], 0, max_gen_len=8)[0]["generation"]
    longer = [*DIALOG, first, {"role": "user", "content": "Now one about a cat."}]
    found["continued"] = llama.chat_completion([longer], 0, max_gen_len=8, logprobs=True)
    llama.reset()
    found["read anew"] = llama.chat_completion([longer], 0, max_gen_len=8, logprobs=True)
    return found


def many(llama: Llama) -> dict:
    """More prompts than one batch holds, one prompt, and a dialog that is refused among others."""
    tagged = [{"role": "user", "content": "[INST] Ha [/INST]"}]
    return {
        "many": llama.text_completion([*PROMPTS, "Tom", "A cat", "Mia"], 0, max_gen_len=8),
        "one": llama.text_completion(PROMPTS[:1], 0, max_gen_len=8, logprobs=True, echo=True),
        "dialogs": llama.chat_completion([DIALOG, tagged, DIALOG], 0, max_gen_len=8),
    }


class Sent(TorchDispatchMode):
    """Counts the bytes that a rank hands to collectives: a share for a gather, all for a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered_bytes = self.summed_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            self.gathered_bytes += args[0].nbytes
        if func is torch.ops._c10d_functional.all_reduce.default:
            self.summed_bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def sent_per_step(llama: Llama, rows: int) -> tuple[int, int]:
    """Bytes gathered and summed by one more decoding step of `rows` rows."""
    totals = []
    for n in (2, 3):
        with Sent() as sent:
            llama.generate([[1]] * rows, n, temperature=0)
        totals.append((sent.gathered_bytes, sent.summed_bytes))
    (gathered, summed), (gathered_more, summed_more) = totals
    return gathered_more - gathered, summed_more - summed


def compiles_whole(llama: Llama) -> bool:
    """Does the model trace without a break, collectives included, to the same logits?"""
    tokens = torch.tensor([[1, 300, 301]])
    whole = torch.compile(llama.model, fullgraph=True, backend="eager")
    with torch.inference_mode():
        return torch.equal(whole(tokens, 0), llama.model(tokens, 0))


def sentence(call: Callable[..., object], *arguments: object, **options: object) -> str:
    """What a call is refused with."""
    try:
        call(*arguments, **options)
    except LlamaError as error:
        return str(error)
    return "not refused"


def main(folder: str) -> None:
    with Llama.build(max_batch_size=4, dtype="float32", timeout_s=60) as llama:
        found = answers(llama) | many(llama)
        found["sent"] = {rows: sent_per_step(llama, rows) for rows in (1, 3)}
        ranks, rank = llama._runtime.world_size, llama.rank
        if ranks == 2:
            found["compiles"] = compiles_whole(llama)
    if ranks == 4:  # the groups have been released; now two copies of the model
        with Llama.build(max_batch_size=4, dtype="float32", model_parallel_size=2) as llama:
            found["replicas"] = many(llama)
            sampled = [llama.text_completion(["Tom"] * 4, seed=5, max_gen_len=8) for _ in range(2)]
            found["replicas sampled"] = sampled
            prompts = [f"I am in copy {rank // 2}"]
            found["replicas differ"] = sentence(llama.text_completion, prompts)
        found["no divisor"] = sentence(Llama.build, model_parallel_size=3)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    print(f"rank {rank} of {os.environ['WORLD_SIZE']} is done")


if __name__ == "__main__":
    main(sys.argv[1])

"""What a model answers, of every kind that there is, written down by each rank of a run."""

from __future__ import annotations

import json
import os
import random
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


def rounds(llama: Llama) -> list:
    """Thirty calls of all kinds, each of which finds the cache as the one before has left it."""
    choose, found = random.Random(0), []
    ids = [llama.tokenizer.encode(prompt, bos=True) for prompt in PROMPTS]

    def some(n: int) -> list[list[int]]:
        return [
            choose.choice(ids) + choose.choices(ids[1], k=choose.randrange(9)) for _ in range(n)
        ]

    def closed_early(prompts: list[list[int]], seed: int) -> list:
        stream = llama.stream(prompts, 9, seed=seed)
        steps = [next(stream) for _ in range(3)]
        stream.close()
        return steps

    def call(seed: int, n: int, temperature: float) -> object:
        kinds: list[Callable[[], object]] = [
            lambda: llama.generate(some(n), 6, temperature, seed=seed, logprobs=True, echo=True),
            lambda: llama.generate(some(n), 6, 1.0, seed=list(range(n))),
            lambda: llama.generate(some(n), 6, temperature),
            lambda: closed_early(some(min(n, 4)), seed),
            lambda: list(llama.stream_chat(DIALOG, temperature, seed=seed, max_gen_len=6)),
            lambda: llama.text_completion(PROMPTS[:n], 0, max_gen_len=9, stop=["little"]),
            lambda: [h[-1, :4].tolist() for h in llama.hidden_states(some(n))],
            llama.reset,
        ]
        return choose.choice(kinds)()

    for seed in range(30):
        found.append(call(seed, choose.randint(1, 6), choose.choice([0, 0.8])))
    return found


def different_caches(llama: Llama, path: Path) -> dict:
    """After rank 1 alone has changed its cache: the answer, and how much of the prompt was read."""
    prompt = llama.tokenizer.encode("Once upon a time there was a little dog", bos=True)
    saved = Path(f"{path}.{llama.rank}")

    def answer() -> list:
        llama.engine.passes.clear()
        [tokens] = llama.generate([prompt], 8, temperature=0)[0]
        return [tokens, sum(n for kind, n in llama.engine.passes if kind == "prefill")]

    def load() -> None:
        llama.reset()
        if llama.rank == 1:
            saved.write_bytes(saved.read_bytes()[:-100])
        refusal = sentence(llama.load_cache, path)
        assert ("truncated" in refusal) == (llama.rank == 1), refusal

    def on_rank_1(change: Callable[[], object]) -> list:
        answer()
        if llama.rank == 1:
            with torch.no_grad():
                change()
        return answer()

    llama.reset()
    found = {"cold": answer(), "equal": answer()}
    llama.save_cache(path)
    load()
    found["load refused"] = answer()
    found["reset"] = on_rank_1(llama.reset)
    weight = llama.model.layers[-1].feed_forward.w2.weight
    found["same weight"] = on_rank_1(lambda: weight.mul_(1))
    found["changed weight"] = on_rank_1(lambda: weight.mul_(-8))
    llama.reset()
    found["changed weight, cold"] = answer()
    on_rank_1(lambda: weight.div_(-8))
    return found


class Sent(TorchDispatchMode):
    """Counts the bytes that a rank hands to collectives: its part for a gather, else all."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered_bytes = self.summed_bytes = self.broadcast_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            self.gathered_bytes += args[0].nbytes
        if func is torch.ops._c10d_functional.all_reduce.default:
            self.summed_bytes += args[0].nbytes
        if func is torch.ops.c10d.broadcast_.default:
            self.broadcast_bytes += sum(tensor.nbytes for tensor in args[0])
        return func(*args, **(kwargs or {}))


def sent_per_step(llama: Llama, rows: int) -> list[int]:
    """Bytes gathered, summed and broadcast by one more decode step of `rows` rows."""
    totals = []
    for n in (2, 3):
        llama.reset()  # so that the rows lie side by side, and no other is computed
        with Sent() as sent:
            llama.generate([[1]] * rows, n, temperature=0)
        totals.append((sent.gathered_bytes, sent.summed_bytes, sent.broadcast_bytes))
    return [more - less for less, more in zip(*totals, strict=True)]


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
        found = answers(llama) | many(llama) | {"rounds": rounds(llama)}
        found["sent"] = {rows: sent_per_step(llama, rows) for rows in (1, 3)}
        ranks, rank = llama._runtime.world_size, llama.rank
        if ranks == 2:
            found["compiles"] = compiles_whole(llama)
            found["different caches"] = different_caches(llama, Path(folder) / "cache")
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

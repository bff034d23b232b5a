"""Measure a story model: does it tell what it is asked for, and does it answer from its story?

    python stories/measure.py --model llama/stories --data stories_data [--old_kind FILE]

`asked.txt` was written before the words of the generator; the words of its second half are not
among them. FILE holds other held-out stories, one a line.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import numpy as np
from make import HERE, RULES, World

from llama import Dialog, Llama

NAMES = {*RULES["she"], *RULES["he"]}
KNOWN = {word for rule in ("animal", "person", "thing", "rare") for word in RULES[rule]}
SHAPE = {"max_seq_len": 512, "max_batch_size": 8, "dtype": "float32", "verbose": False}


def answers(llama: Llama, dialogs: list[Dialog], seed: int, temperature: float) -> list[dict]:
    options = {"temperature": temperature, "top_p": 0.9, "max_gen_len": 250}
    return [dict(a) for a in llama.chat_completion(dialogs, **options, seed=seed)]


def keeps_name(story: str) -> bool:
    """The first name is told again later, and there is at most one other: the friend's."""
    found = [word for word in re.findall(r"[A-Z][a-z]+", story) if word in NAMES]
    words = len(found)
    return words > 1 and len(set(found)) <= 2 and found[0] in found[max(1, words // 3) :]


def requests(llama: Llama, show: bool) -> None:
    """Row 1: forty requests, three seeds."""
    asked = (HERE / "asked.txt").read_text().splitlines()
    dialogs: list[Dialog] = [
        [{"role": "user", "content": f"Tell me a story about {x}."}] for x in asked
    ]
    counts: Counter[str] = Counter()
    for seed in (1, 2, 3):
        for x, answer in zip(asked, answers(llama, dialogs, seed, 0.6), strict=True):
            story = answer["generation"]["content"]
            words = [re.sub(r"^an? ", "", part) for part in x.split(" and ")]
            group = "listed" if all(word in KNOWN for word in words) else "other"
            named = all(re.search(rf"\b{word}", story.lower()) for word in words)
            facts = {"named": named, "name kept": keeps_name(story)}
            facts["ended"] = answer["finish_reason"] == "stop"
            counts.update({f"{group} {fact}": int(value) for fact, value in facts.items()})
            counts[group] += 1
            if show or not all(facts.values()):
                print(f"  [{x}] {[k for k, v in facts.items() if not v]} {story}")
    for group in ("listed", "other"):
        for fact in ("named", "name kept", "ended"):
            share = 100 * counts[f"{group} {fact}"] / counts[group]
            print(f"1. {group} words, {fact}: {share:.0f} % of {counts[group]}")


def questions(llama: Llama, number: int = 50) -> None:
    """Row 2: a question on a story of the generator that it did not write to the training text."""
    world = World(random.Random(99), Counter())
    rows: list[tuple[str, str, Dialog]] = []
    while len(rows) < number:
        kind = ("name", "colour kind", "place", "why")[len(rows) % 4]
        world.brief, world.mood = False, ""
        request, story = world.asked()
        facts = world.facts
        name, _, thing = kind.partition(" ")
        clear = re.search(rf"\b{facts['colour']} {facts['kind']}\b", story)
        if (thing and not clear) or (not thing and not world.is_told(name)):
            continue
        facts |= {"thing": facts["kind"], "shade": facts["colour"]}
        wanted = facts[{"why": "reason", "colour": "shade"}.get(name, name)]
        dialog: Dialog = [
            {"role": "user", "content": request},
            {"role": "assistant", "content": story},
            {"role": "user", "content": world.expand(RULES[f"q.{name}"][len(rows) % 4])},
        ]
        facts.pop("thing")
        rows.append((kind, wanted, dialog))
    right: Counter[str] = Counter()
    given = answers(llama, [dialog for _, _, dialog in rows], 1, 0)
    for (kind, wanted, dialog), answer in zip(rows, given, strict=True):
        text = answer["generation"]["content"]
        good = wanted.lower() in text.lower()
        right[kind] += good
        if not good:
            print(f"  {dialog[-1]['content']} {text} ({wanted})")
    print(f"2. questions: {sum(right.values())} of {number} right, {dict(right)} of 13, 13, 12, 12")


def loss(llama: Llama, texts: list[str]) -> tuple[float, float]:
    """Nats per byte and perplexity per token."""
    total, size, count = 0.0, 0, 0
    for text in texts:
        ids = llama.tokenizer.encode(text, bos=True)[:500]
        _, logprobs = llama.generate([ids], 0, logprobs=True, echo=True)
        assert logprobs is not None
        total -= sum(logprobs[0])
        size, count = size + len(llama.tokenizer.decode(ids).encode()), count + len(ids) - 1
    return total / size, math.exp(total / count)


def plain_stories(data: Path) -> list[str]:
    lines = map(json.loads, (data / "held_out.jsonl").read_text().splitlines())
    return [line["text"] for line in lines if "text" in line]


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def longest_runs(stories: list[str], data: Path) -> list[int]:
    """For each story the most words in a row that the training text has in a row too."""
    numbers: dict[str, int] = {}

    def ids(words: Iterable[str]) -> np.ndarray:
        return np.array([numbers.setdefault(w, len(numbers) + 1) for w in words], dtype=np.uint64)

    lines = map(json.loads, (data / "train.jsonl").read_text().splitlines())
    texts = ([d["text"]] if "text" in d else [a for _, a in d["turns"]] for d in lines)
    text = ids(w for parts in texts for part in parts for w in [*words_of(part), "/"])
    told = [ids(words_of(story)) for story in stories]
    runs, factor = [0] * len(told), np.uint64(0x9E3779B97F4A7C15)
    hashes, hashed = text.copy(), [t.copy() for t in told]
    for length in range(1, 80):
        seen = np.unique(hashes)
        open_rows = [i for i, h in enumerate(hashed) if len(h) and np.isin(h, seen).any()]
        if not open_rows:
            break
        for i in open_rows:
            runs[i] = length
        hashes = hashes[:-1] * factor + text[length:]
        hashed = [h[:-1] * factor + t[length:] for h, t in zip(hashed, told, strict=True)]
    return runs


def copied(llama: Llama, data: Path) -> None:
    """Row 6: twenty stories at temperature 0.8 against twenty held-out ones."""
    words = (HERE / "asked.txt").read_text().splitlines()[:20]
    dialogs: list[Dialog] = [
        [{"role": "user", "content": f"Tell me a story about {x}."}] for x in words
    ]
    told = [a["generation"]["content"] for a in answers(llama, dialogs, 8, 0.8)]
    for name, stories in (("told", told), ("held out", plain_stories(data)[:20])):
        runs = longest_runs(stories, data)
        print(f"6. {name}: longest run {max(runs)} words, median {median(runs)}; {sorted(runs)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama/stories")
    parser.add_argument("--data", default="stories_data", type=Path)
    parser.add_argument("--old_kind", type=Path)
    parser.add_argument("--rows", default="12356")
    parser.add_argument("--show", action="store_true", help="print every story")
    args = parser.parse_args()
    kinds = {"new": plain_stories(args.data)[:40]}
    if args.old_kind:
        kinds["old"] = args.old_kind.read_text().splitlines()[:40]
    with Llama.build(args.model, **SHAPE) as llama:
        if "1" in args.rows:
            requests(llama, args.show)
        if "2" in args.rows:
            questions(llama)
        if "3" in args.rows:
            for kind, texts in kinds.items():
                print(f"3. {kind} kind: {loss(llama, texts)[0]:.3f} nats per byte")
        if "6" in args.rows:
            copied(llama, args.data)
    for quantize in (None, "int8", "int4") if "5" in args.rows else ():
        with Llama.build(args.model, **SHAPE, quantize=quantize) as llama:
            print(f"5. {quantize or 'float32'}: perplexity {loss(llama, kinds['new'])[1]:.3f}")


if __name__ == "__main__":
    main()

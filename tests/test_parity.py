"""Every pair of options gives the answers of `transformers`, and those of the original code."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from checkpoints import hf_model
from conftest import ATOL, NAMES, golden
from parity_answers import CHUNK, WINDOW, Case, answers
from spawn import torchrun
from torch import nn
from transformers.cache_utils import DynamicCache

from llama import Llama
from llama.checkpoints.convert import convert
from llama.checkpoints.load import open_checkpoint

LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# The cheap value of each option is first: it is taken where no pair asks for another.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "compile": (False, True),
    "ranks": (1, 2),
    "quantize": (None, "int8", "int4"),
    "cache": (None, "float16", "int8"),
    "dtype": ("float32", "bfloat16", "float16"),
    "kv_heads": (8, 4, 1),
    "window": (None, WINDOW),
    "chunk": (None, CHUNK),
    "reuse": ("cold", "warm"),
    "batch": (1, 3),
    "rope": ("none", "linear", "llama3"),
    "format": ("hf", "pth1", "pth2"),
}
ROPES: dict[str, dict[str, Any]] = {"none": {}, "linear": LINEAR, "llama3": LLAMA3}
Pair = dict[str, Any]


# One key/value head cannot be split: `build` refuses two ranks, and `convert` two files, which are
# what two ranks had in Meta's training.
IMPOSSIBLE: list[Pair] = [
    {"kv_heads": 1, "ranks": 2},
    {"kv_heads": 1, "format": "pth2"},
    {"name": "rand_mqa", "format": "pth2"},  # the original's checkpoint with one such head
]


def impossible(row: Pair) -> bool:
    return any(pair.items() <= row.items() for pair in IMPOSSIBLE)


def all_pairs(options: dict[str, tuple[Any, ...]]) -> list[Pair]:
    """Every two values of two options that can be together."""
    pairs = [
        {a: x, b: y}
        for a, b in itertools.combinations(options, 2)
        for x, y in itertools.product(options[a], options[b])
    ]
    return [pair for pair in pairs if not impossible(pair)]


def covering_array(options: dict[str, tuple[Any, ...]]) -> list[Case]:
    """Few rows in which every pair occurs: each takes in the first that is left, and then, option
    by option, the value that brings the most others along. Those of a compiled model, which takes
    seconds to make, count five times, and so get together in few of the rows.
    """

    def gain(row: Pair) -> int:
        return sum(5 if pair.get("compile") else 1 for pair in left if pair.items() <= row.items())

    left, rows = all_pairs(options), []
    while left:
        row = dict(left[0])
        for name in options:
            if name not in row:
                choices = [row | {name: value} for value in options[name]]
                row = max((c for c in choices if not impossible(c)), key=gain)
        rows.append({name: row[name] for name in options})
        left = [pair for pair in left if not pair.items() <= row.items()]
    return rows


CASES = covering_array(OPTIONS)


@cache
def source(kv_heads: int, window: int | None, rope: str) -> Any:
    """A random model of transformers in float32; a window makes it a Mistral."""
    kind = {"model_type": "mistral", "sliding_window": window} if window else {}
    scaling = {"rope_scaling": ROPES[rope]} if ROPES[rope] else {}
    # A width that divides into groups of int4 on two ranks too.
    model = hf_model(num_key_value_heads=kv_heads, intermediate_size=192, **kind, **scaling)
    model.lm_head.weight.data[2] = 0  # EOS: a logit of 0 is never the largest
    return model


def written(case: Case, root: Path) -> Path:
    """The folder of a checkpoint: transformers' own files, or what `convert` makes of them."""
    facts = case["kv_heads"], case["window"], case["rope"]
    hf = root / "-".join(map(str, (*facts, "hf")))
    if not hf.exists():
        source(*facts).save_pretrained(hf)
    target = hf.with_name(hf.name.removesuffix("hf") + case["format"])
    if not target.exists():
        convert(str(hf), str(target), to="meta", shards=int(case["format"].removeprefix("pth")))
    return target


# The reference: transformers in float32 over the weights as the case rounds them. What is rounded
# to 8 or 4 bits on the way is rounded here by the formula, so that the tolerance need not hide it.


def dequantized(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The weight (n, k) that values and scales stand for."""
    if values.dtype == torch.int8:
        return values * scales[:, None]
    scale, zero = scales.float()[..., None]
    pairs = values.unflatten(1, (scale.shape[1], -1))
    return (torch.cat((pairs & 15, pairs >> 4), -1) * scale + zero).flatten(1)


class Product(nn.Module):
    """A linear layer of several ranks, each with its own part (values, scales) of the weight."""

    def __init__(self, parts: list[Any], axis: int, head_dim: int | None) -> None:
        super().__init__()
        self.parts, self.axis, self.head_dim = parts, axis, head_dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = len(self.parts)
        pieces = x.chunk(n, -1) if self.axis == 1 else [x] * n
        pairs = zip(pieces, self.parts, strict=True)
        ys = [piece @ dequantized(*part).T for piece, part in pairs]
        y = sum(ys) if self.axis == 1 else torch.cat(ys, -1)
        if self.head_dim is not None:  # from Meta's order of the rows to that of transformers
            y = y.unflatten(-1, (-1, self.head_dim // 2, 2)).transpose(-1, -2).flatten(-3)
        return y


def reference(case: Case) -> Any:
    """The model of transformers that a case has to be equal to."""
    model = copy.deepcopy(source(case["kv_heads"], case["window"], case["rope"]))
    dtype, kind, ranks = getattr(torch, case["dtype"]), case["quantize"], case["ranks"]
    for parameter in model.parameters():
        parameter.data = parameter.to(dtype).float()
    checkpoint = open_checkpoint(case["folder"])
    for name, parameter in checkpoint.parameters.items():
        if kind is None or len(parameter.shape) == 1:
            continue
        parts = [checkpoint.read_quantized(name, kind, rank, ranks) for rank in range(ranks)]
        where, _, what = parameter.hf_name.removesuffix(".weight").rpartition(".")
        if "embed" in what:
            wide = torch.cat([dequantized(*part) for part in parts], 1)
            model.get_submodule(where).embed_tokens.weight.data = wide.to(dtype).float()
        else:
            head_dim = checkpoint.args.head_dim if parameter.rotary else None
            setattr(model.get_submodule(where), what, Product(parts, parameter.axis, head_dim))
    return model


def rounded(x: torch.Tensor, dtype: str | None) -> torch.Tensor:
    """A key or value as the cache gives it back, (..., head_dim)."""
    if dtype == "int8":
        scale = (x.abs().amax(-1, keepdim=True) / 127).half().float()
        return (x / scale).round().clamp(-127, 127) * scale
    return x if dtype is None else x.to(getattr(torch, dtype)).float()


def logprobs_of(model: Any, tokens: list[int], cache_dtype: str | None) -> torch.Tensor:
    """What each token is given by those before it: (n - 1, vocab_size)."""
    update = DynamicCache.update

    def rounding(self: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kw: Any) -> Any:
        return update(self, rounded(keys, cache_dtype), rounded(values, cache_dtype), *args, **kw)

    with torch.no_grad(), mock.patch.object(DynamicCache, "update", rounding):
        return model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)


def differences(case: Case, found: list[dict]) -> tuple[float, float]:
    """How far logprobs are from the reference's, and drawn tokens from its most likely ones."""
    model, off, behind = reference(case), 0.0, 0.0
    for answer in found:
        tokens, values = answer["tokens"], torch.tensor(answer["logprobs"])
        logprobs = logprobs_of(model, tokens, case["cache"])
        theirs = logprobs.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
        off = max(off, float((values - theirs[-len(values) :]).abs().max()))
        best, drawn = logprobs.amax(-1), slice(answer["given"] - 1, None)
        behind = max(behind, float((best - theirs)[drawn].max()))
    return off, behind


# How far a logprob may be from the reference's: as far as the widest of a case's options says.
LIMITS: dict[tuple[str, Any], float] = {
    ("dtype", "float32"): 1e-4,  # sums in another order
    # Each product, norm and sum is rounded to 11 or 8 bits, and the reference rounds weights alone.
    ("dtype", "float16"): 0.03,
    ("dtype", "bfloat16"): 0.1,
    # The reference rounds as we do, so that all is equal, until a last bit tips a number over to
    # the next step, of 11 bits or of 8 bits.
    ("cache", "float16"): 1e-3,
    ("cache", "int8"): 0.02,
    # The kernels round what they multiply to 15 bits.
    ("quantize", "int8"): 2e-3,
    ("quantize", "int4"): 2e-3,
}
TIPPED = 0.25  # where a dtype of 16 bits tips many of the numbers of 8 bits


def limit(case: Case) -> float:
    limits = [LIMITS[item] for item in case.items() if item in LIMITS]
    if case["dtype"] != "float32" and "int8" in (case["quantize"], case["cache"]):
        limits.append(TIPPED)
    return max(limits)


def check(case: Case, found: list[dict]) -> None:
    """The logprobs are the reference's, and where its first choice is clear, so are the tokens."""
    off, behind = differences(case, found)
    assert off <= limit(case)
    assert behind <= 2 * limit(case)  # both of two tokens may be off


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Case]]:
    root = tmp_path_factory.mktemp("parity")
    yield [case | {"folder": str(written(case, root))} for case in CASES]
    torch._dynamo.reset()  # what it has seen here would change what it makes of later models


@pytest.fixture(scope="module")
def on_two_ranks(
    cases: list[Case], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, list[dict]]:
    """The answers of all cases with two ranks, by number; one run for all of them."""
    folder = tmp_path_factory.mktemp("ranks")
    mine = {i: case for i, case in enumerate(cases) if case["ranks"] == 2}
    (folder / "cases.json").write_text(json.dumps(list(mine.values())))
    run = torchrun(2, "tests/parity_answers.py", folder / "cases.json", folder, timeout_s=240)
    assert run.returncode == 0, run.stderr
    first, second = ((folder / f"{rank}.json").read_text() for rank in (0, 1))
    assert first == second
    return dict(zip(mine, json.loads(first), strict=True))


def numbered(ranks: int) -> list[Any]:
    return [
        pytest.param(i, id="-".join(map(str, case.values())))
        for i, case in enumerate(CASES)
        if case["ranks"] == ranks
    ]


@pytest.mark.parametrize("i", numbered(1))
def test_a_mix_of_options_gives_the_answers_of_transformers(i: int, cases: list[Case]) -> None:
    check(cases[i], answers(cases[i]))


@pytest.mark.parametrize("i", numbered(2))
def test_a_mix_of_options_on_two_ranks_gives_the_answers_of_transformers(
    i: int, cases: list[Case], on_two_ranks: dict[int, list[dict]]
) -> None:
    check(cases[i], on_two_ranks[i])


def test_every_pair_of_options_is_in_a_case_but_the_impossible_ones() -> None:
    sizes = [len(values) for values in OPTIONS.values()]
    n_pairs = sum(a * b for a, b in itertools.combinations(sizes, 2))
    found = {pair for case in CASES for pair in itertools.combinations(map(str, case.items()), 2)}
    assert len(found) == n_pairs - 2


# The original code has neither windows nor quantized weights, and answers in float32.
ORIGINAL: dict[str, tuple[Any, ...]] = {
    "chunk": (None, 7),
    "reuse": ("cold", "warm"),
    "format": ("pth1", "pth2", "hf"),
    "name": tuple(NAMES),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, id="-".join(map(str, c.values()))) for c in covering_array(ORIGINAL)]
)
def test_a_mix_of_options_gives_the_recorded_answers_of_the_original(
    case: Case, tmp_path: Path
) -> None:
    source, expected = golden(case["name"])
    folder = source if case["format"] == "pth1" else tmp_path / "converted"
    if case["format"] != "pth1":
        to, shards = ("hf", 1) if case["format"] == "hf" else ("meta", 2)
        convert(str(source), str(folder), to=to, shards=shards)
    options: Any = {"dtype": "float32", "prefill_chunk": case["chunk"], "verbose": False}
    sizes = {"max_seq_len": 256, "max_batch_size": 4}
    with Llama.build(folder, source / "tokenizer.model", **sizes, **options) as llama:
        for answer in expected["cases"]:
            prompts = answer["prompt_tokens"]
            if case["reuse"] == "warm":
                llama.generate([row[: len(row) // 2 + 1] for row in prompts], 0)
            tokens, logprobs = llama.generate(prompts, logprobs=True, **answer["args"])
            assert tokens == answer["tokens"]
            for ours, theirs in zip(logprobs or [], answer["logprobs"], strict=True):
                assert ours == pytest.approx(theirs, abs=ATOL)

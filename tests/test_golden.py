"""The same answers as the original code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from conftest import ATOL, NAMES, golden

from llama import Llama


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest) -> Iterator[tuple[Llama, dict]]:
    folder, expected = golden(request.param)
    with Llama.build(
        folder, max_seq_len=256, max_batch_size=4, dtype="float32", verbose=False
    ) as llama:
        yield llama, expected


def test_tokens_and_logprobs_are_those_of_the_original(case: tuple[Llama, dict]) -> None:
    llama, expected = case
    for answer in expected["cases"]:
        tokens, logprobs = llama.generate(answer["prompt_tokens"], logprobs=True, **answer["args"])
        assert tokens == answer["tokens"]
        for ours, theirs in zip(logprobs, answer["logprobs"], strict=True):
            assert ours == pytest.approx(theirs, abs=ATOL)


def test_the_tokenizer_encodes_as_in_the_original(case: tuple[Llama, dict]) -> None:
    llama, expected = case
    for answer in expected["cases"]:
        ids = [llama.tokenizer.encode(prompt, bos=True, eos=False) for prompt in answer["prompts"]]
        assert ids == answer["prompt_tokens"]


def test_the_logits_are_those_of_the_original(case: tuple[Llama, dict]) -> None:
    llama, expected = case
    forward = expected["forward"]
    logits = llama.model.forward(torch.tensor(forward["tokens"]), 0)[0]
    assert logits.dtype == torch.float32
    torch.testing.assert_close(
        logits[[0, -1]],
        torch.tensor([forward["first_logits"], forward["last_logits"]]),
        atol=ATOL,
        rtol=0,
    )
    sums = torch.tensor(forward["logsumexp"])
    torch.testing.assert_close(logits.logsumexp(-1), sums, atol=ATOL, rtol=0)
    assert logits.argmax(-1).tolist() == forward["argmax"]


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_draws_what_the_original_draws_under_the_same_global_seed(name: str) -> None:
    folder, expected = golden(name)
    sampled = expected["sampled"]
    before = torch.get_rng_state()
    options = {"temperature": sampled["temperature"], "top_p": sampled["top_p"]}
    with Llama.build(
        folder, max_seq_len=256, max_batch_size=4, seed=sampled["seed"], verbose=False
    ) as llama:
        prompt = llama.tokenizer.encode(sampled["prompt"], bos=True)
        first, _ = llama.generate([prompt], sampled["max_gen_len"], **options)
        llama.generate([prompt], 5)  # the instance's generator goes on, and a call's own does not
        again, _ = llama.generate([prompt], sampled["max_gen_len"], **options, seed=sampled["seed"])
    assert first == again == sampled["tokens"]
    assert torch.equal(torch.get_rng_state(), before)

"""Logits to tokens."""

from __future__ import annotations

import math

import pytest
import torch

from llama.generation import sample_top_p
from llama.sampling import NOT_FINITE, make_generator, sample, token_logprobs

CPU = torch.device("cpu")


def multinomial_top_p(probs: torch.Tensor, p: float) -> torch.Tensor:
    """Nucleus sampling with torch.multinomial over the sorted probabilities."""
    ordered, ids = probs.sort(dim=-1, descending=True)
    ordered[ordered.cumsum(-1) - ordered > p] = 0.0
    return ids.gather(-1, torch.multinomial(ordered / ordered.sum(-1, keepdim=True), 1))


@pytest.mark.parametrize("p", [0.0, 0.3, 0.9, 1.0])
def test_the_draws_are_those_of_multinomial_over_the_sorted_probabilities(p: float) -> None:
    logits = torch.randn(4, 500, generator=make_generator(CPU, 0)) * 3
    probs = logits.softmax(-1)
    generator = make_generator(CPU, 1)
    with torch.random.fork_rng():
        for seed in range(50):
            torch.manual_seed(seed)
            expected = multinomial_top_p(probs, p)
            state = torch.get_rng_state()
            torch.manual_seed(seed)
            assert torch.equal(sample_top_p(probs.clone(), p), expected)
            generator.manual_seed(seed)
            assert torch.equal(sample_top_p(probs, p, generator=generator), expected)
            assert torch.equal(generator.get_state(), state)


def test_only_the_nucleus_is_drawn_and_in_its_proportions() -> None:
    probs = torch.tensor([[0.125, 0.5, 0.0625, 0.25, 0.0625]]).expand(20000, -1)
    drawn = sample_top_p(probs, 0.7, generator=make_generator(CPU, 0))
    share = torch.bincount(drawn[:, 0], minlength=5) / 20000
    # 0.5 does not exceed 0.7, and with 0.25 it does. A share of 20,000 draws strays by about
    # 0.004; the tolerance is five times that.
    expected = torch.tensor([0, 0.5, 0, 0.25, 0]) / 0.75
    torch.testing.assert_close(share, expected, atol=0.02, rtol=0)
    assert share[[0, 2, 4]].sum() == 0


def test_probabilities_given_to_the_sampler_are_left_as_they_are() -> None:
    probs = torch.rand(2, 50).softmax(-1)
    kept = probs.clone()
    sample_top_p(probs, 0.5)
    assert torch.equal(probs, kept)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0, 0.6])
def test_a_row_that_is_not_finite_is_told_and_the_others_are_drawn(
    bad: float, temperature: float
) -> None:
    logits = torch.randn(3, 40)
    logits[1, 7] = bad
    tokens = sample(logits, temperature, 0.9, make_generator(CPU, 0))
    assert tokens[1] == NOT_FINITE
    assert (tokens[[0, 2]] >= 0).all()


def test_huge_logits_do_not_overflow() -> None:
    logits = torch.tensor([[6e4, 5.9e4, -6e4]])
    for temperature in (1e-30, 1e-3, 1.0):
        assert sample(logits, temperature, 1.0, make_generator(CPU, 0)).tolist() == [0]


def test_logprobs_are_those_of_log_softmax() -> None:
    logits = torch.randn(2, 3, 50) * 10
    tokens = torch.randint(0, 50, (2, 3))
    expected = torch.log_softmax(logits, -1).gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(token_logprobs(logits, tokens), expected, atol=1e-5, rtol=0)

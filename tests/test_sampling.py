"""Logits to tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from llama import Llama, LlamaError
from llama.generation import sample_top_p
from llama.sampling import (
    NOT_FINITE,
    Draws,
    SamplingParams,
    make_generator,
    reshape_logits,
    sample,
    token_logprobs,
)

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


def test_half_precision_probabilities_are_drawn_from_inside_the_nucleus_only() -> None:
    """In float16 some waiting times are 0, and 0 / 0 used to win."""
    probs = torch.zeros(64, 32000, dtype=torch.float16)
    probs[:, 7], probs[:, 9] = 0.75, 0.25
    for p in (0.5, 1.0):
        for seed in range(20):
            drawn = sample_top_p(probs, p, generator=make_generator(CPU, seed))
            assert set(drawn[:, 0].tolist()) <= {7, 9}


def draw(logits: torch.Tensor, seed: int = 0, **params: Any) -> torch.Tensor:
    """One token for each row, all with the same parameters."""
    waits = torch.empty_like(logits).exponential_(generator=make_generator(CPU, seed))
    return sample(logits, [SamplingParams(**params)] * len(logits), waits)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0, 0.6])
def test_a_row_that_is_not_finite_is_reported_and_the_others_are_drawn(
    bad: float, temperature: float
) -> None:
    logits = torch.randn(3, 40)
    logits[1, 7] = bad
    tokens = draw(logits, temperature=temperature)
    assert tokens[1] == NOT_FINITE
    assert (tokens[[0, 2]] >= 0).all()


def test_tokens_at_minus_infinity_are_never_drawn() -> None:
    logits = torch.full((200, 40), -math.inf)
    assert (draw(logits) == NOT_FINITE).all()
    logits[:, [3, 5]] = torch.tensor([1.0, 1.1])
    assert set(draw(logits, top_p=1).tolist()) == {3, 5}
    assert draw(logits, temperature=0).tolist() == [5] * 200


def test_huge_logits_do_not_overflow() -> None:
    logits = torch.tensor([[6e4, 5.9e4, -6e4]])
    for temperature in (1e-30, 1e-3, 1.0):
        assert draw(logits, temperature=temperature, top_p=1).tolist() == [0]


# Sampling parameters: each against its formula, written out.

ROWS = 20000
SHARE_ATOL = 0.02  # of 20,000 draws a share strays by 0.0035 at most: five times that
LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0, 1.5, 0.5])


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, [1, 4]),
        ({"top_k": 0}, range(6)),
        ({"top_k": 99}, range(6)),
        ({"min_p": 0.3}, [1, 2, 4]),  # e^-1 is 0.37 of the largest, and e^-1.5 is 0.22
        ({"min_p": 1}, [1]),
        ({"top_k": 3, "min_p": 0.5}, [1, 4]),
        ({"top_k": 3, "top_p": 0.1}, [1]),
        # All rules see one distribution: the two most likely have 0.67 of it, 0.81 after top_k.
        ({"top_k": 3, "top_p": 0.7}, [1, 2, 4]),
        ({"temperature": 2, "min_p": 0.5}, [1, 2, 4]),  # e^(-1 / 2) is 0.61
    ],
    ids=str,
)
def test_top_k_and_min_p_keep_the_tokens_of_their_rule_in_their_proportions(
    params: dict, kept: Sequence[int]
) -> None:
    params = {"temperature": 1, "top_p": 1, **params}
    probs = (LOGITS / params["temperature"]).softmax(-1)
    expected = torch.zeros(6)
    expected[[*kept]] = probs[[*kept]]
    share = draw(LOGITS.expand(ROWS, -1), **params).bincount(minlength=6) / ROWS
    assert (share > 0).nonzero()[:, 0].tolist() == [*kept]
    torch.testing.assert_close(share, expected / expected.sum(), atol=SHARE_ATOL, rtol=0)


def test_rows_of_one_draw_keep_their_own_parameters() -> None:
    logits = torch.randn(6, 300, generator=make_generator(CPU, 1)) * 2
    waits = torch.empty_like(logits).exponential_(generator=make_generator(CPU, 2))
    params = [
        SamplingParams(temperature=0),
        SamplingParams(top_p=0.3),
        SamplingParams(top_k=5, top_p=1),
        SamplingParams(temperature=3, min_p=0.1, top_p=1),
        SamplingParams(temperature=1, top_p=1),
        SamplingParams(),
    ]
    together = sample(logits, params, waits)
    alone = [sample(logits[i, None], [params[i]], waits[i, None]) for i in range(6)]
    assert torch.equal(together, torch.cat(alone))


def test_each_penalty_is_its_formula() -> None:
    prompt, tokens = [0, 3, 3, 99], [1, 4, 1]  # 99 is not a word: an id without a logit

    def reshaped(**params: Any) -> torch.Tensor:
        kept = LOGITS.clone()
        result = reshape_logits(SamplingParams(**params), prompt, tokens, LOGITS)
        assert torch.equal(LOGITS, kept)
        return result

    for params, expected in (
        ({"repetition_penalty": 2.0}, [0.0, 1.0, 1.0, -2.0, 0.75, 0.5]),
        ({"presence_penalty": 0.5}, [0.0, 1.5, 1.0, -1.0, 1.0, 0.5]),
        ({"frequency_penalty": 0.5}, [0.0, 1.0, 1.0, -1.0, 1.0, 0.5]),
        ({"presence_penalty": 1.0, "frequency_penalty": -0.5}, [0.0, 2.0, 1.0, -1.0, 1.0, 0.5]),
        ({"logit_bias": {2: 3.0, 5: -0.5}}, [0.0, 2.0, 4.0, -1.0, 1.5, 0.0]),
        ({"logits_processor": lambda ids, logits: logits * len(ids)}, (LOGITS * 7).tolist()),
    ):
        assert reshaped(**params).tolist() == expected


def test_a_processor_has_the_last_word_and_sees_prompt_and_answer(fresh: Llama) -> None:
    seen = []

    def only(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(ids)
        assert logits.shape == (fresh.tokenizer.n_words,)
        assert logits.dtype == torch.float32
        allowed = torch.full_like(logits, -math.inf)
        allowed[[400, 401]] = logits[[400, 401]]
        return allowed

    params = SamplingParams(max_gen_len=4, logits_processor=only, logit_bias={402: 100.0}, seed=3)
    tokens, _ = fresh.generate([[1, 300]], params=params)
    assert set(tokens[0]) <= {400, 401}
    assert seen == [[1, 300, *tokens[0][:n]] for n in range(4)]


@pytest.mark.parametrize(
    ("processor", "error"),
    [
        (lambda ids, logits: 1 / 0, ZeroDivisionError),
        (lambda ids, logits: logits[:3], LlamaError),
        (lambda ids, logits: None, LlamaError),
        (lambda ids, logits: logits * math.nan, LlamaError),
    ],
)
def test_a_processor_that_fails_ends_its_own_call_and_no_other(
    processor: Any, error: type, fresh: Llama
) -> None:
    expected = fresh.generate([[1, 300]], 12, temperature=0)[0]
    stream = fresh.stream([[1, 300]], 12, temperature=0)
    first = next(stream)
    with pytest.raises(error):
        fresh.generate([[1, 300, 301]], params=SamplingParams(logits_processor=processor))
    assert [first[0], *(step[0] for step in stream)] == expected[0]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -1},
        {"top_p": 1.1},
        {"min_p": 2},
        {"top_k": -1},
        {"repetition_penalty": 0},
        {"presence_penalty": math.inf},
        {"temperature": math.nan},
        {"seed": 2**64},
        {"stop": ["a", ""]},
    ],
    ids=str,
)
def test_a_parameter_beyond_its_limit_is_refused_with_its_value(params: dict) -> None:
    name = next(iter(params))
    with pytest.raises(LlamaError, match=name):
        SamplingParams(**params)


# Draws


def test_rows_of_a_draw_do_not_depend_on_the_order_in_which_prompts_ask() -> None:
    def asked(order: list[tuple[int, int]]) -> tuple[dict, torch.Tensor]:
        generator = make_generator(CPU, 5)
        draws = Draws(generator, 3)
        rows = {(t, i): draws.row(t, i, 50).clone() for t, i in order}
        return rows, generator.get_state()

    in_step, state = asked([(t, i) for t in range(4) for i in range(3)])
    generator = make_generator(CPU, 5)
    written_out = [torch.empty(3, 50).exponential_(generator=generator) for _ in range(4)]
    assert all(torch.equal(row, written_out[t][i]) for (t, i), row in in_step.items())
    lagging = [(t, i) for i in (1, 0, 2) for t in range(4)]
    mixed = [(0, 2), (1, 2), (0, 0), (2, 2), (1, 0), (0, 1), (3, 2), (2, 0), (1, 1), (3, 0)]
    for order in (lagging, [*mixed, (2, 1), (3, 1)]):
        found, ended = asked(order)
        assert found.keys() == in_step.keys()
        assert all(torch.equal(found[key], in_step[key]) for key in in_step)
        assert torch.equal(ended, state)


def test_four_prompts_draw_as_a_written_out_loop_of_multinomial(fresh: Llama) -> None:
    """The second of them ends early, and its row is drawn for all the same."""
    prompts = [[1, 300 + i, 301, 302] for i in range(4)]
    model, n_words, n = fresh.model, fresh.tokenizer.n_words, 24
    rows = torch.tensor(prompts)
    with torch.random.fork_rng():
        torch.manual_seed(11)
        for _ in range(n):
            logits = model(rows, 0, only_last=True)[:, -1, :n_words]
            drawn = multinomial_top_p((logits / 0.9).softmax(-1), 0.95)
            rows = torch.cat([rows, drawn], dim=1)
    answers = rows[:, 4:].tolist()
    end = answers[1][5]  # as if it were a stop token, for all of them
    expected = [row[: row.index(end)] if end in row else row for row in answers]
    assert len(expected[1]) <= 5
    assert max(map(len, expected)) == n  # else the loop would prove less than it says
    found, _ = fresh.generate(prompts, n, temperature=0.9, top_p=0.95, seed=11, stop_tokens=[end])
    eos = fresh.tokenizer.eos_id
    assert found == [row[: row.index(eos)] if eos in row else row for row in expected]


def test_nothing_of_a_draw_comes_from_the_callers_defaults(fresh: Llama) -> None:
    options: Any = {"seed": 4, "logprobs": True, "echo": True}
    params = SamplingParams(seed=4, max_gen_len=20, top_p=0.93, min_p=0.01, frequency_penalty=0.3)
    prompts = [[1, 300, 301], [1, 400]]

    def answers() -> list:
        own = fresh.generate(prompts, params=params)
        return [fresh.generate(prompts, 20, **options), own, fresh.hidden_states(prompts)[0].dtype]

    expected = answers()
    try:
        torch.set_default_dtype(torch.float16)
        torch.set_default_device("meta")
        fresh.reset()
        assert answers() == expected
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def test_logprobs_are_those_of_log_softmax() -> None:
    logits = torch.randn(2, 3, 50) * 10
    tokens = torch.randint(0, 50, (2, 3))
    expected = torch.log_softmax(logits, -1).gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(token_logprobs(logits, tokens), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("bias", [math.inf, math.nan])
def test_a_logit_bias_that_leaves_nothing_to_draw_is_refused(bias: float) -> None:
    with pytest.raises(LlamaError, match="of token 5: it must be a number or -inf"):
        SamplingParams(logit_bias={5: bias})
    SamplingParams(logit_bias={5: -math.inf})  # forbids the token

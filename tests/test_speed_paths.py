"""What is done in a faster way gives what the plain way gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from llama import kernels, quantize, sampling
from llama.parallel import layers
from llama.sampling import TOPK_FAST_PATH, SamplingParams, make_generator, sample_top_p

CPU = torch.device("cpu")
IN, OUT = 320, 2500  # more than SMALL numbers, and no whole number of tiles


def plain_top_p(probs: torch.Tensor, p: float, generator: torch.Generator) -> torch.Tensor:
    """Nucleus sampling over a full sort."""
    ordered, tokens = probs.sort(dim=-1, descending=True)
    ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered > p, 0.0)
    waits = torch.empty_like(ordered).exponential_(generator=generator)
    best = (ordered / ordered.sum(-1, keepdim=True) / waits).argmax(-1, keepdim=True)
    return tokens.gather(-1, best)


def logits(spread: float, *, equal: bool = False) -> torch.Tensor:
    x = torch.randn(4, 5 * TOPK_FAST_PATH, generator=make_generator(CPU, 0)) * spread
    return x.round() if equal else x


def sample(logits: torch.Tensor, temperature: float, p: float) -> None:
    params = [SamplingParams(temperature=temperature, top_p=p)] * len(logits)
    waits = torch.empty_like(logits).exponential_(generator=make_generator(CPU, 0))
    sampling.sample(logits, params, waits)


@pytest.mark.parametrize("p", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(
    "logits", [logits(3), logits(0.1), logits(3, equal=True)], ids=["peaked", "flat", "equal"]
)
def test_top_p_over_the_most_likely_draws_what_top_p_over_all_draws(
    logits: torch.Tensor, p: float
) -> None:
    probs = logits.softmax(-1)
    for seed in range(20):
        fast, plain = make_generator(CPU, seed), make_generator(CPU, seed)
        assert torch.equal(sample_top_p(probs, p, generator=fast), plain_top_p(probs, p, plain))
        assert torch.equal(fast.get_state(), plain.get_state())


def test_all_tokens_are_sorted_only_where_the_most_likely_do_not_decide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sorts = 0
    sort = torch.Tensor.sort

    def counting(*args: object, **kwargs: object) -> object:
        nonlocal sorts
        sorts += 1
        return sort(*args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(torch.Tensor, "sort", counting)
    sample(logits(3), 0.6, 0.9)
    assert sorts == 0
    for x, p in ((logits(0.1), 0.9), (logits(3), 1.0), (logits(3, equal=True), 0.9)):
        sample(x, 1.0, p)
    assert sorts == 3


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("choice", kernels.CHOICES)
def test_a_product_is_that_of_float64(
    rows: int, dtype: torch.dtype, slow: bool, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_dtypes = {torch.bfloat16, torch.float16} if slow else set()
    monkeypatch.setattr(quantize, "SLOW_DTYPES", slow_dtypes)
    monkeypatch.setattr(kernels, "_choice", choice)
    x = torch.randn(rows, 2, IN).to(dtype)
    weight = (torch.randn(OUT, IN) / IN**0.5).to(dtype)
    assert weight.numel() > layers.SMALL
    y = layers.linear(x, weight)
    assert (y.dtype, y.shape) == (dtype, (rows, 2, OUT))
    expected = F.linear(x.double(), weight.double())
    # One rounding to the dtype, whose eps it is relative to, and sums in float32 before it.
    torch.testing.assert_close(y.double(), expected, rtol=torch.finfo(dtype).eps, atol=2e-5)


def test_a_product_that_training_needs_keeps_its_gradient() -> None:
    weight, x = torch.randn(OUT, IN, requires_grad=True), torch.ones(1, IN, requires_grad=True)
    layers.linear(x.detach(), weight).sum().backward()
    assert torch.equal(weight.grad, torch.ones(OUT, IN))
    layers.linear(x, weight.detach()).sum().backward()
    # Both are sums of 2500 numbers of about 1 in float32, in different orders.
    torch.testing.assert_close(x.grad, weight.detach().sum(0)[None], atol=2e-3, rtol=0)


def test_a_callers_own_compile_of_a_product_has_one_graph() -> None:
    weight = torch.randn(OUT, IN)
    compiled = torch.compile(layers.linear, fullgraph=True, backend="aot_eager")
    for rows in (1, 12):
        x = torch.randn(rows, 1, IN)
        with torch.inference_mode():
            y = compiled(x, weight)
            assert torch.equal(y, layers.linear(x, weight))
        assert y.is_contiguous()  # as the graph has been told

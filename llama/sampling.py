"""Logits to a token. Randomness is an argument, and computing is done in float32."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from llama.errors import LlamaError, real, require, shown, whole

MOST_LIKELY = 1024  # how many tokens are looked at before all of them are sorted
NOT_FINITE = -1  # what `sample` returns in place of a token id for a row without usable logits


def checked_temperature(temperature: float) -> float:
    """A temperature that has a meaning."""
    number = real(temperature)
    require(
        0 <= number < math.inf,
        f"temperature {shown(temperature)}: it must be a finite number that is not negative "
        "(0 always takes the most likely token)",
    )
    return number


def checked_top_p(top_p: float) -> float:
    """A share that has a meaning."""
    number = real(top_p)
    require(
        0 <= number <= 1,
        f"top_p {shown(top_p)}: it must be a number in [0, 1] (1 keeps every token)",
    )
    return number


def make_generator(device: torch.device, seed: int, replica: int = 0) -> torch.Generator:
    """A source of draws on the device of the logits, a different one for each replica."""
    number = whole(seed)
    if number is None or not -(2**63) <= number < 2**63:
        raise LlamaError(f"seed {shown(seed)}: it must be a whole number of 64 bits")
    return torch.Generator(device).manual_seed(number + replica)


def sample(
    logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator
) -> torch.Tensor:
    """One token for each row of float32 logits (bsz, n): int64 (bsz,), or NOT_FINITE.

    That a row is not finite is told in the result, so that reading the tokens is the one time
    that a step waits for the device.
    """
    finite = logits.amin(-1).isfinite() & logits.amax(-1).isfinite()  # NaN would be both
    if temperature == 0:
        tokens = logits.argmax(-1)
    else:
        # With the largest logit moved to 0, no temperature overflows; below 1e-30, where the
        # distribution has long been a single token, its reciprocal would.
        logits = logits - logits.amax(-1, keepdim=True)
        probs = torch.softmax(logits / max(temperature, 1e-30), dim=-1)
        tokens = sample_top_p(probs, top_p, generator=generator).squeeze(-1)
    return torch.where(finite, tokens, NOT_FINITE)


def sample_top_p(
    probs: torch.Tensor, p: float, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Draw from the smallest set of tokens whose probability exceeds p; returns (bsz, 1).

    Nucleus sampling (Holtzman et al. 2019, arXiv:1904.09751). `probs`: (bsz, n). Without a
    `generator` the draw comes from torch's global one.
    """
    require(
        isinstance(probs, torch.Tensor) and probs.is_floating_point() and probs.ndim == 2,
        f"probs is {shown(probs)}: pass a tensor of probabilities, (bsz, n)",
    )
    probs, tokens = _nucleus(probs, checked_top_p(p))
    probs = probs / probs.sum(-1, keepdim=True)
    # The smallest of exponential waiting times with the rates p is token i with probability p_i.
    # So does torch.multinomial draw, with the same numbers, but a NaN makes it abort the process
    # on CUDA.
    waits = torch.empty_like(probs).exponential_(generator=generator)
    return tokens.gather(-1, (probs / waits).argmax(-1, keepdim=True))


def _nucleus(probs: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The kept probabilities in falling order and zeros behind them, (bsz, n), and their tokens."""
    n = probs.shape[-1]
    if probs.device.type == "cpu" and n > 2 * MOST_LIKELY:  # elsewhere the look would be a wait
        top, tokens = probs.topk(MOST_LIKELY)
        kept = top.masked_fill(top.cumsum(-1) - top > p, 0.0)
        # The full sort begins just so if every row is cut off, and if no two of what is kept are
        # equal, whose order is the sort's to choose.
        equal = (top[:, 1:] == top[:, :-1]) & (kept[:, :-1] > 0)
        if not bool((kept[:, -1] > 0).any() | equal.any()):
            return F.pad(kept, (0, n - MOST_LIKELY)), F.pad(tokens, (0, n - MOST_LIKELY))
    ordered, tokens = probs.sort(dim=-1, descending=True)
    return ordered.masked_fill(ordered.cumsum(-1) - ordered > p, 0.0), tokens


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """log p(token) under float32 logits (..., n), for tokens (...)."""
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)

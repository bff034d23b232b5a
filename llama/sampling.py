"""Logits to a token. Randomness is an argument, and computing is done in float32."""

from __future__ import annotations

import math

import torch

from llama.errors import require

NOT_FINITE = -1  # what `sample` returns in place of a token id for a row without usable logits


def check_sampling(temperature: float, top_p: float) -> None:
    """Refuse what has no meaning."""
    require(
        0 <= temperature < math.inf,
        f"temperature {temperature}: it must be finite and not negative "
        "(0 always takes the most likely token)",
    )
    require(0 <= top_p <= 1, f"top_p {top_p}: it must lie in [0, 1] (1 keeps every token)")


def make_generator(device: torch.device, seed: int, replica: int = 0) -> torch.Generator:
    """A source of draws on the device of the logits, a different one for each replica."""
    require(
        isinstance(seed, int) and -(2**63) <= seed < 2**64,
        f"seed {seed!r}: it must be a whole number of at most 64 bits",
    )
    return torch.Generator(device).manual_seed(seed + replica)


def sample(
    logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator
) -> torch.Tensor:
    """One token for each row of float32 logits (bsz, n): int64 (bsz,), or NOT_FINITE.

    That a row is not finite is told in the result, so that reading the tokens is the one time
    that a step waits for the device.
    """
    if temperature == 0:
        tokens = logits.argmax(-1)
    else:
        # With the largest logit moved to 0, no temperature overflows; below 1e-30, where the
        # distribution has long been a single token, its reciprocal would.
        logits = logits - logits.amax(-1, keepdim=True)
        probs = torch.softmax(logits / max(temperature, 1e-30), dim=-1)
        tokens = sample_top_p(probs, top_p, generator=generator).squeeze(-1)
    return torch.where(logits.sum(-1).isfinite(), tokens, NOT_FINITE)


def sample_top_p(
    probs: torch.Tensor, p: float, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Draw from the smallest set of tokens whose probability exceeds p; returns (bsz, 1).

    Nucleus sampling (Holtzman et al. 2019, arXiv:1904.09751). `probs`: (bsz, n). Without a
    `generator` the draw comes from torch's global one.
    """
    probs, tokens = probs.sort(dim=-1, descending=True)
    probs = probs.masked_fill(probs.cumsum(-1) - probs > p, 0.0)
    probs = probs / probs.sum(-1, keepdim=True)
    # The smallest of exponential waiting times with the rates p is token i with probability p_i.
    # So does torch.multinomial draw, with the same numbers, but a NaN makes it abort the process
    # on CUDA.
    waits = torch.empty_like(probs).exponential_(generator=generator)
    return tokens.gather(-1, (probs / waits).argmax(-1, keepdim=True))


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """log p(token) under float32 logits (..., n), for tokens (...)."""
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)

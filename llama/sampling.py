"""Logits to a token, in float32. Randomness is an argument."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from operator import index

import torch
import torch.nn.functional as F

from llama.errors import require

TOPK_FAST_PATH = 1024  # how many of the most likely tokens are tried before all are sorted
NOT_FINITE = -1  # what `sample` returns instead of a token id for unusable logits

LogitsProcessor = Callable[[list[int], torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class SamplingParams:
    """How a request draws its tokens, when it ends, and what it reports. Defaults: the original's.

    temperature: 0 always takes the most likely token.
    top_p: draw from the smallest set of tokens whose cumulative probability exceeds it.
    top_k: draw from this many of the most likely tokens; 0: all.
    min_p: drop tokens whose probability is below this share of the largest one.
    repetition_penalty: divides positive logits of tokens in prompt or answer, multiplies negative
        ones (Keskar et al. 2019, arXiv:1909.05858); 1: none.
    presence_penalty, frequency_penalty: subtracted from the logits of tokens in the answer, once,
        or once for each occurrence.
    logit_bias: token id to a number that is added to its logit.
    seed: of this request's own draws; None: the generator of the call.
    stop, stop_tokens: texts, or ids, that end the answer as EOS does, and are not part of it.
    max_gen_len: new tokens; None: as many as fit.
    logprobs: report the natural logarithm of each token's probability under the model, before
        temperature and everything else. top_logprobs: also of this many most likely tokens.
    prompt_logprobs: report those of the prompt; position 0 has none and gets 0.
    logits_processor: f(ids, logits) -> logits, for rules that are not here: ids of prompt and
        answer, float32 logits (n_words,).
    """

    temperature: float = 0.6
    top_p: float = 0.9
    max_gen_len: int | None = None
    seed: int | None = None
    stop: Sequence[str] | None = None
    stop_tokens: Sequence[int] | None = None
    logprobs: bool = False
    _: KW_ONLY
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logits_processor: LogitsProcessor | None = None

    def __post_init__(self) -> None:
        for name, (low, high, note) in _LIMITS.items():
            value = getattr(self, name)
            require(
                value is None or (not isinstance(value, bool) and low <= value <= high),
                f"{name} {value!r:.80}: it must be {_interval(low, high)}{note}",
            )
        for name in ("stop", "stop_tokens"):
            require(
                not isinstance(getattr(self, name), (str, bytes)),
                f"{name} is {getattr(self, name)!r:.80}: pass a list",
            )
        for token, bias in self.logit_bias.items():
            require(
                bias < math.inf,
                f"logit_bias {bias!r:.40} of token {token}: it must be a number or -inf",
            )
        for i, text in enumerate(self.stop or ()):
            require(
                isinstance(text, str) and text != "",
                f"stop string {i} is {text!r:.80}: pass texts of at least one character",
            )

    @property
    def reshapes(self) -> bool:
        """Do the logits depend on more than temperature and top_p?"""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.logits_processor
        )


# What a person may pass: lowest, highest, and a remark.
_HUGE = 2**63 - 1
_FINITE = torch.finfo(torch.float32).max
_LIMITS: dict[str, tuple[float, float, str]] = {
    "temperature": (0, _FINITE, " (0 always takes the most likely token)"),
    "top_p": (0, 1, " (1 keeps every token)"),
    "top_k": (0, _HUGE, " (0 keeps every token)"),
    "min_p": (0, 1, ""),
    "repetition_penalty": (math.ulp(0), _FINITE, " (1 changes nothing)"),
    "presence_penalty": (-_FINITE, _FINITE, ""),
    "frequency_penalty": (-_FINITE, _FINITE, ""),
    "seed": (-(2**63), _HUGE, ""),
    "max_gen_len": (0, _HUGE, ", or None for as many as fit"),
    "top_logprobs": (0, _HUGE, ""),
}


def _interval(low: float, high: float) -> str:
    if high == _FINITE:
        return f"a finite number{'' if low < 0 else ' above 0' if low else ' of at least 0'}"
    return (
        "a 64-bit integer"
        if high == _HUGE and low
        else ("an integer of at least 0" if high == _HUGE else f"a number from {low} to {high}")
    )


class Draws:
    """The random numbers of one call: waiting times (n_prompts, n_words) for each output position.

    Prompt i takes row i of draw t for its token t, whatever other prompts do meanwhile, so that
    its answer does not depend on when the engine had a cache row for it.
    """

    def __init__(self, generator: torch.Generator, n_prompts: int = 1) -> None:
        self._generator, self._n_prompts = generator, n_prompts
        self._states: list[torch.Tensor] = []  # of the generator before each draw
        self._last = -1, _NO_STATE

    def row(self, t: int, i: int, n_words: int) -> torch.Tensor:
        """Exponential waiting times (n_words,) for token t of prompt i."""
        if t != self._last[0]:
            generator = self._generator
            if t < len(self._states):  # a prompt that started later repeats an earlier draw
                generator = torch.Generator(generator.device)
                generator.set_state(self._states[t])
            else:
                # One prompt alone never goes back.
                several = self._n_prompts > 1
                self._states.append(generator.get_state() if several else _NO_STATE)
            shape = (self._n_prompts, n_words)
            waits = torch.empty(shape, dtype=torch.float32, device=generator.device)
            self._last = t, waits.exponential_(generator=generator)
        return self._last[1][i]


_NO_STATE = torch.empty(0, device="cpu")


def make_generator(device: torch.device, seed: int, replica: int = 0) -> torch.Generator:
    """A source of draws on the device of the logits, a different one for each replica."""
    require(
        not isinstance(seed, bool) and -(2**63) <= seed <= _HUGE,
        f"seed {seed!r:.80}: it must be a 64-bit integer",
    )
    return torch.Generator(device).manual_seed(index(seed) + replica)


def derived_seed(seed: int, i: int) -> int:
    """A seed for prompt i of a call, by SplitMix64 (Steele et al. 2014)."""
    z = (seed + (i + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return (z ^ (z >> 31)) % 2**63


def reshape_logits(
    params: SamplingParams, prompt: list[int], tokens: list[int], logits: torch.Tensor
) -> torch.Tensor:
    """The logits (n_words,) of one request after its penalties, biases and processor."""
    logits = logits.clone()
    n_words = len(logits)
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt, *tokens}), device=logits.device)
        seen = seen[seen < n_words]
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if tokens and (params.presence_penalty or params.frequency_penalty):
        drawn, counts = torch.tensor(tokens, device=logits.device).unique(return_counts=True)
        logits[drawn] -= params.presence_penalty + params.frequency_penalty * counts.to(logits)
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    if params.logits_processor is not None:
        changed = params.logits_processor([*prompt, *tokens], logits)
        require(
            isinstance(changed, torch.Tensor) and changed.shape == logits.shape,
            f"logits_processor returned {getattr(changed, 'shape', changed)!r:.80}: it must "
            f"return a tensor of shape ({n_words},)",
        )
        logits = changed.to(logits)
        require(
            bool(logits.amax().isfinite()),
            "logits_processor returned NaN or infinity, or left no token: -inf excludes a token",
        )
    return logits


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], waits: torch.Tensor | None
) -> torch.Tensor:
    """One token for each row of float32 logits (bsz, n): int64 (bsz,), or NOT_FINITE.

    `waits`: (bsz, n) exponential waiting times; None if every temperature is 0. An unusable row
    is reported in the result, so that reading the tokens is the only host sync of a step.
    """
    finite = logits.amax(-1).isfinite()  # NaN propagates; -inf only rules a token out
    tokens = logits.argmax(-1)
    if waits is not None:
        # With the largest logit moved to 0, no temperature overflows; below 1e-30, where the
        # distribution has long been a single token, its reciprocal would.
        column = {
            name: logits.new_tensor([[getattr(p, name)] for p in params])
            for name in ("temperature", "top_p", "min_p")
        }
        temperature = column["temperature"]
        logits = logits - logits.amax(-1, keepdim=True)
        probs = torch.softmax(logits / temperature.clamp_min(1e-30), dim=-1)
        if any(p.top_k or p.min_p for p in params):
            probs = _keep_likely(probs, [p.top_k for p in params], column["min_p"])
        drawn = _draw_nucleus(probs, column["top_p"], waits)
        tokens = torch.where(temperature[:, 0] == 0, tokens, drawn)
    return torch.where(finite, tokens, NOT_FINITE)


def _keep_likely(probs: torch.Tensor, top_k: Sequence[int], min_p: torch.Tensor) -> torch.Tensor:
    """Zero what top_k and min_p drop; ties with the k-th token are kept."""
    n = probs.shape[-1]
    k = torch.tensor([[min(k, n) or n] for k in top_k], device=probs.device)
    kth = probs.sort(dim=-1, descending=True)[0].gather(-1, k - 1)
    return probs * (probs >= kth) * (probs >= min_p * probs.amax(-1, keepdim=True))


def sample_top_p(
    probs: torch.Tensor, p: float, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Draw from the smallest set of tokens whose cumulative probability exceeds p: (bsz, 1).

    Nucleus sampling (Holtzman et al. 2019, arXiv:1904.09751). `probs`: (bsz, n). Without a
    `generator` the draw comes from torch's global one.
    """
    require(
        isinstance(probs, torch.Tensor) and probs.is_floating_point() and probs.ndim == 2,
        f"probs is {probs!r:.80}: pass a tensor of probabilities, (bsz, n)",
    )
    SamplingParams(top_p=p)
    # In 16 bits a waiting time can be 0, and 0 / 0 would win.
    probs = probs.to(torch.promote_types(probs.dtype, torch.float32))
    waits = torch.empty_like(probs).exponential_(generator=generator)
    return _draw_nucleus(probs, torch.full_like(probs[:, :1], p), waits)[:, None]


def _draw_nucleus(probs: torch.Tensor, p: torch.Tensor, waits: torch.Tensor) -> torch.Tensor:
    """One token (bsz,) of the nucleus: probs (bsz, n), p (bsz, 1), waits (bsz, n)."""
    probs, tokens = _nucleus(probs, p)
    probs = probs / probs.sum(-1, keepdim=True)
    # The smallest of exponential waiting times with rates p is token i with probability p_i.
    # torch.multinomial draws the same way and the same numbers, but NaN aborts it on CUDA.
    return tokens.gather(-1, (probs / waits).argmax(-1, keepdim=True))[:, 0]


def _nucleus(probs: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The kept probabilities in falling order, zeros behind them, (bsz, n), and their tokens."""
    n = probs.shape[-1]
    if probs.device.type == "cpu" and n > 2 * TOPK_FAST_PATH:  # elsewhere the test would sync
        top, tokens = probs.topk(TOPK_FAST_PATH)
        kept = top.masked_fill(top.cumsum(-1) - top > p, 0.0)
        # The full sort starts the same way if every row is cut off, and if no two of the kept
        # are equal, whose order the sort would choose.
        equal = (top[:, 1:] == top[:, :-1]) & (kept[:, :-1] > 0)
        if not bool((kept[:, -1] > 0).any() | equal.any()):
            pad = (0, n - TOPK_FAST_PATH)
            return F.pad(kept, pad), F.pad(tokens, pad)
    ordered, tokens = probs.sort(dim=-1, descending=True)
    return ordered.masked_fill(ordered.cumsum(-1) - ordered > p, 0.0), tokens


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """log p(token) under float32 logits (..., n), for tokens (...)."""
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def top_logprobs(logits: torch.Tensor, n: int) -> list[dict[int, float]]:
    """Log-probabilities of the n most likely tokens under each row of float32 logits (rows, m)."""
    top = logits.topk(min(n, logits.shape[-1]))
    values = top.values - logits.logsumexp(-1, keepdim=True)  # equal to those of token_logprobs
    pairs = zip(top.indices.tolist(), values.tolist(), strict=True)
    return [dict(zip(ids, row, strict=True)) for ids, row in pairs]

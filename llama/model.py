"""The Llama 2 transformer (Touvron et al. 2023, arXiv:2307.09288), read from top to bottom.

Names of modules and parameters are the checkpoint format. The model knows tensors and positions;
devices, files, tokenizers and random numbers live elsewhere.

Letters in shapes: bsz rows, seqlen new tokens in each, kv_len cache slots that attention reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right

from llama import kernels, kv_cache
from llama.errors import LlamaError, require
from llama.kv_cache import Segment
from llama.parallel.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear


@dataclass
class ModelArgs:
    """The shape of a model: the keys of `params.json`, and the size of the cache."""

    dim: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int | None = None  # None: as many as n_heads
    vocab_size: int = -1  # -1: as the checkpoint's embedding has rows
    multiple_of: int = 256  # the feed-forward width is rounded up to a multiple of this
    ffn_dim_multiplier: float | None = None
    norm_eps: float = 1e-5
    max_batch_size: int = 32
    max_seq_len: int = 2048
    hidden_dim: int | None = None  # the feed-forward width itself, where no rule gives it
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None  # see rope_frequencies
    sliding_window: int | None = None  # attention window in tokens, the query's own included
    prefill_chunk: int | None = None  # tokens of a prompt that one pass may read
    head_dim: int = 0  # 0: dim / n_heads

    def __post_init__(self) -> None:
        self.head_dim = self.head_dim or self.dim // self.n_heads
        sizes = self.max_batch_size, self.max_seq_len, self.sliding_window, self.prefill_chunk
        kv_cache.check_sizes(*sizes)

    @property
    def kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def ffn_dim(self) -> int:
        """The width of the feed-forward layers."""
        if self.hidden_dim is not None:
            return self.hidden_dim
        return feed_forward_width(4 * self.dim, self.multiple_of, self.ffn_dim_multiplier)

    @property
    def n_slots(self) -> int:
        """The length of each row of the cache."""
        return kv_cache.n_slots(self.max_seq_len, self.sliding_window, self.prefill_chunk)

    @property
    def longest_chunk(self) -> int:
        """How many tokens one pass may read once the ring wraps; 0: it must not wrap."""
        return kv_cache.longest_chunk(self.n_slots, self.sliding_window)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x32 = x.float()  # a mean of squares overflows float16
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return x32.type_as(x) * self.weight


# Rotary embedding (Su et al. 2021, arXiv:2104.09864): dimensions 2i and 2i + 1 of a head are a
# point in the plane, which position p rotates by the angle p * theta ** (-2i / head_dim). The
# module computes in real numbers: complex tensors break torch.compile and .to(dtype).


def rope_frequencies(
    head_dim: int, theta: float = 10000.0, scaling: dict[str, Any] | None = None
) -> torch.Tensor:
    """The angle per position of each pair of dimensions, float32 (head_dim / 2,).

    `scaling` is None, `{"rope_type": "linear", "factor": F}` (every angle F times slower), or
    `{"rope_type": "llama3", ...}` (Llama 3.1's rule: slow only the waves that are longer than the
    original context, and blend in between).
    """
    # On the CPU wherever the model is: the same numbers on every device.
    exponents = torch.arange(0, head_dim, 2, device="cpu")[: head_dim // 2].float() / head_dim
    freqs = 1.0 / (theta**exponents)
    if scaling is None:
        return freqs
    factor = scaling["factor"]
    if scaling["rope_type"] == "linear":
        return freqs / factor
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    waves = scaling["original_max_position_embeddings"] * freqs / (2 * math.pi)
    keep = ((waves - low) / (high - low)).clamp(0, 1)  # 1: a short wave, kept as it is
    return keep * freqs + (1 - keep) * freqs / factor


def precompute_freqs_cis(dim: int, end: int, theta: float = 10000.0) -> torch.Tensor:
    """e^(i p f) for every position p < end and frequency f: complex64 (end, dim / 2)."""
    freqs = rope_frequencies(dim, theta).to(torch.get_default_device())
    angles = torch.outer(torch.arange(end).float(), freqs)
    return torch.polar(torch.ones_like(angles), angles)


def reshape_for_broadcast(freqs_cis: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """View (seqlen, n) so that it broadcasts against x (bsz, seqlen, ..., n)."""
    expected = (x.shape[1], x.shape[-1])
    require(freqs_cis.shape == expected, f"freqs_cis is {tuple(freqs_cis.shape)}, not {expected}")
    return freqs_cis.view(1, x.shape[1], *[1] * (x.ndim - 3), x.shape[-1])


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair of x (bsz, seqlen, n_heads, head_dim); computed in float32.

    `cos`, `sin`: broadcastable to (bsz, seqlen, n_heads, head_dim / 2).
    """
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2).type_as(x)


def apply_rotary_emb(
    xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys (bsz, seqlen, n_heads, head_dim) by (seqlen, head_dim / 2)."""
    freqs_cis = reshape_for_broadcast(freqs_cis, xq[..., ::2])
    cos, sin = freqs_cis.real, freqs_cis.imag
    return rotate(xq, cos, sin), rotate(xk, cos, sin)


def repeat_kv(x: torch.Tensor, n_rep: int) -> torch.Tensor:
    """Each head of x (bsz, seqlen, n_kv_heads, head_dim) n_rep times in a row. A copy.

    Attention here does without it; it serves those who write attention out.
    """
    return x.repeat_interleave(n_rep, dim=2) if n_rep > 1 else x


@dataclass
class ForwardContext:
    """What every layer needs to know about one forward pass, computed once for all of them.

    A pass has either one new token in each of several rows, or packed segments, (1, n_tokens).
    """

    cos: torch.Tensor  # (bsz, seqlen, 1, head_dim / 2), float32
    sin: torch.Tensor
    rows: torch.Tensor  # (bsz, 1) or (1, n_tokens): the cache row of each token
    slots: torch.Tensor  # (bsz, 1) or (1, n_tokens): where the new keys and values go
    segments: Sequence[Segment] = ()
    masks: Sequence[torch.Tensor | None] = ()  # of each segment; None: causal from position 0
    read_rows: Any = None  # slice or tensor: the same rows, as an index of the cache
    kv_len: int = 0  # cache slots that attention reads
    bias: torch.Tensor | None = None  # (bsz, 1, 1, kv_len): 0 where a key is seen, else -inf
    positions: torch.Tensor | None = None  # (bsz,), if a kernel applies the rule instead of a bias
    active: torch.Tensor | None = None  # (bsz, 1): the rows that may be written


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) over this rank's heads.

    Owns `cache_k` and `cache_v`, (max_batch_size, n_slots, n_local_kv_heads, head_dim), allocated
    once, and for an int8 cache `scale_k` and `scale_v`, without the last axis. They follow
    `.to()` and are not part of the state dict.
    """

    cache_k: torch.Tensor
    cache_v: torch.Tensor
    scale_k: torch.Tensor | None
    scale_v: torch.Tensor | None

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.head_dim = args.head_dim
        q_dim, kv_dim = args.n_heads * self.head_dim, args.kv_heads * self.head_dim
        self.wq = ColumnParallelLinear(args.dim, q_dim, gather_output=False)
        self.wk = ColumnParallelLinear(args.dim, kv_dim, gather_output=False)
        self.wv = ColumnParallelLinear(args.dim, kv_dim, gather_output=False)
        self.wo = RowParallelLinear(q_dim, args.dim)
        self.n_local_heads = self.wq.output_size_per_partition // self.head_dim
        self.n_local_kv_heads = self.wk.output_size_per_partition // self.head_dim
        self.n_rep = self.n_local_heads // self.n_local_kv_heads
        self.allocate_cache()

    def allocate_cache(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        args = self.args
        shape = (args.max_batch_size, args.n_slots, self.n_local_kv_heads, self.head_dim)
        for name in ("k", "v"):
            cache, scale = torch.zeros(shape, device=device, dtype=dtype), None
            if dtype == torch.int8:
                scale = torch.zeros(shape[:-1], device=device, dtype=kv_cache.SCALE_DTYPE)
            self.register_buffer(f"cache_{name}", cache, persistent=False)
            self.register_buffer(f"scale_{name}", scale, persistent=False)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """x: (bsz, seqlen, dim); returns the same shape."""
        bsz, seqlen, _ = x.shape
        xq = self.wq(x).view(bsz, seqlen, self.n_local_heads, self.head_dim)
        xk = self.wk(x).view(bsz, seqlen, self.n_local_kv_heads, self.head_dim)
        xv = self.wv(x).view(bsz, seqlen, self.n_local_kv_heads, self.head_dim)
        xq, xk = rotate(xq, context.cos, context.sin), rotate(xk, context.cos, context.sin)

        where = context.rows, context.slots, context.active
        kv_cache.write(self.cache_k, self.scale_k, xk, *where)
        kv_cache.write(self.cache_v, self.scale_v, xv, *where)
        y = self._attend_segments(xq, context) if context.segments else self._attend(xq, context)
        return self.wo(y.reshape(bsz, seqlen, -1))

    def _attend(self, xq: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Queries (bsz, 1, n_local_heads, head_dim), each over its own row."""
        if context.positions is not None:
            caches = self.cache_k, self.cache_v, self.scale_k, self.scale_v
            where = context.rows[:, 0], context.positions, context.kv_len
            return kernels.decode_attention(xq[:, 0], *caches, *where, self.args.sliding_window)
        read = context.read_rows, context.kv_len, xq.dtype
        keys = kv_cache.read(self.cache_k, self.scale_k, *read)
        values = kv_cache.read(self.cache_v, self.scale_v, *read)
        # The n_rep queries that share a key head become n_rep positions of one head: the cached
        # heads are not copied.
        xq = xq.view(len(xq), self.n_local_kv_heads, self.n_rep, self.head_dim)
        return F.scaled_dot_product_attention(xq, keys, values, attn_mask=context.bias)

    def _attend_segments(self, xq: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Queries (1, n_tokens, n_local_heads, head_dim), each segment over its own row."""
        groups = (-1, self.n_local_kv_heads, self.n_rep, self.head_dim)
        queries = xq[0].split([segment.length for segment in context.segments])
        answers = []
        for segment, mask, q in zip(context.segments, context.masks, queries, strict=True):
            row = slice(segment.row, segment.row + 1)
            where = row, min(segment.end, self.args.n_slots), xq.dtype
            # Key heads are the batch here, so that expanding them to n_rep copies nothing.
            keys, values = (
                kv_cache.read(cache, scale, *where)[0, :, None].expand(-1, self.n_rep, -1, -1)
                for cache, scale in ((self.cache_k, self.scale_k), (self.cache_v, self.scale_v))
            )
            y = F.scaled_dot_product_attention(
                q.view(groups).permute(1, 2, 0, 3), keys, values, mask, is_causal=mask is None
            )
            answers.append(y.permute(2, 0, 1, 3).flatten(1))  # (length, heads * head_dim)
        return torch.cat(answers)


def feed_forward_width(
    hidden_dim: int, multiple_of: int, ffn_dim_multiplier: float | None = None
) -> int:
    """Two thirds of `hidden_dim` (three matrices instead of two), scaled, and rounded up."""
    hidden_dim = int(2 * hidden_dim / 3)
    if ffn_dim_multiplier is not None:
        hidden_dim = int(ffn_dim_multiplier * hidden_dim)
    return multiple_of * math.ceil(hidden_dim / multiple_of)


class FeedForward(nn.Module):
    """SwiGLU, w2(silu(w1 x) * w3 x) (Shazeer 2020, arXiv:2002.05202).

    With `multiple_of`, the width is `feed_forward_width(hidden_dim, ...)`, as in the original;
    without, it is `hidden_dim` itself.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        multiple_of: int | None = None,
        ffn_dim_multiplier: float | None = None,
    ) -> None:
        super().__init__()
        if multiple_of is not None:
            hidden_dim = feed_forward_width(hidden_dim, multiple_of, ffn_dim_multiplier)
        self.w1 = ColumnParallelLinear(dim, hidden_dim, gather_output=False)
        self.w2 = RowParallelLinear(hidden_dim, dim)
        self.w3 = ColumnParallelLinear(dim, hidden_dim, gather_output=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, layer_id: int, args: ModelArgs) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.attention = Attention(args)
        self.feed_forward = FeedForward(args.dim, args.ffn_dim)
        self.attention_norm = RMSNorm(args.dim, eps=args.norm_eps)
        self.ffn_norm = RMSNorm(args.dim, eps=args.norm_eps)

    @property
    def attn(self) -> Attention:
        """Another name for `attention`."""
        return self.attention

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x), context)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    """Token ids to logits. Needs fairscale's model-parallel groups to be initialized.

    Weights are uninitialized memory until a checkpoint is loaded, as in the original.
    """

    rope_freqs: torch.Tensor

    def __init__(self, params: ModelArgs) -> None:
        super().__init__()
        self.params = params
        self.vocab_size, self.n_layers = params.vocab_size, params.n_layers
        self.tok_embeddings = ParallelEmbedding(params.vocab_size, params.dim)
        self.layers = nn.ModuleList(TransformerBlock(i, params) for i in range(params.n_layers))
        self.norm = RMSNorm(params.dim, eps=params.norm_eps)
        self.output = ColumnParallelLinear(params.dim, params.vocab_size, gather_output=True)
        self.allocate_state()

    def allocate_state(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Make what is not in a checkpoint: the caches, empty, and the rotary frequencies."""
        for attention in self.attentions:
            attention.allocate_cache(device, dtype)
        self._set_rope_freqs(device)

    @property
    def attentions(self) -> list[Attention]:
        """The owners of the cache, layer by layer."""
        return [cast(TransformerBlock, layer).attention for layer in self.layers]

    def _set_rope_freqs(self, device: torch.device | str | None) -> None:
        args = self.params
        freqs = rope_frequencies(args.head_dim, args.rope_theta, args.rope_scaling)
        device = torch.get_default_device() if device is None else device
        self.register_buffer("rope_freqs", freqs.to(device), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Transformer:
        """`.to(dtype)` would round the frequencies, and a late position multiplies the error."""
        super()._apply(fn, recurse)
        self._set_rope_freqs(self.rope_freqs.device)
        return self

    def forward(
        self,
        tokens: torch.Tensor,
        start_pos: int | torch.Tensor,
        *,
        first_row: int | torch.Tensor = 0,
        active: torch.Tensor | None = None,
        kv_len: int | None = None,
        only_last: bool = False,
    ) -> torch.Tensor:
        """Read `tokens` (bsz, seqlen) at positions `start_pos` on; returns float32 logits.

        Args:
            start_pos: the position of each row's first token, an int or a tensor (bsz,).
            first_row: row i of the batch is row first_row + i of the cache. A tensor of one
                number is for a batch of one row, whose place is then no constant of a graph.
            active: bool (bsz,), for one token in each row; the cache rows of the others stay as
                they are, bit by bit, and their logits mean nothing.
            kv_len: how many cache slots attention reads for one token in each row, at least all
                that are filled. None: as many as an int `start_pos` needs, else all.
            only_last: logits of each row's last token alone, (bsz, 1, vocab_size) instead of
                (bsz, seqlen, vocab_size).

        Positions must fit the cache: checked here for an int `start_pos`, and left to the caller
        for a tensor, whose value may be on a device.
        """
        bsz, seqlen = tokens.shape
        self._check_room(bsz, seqlen, start_pos)
        if seqlen > 1:
            starts = [start_pos] * bsz if isinstance(start_pos, int) else start_pos.tolist()
            segments = [Segment(int(first_row) + i, p, seqlen) for i, p in enumerate(starts)]
            packed = tokens.reshape(-1)
            return self.prefill(packed, segments, only_last=only_last).unflatten(0, (bsz, -1))
        context = self._decode_context(bsz, start_pos, first_row, kv_len)
        context.active = None if active is None else active[:, None]
        return self.logits(self.hidden_states(tokens, context))

    def prefill(
        self, tokens: torch.Tensor, segments: Sequence[Segment], *, only_last: bool = False
    ) -> torch.Tensor:
        """Read the tokens (n_tokens,) of several rows, packed one segment behind the other.

        Returns float32 logits (n_tokens, vocab_size), or with `only_last` (len(segments),
        vocab_size), of each segment's last token. Positions must fit the cache.
        """
        h = self.hidden_states(tokens[None], self.segment_context(segments))[0]
        if only_last:
            h = torch.stack([piece[-1] for piece in h.split([s.length for s in segments])])
        return self.logits(h)

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """Float32 (..., vocab_size), without the rows that fill up the ranks."""
        return self.output(h)[..., : self.vocab_size].float()

    def hidden_states(self, tokens: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """The final norm's output (bsz, seqlen, dim), in the model's dtype."""
        # A quantized embedding gives float32, whatever `.to(dtype)` the model went through.
        h = self.tok_embeddings(tokens).type_as(self.norm.weight)
        for layer in self.layers:
            h = layer(h, context)
        return self.norm(h)

    # Attention takes the cheapest form that equals the mask rule, `kv_cache.visible`.

    def _decode_context(
        self,
        bsz: int,
        start_pos: int | torch.Tensor,
        first_row: int | torch.Tensor,
        kv_len: int | None,
    ) -> ForwardContext:
        args, device = self.params, self.rope_freqs.device
        if isinstance(start_pos, int):
            positions, end = torch.full((bsz, 1), start_pos, device=device), start_pos + 1
        else:
            positions, end = start_pos[:, None], args.n_slots
        kv_len = kv_len or min(end, args.n_slots)
        # Rows of one length see every slot that is read.
        causal = kv_cache.is_causal(end, args.n_slots, args.sliding_window)
        unmasked = isinstance(start_pos, int) and kv_len == end and causal
        by_kernel = kernels.can_attend(self.norm.weight)
        rows = torch.arange(bsz, device=device)[:, None] + first_row
        read_rows = slice(first_row, first_row + bsz) if isinstance(first_row, int) else rows[:, 0]
        return ForwardContext(
            *self._rotation(positions),
            rows,
            kv_cache.slot_index(positions, args.n_slots),
            read_rows=read_rows,
            kv_len=kv_len,
            bias=None if by_kernel or unmasked else self._bias(positions, kv_len)[:, None],
            positions=positions[:, 0] if by_kernel else None,
        )

    def segment_context(self, segments: Sequence[Segment]) -> ForwardContext:
        """The context of a pass over packed segments."""
        # A row for each token, then its position.
        places = [(s.row, position) for s in segments for position in range(s.start_pos, s.end)]
        rows, positions = torch.tensor(places, device=self.rope_freqs.device).T[:, None]
        cos, sin = self._rotation(positions)
        slots = kv_cache.slot_index(positions, self.params.n_slots)
        masks = [self._segment_mask(segment) for segment in segments]
        return ForwardContext(cos, sin, rows, slots, segments=segments, masks=masks)

    def _segment_mask(self, segment: Segment) -> torch.Tensor | None:
        args, kv_len = self.params, min(segment.end, self.params.n_slots)
        causal = kv_cache.is_causal(segment.end, args.n_slots, args.sliding_window)
        if not causal or (segment.start_pos and torch.compiler.is_compiling()):
            # Dynamo cannot trace causal_lower_right.
            positions = torch.arange(segment.start_pos, segment.end, device=self.rope_freqs.device)
            return self._bias(positions[None], kv_len)
        return causal_lower_right(segment.length, kv_len) if segment.start_pos else None

    def _bias(self, positions: torch.Tensor, kv_len: int) -> torch.Tensor:
        """The mask rule as 0 where a key is seen and -inf elsewhere, (bsz, seqlen, kv_len)."""
        seen = kv_cache.visible(positions, self.params.n_slots, kv_len, self.params.sliding_window)
        return torch.zeros_like(seen, dtype=self.norm.weight.dtype).masked_fill_(~seen, -math.inf)

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[..., None, None] * self.rope_freqs
        return angles.cos(), angles.sin()

    def _check_room(self, bsz: int, seqlen: int, start_pos: int | torch.Tensor) -> None:
        # No `require`: a compiler would make constants of the numbers in its message.
        args, n_slots = self.params, self.params.n_slots
        if bsz > args.max_batch_size:
            raise LlamaError(f"{bsz} rows, and max_batch_size is {args.max_batch_size}: pass fewer")
        end = start_pos + seqlen if isinstance(start_pos, int) else 0
        too_long = end > n_slots and seqlen > args.longest_chunk
        if isinstance(start_pos, int) and (start_pos < 0 or too_long):
            raise LlamaError(
                f"positions {start_pos} to {end - 1}, and the cache has {n_slots} slots: "
                "pass fewer tokens, or build with a larger max_seq_len"
            )

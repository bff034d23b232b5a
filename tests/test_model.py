"""The model alone: positions, rows, stale slots, dtypes."""

from __future__ import annotations

import pytest
import torch
from conftest import ATOL

from llama import Llama, LlamaError, ModelArgs
from llama.kv_cache import Segment
from llama.model import (
    FeedForward,
    RMSNorm,
    Transformer,
    apply_rotary_emb,
    precompute_freqs_cis,
    repeat_kv,
    reshape_for_broadcast,
)
from llama.parallel.layers import ColumnParallelLinear

TOKENS = torch.tensor([[1, 387, 391, 261, 372, 5, 6, 7, 8, 9, 10, 300, 301, 302, 303, 304]])


def close(actual: torch.Tensor, expected: torch.Tensor, atol: float = ATOL) -> None:
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


def fill_cache(model: Transformer, value: float) -> None:
    for layer in model.layers:
        layer.attention.cache_k.fill_(value)
        layer.attention.cache_v.fill_(value)


def test_a_chunked_prefill_and_single_steps_give_the_logits_of_one_pass(llama: Llama) -> None:
    model = llama.model
    whole = model(TOKENS, 0)
    fill_cache(model, 1e4)
    first = model(TOKENS[:, :7], 0)
    chunked = torch.cat([first, model(TOKENS[:, 7:], 7)], dim=1)
    close(chunked, whole)
    fill_cache(model, 1e4)
    steps = torch.cat([model(TOKENS[:, i : i + 1], i) for i in range(16)], dim=1)
    close(steps, whole)


def test_rows_at_their_own_positions_give_the_logits_of_each_row_alone(llama: Llama) -> None:
    model = llama.model
    alone = [model(TOKENS[:, :5], 0)[0], model(TOKENS[:, 3:14], 0)[0]]
    fill_cache(model, 1e4)
    model.prefill(TOKENS[0, [0, 1, 2, 3, *range(3, 13)]], [Segment(4, 0, 4), Segment(5, 0, 10)])
    newest = TOKENS[0, [4, 13]][:, None]
    logits = model(newest, torch.tensor([4, 10]), first_row=4)
    close(logits[:, 0], torch.stack([alone[0][-1], alone[1][-1]]))
    for row, start_pos, expected in ((4, 4, alone[0]), (5, 10, alone[1])):
        place = torch.tensor(row)
        close(model(newest[row - 4, None], start_pos, first_row=place)[0, 0], expected[-1])


def test_packed_segments_give_the_logits_of_each_row_alone(llama: Llama) -> None:
    """A row that resumes at 500 of 512 with 3 tokens, packed behind one that reads 400."""
    model = llama.model
    ids = torch.randint(3, 1000, (2, 512), generator=torch.Generator().manual_seed(0))
    alone = [model(ids[1:, :400], 0)[0], model(ids[:1, :503], 0)[0, 500:]]
    fill_cache(model, 1e4)
    model(ids[:1, :500], 0, first_row=6)
    tokens = torch.cat([ids[1, :400], ids[0, 500:503]])
    segments = [Segment(2, 0, 400), Segment(6, 500, 3)]
    close(model.prefill(tokens, segments), torch.cat(alone))
    last = model.prefill(tokens, segments, only_last=True)
    close(last, torch.stack([rows[-1] for rows in alone]))


def test_the_last_logits_alone_are_the_last_of_all(llama: Llama) -> None:
    whole = llama.model(TOKENS, 0)
    last = llama.model(TOKENS, 0, only_last=True)
    assert last.shape == (1, 1, 1024)
    close(last, whole[:, -1:])


def test_the_cache_has_the_documented_shape_and_is_not_in_the_state_dict(
    llama: Llama,
) -> None:
    attention = llama.model.layers[3].attention
    assert attention.cache_k.shape == attention.cache_v.shape == (8, 512, 4, 20)
    assert llama.model.layers[3].attn is attention
    names = set(llama.model.state_dict())
    assert not any("cache" in name or "rope" in name for name in names)
    assert "layers.5.feed_forward.w2.weight" in names
    assert len(names) == 3 + 6 * 9


def test_a_bare_forward_builds_no_graph_in_or_out_of_inference_mode(llama: Llama) -> None:
    outside = llama.model.forward(TOKENS, 0)
    assert not outside.requires_grad
    with torch.inference_mode():
        close(llama.model.forward(TOKENS, 0), outside)
    close(llama.model.forward(TOKENS, 0), outside)
    assert not llama.model.layers[0].attention.cache_k.requires_grad


def test_a_change_of_dtype_takes_the_cache_along_and_keeps_the_frequencies_exact(
    fresh: Llama,
) -> None:
    model = fresh.model
    freqs = model.rope_freqs.clone()
    logits = model(TOKENS, 0)
    pointer = model.layers[0].attention.cache_k.data_ptr()
    model(TOKENS, 0)
    assert model.layers[0].attention.cache_k.data_ptr() == pointer
    model.to(torch.bfloat16)
    assert model.layers[0].attention.cache_k.dtype == torch.bfloat16
    assert torch.equal(model.rope_freqs, freqs)
    # bfloat16 has 8 bits: the logits, about 10, move by a few tenths.
    close(model(TOKENS, 0), logits, atol=0.5)
    model.to(torch.float32)
    assert torch.equal(model.rope_freqs, freqs)


def test_positions_beyond_the_cache_and_rows_beyond_the_batch_are_refused(fresh: Llama) -> None:
    with pytest.raises(LlamaError, match=r"positions 250 to 265.*256 slots"):
        fresh.model(TOKENS, 250)
    with pytest.raises(LlamaError, match="5 rows, and max_batch_size is 4: pass fewer"):
        fresh.model(TOKENS.expand(5, -1), 0)


def test_rotary_functions_keep_the_signature_of_the_original() -> None:
    freqs_cis = precompute_freqs_cis(8, 10, theta=10000.0)
    assert freqs_cis.shape == (10, 4)
    assert freqs_cis.dtype == torch.complex64
    xq, xk = torch.randn(2, 10, 3, 8), torch.randn(2, 10, 1, 8)
    rotated_q, rotated_k = apply_rotary_emb(xq, xk, freqs_cis)
    for x, rotated in ((xq, rotated_q), (xk, rotated_k)):
        points = torch.view_as_complex(x.unflatten(-1, (4, 2)))
        broadcast = reshape_for_broadcast(freqs_cis, points)
        assert broadcast.shape == (1, 10, 1, 4)
        close(rotated, torch.view_as_real(points * broadcast).flatten(-2), atol=1e-6)  # rounding
    with pytest.raises(LlamaError, match="freqs_cis is"):
        apply_rotary_emb(xq[:, :4], xk[:, :4], freqs_cis)


def test_the_norm_and_the_feed_forward_are_the_written_out_formulas(llama: Llama) -> None:
    x = torch.randn(2, 3, 160)
    norm = RMSNorm(160, eps=1e-5)
    norm.weight.copy_(torch.rand(160))
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    close(norm(x), expected, atol=1e-6)
    half = norm.half()(300 * torch.ones(1, 160).half())  # whose square overflows float16
    assert half.dtype == torch.float16
    assert torch.equal(half[0], norm.weight)
    feed_forward = FeedForward(dim=160, hidden_dim=640, multiple_of=32, ffn_dim_multiplier=None)
    w1, w2, w3 = (getattr(feed_forward, name) for name in ("w1", "w2", "w3"))
    assert w1.weight.shape == (448, 160)  # 2/3 of 640 is 426, and 448 the next multiple of 32
    for layer in (w1, w2, w3):
        assert not layer.weight.requires_grad
        torch.nn.init.normal_(layer.weight, std=0.1)
    gate = x @ w1.weight.T
    expected = (gate * torch.sigmoid(gate) * (x @ w3.weight.T)) @ w2.weight.T
    close(feed_forward(x), expected, atol=1e-5)
    assert isinstance(w1, ColumnParallelLinear)


def test_the_width_of_the_feed_forward_follows_the_rule_or_is_given() -> None:
    assert ModelArgs(dim=4096, multiple_of=256).ffn_dim == 11008  # Llama 2 7B
    assert ModelArgs(dim=8192, multiple_of=4096, ffn_dim_multiplier=1.3).ffn_dim == 28672  # 70B
    assert ModelArgs(dim=64, hidden_dim=100).ffn_dim == 100


def test_a_head_is_repeated_next_to_itself() -> None:
    x = torch.randn(2, 5, 3, 4)
    repeated = repeat_kv(x, 2)
    assert repeated.shape == (2, 5, 6, 4)
    for head in range(6):
        assert torch.equal(repeated[:, :, head], x[:, :, head // 2])
    assert repeat_kv(x, 1) is x

"""Heads and windows: against attention that is written out, and against another library."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpoints import VOCAB, hf_logits, hf_model, weights, write_meta
from conftest import ATOL, GOLDEN

from llama import Llama, LlamaError
from llama.model import Transformer, apply_rotary_emb, precompute_freqs_cis, repeat_kv

TOKENIZER = GOLDEN / "rand_gqa" / "tokenizer.model"
LENGTHS = [300, 41, 170]
TOKENS = torch.randint(3, VOCAB, (3, 300), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = weights()
    state["output.weight"][2] = 0  # EOS: a logit of 0 is never the largest
    return write_meta(tmp_path_factory.mktemp("window") / "random", state)


def built(folder: Path, **options: Any) -> Llama:
    sizes = {"max_seq_len": 320, "max_batch_size": 3, "dtype": "float32", "verbose": False}
    return Llama.build(folder, TOKENIZER, **{**sizes, **options})


def written_out(model: Transformer, tokens: torch.Tensor, window: int | None) -> torch.Tensor:
    """The logits of one pass over whole rows, without a cache."""
    n, head_dim = tokens.shape[1], model.params.head_dim
    freqs_cis = precompute_freqs_cis(head_dim, n, model.params.rope_theta)
    ago = torch.arange(n)[:, None] - torch.arange(n)
    hidden = (ago < 0) | (ago >= (window or n))
    h = model.tok_embeddings(tokens)
    for layer in model.layers:
        attention, x = layer.attention, layer.attention_norm(h)
        q, k, v = (
            w(x).unflatten(-1, (-1, head_dim)) for w in (attention.wq, attention.wk, attention.wv)
        )
        q, k = apply_rotary_emb(q, k, freqs_cis)
        k, v = repeat_kv(k, attention.n_rep), repeat_kv(v, attention.n_rep)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(head_dim)
        probs = scores.masked_fill(hidden, -math.inf).softmax(-1)
        h = h + attention.wo(torch.einsum("bhqk,bkhd->bqhd", probs, v).flatten(2))
        h = h + layer.feed_forward(layer.ffn_norm(h))
    return model.output(model.norm(h))


def in_pieces(model: Transformer, tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """The logits of a ragged batch: `lengths` tokens in chunks, then the rest one by one."""
    n, chunk = tokens.shape[1], model.params.longest_chunk
    found = torch.full((*tokens.shape, VOCAB), math.nan)

    def read(pieces: list[range]) -> None:
        width = max(map(len, pieces))
        padded = [
            F.pad(row[p.start : p.stop], (0, width - len(p)))
            for row, p in zip(tokens, pieces, strict=True)
        ]
        starts = torch.tensor([p.start for p in pieces])
        logits = model(torch.stack(padded), starts, lengths=torch.tensor([*map(len, pieces)]))
        for i, p in enumerate(pieces):
            found[i, p.start : p.stop] = logits[i, : len(p)]

    for start in range(0, max(lengths), chunk):
        read([range(min(start, end - 1), min(start + chunk, end)) for end in lengths])
    for step in range(n - min(lengths)):
        read([range(p, p + 1) for p in (min(end + step, n - 1) for end in lengths)])
    return found


@contextmanager
def counted(llama: Llama) -> Iterator[list[int]]:
    """The number of positions that each forward pass reads."""
    counts: list[int] = []
    hook = llama.model.register_forward_pre_hook(lambda _, args: counts.append(args[0].numel()))
    yield counts
    hook.remove()


@pytest.mark.parametrize("n_kv_heads", [8, 4, 2, 1])
def test_any_number_of_kv_heads_gives_written_out_attention_and_copies_no_cache(
    n_kv_heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = weights(n_kv_heads=n_kv_heads)
    folder = write_meta(tmp_path / "m", state, n_kv_heads=n_kv_heads)
    with built(folder) as llama:
        model, read = llama.model, []
        attend = F.scaled_dot_product_attention
        monkeypatch.setattr(
            F,
            "scaled_dot_product_attention",
            lambda q, k, v, **options: read.extend([k, v]) or attend(q, k, v, **options),
        )
        logits = model(TOKENS[:, :50], 0)
        torch.testing.assert_close(
            logits, written_out(model, TOKENS[:, :50], None), atol=ATOL, rtol=0
        )
        for layer, k, v in zip(model.layers, read[::2], read[1::2], strict=True):
            assert k.shape == v.shape == (3, n_kv_heads, 50, 8)
            assert k.data_ptr() == layer.attention.cache_k.data_ptr()
            assert v.data_ptr() == layer.attention.cache_v.data_ptr()


@pytest.mark.parametrize(("window", "chunk"), [(1, 4), (7, 1), (7, 5), (7, 300), (64, 16)])
def test_logits_with_a_window_are_those_of_one_pass_with_a_window_mask(
    window: int, chunk: int, folder: Path
) -> None:
    with built(folder, sliding_window=window, prefill_chunk=chunk) as llama:
        model = llama.model
        assert model.layers[0].attention.cache_k.shape[1] == min(320, window + chunk - 1)
        expected = written_out(model, TOKENS, window)
        torch.testing.assert_close(in_pieces(model, TOKENS, LENGTHS), expected, atol=ATOL, rtol=0)


def test_300_tokens_in_a_ring_of_47_slots_give_the_logits_of_a_mistral_model(
    tmp_path: Path,
) -> None:
    mistral = hf_model(model_type="mistral", sliding_window=32, max_position_embeddings=512)
    mistral.save_pretrained(tmp_path)
    with built(tmp_path, prefill_chunk=16) as llama:
        assert llama.model.params.n_slots == 47
        pieces = [llama.model(TOKENS[:1, i : i + 16], i) for i in range(0, 300, 16)]
        expected = hf_logits(mistral, TOKENS[:1])
        torch.testing.assert_close(torch.cat(pieces, dim=1), expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("chunk", [1, 7, 320])
def test_prompts_read_in_chunks_give_the_logprobs_of_one_piece(chunk: int, folder: Path) -> None:
    prompts = [row[:n].tolist() for row, n in zip(TOKENS, (200, 41, 170), strict=True)]
    how = {"max_gen_len": 20, "temperature": 0, "logprobs": True, "echo": True}
    with built(folder) as whole, built(folder, prefill_chunk=chunk) as chunked:
        tokens, logprobs = whole.generate(prompts, **how)
        with counted(chunked) as counts:
            chunked_tokens, chunked_logprobs = chunked.generate(prompts, **how)
    assert chunked_tokens == tokens
    for row, chunked_row in zip(logprobs, chunked_logprobs, strict=True):
        assert chunked_row == pytest.approx(row, abs=ATOL)
    assert max(counts) <= 3 * chunk


def test_with_a_window_prompts_and_answers_may_be_longer_than_the_cache(folder: Path) -> None:
    prompts = [row[:n].tolist() for row, n in zip(TOKENS, LENGTHS, strict=True)]
    with built(folder, max_seq_len=40, sliding_window=7, prefill_chunk=5) as llama:
        tokens, logprobs = llama.generate(prompts, 100, temperature=0, logprobs=True, echo=True)
        unbounded, _ = llama.generate(prompts, temperature=0)
        for row, values, prompt in zip(tokens, logprobs, prompts, strict=True):
            assert len(row) == len(prompt) + 100
            expected = written_out(llama.model, torch.tensor([row]), 7)[0].log_softmax(-1)
            expected = expected[:-1].gather(-1, torch.tensor(row[1:])[:, None])[:, 0]
            assert values[1:] == pytest.approx(expected.tolist(), abs=ATOL)
        # Without max_gen_len: max_seq_len new tokens.
        assert unbounded == [
            row[len(p) : len(p) + 40] for row, p in zip(tokens, prompts, strict=True)
        ]


def test_a_ring_is_filled_at_once_and_then_turned_by_what_it_can_lose(folder: Path) -> None:
    prompts = [TOKENS[0, :46].tolist(), TOKENS[1, :20].tolist()]
    with built(folder, max_seq_len=40, sliding_window=38) as llama, counted(llama) as counts:
        answers = llama.generate(prompts, 0, logprobs=True, echo=True)[1]
        assert counts == [2 * 40, 2 * 3, 2 * 3]
        expected = written_out(llama.model, TOKENS[:1, :46], 38)[0].log_softmax(-1)
        expected = expected[:-1].gather(-1, TOKENS[0, 1:46, None])[:, 0]
        assert answers[0][1:] == pytest.approx(expected.tolist(), abs=ATOL)


def test_a_ring_that_has_turned_is_reused_only_by_what_continues_it(folder: Path) -> None:
    prompt = TOKENS[0, :60].tolist()
    with built(folder, sliding_window=7, prefill_chunk=5) as llama:

        def answer(prompt: list[int]) -> tuple[list[int], int]:
            with counted(llama) as counts:
                return llama.generate([prompt], 20, temperature=0)[0][0], sum(counts)

        first, read = answer(prompt)
        assert read == 60 + 19
        longer = [*prompt, *first, 5, 6]
        second, read = answer(longer)
        assert read == 3 + 19  # the last answer's last token had not been read
        shorter = longer[:70]  # the ring holds positions that come after it
        third, read = answer(shorter)
        assert read == 70 + 19
        for prompt, answered in ((longer, second), (shorter, third)):
            llama.reset()
            assert answer(prompt)[0] == answered


def test_after_an_error_in_the_middle_a_ring_is_read_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, longer = TOKENS[0, :10].tolist(), TOKENS[0, :14].tolist()
    with built(folder, sliding_window=7, prefill_chunk=5) as llama:
        expected, _ = llama.generate([prompt[:4]], 5, temperature=0)
        llama.generate([prompt], 0)
        with monkeypatch.context() as patch:
            # Layer 0 has written positions 10 to 13, over 0 to 2, when layer 1 fails.
            patch.setattr(llama.model.layers[1], "forward", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                llama.generate([longer], 5)
        assert llama.generate([prompt[:4]], 5, temperature=0)[0] == expected
        llama.generate([prompt], 0)
        with monkeypatch.context() as patch:
            # The ring has turned, and the record of it does not follow.
            patch.setattr(llama._record, "extend", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                llama.generate([longer], 5)
        assert llama.generate([prompt[:4]], 5, temperature=0)[0] == expected


@pytest.mark.parametrize("window", [0, -4])
def test_build_refuses_a_window_below_one(window: int, folder: Path) -> None:
    with pytest.raises(LlamaError, match=f"sliding_window {window}: .*above 0"):
        built(folder, sliding_window=window)


def test_build_refuses_a_chunk_that_is_larger_than_the_cache(folder: Path) -> None:
    with pytest.raises(LlamaError, match=r"prefill_chunk 321: .*max_seq_len \(320\)"):
        built(folder, prefill_chunk=321)


def test_a_window_beyond_the_cache_is_refused_unless_prompt_and_answer_fit(folder: Path) -> None:
    prompt = TOKENS[0, :30].tolist()
    with built(folder) as llama:
        expected = llama.generate([prompt], 10, temperature=0)
    with built(folder, max_seq_len=40, sliding_window=41) as llama:
        assert llama.generate([prompt], 10, temperature=0) == expected
        assert llama.generate([prompt], temperature=0) == expected
        with pytest.raises(LlamaError, match=r"max_gen_len is 11, and a window of 41 .* of 40"):
            llama.generate([prompt], 11)
        with pytest.raises(LlamaError, match="has 41 tokens, and max_seq_len is 40"):
            llama.generate([[5] * 41], 0)
        with pytest.raises(LlamaError, match="positions 39 to 40, and the cache has 40 slots"):
            llama.model(TOKENS[:1, :2], 39)


def test_a_pass_that_would_overwrite_what_it_still_needs_is_refused(folder: Path) -> None:
    with built(folder, sliding_window=7, prefill_chunk=5) as llama:
        llama.model(TOKENS[:1, :5], 20)
        with pytest.raises(LlamaError, match="positions 20 to 25, and the cache has 11 slots"):
            llama.model(TOKENS[:1, :6], 20)
        with pytest.raises(LlamaError, match="positions -1 to 0"):
            llama.model(TOKENS[:1, :2], -1)

"""Heads and windows: against attention that is written out, and against another library."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpoints import VOCAB, hf_logits, hf_model, weights, write_meta
from conftest import ATOL, GOLDEN
from torch.nn.attention.bias import CausalBias

from llama import Llama, LlamaError, kernels
from llama import model as llama_model
from llama.kv_cache import Segment
from llama.model import Attention, Transformer, apply_rotary_emb, precompute_freqs_cis, repeat_kv

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
    masked = (ago < 0) | (ago >= (window or n))
    h = model.tok_embeddings(tokens)
    for layer in model.layers:
        attention, x = layer.attention, layer.attention_norm(h)
        q, k, v = (
            w(x).unflatten(-1, (-1, head_dim)) for w in (attention.wq, attention.wk, attention.wv)
        )
        q, k = apply_rotary_emb(q, k, freqs_cis)
        k, v = repeat_kv(k, attention.n_rep), repeat_kv(v, attention.n_rep)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(head_dim)
        probs = scores.masked_fill(masked, -math.inf).softmax(-1)
        h = h + attention.wo(torch.einsum("bhqk,bkhd->bqhd", probs, v).flatten(2))
        h = h + layer.feed_forward(layer.ffn_norm(h))
    return model.output(model.norm(h))


def in_pieces(model: Transformer, tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """The logits of ragged rows: `lengths` tokens in packed chunks, then the rest one by one."""
    n, chunk = tokens.shape[1], model.params.longest_chunk
    found = torch.full((*tokens.shape, VOCAB), math.nan)
    for start in range(0, max(lengths), chunk):
        segments = [
            Segment(row, start, min(chunk, end - start))
            for row, end in enumerate(lengths)
            if start < end
        ]
        packed = torch.cat([tokens[s.row, s.start_pos : s.end] for s in segments])
        pieces = model.prefill(packed, segments).split([s.length for s in segments])
        for segment, logits in zip(segments, pieces, strict=True):
            found[segment.row, segment.start_pos : segment.end] = logits
    rows = torch.arange(len(tokens))
    for step in range(n - min(lengths)):  # a row at its end repeats its last token
        positions = (torch.tensor(lengths) + step).clamp_max(n - 1)
        found[rows, positions] = model(tokens[rows, positions][:, None], positions)[:, 0]
    return found


@contextmanager
def counted(llama: Llama) -> Iterator[list[int]]:
    """The number of tokens that each pass reads."""
    counts: list[int] = []
    hook = llama.model.tok_embeddings.register_forward_pre_hook(
        lambda _, args: counts.append(args[0].numel())
    )
    yield counts
    hook.remove()


# The rule, written out: a query sees the keys of its own row whose positions are in the ring, not
# later than its own, and inside the window.


def by_the_rule(
    attention: Attention, x: torch.Tensor, places: list[tuple[int, int]], freqs_cis: torch.Tensor
) -> torch.Tensor:
    """The layer's output for tokens x (n, dim) at (row, position), from the cache as it stands."""
    args = attention.args
    n_slots, window = args.n_slots, args.sliding_window or args.max_seq_len
    keys, values = (
        cache.float() if scale is None else cache * scale[..., None].float()
        for cache, scale in (
            (attention.cache_k, attention.scale_k),
            (attention.cache_v, attention.scale_v),
        )
    )
    answers = []
    for q, (row, position) in zip(attention.wq(x), places, strict=True):
        q = q.view(1, 1, -1, attention.head_dim)
        q, _ = apply_rotary_emb(q, q, freqs_cis[position, None])
        last = max(p for r, p in places if r == row)
        ring = {p % n_slots: p for p in range(last + 1)}  # later positions overwrite earlier ones
        seen = [slot for slot, p in ring.items() if position - window < p <= position]
        k, v = (repeat_kv(t[row, None, seen], attention.n_rep)[0] for t in (keys, values))
        scores = torch.einsum("hd,nhd->hn", q[0, 0], k) / math.sqrt(attention.head_dim)
        answers.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), v).flatten())
    return attention.wo(torch.stack(answers))


@contextmanager
def checked_attention(llama: Llama, places: list[tuple[int, int]]) -> Iterator[set[str]]:
    """Check the attention of every layer by the rule; yields the forms that it took."""
    attend, forms, args = F.scaled_dot_product_attention, set(), llama.model.params
    freqs_cis = precompute_freqs_cis(args.head_dim, 64, args.rope_theta)

    def spy(q, k, v, attn_mask=None, is_causal=False):
        kind = "none" if attn_mask is None else "bias"
        kind = "lower right" if isinstance(attn_mask, CausalBias) else kind
        forms.add("causal" if is_causal else kind)
        assert k.untyped_storage().nbytes() <= llama.model.attentions[0].cache_k.numel() * 4
        return attend(q, k, v, attn_mask, is_causal=is_causal)

    def check(attention: Attention, inputs: tuple, output: torch.Tensor) -> None:
        expected = by_the_rule(attention, inputs[0].flatten(0, 1), places, freqs_cis)
        # The same sums in another order: outputs of about 1 differ by some 1e-6.
        torch.testing.assert_close(output.flatten(0, 1), expected, atol=1e-5, rtol=0)

    def spy_kernel(*arguments: Any) -> torch.Tensor:
        forms.add("kernel")
        return decode_attention(*arguments)

    decode_attention = kernels.decode_attention
    hooks = [a.register_forward_hook(check) for a in llama.model.attentions]
    with pytest.MonkeyPatch.context() as patch:
        # Not F itself, whose function torch compares with when it meets a CausalBias.
        functions = SimpleNamespace(silu=F.silu, scaled_dot_product_attention=spy)
        patch.setattr(llama_model, "F", functions)
        patch.setattr(kernels, "decode_attention", spy_kernel)
        yield forms
    for hook in hooks:
        hook.remove()


@pytest.fixture(params=["torch", "auto"])
def choice(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Attention by torch, and by our kernels where they compile."""
    monkeypatch.setattr(kernels, "_choice", request.param)
    return "kernel" if kernels.available() else "torch"


@pytest.mark.parametrize("cache", ["float32", "int8"])
@pytest.mark.parametrize("n_kv_heads", [8, 4, 2, 1])
def test_every_form_of_attention_equals_the_rule_over_any_range_of_rows(
    n_kv_heads: int, cache: str, choice: str, tmp_path: Path
) -> None:
    state = weights(n_kv_heads=n_kv_heads)
    folder = write_meta(tmp_path / "m", state, n_kv_heads=n_kv_heads)
    with built(folder, max_seq_len=32, max_batch_size=4, kv_cache_dtype=cache) as llama:
        model = llama.model

        def check(form: str, starts: Any, n: int, first_row: Any = 1, rows: int = 2) -> None:
            of_rows = [starts] * rows if isinstance(starts, int) else starts.tolist()
            places = [
                (int(first_row) + i, start + j) for i, start in enumerate(of_rows) for j in range(n)
            ]
            with checked_attention(llama, places) as forms:
                model(TOKENS[:rows, :n], starts, first_row=first_row)
            assert forms == {"kernel" if n == 1 and choice == "kernel" else form}

        check("causal", 0, 9)
        check("lower right", 9, 5)
        check("none", 14, 1)
        check("bias", torch.tensor([15, 12]), 1)
        check("none", 9, 1, first_row=torch.tensor(2), rows=1)
        check("bias", torch.tensor([8]), 1, first_row=torch.tensor(1), rows=1)
        places = [(3, 0), (3, 1), (1, 13), (1, 14), (1, 15), (2, 7)]
        with checked_attention(llama, places) as forms:
            model.prefill(TOKENS[0, :6], [Segment(3, 0, 2), Segment(1, 13, 3), Segment(2, 7, 1)])
        assert forms == {"causal", "lower right"}  # a segment is never for the kernels


@pytest.mark.parametrize("cache", ["float32", "int8"])
def test_a_window_takes_a_bias_only_once_it_hides_something(
    cache: str, choice: str, folder: Path
) -> None:
    options = {"sliding_window": 7, "prefill_chunk": 5, "kv_cache_dtype": cache}
    with built(folder, max_seq_len=32, **options) as llama:
        model = llama.model
        assert model.params.n_slots == 11
        for start, n, form in (
            (0, 5, "causal"),
            (5, 2, "lower right"),
            (7, 5, "bias"),  # the last of them wraps
            (12, 5, "bias"),
            (17, 1, "bias"),
            (18, 5, "bias"),
        ):
            places = [(row, start + j) for row in (1, 2) for j in range(n)]
            with checked_attention(llama, places) as forms:
                model(TOKENS[:2, start : start + n], start, first_row=1)
            by_kernel = n == 1 and choice == "kernel"
            assert forms == {"kernel" if by_kernel else form}
        with checked_attention(llama, [(1, 23), (2, 21)]) as forms:
            model(TOKENS[:2, :1], torch.tensor([23, 21]), first_row=1)
        assert forms == {"kernel" if choice == "kernel" else "bias"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_cache_dtype": "int8"},
        {"sliding_window": 7, "prefill_chunk": 5},
        {"sliding_window": 7, "prefill_chunk": 5, "kv_cache_dtype": "int8"},
    ],
    ids=str,
)
def test_rows_that_a_pass_does_not_serve_are_bit_identical_afterwards(
    options: dict, folder: Path
) -> None:
    with built(folder, max_seq_len=32, max_batch_size=5, **options) as llama:
        model = llama.model
        # 30 positions, and 32 slots: only the ring has wrapped.
        for start in range(0, 30, 5):
            model(TOKENS[:1, start : start + 5].expand(5, -1), start)

        def others_change(run: Callable[[], Any]) -> bool:
            buffers = [b for a in model.attentions for b in a.buffers(recurse=False)]
            before = [buffer.clone() for buffer in buffers]
            run()
            changed = [
                [not torch.equal(*rows) for rows in zip(*pair, strict=True)]
                for pair in zip(buffers, before, strict=True)
            ]
            assert all(rows[1] and rows[3] for rows in changed)
            return any(rows[i] for rows in changed for i in (0, 2, 4))

        active = torch.tensor([True, False, True])
        newest = TOKENS[:3, 40, None]
        for starts in (30, torch.tensor([29, 0, 31])):
            assert not others_change(
                lambda starts=starts: model(newest, starts, first_row=1, active=active)
            )
        segments = [Segment(3, 30, 2), Segment(1, 28, 3)]
        assert not others_change(lambda: model.prefill(TOKENS[1, :5], segments))
        together = model(newest, 31, first_row=1, active=active)[::2]
        alone = [model(newest[i : i + 1], 31, first_row=i + 1) for i in (0, 2)]
        torch.testing.assert_close(together, torch.cat(alone), atol=ATOL, rtol=0)


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
    options = {"max_gen_len": 20, "temperature": 0, "logprobs": True, "echo": True}
    with built(folder) as whole, built(folder, prefill_chunk=chunk) as chunked:
        tokens, logprobs = whole.generate(prompts, **options)
        with counted(chunked) as counts:
            chunked_tokens, chunked_logprobs = chunked.generate(prompts, **options)
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


def test_a_ring_is_filled_at_once_and_then_wraps_by_what_it_can_lose(folder: Path) -> None:
    prompts = [TOKENS[0, :46].tolist(), TOKENS[1, :20].tolist()]
    with built(folder, max_seq_len=40, sliding_window=38) as llama, counted(llama) as counts:
        answers = llama.generate(prompts, 0, logprobs=True, echo=True)[1]
        assert counts == [40 + 20, 3, 3]
        expected = written_out(llama.model, TOKENS[:1, :46], 38)[0].log_softmax(-1)
        expected = expected[:-1].gather(-1, TOKENS[0, 1:46, None])[:, 0]
        assert answers[0][1:] == pytest.approx(expected.tolist(), abs=ATOL)


def test_a_ring_that_has_wrapped_is_reused_only_by_what_continues_it(folder: Path) -> None:
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


def test_a_wrapped_ring_does_not_pass_for_one_that_is_a_token_shorter(folder: Path) -> None:
    """Slot 0 of 11 holds position 11 after 12 tokens, and no longer position 0."""
    prompt = TOKENS[0, :12].tolist()
    with built(folder, sliding_window=7, prefill_chunk=5) as llama:
        expected = llama.generate([prompt[:3]], 5, temperature=0)[0]
        llama.generate([prompt], 0)
        rows = range(llama.model.params.max_batch_size)
        assert all(llama.engine.cache.common(row, prompt) in (0, 3) for row in rows)
        assert llama.generate([prompt[:3]], 5, temperature=0)[0] == expected


def test_after_an_error_in_the_middle_a_ring_is_read_again(
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

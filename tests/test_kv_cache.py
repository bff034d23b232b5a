from __future__ import annotations

import doctest
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llama import LlamaError, ModelArgs, kv_cache
from llama.memory import ARCHITECTURES, architecture
from llama.sizes import cache_bytes, format_bytes, weights_bytes

K, GIB = 1024, 2**30


def test_the_examples_in_the_docstrings_hold() -> None:
    failed, attempted = doctest.testmod(kv_cache)
    assert attempted > 0
    assert failed == 0


# The ring and the mask rule, against a ring that is written slot by slot.


@st.composite
def chunks(draw: st.DrawFn) -> tuple[int, int | None, list[range]]:
    """(n_slots, window, the positions that each pass writes)."""
    window = draw(st.none() | st.integers(1, 9))
    n_slots = draw(st.integers(window or 1, 24))
    end, passes = 0, []
    for _ in range(draw(st.integers(1, 6))):
        room = max(n_slots - end, kv_cache.longest_chunk(n_slots, window))
        if room > 0:
            passes.append(range(end, end + draw(st.integers(1, room))))
            end = passes[-1].stop
    return n_slots, window, passes


@given(chunks())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_query_sees_exactly_its_window_in_any_ring_and_any_chunks(case) -> None:
    n_slots, window, passes = case
    ring: list[int | None] = [None] * n_slots
    for positions in passes:
        for p in positions:
            ring[int(kv_cache.slot_index(torch.tensor(p), n_slots))] = p
        seen = kv_cache.visible(torch.tensor([[*positions]]), n_slots, n_slots, window)[0]
        for p, mask in zip(positions, seen.tolist(), strict=True):
            first = 0 if window is None else max(0, p - window + 1)
            got = sorted(held for held, ok in zip(ring, mask, strict=True) if ok)
            assert got == list(range(first, p + 1))


@pytest.mark.parametrize("n_slots", [8, 11, 20])
@pytest.mark.parametrize("window", [None, 5, 8, 30])
def test_the_rule_is_plain_causal_attention_where_is_causal_says_so(
    n_slots: int, window: int | None
) -> None:
    for end in range(1, 16):
        positions = torch.arange(end)[None]
        seen = kv_cache.visible(positions, n_slots, min(end, n_slots), window)[0]
        causal = torch.ones(end, end, dtype=torch.bool).tril()
        plain = seen.shape == causal.shape and torch.equal(seen, causal)
        assert kv_cache.is_causal(end, n_slots, window) == plain


def test_rows_of_one_batch_have_each_their_own_mask() -> None:
    positions = torch.tensor([[0, 1, 2], [5, 6, 6], [40, 41, 42]])
    together = kv_cache.visible(positions, 12, 12, 4)
    alone = [kv_cache.visible(row[None], 12, 12, 4)[0] for row in positions]
    assert torch.equal(together, torch.stack(alone))


def test_fewer_slots_than_the_ring_has_give_the_beginning_of_the_mask() -> None:
    positions = torch.tensor([[3, 4, 5]])
    assert torch.equal(
        kv_cache.visible(positions, 32, 6), kv_cache.visible(positions, 32, 32)[..., :6]
    )


@pytest.mark.parametrize(
    ("length", "window", "chunk", "slots", "longest_chunk"),
    [
        (100, None, None, 100, 0),
        (100, None, 8, 100, 0),
        (100, 16, 8, 23, 8),
        (100, 16, 1, 16, 1),
        (100, 16, None, 100, 85),
        (100, 100, 8, 100, 1),
        (100, 101, 8, 100, 0),  # the window is never full, and the ring must not wrap
    ],
)
def test_the_ring_holds_the_window_and_one_chunk(
    length, window, chunk, slots, longest_chunk
) -> None:
    assert kv_cache.n_slots(length, window, chunk) == slots
    assert kv_cache.longest_chunk(slots, window) == longest_chunk


# Bytes. The expected figures are those of papers on the cache, and of the models' cards.


def of(model: str, *, length: int, dtype: torch.dtype = torch.float16, ranks: int = 1) -> int:
    """The cache of one row of a named model."""
    args = replace(architecture(model)[0], max_seq_len=length, sliding_window=None)
    return cache_bytes(args, dtype, ranks)


def test_the_cache_of_known_models_has_the_published_sizes() -> None:
    assert of("llama-2-7b", length=2048) == 2 * 32 * 2048 * 32 * 128 * 2
    assert of("llama-2-7b", length=2048) / 10**9 == pytest.approx(1.07, abs=0.005)
    assert of("llama-3.1-405b", length=128 * K) / GIB == pytest.approx(63.0, abs=0.05)


@pytest.mark.parametrize(("length", "ratio"), [(128 * K, 1.07), (512 * K, 4.28)])
def test_the_cache_of_llama_3_1_8b_outgrows_its_weights(length, ratio) -> None:
    weights = weights_bytes(architecture("llama-3.1-8b")[0], dtype=torch.float16)
    assert of("llama-3.1-8b", length=length) / weights == pytest.approx(ratio, rel=0.01)


def test_the_cache_is_a_product_of_its_factors() -> None:
    args = ModelArgs(dim=128, n_layers=4, n_heads=8, max_seq_len=1, max_batch_size=1)
    token = cache_bytes(args, torch.float16)
    assert token == 2 * 4 * 8 * 16 * 2
    assert cache_bytes(replace(args, max_seq_len=10, max_batch_size=3), torch.float16) == 30 * token
    assert cache_bytes(replace(args, n_kv_heads=2), torch.float16) * 4 == token
    assert cache_bytes(args, torch.float16, 4) * 4 == token
    assert cache_bytes(args, torch.float32) == 2 * token
    ring = replace(args, max_seq_len=10, sliding_window=3, prefill_chunk=2)
    assert cache_bytes(ring, torch.float16) == 4 * token
    # Each head of 16 numbers has a scale of two bytes.
    assert cache_bytes(args, torch.int8) == 2 * 4 * 8 * 18


PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "code-llama-34b": 33_743_970_304,
    "tinyllama-1.1b": 1_100_048_384,
    "mistral-7b": 7_241_732_096,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_weights_of_a_named_model_are_the_parameters_on_its_card(name) -> None:
    args, tied, _ = architecture(name)
    assert not tied
    assert weights_bytes(args, dtype=torch.float16) == 2 * PARAMETERS[name]


SMALL = ModelArgs(dim=64, n_layers=3, n_heads=4, n_kv_heads=2, hidden_dim=96, vocab_size=320)


def test_each_rank_has_all_norms_and_its_part_of_the_matrices() -> None:
    norms = (2 * 3 + 1) * 64 * 4
    alone = weights_bytes(SMALL, dtype=torch.float32)
    assert weights_bytes(SMALL, dtype=torch.float32, ranks=2) == (alone - norms) // 2 + norms


def test_a_tied_output_layer_is_counted_once_where_it_can_be_shared() -> None:
    def count(**options) -> int:
        return weights_bytes(SMALL, dtype=torch.float16, **options)

    assert count() - count(tied=True) == 320 * 64 * 2
    assert count(ranks=2) == count(ranks=2, tied=True)


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B (0 B)"),
        (999, "999 B (999 B)"),
        (1000, "1.00 kB (1000 B)"),
        (2**30, "1.07 GB (1.00 GiB)"),
        (756 * GIB, "811.75 GB (756.00 GiB)"),
        (3 * 2**50, "3377.70 TB (3072.00 TiB)"),
    ],
)
def test_sizes_are_printed_in_decimal_and_in_binary_units(n_bytes, text) -> None:
    assert format_bytes(n_bytes) == text


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_below_one_is_refused(window) -> None:
    with pytest.raises(LlamaError, match=r"sliding_window .*above 0"):
        kv_cache.check_sizes(1, 128, window, None)


@pytest.mark.parametrize("chunk", [0, -1, 129])
def test_a_chunk_that_is_larger_than_the_cache_is_refused(chunk) -> None:
    with pytest.raises(LlamaError, match=r"prefill_chunk .*from 1 to max_seq_len \(128\)"):
        kv_cache.check_sizes(1, 128, 7, chunk)


def test_an_unknown_cache_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(LlamaError, match=r"'float64': .*float32, bfloat16, float16, int8"):
        kv_cache.checked_dtype(torch.float64)
    assert kv_cache.checked_dtype("int8") == kv_cache.checked_dtype(torch.int8) == torch.int8

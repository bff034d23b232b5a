from __future__ import annotations

import doctest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llama import LlamaError, kv_cache
from llama.kv_cache import cache_bytes, format_bytes, longest_context, weights_bytes
from llama.memory import ARCHITECTURES, architecture

KB, MB, GB, GIB = 10**3, 10**6, 10**9, 2**30
K = 1024


def test_the_examples_in_the_docstrings_hold() -> None:
    failed, attempted = doctest.testmod(kv_cache)
    assert attempted >= 3
    assert failed == 0


# The ring and the mask rule, against a ring that is written slot by slot.


@st.composite
def chunked_rows(draw: st.DrawFn) -> tuple[int, int | None, list[list[range]]]:
    """(n_slots, window, for each pass the positions that each row writes)."""
    window = draw(st.none() | st.integers(1, 9))
    n_slots = draw(st.integers(window or 1, 24))
    longest = kv_cache.longest_chunk(n_slots, window)
    n_rows = draw(st.integers(1, 3))
    ends = [0] * n_rows
    passes = []
    for _ in range(draw(st.integers(1, 6))):
        width = draw(st.integers(1, longest if window else n_slots))
        if window is None and max(ends) + width > n_slots:
            break
        # A shorter row repeats its last position, and at its end its newest one: see forward.
        lengths = [draw(st.integers(1, width)) for _ in ends]
        passes.append([range(e, e + n) for e, n in zip(ends, lengths, strict=True)])
        ends = [r.stop for r in passes[-1]]
    return n_slots, window, passes


@given(chunked_rows())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_query_sees_exactly_its_window_in_any_ring_and_any_chunks(case) -> None:
    n_slots, window, passes = case
    for row in range(len(passes[0]) if passes else 0):
        ring: list[int | None] = [None] * n_slots
        for ranges in passes:
            written, width = ranges[row], max(map(len, ranges))
            positions = [*written, *[written[-1]] * (width - len(written))]
            for p in written:
                ring[int(kv_cache.slot_of(torch.tensor(p), n_slots))] = p
            seen = kv_cache.visible(torch.tensor([positions]), n_slots, n_slots, window)[0]
            for p, mask in zip(positions, seen.tolist(), strict=True):
                first = 0 if window is None else max(0, p - window + 1)
                got = sorted(held for held, ok in zip(ring, mask, strict=True) if ok)
                assert got == list(range(first, p + 1))


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
        (100, 101, 8, 100, 0),  # the window is never full, and the ring must not turn
    ],
)
def test_the_ring_holds_the_window_and_one_chunk(
    length, window, chunk, slots, longest_chunk
) -> None:
    assert kv_cache.n_slots(length, window, chunk) == slots
    assert kv_cache.longest_chunk(slots, window) == longest_chunk


# Bytes. The expected figures stand in the documents on the cache, and in the models' cards.


def test_llama_2_7b_at_2048_tokens_takes_33_5_mb_in_a_layer_and_1_07_gb_in_all() -> None:
    assert cache_bytes(1, 32, 128, length=2048) == 2 * 1 * 2048 * 32 * 128 * 2
    # The documents cut 33.55 to 33.5.
    assert cache_bytes(1, 32, 128, length=2048) / MB == pytest.approx(33.5, abs=0.06)
    assert cache_bytes(32, 32, 128, length=2048) / GB == pytest.approx(1.07, abs=0.005)


def test_llama_3_1_405b_at_128k_takes_more_than_63_gb() -> None:
    n_bytes = cache_bytes(126, 8, 128, length=128 * K)
    assert n_bytes > 63 * GB
    assert n_bytes / GIB == pytest.approx(63.0, abs=0.05)


@pytest.mark.parametrize(("length", "ratio"), [(128 * K, 1.07), (512 * K, 4.28)])
def test_the_cache_of_llama_3_1_8b_outgrows_its_weights(length, ratio) -> None:
    args, _, _ = architecture("llama-3.1-8b")
    weights = args.weights_bytes(torch.float16)
    cache = cache_bytes(args.n_layers, args.kv_heads, args.head_dim, length=length)
    assert cache / weights == pytest.approx(ratio, rel=0.01)


def test_grouped_and_multi_query_heads_divide_the_cache_by_the_size_of_a_group() -> None:
    multi_head = cache_bytes(32, 32, 128, length=4 * K)
    assert multi_head == 4 * cache_bytes(32, 8, 128, length=4 * K)
    assert multi_head == 32 * cache_bytes(32, 1, 128, length=4 * K)


def test_the_cache_is_a_product_of_its_factors() -> None:
    token = cache_bytes(4, 8, 16)
    assert cache_bytes(4, 8, 16, length=10, batch=3) == 30 * token
    assert cache_bytes(4, 8, 16, ranks=4) * 4 == token
    assert cache_bytes(4, 8, 16, dtype=torch.float32) == 2 * token
    assert cache_bytes(4, 8, 16, length=10, window=3, chunk=2) == 4 * token
    # A scale of two bytes beside each head's 16.
    assert cache_bytes(4, 8, 16, dtype=torch.int8) == 2 * 4 * 8 * 18


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
    assert args.weights_bytes(torch.float16) == 2 * PARAMETERS[name]


def test_norms_are_whole_on_each_rank_and_matrices_are_split() -> None:
    shape = (64, 3, 4, 2, 96, 320)
    norms = (2 * 3 + 1) * 64 * 4
    whole = weights_bytes(*shape, dtype=torch.float32)
    assert weights_bytes(*shape, dtype=torch.float32, ranks=2) == (whole - norms) // 2 + norms


def test_a_tied_output_layer_is_counted_once_where_it_can_be_shared() -> None:
    shape = (64, 3, 4, 2, 96, 320)
    assert weights_bytes(*shape) - weights_bytes(*shape, tied=True) == 320 * 64 * 2
    assert weights_bytes(*shape, ranks=2) == weights_bytes(*shape, ranks=2, tied=True)


def test_what_is_said_to_fit_fits_and_one_more_does_not() -> None:
    budget = 10 * GIB
    row = cache_bytes(32, 8, 128, length=4 * K)
    n = kv_cache.largest_batch(budget, row)
    assert n * row <= budget < (n + 1) * row
    length = longest_context(budget, cache_bytes(32, 8, 128, batch=3))
    assert cache_bytes(32, 8, 128, length=length, batch=3) <= budget
    assert cache_bytes(32, 8, 128, length=length + 1, batch=3) > budget


def test_a_window_that_fits_has_a_context_without_end() -> None:
    assert longest_context(1000, 10, window=90, chunk=11) is None
    assert longest_context(1000, 10, window=90, chunk=12) == 100
    assert longest_context(1000, 10, window=100) is None


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


@pytest.mark.parametrize("window", [0, -1, 2.5, "7"])
def test_a_window_below_one_is_refused(window) -> None:
    with pytest.raises(LlamaError, match=r"sliding_window .*above 0"):
        kv_cache.check_window(128, window, None)


@pytest.mark.parametrize("chunk", [0, -1, 129, 1.0])
def test_a_chunk_that_is_larger_than_the_cache_is_refused(chunk) -> None:
    with pytest.raises(LlamaError, match=r"prefill_chunk .*from 1 to max_seq_len \(128\)"):
        kv_cache.check_window(128, 7, chunk)


def test_an_unknown_cache_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(LlamaError, match=r"'float64': .*float32, bfloat16, float16, int8"):
        kv_cache.checked_dtype(torch.float64)
    assert kv_cache.checked_dtype("int8") == kv_cache.checked_dtype(torch.int8) == torch.int8

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from llama import Llama, LlamaError
from llama.generation import STORIES
from llama.kv_cache import format_bytes
from llama.memory import ARCHITECTURES, memory, parse_bytes


def lines(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What was printed: the words before two spaces -> the rest of the line."""
    printed = capsys.readouterr().out.splitlines()
    return {label: rest.strip() for label, _, rest in (line.partition("  ") for line in printed)}


def test_the_table_of_a_named_model_holds_weights_token_sequence_and_all(capsys) -> None:
    memory("llama-2-7b", max_seq_len=2048, max_batch_size=8)
    table = lines(capsys)
    assert table["weights, float16"] == "13.48 GB (12.55 GiB)"
    assert table["cache per token, float16"] == "524.29 kB (512.00 KiB)"
    assert table["cache per sequence, 2048 slots"] == "1.07 GB (1.00 GiB)"
    assert table["cache, batch of 8"] == "8.59 GB (8.00 GiB)"
    assert table["weights and cache"] == "22.07 GB (20.55 GiB)"


def test_with_several_ranks_the_table_has_a_column_for_each_of_them(capsys) -> None:
    memory("llama-2-70b", model_parallel_size=8)
    whole, rank = lines(capsys)["cache, batch of 1"].split("   ", 1)
    assert whole == "1.34 GB (1.25 GiB)"
    assert rank.strip() == "167.77 MB (160.00 MiB)"


def test_a_quantised_cache_and_a_window_take_less(capsys) -> None:
    memory("mistral-7b", prefill_chunk=512, kv_cache_dtype="int8")
    table = lines(capsys)
    # 2 * 32 layers * 8 heads * (128 + 2) bytes; 4096 + 512 - 1 slots.
    assert table["cache per token, int8"] == "66.56 kB (65.00 KiB)"
    assert "cache per sequence, 4607 slots" in table


def test_a_budget_tells_the_longest_context_and_the_largest_batch(capsys) -> None:
    memory("llama-2-7b", max_seq_len=2048, max_batch_size=4, budget="24GiB")
    table = lines(capsys)
    assert table["left for the cache"] == "12.29 GB (11.45 GiB)"
    assert table["longest context, batch of 4"] == "5861 tokens"
    assert table["largest batch, 2048 slots each"] == "11 rows"


def test_with_a_window_that_fits_the_context_has_no_end(capsys) -> None:
    memory("mistral-7b", budget="24GiB")
    assert lines(capsys)["longest context, batch of 1"].startswith("without end")


def test_a_budget_below_the_weights_is_refused_with_what_is_missing() -> None:
    missing = r"10.00 GB \(9.31 GiB\) is 3.48 GB \(3.24 GiB\) less than the weights"
    with pytest.raises(LlamaError, match=missing):
        memory("llama-2-7b", budget="10GB")


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(LlamaError, match=f"'gpt-2' .*: {', '.join(ARCHITECTURES)}"):
        memory("gpt-2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is unknown: pass one of float32"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype 'int4'"),
        ({"sliding_window": 0}, "sliding_window 0"),
        ({"prefill_chunk": 5000}, r"prefill_chunk 5000: .*\(4096\)"),
        ({"model_parallel_size": 3}, "32 heads do not divide by 3 ranks"),
        ({"max_batch_size": 0}, "max_batch_size 0"),
        ({"max_seq_len": -1}, "max_seq_len -1"),
        ({"model_parallel_size": 0}, "model_parallel_size 0"),
        ({"budget": "24 Gigs"}, "'24 Gigs' is no size"),
    ],
)
def test_an_option_without_meaning_is_refused(options, message) -> None:
    with pytest.raises(LlamaError, match=message):
        memory("llama-2-7b", **options)


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("24GiB", 24 * 2**30), ("1.5 tb", 15 * 10**11), (7, 7), ("7B", 7), ("1.001kB", 1001)],
)
def test_a_size_is_read_with_any_unit(text, n_bytes) -> None:
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize("model", ["llama-2-7b", "mistral-7b", "tinyllama-1.1b"])
def test_a_plot_is_drawn(model, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    memory(model, plot=str(tmp_path / "cache.png"))
    assert (tmp_path / "cache.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_weights_take_what_an_instance_has(kind: str, capsys) -> None:
    try:
        with Llama.build(quantize=kind, dtype="float32", verbose=False) as llama:
            n_bytes = llama.memory()["weights_bytes"]
    except LlamaError as error:
        pytest.skip(str(error))  # no group divides the shipped model's rows
    memory(str(STORIES), quantize=kind, dtype="float32")
    assert lines(capsys)[f"weights, {kind}"] == format_bytes(n_bytes)


def test_a_plot_without_matplotlib_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(LlamaError, match="a plot needs matplotlib: pip install matplotlib"):
        memory("llama-2-7b", plot=str(tmp_path / "x.png"))


def test_a_plot_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    for plot in (str(tmp_path / "nowhere" / "x.png"), str(tmp_path / "x.xyz")):
        with pytest.raises(LlamaError, match="cannot be written"):
            memory("llama-2-7b", plot=plot)
    with pytest.raises(LlamaError, match="plot True is a bool"):
        memory("llama-2-7b", plot=True)

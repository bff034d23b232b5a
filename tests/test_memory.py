from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llama import Llama, LlamaError
from llama.generation import STORIES
from llama.memory import (
    ARCHITECTURES,
    Plan,
    architecture,
    fitting_context,
    memory,
    parse_bytes,
)
from llama.sizes import format_bytes


def lines(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What was printed: the words before two spaces -> the rest of the line."""
    printed = capsys.readouterr().out.splitlines()
    return {label: rest.strip() for label, _, rest in (line.partition("  ") for line in printed)}


def plan_of(model: str, max_seq_len: int, max_batch_size: int) -> Plan:
    args = architecture(model)[0]
    return Plan(replace(args, max_seq_len=max_seq_len, max_batch_size=max_batch_size))


def test_the_table_of_a_named_model_holds_weights_token_sequence_and_all(capsys) -> None:
    memory("llama-2-7b", max_seq_len=2048, max_batch_size=8)
    table = lines(capsys)
    assert table["weights, float16"] == "13.48 GB (12.55 GiB)"
    assert table["cache per token, float16"] == "524.29 kB (512.00 KiB)"
    assert table["cache per sequence, 2048 slots"] == "1.07 GB (1.00 GiB)"
    assert table["cache, batch of 8"] == "8.59 GB (8.00 GiB)"
    sizes = [13_476_839_424, 8 * 2**30, plan_of("llama-2-7b", 2048, 8).activation_bytes]
    assert table["in all"] == format_bytes(sum(sizes))


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


def test_what_fits_is_the_budget_less_the_weights_and_the_activations(capsys) -> None:
    memory("llama-2-7b", max_seq_len=2048, max_batch_size=8, budget="24GiB")
    table, plan = lines(capsys), plan_of("llama-2-7b", 2048, 8)
    left = 24 * 2**30 - plan.weights_bytes - plan.activation_bytes
    assert table["left for the cache"] == format_bytes(left)
    assert table["longest context, batch of 8"] == f"{left // 8 // 2**19} tokens"
    assert table["largest batch, 2048 slots each"] == f"{left // 2**30} rows"


def test_no_context_beyond_the_models_own_is_promised(capsys) -> None:
    memory("llama-2-7b", budget="24GiB")
    assert lines(capsys)["longest context, batch of 1"] == "4096 tokens, the model's own"


def test_with_a_window_that_fits_the_context_is_unlimited(capsys) -> None:
    memory("mistral-7b", budget="24G")
    assert lines(capsys)["longest context, batch of 1"].startswith("unlimited")


def test_a_budget_below_the_weights_is_refused_with_what_is_missing() -> None:
    with pytest.raises(LlamaError, match=r"10.00 GB \(9.31 GiB\) is 3.\d+ GB .* less than the"):
        memory("llama-2-7b", budget="10GB")


def test_the_context_of_a_command_is_the_models_own_if_it_fits(monkeypatch) -> None:
    own = fitting_context(STORIES, 1)
    assert own == 4096  # the shipped params.json names none
    args = replace(architecture(str(STORIES))[0], max_batch_size=2)
    plan = Plan(args, torch.float32, torch.float32)
    fixed = plan.weights_bytes + plan.activation_bytes
    for room in (2 * plan.cache_bytes, plan.cache_bytes // 4):
        free = fixed + room
        monkeypatch.setattr("llama.memory.available_bytes", lambda _, free=free: free)
        length = fitting_context(STORIES, 2)
        assert 512 <= length <= 4096
        assert (length == 4096) == (room > plan.cache_bytes)
        assert fixed + length * 2 * plan.token_bytes <= free
    monkeypatch.setenv("WORLD_SIZE", "2")  # nothing is measured, which ranks could differ in
    assert fitting_context(STORIES, 2) == 4096


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
        ({"budget": "24 Gigs"}, "'24 Gigs' is not a size"),
        ({"budget": "24"}, "'24' is not a size: write a number and a unit"),
    ],
)
def test_an_option_without_meaning_is_refused(options, message) -> None:
    with pytest.raises(LlamaError, match=message):
        memory("llama-2-7b", **options)


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("24GiB", 24 * 2**30), ("24G", 24 * 2**30), ("1.5 tb", 15 * 10**11), ("1.001kB", 1001)],
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

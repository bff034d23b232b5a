"""The cache as a thing of its own: its dtype, its bytes, what it holds, and its file."""

from __future__ import annotations

import errno
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from checkpoints import hf_model, write_meta
from conftest import ATOL, GOLDEN
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from llama import Llama, LlamaError, kv_cache, prefix_cache, sizes
from llama.checkpoints import load
from llama.generation import STORIES
from llama.prefix_cache import _checksum

TOKENIZER = GOLDEN / "rand_gqa" / "tokenizer.model"
PROMPT = [1, *range(300, 340)]
DTYPES = ["float32", "bfloat16", "float16", "int8"]


def built(folder: Path = STORIES, **options: Any) -> Llama:
    sizes = {"max_seq_len": 128, "max_batch_size": 2, "dtype": "float32", "verbose": False}
    tokenizer = TOKENIZER if folder != STORIES else None
    return Llama.build(folder, tokenizer, **{**sizes, **options})


def read_tokens(llama: Llama) -> list[int]:
    """A list that each forward pass will add its number of tokens to."""
    counts: list[int] = []
    llama.model.tok_embeddings.register_forward_pre_hook(
        lambda _, args: counts.append(args[0].numel())
    )
    return counts


def buffers(llama: Llama) -> list[torch.Tensor]:
    return [buffer for a in llama.model.attentions for buffer in a.buffers(recurse=False)]


def held(llama: Llama) -> list[list[int]]:
    """The tokens of the rows that hold any."""
    rows = [llama.cache(row).tokens for row in range(llama.model.params.max_batch_size)]
    return [tokens for tokens in rows if tokens]


# Dtypes


@pytest.mark.parametrize("shape", [(3, 5, 2, 20), (1, 1, 1, 128)])
def test_a_value_in_int8_is_off_by_half_a_step_at_most(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape) * 10 ** torch.empty(*shape[:-1], 1).uniform_(-3, 3)
    scale = kv_cache.scale_of(x, torch.float16)
    numbers = kv_cache.quantize(x, scale)
    assert numbers.abs().max() <= 127
    assert scale.dtype == torch.float16
    # Half a step, and the 2**-11 by which the largest number's scale may have been rounded.
    step = x.abs().amax(-1, keepdim=True) / 127
    error = (numbers * scale[..., None].float() - x).abs()
    assert (error <= step * (0.5 + 127 * 2**-11)).all()


def test_zeros_stay_zeros_in_int8_and_what_is_not_finite_stays_so() -> None:
    zeros = torch.zeros(2, 8)
    assert not kv_cache.quantize(zeros, kv_cache.scale_of(zeros, torch.float16)).any()
    for value in (torch.nan, torch.inf):
        x = torch.ones(1, 8)
        x[0, 3] = value
        assert not kv_cache.scale_of(x, torch.float16).isfinite().any()


# Largest difference of a logit over 120 tokens of a story; the logits' spread is about 3.
@pytest.mark.parametrize(("dtype", "atol"), [("float16", 0.02), ("bfloat16", 0.2), ("int8", 0.5)])
def test_a_narrower_cache_moves_the_logits_a_little_and_the_perplexity_less(
    dtype: str, atol: float, llama: Llama
) -> None:
    story = llama.tokenizer.encode("Once upon a time, there was a little dog named Max.", bos=True)
    story += llama.generate([story], 100, temperature=0)[0][0]
    tokens = torch.tensor([story])
    with built(kv_cache_dtype=dtype) as narrow:
        assert narrow.model.layers[0].attention.cache_k.dtype == getattr(torch, dtype)
        logits, expected = narrow.model(tokens, 0), llama.model(tokens, 0)
        torch.testing.assert_close(logits, expected, atol=atol, rtol=0)
    loss, expected_loss = (
        torch.nn.functional.cross_entropy(x[0, :-1], tokens[0, 1:]).item()
        for x in (logits, expected)
    )
    assert loss == pytest.approx(expected_loss, abs=0.01)  # a perplexity within 1 %


def test_an_int8_cache_takes_at_most_56_percent_of_float16_scales_counted() -> None:
    sizes = {}
    for dtype in ("float16", "int8"):
        with built(kv_cache_dtype=dtype) as llama:
            sizes[dtype] = llama.memory()["cache_bytes"]
    assert sizes["int8"] <= 0.56 * sizes["float16"]


def test_an_int8_cache_traces_whole_and_follows_a_change_of_dtype() -> None:
    with built(kv_cache_dtype="int8") as llama:
        tokens = torch.tensor([PROMPT])
        expected = llama.model(tokens, 0)
        compiled = torch.compile(llama.model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(tokens, 0), expected, atol=ATOL, rtol=0)
        llama.model.to(torch.bfloat16)
        assert llama.model.layers[0].attention.cache_k.dtype == torch.int8
        # bfloat16 has 8 bits: the logits, about 10, move by a few tenths.
        torch.testing.assert_close(llama.model(tokens, 0), expected, atol=0.7, rtol=0)


def test_an_unknown_cache_dtype_is_refused_by_build() -> None:
    with pytest.raises(LlamaError, match="kv_cache_dtype 'int4': it must be one of float32"):
        built(kv_cache_dtype="int4")


# Bytes


def tensor_bytes(model: torch.nn.Module) -> tuple[int, int]:
    """Of the weights and of the cache, as the tensors say."""
    weights = {p.data_ptr(): p.nbytes for p in model.parameters()}
    caches = [b.nbytes for name, b in model.named_buffers() if "cache" in name or "scale" in name]
    return sum(weights.values()), sum(caches)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("ring", [{}, {"sliding_window": 7, "prefill_chunk": 5}])
def test_counted_bytes_are_those_of_the_tensors(dtype: str, cache_dtype: str, ring: dict) -> None:
    with built(dtype=dtype, kv_cache_dtype=cache_dtype, **ring) as llama:
        memory, args = llama.memory(), llama.model.params
        assert (memory["weights_bytes"], memory["cache_bytes"]) == tensor_bytes(llama.model)
        assert memory["weights_bytes"] == sizes.weights_bytes(args, dtype=getattr(torch, dtype))
        assert memory["used_bytes"] == 0
        llama.generate([PROMPT, PROMPT[:3]], 0)
        slots = min(len(PROMPT), args.n_slots) + 3
        used = sum(
            buffer[0, 0].nbytes * slots
            for layer in llama.model.layers
            for buffer in layer.attention.buffers(recurse=False)
        )
        assert llama.memory()["used_bytes"] == used
        llama.reset()
        assert llama.memory()["used_bytes"] == 0


def test_a_tied_output_layer_is_counted_once(tmp_path: Path) -> None:
    hf_model(tie_word_embeddings=True).save_pretrained(tmp_path)
    with built(tmp_path) as llama:
        weights = llama.memory()["weights_bytes"]
        assert weights == tensor_bytes(llama.model)[0]
        assert weights == sizes.weights_bytes(llama.model.params, dtype=torch.float32, tied=True)


def test_build_refuses_a_cache_that_does_not_fit_before_it_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with built(kv_cache_dtype="int8") as llama:
        memory = llama.memory()
        activations = sizes.activation_bytes(llama.model.params, torch.float32)
    needed = memory["weights_bytes"] + memory["cache_bytes"] + activations
    monkeypatch.setattr(sizes, "available_bytes", lambda _: needed)
    built(kv_cache_dtype="int8").close()
    monkeypatch.setattr(sizes, "available_bytes", lambda _: needed - 1)
    monkeypatch.setattr(load, "Transformer", None)
    size = re.escape(sizes.format_bytes(memory["cache_bytes"]))
    with pytest.raises(LlamaError, match=f"the cache {size} .*max_seq_len \\(128\\)"):
        built(kv_cache_dtype="int8")


# What it holds


def test_a_row_shows_its_tokens_and_views_of_its_keys_and_values() -> None:
    with built() as llama:
        llama.generate([PROMPT[:5], PROMPT], 0)
        row = llama.cache(1)
        assert (row.tokens, row.start) == (PROMPT, 0)
        assert len(row.keys) == len(row.values) == 6
        for layer, keys, values in zip(llama.model.layers, row.keys, row.values, strict=True):
            attention = layer.attention
            for shown, buffer in ((keys, attention.cache_k), (values, attention.cache_v)):
                assert shown.shape == (len(PROMPT), 4, 20)
                assert shown.data_ptr() == buffer[1].data_ptr()
        assert llama.cache(0).tokens == PROMPT[:5]
        llama.reset()
        assert llama.cache(1).tokens == []
        assert llama.cache(1).keys[0].shape == (0, 4, 20)
        with pytest.raises(LlamaError, match="row 2: the cache has 2 rows"):
            llama.cache(2)


def test_a_row_whose_ring_has_wrapped_is_shown_in_order_of_position() -> None:
    with built(sliding_window=7, prefill_chunk=5) as ring, built(sliding_window=7) as whole:
        for llama in (ring, whole):
            llama.generate([PROMPT], 0)
        row, expected = ring.cache(), whole.cache()
        assert row.start == len(PROMPT) - 11
        assert row.tokens == PROMPT[-11:]
        for shown, all_of_them in zip(
            row.keys + row.values, expected.keys + expected.values, strict=True
        ):
            torch.testing.assert_close(shown, all_of_them[-11:], atol=ATOL, rtol=0)


def test_a_row_of_an_int8_cache_is_shown_dequantized(llama: Llama) -> None:
    with built(kv_cache_dtype="int8") as narrow:
        for instance in (narrow, llama):
            instance.reset()
            instance.generate([PROMPT], 0)
        shown, expected = narrow.cache().keys[0], llama.cache().keys[0]
        assert shown.dtype == torch.float32
        # Half of a 127th of a head's largest value, and rounding of the scale.
        atol = float(expected.abs().amax()) / 127 * 0.6
        torch.testing.assert_close(shown, expected, atol=atol, rtol=0)


@pytest.mark.parametrize("kind", ["torch.cat", "none"])
def test_what_the_benchmark_compares_with_computes_the_same(
    kind: str, llama: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.tensor([PROMPT])
    expected = llama.model(tokens, 0)
    for name in ("write", "read"):
        monkeypatch.setattr(kv_cache, name, getattr(kv_cache, name))  # to be put back
    benchmark = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "kv_cache.py"))
    benchmark["use_another_cache"](kind)
    torch.testing.assert_close(llama.model(tokens[:, :-1], 0), expected[:, :-1], atol=ATOL, rtol=0)
    first = 0 if kind == "none" else len(PROMPT) - 1
    last = llama.model(tokens[:, first:], first, only_last=True)
    torch.testing.assert_close(last, expected[:, -1:], atol=ATOL, rtol=0)


# Its file

GO_ON = """
import sys
from llama import Llama
llama = Llama.build(max_seq_len=128, max_batch_size=2, dtype="float32", verbose=False)
llama.load_cache(sys.argv[1])
counts = []
embed = llama.model.tok_embeddings
embed.register_forward_pre_hook(lambda _, args: counts.append(args[0].numel()))
print(llama.generate([eval(sys.argv[2])], 20, temperature=0)[0][0], counts[0], sum(counts))
"""


def test_a_new_process_goes_on_from_a_saved_cache_and_reads_only_what_is_new(
    tmp_path: Path,
) -> None:
    file, prompt = tmp_path / "system.safetensors", [*PROMPT, 400, 401, 402]
    with built() as llama:
        expected = llama.generate([prompt], 20, temperature=0)[0][0]
        llama.reset()
        llama.generate([PROMPT], 0)
        llama.save_cache(file)
    process = subprocess.run(
        [sys.executable, "-c", GO_ON, str(file), str(prompt)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert process.stdout.strip() == f"{expected} 3 {3 + 19}"


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "float16"},
        {"sliding_window": 7, "prefill_chunk": 5},
        {"sliding_window": 7, "prefill_chunk": 5, "kv_cache_dtype": "int8"},
    ],
    ids=str,
)
def test_every_kind_of_cache_is_restored_as_it_was(options: dict, tmp_path: Path) -> None:
    prompts = [PROMPT, PROMPT[:3]]
    with built(**options) as llama, built(**options) as other:
        llama.generate(prompts, 0)
        llama.save_cache(tmp_path / "cache")
        other.load_cache(tmp_path / "cache")
        for layer, restored in zip(llama.model.layers, other.model.layers, strict=True):
            pairs = zip(
                layer.attention.buffers(recurse=False),
                restored.attention.buffers(recurse=False),
                strict=True,
            )
            assert all(torch.equal(a, b) for a, b in pairs)
        longer = [[*prompt, 5, 6] for prompt in prompts]
        counts = read_tokens(other)
        assert other.generate(longer, 9, temperature=0) == llama.generate(longer, 9, temperature=0)
        assert counts[0] == 2 * 2
    assert [file.name for file in tmp_path.iterdir()] == ["cache"]


def test_rows_that_are_not_in_the_file_keep_what_they_hold(tmp_path: Path) -> None:
    with built() as llama:
        llama.generate([PROMPT[:9]], 0)
        llama.save_cache(tmp_path / "cache")
        llama.reset()
        llama.generate([PROMPT[:2], [1, 400]], 0)
        llama.load_cache(tmp_path / "cache")
        assert held(llama) == [PROMPT[:9], [1, 400]]


def test_a_cache_may_be_restored_into_a_longer_one_and_not_into_a_shorter_one(
    tmp_path: Path,
) -> None:
    with built() as llama:
        llama.generate([PROMPT], 0)
        llama.save_cache(tmp_path / "cache")
    with built(max_seq_len=200, max_batch_size=1) as longer:
        longer.load_cache(tmp_path / "cache")
        assert longer.cache().tokens == PROMPT
    with built(max_seq_len=40) as shorter:
        with pytest.raises(
            LlamaError, match=r"row 0 .* holds 41 tokens, and does not fit .* 40 slots"
        ):
            shorter.load_cache(tmp_path / "cache")
        assert shorter.cache().tokens == []


def test_a_ring_that_has_wrapped_is_restored_only_into_one_of_its_size(tmp_path: Path) -> None:
    with built(sliding_window=7, prefill_chunk=5) as llama:
        llama.generate([PROMPT], 0)
        llama.save_cache(tmp_path / "cache")
    with (
        built(sliding_window=7, prefill_chunk=11) as larger,
        pytest.raises(LlamaError, match="n_slots '11', and this model has 17"),
    ):
        larger.load_cache(tmp_path / "cache")


def test_a_save_that_fails_half_way_leaves_the_file_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_the_disk(tensors: dict, file: Path, metadata: dict) -> None:
        file.write_bytes(b"half")
        raise OSError("no space left on the device")

    with built() as llama:
        llama.generate([PROMPT], 0)
        llama.save_cache(tmp_path / "cache")
        monkeypatch.setattr(prefix_cache, "save_file", fill_the_disk)
        with pytest.raises(LlamaError, match="cache' cannot be written: no space left"):
            llama.save_cache(tmp_path / "cache")
        llama.reset()
        llama.load_cache(tmp_path / "cache")
        assert llama.cache().tokens == PROMPT
    assert [file.name for file in tmp_path.iterdir()] == ["cache"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("saved") / "cache.safetensors"
    with built() as llama:
        llama.generate([PROMPT], 0)
        llama.save_cache(file)
    return file


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bfloat16"}, "with dtype 'float32', and this model has bfloat16"),
        ({"kv_cache_dtype": "int8"}, "with kv_cache_dtype 'float32', and this model has int8"),
        ({"sliding_window": 7}, "with sliding_window 'None', and this model has 7"),
    ],
)
def test_a_cache_of_another_dtype_or_window_is_refused(
    options: dict, message: str, saved: Path
) -> None:
    with built(**options) as llama, pytest.raises(LlamaError, match=message):
        llama.load_cache(saved)


def test_a_cache_of_another_model_is_refused_even_if_one_weight_differs(saved: Path) -> None:
    with built() as llama:
        llama.generate([PROMPT], 0)
        llama.model.layers[5].attention.wo.weight[0, 0] += 0.001
        with pytest.raises(LlamaError, match=r"with model '[0-9a-f]{16}', and this model has"):
            llama.load_cache(saved)
    folder = write_meta(saved.parent / "random")
    with built(folder) as llama, pytest.raises(LlamaError, match="with model"):
        llama.load_cache(saved)


@pytest.mark.parametrize("kept", [0, 5, 100, 10_000, -1])
def test_a_cache_file_that_is_truncated_is_refused_and_changes_nothing(
    kept: int, saved: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut"
    cut.write_bytes(saved.read_bytes()[:kept])
    with built() as llama:
        llama.generate([PROMPT[:7]], 0)
        with pytest.raises(LlamaError, match="truncated or not a cache file"):
            llama.load_cache(cut)
        assert llama.cache().tokens == PROMPT[:7]


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
def test_a_cache_that_cannot_be_written_is_said_so_and_leaves_nothing(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tensors: dict, path: Path, metadata: dict) -> None:
        if number == errno.ENOSPC:
            path.write_bytes(b"half")
        raise OSError(number, os.strerror(number))

    def cannot_remove(path: Path, missing_ok: bool = False) -> None:
        raise OSError(number, os.strerror(number))

    with built() as llama:
        llama.generate([PROMPT], 0)
        monkeypatch.setattr(prefix_cache, "save_file", fail)
        if number == errno.EROFS:
            monkeypatch.setattr(Path, "unlink", cannot_remove)
        with pytest.raises(LlamaError, match=f"cannot be written.*{os.strerror(number)}"):
            llama.save_cache(tmp_path / "cache")
    assert list(tmp_path.iterdir()) == []


def test_a_flipped_bit_is_noticed(saved: Path, tmp_path: Path) -> None:
    intact = saved.read_bytes()
    flipped = tmp_path / "flipped"
    with built() as llama:
        for place in range(8, len(intact), len(intact) // 40):
            damaged = bytearray(intact)
            damaged[place] ^= 4
            flipped.write_bytes(damaged)
            with pytest.raises(LlamaError):
                llama.load_cache(flipped)


def test_other_files_are_refused(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "page").write_text("<!doctype html>")
    save_file({"x": torch.zeros(3)}, tmp_path / "other")
    with safe_open(saved, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(saved)
    del tensors["0.layers.3.cache_v"]
    save_file(tensors, tmp_path / "gap", metadata)
    with built() as llama:
        for name, message in {
            "nothing": "does not exist: write it with save_cache",
            "": "is not a file",
            "page": "truncated or not a cache file",
            "other": "format None",
            "gap": "is damaged",
        }.items():
            with pytest.raises(LlamaError, match=message):
                llama.load_cache(tmp_path / name)
        with pytest.raises(LlamaError, match="is not a file: pass the path of a cache file"):
            llama.save_cache(tmp_path)


@pytest.mark.parametrize(
    "name", ["row -1", "row -5", "row x", "row 00", "scalar", "int64", "int32"]
)
def test_a_hostile_cache_file_with_a_right_checksum_is_refused_and_changes_nothing(
    name: str, saved: Path, tmp_path: Path
) -> None:
    with safe_open(saved, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(saved)
    if name.startswith("row"):
        row = name.split()[1]
        tensors = {f"{row}{key.removeprefix('0')}": value for key, value in tensors.items()}
    elif name == "scalar":
        tensors["0.tokens"] = torch.tensor(5)
    elif name == "int64":
        tensors = {key: value.to(torch.int64) for key, value in tensors.items()}
    else:
        tensors["0.tokens"] = tensors["0.tokens"].to(torch.int32)
    save_file(tensors, tmp_path / "hostile", {**metadata, "contents": _checksum(tensors)})
    with built() as llama:
        expected = llama.generate([PROMPT[:7]], 9, temperature=0)
        before = [buffer.clone() for buffer in buffers(llama)], llama.cache().tokens
        with pytest.raises(LlamaError, match="is damaged, or was not written by save_cache"):
            llama.load_cache(tmp_path / "hostile")
        assert all(map(torch.equal, buffers(llama), before[0]))
        assert llama.cache().tokens == before[1]
        assert llama.generate([PROMPT[:7]], 9, temperature=0) == expected


def test_a_path_that_cannot_be_written_is_named_and_not_a_temporary_one(tmp_path: Path) -> None:
    path = str(tmp_path / "nodir" / "x")
    with built() as llama:
        llama.generate([PROMPT], 0)
        with pytest.raises(LlamaError, match=f"^'{re.escape(path)}' cannot be written") as error:
            llama.save_cache(path)
    assert "unfinished" not in str(error.value)


def test_instances_may_save_to_one_path_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one begins and ends while the first one writes."""
    with built() as llama, built() as other:
        llama.generate([PROMPT], 0)
        other.generate([PROMPT[:9]], 0)

        def interrupted(tensors: dict, file: Path, metadata: dict) -> None:
            monkeypatch.setattr(prefix_cache, "save_file", save_file)
            save_file(tensors, file, metadata)
            other.save_cache(tmp_path / "cache")
            other.load_cache(tmp_path / "cache")
            assert held(other) == [PROMPT[:9]]

        monkeypatch.setattr(prefix_cache, "save_file", interrupted)
        llama.save_cache(tmp_path / "cache")
        other.reset()
        other.load_cache(tmp_path / "cache")
        assert held(other) == [PROMPT]
    assert [file.name for file in tmp_path.iterdir()] == ["cache"]


# What others write


def test_weights_written_while_a_stream_is_open_are_not_answered_from_the_cache() -> None:
    def write(llama: Llama) -> None:
        for attention in llama.model.attentions:
            with torch.no_grad():
                attention.wk.weight.mul_(-1)

    with built() as changed:
        write(changed)
        expected = changed.generate([PROMPT], 12, temperature=0)
    with built() as llama:
        stream = llama.stream([PROMPT], 12, temperature=0)
        next(stream)
        write(llama)
        stream.close()
        assert llama.generate([PROMPT], 12, temperature=0) == expected
    with built() as llama:  # a stream that stays open goes on with the new weights
        stream = llama.stream([PROMPT], 12, temperature=0)
        first = next(stream)
        write(llama)
        rest = [step[0] for step in stream]
        llama.reset()
        assert rest == llama.generate([[*PROMPT, *first]], 11, temperature=0)[0][0]


def test_rows_of_other_weights_are_neither_saved_nor_kept_when_a_file_is_loaded(
    tmp_path: Path,
) -> None:
    def write(llama: Llama) -> None:
        with torch.no_grad():
            llama.model.attentions[0].wk.weight.mul_(-1)

    with built() as changed:
        write(changed)
        changed.generate([PROMPT[:9]], 0)
        changed.save_cache(tmp_path / "changed")
    with built() as llama:
        llama.generate([PROMPT[:5], PROMPT], 0)
        write(llama)
        llama.load_cache(tmp_path / "changed")
        assert held(llama) == [PROMPT[:9]]
        write(llama)
        llama.save_cache(tmp_path / "back")
        llama.load_cache(tmp_path / "back")
        assert llama.memory()["used_bytes"] == 0


def test_reset_is_what_writes_through_data_need() -> None:
    with built() as llama:
        llama.generate([PROMPT], 0)
        llama.model.attentions[0].wk.weight.data.mul_(-1)
        llama.reset()
        counts = read_tokens(llama)
        llama.generate([PROMPT], 0)
        assert counts == [len(PROMPT)]
        assert ".data" in (Llama.reset.__doc__ or "")


def test_a_cache_that_is_loaded_or_reset_under_an_open_stream_does_not_change_its_answer(
    saved: Path,
) -> None:
    with built() as llama:
        prompts = [[1, 400, 401], [1, 500]]
        expected = llama.generate(prompts, 30, temperature=0)[0]
        stream = llama.stream(prompts, 30, temperature=0)
        steps = [next(stream)]
        llama.load_cache(saved)
        steps += [next(stream) for _ in range(17)]
        llama.reset()
        steps += list(stream)
    for row, answer in zip(zip(*steps, strict=True), expected, strict=True):
        assert [token for token in row if token is not None] == answer


def test_neither_dtype_nor_device_comes_from_the_callers_defaults(tmp_path: Path) -> None:
    options = {"kv_cache_dtype": "int8", "sliding_window": 7, "prefill_chunk": 5}
    with built(**options) as llama:
        expected = llama.generate([PROMPT, PROMPT[:5]], 9, temperature=0)
        kept = llama.cache()
    try:
        torch.set_default_dtype(torch.float16)
        torch.set_default_device("meta")
        with built(**options) as llama, built(**options, device="cpu") as other:
            assert llama.generate([PROMPT, PROMPT[:5]], 9, temperature=0) == expected
            row = llama.cache()
            assert row.tokens == kept.tokens
            assert all(map(torch.equal, row.keys + row.values, kept.keys + kept.values))
            llama.save_cache(tmp_path / "cache")
            other.load_cache(tmp_path / "cache")
            assert all(map(torch.equal, buffers(other), buffers(llama)))
            dtypes = {t.dtype for t in [*other.model.parameters(), *other.model.buffers()]}
            assert dtypes == {torch.float32, torch.int8, kv_cache.SCALE_DTYPE}
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


# Copies of a prefix


@pytest.mark.parametrize("cache_dtype", ["float32", "int8"])
@pytest.mark.parametrize("ring", [{}, {"sliding_window": 7, "prefill_chunk": 5}])
def test_a_prefix_is_copied_with_its_scales_and_a_wrapped_row_whole_or_not_at_all(
    ring: dict, cache_dtype: str
) -> None:
    with built(**ring, kv_cache_dtype=cache_dtype) as llama:
        cache, n_slots = llama.engine.cache, llama.model.params.n_slots
        wraps = len(PROMPT) > n_slots
        llama.generate([PROMPT], 0)
        source = next(row for row in (0, 1) if cache.rows[row])
        target = 1 - source
        empty = [buffer[target].clone() for buffer in buffers(llama)]
        length = 0 if wraps else 20
        assert cache.assign([*PROMPT[:20], 5], [target]) == (target, length)
        for buffer, before in zip(buffers(llama), empty, strict=True):
            assert torch.equal(buffer[target, :length], buffer[source, :length])
            assert torch.equal(buffer[target, length:], before[length:])
        assert cache.assign([*PROMPT, 5], [target]) == (target, len(PROMPT))
        assert cache.rows[target] == cache.rows[source] == PROMPT
        slots = min(len(PROMPT), n_slots)
        assert all(torch.equal(b[target, :slots], b[source, :slots]) for b in buffers(llama))
        assert all(b[target].any() for b in buffers(llama))


def test_a_prompt_whose_prefix_lies_in_a_busy_row_reads_only_the_rest() -> None:
    longer = [*PROMPT, 400, 401]
    with built(kv_cache_dtype="int8") as llama:
        expected = llama.generate([longer], 9, temperature=0)
        llama.reset()
        stream = llama.stream([PROMPT], 60, temperature=0)
        next(stream)
        llama.engine.passes.clear()
        assert llama.generate([longer], 9, temperature=0) == expected
        assert [n for kind, n in llama.engine.passes if kind == "prefill"] == [2]
        stream.close()


# Two ranks


def _on_two_ranks(rank: int, folder: Path, expected: list) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    options = {"sliding_window": 7, "prefill_chunk": 5}
    with built(**options) as llama:
        args, memory = llama.model.params, llama.memory()
        assert (memory["weights_bytes"], memory["cache_bytes"]) == tensor_bytes(llama.model)
        assert memory["weights_bytes"] == sizes.weights_bytes(args, dtype=torch.float32, ranks=2)
        assert memory["cache_bytes"] == sizes.cache_bytes(args, torch.float32) // 2
        assert llama.generate([PROMPT], 20, temperature=0)[0] == expected
        llama.reset()
        llama.generate([PROMPT[:-1]], 0)
        assert llama.cache().keys[0].shape == (11, 2, 20)
        llama.save_cache(folder / "cache")
    with built(**options) as llama:
        llama.load_cache(folder / "cache")
        counts = read_tokens(llama)
        assert llama.generate([PROMPT], 20, temperature=0)[0] == expected
        assert counts[0] == 1
    with built(kv_cache_dtype="int8") as llama:
        assert llama.memory()["cache_bytes"] == tensor_bytes(llama.model)[1]
        with pytest.raises(LlamaError, match="kv_cache_dtype 'float32', and this model has int8"):
            llama.load_cache(folder / "cache")
        shutil.copy(folder / f"cache.{1 - rank}", folder / f"swapped.{rank}")
        with pytest.raises(
            LlamaError, match=f"rank '{1 - rank} of 2', and this model has {rank} of 2"
        ):
            llama.load_cache(folder / "swapped")


def test_each_of_two_ranks_counts_shows_and_keeps_its_own_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with built(sliding_window=7, prefill_chunk=5) as llama:
        expected = llama.generate([PROMPT], 20, temperature=0)[0]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    context = mp.start_processes(_on_two_ranks, (tmp_path, expected), 2, join=False)
    deadline = time.monotonic() + 120
    while not context.join(timeout=1):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            pytest.fail("the ranks did not finish in 120 s")

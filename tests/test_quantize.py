"""Weights in 8 and 4 bits: what they lose, what they take, and that nothing else changes."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from llama import Llama, LlamaError, kernels, quantize
from llama.checkpoints.convert import convert
from llama.checkpoints.load import open_checkpoint
from llama.generation import STORIES

PROMPTS = ["Once upon a time", "Lily and Ben went to the"]
OUT, IN = 96, 384


@pytest.fixture(scope="module", params=quantize.KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def build(**options: Any) -> Llama:
    options = {"dtype": "float32", "max_seq_len": 128, "max_batch_size": 2, **options}
    return Llama.build(verbose=False, **options)


def dequantized(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Written out number by number."""
    if values.dtype == torch.int8:
        return values.double() * scales.double()[:, None]
    n, k, n_groups = len(values), 2 * values.shape[1], scales.shape[2]
    group, weight = k // n_groups, torch.empty(n, k, dtype=torch.float64)
    for i in range(n):
        for j in range(k):
            g, place = divmod(j, group)
            byte = int(values[i, g * group // 2 + place % (group // 2)])
            code = byte >> 4 if place >= group // 2 else byte & 15
            scale, zero = scales[:, i, g].double()
            weight[i, j] = code * scale + zero
    return weight


def layer(weight: torch.Tensor, kind: str) -> nn.Module:
    made = nn.Linear(1, 1, bias=False)
    quantize.install(made, quantize.quantize("w", weight, kind), torch.device("cpu"))
    return made.quantized


def perplexity(llama: Llama, tokens: torch.Tensor) -> float:
    with torch.inference_mode():
        logits = llama.model(tokens[:, :-1], 0)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).exp().item()


@pytest.mark.parametrize("k", [32, 64, 384])
def test_int8_is_off_by_half_a_step_at_most(k: int) -> None:
    weight = torch.randn(40, k)
    weight[3] = 0
    wide = dequantized(*quantize.quantize("w", weight, "int8"))
    step = weight.abs().amax(-1, keepdim=True) / 127
    assert ((wide - weight).abs() <= step / 2 + 1e-6).all()  # the step is rounded to float32
    assert (wide[3] == 0).all()


@pytest.mark.parametrize("k", [32, 64, 384])
def test_int4_errs_no_more_than_a_grid_over_the_whole_range_of_each_group(k: int) -> None:
    weight = torch.randn(40, k)
    weight[3] = 0
    wide = dequantized(*quantize.quantize("w", weight, "int4"))
    groups = weight.double().unflatten(1, (-1, quantize.group_size(k)))
    low, high = (x[..., None] for x in groups.aminmax(dim=-1))
    step = ((high - low) / 15).clamp_min(1e-30)
    grid = ((groups - low) / step).round() * step + low
    errors = [
        (x - weight).square().unflatten(1, (len(groups[0]), -1)).sum(-1)
        for x in (wide, grid.flatten(1))
    ]
    # The stored scales have 8 bits, those of the grid 53: some groups lose more than they gain.
    assert (errors[0] <= 1.5 * errors[1]).all()
    assert errors[0].sum() < 0.9 * errors[1].sum()
    assert (wide[3] == 0).all()


@pytest.mark.parametrize(("k", "group"), [(2048, 64), (576, 64), (288, 32), (160, 16), (80, 16)])
def test_a_group_is_the_largest_that_gives_a_row_eight_of_them(k: int, group: int) -> None:
    assert quantize.group_size(k) == group


def test_a_weight_of_several_tiles_is_quantized_as_if_it_were_one(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = torch.randn(160, 64), torch.randn(30, 64)
    whole = quantize.quantize("w", weight, kind)
    monkeypatch.setattr(kernels, "_choice", "torch")
    expected = quantize.cpu_linear(x, *whole)
    monkeypatch.setattr(quantize, "TILE_ROWS", 64)
    tiles = quantize.quantize("w", weight, kind)
    assert all(torch.equal(a, b) for a, b in zip(tiles, whole, strict=True))
    torch.testing.assert_close(quantize.cpu_linear(x, *whole), expected)


@pytest.mark.parametrize("group", [64, 32])
def test_values_are_dequantized_as_the_formula_says(kind: str, group: int) -> None:
    parts = quantize.quantize("w", torch.randn(24, 3 * group), kind)
    wide = quantize.dequantize(*parts, torch.float32)
    torch.testing.assert_close(wide.double(), dequantized(*parts), rtol=1e-6, atol=1e-6)
    ids = torch.tensor([[3, 0], [23, 3]])
    assert torch.equal(quantize.QuantizedWeight(*parts).rows(ids), wide[ids])


@pytest.mark.parametrize("choice", kernels.CHOICES)
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_every_form_multiplies_with_the_weight_that_it_stands_for(
    kind: str, rows: int, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_choice", choice)
    weight, x = torch.randn(OUT, IN), torch.randn(rows, 2, IN)
    expected = x.double() @ dequantized(*quantize.quantize("w", weight, kind)).T
    y = layer(weight, kind)(x)
    assert (y.dtype, y.shape) == (x.dtype, (rows, 2, OUT))
    # The kernels round x to 15 bits, relative to its largest number; torch computes in float32.
    assert (y - expected).norm() / expected.norm() < (2e-4 if choice == "auto" else 1e-6)


def test_rows_of_a_batch_do_not_depend_on_each_other(kind: str) -> None:
    form, x = layer(torch.randn(OUT, IN), kind), torch.randn(4, IN)
    alone = form(x[:1])
    x[1:] *= 1e4
    if kernels.available():
        assert torch.equal(form(x)[:1], alone)
    torch.testing.assert_close(form(x)[:1], alone)  # a BLAS may add in another order


def test_x_may_lie_in_memory_as_it_likes_and_be_one_row(kind: str) -> None:
    form, x = layer(torch.randn(OUT, IN), kind), torch.randn(IN, 3).T
    assert not x.is_contiguous()
    assert torch.equal(form(x), form(x.contiguous()))
    torch.testing.assert_close(form(x[0]), form(x[:1])[0])
    assert form(x[:0]).shape == (0, OUT)


def test_scales_do_not_follow_the_callers_default_dtype(kind: str) -> None:
    weight, expected = torch.randn(OUT, IN), quantize.stored("w", (OUT, IN), kind)
    torch.set_default_dtype(torch.float16)
    try:
        parts = quantize.quantize("w", weight, kind)
        y = layer(weight, kind)(weight[:2])
    finally:
        torch.set_default_dtype(torch.float32)
    for part, name in zip(parts, quantize.PARTS, strict=True):
        assert (tuple(part.shape), part.dtype) == expected[f"w.{name}"]
    assert torch.equal(y, layer(weight, kind)(weight[:2]))


def test_numbers_that_are_not_finite_stay_so(kind: str) -> None:
    form, x = layer(torch.randn(OUT, IN), kind), torch.randn(3, IN)
    x[0, 5], x[1, 5] = torch.nan, torch.inf
    y = form(x)
    assert not y[:2].isfinite().any(-1).any()
    assert y[2].isfinite().all()


def test_the_stories_lose_little(kind: str, llama: Llama) -> None:
    text = llama.text_completion(PROMPTS, max_gen_len=100, temperature=1.0, top_p=1.0, seed=3)
    ids = [llama.tokenizer.encode(t["generation"], bos=True)[:80] for t in text]
    tokens = torch.tensor([row for row in ids if len(row) == 80])
    assert len(tokens) > 0
    with build(quantize=kind) as quantized:
        ratio = perplexity(quantized, tokens) / perplexity(llama, tokens)
        # Bounds on what this small model loses: see benchmarks/README.md for what was measured.
        assert ratio < (1.005 if kind == "int8" else 1.015)
        used = quantized.memory()["weights_bytes"] / llama.memory()["weights_bytes"]
        assert used < (0.27 if kind == "int8" else 0.19)


def test_a_quantized_model_can_be_copied_pickled_and_cast_but_not_read(kind: str) -> None:
    with build(quantize=kind) as llama:
        tokens = torch.arange(5, 30)[None]
        expected = llama.model(tokens, 0)
        file = io.BytesIO()
        torch.save(llama.model, file)
        file.seek(0)
        copies = [copy.deepcopy(llama.model), torch.load(file, weights_only=False)]
        for model in copies:
            assert torch.equal(model(tokens, 0), expected)
        # bfloat16 keeps 8 bits; through the layers, that adds up to some hundredths.
        for dtype in (torch.bfloat16, torch.float64):
            cast = copies[0].to(dtype)(tokens, 0)
            assert (cast - expected).norm() / expected.norm() < 0.06
        with pytest.raises(LlamaError, match="quantized model has no state dict"):
            llama.model.state_dict()
        with pytest.raises(LlamaError, match="quantized model takes no state dict"):
            llama.model.load_state_dict({}, strict=False)
        for module in (llama.model.output, llama.model.tok_embeddings):
            assert not hasattr(module, "weight")
            with pytest.raises(LlamaError, match="this weight is quantized"):
                module.weight  # noqa: B018


def test_answers_and_the_cache_go_on_as_without(kind: str, tmp_path: Path) -> None:
    with build(quantize=kind) as llama:
        answers = llama.text_completion(PROMPTS, max_gen_len=20, temperature=0)
        llama.save_cache(tmp_path / "cache")
        again = llama.text_completion(PROMPTS, max_gen_len=20, temperature=0)
        assert again == answers
        streamed = "".join(llama.stream_text(PROMPTS[0], max_gen_len=20, temperature=0))
        assert streamed == answers[0]["generation"]
        other = next(k for k in quantize.KINDS if k != kind)
    with build(quantize=kind) as llama:
        llama.load_cache(tmp_path / "cache")
    with build(quantize=other) as llama, pytest.raises(LlamaError, match="was written with model"):
        llama.load_cache(tmp_path / "cache")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_quantized_folder_is_loaded_as_it_would_be_quantized(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    convert(str(STORIES), str(tmp_path / "q"), to="meta", quantize=kind)
    tokens = torch.arange(5, 30)[None]
    with build(quantize=kind, dtype=dtype) as llama:
        expected = llama.model(tokens, 0)
    with build(ckpt_dir=tmp_path / "q", dtype=dtype) as llama:
        assert torch.equal(llama.model(tokens, 0), expected)
    with build(ckpt_dir=tmp_path / "q", quantize=kind) as llama:
        assert llama.memory()["weights_bytes"] < 8323200 / 3


def test_a_part_of_a_quantized_folder_is_what_a_rank_would_make(tmp_path: Path) -> None:
    convert(str(STORIES), str(tmp_path / "q"), to="meta", quantize="int8", shards=2)
    full, quantized = open_checkpoint(STORIES), open_checkpoint(tmp_path / "q")
    for name in ("layers.0.attention.wo.weight", "layers.1.feed_forward.w1.weight"):
        for rank in (0, 1):
            made = full.read_quantized(name, "int8", rank, 2)
            kept = quantized.read_quantized(name, "int8", rank, 2)
            assert all(torch.equal(a, b) for a, b in zip(made, kept, strict=True))


def test_mistakes_are_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(LlamaError, match="quantize 'int3': it must be one of int8, int4, or None"):
        build(quantize="int3")
    source, target = str(STORIES), str(tmp_path / "q")
    with pytest.raises(LlamaError, match="a row of 40 weights does not divide into groups of 64, "):
        quantize.group_size(40)
    with pytest.raises(LlamaError, match="--to hf has no quantized layout: use --to meta"):
        convert(source, target, to="hf", quantize="int8")
    convert(source, target, to="meta", quantize="int8", shards=2)
    with pytest.raises(
        LlamaError, match="is quantized to int8 for 2 ranks, and there are 1: start 2"
    ):
        build(ckpt_dir=target)
    with pytest.raises(LlamaError, match=r"is quantized to int8, not 'int4'"):
        build(ckpt_dir=target, quantize="int4")
    with pytest.raises(LlamaError, match="is quantized and cannot be converted"):
        convert(target, str(tmp_path / "back"), to="meta")
    (tmp_path / "q" / "quantized.int8.00-of-02.safetensors").unlink()
    with pytest.raises(LlamaError, match=r"quantized.int8.00-of-02.safetensors is missing"):
        build(ckpt_dir=target)


def test_a_quantized_folder_of_another_shape_is_refused(tmp_path: Path) -> None:
    convert(str(STORIES), str(tmp_path / "q"), to="meta", quantize="int4")
    file = tmp_path / "q" / "params.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"n_layers": 9}))
    with pytest.raises(LlamaError, match=r"layers.6.attention.wq.weight.values is missing"):
        build(ckpt_dir=tmp_path / "q")


def test_a_quantized_folder_of_other_dtypes_or_with_more_in_it_is_refused(
    kind: str, tmp_path: Path
) -> None:
    convert(str(STORIES), str(tmp_path / "q"), to="meta", quantize=kind)
    [file] = (tmp_path / "q").glob("*.safetensors")
    whole = {name: tensor.clone() for name, tensor in load_file(file).items()}
    values, scales = (f"layers.0.attention.wq.weight.{part}" for part in quantize.PARTS)
    other = torch.uint8 if kind == "int8" else torch.int8
    for name, tensor, dtype in (
        (values, whole[values].view(other), str(whole[values].dtype)),
        (scales, whole[scales].half(), str(whole[scales].dtype)),
        ("norm.weight", whole["norm.weight"].to(torch.int8), ""),
    ):
        save_file({**whole, name: tensor}, file)
        must = f"{name} is {tensor.dtype}, and must be {dtype.removeprefix('torch.')}"
        with pytest.raises(LlamaError, match=must):
            build(ckpt_dir=tmp_path / "q")
    save_file({**whole, "layers.6.ffn_norm.weight": torch.ones(160)}, file)
    with pytest.raises(LlamaError, match=r"layers.6.ffn_norm.weight.*is not part of this model"):
        build(ckpt_dir=tmp_path / "q")

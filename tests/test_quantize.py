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

from llama import Llama, LlamaError, quantize
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
    n, group = len(values), 2 * values.shape[1] // len(scales)
    wide = torch.empty(n, 2 * values.shape[1], dtype=torch.float64)
    for i in range(n):
        for j in range(wide.shape[1]):
            code = int(values[i, j // 2]) >> 4 * (j % 2) & 15
            step, middle = scales[j // group, i].double()
            wide[i, j] = (code - 8) * step + middle
    return wide


def layer(weight: torch.Tensor, kind: str, device: str, name: str = "w2.weight") -> nn.Module:
    made = nn.Linear(1, 1, bias=False)
    parts = quantize.quantize(name, weight, kind)
    quantize.install(name, made, parts, torch.device(device))
    return made.quantized


def perplexity(llama: Llama, tokens: torch.Tensor) -> float:
    with torch.inference_mode():
        logits = llama.model(tokens[:, :-1], 0)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).exp().item()


@pytest.mark.parametrize("k", [32, 64, 384])
def test_a_weight_is_off_by_half_a_step_at_most(kind: str, k: int) -> None:
    weight = torch.randn(40, k)
    weight[3] = 0
    values, scales = quantize.quantize("w", weight, kind)
    wide = dequantized(values, scales)
    groups = weight.double().unflatten(1, (-1, quantize.group_size(k) if kind == "int4" else k))
    spread = groups.amax(-1) - groups.amin(-1)
    step = spread / 15 if kind == "int4" else groups.abs().amax(-1) / 127
    off = (wide - weight).abs().unflatten(1, groups.shape[1:]).amax(-1)
    # A bfloat16 step is off by a part in 256, of at most 8 steps, and the middle by as much of it.
    slack = groups.abs().amax(-1) / 100 + spread / 100 if kind == "int4" else 1e-6
    assert (off <= step / 2 + slack).all()
    assert (wide[3] == 0).all()


@pytest.mark.parametrize(("k", "group"), [(384, 128), (192, 64), (96, 32)])
def test_a_group_is_the_largest_that_divides_a_row(k: int, group: int) -> None:
    assert quantize.group_size(k) == group


def test_a_weight_of_several_tiles_is_quantized_as_if_it_were_one(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(160, 64)
    whole, product = quantize.quantize("w", weight, kind), layer(weight, kind, "cpu")
    monkeypatch.setattr(quantize, "TILE_ROWS", 64)  # of ATen's blocks for int4, too
    tiles = quantize.quantize("w", weight, kind)
    assert all(torch.equal(a, b) for a, b in zip(tiles, whole, strict=True))
    x = torch.randn(3, 64)
    assert torch.equal(layer(weight, kind, "cpu")(x), product(x))


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_every_form_multiplies_with_the_weight_that_it_stands_for(
    kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = torch.randn(OUT, IN), torch.randn(rows, 2, IN)
    expected = x.double() @ dequantized(*quantize.quantize("w", weight, kind)).T
    packed, one_digit = (layer(weight, kind, "cpu", f"{w}.weight")(x) for w in ("w2", "w1"))
    if kind == "int8":
        monkeypatch.setattr(quantize, "HAS_FBGEMM", False)
    else:
        weight = weight[: OUT - 16]  # 80 rows are no whole number of ATen's tiles
        expected = expected[..., : OUT - 16]
        packed, one_digit = packed[..., : OUT - 16], one_digit[..., : OUT - 16]
    plain = layer(weight, kind, "cpu")(x)
    assert plain.dtype == packed.dtype == x.dtype
    # The plain form computes in float32. The packed ones round x, ATen to bfloat16, FBGEMM to two
    # digits of 8 bits or to one (7 bits on CPUs without VNNI): of the product, in the mean square,
    # a few thousandths, a few hundred-thousandths, and a few thousandths.
    torch.testing.assert_close(plain.double(), expected, rtol=1e-4, atol=1e-4)
    off, off_one_digit = ((y - expected).norm() / expected.norm() for y in (packed, one_digit))
    assert off < (3e-4 if kind == "int8" else 0.006)
    assert off_one_digit < (0.015 if kind == "int8" else 0.006)


def test_rows_of_a_batch_do_not_depend_on_each_other(kind: str) -> None:
    form, x = layer(torch.randn(OUT, IN), kind, "cpu"), torch.randn(4, IN)
    alone = form(x[:1])
    x[1:] *= 1e4
    # The kernel for several rows may add in another order.
    torch.testing.assert_close(form(x)[:1], alone, rtol=1e-2 if kind == "int4" else 1e-5, atol=1e-4)


def test_x_may_lie_in_memory_as_it_likes_and_be_one_row(kind: str) -> None:
    form, x = layer(torch.randn(OUT, IN), kind, "cpu"), torch.randn(IN, 3).T
    assert not x.is_contiguous()
    assert torch.equal(form(x), form(x.contiguous()))
    assert torch.equal(form(x[0]), form(x[:1])[0])
    assert form(x[:0]).shape == (0, OUT)


def test_numbers_that_are_not_finite_stay_so(kind: str) -> None:
    form, x = layer(torch.randn(OUT, IN), kind, "cpu"), torch.randn(3, IN)
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
        assert ratio < (1.02 if kind == "int8" else 1.15)
        used = quantized.memory()["weights_bytes"] / llama.memory()["weights_bytes"]
        assert used < (0.27 if kind == "int8" else 0.17)


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
        # bfloat16 keeps 8 bits; through the layers, that adds up to some hundredths. A cast to
        # float64 shows the roundings of the kernels alone, which fall elsewhere.
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
    with pytest.raises(LlamaError, match="a row of 80 weights does not divide into groups of 128"):
        convert(source, target, to="meta", quantize="int4", shards=2)
    with pytest.raises(LlamaError, match="--to hf has no quantized layout: use --to meta"):
        convert(source, target, to="hf", quantize="int8")
    convert(source, target, to="meta", quantize="int8", shards=2)
    with pytest.raises(LlamaError, match="was quantized for 2 ranks, and there are 1: start 2"):
        build(ckpt_dir=target)
    with pytest.raises(LlamaError, match=r"quantize 'int4', and .* is quantized to int8"):
        build(ckpt_dir=target, quantize="int4")
    with pytest.raises(LlamaError, match="is quantized, and cannot be converted"):
        convert(target, str(tmp_path / "back"), to="meta")
    (tmp_path / "q" / "quantized.int8.00-of-02.safetensors").unlink()
    with pytest.raises(LlamaError, match=r"quantized.int8.00-of-02.safetensors is missing"):
        build(ckpt_dir=target)


def test_a_quantized_folder_of_another_shape_is_refused(tmp_path: Path) -> None:
    convert(str(STORIES), str(tmp_path / "q"), to="meta", quantize="int4")
    file = tmp_path / "q" / "params.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"n_layers": 9}))
    with pytest.raises(LlamaError, match="convert the full checkpoint again"):
        build(ckpt_dir=tmp_path / "q")


def test_a_quantized_folder_of_other_dtypes_or_with_more_in_it_is_refused(
    kind: str, tmp_path: Path
) -> None:
    convert(str(STORIES), str(tmp_path / "q"), to="meta", quantize=kind)
    [file] = (tmp_path / "q").glob("*.safetensors")
    whole = {name: tensor.clone() for name, tensor in load_file(file).items()}
    values, scales = (f"layers.0.attention.wq.weight.{part}" for part in quantize.PARTS)
    other = torch.uint8 if kind == "int8" else torch.int8
    for name, tensor in (
        (values, whole[values].view(other)),
        (scales, whole[scales].half()),
        ("norm.weight", whole["norm.weight"].to(torch.int8)),
    ):
        save_file({**whole, name: tensor}, file)
        with pytest.raises(LlamaError, match=f"^{name} is not .* convert the full checkpoint"):
            build(ckpt_dir=tmp_path / "q")
    save_file({**whole, "layers.6.ffn_norm.weight": torch.ones(160)}, file)
    with pytest.raises(LlamaError, match=r"layers.6.ffn_norm.weight, which is not of this model"):
        build(ckpt_dir=tmp_path / "q")

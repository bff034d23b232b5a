"""The C kernels: equal to float64 and to the mask rule, and absent without harm."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llama import LlamaError, kernels, kv_cache, quantize

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="there is no C compiler")


def attention_by_the_rule(
    q: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    scale_k: torch.Tensor | None,
    scale_v: torch.Tensor | None,
    first_row: int,
    positions: torch.Tensor,
    kv_len: int,
    window: int | None,
) -> torch.Tensor:
    rows = slice(first_row, first_row + len(q))
    keys = kv_cache.read(cache_k, scale_k, rows, kv_len, torch.float64)
    values = kv_cache.read(cache_v, scale_v, rows, kv_len, torch.float64)
    seen = kv_cache.visible(positions[:, None], cache_k.shape[1], kv_len, window)
    groups = q.double().unflatten(1, (cache_k.shape[2], -1))
    scores = groups @ keys.transpose(2, 3) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~seen[:, None], -math.inf).softmax(-1)
    return (weights @ values).flatten(1, 2)


def cache(
    dtype: torch.dtype, rows: int, n_slots: int, n_kv_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    x = torch.randn(rows, n_slots, n_kv_heads, head_dim)
    if dtype != torch.int8:
        return x.to(dtype), None
    scale = kv_cache.scale_of(x, kv_cache.SCALE_DTYPE)
    return kv_cache.quantize(x, scale).to(dtype), scale


@needs_kernels
@pytest.mark.parametrize("dtype", kv_cache.DTYPES.values(), ids=kv_cache.DTYPES)
@pytest.mark.parametrize("shape", [(4, 4, 64), (8, 2, 128), (1, 1, 100), (6, 3, 33)], ids=str)
@pytest.mark.parametrize(
    ("n_slots", "window", "positions"),
    [(300, None, (0, 299, 64)), (100, 40, (250, 13, 99)), (64, 64, (63, 64, 500))],
    ids=["full", "window", "ring"],
)
def test_decode_attention_is_the_mask_rule(
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    n_slots: int,
    window: int | None,
    positions: tuple[int, ...],
) -> None:
    n_heads, n_kv_heads, head_dim = shape
    (k, scale_k), (v, scale_v) = (cache(dtype, 5, n_slots, n_kv_heads, head_dim) for _ in "kv")
    q, last = 2 * torch.randn(3, n_heads, head_dim), torch.tensor(positions)
    kv_len = min(n_slots, max(positions) + 1)
    caches = k, v, scale_k, scale_v
    y = kernels.decode_attention(q, *caches, torch.arange(1, 4), last, kv_len, window)
    expected = attention_by_the_rule(q, *caches, 1, last, kv_len, window)
    # Sums of at most 300 numbers of about 1 in float32.
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    alone = kernels.decode_attention(q[1:2], *caches, torch.tensor([2]), last[1:2], kv_len, window)
    assert torch.equal(alone[0], y[1])


@needs_kernels
def test_decode_attention_is_one_operator_of_a_graph() -> None:
    (k, _), (v, _) = (cache(torch.float32, 2, 8, 2, 16) for _ in "kv")
    q, last = torch.randn(2, 4, 16), torch.tensor([3, 7])
    compiled = torch.compile(kernels.decode_attention, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        y = compiled(q, k, v, None, None, torch.arange(len(q)), last, 8, None)
    assert torch.equal(
        y, kernels.decode_attention(q, k, v, None, None, torch.arange(len(q)), last, 8, None)
    )


@needs_kernels
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_with_a_number_that_is_not_finite_attends_to_nothing_finite(bad: float) -> None:
    (k, _), (v, _) = (cache(torch.float32, 2, 8, 1, 16) for _ in "kv")
    q, last = torch.randn(2, 2, 16), torch.tensor([7, 7])
    q[0, 0, 3] = bad
    y = kernels.decode_attention(q, k, v, None, None, torch.arange(len(q)), last, 8, None)
    assert not y[0, 0].isfinite().any()
    assert y[0, 1].isfinite().all()
    assert y[1].isfinite().all()


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 100])
@pytest.mark.parametrize(("n", "k"), [(7, 96), (130, 1500), (33, 101)])
def test_a_float_product_is_that_of_float64(dtype: torch.dtype, rows: int, n: int, k: int) -> None:
    x, weight = torch.randn(rows, k), torch.randn(n, k).to(dtype)
    y = kernels.linear(x, weight, None)
    expected = x.double() @ weight.double().T
    assert (y - expected).norm() < 1e-6 * expected.norm()  # sums of 1500 numbers in float32
    assert torch.equal(kernels.linear(x[-1:], weight, None), y[-1:])


@needs_kernels
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 100])
@pytest.mark.parametrize(("n", "k"), [(7, 96), (130, 2112), (33, 101)])
def test_an_int8_product_is_the_same_for_any_rows_and_threads(rows: int, n: int, k: int) -> None:
    x, parts = torch.randn(rows, k), quantize.to_int8(torch.randn(n, k))
    y = kernels.linear(x, *parts)
    # As the kernel computes: 15 bits for x, exact sums of 1024 inputs, float32 above.
    scale = x.abs().amax(-1, keepdim=True) / 16383
    inverse = torch.tensor(16383.0) / x.abs().amax(-1, keepdim=True)
    integers = (x * inverse).round().double()
    sums = torch.zeros(rows, n)
    for inputs, values in zip(
        integers.split(1024, 1), parts[0].double().split(1024, 1), strict=True
    ):
        sums += (inputs @ values.T).float()
    assert torch.equal(y, sums * scale * parts[1])
    n_threads = torch.get_num_threads()
    torch.set_num_threads(n_threads % 2 + 1)
    try:
        assert torch.equal(kernels.linear(x, *parts), y)
    finally:
        torch.set_num_threads(n_threads)


@needs_kernels
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 40])
@pytest.mark.parametrize(("n", "k"), [(7, 96), (36, 1088), (130, 2048)])
def test_an_int4_product_is_that_of_its_dequantized_weight(rows: int, n: int, k: int) -> None:
    x, parts = torch.randn(rows, k), quantize.to_int4(torch.randn(n, k))
    y, expected = (
        kernels.linear(x, *parts),
        x.double() @ quantize.dequantize(*parts, x.dtype).double().T,
    )
    assert (y - expected).norm() < 2e-4 * expected.norm()  # x has 15 bits


@pytest.mark.parametrize(
    "script",
    ["exit 1", "sleep 100", "touch $3", "echo no library > $3", "kill -9 $$"],
    ids=["fails", "hangs", "makes-nothing", "makes-garbage", "dies"],
)
def test_a_compiler_that_does_not_work_means_no_kernels(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "TIMEOUT_S", 1.0)
    assert kernels._library.__wrapped__() is None
    assert list((tmp_path / "llama-kernels").iterdir()) == []


def test_a_library_that_others_may_write_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "llama-kernels").mkdir()
    (tmp_path / "llama-kernels").chmod(0o777)
    assert kernels._library.__wrapped__() is None
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")  # no folder can be made there
    assert kernels._library.__wrapped__() is None


def test_choices_are_checked_and_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_choice", "auto")
    kernels.select("torch")
    assert not kernels.available()
    with pytest.raises(LlamaError, match="kernels 'fast': it must be one of auto, torch"):
        kernels.select("fast")


FORKED = """
import os, torch
from llama import kernels
torch.set_num_threads(2)
x, w = torch.randn(4, 512), torch.randn(1024, 512)
y = kernels.linear(x, w, None)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(kernels.linear(x, w, None), y) else 1)
assert os.waitpid(child, 0)[1] == 0
maps = open("/proc/self/maps")
libraries = {line.split()[-1] for line in maps if "/torch/" in line and "gomp" in line}
assert len(libraries) == 1, libraries
"""


@needs_kernels
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads what Linux maps")
def test_a_forked_process_computes_and_torch_and_the_kernels_share_their_threads() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=60, env=environment)

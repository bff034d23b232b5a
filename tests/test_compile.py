"""A compiled decoding step: the answers of the model, and as many graphs as there are buckets."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from llama import Llama, LlamaError, kv_cache, quantize
from llama import compile as compiled
from llama.compile import bucket_lengths, require_compiler
from llama.generation import STORIES
from llama.parallel import layers

PROMPTS = ["Once upon a time", "Lily and Ben went to the park and saw", "The dog"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of the shipped model: the time goes into the compiler, once for each layer."""
    folder = shutil.copytree(STORIES, tmp_path_factory.mktemp("compile") / "m")
    params = json.loads((folder / "params.json").read_text())
    (folder / "params.json").write_text(json.dumps({**params, "n_layers": 2}))
    weights = torch.load(folder / "consolidated.00.pth", weights_only=True)
    kept = ("layers.0.", "layers.1.", "norm", "tok_embeddings", "output")
    weights = {name: tensor for name, tensor in weights.items() if name.startswith(kept)}
    torch.save(weights, folder / "consolidated.00.pth")
    return folder


def build(folder: Path, **options: Any) -> Llama:
    sizes = {"dtype": "float32", "max_seq_len": 96, "max_batch_size": 3, "verbose": False}
    return Llama.build(folder, **{**sizes, **options})


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def answers(llama: Llama, temperature: float) -> list[Any]:
    """Of batches of every size, prompts of several lengths, a stream, and a cached prefix."""
    found: list[Any] = [
        llama.text_completion(PROMPTS[:n], temperature=0, max_gen_len=40) for n in (1, 2, 3)
    ]
    story = llama.text_completion(["Tom had a red ball. " * 3], temperature=0, max_gen_len=50)
    found += [story, "".join(llama.stream_text(PROMPTS[2], temperature=temperature, seed=1))]
    return found


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(layers, "SMALL", 0)  # as with a model of a usual size


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"quantize": "int4"},
        {"sliding_window": 32, "prefill_chunk": 8, "kv_cache_dtype": "int8"},
    ],
    ids=["plain", "int4", "window"],
)
def test_answers_are_those_of_the_model_and_nothing_is_compiled_after_build(
    options: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "MIN_BUCKET", 48)
    # Sums in another order differ in the seventh digit. Where something is rounded to 8 bits, that
    # may tip a number over, which greedy answers bear, and a draw among many tokens does not. With
    # int4, 13 steps of this stream are equal to the last bit; then one number of the many that
    # ATen's kernel rounds to bfloat16 falls to the other side, the cache keeps what follows from
    # it, and logits differ by one bfloat16 step, 0.06, from there on. Two steps later two tokens
    # are 0.02 apart in a draw.
    temperature = 0 if options else 0.8
    with build(folder, **options) as llama:
        expected = answers(llama, temperature)
    with build(folder, **options, compile=True) as llama:
        assert llama.cache().tokens == []
        assert not any(b.any() for a in llama.model.attentions for b in a.buffers(recurse=False))
        n_graphs, buckets = graphs(), bucket_lengths(llama.model.params.n_slots)
        assert n_graphs == 2 * len(buckets)
        assert answers(llama, temperature) == expected
        assert graphs() == n_graphs
        llama.model(torch.tensor([[1, 2]]), 0)
        assert graphs() == n_graphs  # the model itself is as it was


def test_a_dtype_without_fast_products_is_compiled_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Traced as for Inductor, without the code that takes it a dozen seconds.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    with build(folder, dtype="float16", compile=True) as llama:
        n_graphs = graphs()
        for n in (1, 2, 3):
            llama.text_completion(PROMPTS[:n], temperature=0, max_gen_len=5)
        assert graphs() == n_graphs


@pytest.mark.parametrize("max_batch_size", [1, 2])
def test_small_batches_are_compiled_too_and_build_says_so(
    max_batch_size: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    with build(folder, max_batch_size=max_batch_size, compile=True, verbose=True) as llama:
        assert graphs() == max_batch_size
        assert "Compiled the decoding step in" in capsys.readouterr().out
        llama.text_completion(PROMPTS[:max_batch_size], temperature=0, max_gen_len=5)
        assert graphs() == max_batch_size


def test_any_number_of_models_is_compiled_in_one_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The limits are of graphs in all instances together. Tracing is enough to reach them.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    with torch._dynamo.config.patch(recompile_limit=1, accumulated_recompile_limit=3):
        for n in range(1, 6):
            build(folder, max_seq_len=32 * n, max_batch_size=1, compile=True).close()
            assert graphs() == n


@pytest.mark.parametrize("kind", [None, *quantize.KINDS])
def test_a_callers_own_compile_breaks_at_no_position_and_no_length(
    kind: str | None, folder: Path
) -> None:
    # A mask written out, and chunks, add in another order than one pass; quantized products round
    # their input, on an older CPU to 7 bits. One position off makes a difference of 4.
    atol = 2e-4 if kind is None else 0.25
    with build(folder, quantize=kind) as llama:
        compiled_model = torch.compile(llama.model, fullgraph=True, backend="eager")

        def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
            torch.testing.assert_close(actual, expected, atol=atol, rtol=0)

        for rows, start, length in ((1, 0, 10), (1, 10, 3), (2, 2, 5), (1, 13, 1)):
            tokens = torch.arange(5, 5 + rows * length).view(rows, length)
            close(compiled_model(tokens, start), llama.model(tokens, start))
        tokens = torch.arange(5, 14)[None]
        pieces = [compiled_model(tokens[:, start : start + 3], start) for start in (0, 3, 6)]
        close(torch.cat(pieces, dim=1), llama.model(tokens, 0))
        with pytest.raises(LlamaError, match="positions 90 to 99, and the cache has 96 slots"):
            llama.model(torch.zeros(1, 10, dtype=torch.int64), 90)


def test_under_other_settings_of_torch_the_model_runs_as_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(compiled, "MIN_BUCKET", 24)
    threads = torch.get_num_threads()
    with build(folder, compile=True) as llama:
        expected, n_graphs = answers(llama, 0), graphs()
        try:
            torch.set_num_threads(threads + 1)
            assert answers(llama, 0) == expected
        finally:
            torch.set_num_threads(threads)
        llama.model.double()
        assert answers(llama, 0) == expected
        assert graphs() == n_graphs


def test_a_caller_can_compile_the_model_beside_any_number_of_our_graphs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(compiled, "MIN_BUCKET", 48)
    limit = torch._dynamo.config.patch(recompile_limit=3)
    with limit, build(folder, compile=True) as llama:
        assert graphs() > 3
        tokens = torch.arange(5, 15)[None]
        whole = torch.compile(llama.model, fullgraph=True)
        assert torch.equal(whole(tokens, 0), llama.model(tokens, 0))


def test_a_compiled_write_puts_the_same_numbers_into_an_int8_cache() -> None:
    """A compiler leaves out a rounding that it sees undone, such as that of the scales."""
    x, rows, slots = torch.randn(64, 2, 4, 20), torch.arange(64)[:, None], torch.tensor([[1, 3]])
    found = []
    for write in (kv_cache.write, torch.compile(kv_cache.write, fullgraph=True)):
        cache = torch.zeros(64, 5, 4, 20, dtype=torch.int8)
        scales = torch.zeros(64, 5, 4, dtype=kv_cache.SCALE_DTYPE)
        write(cache, scales, x, rows, slots)
        found.append((cache, scales))
    (cache, scales), (compiled_cache, compiled_scales) = found
    assert torch.equal(compiled_scales, scales)
    assert torch.equal(compiled_cache, cache)


def test_nothing_is_compiled_without_being_asked_for(llama: Llama) -> None:
    before = graphs()
    llama.text_completion(PROMPTS, max_gen_len=5)
    assert graphs() == before


def test_a_compiler_that_is_switched_off_is_reported_in_a_sentence(folder: Path) -> None:
    off = torch._dynamo.config.patch(disable=True)  # what TORCH_COMPILE_DISABLE=1 sets
    with off, pytest.raises(LlamaError, match="switched off: unset TORCH_COMPILE_DISABLE"):
        build(folder, compile=True)


def test_a_missing_compiler_is_reported_in_a_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import cpp_builder, exc

    def missing() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    with pytest.raises(LlamaError, match=r"compile=True on cpu needs a C\+\+ compiler"):
        build(folder, compile=True)


def test_buckets_double_up_to_the_cache() -> None:
    assert bucket_lengths(100) == [100]
    assert bucket_lengths(512) == [512]
    assert bucket_lengths(1300) == [512, 1024, 1300]


def test_a_device_that_nothing_can_compile_for_is_refused_with_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.utils import _triton

    monkeypatch.setattr(_triton, "has_triton", lambda: False)
    for device, needed in (("cuda", "triton"), ("mps", "a CPU or a CUDA device")):
        with pytest.raises(LlamaError, match=rf"compile=True on {device} needs {needed}: install"):
            require_compiler(torch.device(device))
    monkeypatch.setattr(_triton, "has_triton", lambda: True)
    require_compiler(torch.device("cuda"))


def test_a_compiler_that_fails_is_reported_in_a_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError("no space left on the device")

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **_: compile(model, backend=broken))
    with pytest.raises(LlamaError, match=r"compiler for cpu failed \(.*no space left"):
        build(folder, compile=True)

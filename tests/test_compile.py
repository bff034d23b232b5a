"""A compiled decoding step: the answers of the model, and as many graphs as there are buckets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from llama import Llama, LlamaError, compiled
from llama.compiled import bucket_lengths

PROMPTS = ["Once upon a time", "Lily and Ben went to the park and saw", "The dog"]


def build(**options: Any) -> Llama:
    options = {"dtype": "float32", "max_seq_len": 96, "max_batch_size": 3, **options}
    return Llama.build(verbose=False, **options)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def answers(llama: Llama, temperature: float) -> list[Any]:
    """Of batches of every size, prompts of several lengths, a stream, and a cache gone on from."""
    found: list[Any] = [
        llama.text_completion(PROMPTS[:n], temperature=0, max_gen_len=40) for n in (1, 2, 3)
    ]
    story = llama.text_completion(["Tom had a red ball. " * 3], temperature=0, max_gen_len=50)
    found += [story, "".join(llama.stream_text(PROMPTS[2], temperature=temperature, seed=1))]
    return found


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()


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
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "SHORTEST", 48)
    # Sums in another order differ in the seventh digit. Where something is rounded to 8 bits, that
    # may tip a number over, which greedy answers bear, and a draw among many tokens does not.
    temperature = 0 if options else 0.8
    with build(**options) as llama:
        expected = answers(llama, temperature)
    with build(**options, compile=True) as llama:
        assert llama.cache().tokens == []
        n_graphs, buckets = graphs(), bucket_lengths(llama.model.params.n_slots)
        assert n_graphs == 2 * len(buckets)
        assert answers(llama, temperature) == expected
        assert graphs() == n_graphs
        llama.model(torch.tensor([[1, 2]]), 0)
        assert graphs() == n_graphs  # the model itself is as it was


def test_a_dtype_without_fast_products_is_compiled_too() -> None:
    with build(dtype="float16", compile=True) as llama:
        n_graphs = graphs()
        for n in (1, 2, 3):
            llama.text_completion(PROMPTS[:n], temperature=0, max_gen_len=5)
        assert graphs() == n_graphs


@pytest.mark.parametrize("max_batch_size", [1, 2])
def test_small_batches_are_compiled_too(max_batch_size: int) -> None:
    with build(max_batch_size=max_batch_size, compile=True) as llama:
        assert graphs() == max_batch_size
        llama.text_completion(PROMPTS[:max_batch_size], temperature=0, max_gen_len=5)
        assert graphs() == max_batch_size


def test_nothing_is_compiled_without_being_asked_for(llama: Llama) -> None:
    before = graphs()
    llama.text_completion(PROMPTS, max_gen_len=5)
    assert graphs() == before


def test_build_says_that_it_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    Llama.build(max_seq_len=32, max_batch_size=1, compile=True).close()
    assert "Compiled the decoding step in" in capsys.readouterr().out


def test_a_missing_compiler_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder, exc

    def missing() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    with pytest.raises(LlamaError, match=r"compile=True on cpu needs a C\+\+ compiler"):
        build(compile=True)


def test_buckets_double_up_to_the_cache() -> None:
    assert bucket_lengths(100) == [100]
    assert bucket_lengths(512) == [512]
    assert bucket_lengths(1300) == [512, 1024, 1300]

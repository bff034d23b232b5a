"""The engines that are compared compute the same, and a comparison has the figures it promises."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from llama import LlamaError

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import engines
import speed
import speed_weights

PROMPTS = [[1, 5, 300, 42, 7], [9, 8, 7, 6, 5]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed_weights, "CACHE", tmp_path_factory.mktemp("weights"))
        folder = speed_weights.meta("tiny", "float32")
        speed_weights.hugging_face(folder)
    return folder


def test_engines_that_are_compared_draw_the_same_tokens(folder: Path) -> None:
    case = {"folder": str(folder), "device": "cpu", "dtype": "float32", "batch": 2}
    case |= {"max_seq_len": 32, "quantize": None, "compile": False, "threads": 1}
    tokens = {
        name: [list(step) for step in engines.ENGINES[name](case).run(PROMPTS, 12)]
        for name in ("ours", "transformers", "original-loop")
    }
    assert len(tokens["ours"]) == 12
    assert tokens["transformers"] == tokens["ours"]
    assert tokens["original-loop"] == tokens["ours"]


def test_a_comparison_prints_ratios_for_each_peer_and_what_the_machine_allows(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speed_weights, "CACHE", folder.parent)
    limits = {"read_gb_per_s": 10.0, "copy_gb_per_s": 10.0, "matrix_gflop_per_s": 100.0}
    monkeypatch.setattr(speed, "machine_limits", lambda *_: limits)  # which takes a large buffer
    speed.main(shape="tiny", peers="original-loop", prompt_len=5, gen_len=4, rounds=2, threads=1)
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    for figure in ("prefill", "decode", "total"):
        medians = {name: median[figure] for name, median in found["median"].items()}
        ratio = medians["ours"] / medians["original-loop"]
        assert found["ratios"][figure] == {"original-loop": pytest.approx(ratio)}
    assert found["loaded"]["ours"].keys() == {"load_s", "peak_gb"}
    # All but the embedding, 512 x 256, of a model of two layers.
    layer = 2 * 256 * 256 + 2 * 256 * 4 * 32 + 3 * 256 * 704 + 2 * 256
    assert found["step_bytes"] == 4 * (2 * layer + 256 + 512 * 256)
    achieved = found["median"]["ours"]["decode"] * found["step_bytes"] / 1e9
    assert found["share_of_read"] == pytest.approx(achieved / limits["read_gb_per_s"])


def test_an_unknown_peer_is_named() -> None:
    with pytest.raises(SystemExit, match="'vllm' is none of the peers: transformers, llama-cpp"):
        speed.cases("vllm", Path(), {}, None, False)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"shape": "13b"}, "'13b' is none of tiny, 110m, 1b, 7b"),
        ({"shape": "tiny", "dtype": "float8"}, "--dtype float8: it must be one of float32"),
        ({"quantize": "int3"}, "--quantize int3: it must be one of int8, int4"),
        ({"batch": 3, "prompt_len": (8, 400)}, "each row has one length, above 0"),
        ({"batch": 0}, "each row has one length, above 0"),
        ({"gen_len": 1}, "--gen_len 1: decoding begins with the second token"),
        ({"weights_dtype": "float8"}, "'float8' is none of float32"),
        ({"rounds": 0}, "--rounds 0: it must be above 0"),
        ({"threads": 0}, "--threads 0: it must be above 0"),
        ({"device": "tpu"}, "device 'tpu' is not supported: pass 'cpu'"),
        ({"prompt_len": (8, 400), "plot": "p.png"}, "which a ragged batch does not"),
    ],
)
def test_an_option_that_cannot_be_is_refused_before_anything_is_made(
    options: dict[str, Any], why: str
) -> None:
    with pytest.raises((SystemExit, LlamaError), match=why):
        speed.main(**options)


def test_a_ragged_batch_has_no_share_in_decoding(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speed_weights, "CACHE", folder.parent)
    limits = {"read_gb_per_s": 10.0, "copy_gb_per_s": 10.0, "matrix_gflop_per_s": 100.0}
    monkeypatch.setattr(speed, "machine_limits", lambda *_: limits)
    speed.main(shape="tiny", prompt_len=(3, 7), gen_len=4, rounds=1, threads=1)
    *_, said, last = capsys.readouterr().out.splitlines()
    assert "a step; read 10.0" in said
    assert not json.loads(last).keys() & {"achieved_gb_per_s", "share_of_read", "share_of_copy"}


def test_a_peer_that_is_not_installed_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speed.importlib.util, "find_spec", lambda _: None)
    found = speed.cases("llama-cpp,transformers", Path(), {"dtype": "float32"}, None, False)
    assert list(found) == ["ours"]
    said = capsys.readouterr().out
    assert "llama-cpp: not installed" in said
    assert "transformers: not installed" in said

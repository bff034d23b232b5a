"""build: defaults, several in one process, what it leaves alone, what it refuses."""

from __future__ import annotations

import ast
import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import GOLDEN

import llama as package
from llama import Llama, LlamaError
from llama.generation import STORIES
from llama.parallel import groups as runtime

ROOT = Path(package.__file__).parent.parent


def python(code: str, *flags: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process of its own; fails unless it exits with 0."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *flags, "-c", code],
        capture_output=True,
        text=True,
        env=env,
        cwd=cwd,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_a_plain_script_prints_its_line_and_nothing_else_and_exits_cleanly(
    tmp_path: Path,
) -> None:
    """With every deprecation an error: none comes from our use of torch."""
    done = python(
        "from llama import Llama\n"
        "print(Llama.build().text_completion(['Once upon a time'], 0, max_gen_len=5))",
        *("-W", "error::DeprecationWarning:llama", "-W", "error::FutureWarning"),
        cwd=tmp_path,
    )
    loaded, answer = done.stdout.splitlines()
    assert loaded.startswith("Loaded in ")
    assert loaded.endswith(" seconds")
    assert ast.literal_eval(answer) == [
        {"generation": ", there was a little", "finish_reason": "length", "stop_reason": None}
    ]
    assert done.stderr == ""


def test_importing_and_building_leave_the_process_as_it_was() -> None:
    python(
        """
import logging, os, random, sys, torch
torch.manual_seed(5)
random.seed(5)
def state():
    return (torch.get_default_dtype(), torch.get_default_device(), id(sys.stdout), id(sys.stderr),
            id(sys.excepthook), logging.root.level, list(logging.root.handlers),
            torch.get_rng_state().tolist(), random.getstate(), torch.get_num_threads(),
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), dict(os.environ))
before = state()
from llama import Llama
assert state() == before, "import"
import llama.__main__
with Llama.build(seed=9) as llama:
    assert state() == before, "build"
    llama.text_completion(["a"], max_gen_len=5)
    for piece in llama.stream_text("a", max_gen_len=5):
        assert not torch.is_inference_mode_enabled()
    assert state() == before, "generate"
assert state() == before, "close"
"""
    )


def test_the_checks_hold_without_assertions() -> None:
    python(
        """
from llama import Llama, LlamaError
llama = Llama.build(max_seq_len=16, max_batch_size=1, verbose=False)
for call in (lambda: llama.generate([[5] * 17]), lambda: llama.generate([]),
             lambda: llama.generate([[5]], 1, -1.0), lambda: Llama.build("nowhere")):
    try:
        call()
    except AssertionError as error:
        if not isinstance(error, LlamaError):
            raise
    else:
        raise SystemExit("no error")
""",
        "-O",
    )


def test_a_second_build_in_one_process_leaves_the_first_one_alone() -> None:
    def defaults() -> tuple:
        return torch.get_default_dtype(), torch.get_default_device(), torch.get_rng_state().tolist()

    before = defaults()
    with Llama.build(max_seq_len=64, verbose=False) as first:
        prompt = [[1, 387, 391]]
        expected = first.generate(prompt, 20, temperature=0)
        second = Llama.build(GOLDEN / "rand_gqa", max_seq_len=32, verbose=False)
        third = Llama.build(max_seq_len=64, verbose=False)
        assert second.generate(prompt, 5, temperature=0) != expected
        assert first.generate(prompt, 20, temperature=0) == expected
        second.close()
        assert third.generate(prompt, 20, temperature=0) == expected
        third.close()
        assert first.generate(prompt, 20, temperature=0) == expected
    assert defaults() == before


def test_a_closed_instance_says_so_and_may_be_closed_again() -> None:
    llama = Llama.build(max_seq_len=16, verbose=False)
    llama.close()
    llama.close()
    calls = [
        lambda: llama.generate([[1]], 1),
        lambda: llama.text_completion(["a"]),
        lambda: llama.chat_completion([[{"role": "user", "content": "a"}]]),
        lambda: llama.stream([[1]], 1),
        llama.reset,
    ]
    for call in calls:
        with pytest.raises(LlamaError, match="closed: build another"):
            call()


def test_none_means_the_default_and_arguments_go_by_position() -> None:
    with Llama.build(None, None, None, None, None, 1, verbose=False) as llama:
        assert (llama.model.params.max_seq_len, llama.model.params.max_batch_size) == (512, 8)
        assert llama.model.output.weight.dtype == torch.float32 or torch.cuda.is_available()
    with Llama.build(str(STORIES), str(STORIES / "tokenizer.model"), 16, 2, 1, 7) as llama:
        assert llama.model.params.max_seq_len == 16


def test_ranks_compare_every_argument_that_has_to_be_the_same_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: dict[str, object] = {}
    monkeypatch.setattr(runtime, "check_same", compared.update)
    Llama.build(max_seq_len=16, max_batch_size=1, verbose=False).close()
    own = {"ckpt_dir", "tokenizer_path", "device", "verbose"}  # of each machine
    assert set(inspect.signature(Llama.build).parameters) - own <= set(compared)


def test_an_instance_is_made_of_a_model_and_a_tokenizer() -> None:
    with Llama.build(max_seq_len=32, verbose=False) as built:
        made = Llama(built.model, built.tokenizer)
        assert made.generate([[1, 5]], 5, seed=3) == built.generate([[1, 5]], 5, seed=3)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "fp16"])
def test_a_dtype_holds_for_weights_and_cache(name: str) -> None:
    with Llama.build(max_seq_len=32, max_batch_size=1, dtype=name, verbose=False) as llama:
        dtype = torch.bfloat16 if name == "bfloat16" else torch.float16
        assert {p.dtype for p in llama.model.parameters()} == {dtype}
        assert llama.model.layers[0].attention.cache_k.dtype == dtype
        logits = llama.model(torch.tensor([[1, 387]]), 0)
        assert logits.dtype == torch.float32
        answer = llama.text_completion(["Once upon a time"], 0, max_gen_len=4)[0]
        assert answer["generation"] == ", there was a"


def test_the_tokenizer_is_found_in_the_folder_above(tmp_path: Path) -> None:
    folder = tmp_path / "llama-2-tiny"
    folder.mkdir()
    for name in ("params.json", "consolidated.00.pth"):
        shutil.copy(GOLDEN / "rand_mqa" / name, folder)
    with pytest.raises(
        LlamaError, match=r"tokenizer.model.* nor in the folder above it.*pass tokenizer_path"
    ):
        Llama.build(folder, verbose=False)
    shutil.copy(GOLDEN / "rand_mqa" / "tokenizer.model", tmp_path)
    Llama.build(folder, max_seq_len=16, verbose=False).close()


def test_a_context_beyond_the_checkpoints_gets_one_warning(tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / "rand_mqa", tmp_path / "model")
    params = json.loads((folder / "params.json").read_text())
    (folder / "params.json").write_text(json.dumps({**params, "max_seq_len": 64}))
    with pytest.warns(UserWarning, match=r"max_seq_len 65 is beyond the 64") as caught:
        Llama.build(folder, max_seq_len=65, verbose=False).close()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    Llama.build(folder, max_seq_len=64, verbose=False).close()


BAD_BUILDS: list[tuple[str, Callable[[], object]]] = [
    (r"nowhere", lambda: Llama.build("nowhere")),
    (r"backslash", lambda: Llama.build(" --ckpt_dir", "x")),
    (r"backslash", lambda: Llama.build(None, " --tokenizer_path")),
    (r"max_seq_len 0", lambda: Llama.build(max_seq_len=0)),
    (r"max_batch_size 0", lambda: Llama.build(max_batch_size=0)),
    (r"sliding_window 0", lambda: Llama.build(sliding_window=0)),
    (r"prefill_chunk 0", lambda: Llama.build(prefill_chunk=0)),
    (r"model_parallel_size (is )?3", lambda: Llama.build(model_parallel_size=3)),
    (r"'int3' is unknown", lambda: Llama.build(dtype="int3")),
    (r"'abacus' is not supported", lambda: Llama.build(device="abacus")),
    (r"seed True", lambda: Llama.build(seed=True)),
    (r"is not a file", lambda: Llama.build(tokenizer_path="nowhere")),
    (r"kv_cache_dtype 'int4'", lambda: Llama.build(kv_cache_dtype="int4")),
    (r"timeout_s (is )?0", lambda: Llama.build(timeout_s=0)),
]


@pytest.mark.parametrize(("message", "build"), BAD_BUILDS, ids=[m for m, _ in BAD_BUILDS])
def test_a_build_that_cannot_be_is_refused_in_one_sentence(
    message: str, build: Callable[[], object]
) -> None:
    users = set(runtime._users)
    with pytest.raises(LlamaError, match=message) as caught:
        build()
    assert "\n" not in str(caught.value)
    assert runtime._users == users, "it has kept the process groups for itself"
    Llama.build(max_seq_len=16, verbose=False).close()


def test_a_folder_without_a_checkpoint_is_listed(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(LlamaError, match=r"notes\.txt"):
        Llama.build(tmp_path)


def test_a_tokenizer_with_more_pieces_than_the_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / "rand_mqa", tmp_path / "model")
    weights = torch.load(folder / "consolidated.00.pth", weights_only=True)
    for name in ("tok_embeddings.weight", "output.weight"):
        weights[name] = weights[name][:1000].clone()
    torch.save(weights, folder / "consolidated.00.pth")
    with pytest.raises(LlamaError, match=r"1024 tokens.*1000"):
        Llama.build(folder, verbose=False)


def test_memory_of_a_closed_instance_is_freed() -> None:
    def resident_bytes() -> int:
        status = Path("/proc/self/status")
        if not status.exists():
            pytest.skip("memory is read from /proc")
        [line] = [x for x in status.read_text().splitlines() if x.startswith("RssAnon")]
        return int(line.split()[1]) * 1024

    def peak_bytes() -> int:
        # Each buffer has 42 MB: what is below 32 MB, malloc may keep for the next time.
        with Llama.build(max_seq_len=16384, max_batch_size=8, verbose=False) as llama:
            for layer in llama.model.layers:
                layer.attention.cache_v.fill_(1)
            return resident_bytes()

    for _ in range(3):
        assert peak_bytes() - resident_bytes() > 240e6

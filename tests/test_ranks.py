"""Several ranks: the answers of one process, and an end to every run that cannot go on."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import cache

import pytest
import torch
from conftest import ATOL, GOLDEN
from rank_answers import answers, many, rounds
from spawn import Run, torchrun

from llama import Llama
from llama.generation import STORIES

OnRanks = Callable[[int], list[dict]]


def alike(a: object, b: object, where: str = "") -> None:
    """Equal, but for numbers, which are sums in another order and may be `ATOL` apart."""
    if isinstance(a, float):
        assert abs(a - b) <= ATOL, where
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, pair in enumerate(zip(a, b, strict=True)):
            alike(*pair, f"{where}[{i}]")
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            alike(a[key], b[key], f"{where}[{key!r}]")
    else:
        assert a == b, where


@pytest.fixture(scope="module")
def alone() -> dict:
    """What one process answers."""
    with Llama.build(max_batch_size=4, dtype="float32", verbose=False) as llama:
        found = answers(llama) | many(llama) | {"rounds": rounds(llama)}
    alike(found["continued"], found["read anew"])
    return json.loads(json.dumps(found))


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> OnRanks:
    """What each rank of a run with so many answers; one run for all tests that ask."""

    @cache
    def found(n_ranks: int) -> list[dict]:
        folder = tmp_path_factory.mktemp("answers")
        run = torchrun(n_ranks, "tests/rank_answers.py", folder)
        assert run.returncode == 0, run.stderr
        assert run.left == []
        builds = 2 if n_ranks == 4 else 1
        assert run.stdout.count("Loaded in ") == builds, "every rank has said so"
        assert "> initializing" not in run.stdout, "fairscale's lines"
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(n_ranks)]

    return found


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_every_rank_gives_the_answers_of_one_process(
    n_ranks: int, alone: dict, on_ranks: OnRanks
) -> None:
    for rank, found in enumerate(on_ranks(n_ranks)):
        alike(alone, {key: found[key] for key in alone}, f"rank {rank}: ")


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_a_step_sends_what_the_readme_says(n_ranks: int, on_ranks: OnRanks) -> None:
    args = json.loads((STORIES / "params.json").read_text())
    dim, n_layers, vocab_size = args["dim"], args["n_layers"], args["vocab_size"]
    for found in on_ranks(n_ranks):
        for rows, sent in found["sent"].items():
            # Numbers in float32, and an int64 token.
            expected = [(dim + vocab_size) // n_ranks * 4, n_layers * 2 * dim * 4, 8]
            assert sent == [int(rows) * size * (n_ranks > 1) for size in expected]


def test_the_model_compiles_whole_on_two_ranks(on_ranks: OnRanks) -> None:
    assert [found["compiles"] for found in on_ranks(2)] == [True, True]


def test_two_copies_of_the_model_share_the_prompts_and_every_rank_has_all_answers(
    alone: dict,
    on_ranks: OnRanks,
) -> None:
    for rank, found in enumerate(on_ranks(4)):
        alike({key: alone[key] for key in found["replicas"]}, found["replicas"], f"rank {rank}: ")


def test_copies_of_the_model_draw_differently_for_equal_prompts_and_alike_each_time(
    on_ranks: OnRanks,
) -> None:
    first, again = on_ranks(4)[0]["replicas sampled"]
    assert first == again
    assert all(found["replicas sampled"] == [first, again] for found in on_ranks(4))
    texts = [answer["generation"] for answer in first]
    assert texts[0] != texts[1], "prompt 0 went to one copy, and prompt 1 to the other"


def test_copies_of_the_model_that_are_given_different_prompts_say_so(on_ranks: OnRanks) -> None:
    for found in on_ranks(4):
        assert re.match(
            r"prompts is \[\[1, .* on rank 0 and .* on rank 2: ", found["replicas differ"]
        )


def test_ranks_whose_caches_differ_give_the_answer_of_a_cold_cache(on_ranks: OnRanks) -> None:
    first, second = (found["different caches"] for found in on_ranks(2))
    assert first == second
    cold, prompt_len = first.pop("cold")
    assert first.pop("equal") == [cold, 0], "equal caches hold the whole prompt"
    changed = first.pop("changed weight"), first.pop("changed weight, cold")
    assert changed[0] == changed[1] == [changed[0][0], prompt_len]
    assert changed[0][0] != cold
    for change, (answer, n_read) in first.items():
        assert answer == cold, change
        assert n_read == prompt_len, change


def test_copies_must_have_equally_many_ranks(on_ranks: OnRanks) -> None:
    for found in on_ranks(4):
        assert found["no divisor"].startswith(
            "model_parallel_size 3 does not divide the world size 4: "
        )


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("mistakes")
    other_weights = folder / "finetuned"
    shutil.copytree(STORIES, other_weights)
    file = other_weights / "consolidated.00.pth"
    tensors = torch.load(file, weights_only=True)
    tensors["norm.weight"][0] += 0.25
    torch.save(tensors, file)
    checkpoints = GOLDEN / "rand_gqa", other_weights, GOLDEN / "rand_mqa"
    run = torchrun(2, "tests/rank_mistakes.py", folder, *checkpoints)
    assert run.returncode == 0, run.stderr
    assert run.left == []
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        ("seed", "seed is 0 on rank 0 and 1 on rank 1: start every rank with the same "),
        ("max_seq_len", "max_seq_len is 256 on rank 0 and 257 on rank 1: start every rank "),
        ("dtype", "dtype is torch.float32 on rank 0 and torch.bfloat16 on rank 1: start "),
        ("shape", "dim is 160 on rank 0 and 64 on rank 1: start every rank with the same device, "),
        ("weights", "the checksum of the norms is "),
        ("heads", "1 key/value heads do not divide by 2 ranks: "),
        ("too many", "model_parallel_size 4 does not divide the world size 2: "),
        ("other size", "model_parallel_size is 1, but this process has groups of 2 already: "),
        ("prompts", "prompts is [[1, 300]] on rank 0 and [[1, 301]] on rank 1: start every "),
        ("temperature", "temperature is 0.5 on rank 0 and 1.5 on rank 1: start every rank "),
        ("drawn", "seed is 0 on rank 0 and 1 on rank 1: start every rank with the same "),
        ("stream", "a stream of this instance is still open: exhaust it, or close() it"),
    ],
)
def test_ranks_that_are_not_alike_are_told_what_differs(
    mistake: str, sentence: str, mistakes: list[dict]
) -> None:
    for found in mistakes:
        assert found[mistake].startswith(sentence)


def test_after_all_of_these_mistakes_the_ranks_still_answer(
    mistakes: list[dict], llama: Llama
) -> None:
    expected, _ = llama.generate([[1, 300]], 4, temperature=0)
    assert [found["still right"] for found in mistakes] == [expected, expected]


def test_rank_0_alone_is_asked_for_input_may_take_its_time_and_ends_all(
    mistakes: list[dict],
) -> None:
    assert [found["read"] for found in mistakes] == [["first", "second", "end", "slow"]] * 2


def fault(name: str, where: str) -> Run:
    run = torchrun(2, "tests/rank_faults.py", name, where, timeout_s=90)
    assert run.returncode != 0
    assert "unharmed" not in run.stdout
    assert run.left == []
    return run


@pytest.mark.parametrize("where", ["loading", "generation"])
def test_an_exception_on_one_rank_is_seen_and_ends_all(where: str) -> None:
    stderr = fault("raise", where).stderr
    assert "OSError: the cosmic ray of the test" in stderr


def test_a_killed_rank_ends_all() -> None:
    assert "Signal 9 (SIGKILL) received" in fault("kill", "generation").stderr


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        (
            "before",
            "rank 0 waited 5 s in build for ranks [1]: see what they do, and call build",
        ),
        (
            "generation",
            "rank 0 waited for the other ranks' parts of the model, but a rank ended or did ",
        ),
    ],
)
def test_a_rank_that_stays_silent_is_named_by_the_one_that_waits(where: str, sentence: str) -> None:
    assert sentence in fault("sleep", where).stderr

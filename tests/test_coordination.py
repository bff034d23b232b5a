"""What ranks tell each other outside the forward pass, on two ranks without a model."""

from __future__ import annotations

import json

import pytest
from spawn import torchrun


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("coordination")
    run = torchrun(2, "tests/rank_coordination.py", folder)
    assert run.returncode == 0, run.stderr
    assert run.left == []
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_equal_caches_are_shared_whole_after_one_gather(ranks: list[dict]) -> None:
    assert [found["equal"] for found in ranks] == [[[3, 2, 0, 3, 4, 5], 1]] * 2


def test_different_caches_are_shared_as_far_as_every_rank_holds_them(ranks: list[dict]) -> None:
    assert [found["different"] for found in ranks] == [[[2, 2, 0, 3, 0, 5], 2]] * 2


def test_the_first_argument_that_differs_is_named(ranks: list[dict]) -> None:
    for found in ranks:
        assert found["call"].startswith("prompts is [[1, 0]] on rank 0 and [[1, 1]] on rank 1: ")


def test_all_ranks_take_the_tokens_of_rank_0(ranks: list[dict]) -> None:
    assert [found["drawn"] for found in ranks] == [[10, 20]] * 2


def test_replicas_answer_their_parts_and_fail_together(ranks: list[dict]) -> None:
    for found in ranks:
        assert found["doubled"] == [0, 2, 4, 6, 8]
        assert found["unlucky"] == "13 is unlucky, says rank 1"
        assert found["other seed"].startswith("seed is 0 on rank 0 and 1 on rank 1: ")


def test_groups_that_are_in_use_keep_their_size(ranks: list[dict]) -> None:
    for found in ranks:
        assert found["impossible"].startswith(
            "model_parallel_size is 2, but this process has groups of 1 already: pass 1, or close "
        )


def test_events_arrive_after_any_idle_time(ranks: list[dict]) -> None:
    assert ranks[1]["received"] == [{"text": "first"}, None, "last"]


def test_a_rank_0_that_is_silent_or_has_ended_is_noticed(ranks: list[dict]) -> None:
    sentence = "rank 1 waited for a heartbeat of rank 0, but a rank ended or did not answer within "
    assert ranks[1]["silent"].startswith(sentence + "1 s: ")
    assert ranks[1]["ended"].startswith(sentence + "60 s: ")
    assert ranks[1]["soon"]

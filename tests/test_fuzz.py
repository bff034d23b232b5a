"""Any mix of arguments within bounds: a well-formed answer; and a long life equals a fresh one.

The draws are the same in each run.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_meta
from conftest import GOLDEN, drain
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from llama import Llama, LlamaError
from llama.detokenizer import Detokenizer
from llama.sampling import SamplingParams, sample

settings.register_profile(
    "fuzz",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
FUZZ = settings.get_profile("fuzz")
TOKENIZER = GOLDEN / "rand_gqa" / "tokenizer.model"
VOCAB, ROWS, LENGTH = 1024, 3, 40  # of the small instances
# One row alone, with others, from a cache or anew: float32 sums in other orders.
ATOL = 1e-4


ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=LENGTH // 2)
prompt_lists = st.lists(ids, min_size=1, max_size=ROWS)
plain = st.text("abcdefgh \n.,é🐶", max_size=12)
text_lists = st.lists(plain, min_size=1, max_size=ROWS + 2)
turns = st.lists(plain.map(str.strip), min_size=1, max_size=3).map(
    lambda t: t[: len(t) // 2 * 2 + 1]
)


def dialog_of(contents: list[str], system: bool) -> list[dict[str, str]]:
    """User and assistant in turn, and sometimes a system message in front."""
    contents = contents if len(contents) % 2 else contents[:-1]
    roles = ["user", "assistant"] * len(contents)
    dialog = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return [{"role": "system", "content": "Be brief."}] * system + dialog


dialogs = st.builds(dialog_of, turns, st.booleans())
dialog_lists = st.lists(dialogs, min_size=1, max_size=ROWS + 1)


OPTIONS: dict[str, st.SearchStrategy] = {
    "max_gen_len": st.integers(0, 6),
    "temperature": st.sampled_from([0, 0.0, 0.6, 1, 30.0, 1e-300]),
    "top_p": st.sampled_from([0, 0.3, 0.9, 1]),
    "logprobs": st.booleans(),
    "echo": st.booleans(),
    "seed": st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
    "stop": st.one_of(st.none(), st.lists(st.text("aeth .", min_size=1, max_size=3), max_size=3)),
    "stop_tokens": st.one_of(st.none(), st.lists(st.integers(0, VOCAB - 1), max_size=300)),
    "allow_tags": st.booleans(),
}
COMMON = ["max_gen_len", "temperature", "top_p", "seed"]
CALLS: dict[str, tuple[st.SearchStrategy, list[str]]] = {
    "generate": (prompt_lists, [*COMMON, "logprobs", "echo", "stop_tokens"]),
    "stream": (prompt_lists, [*COMMON, "logprobs", "stop_tokens"]),
    "text_completion": (text_lists, [*COMMON, "logprobs", "echo", "stop"]),
    "stream_text": (plain, [*COMMON, "stop"]),
    "chat_completion": (dialog_lists, [*COMMON, "logprobs", "stop", "allow_tags"]),
    "stream_chat": (dialogs, [*COMMON, "stop", "allow_tags"]),
}


def calls(*names: str) -> st.SearchStrategy:
    """A call by its name, its prompts, and any mix of its options."""
    return st.sampled_from(names or list(CALLS)).flatmap(
        lambda name: st.tuples(
            st.just(name),
            CALLS[name][0],
            st.fixed_dictionaries(
                {"max_gen_len": OPTIONS["max_gen_len"]},
                optional={k: OPTIONS[k] for k in CALLS[name][1][1:]},
            ),
        )
    )


def make(llama: Llama, call: tuple[str, Any, dict[str, Any]]) -> Any:
    """The answer to a call; of a stream, all that it yields, and what it returns."""
    name, subject, options = call
    found = getattr(llama, name)(subject, **options)
    return drain(found) if isinstance(found, Generator) else found


def attempt(function: Callable[[], Any]) -> tuple[Any, str | None]:
    """What a function returns, or how it refuses to."""
    try:
        return function(), None
    except LlamaError as error:
        return None, str(error)


def same(a: Any, b: Any) -> bool:
    """Are two answers equal, and their logprobs nearly so?"""
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= ATOL
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def check_answer(call: tuple[str, Any, dict[str, Any]], answer: Any) -> None:
    """What holds of any answer, whatever was asked."""
    name, subject, options = call
    logprobs = options.get("logprobs", False)
    if name == "generate":
        tokens, values = answer
        assert len(tokens) == len(subject)
        assert (values is not None) == logprobs
        check_rows(tokens, values or [[0.0] * len(row) for row in tokens])
    elif name == "stream":
        steps, result = answer
        assert all(len(step) == len(subject) for step in steps)
        assert all(reason in ("stop", "length") for reason in result["finish_reasons"])
        rows = [[t for t in row if t is not None] for row in zip(*steps, strict=True)]
        rows = rows or [[] for _ in subject]
        check_rows(rows, result["logprobs"] or [[0.0] * len(row) for row in rows])
    elif name.startswith("stream"):
        pieces, prediction = answer
        assert "".join(pieces) == prediction["generation"]
        check_prediction(prediction, logprobs=False)
    else:
        assert len(answer) == len(subject)
        for prediction in answer:
            if name == "chat_completion":
                assert prediction["generation"]["role"] == "assistant"
                prediction = prediction | {"generation": prediction["generation"]["content"]}
            check_prediction(prediction, logprobs=logprobs)


def check_rows(tokens: list[list[int]], logprobs: list[list[float]]) -> None:
    for row, values in zip(tokens, logprobs, strict=True):
        assert all(type(token) is int and 0 <= token < VOCAB for token in row)
        assert len(values) == len(row)
        assert all(-math.inf < value <= 0 for value in values)


def check_prediction(prediction: dict[str, Any], *, logprobs: bool) -> None:
    assert isinstance(prediction["generation"], str)
    assert prediction["finish_reason"] in ("stop", "length")
    assert ("tokens" in prediction) == ("logprobs" in prediction) == logprobs
    if logprobs and prediction["tokens"]:
        assert "".join(prediction["tokens"]) == prediction["generation"]
        assert len(prediction["logprobs"]) == len(prediction["tokens"])
        assert all(-math.inf < value <= 0 for value in prediction["logprobs"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_meta(tmp_path_factory.mktemp("fuzz") / "tiny")


def build(folder: Path, **options: Any) -> Llama:
    sizes = {"max_seq_len": LENGTH, "max_batch_size": ROWS, "verbose": False}
    return Llama.build(folder, TOKENIZER, **{**sizes, **options})


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Iterator[Llama]:
    with build(folder) as llama:
        yield llama


GOOD = (
    "text_completion",
    ["Once upon a time", "a"],
    {"max_gen_len": 4, "seed": 3, "logprobs": True},
)


@settings(FUZZ, max_examples=100)
@given(call=calls())
def test_any_call_is_answered_or_too_long_and_the_next_one_is_right(
    tiny: Llama, call: tuple[str, Any, dict[str, Any]]
) -> None:
    tiny.reset()
    expected = make(tiny, GOOD)
    answer, refusal = attempt(lambda: make(tiny, call))
    if refusal is None:
        check_answer(call, answer)
    else:
        assert "max_seq_len is" in refusal
    assert same(make(tiny, GOOD), expected)


@settings(FUZZ, max_examples=60)
@given(ids=ids)
def test_any_ids_decode_one_by_one_to_the_text_of_all(tiny: Llama, ids: list[int]) -> None:
    decoder = Detokenizer(tiny.tokenizer)
    pieces = [decoder.push(id) for id in ids]
    assert "".join(pieces) + decoder.finish() == tiny.tokenizer.decode(ids)


floats = st.floats(width=32)


@settings(FUZZ, max_examples=100)
@given(
    rows=st.integers(1, 9).flatmap(
        lambda n: st.lists(st.lists(floats, min_size=n, max_size=n), min_size=1, max_size=3)
    ),
    temperature=st.one_of(st.just(0.0), st.floats(0, 1e38)),
    top_p=st.floats(0, 1),
)
def test_any_logits_give_a_token_that_they_allow_or_none(
    rows: list[list[float]], temperature: float, top_p: float
) -> None:
    logits = torch.tensor(rows)
    waits = torch.empty_like(logits).exponential_(generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(temperature, top_p)] * len(rows)
    for row, token in zip(logits, sample(logits, params, waits).tolist(), strict=True):
        # -inf excludes a token; NaN, inf, or nothing left: no token.
        assert (token == -1) == (not row.amax().isfinite())
        assert token == -1 or row[token].isfinite()


BUILD: dict[str, st.SearchStrategy] = {
    "max_seq_len": st.integers(1, 64),
    "max_batch_size": st.integers(1, 4),
    "model_parallel_size": st.sampled_from([None, 1]),
    "seed": st.integers(0, 9),
    "device": st.sampled_from([None, "cpu", torch.device("cpu")]),
    "dtype": st.sampled_from([None, "float32", torch.bfloat16]),
    "sliding_window": st.one_of(st.none(), st.integers(1, 80)),
    "prefill_chunk": st.one_of(st.none(), st.integers(1, 40)),
    "kv_cache_dtype": st.sampled_from([None, "int8", "float16", torch.float32]),
    "quantize": st.sampled_from([None, "int8", "int4"]),
    "timeout_s": st.sampled_from([5, 600.0]),
    "check_ranks": st.booleans(),
    "verbose": st.just(False),
}


@settings(FUZZ, max_examples=60)
@given(
    options=st.fixed_dictionaries({}, optional=BUILD),
    call=calls(),
)
def test_whatever_build_is_given_it_refuses_or_builds_what_answers(
    folder: Path, options: dict[str, Any], call: tuple[str, Any, dict[str, Any]]
) -> None:
    state = torch.get_rng_state()
    with contextlib.redirect_stdout(io.StringIO()):
        llama, refusal = attempt(lambda: build(folder, **options))
    if refusal is not None:
        assert 0 < len(refusal) < 1000
    else:
        with llama, contextlib.suppress(LlamaError):  # a prompt may be too long for it
            check_answer(call, make(llama, call))
        with pytest.raises(LlamaError, match="closed"):
            llama.memory()
    assert torch.equal(torch.get_rng_state(), state)


# The ends of what is allowed.


@pytest.mark.parametrize("character", ["a", "\0", " ", "\u202e", "\U0001f436", "\n"])
def test_a_megabyte_of_one_character_is_refused_by_its_length(tiny: Llama, character: str) -> None:
    tiny.reset()
    expected = make(tiny, GOOD)
    long = character * (10**6 // len(character.encode()))
    with pytest.raises(LlamaError, match="tokens, and max_seq_len is"):
        tiny.text_completion([long])
    with pytest.raises(LlamaError, match="tokens, and max_seq_len is"):
        tiny.stream_chat([{"role": "user", "content": f"a{long}a"}])
    assert make(tiny, ("text_completion", ["a"], {"stop": [long], "max_gen_len": 3}))
    assert same(make(tiny, GOOD), expected)


def test_a_dialog_of_ten_thousand_turns_is_refused_by_its_length(tiny: Llama) -> None:
    dialog = dialog_of(["Hello!"] * 10_001, True)
    with pytest.raises(LlamaError, match=r"dialog 0 has .* tokens, and max_seq_len is"):
        tiny.chat_completion([dialog])


def test_a_cache_of_one_position_scores_and_answers_nothing(folder: Path) -> None:
    with build(folder, max_seq_len=1, max_batch_size=1) as llama:
        assert llama.generate([[1]], logprobs=True, echo=True) == ([[1]], [[0.0]])
        assert llama.text_completion([""]) == [
            {"generation": "", "finish_reason": "length", "stop_reason": None}
        ]
        assert drain(llama.stream([[7]]))[0] == []
        with pytest.raises(LlamaError, match="2 tokens, and max_seq_len is 1"):
            llama.generate([[1, 2]])


# A long life of one instance, beside another one that forgets everything before each call.


class Life(RuleBasedStateMachine):
    """Calls, streams that are left or closed or gone on with, files, mistakes, in any order."""

    options: dict[str, Any]
    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.llama, self.forgetful = (build(self.folder, **self.options) for _ in range(2))
        self.file = self.folder / f"cache-{id(self)}.safetensors"
        self.saved: list[list[int]] | None = None
        self.streams: tuple[Generator, Generator] | None = None  # of the two instances

    def teardown(self) -> None:
        self.close_stream()
        self.llama.close()
        self.forgetful.close()
        self.file.unlink(missing_ok=True)

    def held_rows(self) -> list[list[int]]:
        return [self.llama.cache(row).tokens for row in range(ROWS)]

    @rule(call=calls("generate", "text_completion", "chat_completion"))
    def answer(self, call: tuple[str, Any, dict[str, Any]]) -> None:
        self.close_stream()
        self.forgetful.reset()
        both = (self.llama, self.forgetful)
        answers = [attempt(lambda llama=llama: make(llama, call)) for llama in both]
        assert same(*answers)

    @precondition(lambda self: self.streams is None)
    @rule(call=calls("stream", "stream_text", "stream_chat"))
    def open_stream(self, call: tuple[str, Any, dict[str, Any]]) -> None:
        name, subject, options = call
        self.forgetful.reset()
        with contextlib.suppress(LlamaError):
            opened = [getattr(x, name)(subject, **options) for x in (self.llama, self.forgetful)]
            self.streams = opened[0], opened[1]

    @precondition(lambda self: self.streams is not None)
    @rule(steps=st.integers(1, 5))
    def go_on(self, steps: int) -> None:
        assert self.streams is not None
        for _ in range(steps):
            ours, theirs = (next(stream, None) for stream in self.streams)
            assert ours == theirs
            if ours is None:
                self.streams = None
                return

    @rule()
    def close_stream(self) -> None:
        for stream in self.streams or ():
            stream.close()
        self.streams = None

    @rule()
    def leave_stream(self) -> None:
        """Nobody refers to it any more, which ends it."""
        self.streams = None

    @rule()
    def reset(self) -> None:
        self.llama.reset()
        assert self.held_rows() == [[]] * ROWS

    @rule()
    def save(self) -> None:
        self.saved = self.held_rows()
        self.llama.save_cache(self.file)

    @precondition(lambda self: self.saved is not None)
    @rule()
    def load(self) -> None:
        assert self.saved is not None
        before = self.held_rows()
        self.llama.load_cache(self.file)
        assert self.held_rows() == [new or old for new, old in zip(self.saved, before, strict=True)]

    @rule()
    def fail_to_load(self) -> None:
        before = self.held_rows()
        with pytest.raises(LlamaError):
            self.llama.load_cache(TOKENIZER)
        assert self.held_rows() == before

    @rule()
    def look(self) -> None:
        """What each row is said to hold is what reading these tokens anew gives."""
        self.close_stream()
        for row in range(ROWS):
            held = self.llama.cache(row)
            if held.tokens and held.start == 0:
                self.forgetful.reset()
                self.forgetful.generate([held.tokens], 0)
                rows = map(self.forgetful.cache, range(ROWS))
                fresh = next(row for row in rows if row.tokens)
                for ours, theirs in zip(
                    held.keys + held.values, fresh.keys + fresh.values, strict=True
                ):
                    torch.testing.assert_close(ours, theirs, atol=ATOL, rtol=0)

    @invariant()
    def is_within_its_bounds(self) -> None:
        used = self.llama.memory()
        assert 0 <= used["used_bytes"] <= used["cache_bytes"]


@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 8, "prefill_chunk": 4}, {"prefill_chunk": 3, "max_batch_size": ROWS}],
    ids=["whole", "ring", "chunks"],
)
def test_a_long_life_gives_the_answers_of_an_instance_that_knows_nothing(
    options: dict[str, Any], folder: Path
) -> None:
    life = type("Life", (Life,), {"options": options, "folder": folder})
    run_state_machine_as_test(
        life, settings=settings(FUZZ, max_examples=15, stateful_step_count=30)
    )

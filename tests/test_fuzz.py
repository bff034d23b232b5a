"""Whatever the arguments: an answer that is well-formed, or a `LlamaError`; and then all is well.

The draws are the same in each run.
"""

from __future__ import annotations

import contextlib
import io
import math
import random
import signal
from collections.abc import Callable, Generator, Iterator
from decimal import Decimal
from fractions import Fraction
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
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

from llama import Llama, LlamaError, Tokenizer
from llama.__main__ import COMMANDS
from llama.checkpoints.convert import convert
from llama.detokenizer import Detokenizer
from llama.generation import STORIES
from llama.memory import memory
from llama.sampling import sample, sample_top_p

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


def shown(value: object) -> str:
    try:
        return repr(value)[:60]
    except ValueError:  # a number of thousands of digits
        return "a number that is too long to be shown"


class Wrong:
    """An argument as it might come; hypothesis can show it, whatever it is."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return shown(self.value)


# What nobody expects, as it comes from JSON, numpy, torch and mistakes.
ODD: list[Any] = [
    *[None, True, False, 0, 1, -1, 7, 10**30, 2**63, -(2**63) - 1, 10**5000, -(10**5000)],
    *[0.0, -0.0, 0.5, 1.0, 1.5, 1e308, 5e-324, math.nan, math.inf, -math.inf, 1j],
    *["", "a", "7", "\0", "\ud800", "\u202e", "\x1b[2J", "--x", "a" * 100_000, "a/" * 3000, b"x"],
    *[[], [[]], [[[1]]], [None], ["a", None], ["a\0\ud800"], [[-1]], [[VOCAB]], [[10**5000]]],
    *[{}, {"role": "user"}, {1}, (1, 2), range(3), [[1.5]], [math.nan], [["a"]], [[{}]]],
    *[[{"role": "user", "content": "x"}], [[{"role": "user", "content": "x"}]]],
    *[[{"role": [], "content": "x"}], [{"role": "user", "content": None}], [[{"role": "user"}]]],
    *[[{"role": np.array(["user", "b"]), "content": "x"}], [{"role": "tool", "content": ""}]],
    *[Decimal(1), Decimal("nan"), Fraction(1, 3), np.float32(0.5), np.int64(3), np.bool_(True)],
    *[np.array(5), np.array([1, 2]), np.array([[1.5]]), np.array(["a"]), np.array([], dtype=int)],
    *[torch.tensor(3), torch.tensor([1.5, 2]), torch.ones(2, 3), torch.tensor([[1, 5]])],
    *[object(), int, len, Ellipsis, Path("nowhere"), torch.float64, torch.device("meta")],
]
texts = st.one_of(
    st.text(st.characters(), max_size=12),  # every character that there is, halves included
    st.text(
        st.sampled_from("\0\t\n\r\x1b\x7f\u202e\u200f\ufeff\ufffe\ud83d\udc36🐶 a▁"), max_size=12
    ),
    st.sampled_from(["", " ", "Once upon a time", "<s>", "</s>", "[INST] <<SYS>>", "ab" * 500]),
)
leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts, st.binary())
nested = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["role", "content", "x"]), inner, max_size=3),
    ),
    max_leaves=6,
)
wrong = st.one_of(st.sampled_from(ODD), nested).map(Wrong)

# What is right, or nearly so.
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


# One wrong argument, or several, among right ones.


def option(right: st.SearchStrategy, times: int = 3) -> st.SearchStrategy:
    """Mostly what is right: with all wrong, only the first would ever be looked at."""
    return st.one_of(*[right] * times, wrong)


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


def calls(
    which: Callable[[st.SearchStrategy], st.SearchStrategy], *names: str
) -> st.SearchStrategy:
    """A call by its name, what it is about, and any mix of its options."""
    return st.sampled_from(names or list(CALLS)).flatmap(
        lambda name: st.tuples(
            st.just(name),
            which(CALLS[name][0]),
            st.fixed_dictionaries(
                {"max_gen_len": which(OPTIONS["max_gen_len"])},
                optional={k: which(OPTIONS[k]) for k in CALLS[name][1][1:]},
            ),
        )
    )


def unwrapped(value: Any) -> Any:
    return value.value if isinstance(value, Wrong) else value


def make(llama: Llama, call: tuple[str, Any, dict[str, Any]]) -> Any:
    """The answer to a call; of a stream, all that it yields, and what it returns."""
    name, subject, options = call
    options = {key: unwrapped(value) for key, value in options.items()}
    found = getattr(llama, name)(unwrapped(subject), **options)
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
    subject, logprobs = unwrapped(subject), bool(unwrapped(options.get("logprobs", False)))
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


@settings(FUZZ, max_examples=250)
@given(call=calls(option))
def test_any_call_is_answered_or_refused_and_the_next_one_is_right(
    tiny: Llama, call: tuple[str, Any, dict[str, Any]]
) -> None:
    tiny.reset()
    expected = make(tiny, GOOD)
    answer, refusal = attempt(lambda: make(tiny, call))
    if refusal is None:
        check_answer(call, answer)
    else:
        assert 0 < len(refusal) < 1000
        assert "\n" not in refusal
    assert same(make(tiny, GOOD), expected)


@pytest.mark.parametrize("name", CALLS)
def test_each_argument_of_a_call_may_be_anything(tiny: Llama, name: str) -> None:
    subjects = {
        "generate": [[1, 5]],
        "stream": [[1, 5]],
        "text_completion": ["a"],
        "stream_text": "a",
    }
    dialog = [{"role": "user", "content": "a"}]
    subject = {"chat_completion": [dialog], "stream_chat": dialog, **subjects}[name]
    tiny.reset()
    expected = make(tiny, GOOD)
    given = [(value, {"max_gen_len": 2}) for value in ODD]
    given += [(subject, {"max_gen_len": 2, key: v}) for key in CALLS[name][1] for v in ODD]
    for first, options in given:
        with contextlib.suppress(LlamaError):
            check_answer((name, first, options), make(tiny, (name, first, options)))
    with pytest.raises(TypeError):
        make(tiny, (name, subject, {"no_such_option": 1}))
    assert same(make(tiny, GOOD), expected)


@settings(FUZZ, max_examples=60)
@given(text=texts, bos=option(st.booleans()), eos=option(st.booleans()), ids=st.one_of(ids, wrong))
def test_any_text_and_any_ids_go_through_the_tokenizer(
    tiny: Llama, text: str, bos: Any, eos: Any, ids: Any
) -> None:
    tokenizer = tiny.tokenizer
    try:
        encoded = tokenizer.encode(text, bos=unwrapped(bos), eos=unwrapped(eos))
    except LlamaError:
        encoded = []
    assert all(0 <= id < VOCAB for id in encoded)
    try:
        text = tokenizer.decode(unwrapped(ids))
    except LlamaError:
        return
    decoder = Detokenizer(tokenizer)
    pieces = [decoder.push(int(id)) for id in unwrapped(ids)]
    assert "".join(pieces) + decoder.finish() == text


@pytest.mark.parametrize("value", ODD, ids=shown)
def test_whatever_else_takes_an_argument_refuses_what_it_cannot_use(
    tiny: Llama, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    takers = [tiny.cache, tiny.load_cache, tiny.tokenizer.encode, tiny.tokenizer.decode, Tokenizer]
    for taker in [*takers, tiny.save_cache]:
        with contextlib.suppress(LlamaError):
            taker(value)
    # The sampler's callers are not only ours.
    probs = torch.full((2, 8), 1 / 8)
    with contextlib.suppress(LlamaError):
        drawn = sample_top_p(probs, value)
        assert drawn.shape == (2, 1)
        assert bool(((drawn >= 0) & (drawn < 8)).all())
    if not (isinstance(value, torch.Tensor) and value.ndim == 2 and value.is_floating_point()):
        with pytest.raises(LlamaError, match="probs is"):
            sample_top_p(value, 0.5)


floats = st.floats(width=32)


@settings(FUZZ, max_examples=100)
@given(
    rows=st.integers(1, 9).flatmap(
        lambda n: st.lists(st.lists(floats, min_size=n, max_size=n), min_size=1, max_size=3)
    ),
    temperature=st.one_of(st.just(0.0), st.floats(0, 1e308)),
    top_p=st.floats(0, 1),
)
def test_any_logits_give_a_token_of_theirs_or_are_said_to_be_not_finite(
    rows: list[list[float]], temperature: float, top_p: float
) -> None:
    logits, generator = torch.tensor(rows), torch.Generator().manual_seed(0)
    tokens = sample(logits, temperature, top_p, generator)
    for row, token in zip(logits, tokens.tolist(), strict=True):
        assert (token == -1) == (not row.isfinite().all())
        assert -1 <= token < len(row)


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
    "compile": st.just(False),
}


@settings(FUZZ, max_examples=120)
@given(
    options=st.fixed_dictionaries({}, optional={k: option(v, 12) for k, v in BUILD.items()}),
    call=calls(lambda right: right),
)
def test_whatever_build_is_given_it_refuses_or_builds_what_answers(
    folder: Path, options: dict[str, Any], call: tuple[str, Any, dict[str, Any]]
) -> None:
    options = {key: unwrapped(value) for key, value in options.items()}
    state = torch.get_rng_state()
    if is_true(options.get("compile")):
        return  # takes a minute, and has its own tests
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


def is_true(value: Any) -> bool:
    try:
        return bool(value)
    except (ValueError, RuntimeError):
        return False


@pytest.mark.parametrize("name", [*BUILD, "ckpt_dir", "tokenizer_path"])
def test_each_argument_of_build_may_be_anything(folder: Path, name: str) -> None:
    paths = {"ckpt_dir": folder, "tokenizer_path": TOKENIZER, "max_seq_len": LENGTH}
    for value in ODD:
        if name == "compile" and is_true(value):
            continue
        with contextlib.suppress(LlamaError), contextlib.redirect_stdout(io.StringIO()):
            Llama.build(**{**paths, "verbose": False, name: value}).close()


# The command line, called in this process. Its words come from `fire`, which makes numbers, lists
# and truths of them; a number of more digits than Python reads stays a text.
WORDS = [value for value in ODD if "too long" not in shown(value)]
COMMAND_ARGUMENTS: dict[Callable[..., None], dict[str, Any]] = {
    COMMANDS["inspect"]: {"folder": STORIES},
    memory: {
        **{"model": "llama-2-7b", "max_seq_len": 9, "max_batch_size": 1, "dtype": "float32"},
        **{"kv_cache_dtype": "int8", "quantize": "int8", "model_parallel_size": 1},
        **{"sliding_window": 8, "prefill_chunk": 4, "budget": "24GiB"},
    },
    convert: {
        "src": "",
        "dst": "out",
        "to": "hf",
        "shards": 1,
        "dtype": "float16",
        "quantize": None,
    },
}


@pytest.mark.parametrize("command", COMMAND_ARGUMENTS)
def test_each_argument_of_a_command_may_be_anything(
    command: Callable[..., None], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = COMMAND_ARGUMENTS[command]
    if command is convert:
        arguments = {**arguments, "src": folder, "force": False}
    for name in arguments:
        for value in WORDS:
            with contextlib.suppress(LlamaError), contextlib.redirect_stdout(io.StringIO()):
                command(**{**arguments, name: value})
    left = {path.suffix for path in tmp_path.rglob("*")}
    assert not left & {".partial", ".old", ".unfinished"}


# The ends of what is allowed, and interrupts.


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
        assert llama.text_completion([""]) == [{"generation": "", "finish_reason": "length"}]
        assert drain(llama.stream([[7]])) == ([], {"finish_reasons": ["length"], "logprobs": None})
        with pytest.raises(LlamaError, match="2 tokens, and max_seq_len is 1"):
            llama.generate([[1, 2]])


@pytest.mark.parametrize("rows", [1, 64])
def test_a_batch_may_be_as_large_as_the_cache(folder: Path, tiny: Llama, rows: int) -> None:
    prompts = [[1, *range(5, 5 + i % 9)] for i in range(rows)]
    with build(folder, max_batch_size=rows) as llama:
        tokens, _ = llama.generate(prompts, 5, temperature=0)
        with pytest.raises(LlamaError, match=f"{rows + 1} prompts, and max_batch_size is {rows}"):
            llama.generate([*prompts, [1]])
    assert tokens == [tiny.generate([prompt], 5, temperature=0)[0][0] for prompt in prompts]


def interrupt_again_and_again(tiny: Llama, tmp_path: Path) -> None:
    tiny.reset()
    expected, file, rng = make(tiny, GOOD), tmp_path / "cache", random.Random(0)
    tiny.save_cache(file)

    def load() -> None:
        try:
            tiny.load_cache(file)
        except ValueError as error:  # what torch makes of an interrupt while it is given a file
            raise KeyboardInterrupt from error

    uses: list[Callable[[], object]] = [
        lambda: tiny.generate([[1, 5], [1, 9, 9, 9]], 30),
        lambda: tiny.text_completion(["Once upon a time"] * 5),
        lambda: drain(tiny.stream_text("Once")),
        lambda: [load() for _ in range(20)],
        lambda: [tiny.save_cache(file) for _ in range(20)],
    ]
    armed, interrupted = False, 0

    def interrupt(*_: object) -> None:
        if armed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for i in range(100):
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 0.02))
                uses[i % len(uses)]()
                armed = False
            except KeyboardInterrupt:
                armed = False
                interrupted += 1
            assert same(make(tiny, GOOD), expected)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 20
    tiny.load_cache(file)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def in_another_process(folder: Path, tmp_path: Path) -> None:
    with build(folder) as tiny:
        interrupt_again_and_again(tiny, tmp_path)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="Windows has no timer of signals")
def test_an_interrupt_at_any_time_leaves_the_next_answer_right(
    folder: Path, tmp_path: Path
) -> None:
    # An interrupt that meets torch's bookkeeping of gradients switches them off for good.
    process = get_context("spawn").Process(target=in_another_process, args=(folder, tmp_path))
    process.start()
    process.join(120)
    assert process.exitcode == 0


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
        self.yielded = False  # does the stream hold its turn?

    def teardown(self) -> None:
        self.close_stream()
        self.llama.close()
        self.forgetful.close()
        self.file.unlink(missing_ok=True)

    @property
    def is_held(self) -> bool:
        return self.streams is not None and self.yielded

    def held_rows(self) -> list[list[int]]:
        return [self.llama.cache(row).tokens for row in range(ROWS)]

    @rule(call=calls(lambda right: right, "generate", "text_completion", "chat_completion"))
    def answer(self, call: tuple[str, Any, dict[str, Any]]) -> None:
        if self.is_held:
            with pytest.raises(LlamaError, match=r"still open|tokens, and max_seq_len is"):
                make(self.llama, call)
            return
        self.close_stream()
        self.forgetful.reset()
        both = (self.llama, self.forgetful)
        answers = [attempt(lambda llama=llama: make(llama, call)) for llama in both]
        assert same(*answers)

    @rule(call=calls(option))
    def mistake(self, call: tuple[str, Any, dict[str, Any]]) -> None:
        """With a seed, since it may be none, and the other instance does not draw with it."""
        if self.is_held or unwrapped(call[2].get("seed")) is None:
            return
        self.close_stream()
        with contextlib.suppress(LlamaError):
            make(self.llama, call)

    @precondition(lambda self: self.streams is None)
    @rule(call=calls(lambda right: right, "stream", "stream_text", "stream_chat"))
    def open_stream(self, call: tuple[str, Any, dict[str, Any]]) -> None:
        name, subject, options = call
        self.forgetful.reset()
        with contextlib.suppress(LlamaError):
            opened = [getattr(x, name)(subject, **options) for x in (self.llama, self.forgetful)]
            self.streams, self.yielded = (opened[0], opened[1]), False

    @precondition(lambda self: self.streams is not None)
    @rule(steps=st.integers(1, 5))
    def go_on(self, steps: int) -> None:
        assert self.streams is not None
        for _ in range(steps):
            ours, theirs = (next(stream, None) for stream in self.streams)
            assert ours == theirs
            self.yielded = ours is not None
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
        if self.is_held:
            with pytest.raises(LlamaError, match="still open"):
                self.llama.reset()
        else:
            self.llama.reset()
            assert self.held_rows() == [[]] * ROWS

    @rule()
    def save(self) -> None:
        if self.is_held:
            with pytest.raises(LlamaError, match="still open"):
                self.llama.save_cache(self.file)
        else:
            self.saved = self.held_rows()
            self.llama.save_cache(self.file)

    @precondition(lambda self: self.saved is not None)
    @rule()
    def load(self) -> None:
        if self.is_held:
            with pytest.raises(LlamaError, match="still open"):
                self.llama.load_cache(self.file)
            return
        assert self.saved is not None
        before = self.held_rows()
        self.llama.load_cache(self.file)
        assert self.held_rows() == [new or old for new, old in zip(self.saved, before, strict=True)]

    @precondition(lambda self: not self.is_held)
    @rule()
    def fail_to_load(self) -> None:
        before = self.held_rows()
        with pytest.raises(LlamaError):
            self.llama.load_cache(TOKENIZER)
        assert self.held_rows() == before

    @precondition(lambda self: not self.is_held)
    @rule()
    def look(self) -> None:
        """What each row is said to hold is what reading these tokens anew gives."""
        self.close_stream()
        for row in range(ROWS):
            held = self.llama.cache(row)
            if held.tokens and held.start == 0:
                self.forgetful.reset()
                self.forgetful.generate([held.tokens], 0)
                fresh = self.forgetful.cache(0)
                for ours, theirs in zip(
                    held.keys + held.values, fresh.keys + fresh.values, strict=True
                ):
                    torch.testing.assert_close(ours, theirs, atol=ATOL, rtol=0)

    @invariant()
    def is_within_its_bounds(self) -> None:
        if not self.is_held:
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

"""The engine: rows, prefixes, pauses, failures and threads; all answers as if served alone."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from checkpoints import write_meta
from conftest import ATOL, GOLDEN, drain

from llama import Llama, LlamaError
from llama.sampling import SamplingParams

TOKENIZER = GOLDEN / "rand_gqa" / "tokenizer.model"
ROWS = 4


def ids(n: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 1024, (n,), generator=generator).tolist()


def build(folder: object, max_seq_len: int = 1024, **options: int) -> Llama:
    """A tiny model that never ends by itself."""
    sizes = {"max_seq_len": max_seq_len, "max_batch_size": ROWS, **options}
    llama = Llama.build(folder, TOKENIZER, dtype="float32", verbose=False, **sizes)
    llama.engine.eos_ids = frozenset()
    return llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> object:
    return write_meta(tmp_path_factory.mktemp("engine") / "tiny")


@pytest.fixture
def tiny(folder: object) -> Iterator[Llama]:
    with build(folder) as llama:
        yield llama


@pytest.fixture
def alone(folder: object) -> Iterator[Callable]:
    """What one prompt gets from an instance that serves nothing else and has forgotten all."""
    with build(folder, max_batch_size=1) as llama:

        def answer(prompt: list[int], *args: object, **options: object) -> list[int]:
            llama.reset()
            return llama.generate([prompt], *args, **options)[0][0]

        yield answer


def prefill_tokens(llama: Llama) -> list[int]:
    return [n for kind, n in llama.engine.passes if kind == "prefill"]


# Rows.


def test_more_prompts_than_rows_flow_through_each_with_the_answer_it_gets_alone(
    tiny: Llama, alone: Callable
) -> None:
    prompts = [ids(5 + i % 7, i) for i in range(11)]
    greedy, _ = tiny.generate(prompts, 9, 0)
    assert greedy == [alone(prompt, 9, 0) for prompt in prompts]
    seeds = list(range(100, 111))
    drawn, _ = tiny.generate(prompts, 9, 1.0, 1.0, seed=seeds)
    expected = [alone(p, 9, 1.0, 1.0, seed=s) for p, s in zip(prompts, seeds, strict=True)]
    assert drawn == expected
    assert tiny.generate(prompts, 9, seed=1) == tiny.generate(prompts, 9, seed=1)
    assert tiny.generate(prompts, 9, seed=1) != tiny.generate(prompts, 9, seed=2)


def test_a_row_is_free_for_the_next_request_as_soon_as_its_request_has_ended(
    folder: object,
) -> None:
    with build(folder, max_batch_size=2) as llama:
        limits = [30, 5, 5, 5, 5, 5]
        requests = []
        for i, limit in enumerate(limits):
            params = SamplingParams(temperature=0, max_gen_len=limit)
            requests += llama._requests({"a prompt": ids(4, i)}, params)
        llama._run(requests)
        assert [len(request.tokens) for request in requests] == limits
        decodes = sum(kind == "decode" for kind, _ in llama.engine.passes)
        # The long answer decodes 29 times; the short ones pass through the other row meanwhile.
        assert decodes == 29


def test_requests_behind_one_system_prompt_read_it_once(folder: object) -> None:
    with build(folder, max_batch_size=8) as llama:
        system = ids(512)
        prompts = [system + ids(10 + i, i + 1) for i in range(8)]
        shared, _ = llama.generate(prompts, 3, 0)
        assert sum(prefill_tokens(llama)) == 512 + sum(len(prompt) - 512 for prompt in prompts)
        for prompt, tokens in zip(prompts, shared, strict=True):
            llama.reset()
            assert llama.generate([prompt], 3, 0)[0] == [tokens]


def test_a_long_prompt_delays_running_requests_by_one_chunk_of_512_at_most(
    folder: object,
) -> None:
    with build(folder, 2304, max_batch_size=8) as llama:
        greedy = SamplingParams(temperature=0, max_gen_len=40)
        short = llama._requests({f"prompt {i}": ids(6, i) for i in range(7)}, greedy)
        llama.engine.add(short)
        while not all(len(request.tokens) >= 3 for request in short):
            llama.engine.advance()
        llama.engine.passes.clear()
        (long,) = llama._requests({"a prompt": ids(2000, 9)}, greedy)
        llama._run([long])
        passes = list(llama.engine.passes)
        last = max(i for i, (kind, _) in enumerate(passes) if kind == "prefill")
        kinds = [kind for kind, _ in passes[: last + 1]]
        assert all("decode" in pair for pair in pairwise(kinds))
        assert [n for kind, n in passes if kind == "prefill"] == [512, 512, 512, 464]
        assert all(n == 7 for kind, n in passes[:last] if kind == "decode")


# Prefixes.


def test_a_chat_finds_its_prefix_in_whichever_row_it_lies(tiny: Llama, alone: Callable) -> None:
    prompts = [ids(40, i) for i in range(ROWS)]
    answers, _ = tiny.generate(prompts, 5, 0)
    for i in (3, 1, 2):
        longer = prompts[i] + answers[i] + ids(6, 50 + i)
        tiny.engine.passes.clear()
        assert tiny.generate([longer], 5, 0)[0] == [alone(longer, 5, 0)]
        assert prefill_tokens(tiny) == [7]  # the answer's last token was drawn, and not read


def test_a_row_that_is_running_is_a_source_of_prefixes(tiny: Llama, alone: Callable) -> None:
    prompt = ids(60)
    stream = tiny.stream([prompt], 30, 0)
    first = [next(stream)[0] for _ in range(3)]
    tiny.engine.passes.clear()
    branch = [*prompt, *ids(5, 1)]
    assert tiny.generate([branch], 8, 0)[0] == [alone(branch, 8, 0)]
    assert prefill_tokens(tiny) == [5]
    assert first + [step[0] for step in drain(stream)[0]] == alone(prompt, 30, 0)


def test_requests_that_share_a_prefix_that_is_being_read_wait_for_it(
    folder: object, alone: Callable
) -> None:
    with build(folder, prefill_chunk=16) as llama:
        prompts = [ids(64) + ids(4, i + 1) for i in range(3)]
        found, _ = llama.generate(prompts, 4, 0)
        assert found == [alone(prompt, 4, 0) for prompt in prompts]
        assert sum(prefill_tokens(llama)) == 64 + 3 * 4


def test_prompt_logprobs_switch_reuse_off(tiny: Llama) -> None:
    prompt = ids(30)
    tiny.generate([prompt], 1)
    tiny.engine.passes.clear()
    _, [scores] = tiny.generate([prompt], 0, logprobs=True, echo=True)
    assert prefill_tokens(tiny) == [30]
    assert len(scores) == 30


# Failures.


def raises(_: list[int], logits: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError("division")


MISTAKES = {
    "raises": (raises, ZeroDivisionError, "division"),
    "another shape": (lambda _, logits: logits[:5], LlamaError, "logits_processor returned"),
    "no tensor": (lambda _, logits: None, LlamaError, "logits_processor returned"),
    "NaN": (lambda _, logits: logits * float("nan"), LlamaError, "logits_processor returned NaN"),
    "nothing left": (
        lambda _, logits: logits - float("inf"),
        LlamaError,
        "logits_processor returned NaN",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_processor_that_fails_ends_its_request_alone_and_its_row_is_zeroed(
    tiny: Llama, alone: Callable, name: str
) -> None:
    processor, error, message = MISTAKES[name]

    def late(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits if len(ids) < 9 else processor(ids, logits)

    other = tiny.stream([ids(7, 1)], 30, 0)
    first = [next(other)[0] for _ in range(2)]
    with pytest.raises(error, match=message):
        tiny.generate([ids(6)], params=SamplingParams(temperature=0, logits_processor=late))
    assert first + [step[0] for step in drain(other)[0]] == alone(ids(7, 1), 30, 0)
    assert sum(bool(row) for row in tiny.engine.cache.rows) == 1
    failed = [row for row, held in enumerate(tiny.engine.cache.rows) if not held]
    assert not tiny.model.attentions[0].cache_k[failed].any()
    assert tiny.generate([ids(6)], 8, 0)[0] == [alone(ids(6), 8, 0)]


def test_a_processor_may_exclude_tokens_by_minus_infinity(tiny: Llama) -> None:
    def even(_: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(0, torch.arange(1, len(logits), 2), float("-inf"))

    for temperature in (0, 1.0):
        params = SamplingParams(temperature, 1.0, logits_processor=even, max_gen_len=20)
        [tokens], _ = tiny.generate([ids(6)], params=params)
        assert [token % 2 for token in tokens] == [0] * 20


def test_logits_that_are_not_finite_end_their_request_alone(tiny: Llama, alone: Callable) -> None:
    prompts = [[1, 5, 6, 7], [1, 9, 8, 1000]]
    expected = alone(prompts[0], 12, 0)
    stream = tiny.stream([prompts[0]], 12, 0)
    first = [next(stream)[0] for _ in range(2)]
    assert 1000 not in expected
    with torch.no_grad():
        tiny.model.tok_embeddings.weight[1000] = float("nan")
    with pytest.raises(LlamaError, match="not finite"):
        tiny.generate([prompts[1]], 5, 0)
    assert first + [step[0] for step in drain(stream)[0]] == expected


def test_an_exception_in_a_pass_fails_the_requests_of_that_pass_each_in_its_own_caller(
    tiny: Llama, alone: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [tiny.stream([ids(6, i)], 40, 0) for i in range(2)]
    for stream in streams:
        next(stream)
    feed_forward = tiny.model.layers[1].feed_forward

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(feed_forward, "forward", broken)
        with pytest.raises(MemoryError):
            drain(streams[0])
    with pytest.raises(MemoryError):
        drain(streams[1])
    assert tiny.generate([ids(6)], 9, 0)[0] == [alone(ids(6), 9, 0)]


def test_an_interrupt_in_one_caller_ends_only_its_own_request(
    tiny: Llama, alone: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a pass, and between a pass and its draws."""
    for place in ("feed_forward", "sample"):
        stream = tiny.stream([ids(6, 1)], 40, 0.9, seed=4)
        first = [next(stream)[0] for _ in range(3)]

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            if place == "sample":
                patch.setattr("llama.engine.sample", interrupt)
            else:
                patch.setattr(tiny.model.layers[1].feed_forward, "forward", interrupt)
            with pytest.raises(KeyboardInterrupt):
                tiny.generate([ids(5, 2)], 5)
        assert first + [s[0] for s in drain(stream)[0]] == alone(ids(6, 1), 40, 0.9, seed=4)
        assert tiny.generate([ids(5, 2)], 5, 0)[0] == [alone(ids(5, 2), 5, 0)]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="Windows has no timer of signals")
def test_interrupts_at_any_time_leave_the_next_answer_right(tiny: Llama) -> None:
    expected = tiny.generate([ids(5), ids(9, 1)], 6, 0)
    rng, interrupted, armed = random.Random(0), 0, False

    def interrupt(*_: object) -> None:
        if armed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(60):
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 0.02))
                tiny.generate([ids(4, i) for i in range(9)], 30)
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                armed = False
            assert tiny.generate([ids(5), ids(9, 1)], 6, 0) == expected
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 20


# Streams.


def test_a_stream_pauses_16_tokens_ahead_of_its_reader(tiny: Llama, alone: Callable) -> None:
    stream = tiny.stream([ids(6)], 100, 0)
    first = [next(stream)[0]]
    tiny.generate([ids(5, 1)], 60, 0)
    (request,) = tiny.engine.running.values()
    assert len(request.tokens) == 1 + 16
    assert first + [step[0] for step in drain(stream)[0]] == alone(ids(6), 100, 0)


def test_the_longest_paused_stream_loses_its_row_and_goes_on_when_it_is_read(
    tiny: Llama, alone: Callable
) -> None:
    streams = [tiny.stream([ids(6, i)], 60, 0) for i in range(ROWS + 2)]
    found = [[next(stream)[0]] for stream in streams[:ROWS]]
    tiny.generate([ids(5, 90)], 30, 0)  # while it decodes, all streams pause
    assert len(tiny.engine.running) == ROWS - 1
    found += [[next(stream)[0]] for stream in streams[ROWS:]]
    for stream, tokens in zip(streams, found, strict=True):
        tokens += [step[0] for step in drain(stream)[0]]
    assert found == [alone(ids(6, i), 60, 0) for i in range(ROWS + 2)]


# Threads.


def use(llama: Llama, i: int) -> tuple[int, list[int], bool]:
    """One client: reads all of its stream, or closes it early, or leaves it, or is slow."""
    rng = random.Random(i)
    n_read = rng.choice([1, 5, 30, 30, 30])
    stream = llama.stream([ids(6 + i % 5, i)], 30, 1.0, 1.0, seed=i)
    found = []
    for step in stream:
        found.append(step[0])
        if rng.random() < 0.05:
            time.sleep(0.01)
        if len(found) == n_read < 30:
            if rng.random() < 0.5:
                stream.close()
            break
    return i, found, n_read == 30


def check_clients(clients: list[tuple[int, list[int], bool]], alone: Callable) -> None:
    for i, found, is_whole in clients:
        expected = alone(ids(6 + i % 5, i), 30, 1.0, 1.0, seed=i)
        assert found == (expected if is_whole else expected[: len(found)])


@pytest.mark.parametrize("kind", ["threads", "tasks"])
def test_clients_of_a_thread_pool_get_the_answers_that_they_get_alone(
    tiny: Llama, alone: Callable, kind: str
) -> None:
    n_threads = threading.active_count()
    if kind == "threads":
        with ThreadPoolExecutor(12) as pool:
            futures = [pool.submit(use, tiny, i) for i in range(24)]
            clients = [future.result(timeout=120) for future in futures]
    else:

        async def stream(i: int) -> tuple[int, list[int], bool]:
            """Each token in whichever thread is free."""
            tokens = tiny.stream([ids(6 + i % 5, i)], 30, 1.0, 1.0, seed=i)
            found = []
            while (step := await asyncio.to_thread(next, tokens, None)) is not None:
                found.append(step[0])
            return i, found, True

        async def run() -> list[tuple[int, list[int], bool]]:
            return list(await asyncio.gather(*map(stream, range(12))))

        clients = asyncio.run(asyncio.wait_for(run(), timeout=120))
    check_clients(clients, alone)
    gc.collect()
    tiny.generate([[1]], 1)
    assert not tiny.engine.running
    assert not tiny.engine.waiting
    assert threading.active_count() <= n_threads


def test_closing_wakes_everybody_who_waits(folder: object) -> None:
    llama = build(folder)
    errors: list[str] = []
    started = threading.Barrier(7)

    def read(i: int) -> None:
        stream = llama.stream([ids(5, i)], 1000, 0)
        next(stream)
        started.wait(60)
        try:
            drain(stream)
        except LlamaError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=read, args=(i,), daemon=True) for i in range(6)]
    for thread in threads:
        thread.start()
    started.wait(60)
    closers = [threading.Thread(target=llama.close, daemon=True) for _ in range(2)]
    for thread in [*closers, *threads]:
        if not thread.ident:
            thread.start()
    for thread in [*closers, *threads]:
        thread.join(60)
        assert not thread.is_alive()
    assert errors == ["this instance is closed: build another"] * 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused_while_a_thread_of_the_parent_is_in_a_step(
    tiny: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    within, go_on = threading.Event(), threading.Event()
    stream = tiny.stream([ids(5, 1)], 20, 0)
    next(stream)

    def slowly(*_: object) -> None:
        within.set()
        assert go_on.wait(60)
        raise ZeroDivisionError

    monkeypatch.setattr("llama.engine.sample", slowly)

    def fail() -> None:
        with pytest.raises(ZeroDivisionError):
            tiny.generate([[1]])

    other = threading.Thread(target=fail)
    other.start()
    assert within.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # whoever waits for the parent's lock is killed
        refused = 0
        for call in (lambda: tiny.generate([[1]], 1), lambda: next(stream), tiny.close):
            try:
                call()
            except LlamaError as error:
                refused += "forked" in str(error)
        os._exit(refused)
    _, status = os.waitpid(child, 0)
    go_on.set()
    other.join(60)
    assert os.waitstatus_to_exitcode(status) == 3


# What a request says.


def test_a_stop_string_with_a_space_matches_the_first_word_of_the_answer(llama: Llama) -> None:
    [free] = llama.text_completion(["Once upon"], 0, max_gen_len=8)
    word = free["generation"].split()[0]
    stop = " " + word
    assert free["generation"].startswith(word), "the first space is not a part of the text"
    [cut] = llama.text_completion(["Once upon"], 0, max_gen_len=8, stop=[stop])
    assert cut["generation"] == ""
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    pieces, streamed = drain(llama.stream_text("Once upon", 0, max_gen_len=8, stop=[stop]))
    assert (pieces, streamed["stop_reason"]) == ([], stop)


def test_a_stop_reason_tells_eos_stop_string_stop_id_and_length_apart(
    llama: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = llama.tokenizer.encode("Once upon a time", bos=True)
    [tokens], _ = llama.generate([prompt], 6, 0)

    def reasons(**options: object) -> tuple[object, object]:
        _, result = drain(llama.stream([prompt], 6, 0, **options))
        return result["finish_reasons"][0], result["stop_reasons"][0]

    assert reasons() == ("length", None)
    assert reasons(stop_tokens=[tokens[2]]) == ("stop", tokens[2])
    with monkeypatch.context() as patch:
        patch.setattr(llama.engine, "eos_ids", frozenset([tokens[2]]))
        assert reasons() == ("stop", None)
    [text] = llama.text_completion(["Once upon a time"], 0, max_gen_len=20, stop=["zzz", "."])
    assert text["stop_reason"] == (text["finish_reason"] == "stop" and ".")


def test_sampling_parameters_may_be_given_as_one_object(llama: Llama) -> None:
    prompts = [[1, 387, 391], [1, 5]]
    params = SamplingParams(0.8, 0.7, seed=3, max_gen_len=9, logprobs=True)
    single = {"temperature": 0.8, "top_p": 0.7, "seed": 3, "max_gen_len": 9}
    assert llama.generate(prompts, params=params) == llama.generate(
        prompts, logprobs=True, **single
    )
    assert (
        drain(llama.stream_text("a", params=params))[0]
        == drain(llama.stream_text("a", **single))[0]
    )
    greedy = SamplingParams(top_k=1, max_gen_len=9)
    assert llama.generate(prompts, params=greedy) == llama.generate(prompts, 9, 0)


@pytest.mark.parametrize("chunk", [None, 7])
def test_hidden_states_are_the_norms_output_batched_and_in_chunks(
    folder: object, chunk: int | None
) -> None:
    with build(folder, prefill_chunk=chunk) as llama:
        prompts = [ids(3 + 5 * i, i) for i in range(ROWS + 2)]
        llama.generate(prompts[1:3], 2)  # what the cache holds does not matter
        found = llama.hidden_states(prompts)
        outputs: list[torch.Tensor] = []
        handle = llama.model.norm.register_forward_hook(lambda *x: outputs.append(x[2]))
        for prompt, states in zip(prompts, found, strict=True):
            assert (states.dtype, states.shape) == (torch.float32, (len(prompt), 64))
            outputs.clear()
            llama.model(torch.tensor([prompt[: chunk or None]]), 0)
            expected = outputs[0][0]
            # Sums in another order; the values are about 1.
            torch.testing.assert_close(states[: len(expected)], expected, atol=ATOL, rtol=0)
        handle.remove()
        llama.reset()
        logits = llama.model.output(found[-1])
        with build(folder) as other:
            whole = other.model(torch.tensor([prompts[-1]]), 0)[0]
        torch.testing.assert_close(logits, whole, atol=ATOL, rtol=0)


def test_thousands_of_prompts_of_one_new_token_take_linear_work_and_little_memory(
    folder: object,
) -> None:
    with build(folder, 64, max_batch_size=8) as llama:
        prompts = [[3 + i % 1000, 3 + i // 1000] for i in range(2000)]
        llama.generate(prompts[:500], 1)

        def peak() -> int:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

        before = peak()
        llama.engine.passes.clear()
        tokens, _ = llama.generate(prompts, 1)
        assert [len(row) for row in tokens] == [1] * 2000
        assert peak() - before < 2000 * 2048
        assert len(llama.engine.passes) == 250

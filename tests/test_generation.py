"""generate and the completion calls: limits, batches, logprobs, seeds, reuse of the cache."""

from __future__ import annotations

import shutil
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ATOL, GOLDEN

from llama import Llama, LlamaError, Tokenizer
from llama.generation import UNSAFE_ERROR
from llama.sampling import token_logprobs

PROMPTS = [
    "Once upon a time",
    "The little dog was very happy because it had a new",
    "Lily",
]


def encoded(llama: Llama, *texts: str) -> list[list[int]]:
    return [llama.tokenizer.encode(text, bos=True) for text in texts]


def no_eos(llama: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.engine, "eos_ids", frozenset())


@pytest.fixture
def passes(llama: Llama) -> deque[tuple[str, int]]:
    """The kind and the number of tokens of each pass."""
    llama.reset()
    llama.engine.passes.clear()
    return llama.engine.passes


@pytest.mark.parametrize("max_gen_len", [64, 1])
def test_limits_are_each_prompts_own(
    llama: Llama, monkeypatch: pytest.MonkeyPatch, max_gen_len: int
) -> None:
    no_eos(llama, monkeypatch)
    prompts = [list(range(300, 308)), list(range(400, 413))]
    together, _ = llama.generate(prompts, max_gen_len, temperature=0)
    assert [len(tokens) for tokens in together] == [max_gen_len, max_gen_len]
    for prompt, tokens in zip(prompts, together, strict=True):
        llama.reset()
        assert llama.generate([prompt], max_gen_len, temperature=0)[0] == [tokens]


def test_limits_by_the_cache_are_each_prompts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with Llama.build(max_seq_len=20, max_batch_size=2, verbose=False) as llama:
        no_eos(llama, monkeypatch)
        prompts = [list(range(300, 308)), list(range(400, 413))]
        for limit in (64, None):
            tokens, _ = llama.generate(prompts, limit, temperature=0)
            assert [len(t) for t in tokens] == [12, 7]


def test_a_ragged_batch_takes_one_prefill_and_as_many_steps_as_the_longest_answer(
    llama: Llama, passes: deque[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_eos(llama, monkeypatch)
    ids = torch.randint(3, 1000, (400,), generator=torch.Generator().manual_seed(1)).tolist()
    llama.generate([ids[:8], ids], 20, temperature=0)
    assert list(passes) == [("prefill", 408)] + [("decode", 2)] * 19


def test_logprobs_when_nothing_is_generated_are_those_of_a_prompt_that_fills_the_cache(
    llama: Llama,
) -> None:
    ids = [1, *torch.randint(3, 1000, (511,), generator=torch.Generator().manual_seed(2)).tolist()]
    tokens, logprobs = llama.generate([ids], 5, logprobs=True, echo=True)
    assert tokens == [ids]
    logits = llama.model(torch.tensor([ids]), 0)[0]
    expected = torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])
    assert logprobs[0][0] == 0.0
    assert logprobs[0][1:] == pytest.approx(expected[:, 0].tolist(), abs=ATOL)
    assert llama.generate([ids], 5, logprobs=True) == ([[]], [[]])


def test_scoring_an_answer_as_a_prompt_gives_the_logprobs_of_generating_it(llama: Llama) -> None:
    prompts = encoded(llama, *PROMPTS)
    tokens, logprobs = llama.generate(prompts, 30, temperature=1.0, logprobs=True, seed=3)
    whole = [p + t for p, t in zip(prompts, tokens, strict=True)]
    scored, scores = llama.generate(whole, 0, logprobs=True, echo=True)
    assert scored == whole
    for prompt, score, logprob in zip(prompts, scores, logprobs, strict=True):
        assert score[len(prompt) :] == pytest.approx(logprob, abs=ATOL)


def test_logprobs_come_at_temperature_0_from_every_call_and_match_the_tokens(
    llama: Llama,
) -> None:
    tokens, logprobs = llama.generate(encoded(llama, *PROMPTS), 12, temperature=0, logprobs=True)
    assert [len(t) for t in tokens] == [len(p) for p in logprobs]
    completions = llama.text_completion(PROMPTS, temperature=0, max_gen_len=12, logprobs=True)
    dialogs = [[{"role": "user", "content": "Tell me a story about a dog."}]]
    chats = llama.chat_completion(dialogs, temperature=0, max_gen_len=12, logprobs=True)
    for prediction in completions + chats:
        assert len(prediction["tokens"]) == len(prediction["logprobs"]) == 12
        assert all(-20 < value < 0 for value in prediction["logprobs"])
    assert [c["logprobs"] for c in completions] == [pytest.approx(p, abs=ATOL) for p in logprobs]
    assert "".join(chats[0]["tokens"]) == chats[0]["generation"]["content"]


def test_logprobs_are_the_models_at_any_temperature(llama: Llama) -> None:
    prompts = encoded(llama, PROMPTS[0])
    tokens, logprobs = llama.generate(prompts, 8, temperature=2.0, top_p=0.5, logprobs=True, seed=1)
    logits = llama.model(torch.tensor([prompts[0] + tokens[0]]), 0)[0, len(prompts[0]) - 1 : -1]
    expected = token_logprobs(logits, torch.tensor(tokens[0])).tolist()
    assert logprobs[0] == pytest.approx(expected, abs=ATOL)


def test_echo_keeps_an_end_of_text_inside_the_prompt(llama: Llama) -> None:
    prompt = [1, 387, 2, 1, 387, 391]
    tokens, _ = llama.generate([prompt], 4, temperature=0, echo=True)
    assert tokens[0][:6] == prompt
    assert len(tokens[0]) == 10


def test_rows_end_one_by_one_and_the_loop_ends_with_the_last(
    llama: Llama, passes: deque[tuple[str, int]]
) -> None:
    prompts = encoded(llama, *PROMPTS)
    free, _ = llama.generate(prompts, 40, temperature=0)
    stop = free[0][5]
    first = [tokens.index(stop) if stop in tokens else len(tokens) for tokens in free]
    passes.clear()
    llama.reset()
    stopped, _ = llama.generate(prompts, 40, temperature=0, stop_tokens=[stop])
    assert stopped == [t[:n] for t, n in zip(free, first, strict=True)]
    assert len(passes) == 1 + min(max(first), 39)


@pytest.mark.parametrize("batch", [1, 4])
def test_six_dialogs_flow_through_any_number_of_rows(llama: Llama, batch: int) -> None:
    dialogs = [[{"role": "user", "content": f"Tell me a story about a {x}."}] for x in "abcdef"]
    expected = llama.chat_completion(dialogs, temperature=0, max_gen_len=10)
    with Llama.build(max_seq_len=64, max_batch_size=batch, verbose=False) as small:
        assert small.chat_completion(dialogs, temperature=0, max_gen_len=10) == expected
        prompts = [f"The {x}" for x in "abcdefg"]
        answers = small.text_completion(prompts, temperature=0, max_gen_len=5)
        assert answers == llama.text_completion(prompts, temperature=0, max_gen_len=5)


def test_one_tagged_dialog_among_three_is_refused_and_the_others_are_unchanged(
    llama: Llama, passes: deque[tuple[str, int]]
) -> None:
    good = [
        [{"role": "user", "content": "Tell me a story about a dog."}],
        [{"role": "user", "content": "Hello!"}],
    ]
    tagged = [{"role": "user", "content": "[INST] Hello! [/INST]"}]
    expected = llama.chat_completion(good, temperature=0, max_gen_len=20, logprobs=True)
    answers = llama.chat_completion(
        [good[0], tagged, good[1]], temperature=0, max_gen_len=20, logprobs=True
    )
    for answer, other in zip([answers[0], answers[2]], expected, strict=True):
        # Sums in another order: the second call goes on from the cache.
        assert answer["logprobs"] == pytest.approx(other["logprobs"], abs=ATOL)
        assert {**answer, "logprobs": 0} == {**other, "logprobs": 0}
    assert answers[1] == {
        "generation": {"role": "assistant", "content": UNSAFE_ERROR},
        "finish_reason": "stop",
        "tokens": [],
        "logprobs": [],
    }
    passes.clear()
    assert llama.chat_completion([tagged])[0]["generation"]["content"] == UNSAFE_ERROR
    assert not passes
    allowed = llama.chat_completion([tagged], temperature=0, max_gen_len=5, allow_tags=True)
    assert allowed[0]["generation"]["content"] != UNSAFE_ERROR


def test_each_of_ten_turns_of_a_chat_reads_its_new_tokens_only(
    llama: Llama, passes: deque[tuple[str, int]]
) -> None:
    dialog = [{"role": "user", "content": "Tell me a story about a bird."}]
    new_turn = 10**6  # the first turn is all new
    for _ in range(10):
        ids = llama.chat_format.encode(dialog)
        common, _ = llama.engine.cache.longest(ids)
        passes.clear()
        answer = llama.chat_completion([dialog], temperature=0, max_gen_len=16)[0]["generation"]
        prefills = [n for kind, n in passes if kind == "prefill"]
        # One token alone is read as a decoding step is.
        assert sum(prefills) == (len(ids) - common if len(ids) - common > 1 else 0)
        # Besides the new turn: the last token of the answer, which was drawn and not read, the
        # space and the end of text behind it, and one more where a cut answer is spelled anew.
        assert sum(prefills) <= new_turn + 4
        turn = {"role": "user", "content": "And what is the name of the bird?"}
        dialog = [*dialog, answer, turn]
        new_turn = len(llama.chat_format.encode([turn]))


def test_what_is_reused_changes_no_answer(llama: Llama) -> None:
    prompts = encoded(llama, *PROMPTS)
    llama.reset()
    first = llama.generate(prompts, 30, temperature=0, logprobs=True)
    longer = [p + t[:10] for p, t in zip(prompts, first[0], strict=True)]
    reused = llama.generate(longer, 20, temperature=0, logprobs=True)
    llama.reset()
    anew = llama.generate(longer, 20, temperature=0, logprobs=True)
    assert reused[0] == anew[0] == [t[10:] for t in first[0]]
    for a, b in zip(reused[1], anew[1], strict=True):
        assert a == pytest.approx(b, abs=ATOL)


def test_zeroing_the_cache_by_hand_between_calls_changes_no_answer(llama: Llama) -> None:
    prompts = encoded(llama, *PROMPTS)
    expected = llama.generate(prompts, 20, temperature=0)
    for layer in llama.model.layers:
        layer.attention.cache_k.zero_()
        layer.attention.cache_v.zero_()
    assert llama.generate(prompts, 20, temperature=0) == expected


def test_weights_written_between_calls_are_not_answered_from_the_old_cache(fresh: Llama) -> None:
    prompts = encoded(fresh, PROMPTS[1])
    fresh.generate(prompts, 5, temperature=0)
    fresh.model.layers[0].attention.wk.weight.mul_(1.5)
    changed = fresh.generate(prompts, 20, temperature=0, logprobs=True)
    fresh.reset()
    assert fresh.generate(prompts, 20, temperature=0, logprobs=True)[0] == changed[0]


def test_weights_whose_writes_torch_does_not_count_are_read_anew_each_time(
    fresh: Llama,
) -> None:
    prompts = encoded(fresh, PROMPTS[1])
    expected = fresh.generate(prompts, 5, temperature=0)
    with torch.inference_mode():
        weight = fresh.model.norm.weight.clone()
    fresh.model.norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    fresh.engine.passes.clear()
    for _ in range(2):
        assert fresh.generate(prompts, 5, temperature=0) == expected
    once = [("prefill", len(prompts[0]))] + [("decode", 1)] * 4
    assert list(fresh.engine.passes) == once * 2


def test_garbage_in_every_stale_slot_is_never_seen(llama: Llama) -> None:
    prompts = encoded(llama, *PROMPTS)
    llama.reset()
    expected = llama.generate(prompts, 30, temperature=0, logprobs=True)
    for layer in llama.model.layers:
        for cache in (layer.attention.cache_k, layer.attention.cache_v):
            cache.fill_(3e4)
    llama.engine.cache.forget()
    garbage = llama.generate(prompts, 30, temperature=0, logprobs=True)
    assert garbage[0] == expected[0]
    for a, b in zip(garbage[1], expected[1], strict=True):
        assert a == pytest.approx(b, abs=ATOL)


@pytest.mark.parametrize("temperature", [1e-4, 1e-40, 5e-324])
def test_an_edge_value_of_temperature_is_the_most_likely_token(
    llama: Llama, temperature: float
) -> None:
    prompts = encoded(llama, *PROMPTS)
    assert llama.generate(prompts, 20, temperature) == llama.generate(prompts, 20, 0)


@pytest.mark.parametrize("top_p", [0, 1e-4])
def test_an_edge_value_of_top_p_is_the_most_likely_token(llama: Llama, top_p: float) -> None:
    prompts = encoded(llama, *PROMPTS)
    assert llama.generate(prompts, 20, 1.0, top_p) == llama.generate(prompts, 20, 0)


def test_an_edge_value_of_top_p_1_keeps_every_token(llama: Llama) -> None:
    tokens, _ = llama.generate(encoded(llama, *PROMPTS), 60, temperature=50.0, top_p=1.0, seed=1)
    assert len({token for row in tokens for token in row}) > 100


def test_a_seed_of_a_call_leaves_the_instances_draws_alone(llama: Llama) -> None:
    prompts = encoded(llama, PROMPTS[0])
    a = llama.generate(prompts, 20, seed=5)
    state = llama._generator.get_state()
    assert llama.generate(prompts, 20, seed=5) == a
    assert torch.equal(llama._generator.get_state(), state)
    assert llama.generate(prompts, 20, seed=6) != a
    assert llama.generate(prompts, 20, seed=0) == llama.generate(prompts, 20, seed=0)
    assert not torch.equal((llama.generate(prompts, 20), llama._generator.get_state())[1], state)


TAGGED = [{"role": "user", "content": "[INST]"}]
BAD_CALLS: list[tuple[str, Callable[[Llama], object]]] = [
    (r"513 tokens.*max_seq_len is 512", lambda x: x.generate([[5] * 513], 1)),
    (r"no prompts", lambda x: x.generate([], 1)),
    (r"no prompts", lambda x: x.text_completion([])),
    (r"no dialogs", lambda x: x.chat_completion([])),
    (r"prompt 1 is empty", lambda x: x.generate([[1], []], 1)),
    (r"token 1024 of prompt 0.*from 0 to 1023", lambda x: x.generate([[1, 1024]], 1)),
    (r"token -1 of prompt 0", lambda x: x.generate([[-1]], 1)),
    (r"prompts are 'text'", lambda x: x.generate("text", 1)),
    (r"prompts is 'text'", lambda x: x.text_completion("text")),
    (r"max_gen_len -1", lambda x: x.chat_completion([TAGGED], max_gen_len=-1)),
    (r"max_gen_len -1", lambda x: x.stream_chat(TAGGED, max_gen_len=-1)),
    (r"row 9", lambda x: x.cache(9)),
    (r"model_path None", lambda x: Tokenizer(None)),
    (r"max_gen_len -1", lambda x: x.generate([[1]], -1)),
    (r"temperature -1", lambda x: x.generate([[1]], 1, -1)),
    (r"temperature nan", lambda x: x.generate([[1]], 1, float("nan"))),
    (r"temperature True", lambda x: x.generate([[1]], 1, True)),  # `--temperature` and no number
    (r"temperature inf", lambda x: x.generate([[1]], 1, float("inf"))),
    (r"top_p 1\.1", lambda x: x.generate([[1]], 1, 0.6, 1.1)),
    (r"top_p -0\.1", lambda x: x.generate([[1]], 1, 0.6, -0.1)),
    (r"top_p nan", lambda x: x.generate([[1]], 1, 0.6, float("nan"))),
    (r"seed has 1 numbers for 2 prompts", lambda x: x.generate([[1]] * 2, 1, seed=[3])),
    (r"token 2000 of stop_tokens", lambda x: x.generate([[1]], 1, stop_tokens=[2000])),
    (r"stop string 1 is ''", lambda x: x.text_completion(["a"], stop=["b", ""])),
    (r"stop is 'ab'", lambda x: x.text_completion(["a"], stop="ab")),
    (r"half of a character", lambda x: x.text_completion(["a\ud800"])),
]


@pytest.mark.parametrize(("message", "call"), BAD_CALLS, ids=[m for m, _ in BAD_CALLS])
def test_a_mistake_gets_one_sentence_and_the_next_call_is_right(
    llama: Llama, message: str, call: Callable[[Llama], object]
) -> None:
    prompts = encoded(llama, *PROMPTS)
    expected = llama.generate(prompts, 10, temperature=0)
    with pytest.raises(LlamaError, match=message) as caught:
        call(llama)
    assert isinstance(caught.value, AssertionError)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)
    assert llama.generate(prompts, 10, temperature=0) == expected


def test_numbers_and_truths_of_numpy_are_as_good_as_pythons(llama: Llama) -> None:
    prompts = encoded(llama, *PROMPTS)
    expected = llama.generate(prompts, 5, 0.5, 0.5, logprobs=True, echo=True, seed=3)
    numbers = (np.int64(5), np.float32(0.5), np.float64(0.5))
    arrays = [np.array(prompt) for prompt in prompts]
    truths = {"logprobs": np.bool_(True), "echo": np.bool_(True), "seed": np.int32(3)}
    tokens, logprobs = llama.generate(arrays, *numbers, **truths)
    assert tokens == expected[0]
    assert logprobs == [pytest.approx(row, abs=ATOL) for row in expected[1]]


def test_the_empty_text_is_the_beginning_of_text_alone(llama: Llama) -> None:
    assert llama.text_completion([""], temperature=0, max_gen_len=3) == [
        {
            "generation": llama.tokenizer.decode(llama.generate([[1]], 3, 0)[0][0]),
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]


def test_logits_that_are_not_finite_are_named_and_leave_no_trace(fresh: Llama) -> None:
    prompts = encoded(fresh, *PROMPTS)
    expected = fresh.generate(prompts, 10, temperature=0)
    weight = fresh.model.layers[2].attention.wv.weight
    kept = weight.clone()
    for poison, options in [
        (float("nan"), {}),
        (float("inf"), {"temperature": 0}),
        (float("nan"), {"logprobs": True, "echo": True, "max_gen_len": 0}),
    ]:
        weight.fill_(poison)
        # The longest one first, so that it poisons slots of row 0 that are not written again.
        with pytest.raises(LlamaError, match=r"not finite.*dtype"):
            fresh.generate(prompts[1:] + prompts[:1], **options)
        weight.copy_(kept)
        assert fresh.generate(prompts, 10, temperature=0) == expected


def test_threads_share_an_instance(llama: Llama) -> None:
    prompts = encoded(llama, *PROMPTS)
    expected = [llama.generate([prompt], 30, temperature=0) for prompt in prompts]
    answers: dict[int, object] = {}

    def work(i: int) -> None:
        for _ in range(3):
            answers[i] = llama.generate([prompts[i]], 30, temperature=0)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [answers[i] for i in range(3)] == expected


def test_surplus_rows_of_the_vocabulary_count_as_probability_and_are_never_drawn(
    tmp_path: Path,
) -> None:
    """A fine-tune may have added rows for which the tokenizer has no piece."""
    folder = shutil.copytree(GOLDEN / "rand_mqa", tmp_path / "model")
    weights = torch.load(folder / "consolidated.00.pth", weights_only=True)
    for name in ("tok_embeddings.weight", "output.weight"):
        weights[name] = torch.cat([weights[name], 3 * weights[name][:16]])
    torch.save(weights, folder / "consolidated.00.pth")
    with Llama.build(folder, max_seq_len=64, max_batch_size=1, verbose=False) as surplus:
        assert surplus.tokenizer.n_words == 1024
        for temperature in (0, 5.0):
            [tokens], [logprobs] = surplus.generate([[1, 5]], 40, temperature, 1.0, logprobs=True)
            assert max(tokens) < 1024
            logits = surplus.model(torch.tensor([[1, 5, *tokens]]), 0)[0, 1:-1]
            assert logits.argmax(-1).max() >= 1024, "the rows that must not be drawn are likely"
            expected = token_logprobs(logits, torch.tensor(tokens)).tolist()
            assert logprobs == pytest.approx(expected, abs=ATOL)
        # A prompt may hold them.
        assert len(surplus.generate([[1, 1039]], 3, 0)[0][0]) == 3

"""The HTTP server, over a real socket, beside the calls of Llama that it stands for."""

from __future__ import annotations

import base64
import json
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from spawn import TORCHRUN

pytest.importorskip("fastapi")
import httpx
import uvicorn

from llama import Llama, LlamaError
from llama.server.app import MAX_BODY_BYTES, Server, make_app
from llama.server.serve import listen

HELLO = [{"role": "user", "content": "Hello!"}]
STORY = [{"role": "user", "content": "Tell me a story about a dog."}]


class Running:
    """A server in a thread, and a client of it."""

    def __init__(self, llama: Llama, max_queue: int = 256, **options: Any) -> None:
        self.server = Server(llama, "stories", max_queue=max_queue)
        listener = listen("127.0.0.1", 0)
        app = make_app(self.server, **options)
        self._http = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on"))
        self._thread = threading.Thread(target=self._http.run, kwargs={"sockets": [listener]})
        self._thread.start()
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(f"/v1/{path}", json=body)

    def ok(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.post(path, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        with self.client.stream("POST", f"/v1/{path}", json={**body, "stream": True}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line[6:] for line in answer.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def close(self) -> None:
        self.client.close()
        self._http.should_exit = True
        self._thread.join(timeout=20)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def small() -> Iterator[Llama]:
    with Llama.build(max_seq_len=256, max_batch_size=4, dtype="float32", verbose=False) as llama:
        yield llama


@pytest.fixture(scope="module")
def running(small: Llama) -> Iterator[Running]:
    server = Running(small)
    yield server
    server.close()


def test_a_chat_is_answered_as_by_chat_completion(running: Running, small: Llama) -> None:
    (expected,) = small.chat_completion([STORY], temperature=0, max_gen_len=20)
    found = running.ok("chat/completions", messages=STORY, temperature=0, max_tokens=20)
    (choice,) = found["choices"]
    assert choice["message"] == expected["generation"]
    assert choice["finish_reason"] == expected["finish_reason"]
    n_prompt = len(small.chat_format.encode(STORY))
    assert found["usage"]["prompt_tokens"] == n_prompt
    assert found["usage"]["completion_tokens"] == 20
    again = running.ok("chat/completions", messages=STORY, temperature=0, max_tokens=20)
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": n_prompt - 1}


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize("stop", [None, " dog", "named"])
def test_a_stream_joins_to_the_whole_answer(running: Running, path: str, stop: str | None) -> None:
    prompt = {"messages": STORY} if path.startswith("chat") else {"prompt": "Once upon a time"}
    logprobs = True if path.startswith("chat") else 0
    asked = {**prompt, "seed": 3, "max_tokens": 30, "n": 2, "logprobs": logprobs, "stop": stop}
    whole = running.ok(path, **asked)
    chunks = running.stream(path, **asked, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert all(chunks[-1]["usage"][name] == whole["usage"][name] for name in counts)
    for choice in whole["choices"]:
        parts = [
            c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == choice["index"]
        ]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        if path == "completions":
            assert "".join(part["text"] for part in parts) == choice["text"]
            tokens = [t for part in parts for t in part["logprobs"]["tokens"]]
            assert tokens == choice["logprobs"]["tokens"]
            assert "".join(tokens) == choice["text"]
        else:
            text = "".join(part["delta"].get("content", "") for part in parts)
            assert text == choice["message"]["content"]
            entries = [e for p in parts if p["logprobs"] for e in p["logprobs"]["content"]]
            wanted = choice["logprobs"]["content"]
            assert [e["token"] for e in entries] == [e["token"] for e in wanted]
            # Other rows ran meanwhile, and the cache was warm: sums in another order.
            values = [e["logprob"] for e in wanted]
            assert [e["logprob"] for e in entries] == pytest.approx(values, abs=1e-4)


def test_choice_i_draws_with_seed_plus_i(running: Running) -> None:
    asked = {"prompt": "Once upon a time, there was", "max_tokens": 12}
    three = running.ok("completions", **asked, n=3, seed=7)["choices"]
    alone = [running.ok("completions", **asked, seed=7 + i)["choices"][0] for i in range(3)]
    assert [c["text"] for c in three] == [c["text"] for c in alone]
    assert len({c["text"] for c in three}) > 1


def test_a_prompt_is_a_text_or_ids_or_a_list_of_either(running: Running, small: Llama) -> None:
    texts = ["Once upon a time", "Tom and his dog"]
    ids = [small.tokenizer.encode(text, bos=True) for text in texts]
    asked = {"temperature": 0, "max_tokens": 6}
    first, second = (c["text"] for c in running.ok("completions", prompt=texts, **asked)["choices"])
    expected, _ = small.generate(ids, max_gen_len=6, temperature=0)
    for text, prompt, answer in zip((first, second), ids, expected, strict=True):
        whole = small.tokenizer.decode(prompt + answer)
        assert whole.endswith(text)  # with the space in front
    for prompt, wanted in ((texts[0], [first]), (ids[0], [first]), (ids, [first, second])):
        found = running.ok("completions", prompt=prompt, **asked)["choices"]
        assert [c["text"] for c in found] == wanted
    assert (
        running.ok("completions", prompt=texts[0], temperature=0)["usage"]["completion_tokens"]
        == 16
    )


def test_max_tokens_0_with_echo_scores_the_prompt(running: Running, small: Llama) -> None:
    text = "Once upon a time, there was a dog."
    ids = small.tokenizer.encode(text, bos=True)
    _, expected = small.generate([ids], max_gen_len=0, logprobs=True, echo=True)
    found = running.ok("completions", prompt=text, max_tokens=0, echo=True, logprobs=2)
    (choice,) = found["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "".join(logprobs["tokens"]) == text
    assert logprobs["token_logprobs"][0] is None
    # The same pass over the same tokens.
    assert logprobs["token_logprobs"][1:] == pytest.approx(expected[0][1:], abs=1e-6)
    for value, top in zip(
        logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True
    ):
        assert len(top) == 2
        assert value <= max(top.values())
    assert any(
        value == max(top.values())
        for value, top in zip(
            logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True
        )
    )
    assert [
        text[at:].startswith(token)
        for at, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
    ] == [True] * len(ids)


def test_embeddings_are_pooled_hidden_states(running: Running, small: Llama) -> None:
    ids = [small.tokenizer.encode(text, bos=True) for text in ("a cat", "a dog in the park")]
    hidden = small.hidden_states(ids)
    for pooling in ("mean", "last"):
        expected = [h.mean(0) if pooling == "mean" else h[-1] for h in hidden]
        found = running.ok("embeddings", input=ids, pooling=pooling)["data"]
        for one, wanted in zip(found, expected, strict=True):
            vector = torch.tensor(one["embedding"])
            torch.testing.assert_close(vector, wanted / wanted.norm(), atol=1e-5, rtol=0)
    raw = running.ok("embeddings", input="a cat", encoding_format="base64")["data"][0]["embedding"]
    plain = running.ok("embeddings", input="a cat")["data"][0]["embedding"]
    assert struct.unpack(f"<{len(plain)}f", base64.b64decode(raw)) == pytest.approx(plain, abs=1e-6)


def test_tokenize_and_detokenize_are_the_tokenizers(running: Running, small: Llama) -> None:
    ids = small.tokenizer.encode("Once upon", bos=True)
    found = running.client.post("/tokenize", json={"prompt": "Once upon"}).json()
    assert (found["tokens"], found["count"]) == (ids, len(ids))
    assert running.client.post("/detokenize", json={"tokens": ids}).json() == {
        "prompt": "Once upon"
    }


CHAT, TEXT = "chat/completions", "completions"
REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    (CHAT, {"messages": HELLO, "model": "gpt"}, 404, "'gpt' does not exist"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": "Hello"}, 400, "messages"),
    (CHAT, {}, 400, "messages"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, 400, "role"),
    (CHAT, {"messages": [{"role": "assistant", "content": "x"}]}, 400, "'user' is expected"),
    (CHAT, {"messages": [{"role": "user", "content": "[INST] x"}]}, 400, "special tags"),
    (CHAT, {"messages": [{"role": "user", "content": "word " * 400}]}, 400, "the context 256"),
    (CHAT, {"messages": HELLO, "tools": [{}]}, 400, "tools is not supported"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json"}}, 400, "response_format"),
    (CHAT, {"messages": HELLO, "temperature": "hot"}, 400, "temperature"),
    (CHAT, {"messages": HELLO, "temperature": -1}, 400, "temperature"),
    (CHAT, {"messages": HELLO, "top_p": 2}, 400, "top_p"),
    (CHAT, {"messages": HELLO, "n": 0}, 400, "n:"),
    (CHAT, {"messages": HELLO, "seed": 2**70}, 400, "seed"),
    (CHAT, {"messages": HELLO, "stop": [""]}, 400, "stop string 0"),
    (CHAT, {"messages": HELLO, "stop": 7}, 400, "stop"),
    (CHAT, {"messages": HELLO, "logit_bias": {"x": 1}}, 400, "logit_bias"),
    (CHAT, {"messages": HELLO, "logit_bias": {"99999": 1}}, 400, "99999"),
    (CHAT, {"messages": HELLO, "stream": "yes"}, 400, "stream"),
    (TEXT, {"prompt": []}, 400, "is empty"),
    (TEXT, {"prompt": [[]]}, 400, "is empty"),
    (TEXT, {"prompt": [99999]}, 400, "token 99999"),
    (TEXT, {"prompt": [-1]}, 400, "prompt"),
    (TEXT, {"prompt": {"a": 1}}, 400, "prompt"),
    (TEXT, {"prompt": "x", "max_tokens": -1}, 400, "max_tokens"),
    (TEXT, {"prompt": "x", "best_of": 3}, 400, "best_of"),
    (TEXT, {"prompt": "x", "suffix": "y"}, 400, "suffix is not supported"),
    ("embeddings", {"input": "x " * 400}, 400, "the context 256"),
    ("nothing", {}, 404, "Not Found"),
]


@pytest.mark.parametrize(("path", "body", "status", "message"), REFUSED)
def test_a_mistake_is_answered_with_a_sentence(
    running: Running, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    answer = running.post(path, **body)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
    assert running.server.runner.n_active == 0


def test_a_prompt_that_is_too_long_has_openais_code(running: Running) -> None:
    error = running.post(TEXT, prompt="word " * 400).json()["error"]
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b'{"prompt": "\\ud800"}', b"[" * 100_000, b'{"prompt": NaN}']
)
def test_a_body_that_cannot_be_read_is_a_mistake(running: Running, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    answer = running.client.post("/v1/completions", content=content, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_unknown_fields_are_ignored_and_harmless_ones_pass(running: Running) -> None:
    extra = {"user": "x", "tools": [], "response_format": {"type": "text"}, "foo": 1}
    running.ok(CHAT, messages=HELLO, max_tokens=1, **extra)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}]
    asked = {"temperature": 0, "max_tokens": 5}
    assert (
        running.ok(CHAT, messages=parts, **asked)["choices"]
        == running.ok(CHAT, messages=HELLO, **asked)["choices"]
    )


def test_a_body_beyond_the_limit_is_refused(running: Running) -> None:
    answer = running.client.post("/v1/completions", content=b" " * (MAX_BODY_BYTES + 1))
    assert answer.status_code == 413

    def pieces() -> Iterator[bytes]:  # without a Content-Length
        for _ in range(MAX_BODY_BYTES // 2**20 + 1):
            yield b" " * 2**20

    answer = running.client.post("/v1/completions", content=pieces())
    assert answer.status_code == 413


def test_forty_clients_get_the_answers_that_each_gets_alone(running: Running) -> None:
    def ask(i: int) -> str:
        asked = {
            "prompt": f"Once upon a time, number {i % 10}",
            "seed": i,
            "max_tokens": 10 + i % 7,
        }
        if i % 2:
            chunks = running.stream(TEXT, **asked)
            return "".join(chunk["choices"][0]["text"] for chunk in chunks)
        return running.ok(TEXT, **asked)["choices"][0]["text"]

    with ThreadPoolExecutor(20) as pool:
        together = list(pool.map(ask, range(40)))
    alone = [ask(i) for i in range(40)]
    # Sums in another order differ by 1e-6: a draw that close is as good as never met.
    assert sum(a != b for a, b in zip(together, alone, strict=True)) <= 1


def test_a_client_that_leaves_frees_its_row(running: Running) -> None:
    engine = running.server.llama.engine
    for stream in (True, False):
        with httpx.Client(base_url=running.url) as client:
            body = {
                "prompt": "Once",
                "max_tokens": 250,
                "stream": stream,
                "logit_bias": {"2": -100},
            }
            try:
                with client.stream("POST", "/v1/completions", json=body, timeout=0.3) as answer:
                    next(answer.iter_lines())
            except httpx.ReadTimeout:
                assert not stream
    deadline = time.monotonic() + 10
    while (engine.running or running.server.runner.n_active) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not engine.running
    assert running.server.runner.n_active == 0


def test_calls_beyond_the_queue_are_told_to_come_back(small: Llama) -> None:
    server = Running(small, max_queue=1)
    try:
        slow = {"prompt": "Once", "max_tokens": 60, "logit_bias": {"2": -100}}
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda _: server.post(TEXT, **slow), range(12)))
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 429}
        refused = answers[statuses.index(429)]
        assert refused.headers["Retry-After"] == "1"
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        server.ok(TEXT, prompt="Once", max_tokens=1)
    finally:
        server.close()


def test_a_key_opens_all_but_the_page_and_health(small: Llama) -> None:
    server = Running(small, api_key="secret", cors="https://example.org")
    try:
        assert server.client.get("/").status_code == 200
        assert server.client.get("/health").json() == {"status": "ok"}
        refused = server.client.get("/v1/models")
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        key = {"Authorization": "Bearer secret", "Origin": "https://example.org"}
        allowed = server.client.get("/v1/models", headers=key)
        assert allowed.json()["data"][0]["id"] == "stories"
        assert allowed.headers["Access-Control-Allow-Origin"] == "https://example.org"
    finally:
        server.close()


def test_the_page_loads_nothing_from_elsewhere(running: Running) -> None:
    page = running.client.get("/")
    policy = page.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "Access-Control-Allow-Origin" not in page.headers
    sources = re.findall(r"(?:src|href)=\"([^\"]*)\"", page.text)
    assert all(source.startswith(("data:", "#")) for source in sources)
    assert "innerHTML" not in page.text


def test_the_metrics_count_what_was_served(running: Running) -> None:
    def value(name: str) -> float:
        found = re.search(rf"^{name} (\S+)$", running.client.get("/metrics").text, re.MULTILINE)
        return float(found[1])

    before = value("llama_generated_tokens_total")
    running.ok(TEXT, prompt="Once", max_tokens=3)
    assert value("llama_generated_tokens_total") == before + 3
    assert value("llama_rows") == 4
    assert value("llama_queue") == 0


def test_the_client_of_openai_works_unchanged(running: Running) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["stories"]
    answer = client.chat.completions.create(
        model="stories", messages=STORY, temperature=0, max_tokens=9, logprobs=True, top_logprobs=2
    )
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == answer.usage.completion_tokens == 9
    assert tokens[0].logprob == tokens[0].top_logprobs[0].logprob
    chunks = client.chat.completions.create(
        model="stories", messages=STORY, temperature=0, max_tokens=9, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.choices[0].message.content
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")


def test_a_port_that_is_taken_is_one_sentence() -> None:
    with (
        listen("127.0.0.1", 0) as taken,
        pytest.raises(LlamaError, match=r"cannot be listened on .*: choose another --port"),
    ):
        listen("127.0.0.1", taken.getsockname()[1])


SERVE = ["-m", "llama", "serve", "--port", "0", "--noverbose", "--dtype", "float32"]


def address(process: subprocess.Popen[str]) -> str:
    return re.search(r"http://\S+", process.stdout.readline())[0]


def started(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=spawn_root()
    )


def spawn_root() -> str:
    from spawn import ROOT

    return str(ROOT)


def test_sigterm_lets_running_answers_finish() -> None:
    process = started(sys.executable, *SERVE, "--max_seq_len", "256")
    url = address(process)
    body = {"prompt": "Once", "max_tokens": 200, "stream": True, "logit_bias": {"2": -100}}
    with (
        httpx.Client(timeout=60) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    _, stderr = process.communicate(timeout=30)
    assert process.returncode in (0, 143), stderr
    assert stderr == ""


def test_two_ranks_serve_after_a_pause_longer_than_their_timeout() -> None:
    alone = started(sys.executable, *SERVE)
    ranks = [*TORCHRUN, "--standalone", "--nproc_per_node", "2"]
    two = started(*ranks, *SERVE, "--timeout_s", "3")
    try:
        urls = [address(alone), address(two)]
        time.sleep(7)
        asked = {"prompt": "Once upon a time", "seed": 1, "max_tokens": 20}
        answers = [
            httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json()["choices"]
            for url in urls
        ]
        assert answers[0] == answers[1]
    finally:
        for process in (alone, two):
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=40)

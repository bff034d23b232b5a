"""The chat page in a browser; skipped where there is no Chromium or Playwright."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

sync_api = pytest.importorskip("playwright.sync_api")
pytest.importorskip("fastapi")
from test_server import Running  # noqa: E402

from llama import Llama  # noqa: E402

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
HOSTILE = "**bold** <script>hacked=1</script> <img src=x onerror=hacked=1> [x](javascript:hacked=1)"


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    with (
        Llama.build(max_seq_len=512, max_batch_size=2, dtype="float32", verbose=False) as llama,
        sync_api.sync_playwright() as playwright,
    ):
        server = Running(llama)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(server.url)
        yield page
        browser.close()
        server.close()


def ask(page: Any, text: str) -> None:
    page.fill("#input", text)
    page.keyboard.press("Enter")
    page.locator("#send[aria-label=Send]").wait_for()


def test_a_chat_is_shown_retried_edited_and_kept(page: Any) -> None:
    for text in ("Hello!", "Tell me a story about a dog.", "And then?"):
        ask(page, text)
    assert page.locator("article").count() == 6
    assert "tokens/s" in page.locator("article .facts").last.inner_text()
    assert "reused" in page.inner_text("#context")
    page.click("button[aria-label='Answer again']")
    page.locator("#send[aria-label=Send]").wait_for()
    assert page.locator("article").count() == 6
    page.reload()
    assert page.locator("article").count() == 6


def test_html_of_an_answer_stays_text(page: Any) -> None:
    chunk = json.dumps({"choices": [{"delta": {"content": HOSTILE}, "finish_reason": "stop"}]})
    body = f"data: {chunk}\n\ndata: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=body, content_type="text/event-stream"),
    )
    ask(page, "Attack")
    page.unroute("**/v1/chat/completions")
    answer = page.locator("article.assistant .text").last
    assert "<script>hacked=1</script> <img src=x" in answer.inner_text()
    assert answer.locator("strong").inner_text() == "bold"
    assert answer.locator("script, img, a").count() == 0


def test_a_phone_needs_no_sideways_scrolling(page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 700})
    for selector in ("html", "#log"):
        box = page.locator(selector)
        assert box.evaluate("e => e.scrollWidth") <= box.evaluate("e => e.clientWidth")

"""Text to ids and back, whole and piece by piece."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llama import LlamaError, Tokenizer
from llama.detokenizer import Detokenizer, check_stop
from llama.generation import STORIES

TOKENIZER = Tokenizer(STORIES / "tokenizer.model")
TEXTS = [
    "Dear [Name], I hope this email finds you well.",
    "一个汉字",
    "🙂 and 👩\u200d👧",
    "  two spaces, then\ttab\nand newline  ",
    "\u200f\u202eright to left\x00\x07\x1b",
    "",
]


def pieces_of(ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


def test_the_ids_of_the_model_file() -> None:
    t = TOKENIZER
    assert (t.n_words, t.bos_id, t.eos_id, t.pad_id) == (1024, 1, 2, -1)
    assert t.encode("Once", bos=True, eos=True) == [1, *t.encode("Once"), 2]
    assert t.encode("Once") == t.encode("Once", False, False) == t.sp_model.encode("Once")
    assert t.encode("", bos=True) == [1]


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_of_a_text_join_to_it(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert "".join(pieces_of(ids)) == TOKENIZER.decode(ids) == text


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_a_character_comes_whole_with_its_last_byte(text: str) -> None:
    ids = TOKENIZER.encode(text)
    if TOKENIZER.decode(ids) == text:
        assert not any("\ufffd" in piece for piece in pieces_of(ids)) or "\ufffd" in text
        assert pieces_of(ids)[-1] == ""


def test_a_piece_is_given_out_as_soon_as_it_is_certain() -> None:
    ids = TOKENIZER.encode("Once 你a")
    byte_ids = [i for i in ids if TOKENIZER.sp_model.is_byte(i)]
    assert len(byte_ids) == 3
    pieces = pieces_of(ids)
    assert pieces[ids.index(byte_ids[0]) :][:4] == ["", "", "你", "a"]


def test_an_id_without_a_piece_is_an_index_error() -> None:
    for id in (-1, 1024):
        with pytest.raises(IndexError):
            TOKENIZER.decode([1, id])


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"<!DOCTYPE html><html><body>Access denied</body></html>", "an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a git-lfs pointer"),
        (b'{\n  "version": "1.0", "model": {}}', "JSON"),
        (b"IQ== 0\nIg== 1\nIw== 2\n", "a tiktoken file"),
        (b"", "an empty file"),
        (bytes(4096), "not a SentencePiece model"),
        (b"Entry not found", "not a SentencePiece model"),
        (b"\x00\x01\x02garbage", "not a SentencePiece model"),
        ((STORIES / "tokenizer.model").read_bytes()[:5000], "not a SentencePiece model, or a dam"),
    ],
)
def test_a_wrong_file_where_the_tokenizer_should_be_is_said_what_it_looks_like(
    tmp_path: Path, content: bytes, found: str
) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(LlamaError, match=rf"tokenizer.model' is {found}"):
        Tokenizer(path)


def test_a_tokenizer_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(LlamaError, match=r"nowhere.model' is not a file"):
        Tokenizer(str(tmp_path / "nowhere.model"))


IDS = st.lists(st.integers(0, 1023) | st.integers(3, 258) | st.sampled_from([0, 1, 2, 960]))
STOPS = st.lists(st.sampled_from([" the", "e", "a b", "\ufffd", ".", "n", " "]), max_size=2)


@settings(max_examples=300, deadline=None)
@example([197, 1, 410], [], False)  # a broken character, a token without text, a word
@example([960, 960, 1, 960, 410], [], False)
@example([], TOKENIZER.encode("你")[:-1], False)  # the echo ends within a character
@given(IDS, IDS, st.booleans())
def test_the_pieces_of_any_ids_join_to_what_decode_gives(
    generated: list[int], echoed: list[int], keep_space: bool
) -> None:
    detokenizer = Detokenizer(TOKENIZER, (), echoed, keep_space=keep_space)
    streamed = [detokenizer.text, *map(detokenizer.push, generated), detokenizer.finish()]
    decoded = TOKENIZER.decode(echoed + generated)
    expected = {decoded, " " + decoded} if keep_space else {decoded}
    assert "".join(streamed) == "".join(detokenizer.pieces) == detokenizer.text
    assert detokenizer.text in expected
    assert len(detokenizer.pieces) == len(echoed + generated)


@settings(max_examples=500, deadline=None)
@given(IDS, IDS, STOPS)
def test_the_text_ends_before_the_first_stop_string_and_its_pieces_do_too(
    generated: list[int], echoed: list[int], stop: list[str]
) -> None:
    # The oracle decodes everything again for every token.
    spaced = Detokenizer(TOKENIZER, (), echoed, keep_space=True)
    echo = len(spaced.text)
    texts = [(spaced.push(id), spaced.text)[1][echo:] for id in generated]
    texts.append((spaced.finish(), spaced.text)[1][echo:])
    seen = next((text for text in texts if any(s in text for s in stop)), texts[-1])
    found = min((seen.find(s) for s in stop if s in seen), default=len(seen))

    detokenizer = Detokenizer(TOKENIZER, stop, echoed)
    streamed = ""
    for id in generated:
        streamed += detokenizer.push(id)
        if detokenizer.stop is not None:
            break
    else:
        # What is held back could become a stop string, or a character.
        held = seen[len(streamed) :].rstrip("\ufffd") if detokenizer.stop is None else ""
        assert len(held) <= max(map(len, stop), default=0) + 1
    streamed += detokenizer.finish()
    if generated:
        assert detokenizer.stop in ([s for s in stop if seen[found:].startswith(s)] or [None])
    whole = TOKENIZER.decode(echoed + generated)
    space = len(spaced.text) - len(whole)  # 1 where the first space was dropped
    lost = space if echo == 0 else 0
    assert streamed == seen[:found][lost:] or not generated
    assert detokenizer.text.endswith(streamed)
    assert "".join(detokenizer.pieces) == detokenizer.text
    assert whole.startswith(detokenizer.text)


def test_a_stop_string_with_a_space_matches_the_first_word() -> None:
    ids = TOKENIZER.encode("the cat the")
    for stop, text in ((" the", ""), ("the", ""), (" cat", "the"), (" the ", "")):
        detokenizer = Detokenizer(TOKENIZER, [stop])
        streamed = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
        assert (streamed, detokenizer.text, detokenizer.stop) == (text, text, stop)
    assert Detokenizer(TOKENIZER, [" the"], ids).stop is None  # the prompt is not searched


def test_the_first_space_is_kept_on_request() -> None:
    ids = TOKENIZER.encode("the cat")
    kept = Detokenizer(TOKENIZER, keep_space=True)
    assert "".join(map(kept.push, ids)) + kept.finish() == kept.text == " the cat"
    assert "".join(kept.pieces) == " the cat"


def test_a_token_is_decoded_once_however_long_the_text_is() -> None:
    class Counting(Tokenizer):
        calls = 0

        def token_bytes(self, id: int, *, first: bool = False) -> bytes:
            Counting.calls += 1
            return super().token_bytes(id, first=first)

        def decode(self, t: object) -> str:
            raise AssertionError("the whole text is decoded again")

    detokenizer = Detokenizer(Counting(STORIES / "tokenizer.model"), ["never"])
    for _ in range(1000):
        detokenizer.push(410)
    detokenizer.finish()
    assert Counting.calls <= 1001


@pytest.mark.parametrize("stop", ["ab", ["b", ""], [1], b"ab"])
def test_stop_strings_that_are_not_a_list_of_texts_are_refused(stop: object) -> None:
    with pytest.raises(LlamaError, match="stop"):
        check_stop(stop)
    assert check_stop(None) == check_stop([]) == ()
    assert check_stop(iter(["a", "b"])) == ("a", "b")

"""Text to ids and back, whole and piece by piece."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llama import LlamaError, Tokenizer
from llama.detokenizer import RowText, StopFinder
from llama.generation import STORIES
from llama.tokenizer import StreamDecoder

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
    decoder = StreamDecoder(TOKENIZER)
    pieces = [decoder.push(id) for id in ids]
    return [*pieces, decoder.finish()]


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


@settings(max_examples=300, deadline=None)
@example([197, 1, 410])  # a broken character, a token without text, a word
@example([960, 960, 1, 960, 410])
@given(st.lists(st.integers(0, 1023) | st.integers(3, 258) | st.sampled_from([0, 1, 2, 960])))
def test_the_pieces_of_any_ids_join_to_what_decode_gives(ids: list[int]) -> None:
    assert "".join(pieces_of(ids)) == TOKENIZER.decode(ids)


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


def test_an_id_without_a_piece_is_refused() -> None:
    for id in (-1, 1024):
        with pytest.raises(LlamaError, match=rf"token 1 of the ids is {id}.*from 0 to 1023"):
            TOKENIZER.decode([1, id])


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"<!DOCTYPE html><html><body>Access denied</body></html>", "an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a git-lfs pointer"),
        (b'{\n  "version": "1.0", "model": {}}', "JSON"),
        (b"IQ== 0\nIg== 1\nIw== 2\n", "a tiktoken file"),
        (b"", "an empty file"),
        (bytes(4096), "a file of zeros"),
        (b"Entry not found", "plain text"),
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


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab", max_size=3), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_a_stop_string_is_found_across_pieces_and_nothing_before_it_is_lost(
    pieces: list[str], stop: list[str]
) -> None:
    finder = StopFinder(stop)
    passed = []
    whole = ""
    for piece in pieces:
        passed.append(finder.push(piece))
        whole += piece
        if any(s in whole for s in stop):
            break
        # What is held back could still become a stop string, and nothing longer is held back.
        held = whole[len("".join(passed)) :]
        assert held == "" or any(s.startswith(held) for s in stop)
    passed.append(finder.finish())
    found = [whole.find(s) for s in stop if s in whole]
    assert "".join(passed) == (whole[: min(found)] if found else whole)
    assert finder.found == bool(found)


@settings(max_examples=200, deadline=None)
@example([], TOKENIZER.encode("你")[:-1], [])  # ends within a character, and nothing is generated
@given(
    st.lists(st.integers(3, 1023), max_size=12),
    st.lists(st.integers(3, 1023), max_size=6),
    st.lists(st.sampled_from([" the", "e", "a b", "\ufffd", ".", "n"]), max_size=2),
)
def test_the_pieces_of_a_row_join_to_its_text(
    generated: list[int], echoed: list[int], stop: list[str]
) -> None:
    row = RowText(TOKENIZER, stop, echoed)
    streamed = ""
    for id in generated:
        streamed += row.push(id)
        if row.stopped:
            break
    streamed += row.finish()
    assert "".join(row.pieces) == row.text
    assert row.text.endswith(streamed)
    whole = TOKENIZER.decode(echoed + generated)
    assert whole.startswith(row.text)
    if not stop:
        assert row.text == whole
        assert len(row.pieces) == len(echoed + generated)

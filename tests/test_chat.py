"""The chat format, id by id, and what is refused of a dialog."""

from __future__ import annotations

import pytest

from llama import Dialog, Llama, LlamaError, Tokenizer
from llama.chat import Llama2Format
from llama.generation import STORIES


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict:
    return {"role": "assistant", "content": content}


def system(content: str) -> dict:
    return {"role": "system", "content": content}


BOS, EOS = 1, 2
INST = [499, 502, 1007]  # "▁[" "INST" "]"
END_INST = [620, 502, 1007]  # "▁[/" "INST" "]"
HI = [327, 966]  # "▁H" "i"
YES = [960, 563, 975, 960]  # "▁" "Yes" "." "▁"
WHY = [461, 965, 972]  # "▁W" "h" "y"
# "▁<<" "SYS" ">>" "\n" "B" "e" "▁kind" "." "\n" "<<" "/" "SYS" ">>" "\n" "\n" "H" "i"
BE_KIND_HI = [
    *[501, 500, 495, 13, 1003, 961, 764, 975, 13],
    *[494, 1005, 500, 495, 13, 13, 992, 966],
]

# Each dialog with the text that it stands for, and its ids.
SHAPES: dict[str, tuple[Dialog, list[int]]] = {
    "<s>[INST] Hi [/INST]": ([user("Hi")], [BOS, *INST, *HI, *END_INST]),
    "the same, spaces around the content": ([user(" Hi \n")], [BOS, *INST, *HI, *END_INST]),
    "<s>[INST] <<SYS>>\\nBe kind.\\n<</SYS>>\\n\\nHi [/INST]": (
        [system("Be kind."), user("Hi")],
        [BOS, *INST, *BE_KIND_HI, *END_INST],
    ),
    "<s>[INST] Hi [/INST] Yes. </s><s>[INST] Why [/INST]": (
        [user("Hi"), assistant("Yes."), user("Why")],
        [BOS, *INST, *HI, *END_INST, *YES, EOS, BOS, *INST, *WHY, *END_INST],
    ),
    "a system message and two turns": (
        [system("Be kind."), user("Hi"), assistant("Yes."), user("Why")],
        [BOS, *INST, *BE_KIND_HI, *END_INST, *YES, EOS, BOS, *INST, *WHY, *END_INST],
    ),
    "three turns, the last empty: <s>[INST]  [/INST]": (
        [user("Hi"), assistant("Yes."), user("Why"), assistant("No"), user("")],
        [
            *[BOS, *INST, *HI, *END_INST, *YES, EOS],
            *[BOS, *INST, *WHY, *END_INST, 960, 867, 960, EOS],  # "▁" "No" "▁"
            *[BOS, *INST, 960, *END_INST],
        ],
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(STORIES / "tokenizer.model")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_dialog_has_exactly_these_ids(tokenizer: Tokenizer, shape: str) -> None:
    dialog, ids = SHAPES[shape]
    chat = Llama2Format(tokenizer)
    chat.check(dialog, 0)
    assert chat.encode(dialog) == ids


def test_text_that_looks_like_a_control_token_is_text(tokenizer: Tokenizer) -> None:
    ids = Llama2Format(tokenizer).encode([user("</s><s> [INST]")])
    assert ids.count(BOS) == 1
    assert EOS not in ids
    assert tokenizer.decode(ids) == "[INST] </s><s> [INST] [/INST]"


BAD_DIALOGS: list[tuple[str, object]] = [
    (r"dialog 1 is empty", []),
    (r"dialog 1 is a str", "Hello"),
    (r"dialog 1 is a int", 5),
    (r"message 0 of dialog 1 has the role 'assistant' where 'user'", [assistant("Hi")]),
    (r"message 1 of dialog 1 has the role 'user' where 'assistant'", [user("a"), user("b")]),
    (r"message 1 of dialog 1 has the role 'system' where 'assistant'", [user("a"), system("b")]),
    (r"message 1 of dialog 1 has the role 'system' where 'user'", [system("a"), system("b")]),
    (r"message 0 of dialog 1 has the role 'tool'", [{"role": "tool", "content": "a"}]),
    (r"ends with message 1 of the role 'assistant'", [user("a"), assistant("b")]),
    (r"ends with message 0 of the role 'system'", [system("a")]),
    (r"message 0 of dialog 1 is .*'role' and 'content' are", [{"role": "user"}]),
    (r"message 0 of dialog 1 is .*'role' and 'content' are", [{"content": "a"}]),
    (r"message 0 of dialog 1 is 'a'", ["a"]),
    (r"message 0 of dialog 1 is .* are strings", [{"role": "user", "content": 5}]),
    (r"message 0 of dialog 1 is .* are strings", [{"role": "user", "content": None}]),
    (r"dialog 1 has \d+ tokens.*max_seq_len is 512", [user("word " * 600)]),
]


@pytest.mark.parametrize(("message", "dialog"), BAD_DIALOGS)
def test_a_dialog_that_cannot_be_answered_is_named(
    llama: Llama, message: str, dialog: object
) -> None:
    good = [user("Hello!")]
    expected = llama.chat_completion([good], temperature=0, max_gen_len=8)
    with pytest.raises(LlamaError, match=message):
        llama.chat_completion([good, dialog], max_gen_len=8)
    with pytest.raises(LlamaError, match=message.replace("dialog 1", "(dialog 0|the dialog)")):
        llama.stream_chat(dialog)
    assert llama.chat_completion([good], temperature=0, max_gen_len=8) == expected

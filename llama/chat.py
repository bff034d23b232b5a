"""Chat formats: a dialog to token ids.

In the format of Llama 2 every turn of user and assistant is one sequence between BOS and EOS. The
last one is open: the model completes it. A system message is part of the first user message:

    <BOS>[INST] <<SYS>>
    Be brief.
    <</SYS>>

    Hello! [/INST] Hi. <EOS><BOS>[INST] And now? [/INST]

The spaces around each part belong to the format; those around a message's content are stripped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from llama.errors import require
from llama.tokenizer import Tokenizer

Role = Literal["system", "user", "assistant"]


class Message(TypedDict):
    role: Role
    content: str


Dialog = Sequence[Message]

B_INST, E_INST = "[INST]", "[/INST]"
B_SYS, E_SYS = "<<SYS>>\n", "\n<</SYS>>\n\n"

SPECIAL_TAGS = [B_INST, E_INST, "<<SYS>>", "<</SYS>>"]
UNSAFE_ERROR = "Error: special tags are not allowed as part of the prompt."


class ChatFormat:
    """The chat format of Llama 2."""

    # A message that contains one of these could pose as another part of the dialog.
    tags: Sequence[str] = SPECIAL_TAGS

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, dialog: Dialog) -> list[int]:
        """The ids of a dialog that `check` accepted, up to where the answer begins."""
        contents = [message["content"].strip() for message in dialog]
        if dialog[0]["role"] == "system":
            # The original strips the user's message only together with the system message.
            first_user = dialog[1]["content"]
            contents[:2] = [f"{B_SYS}{dialog[0]['content']}{E_SYS}{first_user}".strip()]
        ids: list[int] = []
        for user, assistant in zip(contents[0:-1:2], contents[1::2], strict=True):
            turn = f"{B_INST} {user} {E_INST} {assistant} "
            ids += self.tokenizer.encode(turn, bos=True, eos=True)
        return ids + self.tokenizer.encode(f"{B_INST} {contents[-1]} {E_INST}", bos=True)

    def has_tags(self, dialog: Dialog) -> bool:
        """Does a message of any role contain a tag of the format?"""
        return any(tag in message["content"] for message in dialog for tag in self.tags)

    def check(self, dialog: Dialog, index: int) -> None:
        """LlamaError: `dialog`, the one at `index` of the call, does not fit the format."""
        where = f"dialog {index}"
        check_messages(dialog, where)
        has_system = dialog[0]["role"] == "system"
        for i, message in enumerate(dialog):
            expected = "user" if (i - has_system) % 2 == 0 else "assistant"
            require(
                message["role"] == expected or (i == 0 and has_system),
                f"message {i} of {where} has the role {message['role']!r:.80} where {expected!r} "
                "is expected: a dialog is an optional system message, then user and assistant in "
                "turn",
            )
        require(
            dialog[-1]["role"] == "user",
            f"{where} ends with message {len(dialog) - 1} of the role {dialog[-1]['role']!r}: "
            "it must end with the user's message that is to be answered",
        )


def check_messages(dialog: Dialog, where: str) -> None:
    """LlamaError: `dialog` is not a list of messages."""
    require(
        isinstance(dialog, Sequence) and not isinstance(dialog, str),
        f"{where} is a {type(dialog).__name__}: pass a list of messages",
    )
    require(len(dialog) > 0, f"{where} is empty: it needs at least a user's message")
    for i, message in enumerate(dialog):
        at = f"message {i} of {where}"
        require(
            isinstance(message, Mapping) and {"role", "content"} <= message.keys(),
            f"{at} is {message!r:.80}: it must be a dict with 'role' and 'content'",
        )
        for key in ("role", "content"):
            value = message[key]
            require(
                isinstance(value, str),
                f"the {key} of {at} is a {type(value).__name__}: it must be a str",
            )

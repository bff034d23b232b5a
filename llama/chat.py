"""Chat formats: a dialog to token ids.

`ChatFormat` is the common part, one class below it is one format. A format places control ids
itself; a message's text never becomes one.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, NoReturn, Protocol, TypedDict

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llama.errors import LlamaError, require
from llama.tokenizer import BaseTokenizer, Tokenizer

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
    """The format of a model that has none: dialogs are refused."""

    name = "none"
    # A message that contains one of these could pose as another part of the dialog.
    tags: Sequence[str] = ()
    control: Sequence[str] = ()  # tokens without which the format cannot be written

    def __init__(self, tokenizer: BaseTokenizer) -> None:
        self.tokenizer = tokenizer
        missing = [text for text in self.control if text not in tokenizer.special]
        require(
            not missing,
            f"the chat format {self.name!r} needs the tokens {', '.join(missing)}, which the "
            "tokenizer does not have: pass another chat_format",
        )

    def encode(self, dialog: Dialog) -> list[int]:
        """The ids of a dialog that `check` accepted, up to where the answer begins."""
        raise NotImplementedError

    def check(self, dialog: Dialog, index: int) -> None:
        """LlamaError: `dialog`, the one at `index` of the call, does not fit the format."""
        raise LlamaError(
            "this checkpoint has no chat template, so how a dialog is written is not known: pass "
            f"chat_format= one of {', '.join(map(repr, FORMATS))}, or a Jinja template"
        )

    def has_tags(self, dialog: Dialog) -> bool:
        """Does a message of any role contain a tag of the format?"""
        return any(tag in message["content"] for message in dialog for tag in self.tags)


class Llama2Format(ChatFormat):
    """Each turn of user and assistant is a sequence of its own, and the last one is open.

    A system message is part of the first user message. The spaces around each part belong to the
    format; those around a message's content are stripped:

        <BOS>[INST] <<SYS>>
        Be brief.
        <</SYS>>

        Hello! [/INST] Hi. <EOS><BOS>[INST] And now? [/INST]
    """

    name = "llama2"
    tags = SPECIAL_TAGS

    def encode(self, dialog: Dialog) -> list[int]:
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

    def check(self, dialog: Dialog, index: int) -> None:
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


class MistralFormat(Llama2Format):
    """The format of Mistral 7B v0.3, where [INST] and [/INST] are control tokens.

    A system message is part of the last user message.
    """

    name = "mistral"
    control = (B_INST, E_INST)

    def encode(self, dialog: Dialog) -> list[int]:
        tokenizer, special = self.tokenizer, self.tokenizer.special
        contents = [message["content"] for message in dialog]
        if dialog[0]["role"] == "system":
            system = contents.pop(0)
            contents[-1] = f"{system}\n\n{contents[-1]}"
        ids = [tokenizer.bos_id]
        for i, content in enumerate(contents):
            text = tokenizer.encode(content, eos=i % 2 == 1)
            ids += [special[B_INST], *text, special[E_INST]] if i % 2 == 0 else text
        return ids


class Llama3Format(ChatFormat):
    """Each message follows a header that names its role; roles are free.

    <|begin_of_text|><|start_header_id|>user<|end_header_id|>

    Hello!<|eot_id|><|start_header_id|>assistant<|end_header_id|>
    """

    name = "llama3"
    tags = (
        *("<|begin_of_text|>", "<|end_of_text|>"),
        *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    )
    control = tags

    def encode(self, dialog: Dialog) -> list[int]:
        bos, _, start, end, eot = (self.tokenizer.special[tag] for tag in self.tags)
        parts: list[str | int] = [bos]
        for message in dialog:
            parts += [start, message["role"], end, f"\n\n{message['content'].strip()}", eot]
        return self.tokenizer.encode_parts([*parts, start, "assistant", end, "\n\n"])

    def check(self, dialog: Dialog, index: int) -> None:
        check_messages(dialog, f"dialog {index}")


class TemplateFormat(ChatFormat):
    """A checkpoint's own Jinja template.

    The template sees messages in which the text of each control token is broken up by a number
    that nobody can guess. So every control token in its output is one that the template wrote.
    """

    name = "template"

    def __init__(self, tokenizer: BaseTokenizer, template: str) -> None:
        super().__init__(tokenizer)
        # What training tools mark as generated is ordinary output here.
        for tag, instead in (("generation", "if true"), ("endgeneration", "endif")):
            template = re.sub(rf"({{%[-+]?\s*){tag}(\s*[-+]?%}})", rf"\1{instead}\2", template)
        try:
            self._template = Sandbox().from_string(template)
        except Exception as error:
            raise LlamaError(
                f"the chat template cannot be read ({error!s:.200}): pass another as chat_format="
            ) from error
        tags = re.findall(r"[<\[][|｜].+?[|｜][>\]]|\[/?[A-Z_]+\]|<</?SYS>>", template)
        tags += [text for text in tokenizer.special if text in template]
        self.tags = tuple(dict.fromkeys(tags))

    def encode(self, dialog: Dialog) -> list[int]:
        break_up = str(secrets.randbits(96))
        variables: dict[str, Any] = dict.fromkeys(("tools", "documents"))
        variables["messages"] = self._plain(dialog, break_up)
        variables["bos_token"] = self.tokenizer.special_text(self.tokenizer.bos_id)
        variables["eos_token"] = self.tokenizer.special_text(self.tokenizer.eos_id)
        text = render(self._template, add_generation_prompt=True, **variables)
        parts = self.tokenizer.split_special(text)
        return self.tokenizer.encode_parts(
            [part.replace(break_up, "") if isinstance(part, str) else part for part in parts]
        )

    def check(self, dialog: Dialog, index: int) -> None:
        check_messages(dialog, f"dialog {index}")
        try:
            self.encode(dialog)
        except Exception as error:  # templates may raise whatever Python does
            raise LlamaError(
                f"the chat template refuses dialog {index}: {error!s:.300}: change the dialog, or "
                "pass another template as chat_format="
            ) from error

    def _plain(self, value: Any, break_up: str) -> Any:
        """`value` in plain types, with every control token in its strings broken up."""
        if isinstance(value, str):
            pattern = self.tokenizer.special_pattern
            return pattern.sub(lambda found: found[0][0] + break_up + found[0][1:], value)
        if isinstance(value, Mapping):
            return {str(key): self._plain(item, break_up) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self._plain(item, break_up) for item in value]
        return value if isinstance(value, (bool, int, float)) else None


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with what chat templates use, limited in time and in the size of its text."""

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        self.filters["tojson"] = _to_json

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(x) if hasattr(x, "__len__") else abs(x) for x in (left, right)]
        if operator == "**" or math.prod(sizes) > MAX_TEXT:
            raise TemplateError(f"its {operator} makes a text or a number that is too long")
        return super().call_binop(context, operator, left, right)


MAX_SECONDS, MAX_TEXT = 2.0, 10_000_000  # of one rendering


def render(template: Template, **variables: Any) -> str:
    """The text of a template. TimeoutError: it takes too long. TemplateError: it is too long."""
    end, size, parts = time.monotonic() + MAX_SECONDS, 0, []

    def watch(*_: Any) -> Any:
        if time.monotonic() > end:
            raise TimeoutError(f"it takes more than {MAX_SECONDS} seconds")
        return watch

    before = sys.gettrace()
    sys.settrace(watch)  # called for each line that runs
    try:
        for part in template.generate(variables):
            parts.append(part)
            size += len(part)
            if size > MAX_TEXT:
                raise TemplateError(f"its text is longer than {MAX_TEXT:,} characters")
    finally:
        sys.settrace(before)
    return "".join(parts)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, **options: Any) -> str:
    # Jinja's own filter writes < and > as \u003c and \u003e.
    return json.dumps(value, **{"ensure_ascii": False, **options})


FORMATS: dict[str, type[ChatFormat]] = {
    kind.name: kind for kind in (Llama2Format, Llama3Format, MistralFormat)
}


class TextFacts(Protocol):
    """What `choose_chat_format` needs of a checkpoint's facts."""

    @property
    def chat_template(self) -> str | None: ...

    @property
    def layout(self) -> str: ...


def choose_chat_format(
    tokenizer: BaseTokenizer, facts: TextFacts, chat_format: str | None = None
) -> ChatFormat:
    """The chat format of a checkpoint.

    `chat_format` is the name of one, or a Jinja template. Without it, the checkpoint's template is
    used, and without that the format of Meta's models, if the checkpoint is in Meta's layout.
    """
    if chat_format in FORMATS:
        return FORMATS[chat_format](tokenizer)
    if chat_format is not None:
        require(
            "{" in chat_format,
            f"chat_format {chat_format!r:.80} is unknown: pass one of "
            f"{', '.join(map(repr, FORMATS))}, or a Jinja template",
        )
        return TemplateFormat(tokenizer, chat_format)
    if facts.chat_template is not None:
        return TemplateFormat(tokenizer, facts.chat_template)
    if facts.layout != "meta":
        return ChatFormat(tokenizer)
    if B_INST in tokenizer.special:
        return MistralFormat(tokenizer)
    if Llama3Format.tags[2] in tokenizer.special:
        return Llama3Format(tokenizer)
    return (Llama2Format if isinstance(tokenizer, Tokenizer) else ChatFormat)(tokenizer)


def check_messages(dialog: Dialog, where: str) -> None:
    """LlamaError: `dialog` is not a list of messages."""
    require(
        isinstance(dialog, Sequence) and not isinstance(dialog, str),
        f"{where} is a {type(dialog).__name__}: pass a list of messages",
    )
    require(len(dialog) > 0, f"{where} is empty: it needs at least a user's message")
    for i, message in enumerate(dialog):
        require(
            isinstance(message, Mapping)
            and all(isinstance(message.get(key), str) for key in ("role", "content")),
            f"message {i} of {where} is {message!r:.80}: it must be a dict whose 'role' and "
            "'content' are strings",
        )

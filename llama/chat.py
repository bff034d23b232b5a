"""Chat formats: a dialog to token ids. A message's text never becomes a control id."""

from __future__ import annotations

import json
import math
import re
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, NoReturn, TypedDict

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llama.checkpoints.text import TextFacts
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

    def __init__(self, tokenizer: BaseTokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, dialog: Dialog) -> list[int]:
        """The ids of a dialog that `check` accepted, up to where the answer begins."""
        raise NotImplementedError

    def check(self, dialog: Dialog, index: int) -> None:
        """LlamaError: `dialog`, the one at `index` of the call, does not fit the format."""
        raise LlamaError(
            "this checkpoint has no chat template, so how a dialog is written is not known: pass "
            f"chat_format= one of {', '.join(map(repr, TEMPLATES))}, or a Jinja template"
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


class TemplateFormat(ChatFormat):
    """A Jinja template, such as a checkpoint's own.

    The template sees messages in which the text of each control token is broken up by a number
    that nobody can guess. So every control token in its output is one that the template wrote.
    """

    def __init__(self, tokenizer: BaseTokenizer, template: str, name: str = "template") -> None:
        super().__init__(tokenizer)
        self.name = name
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


# The formats that have a name. `Llama2Format` is exact; its template is for files.
TEMPLATES = {
    "llama2": """{% set has_system = messages[0].role == 'system' %}\
{% for message in (messages[1:] if has_system else messages) %}{% if message.role == 'user' %}\
{% set system = '<<SYS>>\\n' ~ messages[0].content ~ '\\n<</SYS>>\\n\\n' %}\
{{ bos_token }}[INST] {{ (system * (has_system and loop.first) ~ message.content) | trim }} [/INST]\
{% else %} {{ message.content | trim }} {{ eos_token }}{% endif %}{% endfor %}""",
    "llama3": """{{ bos_token }}{% for message in messages %}\
<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}\
<|start_header_id|>assistant<|end_header_id|>

{% endif %}""",
    "mistral": """{{ bos_token }}{% set has_system = messages[0].role == 'system' %}\
{% for message in (messages[1:] if has_system else messages) %}\
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('user and assistant have to alternate') }}{% endif %}\
{% if message.role == 'user' %}[INST] \
{{ messages[0].content ~ '\\n\\n' if has_system and loop.last else '' }}\
{{ message.content }}[/INST]\
{% else %} {{ message.content ~ eos_token }}{% endif %}{% endfor %}""",
}


def choose_chat_format(
    tokenizer: BaseTokenizer, facts: TextFacts, chat_format: str | None = None
) -> ChatFormat:
    """The chat format of a checkpoint.

    `chat_format` is the name of one, or a Jinja template. Without it, the checkpoint's template is
    used, and without that the format of Meta's models, if the checkpoint is in Meta's layout.
    """
    chosen = chat_format or facts.chat_template
    if chosen is None and facts.layout == "meta":
        tags = {"[INST]": "mistral", "<|eot_id|>": "llama3"}
        known = "llama2" if isinstance(tokenizer, Tokenizer) else None
        chosen = next((name for tag, name in tags.items() if tag in tokenizer.special), known)
    if chosen is None:
        return ChatFormat(tokenizer)
    if chosen == "llama2":
        return Llama2Format(tokenizer)
    if chosen not in TEMPLATES:
        require(
            "{" in chosen,
            f"chat_format {chosen!r:.80} is unknown: pass one of "
            f"{', '.join(map(repr, TEMPLATES))}, or a Jinja template",
        )
        return TemplateFormat(tokenizer, chosen)
    chat = TemplateFormat(tokenizer, TEMPLATES[chosen], chosen)
    missing = [tag for tag in chat.tags if tag not in tokenizer.special]
    require(
        not missing,
        f"the chat format {chosen!r} needs the tokens {', '.join(missing)}, which the tokenizer "
        "does not have: pass another chat_format",
    )
    return chat


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

"""A chat in the terminal: `python -m llama chat`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from llama.chat import UNSAFE_ERROR, Message
from llama.cli import convert, sampling_options, with_options
from llama.errors import LlamaError
from llama.generation import Llama
from llama.parallel.ranks import read_on_rank_0
from llama.sampling import SamplingParams

HELP = """\
/reset          start a new dialog           /undo       remove the last exchange
/system TEXT    new dialog with a system     /retry      answer the last message again
                message; without TEXT, none
/save FILE      write the dialog as JSON     /load FILE  read it
/set NAME VALUE such as temperature 0.2      /stats      speed, and how full the context is
/help           this list                    /quit       or Ctrl-D: end
Ctrl-C stops an answer. A line that ends with a backslash continues on the next one."""

# What a terminal would obey: all control characters but tab and newline.
CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])
ROOM = 4  # old turns go until this fraction of the context is free for the answer


class Chat:
    """A dialog with `llama`, and how its answers are sampled.

    Each method named after a command takes the rest of the line and returns what to show.
    """

    def __init__(self, llama: Llama, params: SamplingParams, system: str | None) -> None:
        self.llama = llama
        self.params = params
        self.dialog: list[Message] = []
        self.stats_line = "no answer yet"
        if system:
            self.system(system)

    def show(self, text: str, end: str = "\n") -> None:
        if self.llama.rank == 0:
            print(text.translate(CONTROLS), end=end, flush=True)

    def send(self, text: str) -> None:
        """Answer a message; a message that is refused leaves the dialog as it was."""
        before = list(self.dialog)
        self.dialog.append({"role": "user", "content": text})
        try:
            kept = self._answer()
        except LlamaError as error:
            self.show(f"{error} (/help lists the commands)")
            kept = False
        if not kept:
            self.dialog = before

    def reset(self, _: str = "") -> str:
        self.dialog = [m for m in self.dialog if m["role"] == "system"]
        return "New dialog."

    def system(self, text: str) -> str:
        self.dialog = [{"role": "system", "content": text}] if text else []
        return "New dialog " + ("with this system message." if text else "without system message.")

    def undo(self, _: str = "") -> str:
        removed = [
            self.dialog.pop() for _ in self.dialog[-2:] if self.dialog[-1]["role"] != "system"
        ]
        return "Removed the last exchange." if removed else "Nothing to remove."

    def retry(self, _: str) -> str:
        last = self.dialog[-2]["content"] if len(self.dialog) > 1 else None
        if last is None or self.dialog[-1]["role"] != "assistant":
            return "Nothing to answer again."
        self.undo()
        self.send(last)
        return ""

    def save(self, file: str) -> str:
        if self.llama.rank == 0:
            Path(file).write_text(json.dumps(self.dialog, indent=2) + "\n", encoding="utf-8")
        return f"Saved {file}."

    def load(self, file: str) -> str:
        dialog = read_on_rank_0(partial(_read_json, file))
        if isinstance(dialog, Exception):
            raise dialog
        for message in dialog:
            if not isinstance(message["role"] + message["content"], str):
                raise TypeError("a message has a role and a content, both text")
        self.dialog = dialog
        return f"Loaded {len(dialog)} messages."

    def set(self, words: str) -> str:
        name, _, value = words.partition(" ")
        options = sampling_options()
        if name not in options:
            return "\n".join(f"{name} {getattr(self.params, name)}" for name in options)
        self.params = with_options(self.params, {name: convert(name, options[name], value)})
        return f"{name} is {getattr(self.params, name)}."

    def stats(self, _: str) -> str:
        return self.stats_line

    def help(self, _: str) -> str:
        return HELP

    def _answer(self) -> bool:
        """Stream the answer to the last message; False if it was refused for its tags."""
        self._make_room()
        start, first, content, note = time.monotonic(), 0.0, "", ""
        stream = self.llama.stream_chat(self.dialog, params=self.params)
        try:
            while True:
                piece = next(stream)
                first = first or time.monotonic() - start
                content += piece
                self.show(piece, end="")
        except StopIteration as end:
            if end.value["finish_reason"] == "length":
                note = " [cut short: max_gen_len or the context is reached]"
        except KeyboardInterrupt:
            note = " [stopped]"
        self.show(note)
        if content == UNSAFE_ERROR:
            return False
        self.dialog.append({"role": "assistant", "content": content})
        self._measure(content, first, time.monotonic() - start)
        return True

    def _make_room(self) -> None:
        """Drop the oldest exchanges, after the system message, that leave no room to answer."""
        args = self.llama.model.params
        n_before, first = len(self.dialog), int(self.dialog[0]["role"] == "system")
        while (
            args.longest_chunk == 0  # without a window the context is bounded
            and len(self.dialog) > first + 2
            and self._n_tokens() > args.max_seq_len - args.max_seq_len // ROOM
        ):
            del self.dialog[first : first + 2]
        if len(self.dialog) < n_before:
            self.show(
                f"[the context is full: dropped the oldest {n_before - len(self.dialog)} messages]"
            )

    def _n_tokens(self) -> int:
        return len(self.llama.chat_format.encode(self.dialog))

    def _measure(self, content: str, first_s: float, total_s: float) -> None:
        answered = len(self.llama.tokenizer.encode(content))
        asked = len(self.llama.chat_format.encode(self.dialog[:-1]))
        self.stats_line = (
            f"first text after {first_s:.2f} s, {answered / total_s:.1f} tokens/s, context: "
            f"{asked + answered} of {self.llama.model.params.max_seq_len} tokens"
        )


def _read_json(file: str) -> Any:
    try:
        return json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return error  # every rank raises it


COMMANDS = ("reset", "system", "undo", "retry", "save", "load", "set", "stats", "help")


def chat(llama: Llama, params: SamplingParams, system: str | None) -> None:
    """Read lines and answer them until the input ends."""
    talk = Chat(llama, params, system)
    if sys.stdin.isatty():
        talk.show("/help lists the commands, Ctrl-D ends.")
    read = line_reader()
    while (line := read_on_rank_0(partial(read_message, read))) is not None:
        word, _, rest = line.strip().partition(" ")
        if word == "/quit":
            return
        if not word.startswith("/"):
            if word:
                talk.send(line)
            continue
        command = word[1:] if word[1:] in COMMANDS else "help"
        try:
            talk.show(getattr(talk, command)(rest.strip()))
        except (LlamaError, OSError, ValueError, TypeError, KeyError) as error:
            talk.show(f"{word} failed: {error}")


def read_message(read: Callable[[str], str]) -> str | None:
    """A line, and those that continue it after a backslash; None at the end of the input."""
    lines: list[str] = []
    with suppress(EOFError):
        while True:
            try:
                lines.append(read("... " if lines else "> "))
            except KeyboardInterrupt:
                print()
                lines.clear()
                continue
            if not lines[-1].endswith("\\"):
                return "\n".join([*(line[:-1] for line in lines[:-1]), lines[-1]])

    return None


def line_reader() -> Callable[[str], str]:
    """`input`, with editing and history at a terminal."""
    if not sys.stdin.isatty():
        return lambda _: input()
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.key_binding import KeyBindings
    except ImportError:
        with suppress(ImportError):  # Windows has none
            import readline  # noqa: F401 (input uses it)
        return input
    keys = KeyBindings()
    keys.add("enter")(lambda event: event.current_buffer.validate_and_handle())
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    return PromptSession(key_bindings=keys, multiline=True).prompt

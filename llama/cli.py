"""Running a command of ours in whatever terminal or pipe there is."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import TypeAlias

import fire

Command: TypeAlias = Callable[..., None]


def run(command: Command | dict[str, Command], name: str | None = None) -> None:
    """Call `command`, or the one of several that the command line names, with its arguments.

    A stream that is closed is an empty one. A character that the terminal lacks gets a substitute,
    and so does one that the input breaks. A reader that has gone away, as `head` does, and Ctrl-C
    end the command in silence, and output that goes to a full disk ends it with a word.
    """
    for standard, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, standard) is None:
            setattr(sys, standard, open(os.devnull, mode))  # noqa: SIM115 (it stays open)
    for stream, errors in ((sys.stdout, "backslashreplace"), (sys.stdin, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    try:
        for call in asked(command, name):
            call()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)  # as a program that the signal SIGINT has ended
    except OSError as error:
        if error.filename is not None:
            raise
        # What is still in the buffer goes nowhere, or Python would complain at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            sys.exit(141)  # as a program that the signal SIGPIPE has ended
        sys.exit(f"error: the output cannot be written: {error.strerror}")


def asked(command: Command | dict[str, Command], name: str | None) -> list[Command]:
    """The call that the command line asks for, or none if it asks for help.

    Fire refuses an option that it does not know only after the call: so it gets one that waits.
    """
    calls: list[Command] = []

    def later(function: Command) -> Command:
        @wraps(function)
        def keep(*args: object, **options: object) -> None:
            calls.append(partial(function, *args, **options))

        return keep

    if isinstance(command, dict):
        fire.Fire({word: later(function) for word, function in command.items()}, name=name)
    else:
        fire.Fire(later(command), name=name)
    return calls

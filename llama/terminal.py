"""Running a command of ours in whatever terminal or pipe there is."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Any

import fire


def run(
    command: Callable[..., Any] | dict[str, Callable[..., Any]], name: str | None = None
) -> None:
    """Call `command` with the arguments of the command line.

    A character that the terminal lacks gets a substitute, and so does one that the input breaks;
    a reader that has gone away, as `head` does, ends the command in silence.
    """
    for stream, errors in ((sys.stdout, "backslashreplace"), (sys.stdin, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    try:
        fire.Fire(command, name=name)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        # What is still in the buffer goes nowhere, or Python would complain at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)  # as a program that the signal SIGPIPE has ended

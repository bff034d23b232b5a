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
        fire.Fire(command, name=name)
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

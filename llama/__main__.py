"""The command line: `python -m llama COMMAND`."""

from __future__ import annotations

import signal
import sys

from llama import repl
from llama.checkpoints.convert import convert
from llama.checkpoints.load import describe, find_checkpoint, validation_errors
from llama.cli import Command, run, with_model
from llama.errors import LlamaError, checked_path
from llama.generation import Llama
from llama.memory import memory


def inspect(folder: str) -> None:
    """Print what a checkpoint is; exit with status 1 if it cannot be used.

    Args:
        folder: in Meta's or Hugging Face's layout.
    """
    checkpoint = find_checkpoint(checked_path(folder, "folder"))
    errors = validation_errors(checkpoint)
    for key, value in {**describe(checkpoint), "problems": str(len(errors) or "none")}.items():
        print(f"{key:12} {value}")
    if errors:
        raise LlamaError("\n".join(errors))


def chat(
    llama: Llama,
    *,
    system: str | None = None,
    temperature: float = 0.6,
    top_p: float = 0.9,
    max_gen_len: int | None = None,
) -> None:
    """Chat in the terminal.

    Args:
        system: a system message.
        temperature: 0 always takes the most likely token.
        top_p: sample from the smallest set of tokens whose cumulative probability exceeds it.
        max_gen_len: new tokens of each answer; default: as many as the context has room for.
    """
    options = {"temperature": temperature, "top_p": top_p, "max_gen_len": max_gen_len}
    repl.chat(llama, system=system, options=options)


COMMANDS: dict[str, Command] = {
    "chat": with_model(chat),
    "inspect": inspect,
    "convert": convert,
    "memory": memory,
}


def main() -> None:
    """Run the command that the command line names."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that half a file is removed
    run(COMMANDS, name="llama")


if __name__ == "__main__":
    main()

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
from llama.sampling import SamplingParams


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


def chat(llama: Llama, params: SamplingParams, *, system: str | None = None) -> None:
    """Chat in the terminal.

    Args:
        system: a system message.
    """
    repl.chat(llama, params, system)


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

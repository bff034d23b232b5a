"""The command line: `python -m llama COMMAND`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from llama.checkpoints.convert import convert
from llama.checkpoints.load import describe, find_checkpoint, validation_errors
from llama.cli import run
from llama.errors import LlamaError, checked_path
from llama.memory import memory


def inspect(folder: str) -> None:
    """Print what a checkpoint is; exit with status 1 if it cannot be used.

    Args:
        folder: in Meta's or Hugging Face's layout.
    """
    checkpoint = find_checkpoint(checked_path(str(folder), "folder"))
    errors = validation_errors(checkpoint)
    for key, value in {**describe(checkpoint), "problems": str(len(errors) or "none")}.items():
        print(f"{key:12} {value}")
    if errors:
        raise LlamaError("\n".join(errors))


COMMANDS: dict[str, Callable[..., None]] = {
    "inspect": inspect,
    "convert": convert,
    "memory": memory,
}


def main() -> None:
    """Run a command; a mistake is one line on standard error and the exit status 1."""
    for name in ("SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
            signal.signal(number, lambda n, _: sys.exit(128 + n))  # so that half a file is removed
    try:
        run(COMMANDS, name="python -m llama")
    except LlamaError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

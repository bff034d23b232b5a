"""The command line: `python -m llama COMMAND`."""

from __future__ import annotations

import sys
from collections.abc import Callable

import fire

from llama.errors import LlamaError

COMMANDS: dict[str, Callable[..., None]] = {}


def main() -> None:
    try:
        fire.Fire(COMMANDS, name="python -m llama")
    except LlamaError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

"""The command line: `python -m llama COMMAND`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

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


def chat(build: Callable[[], Llama], params: SamplingParams, *, system: str | None = None) -> None:
    """Chat in the terminal.

    Args:
        system: a system message.
    """
    with build() as llama:
        repl.chat(llama, params, system)


def serve(
    build: Callable[[], Llama],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    api_key: str | None = None,
    max_queue: int = 256,
    grace: int = 30,
    cors: str | None = None,
    ckpt_dir: str | None = None,
    timeout_s: float = 600,
) -> None:
    """Serve OpenAI's HTTP API, and a page to chat with.

    Args:
        host: the address to listen on; 0.0.0.0 is every IPv4 address of this machine.
        port: 0 takes a free one.
        name: of the model in the API; default: the name of the checkpoint's folder.
        api_key: clients must send this key; default: the variable LLAMA_API_KEY, if it is set.
        max_queue: calls that may wait for a free row; more are answered with 429.
        grace: seconds that running answers get to finish after SIGTERM.
        cors: an origin whose pages may call this server, or *.
    """
    try:
        from llama.server import serve
    except ImportError as error:
        packages = "pip install fastapi uvicorn prometheus_client"
        raise LlamaError(f"serving needs {error.name}: {packages}") from error
    listener = serve.listen(host, port) if int(os.environ.get("RANK", 0)) == 0 else None
    with build() as llama:
        serve.serve(
            llama,
            listener,
            name=name or (Path(ckpt_dir).resolve().name if ckpt_dir else "stories"),
            api_key=api_key or os.environ.get("LLAMA_API_KEY"),
            max_queue=max_queue,
            grace=grace,
            cors=cors,
            timeout_s=timeout_s,
        )


COMMANDS: dict[str, Command] = {
    "chat": with_model(chat),
    "serve": with_model(serve, max_batch_size=8),
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

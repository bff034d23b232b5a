"""The command line: `python -m llama COMMAND`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from json import dumps
from pathlib import Path

from tqdm import tqdm

from llama import repl
from llama.checkpoints.convert import convert
from llama.checkpoints.load import describe, find_checkpoint, validation_errors
from llama.cli import Command, run, with_model
from llama.errors import LlamaError, checked_path, require
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


def generate(
    build: Callable[[], Llama],
    params: SamplingParams,
    *,
    prompt: str | None = None,
    file: str | None = None,
    n: int = 1,
    json: bool = False,
    out: str | None = None,
) -> None:
    """Continue a prompt, or each line of a file.

    Args:
        prompt: the text; - reads standard input.
        file: a file with a prompt on each line.
        n: answers to each prompt.
        json: print a line of JSON for each answer, and nothing before it is complete.
        out: append the lines of JSON to this file, and skip the answers that it holds already.
    """
    require((prompt is None) != (file is None), "pass --prompt TEXT or --file FILE")
    require(n >= 1, f"--n {n}: it must be at least 1")
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        prompts = [text] if text is not None else Path(file or "").read_text("utf-8").splitlines()
        n_done = len(Path(out).read_bytes().splitlines()) if out and Path(out).exists() else 0
    except (OSError, UnicodeDecodeError) as error:
        raise LlamaError(f"the prompts or the answers cannot be read: {error}") from error
    wanted = [text for text in prompts for _ in range(n)][n_done:]
    with build() as llama:
        show = partial(print, flush=True) if llama.rank == 0 else lambda *_, **__: None
        if len(wanted) == 1 and not (json or out):
            show(wanted[0], end="")
            for piece in llama.stream_text(wanted[0], params=params):
                show(piece, end="")
            show()
            return
        size = 4 * llama.model.params.max_batch_size
        with open(out, "a") if out and llama.rank == 0 else nullcontext(sys.stdout) as target:
            for i in tqdm(range(0, len(wanted), size), disable=None if llama.rank == 0 else True):
                batch = wanted[i : i + size]
                answers = llama.text_completion(batch, params=params)
                for asked, answer in zip(batch, answers, strict=True):
                    plain = asked + answer["generation"]
                    show(dumps({"prompt": asked, **answer}) if json or out else plain, file=target)


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
    "generate": with_model(generate, max_batch_size=8),
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

"""The command line: `python -m llama COMMAND`."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from llama import repl
from llama.checkpoints.convert import convert
from llama.checkpoints.reader import DTYPES, find_checkpoint, problems
from llama.cli import Command, run, with_model
from llama.errors import LlamaError, checked_path
from llama.generation import Llama
from llama.memory import memory
from llama.parameters import OUTPUT
from llama.sampling import SamplingParams
from llama.sizes import format_bytes

FORMATS = {"meta": "Meta", "hf": "Hugging Face", "quantized": "quantized"}


def inspect(folder: str) -> None:
    """Print what a checkpoint is; exit with status 1 if it cannot be used.

    Args:
        folder: in Meta's or Hugging Face's layout.
    """
    checkpoint = find_checkpoint(checked_path(folder, "folder"))
    args, tied, path = checkpoint.args, checkpoint.config.tied, checkpoint.path
    stored = {k: p for k, p in checkpoint.parameters.items() if not (tied and k == OUTPUT)}
    n_parameters = sum(math.prod(parameter.shape) for parameter in stored.values())
    dtypes = {str(part.tensor.dtype) for parts in checkpoint.parts.values() for part in parts}
    dtypes = dtypes if checkpoint.quantized is None else {checkpoint.quantized}
    tokenizers = [name for name in ("tokenizer.model", "tokenizer.json") if (path / name).exists()]
    found = problems(checkpoint)
    facts = {
        "format": FORMATS[checkpoint.format],
        "shards": f"{len(checkpoint.files)}, {checkpoint.files[0].suffix}",
        "parameters": f"{n_parameters:,} in {len(stored)} tensors",
        "dtype": ", ".join(sorted(dtypes)).replace("torch.", ""),
        "layers": f"{args.n_layers} of dim {args.dim}, feed-forward {args.ffn_dim}",
        "heads": f"{args.n_heads}, {args.kv_heads} key/value heads, {args.head_dim} wide",
        "vocabulary": f"{args.vocab_size}" + ", output tied to the embedding" * tied,
        "context": checkpoint.context or "not said",
        "tokenizer": ", ".join(tokenizers) or "none in this folder",
    }
    facts |= {
        f"as {name}": format_bytes(n_parameters * dtype.itemsize) for name, dtype in DTYPES.items()
    }
    facts["problems"] = len(found) or "none"
    for key, value in facts.items():
        print(f"{key:12} {value}")
    if found:
        raise LlamaError("\n".join(found))


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
        from llama.server import app
    except ImportError as error:
        packages = "pip install fastapi uvicorn prometheus_client"
        raise LlamaError(f"serving needs {error.name}: {packages}") from error
    listener = app.listen(host, port) if int(os.environ.get("RANK", 0)) == 0 else None
    with build() as llama:
        app.serve(
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

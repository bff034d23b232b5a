"""The command line: `python -m llama COMMAND`."""

from __future__ import annotations

import math
import signal
import sys

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

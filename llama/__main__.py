"""The command line: `python -m llama COMMAND`."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable

from llama.checkpoints.convert import convert
from llama.checkpoints.reader import DTYPES, find_checkpoint, problems
from llama.cli import run
from llama.errors import LlamaError, checked_path
from llama.memory import memory
from llama.parameters import OUTPUT
from llama.sizes import format_bytes

FORMATS = {"meta": "Meta", "hf": "Hugging Face", "quantized": "quantized"}


def inspect(folder: str) -> None:
    """Print what a checkpoint is; exit with status 1 if it cannot be used.

    Args:
        folder: in Meta's or Hugging Face's layout.
    """
    checkpoint = find_checkpoint(checked_path(str(folder), "folder"))
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

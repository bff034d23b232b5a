"""The command line: `python -m llama COMMAND`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import fire

from llama.checkpoint import DTYPES, find_checkpoint, problems
from llama.convert import convert
from llama.errors import LlamaError
from llama.kv_cache import format_bytes


def inspect(folder: str) -> None:
    """Print what a checkpoint is; exit with status 1 if it cannot be used.

    Args:
        folder: in Meta's or Hugging Face's layout.
    """
    checkpoint = find_checkpoint(str(folder))
    args, parameters = checkpoint.args, checkpoint.parameters
    dtypes = {str(part.tensor.dtype) for parts in checkpoint.parts.values() for part in parts}
    n_parameters = sum(math.prod(p.shape) for p in parameters.values())
    found = problems(checkpoint)
    layout = {"meta": "Meta", "hf": "Hugging Face"}[checkpoint.format]
    tokenizers = [
        f for f in ("tokenizer.model", "tokenizer.json") if (checkpoint.path / f).exists()
    ]
    facts = {
        "format": f"{layout}, {checkpoint.files[0].suffix} in {len(checkpoint.files)} shards",
        "parameters": f"{n_parameters:,} in {len(parameters)} tensors",
        "dtype": ", ".join(sorted(dtypes)).replace("torch.", ""),
        "layers": f"{args.n_layers} of dim {args.dim}, feed-forward {args.ffn_dim}",
        "heads": f"{args.n_heads}, {args.kv_heads} key/value heads, {args.head_dim} wide",
        "vocabulary": f"{args.vocab_size}" + ", tied output" * checkpoint.config.tied,
        "context": checkpoint.context or "not named",
        "tokenizer": ", ".join(tokenizers) or "none in this folder",
        **{f"in {name}": format_bytes(args.weights_bytes(dtype)) for name, dtype in DTYPES.items()},
        "problems": len(found) or "none",
    }
    for key, value in facts.items():
        print(f"{key:12} {value}")
    if found:
        raise LlamaError("\n".join(found))


COMMANDS: dict[str, Callable[..., None]] = {"inspect": inspect, "convert": convert}


def main() -> None:
    try:
        fire.Fire(COMMANDS, name="python -m llama")
    except LlamaError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

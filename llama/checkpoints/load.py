"""The steps of `Llama.build`: its arguments, the tokenizer, this rank's part of the model."""

from __future__ import annotations

from pathlib import Path

import torch

from llama.checkpoints import reader as checkpoints
from llama.errors import LlamaError, checked_path, require
from llama.kv_cache import checked_dtype
from llama.model import ModelArgs, Transformer
from llama.parallel import ranks
from llama.parallel.groups import Runtime
from llama.sizes import require_room
from llama.tokenizer import Tokenizer


def load_tokenizer(ckpt_dir: Path, tokenizer_path: str | Path | None, vocab_size: int) -> Tokenizer:
    """The tokenizer at a path, or the one that lies with the checkpoint."""
    tokenizer = Tokenizer(_find_tokenizer(ckpt_dir, tokenizer_path))
    require(
        tokenizer.n_words <= vocab_size,
        f"the tokenizer has {tokenizer.n_words} pieces, and the checkpoint has embeddings for "
        f"{vocab_size}: pass the tokenizer.model that belongs to the checkpoint",
    )
    return tokenizer


def _find_tokenizer(ckpt_dir: Path, tokenizer_path: str | Path | None) -> Path:
    if tokenizer_path is not None:
        return checked_path(tokenizer_path, "tokenizer_path")
    for folder in (ckpt_dir, ckpt_dir.parent):
        if (folder / "tokenizer.model").is_file():
            return folder / "tokenizer.model"
    hint = ""
    if (ckpt_dir / "tokenizer.json").is_file():
        hint = (
            ", the SentencePiece file from the model's own download page (all of Llama 2 share "
            "one); the tokenizer.json that is there cannot take its place"
        )
    raise LlamaError(
        f"there is no tokenizer.model in {str(ckpt_dir)!r} nor in the folder above it: "
        f"pass tokenizer_path{hint}"
    )


def load_model(
    args: ModelArgs,
    checkpoint: checkpoints.Checkpoint,
    runtime: Runtime,
    kv_cache_dtype: str | torch.dtype | None,
    quantize: str | None = None,
) -> Transformer:
    """This rank's part of the model, on its device."""
    device, dtype = runtime.device, runtime.dtype
    cache_dtype = checked_dtype(dtype if kv_cache_dtype is None else kv_cache_dtype)
    kind = checkpoint.check_quantize(quantize, runtime.model_parallel_size)
    require_room(
        args,
        device=device,
        dtype=dtype,
        cache_dtype=cache_dtype,
        ranks=runtime.model_parallel_size,
        tied=checkpoint.config.tied,
        quantize=kind,
    )
    # Outside inference mode, so that torch counts the writes to the cache: see CacheRecord.
    with torch.inference_mode(False):
        with torch.device("meta"):
            model = Transformer(args)
        shown = runtime.rank == 0
        checkpoints.load(
            model, checkpoint, device=device, dtype=dtype, quantize=kind, progress=shown
        )
        model.allocate_state(device, cache_dtype)
    ranks.check_weights(model)
    return model.eval()

"""Open a checkpoint of any format, and give a model this rank's weights."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from fairscale.nn.model_parallel import initialize as groups
from torch import nn
from tqdm import tqdm

from llama import quantize as quant
from llama.chat import choose_chat_format
from llama.checkpoints.adapter import open_adapter
from llama.checkpoints.files import DTYPES
from llama.checkpoints.gguf import metadata_tokenizer, open_gguf
from llama.checkpoints.hf import open_hf
from llama.checkpoints.meta import SHARD, open_meta
from llama.checkpoints.quantized import open_quantized
from llama.checkpoints.reader import Checkpoint, file_errors
from llama.errors import LlamaError, checked_path, require
from llama.kv_cache import checked_dtype
from llama.model import ModelArgs, Transformer
from llama.parallel import ranks
from llama.parallel.groups import Runtime
from llama.parameters import OUTPUT, padded
from llama.sizes import format_bytes, require_room
from llama.tokenizer import TOKENIZER_FILES, BaseTokenizer, open_tokenizer

_MAX_PADDING = 1024  # rows of the embedding without a token; published models have up to 250
_FORMATS = {"meta": "Meta", "hf": "Hugging Face", "quantized": "quantized", "gguf": "GGUF"}


def open_checkpoint(ckpt_dir: Path | str, *, adapter: Path | str | None = None) -> Checkpoint:
    """Recognise a folder, or a GGUF file, and check it against what it says of itself.

    `adapter` is a folder with LoRA as PEFT saves it, which is added to the weights.

    Reads JSON and the headers of the weight files; of the weights only the norms, and an output
    layer that is stored though it is said to be tied.

    Raises:
        LlamaError: the folder does not hold one complete and consistent checkpoint.
    """
    checkpoint = find_checkpoint(ckpt_dir)
    errors = file_errors(checkpoint)
    if errors:
        more = f" ({len(errors) - 1} more: python -m llama inspect {checkpoint.path})"
        raise LlamaError(errors[0] + more * (len(errors) > 1))
    if adapter is None:
        return checkpoint
    full = f"{checkpoint.path} is quantized, and an adapter needs the full checkpoint: pass that"
    require(checkpoint.quantized is None, full)
    path = checked_path(adapter, "adapter")
    found = open_adapter(path, checkpoint.parameters, checkpoint.args.head_dim)
    return replace(checkpoint, adapter=found)


def find_checkpoint(ckpt_dir: Path | str) -> Checkpoint:
    """`open_checkpoint` without the check of the tensors."""
    path = Path(ckpt_dir)
    if path.suffix == ".gguf" and path.is_file():
        return cast(Checkpoint, open_gguf(path))
    if not path.is_dir():
        state = "is a file" if path.exists() else "does not exist"
        raise LlamaError(f"{str(path)!r:.80} {state}: pass the folder that holds the checkpoint")
    readable = os.access(path, os.R_OK | os.X_OK)
    require(readable, f"{str(path)!r:.80} is not readable: change its permissions")
    for opener in (open_meta, open_hf, open_quantized, open_gguf):
        checkpoint = opener(path)
        if checkpoint is not None:
            return checkpoint
    raise LlamaError(_what_is_missing(path))


def _what_is_missing(path: Path) -> str:
    held = sorted(file.name for file in path.iterdir())
    has_shards = any(SHARD.fullmatch(name) for name in held)
    if "params.json" in held or has_shards:
        missing = "params.json" if has_shards else "consolidated.00.pth"
        return f"{path / missing} is missing: download it as well"
    if "adapter_config.json" in held:
        return f"{path} holds an adapter only: pass the base model, and this folder as adapter="
    listed = ", ".join(held[:8]) + ", ..." * (len(held) > 8) if held else "nothing"
    # One level down, or as the Hub's cache keeps a repository: snapshots/COMMIT/.
    patterns = [f"{up}/{name}.json" for up in ("*", "*/*") for name in ("params", "config")]
    inner = sorted(file.parent for pattern in patterns for file in path.glob(pattern))
    hint = f"; did you mean {inner[0]}?" if inner else ""
    return (
        f"{path} holds neither params.json with consolidated.00.pth (Meta) nor config.json with "
        f"model.safetensors (Hugging Face), but {listed:.300}{hint}"
    )


def find_tokenizer(path: Path) -> Path:
    """The tokenizer in a checkpoint's folder; Meta's folders share the one in the folder above."""
    folder = Path(os.path.abspath(path))
    meta = not (folder / "config.json").is_file()
    for place in (folder, folder.parent) if meta else (folder,):
        for name in TOKENIZER_FILES:
            if (place / name).is_file():
                return place / name
    where = f"in {str(folder)!r}" + " nor in the folder above it" * meta
    names = ", ".join(TOKENIZER_FILES)
    raise LlamaError(f"there is none of {names} {where}: download it, or pass tokenizer_path")


def load_tokenizer(checkpoint: Checkpoint, path: str | Path | None = None) -> BaseTokenizer:
    """The tokenizer at a path, or the one that comes with the checkpoint."""
    text = checkpoint.text
    if path is None and checkpoint.format == "gguf":
        tokenizer = metadata_tokenizer(checkpoint)
    else:
        path = find_tokenizer(checkpoint.path) if path is None else path
        tokenizer = open_tokenizer(path, eos_ids=text.eos_ids)
    both = f"the tokenizer has {tokenizer.n_words} tokens, the checkpoint {checkpoint.vocab_size}"
    fits = 0 <= checkpoint.vocab_size - tokenizer.n_words < _MAX_PADDING
    require(fits, f"{both}: pass the tokenizer that belongs to the checkpoint")
    tokenizer.adds_bos = tokenizer.adds_bos if text.bos is None else text.bos
    return tokenizer


def validation_errors(checkpoint: Checkpoint) -> list[str]:
    """Why `Llama.build` would refuse the checkpoint, a sentence each; empty: it would not."""
    errors = file_errors(checkpoint)
    try:
        load_tokenizer(checkpoint)
    except LlamaError as error:
        errors.append(str(error))
    return errors


def describe(checkpoint: Checkpoint) -> dict[str, str]:
    """What `inspect` prints of a checkpoint, by label."""
    args, tied = checkpoint.args, checkpoint.config.tied
    stored = [p for name, p in checkpoint.parameters.items() if not (tied and name == OUTPUT)]
    n_parameters = sum(torch.Size(parameter.shape).numel() for parameter in stored)
    tensors = [part.tensor for parts in checkpoint.parts.values() for part in parts]
    dtypes = {t.kind.name if hasattr(t, "kind") else str(t.dtype) for t in tensors}
    dtype = checkpoint.quantized or ", ".join(sorted(dtypes)).replace("torch.", "")
    try:
        tokenizer = load_tokenizer(checkpoint)
        text = {
            "tokenizer": f"{type(tokenizer).__name__}, {tokenizer.n_words} tokens",
            "EOS": ", ".join(map(str, tokenizer.eos_ids)),
            "chat format": choose_chat_format(tokenizer, checkpoint.text).name,
        }
    except LlamaError:
        text = {"tokenizer": "none that can be used"}
    facts = {
        "format": _FORMATS[checkpoint.format],
        "shards": f"{len(checkpoint.files)}, {checkpoint.files[0].suffix}",
        "parameters": f"{n_parameters:,} in {len(stored)} tensors",
        "dtype": dtype,
        "layers": f"{args.n_layers} of dim {args.dim}, feed-forward {args.ffn_dim}",
        "heads": f"{args.n_heads}, {args.kv_heads} key/value heads, {args.head_dim} wide",
        "vocabulary": f"{args.vocab_size}" + ", output tied to the embedding" * tied,
        "context": str(checkpoint.context or "not stated"),
        **text,
    }
    sizes = {f"as {name}": n_parameters * dtype.itemsize for name, dtype in DTYPES.items()}
    return facts | {label: format_bytes(size) for label, size in sizes.items()}


def load(
    model: Transformer,
    checkpoint: Checkpoint,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    quantize: str | None = None,
    progress: bool = True,
) -> None:
    """Give `model`, built under `torch.device("meta")`, this rank's weights.

    With `quantize`, each is quantized before the next is read. The caller then allocates what no
    checkpoint stores: `model.allocate_state(device, dtype)`.
    """
    rank, n_ranks = groups.get_model_parallel_rank(), groups.get_model_parallel_world_size()
    kind = checkpoint.check_quantize(quantize, n_ranks)
    named = list(model.named_parameters())
    if kind is not None:  # the largest first: each is in memory twice while it is quantized
        named.sort(key=lambda item: -item[1].numel())
    total = sum(p.numel() for _, p in named) * dtype.itemsize
    # `disable=None`: only on a terminal.
    hidden: Any = None if progress else True
    with tqdm(None, "loading", total, unit="B", unit_scale=True, delay=1, disable=hidden) as bar:
        for name, parameter in named:
            module = model.get_submodule(name.removesuffix(".weight"))
            bar.update(parameter.numel() * dtype.itemsize)
            if kind is not None and parameter.ndim == 2:
                parts = checkpoint.read_quantized(name, kind, rank, n_ranks)
                quant.install(module, parts, torch.device(device))
                continue
            if name == OUTPUT and checkpoint.config.tied and n_ranks == 1:
                tensor = model.tok_embeddings.weight.data
            else:
                tensor = checkpoint.read(name, rank, n_ranks, device=device, dtype=dtype)
            assert tensor.shape == parameter.shape, (name, tensor.shape, parameter.shape)
            module.weight = nn.Parameter(tensor, requires_grad=False)


def load_model(
    args: ModelArgs,
    checkpoint: Checkpoint,
    runtime: Runtime,
    kv_cache_dtype: str | torch.dtype | None,
    quantize: str | None = None,
) -> Transformer:
    """This rank's part of the model, on its device."""
    device, dtype, n_ranks = runtime.device, runtime.dtype, runtime.model_parallel_size
    vocab_size = args.vocab_size
    args = replace(args, vocab_size=padded(vocab_size, n_ranks))
    cache_dtype = checked_dtype(dtype if kv_cache_dtype is None else kv_cache_dtype)
    kind = checkpoint.check_quantize(quantize, n_ranks)
    require_room(
        args,
        device=device,
        dtype=dtype,
        cache_dtype=cache_dtype,
        ranks=n_ranks,
        tied=checkpoint.config.tied,
        quantize=kind,
    )
    # Outside inference mode, so that torch counts the writes to the cache.
    with torch.inference_mode(False):
        with torch.device("meta"):
            model = Transformer(args)
            model.vocab_size = vocab_size
        progress = runtime.rank == 0
        load(model, checkpoint, device=device, dtype=dtype, quantize=kind, progress=progress)
        model.allocate_state(device, cache_dtype)
    ranks.check_weights(model)
    return model.eval()

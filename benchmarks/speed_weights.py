"""Random weights of a named shape, in each layout that an engine of speed.py reads, made once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from llama.checkpoints.convert import convert
from llama.checkpoints.files import DTYPES
from llama.checkpoints.load import open_checkpoint
from llama.model import ModelArgs
from llama.parameters import parameters, require_split

_KEYS = ("dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "vocab_size")
SHAPES = {
    "tiny": (256, 2, 8, 4, 704, 512),
    "110m": (768, 12, 12, 12, 2048, 32000),
    "1b": (2048, 22, 32, 4, 5632, 32000),
    "7b": (4096, 32, 32, 32, 11008, 32000),
}
CACHE = Path(os.environ.get("LLAMA_BENCHMARKS", Path.home() / ".cache" / "llama-benchmarks"))


def meta(shape: str, dtype: str, shards: int = 1) -> Path:
    """A Meta folder; made shard by shard."""
    for asked, known in ((shape, SHAPES), (dtype, DTYPES)):
        if asked not in known:
            raise SystemExit(f"{asked!r} is none of {', '.join(known)}")
    folder = CACHE / f"{shape}-{dtype}-{shards}"
    if folder.exists():
        return folder
    params = {**dict(zip(_KEYS, SHAPES[shape], strict=True)), "norm_eps": 1e-5}
    args = ModelArgs(**params)
    require_split(args, shards, "shards")
    partial = folder.with_suffix(".partial")
    partial.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for i in range(shards):
        shard = {}
        for name, parameter in parameters(args).items():
            size, scale = parameter.local_shape(shards), parameter.shape[-1] ** -0.5
            weight = torch.randn(size, generator=generator) * scale
            shard[name] = (weight if len(size) == 2 else torch.ones(size)).to(DTYPES[dtype])
        torch.save(shard, partial / f"consolidated.{i:02d}.pth")
    (partial / "params.json").write_text(json.dumps(params))
    return partial.rename(folder)


def hugging_face(folder: Path) -> None:
    """The same weights beside `folder`."""
    target = folder.with_name(folder.name + "-hf")
    if not target.exists():
        convert(str(folder), str(target), to="hf")


def gguf(folder: Path, kind: str) -> None:
    """The same weights as F32, F16, Q8_0 or Q4_0 in a file of llama.cpp, without a tokenizer."""
    import gguf as library

    file = folder.with_name(f"{folder.name}.{kind}.gguf")
    if file.exists():
        return
    checkpoint, names = open_checkpoint(folder), gguf_names()
    args, partial = checkpoint.args, file.with_suffix(".partial")
    writer = library.GGUFWriter(partial, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(args.dim)
    writer.add_block_count(args.n_layers)
    writer.add_feed_forward_length(args.ffn_dim)
    writer.add_head_count(args.n_heads)
    writer.add_head_count_kv(args.kv_heads)
    writer.add_layer_norm_rms_eps(args.norm_eps)
    writer.add_rope_dimension_count(args.head_dim)
    writer.add_vocab_size(args.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    quantization = library.GGMLQuantizationType[kind]
    for name in checkpoint.parameters:
        *layer, part = name.removesuffix(".weight").removeprefix("layers.").rsplit(".", 1)
        number = f"blk.{layer[0].split('.')[0]}." if layer else ""
        tensor = checkpoint.read(name, dtype=torch.float32).numpy()
        if tensor.ndim == 2:
            data = library.quants.quantize(tensor, quantization)
            writer.add_tensor(f"{number}{names[part]}.weight", data, raw_dtype=quantization)
        else:
            writer.add_tensor(f"{number}{names[part]}.weight", tensor.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(file)


def gguf_names() -> dict[str, str]:
    ours = "tok_embeddings norm output wq wk wv wo w1 w2 w3 attention_norm ffn_norm"
    theirs = "token_embd output_norm output attn_q attn_k attn_v attn_output ffn_gate ffn_down"
    theirs += " ffn_up attn_norm ffn_norm"
    return dict(zip(ours.split(), theirs.split(), strict=True))

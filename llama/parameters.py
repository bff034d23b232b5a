"""The table of parameters: name, shape, split axis, and the name in other formats."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import torch

from llama.errors import require
from llama.model import ModelArgs

# The full shape, the axis that ranks and Meta's shards split (None: each has all of it), and the
# names in a Hugging Face folder and in GGUF (without `.weight`). A layer's names begin with
# `layers.N.`, `model.layers.N.` or `blk.N.`.
_OF_THE_MODEL = {
    "tok_embeddings.weight": (("vocab", "dim"), 1, "model.embed_tokens.weight", "token_embd"),
    "norm.weight": (("dim",), None, "model.norm.weight", "output_norm"),
    "output.weight": (("vocab", "dim"), 0, "lm_head.weight", "output"),
}
_OF_A_LAYER = {
    "attention.wq.weight": (("q", "dim"), 0, "self_attn.q_proj.weight", "attn_q"),
    "attention.wk.weight": (("kv", "dim"), 0, "self_attn.k_proj.weight", "attn_k"),
    "attention.wv.weight": (("kv", "dim"), 0, "self_attn.v_proj.weight", "attn_v"),
    "attention.wo.weight": (("dim", "q"), 1, "self_attn.o_proj.weight", "attn_output"),
    "feed_forward.w1.weight": (("ffn", "dim"), 0, "mlp.gate_proj.weight", "ffn_gate"),
    "feed_forward.w2.weight": (("dim", "ffn"), 1, "mlp.down_proj.weight", "ffn_down"),
    "feed_forward.w3.weight": (("ffn", "dim"), 0, "mlp.up_proj.weight", "ffn_up"),
    "attention_norm.weight": (("dim",), None, "input_layernorm.weight", "attn_norm"),
    "ffn_norm.weight": (("dim",), None, "post_attention_layernorm.weight", "ffn_norm"),
}
EMBEDDING, OUTPUT = "tok_embeddings.weight", "output.weight"
_ROTARY = ("attention.wq.weight", "attention.wk.weight")  # see `permute_heads`


# What torch.compile, DataParallel and PEFT put in front of names.
_WRAPPERS = re.compile(r"_orig_mod\.|^(?:(?:_orig_mod|module|base_model\.model)\.)+")


def unwrapped(names: Iterable[str]) -> dict[str, str]:
    """The names without what wrappers of a model put in front: plain name -> name."""
    return {_WRAPPERS.sub("", name): name for name in names}


class Parameter(NamedTuple):
    shape: tuple[int, ...]
    axis: int | None
    hf_name: str
    gguf_name: str
    rotary: bool  # Hugging Face permutes its rows

    pads: bool = False  # the first axis is padded to a multiple of the ranks

    def local_shape(self, ranks: int) -> tuple[int, ...]:
        """The shape of each rank's part."""
        return tuple(len(interval) for interval in self.interval(0, ranks))

    def interval(self, rank: int, ranks: int) -> list[range]:
        """The part of each axis that a rank needs, which may end behind the last row."""
        sizes = list(self.shape)
        if self.pads:
            sizes[0] = padded(sizes[0], ranks)
        ends = [(0, n) for n in sizes]
        if self.axis is not None:
            n = sizes[self.axis] // ranks
            ends[self.axis] = rank * n, (rank + 1) * n
        return [range(*end) for end in ends]


def padded(vocab_size: int, ranks: int) -> int:
    """The rows of the vocabulary, with those that make it a multiple of the ranks."""
    return -(-vocab_size // ranks) * ranks


def parameters(args: ModelArgs) -> dict[str, Parameter]:
    """Every parameter of the model by name."""
    q, kv = args.n_heads * args.head_dim, args.kv_heads * args.head_dim
    sizes = {"vocab": args.vocab_size, "dim": args.dim, "q": q, "kv": kv, "ffn": args.ffn_dim}
    tables = [("", "", "", _OF_THE_MODEL)]
    for i in range(args.n_layers):
        tables.append((f"layers.{i}.", f"model.layers.{i}.", f"blk.{i}.", _OF_A_LAYER))
    return {
        prefix + name: Parameter(
            tuple(sizes[s] for s in shape),
            axis,
            hf_prefix + hf_name,
            f"{gguf_prefix}{gguf_name}.weight",
            name in _ROTARY,
            shape[0] == "vocab",
        )
        for prefix, hf_prefix, gguf_prefix, table in tables
        for name, (shape, axis, hf_name, gguf_name) in table.items()
    }


def permute_heads(rows: torch.Tensor, a: int, b: int) -> torch.Tensor:
    """View the rows of each head, an a x b table, as b x a: (heads, b, a, in_features).

    Meta stores the two dimensions of a rotary pair next to each other, Hugging Face half a head
    apart: its head is a table of 2 x head_dim / 2, Meta's one of head_dim / 2 x 2.
    """
    return rows.unflatten(0, (-1, a, b)).transpose(1, 2)


def require_split(args: ModelArgs, parts: int, name: str = "ranks") -> None:
    """Refuse a number of ranks, or of shards, that cannot share the model evenly."""
    shared = {
        "heads": args.n_heads,
        "key/value heads": args.kv_heads,
        "rows of the feed-forward layers": args.ffn_dim,
    }
    if name == "shards":  # ranks pad it
        shared["rows of the vocabulary"] = args.vocab_size
    fewer = range(1, min(parts, min(shared.values()) + 1))
    possible = [str(n) for n in fewer if not any(size % n for size in shared.values())]
    for what, size in shared.items():
        require(
            size % parts == 0,
            f"{size} {what} do not divide by {parts} {name}: use {', '.join(possible[-4:])}",
        )

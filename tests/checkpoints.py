"""Tiny checkpoints, written without the code under test."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

PARAMS = {"dim": 64, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "norm_eps": 1e-5}
HIDDEN, VOCAB = 176, 1024  # no multiple of 256 gives 176
SPLIT = {"wo": 1, "w2": 1, "tok_embeddings": 1, "norm": None, "attention_norm": None}
SPLIT["ffn_norm"] = None  # everything else is split by rows


def weights(seed: int = 0, *, vocab: int = VOCAB, n_kv_heads: int = 4) -> dict[str, torch.Tensor]:
    """Random weights under Meta's names, large enough for logits that differ."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    dim, kv = PARAMS["dim"], PARAMS["dim"] * n_kv_heads // PARAMS["n_heads"]
    state = {"tok_embeddings.weight": random(vocab, dim), "output.weight": random(vocab, dim)}
    state["norm.weight"] = 1 + random(dim)
    for i in range(PARAMS["n_layers"]):
        state |= {
            f"layers.{i}.attention.wq.weight": random(dim, dim),
            f"layers.{i}.attention.wk.weight": random(kv, dim),
            f"layers.{i}.attention.wv.weight": random(kv, dim),
            f"layers.{i}.attention.wo.weight": random(dim, dim),
            f"layers.{i}.feed_forward.w1.weight": random(HIDDEN, dim),
            f"layers.{i}.feed_forward.w2.weight": random(dim, HIDDEN),
            f"layers.{i}.feed_forward.w3.weight": random(HIDDEN, dim),
            f"layers.{i}.attention_norm.weight": 1 + random(dim),
            f"layers.{i}.ffn_norm.weight": 1 + random(dim),
        }
    return state


def split(
    state: dict[str, torch.Tensor], shards: int, *, embedding_axis: int = 1
) -> list[dict[str, torch.Tensor]]:
    """What Meta's training wrote on each of its ranks."""
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(shards)]
    for name, tensor in state.items():
        axis = SPLIT.get(name.split(".")[-2], 0)
        axis = embedding_axis if name == "tok_embeddings.weight" else axis
        pieces = [tensor] * shards if axis is None else tensor.chunk(shards, axis)
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = piece.clone()
    return parts


def write_meta(
    folder: Path,
    state: dict[str, torch.Tensor] | None = None,
    *,
    shards: int = 1,
    suffix: str = "pth",
    embedding_axis: int = 1,
    **params: Any,
) -> Path:
    folder.mkdir(parents=True)
    written = {**PARAMS, "vocab_size": -1, "hidden_dim": HIDDEN, **params}
    (folder / "params.json").write_text(json.dumps(written))
    save = torch.save if suffix == "pth" else save_file
    parts = split(state or weights(), shards, embedding_axis=embedding_axis)
    for i, part in enumerate(parts):
        save(part, folder / f"consolidated.{i:02d}.{suffix}")
    return folder


def hf_model(**config: Any) -> Any:
    """A random model of transformers, in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": HIDDEN, "vocab_size": VOCAB}
    sizes |= {"max_position_embeddings": 256, "model_type": "llama"}
    made = AutoConfig.for_model(**{**sizes, **copy.deepcopy(config)})  # it adds to what it is given
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(made).eval()
    for parameter in model.parameters():
        if (
            parameter.ndim == 2
        ):  # transformers' own weights are so small that positions hardly count
            parameter.data = torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
        else:
            parameter.data = 1 + 0.1 * torch.randn_like(parameter)
    model.tie_weights()
    return model


_HF_NAMES = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
}


def meta_state(model: Any) -> dict[str, torch.Tensor]:
    """The weights of a model of transformers as Meta stores them."""
    state = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = tensor.view(-1, 2, model.config.head_dim // 2, tensor.shape[-1])
            tensor = heads.transpose(1, 2).reshape(tensor.shape)
        for theirs, ours in _HF_NAMES.items():
            name = name.replace(theirs, ours)
        state[name] = tensor.clone()
    return state


def hf_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens).logits


def tensors_of(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of each weight file, by the parsers' own means."""
    from safetensors.torch import load_file

    found = {f.name: load_file(f) for f in sorted(folder.glob("*.safetensors"))}
    return found | {f.name: torch.load(f) for f in sorted(folder.glob("*.pth"))}

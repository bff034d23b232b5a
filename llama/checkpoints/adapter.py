"""LoRA (Hu et al. 2021, arXiv:2106.09685) as PEFT saves it, added to weights as they are read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llama.checkpoints.config import require_supported
from llama.checkpoints.files import map_tensors, read_json
from llama.errors import LlamaError, require
from llama.parameters import EMBEDDING, OUTPUT, Parameter, permute_heads, unwrapped

# Keys of adapter_config.json that change the result, and what is supported of them.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", None),
}
_UNSUPPORTED = (
    *("use_dora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out", "modules_to_save"),
    *("trainable_token_indices", "rank_pattern", "alpha_pattern", "alora_invocation_tokens"),
    *("arrow_config", "layer_replication"),
)


@dataclass(frozen=True)
class Adapter:
    """The matrices A (r, in) and B (out, r) of each adapted parameter, B in Meta's rotary order."""

    matrices: dict[str, tuple[torch.Tensor, torch.Tensor]]
    scale: float

    def delta(self, name: str, box: list[range]) -> torch.Tensor | None:
        """What to add to that box of a parameter: float32, or None."""
        if name not in self.matrices:
            return None
        a, b = self.matrices[name]
        rows, columns = (slice(r.start, r.stop) for r in box)
        return self.scale * (b[rows].float() @ a[:, columns].float())


def open_adapter(path: Path, table: dict[str, Parameter], head_dim: int) -> Adapter:
    """The adapter in a folder, for a model with these parameters."""
    config = read_json(path / "adapter_config.json")
    off: dict[str, tuple[Any, ...]] = dict.fromkeys(_UNSUPPORTED, (None, False, [], {}))
    require_supported(config, _SUPPORTED | off, path)
    rank, alpha = config.get("r", 0), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, (int, float)):
        raise LlamaError(
            f"{path}: r is {rank!r:.80} and lora_alpha {alpha!r:.80}: they must be numbers above 0"
        )
    files = [path / f"adapter_model.{suffix}" for suffix in ("safetensors", "bin")]
    stored = map_tensors(next((file for file in files if file.is_file()), files[0]))
    found = {name: stored[key] for name, key in unwrapped(stored).items()}
    matrices = {}
    for name, parameter in table.items():
        stem = parameter.hf_name.removesuffix("weight")
        a, b = (found.pop(f"{stem}lora_{letter}.weight", None) for letter in "AB")
        if a is None and b is None:
            continue
        needed = [parameter.shape[0], rank, rank, parameter.shape[-1]]
        if a is None or b is None or [*b.shape, *a.shape] != needed:
            raise LlamaError(f"{path} is an adapter of another model: {stem}lora_A does not fit")
        if parameter.rotary:
            b = permute_heads(b, 2, head_dim // 2).flatten(0, 2)
        matrices[name] = a, b
    extra = [*found, *({EMBEDDING, OUTPUT} & matrices.keys())]
    rule = "not supported: only LoRA of attention and feed-forward is"
    require(not extra and len(matrices) > 0, f"{path}: {extra[:1]!r:.120} is {rule}")
    return Adapter(matrices, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))

"""What a checkpoint's JSON files say of its model, and how to write them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from llama.checkpoints.files import read_json
from llama.errors import LlamaError, require
from llama.model import ModelArgs, feed_forward_width

# What config.json and GGUF call a field of ModelArgs; params.json has the fields' own names.
_KEYS = {
    "dim": ("hidden_size", "embedding_length"),
    "n_layers": ("num_hidden_layers", "block_count"),
    "n_heads": ("num_attention_heads", "attention.head_count"),
    "hidden_dim": ("intermediate_size", "feed_forward_length"),
    "n_kv_heads": ("num_key_value_heads", "attention.head_count_kv"),
    "head_dim": ("head_dim", "attention.key_length"),
    "norm_eps": ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
    "rope_theta": ("rope_theta", "rope.freq_base"),
    "sliding_window": ("sliding_window", "attention.sliding_window"),
}
_REQUIRED = ("dim", "n_layers", "n_heads", "hidden_dim")
HF, GGUF = 0, 1  # the columns of the table
# What a model_type means when it leaves a key out.
_HF_DEFAULTS: dict[Any, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6},
    "mistral": {"rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096},
}
# Keys of config.json that would change the answer, and what is supported of them.
_HF_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "model_type": tuple(_HF_DEFAULTS),
    "architectures": (["LlamaForCausalLM"], ["MistralForCausalLM"], None),
    "hidden_act": ("silu", "swish", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
}
# What Meta's `use_scaled_rope` stands for. Two small models of Llama 3.2, recognised by their dim
# and n_layers, have another factor, which their params.json does not state.
_SCALED_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_SCALED_ROPE_FACTORS: dict[Any, float] = {(2048, 16): 32.0, (3072, 28): 32.0}
_ROPE_SCALINGS = {"linear": ("factor",), "llama3": tuple(_SCALED_ROPE)}
_CALLERS = ("max_batch_size", "max_seq_len", "prefill_chunk")  # not the checkpoint's to choose
_TOO_LARGE = 2**53  # a float is exact for every smaller whole number
CONTEXT = 4096  # of Llama 2, whose params.json does not state it


class Config(NamedTuple):
    params: dict[str, Any]  # fields of ModelArgs
    context: int | None  # how many positions the model was trained on, if stated
    tied: bool = False  # the output layer is the embedding
    vocab_size: int | None = None  # as stated; the embedding has to agree


def require_supported(
    found: Mapping[str, Any], supported: Mapping[str, tuple[Any, ...]], where: Path
) -> None:
    """Refuse a key that would change the answer in a way that is not implemented."""
    for key, values in supported.items():
        known = ", ".join(map(str, values))
        refusal = f"{where}: {key} {found.get(key)!r:.80} is not supported: only {known}"
        require(found.get(key) in values, refusal)


def read_params(file: Path) -> Config:
    """Meta's params.json."""
    found = read_json(file)
    known = {field.name for field in fields(ModelArgs)} | {"use_scaled_rope"}
    unknown = ", ".join(sorted(found.keys() - known))
    require(not unknown, f"{file}: unknown key {unknown:.80}: known are {', '.join(sorted(known))}")
    params = {key: value for key, value in found.items() if key not in _CALLERS}
    if params.pop("use_scaled_rope", False) and not params.get("rope_scaling"):
        shape = (params.get("dim"), params.get("n_layers"))
        factor = _SCALED_ROPE_FACTORS.get(shape, _SCALED_ROPE["factor"])
        params["rope_scaling"] = {"rope_type": "llama3", **_SCALED_ROPE, "factor": factor}
    return checked_config(params, file, context=found.get("max_seq_len"))


def read_config(file: Path) -> Config:
    """Hugging Face's config.json."""
    found = read_json(file)
    quantized = found.get("quantization_config") or found.get("quantization")  # or MLX
    if quantized:
        raise LlamaError(
            f"{file}: the weights are quantized ({quantized!r:.80}) in a form that is not "
            "supported: download the model's unquantized weights, and build with quantize="
        )
    # Two dialects: `rope_theta` next to `rope_scaling`, or both of them in `rope_parameters`. If
    # there are both, transformers follows the first.
    rope = found.get("rope_scaling") or found.get("rope_parameters") or {}
    require(isinstance(rope, dict), f"{file}: the rope scaling is {rope!r:.80}, not an object")
    found |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    require_supported(found, _HF_SUPPORTED, file)
    defaults = _HF_DEFAULTS[found["model_type"]]
    if "sliding_window" not in defaults and found.pop("sliding_window", None) is not None:
        warnings.warn(
            f"{file}: sliding_window is ignored: models of type {found['model_type']} have none",
            stacklevel=2,
        )
    params = named_params({**defaults, **found}.get, HF, file)
    _require_number(found.get("vocab_size"), "vocab_size", file, whole=True)
    context, tied = found.get("max_position_embeddings"), bool(found.get("tie_word_embeddings"))
    config = checked_config({**params, "rope_scaling": rope}, file, context=context)
    return config._replace(tied=tied, vocab_size=found.get("vocab_size"))


def named_params(value: Callable[[str], Any], column: int, file: Path) -> dict[str, Any]:
    """Fields of ModelArgs from the values that another format has for them."""
    params = {ours: value(names[column]) for ours, names in _KEYS.items()}
    for key in _REQUIRED:
        require(params[key] is not None, f"{file} has no {_KEYS[key][column]}: download it again")
    return params


def checked_config(params: dict[str, Any], file: Path, *, context: Any) -> Config:
    """A Config from which a model can be built; keys whose value is None are dropped."""
    _require_number(context, "the context", file, whole=True)
    params["rope_scaling"] = _rope_scaling(params.get("rope_scaling") or {}, context, file)
    params.pop("vocab_size", None)  # the rows of the embedding decide
    params = {key: value for key, value in params.items() if value is not None}
    for field in fields(ModelArgs):
        if field.name in params and field.name != "rope_scaling":
            whole = str(field.type).startswith("int")
            _require_number(params[field.name], field.name, file, whole=whole)
    args = ModelArgs(**params)
    require(args.n_layers < 10_000, f"{file}: n_layers is {args.n_layers}, more than any model has")
    if params.get("head_dim") == args.dim // args.n_heads:
        del params["head_dim"]
    multiples = [("n_heads", args.n_heads, args.kv_heads), ("head_dim", args.head_dim, 2)]
    if "head_dim" not in params:
        multiples.insert(0, ("dim", args.dim, args.n_heads))
    for what, size, part in multiples:
        require(size % part == 0, f"{file}: {what} is {size}, and must be a multiple of {part}")
    return Config(params, context)


def _rope_scaling(given: Any, context: int | None, file: Path) -> dict[str, Any] | None:
    """A rope scaling as `llama.model.rope_frequencies` takes it; None if there is none."""
    require(isinstance(given, dict), f"{file}: the rope scaling is {given!r:.80}, not an object")
    kind = str(given.get("rope_type", given.get("type", "default")))
    if any(isinstance(value, dict) for value in given.values()):
        kind = "of several kinds"
    if kind == "default":
        return None
    known = " and ".join(_ROPE_SCALINGS)
    require(
        kind in _ROPE_SCALINGS,
        f"{file}: the rope scaling {kind!r:.80} is not supported: only {known}",
    )
    given = {"original_max_position_embeddings": context, **given}
    scaling = {key: given.get(key) for key in _ROPE_SCALINGS[kind]}
    for key, value in scaling.items():
        _require_number(value or 0, f"{key} of the rope scaling", file)
    return {"rope_type": kind, **scaling}


def _require_number(value: Any, name: str, file: Path, *, whole: bool = False) -> None:
    # `json` also reads true as an int, Infinity, and numbers of any length.
    kinds = int if whole else (int, float)
    known = isinstance(value, kinds) and not isinstance(value, bool) and 0 < value < _TOO_LARGE
    kind = "a whole number" if whole else "a number"
    rule = f"{file}: {name} is {value!r:.40}, and must be {kind} above 0 and below 2**53"
    require(value is None or known, rule)


def to_params(params: dict[str, Any], context: int | None) -> dict[str, Any]:
    """A params.json. Keys that are not Meta's appear only if they differ from the default."""
    args, defaults = ModelArgs(**params), ModelArgs()
    metas = ("dim", "n_layers", "n_heads", "vocab_size", "multiple_of", "norm_eps")
    written = {
        key: value
        for key, value in vars(args).items()
        if key in metas or (key in params and value != getattr(defaults, key))
    }
    if args.hidden_dim == feed_forward_width(4 * args.dim, args.multiple_of):
        del written["hidden_dim"]
    if context not in (None, CONTEXT):
        written["max_seq_len"] = context
    return written


def to_config(params: dict[str, Any], context: int | None) -> dict[str, Any]:
    """A config.json, without what depends on the weights and on the text."""
    args = ModelArgs(**params)
    values = {**vars(args), "hidden_dim": args.ffn_dim, "n_kv_heads": args.kv_heads}
    config = {names[HF]: values[ours] for ours, names in _KEYS.items()}
    config |= {"rope_scaling": args.rope_scaling, "max_position_embeddings": context}
    name = "Llama" if args.sliding_window is None else "Mistral"
    facts: dict[str, Any] = {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower()}
    facts |= {"vocab_size": args.vocab_size, "hidden_act": "silu"}
    return facts | {key: value for key, value in config.items() if value is not None}

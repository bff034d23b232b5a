"""What `params.json` (Meta) and `config.json` (Hugging Face) say of a model, and how to say it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from llama.checkpoints.files import read_json
from llama.errors import require
from llama.model import ModelArgs, feed_forward_width

# What config.json calls a field of ModelArgs; params.json has the fields' own names.
_HF_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "sliding_window": "sliding_window",
}
_HF_REQUIRED = ("dim", "n_layers", "n_heads", "hidden_dim")
# What a model_type means when it leaves a key out.
_HF_DEFAULTS: dict[Any, dict[str, Any]] = {
    "llama": {"norm_eps": 1e-6},
    "mistral": {"norm_eps": 1e-6, "n_kv_heads": 8, "sliding_window": 4096},
}
# Keys of config.json that would change the answer, and what is supported of them.
_HF_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "model_type": tuple(_HF_DEFAULTS),
    "architectures": (["LlamaForCausalLM"], ["MistralForCausalLM"], None),
    "hidden_act": ("silu", "swish", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
}
# What Meta's `use_scaled_rope` stands for. The two small models of Llama 3.2, told by their dim and
# n_layers, have another factor, of which params.json says nothing.
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
CONTEXT = 4096  # Llama 2's, whose params.json does not say it


class Config(NamedTuple):
    params: dict[str, Any]  # fields of ModelArgs
    context: int | None  # how many positions the model was trained on, if it says so
    tied: bool  # the output layer is the embedding
    vocab_size: int | None = None  # where it has to be what the embedding has


def read_params(file: Path) -> Config:
    """Meta's params.json."""
    found = read_json(file)
    known = {field.name for field in fields(ModelArgs)} | {"use_scaled_rope", "head_dim"}
    unknown = ", ".join(sorted(found.keys() - known))
    require(not unknown, f"{file}: unknown key {unknown}: known are {', '.join(sorted(known))}")
    params = {key: value for key, value in found.items() if key not in _CALLERS}
    if params.pop("use_scaled_rope", False) and not params.get("rope_scaling"):
        shape = (params.get("dim"), params.get("n_layers"))
        factor = _SCALED_ROPE_FACTORS.get(shape, _SCALED_ROPE["factor"])
        params["rope_scaling"] = {"rope_type": "llama3", **_SCALED_ROPE, "factor": factor}
    return _checked(params, found.get("max_seq_len"), False, file)


def read_config(file: Path) -> Config:
    """Hugging Face's config.json."""
    found = read_json(file)
    # Two dialects: `rope_theta` beside `rope_scaling`, or both of them in `rope_parameters`. Where
    # both are spoken, transformers listens to the first.
    rope = found.get("rope_scaling") or found.get("rope_parameters") or {}
    require(isinstance(rope, dict), f"{file}: the rope scaling is {rope!r}, and must be an object")
    found |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    for key, supported in _HF_SUPPORTED.items():
        named = ", ".join(str(value) for value in supported)
        require(
            found.get(key) in supported,
            f"{file}: {key} {found.get(key)!r} is another model than this library computes, "
            f"which has {named}",
        )
    params: dict[str, Any] = dict(_HF_DEFAULTS[found["model_type"]])
    params |= {ours: found[theirs] for ours, theirs in _HF_KEYS.items() if theirs in found}
    for key in _HF_REQUIRED:
        require(key in params, f"{file} has no {_HF_KEYS[key]}: download it again")
    params |= {"head_dim": found.get("head_dim"), "rope_scaling": rope}
    context, tied = found.get("max_position_embeddings"), found.get("tie_word_embeddings")
    vocab_size = found.get("vocab_size")
    _require_number(vocab_size, "vocab_size", file, kinds=(int,))
    return _checked(params, context, bool(tied), file)._replace(vocab_size=vocab_size)


def _checked(params: dict[str, Any], context: Any, tied: bool, file: Path) -> Config:
    """What a model can be built from, without the keys that say nothing."""
    _require_number(context, "the context", file, kinds=(int,))
    params["rope_scaling"] = _rope_scaling(params.get("rope_scaling"), context, file)
    head_dim = params.pop("head_dim", None)
    params.pop("vocab_size", None)  # the embedding knows it
    params = {key: value for key, value in params.items() if value is not None}
    for field in fields(ModelArgs):
        if field.name in params and field.name != "rope_scaling":
            kinds = (int,) if str(field.type).startswith("int") else (int, float)
            _require_number(params[field.name], field.name, file, kinds=kinds)
    args = ModelArgs(**params)
    require(args.n_layers < 10_000, f"{file}: n_layers is {args.n_layers}, more than any model has")
    for what, whole, part in (
        ("dim", args.dim, args.n_heads),
        ("n_heads", args.n_heads, args.kv_heads),
        ("the size of a head", args.head_dim, 2),
    ):
        require(whole % part == 0, f"{file}: {what} is {whole}, and must be a multiple of {part}")
    require(
        head_dim in (None, args.head_dim),
        f"{file}: head_dim {head_dim} is not supported: only dim / n_heads is, {args.head_dim}",
    )
    return Config(params, context, tied)


def _rope_scaling(given: Any, context: int | None, file: Path) -> dict[str, Any] | None:
    """A rope scaling as `llama.model.rope_frequencies` takes it; None if there is none."""
    if not given:
        return None
    require(isinstance(given, dict), f"{file}: the rope scaling is {given!r}: it must be an object")
    kind = str(given.get("rope_type", given.get("type", "default")))
    if any(isinstance(value, dict) for value in given.values()):
        kind = "of several kinds"
    if kind == "default":
        return None
    require(
        kind in _ROPE_SCALINGS,
        f"{file}: the rope scaling {kind!r} is not supported: {' and '.join(_ROPE_SCALINGS)} are",
    )
    given = {"original_max_position_embeddings": context, **given}
    scaling = {key: given.get(key) for key in _ROPE_SCALINGS[kind]}
    for key, value in scaling.items():
        _require_number(value or 0, f"{key} of the rope scaling", file)
    return {"rope_type": kind, **scaling}


def _require_number(
    value: Any, name: str, file: Path, kinds: tuple[type[int] | type[float], ...] = (int, float)
) -> None:
    # `json` reads true as an int, too, and Infinity, and numbers of any length.
    known = isinstance(value, kinds) and not isinstance(value, bool) and 0 < value < _TOO_LARGE
    whole = "whole " * (kinds == (int,))
    require(
        value is None or known,
        f"{file}: {name} is {value!r:.40}, and must be a {whole}number above 0 and below 2**53",
    )


def to_params(params: dict[str, Any], context: int | None) -> dict[str, Any]:
    """A params.json, in which a key that is not Meta's own stands only where it says something."""
    args = ModelArgs(**params)
    written = {key: params[key] for key in ("dim", "n_layers", "n_heads", "vocab_size")}
    written |= {"multiple_of": args.multiple_of, "norm_eps": args.norm_eps}
    written |= {
        field.name: params[field.name]
        for field in fields(ModelArgs)
        if params.get(field.name, field.default) != field.default
    }
    if args.hidden_dim == feed_forward_width(4 * args.dim, args.multiple_of):
        del written["hidden_dim"]
    if context not in (None, CONTEXT):
        written["max_seq_len"] = context
    return written


def to_config(
    params: dict[str, Any], context: int | None, *, tied: bool, dtype: str
) -> dict[str, Any]:
    """A config.json."""
    args = ModelArgs(**params)
    windowed = args.sliding_window is not None
    values = {**vars(args), "hidden_dim": args.ffn_dim, "n_kv_heads": args.kv_heads}
    config = {theirs: values[ours] for ours, theirs in _HF_KEYS.items()}
    if not windowed:
        del config["sliding_window"]
    return {
        "architectures": ["MistralForCausalLM" if windowed else "LlamaForCausalLM"],
        "model_type": "mistral" if windowed else "llama",
        **config,
        "rope_scaling": args.rope_scaling,
        "vocab_size": args.vocab_size,
        "max_position_embeddings": context or CONTEXT,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
    }

"""What a checkpoint's JSON files say of its model and its text, and how to write them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from llama.checkpoints.files import read_json
from llama.errors import LlamaError, require
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
    "head_dim": "head_dim",
}
_HF_REQUIRED = ("dim", "n_layers", "n_heads", "hidden_dim")
# What a model_type means when it leaves a key out.
_HF_DEFAULTS: dict[Any, dict[str, Any]] = {
    "llama": {"norm_eps": 1e-6},
    "mistral": {"norm_eps": 1e-6, "n_kv_heads": 8, "sliding_window": 4096},
}
_WINDOWED = ("mistral",)  # the model types whose attention has a window in transformers
# Keys of config.json that would change the answer, and what is supported of them.
_HF_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "model_type": tuple(_HF_DEFAULTS),
    "architectures": (["LlamaForCausalLM"], ["MistralForCausalLM"], None),
    "hidden_act": ("silu", "swish", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
}
_QUANTIZED = ("quantization_config", "quantization")  # GPTQ, AWQ, EXL2 and others; MLX
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
_TEXT_FILES = ("config.json", "generation_config.json", "tokenizer_config.json")
_CALLERS = ("max_batch_size", "max_seq_len", "prefill_chunk")  # not the checkpoint's to choose
_TOO_LARGE = 2**53  # a float is exact for every smaller whole number
CONTEXT = 4096  # of Llama 2, whose params.json does not state it


@dataclass(frozen=True)
class TextFacts:
    """What a checkpoint says of its text."""

    layout: str  # meta, hf or gguf
    eos_ids: tuple[int, ...] = ()
    bos: bool | None = None  # whether a prompt begins with BOS; None: not stated
    chat_template: str | None = None


class Config(NamedTuple):
    params: dict[str, Any]  # fields of ModelArgs
    context: int | None  # how many positions the model was trained on, if stated
    tied: bool = False  # the output layer is the embedding
    vocab_size: int | None = None  # as stated; the embedding has to agree


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
    kind = next((found[key] for key in _QUANTIZED if found.get(key)), None)
    require(
        kind is None,
        f"{file}: the weights are quantized ({kind!r:.80}) in a form that is not supported: "
        "download the model's unquantized weights, and build with quantize='int8' or 'int4'",
    )
    # Two dialects: `rope_theta` next to `rope_scaling`, or both of them in `rope_parameters`. If
    # there are both, transformers follows the first.
    rope = found.get("rope_scaling") or found.get("rope_parameters") or {}
    require(isinstance(rope, dict), f"{file}: the rope scaling is {rope!r:.80}, not an object")
    found |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    for key, supported in _HF_SUPPORTED.items():
        require(
            found.get(key) in supported,
            f"{file}: {key} {found.get(key)!r:.80} is not supported: it must be one of "
            f"{', '.join(str(value) for value in supported)}",
        )
    model_type = found["model_type"]
    params: dict[str, Any] = dict(_HF_DEFAULTS[model_type])
    params |= {ours: found[theirs] for ours, theirs in _HF_KEYS.items() if theirs in found}
    if model_type not in _WINDOWED and params.pop("sliding_window", None) is not None:
        warnings.warn(
            f"{file}: sliding_window is ignored: models of type {model_type} have none",
            stacklevel=2,
        )
    for key in _HF_REQUIRED:
        require(key in params, f"{file} has no {_HF_KEYS[key]}: download it again")
    params["rope_scaling"] = rope
    _require_number(found.get("vocab_size"), "vocab_size", file, whole=True)
    return checked_config(
        params,
        file,
        context=found.get("max_position_embeddings"),
        tied=bool(found.get("tie_word_embeddings")),
        vocab_size=found.get("vocab_size"),
    )


def checked_config(
    params: dict[str, Any],
    file: Path,
    *,
    context: Any,
    tied: bool = False,
    vocab_size: int | None = None,
) -> Config:
    """A Config from which a model can be built; keys whose value is None are dropped."""
    _require_number(context, "the context", file, whole=True)
    params["rope_scaling"] = _rope_scaling(params.get("rope_scaling"), context, file)
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
    return Config(params, context, tied, vocab_size)


def _rope_scaling(given: Any, context: int | None, file: Path) -> dict[str, Any] | None:
    """A rope scaling as `llama.model.rope_frequencies` takes it; None if there is none."""
    if not given:
        return None
    require(isinstance(given, dict), f"{file}: the rope scaling is {given!r:.80}, not an object")
    kind = str(given.get("rope_type", given.get("type", "default")))
    if any(isinstance(value, dict) for value in given.values()):
        kind = "of several kinds"
    if kind == "default":
        return None
    require(
        kind in _ROPE_SCALINGS,
        f"{file}: the rope scaling {kind!r:.80} is not supported: it must be "
        f"{' or '.join(_ROPE_SCALINGS)}",
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
    require(
        value is None or known,
        f"{file}: {name} is {value!r:.40}, and must be a {'whole ' * whole}number above 0 and "
        "below 2**53",
    )


def to_params(params: dict[str, Any], context: int | None) -> dict[str, Any]:
    """A params.json. Keys that are not Meta's appear only if they differ from the default."""
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


def to_config(params: dict[str, Any], context: int | None) -> dict[str, Any]:
    """A config.json, without what depends on the weights and on the text."""
    args = ModelArgs(**params)
    windowed = args.sliding_window is not None
    values = {**vars(args), "hidden_dim": args.ffn_dim, "n_kv_heads": args.kv_heads}
    config = {theirs: values[ours] for ours, theirs in _HF_KEYS.items()}
    if not windowed:
        del config["sliding_window"]
    if context is not None:
        config["max_position_embeddings"] = context
    return {
        "architectures": ["MistralForCausalLM" if windowed else "LlamaForCausalLM"],
        "model_type": "mistral" if windowed else "llama",
        **config,
        "rope_scaling": args.rope_scaling,
        "vocab_size": args.vocab_size,
        "hidden_act": "silu",
    }


def read_text_facts(path: Path) -> TextFacts:
    """What the files in a folder say of its text; each of them may be absent."""
    config, generation, tokenizer = found = [
        read_json(path / name) if (path / name).is_file() else {} for name in _TEXT_FILES
    ]
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    eos_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    require(
        all(type(id) is int and id >= 0 for id in eos_ids),
        f"{path}: eos_token_id is {eos!r:.80}, and must be a token id or a list of them",
    )
    template = _chat_template(path / "chat_template.jinja", tokenizer)
    layout = "hf" if any(found) or template else "meta"
    bos = tokenizer.get("add_bos_token")
    return TextFacts(layout, tuple(eos_ids), bos if isinstance(bos, bool) else None, template)


def _chat_template(file: Path, tokenizer: dict[str, Any]) -> str | None:
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LlamaError(f"{file} cannot be read: {error}") from error
    found = tokenizer.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None

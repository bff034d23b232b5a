"""The Llama family in the files that people have: logits equal to those of transformers.

Each case is a small random model in the shape and the files of a published one. docs/models.md
lists them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB, hf_logits, hf_model, meta_state, write_meta
from conftest import ATOL, GOLDEN
from safetensors.torch import load_file, save_file

from llama import Llama, LlamaError
from llama.checkpoints.load import open_checkpoint

TOKENS = torch.randint(VOCAB, (1, 200), generator=torch.Generator().manual_seed(1))
TOKENIZER = GOLDEN / "rand_gqa" / "tokenizer.model"
LLAMA31 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
LLAMA31 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
HF = {
    "Llama 2 7B": {"num_key_value_heads": 8},
    "Llama 2 70B": {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 4},
    "CodeLlama": {"num_key_value_heads": 8, "rope_theta": 1e6, "vocab_size": VOCAB + 16},
    "Llama 3": {"rope_theta": 5e5},
    "Llama 3.1": {"rope_theta": 5e5, "rope_scaling": LLAMA31},
    "Llama 3.2": {
        "rope_theta": 5e5,
        "rope_scaling": {**LLAMA31, "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "TinyLlama-Chat": {"num_key_value_heads": 4},
    "Vicuna 16K": {
        "num_key_value_heads": 8,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "Hermes": {"vocab_size": VOCAB + 32, "eos_token_id": [VOCAB, 2]},
    "Yi": {"num_key_value_heads": 1, "rope_theta": 5e6, "rms_norm_eps": 1e-5},
    "OpenLLaMA 3B": {"hidden_size": 200, "num_attention_heads": 2, "num_key_value_heads": 2},
    "SmolLM2": {"rope_theta": 1e5, "tie_word_embeddings": True},
    "DeepSeek-Coder": {"rope_theta": 1e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "Mistral v0.1": {**MISTRAL, "sliding_window": 50},
    "Mistral v0.3": {**MISTRAL, "sliding_window": None, "rope_theta": 1e6},
    "Mistral-Nemo": {**MISTRAL, "sliding_window": None, "rope_theta": 1e6, "head_dim": 32},
}
META: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # Name: the Hugging Face case, how the files are written, what params.json says.
    "Llama 2 7B": ("Llama 2 7B", {}, {"n_kv_heads": None}),
    "Llama 2 13B in 2 files": ("Llama 2 7B", {"shards": 2}, {"n_kv_heads": None}),
    "Llama 2 70B in 8 files": ("Llama 2 70B", {"shards": 8}, {"n_heads": 16, "n_kv_heads": 8}),
    "CodeLlama": ("CodeLlama", {}, {"n_kv_heads": None, "rope_theta": 1e6}),
    "Llama 3": ("Llama 3", {"embedding_axis": 0, "shards": 2}, {"rope_theta": 5e5}),
    "Llama 3.1": (
        "Llama 3.1",
        {"embedding_axis": 0, "shards": 2},
        {"rope_theta": 5e5, "use_scaled_rope": True},
    ),
    "Mistral v0.3": ("Mistral v0.3", {"suffix": "safetensors"}, {"rope_theta": 1e6}),
    "Mistral-Nemo": (
        "Mistral-Nemo",
        {"suffix": "safetensors"},
        {"rope_theta": 1e6, "head_dim": 32},
    ),
}


def logits_of(folder: Path) -> torch.Tensor:
    shutil.copy(TOKENIZER, folder)
    if open_checkpoint(folder).vocab_size == VOCAB + 32:  # Hermes
        added = {"<|im_end|>": VOCAB, "<|im_start|>": VOCAB + 1}
        (folder / "added_tokens.json").write_text(json.dumps(added))
    sizes = {"max_seq_len": 256, "max_batch_size": 1, "dtype": "float32", "verbose": False}
    with Llama.build(folder, **sizes) as llama:
        return llama.model(TOKENS, 0)


@pytest.mark.parametrize("name", HF)
def test_a_hugging_face_folder_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    model = hf_model(**HF[name])
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(logits_of(tmp_path), hf_logits(model, TOKENS), atol=ATOL, rtol=0)


@pytest.mark.parametrize("name", META)
def test_a_folder_in_metas_layout_gives_the_logits_of_transformers(
    name: str, tmp_path: Path
) -> None:
    case, files, params = META[name]
    model = hf_model(**HF[case])
    params = {"n_kv_heads": 2, "norm_eps": model.config.rms_norm_eps, **params}
    folder = write_meta(tmp_path / "m", meta_state(model), **files, **params)
    if name.startswith("Mistral"):
        (folder / "consolidated.00.safetensors").rename(folder / "consolidated.safetensors")
    torch.testing.assert_close(logits_of(folder), hf_logits(model, TOKENS), atol=ATOL, rtol=0)


# Files that training tools leave behind


@pytest.mark.parametrize(
    "prefix", ["_orig_mod.", "module.", "base_model.model.", "module._orig_mod."]
)
@pytest.mark.parametrize("layout", ["hf", "meta"])
def test_names_that_a_wrapper_of_the_model_changed_are_recognised(
    prefix: str, layout: str, tmp_path: Path
) -> None:
    model = hf_model()
    if layout == "hf":
        folder = tmp_path / "hf"
        model.save_pretrained(folder)
        state = load_file(folder / "model.safetensors")
        save_file({prefix + k: t for k, t in state.items()}, folder / "model.safetensors")
    else:
        state = meta_state(model)
        folder = write_meta(tmp_path / "meta", state, n_kv_heads=2, norm_eps=1e-6)
        torch.save({prefix + k: t for k, t in state.items()}, folder / "consolidated.00.pth")
    torch.testing.assert_close(logits_of(folder), hf_logits(model, TOKENS), atol=ATOL, rtol=0)


def test_a_model_without_its_head_has_names_without_model_and_loads_if_it_is_tied(
    tmp_path: Path,
) -> None:
    model = hf_model(tie_word_embeddings=True)
    model.config.save_pretrained(tmp_path)
    model.model.save_pretrained(tmp_path / "base")
    shutil.copy(tmp_path / "base/model.safetensors", tmp_path)
    assert "norm.weight" in load_file(tmp_path / "model.safetensors")
    torch.testing.assert_close(logits_of(tmp_path), hf_logits(model, TOKENS), atol=ATOL, rtol=0)


def test_a_missing_output_layer_is_not_taken_for_a_tied_one(tmp_path: Path) -> None:
    """transformers would draw it at random, with a warning."""
    hf_model().save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["lm_head.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(LlamaError, match=r"lm_head.weight is missing .* set tie_word_embeddings"):
        open_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert open_checkpoint(tmp_path).config.tied


def test_two_tensors_that_stand_for_one_parameter_are_refused(tmp_path: Path) -> None:
    hf_model().save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["module.model.norm.weight"] = torch.ones(64)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(LlamaError, match=r"norm.weight', which is not part of this model"):
        open_checkpoint(tmp_path)

"""LoRA: merged while loading, equal to what PEFT computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB, hf_logits, hf_model
from conftest import ATOL, GOLDEN
from safetensors.torch import load_file, save_file

from llama import Llama, LlamaError
from llama.checkpoints.convert import convert
from llama.checkpoints.load import open_checkpoint

TOKENS = torch.randint(VOCAB, (1, 200), generator=torch.Generator().manual_seed(1))
TOKENIZER = GOLDEN / "rand_gqa" / "tokenizer.model"
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(folder: Path, **options: Any) -> Any:
    """Write a base model to `base` and an adapter to `lora`; returns PEFT's model."""
    from peft import LoraConfig, get_peft_model

    model = hf_model(num_key_value_heads=4)
    model.save_pretrained(folder / "base")
    chosen = {"r": 4, "lora_alpha": 16, "target_modules": ALL, **options}
    peft_model = get_peft_model(model, LoraConfig(**chosen))
    torch.manual_seed(1)
    for name, parameter in peft_model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter) / 16
    peft_model.save_pretrained(folder / "lora")
    return peft_model.eval()


def logits_of(folder: Path, **options: Any) -> torch.Tensor:
    sizes = {"max_seq_len": 256, "max_batch_size": 1, "dtype": "float32", "verbose": False}
    with Llama.build(folder, TOKENIZER, **sizes, **options) as llama:
        return llama.model(TOKENS, 0)


@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True}, {"target_modules": ["q_proj", "down_proj"], "r": 2}],
    ids=["all", "rslora", "two_of_seven"],
)
def test_logits_equal_those_of_peft(options: dict, tmp_path: Path) -> None:
    expected = hf_logits(adapted(tmp_path, **options), TOKENS)
    found = logits_of(tmp_path / "base", adapter=tmp_path / "lora")
    torch.testing.assert_close(found, expected, atol=ATOL, rtol=0)
    assert (found - logits_of(tmp_path / "base")).abs().max() > 0.1


def test_each_rank_reads_its_part_and_every_layout_gives_the_same(tmp_path: Path) -> None:
    adapted(tmp_path)
    convert(tmp_path / "base", tmp_path / "meta", to="meta", shards=2)
    convert(tmp_path / "base", tmp_path / "merged", to="hf", adapter=tmp_path / "lora")
    merged = open_checkpoint(tmp_path / "merged")
    for base in ("base", "meta"):
        checkpoint = open_checkpoint(tmp_path / base, adapter=tmp_path / "lora")
        for name, parameter in checkpoint.parameters.items():
            whole = merged.read(name)
            for rank in range(2):
                box = tuple(slice(r.start, r.stop) for r in parameter.interval(rank, 2))
                assert torch.equal(checkpoint.read(name, rank, 2), whole[box])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"use_dora": True}, "use_dora True is not supported"),
        ({"modules_to_save": ["embed_tokens"]}, r"modules_to_save \['embed_tokens'\] is not supp"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "only LoRA of attention and feed-forward"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(options: dict, said: str, tmp_path: Path) -> None:
    adapted(tmp_path, **options)
    with pytest.raises(LlamaError, match=said):
        open_checkpoint(tmp_path / "base", adapter=tmp_path / "lora")


def test_an_adapter_of_another_model_or_of_none_is_refused(tmp_path: Path) -> None:
    adapted(tmp_path)
    hf_model().save_pretrained(tmp_path / "other")
    with pytest.raises(LlamaError, match=r"is an adapter of another model: .*k_proj.lora_A does n"):
        open_checkpoint(tmp_path / "other", adapter=tmp_path / "lora")
    with pytest.raises(LlamaError, match=r"adapter_config.json cannot be read"):
        open_checkpoint(tmp_path / "base", adapter=tmp_path / "base")
    file = tmp_path / "lora/adapter_model.safetensors"
    state = load_file(file)
    state["base_model.model.model.layers.9.mlp.up_proj.lora_A.weight"] = torch.ones(4, 64)
    save_file(state, file)
    with pytest.raises(LlamaError, match=r"layers.9.mlp.up_proj.lora_A.weight'. is not supported"):
        open_checkpoint(tmp_path / "base", adapter=tmp_path / "lora")
    config = tmp_path / "lora/adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "r": "four"}))
    with pytest.raises(LlamaError, match=r"r is 'four' and lora_alpha 16"):
        open_checkpoint(tmp_path / "base", adapter=tmp_path / "lora")


def test_a_quantized_base_is_refused_and_a_full_one_quantized_with_the_adapter(
    tmp_path: Path,
) -> None:
    adapted(tmp_path)
    convert(tmp_path / "base", tmp_path / "int8", to="meta", quantize="int8")
    with pytest.raises(LlamaError, match="is quantized, and an adapter needs the full checkpoint"):
        open_checkpoint(tmp_path / "int8", adapter=tmp_path / "lora")
    convert(tmp_path / "base", tmp_path / "merged", to="meta", adapter=tmp_path / "lora")
    expected = logits_of(tmp_path / "merged", quantize="int8")
    found = logits_of(tmp_path / "base", quantize="int8", adapter=tmp_path / "lora")
    assert torch.equal(found, expected)

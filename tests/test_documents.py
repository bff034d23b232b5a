"""The code of three documents about the cache of the original, run here.

They were written for the original code: "Why KV Cache Pre-Allocation with max_seq_len Is
Necessary", "How to Implement KV Caching in Llama 2", and "KV-Cache: Mechanics & Memory". What
differs from their text is said where it does.
"""

from __future__ import annotations

import pytest
import torch
from conftest import GOLDEN

from llama import LlamaError
from llama.generation import STORIES, Llama
from llama.model import ModelArgs, repeat_kv

CKPT = {"ckpt_dir": STORIES, "tokenizer_path": STORIES / "tokenizer.model", "verbose": False}


def test_the_cache_is_allocated_once_with_the_documented_shape() -> None:
    llama = Llama.build(max_seq_len=4096, max_batch_size=4, **CKPT)
    n_local_kv_heads, head_dim = 4, 20
    cache_k = llama.model.layers[0].attention.cache_k
    assert cache_k.shape == torch.Size([4, 4096, n_local_kv_heads, head_dim])
    assert torch.equal(cache_k, torch.zeros(4, 4096, n_local_kv_heads, head_dim))
    pointer = cache_k.data_ptr()
    llama.text_completion(["Once upon a time"] * 4, max_gen_len=5)
    assert llama.model.layers[0].attention.cache_k.data_ptr() == pointer


def test_a_pass_writes_its_positions_and_attends_to_all_up_to_them() -> None:
    llama = Llama.build(max_seq_len=32, max_batch_size=2, **CKPT)
    attention = llama.model.layers[0].attention
    bsz, start_pos, seqlen = 2, 3, 4
    seen = {}
    attention.wk.register_forward_hook(lambda *args: seen.update(xk=args[2].view(2, -1, 4, 20)))
    attention.wv.register_forward_hook(lambda *args: seen.update(xv=args[2].view(2, -1, 4, 20)))
    llama.model(torch.full((bsz, start_pos), 5), 0)
    llama.model(torch.full((bsz, seqlen), 6), start_pos)
    values = attention.cache_v[:bsz, : start_pos + seqlen]
    assert torch.equal(values[:, start_pos : start_pos + seqlen], seen["xv"])
    keys = attention.cache_k[:bsz, : start_pos + seqlen]
    assert not torch.equal(keys[:, start_pos:], seen["xk"])  # they are turned by their positions
    assert keys.data_ptr() == attention.cache_k.data_ptr()  # a view: nothing is copied
    assert not attention.cache_k[:bsz, start_pos + seqlen :].any()
    assert repeat_kv(keys, attention.n_rep).shape == (bsz, start_pos + seqlen, 8, 20)


def test_a_prompt_longer_than_the_cache_is_an_assertion_error() -> None:
    llama = Llama.build(max_seq_len=16, max_batch_size=1, **CKPT)
    with pytest.raises(AssertionError):
        llama.generate([[5] * 17], max_gen_len=1)


def test_generating_nothing_fills_the_cache_for_inspection() -> None:
    llama = Llama.build(max_seq_len=2048, max_batch_size=1, **CKPT)
    prompt = "Explain quantum entanglement."
    # The document leaves out bos and eos, which have defaults here.
    tokens = [llama.tokenizer.encode(prompt)]
    assert llama.generate(prompt_tokens=tokens, max_gen_len=0) == ([[]], None)
    first_attn = llama.model.layers[0].attn
    assert first_attn.cache_k.shape == first_attn.cache_v.shape == (1, 2048, 4, 20)
    assert first_attn.cache_k.device == llama.model.output.weight.device
    filled = first_attn.cache_k[0].flatten(1).any(-1)
    assert filled.tolist() == [True] * len(tokens[0]) + [False] * (2048 - len(tokens[0]))


def test_the_cache_may_be_zeroed_between_conversations() -> None:
    def reset_kv_cache(llama_model: torch.nn.Module) -> None:
        for layer in llama_model.layers:
            layer.attn.cache_k.zero_()
            layer.attn.cache_v.zero_()

    llama = Llama.build(max_seq_len=128, max_batch_size=1, **CKPT)
    # The document nests the tokens one level too deep; here that is named.
    with pytest.raises(LlamaError, match="prompt 0 holds more than integers"):
        llama.generate(prompt_tokens=[[llama.tokenizer.encode("New topic")]], max_gen_len=50)
    prompt_tokens = [llama.tokenizer.encode("New topic")]
    expected = llama.generate(prompt_tokens=prompt_tokens, max_gen_len=50, temperature=0)
    reset_kv_cache(llama.model)
    output = llama.generate(prompt_tokens=prompt_tokens, max_gen_len=50, temperature=0)
    assert output == expected


# Inductor's own code generation uses what torch deprecates.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_model_may_be_compiled_by_the_caller() -> None:
    # Two layers: the time goes into the compiler.
    llama = Llama.build(GOLDEN / "rand_mqa", max_seq_len=64, max_batch_size=1, verbose=False)
    # The document nests the tokens one level too deep, and decodes the pair that generate returns.
    prompt_tokens = [llama.tokenizer.encode("Tell me a joke.")]
    expected = llama.generate(prompt_tokens=prompt_tokens, max_gen_len=20, temperature=0)
    llama.reset()
    llama.model = torch.compile(llama.model, mode="max-autotune")
    output = llama.generate(prompt_tokens=prompt_tokens, max_gen_len=20, temperature=0)
    assert output == expected
    assert llama.tokenizer.decode(output[0][0])


def test_the_cache_of_each_layer_is_inspected_as_it_grows() -> None:
    # The document's last code needs a gated model; this is the same inspection here.
    llama = Llama.build(max_seq_len=64, max_batch_size=1, **CKPT)
    input_ids = torch.tensor([llama.tokenizer.encode("Hello, world!", bos=True)])
    logits = llama.model(input_ids, 0)
    length = input_ids.shape[1]
    caches = [(layer.attention.cache_k, layer.attention.cache_v) for layer in llama.model.layers]
    for k, v in caches:
        assert k[:, :length].shape == v[:, :length].shape == (1, length, 4, 20)
    # All of it is there from the beginning: 2 x layers x rows x slots x heads x width x bytes.
    assert sum(k.nbytes + v.nbytes for k, v in caches) == 2 * 6 * 1 * 64 * 4 * 20 * 4
    next_token = torch.argmax(logits[:, -1, :], dim=-1, keepdim=True)
    llama.model(next_token, length)
    for k, _ in caches:
        filled = k[0].flatten(1).any(-1)
        assert filled.sum() == length + 1


def test_the_cache_of_the_7b_takes_a_gigabyte_at_2048_tokens() -> None:
    """The document says 400 MB for 32 layers; 33.5 MB for one is right."""
    args = ModelArgs(max_seq_len=2048, max_batch_size=1)
    per_layer = 2 * args.max_batch_size * args.n_slots * args.kv_heads * args.head_dim * 2
    assert per_layer == pytest.approx(33.5e6, rel=0.01)
    assert per_layer * args.n_layers == pytest.approx(1.07e9, rel=0.01)

"""A GPU gives the answers of the CPU; `pytest -m gpu` runs these alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llama import Llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

PROMPTS = ["Once upon a time", "Lily and Ben went to the park and saw", "The dog"]


def build(device: str, **options: Any) -> Llama:
    options = {"max_seq_len": 96, "max_batch_size": 3, "dtype": "float32", **options}
    return Llama.build(device=device, verbose=False, **options)


def texts(llama: Llama) -> list[str]:
    answers = llama.text_completion(PROMPTS, temperature=0, max_gen_len=40)
    return [answer["generation"] for answer in answers]


def test_greedy_answers_and_logits_in_float32_are_those_of_the_cpu() -> None:
    with build("cpu") as cpu, build("cuda") as gpu:
        assert texts(gpu) == texts(cpu)
        tokens = torch.tensor([cpu.tokenizer.encode(PROMPTS[1], bos=True)])
        on_gpu = gpu.model(tokens.cuda(), 0).cpu()
        # float32 sums in another order, over logits of about 10; TF32 is off by default.
        torch.testing.assert_close(on_gpu, cpu.model(tokens, 0), rtol=0, atol=1e-3)


@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}, {"quantize": "int4"}])
def test_a_compiled_step_answers_as_the_model_does(options: dict[str, Any]) -> None:
    with build("cuda", **options) as plain, build("cuda", compile=True, **options) as compiled:
        assert texts(compiled) == texts(plain)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantized_logits_are_those_of_the_cpu(quantize: str) -> None:
    with build("cpu", quantize=quantize) as cpu, build("cuda", quantize=quantize) as gpu:
        tokens = torch.tensor([cpu.tokenizer.encode(PROMPTS[1], bos=True)])
        apart = gpu.model(tokens.cuda(), 0).cpu() - cpu.model(tokens, 0)
        # The CPU rounds the activations too: over logits with a deviation of 3, in the mean square.
        assert apart.square().mean().sqrt() < 0.1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_narrow_dtype_scores_a_text_nearly_as_float32_does(dtype: str) -> None:
    with build("cpu") as cpu, build("cuda", dtype=dtype) as gpu:
        ids = cpu.tokenizer.encode("Once upon a time, there was a little girl.", bos=True)
        scores = [
            sum(llama.generate([ids], 0, logprobs=True, echo=True)[1][0]) / len(ids)
            for llama in (cpu, gpu)
        ]
        assert scores[1] == pytest.approx(scores[0], abs=0.02)  # bfloat16 has three digits

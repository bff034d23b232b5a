"""Continue a few texts.

    torchrun --standalone --nproc_per_node 1 example_text_completion.py \
        --ckpt_dir llama-2-7b/ --tokenizer_path tokenizer.model

Without --ckpt_dir the small model that ships with the package is used.
"""

from __future__ import annotations

from llama import Llama
from llama.cli import run

# The shipped model has seen children's stories only.
STORY_PROMPTS = [
    "Once upon a time",
    "One day, a little girl named Lily",
    "Tom and his dog went to the park. They",
    "The little bird was sad because",
]
PROMPTS = [
    # Continued freely
    "The first thing that a visitor to the lighthouse notices is",
    "In plain words, the second law of thermodynamics says that",
    # Continued in the manner of the examples
    """English to Italian:

    bread => pane
    window => finestra
    lighthouse =>""",
    """A function that returns the n-th Fibonacci number:

def fibonacci(n):
""",
]


def main(
    ckpt_dir: str | None = None,
    tokenizer_path: str | None = None,
    temperature: float = 0.6,
    top_p: float = 0.9,
    max_seq_len: int = 128,
    max_gen_len: int | None = 64,
    max_batch_size: int = 4,
    *,
    device: str | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    seed: int = 1,
) -> None:
    """Build a model and print how it continues each prompt."""
    shape = (max_seq_len, max_batch_size)
    build = {"seed": seed, "device": device, "dtype": dtype, "quantize": quantize}
    llama = Llama.build(ckpt_dir, tokenizer_path, *shape, **build)
    prompts = STORY_PROMPTS if ckpt_dir is None else PROMPTS
    results = llama.text_completion(
        prompts, max_gen_len=max_gen_len, temperature=temperature, top_p=top_p
    )
    if llama.rank != 0:
        return
    for prompt, result in zip(prompts, results, strict=True):
        print(prompt)
        print(f"> {result['generation']}")
        print("\n==================================\n")


if __name__ == "__main__":
    run(main)

"""Answer a few dialogs. To chat yourself: `python -m llama chat`.

    torchrun --standalone --nproc_per_node 1 example_chat_completion.py \
        --ckpt_dir llama-2-7b-chat/ --tokenizer_path tokenizer.model

Without --ckpt_dir the small model that ships with the package is used.
"""

from __future__ import annotations

from llama import Dialog, Llama
from llama.cli import run

# The shipped model has seen children's stories only.
STORY_DIALOGS: list[Dialog] = [
    [{"role": "user", "content": "Hello!"}],
    [{"role": "user", "content": "Tell me a story about a dog."}],
    [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello! Do you want to hear a story?"},
        {"role": "user", "content": "Tell me a story about a bird."},
    ],
    [
        {"role": "system", "content": "You tell stories to small children."},
        {"role": "user", "content": "Tell me a story about a cat."},
    ],
]
DIALOGS: list[Dialog] = [
    [{"role": "user", "content": "Why is the sea salty, and rivers are not?"}],
    [
        {"role": "user", "content": "I have one day in Lisbon. Where do I begin?"},
        {"role": "assistant", "content": "In the Alfama, early, before the trams are full."},
        {"role": "user", "content": "And what do I eat there?"},
    ],
    [
        {"role": "system", "content": "Answer in rhyme."},
        {"role": "user", "content": "How does a lock of a canal work?"},
    ],
]


def main(
    ckpt_dir: str | None = None,
    tokenizer_path: str | None = None,
    temperature: float = 0.6,
    top_p: float = 0.9,
    max_seq_len: int = 512,
    max_batch_size: int = 8,
    max_gen_len: int | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    seed: int = 1,
) -> None:
    """Build a model and print its answers to a few dialogs."""
    shape = (max_seq_len, max_batch_size)
    build = {"seed": seed, "device": device, "dtype": dtype, "quantize": quantize}
    llama = Llama.build(ckpt_dir, tokenizer_path, *shape, **build)
    dialogs = STORY_DIALOGS if ckpt_dir is None else DIALOGS
    results = llama.chat_completion(
        dialogs, max_gen_len=max_gen_len, temperature=temperature, top_p=top_p
    )
    if llama.rank != 0:
        return
    for dialog, result in zip(dialogs, results, strict=True):
        for message in dialog:
            print(f"{message['role'].capitalize()}: {message['content']}\n")
        answer = result["generation"]
        print(f"> {answer['role'].capitalize()}: {answer['content']}")
        print("\n==================================\n")


if __name__ == "__main__":
    run(main)

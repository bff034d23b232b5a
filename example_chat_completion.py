"""Answer a few dialogs, or chat: `--interactive`.

    torchrun --standalone --nproc_per_node 1 example_chat_completion.py \
        --ckpt_dir llama-2-7b-chat/ --tokenizer_path tokenizer.model

Without a checkpoint the small one that ships with the package is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from llama import Dialog, Llama, LlamaError
from llama.cli import run
from llama.parallel.ranks import read_on_rank_0

# The shipped model knows small children's stories, and nothing else.
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
LAUNCHED = "RANK" in os.environ  # by torchrun, which ends its ranks on Ctrl-C
HELP = "/reset begins anew, /system TEXT begins anew with a system message, /quit or Ctrl-D ends."


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
    seed: int = 1,
    interactive: bool = False,
) -> None:
    """Build a model and print its answers, or hold a dialog with whoever is at the keyboard."""
    llama = Llama.build(
        ckpt_dir, tokenizer_path, max_seq_len, max_batch_size, seed=seed, device=device, dtype=dtype
    )
    options = {"max_gen_len": max_gen_len, "temperature": temperature, "top_p": top_p}
    if interactive:
        with suppress(KeyboardInterrupt):
            chat(llama, options)
        return
    dialogs = STORY_DIALOGS if ckpt_dir is None else DIALOGS
    results = llama.chat_completion(dialogs, **options)
    if llama.rank != 0:
        return
    for dialog, result in zip(dialogs, results, strict=True):
        for message in dialog:
            print(f"{message['role'].capitalize()}: {message['content']}\n")
        answer = result["generation"]
        print(f"> {answer['role'].capitalize()}: {answer['content']}")
        print("\n==================================\n")


def chat(llama: Llama, options: dict) -> None:
    """Read lines and answer them until the input ends; the dialog is kept."""
    show = print if llama.rank == 0 else lambda *_, **__: None
    show(HELP)
    dialog: Dialog = []
    while (line := read_on_rank_0(read_line)) is not None:
        command, _, rest = line.strip().partition(" ")
        if command == "/quit":
            break
        if command == "/reset":
            dialog = []
        elif command == "/system":
            dialog = [{"role": "system", "content": rest}]
        elif command.startswith("/"):
            show(HELP)
        elif command:
            dialog = answer(llama, [*dialog, {"role": "user", "content": line}], options, show)


def read_line() -> str | None:
    """A line from the keyboard or a pipe; None at its end."""
    while True:
        try:
            return input("> ")
        except KeyboardInterrupt:
            print()
            if LAUNCHED:
                return None
        except EOFError:
            return None


def answer(llama: Llama, dialog: Dialog, options: dict, show: Callable[..., None]) -> Dialog:
    """Show the answer as it comes; returns the dialog with it."""
    content, note = "", ""
    try:
        stream = llama.stream_chat(dialog, **options)
        while True:
            piece = next(stream)
            content += piece
            show(piece, end="", flush=True)
    except StopIteration as end:
        if end.value["finish_reason"] == "length":
            note = " (cut short: the context or max_gen_len is full; /reset begins anew)"
    except KeyboardInterrupt:
        if LAUNCHED:
            raise
        note = " (stopped)"
    except LlamaError as error:
        show(f"{error}\n/reset begins anew.")
        return dialog[:-1]
    show(note)
    return [*dialog, {"role": "assistant", "content": content}]


if __name__ == "__main__":
    run(main)

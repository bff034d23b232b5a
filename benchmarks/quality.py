"""What quantizing costs in quality: perplexity and differences of logits, beside float32.

python benchmarks/quality.py                      the shipped model, on stories that it draws itself
python benchmarks/quality.py --gguf FILE.gguf     another one, on the texts of Python's own help

A file of llama.cpp is widened to float32 first, whatever it is in; the packages gguf and
llama-cpp-python read it.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from json import dumps
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from engines import Ours
from speed import cpu_name
from speed_weights import gguf_names

from llama import Llama
from llama.cli import run
from llama.generation import STORIES

WINDOW = 512  # tokens that are read at once


def own_stories(n: int) -> list[list[int]]:
    """Stories that the shipped model draws in float32 at temperature 1."""
    with Llama.build(dtype="float32", device="cpu", seed=0, verbose=False) as llama:
        prompts = [[llama.tokenizer.bos_id]] * llama.model.params.max_batch_size
        drawn: list[list[int]] = []
        while sum(map(len, drawn)) < n:
            drawn += llama.generate(prompts, temperature=1, top_p=1, echo=True)[0]
    return drawn


def help_texts(file: Path, n: int) -> list[list[int]]:
    """The first `n` tokens of what Python's help has to say, in windows."""
    import llama_cpp

    tokenizer = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer.tokenize(text.encode(), add_bos=False)[:n]
    return [ids[i : i + WINDOW] for i in range(0, len(ids), WINDOW)]


def from_gguf(file: Path, folder: Path) -> None:
    """Write the model of a file of llama.cpp as a Meta folder in float32."""
    import gguf

    reader = gguf.GGUFReader(file)

    def fact(name: str) -> float:
        return reader.fields[f"llama.{name}"].contents()

    params = {
        "dim": fact("embedding_length"),
        "n_layers": fact("block_count"),
        "n_heads": fact("attention.head_count"),
        "n_kv_heads": fact("attention.head_count_kv"),
        "hidden_dim": fact("feed_forward_length"),
        "norm_eps": fact("attention.layer_norm_rms_epsilon"),
        "rope_theta": fact("rope.freq_base"),
    }
    ours = {theirs: name for name, theirs in gguf_names().items()}
    weights = {}
    for tensor in reader.tensors:
        *layer, part, _ = tensor.name.removeprefix("blk.").split(".")
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        weights[".".join([*(["layers", layer[0]] if layer else []), PLACES[ours[part]]])] = values
    weights.setdefault("output.weight", weights["tok_embeddings.weight"])
    torch.save(weights, folder / "consolidated.00.pth")
    (folder / "params.json").write_text(dumps(params))


# Where a part lies in a layer.
PLACES = {name: f"{name}.weight" for name in gguf_names()}
PLACES |= {name: f"attention.{name}.weight" for name in ("wq", "wk", "wv", "wo")}
PLACES |= {name: f"feed_forward.{name}.weight" for name in ("w1", "w2", "w3")}


@torch.inference_mode()
def logits_of(folder: Path, texts: list[list[int]], quantize: str | None) -> Iterator[torch.Tensor]:
    case = {"folder": str(folder), "device": "cpu", "dtype": "float32", "quantize": quantize}
    case |= {"compile": False, "batch": 1, "max_seq_len": WINDOW}
    model = Ours(case).model
    for ids in texts:
        yield model(torch.tensor([ids]), 0)[0]


def distance(
    texts: list[list[int]], exact: list[torch.Tensor], logits: Iterator[torch.Tensor]
) -> dict[str, float]:
    """Perplexity, and the root mean square of the differences of logits."""
    losses, squares, count = 0.0, 0.0, 0
    for ids, x, y in zip(texts, exact, logits, strict=True):
        losses += F.cross_entropy(y[:-1], torch.tensor(ids[1:]), reduction="sum").item()
        squares += (y - x).square().mean(-1).sum().item()
        count += len(ids)
    return {
        "perplexity": math.exp(losses / (count - len(texts))),
        "rms": math.sqrt(squares / count),
    }


def main(gguf: str | None = None, tokens: int = 8192) -> None:
    """Print a line for each kind; the last line is JSON."""
    with tempfile.TemporaryDirectory() as made:
        folder = STORIES if gguf is None else Path(made)
        if gguf is None:
            texts = own_stories(tokens)
        else:
            from_gguf(Path(gguf), folder)
            texts = help_texts(Path(gguf), tokens)
        exact = list(logits_of(folder, texts, None))
        found = {
            kind or "float32": distance(texts, exact, logits_of(folder, texts, kind))
            for kind in (None, "int8", "int4")
        }
    for kind, figures in found.items():
        print(f"{kind:8}" + "".join(f"  {name} {value:.4f}" for name, value in figures.items()))
    facts = {"tokens": sum(map(len, texts)), "logits_std": torch.cat(exact).std().item()}
    print(dumps(found | facts | {"cpu": cpu_name()}))


if __name__ == "__main__":
    run(main)

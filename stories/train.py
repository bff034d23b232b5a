"""Train the shipped model on the text of `make.py`: one CPU thread, resumable, seeded.

    python stories/train.py --data stories_data --steps 4000
    python stories/train.py --data stories_data --minutes 60     # whichever comes first

The learning rate warms up, stays, and falls to 0 over the last part. A run that is started again
goes on from its last checkpoint. Writes params.json, consolidated.00.pth and tokenizer.model.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
from torch import Tensor, nn
from torch.nn import functional as F

PARAMS: dict[str, Any] = {
    "dim": 160,
    "n_layers": 6,
    "n_heads": 8,
    "n_kv_heads": 4,
    "vocab_size": 1024,
}
PARAMS |= {"multiple_of": 32, "norm_eps": 1e-05}
WIDTH, HIDDEN, HEADS, KV_HEADS = 160, 448, 8, 4
MAX_LEN, BATCH_TOKENS, POOL = 512, 1536, 512
WARMUP, DECAY = 60, 0.4  # steps, and the part of the run in which the rate falls
MUON_LR, ADAM_LR = 0.02, 0.003


class Layer(nn.Module):
    """A layer of Llama 2, with the names of Meta's checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        kv = WIDTH * KV_HEADS // HEADS
        shapes = {"wq": (WIDTH, WIDTH), "wk": (WIDTH, kv), "wv": (WIDTH, kv), "wo": (WIDTH, WIDTH)}
        self.attention = nn.ModuleDict({k: nn.Linear(*s, bias=False) for k, s in shapes.items()})
        shapes = {"w1": (WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH), "w3": (WIDTH, HIDDEN)}
        self.feed_forward = nn.ModuleDict({k: nn.Linear(*s, bias=False) for k, s in shapes.items()})
        self.attention_norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.ffn_norm = nn.RMSNorm(WIDTH, eps=1e-5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, n, _ = x.shape
        h, a, f = self.attention_norm(x), self.attention, self.feed_forward
        q, k, v = (
            a[w](h).view(b, n, -1, WIDTH // HEADS).transpose(1, 2) for w in ("wq", "wk", "wv")
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        with torch.autocast("cpu", enabled=False):  # heads of 20 are slow in bfloat16
            attended = F.scaled_dot_product_attention(
                q.float(), k.float(), v.float(), is_causal=True
            )
        x = x + a["wo"](attended.transpose(1, 2).reshape(b, n, WIDTH))
        h = self.ffn_norm(x)
        return x + f["w2"](F.silu(f["w1"](h)) * f["w3"](h))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of neighboring elements."""
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(PARAMS["vocab_size"], WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(PARAMS["n_layers"]))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.output = nn.Linear(WIDTH, PARAMS["vocab_size"], bias=False)
        nn.init.normal_(self.tok_embeddings.weight, std=0.5)
        for name, weight in self.named_parameters():
            if name.endswith(("wo.weight", "w2.weight", "output.weight")):
                nn.init.normal_(weight, std=0.01)
        size = WIDTH // HEADS
        rates = 10000.0 ** -(torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(MAX_LEN), rates)
        self.angles = (angles.cos(), angles.sin())

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of the targets that are not -1."""
        cos, sin = (t[: ids.shape[1]] for t in self.angles)
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        wanted = targets >= 0
        return F.cross_entropy(self.output(self.norm(x[wanted])).float(), targets[wanted])


class Muon(torch.optim.Optimizer):
    """Momentum whose steps are made orthogonal by five Newton-Schulz iterations."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                state["m"].lerp_(p.grad, 0.05)
                g = p.grad.lerp(state["m"], 0.95)
                x = g.T if g.shape[0] > g.shape[1] else g
                x = (x / (x.norm() + 1e-7)).bfloat16()
                for _ in range(5):
                    s = x @ x.T
                    x = 3.4445 * x + (-4.775 * s + 2.0315 * s @ s) @ x
                x = x.T if g.shape[0] > g.shape[1] else x
                p.mul_(1 - group["lr"] * 0.02)
                p.add_(x, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def train_tokenizer(data: Path) -> None:
    """SentencePiece BPE with Llama 2's settings, on dialogs as the model sees them."""
    texts = []
    with open(data / "train.jsonl") as file:
        for _, line in zip(range(12000), file, strict=False):
            document = json.loads(line)
            texts += [document["text"]] if "text" in document else []
            texts += [
                f"[INST] {q} [/INST] {a}".replace("\n", " ") for q, a in document.get("turns", [])
            ]
            texts += [f"<<SYS>> {document['system']} <</SYS>>"] if document.get("system") else []
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(data / "tokenizer"), model_type="bpe",
        vocab_size=PARAMS["vocab_size"], byte_fallback=True, character_coverage=1.0,
        split_digits=True, allow_whitespace_only_pieces=True, remove_extra_whitespaces=False,
        normalization_rule_name="identity", add_dummy_prefix=True, num_threads=1,
        unk_id=0, bos_id=1, eos_id=2, pad_id=-1, minloglevel=1,
    )  # fmt: skip


def encode(tokenizer: sentencepiece.SentencePieceProcessor, document: dict) -> tuple[list, list]:
    """Ids and targets of a document: -1 where the next token is the user's or the format's."""
    if "text" in document:
        ids = [1, *tokenizer.encode(document["text"])]
        return ids, [*ids[1:], 2]
    ids, targets = [], []
    system = document["system"]
    for i, (user, answer) in enumerate(document["turns"]):
        if i == 0 and system:
            user = f"<<SYS>>\n{system}\n<</SYS>>\n\n{user}"
        if ids:
            ids += [tokenizer.piece_to_id("▁"), 2]  # the library closes a turn with a space
            targets += [-1, -1]
        prompt = [1, *tokenizer.encode(f"[INST] {user} [/INST]")]
        whole = [1, *tokenizer.encode(f"[INST] {user} [/INST] {answer}")]
        ids += whole
        targets += [-1] * (len(prompt) - 1) + whole[len(prompt) :] + [2]
    return ids, targets


def load(data: Path, name: str) -> list[np.ndarray]:
    """Each document as two rows: ids and targets."""
    cached = data / f"{name}.npz"
    if not cached.exists():
        tokenizer = sentencepiece.SentencePieceProcessor(str(data / "tokenizer.model"))
        rows = [
            np.array(encode(tokenizer, json.loads(line)), dtype=np.int16)[:, :MAX_LEN]
            for line in (data / f"{name}.jsonl").read_text().splitlines()
        ]
        lengths = [row.shape[1] for row in rows]
        np.savez(cached, rows=np.concatenate(rows, 1), ends=np.cumsum(lengths))
    file = np.load(cached)
    return np.split(file["rows"], file["ends"][:-1], axis=1)


def batches(rows: list[np.ndarray], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Without end: batches of documents of similar lengths, padded at the right."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(rows))
        for start in range(0, len(rows) - POOL + 1, POOL):
            pool = sorted((rows[i] for i in order[start : start + POOL]), key=lambda r: r.shape[1])
            groups: list[list[np.ndarray]] = [[]]
            for row in pool:
                if (len(groups[-1]) + 1) * row.shape[1] > BATCH_TOKENS:
                    groups.append([])
                groups[-1].append(row)
            for i in rng.permutation(len(groups)):
                out = np.full((2, len(groups[i]), groups[i][-1].shape[1]), -1, dtype=np.int64)
                for j, row in enumerate(groups[i]):
                    out[:, j, : row.shape[1]] = row
                yield torch.from_numpy(out[0].clip(0)), torch.from_numpy(out[1])


@torch.no_grad()
def held_out_loss(model: Model, rows: list[np.ndarray]) -> float:
    losses, count = 0.0, 0
    for row in rows[:100]:
        ids, targets = torch.from_numpy(row.astype(np.int64))
        n = int((targets >= 0).sum())
        losses, count = losses + float(model(ids[None], targets[None])) * n, count + n
    return losses / count


class Run:
    """A model, its optimizers and how far they are; kept in `last.pt`."""

    def __init__(self, data: Path) -> None:
        self.data, self.model = data, Model()
        hidden = [p for p in self.model.layers.parameters() if p.ndim == 2]
        others = [p for p in self.model.parameters() if not any(p is h for h in hidden)]
        adam = torch.optim.AdamW(others, ADAM_LR, betas=(0.9, 0.95), weight_decay=0)
        self.optimizers = [(Muon(hidden, {"lr": MUON_LR}), MUON_LR), (adam, ADAM_LR)]
        self.step, self.tokens, self.spent = 0, 0, 0.0
        if (data / "last.pt").exists():
            last = torch.load(data / "last.pt")
            self.model.load_state_dict(last["model"])
            for (optimizer, _), state in zip(self.optimizers, last["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            self.step, self.tokens, self.spent = last["step"], last["tokens"], last["spent"]

    def learn(self, ids: Tensor, targets: Tensor, rate: float, bfloat16: bool) -> float:
        """One step at `rate` times the highest learning rates."""
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            loss = self.model(ids, targets)
        loss.backward()
        for optimizer, lr in self.optimizers:
            optimizer.param_groups[0]["lr"] = lr * max(rate, 0.0)
            optimizer.step()
            optimizer.zero_grad()
        self.step, self.tokens = self.step + 1, self.tokens + ids.numel()
        return loss.item()

    def save(self) -> None:
        """Write what a run goes on from, and the checkpoint."""
        facts = {"step": self.step, "tokens": self.tokens, "spent": self.spent}
        states = [optimizer.state_dict() for optimizer, _ in self.optimizers]
        weights = self.model.state_dict()
        torch.save({"model": weights, "optimizers": states, **facts}, self.data / "new.pt")
        (self.data / "new.pt").replace(self.data / "last.pt")
        half = {k: v.to(torch.float16).clone() for k, v in weights.items()}
        torch.save(half, self.data / "consolidated.00.pth")
        (self.data / "params.json").write_text(json.dumps(PARAMS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="stories_data", type=Path)
    parser.add_argument("--steps", default=4000, type=int)
    parser.add_argument("--minutes", default=1e9, type=float)
    parser.add_argument("--float32", action="store_true", help="not bfloat16 products")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if not (args.data / "tokenizer.model").exists():
        train_tokenizer(args.data)
    rows, held_out = load(args.data, "train"), load(args.data, "held_out")
    run = Run(args.data)
    begin = time.time() - run.spent
    for ids, targets in batches(rows, seed=run.step):
        run.spent = time.time() - begin
        progress = max(run.step / args.steps, run.spent / 60 / args.minutes)
        rate = min(1.0, (run.step + 1) / WARMUP, (1 - progress) / DECAY)
        loss = run.learn(ids, targets, rate, not args.float32)
        if run.step % 50 == 0:
            print(f"step {run.step} loss {loss:.3f} {run.tokens / run.spent:.0f} tokens/s")
        if run.step % 200 == 0 or progress >= 1:
            score = held_out_loss(run.model, held_out)
            with open(args.data / "loss.csv", "a") as file:
                file.write(f"{run.step},{run.tokens},{run.spent / 60:.1f},{score:.4f}\n")
            run.save()
        if progress >= 1:
            break


if __name__ == "__main__":
    main()

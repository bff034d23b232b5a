"""Prefix caching: which tokens each cache row holds, so that later prompts re-use them."""

from __future__ import annotations

import hashlib
import re
import uuid
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fairscale.nn.model_parallel import initialize as groups
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from llama import kv_cache, quantize
from llama.errors import LlamaError, checked_path, require
from llama.model import Transformer

COPY_COST = 1 / 8  # of copying a token's keys, against losing those of a token


@dataclass(frozen=True)
class CachedRow:
    """What one row of the cache holds, in order of position."""

    tokens: list[int]
    start: int  # the position of the first of them: above 0 once the ring has wrapped
    keys: list[torch.Tensor]  # of each layer, (len(tokens), n_local_kv_heads, head_dim)
    values: list[torch.Tensor]


class PrefixCache:
    """The tokens whose keys and values each row of the cache holds, from position 0 on.

    It is right as long as nobody else writes the cache or the weights, which
    `invalidate_on_external_write` notices where torch counts writes. Writes through `.data` or
    a NumPy view are not counted: call `reset()` after them.
    """

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.rows: list[list[int]] = [[] for _ in range(model.params.max_batch_size)]
        self._used = [0] * len(self.rows)  # when each row was last given to a request
        self._clock = 0
        self._tensors: list[torch.Tensor] = []
        self._places: list[int] = []
        self._n_writes = 0

    # Which row a prompt gets.

    def common(self, row: int, ids: Sequence[int]) -> int:
        """How many tokens of `ids` the row can spare a pass; at least one is left to be read.

        A row whose ring has wrapped has lost its beginning, and can only be continued.
        """
        held = self.rows[row]
        n = min(common_prefix(held, ids), len(ids) - 1)
        return 0 if len(held) > self.model.params.n_slots and n < len(held) else n

    def longest(self, ids: Sequence[int]) -> tuple[int, int]:
        """The longest prefix of `ids` that any row holds, and that row."""
        return max((self.common(row, ids), -row) for row in range(len(self.rows)))

    def assign(
        self, ids: Sequence[int], free: Sequence[int], *, reuse: bool = True
    ) -> tuple[int, int]:
        """Give one of the `free` rows to a request; returns it and how many of `ids` it holds.

        The row is the one that loses least: tokens that no longer fit are lost, and tokens that
        another row holds are copied from there, which costs a fraction of a pass.
        """
        best, source = self.longest(ids) if reuse else (0, 0)
        common = {row: self.common(row, ids) if reuse else 0 for row in free}

        def cost(row: int) -> tuple[float, int, int]:
            lost = len(self.rows[row]) - common[row]
            return lost + COPY_COST * (best - common[row]), self._used[row], row

        row = min(free, key=cost)
        self._clock += 1
        self._used[row] = self._clock
        if best > common[row]:
            self._copy(-source, row, best)
        del self.rows[row][max(best, common[row]) :]
        return row, len(self.rows[row])

    @torch.inference_mode()
    def _copy(self, source: int, target: int, length: int) -> None:
        """Copy the slots of the first `length` tokens, scales included."""
        slots = min(length, self.model.params.n_slots)
        self.forget(target)
        for buffer in self._buffers().values():
            buffer[target, :slots] = buffer[source, :slots]
        self.rows[target] = self.rows[source][:length]
        self.written()

    # What was written.

    def truncate(self, row: int, length: int) -> None:
        """Before a write from position `length` on."""
        del self.rows[row][length:]

    def forget(self, row: int | None = None) -> None:
        for held in self.rows if row is None else [self.rows[row]]:
            held.clear()
        if row is None:
            self._used = [0] * len(self.rows)

    @torch.inference_mode()
    def clear(self, row: int | None = None) -> None:
        """Zero a row, or all, and forget what it held."""
        self.forget(row)
        for buffer in self._buffers().values():
            (buffer if row is None else buffer[row]).zero_()
        self.written()

    def written(self) -> None:
        """After a write of our own."""
        self._n_writes = self._count_writes()

    def was_written_elsewhere(self) -> bool:
        """Did somebody else write the cache or the weights since `written`?"""
        return self._n_writes != self._count_writes()

    def invalidate_on_external_write(self) -> bool:
        """Forget everything if that is so, or if tensors were replaced, or writes not counted."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        places = [tensor.data_ptr() for tensor in tensors]
        counted = not any(tensor.is_inference() for tensor in tensors)
        valid = counted and places == self._places and not self.was_written_elsewhere()
        self._tensors, self._places = tensors if counted else [], places
        if not valid:
            self.forget()
        self.written()
        return not valid

    def _count_writes(self) -> int:
        return sum(tensor._version for tensor in self._tensors)

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {
            f"layers.{i}.{name}": buffer
            for i, attention in enumerate(self.model.attentions)
            for name, buffer in attention.named_buffers(recurse=False)
        }

    # Inspecting and saving.

    @property
    def held_tokens(self) -> int:
        """Slots in use."""
        return sum(min(len(held), self.model.params.n_slots) for held in self.rows)

    def read_row(self, row: int) -> CachedRow:
        """Views of the buffers, or copies if the ring has wrapped or the cache is int8."""
        args = self.model.params
        require(
            0 <= row < args.max_batch_size,
            f"row {row!r:.80}: the cache has {args.max_batch_size} rows, counted from 0",
        )
        tokens = self.rows[row]
        start = max(0, len(tokens) - args.n_slots)
        positions = torch.arange(start, len(tokens), device=self.model.rope_freqs.device)
        slots = kv_cache.slot_index(positions, args.n_slots)

        def in_order(cache: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
            dtype = cache.dtype if scales is None else self.model.norm.weight.dtype
            x = kv_cache.read(cache, scales, slice(row, row + 1), len(slots), dtype)
            x = x[0].transpose(0, 1)
            return x if start == 0 else x[slots]

        attentions = self.model.attentions
        return CachedRow(
            tokens=tokens[start:],
            start=start,
            keys=[in_order(attention.cache_k, attention.scale_k) for attention in attentions],
            values=[in_order(attention.cache_v, attention.scale_v) for attention in attentions],
        )

    def save(self, path: str | Path) -> None:
        """Write what every row holds; the file appears, or is replaced, when it is complete."""
        path = _path_of_this_rank(path)
        tensors = {}
        for row, tokens in enumerate(self.rows):
            if tokens:
                tensors[f"{row}.tokens"] = torch.tensor(tokens, dtype=torch.int64, device="cpu")
                for name, buffer in self._buffers().items():
                    tensors[f"{row}.{name}"] = buffer[row, : self.model.params.n_slots][
                        : len(tokens)
                    ]
        unfinished = path.with_name(f".{uuid.uuid4().hex}.unfinished")
        try:
            save_file(tensors, unfinished, self._identity() | {"contents": _checksum(tensors)})
            unfinished.replace(path)
        except (OSError, SafetensorError) as error:
            reason = str(error).replace(str(unfinished), str(path))
            raise LlamaError(f"{str(path)!r} cannot be written: {reason}") from error
        finally:
            with suppress(OSError):  # a read-only disk refuses this as well
                unfinished.unlink()

    @torch.inference_mode()
    def load(self, path: str | Path) -> None:
        """Fill the rows that the file holds; the others stay as they are.

        Raises:
            LlamaError: the file is damaged, or of another model, dtype or window. Nothing changes.
        """
        path = _path_of_this_rank(path)
        rows, tensors = self._checked_file(path)
        for row, tokens in rows.items():
            self.forget(row)
            for name, buffer in self._buffers().items():
                held = tensors[f"{row}.{name}"]
                buffer[row, : len(held)] = held.to(buffer.device)
            self.rows[row] = tokens
        self.written()

    def _checked_file(self, path: Path) -> tuple[dict[int, list[int]], dict[str, torch.Tensor]]:
        """The tokens of each row of a cache file, and all its tensors."""
        found, tensors = _read(path)
        for name, ours in self._identity().items():
            require(
                found.get(name) == ours,
                f"{path} was written with {name} {found.get(name)!r:.80}, and this model has "
                f"{ours}: build as for the file, or re-run the prompt",
            )
        damaged = f"{path} is damaged, or was not written by save_cache: re-run the prompt"
        require(found.get("contents") == _checksum(tensors), damaged)
        args, buffers, rows = self.model.params, self._buffers(), {}
        layout = {}
        for name in [name for name in tensors if name.endswith(".tokens")]:
            row, ids = name.removesuffix(".tokens"), tensors[name]
            valid = ids.dtype == torch.int64 and ids.ndim == 1
            valid &= re.fullmatch("0|[1-9][0-9]{0,3}", row) is not None
            require(valid and bool(((ids >= 0) & (ids < args.vocab_size)).all()), damaged)
            held = min(len(ids), args.n_slots)
            require(
                int(row) < args.max_batch_size and (len(ids) == held or args.longest_chunk > 0),
                f"row {row} of {path} holds {len(ids)} tokens, and does not fit "
                f"{args.max_batch_size} rows of {args.n_slots} slots: build with the "
                "max_batch_size, max_seq_len and prefill_chunk that it was written with",
            )
            rows[int(row)] = ids.tolist()
            layout[name] = ((len(ids),), torch.int64)
            for part, buffer in buffers.items():
                layout[f"{row}.{part}"] = ((held, *buffer.shape[2:]), buffer.dtype)
        require(layout == {n: (tuple(t.shape), t.dtype) for n, t in tensors.items()}, damaged)
        return rows, tensors

    def _identity(self) -> dict[str, str]:
        """Everything that the keys and values depend on, except the tokens."""
        model = self.model
        rank, ranks = groups.get_model_parallel_rank(), groups.get_model_parallel_world_size()
        args = model.params
        quantized = [tensor for weight in quantize.weights(model) for tensor in weight.tensors()]
        weights = [model.rope_freqs, *model.parameters(), *quantized]
        shape = f"{args.n_heads} {args.kv_heads} {args.norm_eps} "
        return {
            "format": "llama-kv-cache-1",
            "rank": f"{rank} of {ranks}",
            "dtype": str(model.norm.weight.dtype).removeprefix("torch."),
            "kv_cache_dtype": str(model.attentions[0].cache_k.dtype).removeprefix("torch."),
            "sliding_window": str(args.sliding_window),
            "n_slots": str(args.n_slots) if args.longest_chunk else "any",
            "model": _checksum({shape + str(i): tensor for i, tensor in enumerate(weights)}),
        }


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading numbers two lists share."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])


def _path_of_this_rank(path: str | Path) -> Path:
    path, ranks = checked_path(path, "path"), groups.get_model_parallel_world_size()
    path = path if ranks == 1 else Path(f"{path}.{groups.get_model_parallel_rank()}")
    require(
        path.is_file() or not path.exists(),
        f"{str(path)!r} is not a file: pass the path of a cache file",
    )
    return path


def _read(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """The metadata and the tensors of a safetensors file."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise LlamaError(f"{path} does not exist: write it with save_cache") from error
    except (OSError, SafetensorError) as error:
        raise LlamaError(
            f"{path} is truncated or not a cache file ({error}): write it with save_cache"
        ) from error


def _checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """Of names, shapes, dtypes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        raw: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {zlib.crc32(raw)}\n".encode())
    return digest.hexdigest()[:16]

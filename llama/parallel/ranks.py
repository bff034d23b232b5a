"""Cross-rank coordination outside the forward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from fairscale.nn.model_parallel import initialize as groups

from llama.errors import LlamaError
from llama.model import RMSNorm, Transformer
from llama.parallel.groups import Runtime, brief, check_same, gather, gloo_group, require_same
from llama.prefix_cache import common_prefix

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def check_weights(model: Transformer) -> None:
    """Raise LlamaError if the ranks have loaded different checkpoints of one shape.

    Compares the norms, which every rank holds whole, by the sums of their float32 bit patterns:
    integers are equal on every machine, and MPS has no float64.
    """
    norms = [m.weight.detach() for m in model.modules() if isinstance(m, RMSNorm)]
    sums = torch.stack([norm.float().view(torch.int32).sum() for norm in norms])
    check_same({"the checksum of the norms": sums.tolist()})


def compare_call(
    call: Mapping[str, Any],
    held: Sequence[Sequence[int]],
    group: dist.ProcessGroup,
    *,
    n_slots: int,
) -> list[int]:
    """Compare a call, and the caches that it starts from, between the ranks of `group`.

    Args:
        call: what the answers depend on, by name.
        held: the tokens that each row of this rank's cache holds.
        n_slots: slots in a row. Of a row that has wrapped, ranks share everything or nothing.

    Returns:
        For each row how many tokens, from the first on, all ranks hold.

    Raises:
        LlamaError: an argument differs between ranks.
    """
    digests = [hash(tuple(tokens)) for tokens in held]
    everyone = gather(({name: brief(value) for name, value in call.items()}, digests), group)
    for name in call:
        require_same(name, [others.get(name) for others, _ in everyone], group)
    shared = [len(tokens) for tokens in held]
    by_row = zip(*(others for _, others in everyone), strict=True)
    rows = [row for row, found in enumerate(by_row) if len(set(found)) > 1]
    if rows:
        by_rank = gather([list(held[row]) for row in rows], group)
        for row, tokens in zip(rows, zip(*by_rank, strict=True), strict=True):
            has_wrapped = max(map(len, tokens)) > n_slots
            shared[row] = 0 if has_wrapped else min(common_prefix(tokens[0], t) for t in tokens)
    return shared


def broadcast_tokens(tokens: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Overwrite `tokens`, of any shape, with those of the first rank of `group`."""
    if group.size() > 1:
        dist.broadcast(tokens, group_src=0, group=group)
    return tokens


def run_data_parallel(
    runtime: Runtime,
    items: Sequence[Item],
    call: Mapping[str, Any],
    answer: Callable[[Sequence[Item]], list[Answer]],
) -> list[Answer]:
    """Let each replica answer its part of `items`; returns all answers on every rank.

    Item i goes to replica i modulo their number. A LlamaError of one replica is raised on all.
    """
    with waiting(runtime, "for the other ranks to make the same call"):
        check_same(call)
    try:
        local: Any = answer(items[runtime.replica :: runtime.replicas])
    except LlamaError as error:
        local = error
    with waiting(runtime, "for the answers of the other replicas"):
        parts = gather(local, groups.get_data_parallel_group())
    for part in parts:
        if isinstance(part, LlamaError):
            raise part
    return [parts[i % len(parts)][i // len(parts)] for i in range(len(items))]


class Events:
    """A channel from rank 0 to the other ranks that may idle for ever.

    Rank 0 sends heartbeats, so that the others tell an idle rank from a dead one: they wait at most
    `timeout_s` seconds for either. All ranks make the channel, and close it, together; between two
    events they do the same work.
    """

    def __init__(self, timeout_s: float = 600) -> None:
        self._timeout_s = timeout_s
        self._lock, self._closed = threading.Lock(), threading.Event()
        with _waiting(timeout_s, "for all ranks to open a channel"):
            self._group = gloo_group(timeout_s)
        if dist.get_rank() == 0:
            threading.Thread(target=self._beat, daemon=True).start()

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, payload: Any) -> None:
        """On rank 0: hand a picklable payload to all other ranks; waits until they take it."""
        with _waiting(self._timeout_s, "for the other ranks to take an event"):
            self._broadcast((payload,))

    def receive(self) -> Any:
        """On the other ranks: the next payload of rank 0.

        Raises:
            RuntimeError: rank 0 has ended, or was silent for `timeout_s`.
        """
        with _waiting(self._timeout_s, "for a heartbeat of rank 0"):
            while (event := self._broadcast(None)) is None:
                pass
        return event[0]

    def close(self) -> None:
        """Release the channel."""
        self._closed.set()
        with self._lock:
            dist.destroy_process_group(self._group)

    def _broadcast(self, event: tuple[Any] | None) -> tuple[Any] | None:
        events = [event]
        with self._lock:
            dist.broadcast_object_list(events, src=0, group=self._group)
        return events[0]

    def _beat(self) -> None:
        while not self._closed.wait(self._timeout_s / 4):
            try:
                self._broadcast(None)
            except RuntimeError:
                return  # the next `send` raises it as well


def read_on_rank_0(read: Callable[[], Answer], timeout_s: float = 600) -> Answer:
    """What `read()` returns on rank 0, on every rank, however long it takes.

    EOFError is raised on every rank.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return read()
    with Events(timeout_s) as events:
        if dist.get_rank() > 0:
            event = events.receive()
        else:
            try:
                event = (read(),)
            except EOFError:
                event = ()
            events.send(event)
    if not event:
        raise EOFError("the input of rank 0 has ended")
    return event[0]


def waiting(
    runtime: Runtime | None, what: str = "for the other ranks' parts of the model"
) -> AbstractContextManager[None]:
    """Turn the failure of a collective of gloo into a sentence.

    NCCL raises nothing: its watchdog logs the failure and ends the process.
    """
    return _waiting(None if runtime is None else runtime.timeout_s, what)


@contextmanager
def _waiting(timeout_s: float | None, what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        is_collective = isinstance(error, dist.DistError) or "gloo" in str(error)
        if timeout_s is None or not is_collective:
            raise
        raise RuntimeError(
            f"rank {dist.get_rank()} waited {what}, but a rank ended or did not answer within "
            f"{timeout_s:g} s: see what the ranks wrote to standard error, or pass a larger "
            "timeout_s"
        ) from error


def waiting_to_load(runtime: Runtime) -> AbstractContextManager[None]:
    """`waiting`, while the ranks load their weights and compare them."""
    return waiting(runtime, "for the other ranks to load their weights")

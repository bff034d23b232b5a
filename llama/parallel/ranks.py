"""What the ranks of one run tell each other beside the model's own sums and gathers.

The model's collectives keep ranks in step as long as all of them make the same calls. Here is what
sees to that: calls and drawn tokens are compared, input comes from one rank, the answers of several
replicas are brought together, and a rank that waits in vain says for whom.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from fairscale.nn.model_parallel import initialize as groups

from llama.errors import LlamaError
from llama.model import RMSNorm, Transformer
from llama.parallel.groups import Runtime, check_same, input_group, name_ranks
from llama.parallel.layers import all_gather

T = TypeVar("T")

GRACE_S = 2  # ranks that wait for the same one run into the timeout at almost the same time


def check_weights(model: Transformer) -> None:
    """Refuse to go on where ranks have loaded different checkpoints of one shape.

    The norms, which every rank has whole, tell: no two trainings end with the same ones.
    """
    norms = [m.weight.double().sum().item() for m in model.modules() if isinstance(m, RMSNorm)]
    check_same({"the sum of the norms' weights": norms})


def check_call(rows: Sequence[Any], how: Any, *, everyone: bool = False, **arguments: Any) -> None:
    """Refuse a call that other ranks of this copy of the model make with other arguments.

    `everyone`: other ranks of any copy.
    """
    arguments |= {"temperature": how.temperature, "top_p": how.top_p}
    arguments |= {"prompts": [row.prompt for row in rows], "limits": [row.limit for row in rows]}
    check_same(arguments, None if everyone else groups.get_model_parallel_group())


def check_tokens(tokens: torch.Tensor) -> None:
    """Refuse tokens (bsz,) that another rank of this copy of the model drew differently."""
    group = groups.get_model_parallel_group()
    drawn = all_gather(tokens[:, None], group.group_name, group.size())  # (bsz, ranks)
    if bool((drawn == drawn[:, :1]).all()):
        return
    row, odd = (drawn != drawn[:, :1]).nonzero()[0].tolist()
    ranks = dist.get_process_group_ranks(group)
    raise LlamaError(
        f"rank {ranks[odd]} drew token {int(drawn[row, odd])} for row {row} where rank {ranks[0]} "
        f"drew {int(drawn[row, 0])}: give every rank the same calls, seed and library versions"
    )


def share(
    runtime: Runtime, rows: Sequence[Any], how: Any, answer: Callable[[Sequence[Any]], list[T]]
) -> list[T]:
    """The answers to all rows, of which each copy of the model works on its part.

    Row i goes to copy i modulo their number. An error of one is raised on all.
    """
    with waiting(runtime, "for the other ranks to make the same call", lambda: None):
        check_call(rows, how, everyone=True)
    try:
        mine: Any = answer(rows[runtime.replica :: runtime.replicas])
    except LlamaError as error:
        mine = error
    parts: list[Any] = [None] * runtime.replicas
    group = groups.get_data_parallel_group()
    with waiting(runtime, "for the answers of the other replicas", lambda: group):
        dist.all_gather_object(parts, mine, group=group)
    for part in parts:
        if isinstance(part, LlamaError):
            raise part
    return [parts[i % runtime.replicas][i // runtime.replicas] for i in range(len(rows))]


def read_on_rank_0(read: Callable[[], T]) -> T:
    """What `read()` returns on rank 0, on every rank. `EOFError` is raised on every rank too.

    The others wait for as long as the person at the keyboard takes: the timeout of the run is not
    for them.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return read()
    group = input_group()
    told: list[Any] = [None, False]
    ended: EOFError | None = None
    if dist.get_rank() == 0:
        try:
            told = [read(), False]
        except EOFError as error:
            told, ended = [None, True], error
    dist.broadcast_object_list(told, src=0, group=group)
    if told[1]:
        raise ended or EOFError("the input of rank 0 has ended")
    return told[0]


@contextmanager
def waiting(
    runtime: Runtime | None,
    what: str = "for the other ranks' parts of the model",
    group: Callable[[], dist.ProcessGroup | None] = groups.get_model_parallel_group,
) -> Iterator[None]:
    """Turn a collective's failure into a sentence that says which rank waits for what."""
    try:
        yield
    except RuntimeError as error:
        if runtime is None or not (
            "gloo" in str(error) or isinstance(error, dist.DistBackendError)
        ):
            raise
        peers = [rank for rank in dist.get_process_group_ranks(group()) if rank != runtime.rank]
        raise RuntimeError(_failure(runtime, what, peers, "Timed out" in str(error))) from error


def waiting_to_load(runtime: Runtime) -> AbstractContextManager[None]:
    """`waiting`, while the ranks load their weights and compare them."""
    return waiting(runtime, "for the other ranks to load their weights", lambda: None)


def _failure(runtime: Runtime, what: str, peers: list[int], timed_out: bool) -> str:
    absent = _absent(runtime, peers, wait_s=GRACE_S if timed_out else 0)
    if not timed_out:
        return (
            f"rank {runtime.rank} lost its connection to {name_ranks(absent or peers)} while it "
            f"waited {what}: see what that rank wrote to standard error"
        )
    return (
        f"rank {runtime.rank} waited {runtime.timeout_s:g} s {what}, and "
        f"{name_ranks(absent or peers)} stayed silent: see what it does there, or pass a larger "
        "timeout_s"
    )


def _absent(runtime: Runtime, peers: list[int], wait_s: float) -> list[int]:
    """Those of `peers` that do not say within `wait_s` that they have stopped too."""
    absent, store = list(peers), runtime.store
    if store is None:
        return absent

    def ask() -> None:
        store.set(f"stopped {runtime.rank}", "")
        end = time.monotonic() + wait_s
        while absent and time.monotonic() < end:
            absent[:] = [r for r in absent if not store.check([f"stopped {r}"])]
            time.sleep(0.1)

    # A thread, since nothing ends a question to a machine that cannot be reached.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(wait_s + 1)
    return absent


def compare_call(call: Any, held: Any) -> list[int]: ...
def broadcast_tokens(tokens: torch.Tensor) -> torch.Tensor: ...
def run_data_parallel(runtime: Runtime, items: Any, call: Any, answer: Any) -> Any: ...

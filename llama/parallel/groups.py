"""Set-up and teardown of the process groups.

Groups that the caller made are used and left alone. Groups that are made here are released with
the last runtime that uses them, or when the process ends.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from fairscale.nn.model_parallel import initialize as groups

from llama.device import resolve_device, resolve_dtype
from llama.errors import LlamaError, require

CONNECT_S = 60  # the ranks of one launch start within seconds, however long a call may take
_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True, eq=False)
class Runtime:
    """This rank's device and its position in the process groups."""

    device: torch.device
    dtype: torch.dtype
    rank: int  # of all ranks
    world_size: int
    model_parallel_size: int  # ranks that share one copy of the model (tensor parallelism)
    replica: int  # this rank's copy of the model (data parallelism)
    replicas: int
    timeout_s: float


def setup(
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    model_parallel_size: int | None = None,
    timeout_s: float = 600,
    arguments: Mapping[str, Any] | None = None,
) -> Runtime:
    """Choose this rank's device and dtype, and make the groups that do not exist yet.

    Args:
        device: None: CUDA if available, else MPS for a single process, else the CPU.
        dtype: None: float16 on CUDA and MPS, float32 on a CPU.
        model_parallel_size: ranks that share one copy of the model; None: all ranks.
        timeout_s: how long a rank waits for another one, in seconds.
        arguments: further arguments that must be equal on all ranks.

    Raises:
        LlamaError: an argument is invalid or differs between ranks, or a rank is missing.
    """
    require(
        0 < timeout_s <= 10**9,
        f"timeout_s is {timeout_s!r:.80}: pass seconds, more than 0 and at most 10**9",
    )
    shared = {"model_parallel_size": model_parallel_size, "timeout_s": timeout_s}
    with _lock:
        exists = dist.is_initialized()
        world_size = dist.get_world_size() if exists else int(os.environ.get("WORLD_SIZE", 1))
        device = resolve_device(device, alone=world_size == 1)
        dtype = resolve_dtype(dtype, device)
        if device.type == "cuda" and world_size > 1:
            torch.cuda.set_device(device)  # collectives of NCCL use the current device
        try:
            if not exists:
                _owned.start_world(world_size, device, timeout_s)
            check_same({**shared, "dtype": dtype, **(arguments or {})})
            _owned.start_groups(model_parallel_size, timeout_s)
        except BaseException:
            if not _users:
                _owned.release()
            raise
        runtime = Runtime(
            device=device,
            dtype=dtype,
            rank=dist.get_rank(),
            world_size=world_size,
            model_parallel_size=groups.get_model_parallel_world_size(),
            replica=groups.get_data_parallel_rank(),
            replicas=groups.get_data_parallel_world_size(),
            timeout_s=timeout_s,
        )
        _users.add(runtime)
        return runtime


def teardown(runtime: Runtime) -> None:
    """Give up `runtime`; the last one releases the groups that were made here."""
    if _owned.process != os.getpid():
        return  # a forked child: the lock may be held for ever, and the groups are the parent's
    with _lock:
        _users.discard(runtime)
        if not _users:
            _owned.release()


@dataclass
class OwnedGroups:
    """The groups that were made here, not by the caller."""

    world: dist.ProcessGroup | None = None
    groups: list[dist.ProcessGroup] = field(default_factory=list)
    store: dist.Store | None = None  # kept: on rank 0 it serves the other ranks
    n_worlds: int = 0  # equal on all ranks
    process: int = field(default_factory=os.getpid)

    def start_world(self, world_size: int, device: torch.device, timeout_s: float) -> None:
        """Make the default group; a single process keeps it in memory."""
        self.groups = []  # the caller may have destroyed an earlier world
        groups.destroy_model_parallel()
        timeout = timedelta(seconds=timeout_s)
        backend = "nccl" if device.type == "cuda" and world_size > 1 else "gloo"
        rank, hook = 0, sys.excepthook
        store: dist.Store = dist.HashStore()
        if world_size > 1:
            self.store = self.store or rendezvous(world_size, min(timeout_s, CONNECT_S))
            store, rank = dist.PrefixStore(f"{self.n_worlds}", self.store), int(os.environ["RANK"])
            store.set_timeout(timeout)
            wait_for_all(store, rank, world_size, backend, timeout_s)
        self.n_worlds += 1
        with _loopback(world_size):
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world_size, timeout=timeout
            )
        self.world = dist.group.WORLD
        if world_size == 1:
            sys.excepthook = hook  # torch's hook begins each line of a traceback with "[rank0]: "

    def start_groups(self, model_parallel_size: int | None, timeout_s: float) -> None:
        """Make fairscale's groups, unless they exist.

        fairscale's own function prints, and waits half an hour for a missing rank.
        """
        if groups.model_parallel_is_initialized():
            size = groups.get_model_parallel_world_size()
            require(
                model_parallel_size in (None, size),
                f"model_parallel_size is {model_parallel_size}, but this process has groups of "
                f"{size} already: pass {size}, or close what uses them first",
            )
            return
        world_size = dist.get_world_size()
        size = world_size if model_parallel_size is None else model_parallel_size
        require(
            1 <= size <= world_size and world_size % size == 0,
            f"model_parallel_size {size} does not divide the world size {world_size}: start with "
            f"torchrun --nproc_per_node {size}, or leave model_parallel_size out",
        )
        replicas = [list(range(i, i + size)) for i in range(0, world_size, size)]
        layout = {
            "_DATA_PARALLEL_GROUP": list(map(list, zip(*replicas, strict=True))),
            "_MODEL_PARALLEL_GROUP": replicas,
            "_PIPELINE_PARALLEL_GROUP": [[rank] for rank in range(world_size)],
        }
        timeout = timedelta(seconds=timeout_s)
        with _loopback(world_size):
            for name, ranks in layout.items():
                group, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timeout)
                self.groups.append(group)
                setattr(groups, name, group)
        groups._PIPELINE_PARALLEL_RANKS = [dist.get_rank()]

    def release(self) -> None:
        """Destroy what was made here, and nothing of the caller's."""
        if self.process != os.getpid() or self._is_failing():
            return
        made, world = self.groups, self.world
        self.groups, self.world = [], None
        if made and groups._MODEL_PARALLEL_GROUP in made:
            groups.destroy_model_parallel()
        if not dist.is_initialized():
            return
        if world is dist.group.WORLD:
            dist.destroy_process_group()
        elif world is None:
            for group in made:
                dist.destroy_process_group(group)

    def _is_failing(self) -> bool:
        """Is an exception about to end a rank on a GPU?

        Destroying a group of NCCL would wait for ranks that wait for this one.
        """
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)  # the latter at exit
        return bool(error and dist.is_initialized() and dist.get_backend() == "nccl")


_lock = threading.RLock()
_owned = OwnedGroups()
_users: set[Runtime] = set()
atexit.register(_owned.release)


def rendezvous(world_size: int, timeout_s: float) -> dist.Store:
    """The store of the launch that the environment describes."""
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    except (RuntimeError, ValueError) as error:
        address = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise LlamaError(
            f"RANK={os.environ.get('RANK')} and WORLD_SIZE={world_size} are set, but the ranks did "
            f"not meet at {address!r} within {timeout_s:g} s: start all of them with torchrun, or "
            "unset RANK and WORLD_SIZE to run as one process"
        ) from error
    return store


def wait_for_all(
    store: dist.Store, rank: int, world_size: int, backend: str, timeout_s: float
) -> None:
    """Wait until all ranks have called `build`, each with the same kind of device."""
    keys = [f"backend of {rank}" for rank in range(world_size)]
    store.set(keys[rank], backend)
    try:
        store.wait(keys)
    except RuntimeError as error:
        missing_ranks = [i for i, key in enumerate(keys) if not store.check([key])]
        raise LlamaError(
            f"rank {rank} waited {timeout_s:g} s in build for ranks {missing_ranks}: see what they "
            "do, and call build on every rank"
        ) from error
    require_same("the backend", [store.get(key).decode() for key in keys])


def gloo_group(timeout_s: float) -> dist.ProcessGroup:
    """A new group of all ranks, over gloo on every device."""
    with _loopback(dist.get_world_size()):
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))


def check_same(arguments: Mapping[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Raise LlamaError for the first argument that differs between the ranks of `group`."""
    everyone = gather({name: brief(value) for name, value in arguments.items()}, group)
    for name in arguments:
        require_same(name, [others.get(name) for others in everyone], group)


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Each rank's picklable `value`, in the order of the ranks of `group`."""
    values = [value] * dist.get_world_size(group)
    if len(values) > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def brief(value: Any) -> str:
    """A short text that is equal for equal values only; a function's is its name."""
    text = getattr(value, "__qualname__", type(value).__name__) if callable(value) else repr(value)
    return text if len(text) <= 60 else f"{text[:40]}... (crc32 {zlib.crc32(text.encode()):08x})"


def require_same(name: str, values: Sequence[Any], group: dist.ProcessGroup | None = None) -> None:
    """Raise LlamaError unless `values`, one of each rank of `group`, are equal."""
    mismatch = next((i for i, value in enumerate(values) if value != values[0]), None)
    if mismatch is not None:
        ranks = range(len(values)) if group is None else dist.get_process_group_ranks(group)
        raise LlamaError(
            f"{name} is {values[0]} on rank {ranks[0]} and {values[mismatch]} on rank "
            f"{ranks[mismatch]}: start every rank with the same device, checkpoint, arguments and "
            "prompts"
        )


@contextmanager
def _loopback(world_size: int) -> Iterator[None]:
    """Restrict gloo to the loopback interface while all ranks run on this machine.

    Otherwise it needs a host name that resolves. An interface that the user chose for several
    ranks is kept.
    """
    chosen = os.environ.get(_INTERFACE)
    is_local = chosen is None and os.environ.get("LOCAL_WORLD_SIZE") == str(world_size)
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if names and (world_size == 1 or is_local):
        os.environ[_INTERFACE] = names[0]
    try:
        yield
    finally:
        os.environ.pop(_INTERFACE, None)
        if chosen is not None:
            os.environ[_INTERFACE] = chosen

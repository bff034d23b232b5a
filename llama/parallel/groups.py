"""Device, dtype and process group: set-up and teardown.

Groups live as long as the process or the last runtime that uses them, and belong to whoever made
them: what the caller made is used and left alone, what is made here is counted and released.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from fairscale.nn.model_parallel import initialize as groups

from llama.device import resolve_device, resolve_dtype
from llama.errors import LlamaError, checked_whole, real, require, shown

LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what every launcher sets
SAME = "start every rank with the same checkpoint, arguments and prompts"
CONNECT_S = 60  # ranks of one launch start within seconds; nobody needs longer to answer a call


@dataclass(frozen=True, eq=False)
class Runtime:
    """Where this rank computes, and its place among the others."""

    device: torch.device
    dtype: torch.dtype
    rank: int  # of all ranks
    world_size: int
    model_parallel_rank: int  # among the ranks that share one copy of the model
    model_parallel_size: int
    replica: int  # which copy of the model it shares
    replicas: int
    timeout_s: float
    store: dist.Store | None  # where ranks can leave word, if the world was made here


def setup(
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    model_parallel_size: int | None = None,
    timeout_s: float = 600,
    arguments: Mapping[str, Any] | None = None,
) -> Runtime:
    """Find this rank's device and dtype, and make the groups that the caller has not made.

    Args:
        device: None: CUDA if there is any, else MPS for a process alone, else the CPU.
        dtype: None: float16 on CUDA and MPS, float32 on a CPU.
        model_parallel_size: ranks that share one copy of the model; None: all there are.
        timeout_s: how long a rank waits for another one.
        arguments: whatever else must be the same on every rank.

    Raises:
        LlamaError: with the value, the limit and the remedy.
    """
    require(
        0 < real(timeout_s) <= 10**9,
        f"timeout_s {shown(timeout_s)}: it must be a number of seconds above 0, at most 10**9",
    )
    if model_parallel_size is not None:
        model_parallel_size = checked_whole(model_parallel_size, "model_parallel_size", 1)
    with _lock:
        launch = None if dist.is_initialized() else _launch()
        world_size = dist.get_world_size() if launch is None else launch.world_size
        device = resolve_device(device, alone=world_size == 1)
        dtype = resolve_dtype(dtype, device)
        if device.type == "cuda" and world_size > 1:
            torch.cuda.set_device(device)  # as the original does; NCCL's calls look there too
        try:
            if launch is not None:
                _made.start_world(launch, device, timeout_s)
            check_same(
                {
                    "model_parallel_size": model_parallel_size,
                    "dtype": dtype,
                    "timeout_s": timeout_s,
                    **(arguments or {}),
                }
            )
            _made.start_groups(model_parallel_size, device, timeout_s)
        except BaseException:
            if not _users:
                _made.release()
            raise
        runtime = Runtime(
            device=device,
            dtype=dtype,
            rank=dist.get_rank(),
            world_size=world_size,
            model_parallel_rank=groups.get_model_parallel_rank(),
            model_parallel_size=groups.get_model_parallel_world_size(),
            replica=groups.get_data_parallel_rank(),
            replicas=groups.get_data_parallel_world_size(),
            timeout_s=timeout_s,
            store=_made.store,
        )
        _users.add(runtime)
        return runtime


def teardown(runtime: Runtime) -> None:
    """Give up `runtime`; with the last one go the groups that were made here."""
    with _lock:
        _users.discard(runtime)
        if not _users:
            _made.release()


@dataclass(frozen=True)
class Launch:
    """What a launcher's environment says; `address` is None for a process alone."""

    rank: int = 0
    world_size: int = 1
    address: str | None = None


def _launch() -> Launch:
    found = {name: os.environ[name] for name in LAUNCHER if name in os.environ}
    if not found:
        return Launch()
    missing = [name for name in LAUNCHER if name not in found]
    remedy = f"start with torchrun, or unset {', '.join(found)} to run as one process"
    require(not missing, f"{', '.join(found)} set without {', '.join(missing)}: {remedy}")
    try:
        rank, world_size = int(found["RANK"]), int(found["WORLD_SIZE"])
        int(found["MASTER_PORT"])
    except ValueError as error:
        raise LlamaError(f"{found} are not the numbers of a launch: {remedy}") from error
    require(0 <= rank < world_size, f"RANK={rank} with WORLD_SIZE={world_size}: {remedy}")
    if world_size == 1:
        return Launch()
    return Launch(rank, world_size, f"{found['MASTER_ADDR']}:{found['MASTER_PORT']}")


class _Made:
    """The groups that were made here, and not by the caller."""

    def __init__(self) -> None:
        self.world: dist.ProcessGroup | None = None
        self.groups: list[dist.ProcessGroup] = []
        self.input: dist.ProcessGroup | None = None
        self.meeting: dist.Store | None = None  # kept: another rank may still be reading from it
        self.store: dist.Store | None = None  # the part of it for the present world
        self.launches = 0  # counts equally on every rank
        self.process = os.getpid()

    def start_world(self, launch: Launch, device: torch.device, timeout_s: float) -> None:
        if self.launches == 0:
            atexit.register(self.release)
        # Groups may be left from a world that the caller has destroyed.
        self.groups, self.input = [], None
        groups.destroy_model_parallel()
        backend = "nccl" if device.type == "cuda" else "gloo"
        if launch.address is None:
            self.store = dist.HashStore()
        else:
            self.meeting = self.meeting or _meet(launch, min(timeout_s, CONNECT_S))
            self.store = dist.PrefixStore(f"llama/{self.launches}", self.meeting)
            self.store.set_timeout(timedelta(seconds=timeout_s))
            _await_all(launch, self.store, backend, timeout_s)
        self.launches += 1
        hook = sys.excepthook
        with _loopback(launch.world_size):
            dist.init_process_group(
                backend,
                store=self.store,
                rank=launch.rank,
                world_size=launch.world_size,
                timeout=timedelta(seconds=timeout_s),
            )
        self.world = dist.group.WORLD
        # torch's puts "[rank1]: " before each line of a traceback: once is enough.
        if launch.world_size == 1 or self.launches > 1:
            sys.excepthook = hook

    def start_groups(
        self, model_parallel_size: int | None, device: torch.device, timeout_s: float
    ) -> None:
        world_size = dist.get_world_size()
        if groups.model_parallel_is_initialized():
            size = groups.get_model_parallel_world_size()
            require(
                model_parallel_size in (None, size),
                f"model_parallel_size {model_parallel_size}, and this process already has groups "
                f"of {size}: pass {size}, or close what uses them first",
            )
        else:
            size = _model_parallel_size(model_parallel_size, world_size)
            with _loopback(world_size), _fairscale(timedelta(seconds=timeout_s)):
                groups.initialize_model_parallel(size)
            self.groups = [
                groups.get_data_parallel_group(),
                groups.get_model_parallel_group(),
                groups.get_pipeline_parallel_group(),
            ]
        backend = dist.get_backend(groups.get_model_parallel_group())
        require(
            size == 1 or device.type == "cuda" or backend != "nccl",
            f"device '{device}', and the process group is one of nccl, which serves GPUs only: "
            "pass device='cuda', or make the group with gloo",
        )

    def release(self) -> None:
        """Give up what was made here; nothing of the caller's."""
        if self.process != os.getpid():
            return  # forked: the groups' threads stayed behind, and to end them would crash
        if self.world is not None and self.world is dist.group.WORLD and _is_failing(self.world):
            return
        made, self.groups, self.input = self.groups, [], None
        world, self.world, self.store = self.world, None, None
        if not dist.is_initialized():
            return
        backends, group = [], cast("dist.ProcessGroup | None", None)
        for group in made if world is None else [*made, world]:
            with suppress(RuntimeError):  # a group of nccl has none for the CPU
                backends.append(group._get_backend(torch.device("cpu")))
        if groups.model_parallel_is_initialized() and groups.get_model_parallel_group() in made:
            groups.destroy_model_parallel()
        if world is dist.group.WORLD:
            dist.destroy_process_group()
        elif world is None:
            for group in made:
                dist.destroy_process_group(group)
        # The backends go last, on their own: torch 2.6 ends the threads of a group with Python's
        # lock held, and one of them may be waiting for that lock.
        made.clear()
        group = world = None
        backends.clear()


def _is_failing(world: dist.ProcessGroup) -> bool:
    """Is an error on its way out of a rank on a GPU?

    To give up a group of nccl would then wait for ranks that wait for this one; it goes with the
    process.
    """
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)  # the latter at exit
    return error is not None and world.size() > 1 and dist.get_backend(world) == "nccl"


def input_group() -> dist.ProcessGroup:
    """All ranks, over gloo whatever the device, and with no timeout to speak of."""
    with _lock:
        if _made.input is None:
            check_same({})  # all have come: a rank that has not is found by the run's own timeout
            with _loopback(dist.get_world_size()):
                _made.input = dist.new_group(backend="gloo", timeout=timedelta(days=365))
            _made.groups.append(_made.input)
        return _made.input


_lock = threading.RLock()
_made = _Made()
_users: set[Runtime] = set()


def _model_parallel_size(size: int | None, world_size: int) -> int:
    if size is None:
        return world_size
    require(
        size <= world_size,
        f"model_parallel_size {size} needs as many processes, and this run has {world_size}: "
        f"start with torchrun --nproc_per_node {size}, or leave model_parallel_size out",
    )
    require(
        world_size % size == 0,
        f"model_parallel_size {size} does not divide the {world_size} processes: "
        "start a multiple of it",
    )
    return size


def _meet(launch: Launch, timeout_s: float) -> dist.Store:
    """The store that a launcher's environment leads to."""
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    except (RuntimeError, ValueError) as error:
        raise LlamaError(
            f"RANK={launch.rank} and WORLD_SIZE={launch.world_size} are set, and within "
            f"{timeout_s:g} s the ranks did not meet at {launch.address}: start all of them with "
            f"torchrun, or unset {', '.join(LAUNCHER)} to run as one process"
        ) from error
    return store


def _await_all(launch: Launch, store: dist.Store, backend: str, timeout_s: float) -> None:
    """Wait until every rank has come to `build`, since gloo would not say who is missing."""
    keys = [f"backend of {rank}" for rank in range(launch.world_size)]
    store.set(keys[launch.rank], backend)
    try:
        store.wait(keys)
    except RuntimeError as error:
        absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise LlamaError(
            f"rank {launch.rank} waited {timeout_s:g} s in build for {name_ranks(absent)}: "
            "see what it does there, and call build on every rank"
        ) from error
    backends = [store.get(key).decode() for key in keys]
    _require_same("the backend", backends, "give every rank the same kind of device")


def check_same(arguments: Mapping[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Refuse arguments that are not the same on every rank of `group`, and name one that differs.

    What cannot be compared on all of them (paths, the device) is not for here.
    """
    if dist.get_world_size(group) == 1:
        return
    everyone: list[Any] = [None] * dist.get_world_size(group)
    shown = {name: _show(value) for name, value in arguments.items()}
    dist.all_gather_object(everyone, shown, group=group)
    for name in arguments:
        values = [others.get(name) for others in everyone]
        _require_same(name, values, SAME, group)


def _show(value: Any) -> str:
    """A short text that is different for different values."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}... (crc32 {zlib.crc32(text.encode()):08x})"


def _require_same(
    name: str, values: list[Any], remedy: str, group: dist.ProcessGroup | None = None
) -> None:
    """`values`: one of each rank of `group`."""
    odd = next((i for i, value in enumerate(values) if value != values[0]), None)
    if odd is not None:
        ranks = range(len(values)) if group is None else dist.get_process_group_ranks(group)
        raise LlamaError(
            f"{name} is {values[0]} on rank {ranks[0]} and {values[odd]} on rank {ranks[odd]}: "
            f"{remedy}"
        )


def name_ranks(ranks: Sequence[int]) -> str:
    """Some ranks, in a sentence."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


@contextmanager
def _fairscale(timeout: timedelta) -> Iterator[None]:
    """Give fairscale's module a `print` and a `new_group` of its own for the time.

    It announces its groups on standard output, which belongs to the caller, and makes them with
    torch's timeout of half an hour.
    """
    new_group = partial(dist.new_group, timeout=timeout)
    distributed = SimpleNamespace(**{**vars(dist), "new_group": new_group})
    names = vars(groups)
    names["print"] = lambda *_: None
    names["torch"] = SimpleNamespace(**{**vars(torch), "distributed": distributed})
    try:
        yield
    finally:
        names["torch"] = torch
        del names["print"]


@contextmanager
def _loopback(world_size: int) -> Iterator[None]:
    """Make gloo listen on the loopback interface only, where all ranks are on this machine.

    Without this gloo takes the interface that the host's name resolves to, if it does. It reads
    the variable when a group is made, and cannot be told otherwise for the groups that fairscale
    makes; the variable is put back at once. With several ranks, the user's choice goes first.
    """
    variable = "GLOO_SOCKET_IFNAME"
    before = os.environ.get(variable)
    here = before is None and os.environ.get("LOCAL_WORLD_SIZE") == str(world_size)
    names = {name for _, name in socket.if_nameindex()} if hasattr(socket, "if_nameindex") else ()
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is None or not (world_size == 1 or here):
        yield
        return
    os.environ[variable] = loopback
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before

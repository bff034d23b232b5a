"""Device, dtype and process groups: what a process alone needs, and what the caller keeps."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from spawn import Run, python
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llama import Llama, LlamaError
from llama import device as device_module
from llama.device import available_bytes, resolve_device, resolve_dtype
from llama.model import ModelArgs, Transformer
from llama.parallel import groups
from llama.sizes import require_room

CPU = torch.device("cpu")
NAMESPACES = shutil.which("ip") is not None and (
    subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode == 0
    if shutil.which("unshare")
    else False
)
LEFT_OVER = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"}
MADE_BY_CALLER = """
import torch, torch.distributed as dist
from fairscale.nn.model_parallel import initialize as groups
from llama.parallel.groups import setup, teardown
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""


def ok(run: Run) -> Run:
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert run.left == []
    return run


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float32", torch.float32),
        ("fp32", torch.float32),
        ("float16", torch.float16),
        ("fp16", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("bf16", torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_a_dtype_goes_by_its_long_its_short_and_its_torch_name(
    name: str | torch.dtype, dtype: torch.dtype
) -> None:
    assert resolve_dtype(name, CPU) == dtype


def test_the_default_dtype_follows_from_the_kind_of_device_alone() -> None:
    assert resolve_dtype(None, CPU) == torch.float32
    assert resolve_dtype(None, torch.device("cuda", 3)) == torch.float16
    assert resolve_dtype(None, torch.device("mps")) == torch.float16


@pytest.mark.parametrize("dtype", ["int8", "", torch.int8, torch.float64, 16])
def test_an_unknown_dtype_is_answered_with_the_known_ones(dtype: object) -> None:
    with pytest.raises(LlamaError, match=r"is unknown: pass one of float32, fp32, float16, fp16, "):
        resolve_dtype(dtype, CPU)


def test_a_device_is_what_was_asked_for_or_the_best_that_is_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert resolve_device(None) == torch.device("cuda", 2)
    assert resolve_device("cuda") == torch.device("cuda", 2)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    assert resolve_device(CPU) == CPU
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(LlamaError, match="'cuda:4' is not available, torch finds 4 GPUs: "):
        resolve_device(None)


def test_several_ranks_do_not_take_mps_whose_tensors_gloo_cannot_send(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert resolve_device(None) == torch.device("mps")
    assert resolve_device(None, alone=False) == CPU
    with pytest.raises(LlamaError, match="'mps' serves a single process"):
        resolve_device("mps", alone=False)


@pytest.mark.parametrize("device", ["gpu", "cpu:x", "meta"])
def test_an_unknown_device_is_answered_with_the_known_ones(device: object) -> None:
    with pytest.raises(LlamaError, match=r"pass 'cpu', 'mps', 'cuda' or 'cuda:N'$"):
        resolve_device(device)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        LlamaError,
        match="torch finds 0 GPUs: pass device='cpu'",
    ):
        resolve_device("cuda")


def test_available_memory_is_no_more_than_the_machine_has() -> None:
    available = available_bytes(CPU)
    if available is None:
        pytest.skip("only Linux tells")
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    assert 0 < available < 1024 * int(fields["MemTotal"].split()[0])


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device_module, "_CGROUP", tmp_path)
    if available_bytes(CPU) is None:
        pytest.skip("nobody tells the memory here")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.stat").write_text("anon 3000000\nfile 2000000\n")
    assert available_bytes(CPU) > 10**7
    (tmp_path / "memory.max").write_text("10000000\n")
    assert available_bytes(CPU) == 7_000_000  # what the kernel can drop is not in use


def test_what_torchs_allocator_holds_free_on_a_gpu_is_available(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 + device.index, 99))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
    assert available_bytes(torch.device("cuda", 2)) == 7 + 50 - 20
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 50)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 8)
    assert available_bytes(torch.device("mps")) == 42


def test_where_nobody_tells_the_memory_nothing_is_refused_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(word: str, file: Path) -> int:
        raise FileNotFoundError(file)

    monkeypatch.setattr(device_module, "_number", missing)
    assert available_bytes(CPU) is None
    huge = ModelArgs(vocab_size=32000, max_seq_len=2**40)
    require_room(huge, device=CPU, dtype=torch.float32)


def test_a_process_alone_listens_on_loopback_only_and_leaves_all_as_it_was() -> None:
    run = ok(
        python(
            """
import os, sys, torch
from pathlib import Path
def state():
    return (dict(os.environ), id(sys.stdout), id(sys.excepthook), torch.get_default_dtype(),
            torch.get_default_device(), torch.get_rng_state().tolist())
before = state()
from llama.parallel.groups import setup, teardown
runtime = setup()
assert state() == before
mine = {os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.exists()}
rows = [line.split() for table in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]]
listening = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]
assert all(address.startswith("0100007F:") for address in listening), listening
teardown(runtime)
assert state() == before
""",
            GLOO_SOCKET_IFNAME="no_such_interface",  # what a cluster's profile may leave there
        )
    )
    assert run.stdout == ""


@pytest.mark.skipif(not NAMESPACES, reason="network namespaces cannot be made here")
def test_a_process_alone_needs_no_network_and_no_name_for_its_host() -> None:
    network = 'hostname nowhere.invalid; ip link set lo up; exec "$@"'
    prefix = ["unshare", "--net", "--uts", "bash", "-c", network, "-"]
    ok(python("from llama.parallel.groups import setup; setup()", prefix=prefix))


def test_groups_go_with_the_last_that_uses_them_and_can_be_made_again() -> None:
    ok(
        python(
            """
import torch.distributed as dist
from fairscale.nn.model_parallel import initialize as groups
from llama.parallel.groups import setup, teardown
for _ in range(2):
    first, second = setup(), setup(dtype="bf16")
    assert first.world_size == first.model_parallel_size == first.replicas == 1
    teardown(first)
    teardown(first)
    assert dist.is_initialized() and groups.model_parallel_is_initialized()
    teardown(second)
    assert not dist.is_initialized() and not groups.model_parallel_is_initialized()
setup()  # and nobody releases this one
"""
        )
    )


def test_groups_of_the_caller_are_used_and_left_alone() -> None:
    ok(
        python(
            MADE_BY_CALLER
            + """
world = dist.group.WORLD
runtime = setup()
assert dist.group.WORLD is world
teardown(runtime)
assert dist.group.WORLD is world and not groups.model_parallel_is_initialized()
print = lambda *_: None
groups.print = print
groups.initialize_model_parallel(1)
group = groups.get_model_parallel_group()
runtime = setup(model_parallel_size=1)
teardown(runtime)
assert groups.get_model_parallel_group() is group
dist.all_reduce(torch.ones(1), group=group)
dist.destroy_process_group()
"""
        )
    )


def test_a_caller_may_destroy_the_groups_that_were_made_here() -> None:
    ok(
        python(
            """
import torch.distributed as dist
from llama.parallel.groups import setup, teardown
runtime = setup()
dist.destroy_process_group()
teardown(setup())
teardown(runtime)
"""
        )
    )


def test_an_impossible_model_parallel_size_is_refused_and_leaves_no_group() -> None:
    run = ok(
        python(
            """
import torch.distributed as dist
from llama.parallel.groups import LlamaError, setup
for size in (2, 0):
    try:
        setup(model_parallel_size=size)
    except LlamaError as error:
        print(error)
    assert not dist.is_initialized()
"""
        )
    )
    for size, sentence in zip((2, 0), run.stdout.splitlines(), strict=True):
        assert sentence.startswith(
            f"model_parallel_size {size} does not divide the world size 1: start with torchrun "
        )


@pytest.mark.parametrize(
    "env", [LEFT_OVER, LEFT_OVER | {"RANK": "1"}, {"RANK": "1", "WORLD_SIZE": "2"}]
)
def test_a_broken_or_left_over_launch_is_named_at_once(env: dict[str, str]) -> None:
    run = python("from llama.parallel.groups import setup; setup(timeout_s=1)", **env)
    assert run.returncode == 1
    assert re.search(
        f"RANK={env['RANK']} and WORLD_SIZE=2 are set, but the ranks did not meet at '.*' within "
        "1 s: start all of them with torchrun, or unset RANK and WORLD_SIZE to run as one process$",
        run.stderr.splitlines()[-1],
    )


def test_a_left_over_launch_of_one_process_is_ignored_and_others_are_found_soon() -> None:
    ok(
        python(
            "from llama.parallel.groups import setup; setup()", **(LEFT_OVER | {"WORLD_SIZE": "1"})
        )
    )
    assert groups.CONNECT_S <= 60  # a call may wait 600 s for another rank


def test_a_process_alone_makes_no_group_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = []

    def init(backend: str, **_: object) -> None:
        backends.append(backend)

    monkeypatch.setattr(torch.distributed, "init_process_group", init)
    owned = groups.OwnedGroups()
    owned.start_world(1, torch.device("cuda"), timeout_s=1)
    assert backends == ["gloo"]


class Operators(TorchDispatchMode):
    """Notes operators that make a float64 or complex tensor, or whose inputs mix devices."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.wide, self.mixed = 0, set[str](), set[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += 1
        made = [x.dtype for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        if any(dtype == torch.float64 or dtype.is_complex for dtype in made):
            self.wide.add(str(func))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if len({x.device for x in inputs if x.ndim > 0}) > 1:
            self.mixed.add(str(func))
        return out


@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}, {"quantize": "int4"}])
def test_no_operator_of_build_prefill_and_decode_makes_float64_which_mps_does_not_have(
    options: dict[str, str],
) -> None:
    with Operators() as seen, Llama.build(max_seq_len=32, verbose=False, **options) as llama:
        llama.generate([[1, 300], [1]], 4, temperature=1, logprobs=True, echo=True)
    assert seen.count > 100
    assert seen.wide == set()


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.int8])
def test_no_operator_of_the_model_mixes_its_device_with_another(
    llama: Llama, window: int | None, cache_dtype: torch.dtype
) -> None:
    """The session's `llama` provides the groups; a CPU tensor would mix with meta tensors."""
    args = ModelArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=64, multiple_of=16)
    args = replace(args, max_seq_len=32, max_batch_size=2, sliding_window=window)
    meta = torch.device("meta")
    with meta:
        model = Transformer(args)
    with torch.inference_mode(), Operators() as seen:
        model.allocate_state(meta, cache_dtype)
        model(torch.zeros(2, 5, dtype=torch.long, device=meta), 0)
        logits = model(
            torch.zeros(2, 1, dtype=torch.long, device=meta),
            torch.zeros(2, dtype=torch.long, device=meta),
            kv_len=8,
            only_last=True,
        )
    assert logits.device == meta
    assert seen.wide == seen.mixed == set()

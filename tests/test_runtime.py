"""Device, dtype and process groups: what a process alone needs, and what the caller keeps."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from spawn import Run, python

from llama import LlamaError
from llama.checkpoints.reader import require_room
from llama.model import ModelArgs
from llama.parallel import groups as runtime
from llama.parallel.groups import CONNECT_S, available_bytes, resolve_device, resolve_dtype

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
    with pytest.raises(LlamaError, match=r"'cuda:4', and this machine has 4: start at most 4"):
        resolve_device(None)


def test_several_ranks_do_not_take_mps_whose_tensors_gloo_cannot_send(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert resolve_device(None) == torch.device("mps")
    assert resolve_device(None, alone=False) == CPU
    with pytest.raises(LlamaError, match="'mps' serves one process alone"):
        resolve_device("mps", alone=False)


@pytest.mark.parametrize("device", ["gpu", "cpu:x", "meta", 1.5])
def test_an_unknown_device_is_answered_with_the_known_ones(device: object) -> None:
    with pytest.raises(LlamaError, match=r"pass 'cpu', 'mps', 'cuda' or 'cuda:N'$"):
        resolve_device(device)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LlamaError, match="torch finds no GPU: pass 'cpu'"):
        resolve_device("cuda")


def test_available_memory_is_no_more_than_the_machine_has() -> None:
    available = available_bytes(CPU)
    if available is None:
        pytest.skip("only Linux tells")
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    assert 0 < available < 1024 * int(fields["MemTotal"].split()[0])


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runtime, "_CGROUP", tmp_path)
    if available_bytes(CPU) is None:
        pytest.skip("nobody tells the memory here")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.stat").write_text("anon 3000000\nfile 2000000\n")
    assert available_bytes(CPU) > 10**7
    (tmp_path / "memory.max").write_text("10000000\n")
    assert available_bytes(CPU) == 7_000_000  # what the kernel can drop is not in use


def test_the_memory_of_a_gpu_is_what_its_driver_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 + device.index, 99))
    assert available_bytes(torch.device("cuda", 2)) == 7
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 50)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 8)
    assert available_bytes(torch.device("mps")) == 42


def test_where_nobody_tells_the_memory_nothing_is_refused_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(word: str, file: Path) -> int:
        raise FileNotFoundError(file)

    monkeypatch.setattr(runtime, "_number", missing)
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
for size in (2, 0, "2"):
    try:
        setup(model_parallel_size=size)
    except LlamaError as error:
        print(error)
    assert not dist.is_initialized()
"""
        )
    )
    sentences = run.stdout.splitlines()
    assert sentences[0].startswith(
        "model_parallel_size 2 needs as many processes, and this run has 1: start with"
    )
    assert sentences[1].startswith("model_parallel_size 0: it must be a whole number from 1 to")
    assert sentences[2].startswith("model_parallel_size '2': it must be a whole number from 1 to")


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"MASTER_ADDR": "localhost"}, "MASTER_ADDR set without RANK, WORLD_SIZE, MASTER_PORT: "),
        (LEFT_OVER | {"RANK": "2"}, "RANK=2 with WORLD_SIZE=2: start with torchrun, or unset "),
        (LEFT_OVER | {"RANK": "x"}, "are not the numbers of a launch: start with torchrun, or "),
        (LEFT_OVER, "and within 1 s the ranks did not meet at 127.0.0.1:29577: start all of them"),
        (LEFT_OVER | {"RANK": "1"}, "RANK=1 and WORLD_SIZE=2 are set, and within 1 s the ranks "),
    ],
)
def test_a_broken_or_left_over_launch_is_named_at_once(env: dict[str, str], message: str) -> None:
    run = python("from llama.parallel.groups import setup; setup(timeout_s=1)", **env)
    assert run.returncode == 1
    assert message in run.stderr.splitlines()[-1]


def test_a_left_over_launch_is_not_waited_for_as_long_as_a_rank_is() -> None:
    assert CONNECT_S <= 60  # what the tests above do with 1 s; a rank has 600 s
    ok(
        python(
            "from llama.parallel.groups import setup; setup()", **(LEFT_OVER | {"WORLD_SIZE": "1"})
        )
    )

"""Two machines, as two network namespaces of this one, joined by a virtual Ethernet cable.

Needs Linux, `ip` (iproute2) and the right to make namespaces; skipped elsewhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from spawn import ROOT, TORCHRUN, Run, Started

from llama import Llama

PROMPT, TOKENS = "Once upon a time", 24


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@dataclass(frozen=True)
class Host:
    name: str
    interface: str
    address: str


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    if shutil.which("ip") is None:
        pytest.skip("there is no ip: apt-get install iproute2")
    tag = f"{os.getpid() % 100000}"
    hosts = [Host(f"llama{i}_{tag}", f"ll{i}_{tag}", f"10.93.0.{i + 1}") for i in range(2)]
    with ExitStack() as stack:
        try:
            for host in hosts:
                ip("netns", "add", host.name)
                stack.callback(ip, "netns", "delete", host.name)
            ip("link", "add", hosts[0].interface, "type", "veth", "peer", hosts[1].interface)
            for host in hosts:
                ip("link", "set", host.interface, "netns", host.name)
                ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
                for interface in ("lo", host.interface):
                    ip("-n", host.name, "link", "set", interface, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode()}")
        yield hosts


def start(hosts: list[Host], script: str, *arguments: str | Path) -> list[Started]:
    """An agent on each host, each with two ranks, as the README has it."""
    return [
        Started(
            [
                *("ip", "netns", "exec", host.name, *TORCHRUN),
                *("--nnodes", "2", "--node_rank", str(i), "--nproc_per_node", "2"),
                *("--master_addr", hosts[0].address, "--master_port", "29500"),
                *(ROOT / script, *arguments),
            ],
            GLOO_SOCKET_IFNAME=host.interface,
        )
        for i, host in enumerate(hosts)
    ]


def finish(agents: list[Started], timeout_s: float) -> list[Run]:
    end = time.monotonic() + timeout_s
    runs = [agent.wait(end - time.monotonic()) for agent in agents]
    assert [run.left for run in runs] == [[], []]
    return runs


def test_two_hosts_answer_as_one_process(hosts: list[Host], tmp_path: Path, llama: Llama) -> None:
    with ExitStack() as stack:
        agents = start(hosts, "tests/rank_story.py", PROMPT, str(TOKENS), tmp_path)
        for agent in agents:
            stack.enter_context(agent)
        runs = finish(agents, 120)
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    [answer] = llama.text_completion([PROMPT], 0, max_gen_len=TOKENS)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(4)] == (
        [answer["generation"]] * 4
    )


def test_when_the_link_is_cut_both_hosts_end_and_say_why(hosts: list[Host], tmp_path: Path) -> None:
    with ExitStack() as stack:
        # More tokens than can be generated before the cut.
        agents = start(hosts, "tests/rank_story.py", PROMPT, "100000", tmp_path)
        for agent in agents:
            stack.enter_context(agent)
        end = time.monotonic() + 60
        while not (tmp_path / "generating").exists():
            assert time.monotonic() < end, "no token has come"
            time.sleep(0.1)
        ip("-n", hosts[0].name, "link", "set", hosts[0].interface, "down")
        runs = finish(agents, 120)
    for run in runs:
        assert run.returncode != 0
        assert (
            "waited for the other ranks' parts of the model, but a rank ended or did not"
            in run.stderr
        )

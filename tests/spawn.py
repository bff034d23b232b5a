"""Run commands as users do, each within a time limit, and leave no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
MARK = "LLAMA_TEST_RUN"  # in the environment of every process of a run
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Run:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str
    left: list[int]  # processes that outlived it, and have been killed since


class Started:
    """A command that runs; `wait` for it, or leave the `with` block to kill all of it."""

    def __init__(
        self,
        command: Sequence[str | Path],
        stdin: str = "",
        cwd: Path | None = None,
        **env: str,
    ) -> None:
        self._mark = uuid.uuid4().hex
        inherited = {k: v for k, v in os.environ.items() if k not in LAUNCHER}
        own = {MARK: self._mark, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=inherited | own | env,
        )
        self._stdin = stdin

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        for pid in self._processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> Run:
        stdout, stderr = self._process.communicate(self._stdin, timeout=timeout_s)
        return Run(self._process.returncode, stdout, stderr, list(self._processes()))

    def _processes(self) -> Iterator[int]:
        """What still runs of it, children's children included; Linux tells."""
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if f"{MARK}={self._mark}".encode() in environ.read_bytes():
                    yield int(environ.parent.name)


def run(
    command: Sequence[str | Path],
    *,
    timeout_s: float = 60,
    stdin: str = "",
    cwd: Path | None = None,
    **env: str,
) -> Run:
    with Started(command, stdin, cwd, **env) as started:
        return started.wait(timeout_s)


def python(code: str, *, prefix: Sequence[str] = (), timeout_s: float = 60, **env: str) -> Run:
    """Run `code` in an interpreter of its own."""
    return run([*prefix, sys.executable, "-c", code], timeout_s=timeout_s, **env)


def torchrun(
    n_ranks: int,
    script: str | Path,
    *arguments: str | Path,
    timeout_s: float = 120,
    stdin: str = "",
    **env: str,
) -> Run:
    """Run a script of this folder, or of the root, on ranks of this machine."""
    launch = [*TORCHRUN, "--standalone", "--nproc_per_node", str(n_ranks)]
    command = [*launch, ROOT / script, *arguments]
    return run(command, timeout_s=timeout_s, stdin=stdin, **env)


TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

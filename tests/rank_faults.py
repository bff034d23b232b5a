"""Two ranks, one of which fails in the way that the first argument names."""

from __future__ import annotations

import os
import signal
import sys
import time

from llama import Llama
from llama.checkpoints import load as checkpoints
from llama.parallel import groups as runtimes

FAULTY = os.environ["RANK"] == "1"


def fail(fault: str) -> None:
    if fault == "raise":
        raise OSError("the cosmic ray of the test")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "sleep":
        time.sleep(600)


def main(fault: str, where: str) -> None:
    if where == "loading" and FAULTY:
        checkpoints.load = lambda *_, **__: fail(fault)
    if where == "before" and FAULTY:
        runtimes.setup = lambda **_: fail(fault)
    # Ranks of a busy machine come seconds apart; only who waits for a silent one has to be quick.
    llama = Llama.build(timeout_s=5 if fault == "sleep" else 60, dtype="float32")
    for step, _ in enumerate(llama.stream([[1]], 400, temperature=0)):
        if step == 3 and FAULTY and where == "generation":
            fail(fault)
    print("unharmed")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""From a socket to answers, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import signal
import socket

import uvicorn

from llama.errors import LlamaError
from llama.generation import Llama
from llama.server.app import Server, make_app
from llama.server.runner import Runner


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises LlamaError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        raise LlamaError(
            f"{host}:{port} cannot be listened on ({error}): choose another --port or --host"
        ) from error


def serve(
    llama: Llama,
    listener: socket.socket | None,
    *,
    name: str,
    api_key: str | None,
    max_queue: int,
    grace: int,
    cors: str | None,
    timeout_s: float,
) -> None:
    """Answer HTTP on rank 0 until SIGTERM or Ctrl-C; other ranks follow it.

    Raises:
        LlamaError: another rank has ended.
    """
    if listener is None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 says when to end
        Runner(llama, timeout_s=timeout_s).run()
        return
    server = Server(llama, name, max_queue=max_queue, timeout_s=timeout_s)

    def end() -> None:
        http.should_exit = True

    app = make_app(server, api_key=api_key, cors=cors, on_failure=end)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=grace, lifespan="on"
    )
    http = uvicorn.Server(config)
    host, port = listener.getsockname()[:2]
    print(f"{name} at http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    http.run(sockets=[listener])
    if server.runner.failure is not None:
        raise LlamaError(f"the engine has failed: {server.runner.failure}")

"""Run a server process: checks before the port opens, the address it got, clean shutdown on SIGTERM and SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI

from errata_protocol.environment import EnvironmentSpec
from errata_protocol.errors import InvalidRequest

from .auth import LOOPBACK_NAMES, is_loopback
from .loading import Stated, load
from .runtime import Runtime
from .settings import Settings

log = logging.getLogger("errata.server")

SHUTDOWN_S = 30
"""How long a request that runs may take to commit after SIGTERM."""

MAX_WIRE_FRAME = 64 * 1024**2
"""Frames up to here are read, so that one over ``Settings.max_frame`` gets an error and not a hang-up (PROTOCOL A6)."""


@dataclass(frozen=True, slots=True)
class Bind:
    """Where to listen.

    Args:
        host: Address or name.
        port: 0 takes a free one.
        insecure: Other machines may use the server without a token.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    insecure: bool = False


def build(
    target: str,
    settings: Settings,
    *,
    bind: Bind,
    mode: str | None,
    max_sessions: int | None = None,
    stated: Stated | None = None,
    deterministic: bool = False,
    volatile: Sequence[str] = (),
    detect: str | None = None,
) -> tuple[FastAPI, Runtime]:
    """Load an environment and make its application; the last arguments as in `create_fastapi_app`.

    Raises:
        InvalidRequest: Nothing to serve by that name, an unprotected public bind, or a ``detect`` that maps no fields.
        JournalUnavailable: The data directory cannot be used.
    """
    if not is_loopback(bind.host) and settings.token is None and not bind.insecure:
        raise InvalidRequest(
            f"{bind.host} can be reached from other machines and no token is set: set ERRATA_TOKEN, "
            "bind 127.0.0.1, or say --insecure"
        )
    if is_loopback(bind.host) and not settings.allowed_hosts:
        settings = settings.model_copy(update={"allowed_hosts": (*LOOPBACK_NAMES, bind.host)})
    os.environ.update(settings.in_environment())  # for an application that was made by our own create_app
    servable = load(target, mode=mode, stated=stated)
    runtime = servable.runtime or Runtime.of(settings)
    app = servable.application(
        runtime,
        mode=mode,
        max_sessions=max_sessions,
        insecure=bind.insecure,
        deterministic=deterministic,
        volatile=volatile,
        detect=detect,
    )
    return app, runtime


async def prepare(app: FastAPI, runtime: Runtime) -> None:
    """Do what must succeed before the port opens.

    Raises:
        SandboxUnavailable: The environment runs commands and this machine cannot sandbox them.
    """
    await runtime.start()
    spec: EnvironmentSpec = app.state.spec
    if spec.sandbox:
        info = await runtime.sandboxes.start()
        for note in info.notes:
            log.warning("sandbox: %s", note)


def run(app: FastAPI, runtime: Runtime, bind: Bind) -> None:
    """Serve until a signal; return after the last commit."""
    listening = _listen(bind)
    host, port = listening.getsockname()[:2]
    url = f"http://{'[' + host + ']' if ':' in host else host}:{port}"
    config = uvicorn.Config(
        app,
        host=bind.host,
        port=port,
        loop="uvloop" if sys.platform == "linux" else "asyncio",
        ws="websockets-sansio",
        ws_max_size=MAX_WIRE_FRAME,
        ws_per_message_deflate=False,
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    server = _Announced(config, runtime, url, app)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(_serve(server, app, runtime, listening))


async def _serve(server: uvicorn.Server, app: FastAPI, runtime: Runtime, listening: socket.socket) -> None:
    try:
        await prepare(app, runtime)
        gc.collect()
        gc.freeze()  # what was imported stays: looking through it again and again costs pauses of 0.2 s under load
        await server.serve(sockets=[listening])
    finally:
        await runtime.close()


class _Announced(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, runtime: Runtime, url: str, app: FastAPI) -> None:
        super().__init__(config)
        self._runtime = runtime
        self._url = url
        self._name = app.state.spec.name

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on a signal and return; uvicorn's own would raise the signal again afterwards, losing exit status 0."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._runtime.announce(self._url)
        kept = self._runtime.data_dir or "memory only, lost when this process ends"
        print(f"errata: serving {self._name} at {self._url} (journal: {kept})", file=sys.stderr, flush=True)


def _listen(bind: Bind) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(bind.host, bind.port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, proto)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(4096)
    except OSError as error:
        raise InvalidRequest(
            f"cannot listen on {bind.host}:{bind.port}: {error.strerror or error}; "
            "give another --port (0 takes a free one)"
        ) from error
    return listening


__all__ = ["Bind", "build", "prepare", "run"]

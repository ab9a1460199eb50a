"""Target of OpenEnv's own server tests: applications whose requests are answered by a server of several workers.

The environments of these tests are classes inside functions, which no command line can name. So each application forks
a process when it is made. At the first request that process begins to serve what was made, as ``errata serve`` does
with ``--workers``, and the application sends it this request and all later ones, each on a connection of its own. What
the tests do with the objects themselves, without a request, happens in their own process.

A server with several workers refuses an environment that has one instance, so each has more here.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import websockets
from fastapi import FastAPI
from openenv.core.env_server.types import ServerMode
from starlette.types import ASGIApp, Receive, Scope, Send

from errata_server import app as ours
from errata_server import fleet
from errata_server.runtime.registry import RUNTIMES
from errata_server.runtime.runtime import Runtime
from errata_server.serve.server import Bind, Served, checked_settings, run
from errata_server.settings import Settings

WORKERS = 4
INSTANCES = 64
"""Upper bound of the instances of each environment."""
ANSWERED = Path("answered")
"""File to which each worker appends its number, a byte, for each request and each socket that it has answered."""
_PR_SET_PDEATHSIG = 1


class Fleet:
    """A server with several workers, in processes that are forked from this one.

    Args:
        make: Makes the application of a worker.
    """

    def __init__(self, make: Callable[[Runtime], FastAPI]) -> None:
        self._directory = Path(tempfile.mkdtemp(dir=Path.cwd()))
        self._wanted, self._url = os.pipe(), os.pipe()
        self._found: str | None = None
        self._pid = os.fork()
        if not self._pid:
            self._serve(make)

    def url(self) -> str:
        """Return the address; the first call starts the workers and waits for them.

        Raises:
            RuntimeError: They could not start.
        """
        if self._found is None:
            os.write(self._wanted[1], b"1")
            self._found = os.read(self._url[0], 1024).decode()
        if not self._found.startswith("http"):
            raise RuntimeError("the server did not start; its output is that of the test")
        return self._found

    def end(self) -> None:
        """End all its processes; the workers die with their supervisor."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        for end in (*self._wanted, *self._url):
            os.close(end)

    def _serve(self, make: Callable[[Runtime], FastAPI]) -> None:
        """Serve in the forked process, and in the workers that are forked from it; none returns to the tests."""
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            os.read(self._wanted[0], 1)
            self._supervise(make)
        except BaseException:
            traceback.print_exc()
            os.write(self._url[1], b"failed")
        finally:
            os._exit(0)

    def _supervise(self, make: Callable[[Runtime], FastAPI]) -> None:
        bind = Bind(port=0)
        worker = fleet.supervise(self._directory, bind, WORKERS)
        if worker is None:
            return
        own = Settings(data_dir=worker.join(), fsync=False)
        runtime = RUNTIMES.shared(fleet.shared_settings(checked_settings(own, bind), WORKERS))
        app = make(runtime)
        app.add_middleware(_Counted, worker=worker.member.worker)

        def announced(url: str) -> list[str]:
            os.write(self._url[1], url.encode())
            return []

        served = Served(app, runtime, (), {}, announced)
        worker.enter(served)
        run(served, bind, worker)


class _Counted:
    """ASGI middleware that notes who answers a request.

    Args:
        app: The application of a worker.
        worker: Number of the worker.
    """

    ends_before_socket = True

    def __init__(self, app: ASGIApp, *, worker: int) -> None:
        self._app = app
        self._worker = worker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            note = os.open(ANSWERED, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.write(note, bytes([self._worker]))
            os.close(note)
        await self._app(scope, receive, send)


class _Elsewhere:
    """ASGI middleware that sends all requests to a server, each on a new connection.

    Args:
        app: The application, which gets the events of its lifespan only.
        server: The server.
    """

    def __init__(self, app: ASGIApp, *, server: Fleet) -> None:
        self._app = app
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._request(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._socket(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts, more = [], True
        while more:
            message = await receive()
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            answer = await client.request(
                scope["method"], self._target(scope), headers=_kept(scope), content=b"".join(parts)
            )
        left_out = ("content-encoding", "transfer-encoding", "connection")
        headers = [(name, value) for name, value in answer.headers.raw if name.decode().lower() not in left_out]
        await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": answer.content})

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        url = self._target(scope).replace("http", "ws", 1)
        try:
            socket = await websockets.connect(url, proxy=None, subprotocols=scope.get("subprotocols") or None)
        except websockets.InvalidStatus:
            await send({"type": "websocket.close", "code": 1008})
            return
        await send({"type": "websocket.accept", "subprotocol": socket.subprotocol})

        async def there() -> None:
            while (message := await receive())["type"] == "websocket.receive":
                text = message.get("text")
                await socket.send(text if text is not None else message["bytes"])
            await socket.close(message.get("code", 1000))

        sending = asyncio.create_task(there())
        with contextlib.suppress(websockets.ConnectionClosed):
            while True:
                got = await socket.recv()
                await send({"type": "websocket.send", "text" if isinstance(got, str) else "bytes": got})
        if not sending.done():
            sending.cancel()
            await send({"type": "websocket.close", "code": socket.close_code or 1000})

    def _target(self, scope: Scope) -> str:
        query = scope["query_string"].decode("latin-1")
        return self._server.url() + scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")


def _kept(scope: Scope) -> list[tuple[bytes, bytes]]:
    left_out = (b"host", b"content-length", b"connection", b"accept-encoding")
    return [(name, value) for name, value in scope["headers"] if name.lower() not in left_out]


_running: list[Fleet] = []


def _elsewhere(app: FastAPI, make: Callable[[Runtime], FastAPI]) -> None:
    """Let a server answer the requests of an application, from now on."""
    _running.append(Fleet(make))
    app.add_middleware(_Elsewhere, server=_running[-1])


def pytest_runtest_logfinish(nodeid: str, location: Any) -> None:
    """End the servers of a test."""
    while _running:
        _running.pop().end()


def _with_instances(env: Any) -> Any:
    """Return an environment that may have several instances."""
    return type(env.__name__, (env,), {"SUPPORTS_CONCURRENT_SESSIONS": True}) if isinstance(env, type) else env


def create_fastapi_app(env: Any, *args: Any, **kwargs: Any) -> FastAPI:
    """Create an application with OpenEnv's signature."""
    app = ours.create_fastapi_app(env, *args, **kwargs)
    several = {**kwargs, "max_concurrent_envs": INSTANCES}
    _elsewhere(app, lambda runtime: ours.create_fastapi_app(_with_instances(env), *args, runtime=runtime, **several))
    return app


class HTTPEnvServer(ours.HTTPEnvServer):
    """OpenEnv's server class, for whose application several workers answer."""

    def __init__(self, env: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(env, *args, **kwargs)
        several = {**kwargs, "max_concurrent_envs": INSTANCES, "concurrency_config": None}
        self._made = partial(ours.HTTPEnvServer, _with_instances(env), *args, **several)

    def register_routes(self, app: FastAPI, mode: Any = ServerMode.SIMULATION) -> None:
        """Register our routes, and let several workers answer their requests."""
        super().register_routes(app, mode)

        def made(runtime: Runtime) -> FastAPI:
            served = FastAPI()
            self._made(runtime=runtime).register_routes(served, mode)
            return served

        _elsewhere(app, made)

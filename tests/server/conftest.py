"""A connection that speaks frames, for tests of the plain door."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from errata_server.app import create_fastapi_app
from errata_server.journal import MemoryJournal
from errata_server.runtime.runtime import Runtime
from errata_server.sandbox.fake.backend import FakeBackend
from errata_server.settings import Settings
from errata_server.simulation import SeededIds, SimulatedClock, SimulatedThreads
from errata_server.targets import directory_modules

from .environments import CountAction, CountEnvironment, CountObservation


class Socket:
    """One ``/ws`` connection."""

    def __init__(self, ws: Any) -> None:
        self.ws = ws

    def raw(self, text: str) -> str:
        self.ws.send_text(text)
        return str(self.ws.receive_text())

    def ask(self, type_: str, data: Any = None, **more: Any) -> dict[str, Any]:
        frame = {"type": type_, **({} if data is None else {"data": data}), **more}
        return dict(json.loads(self.raw(json.dumps(frame))))


@contextmanager
def connect(client: TestClient, path: str = "/ws", *, told: bool = True) -> Iterator[Socket]:
    """Open a socket; ``told`` sends the capability probe first, so that frames carry eid, t and digest."""
    with client.websocket_connect(path) as ws:
        socket = Socket(ws)
        if told:
            assert socket.ask("capabilities")["type"] == "capabilities"
        yield socket


Connect = Callable[..., AbstractContextManager[Socket]]


async def until(said: Callable[[], bool]) -> None:
    """Wait for what has no event of its own: a thread says it, or a peer."""
    async with asyncio.timeout(60):
        while not said():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


_ENVIRONMENTS = ("terminal_env", "swe_bench_lite_env")
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def _is_installed(name: str, before: Set[str]) -> bool:
    """Return whether a module is of a package that was imported before, of an installed one, or ours."""
    package = name.partition(".")[0]
    if package in before or package.startswith("errata_") or package in _ENVIRONMENTS:
        return True
    spec = getattr(sys.modules.get(package), "__spec__", None)
    if spec is None:
        return False
    places = [spec.origin, *(spec.submodule_search_locations or ())]
    return any(str(place).startswith((*_INSTALLED, "built-in", "frozen")) for place in places)


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Modules of directories, path entries and finders that a test adds are gone after it.

    Modules of installed packages stay. A second copy of one has other classes: httpx, for instance, would not know the
    exceptions of a new httpcore.
    """
    modules, path, finders = set(sys.modules), list(sys.path), list(sys.meta_path)
    yield
    for name in [name for name in sys.modules if name not in modules and not _is_installed(name, modules)]:
        del sys.modules[name]
    sys.path[:], sys.meta_path[:] = path, finders
    directory_modules._directories.clear()


def simulated(settings: Settings | None = None) -> Runtime:
    """Return a runtime on fakes: no thread, file or clock of the machine; ids from a seed."""
    return Runtime(
        settings or Settings(),
        journal=MemoryJournal(),
        sandboxes=FakeBackend(),
        ids=SeededIds(random.Random(7)),
        clock=SimulatedClock(itertools.count().__next__),
        threads=SimulatedThreads(),
    )


@pytest.fixture
def app() -> FastAPI:
    return create_fastapi_app(
        CountEnvironment,
        CountAction,
        CountObservation,
        max_concurrent_envs=8,
        runtime=simulated(Settings(journal_wait_s=0.3)),
    )


@pytest.fixture
def client(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app) as made:
        yield made

"""Sessions as a server would run them, without a server."""

from __future__ import annotations

import logging
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from errata_server import context
from errata_server.sandbox.base import Backend
from terminal_env.server.environment import TerminalEnvironment

from .scripted import ScriptedBackend

LOG = logging.getLogger("errata.test")
SEED = 4711


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend()


@pytest.fixture
def in_session() -> Iterator[Callable[[Backend], None]]:
    """Make a backend the current session's, as a server does around each call."""
    tokens = []

    def enter(backend: Backend) -> None:
        tokens.append(context._current.set(context.SessionContext(backend, SEED, LOG)))

    yield enter
    context._current.set(None)


@pytest.fixture
def environment(backend: ScriptedBackend, in_session: Callable[[Backend], None]) -> TerminalEnvironment:
    in_session(backend)
    return TerminalEnvironment()


@pytest_asyncio.fixture
async def real(tmp_path: Path, in_session: Callable[[Backend], None]) -> AsyncIterator[Backend]:
    """The namespace backend on a data directory of its own; it refuses where the machine lacks something."""
    from errata_server.sandbox.namespace import NamespaceBackend

    backend = NamespaceBackend(tmp_path / "sandboxes")
    await backend.start()
    in_session(backend)
    yield backend
    await backend.close()
    shutil.rmtree(tmp_path / "sandboxes", ignore_errors=True)

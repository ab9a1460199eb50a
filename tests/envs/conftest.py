"""Sessions as a server would run them, without a server."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from errata_server.environments import context
from errata_server.sandbox.base import Backend
from errata_server.sandbox.namespace.backend import NamespaceBackend
from terminal_env.server.check.results import ALLOW_VARIABLE, DIRECTORY_VARIABLE
from terminal_env.server.environment import TerminalEnvironment
from terminal_env.server.tasks import TASKS_VARIABLE

from .scripted import ScriptedBackend, write_task

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


@pytest.fixture(scope="module")
def namespace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """One namespace backend for a module's tests: it belongs to no event loop, and sessions on it do not meet.

    It is not skipped where the machine lacks something: it refuses with a line that says what.
    """
    directory = tmp_path_factory.mktemp("sandboxes")
    backend = NamespaceBackend(directory)
    asyncio.run(backend.start())
    yield backend
    asyncio.run(backend.close())
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def real(namespace: Backend, in_session: Callable[[Backend], None]) -> Backend:
    """The namespace backend as the current session's."""
    in_session(namespace)
    return namespace


@pytest.fixture(autouse=True)
def unchecked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve tasks that no check has passed; results of checks are kept apart from the user's own."""
    monkeypatch.setenv(ALLOW_VARIABLE, "true")
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "checks"))


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two tasks of the operator's own, ``copy`` and ``other``."""
    write_task(
        tmp_path / "copy",
        {
            "instruction.md": "Copy it.\n",
            "environment/in.txt": "data\n",
            "tests/expected.txt": "SECRET-OF-THE-TESTS\n",
            "solution/solve.sh": "echo SECRET-OF-THE-SOLUTION\n",
        },
    )
    write_task(tmp_path / "other", {})
    monkeypatch.setenv(TASKS_VARIABLE, str(tmp_path))
    yield tmp_path

"""Fixtures for sandbox tests. Without a base tree they fail and say what to do: a green run that tested no sandbox
would be worse. ``ERRATA_SKIP_SANDBOX=REASON`` skips them, and the reason is shown. Run by root they test root mode, and
by an ordinary user rootless mode; ``test_rootless.py`` has root do both."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from errata_server.sandbox.files import as_owner
from errata_server.sandbox.files.walk import remove_tree
from errata_server.sandbox.namespace.backend import NamespaceBackend


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[Path]:
    """A data directory that is removed even where pytest's own clean-up cannot follow (trees deeper than a path)."""
    reason = os.environ.get("ERRATA_SKIP_SANDBOX")
    if reason:
        pytest.skip(f"ERRATA_SKIP_SANDBOX: {reason}")
    yield tmp_path / "sandboxes"
    as_owner.call(remove_tree, tmp_path / "sandboxes")


@pytest.fixture(scope="session")
def one_backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NamespaceBackend]:
    """A backend for all tests of a run that asks for it: to start one takes longer than most tests."""
    place = tmp_path_factory.mktemp("one") / "sandboxes"
    backend = NamespaceBackend(place)
    yield backend
    asyncio.run(backend.close())
    as_owner.call(remove_tree, place)


@pytest.fixture
async def namespace_backend(data_dir: Path, request: pytest.FixtureRequest) -> AsyncIterator[NamespaceBackend]:
    """A started backend on the default base tree, with nothing in it."""
    if os.environ.get("ERRATA_ONE_BACKEND"):
        shared: NamespaceBackend = request.getfixturevalue("one_backend")
        await shared.start()
        yield shared
        for box in list(shared.live.values()):
            await box.destroy()
        await shared.collect([])
        return
    backend = NamespaceBackend(data_dir)
    await backend.start()
    yield backend
    await backend.close()

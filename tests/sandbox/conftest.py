"""Fixtures for sandbox tests. Without a base tree they fail and say what to do: a green run that tested no sandbox
would be worse. ``ERRATA_SKIP_SANDBOX=REASON`` skips them, and the reason is shown. Run by root they test root mode, and
by an ordinary user rootless mode; ``test_rootless.py`` has root do both."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from errata_server.sandbox import as_owner
from errata_server.sandbox.namespace import NamespaceBackend
from errata_server.sandbox.treewalk import remove_tree


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[Path]:
    """A data directory that is removed even where pytest's own clean-up cannot follow (trees deeper than a path)."""
    reason = os.environ.get("ERRATA_SKIP_SANDBOX")
    if reason:
        pytest.skip(f"ERRATA_SKIP_SANDBOX: {reason}")
    yield tmp_path / "sandboxes"
    as_owner.call(remove_tree, tmp_path / "sandboxes")


@pytest.fixture
async def namespace_backend(data_dir: Path) -> AsyncIterator[NamespaceBackend]:
    """A started backend on the default base tree."""
    backend = NamespaceBackend(data_dir)
    await backend.start()
    yield backend
    await backend.close()

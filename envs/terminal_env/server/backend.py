"""Which sandbox backend an environment uses: its session's, or one of this process where stock OpenEnv serves it."""

from __future__ import annotations

import os
import tempfile
from functools import lru_cache
from pathlib import Path

from errata_server.environments.context import current_session
from errata_server.sandbox.base import Backend

DATA_VARIABLE = "ERRATA_DATA_DIR"


def session_backend() -> tuple[Backend, int | None]:
    """Return the backend and the seed that the session's server drew, None without such a server."""
    try:
        session = current_session()
    except LookupError:
        return _own_backend(), None
    return session.sandboxes, session.seed


@lru_cache(maxsize=1)
def _own_backend() -> Backend:
    # Here, because a server that brings its own backend need not be able to load this one.
    from errata_server.sandbox.namespace.backend import NamespaceBackend

    configured = os.environ.get(DATA_VARIABLE)
    if configured:
        return NamespaceBackend(Path(configured) / "sandboxes")
    # Kept by this function until the process ends; the directory goes with it.
    directory = tempfile.TemporaryDirectory(prefix="errata-sandboxes-", ignore_cleanup_errors=True)
    backend = NamespaceBackend(Path(directory.name))
    _directories.append(directory)
    return backend


_directories: list[tempfile.TemporaryDirectory[str]] = []

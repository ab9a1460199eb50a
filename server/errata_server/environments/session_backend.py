"""Which sandbox backend an environment uses: its session's, or one of this process where stock OpenEnv serves it."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path

from ..sandbox import registry
from ..sandbox.base import Backend
from ..settings import Settings
from .context import current_session


def session_backend() -> tuple[Backend, int | None]:
    """Return the backend and the seed that the session's server drew, None without such a server."""
    try:
        session = current_session()
    except LookupError:
        return _own_backend(), None
    return session.sandboxes, session.seed


@lru_cache(maxsize=1)
def _own_backend() -> Backend:
    settings = Settings()
    directory = settings.data_dir
    if directory is None:
        # Kept until the process ends; the directory goes with it.
        temporary = tempfile.TemporaryDirectory(prefix="errata-sandboxes-", ignore_cleanup_errors=True)
        _directories.append(temporary)
        directory = Path(temporary.name)
    return registry.create(settings.sandbox, registry.place_of(directory, settings.base))


_directories: list[tempfile.TemporaryDirectory[str]] = []

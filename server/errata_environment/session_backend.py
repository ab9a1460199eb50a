"""Returns the sandbox backend for an environment: that of its session, or one of this process under stock OpenEnv."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path

from errata_server.environments.context import current_session
from errata_server.sandbox import registry
from errata_server.sandbox.base import Backend
from errata_server.settings import Settings


def session_backend() -> tuple[Backend, int | None]:
    """Return the sandbox backend to use, and the seed that the server drew for the session.

    Where stock OpenEnv serves the environment there is no session: one backend is created for the process, from the
    ``ERRATA_*`` settings, and the seed is None.
    """
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
        # Kept until the process ends, which removes the directory.
        temporary = tempfile.TemporaryDirectory(prefix="errata-sandboxes-", ignore_cleanup_errors=True)
        _directories.append(temporary)
        directory = Path(temporary.name)
    return registry.create(settings.sandbox, registry.config_for(directory, settings.base))


_directories: list[tempfile.TemporaryDirectory[str]] = []

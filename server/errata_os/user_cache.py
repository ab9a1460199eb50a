"""`user_cache`: the directory of what this user's programs can make again."""

from __future__ import annotations

import os
from pathlib import Path

from errata_protocol.errors import SandboxUnavailable


def user_cache() -> Path:
    """Return Errata's directory in the user's cache, ``XDG_CACHE_HOME`` or ``~/.cache``.

    Raises:
        SandboxUnavailable: This user has no home directory, as a uid of its own in a container.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "errata"
    except RuntimeError as error:
        raise SandboxUnavailable(
            "this user has no home directory for a cache: set XDG_CACHE_HOME to a directory"
        ) from error

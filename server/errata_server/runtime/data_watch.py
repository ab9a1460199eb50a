"""Notices at once when a data directory is removed, renamed or unmounted while its server runs.

Files that are open stay writable when their directory is gone, so commits would go on into files that nobody can open
again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from errata_os.service_threads import ServiceThread

WATCH_S = 0.5
"""Between two looks at the directories."""


class DataWatch:
    """Looks at directories on a thread of its own, until `close`.

    Args:
        directories: Existing ones.
        looked: Called on the thread after each look.

    Attributes:
        missing: The first directory whose path no longer leads to it; None while all are in place.
    """

    def __init__(self, directories: Sequence[Path], looked: Callable[[], object]) -> None:
        self.missing: Path | None = None
        self._known = {directory: _identity(directory) for directory in directories}
        self._looked = looked
        self._closed = threading.Event()
        self._thread = ServiceThread("errata-data-watch", self._run)

    @property
    def trouble(self) -> str | None:
        """Why the thread itself failed, for ``/ready``; None when all is well."""
        return self._thread.trouble

    def close(self) -> None:
        """Stop looking. Idempotent."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(WATCH_S):
            self.missing = next((path for path, known in self._known.items() if _identity(path) != known), None)
            self._looked()


def _identity(directory: Path) -> tuple[int, int] | None:
    try:
        found = directory.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino

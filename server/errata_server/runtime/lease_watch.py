"""Notices when the data directory of a server with a lease has a later owner, and removes what earlier ones left."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from errata_os.service_threads import ServiceThread

from .epochs import later_than, remove_earlier
from .lease import Lease

log = logging.getLogger("errata.server")

WATCH_S = 0.5
"""Between two looks at the lease and the directory."""


class LeaseWatch:
    """Looks at a lease and its data directory on a thread of its own, until `close`.

    Args:
        lease: The server's lease.
        directory: Data directory of the lease's epoch.
        lost: Called on the thread, at each look, once the directory has a later owner.
    """

    def __init__(self, lease: Lease, directory: Path, lost: Callable[[str], None]) -> None:
        self._lease = lease
        self._directory = directory
        self._lost = lost
        self._closed = threading.Event()
        self._thread = ServiceThread("errata-lease-watch", self._run)

    @property
    def trouble(self) -> str | None:
        """Why the thread itself failed, for ``/ready``; None when all is well."""
        return self._thread.trouble

    def close(self) -> None:
        """Stop looking. Idempotent."""
        self._closed.set()
        self._thread.join()

    def why_lost(self) -> str | None:
        """Return why this server has no part in the directory any more; None while it has, or nobody can tell."""
        if self._lease.is_lost():
            return f"its keeper has a later lease than that of epoch {self._lease.epoch}"
        try:
            later = later_than(self._directory)
        except OSError as error:
            log.warning("the shared data directory cannot be read: %s", error)
            return None
        return f"epoch {later} has taken its data directory over" if later is not None else None

    def _run(self) -> None:
        if self.why_lost() is None:
            try:
                remove_earlier(self._directory)
            except OSError as error:
                log.warning("what earlier owners left in the shared data directory cannot be removed: %s", error)
        while True:
            if (why := self.why_lost()) is not None:
                self._lost(why)
            if self._closed.wait(WATCH_S):
                return

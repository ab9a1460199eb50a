"""``errata serve --lease``: the server's own directory in a shared one, and its end when another server follows."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from errata_protocol.errors import InvalidRequest

from ..runtime.epochs import enter
from ..runtime.lease import Lease
from ..settings import Settings

log = logging.getLogger("errata.server")

LEASE_LOST = 75
"""Exit status of a server whose data directory another one has taken over."""


def own_directory(shared: Path, lease: Path, store: str | None, *, several: bool, fsync: bool | None) -> Path:
    """Return the data directory of the lease's epoch in a shared one.

    Args:
        shared: The shared directory.
        lease: File of the lease.
        store: Name of the journal's store that the command names; None for what the settings say.
        several: Whether the command names several workers.
        fsync: Whether the command asks for syncs; None for what the settings say.

    Raises:
        InvalidRequest: A lease does not go with the other options.
        JournalUnavailable: There is no lease, or the directory cannot be taken over.
    """
    settings = Settings()
    if several:
        raise InvalidRequest("a lease is one process's: give --workers 1, and each shard a server of its own")
    if not (settings.fsync if fsync is None else fsync):
        raise InvalidRequest("a lease needs --fsync: another box finds only what was synced")
    return enter(shared, Lease(lease).epoch, store or settings.journal_store)


def end(why: str) -> None:
    """End this process at once: nothing that it does counts any more, and it has nothing left to commit."""
    log.critical("the server ends, and acknowledges nothing more: %s", why)
    logging.shutdown()
    os._exit(LEASE_LOST)

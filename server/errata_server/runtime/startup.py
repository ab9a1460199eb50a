"""Opens the journal of a data directory, and recovers what an earlier server left in it: sessions, sandbox layers."""

from __future__ import annotations

import logging
from pathlib import Path

from errata_protocol.errors import SandboxUnavailable

from ..journal import Journal, JournalConfig, MemoryJournal, SalvageReport, SessionChange, SessionRow, journal_in
from ..journal import registry as journal_registry
from ..recovery import recovery_class, repeats_requests
from ..settings import Settings
from .lease import Lease
from .sandboxes import Sandboxes
from .store import Store

log = logging.getLogger("errata.server")


def open_journal(data_dir: Path | None, settings: Settings, lease: Lease | None = None) -> Journal:
    """Open the journal in ``data_dir``, repaired first where the settings ask for it; in memory without a directory.

    Args:
        data_dir: Data directory, which this process has locked.
        settings: Settings of the server.
        lease: Lease of the data directory, without which nothing is acknowledged; None where this process alone has it.

    Raises:
        InvalidRequest: The store that the settings name is not installed, or the directory has a journal of another.
        JournalUnavailable: It cannot be opened.
        NotSupported: The settings ask for a repair, and the store has none.
    """
    if data_dir is None:
        return MemoryJournal(repeats_requests=repeats_requests)
    store, directory = journal_registry.choose(data_dir, settings.journal_store), journal_in(data_dir)
    if settings.journal_salvage and directory.is_dir():
        _log_salvage(store.salvage(directory))
    return store.open(JournalConfig(directory, settings.fsync, None if lease is None else lease.is_valid))


async def recover(store: Store, sandboxes: Sandboxes, *, taken_over: bool = False) -> None:
    """Mark the sessions that ended with their server, and delete sandbox layers that no committed row names.

    Sessions that were given out and have a recovery class stay open: their clients attach again.

    Args:
        store: Access to the journal.
        sandboxes: Sandbox layers of the data directory.
        taken_over: Whether the journal may be one that was taken over from another box, where the layers are.

    Raises:
        JournalUnavailable: The journal cannot be read or written.
    """
    ended: list[SessionChange] = []
    for row in await store.open_sessions():
        if not row.given_out:
            ended.append(SessionChange(row.sid, status="closed"))
        elif not recovery_class(row.recovery).survives_restart:
            ended.append(SessionChange(row.sid, status="lost"))
        elif taken_over and not sandboxes.has_layers and await _is_on_layers(store, row):
            ended.append(SessionChange(row.sid, status="lost", lost="its sandbox was on the box that served it before"))
    if ended:
        await store.commit(*ended)
    try:
        report = await sandboxes.collect(store.refs)
    except SandboxUnavailable as error:
        log.error("sandboxes of an earlier server cannot be cleaned up: %s", error)
    else:
        if report.layers or report.sandboxes:
            log.info("dropped %d uncommitted layers, %d dead sandboxes", report.layers, report.sandboxes)


async def _is_on_layers(store: Store, row: SessionRow) -> bool:
    """Return whether a session continues from a snapshot that has layers of a sandbox."""
    if not recovery_class(row.recovery).takes_snapshots:
        return False
    last = await store.last_delivery(row.sid)
    return last is not None and any(ref.kind != "base" for ref in last.refs)


def _log_salvage(report: SalvageReport) -> None:
    if not report.is_damaged:
        return
    for found in report.damaged:
        log.error(
            "the journal was damaged: %s at bytes %d to %d of segment %d, which held %s",
            found.what,
            found.begin,
            found.end,
            found.segment,
            found.holds or "nothing that can be read",
        )
    for session in report.sessions:
        log.error("session %s had rows there (it was %s): %s", session.sid, session.status, ", ".join(session.episodes))
    log.error(
        "the journal is repaired: %d sessions are lost, %d rows are whole; the damaged segments are kept in %s",
        len(report.lost),
        report.rows,
        report.originals,
    )

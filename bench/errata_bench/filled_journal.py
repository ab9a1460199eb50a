"""Writes a journal with many deliveries directly; to fill it through sessions would take hours."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from errata_server.journal import DeliveryRow, EpisodeRow, IndexedJournal, SessionRow, journal_in
from errata_server.journal.base import Record

DELIVERIES = 100
"""Deliveries of each episode."""
GROUP = 50
"""Episodes in one commit."""
REQUEST = b'{"text":"%s"}' % (b"x" * 64)
REQUEST_SHA = hashlib.sha256(REQUEST).digest()


def payload(eid: str, t: int) -> bytes:
    """Return P_t of about 1 KiB; it contains its eid and t."""
    return b'{"eid":"%s","t":%d,"observation":{"text":"%s"},"reward":1.0,"done":false}' % (
        eid.encode(),
        t,
        hashlib.sha256(f"{eid}{t}".encode()).hexdigest().encode() * 14,
    )


async def fill(data_dir: Path, episodes: int, environment: str) -> Path:
    """Write episodes of `DELIVERIES` each into the data directory of a server; return its journal."""
    data_dir.mkdir(parents=True, exist_ok=True)
    path = journal_in(data_dir)
    journal = IndexedJournal(path, fsync=False)  # synced once, at the end
    for start in range(0, episodes, GROUP):
        rows: list[Record] = []
        for number in range(start, min(episodes, start + GROUP)):
            rows += _episode(number, environment)
        await journal.commit(*rows)
    journal.close()
    os.sync()
    return path


def _episode(number: int, environment: str) -> list[Record]:
    eid, sid = f"ep_{number:012d}", f"s_{number:012d}"
    rows: list[Record] = [
        SessionRow(sid, environment, "none", number, 1.0, status="closed"),
        EpisodeRow(eid, sid, environment, 1.0),
    ]
    for t in range(DELIVERIES):
        body = payload(eid, t)
        digest = hashlib.sha256(body).digest()
        rows.append(
            DeliveryRow(
                eid=eid,
                t=t,
                sid=sid,
                id=t + 1,
                kind="step" if t else "reset",
                request=REQUEST,
                request_sha=REQUEST_SHA,
                status="ok",
                payload=body,
                digest=digest,
                semantic_digest=digest,
                state=None,
                refs=(),
                created=1.0,
                reward=1.0,
            )
        )
    return rows

"""Rows for tests of the journal."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from errata_protocol.environment import SnapshotRef
from errata_server.journal import DeliveryRow, DirectoryDisk, EpisodeRow, RewardRow, SessionRow
from errata_server.journal.codec import LogRecord, encode_record
from errata_server.journal.segments import SegmentLog, Segments


def delivery(
    eid: str, t: int | None, *, sid: str = "s", refs: tuple[SnapshotRef, ...] = (), **over: object
) -> DeliveryRow:
    payload = over.get("payload", f'{{"t":{t}}}'.encode())
    digest = hashlib.sha256(payload if isinstance(payload, bytes) else b"").digest()
    values: dict[str, object] = {
        "eid": eid, "t": t, "sid": sid, "id": None, "kind": "step" if t else "reset", "request": b"{}",
        "request_sha": hashlib.sha256(b"{}").digest(), "status": "ok", "payload": payload,
        "digest": digest, "semantic_digest": None, "state": b"s", "refs": refs,
        "created": 1.0, "reward": 0.5,
    }  # fmt: skip
    return DeliveryRow(**{**values, **over})  # type: ignore[arg-type]


def session(sid: str = "s", **over: object) -> SessionRow:
    return SessionRow(**{"sid": sid, "environment": "e", "recovery": "none", "seed": 7, "created": 1.0, **over})  # type: ignore[arg-type]


def episode(eid: str, sid: str = "s", **over: object) -> EpisodeRow:
    return EpisodeRow(**{"eid": eid, "sid": sid, "environment": "e", "created": 1.0, **over})  # type: ignore[arg-type]


def reward(eid: str, t: int, **over: object) -> RewardRow:
    values = {"value": 1.0, "source": "environment", "reward_id": "a", "sid": "s", "seq": 1, "created": 1.0}
    return RewardRow(**{"eid": eid, "t": t, **values, **over})  # type: ignore[arg-type]


def rewrite_journal(directory: Path, change: Callable[[LogRecord], LogRecord | None]) -> None:
    """Write a journal again with other records, or without some, each with a good checksum, and no index."""
    log = Segments(DirectoryDisk(directory))
    records = [change(record) for placed, _ in log.after(None) for _, record in placed]
    for file in directory.iterdir():
        file.unlink()
    new = SegmentLog(DirectoryDisk(directory))
    new.append(b"".join(encode_record(record) for record in records if record is not None))

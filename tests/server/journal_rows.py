"""Rows for tests of the journal."""

from __future__ import annotations

import hashlib

from errata_protocol.environment import SnapshotRef
from errata_server.journal import DeliveryRow, EpisodeRow, RewardRow, SessionRow


def delivery(
    eid: str, t: int | None, *, sid: str = "s", refs: tuple[SnapshotRef, ...] = (), **over: object
) -> DeliveryRow:
    payload = f'{{"t":{t}}}'.encode()
    values: dict[str, object] = {
        "eid": eid, "t": t, "sid": sid, "id": None, "kind": "step" if t else "reset", "request": b"{}",
        "request_sha": hashlib.sha256(b"{}").digest(), "status": "ok", "payload": payload,
        "digest": hashlib.sha256(payload).digest(), "semantic_digest": None, "state": b"s", "refs": refs,
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

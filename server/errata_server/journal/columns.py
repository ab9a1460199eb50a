"""Records as flat tuples of None, int, float, str and bytes: what SQLite binds and what the log's codec writes.

A column is only ever added at the end, with a default in `base`: a shorter tuple of an older log still reads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from errata_protocol.environment import SnapshotRef

from .base import DeliveryRow, EpisodeRow, RewardRow, SessionChange, SessionRow

Value = None | int | float | str | bytes

SESSION = (
    "sid, environment, recovery, seed, created, given_out, principal, status, fork_of, fork_request, lost, key_hash, "
    "group_id"
)
EPISODE = "eid, sid, environment, created, episode_id, principal, origin_eid, origin_t, agent_text_version"
DELIVERY = (
    "eid, t, sid, id, kind, request, request_sha, status, payload, digest, semantic_digest, state, refs, created, "
    "reward, done, error_kind, hint_template_key"
)
REWARD = "eid, t, value, source, reward_id, sid, seq, created"


def of_session(s: SessionRow) -> tuple[Value, ...]:
    """Return the columns `SESSION`."""
    return (
        s.sid, s.environment, s.recovery, s.seed, s.created, s.given_out, s.principal, s.status, s.fork_of,
        s.fork_request, s.lost, s.key_hash, s.group,
    )  # fmt: skip


def of_episode(e: EpisodeRow) -> tuple[Value, ...]:
    """Return the columns `EPISODE`."""
    return (
        e.eid, e.sid, e.environment, e.created, e.episode_id, e.principal, e.origin_eid, e.origin_t,
        e.agent_text_version,
    )  # fmt: skip


def of_delivery(d: DeliveryRow) -> tuple[Value, ...]:
    """Return the columns `DELIVERY`."""
    return (
        d.eid, d.t, d.sid, d.id, d.kind, d.request, d.request_sha, d.status, d.payload, d.digest, d.semantic_digest,
        d.state, json.dumps([[r.kind, r.id, r.digest] for r in d.refs]) if d.refs else None, d.created, d.reward,
        d.done, d.error_kind, d.hint_template_key,
    )  # fmt: skip


def of_change(c: SessionChange) -> tuple[Value, ...]:
    """Return sid, status, given_out, lost."""
    return (c.sid, c.status, c.given_out, c.lost)


def of_reward(r: RewardRow) -> tuple[Value, ...]:
    """Return the columns `REWARD`."""
    return (r.eid, r.t, r.value, r.source, r.reward_id, r.sid, r.seq, r.created)


def session(row: Sequence[Any]) -> SessionRow:
    """Return the session of its columns."""
    sid, environment, recovery, seed, created, given_out, *rest = row
    return SessionRow(sid, environment, recovery, seed, created, bool(given_out), *rest)


def episode(row: Sequence[Any]) -> EpisodeRow:
    """Return the episode of its columns."""
    return EpisodeRow(*row)


def delivery(row: Sequence[Any]) -> DeliveryRow:
    """Return the delivery of its columns."""
    refs, created, reward, done, *rest = row[12:]
    return DeliveryRow(*row[:12], refs_of(refs) if refs else (), created, reward, bool(done), *rest)  # type: ignore[call-arg]


def change(row: Sequence[Any]) -> SessionChange:
    """Return the session change of its columns."""
    sid, status, given_out, *rest = row
    return SessionChange(sid, status, None if given_out is None else bool(given_out), *rest)


def reward(row: Sequence[Any]) -> RewardRow:
    """Return the reward of its columns."""
    return RewardRow(*row)


def refs_of(text: str) -> tuple[SnapshotRef, ...]:
    """Return the refs of the column ``refs``."""
    return tuple(SnapshotRef(*ref) for ref in json.loads(text))

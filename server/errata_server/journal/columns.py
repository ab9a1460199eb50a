"""Rows as tuples, and back: the column order of segment records and of the SQLite index.

A column is only ever added at the end, with a default in `base`: a shorter tuple of an older log still reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from errata_protocol.environment import SnapshotRef

from .base import DeliveryRow, EpisodeRow, RewardRow, SessionChange, SessionRow

SESSION = (
    "sid", "environment", "recovery", "seed", "created", "given_out", "principal", "status", "fork_of", "fork_request",
    "lost", "key_hash", "group", "label_group", "label_step", "label_run",
)  # fmt: skip
EPISODE = (
    "eid", "sid", "environment", "created", "episode_id", "principal", "origin_eid", "origin_t", "agent_text_version",
    "label_group", "label_step", "label_run",
)  # fmt: skip
DELIVERY = (
    "eid", "t", "sid", "id", "kind", "request", "request_sha", "status", "payload", "digest", "semantic_digest",
    "state", "refs", "created", "reward", "done", "error_kind", "hint_template_key", "volatile",
)  # fmt: skip
REWARD = ("eid", "t", "value", "source", "reward_id", "sid", "seq", "created")
CHANGE = ("sid", "status", "given_out", "lost")

_REFS = DELIVERY.index("refs")
_VOLATILE = DELIVERY.index("volatile")

# One call in C for a row: this is on the path of every step.
of_session: Callable[[SessionRow], tuple[Any, ...]] = attrgetter(*SESSION)
of_episode: Callable[[EpisodeRow], tuple[Any, ...]] = attrgetter(*EPISODE)
of_reward: Callable[[RewardRow], tuple[Any, ...]] = attrgetter(*REWARD)
of_change: Callable[[SessionChange], tuple[Any, ...]] = attrgetter(*CHANGE)
_of_delivery: Callable[[DeliveryRow], tuple[Any, ...]] = attrgetter(*DELIVERY)


def of_delivery(d: DeliveryRow) -> tuple[Any, ...]:
    """Return the columns `DELIVERY`; each ref as kind, id, digest."""
    values = _of_delivery(d)
    if not d.refs:
        return values
    return (*values[:_REFS], of_refs(d.refs), *values[_REFS + 1 :])


def session(row: Sequence[Any]) -> SessionRow:
    """Return the session of its columns."""
    sid, environment, recovery, seed, created, given_out, *rest = row
    return SessionRow(sid, environment, recovery, seed, created, bool(given_out), *rest)


def episode(row: Sequence[Any]) -> EpisodeRow:
    """Return the episode of its columns."""
    return EpisodeRow(*row)


def delivery(row: Sequence[Any]) -> DeliveryRow:
    """Return the delivery of its columns."""
    values = list(row)
    values[_REFS] = refs_of(row[_REFS])
    if len(row) > _VOLATILE and row[_VOLATILE] is not None:
        values[_VOLATILE] = tuple(row[_VOLATILE])
    return DeliveryRow(*values)


def change(row: Sequence[Any]) -> SessionChange:
    """Return the session change of its columns."""
    return SessionChange(*row)


def reward(row: Sequence[Any]) -> RewardRow:
    """Return the reward of its columns."""
    return RewardRow(*row)


def of_refs(refs: Sequence[SnapshotRef]) -> list[tuple[str, str, str]]:
    """Return refs as kind, id, digest."""
    return [(r.kind, r.id, r.digest) for r in refs]


def refs_of(values: Sequence[Sequence[str]]) -> tuple[SnapshotRef, ...]:
    """Return the refs of their kinds, ids and digests."""
    return tuple(SnapshotRef(*ref) for ref in values)

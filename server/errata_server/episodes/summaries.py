"""Summaries of episodes: what lists say of an episode. Reads the journal directly and may block."""

from __future__ import annotations

from collections.abc import Iterable

from errata_protocol.errors import JournalUnavailable
from errata_protocol.replay import EpisodeSummary
from errata_protocol.task_names import task_of

from ..ids import name_of
from ..journal.base import DeliveryRow, EpisodeRow, EpisodeStats, Journal, SessionRow

MAX_ANCESTORS = 64
"""Most episodes that are looked at for the task of a fork, from parent to parent."""


def summaries(journal: Journal, found: Iterable[EpisodeStats]) -> list[EpisodeSummary]:
    """Return the summaries of episodes, in their order. At most three rows are read for each one, more for forks.

    Args:
        journal: The journal.
        found: The episodes.
    """
    tasks: dict[str, str | None] = {}
    return [
        EpisodeSummary(
            eid=stats.row.eid,
            episode_id=stats.row.episode_id,
            environment=stats.row.environment,
            session=name_of(stats.row.sid),
            created=stats.row.created,
            done=stats.done,
            deliveries=stats.deliveries,
            reward=stats.reward,
            error_kinds=stats.error_kinds,
            origin=stats.row.origin,
            task=named_task(journal, stats.row, tasks),
            status="done" if stats.done else session_status(journal.session(stats.row.sid)),
            last=_last(journal, stats),
        )
        for stats in found
    ]


def session_status(session: SessionRow | None) -> str:
    """Return the status of a session: ``open``, ``closed``, ``lost`` or ``expired``."""
    return session.status if session is not None else "closed"


def named_task(journal: Journal, row: EpisodeRow, tasks: dict[str, str | None]) -> str | None:
    """Return the task of an episode; of a fork whose first state does not name it, that of its parent.

    Args:
        journal: The journal.
        row: The episode.
        tasks: The tasks that are known; those that are found are added.
    """
    lineage: list[str] = []
    task: str | None = None
    current: EpisodeRow | None = row
    while current is not None and len(lineage) < MAX_ANCESTORS:
        if current.eid in tasks:
            task = tasks[current.eid]
            break
        lineage.append(current.eid)
        first = _delivery(journal, current.eid, 0)
        if first is not None and (task := task_of(first.payload, first.request)) is not None:
            break
        current = journal.episode(current.origin_eid) if current.origin_eid is not None else None
    tasks.update(dict.fromkeys(lineage, task))
    return task


def _last(journal: Journal, stats: EpisodeStats) -> float:
    """Return when an episode's newest delivery was made."""
    eid, count = stats.row.eid, stats.deliveries
    # The first delivery of an episode that began without a reset has t=1.
    newest = (_delivery(journal, eid, count) or _delivery(journal, eid, count - 1)) if count else None
    return newest.created if newest is not None else stats.row.created


def _delivery(journal: Journal, eid: str, t: int) -> DeliveryRow | None:
    """Return a delivery; None if there is none or its row is damaged: a list shows the episode all the same."""
    try:
        return journal.delivery(eid, t)
    except JournalUnavailable:
        return None

"""Summaries of episodes: what lists say of an episode."""

from __future__ import annotations

from errata_protocol.replay import EpisodeSummary

from ..ids import name_of
from ..journal.base import EpisodeStats, SessionRow


def summary_of(stats: EpisodeStats) -> EpisodeSummary:
    """Return the summary of an episode."""
    return EpisodeSummary(
        eid=stats.eid,
        episode_id=stats.episode_id,
        environment=stats.environment,
        session=name_of(stats.row.sid),
        created=stats.created,
        done=stats.done,
        deliveries=stats.deliveries,
        reward=stats.reward,
        error_kinds=stats.error_kinds,
        origin=stats.row.origin,
        task=stats.task,
        status=stats.status,
        last=stats.last,
        hint_keys=stats.hint_keys,
        group=stats.group,
        step=stats.step,
        run=stats.run,
    )


def session_status(session: SessionRow | None) -> str:
    """Return the status of a session: ``open``, ``closed``, ``lost`` or ``expired``."""
    return session.status if session is not None else "closed"

"""`lineage`: which recorded requests lead to a delivery: those of its episode, and where that is a fork, of others."""

from __future__ import annotations

from msgspec import Struct

from errata_protocol.errors import UnknownEpisode

from ..journal.base import EpisodeRow, Journal


class Stretch(Struct, frozen=True):
    """Deliveries 0 to ``t`` of one episode.

    Args:
        eid: The episode.
        t: Last delivery of the stretch.
        fork_name: The episode's `EpisodeRow.fork_name`.
        with_errors: Whether the errors that were recorded after ``t`` belong to the stretch.
    """

    eid: str
    t: int
    fork_name: str | None
    with_errors: bool = False


class Lineage(Struct, frozen=True):
    """What one data directory knows of the requests that lead to a delivery.

    Args:
        stretches: The requests, in the reverse of the order in which they ran.
        origin: The episode and the delivery whose requests ran before these, maybe of another data directory; None
            where none did.
    """

    stretches: tuple[Stretch, ...]
    origin: tuple[str, int] | None


def lineage(journal: Journal, eid: str, t: int, whole_session: bool) -> Lineage:
    """Return what leads to a delivery, up to the first fork. May block.

    Args:
        journal: The journal that has the episode.
        eid: The episode.
        t: The delivery.
        whole_session: Whether the earlier episodes of the session belong to it, where the episode is no fork.

    Raises:
        UnknownEpisode: The episode was deleted.
    """
    first = _known(journal, eid)
    stretches = [Stretch(eid, t, first.fork_name)]
    if whole_session and first.origin_eid is None:
        of_session = journal.session_episodes(first.sid)
        for earlier in reversed(of_session[: of_session.index(eid)]):
            row, turns = journal.episode(earlier), journal.turns(earlier)
            if row is not None and turns:
                stretches.append(Stretch(earlier, turns[-1].t, row.fork_name, with_errors=True))
                first = row
    origin = first.origin
    return Lineage(tuple(stretches), (origin.eid, origin.t) if origin is not None else None)


def _known(journal: Journal, eid: str) -> EpisodeRow:
    row = journal.episode(eid)
    if row is None:
        raise UnknownEpisode(eid)
    return row

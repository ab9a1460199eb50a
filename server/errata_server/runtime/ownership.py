"""Finds an episode or a delivery for its owner, and chooses the error where there is none (PROTOCOL F2).

The functions read the journal directly and may block: `Store` calls them on a reader thread.
"""

from __future__ import annotations

import hmac

from msgspec import Struct

from errata_protocol.errors import CallerError, NoReset, StateOutOfRange, UnknownEpisode
from errata_protocol.read_keys import plain_hash, read_key

from ..journal.base import DeliveryRow, EpisodeRow, Journal, SessionRow, is_owned


def find_episode(journal: Journal, eid: str, principal: str | None) -> EpisodeRow:
    """Return an episode of ``principal``.

    Raises:
        UnknownEpisode: There is no such episode, or it belongs to somebody else: both get the same answer.
    """
    row = journal.episode(eid)
    if row is None or not is_owned(row.principal, principal):
        raise UnknownEpisode(eid)
    return row


def read_key_of(session: SessionRow) -> str:
    """Return the key that opens the episodes of a session where there are no tokens (PROTOCOL F2)."""
    return read_key(session.key_hash if session.key_hash is not None else plain_hash(session.sid))


_NOBODY = SessionRow(sid="", environment="", recovery="", seed=0, created=0.0)


def opens(journal: Journal, eid: str, key: str, sid: str | None) -> bool:
    """Return whether ``key`` is the read key of an episode's session, or ``sid`` that session.

    As much is read and compared for an episode that does not exist as for one that does.
    """
    row = journal.episode(eid)
    session = journal.session(row.sid if row is not None else "") or _NOBODY
    fits = hmac.compare_digest(read_key_of(session).encode(), key.encode())
    return row is not None and (row.sid == sid or (fits and session is not _NOBODY))


class ForkParent(Struct, frozen=True):
    """The delivery that a fork continues from, and whose it is.

    Args:
        row: The delivery.
        episode: The delivery's episode.
        session: The session of the episode; None where it was deleted.
    """

    row: DeliveryRow
    episode: EpisodeRow
    session: SessionRow | None


def find_parent(journal: Journal, eid: str, t: int, principal: str | None) -> ForkParent:
    """Return delivery ``t`` of an episode of ``principal`` as the parent of a fork; raises as `find_delivery`."""
    row, episode = find_delivery(journal, eid, t, principal), find_episode(journal, eid, principal)
    return ForkParent(row, episode, journal.session(row.sid))


def find_delivery(journal: Journal, eid: str, t: int, principal: str | None) -> DeliveryRow:
    """Return delivery ``t`` of an episode of ``principal``.

    Raises:
        UnknownEpisode: See `find_episode`.
        NoReset: ``t`` is 0 and the episode began without a reset.
        StateOutOfRange: The episode has no delivery ``t``.
    """
    find_episode(journal, eid, principal)
    row = journal.delivery(eid, t)
    if row is None:
        raise delivery_error(journal, eid, t)
    return row


def delivery_error(journal: Journal, eid: str, t: int) -> CallerError:
    """Return the error for an existing episode without delivery ``t``; it may have been deleted since it was found."""
    turns = journal.turns(eid)
    if not turns and journal.episode(eid) is None:
        return UnknownEpisode(eid)
    return missing_delivery(eid, t, turns[-1].t if turns else None)


def missing_delivery(eid: str, t: int, last_t: int | None) -> CallerError:
    """Return the error for an episode without delivery ``t``.

    Args:
        eid: The episode.
        t: The delivery that was asked for.
        last_t: The episode's newest delivery; None where it has none.
    """
    if t == 0 and last_t is not None:
        return NoReset(f"episode {eid} began without a reset and has no reset payload: ask for t >= 1", eid=eid)
    return StateOutOfRange(eid, t, last_t + 1 if last_t is not None else 0)

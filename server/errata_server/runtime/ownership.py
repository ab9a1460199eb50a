"""Looks up an episode or a delivery for its owner; chooses the error where it is missing or somebody else's."""

from __future__ import annotations

from errata_protocol.errors import CallerError, NoReset, StateOutOfRange, UnknownEpisode

from ..journal.base import DeliveryRow, EpisodeRow
from .store import Store


async def owned_episode(store: Store, eid: str, principal: str | None) -> EpisodeRow:
    """Return an episode of ``principal``.

    Raises:
        UnknownEpisode: No such episode, or somebody else's: the two are told alike (PROTOCOL F2).
    """
    row = await store.episode(eid)
    if row is None or row.principal != principal:
        raise UnknownEpisode(eid)
    return row


async def owned_delivery(store: Store, eid: str, t: int, principal: str | None) -> DeliveryRow:
    """Return delivery ``t`` of an episode of ``principal``.

    Raises:
        UnknownEpisode: No such episode, or somebody else's.
        NoReset: ``t`` is 0 and the episode began without a reset.
        StateOutOfRange: The episode has no delivery t.
    """
    await owned_episode(store, eid, principal)
    row = await store.delivery(eid, t)
    if row is None:
        raise await absence(store, eid, t)
    return row


async def absence(store: Store, eid: str, t: int) -> CallerError:
    """Return what to tell of an owned episode that has no delivery ``t``, or that was deleted meanwhile."""
    turns = await store.turns(eid)
    if not turns and await store.episode(eid) is None:
        return UnknownEpisode(eid)
    return absent(eid, t, turns[-1].t if turns else None)


def absent(eid: str, t: int, last_t: int | None) -> CallerError:
    """Return what to tell of an episode that has no delivery ``t``; ``last_t`` is its newest, None without any."""
    if t == 0 and last_t is not None:
        return NoReset(f"episode {eid} began without a reset and has no reset payload: ask for t >= 1", eid=eid)
    return StateOutOfRange(eid, t, last_t + 1 if last_t is not None else 0)

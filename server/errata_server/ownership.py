"""What a principal may look at, and what it is told about what is not there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from errata_protocol.errors import CallerError, NoReset, StateOutOfRange, UnknownEpisode

from .journal.base import EpisodeRow

if TYPE_CHECKING:
    from .runtime import Runtime


async def owned_episode(runtime: Runtime, eid: str, principal: str | None) -> EpisodeRow:
    """Return an episode of ``principal``.

    Raises:
        UnknownEpisode: No such episode, or somebody else's: the two are told alike (PROTOCOL F2).
    """
    row = await runtime.read(runtime.journal.episode, eid)
    if row is None or row.principal != principal:
        raise UnknownEpisode(eid)
    return row


async def absence(runtime: Runtime, eid: str, t: int) -> CallerError:
    """Return what to tell of an owned episode that has no delivery ``t``, or that was deleted meanwhile."""
    turns = await runtime.read(runtime.journal.turns, eid)
    if not turns and await runtime.read(runtime.journal.episode, eid) is None:
        return UnknownEpisode(eid)
    if t == 0 and turns:
        return NoReset(f"episode {eid} began with a tools/call and has no reset payload: ask for t >= 1", eid=eid)
    return StateOutOfRange(eid, t, turns[-1].t + 1 if turns else 0)

"""Refuses records whose key is taken, or whose parent does not exist; the rules of every journal.

A key is an episode and a turn, a session and a request id, a session id, or a reward id.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from errata_protocol.errors import Conflict, UnknownEpisode
from errata_protocol.shards import shard_of

from .base import DeliveryRow, EpisodeRow, Record, RewardRow, SessionRow

Claims = set[tuple[Any, ...]]
"""Keys of records that were checked and are not applied yet: later ones of the same transaction must see them. Each
begins with the name of the question of `Keys` that it answers."""


class Keys(Protocol):
    """What a store holds already."""

    def has_session(self, sid: str) -> bool: ...
    def has_episode(self, eid: str) -> bool: ...
    def has_delivery(self, eid: str, t: int) -> bool: ...
    def has_id(self, sid: str, id: int) -> bool: ...
    def has_fork(self, fork_of: str | None, request: str) -> bool: ...
    def has_reward(self, eid: str, reward_id: str) -> bool: ...
    def has_seq(self, sid: str, seq: int) -> bool: ...
    def accepts(self, d: DeliveryRow) -> bool:
        """Return whether the episode of a delivery with t and id is there, and no row has that t or that id."""
        ...


def of_step(d: DeliveryRow) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return what a delivery with an id claims."""
    return ("delivery", d.eid, d.t), ("id", d.sid, d.id)


def check(records: Iterable[Record], keys: Keys, earlier: Claims) -> Claims:
    """Return what ``records`` claim, if they conflict with no row and with none of ``earlier``.

    Raises:
        Conflict: See `errata_server.journal.base.Journal.commit`.
        UnknownEpisode: Likewise.
    """
    new: Claims = set()
    for record in records:
        match record:
            case DeliveryRow() as d:
                delivered, numbered = of_step(d)
                if (
                    d.t is not None and (delivered in new or delivered in earlier or keys.has_delivery(d.eid, d.t))
                ) or (d.id is not None and (numbered in new or numbered in earlier or keys.has_id(d.sid, d.id))):
                    raise _conflict(d)
                known = keys.has_episode(d.eid) or ("episode", d.eid) in new or ("episode", d.eid) in earlier
                if d.t is not None:
                    if not known:
                        raise UnknownEpisode(d.eid)
                    new.add(delivered)
                if d.id is not None and (known or not d.eid):
                    new.add(numbered)
            case EpisodeRow() as e:
                key = ("episode", e.eid)
                if key in new or key in earlier or keys.has_episode(e.eid):
                    raise _conflict(e)
                # A fork may continue an episode of another directory, whose server keeps it for the fork.
                if e.origin_eid is not None and e.origin_t is not None and shard_of(e.origin_eid) == shard_of(e.eid):
                    _need(e.origin_eid, e.origin_t, keys, earlier, new)
                new.add(key)
            case SessionRow() as s:
                key, fork = ("session", s.sid), ("fork", s.fork_of, s.fork_request)
                if key in new or key in earlier or keys.has_session(s.sid):
                    raise _conflict(s)
                if s.fork_request is not None:
                    if fork in new or fork in earlier or keys.has_fork(s.fork_of, s.fork_request):
                        raise _conflict(s)
                    new.add(fork)
                new.add(key)
            case RewardRow() as r:
                rewarded, pushed = ("reward", r.eid, r.reward_id), ("seq", r.sid, r.seq)
                if (rewarded in new or rewarded in earlier or keys.has_reward(r.eid, r.reward_id)) or (
                    r.seq is not None and (pushed in new or pushed in earlier or keys.has_seq(r.sid, r.seq))
                ):
                    raise _conflict(r)
                _need(r.eid, r.t, keys, earlier, new)
                new.add(rewarded)
                if r.seq is not None:
                    new.add(pushed)
            case _:  # a session change claims nothing
                pass
    return new


def _need(eid: str, t: int, keys: Keys, earlier: Claims, new: Claims) -> None:
    key = ("delivery", eid, t)
    if key not in new and key not in earlier and not keys.has_delivery(eid, t):
        raise UnknownEpisode(eid)


def _conflict(record: Record) -> Conflict:
    return Conflict(f"the journal already holds another record under the key of this {type(record).__name__}")

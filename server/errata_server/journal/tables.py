"""`Tables`: all rows and their indexes in memory; the base class of `LogJournal` and `MemoryJournal`."""

from __future__ import annotations

import functools
import heapq
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

from msgspec.structs import replace

from errata_protocol.environment import SnapshotRef
from errata_protocol.episode_lists import EVERY, NEWEST, EpisodeFilter, EpisodeOrder, ListPlace, aggregated
from errata_protocol.replay import EpisodeAggregates

from .base import (
    DeliveryRow,
    EpisodeRow,
    EpisodeStats,
    HeldEpisode,
    Journal,
    Record,
    RewardRow,
    SessionChange,
    SessionRow,
    SessionStatus,
    TurnRow,
    is_owned,
    listed_status,
)
from .codec import Deletion
from .live import Episode as Totals

ROW_BYTES = 1024
"""What any row is taken to cost beside its payload, request and state: its own fields and its place in the indexes."""


P = ParamSpec("P")
R = TypeVar("R")


def _locked(read: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Keep a read and a writer on another thread apart."""

    @functools.wraps(read)
    def locked(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return read(self, *args, **kwargs)

    return locked


def all_are_repeated(recovery: str) -> bool:
    """Return True: the errors of every session are kept, whatever its recovery class."""
    return True


class Tables(Journal):
    """The reading half of a journal with its rows in memory; see `Journal`. `_lock` is held while they change.

    Args:
        repeats_requests: Whether the sessions of a recovery class, given by its name, are continued by running their
            requests again. Recorded errors of other sessions are kept only for `replies`.
    """

    blocking = False

    def __init__(self, repeats_requests: Callable[[str], bool] = all_are_repeated) -> None:
        self._repeats_requests = repeats_requests
        self._lock = threading.RLock()
        self._bytes = 0
        self._sessions: dict[str, SessionRow] = {}
        self._episodes: dict[str, tuple[int, EpisodeRow]] = {}
        self._totals: dict[str, Totals] = {}
        self._deliveries: dict[str, dict[int, DeliveryRow]] = {}
        self._errors: dict[str, dict[int, list[DeliveryRow]]] = {}
        self._episodes_of: dict[str, list[str]] = {}
        self._children: Counter[str] = Counter()
        """Episodes that come from one, by its eid, whether it is there or not."""
        self._replies: dict[str, dict[int, DeliveryRow]] = {}
        self._last_ids: dict[str, int] = {}
        self._rewards: dict[str, dict[str, RewardRow]] = {}
        self._late_rewards: dict[str, Counter[int]] = {}
        """How many late rewards each delivery has, by eid and t."""
        self._pushes: dict[str, dict[int, RewardRow]] = {}
        self._last_seqs: dict[str, int] = {}
        self._forks: dict[tuple[str | None, str], str] = {}
        self._n = 0

    # -- conflicts with a commit (errata_server.journal.claims) ---------------------------------------------------

    def accepts(self, d: DeliveryRow) -> bool:
        assert d.t is not None and d.id is not None
        return self.has_episode(d.eid) and not self.has_delivery(d.eid, d.t) and not self.has_id(d.sid, d.id)

    def has_session(self, sid: str) -> bool:
        return sid in self._sessions

    def has_episode(self, eid: str) -> bool:
        return eid in self._episodes

    def has_delivery(self, eid: str, t: int) -> bool:
        return t in self._deliveries.get(eid, ())

    def has_id(self, sid: str, id: int) -> bool:
        return id in self._replies.get(sid, ())

    def has_fork(self, fork_of: str | None, request: str) -> bool:
        return (fork_of, request) in self._forks

    def has_reward(self, eid: str, reward_id: str) -> bool:
        return reward_id in self._rewards.get(eid, ())

    def has_seq(self, sid: str, seq: int) -> bool:
        return seq in self._pushes.get(sid, ())

    def _apply(self, record: Record) -> None:
        match record:
            case DeliveryRow() as d:
                if d.eid and d.eid not in self._episodes:
                    return  # a recorded reply of an episode that was deleted
                if d.id is not None:
                    kept = d if d.t is not None else replace(d, request=b"")  # a reply is small, a request may not be
                    self._replies.setdefault(d.sid, {})[d.id] = kept
                    self._last_ids[d.sid] = max(d.id, self._last_ids.get(d.sid, 0))
                    self._bytes += ROW_BYTES
                if not d.eid:
                    return
                self._totals[d.eid].add(d)
                turns = self._deliveries.setdefault(d.eid, {})
                if d.t is not None:
                    turns[d.t] = d
                    self._bytes += _size(d)
                elif self._is_reexecuted(d.sid):  # of others no read returns one, but by its id
                    self._errors.setdefault(d.eid, {}).setdefault(next(reversed(turns), -1), []).append(d)
                    self._bytes += _size(d)
            case EpisodeRow() as e:
                self._n += 1
                parent = self._totals.get(e.origin_eid) if e.origin_eid is not None else None
                self._totals[e.eid] = Totals(
                    self._n, 0, last=e.created, task=parent.task if parent is not None else None
                )  # before the row: a list on another thread reads it with the row
                self._episodes[e.eid] = (self._n, e)
                self._episodes_of.setdefault(e.sid, []).append(e.eid)
                if e.origin_eid is not None:
                    self._children[e.origin_eid] += 1
                self._bytes += ROW_BYTES
            case RewardRow() as r:
                if r.eid not in self._episodes:
                    return  # what it is of was deleted and compacted
                self._rewards.setdefault(r.eid, {})[r.reward_id] = r
                self._late_rewards.setdefault(r.eid, Counter())[r.t] += 1
                self._bytes += ROW_BYTES
                if r.seq is not None:
                    self._pushes.setdefault(r.sid, {})[r.seq] = r
                    self._last_seqs[r.sid] = max(r.seq, self._last_seqs.get(r.sid, 0))
            case SessionRow() as s:
                self._sessions[s.sid] = s
                self._bytes += ROW_BYTES
                if s.fork_request is not None:
                    self._forks[s.fork_of, s.fork_request] = s.sid
            case SessionChange() as c:
                if c.sid in self._sessions:
                    self._sessions[c.sid] = c.applied(self._sessions[c.sid])

    def _is_reexecuted(self, sid: str) -> bool:
        return sid in self._sessions and self._repeats_requests(self._sessions[sid].recovery)

    @_locked
    def delivery(self, eid: str, t: int) -> DeliveryRow | None:
        return self._deliveries.get(eid, {}).get(t)

    @_locked
    def recorded(self, eid: str, t: int) -> list[DeliveryRow]:
        first = self.delivery(eid, t)
        return [first, *self._errors.get(eid, {}).get(t, ())] if first is not None else []

    @_locked
    def last_delivery(self, sid: str) -> DeliveryRow | None:
        for eid in reversed(self._episodes_of.get(sid, ())):
            if turns := self._deliveries.get(eid):
                return next(reversed(turns.values()))
        return None

    @_locked
    def replies(self, sid: str, first: int, last: int) -> list[DeliveryRow]:
        rows = self._replies.get(sid, {})
        span = range(max(first, 1), min(last, self._last_ids.get(sid, 0)) + 1)
        if len(span) > len(rows):  # a plain session's ids are far apart
            return [rows[id] for id in sorted(id for id in rows if id in span)]
        return [rows[id] for id in span if id in rows]

    @_locked
    def last_id(self, sid: str) -> int:
        return self._last_ids.get(sid, 0)

    @_locked
    def rewards(self, eid: str) -> list[RewardRow]:
        return list(self._rewards.get(eid, {}).values())

    @_locked
    def pushes(self, sid: str, first: int, last: int) -> list[RewardRow]:
        rows = self._pushes.get(sid, {})
        return [rows[seq] for seq in range(max(first, 1), min(last, self._last_seqs.get(sid, 0)) + 1) if seq in rows]

    @_locked
    def last_seq(self, sid: str) -> int:
        return self._last_seqs.get(sid, 0)

    @_locked
    def episode(self, eid: str) -> EpisodeRow | None:
        return self._episodes[eid][1] if eid in self._episodes else None

    @_locked
    def first_episode(self, sid: str) -> EpisodeRow | None:
        eids = self._episodes_of.get(sid)
        return self._episodes[eids[0]][1] if eids else None

    @_locked
    def session_episodes(self, sid: str) -> list[str]:
        return list(self._episodes_of.get(sid, ()))

    @_locked
    def turns(self, eid: str, *, semantic: bool = False) -> list[TurnRow]:
        return [
            TurnRow(
                t,
                d.kind,
                d.digest,
                d.semantic() if semantic else None,
                d.reward,
                d.done,
                d.error_kind,
                d.hint_template_key,
            )
            for t, d in sorted(self._deliveries.get(eid, {}).items())
        ]

    @_locked
    def deliveries(self, eid: str, *, after: int = -1, limit: int, most_bytes: int) -> list[DeliveryRow]:
        rows = self._deliveries.get(eid, {})
        last = next(reversed(rows), -1)
        # Nearly always no t is missing: an episode may begin without a reset, and a journal may have been repaired.
        ts: Iterable[int] = range(after + 1, min(last, after + limit) + 1)
        if any(t not in rows for t in ts):
            ts = heapq.nsmallest(limit, (t for t in rows if t > after))
        found: list[DeliveryRow] = []
        size = 0
        for row in (rows[t] for t in ts):
            found.append(row)
            size += len(row.payload) + len(row.request)
            if size >= most_bytes:
                break
        return found

    @_locked
    def late_rewards(self, eid: str, *, first: int, last: int) -> dict[int, int]:
        of = self._late_rewards.get(eid, Counter())
        ts: Iterable[int] = of if len(of) < last - first else range(first, last + 1)
        return {t: of[t] for t in ts if first <= t <= last and t in of}

    def episodes(
        self,
        *,
        limit: int,
        after: ListPlace | None = None,
        wanted: EpisodeFilter = EVERY,
        order: EpisodeOrder = NEWEST,
        principal: str | None,
        attached: frozenset[str] | None = None,
    ) -> tuple[list[EpisodeStats], ListPlace | None]:
        stats = self._all_stats(principal, attached)
        return order.page((one for one in stats if wanted.matches(one) and order.is_after(one, after)), limit)

    def aggregates(
        self,
        *,
        bucket_s: int,
        wanted: EpisodeFilter = EVERY,
        principal: str | None,
        attached: frozenset[str] | None = None,
    ) -> EpisodeAggregates:
        return aggregated((one for one in self._all_stats(principal, attached) if wanted.matches(one)), bucket_s)

    @_locked
    def episode_stats(self, eid: str, attached: frozenset[str] | None = None) -> EpisodeStats | None:
        if eid not in self._episodes:
            return None
        row = self._episodes[eid][1]
        return self._totals[eid].stats(row, listed_status(_status(self._sessions.get(row.sid)), row.sid, attached))

    def _all_stats(self, principal: str | None, attached: frozenset[str] | None = None) -> Iterator[EpisodeStats]:
        """Yield the episodes of an owner. Commits go on meanwhile; what is read is copied first."""
        with self._lock:
            rows, sessions = list(self._episodes.values()), self._sessions.copy()
            totals = self._totals.copy()
        for _, row in rows:
            if is_owned(row.principal, principal) and (of := totals.get(row.eid)) is not None:  # not deleted meanwhile
                yield of.stats(row, listed_status(_status(sessions.get(row.sid)), row.sid, attached))

    @_locked
    def held(self, *, after: int, limit: int) -> list[HeldEpisode]:
        found: list[HeldEpisode] = []
        for n, row in self._episodes.values():
            if n <= after:
                continue
            if len(found) == limit:
                break
            turns = list(self._deliveries.get(row.eid, {}).values())
            rows = [*turns, *(d for errors in self._errors.get(row.eid, {}).values() for d in errors)]
            found.append(
                HeldEpisode(
                    n,
                    row,
                    len(turns),
                    sum(len(d.payload) for d in rows),
                    sum(len(d.request) for d in rows),
                    sum(len(d.state or b"") for d in rows),
                    max((d.created for d in rows), default=row.created),
                    any(d.done for d in turns),
                )
            )
        return found

    @_locked
    def session(self, sid: str) -> SessionRow | None:
        return self._sessions.get(sid)

    @_locked
    def open_sessions(self) -> list[SessionRow]:
        return [s for s in self._sessions.values() if s.status == "open"]

    @_locked
    def fork_session(self, eid: str, request_id: str) -> SessionRow | None:
        sid = self._forks.get((eid, request_id))
        return self._sessions[sid] if sid is not None else None

    @_locked
    def refs(self) -> set[SnapshotRef]:
        return {ref for turns in list(self._deliveries.values()) for d in list(turns.values()) for ref in d.refs}

    def _deletion(self, eid: str) -> Deletion:
        """Return what is written of the end of an episode that is here."""
        sid = self._episodes[eid][1].sid
        return Deletion(eid, sid, self._last_ids.get(sid, 0), self._last_seqs.get(sid, 0))

    def _count(self, deletion: Deletion) -> None:
        """What a session had counted up to stays, also where its rows were compacted."""
        sid = deletion.sid
        for counted, last in ((self._last_ids, deletion.last_id), (self._last_seqs, deletion.last_seq)):
            if last:
                counted[sid] = max(last, counted.get(sid, 0))

    def _delete(self, eid: str) -> int:
        if eid not in self._episodes:
            return 0
        _, row = self._episodes.pop(eid)
        del self._totals[eid]
        self._bytes -= ROW_BYTES
        self._episodes_of[row.sid].remove(eid)
        if row.origin_eid is not None:
            self._children[row.origin_eid] -= 1
            if not self._children[row.origin_eid]:
                del self._children[row.origin_eid]
        if not self._episodes_of[row.sid]:
            del self._episodes_of[row.sid]
        gone = self._deliveries.pop(eid, {})
        self._bytes -= sum(map(_size, gone.values()))
        self._bytes -= sum(_size(d) for errors in self._errors.pop(eid, {}).values() for d in errors)
        replies = self._replies.pop(row.sid, {})
        kept = {id: of for id, of in replies.items() if of.eid != eid}
        self._bytes -= ROW_BYTES * (len(replies) - len(kept))
        if kept:
            self._replies[row.sid] = kept
        self._bytes -= ROW_BYTES * len(self._rewards.pop(eid, {}))
        self._late_rewards.pop(eid, None)
        pushes = self._pushes.pop(row.sid, {})
        if left := {seq: of for seq, of in pushes.items() if of.eid != eid}:
            self._pushes[row.sid] = left
        return len(gone)


def _status(session: SessionRow | None) -> SessionStatus | None:
    return session.status if session is not None else None


def _size(d: DeliveryRow) -> int:
    return ROW_BYTES + len(d.payload) + len(d.request) + len(d.state or b"")

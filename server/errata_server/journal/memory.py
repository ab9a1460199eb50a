"""A journal in memory: for tests, and for an app that was given no data directory. Nothing survives the process."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from errata_protocol.environment import SnapshotRef
from errata_protocol.errors import Conflict, JournalUnavailable, UnknownEpisode

from .base import DeliveryRow, EpisodeRow, EpisodeStats, Journal, Record, SessionChange, SessionRow, TurnRow

ROW_BYTES = 1024
"""What any row is taken to cost beside its payload, request and state: its own fields and its place in the indexes."""


class MemoryJournal(Journal):
    """Keeps whole sessions up to a size, then forgets the oldest closed ones with their episodes.

    Args:
        max_bytes: Bytes to keep: payload, request and state, and `ROW_BYTES` a row.
    """

    durable = False

    def __init__(self, *, max_bytes: int = 256 * 1024**2) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._sessions: dict[str, SessionRow] = {}
        self._episodes: dict[str, tuple[int, EpisodeRow]] = {}
        self._deliveries: dict[str, dict[int, DeliveryRow]] = {}
        self._episodes_of: dict[str, list[str]] = {}
        self._ids: dict[str, dict[int, str]] = {}
        self._forks: dict[tuple[str, str], str] = {}
        self._n = 0
        self._closed = False

    @property
    def failing(self) -> str | None:
        return None

    async def commit(self, *records: Record) -> None:
        if self._closed:
            raise JournalUnavailable("the journal is closed: the server is shutting down")
        self._check(records)
        for record in records:
            self._apply(record)
        if self._bytes > self._max_bytes:
            self._forget()

    def _check(self, records: tuple[Record, ...]) -> None:
        new: set[str] = set()
        for record in records:
            taken = False
            match record:
                case DeliveryRow() as d:
                    if d.t is not None and d.eid not in self._episodes and d.eid not in new:
                        raise UnknownEpisode(d.eid)
                    taken = d.t in self._deliveries.get(d.eid, ()) if d.t is not None else False
                    taken = taken or (d.id is not None and d.id in self._ids.get(d.sid, ()))
                case EpisodeRow() as e:
                    if e.origin_eid is not None and e.origin_t not in self._deliveries.get(e.origin_eid, ()):
                        raise UnknownEpisode(e.origin_eid)
                    taken = e.eid in self._episodes
                    new.add(e.eid)
                case SessionRow() as s:
                    taken = s.sid in self._sessions
                    taken = taken or (s.fork_request is not None and (s.fork_of, s.fork_request) in self._forks)
                case SessionChange():
                    pass
            if taken:
                raise Conflict(
                    f"the journal already holds another record under the key of this {type(record).__name__}"
                )

    def _apply(self, record: Record) -> None:
        match record:
            case DeliveryRow() as d:
                if d.eid not in self._episodes:
                    return  # a recorded error of an episode that was deleted
                if d.id is not None:
                    self._ids.setdefault(d.sid, {})[d.id] = d.eid
                    self._bytes += ROW_BYTES
                if d.t is not None:  # of a recorded error only the id is kept: no read returns one
                    self._deliveries.setdefault(d.eid, {})[d.t] = d
                    self._bytes += _size(d)
            case EpisodeRow() as e:
                self._n += 1
                self._episodes[e.eid] = (self._n, e)
                self._episodes_of.setdefault(e.sid, []).append(e.eid)
                self._bytes += ROW_BYTES
            case SessionRow() as s:
                self._sessions[s.sid] = s
                self._bytes += ROW_BYTES
                if s.fork_of is not None and s.fork_request is not None:
                    self._forks[s.fork_of, s.fork_request] = s.sid
            case SessionChange() as c:
                if c.sid in self._sessions:
                    old = self._sessions[c.sid]
                    self._sessions[c.sid] = replace(
                        old,
                        status=c.status if c.status is not None else old.status,
                        given_out=c.given_out if c.given_out is not None else old.given_out,
                    )

    def _forget(self) -> None:
        for session in list(self._sessions.values()):
            if self._bytes <= self._max_bytes * 3 // 4:
                return
            if session.status != "open":
                self._forget_session(session)

    def _forget_session(self, session: SessionRow) -> None:
        for eid in list(self._episodes_of.get(session.sid, ())):
            self.delete_episode(eid)
        del self._sessions[session.sid]
        self._bytes -= ROW_BYTES
        if session.fork_of is not None and session.fork_request is not None:
            del self._forks[session.fork_of, session.fork_request]

    def delivery(self, eid: str, t: int) -> DeliveryRow | None:
        return self._deliveries.get(eid, {}).get(t)

    def last_delivery(self, sid: str) -> DeliveryRow | None:
        for eid in reversed(self._episodes_of.get(sid, ())):
            if turns := self._deliveries.get(eid):
                return next(reversed(turns.values()))
        return None

    def episode(self, eid: str) -> EpisodeRow | None:
        return self._episodes[eid][1] if eid in self._episodes else None

    def first_episode(self, sid: str) -> EpisodeRow | None:
        eids = self._episodes_of.get(sid)
        return self._episodes[eids[0]][1] if eids else None

    def turns(self, eid: str) -> list[TurnRow]:
        return [
            TurnRow(t, d.kind, d.digest, d.semantic_digest, d.reward, d.done, d.error_kind, d.hint_template_key)
            for t, d in sorted(self._deliveries.get(eid, {}).items())
        ]

    def episodes(
        self,
        *,
        limit: int,
        before: int | None = None,
        environment: str | None = None,
        error_kind: str | None = None,
        principal: str | None,
    ) -> tuple[list[EpisodeStats], int | None]:
        found: list[tuple[int, EpisodeStats]] = []
        for n, row in reversed(list(self._episodes.values())):
            if before is not None and n >= before:
                continue
            if environment is not None and row.environment != environment:
                continue
            if row.principal != principal:
                continue
            turns = self.turns(row.eid)
            kinds = Counter(t.error_kind for t in turns if t.error_kind is not None)
            if error_kind is not None and error_kind not in kinds:
                continue
            reward = sum(t.reward for t in turns if t.reward is not None)
            found.append(
                (n, EpisodeStats(row, len(turns), reward, any(t.done for t in turns), dict(sorted(kinds.items()))))
            )
            if len(found) > limit:
                break
        return [s for _, s in found[:limit]], found[limit - 1][0] if len(found) > limit else None

    def session(self, sid: str) -> SessionRow | None:
        return self._sessions.get(sid)

    def open_sessions(self) -> list[SessionRow]:
        return [s for s in self._sessions.values() if s.status == "open"]

    def fork_session(self, eid: str, request_id: str) -> SessionRow | None:
        sid = self._forks.get((eid, request_id))
        return self._sessions[sid] if sid is not None else None

    def refs(self) -> set[SnapshotRef]:
        return {ref for turns in list(self._deliveries.values()) for d in list(turns.values()) for ref in d.refs}

    def delete_episode(self, eid: str) -> int:
        if eid not in self._episodes:
            return 0
        _, row = self._episodes.pop(eid)
        self._bytes -= ROW_BYTES
        self._episodes_of[row.sid].remove(eid)
        if not self._episodes_of[row.sid]:
            del self._episodes_of[row.sid]
        gone = self._deliveries.pop(eid, {})
        self._bytes -= sum(map(_size, gone.values()))
        ids = self._ids.pop(row.sid, {})
        kept = {id: of for id, of in ids.items() if of != eid}
        self._bytes -= ROW_BYTES * (len(ids) - len(kept))
        if kept:
            self._ids[row.sid] = kept
        return len(gone)

    def close(self) -> None:
        self._closed = True


def _size(d: DeliveryRow) -> int:
    return ROW_BYTES + len(d.payload) + len(d.request) + len(d.state or b"")

"""`IndexedReads`: the reads of a journal with an index: the newest rows from memory, the others through the index."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from errata_protocol.environment import SnapshotRef
from errata_protocol.episode_lists import EVERY, NEWEST, EpisodeFilter, EpisodeOrder, ListPlace
from errata_protocol.replay import EpisodeAggregates

from . import columns
from .base import (
    DeliveryRow,
    EpisodeRow,
    EpisodeStats,
    HeldEpisode,
    JournalDamaged,
    Reads,
    RewardRow,
    SessionRow,
    TurnRow,
    listed_status,
)
from .index import EPISODE, MAX_INTEGER, REWARD, SESSION, decode_replies, decode_turns, entries_of
from .indexed_listing import IndexedListing
from .indexed_standing import Rows, Standing
from .live import COMPUTED, Episode, Flat, Live, Reply, Turn
from .segments import Place, Segments

T = TypeVar("T")

REFS_AT_ONCE = 20_000

_EPISODE_COLUMNS = ", ".join(f"e.{name}" for name in columns.EPISODE)


class IndexedReads(Reads):
    """Answers reads from memory and the index. Any thread may read.

    Args:
        segments: Where the rows are.
        standing: Looks up sessions, episodes and turns.
        live: What is not in the index yet.
        rows: As in `Standing`.
    """

    def __init__(self, segments: Segments, standing: Standing, live: Live, rows: Rows) -> None:
        self._segments = segments
        self._standing = standing
        self._live = live
        self._rows = rows
        self._listing = IndexedListing(live, rows)

    # -- deliveries ----------------------------------------------------------------------------------------------

    def delivery(self, eid: str, t: int) -> DeliveryRow | None:
        turn = self._standing.turn(eid, t)
        return self._row(turn, eid, t) if turn is not None else None

    def _row(self, at: Turn | Reply | Place, eid: str | None, t: int | None) -> DeliveryRow:
        row = self._segments.read(Place(at.segment, at.offset, at.size))
        if not isinstance(row, DeliveryRow) or row.t != t or (eid is not None and row.eid != eid):
            raise JournalDamaged(
                f"the journal is damaged: its index names byte {at.offset} of segment {at.segment} for another row; "
                "stop the server and remove index.db, it is made again from the segments"
            )
        return row

    def recorded(self, eid: str, t: int) -> list[DeliveryRow]:
        delivery = self.delivery(eid, t)
        if delivery is None:
            return []
        episode = self._standing.episode(eid)
        found = set[Place]()
        if episode is not None:
            for batch in self._live.batches():
                found.update(Place(*e[1:4]) for e in batch.errors.get(episode.n, ()) if e.after == t)
            sql = "SELECT segment, offset, size FROM errors WHERE episode = ? AND after = ?"
            found.update(Place(*row) for row in self._rows(sql, (episode.n, t)))
        return [delivery, *(self._row(place, eid, None) for place in sorted(found))]

    def last_delivery(self, sid: str) -> DeliveryRow | None:
        for eid, episode in self._episodes_of(sid):
            if episode.last_t >= 0:
                return self.delivery(eid, episode.last_t)
        return None

    def turns(self, eid: str, *, semantic: bool = False) -> list[TurnRow]:
        episode = self._standing.episode(eid)
        if episode is None:
            return []
        of = self._semantic if semantic else _no_digest
        return [TurnRow(turn.t, turn.kind, turn.digest, of(turn, eid), *turn[8:]) for turn in self._turns(episode.n)]

    def _turns(self, n: int, after: int = -1, limit: int = MAX_INTEGER) -> list[Turn]:
        """Return the turns of the episode numbered ``n`` behind a t, in order, at most ``limit``."""
        waiting = [batch.turns.get(n, {}) for batch in self._live.batches()]
        # A run has one turn at least.
        sql = (
            "SELECT group_concat(hex(run)) FROM "
            "(SELECT run FROM turns WHERE episode = ? AND last > ? ORDER BY last LIMIT ?)"
        )
        there: dict[int, Flat] = {
            turn.t: turn for (text,) in self._rows(sql, (n, after, limit)) for turn in entries_of(text, decode_turns)
        }
        for turns in reversed(waiting):
            there.update(turns)
        return [Turn._make(there[t]) for t in sorted(t for t in there if t > after)[:limit]]

    def deliveries(self, eid: str, *, after: int = -1, limit: int, most_bytes: int) -> list[DeliveryRow]:
        episode = self._standing.episode(eid)
        found: list[DeliveryRow] = []
        size = 0
        for turn in self._turns(episode.n, after, limit) if episode is not None else ():
            row = self._row(turn, eid, turn.t)
            found.append(row)
            size += len(row.payload) + len(row.request)
            if size >= most_bytes:
                break
        return found

    def _semantic(self, turn: Turn, eid: str) -> bytes | None:
        if turn.semantic_digest == COMPUTED:
            return self._row(turn, eid, turn.t).semantic()
        return turn.semantic_digest

    # -- a session's replies and pushes --------------------------------------------------------------------------

    def replies(self, sid: str, first: int, last: int) -> list[DeliveryRow]:
        session = self._standing.session(sid)
        if session is None:
            return []
        waiting = [batch.replies.get(session.n, {}) for batch in self._live.batches()]
        sql = (
            "SELECT group_concat(hex(run)) FROM "
            "(SELECT run FROM replies WHERE session = ? AND last >= ? AND first <= ? ORDER BY last)"
        )
        rows = self._rows(sql, (session.n, first, min(last, MAX_INTEGER)))
        there: dict[int, Flat] = {reply.id: reply for (text,) in rows for reply in entries_of(text, decode_replies)}
        for replies in reversed(waiting):
            there.update(replies)
        gone = set(self._live.deleted.values())
        found = (Reply._make(there[id]) for id in sorted(there) if first <= id <= last)
        return [self._reply(reply, sid) for reply in found if reply.episode not in gone]

    def _reply(self, reply: Reply, sid: str) -> DeliveryRow:
        row = self._segments.read(Place(reply.segment, reply.offset, reply.size))
        if not isinstance(row, DeliveryRow) or (row.sid, row.id) != (sid, reply.id):
            raise JournalDamaged(
                f"the journal is damaged: its index names byte {reply.offset} of segment {reply.segment} for another "
                "reply; stop the server and remove index.db, it is made again from the segments"
            )
        return row

    def last_id(self, sid: str) -> int:
        session = self._standing.session(sid)
        return session.last_id if session is not None else 0

    def rewards(self, eid: str) -> list[RewardRow]:
        episode = self._standing.episode(eid)
        if episode is None:
            return []
        with self._live.locked_batches() as batches:
            waiting = [row for batch in batches for _, row in batch.rewards.get(episode.n, {}).values()]
        sql = f"SELECT {REWARD} FROM rewards WHERE episode = ? ORDER BY n"
        there = {row.reward_id: row for row in map(columns.reward, self._rows(sql, (episode.n,)))}
        for row in waiting:
            there.setdefault(row.reward_id, row)
        return list(there.values())

    def late_rewards(self, eid: str, *, first: int, last: int) -> dict[int, int]:
        episode = self._standing.episode(eid)
        if episode is None:
            return {}
        with self._live.locked_batches() as batches:
            waiting = {
                id: row.t
                for batch in batches
                for id, (_, row) in batch.rewards.get(episode.n, {}).items()
                if first <= row.t <= last
            }
        # A reward that leaves for the index meanwhile is found in both.
        sql = (
            "SELECT json_group_array(json_array(t, n)) FROM (SELECT t, count(*) AS n FROM rewards WHERE episode = ? "
            "AND t BETWEEN ? AND ? AND reward_id NOT IN (SELECT value FROM json_each(?)) GROUP BY t)"
        )
        counts = Counter(waiting.values())
        for (text,) in self._rows(sql, (episode.n, first, last, json.dumps(list(waiting)))):
            counts.update(dict(json.loads(text)))
        return dict(counts)

    def pushes(self, sid: str, first: int, last: int) -> list[RewardRow]:
        session = self._standing.session(sid)
        if session is None:
            return []
        waiting = [batch.pushes.get(session.n, {}) for batch in self._live.batches()]
        sql = f"SELECT {REWARD} FROM rewards WHERE session = ? AND seq BETWEEN ? AND ? ORDER BY seq"
        rows = map(columns.reward, self._rows(sql, (session.n, first, min(last, MAX_INTEGER))))
        there = {row.seq: row for row in rows if row.seq is not None}
        for pushes in waiting:
            there.update(pushes)
        return [
            there[seq] for seq in sorted(there) if first <= seq <= last and there[seq].eid not in self._live.deleted
        ]

    def last_seq(self, sid: str) -> int:
        session = self._standing.session(sid)
        return session.last_seq if session is not None else 0

    # -- episodes ------------------------------------------------------------------------------------------------

    def episode(self, eid: str) -> EpisodeRow | None:
        if eid in self._live.deleted:
            return None
        for batch in self._live.batches():
            if eid in batch.episodes:
                return batch.episodes[eid][2]
        return _first(columns.episode, self._rows(f"SELECT {EPISODE} FROM episodes WHERE eid = ?", (eid,)))

    def first_episode(self, sid: str) -> EpisodeRow | None:
        of = self._episodes_of(sid)
        return self.episode(of[-1][0]) if of else None

    def session_episodes(self, sid: str) -> list[str]:
        return [eid for eid, _ in reversed(self._episodes_of(sid))]

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
        return self._listing.page(
            limit=limit, after=after, wanted=wanted, order=order, principal=principal, attached=attached
        )

    def aggregates(
        self,
        *,
        bucket_s: int,
        wanted: EpisodeFilter = EVERY,
        principal: str | None,
        attached: frozenset[str] | None = None,
    ) -> EpisodeAggregates:
        return self._listing.aggregates(bucket_s, wanted, principal, attached)

    def episode_stats(self, eid: str, attached: frozenset[str] | None = None) -> EpisodeStats | None:
        row, totals = self.episode(eid), self._standing.episode(eid)
        if row is None or totals is None:
            return None
        session = self.session(row.sid)
        status = session.status if session is not None else None
        return totals.stats(row, listed_status(status, row.sid, attached))

    def held(self, *, after: int, limit: int) -> list[HeldEpisode]:
        waiting: dict[int, tuple[Any, ...]] = {}
        new: dict[int, EpisodeRow] = {}
        with self._live.lock:
            for batch in (self._live.batch, self._live.leaving):
                if batch is not None:
                    new.update((n, row) for n, _, row in batch.episodes.values())
                    for n, e in batch.of_episodes.items():
                        sizes = (e.payload_bytes, e.request_bytes, e.state_bytes)
                        waiting[n] = (e.deliveries, *sizes, e.newest, e.done)
        sql = (
            "SELECT e.n, t.deliveries, t.payload_bytes, t.request_bytes, t.state_bytes, t.newest, t.done, "
            f"{_EPISODE_COLUMNS} FROM episodes e LEFT JOIN totals t ON t.episode = e.n WHERE e.n > ? "
            "ORDER BY e.n LIMIT ?"
        )
        found = {n: row for n, row in new.items() if n > after}
        for n, *rest in self._rows(sql, (after, limit + len(self._live.deleted))):
            found[n] = columns.episode(rest[6:])
            waiting.setdefault(n, tuple(rest[:6]))
        gone = set(self._live.deleted.values())
        return [_held(n, found[n], waiting[n]) for n in sorted(found.keys() - gone)[:limit]]

    def _episodes_of(self, sid: str) -> list[tuple[str, Episode]]:
        """Return a session's episodes, newest first."""
        session = self._standing.session(sid)
        if session is None:
            return []
        found: dict[str, tuple[int, int]] = {}
        for batch in self._live.batches():
            found.update((eid, (n, -1)) for eid, n in batch.by_session.get(session.n, ()))
        sql = (
            "SELECT e.eid, e.n, coalesce(t.last_t, -1) FROM episodes e LEFT JOIN totals t ON t.episode = e.n "
            "WHERE e.session = ?"
        )
        found.update((eid, (n, last)) for eid, n, last in self._rows(sql, (session.n,)))
        return [
            (eid, self._live.episodes.get(eid) or Episode(n, session.n, last))
            for eid, (n, last) in sorted(found.items(), key=lambda one: -one[1][0])
            if eid not in self._live.deleted
        ]

    # -- sessions ------------------------------------------------------------------------------------------------

    def session(self, sid: str) -> SessionRow | None:
        batches = self._live.batches()
        rows = [batch.sessions.get(sid, (0, None))[1] for batch in batches]
        at = next((at for at, row in enumerate(rows) if row is not None), len(rows))
        row = rows[at] if at < len(rows) else self._session_row(sid)
        if row is None:
            return None
        for batch in reversed(batches[:at]):
            if sid in batch.changes:
                row = batch.changes[sid].applied(row)
        return row

    def _session_row(self, sid: str) -> SessionRow | None:
        sql = f"SELECT {SESSION} FROM sessions WHERE sid = ? AND environment IS NOT NULL"
        return _first(columns.session, self._rows(sql, (sid,)))

    def open_sessions(self) -> list[SessionRow]:
        with self._live.locked_batches() as batches:
            waiting = [(batch.changes.copy(), batch.sessions.copy()) for batch in batches]
        rows = map(columns.session, self._rows(f"SELECT {SESSION} FROM sessions WHERE status = 'open'", ()))
        found = {row.sid: row for row in rows}
        for changes, sessions in waiting:
            for sid, change in changes.items():
                if sid in found:
                    found[sid] = change.applied(found[sid])
            found.update((sid, row) for sid, (_, row) in sessions.items() if row is not None)
        return sorted((row for row in found.values() if row.status == "open"), key=lambda row: row.created)

    def fork_session(self, eid: str, request_id: str) -> SessionRow | None:
        sid = self._standing.forked(eid, request_id)
        return self.session(sid) if sid is not None else None

    def refs(self) -> set[SnapshotRef]:
        batches, found = self._live.batches(), set[SnapshotRef]()
        gone = set(self._live.deleted.values())
        sql = (
            "SELECT '[' || group_concat(refs) FILTER (WHERE episode NOT IN (SELECT value FROM json_each(?))) || ']', "
            "max(n) FROM (SELECT n, episode, refs FROM refs WHERE n > ? ORDER BY n LIMIT ?)"
        )
        last: int | None = 0
        while last is not None:
            text, last = self._rows(sql, (json.dumps(list(gone)), last, REFS_AT_ONCE))[0]
            found.update(columns.refs_of(json.loads(text or "[]")))
        for batch in batches:
            found.update(ref for n, refs in batch.refs if n not in gone for ref in refs)
        return found


def _no_digest(turn: Turn, eid: str) -> None:
    """Return None: the digest was not asked for."""


def _held(n: int, row: EpisodeRow, totals: tuple[Any, ...]) -> HeldEpisode:
    deliveries, payloads, requests, states, newest, done = totals
    return HeldEpisode(
        n, row, deliveries or 0, payloads or 0, requests or 0, states or 0, newest or row.created, bool(done)
    )


def _first(made: Callable[[Sequence[Any]], T], rows: list[tuple[Any, ...]]) -> T | None:
    return made(rows[0]) if rows else None

"""`Live`: in memory, the rows that are not yet in the index, and counters of the sessions and episodes in use (last
turn, last request id, totals).

Records are added here as soon as they are durable, under `Live.lock`, and go to the index in large batches. A batch
that is being written is still found here: a read looks at both batches before it asks the index, and misses nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from errata_protocol.environment import SnapshotRef
from errata_protocol.task_names import task_of

from . import columns
from .base import (
    DeliveryRow,
    EpisodeRow,
    EpisodeStats,
    ListedStatus,
    RecordKind,
    RewardRow,
    SessionChange,
    SessionRow,
)
from .codec import Deletion, LogRecord
from .segments import Place, Position

Flat = tuple[Any, ...]
"""A `Turn` or `Reply` while it waits: a plain tuple, which costs less to make and nothing to the garbage collector."""


COMPUTED = b""
"""In the place of a semantic digest that is computed from the row on demand."""


class Turn(NamedTuple):
    """A delivery in the index: where its row is, and what listings need of it."""

    t: int
    segment: int
    offset: int
    size: int
    id: int | None
    kind: RecordKind
    digest: bytes
    semantic_digest: bytes | None
    reward: float | None
    done: bool
    error_kind: str | None
    hint_template_key: str | None


class Reply(NamedTuple):
    """A row with an id in the index; ``episode`` is 0 for that of a session before its first."""

    id: int
    episode: int
    segment: int
    offset: int
    size: int


class Replied(NamedTuple):
    """A row without t in the index, by the delivery that it followed."""

    after: int
    segment: int
    offset: int
    size: int
    id: int | None


@dataclass(slots=True, eq=False)
class Episode:
    """Totals and last t of an episode.

    Args:
        n: Its number in the index.
        session: That of its session.
        last_t: Highest t, -1 without a delivery.
        indexed_t: Highest t in the index.
        deliveries: Rows with a t.
        reward: Their sum.
        done: One of them ended it.
        error_kinds: How many were marked how; None for none.
        payload_bytes: Of all its rows, also those without t.
        request_bytes: Likewise.
        state_bytes: Likewise.
        newest: When its newest row was made, seconds since the epoch; 0 without a row.
        last: When its newest delivery was made, seconds since the epoch; its creation, without any.
        hint_keys: How many of its turns have a hint of which template; None for none.
        task: Name of its task; None if its t=0 names none, nor that of the episode that it was forked from.
    """

    n: int
    session: int
    last_t: int = -1
    indexed_t: int = -1
    deliveries: int = 0
    reward: float = 0.0
    done: bool = False
    error_kinds: dict[str, int] | None = None
    payload_bytes: int = 0
    request_bytes: int = 0
    state_bytes: int = 0
    newest: float = 0.0
    last: float = 0.0
    hint_keys: dict[str, int] | None = None
    task: str | None = None

    def stats(self, row: EpisodeRow, session_status: ListedStatus | None) -> EpisodeStats:
        """Return what lists say of the episode, whose row is ``row``."""
        kinds, keys = (dict(sorted(counts.items())) if counts else {} for counts in (self.error_kinds, self.hint_keys))
        return EpisodeStats(
            row, self.deliveries, self.reward, self.done, kinds, keys, self.task, self.last, session_status
        )

    def add(self, d: DeliveryRow) -> None:
        """Count a row of the episode. Dicts are not changed in place: others may read the one that is there."""
        t = d.t
        self.payload_bytes += len(d.payload)
        self.request_bytes += len(d.request)
        if d.state is not None:
            self.state_bytes += len(d.state)
        if d.created > self.newest:
            self.newest = d.created
        if t is None:
            return
        if t > self.last_t:
            self.last_t = t
        if t == 0:
            self.task = task_of(d.payload, d.request) or self.task
        if d.created > self.last:
            self.last = d.created
        self.deliveries += 1
        if d.reward is not None:
            self.reward += d.reward
        if d.done:
            self.done = True
        if d.error_kind is not None:
            self.error_kinds = _one_more(self.error_kinds, d.error_kind)
        if d.hint_template_key is not None:
            self.hint_keys = _one_more(self.hint_keys, d.hint_template_key)


def _one_more(counts: dict[str, int] | None, key: str) -> dict[str, int]:
    return {**counts, key: counts.get(key, 0) + 1} if counts is not None else {key: 1}


@dataclass(slots=True, eq=False)
class Session:
    """Last id and seq of a session.

    Args:
        n: Its number in the index.
        known: It has a row; else only other rows name it.
        last_id: Highest id, 0 without any.
        indexed_id: Highest id in the index.
        last_seq: Highest seq, 0 without any.
    """

    n: int
    known: bool = False
    last_id: int = 0
    indexed_id: int = 0
    last_seq: int = 0


class Total(NamedTuple):
    """What `Episode` has of the episode numbered ``n``, at the end of a batch."""

    n: int
    last_t: int
    deliveries: int
    reward: float
    done: bool
    payload_bytes: int
    request_bytes: int
    state_bytes: int
    newest: float
    last: float
    task: str | None
    hint_keys: dict[str, int] | None
    error_kinds: dict[str, int] | None


class Counter(NamedTuple):
    """What `Session` has of the session numbered ``n``, at the end of a batch."""

    n: int
    last_id: int
    last_seq: int


@dataclass(slots=True)
class Batch:
    """Records that go to the index together, by what they are there; ``position`` is behind the last of them.

    Commits change the dicts while other threads read. A read without `Live.lock` may look a key up, go through a list,
    which only grows, or pass a whole dict to ``dict.update``; to go through a dict it needs the lock.

    ``of_episodes`` and ``of_sessions`` go on changing after the batch has left, because later records count there, too.
    ``totals``, ``counters`` and the next numbers are what stands at ``position``; they are set as the batch leaves.
    """

    position: Position | None = None
    rows: int = 0
    sessions: dict[str, tuple[int, SessionRow | None]] = field(default_factory=dict)
    changes: dict[str, SessionChange] = field(default_factory=dict)
    episodes: dict[str, tuple[int, int, EpisodeRow]] = field(default_factory=dict)
    by_session: dict[int, list[tuple[str, int]]] = field(default_factory=dict)
    """Ids and numbers of the episodes, by the number of their session."""
    turns: dict[int, dict[int, Flat]] = field(default_factory=dict)
    replies: dict[int, dict[int, Flat]] = field(default_factory=dict)
    errors: dict[int, list[Replied]] = field(default_factory=dict)
    rewards: dict[int, dict[str, tuple[Place, RewardRow]]] = field(default_factory=dict)
    pushes: dict[int, dict[int, RewardRow]] = field(default_factory=dict)
    refs: list[tuple[int, tuple[SnapshotRef, ...]]] = field(default_factory=list)
    forks: dict[tuple[str | None, str], str] = field(default_factory=dict)
    of_episodes: dict[int, Episode] = field(default_factory=dict)
    of_sessions: dict[int, Session] = field(default_factory=dict)
    segments: dict[int, list[int]] = field(default_factory=dict)
    """Rows and bytes by segment."""
    totals: list[Total] = field(default_factory=list)
    counters: list[Counter] = field(default_factory=list)
    next_session: int = 1
    next_episode: int = 1

    def freeze(self, next_session: int, next_episode: int) -> None:
        """Set what stands at ``position``; the caller lets no record come between."""
        self.totals = [
            Total(
                n, e.last_t, e.deliveries, e.reward, e.done, e.payload_bytes, e.request_bytes, e.state_bytes, e.newest,
                e.last, e.task, e.hint_keys, e.error_kinds,
            )
            for n, e in self.of_episodes.items()
        ]  # fmt: skip
        self.counters = [Counter(n, s.last_id, s.last_seq) for n, s in self.of_sessions.items()]
        self.next_session, self.next_episode = next_session, next_episode


class Live:
    """See the module.

    Args:
        max_idle: Episodes and sessions to remember where nothing of them waits for the index; those in use are asked
            for at every step.

    Attributes:
        lock: Held while records are added, and by reads of more than one attribute.
        batch: Records added since the last batch left.
        leaving: The batch that is being written to the index.
        deleted: Numbers of the episodes whose end is not in the index yet.
    """

    def __init__(self, *, max_idle: int = 65_536) -> None:
        self.lock = threading.Lock()
        self.batch = Batch()
        self.leaving: Batch | None = None
        self.episodes: dict[str, Episode] = {}
        self.sessions: dict[str, Session] = {}
        self.deleted: dict[str, int] = {}
        self.next_episode = 1
        self.next_session = 1
        self._max_idle = max_idle
        self._recent: tuple[set[int], set[int]] = set(), set()  # numbers of episodes and sessions that got rows

    def batches(self) -> tuple[Batch, ...]:
        """Return what waits for the index, newest first."""
        with self.lock:
            return (self.batch,) if self.leaving is None else (self.batch, self.leaving)

    @contextlib.contextmanager
    def locked_batches(self) -> Iterator[tuple[Batch, ...]]:
        """Hold the lock and yield what waits for the index, oldest first; for reads that go through a dict."""
        with self.lock:
            yield (self.batch,) if self.leaving is None else (self.leaving, self.batch)

    def take(self, records: Iterable[tuple[tuple[int, int, int], LogRecord]], position: Position) -> None:
        """Add records that are durable, each with its `Place`; their episodes and sessions are known here, or new.

        `errata_server.journal.codec.Deletion` is not for here.
        """
        with self.lock:
            batch = self.batch
            current, tally = -1, [0, 0]
            for (segment, offset, size), record in records:
                if segment != current:
                    current, tally = segment, batch.segments.setdefault(segment, [0, 0])
                batch.rows += 1
                tally[0] += 1
                tally[1] += size
                if type(record) is DeliveryRow:
                    self._take_delivery(batch, record, segment, offset, size)
                else:
                    self._take(record, Place(segment, offset, size))
            batch.position = position

    def count(self, deletion: Deletion) -> None:
        """Keep the last id and seq of a deleted episode's session, whose rows may all be gone."""
        with self.lock:
            session = self._session(deletion.sid)
            session.last_id = max(session.last_id, deletion.last_id)
            session.last_seq = max(session.last_seq, deletion.last_seq)

    def leave(self) -> Batch | None:
        """Return the batch to write to the index: the one that left before and did not arrive, else the current one."""
        with self.lock:
            if self.leaving is None and self.batch.position is not None:
                # Records that come from now on are behind the batch's position: after a crash they are replayed, and
                # must not be counted already.
                self.batch.freeze(self.next_session, self.next_episode)
                self.leaving, self.batch = self.batch, Batch()
            return self.leaving

    def arrived(self) -> None:
        """Called when the batch that left is in the index."""
        with self.lock:
            if self.leaving is None:
                raise RuntimeError("no batch has left")
            self._recent[0].update(self.leaving.of_episodes)
            self._recent[1].update(self.leaving.of_sessions)
            for n, turns in self.leaving.turns.items():
                episode = self.leaving.of_episodes[n]
                episode.indexed_t = max(episode.indexed_t, *turns)
            for n, replies in self.leaving.replies.items():
                session = self.leaving.of_sessions[n]
                session.indexed_id = max(session.indexed_id, *replies)
            self.leaving = None

    def forget_idle(self) -> None:
        """Forget the episodes and sessions that were first seen longest ago and have no waiting rows."""
        with self.lock:
            batches = (self.batch,) if self.leaving is None else (self.batch, self.leaving)
            for known, busy in (
                (self.episodes, [batch.of_episodes for batch in batches]),
                (self.sessions, [batch.of_sessions for batch in batches]),
            ):
                _forget(known, busy, self._max_idle)

    def forget_unused(self) -> None:
        """Forget the episodes and sessions for which no row came since the last call, and which have no waiting rows.

        Those that ended are forgotten so. The next row of one that continues looks it up again.
        """
        with self.lock:
            batches = (self.batch,) if self.leaving is None else (self.batch, self.leaving)
            episodes = self._recent[0].union(*(batch.of_episodes for batch in batches))
            sessions = self._recent[1].union(*(batch.of_sessions for batch in batches))
            self._recent = set(), set()
            self.episodes = {eid: episode for eid, episode in self.episodes.items() if episode.n in episodes}
            self.sessions = {sid: session for sid, session in self.sessions.items() if session.n in sessions}

    def delete(self, eid: str, n: int) -> None:
        """Note that an episode was deleted, which the index does not know yet."""
        with self.lock:
            self.deleted[eid] = n
            self.episodes.pop(eid, None)

    def _take(self, record: LogRecord, place: Place) -> None:
        batch = self.batch
        match record:
            case EpisodeRow() as e:
                session = self._session(e.sid)
                parent = self.episodes.get(e.origin_eid) if e.origin_eid is not None else None
                episode = self.episodes[e.eid] = Episode(
                    self.next_episode, session.n, last=e.created, task=parent.task if parent is not None else None
                )
                self.next_episode += 1
                batch.episodes[e.eid] = (episode.n, session.n, e)
                batch.by_session.setdefault(session.n, []).append((e.eid, episode.n))
                batch.of_episodes[episode.n] = episode
            case SessionRow() as s:
                session = self._session(s.sid)
                session.known = True
                batch.sessions[s.sid] = (session.n, s)
                if s.fork_request is not None:
                    batch.forks[s.fork_of, s.fork_request] = s.sid
            case SessionChange() as c:
                n, row = batch.sessions.get(c.sid, (0, None))
                if row is not None:
                    batch.sessions[c.sid] = (n, c.applied(row))
                else:
                    batch.changes[c.sid] = merged(batch.changes.get(c.sid), c)
            case RewardRow() as r:
                if (of := self.episodes.get(r.eid)) is None:
                    return
                session = self._session(r.sid)
                batch.rewards.setdefault(of.n, {})[r.reward_id] = (place, r)
                batch.of_episodes[of.n] = of
                if r.seq is not None:
                    batch.pushes.setdefault(session.n, {})[r.seq] = r
                    session.last_seq = max(session.last_seq, r.seq)
            case _:
                pass

    def _take_delivery(self, batch: Batch, d: DeliveryRow, segment: int, offset: int, size: int) -> None:
        episode = self.episodes.get(d.eid)
        if episode is None and d.eid:
            return  # a recorded reply of an episode that was deleted
        id = d.id
        if id is not None:
            session = self.sessions.get(d.sid)
            if session is None:
                session = self._session(d.sid)
            replies = batch.replies.get(session.n)
            if replies is None:
                replies = batch.replies[session.n] = {}
                batch.of_sessions[session.n] = session
            replies[id] = (id, episode.n if episode is not None else 0, segment, offset, size)
            if id > session.last_id:
                session.last_id = id
        if episode is None:
            return
        n, t = episode.n, d.t
        episode.add(d)
        if t is None:
            batch.of_episodes[n] = episode
            batch.errors.setdefault(n, []).append(Replied(episode.last_t, segment, offset, size, id))
            return
        turns = batch.turns.get(n)
        if turns is None:
            turns = batch.turns[n] = {}
            batch.of_episodes[n] = episode
        turns[t] = (
            t, segment, offset, size, id, d.kind, d.digest, d.semantic_digest if d.volatile is None else COMPUTED,
            d.reward, d.done, d.error_kind, d.hint_template_key,
        )  # fmt: skip
        if d.refs:
            batch.refs.append((n, d.refs))

    def _session(self, sid: str) -> Session:
        session = self.sessions.get(sid)
        if session is None:
            session = self.sessions[sid] = Session(self.next_session)
            self.next_session += 1
            self.batch.sessions[sid] = (session.n, None)
        self.batch.of_sessions[session.n] = session
        return session


def merged(first: SessionChange | None, second: SessionChange) -> SessionChange:
    """Return one change for two."""
    if first is None:
        return second
    pairs = zip(columns.of_change(first), columns.of_change(second), strict=True)
    return columns.change([new if new is not None else old for old, new in pairs])


def _forget(known: dict[str, Any], busy: list[dict[int, Any]], most: int) -> None:
    spare = len(known) - most
    if spare <= 0:
        return
    idle = (key for key, one in known.items() if not any(one.n in of for of in busy))
    for key in [key for key, _ in zip(idle, range(spare), strict=False)]:
        del known[key]

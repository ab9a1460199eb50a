"""`Changes`: which episodes changed lately, for those who follow them; nothing is kept while nobody does (PROTOCOL G).

There is one change for each episode: all that happened to it since it was last read. Changes stand in a ring, oldest
first, and a change that was read moves to the end when something new happens to its episode. A reader keeps its
position in the ring and has no queue. If the ring has dropped changes that a reader has not read, the reader is told to
list the episodes again.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

from errata_protocol.errors import Overloaded
from errata_protocol.replay import Happened

from ..ids import name_of
from ..journal.base import ALL_OWNERS, DeliveryRow, EpisodeRow, Journal, Record, RewardRow, SessionChange, is_owned

RING = 32_768
"""Changes that are kept: of so many episodes a reader may have missed something."""

MAX_EVENTS = 250
"""Events that a reader takes at a time."""

MAX_WALK = 4_096
"""Places of the ring that a reader looks at, at a time: most of them may be of changes that have moved."""

MAX_READERS, MAX_READERS_OF_ONE = 64, 32
"""Readers at a time, of all principals and of one."""

KEEP_S = 60.0
"""How long changes are kept once the last reader has gone, seconds: it may come back."""

MAX_KIND = 200
"""Longest kind of an error in an event, in code points."""

MAX_LATE = 16
"""Most late rewards in an event; a reader of one with more asks for the episode's."""

RETRY_S = 5.0
"""``retry_after`` of a reader that has to wait for a place, seconds."""

_WHAT: tuple[Happened, ...] = get_args(Happened)
_CREATED, _DELIVERED, _MARKED, _ENDED, _REWARDED, _SESSION, _DELETED = range(len(_WHAT))

Event = dict[str, Any]
"""The fields of an `errata_protocol.replay.EpisodeEvent`: to make one of these takes as long as all the rest."""

Reason = Literal["start", "restart", "behind"]
"""Why a reader has to list: it just began, its cursor is of another server or list, or it missed something."""


class Change:
    """What happened to an episode, or to the session of one.

    Args:
        key: Its key among the changes.
        eid: The episode; None for that of a session until it is looked up, or where it has none.
        sid: The session.
    """

    __slots__ = (
        "at", "done", "eid", "environment", "error_kind", "error_t", "is_known", "is_read", "key", "late",
        "late_before", "principal", "reward", "seq", "sid", "status", "t",
    )  # fmt: skip

    def __init__(self, key: str, eid: str | None, sid: str) -> None:
        self.key, self.eid, self.sid = key, eid, sid
        self.seq = 0
        self.at = [0] * len(_WHAT)
        """For each of `Happened` the place at which it happened last; 0 where it did not."""
        self.is_read = self.is_known = self.done = False
        self.environment = ""
        self.principal: str | None = None
        self.t: int | None = None
        self.error_t: int | None = None
        self.reward: float | None = None
        self.late: deque[tuple[int, int, float]] | None = None
        """Newest late rewards, oldest first: the place at which each came, its t, its value."""
        self.late_before = 0
        """Place of the newest late reward that is in `late` no more."""
        self.error_kind: str | None = None
        self.status: str | None = None

    def belongs_to(self, environment: str, principal: str | None) -> None:
        """Note whose the episode is."""
        self.environment, self.principal, self.is_known = environment, principal, True

    def rewarded(self, t: int, value: float, floor: int) -> None:
        """Note a late reward, at the place where the change stands; those up to ``floor`` have been read by all."""
        if self.late is None:
            self.late = deque()
        while self.late and self.late[0][0] <= floor:
            self.late.popleft()
        self.late.append((self.seq, t, value))
        if len(self.late) > MAX_LATE:
            self.late_before = self.late.popleft()[0]

    def event(self, after: int) -> Event:
        """Return what happened behind a place."""
        marked = self.at[_MARKED] > after
        late = [(t, value) for at, t, value in self.late or () if at > after]
        return {
            "eid": self.eid,
            "session": name_of(self.sid),
            "environment": self.environment,
            "what": [what for what, at in zip(_WHAT, self.at, strict=True) if at > after],
            "t": self.t,
            "reward": self.reward,
            "done": self.done if self.t is not None else None,
            "error_kind": self.error_kind if marked else None,
            "error_t": self.error_t if marked else None,
            "late_t": late[-1][0] if late else None,
            "late_reward": late[-1][1] if late else None,
            "late_rewards": [{"t": t, "value": value} for t, value in late] if self.late_before <= after else None,
            "status": self.status if self.at[_SESSION] > after else None,
        }


class Reader:
    """One who follows changes. Close it at the end.

    Args:
        principal: Whose episodes it may see.
        environment: Only episodes of this environment; None for all.
        episode: Only this episode; None for all.
        wake: Called on any thread when something may be there to take.
    """

    def __init__(
        self, principal: str | None, environment: str | None, episode: EpisodeRow | None, wake: Callable[[], None]
    ) -> None:
        self.principal = principal
        self.environment = environment
        self.episode = episode
        self.wake = wake
        self.at = 0
        self.waits = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the only changes that it follows; empty for all."""
        return () if self.episode is None else (self.episode.eid, _of_session(self.episode.sid))

    @property
    def scope(self) -> str:
        """What it follows, for its cursors: one of another list is none here."""
        return name_of(f"{self.principal}/{self.environment}/{self.keys}")

    def follows(self, change: Change) -> bool:
        """Return whether a change whose owner is known is for it."""
        return is_owned(change.principal, self.principal) and self.environment in (None, change.environment)


class Changes:
    """The changes of one data directory. Any thread may use it.

    Args:
        draw: Draws a random number, by which cursors of another run are told from those of this one.

    Attributes:
        active: Whether changes have to be noted now.
        ended: Whether the server stops: readers have to go.
    """

    def __init__(self, draw: Callable[[], int] = lambda: secrets.randbits(31)) -> None:
        self.active = False
        self.ended = False
        self._draw = draw
        self._run: str | None = None
        self._lock = threading.Lock()
        self._readers: set[Reader] = set()
        self._seq = 0
        self._first = 0  # a reader has missed nothing if it has read up to here
        self._floor = 0  # whoever reads has read up to here, or need not
        self._changes: dict[str, Change] = {}
        self._ring: list[Change | None] = []
        self._rest: asyncio.TimerHandle | None = None

    @property
    def readers(self) -> int:
        """Number of readers."""
        return len(self._readers)

    def begin(self) -> None:
        """Called when the journal is opened: cursors of before are of another run."""
        with self._lock:
            self._run, self.ended = None, False
            self._stop()

    def end(self) -> None:
        """Called when the server begins to stop: wake all readers, which then go."""
        with self._lock:
            self.ended = True
            for reader in self._readers:
                reader.wake()

    # -- what happens ------------------------------------------------------------------------------------------------

    def note(self, records: Iterable[Record]) -> None:
        """Note what was committed."""
        with self._lock:
            if not self.active:
                return
            for record in records:
                if type(record) is DeliveryRow:
                    if record.t is not None and record.eid:
                        self._delivered(record, record.t)
                elif type(record) is EpisodeRow:
                    change = self._touched(record.eid, record.eid, record.sid, _CREATED)
                    change.belongs_to(record.environment, record.principal)
                elif type(record) is RewardRow:
                    change = self._touched(record.eid, record.eid, record.sid, _REWARDED)
                    change.rewarded(record.t, record.value, self._floor)
                elif type(record) is SessionChange and record.status is not None:
                    change = self._touched(_of_session(record.sid), None, record.sid, _SESSION)
                    change.status = record.status
            self._wake()

    def attached(self, sid: str, attached: bool) -> None:
        """Note that an open session has a connection again, or has none any more."""
        with self._lock:
            if self.active:
                change = self._touched(_of_session(sid), None, sid, _SESSION)
                change.status = "open" if attached else "detached"
                self._wake()

    def deleted(self, row: EpisodeRow) -> None:
        """Note that an episode was deleted."""
        with self._lock:
            if self.active:
                self._touched(row.eid, row.eid, row.sid, _DELETED).belongs_to(row.environment, row.principal)
                self._wake()

    def _delivered(self, row: DeliveryRow, t: int) -> None:
        change = self._touched(row.eid, row.eid, row.sid, _DELIVERED)
        change.t, change.reward = t, row.reward
        if row.error_kind is not None:
            change.at[_MARKED] = change.seq
            change.error_kind, change.error_t = row.error_kind[:MAX_KIND], t
        if row.done:
            change.at[_ENDED], change.done = change.seq, True

    def _touched(self, key: str, eid: str | None, sid: str, what: int) -> Change:
        change = self._changes.get(key)
        if change is None:
            change = Change(key, eid, sid)
        if change.is_read or change.seq <= self._floor:
            self._seq += 1
            place = self._seq % RING
            over = self._ring[place]
            if over is not None and over.seq == self._seq - RING:
                del self._changes[over.key]
            self._ring[place] = self._changes[key] = change
            change.seq, change.is_read = self._seq, False
        change.at[what] = change.seq
        return change

    def _wake(self) -> None:
        for reader in self._readers:
            if reader.waits:
                reader.waits = False
                reader.wake()

    # -- readers -----------------------------------------------------------------------------------------------------

    def open(self, reader: Reader, cursor: str | None) -> Reason | None:
        """Let a reader begin, and return why it has to list; None where it goes on from its cursor.

        Args:
            reader: The reader; its `close` has to follow.
            cursor: What an event of an earlier reader had as its id; None to begin now.

        Raises:
            Overloaded: There are as many readers as there may be.
        """
        with self._lock:
            of_one = sum(other.principal == reader.principal for other in self._readers)
            if len(self._readers) >= MAX_READERS or of_one >= MAX_READERS_OF_ONE:
                raise Overloaded(
                    f"{len(self._readers)} streams of events are open, {of_one} of them yours: at most {MAX_READERS} "
                    f"and {MAX_READERS_OF_ONE} may be; close some",
                    retry_after=RETRY_S,
                )
            if self._rest is not None:
                self._rest.cancel()
                self._rest = None
            if self._run is None:
                self._run = f"{self._draw():08x}"
            if not self.active:  # what happened meanwhile is not here
                self._seq += 1
                self._first = self._seq
                self._ring = [None] * RING
                self.active = True
            self._readers.add(reader)
            why, at = self._place(reader, cursor)
            if at is None:
                at = self._restarted()
            reader.at = at
            return why

    def close(self, reader: Reader) -> None:
        """Let a reader go; on its event loop. Idempotent."""
        with self._lock:
            self._readers.discard(reader)
            if not self._readers and self.active and self._rest is None:
                self._rest = asyncio.get_running_loop().call_later(KEEP_S, self._rest_now)

    def take(self, reader: Reader) -> tuple[list[tuple[str, Event]], Sequence[Change], Reason | None]:
        """Return what a reader has not read: events with their cursors, changes that have to be looked up (`look_up`)
        before anything is taken, and why it has to list."""
        with self._lock:
            if not self.active:  # the journal was opened again, and nobody has begun to read since
                reader.waits = True
                return [], (), None
            if reader.at < max(self._first, self._seq - RING):
                reader.at = self._restarted()
                return [], (), "behind"
            if reader.keys:
                return self._take_of_one(reader), (), None
            found: list[tuple[str, Event]] = []
            end = min(self._seq, reader.at + MAX_WALK)
            new = [
                change
                for seq in range(reader.at + 1, end + 1)
                if (change := self._ring[seq % RING]) is not None and change.seq == seq
            ]
            if unknown := [change for change in new[:MAX_EVENTS] if not change.is_known]:
                return [], unknown, None
            for change in new:
                if len(found) == MAX_EVENTS or not change.is_known:
                    end = change.seq - 1
                    break
                if reader.follows(change):
                    event = change.event(reader.at)
                    change.is_read = True
                    found.append((self._cursor(reader, change.seq), event))
            reader.at = end
            reader.waits = end == self._seq
            return found, (), None

    def _take_of_one(self, reader: Reader) -> list[tuple[str, Event]]:
        row = reader.episode
        found: list[tuple[str, Event]] = []
        if row is None:
            raise TypeError("the reader follows all episodes")
        for change in (self._changes.get(key) for key in reader.keys):
            if change is not None and change.seq > reader.at:
                # Of a session it is the newest episode's for others, and that one may not be looked up yet.
                own = {"eid": row.eid, "environment": row.environment}
                found.append((self._cursor(reader, self._seq), change.event(reader.at) | own))
                change.is_read = True
        reader.at = self._seq  # what comes to these changes comes behind this
        reader.waits = True
        return found

    def cursor(self, reader: Reader) -> str:
        """Return the cursor of all that a reader has taken."""
        with self._lock:
            return self._cursor(reader, reader.at)

    def look_up(self, journal: Journal, changes: Sequence[Change]) -> None:
        """Look up whose episodes these changes are of; may block."""
        for change in changes:
            row: Any = journal.episode(change.eid) if change.eid is not None else journal.session(change.sid)
            eid = change.eid or next(reversed(journal.session_episodes(change.sid)), None)
            with self._lock:
                if row is not None:
                    change.belongs_to(row.environment, row.principal)
                elif not change.is_known:  # deleted meanwhile by one that did not note it: nobody's
                    change.belongs_to("", ALL_OWNERS)
                change.eid = eid

    def _place(self, reader: Reader, cursor: str | None) -> tuple[Reason | None, int | None]:
        if cursor is None:
            return "start", None
        run, _, rest = cursor.partition("-")
        scope, _, seq = rest.partition("-")
        if (run, scope) != (self._run, reader.scope) or not (seq.isascii() and seq.isdecimal() and len(seq) < 16):
            return "restart", None
        if not max(self._first, self._seq - RING) <= int(seq) <= self._seq:
            return "behind", None
        return None, int(seq)

    def _restarted(self) -> int:
        """Return the place from which a reader goes on that lists now: what changes from now on comes behind it."""
        self._floor = self._seq
        return self._seq

    def _cursor(self, reader: Reader, seq: int) -> str:
        return f"{self._run}-{reader.scope}-{seq}"

    def _rest_now(self) -> None:
        with self._lock:
            self._rest = None
            if not self._readers:
                self._stop()

    def _stop(self) -> None:
        self.active = False
        self._changes, self._ring = {}, []


def _of_session(sid: str) -> str:
    return f"session {sid}"

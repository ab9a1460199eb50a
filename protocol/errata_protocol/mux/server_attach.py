"""How sessions come to a socket and leave it on the server: open, resume, fence, end (PROTOCOL D3, D7, D12)."""

from __future__ import annotations

import heapq
import hmac
from collections.abc import Callable
from itertools import count

from ..errors import (
    ErrataError,
    InvalidEnvelope,
    LocalProtocolError,
    NotAttached,
    SessionClosed,
    SessionExpired,
    SessionLost,
)
from .effects import Find, Forget, Hibernate, Stored
from .envelope import MAX_ID, write_envelope
from .records import EndReason
from .server_output import Out
from .server_requests import hash_key
from .server_session import Arrival, Message, ServerConfig, ServerConnection, ServerSession, Told, optional
from .state import Action, Event, Role, State, transition

_NO_HASH = bytes(32)
_LOST = "no session with this sid and key: open another"
_ENDS: dict[EndReason, tuple[type[ErrataError], str]] = {
    "closed": (SessionClosed, "the session was closed by its owner; its episodes stay readable"),
    "expired": (SessionExpired, "the session expired; its episodes stay readable: open another"),
    "lost": (SessionLost, "the session is lost; what was committed stays readable: open another"),
}

LOOK_AGAIN_S = 0.05
"""Least time until a detached session is looked at again that has a request running."""


class Attachments:
    """The sessions in memory, those that are looked for, and the sockets they are attached to.

    Args:
        config: Limits.
        out: Where effects and messages go.
        deliver: Takes a message that was parked, in its turn.

    Attributes:
        sessions: By sid; those that are only looked for are not among them.
    """

    def __init__(self, config: ServerConfig, out: Out, deliver: Callable[[Message, float], None]) -> None:
        self.config = config
        self._out = out
        self._deliver = deliver
        self.sessions: dict[str, ServerSession] = {}
        self._sought: dict[tuple[str, bytes, str | None], ServerSession] = {}
        self._timers: list[tuple[float, int, ServerSession]] = []
        self._order = count()

    def disconnect(self, connection: ServerConnection, now: float) -> None:
        """Detach the sessions of a lost socket."""
        connection.lost = True
        for session in connection.sessions.values():
            if session.state in (State.ATTACHED, State.DETACHED) and session.connection is not connection:
                continue
            step = transition(Role.SERVER, session.state, Event.SOCKET_LOST)
            session.state = step.next
            if step.action is Action.DETACH:
                self._detach(session, now)
        connection.sessions.clear()

    def arrive(self, arrival: Arrival, now: float) -> None:
        """Take an open or resume: attach the session, look for it, or wait with it."""
        connection = arrival.connection
        key_hash = hash_key(arrival.sid, arrival.key)
        session = self.sessions.get(arrival.sid)
        own = session is not None and session.principal == connection.principal
        known = session.key_hash if session is not None and own else _NO_HASH
        if not hmac.compare_digest(known, key_hash) or session is None:
            place = (arrival.sid, key_hash, connection.principal)
            session = self._sought.get(place)
            if session is None:
                session = self._sought[place] = ServerSession(arrival.sid, key_hash, connection.principal)
        elif not self._may_attach(session, arrival):
            return
        step = transition(Role.SERVER, session.state, Event.OPEN if arrival.making else Event.RESUME)
        session.state = step.next
        if step.action is Action.ATTACH:
            self._attach(session, arrival)
            return
        connection.sessions.setdefault(arrival.sid, session)  # what follows on this socket waits with it
        if step.action is Action.PARK:
            session.parked.append(arrival)
            return
        session.origin = arrival
        session.group = arrival.group
        self._out.effects.append(Find(session, step.action is Action.MAKE))

    def _may_attach(self, session: ServerSession, arrival: Arrival) -> bool:
        """Refuse an arrival that came too late, or that knows more than this server."""
        refusal = self._unfit(session, arrival)
        if refusal is None:
            return True
        connection = arrival.connection
        if session.connection is not connection:
            self._unlink(session, connection)
        self._out.error(connection, refusal, arrival.sid)
        return False

    def _unfit(self, session: ServerSession, arrival: Arrival) -> ErrataError | None:
        if arrival.fence is not None and (
            arrival.fence < session.fence
            or (arrival.fence == session.fence and arrival.connection is not session.connection)
        ):
            way = "without one" if session.fence == MAX_ID else "with a higher one"  # which the wire could not carry
            return NotAttached(
                f"another socket was attached under fence {session.fence}: resume {way} to take it over",
                fence=session.fence,
            )
        if arrival.last > session.done:
            return SessionLost(
                f"the resume acknowledges request {arrival.last}, and this server answered none after {session.done}: "
                "the end of its journal is lost; open another session",
                next_id=session.next_id,
                eid=session.eid,
                t=session.t,
            )
        return None

    def _attach(self, session: ServerSession, arrival: Arrival) -> None:
        connection, old = arrival.connection, session.connection
        if old is not connection:
            if old is not None:
                old.sessions.pop(session.sid, None)
                old.behind.pop(session.sid, None)
                self._out.detached(old, session.sid, "taken_over")
            session.connection = connection
            connection.sessions[session.sid] = session
            for pending in session.queue:
                pending.release()
                pending.hold(connection)
        session.fence = min(session.fence + 1, MAX_ID) if arrival.fence is None else arrival.fence
        self.acknowledge(session, arrival.last, arrival.last_seq)
        session.inherited = session.next_id - 1
        session.sent = session.acked if arrival.making else arrival.last
        session.seq_sent = session.acked_seq if arrival.making else min(arrival.last_seq, session.seq)
        session.recall = session.recall_pushes = None  # what an earlier attachment waits for is not this one's
        head = {"sid": session.sid, "type": "opened" if arrival.making else "resumed"}
        self._out.send(connection, session.sid, write_envelope(head, session.position()))
        self._out.flush(session)
        self._out.flush_pushes(session)

    def acknowledge(self, session: ServerSession, last: int, last_seq: int) -> None:
        """Forget what the client has, here and, by an effect, in the journal."""
        if session.acknowledge(last, last_seq):
            self._out.effects.append(Forget(session, session.acked, session.acked_seq))

    def _detach(self, session: ServerSession, now: float) -> None:
        session.connection = None
        session.recall = session.recall_pushes = None
        session.detached_at = now
        if not session.timed and session.recovery != "none":
            session.timed = True
            heapq.heappush(self._timers, (self._due(session), next(self._order), session))

    def _due(self, session: ServerSession) -> float:
        return max(session.detached_at, session.last_reply_at) + self.config.limits.detach_ttl_s

    def found(self, effect: Find, stored: Stored, now: float) -> None:
        """Take a session that the shell found or made."""
        session = effect.session
        if stored.status != "open":
            self._over(session, stored, stored.status, now)
            return
        session.next_id, session.done = stored.next_id, stored.next_id - 1
        session.eid, session.t, session.seq = stored.eid, stored.t, stored.seq
        session.recovery, session.group = stored.recovery, stored.group or session.group
        arrival = self._found_for(session)
        lost = arrival.connection.lost
        self.sessions[session.sid] = session
        if not lost and not self._may_attach(session, arrival):
            lost = True
        session.state = transition(Role.SERVER, session.state, Event.FOUND_ALONE if lost else Event.FOUND).next
        if lost:
            self._detach(session, now)
        else:
            self._attach(session, arrival)
        self._replay(session, now)

    def refused(self, effect: Find, error: ErrataError, now: float) -> None:
        """Take that the shell neither found nor made a session."""
        session = effect.session
        arrival = self._found_for(session)
        session.state = transition(Role.SERVER, session.state, Event.REFUSED).next
        self._unlink(session, arrival.connection)
        if isinstance(error, SessionLost):
            error = SessionLost(_LOST)  # one text, whatever was wrong
        self._out.error(arrival.connection, error, session.sid)
        self._replay(session, now)

    def _found_for(self, session: ServerSession) -> Arrival:
        arrival, session.origin = session.origin, None
        if arrival is None or self._sought.pop((session.sid, session.key_hash, session.principal), None) is not session:
            raise LocalProtocolError("a session was found twice, or was not looked for")
        return arrival

    def _over(self, session: ServerSession, stored: Stored, reason: EndReason, now: float) -> None:
        """Tell the owner that the session is over, and what it missed before."""
        arrival = self._found_for(session)
        session.state = transition(Role.SERVER, session.state, Event.REFUSED).next
        self._unlink(session, arrival.connection)
        cls, text = _ENDS[reason]
        told = cls(text, next_id=stored.next_id, eid=stored.eid, t=stored.t)
        self._out.error(arrival.connection, told, session.sid)
        session.inherited = stored.next_id - 1
        if not arrival.connection.lost:
            self._out.part(session, arrival.last + 1, Told(arrival.connection, stored.next_id - 1))
        self._replay(session, now)

    def _unlink(self, session: ServerSession, *connections: ServerConnection) -> None:
        """Take a session off sockets that waited for it."""
        for connection in (*connections, *(item.connection for item in session.parked)):
            if connection.sessions.get(session.sid) is session:
                del connection.sessions[session.sid]

    def _replay(self, session: ServerSession, now: float) -> None:
        """Play what was parked again, in order."""
        parked, session.parked = session.parked, []
        for item in parked:
            if isinstance(item, Message):
                item.connection.in_flight -= 1
            if item.connection.lost:
                continue
            if isinstance(item, Message):
                try:
                    self._deliver(item, now)
                except InvalidEnvelope as error:
                    envelope = item.envelope
                    told = {"id": optional(envelope.id), "q": optional(envelope.q), "index": item.index}
                    self._out.error(item.connection, error, session.sid, **told)
            else:
                self.arrive(item, now)

    def tick(self, now: float) -> None:
        """Hibernate what has been detached for long enough; see `next_timer`."""
        while self._timers and self._timers[0][0] <= now:
            _, _, session = heapq.heappop(self._timers)
            session.timed = False
            if session.state is not State.DETACHED:
                continue
            due = self._due(session)
            if session.queue:  # what runs is not the journal's yet, however short the time is that sessions are kept
                due = max(due, now + max(self.config.limits.detach_ttl_s, LOOK_AGAIN_S))
            if due > now:
                session.timed = True
                heapq.heappush(self._timers, (due, next(self._order), session))
                continue
            session.state = transition(Role.SERVER, session.state, Event.TTL).next
            self._out.effects.append(Hibernate(session))

    def next_timer(self) -> float | None:
        """Return when to call `tick`, None if nothing waits."""
        return self._timers[0][0] if self._timers else None

    def slept(self, effect: Hibernate, now: float) -> None:
        """Take that a session's environment is closed: it is the journal's now."""
        session = effect.session
        if session.state is State.HIBERNATING:
            self._forget(session, Event.SLEPT)
            self._replay(session, now)

    def _forget(self, session: ServerSession, event: Event) -> None:
        session.state = transition(Role.SERVER, session.state, event).next
        del self.sessions[session.sid]
        self._unlink(session)

    def bury(self, session: ServerSession, reason: EndReason, *, told: bool, now: float) -> None:
        """End a session: answer what is queued, behind the replies that are still due.

        Args:
            session: In memory.
            reason: Why.
            told: Send ``detached``: its socket does not know by a reply.
            now: As everywhere.
        """
        connection = session.connection
        cls, text = _ENDS[reason]
        self._forget(session, Event.ENDED)
        refused: dict[int, ErrataError] = {}
        for pending in session.queue:
            pending.release()
            refused[pending.id] = cls(text, eid=session.eid, t=session.t)
        session.queue.clear()
        if connection is not None:
            connection.sessions.pop(session.sid, None)
            session.connection = None
            end = Told(connection, session.done, refused, reason if told else None)
            self._out.part(session, session.sent + 1, end)
        self._replay(session, now)

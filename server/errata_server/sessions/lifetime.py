"""`Lifetime`: attaches and detaches sockets; hibernates, evicts, expires and closes sessions (PROTOCOL A3, D12)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from errata_protocol.errors import SessionUnknown

from ..concurrency.fair_lock import Turn
from ..concurrency.owned_tasks import OwnedTasks
from ..environments.placement import EnvironmentFactory
from ..environments.signatures import says_concurrent
from ..journal.base import Record, SessionChange, SessionStatus
from ..runtime.capacity import Room, Share
from ..runtime.runtime import Runtime
from .session import Session
from .table import SessionTable


class DetachedElsewhere(Protocol):
    """Sessions without a socket that another module keeps: those of multiplexed sockets."""

    def oldest(self, room: Room) -> Session | None:
        """Return the one detached longest whose instance can be taken, where that frees a place of ``room``."""

    def soon_free(self, room: Room) -> bool:
        """Return whether `oldest` would return one if its request had ended."""

    def lost(self, session: Session) -> None:
        """Called when the instance of a session was taken that cannot be continued without it."""


class Lifetime:
    """Ends the sessions of one environment, or their instances: in time, for another session, for good.

    Args:
        runtime: Journal, clock and settings.
        environment: Name under which sessions are journaled.
        factory: Makes its instances.
        room: How many instances there may be.
        table: The sessions.
        tasks: Runs what must not end with its caller.
        session_timeout_s: After so long without a socket a session is ended, as upstream does; None keeps it.

    Attributes:
        multiplexed: The detached sessions of multiplexed sockets; set by their door.
    """

    def __init__(
        self,
        runtime: Runtime,
        environment: str,
        factory: EnvironmentFactory,
        room: Room,
        table: SessionTable,
        tasks: OwnedTasks,
        session_timeout_s: float | None,
    ) -> None:
        self._runtime = runtime
        self._environment = environment
        self._factory = factory
        self._room = room
        self._table = table
        self._tasks = tasks
        self.session_timeout_s = session_timeout_s
        self.multiplexed: DetachedElsewhere | None = None
        runtime.relievers.append(self._evict_oldest)

    def attach(self, session: Session, socket: object) -> None:
        """Tie a session to the one socket that speaks for it.

        Raises:
            SessionUnknown: Another socket is attached.
        """
        if session.attached is not None:
            raise SessionUnknown(f"Session {session.sid} already has an attached WebSocket")
        self._table.hold(session)
        session.attached = socket
        session.was_attached = True
        session.detached_at = None
        self._table.detached.pop(session.sid, None)

    async def detach(self, session: Session, socket: object) -> None:
        """Detach a session from its socket, which is gone (PROTOCOL A3): close it, or keep it for ``detach_ttl_s``."""
        if session.attached is not socket:
            return
        session.attached = None
        if session.closing or not session.given_out:
            # To its end, also where the socket's task is cancelled.
            await asyncio.shield(self._tasks.start(self.close(session)))
            return
        self.keep_idle(session)

    def keep_idle(self, session: Session) -> None:
        """Start the timers after which a given-out session without a socket is hibernated, or ended as upstream does.

        Each request of a session that has no socket starts them anew.
        """
        if session.closed:
            return
        for timer in session.timers:
            timer.cancel()
        session.detached_at = since = object()
        self._table.hold(session)
        self._table.detached.pop(session.sid, None)
        self._table.detached[session.sid] = session  # at the end: the oldest is evicted first
        loop = asyncio.get_running_loop()
        ends = [(self._runtime.settings.detach_ttl_s, self.hibernate)]
        if self.session_timeout_s is not None:
            ends.append((self.session_timeout_s, self.close))
        session.timers = [loop.call_later(after_s, self._after_idle, session, since, end) for after_s, end in ends]

    def _after_idle(self, session: Session, since: object, end: Callable[..., Coroutine[Any, Any, None]]) -> None:
        if session.detached_at is since:
            self._tasks.start(end(session, since))

    async def hibernate(self, session: Session, since: object | None = None) -> None:
        """Close the environment of a detached session; its row and layers stay, and the next request wakes it.

        Args:
            session: Which one.
            since: Only if it is still detached since then.
        """
        async with session.lock as turn:
            if since is not None and session.detached_at is not since:
                return
            idle = session.detached_at is not None or session.multiplexed
            if session.recoverable and idle and (host := session.take_host(turn)) is not None:
                await host.close()
            if session.host is None and session.attached is None and idle and not session.multiplexed:
                self._let_sleep(turn, session)

    def _let_sleep(self, turn: Turn, session: Session) -> None:
        """Forget a session whose row holds all that is to be known; requests that wait for its lock still hold it."""
        if session.closed or not session.committed or self.session_timeout_s is not None:
            return  # in the last case a timer of its own ends it
        self._table.let_sleep(session)

    async def sleep(self, session: Session) -> None:
        """Close the environment of a session without a socket and forget it; its row and layers stay."""
        async with session.lock as turn:
            host = session.take_host(turn)
            if host is not None:
                await host.close()
            self._table.forget(session)

    async def _evict(self, session: Session) -> None:
        """Take a detached session's instance for another session: it sleeps, or is lost if it cannot wake again."""
        self._runtime.metrics.evicted(self._environment, "hibernated" if session.recoverable else "lost")
        if session.recoverable:
            await self.hibernate(session)
            return
        why = "it was detached and its place was needed"
        session.lost = session.lost_message(why)
        async with session.lock as turn:
            host = session.take_host(turn)
            if host is not None:
                await host.close()
            if session.committed:
                await self._runtime.journal.commit(SessionChange(session.sid, status="lost", lost=why))
            self._table.forget(session)
        if session.multiplexed and self.multiplexed is not None:
            self.multiplexed.lost(session)

    async def close(
        self,
        session: Session,
        since: object | None = None,
        *,
        status: SessionStatus = "closed",
        with_records: Sequence[Record] = (),
    ) -> None:
        """End a session for good; its episodes stay readable. Waits for a request that runs. Idempotent.

        Args:
            session: Which one.
            since: Only if it is still detached since then.
            status: How it ended.
            with_records: To commit together with its end.
        """
        async with session.lock as turn:
            if session.closed or (since is not None and session.detached_at is not since):
                return
            session.closed = True
            host = session.take_host(turn)
            if host is not None:
                await host.close()
            ended = [SessionChange(session.sid, status=status)] if session.lost is None else []  # a lost one stays lost
            if session.committed and (ended or with_records):
                await self._runtime.journal.commit(*ended, *with_records)
            self._runtime.metrics.ended(self._environment, status if session.lost is None else "lost")
            # Only now: until its row says so, a request that looks it up must find that it is closed.
            self._table.forget(session)

    async def make_room(self, room: Room) -> None:
        """Return when ``room`` has a place, taking instances of detached sessions for it.

        Raises:
            CapacityReached: There is none, and no detached session's instance can be taken.
        """
        while room.full:
            for relieve in self._runtime.relievers:
                if await relieve(room):
                    break
            else:
                self._runtime.metrics.refused(self._environment, room.full_of)
                raise room.refusal(takes_several=self._takes_several(), soon_free=self._soon_free(room))

    def share_of(self, principal: str | None) -> Room:
        """Return where an instance of a principal's session is counted."""
        return Share(self._room, self._runtime.room_of(principal))

    def _takes_several(self) -> bool:
        """Return whether the environment class allows several instances."""
        made = next((session.host.env for session in self._table.live.values() if session.host is not None), None)
        return says_concurrent(made if made is not None else self._factory)

    def _soon_free(self, room: Room) -> bool:
        """Return whether a place of ``room`` may be free soon: a session has it that has no socket or is being opened.

        The one gives its place up when its request ends; the other when its opening fails.
        """
        return any(
            (
                session.opening
                or (
                    session.host is not None
                    and session.attached is None
                    and not session.multiplexed
                    and session.lock.busy
                    and (session.recoverable or session.was_attached)
                )
            )
            and room.freed_by(session.room)
            for session in self._table.live.values()
        ) or (self.multiplexed is not None and self.multiplexed.soon_free(room))

    async def _evict_oldest(self, room: Room) -> bool:
        """Evict the oldest detached session whose place helps ``room``; return whether there was one."""
        detached = next(
            (
                s
                for s in self._table.detached.values()
                if s.host is not None
                and not s.lock.busy
                and (s.recoverable or s.was_attached)
                and room.freed_by(s.room)
            ),
            None,
        )
        if detached is None and self.multiplexed is not None:
            detached = self.multiplexed.oldest(room)
        if detached is None:
            return False
        await self._evict(detached)
        return True

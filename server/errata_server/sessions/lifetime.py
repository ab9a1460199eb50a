"""Base class of `Sessions`: attaches and detaches sockets; hibernates, evicts and expires (PROTOCOL A3, D12)."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from errata_protocol.errors import SessionUnknown

from ..journal.base import Record, SessionChange, SessionStatus
from ..runtime.capacity import Room
from ..runtime.runtime import Runtime
from .session import Session

T = TypeVar("T")


class Idle(Protocol):
    """Sessions that nobody speaks for, kept elsewhere."""

    def oldest(self, room: Room) -> Session | None:
        """Return the one whose instance another session may have, where that frees a place of ``room``."""

    def soon_free(self, room: Room) -> bool:
        """Say whether `oldest` would return one if its request had ended."""

    def lost(self, session: Session) -> None:
        """Take that its instance was taken, and it cannot be continued."""


@dataclass(eq=False, slots=True)
class _Search:
    outdated: set[str] = field(default_factory=set)


class Idling:
    """The half of `sessions.Sessions` that lets sessions go: for a while, for another's sake, for good.

    Args:
        runtime: Journal, clock and settings.
        environment: Name under which sessions are journaled.
        session_timeout_s: After so long without a socket a session is ended, as upstream does; None keeps it.
    """

    def __init__(self, runtime: Runtime, environment: str, session_timeout_s: float | None) -> None:
        self.runtime = runtime
        self.environment = environment
        self.session_timeout_s = session_timeout_s
        self._live: dict[str, Session] = {}
        self._asleep: weakref.WeakValueDictionary[str, Session] = weakref.WeakValueDictionary()
        """Sessions without an instance that somebody else holds: nothing here keeps them, their rows are enough. As
        long as one is held, whoever looks for it gets the same."""
        self._detached: dict[str, Session] = {}  # in the order of their detaching
        self.multiplexed: Idle | None = None
        """Those that sockets of many sessions have let go of."""
        self._owned: set[asyncio.Task[Any]] = set()
        self._searches: dict[str, list[_Search]] = {}
        runtime.relievers.append(self._relieve)

    def attach(self, session: Session, socket: object) -> None:
        """Tie a session to the one socket that speaks for it.

        Raises:
            SessionUnknown: Another socket is attached.
        """
        if session.attached is not None:
            raise SessionUnknown(f"Session {session.sid} already has an attached WebSocket")
        self.hold(session)
        session.attached = socket
        session.was_attached = True
        session.detached_at = None
        self._detached.pop(session.sid, None)

    def held(self, sid: str) -> Session | None:
        """Return the session of an id as this process has it, whoever's it is; None where only its row may be."""
        return self._live.get(sid) or self._asleep.get(sid)

    def hold(self, session: Session) -> None:
        """Keep a session in memory: it has a socket or an instance, or is about to."""
        if not session.closed:
            self._live[session.sid] = session

    async def detach(self, session: Session, socket: object) -> None:
        """Let go of a session whose socket is gone (PROTOCOL A3): destroyed, or kept for ``detach_ttl_s``."""
        if session.attached is not socket:
            return
        session.attached = None
        if session.closing or not session.given_out:
            await asyncio.shield(self.own(self.close(session)))  # to its end, also where the socket's task is cancelled
            return
        self.keep_idle(session)

    def keep_idle(self, session: Session) -> None:
        """Start the times after which a given-out session without a socket is hibernated, or ended as upstream does.

        Each request of a session that has no socket starts them anew.
        """
        if session.closed:
            return
        for timer in session.timers:
            timer.cancel()
        session.detached_at = since = object()
        self.hold(session)
        self._detached.pop(session.sid, None)
        self._detached[session.sid] = session  # at the end: the oldest is evicted first
        loop = asyncio.get_running_loop()
        ends = [(self.runtime.settings.detach_ttl_s, self.hibernate)]
        if self.session_timeout_s is not None:
            ends.append((self.session_timeout_s, self.close))
        session.timers = [loop.call_later(after_s, self._after_idle, session, since, end) for after_s, end in ends]

    def _after_idle(self, session: Session, since: object, end: Callable[..., Coroutine[Any, Any, None]]) -> None:
        if session.detached_at is since:
            self.own(end(session, since))

    async def hibernate(self, session: Session, since: object | None = None) -> None:
        """Close the environment of a detached session; its row and layers stay, and the next request wakes it.

        Args:
            session: Which one.
            since: Only if it is still detached since then.
        """
        async with session.turn:
            if since is not None and session.detached_at is not since:
                return
            idle = session.detached_at is not None or session.multiplexed
            if session.recoverable and session.host is not None and idle:
                host, session.host = session.host, None
                await host.close()
            if session.host is None and session.attached is None and idle and not session.multiplexed:
                self._let_sleep(session)

    def _let_sleep(self, session: Session) -> None:
        """Forget a session whose row says all there is to say. In its turn; who waits for that still holds it."""
        if session.closed or not session.committed or self.session_timeout_s is not None:
            return  # in the last case a timer of its own ends it
        self.forget(session)
        self._asleep[session.sid] = session

    async def sleep(self, session: Session) -> None:
        """Close the environment of a session and let go of it; its row and layers stay. For what nobody speaks for."""
        async with session.turn:
            host, session.host = session.host, None
            if host is not None:
                await host.close()
            self.forget(session)

    async def _evict(self, session: Session) -> None:
        """Take a detached session's instance away for another's: it sleeps, or is lost if it cannot wake again."""
        self.runtime.metrics.evicted(self.environment, "hibernated" if session.recoverable else "lost")
        if session.recoverable:
            await self.hibernate(session)
            return
        why = "it was detached and its place was needed"
        session.lost = session.lost_message(why)
        async with session.turn:
            host, session.host = session.host, None
            if host is not None:
                await host.close()
            if session.committed:
                await self.runtime.journal.commit(SessionChange(session.sid, status="lost", lost=why))
            self.forget(session)
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
        async with session.turn:
            if session.closed or (since is not None and session.detached_at is not since):
                return
            session.closed = True
            host, session.host = session.host, None
            if host is not None:
                await host.close()
            ended = [SessionChange(session.sid, status=status)] if session.lost is None else []  # a lost one stays lost
            if session.committed and (ended or with_records):
                await self.runtime.journal.commit(*ended, *with_records)
            self.runtime.metrics.ended(self.environment, status if session.lost is None else "lost")
            # Only now: until its row says so, a request that looks it up must find that it is closed.
            self.forget(session)

    def forget(self, session: Session) -> None:
        """Let go of a session that is over, or never began."""
        for timer in session.timers:
            timer.cancel()
        session.timers.clear()  # they name the session
        if self._live.get(session.sid) is session:
            del self._live[session.sid]
        if self._asleep.get(session.sid) is session:
            del self._asleep[session.sid]
        self._detached.pop(session.sid, None)
        for search in self._searches.get(session.sid, ()):
            search.outdated.add(session.sid)

    @contextlib.contextmanager
    def search(self, sids: Collection[str]) -> Iterator[set[str]]:
        """Read the rows of sessions within: those named in the end were let go of meanwhile, and have to be read again.

        A row that says "open" may be read before a session ends and looked at after it: the session would go on.
        """
        search = _Search()
        for sid in sids:
            self._searches.setdefault(sid, []).append(search)
        try:
            yield search.outdated
        finally:
            for sid in sids:
                self._searches[sid].remove(search)
                if not self._searches[sid]:
                    del self._searches[sid]

    async def _make_room(self, room: Room) -> None:
        while room.full:
            for relieve in self.runtime.relievers:
                if await relieve(room):
                    break
            else:
                self.runtime.metrics.refused(self.environment, room.full_of)
                raise room.refusal(takes_several=self._takes_several(), soon_free=self._soon_free(room))

    def _takes_several(self) -> bool:
        """Say whether the environment class allows several instances."""
        raise NotImplementedError

    def _soon_free(self, room: Room) -> bool:
        """Say whether a session has a place that helps ``room`` perhaps not for long.

        It has no socket, and its place is free when its request ends; or it is being opened, which may fail.
        """
        return any(
            (
                session.opening
                or (
                    session.host is not None
                    and session.attached is None
                    and not session.multiplexed
                    and session.turn.busy
                    and (session.recoverable or session.was_attached)
                )
            )
            and room.freed_by(session.room)
            for session in self._live.values()
        ) or (self.multiplexed is not None and self.multiplexed.soon_free(room))

    async def _relieve(self, room: Room) -> bool:
        """Take the place of a detached session, the oldest, where that helps ``room``; return whether there was one."""
        detached = next(
            (
                s
                for s in self._detached.values()
                if s.host is not None
                and not s.turn.busy
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

    def own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``work`` in a task that goes on when whoever waits for it (shielded) is gone."""
        task = asyncio.get_running_loop().create_task(work)
        self._owned.add(task)
        task.add_done_callback(self._owned.discard)
        return task

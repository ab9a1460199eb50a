"""`Lifetime`: attaches and detaches sockets; runs idle timers; hibernates, evicts and closes sessions; makes capacity
for new ones (PROTOCOL A3, D12)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from errata_protocol.errors import SessionUnknown

from ..concurrency.fair_lock import Held
from ..concurrency.owned_tasks import OwnedTasks
from ..environments.placement import EnvironmentFactory
from ..environments.signatures import supports_concurrency
from ..journal.base import Record, SessionChange, SessionStatus
from ..runtime.capacity import Capacity, SharedCapacity
from ..runtime.runtime import Runtime
from .session import Session
from .table import SessionTable


class DetachedElsewhere(Protocol):
    """The detached sessions of multiplexed sockets, which another module keeps."""

    def __len__(self) -> int:
        """Return how many of them hold an instance."""

    def oldest(self, capacity: Capacity) -> Session | None:
        """Return the longest detached session whose eviction frees ``capacity`` (`Capacity.freed_by`), or None."""

    def soon_free(self, capacity: Capacity) -> bool:
        """Return whether `oldest` could return a session once a running request has ended."""

    def lost(self, session: Session) -> None:
        """Called when a session was lost because its instance was evicted and cannot be restored."""


class Lifetime:
    """Attaches, detaches, hibernates, evicts and closes the sessions of one environment.

    Args:
        runtime: Journal, clock and settings.
        environment: Name under which sessions are journaled.
        factory: Creates its instances.
        capacity: Limit and current number of the environment's instances.
        table: The sessions in memory.
        tasks: Runs work that must go on when its caller is cancelled.
        session_timeout_s: Seconds without a socket after which a session is closed, as upstream does; None for never.
        multiplexed: The detached sessions of multiplexed sockets; None without such a door.
    """

    def __init__(
        self,
        runtime: Runtime,
        environment: str,
        factory: EnvironmentFactory,
        capacity: Capacity,
        table: SessionTable,
        tasks: OwnedTasks,
        session_timeout_s: float | None,
        multiplexed: DetachedElsewhere | None = None,
    ) -> None:
        self._runtime = runtime
        self._environment = environment
        self._factory = factory
        self._capacity = capacity
        self._table = table
        self._tasks = tasks
        self.session_timeout_s = session_timeout_s
        self._multiplexed = multiplexed

    def detached(self) -> int:
        """Return how many sessions have no socket and hold an instance."""
        return len(self._table.detached) + (len(self._multiplexed) if self._multiplexed is not None else 0)

    def attach(self, session: Session, socket: object) -> None:
        """Attach a session to a socket, the only one that may send its requests.

        Raises:
            SessionUnknown: Another socket is attached.
        """
        if session.attached is not None:
            raise SessionUnknown(f"Session {session.sid} already has an attached WebSocket")
        self._table.hold(session)
        session.attached = socket
        session.was_attached = True
        session.detached_at = None
        self._runtime.attached.add(session.sid, tell=session.eid is not None)
        self._table.detached.pop(session.sid, None)

    async def detach(self, session: Session, socket: object) -> None:
        """Detach a session from its closed socket: close it, or keep it for ``detach_ttl_s`` (PROTOCOL A3)."""
        if session.attached is not socket:
            return
        session.attached = None
        ends = session.closing or not session.resumable
        self._runtime.attached.discard(session.sid, tell=session.eid is not None and not (ends or session.closed))
        if ends:
            # Must complete even if the socket's task is cancelled.
            await asyncio.shield(self._tasks.start(self.close(session)))
            return
        self.keep_idle(session)

    def keep_idle(self, session: Session) -> None:
        """Start, or restart, the idle timers of a session without a socket.

        After ``detach_ttl_s`` the session is hibernated. After ``session_timeout_s``, if set, it is closed. Neither
        happens if a socket was attached, or the timers were restarted, in between. The session also becomes the last
        that is evicted for another. A closed session is left alone.
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
        """Close the environment of a detached session; it stays in the journal, and the next request restores it.

        Args:
            session: The session.
            since: Do nothing unless the session is still detached since then; None to skip this check.
        """
        async with session.lock as held:
            if since is not None and session.detached_at is not since:
                return
            idle = session.detached_at is not None or session.multiplexed
            if session.recoverable and idle and (host := session.take_host(held)) is not None:
                await host.close()
            if session.host is None and session.attached is None and idle and not session.multiplexed:
                self._let_sleep(held, session)

    def _let_sleep(self, held: Held, session: Session) -> None:
        """Drop the table's reference to a session that its row describes fully; waiting requests still refer to it."""
        if session.closed or not session.committed or self.session_timeout_s is not None:
            return  # with a session timeout, its own timer closes it
        self._table.let_sleep(session)

    async def sleep(self, session: Session) -> None:
        """Close the environment of a session without a socket, and remove it from memory; it stays in the journal."""
        async with session.lock as held:
            host = session.take_host(held)
            if host is not None:
                await host.close()
            self._table.forget(session)

    async def _evict(self, session: Session) -> None:
        """Free a detached session's instance for another session: hibernate it, or lose it if it is not recoverable."""
        self._runtime.metrics.evicted(self._environment, "hibernated" if session.recoverable else "lost")
        if session.recoverable:
            await self.hibernate(session)
            return
        why = "it was detached and its place was needed"
        session.lost = session.lost_message(why)
        async with session.lock as held:
            host = session.take_host(held)
            if host is not None:
                await host.close()
            if session.committed:
                await self._runtime.store.commit(SessionChange(session.sid, status="lost", lost=why))
            self._table.forget(session)
        if session.multiplexed and self._multiplexed is not None:
            self._multiplexed.lost(session)

    async def close(
        self,
        session: Session,
        since: object | None = None,
        *,
        status: SessionStatus = "closed",
        with_records: Sequence[Record] = (),
    ) -> None:
        """Close a session permanently, after a running request; its episodes stay readable. Idempotent.

        Args:
            session: The session.
            since: Do nothing unless the session is still detached since then; None to skip this check.
            status: Final status to journal.
            with_records: Records to commit together with the status.
        """
        async with session.lock as held:
            if session.closed or (since is not None and session.detached_at is not since):
                return
            session.closed = True
            host = session.take_host(held)
            if host is not None:
                await host.close()
            ended = [SessionChange(session.sid, status=status)] if session.lost is None else []  # a lost one stays lost
            if session.committed and (ended or with_records):
                try:
                    await self._runtime.store.commit(*ended, *with_records)
                except BaseException:
                    session.closed = False  # its row is open: the close has to be asked for again
                    raise
            self._runtime.metrics.ended(self._environment, status if session.lost is None else "lost")
            # Not earlier: until the row has the status, a lookup must find this closed session.
            self._table.forget(session)

    async def ensure_capacity(self, capacity: Capacity) -> None:
        """Evict detached sessions, longest detached first, until ``capacity`` is not full.

        Raises:
            CapacityReached: It is full, and no detached session can be evicted.
        """
        while capacity.full:
            if not await self._runtime.live_sessions.evict_for(capacity):
                self._runtime.metrics.refused(self._environment, capacity.full_of)
                raise capacity.refusal(takes_several=self._takes_several(), soon_free=self._soon_free(capacity))

    def share_of(self, principal: str | None) -> Capacity:
        """Return the capacity that counts an instance of a principal's session."""
        return SharedCapacity(self._capacity, self._runtime.quotas.instances(principal))

    def _takes_several(self) -> bool:
        """Return whether the environment class allows several instances."""
        made = next((session.host.env for session in self._table.live.values() if session.host is not None), None)
        return supports_concurrency(made if made is not None else self._factory)

    def _soon_free(self, capacity: Capacity) -> bool:
        """Return whether ``capacity`` may soon no longer be full.

        A detached session can be evicted when its request ends; a session being opened may fail to open.
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
            and capacity.freed_by(session.capacity)
            for session in self._table.live.values()
        ) or (self._multiplexed is not None and self._multiplexed.soon_free(capacity))

    async def evict_oldest(self, capacity: Capacity) -> bool:
        """Evict the longest detached session that counts in ``capacity``; return whether there was one."""
        detached = next(
            (
                s
                for s in self._table.detached.values()
                if s.host is not None
                and not s.lock.busy
                and (s.recoverable or s.was_attached)
                and capacity.freed_by(s.capacity)
            ),
            None,
        )
        if detached is None and self._multiplexed is not None:
            detached = self._multiplexed.oldest(capacity)
        if detached is None:
            return False
        await self._evict(detached)
        return True

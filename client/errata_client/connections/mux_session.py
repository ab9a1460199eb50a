"""`MuxSession`: one session on a `Connection`: its requests and their outcomes, timeouts, retries, tickets.

A request whose caller timed out or was cancelled is cancelled on the server. If that comes too late, it runs, and its
outcome still moves `t`. A session's requests run in order, so the next request runs after it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from errata_protocol.errors import (
    CODES,
    ErrataError,
    LocalProtocolError,
)
from errata_protocol.labels import NO_LABELS, Labels
from errata_protocol.mux import (
    Answered,
    Attached,
    ClientEvent,
    ClientRequest,
    ClientSession,
    Failed,
    Pushed,
    Refused,
    Replied,
    SessionEnded,
    TakenOver,
    hash_key,
)
from errata_protocol.mux.records import ReadKind, RequestKind
from errata_protocol.read_keys import read_key
from errata_protocol.shards import named, shard_of

from .connection import Connection
from .outcome import Done, Outcome, copy_of, ignore_outcome, resolve, taken_over_error
from .stats import SessionStats
from .ticket import Ticket

RETRY_S = 0.2
"""Wait before the first retry of a request, where the server names none, seconds; doubles with each retry."""

_log = logging.getLogger("errata.client")


class MuxSession:
    """A session of one client. `open` opens it.

    Args:
        connection: The connection that it uses.
        stats: Counters to increment.
        delivered: Called with each delivery once, in order; also those of abandoned requests, and those that a ticket's
            earlier process requested.
        moved: Called with (eid, t) when a session that was continued by a ticket is further than its deliveries.
        rewarded: Called with the payload of each pushed reward, once, in order.
        retries: How often a request is sent again after an infrastructure failure that the server rolled back.
        ends: Whether the session ends with its client and with the connection.
        ticket: Continue this session instead of opening one.
        labels: Returns the labels that an open or a reset is to have.
        shard: Returns the name of the server's data directory, which the session's id is to name; None for none.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        stats: SessionStats,
        delivered: Callable[[Replied], None],
        moved: Callable[[str, int], None],
        rewarded: Callable[[bytes], None],
        retries: int,
        ends: bool,
        ticket: Ticket | None = None,
        labels: Callable[[], Labels] = lambda: NO_LABELS,
        shard: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.connection = connection
        self.stats = stats
        self.ends = ends
        self.ended: ErrataError | None = None
        """Why the session ended; None while it has not."""
        self._delivered, self._moved, self._rewarded = delivered, moved, rewarded
        self._retries = retries
        self._ticket = ticket
        self._labels = labels
        self._shard = shard
        self._session: ClientSession | None = None
        self._waiting: dict[ClientRequest, Done] = {}
        self._tried: dict[ClientRequest, int] = {}
        self._attached = False
        self._taken_over = False
        self._caught_up = ticket is None
        self._position: tuple[int, str | None, int | None] = (0, None, None)
        self._refusal: ErrataError | None = None
        self._changed: list[asyncio.Future[None]] = []

    @property
    def is_live(self) -> bool:
        """Whether it was opened, and neither ended nor was taken over."""
        return self._session is not None and self.ended is None and not self._taken_over

    @property
    def read_key(self) -> str | None:
        """What opens its episodes on a server without tokens; None while it has no session."""
        session = self._session
        return read_key(hash_key(session.sid, session.key)) if session is not None else None

    def _last_refusal(self) -> ErrataError | None:
        return self._refusal

    # -- life --------------------------------------------------------------------------------------------------------

    async def open(self, timeout_s: float) -> None:
        """Open the session, or resume that of the ticket, and wait until the server has confirmed it.

        Raises:
            ErrataError: The server refused for good, e.g. SESSION_LOST, or until ``timeout_s`` was over, e.g.
                CAPACITY_REACHED.
            ConnectionError: The server cannot be reached.
            TimeoutError: The server did not answer within ``timeout_s``.
        """
        self.connection.enter()
        self._check()
        if self._session is None:
            machine, ticket = self.connection.machine, self._ticket
            if ticket is None:
                group = self.connection.group if self.ends else None
                sid = named(self._shard(), secrets.token_urlsafe(24))
                session = machine.open(sid, secrets.token_urlsafe(24), group, self._labels())
            else:
                session = machine.adopt(ticket["sid"], ticket["key"], last=ticket["last"], last_seq=ticket["last_seq"])
            self._session = session
            self.connection.attach(session, self)
        await self._until(lambda: self._attached, timeout_s, "the session was not opened")

    def adopt_child(self, session: ClientSession) -> None:
        """Use the session that a fork made; the state machine resumes it without a further call."""
        self._session = session
        self.connection.attach(session, self)

    async def settle(self, timeout_s: float) -> None:
        """Wait until every request has an outcome; first take the session back if another process took it over.

        Raises:
            ErrataError: The session ended.
            TimeoutError: A request has no outcome after ``timeout_s``.
        """
        self.connection.enter()
        self._check()
        if self._taken_over and self._session is not None:
            self._taken_over = False
            self.connection.machine.claim(self._session)
            self.connection.schedule_send()
        await self._until(
            lambda: self._attached and not self._waiting, timeout_s, "a request of the session is still without outcome"
        )

    async def end(self, timeout_s: float = 2.0) -> None:
        """End the session on the server and `leave` it. A server that cannot be reached ends it when it expires.

        Args:
            timeout_s: How long to wait for the reply. The session ends also where the reply comes later, for example
                because a step is still running.
        """
        if self._session is None or self.ended is not None:
            return
        closed: asyncio.Future[Replied] = asyncio.get_running_loop().create_future()
        try:
            # Not `ask`, which would cancel the close on the server when the time is over.
            self.begin("close", b"{}", partial(resolve, closed))
            async with asyncio.timeout(timeout_s):
                await closed
        except (ErrataError, OSError) as error:
            _log.debug("no reply to the close of a session: %r", error)
        finally:
            self.leave()

    def leave(self) -> None:
        """Remove the session from its connection and fail waiting requests. It stays on the server, detached."""
        session, self._session = self._session, None
        self._attached = False
        if session is not None and self.ended is None:
            self.ended = LocalProtocolError("the session was left: open another, or resume it with its ticket")
            self.connection.forget(session)
        self._fail_all(LocalProtocolError("the session was left while a request was waiting"))

    def ticket(self) -> Ticket:
        """Return a ticket with which another process can continue the session.

        From then on, closing this client leaves the session open on the server.

        Returns:
            The session's id, secret and position; keep it secret.

        Raises:
            ErrataError: The session is not open, was taken over, or ended.
        """
        session = self._live()
        self.ends = False
        return Ticket(version=1, sid=session.sid, key=session.key, last=session.last, last_seq=session.last_seq)

    # -- requests ----------------------------------------------------------------------------------------------------

    def begin(
        self, kind: RequestKind, data: bytes, done: Done, condition: tuple[int, str | None] | None = None
    ) -> ClientRequest:
        """Send a request without waiting for its outcome.

        Args:
            kind: Type of the request.
            data: Its ``data``, JSON.
            done: Called once, with the reply or the exception.
            condition: (t, eid) at which the session has to be for the request to run.

        Raises:
            ErrataError: The session is not open, was taken over, or ended; or ``data`` is too long for the protocol.
        """
        connection = self.connection
        connection.enter()
        session = self._live()
        labels = (self._labels() or None) if kind == "reset" else None
        request = connection.machine.request(session, kind, data, condition=condition, labels=labels)
        self._waiting[request] = done
        self.stats.requests += 1
        connection.schedule_send()
        return request

    def abandon(self, request: ClientRequest) -> bool:
        """Cancel a request whose caller no longer waits. Its callback is not called any more.

        Returns:
            Whether it surely has no effect, because it was not sent yet or was refused.
        """
        if request not in self._waiting or self._session is None:
            return False
        self.stats.abandoned += 1
        self._waiting[request] = ignore_outcome
        refused = request in self._session.unsent
        if self.connection.machine.cancel(self._session, request):
            self._finish(request)
        self.connection.schedule_send()
        return refused

    async def ask(self, kind: RequestKind, data: bytes, timeout_s: float) -> Replied:
        """Send a request and return its reply.

        Raises:
            ErrataError: The recorded error of the request, why the session ended, or the server's last refusal, where
                it refused until ``timeout_s`` was over.
            TimeoutError: No reply within ``timeout_s``. The request was cancelled, the session goes on.
            ConnectionError: There was no socket for `Backoff.give_up_s`. Otherwise as TimeoutError.
        """
        replied: asyncio.Future[Replied] = asyncio.get_running_loop().create_future()
        request = self.begin(kind, data, partial(resolve, replied))
        return await self._outcome(request, replied, timeout_s)

    async def fork(
        self, t: int, eid: str | None, child: MuxSession, timeout_s: float, labels: Labels | None = None
    ) -> Replied:
        """Fork an episode of this session at ``t``; ``child`` becomes the new session and is waited for.

        If the caller is cancelled or gets an error, nobody has the child: it is ended as soon as it exists.

        Args:
            t: Delivery that is the child's t=0.
            eid: Episode of this session; None is the running one.
            child: A session that was not opened.
            timeout_s: For the fork, and again for attaching the child.
            labels: All labels of the child; None gives it the parent's.

        Raises:
            ErrataError, TimeoutError, ConnectionError: See `ask`.
        """
        self.connection.enter()
        session = self._live()
        machine = self.connection.machine
        sid = named(shard_of(session.sid), secrets.token_urlsafe(24))  # a fork is where its parent is
        request = machine.fork(session, t, sid, secrets.token_urlsafe(24), eid, labels)
        replied: asyncio.Future[Replied] = asyncio.get_running_loop().create_future()

        def adopt(outcome: Outcome) -> None:
            if not isinstance(outcome, Exception):
                child.adopt_child(machine.sessions[sid])
            resolve(replied, outcome)

        def discard(outcome: Outcome | None = None) -> None:
            if not isinstance(outcome, Exception) and sid in machine.sessions:
                child._session = None  # so that the child's door does not take it off the connection before its close
                self._end_unused(machine.sessions[sid])

        self._waiting[request] = adopt
        self.stats.requests += 1
        self.connection.schedule_send()
        try:
            reply = await self._outcome(request, replied, timeout_s)
            await child._until(lambda: child._attached, timeout_s, "the child of the fork was not attached")
        except BaseException:
            if request in self._waiting:  # its cancellation may come too late
                self._waiting[request] = discard
            else:
                discard()
            raise
        return reply

    def _end_unused(self, session: ClientSession) -> None:
        """End a session that no client has, and keep it on the connection until the server has answered."""
        unused = MuxSession(
            self.connection,
            stats=SessionStats(),
            delivered=lambda reply: None,
            moved=lambda eid, t: None,
            rewarded=lambda payload: None,
            retries=0,
            ends=True,
        )
        unused.adopt_child(session)
        with suppress(LocalProtocolError):  # the connection is closed
            unused.begin("close", b"{}", lambda outcome: unused.leave())

    async def read(self, kind: ReadKind, data: bytes, timeout_s: float) -> Answered:
        """Send a read, which does not wait for the session's requests, and return its answer.

        Raises:
            ErrataError: The answer is an error, or the session ended.
            TimeoutError: No answer within ``timeout_s``.
        """
        session = self._live()
        try:
            async with asyncio.timeout(timeout_s):
                return await self.connection.read(kind, session, data, timeout_s)
        except TimeoutError as error:
            raise TimeoutError(f"no answer to a {kind} read within message_timeout_s={timeout_s:g}") from error

    async def _outcome(self, request: ClientRequest, replied: asyncio.Future[Replied], timeout_s: float) -> Replied:
        try:
            with self.connection.waits.on(f"the reply to a {request.kind}", timeout_s, self._last_refusal):
                async with asyncio.timeout(timeout_s):
                    return await replied
        except TimeoutError as error:
            refusal = self._refusal
            if self.abandon(request) and refusal is not None:
                raise copy_of(refusal) from error
            raise TimeoutError(
                f"no reply to a {request.kind} within message_timeout_s={timeout_s:g}; it was cancelled, which may "
                "have come too late: await reattach() and compare t, or go on; the next request runs after it"
            ) from error
        except asyncio.CancelledError:
            replied.cancel()
            self.abandon(request)
            raise

    # -- called by the connection ------------------------------------------------------------------------------------

    def receive(self, event: ClientEvent) -> None:
        """Called with each event of the session, in order."""
        cls = type(event)
        if cls is Replied:
            self._take_reply(event)  # type: ignore[arg-type]
        elif isinstance(event, Failed):
            self._take_failure(event)
        elif isinstance(event, Attached):
            self._attached, self._taken_over, self._refusal = True, False, None
            self.stats.resumes += self._position[0] > 0
            self._position = (event.position.next_id, event.position.eid, event.position.t)
            self._catch_up()
        elif isinstance(event, Pushed):
            self.stats.rewards += 1
            try:
                self._rewarded(event.payload)
            except Exception:
                _log.exception("a callback for late rewards raised")
        elif isinstance(event, Refused):
            self.stats.refused[event.error.code] += 1
            self._refusal = event.error
        elif isinstance(event, TakenOver):
            self._attached, self._taken_over = False, True
            self._abandon_all(taken_over_error())
        elif isinstance(event, SessionEnded):
            self.ended = event.error
            self._attached = False
            self._fail_all(event.error)
        self._notify()

    def unreachable(self, error: Exception) -> None:
        """Called when there is no connection for now: fail all callers that wait, and cancel their requests."""
        self._attached = False
        self._abandon_all(error)
        self._notify(error)

    def _take_reply(self, event: Replied) -> None:
        outcome: Outcome = event
        self._refusal = None
        self.stats.replies += 1
        if event.t is not None:
            try:
                self._delivered(event)
            except ErrataError as error:
                outcome = error
        if event.request is not None:
            self._finish(event.request)(outcome)
        if not self._caught_up:
            self._catch_up()

    def _take_failure(self, event: Failed) -> None:
        request = event.request
        if event.recorded:
            self._refusal = None
            self.stats.replies += 1
        if request is not None and not self._try_again(request, event):
            self._finish(request)(copy_of(event.error))
        if not self._caught_up:
            self._catch_up()

    def _try_again(self, request: ClientRequest, event: Failed) -> bool:
        """Retry a request after a failure that the server rolled back; return whether it will be sent again.

        A request is not retried while others wait, because those after it may have run.
        """
        session, info = self._session, CODES.get(event.error.code)
        tried = self._tried.get(request, 0)
        if not event.recorded or info is None or not info.retryable or info.fault != "service" or session is None:
            return False
        if tried >= self._retries or len(self._waiting) > 1 or request.cancelled:
            return False  # later requests may have run, or the caller no longer waits
        self._tried[request] = tried + 1
        self.stats.retried[event.error.code] += 1
        retry_after = event.error.details.get("retry_after")
        wait_s = retry_after if isinstance(retry_after, int | float) else RETRY_S * 2**tried
        condition = request.condition
        if condition is None and request.kind != "reset" and session.t is not None:
            condition = (session.t, session.eid)  # requests that are sent during the wait may move the session
        asyncio.get_running_loop().call_later(wait_s, self._send_again, request, condition)
        return True

    def _send_again(self, request: ClientRequest, condition: tuple[int, str | None] | None) -> None:
        session = self._session
        if request not in self._waiting or session is None or self.ended is not None:
            return  # the session ended, and its callers got that error
        if request.cancelled:
            self._finish(request)
            self._notify()
            return
        self.connection.machine.request_again(session, request, condition)
        self.connection.schedule_send()

    def _catch_up(self) -> None:
        """Report the position of a session that was continued by a ticket, once all missed replies have arrived."""
        next_id, eid, t = self._position
        if not self._caught_up and self._session is not None and self._session.last >= next_id - 1:
            self._caught_up = True
            if eid is not None and t is not None:
                self._moved(eid, t)

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self.ended is not None:
            raise copy_of(self.ended)

    def _live(self) -> ClientSession:
        """Return the session in the state machine; raise if it is not open, was taken over, or ended."""
        self._check()
        if self._taken_over:
            raise taken_over_error()
        if self._session is None:
            raise LocalProtocolError("the session is not open yet: connect() first")
        return self._session

    def _finish(self, request: ClientRequest) -> Done:
        """Remove a request that has its outcome, and return its callback."""
        self._tried.pop(request, None)
        return self._waiting.pop(request, ignore_outcome)

    def _abandon_all(self, error: Exception) -> None:
        """Fail all waiting callers, and cancel their requests where that is still possible."""
        for request, done in list(self._waiting.items()):
            if not request.cancelled:
                self.abandon(request)
                done(copy_of(error))

    def _fail_all(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, {}
        self._tried.clear()
        for done in waiting.values():
            done(copy_of(error))

    async def _until(self, is_so: Callable[[], bool], timeout_s: float, what_not: str) -> None:
        """Wait until ``is_so()``, which is checked after every event; ``what_not`` is the text of the TimeoutError."""
        try:
            with self.connection.waits.on("a session", timeout_s, self._last_refusal):
                async with asyncio.timeout(timeout_s):
                    while not is_so():
                        self._check()
                        if self._taken_over:
                            raise taken_over_error()
                        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                        self._changed.append(changed)
                        self.connection.schedule_send()
                        await changed
        except TimeoutError as error:
            if self._refusal is not None:
                raise copy_of(self._refusal) from error
            raise TimeoutError(f"{what_not} within {timeout_s:g} s") from error
        self._check()

    def _notify(self, error: Exception | None = None) -> None:
        changed, self._changed = self._changed, []
        for future in changed:
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(copy_of(error))

"""One session on a `Connection`: requests and what becomes of them, deadlines, retries, tickets.

A request whose caller is gone (deadline, cancellation) is asked back from the server. Where that comes too late it runs
on, and its outcome still moves `t`; the session's requests run in order, so whatever is asked next runs behind it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from functools import partial

from errata_protocol.errors import (
    CODES,
    ErrataError,
    LocalProtocolError,
)
from errata_protocol.mux import (
    Answered,
    ClientEvent,
    ClientRequest,
    ClientSession,
    Failed,
    Opened,
    Pushed,
    Refused,
    Replied,
    SessionEnded,
    TakenOver,
)
from errata_protocol.mux.records import ReadKind, RequestKind

from .connection import Connection
from .outcome import Done, Outcome, nobody, raised_again, resolve, taken
from .stats import SessionStats
from .ticket import Ticket

RETRY_S = 0.2
"""Wait before a request is sent again whose failure was rolled back, where the server names none; doubles."""

_log = logging.getLogger("errata.client")


class MuxSession:
    """A session of one client.

    Args:
        connection: What carries it.
        stats: Where it counts.
        delivered: Takes each delivery once, in order, abandoned ones and those of a process before this one included.
        moved: Takes (eid, t) where an adopted session stands ahead of what was delivered here.
        rewarded: Takes the payload of each pushed reward, once, in order.
        retries: How often a request is sent again whose infrastructure failure the server rolled back.
        ends: The session ends with its client, and with the connection.
        ticket: Continue this session instead of opening one.
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
    ) -> None:
        self.connection = connection
        self.stats = stats
        self.ends = ends
        self.ended: ErrataError | None = None
        """Why it is over."""
        self._delivered, self._moved, self._rewarded = delivered, moved, rewarded
        self._retries = retries
        self._ticket = ticket
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

    # -- life --------------------------------------------------------------------------------------------------------

    async def open(self, timeout_s: float) -> None:
        """Open or adopt the session and wait until the server has it.

        Raises:
            ErrataError: The server refused: SESSION_LOST and its like for good, CAPACITY_REACHED and its like until
                ``timeout_s`` was over.
            ConnectionError: The server cannot be reached.
            TimeoutError: It did not answer in time.
        """
        self.connection.enter()
        self._check()
        if self._session is None:
            machine, ticket = self.connection.machine, self._ticket
            if ticket is None:
                group = self.connection.group if self.ends else None
                session = machine.open(secrets.token_urlsafe(24), secrets.token_urlsafe(24), group)
            else:
                session = machine.adopt(ticket["sid"], ticket["key"], last=ticket["last"], last_seq=ticket["last_seq"])
            self._session = session
            self.connection.attach(session, self)
        await self._until(lambda: self._attached, timeout_s, "the session was not opened")

    def adopt_child(self, session: ClientSession) -> None:
        """Take the child of a fork, which the machine resumes by itself."""
        self._session = session
        self.connection.attach(session, self)

    async def settle(self, timeout_s: float) -> None:
        """Wait until nothing is outstanding, taking the session back if another process took it over.

        Raises:
            ErrataError: The session is over.
            TimeoutError: A request is still running.
        """
        self.connection.enter()
        self._check()
        if self._taken_over and self._session is not None:
            self._taken_over = False
            self.connection.machine.claim(self._session)
            self.connection.stir()
        await self._until(
            lambda: self._attached and not self._waiting, timeout_s, "a request of the session is still without outcome"
        )

    async def end(self, timeout_s: float = 2.0) -> None:
        """End the session on the server, as far as it can be told."""
        if self._session is None or self.ended is not None:
            return
        try:
            await self.ask("close", b"{}", timeout_s)
        except (ErrataError, OSError) as error:
            _log.debug("a session was left to the server: %r", error)
        self.leave()

    def leave(self) -> None:
        """Forget the session here; on the server it stays, detached once its socket is gone."""
        session, self._session = self._session, None
        self._attached = False
        if session is not None and self.ended is None:
            self.ended = LocalProtocolError("the session was left: open another, or resume it with its ticket")
            self.connection.let_go(session)
        self._fail_all(LocalProtocolError("the session was left while a request was waiting"))

    def ticket(self) -> Ticket:
        """Return what another process needs to continue the session, which from now on does not end with its client.

        Raises:
            ErrataError: There is no session to continue.
        """
        session = self._live()
        self.ends = False
        return Ticket(version=1, sid=session.sid, key=session.key, last=session.last, last_seq=session.last_seq)

    # -- requests ----------------------------------------------------------------------------------------------------

    def begin(
        self, kind: RequestKind, data: bytes, done: Done, condition: tuple[int, str | None] | None = None
    ) -> ClientRequest:
        """Send a request; ``done`` is called once, with its reply or the exception.

        Raises:
            ErrataError: The session is over, was taken over, or ``data`` is nothing the wire can carry.
        """
        connection = self.connection
        connection.enter()
        session = self._live()
        request = connection.machine.request(session, kind, data, condition=condition)
        self._waiting[request] = done
        self.stats.requests += 1
        connection.stir()
        return request

    def abandon(self, request: ClientRequest) -> bool:
        """Ask a request back that nobody waits for any more.

        Returns:
            It has had and will have no effect: it was not sent, or refused.
        """
        if request not in self._waiting or self._session is None:
            return False
        self.stats.abandoned += 1
        self._waiting[request] = nobody
        refused = request in self._session.unsent
        if self.connection.machine.cancel(self._session, request):
            self._finish(request)
        self.connection.stir()
        return refused

    async def ask(self, kind: RequestKind, data: bytes, timeout_s: float) -> Replied:
        """Send a request and return its reply.

        Raises:
            ErrataError: The recorded error, why the session is over, or the last refusal if that was all.
            TimeoutError: No reply within ``timeout_s``; the request was asked back, the session goes on.
            ConnectionError: The server could not be reached for too long; likewise.
        """
        replied: asyncio.Future[Replied] = asyncio.get_running_loop().create_future()
        request = self.begin(kind, data, partial(resolve, replied))
        return await self._outcome(request, replied, timeout_s)

    async def fork(self, t: int, eid: str | None, child: MuxSession, timeout_s: float) -> Replied:
        """Fork an episode of this session, and give its session to ``child``.

        Raises:
            As `ask`.
        """
        self.connection.enter()
        session = self._live()
        machine = self.connection.machine
        sid = secrets.token_urlsafe(24)
        request = machine.fork(session, t, sid, secrets.token_urlsafe(24), eid)
        replied: asyncio.Future[Replied] = asyncio.get_running_loop().create_future()

        def adopt(outcome: Outcome) -> None:
            if not isinstance(outcome, Exception):
                child.adopt_child(machine.sessions[sid])
                if replied.done():  # nobody waits for it: it must not stay behind
                    child.begin("close", b"{}", nobody)
            resolve(replied, outcome)

        self._waiting[request] = adopt
        self.stats.requests += 1
        self.connection.stir()
        reply = await self._outcome(request, replied, timeout_s)
        await child._until(lambda: child._attached, timeout_s, "the child of the fork was not attached")
        return reply

    async def read(self, kind: ReadKind, data: bytes, timeout_s: float) -> Answered:
        """Ask a read, which waits for no request.

        Raises:
            ErrataError: The answer is an error, or the session is over.
            TimeoutError: No answer within ``timeout_s``.
        """
        session = self._live()
        try:
            async with asyncio.timeout(timeout_s):
                return await self.connection.read(kind, session, data)
        except TimeoutError as error:
            raise TimeoutError(f"no answer to a {kind} read within message_timeout_s={timeout_s:g}") from error

    async def _outcome(self, request: ClientRequest, replied: asyncio.Future[Replied], timeout_s: float) -> Replied:
        try:
            async with asyncio.timeout(timeout_s):
                return await replied
        except TimeoutError as error:
            refusal = self._refusal
            if self.abandon(request) and refusal is not None:
                raise raised_again(refusal) from error
            raise TimeoutError(
                f"no reply to a {request.kind} within message_timeout_s={timeout_s:g}; it was asked back and may still "
                "act: await reattach() to see by t, or go on, which runs behind it"
            ) from error
        except asyncio.CancelledError:
            replied.cancel()
            self.abandon(request)
            raise

    # -- what the connection tells -----------------------------------------------------------------------------------

    def take(self, event: ClientEvent) -> None:
        """Take an event of the session, in order."""
        cls = type(event)
        if cls is Replied:
            self._take_reply(event)  # type: ignore[arg-type]
        elif isinstance(event, Failed):
            self._take_failure(event)
        elif isinstance(event, Opened):
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
            self._abandon_all(taken())
        elif isinstance(event, SessionEnded):
            self.ended = event.error
            self._attached = False
            self._fail_all(event.error)
        self._tell()

    def unreachable(self, error: Exception) -> None:
        """Take that nothing is sent or received for now."""
        self._attached = False
        self._abandon_all(error)
        self._tell(error)

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
            self._finish(request)(raised_again(event.error))
        if not self._caught_up:
            self._catch_up()

    def _try_again(self, request: ClientRequest, event: Failed) -> bool:
        """Send a request again whose failure the server rolled back, if the session still stands where it did."""
        session, info = self._session, CODES.get(event.error.code)
        tried = self._tried.get(request, 0)
        if not event.recorded or info is None or not info.retryable or info.fault != "service" or session is None:
            return False
        if tried >= self._retries or len(self._waiting) > 1 or self._waiting.get(request, nobody) is nobody:
            return False  # what was asked behind it has run, or nobody wants it any more
        self._tried[request] = tried + 1
        self.stats.retried[event.error.code] += 1
        told = event.error.details.get("retry_after")
        wait_s = told if isinstance(told, int | float) else RETRY_S * 2**tried
        condition = request.condition
        if condition is None and request.kind != "reset" and session.t is not None:
            condition = (session.t, session.eid)  # now: what is asked during the wait may move it
        asyncio.get_running_loop().call_later(wait_s, self._send_again, request, condition)
        return True

    def _send_again(self, request: ClientRequest, condition: tuple[int, str | None] | None) -> None:
        session = self._session
        if request not in self._waiting or session is None or self.ended is not None:
            return  # the session ended, and who waited was told
        done, tried = self._waiting.pop(request), self._tried.pop(request)
        if done is nobody:
            self._tell()
            return
        again = self.connection.machine.request(session, request.kind, request.data, condition=condition)
        self._waiting[again], self._tried[again] = done, tried
        self.connection.stir()

    def _catch_up(self) -> None:
        """Say where an adopted session stands, once the replies it had missed are here."""
        next_id, eid, t = self._position
        if not self._caught_up and self._session is not None and self._session.last >= next_id - 1:
            self._caught_up = True
            if eid is not None and t is not None:
                self._moved(eid, t)

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self.ended is not None:
            raise raised_again(self.ended)

    def _live(self) -> ClientSession:
        """Return the session that requests go to."""
        self._check()
        if self._taken_over:
            raise taken()
        if self._session is None:
            raise LocalProtocolError("the session is not open yet: connect() first")
        return self._session

    def _finish(self, request: ClientRequest) -> Done:
        self._tried.pop(request, None)
        return self._waiting.pop(request, nobody)

    def _abandon_all(self, error: Exception) -> None:
        """Let nobody wait, and ask back what can be."""
        for request, done in list(self._waiting.items()):
            if done is not nobody:
                self.abandon(request)
                done(raised_again(error))

    def _fail_all(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, {}
        self._tried.clear()
        for done in waiting.values():
            done(raised_again(error))

    async def _until(self, is_so: Callable[[], bool], timeout_s: float, what_not: str) -> None:
        """Wait for a state of the session."""
        try:
            async with asyncio.timeout(timeout_s):
                while not is_so():
                    self._check()
                    if self._taken_over:
                        raise taken()
                    changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._changed.append(changed)
                    self.connection.stir()
                    await changed
        except TimeoutError as error:
            if self._refusal is not None:
                raise raised_again(self._refusal) from error
            raise TimeoutError(f"{what_not} within {timeout_s:g} s") from error
        self._check()

    def _tell(self, error: Exception | None = None) -> None:
        changed, self._changed = self._changed, []
        for future in changed:
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(raised_again(error))

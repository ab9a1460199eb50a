"""`Acceptor`: takes connections from the address that all workers share, and gives each to its worker.

The first line of the request is only peeked at: the worker that serves the connection still reads the whole request.
A connection of a named session or episode goes to its worker, another one to the worker that the board chooses. The
descriptor is sent over a socket pair (``SCM_RIGHTS``), which keeps it while the worker starts again. One that any
worker may serve is sent over another pair, and others take it from there where that worker's event loop does not run.
"""

from __future__ import annotations

import array
import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ..serve.connections import Connections
from .board import BEAT_S
from .member import Member
from .routes import of_head

log = logging.getLogger("errata.fleet")

AT_ONCE = 16
"""Connections that are accepted before the event loop gets a turn, so that other workers get some of a burst."""

HEAD_S = 20.0
"""Time for the first line of the first request to arrive, seconds."""

HEAD_BYTES = 16 * 1024
"""Longest first line that is looked at, bytes; the HTTP server refuses a longer one."""

PEEK_AGAIN_S = 0.005
"""Time until an incomplete line is looked at again, seconds: it stays readable, so readiness says nothing."""

BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\nretry-after: 1\r\n"
    b"content-length: 41\r\nconnection: close\r\n\r\nthis session's worker is busy: try again\n"
)
"""Answer where a worker takes no more connections, because it is stopped or starts for long."""

MakeProtocol = Callable[[], asyncio.Protocol]


class _Waiting:
    """A connection whose first line has not arrived; `Connections` counts it and may close it.

    Args:
        connection: The connection.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.task: asyncio.Task[None] | None = None
        self.transport = self  # what `Connections` asks of a transport

    def abort(self) -> None:
        """Close the connection."""
        if self.task is not None:
            self.task.cancel()

    def is_closing(self) -> bool:
        """Return whether it is closed."""
        return self.connection.fileno() < 0

    def get_write_buffer_size(self) -> int:
        """Return how many bytes wait to be sent."""
        return 0


class Acceptor:
    """One worker's end of the shared address.

    Args:
        member: The worker.
        connections: The worker's connections.
        serve: Makes the protocol of a client's connection.
        serve_other: Makes the protocol of another worker's connection.
        beaten: Called after each heartbeat.
    """

    def __init__(
        self,
        member: Member,
        connections: Connections,
        serve: MakeProtocol,
        serve_other: MakeProtocol,
        beaten: Callable[[], None],
    ) -> None:
        self._member = member
        self._connections = connections
        self._serve = serve
        self._serve_other = serve_other
        self._beaten = beaten
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._unplaced: set[asyncio.Task[None]] = set()
        self._coming = 0
        self._sockets: tuple[tuple[socket.socket, Callable[[], None]], ...] = (
            (member.plan.listening, self._accept),
            (member.plan.doors[member.worker], self._accept_other),
            *(
                (pairs[member.worker][1], partial(self._receive, pairs, member.worker))
                for pairs in (member.plan.inboxes, member.plan.placed)
            ),
        )

    def open(self) -> None:
        """Begin to take connections, and to write heartbeats."""
        for listening, ready in self._sockets:
            self._loop.add_reader(listening.fileno(), ready)
        self._beat()

    def close(self) -> None:
        """Take no further connections. Those that wait for their first line are closed."""
        for listening, _ in self._sockets:
            self._loop.remove_reader(listening.fileno())
        self._beating.cancel()
        self._member.plan.board.clear(self._member.worker)
        for task in self._tasks:
            task.cancel()

    def _beat(self) -> None:
        plan = self._member.plan
        plan.board.beat(self._member.worker, self._count)
        for other in range(plan.board.workers):
            if other != self._member.worker and not plan.board.is_alive(other):
                self._receive(plan.placed, other)
        self._beaten()
        self._beating = self._loop.call_later(BEAT_S, self._beat)

    @property
    def _count(self) -> int:
        """Number of connections that are this worker's: not those whose worker is not known yet."""
        return len(self._connections) - len(self._unplaced) + self._coming

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _accept(self) -> None:
        for connection in accepted(self._member.plan.listening):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            waiting = _Waiting(connection)
            if not self._connections.made(waiting):
                connection.close()
                continue
            waiting.task = self._spawn(self._route(waiting))
            self._unplaced.add(waiting.task)
            waiting.task.add_done_callback(self._unplaced.discard)

    def _accept_other(self) -> None:
        for connection in accepted(self._member.plan.doors[self._member.worker]):
            self._take(connection, self._serve_other)

    def _receive(self, pairs: Sequence[tuple[socket.socket, socket.socket]], worker: int) -> None:
        """Take connections that were handed over to a worker."""
        for connection in received(pairs[worker][1]):
            self._member.plan.board.pass_on(self._member.worker, worker, -1)
            self._take(connection, self._serve)

    async def _route(self, waiting: _Waiting) -> None:
        connection, member = waiting.connection, self._member
        try:
            head = await self._head(connection)
        except (OSError, TimeoutError, asyncio.CancelledError):
            connection.close()
            return
        finally:
            self._connections.lost(waiting)
            assert waiting.task is not None
            self._unplaced.discard(waiting.task)
        owner, pairs = of_head(head, member.names, member.sole), member.plan.inboxes
        if owner is None or member.plan.board.is_drained(owner):  # any worker answers MISDIRECTED for a drained one
            owner, pairs = member.plan.board.place(member.worker), member.plan.placed
        if owner == member.worker:
            self._take(connection, self._serve)
            return
        with connection:
            member.plan.board.pass_on(member.worker, owner, 1)
            try:
                descriptors = array.array("i", [connection.fileno()])
                pairs[owner][0].sendmsg(
                    [b"c"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)], socket.MSG_DONTWAIT
                )
            except OSError as error:
                member.plan.board.pass_on(member.worker, owner, -1)
                log.warning("worker %d takes no connections (%s): one for it was refused", owner, error)
                with suppress(OSError):
                    connection.send(BUSY)

    async def _head(self, connection: socket.socket) -> bytes:
        """Return what has arrived of a request once its first line is there, without taking it from the socket.

        Raises:
            OSError: The connection was closed.
            TimeoutError: The line has not arrived within `HEAD_S`.
        """
        async with asyncio.timeout(HEAD_S):
            readable = self._loop.create_future()
            self._loop.add_reader(connection.fileno(), _settle, readable)
            try:
                await readable
            finally:
                self._loop.remove_reader(connection.fileno())
            while True:
                head = connection.recv(HEAD_BYTES, socket.MSG_PEEK)
                if not head:
                    raise ConnectionResetError("closed before its first request")
                if b"\n" in head or len(head) >= HEAD_BYTES:
                    return head
                await asyncio.sleep(PEEK_AGAIN_S)

    def _take(self, connection: socket.socket, serve: MakeProtocol) -> None:
        """Serve a connection, and count it at once, so that those of a burst spread."""
        self._coming += 1
        self._member.plan.board.tell(self._member.worker, self._count)
        self._spawn(self._adopt(connection, serve))

    async def _adopt(self, connection: socket.socket, serve: MakeProtocol) -> None:
        try:
            await self._loop.connect_accepted_socket(serve, connection)
        except OSError:
            connection.close()
        finally:
            self._coming -= 1


def _settle(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)


def received(inbox: socket.socket) -> list[socket.socket]:
    """Take connections that other workers have handed over, at most `AT_ONCE`."""
    found: list[socket.socket] = []
    for _ in range(AT_ONCE):
        try:
            _, sent, _, _ = inbox.recvmsg(1, socket.CMSG_SPACE(array.array("i").itemsize))
        except BlockingIOError:
            break
        for _, _, data in sent:
            connection = socket.socket(fileno=array.array("i", data)[0])
            connection.setblocking(False)
            found.append(connection)
    return found


def accepted(listening: socket.socket) -> list[socket.socket]:
    """Accept connections that wait, at most `AT_ONCE`."""
    found: list[socket.socket] = []
    for _ in range(AT_ONCE):
        try:
            connection, _ = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            break
        except OSError as error:  # no descriptors left: those that wait are accepted later
            log.warning("no connection could be accepted: %s", error)
            break
        connection.setblocking(False)
        found.append(connection)
    return found

"""`Connections`: counts a server's connections and limits them, so that file descriptors do not run out.

An idle connection costs its client nothing and the server a descriptor. At the limit, a new connection replaces the one
that has waited longest for a request, before any authentication: a flood of silent connections closes its own, and a
connection that sends a request at once is answered. WebSockets may not use the last few places, so that ``/ready`` and
other routes answer even when all other places are taken.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Protocol

from ..runtime.metrics import Metrics

log = logging.getLogger("errata.server")

RESERVED_FOR_HTTP = 16
"""Places that WebSockets may not use; a quarter of all places if that is less."""

WARNING_INTERVAL_S = 60.0
"""Shortest time between two warnings that places are short, seconds."""

UNBOUNDED = 2**31


class Connection(Protocol):
    """An asyncio protocol object of a connection."""

    transport: Any
    """The asyncio transport of the connection."""


class Connections:
    """The open connections of one server.

    Args:
        limit: Largest number of connections.

    Attributes:
        max_sockets: Largest number of WebSockets among them.
        closed: Number of connections closed to make room, or refused, since the start.
    """

    def __init__(self, limit: int = UNBOUNDED) -> None:
        self.limit = limit
        self.max_sockets = limit - min(RESERVED_FOR_HTTP, limit // 4)
        self.closed = 0
        self._all: set[Connection] = set()
        self._sockets: set[Connection] = set()
        self._without_request: dict[Connection, None] = {}  # since they were made, the oldest first
        self._idle: dict[Connection, None] = {}  # between two requests, the longest idle first
        self._warned_at = -WARNING_INTERVAL_S

    def __len__(self) -> int:
        return len(self._all)

    @classmethod
    def of(cls, config: Any) -> Connections:
        """Return the ``connections`` attribute of a `uvicorn.Config`; set it without a limit if it is missing."""
        found: Connections | None = getattr(config, "connections", None)
        if found is None:
            found = config.connections = cls()
        return found

    def show(self, metrics: Metrics) -> None:
        """Add the number of connections, and of those closed for lack of places, to a server's metrics."""
        metrics.gauge("errata_connections", "Open connections, WebSockets among them.", lambda: len(self))
        metrics.counter(
            "errata_connections_closed_total",
            "Connections closed or refused because there were too many.",
            lambda: self.closed,
        )

    def made(self, connection: Connection) -> bool:
        """Count a new connection.

        At the limit, the connection that has waited longest for a request is closed in its place.

        Returns:
            False if no connection could be closed: the caller has to close the new one, which is not counted.
        """
        if len(self._all) >= self.limit:
            self.closed += 1
            self._warn()
            idle = self._longest_idle()
            if idle is None:
                return False
            self.lost(idle)
            idle.transport.abort()
        self._all.add(connection)
        self._without_request[connection] = None
        return True

    def request_received(self, connection: Connection) -> None:
        """Note that a request has arrived: the connection is not closed to make room."""
        self._without_request.pop(connection, None)
        self._idle.pop(connection, None)

    def request_answered(self, connection: Connection) -> None:
        """Note that the request was answered: the connection may be closed to make room while it waits for another."""
        if connection in self._all and not connection.transport.is_closing():
            self._idle[connection] = None

    def upgraded(self, socket: Connection) -> None:
        """Count a WebSocket. The HTTP connection that it replaces has to be removed with `lost`."""
        self._all.add(socket)
        self._sockets.add(socket)

    def lost(self, connection: Connection) -> None:
        """Remove a connection that has ended."""
        self.request_received(connection)
        self._all.discard(connection)
        self._sockets.discard(connection)

    @property
    def full(self) -> bool:
        """Whether there is no place for another WebSocket."""
        return len(self._sockets) >= self.max_sockets

    def trouble(self) -> str | None:
        """Return a message if there is no place for another WebSocket, else None."""
        if not self.full:
            return None
        return (
            f"all {self.max_sockets} places for WebSockets are taken: multiplex sessions over fewer sockets, or "
            "raise the limit of open files (ulimit -n)"
        )

    def refuse(self) -> None:
        """Count a WebSocket that the caller refuses."""
        self.closed += 1
        self._warn()

    def _longest_idle(self) -> Connection | None:
        for connection in self._without_request:
            return connection
        for connection in self._idle:
            if connection.transport.get_write_buffer_size() == 0:  # else its answer is not all sent
                return connection
        return None

    def _warn(self) -> None:
        now = time.monotonic()
        if now - self._warned_at < WARNING_INTERVAL_S:
            return
        self._warned_at = now
        log.warning(
            "%d connections are open (%d WebSockets), as many as the limit of open files allows: those that wait "
            "longest for a request are closed for new ones. Raise the limit (ulimit -n) if these are your clients",
            len(self._all),
            len(self._sockets),
        )

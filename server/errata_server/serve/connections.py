"""`Connections`: counts a server's connections and bounds them, so that none takes the last descriptor.

A connection without a request costs its client nothing and the server a descriptor. Where there are as many as
`Connections.most`, a new one takes the place of the one that has waited longest for a request, before anybody is
authenticated: a flood of silent connections closes its own, and a request that comes at once is answered. The last few
places are never a WebSocket's: ``/ready`` and the other routes answer also where all others are taken.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Protocol

from ..runtime.metrics import Metrics

log = logging.getLogger("errata.server")

FOR_REQUESTS = 16
"""Places that no WebSocket takes; a quarter of all where these are few."""

SAID_S = 60.0
"""How often the log says that places are short."""

UNBOUNDED = 2**31


class Connection(Protocol):
    """A connection's protocol object."""

    transport: Any
    """Its transport, from asyncio."""


class Connections:
    """Those of one server.

    Args:
        most: How many there may be at a time.

    Attributes:
        most_sockets: How many of them may be WebSockets.
        closed: Connections that were closed to make room, or refused, since the start.
    """

    def __init__(self, most: int = UNBOUNDED) -> None:
        self.most = most
        self.most_sockets = most - min(FOR_REQUESTS, most // 4)
        self.closed = 0
        self._all: set[Connection] = set()
        self._sockets: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}  # for their first request, the oldest first
        self._kept: dict[Connection, None] = {}  # between two requests, likewise
        self._said_at = -SAID_S

    def __len__(self) -> int:
        return len(self._all)

    @classmethod
    def of(cls, config: Any) -> Connections:
        """Return those of a server with this `uvicorn.Config`; unbounded where nobody gave it any."""
        found: Connections | None = getattr(config, "connections", None)
        if found is None:
            found = config.connections = cls()
        return found

    def show(self, metrics: Metrics) -> None:
        """Add them to a server's metrics."""
        metrics.gauge("errata_connections", "Open connections, WebSockets among them.", lambda: len(self))
        metrics.counter(
            "errata_connections_closed_total",
            "Connections closed or refused because there were too many.",
            lambda: self.closed,
        )

    def made(self, connection: Connection) -> bool:
        """Count a new connection; where places are short, close another, or say False: it has to be closed itself."""
        if len(self._all) >= self.most:
            self.closed += 1
            self._say()
            idle = self._longest_idle()
            if idle is None:
                return False
            self.lost(idle)
            idle.transport.abort()
        self._all.add(connection)
        self._waiting[connection] = None
        return True

    def busy(self, connection: Connection) -> None:
        """A request of this one has come: it is not closed for another."""
        self._waiting.pop(connection, None)
        self._kept.pop(connection, None)

    def idle(self, connection: Connection) -> None:
        """This one was answered, and waits for its next request."""
        if connection in self._all and not connection.transport.is_closing():
            self._kept[connection] = None

    def upgraded(self, socket: Connection) -> None:
        """Count a WebSocket; the connection that it was before is `lost`."""
        self._all.add(socket)
        self._sockets.add(socket)

    def lost(self, connection: Connection) -> None:
        """This one is over."""
        self.busy(connection)
        self._all.discard(connection)
        self._sockets.discard(connection)

    @property
    def full(self) -> bool:
        """No further WebSocket has a place."""
        return len(self._sockets) >= self.most_sockets

    def trouble(self) -> str | None:
        """Say that no further WebSocket has a place; None while one has."""
        if not self.full:
            return None
        return (
            f"all {self.most_sockets} places for WebSockets are taken: multiplex sessions over fewer sockets, or "
            "raise the limit of open files (ulimit -n)"
        )

    def refuse(self) -> None:
        """Count a WebSocket that is refused."""
        self.closed += 1
        self._say()

    def _longest_idle(self) -> Connection | None:
        for connection in self._waiting:
            return connection
        for connection in self._kept:
            if connection.transport.get_write_buffer_size() == 0:  # else its answer is not all sent
                return connection
        return None

    def _say(self) -> None:
        now = time.monotonic()
        if now - self._said_at < SAID_S:
            return
        self._said_at = now
        log.warning(
            "%d connections are open (%d WebSockets), as many as the limit of open files allows: those that wait "
            "longest for a request are closed for new ones. Raise the limit (ulimit -n) if these are your clients",
            len(self._all),
            len(self._sockets),
        )

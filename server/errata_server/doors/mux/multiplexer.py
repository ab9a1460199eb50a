"""`Multiplexer`: the multiplexed sessions of one environment. Connects sockets, driver and handlers.

A frame goes socket -> `ProtocolDriver.receive` -> state machine -> effects. The handler of an effect does its I/O and
passes the outcome to the driver, whose next effects include `Write`; that wakes the socket, which sends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVarTuple

from starlette.websockets import WebSocket

from errata_protocol.capabilities import Capabilities
from errata_protocol.errors import NotSupported
from errata_protocol.mux import (
    AnswerRead,
    FindSession,
    ForgetReplies,
    Hibernate,
    ReadPushes,
    ReadReplies,
    RecordError,
    RunRequest,
    ServerConfig,
    ServerConnection,
    ServerSession,
    Write,
)
from errata_protocol.mux.state import State

from ...episodes.episodes import Episodes
from ...ids import MULTIPLEXED
from ...journal.base import RewardRow
from ...runtime.rewards import push_data
from ...sessions.sessions import Sessions
from ..asgi_extensions import set_message_bounds
from ..mcp import McpDoor
from .detached import DetachedSessions
from .driver import ProtocolDriver, SocketHandle, journal_sid, wire_sid
from .lifetime import SessionLifetime
from .lookup import SessionLookup
from .reads import ReadRunner
from .requests import RequestRunner
from .translation import RequestDecoder

Args = TypeVarTuple("Args")

RETURN_S = 1.0
"""``retry_after`` of ``goaway``, seconds: how long another server process needs to start."""

POLL_S = 0.02
"""Interval at which `drain` checks whether everything is answered, seconds."""


class Multiplexer:
    """All multiplexed sessions of one environment. It runs on one event loop, that of the sockets.

    Args:
        config: Configuration of the state machine.
        sessions: The environment's sessions.
        detached: Lists the sessions that have no socket.
        episodes: Reads and forks of the journal.
        decoder: Decodes requests.
        mcp: Answers tools/list.
        capabilities: Returns what the environment offers.
    """

    def __init__(
        self,
        config: ServerConfig,
        sessions: Sessions,
        detached: DetachedSessions,
        episodes: Episodes,
        decoder: RequestDecoder,
        mcp: McpDoor,
        capabilities: Callable[[], Capabilities],
    ) -> None:
        runtime = sessions.runtime
        self._settings, self._quotas = runtime.settings, runtime.quotas
        self._with_socket = runtime.attached
        self.driver = driver = ProtocolDriver(config, self._attached)
        self.connections: set[ServerConnection] = set()
        self._lifetime = lifetime = SessionLifetime(driver, sessions, detached)
        self._lookup = lookup = SessionLookup(driver, sessions, lifetime)
        self._requests = requests = RequestRunner(driver, sessions, lifetime, decoder, episodes.forks)
        reads = ReadRunner(driver, sessions, lifetime, episodes.reads, mcp, capabilities)
        driver.handle_with(
            {
                Write: self._write,
                RunRequest: requests.run,
                RecordError: requests.record,
                FindSession: lookup.find,
                ReadReplies: reads.read_replies,
                ReadPushes: reads.read_pushes,
                AnswerRead: reads.read,
                Hibernate: lifetime.hibernate,
                ForgetReplies: lambda effect: None,  # rows are deleted by retention
            }
        )

    def set_bounds(self, websocket: WebSocket, principal: str | None) -> None:
        """Set the bounds of a socket's messages. Call it before the socket is accepted."""
        set_message_bounds(websocket, self._settings.max_frame, self._quotas.unfinished(principal))

    def connect(self, principal: str | None, handle: SocketHandle) -> ServerConnection:
        """Connect a new socket.

        Args:
            principal: Who opened it.
            handle: The socket.

        Returns:
            The state machine's side of the connection.

        Raises:
            NotSupported: Sockets of another event loop are connected.
        """
        loop = asyncio.get_running_loop()
        if not self.driver.runs_on(loop):
            if self.connections:
                raise NotSupported("multiplexed sockets of another event loop are connected: use one server")
            self.driver.move_to(loop)
        connection = self.driver.protocol.connect(principal, handle, self._quotas.unfinished(principal))
        self.connections.add(connection)
        return connection

    def disconnect(self, connection: ServerConnection) -> None:
        """Disconnect a socket; its sessions are kept for ``detach_ttl_s``."""
        self.connections.discard(connection)
        left = [machine for machine in connection.sessions.values() if machine.connection is connection]
        self.driver.disconnect(connection)
        socket: SocketHandle = connection.handle  # type: ignore[assignment]  # given to `connect`
        for machine in left:
            self._requests.left(machine, socket.reader)
            self._lifetime.detach(machine)

    def _attached(self, machine: ServerSession) -> None:
        tell = machine.eid is not None and machine.state in (State.ATTACHED, State.DETACHED)
        change = self._with_socket.discard if machine.connection is None else self._with_socket.add
        change(journal_sid(machine.sid), tell=tell)

    def _write(self, effect: Write) -> None:
        handle: SocketHandle = effect.connection.handle  # type: ignore[assignment]  # given to `connect`
        handle.wake()

    def reward_committed(self, sid: str, row: RewardRow) -> None:
        """Push a committed late reward to its session. It may be called on any event loop."""
        if row.seq is not None:
            self._on_own_loop(self._push, wire_sid(sid), row.seq, push_data(row))

    def _push(self, sid: str, seq: int, data: bytes) -> None:
        self._lookup.pushed(sid, seq)
        self.driver.pushed(sid, seq, data)

    def session_ended(self, sid: str) -> None:
        """Tell a session's client that another door ended it, e.g. with its episode; plain sessions are ignored.

        It may be called on any event loop.
        """
        if sid.startswith(MULTIPLEXED):  # a client may have chosen the id of a plain session as its sid
            self._on_own_loop(self._lifetime.ended_elsewhere, sid)

    def _on_own_loop(self, call: Callable[[*Args], None], *args: *Args) -> None:
        """Call ``call(*args)`` on the loop of the sockets, at once if that is running; not at all without one."""
        if not self.driver.has_loop or self.driver.loop.is_closed():
            return
        if self.driver.runs_on(asyncio.get_running_loop()):
            call(*args)
        else:
            self.driver.loop.call_soon_threadsafe(call, *args)

    async def drain(self) -> None:
        """Admit no more requests; return when all that were admitted are answered and sent (PROTOCOL D8)."""
        self.driver.go_away(RETURN_S)
        while self._busy():  # noqa: ASYNC110 - once in a server's life, and many events can end it
            await asyncio.sleep(POLL_S)

    def _busy(self) -> bool:
        return any(machine.queue for machine in self.driver.protocol.in_memory()) or any(
            connection.has_data for connection in self.connections
        )

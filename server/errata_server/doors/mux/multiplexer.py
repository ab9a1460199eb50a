"""`Multiplex`: connects sockets to the mux state machine, gives each effect its handler; hibernation and drain.

The state machine of `errata_protocol.mux` decides what is admitted, in which order, and what is answered; sessions run
it and the journal keeps it. Everything here happens on one event loop, the one of the sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.websockets import WebSocket

from errata_protocol.capabilities import Capabilities
from errata_protocol.errors import FrameTooLarge, NotSupported, Overloaded
from errata_protocol.mux import (
    Find,
    Forget,
    Hibernate,
    Read,
    Recall,
    RecallPushes,
    Record,
    Run,
    ServerConnection,
    Write,
)

from ...episodes.episodes import Episodes
from ...journal.base import RewardRow
from ...runtime.capacity import Room
from ...runtime.rewards import push_data
from ...sessions.session import Session
from ...sessions.sessions import Sessions
from ..asgi_extensions import answers_unread
from ..mcp import McpDoor
from .lookup import Finding
from .reads import Reads
from .requests import Answers
from .shell import PREFIX, Door, MuxShell
from .translation import Reading

RETURN_S = 1.0
"""When clients of a server that stops shall come again: another process needs about so long to start."""

LOOK_S = 0.02
"""How often a server that stops looks whether all is answered."""


class Multiplex:
    """All multiplexed sessions of one environment.

    Args:
        sessions: The environment's sessions.
        episodes: Reads and forks of the journal.
        reading: Reads requests.
        mcp: Answers what JSON-RPC reads.
        capabilities: What a probe is answered.
        production: No state(t), no fork (PROTOCOL F1).
    """

    def __init__(
        self,
        sessions: Sessions,
        episodes: Episodes,
        reading: Reading,
        mcp: McpDoor,
        capabilities: Callable[[], Capabilities],
        *,
        production: bool,
    ) -> None:
        self._sessions = sessions
        shell = self._shell = MuxShell(sessions, production=production)
        self.protocol = shell.protocol
        self._connections: set[ServerConnection] = set()
        finding = self._finding = Finding(shell)
        answers = Answers(shell, reading, episodes.forks)
        reads = Reads(shell, episodes.reads, mcp, capabilities)
        shell.perform = {
            Write: self._write,
            Run: answers.run,
            Record: answers.record,
            Find: finding.find,
            Recall: reads.recall,
            RecallPushes: reads.recall_pushes,
            Read: reads.read,
            Hibernate: self._hibernate,
            Forget: lambda effect: None,  # retention decides what the journal forgets
        }
        sessions.lifetime.multiplexed = self
        shell.runtime.drains.append(self.drain)
        shell.runtime.rewards.on_pushed.append(self._pushed)

    # -- sockets ----------------------------------------------------------------------------------------------------

    def bound(self, websocket: WebSocket, principal: str | None) -> None:
        """Set the bounds of a socket's messages; before it is accepted."""
        runtime = self._shell.runtime
        answers_unread(websocket, runtime.settings.max_frame, runtime.unfinished_of(principal))

    def connect(self, principal: str | None, handle: Door) -> ServerConnection:
        """Take a new socket.

        Args:
            principal: Who opened it.
            handle: The socket.

        Raises:
            NotSupported: Sockets of another event loop are connected.
        """
        loop = asyncio.get_running_loop()
        if self._shell.loop is not loop:
            if self._connections:
                raise NotSupported("multiplexed sockets of another event loop are connected: use one server")
            self._shell.move_to(loop)
        connection = self.protocol.connect(principal, handle, self._shell.runtime.unfinished_of(principal))
        self._connections.add(connection)
        return connection

    def receive(self, connection: ServerConnection, frame: bytes | str) -> None:
        """Take a frame. Whatever is wrong with it is answered."""
        self._shell.do(self.protocol.receive(connection, frame, self._shell.now()))

    def unread(self, connection: ServerConnection, why: FrameTooLarge | Overloaded) -> None:
        """Take that a frame came that was not kept; its sender is told ``why``."""
        self._shell.do(self.protocol.unread(connection, why))

    def disconnect(self, connection: ServerConnection) -> None:
        """Let go of a socket; its sessions are kept for ``detach_ttl_s``."""
        self._connections.discard(connection)
        left = [mine for mine in connection.sessions.values() if mine.connection is connection]
        self._shell.do(self.protocol.disconnect(connection, self._shell.now()))
        for mine in left:
            self._shell.keep_idle(mine)

    def drained(self, connection: ServerConnection) -> None:
        """Take that a socket has room for replies that waited."""
        self._shell.do(self.protocol.drained(connection))

    async def drain(self) -> None:
        """Admit nothing more, and return when all that was admitted is answered and sent (PROTOCOL D8)."""
        self._shell.do(self.protocol.go_away(RETURN_S))
        while self._busy():  # noqa: ASYNC110 - once in a server's life, and its end has many causes
            await asyncio.sleep(LOOK_S)

    def _busy(self) -> bool:
        return any(mine.queue for mine in self.protocol.in_memory()) or any(c.has_data for c in self._connections)

    def _write(self, effect: Write) -> None:
        effect.connection.handle.wake()  # type: ignore[attr-defined] # see connect

    def _pushed(self, sid: str, row: RewardRow) -> None:
        """Take a late reward that was committed, on whatever event loop it was posted."""
        loop = self._shell.loop
        if loop is None or loop.is_closed() or row.seq is None:
            return
        if loop is not asyncio.get_running_loop():
            loop.call_soon_threadsafe(self._pushed, sid, row)
            return
        sid = sid.removeprefix(PREFIX)
        self._finding.pushed(sid, row.seq)
        self._shell.do(self.protocol.pushed(sid, row.seq, push_data(row)))

    # -- sleep ------------------------------------------------------------------------------------------------------

    def _hibernate(self, effect: Hibernate) -> None:
        self._shell.spawn(self._sleep(effect))

    async def _sleep(self, effect: Hibernate) -> None:
        session: Session | None = effect.session.handle
        self._shell.idle.pop(effect.session.sid, None)
        if session is not None:
            await self._sessions.lifetime.sleep(session)
        self._shell.do(self.protocol.slept(effect, self._shell.now()))

    def oldest(self, room: Room) -> Session | None:
        """Return the session detached longest whose instance another may have, where that frees a place of ``room``."""
        for sid, session in list(self._shell.idle.items()):
            mine = self.protocol.session(sid)
            if mine is None or mine.connection is not None or session.host is None:
                del self._shell.idle[sid]
            elif not session.lock.busy and not mine.queue and room.freed_by(session.room):
                return session
        return None

    def soon_free(self, room: Room) -> bool:
        """Say whether `oldest` would return one if its request had ended."""
        return any(
            (mine := self.protocol.session(sid)) is not None
            and mine.connection is None
            and session.host is not None
            and room.freed_by(session.room)
            for sid, session in self._shell.idle.items()
        )

    def lost(self, session: Session) -> None:
        """Take that a session's instance was taken, and it cannot be continued."""
        self._shell.end(session.sid.removeprefix(PREFIX), "lost")

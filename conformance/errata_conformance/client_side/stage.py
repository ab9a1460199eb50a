"""The server for client checks: the sample server, whose connections can be cut and whose messages can be changed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from ..exact import encode
from ..sample.episodes import World
from ..sample.mux import Socket
from ..sample.server import Server, running
from .witness import Witness

Envelope = dict[str, Any]


@dataclass
class Stage:
    """A server for one scenario.

    Args:
        multiplexed: Whether it accepts the subprotocol.
        on_message: Called with each envelope from the client; if it returns False, the server does not get it.
        on_send: Called with (head, payload) of each message from the server; returns the texts to send instead.
        on_frame: Called with each frame of the server on a plain socket; returns the one to send instead.
        seen: The client's envelopes.
        offered: The subprotocols that were offered, by connection.
        plain_sockets: How many plain sockets are open.
    """

    multiplexed: bool = True
    on_message: Callable[[Envelope], bool] = lambda _: True
    on_send: Callable[[Envelope, str], list[str] | None] = lambda _head, _payload: None
    on_frame: Callable[[str], str] = lambda frame: frame
    seen: list[Envelope] = field(default_factory=list)
    offered: list[list[str]] = field(default_factory=list)
    plain_sockets: int = 0
    url: str = ""
    server: StageServer = field(init=False)
    witness: Witness = field(default_factory=lambda: Witness(set()))
    _links: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def cut(self) -> None:
        """Abort every connection, as a network failure does."""
        for writer in list(self._links):
            writer.transport.abort()

    @property
    def sockets(self) -> list[StageSocket]:
        """The multiplexed sockets that are connected."""
        return [one for one in self.server.sockets if isinstance(one, StageSocket)]

    def inject(self, text: str) -> None:
        """Send a text to the client on every socket."""
        self.witness.said(text)
        for socket in self.sockets:
            socket.out.put_nowait(text)

    def of(self, *kinds: str) -> list[Envelope]:
        """Return the client's messages of the given types."""
        return [one for one in self.seen if one.get("type") in kinds]

    def received(self, connection: object, text: str) -> str | None:
        """Record a frame, and return the part of it that the server gets; a frame that is none it gets whole."""
        texts = self.witness.frame(connection, text)
        kept = []
        for one in texts:
            envelope = json.loads(one)
            arrives = True
            if isinstance(envelope, dict):
                self.seen.append(envelope)
                arrives = self.on_message(envelope)
            self.witness.envelope(connection, one, arrives)
            if arrives:
                kept.append(one)
        return f"[{','.join(kept)}]" if kept else None if texts else text


class StageSocket(Socket):
    """A socket of the sample server whose messages the stage sees and can change."""

    stage: Stage

    def receive(self, frame: str) -> None:
        """Process the part of a frame that the stage lets through."""
        kept = self.stage.received(self, frame)
        if kept is not None:
            self.pass_on(kept)

    def pass_on(self, frame: str) -> None:
        """Process a frame without the stage."""
        super().receive(frame)

    def send(self, head: Envelope, payload: str) -> None:
        """Send the texts that the stage's ``on_send`` returns for a message; if that is None, the message itself."""
        texts = self.stage.on_send(head, payload)
        if texts is None:
            self.stage.witness.said(text_of(head, payload))
            super().send(head, payload)
        for text in texts or ():
            self.stage.witness.said(text)
            self.out.put_nowait(text)


class StageServer(Server):
    """The sample server with the sockets of a stage."""

    def __init__(self, world: World, stage: Stage) -> None:
        super().__init__(world)
        self.stage = stage
        self.socket_type = type("StageSocket", (StageSocket,), {"stage": stage})

    async def ws(self, connection: WebSocket) -> None:
        """Serve a socket as the stage requires."""
        self.stage.offered.append(list(connection.scope["subprotocols"]))
        if not self.stage.multiplexed:
            connection.scope["subprotocols"] = []
        await super().ws(connection)

    async def plain(self, connection: WebSocket, owner: str | None) -> None:
        """Serve a plain socket, whose frames the witness sees and the stage can change."""
        receive, send_text = connection.receive, connection.send_text

        async def heard() -> Any:
            event = await receive()
            if "text" in event:
                self.stage.witness.plain(event["text"])
            return event

        async def said(data: str) -> None:
            await send_text(self.stage.on_frame(data))

        connection.receive, connection.send_text = heard, said  # type: ignore[method-assign]
        self.stage.plain_sockets += 1
        try:
            await super().plain(connection, owner)
        finally:
            self.stage.plain_sockets -= 1

    async def fork(self, request: Request) -> Response:
        """Fork an episode; the witness sees the body."""
        self.stage.witness.body("http.ForkRequest", "R-015-20", (await request.body()).decode())
        return await super().fork(request)

    async def reward(self, request: Request) -> Response:
        """Add a reward; the witness sees the body."""
        self.stage.witness.body("http.RewardPost", "R-016-34", (await request.body()).decode())
        return await super().reward(request)


def text_of(head: Envelope, payload: str) -> str:
    """Return a message in the form that the sample server sends."""
    return f'{encode(head)[:-1]},"data":{payload}}}'


@asynccontextmanager
async def staged(stage: Stage, world: World | None = None) -> AsyncIterator[Stage]:
    """Run a server for a stage while the block runs, behind a proxy whose connections `Stage.cut` aborts.

    Args:
        stage: The stage. It is yielded, with ``url`` (of the proxy) and ``server`` set.
        world: State of the server; a new one by default. Its sessions' workers are cancelled at the end.
    """
    world = world or World()
    stage.server = StageServer(world, stage)
    server = running(world, 0, server=stage.server)
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.005)
    inside = server.servers[0].sockets[0].getsockname()[1]

    async def link(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection("127.0.0.1", inside)
        both = {writer, ours}
        stage._links |= both

        async def copy(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
            try:
                while data := await source.read(1 << 16):
                    to.write(data)
                    await to.drain()
            except (ConnectionError, OSError):
                pass
            finally:
                to.close()

        try:
            await asyncio.gather(copy(reader, ours), copy(theirs, writer))
        finally:
            stage._links -= both

    proxy = await asyncio.start_server(link, "127.0.0.1", 0)
    stage.url = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    try:
        yield stage
    finally:
        stage.cut()
        proxy.close()
        server.should_exit = server.force_exit = True
        await asyncio.wait([serving], timeout=10)
        for session in world.sessions.values():
            session.worker.cancel()

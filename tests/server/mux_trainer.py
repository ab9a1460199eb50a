"""A trainer with many sessions on one socket: the client's state machine over an ASGI peer, cut and joined at will."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from starlette.types import ASGIApp

from errata_protocol.capabilities import PROTOCOL_NAME
from errata_protocol.errors import ErrataError
from errata_protocol.mux import (
    Answered,
    Attached,
    ClientConfig,
    ClientEvent,
    ClientProtocol,
    ClientRead,
    ClientRequest,
    ClientSession,
    Failed,
    GoneAway,
    Pushed,
    Refused,
    Replied,
    SessionEnded,
)

from .asgi_peer import REPLY_S, Peer


class Trainer:
    """One client.

    Args:
        app: The application.
        path: Of its door.
        chance: Draws sids and keys.
        headers: Of the handshake.
    """

    def __init__(
        self, app: ASGIApp, path: str = "/ws", *, chance: random.Random, headers: dict[str, str] | None = None
    ) -> None:
        self.protocol = ClientProtocol(ClientConfig())
        self.events: list[ClientEvent] = []
        self.pushed: list[dict[str, Any]] = []
        self.ends: dict[str, ErrataError] = {}
        self.refusals: list[ErrataError] = []
        self.refused = asyncio.Event()
        self.sent_away: list[float] = []
        self._app, self._path, self._headers = app, path, headers
        self._chance = chance
        self._peer: Peer | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[object, asyncio.Future[Any]] = {}

    def secret(self) -> str:
        return f"{self._chance.getrandbits(132):033x}"

    async def join(self) -> None:
        """Connect."""
        peer = Peer(self._app, self._path, headers=self._headers, subprotocols=(PROTOCOL_NAME,))
        await peer.__aenter__()
        assert peer.answer["type"] == "websocket.accept" and peer.answer["subprotocol"] == PROTOCOL_NAME, peer.answer
        self._peer = peer
        self.protocol.connected(self._now())
        self._reading = asyncio.create_task(self._read(peer))
        self._flush()

    async def cut(self) -> None:
        """Lose the socket."""
        peer, self._peer = self._peer, None
        assert peer is not None and self._reading is not None
        self._reading.cancel()
        self.protocol.disconnected(self._now())
        await peer.__aexit__(None, None, None)

    async def open(self, group: str | None = None) -> ClientSession:
        session = self.protocol.open(self.secret(), self.secret(), group)
        opened: Attached = await self._outcome(("opened", session.sid))
        assert opened.session is session
        return session

    async def ask(self, session: ClientSession, kind: Any, data: Any = None, **more: Any) -> Replied:
        """Send a mutating request and return its reply; a recorded error is raised."""
        request = self.protocol.request(session, kind, json.dumps({} if data is None else data).encode(), **more)
        found: Replied = await self._outcome(request)
        return found

    async def fork(self, session: ClientSession, t: int, eid: str | None = None) -> ClientSession:
        sid = self.secret()
        request = self.protocol.fork(session, t, sid, self.secret(), eid)
        child = asyncio.ensure_future(self._outcome(("opened", sid)))
        await self._outcome(request)
        await child
        return self.protocol.sessions[sid]

    async def read(self, kind: Any, session: ClientSession | None = None, data: Any = None) -> Answered:
        read = self.protocol.read(kind, session, json.dumps({} if data is None else data).encode())
        found: Answered = await self._outcome(read)
        return found

    def ask_later(self, session: ClientSession, kind: Any, data: Any = None, **more: Any) -> asyncio.Future[Replied]:
        """As `ask`, without waiting."""
        request = self.protocol.request(session, kind, json.dumps({} if data is None else data).encode(), **more)
        return asyncio.ensure_future(self._outcome(request))

    async def tick(self, seconds: float = 60.0) -> None:
        """Do what the machine put off."""
        self._take(self.protocol.tick(self._now() + seconds))
        self._flush()

    async def _outcome(self, key: object) -> Any:
        future = self._waiting[key] = asyncio.get_running_loop().create_future()
        self._flush()
        async with asyncio.timeout(REPLY_S):
            return await future

    def _flush(self) -> None:
        if self._peer is not None:
            while self.protocol.has_data:
                for frame in self.protocol.data_to_send():
                    self._peer.send(frame.decode())

    async def _read(self, peer: Peer) -> None:
        while (message := await peer.got.get())["type"] == "websocket.send":
            self._take(self.protocol.receive(message["text"], self._now()))
            self._flush()

    def _take(self, events: list[ClientEvent]) -> None:
        for event in events:
            self.events.append(event)
            match event:
                case Attached():
                    self._answer(("opened", event.session.sid), event)
                case Replied():
                    self._answer(event.request, event)
                case Failed():
                    self._answer(event.request, event.error)
                case Answered():
                    self._answer(event.read, event.error or event)
                case Pushed():
                    self.pushed.append(json.loads(event.payload))
                case SessionEnded():
                    self.ends[event.session.sid] = event.error
                    self._answer(("opened", event.session.sid), event.error)
                case Refused():
                    self.refusals.append(event.error)
                    self.refused.set()
                case GoneAway():
                    self.sent_away.append(event.retry_after_s)

    def _answer(self, key: ClientRequest | ClientRead | tuple[str, str] | None, outcome: object) -> None:
        future = self._waiting.pop(key, None)
        if future is None or future.done():
            return
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

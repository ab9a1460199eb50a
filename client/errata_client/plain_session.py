"""One session over a plain ``/ws``: what it delivered, where it stands, what is in doubt when its socket is lost."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any, Generic

from openenv.core.env_client import _is_localhost_ws_url
from websockets.exceptions import ConnectionClosed

from errata_protocol.errors import InvalidRequest, LocalProtocolError, SessionLost
from errata_protocol.payload import digest
from errata_protocol.replay import Kind, StateAt

from .fallback import DeliveryLog
from .frames import Frame, FrameInvalid
from .http_door import HttpDoor
from .plain_ws import ActT, ObsT, SocketClient, StateT, delivery_kind, reply_type


class PlainSession(SocketClient[ActT, ObsT, StateT], Generic[ActT, ObsT, StateT]):
    """A `SocketClient` that keeps what it received and never takes one session for another.

    Args:
        session_id: Attach to this given-out session.
        durable: Have the server give the session out.
        args: `EnvClient`'s.
        kwargs: Likewise.
    """

    def __init__(self, *args: Any, session_id: str | None = None, durable: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._session_id = session_id
        self._durable = durable
        self._log = DeliveryLog()
        self._in_doubt: str | None = None
        self._closed = False
        self._door: HttpDoor | None = None

    async def connect_plain(self) -> None:
        """Open the socket if it is not, for another session where the one before ended with it."""
        async with self.turn():
            if not self.is_open:
                if self._session_id is None:
                    self._log.leave()  # a plain session ended with its socket: this is another one
                await self._open()
            self._settle()

    def _offers(self, extension: str) -> bool:
        return self._capabilities is not None and self._capabilities.offers(extension)

    def _call_timeout_s(self, kind: str, data: Any) -> float:
        """Return how long the server says that a request can take; 0 where it says nothing of it."""
        told = self._capabilities
        return 0.0 if told is None or kind != "step" else told.patience_s(data, 0.0)

    def _patience_s(self, message: dict[str, Any]) -> float:
        default: float = self._message_timeout
        return max(default, self._call_timeout_s(message["type"], message.get("data")))

    def _http(self) -> HttpDoor:
        if self._ws_url is None:
            raise ConnectionError("the server of this client was stopped with its provider")
        if self._door is None or self._door.ws_url != self._ws_url:
            self._door = HttpDoor(
                self._ws_url,
                headers=self._headers,
                timeout_s=self._message_timeout,
                trust_env=not _is_localhost_ws_url(self._ws_url),
            )
        return self._door

    async def _open(self) -> None:
        """Open the socket and learn where the session stands. The caller holds the turn."""
        self._closed = False
        self._start_provider_if_needed()
        if self._durable and self._session_id is None:
            self._session_id = await self._http().create_session()
        await self.open_socket()
        position = self._capabilities.session if self._capabilities is not None else None
        if self._session_id is not None and position is not None and position.eid is None and self._log.eid is not None:
            self.drop_socket()  # servers before OpenEnv 0.5 take no notice of session_id
            raise SessionLost(
                f"the server attached another environment than that of episode {self._log.eid}: open another session",
                eid=self._log.eid,
                t=self._log.t,
            )
        if self._session_id is None or position is None or position.eid is None or position.t is None:
            return
        eid, t = position.eid, position.t
        if eid == self._log.eid and self._log.t is not None and t < self._log.t:
            self.drop_socket()
            raise SessionLost(
                f"the server has episode {eid} at t={t} but delivered t={self._log.t} before: acknowledged deliveries "
                "are gone; fork what is left, or open another session",
                eid=eid,
                t=t,
            )
        self._log.move(eid, t)

    def _settle(self) -> None:
        """An explicit connect of an Errata session told its position, so a lost reply is no longer in doubt."""
        if self._capabilities is not None:
            self._in_doubt = None

    async def _ask(self, message: dict[str, Any]) -> Frame:
        """Answer one request on the session it was meant for. The caller holds the turn."""
        kind = delivery_kind(message)
        if not self.is_open:
            if self._session_id is None and self._log.eid is not None and kind != "reset":
                if self._closed:
                    raise LocalProtocolError(
                        f"this client was closed at t={self._log.t} of episode {self._log.eid}, no {message['type']} "
                        "was sent: reset() opens another session",
                        eid=self._log.eid,
                        t=self._log.t,
                    )
                raise SessionLost(
                    f"the socket of this session was lost at t={self._log.t} of episode {self._log.eid}, and a session "
                    "that was never given out ends with its socket: reset, or fork the episode from there",
                    eid=self._log.eid,
                    t=self._log.t,
                )
            await self._open()
        if self._in_doubt is not None and kind in ("step", "mcp"):
            raise SessionLost(self._in_doubt) if self._capabilities is None else InvalidRequest(self._in_doubt)
        text = self.encode(message)
        try:
            frame = self.expect(await self.exchange(text, self._patience_s(message)), reply_type(message))
        except (FrameInvalid, OSError, ConnectionClosed, asyncio.CancelledError) as error:
            if kind is not None:
                self._reply_lost(kind)
            if self._in_doubt is not None:
                error.add_note(self._in_doubt)
            raise
        if kind is not None:
            self._received(kind, frame)
        return frame

    def _reply_lost(self, kind: Kind) -> None:
        """The server may or may not have acted: refuse to act again until the caller has looked."""
        if self._session_id is None:
            return
        way_out = "call reattach() and compare t before the next step"
        if self._capabilities is None:
            way_out = "this server keeps no record of it: reset to start another episode"
        self._in_doubt = f"the reply to a {kind} after t={self._log.t} was lost: {way_out}"

    def _received(self, kind: Kind, frame: Frame) -> None:
        """Verify and keep a delivery. An error frame never comes here: it replaces a delivery and has no t."""
        stamp = frame.stamp
        if stamp is None:
            if kind == "mcp" and (not isinstance(frame.data, dict) or frame.data.get("error") is not None):
                return
            if self._offers("state_at"):
                raise FrameInvalid(f"the server delivered a {kind} without eid, t and digest")
            eid = self._log.eid if kind != "reset" and self._log.eid is not None else f"local-{uuid.uuid4().hex}"
            t = 0 if kind == "reset" else (self._log.t or 0) + 1
            self._log.note(StateAt(eid, t, kind, frame.raw, digest(frame.raw), "history"))
        else:
            try:
                stamp.verify(frame.raw)
            except FrameInvalid:
                self._log.move(stamp.eid, stamp.t)  # it was delivered; its bytes are not kept
                raise
            self._log.note(StateAt(stamp.eid, stamp.t, kind, frame.raw, stamp.digest, "history"))
        if kind == "reset":
            self._in_doubt = None

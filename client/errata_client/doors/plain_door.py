"""`PlainDoor`: a session over a plain ``/ws``. After a lost reply it repeats the request where
the server executes it once, and otherwise refuses steps until its position is known."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from typing import Any

from websockets.exceptions import ConnectionClosed

from errata_protocol.capabilities import Capabilities
from errata_protocol.errors import (
    ErrataError,
    InvalidRequest,
    LocalProtocolError,
    Misdirected,
    NotSupported,
    SessionLost,
    SessionUnknown,
    UnknownEpisode,
)
from errata_protocol.labels import EXTENSION, NO_LABELS, Labels
from errata_protocol.payload import digest
from errata_protocol.replay import ForkReply, Kind, StateAt

from ..deliveries.delivery_log import DeliveryLog
from ..deliveries.late_rewards import Reward
from ..wire.frames import Frame, FrameInvalid, replayed
from .door import ChildDoors, fork_over_http
from .socket_client import SocketClient, delivery_kind, may_pass, reply_type

log = logging.getLogger("errata.client")

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 2.0
"""First and longest time between two attempts to send a request again, seconds."""

_TOO_LONG = 1009
"""Close code where a message is longer than the peer takes."""


class PlainDoor:
    """A `Door` over the socket of an `EnvClient`.

    Args:
        client: The client whose socket it uses; its ``session_id`` is the given-out session, if there is one.
        log: Receives the deliveries.
        durable: Have the server give the session out.

    Attributes:
        ends_at_close: Whether `end_given_out` ends the given-out session on the server.
    """

    def __init__(self, client: SocketClient[Any, Any, Any], log: DeliveryLog, *, durable: bool) -> None:
        self.ends_at_close = False
        self._client = client
        self._log = log
        self._durable = durable
        self._in_doubt: str | None = None
        self._labelled: Labels | None = None  # what the session was made with; None for one that another client made

    @property
    def capabilities(self) -> Capabilities | None:
        """See `Door.capabilities`."""
        return self._client._capabilities

    async def connect(self) -> None:
        """See `Door.connect`. A session that was not given out ended with its socket; then this opens another."""
        async with self._client.turn():
            if not self._client.is_open:
                if self._client._session_id is None:
                    self._log.end_episode()  # its session ended with its socket
                await self._open()
            self._settle()

    async def reattach(self) -> None:
        """See `Door.reattach`."""
        if self._client._session_id is None:
            raise NotSupported(
                "this session was never given out, so it ends with its socket: use ErrataClient(..., durable=True), "
                "or fork the episode from its last (eid, t)"
            )
        async with self._client.turn():
            if self._client.is_open:
                await self._client._disconnect_async()
            await self._open()
            self._settle()

    def attach_to(self, session_id: str, *, ends_at_close: bool) -> None:
        """See `Attachable.attach_to`."""
        self._client._session_id = session_id
        self.ends_at_close = ends_at_close
        self._labelled = self._client._labels  # those that the fork was given, or its parent has

    async def end_given_out(self) -> None:
        """Close the socket and end the given-out session, if it ``ends_at_close``; errors of that are ignored."""
        session_id = self._client._session_id
        if not self.ends_at_close or session_id is None or self._client._ws_url is None:
            return
        await self._client._disconnect_async()  # the server ends no session that a socket is attached to
        try:
            await self._client._http().close_session(session_id)
        except (ErrataError, OSError):
            pass  # best effort, as upstream's close is; the session expires
        self.ends_at_close = False

    async def ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """See `Door.ask`."""
        async with self._client.turn():
            frame = await self._ask(message, timeout_s)
        return {"type": frame.type, "data": frame.data}

    def begin(self, kind: Kind, data: dict[str, Any], done: Callable[[Any], None]) -> None:
        """Return None: a plain socket has one request in flight, so a request may have to wait."""
        return

    async def state_at(self, t: int, eid: str | None) -> StateAt:
        """See `Door.state_at`. Uses HTTP where no socket is open, and for episodes of other sessions."""
        target = eid if eid is not None else self._log.eid
        if target is None or self._client.is_open:
            wanted = {"t": t} if eid is None else {"t": t, "eid": eid}
            try:
                async with self._client.turn():
                    frame = await self._ask({"type": "state", "data": wanted}, self._client._message_timeout)
                return replayed(frame, t, eid)
            except (Misdirected, UnknownEpisode):
                if eid is None or eid == self._log.eid:
                    raise
        # A socket knows only the episodes of its session, the HTTP routes know all.
        assert target is not None
        return await self._client._http().state_at(target, t)

    async def fork(
        self, t: int, eid: str | None, target: str, child: ChildDoors, labels: Labels | None = None
    ) -> ForkReply:
        """See `Door.fork`."""
        return await fork_over_http(self._client._http(), target, t, child, labels, durable=self._durable)

    async def rewards(self, eid: str) -> list[Reward]:
        """See `Door.rewards`."""
        return await self._client._http().rewards(eid)

    async def _open(self) -> None:
        """Open the socket and set the log to the session's position. The caller holds the lock.

        Raises:
            SessionLost: The server has another session, or one that lacks deliveries of this client.
        """
        self._client._closed = False
        self._client._start_provider_if_needed()
        if self._durable and self._client._session_id is None:
            self._labelled = self._client._labels
            self._client._session_id = await self._client._http().create_session(self._labelled)
        elif self._client._session_id is None:
            self._labelled = self._client._labels
        await self._client.open_socket()
        position = self._client._capabilities.session if self._client._capabilities is not None else None
        self._log.read_key = position.read_key if position is not None else None
        session_id = self._client._session_id
        if session_id is not None and position is not None and position.eid is None and self._log.eid is not None:
            self._client.drop_socket()  # servers before OpenEnv 0.5 ignore session_id
            raise SessionLost(
                f"the server attached another environment than that of episode {self._log.eid}: open another session",
                eid=self._log.eid,
                t=self._log.t,
            )
        if session_id is None or position is None or position.eid is None or position.t is None:
            return
        eid, t = position.eid, position.t
        if eid == self._log.eid and self._log.t is not None and t < self._log.t:
            self._client.drop_socket()
            raise SessionLost(
                f"the server has episode {eid} at t={t} but delivered t={self._log.t} before: acknowledged deliveries "
                "are gone; fork what is left, or open another session",
                eid=eid,
                t=t,
            )
        self._log.move(eid, t)

    def _settle(self) -> None:
        """Allow steps again: after a connect, an Errata server's position shows whether the last request ran."""
        if self._client._capabilities is not None:
            self._in_doubt = None

    async def _ask(self, message: dict[str, Any], timeout_s: float) -> Frame:
        """Send one request on the session of this client, once, and return its reply. The caller holds the lock.

        If the socket is closed, another is opened first and attached to the session. The request is sent again only
        where the server executes it once all the same (`_answered`).
        If the reply to a reset, step or mcp call of a given-out session is lost, the next step is refused until the
        caller has compared t (`reattach`).

        Args:
            message: The request, with its ``type``.
            timeout_s: Longest time for sending and for the reply, seconds; opening the socket is not included.

        Raises:
            ErrataError: The reply is an error, or the server refused the socket.
            ConnectionError: The socket was closed, and the server cannot be reached.
            SessionLost: The session ended with its socket; or a reply was lost on a vanilla server.
            LocalProtocolError: The client was closed.
            InvalidRequest: An earlier reply was lost, and the position has to be compared before the next step; or the
                message has no JSON form.
            TimeoutError: No reply came in time. The socket was dropped; whether the request ran is unknown.
            ConnectionClosed: The socket was lost; whether the request ran is unknown.
            FrameInvalid: The reply is no valid frame, or a delivery that cannot be the next one of the session.
        """
        kind = delivery_kind(message)
        if not self._client.is_open:
            if self._client._session_id is None and self._log.eid is not None and kind != "reset":
                if self._client._closed:
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
        if kind == "reset":
            self._check_labels()
        if self._in_doubt is not None and kind in ("step", "mcp"):
            raise SessionLost(self._in_doubt) if self._client._capabilities is None else InvalidRequest(self._in_doubt)
        try:
            frame = self._client.expect(await self._answered(message, timeout_s), reply_type(message))
        except (FrameInvalid, OSError, ConnectionClosed, asyncio.CancelledError) as error:
            if kind is not None:
                self._reply_lost(kind)
            if self._in_doubt is not None:
                error.add_note(self._in_doubt)
            raise
        if kind is not None:
            self._received(kind, frame)
        return frame

    def _check_labels(self) -> None:
        """Refuse a reset whose episode would have other labels than the client has now.

        Raises:
            InvalidRequest: The session was made with others.
        """
        labels = self._client._labels
        if labels != (NO_LABELS if self._labelled is None else self._labelled) and self._client._offers(EXTENSION):
            raise InvalidRequest(
                "labels of a session on a plain socket are those that it was opened with: set them before connect(), "
                "or use a multiplexed connection (leave mux=False, durable= and session_id= out)"
            )

    async def _answered(self, message: dict[str, Any], timeout_s: float) -> Frame:
        """Send a request on the open socket and return the frame that answers it.

        Where the server executes a request with an id once, and the socket is lost or no reply comes within
        ``resend_after_s``, the request is sent again on another socket until ``timeout_s`` is over.
        """
        if self._client._session_id is None or not self._client._offers("request_id") or message["type"] == "state":
            return await self._client.exchange(self._client.encode(message), timeout_s)
        text = self._client.encode({**message, "request_id": uuid.uuid4().hex})
        clock, resend_after_s = asyncio.get_running_loop().time, self._client._resend_after
        wait_s = timeout_s if resend_after_s is None else resend_after_s
        deadline, pause_s = clock() + timeout_s, _FIRST_PAUSE_S
        while True:
            try:
                if not self._client.is_open:
                    async with asyncio.timeout_at(deadline):
                        await self._client.open_socket()
                return await self._client.exchange(text, max(0.0, min(wait_s, deadline - clock())))
            except (OSError, ConnectionClosed, Misdirected, SessionUnknown) as error:
                if isinstance(error, Misdirected | SessionUnknown) and not may_pass(error):
                    raise
                if isinstance(error, TimeoutError) and resend_after_s is None:
                    raise
                if isinstance(error, ConnectionClosed) and _TOO_LONG in (
                    closed.code for closed in (error.rcvd, error.sent) if closed is not None
                ):
                    raise  # the request, or its reply, is as long the next time
                if clock() + pause_s > deadline:
                    if isinstance(error, TimeoutError):
                        text = f"no reply within {timeout_s:g} s; the request was sent again after each {wait_s:g} s"
                        raise TimeoutError(text) from error
                    raise
                self._client.drop_socket()
                log.info("the socket was lost: %s is sent again: %s", message["type"], error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def _reply_lost(self, kind: Kind) -> None:
        """Called when a reply was lost: refuse steps of a given-out session until the caller has compared t."""
        if self._client._session_id is None:
            return
        way_out = "call reattach() and compare t before the next step"
        if self._client._capabilities is None:
            way_out = "this server keeps no record of it: reset to start another episode"
        self._in_doubt = f"the reply to a {kind} after t={self._log.t} was lost: {way_out}"

    def _received(self, kind: Kind, frame: Frame) -> None:
        """Verify a delivery and add it to the log.

        Raises:
            FrameInvalid: It has no stamp, another digest, or a position that does not follow the last one.
        """
        stamp = frame.stamp
        if stamp is not None and stamp.digest is None and self._client._offers("state_at"):
            raise FrameInvalid(f"the server sent an incomplete stamp: eid={stamp.eid!r}, t={stamp.t!r}, digest=None")
        if stamp is None:
            if kind == "mcp" and (not isinstance(frame.data, dict) or frame.data.get("error") is not None):
                return
            if self._client._offers("state_at"):
                raise FrameInvalid(f"the server delivered a {kind} without eid, t and digest")
            eid = self._log.eid if kind != "reset" and self._log.eid is not None else f"local-{uuid.uuid4().hex}"
            t = 0 if kind == "reset" else (self._log.t or 0) + 1
            self._log.note(StateAt(eid, t, kind, frame.raw, digest(frame.raw), "history"))
        else:
            try:
                stamp.verify(frame.raw)
            except FrameInvalid:
                self._log.move(stamp.eid, stamp.t)  # its position is known; its bytes are not kept
                raise
            self._log.note(StateAt(stamp.eid, stamp.t, kind, frame.raw, stamp.digest or digest(frame.raw), "history"))
        if kind == "reset":
            self._in_doubt = None

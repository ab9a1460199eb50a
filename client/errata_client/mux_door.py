"""The multiplexed door: OpenEnv's messages in, payloads out, over a connection that many clients share."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import msgspec
from websockets.asyncio.client import ClientConnection

from errata_protocol.capabilities import Capabilities
from errata_protocol.errors import CODES, ErrataError, InvalidRequest, NotSupported
from errata_protocol.mux import Answered, Replied
from errata_protocol.replay import Kind, StateAt

from .connection import Connection
from .dialing import Dial
from .fallback import DeliveryLog
from .frames import Frame, FrameInvalid, Stamp, as_kind, replayed
from .late_rewards import Reward, read_reward, read_rewards
from .mux_session import MuxSession
from .outcome import Outcome
from .plain_ws import REPLY_TYPES, delivery_kind
from .sharing import Lease, join
from .stats import SessionStats
from .ticket import Ticket

_ENCODE = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode

_log = logging.getLogger("errata.client")


def encode(data: Any) -> bytes:
    """Return the ``data`` of a request as JSON.

    Raises:
        InvalidRequest: It has no JSON form; NaN and infinities have none.
    """
    try:
        return _ENCODE(data).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the request has no JSON form: {error}") from error


def decode(payload: bytes) -> Any:
    """Return what a payload says, as `json.loads` reads it.

    Raises:
        FrameInvalid: It is not JSON.
    """
    try:
        return msgspec.json.decode(payload)
    except (msgspec.DecodeError, RecursionError):  # e.g. half of a surrogate pair, which the standard library reads
        try:
            return json.loads(payload)
        except (ValueError, RecursionError) as error:
            raise FrameInvalid(f"the server sent a payload that cannot be read: {error}") from error


class Begun:
    """A request of a batch: one object for each, since there are thousands in flight and the collector visits them all.

    Args:
        door: Whose.
        session: The session it is sent on.
        kind: Its type.
        data: Its ``data``.
        done: Who is told.
    """

    __slots__ = ("_done", "_door", "_kind", "_request", "_session")

    def __init__(
        self, door: MuxDoor, session: MuxSession, kind: Kind, data: bytes, done: Callable[[Any], None]
    ) -> None:
        self._door = door
        self._kind = kind
        self._done = done
        self._session = session
        self._request = session.begin(kind, data, self._take)

    def ask_back(self) -> None:
        """Let nobody wait for it."""
        self._session.abandon(self._request)

    def _take(self, outcome: Outcome) -> None:
        if isinstance(outcome, Exception):
            self._door.told(outcome)
            self._done(outcome)
            return
        try:
            data = self._door.data_of(self._kind, outcome)
        except FrameInvalid as error:
            self._done(error)
            return
        self._done(data)


class MuxDoor:
    """One client's session on a connection, and where the connection comes from.

    Args:
        log: Where deliveries are kept.
        connection: Use this one; None shares the loop's.
        ticket: Continue this session.
        durable: The session stays when the client is closed.
        retries: How often a request is sent again whose infrastructure failure was rolled back.
    """

    def __init__(
        self,
        log: DeliveryLog,
        *,
        connection: Connection | None,
        ticket: Ticket | None,
        durable: bool,
        retries: int,
    ) -> None:
        self.stats = SessionStats()
        self.on_reward: Callable[[Reward], None] | None = None
        self.session: MuxSession | None = None
        self._log = log
        self._connection = connection
        self._ticket = ticket
        self._durable = durable
        self._retries = retries
        self._lease: Lease | None = None
        self._told = False  # somebody was told that the session is over

    @property
    def is_there(self) -> bool:
        """Whether the server speaks the protocol and this client has a session on it."""
        return self.session is not None

    @property
    def is_live(self) -> bool:
        """Whether requests can be sent at once."""
        return self.session is not None and self.session.is_live

    @property
    def capabilities(self) -> Capabilities | None:
        """What the server said it can do."""
        return None if self._lease is None else self._lease.connection.capabilities

    # -- life -------------------------------------------------------------------------------------------------------

    async def find(self, base_url: str, dial: Dial) -> ClientConnection | None:
        """Get a connection, if the server speaks the protocol.

        Returns:
            The plain socket that it accepted instead, if it does not and this client was the one to find out.

        Raises:
            ConnectionError: The server cannot be reached.
        """
        if self._connection is not None:
            self._lease = Lease(self._connection)
        else:
            found = await join(base_url, dial)
            if not isinstance(found, Lease):
                return found
            self._lease = found
        self.session = self._new(self._ticket)
        return None

    async def connect(self, timeout_s: float) -> None:
        """Open or adopt the session, or another one in place of one that is over and was told to be.

        Raises:
            As `MuxSession.open`.
        """
        session, lease = self.session, self._lease
        assert session is not None and lease is not None
        await lease.connection.connect()
        if session.ended is not None and self._told:
            self._log.leave()
            session = self.session = self._new(None)
            self._told = False
        try:
            await session.open(timeout_s)
        finally:
            self._told = session.ended is not None

    async def leave(self, *, end: bool | None = None) -> None:
        """Let go of the session and the connection.

        Args:
            end: End the session on the server; None does what it was opened for.
        """
        session, self.session = self.session, None
        lease, self._lease = self._lease, None
        try:
            if session is not None:
                if session.ends if end is None else end:
                    await session.end()
                else:
                    session.leave()
                self._told = False
        finally:
            if lease is not None:
                await lease.release()

    def ticket(self) -> Ticket:
        """Return what another process needs to continue the session.

        Raises:
            NotSupported: It is no multiplexed session.
        """
        if self.session is None:
            raise NotSupported("there is no multiplexed session to continue: connect() first, or use durable=True")
        return self.session.ticket()

    async def fork(self, t: int, eid: str | None, child: MuxDoor, timeout_s: float) -> dict[str, Any]:
        """Fork an episode of the session.

        Returns:
            ``data`` of the reply: ``sid``, ``eid``, ``t`` and ``origin`` of the child, which ``child`` now has.
        """
        session, lease = self.session, self._lease
        assert session is not None and lease is not None
        child._lease = lease.share()
        child.session = child._new(None)
        try:
            reply = await session.fork(t, eid, child.session, timeout_s)
        except BaseException:
            await child.leave(end=False)
            raise
        told: dict[str, Any] = decode(reply.payload)
        return told

    def _new(self, ticket: Ticket | None) -> MuxSession:
        assert self._lease is not None
        return MuxSession(
            self._lease.connection,
            stats=self.stats,
            delivered=self._delivered,
            moved=self._log.move,
            rewarded=self._rewarded,
            retries=self._retries,
            ends=ticket is None and not self._durable,
            ticket=ticket,
        )

    # -- requests ---------------------------------------------------------------------------------------------------

    async def ask(self, message: dict[str, Any], timeout_s: float, connect_timeout_s: float) -> dict[str, Any]:
        """Answer one of OpenEnv's messages.

        Raises:
            ErrataError: What the server answered, or why the session is over.
            TimeoutError: No reply in time; the session goes on.
            ConnectionError: The server cannot be reached.
        """
        kind = delivery_kind(message)
        if self._told and kind == "reset":
            await self.connect(connect_timeout_s)  # the loss was told: this is a new beginning on purpose
        session = self.session
        assert session is not None
        try:
            if kind is not None:
                reply = await session.ask(kind, encode(message.get("data", {})), timeout_s)
                return {"type": reply.type, "data": self.data_of(kind, reply)}
            match message["type"]:
                case "state" | "mcp" as read:
                    answer = await session.read(read, encode(message.get("data", {})), timeout_s)
                    return {"type": answer.type, "data": decode(answer.payload)}
            raise InvalidRequest(f"the multiplexed protocol has no {message['type']!r} message")
        finally:
            self._told = self._told or session.ended is not None

    def begin(self, kind: Kind, data: bytes, done: Callable[[Any], None]) -> Begun:
        """Send a request without waiting; ``done`` is called once, with its decoded ``data`` or the exception.

        Raises:
            As `MuxSession.begin`.
        """
        assert self.session is not None
        return Begun(self, self.session, kind, data, done)

    def told(self, error: Exception) -> None:
        """Note that a caller heard of an error: where it was the session's end, the next reset may begin another."""
        self._told = self._told or _is_end(error)

    @staticmethod
    def data_of(kind: Kind, reply: Replied) -> Any:
        """Return the decoded ``data`` of a reply.

        Raises:
            FrameInvalid: It answers something else.
        """
        if reply.type != REPLY_TYPES[kind] or (kind != "mcp" and reply.t is None):
            raise FrameInvalid(f"the server answered a {kind} with {reply.type!r}, t={reply.t}")
        return decode(reply.payload)

    async def state_at(self, t: int, eid: str | None, timeout_s: float) -> StateAt:
        """Read the exact bytes of a delivery from the server, verified."""
        assert self.session is not None
        wanted: dict[str, Any] = {"t": t} if eid is None else {"t": t, "eid": eid}
        return replayed(_frame(await self.session.read("state", encode(wanted), timeout_s)), t, eid)

    async def rewards(self, eid: str | None, timeout_s: float) -> list[Reward]:
        """Read the late rewards of an episode."""
        assert self.session is not None
        wanted = {} if eid is None else {"eid": eid}
        return read_rewards((await self.session.read("rewards", encode(wanted), timeout_s)).payload, eid)

    # -- what comes by itself ---------------------------------------------------------------------------------------

    def _delivered(self, reply: Replied) -> None:
        if reply.eid is None or reply.t is None or not reply.digest:
            raise FrameInvalid(f"the server delivered t={reply.t} without eid or digest")
        kind = None if reply.request is None else as_kind(reply.request.kind)
        if kind is None:  # asked for by the process before this one
            kind = "mcp" if reply.type == "mcp" else "reset" if reply.t == 0 else "step"
        self._log.note(StateAt(reply.eid, reply.t, kind, reply.payload, reply.digest, "history"))

    def _rewarded(self, payload: bytes) -> None:
        if self.on_reward is not None:
            self.on_reward(read_reward(decode(payload)))


def _is_end(error: Exception) -> bool:
    return isinstance(error, ErrataError) and error.code in CODES and not error.info.session_survives


def _frame(answer: Answered) -> Frame:
    if answer.eid is None or answer.t is None:
        raise FrameInvalid(f"the server answered a state read with {answer.type!r} without eid or t")
    stamp = Stamp(answer.eid, answer.t, answer.digest)
    return Frame(answer.type, None, answer.payload, stamp, as_kind(answer.kind))

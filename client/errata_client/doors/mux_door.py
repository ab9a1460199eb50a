"""`MuxDoor`: sends OpenEnv's messages over a multiplexed connection and decodes the replies."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable
from typing import Any

import msgspec
from websockets.asyncio.client import ClientConnection

from errata_protocol.capabilities import Capabilities
from errata_protocol.errors import CODES, ErrataError, InvalidRequest, NotSupported, UnknownEpisode
from errata_protocol.fleet import EXTENSION as FLEET
from errata_protocol.labels import EXTENSION, NO_LABELS, Labels
from errata_protocol.mux import Answered, Replied
from errata_protocol.names import SHARD
from errata_protocol.replay import ForkReply, Kind, StateAt
from errata_protocol.shards import shard_of

from ..connections.connection import Connection
from ..connections.dialing import Dial
from ..connections.mux_session import MuxSession
from ..connections.outcome import Outcome
from ..connections.sharing import Lease, join, join_placed
from ..connections.stats import SessionStats
from ..connections.ticket import Ticket
from ..deliveries.delivery_log import DeliveryLog
from ..deliveries.late_rewards import Reward, read_reward, read_rewards
from ..wire.frames import Frame, FrameInvalid, Stamp, as_kind, replayed
from .door import ChildDoors, Sharing, fork_over_http
from .socket_client import REPLY_TYPES, SocketClient, delivery_kind

_ENCODE = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode

_log = logging.getLogger("errata.client")


def encode(data: Any) -> bytes:
    """Return the ``data`` of a request as JSON.

    Raises:
        InvalidRequest: It has no JSON form; NaN and infinities have none either.
    """
    try:
        return _ENCODE(data).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the request has no JSON form: {error}") from error


def decode(payload: bytes) -> Any:
    """Decode a payload as `json.loads` does, which also reads lone surrogates.

    Raises:
        FrameInvalid: It is not JSON.
    """
    try:
        return msgspec.json.decode(payload)
    except (msgspec.DecodeError, RecursionError):  # e.g. a lone surrogate, which the standard library accepts
        try:
            return json.loads(payload)
        except (ValueError, RecursionError) as error:
            raise FrameInvalid(f"the server sent a payload that cannot be read: {error}") from error


class MuxRequest:
    """A `PendingRequest`; it is sent when it is made.

    One object for each request, without closures: with thousands in flight, objects cost time in garbage collections.

    Args:
        door: The door whose session it is.
        session: The session.
        kind: Type of the request.
        data: Its ``data``, JSON.
        done: Called once, with the decoded ``data`` or the exception.
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

    def cancel(self) -> None:
        """See `doors.PendingRequest`."""
        self._session.abandon(self._request)

    def _take(self, outcome: Outcome) -> None:
        if isinstance(outcome, Exception):
            self._door.note_error(outcome)
            self._done(outcome)
            return
        try:
            data = self._door.data_of(self._kind, outcome)
        except FrameInvalid as error:
            self._done(error)
            return
        self._done(data)


class MuxDoor:
    """A `Door` with a session on a multiplexed connection.

    Args:
        client: The client; its timeouts and its HTTP door are used.
        log: Receives the deliveries.
        connection: The connection; None shares that of the event loop.
        ticket: Continue this session instead of opening one.
        durable: The session stays when the client is closed.
        retries: How often a request is sent again after an infrastructure failure that the server rolled back.

    Attributes:
        stats: Counters.
        on_reward: Called with each reward that the server pushes, or None.
        session: The session; None before `find` and after `leave`.
        first_ticket: Ticket of the session that is continued instead of opening one; None without.
    """

    def __init__(
        self,
        client: SocketClient[Any, Any, Any],
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
        self._client = client
        self._log = log
        self._connection = connection
        self.first_ticket = ticket
        self._durable = durable
        self._retries = retries
        self._lease: Lease | None = None
        self._found: tuple[str, Dial, str] | None = None  # at which server, how, and as one of which group
        self._end_seen = False  # a caller has received the error that ended the session

    @property
    def has_session(self) -> bool:
        """Whether `find` has found a multiplexed connection and the session was not left."""
        return self.session is not None

    @property
    def capabilities(self) -> Capabilities | None:
        """See `Door.capabilities`."""
        return None if self._lease is None else self._lease.connection.capabilities

    # -- life -------------------------------------------------------------------------------------------------------

    async def find(self, base_url: str, dial: Dial) -> ClientConnection | None:
        """Find a connection and make a session on it that is not open yet, if the server speaks the protocol.

        Returns:
            The plain socket that the server accepted instead, if it does not; None also where another client has that
            socket (`sharing.join`).

        Raises:
            ConnectionError: The server cannot be reached.
        """
        if self._connection is not None:
            self._lease = Lease(self._connection)
        else:
            self._found = None
            if self.first_ticket is None:
                group = self._group()
                found = await join_placed(base_url, dial, group)
                self._found = base_url, dial, group
            else:
                sid = self.first_ticket["sid"]
                shard = shard_of(sid)
                found = await (join(base_url, dial) if shard is None else join_placed(base_url, dial, sid, shard))
            if not isinstance(found, Lease):
                return found
            self._lease = found
        self.session = self._new(self.first_ticket)
        return None

    async def connect(self) -> None:
        """Open the session, or another one where it ended and a caller has received that error.

        Raises:
            ErrataError, ConnectionError, TimeoutError: See `MuxSession.open`.
        """
        try:
            await self._open()
        except ConnectionError:
            await self._client._close_unconnected()
            raise
        except ErrataError:
            if self._log.eid is None:  # the session had no episode yet
                await self.leave()
            raise
        self._client._learn(self.capabilities)

    async def _open(self) -> None:
        session, lease = self.session, self._lease
        assert session is not None and lease is not None
        await lease.connection.connect()
        if session.ended is not None and self._end_seen:
            self._log.end_episode()
            session = self.session = self._new(None)
            self._end_seen = False
        try:
            await session.open(self._client._connect_timeout)
        finally:
            self._end_seen = session.ended is not None

    @property
    def _is_misplaced(self) -> bool:
        """Whether the session was opened before the client's labels named a group, and may move: it has no episode."""
        labels, session, offered = self._client._labels, self.session, self.capabilities
        return (
            self._found is not None
            and labels.group is not None
            and labels.header() != self._found[2]
            and self._log.eid is None
            and session is not None
            and session.ends
            and offered is not None
            and offered.offers(FLEET)
        )

    async def _move(self) -> None:
        """Open another session in place of one without an episode where the client's group is at another member.

        Raises:
            ErrataError, ConnectionError, TimeoutError: See `connect`.
        """
        assert self._found is not None and self._lease is not None and self.session is not None
        base_url, dial, _ = self._found
        group = self._group()
        found = await join_placed(base_url, dial, group)
        self._found = base_url, dial, group
        if not isinstance(found, Lease):  # another client has found a server that speaks no such protocol any more
            if found is not None:
                await found.close()
            return
        if found.connection is self._lease.connection:
            await found.release()
            return
        session, lease = self.session, self._lease
        self._lease = found
        self.session = self._new(None)
        try:
            await session.end()  # first: a server may have room for no other one beside it
        finally:
            await lease.release()
        await self.connect()

    async def reattach(self) -> None:
        """See `Door.reattach`. The connection attaches again by itself; this waits for the requests in flight."""
        assert self.session is not None
        await self.session.settle(self._client._message_timeout)

    async def leave(self, *, end: bool | None = None) -> None:
        """Leave the session and release the connection.

        Args:
            end: Whether to end the session on the server; None ends it where it `MuxSession.ends` with its client.
        """
        session, self.session = self.session, None
        lease, self._lease = self._lease, None
        try:
            if session is not None:
                if session.ends if end is None else end:
                    await session.end()
                else:
                    session.leave()
                self._end_seen = False
        finally:
            if lease is not None:
                await lease.release()

    def ticket(self) -> Ticket:
        """See `MuxSession.ticket`.

        Raises:
            NotSupported: There is no multiplexed session.
            ErrataError: The session is not open, was taken over, or ended.
        """
        if self.session is None:
            raise NotSupported("there is no multiplexed session to continue: connect() first, or use durable=True")
        return self.session.ticket()

    async def fork(
        self, t: int, eid: str | None, target: str, child: ChildDoors, labels: Labels | None = None
    ) -> ForkReply:
        """See `Door.fork`. Episodes of other sessions are forked over HTTP."""
        try:
            if not self._is_elsewhere(eid):
                return await self._fork(t, eid, child.mux, labels)
        except UnknownEpisode:  # a session knows only its own episodes, the HTTP routes know all
            if eid is None:
                raise
        return await fork_over_http(self._client._http(), target, t, child, labels, durable=self._durable)

    async def _fork(self, t: int, eid: str | None, child: Sharing, labels: Labels | None) -> ForkReply:
        session, lease = self.session, self._lease
        assert session is not None and lease is not None
        forked = child.share(lease.share())
        try:
            reply = await session.fork(t, eid, forked, self._client._message_timeout, labels)
        except BaseException:
            await child.leave(end=False)
            raise
        data: dict[str, Any] = decode(reply.payload)
        return ForkReply.model_validate({"session_id": data.get("sid"), **data, "read_key": forked.read_key})

    def share(self, lease: Lease) -> MuxSession:
        """See `doors.Sharing.share`."""
        self._lease = lease
        session = self.session = self._new(None)
        self._client._learn(self.capabilities)
        return session

    def _new(self, ticket: Ticket | None) -> MuxSession:
        assert self._lease is not None
        return MuxSession(
            self._lease.connection,
            stats=self.stats,
            delivered=self._delivered,
            moved=self._moved,
            rewarded=self._rewarded,
            retries=self._retries,
            ends=ticket is None and not self._durable,
            ticket=ticket,
            labels=self._labels,
            shard=self._shard,
        )

    def _shard(self) -> str | None:
        """Return the name of the data directory of the server, or of its member that has the session; None for none."""
        assert self._lease is not None
        name = self._lease.connection.member or (self.capabilities.shard if self.capabilities is not None else None)
        return name if SHARD.matches(name) else None

    def _group(self) -> str:
        """Return the name of the sessions that are to be at one member of the server: those of a group of rollouts."""
        labels = self._client._labels
        return labels.header() if labels.group is not None else secrets.token_hex(8)

    def _labels(self) -> Labels:
        """Return the labels to send: none to a server that would refuse them."""
        offered = self.capabilities is not None and self.capabilities.offers(EXTENSION)
        return self._client._labels if offered else NO_LABELS

    # -- requests ---------------------------------------------------------------------------------------------------

    async def ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """See `Door.ask`. A reset opens another session where this one ended and a caller has received that error."""
        kind = delivery_kind(message)
        if kind == "reset":
            if self._end_seen:
                await self._open()
            elif self._is_misplaced:
                await self._move()
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
            self._end_seen = self._end_seen or session.ended is not None

    def begin(self, kind: Kind, data: dict[str, Any], done: Callable[[Any], None]) -> MuxRequest | None:
        """See `Door.begin`; None where the session is not open, or has to be opened at another member first.

        Raises:
            ErrataError: See `MuxSession.begin`.
        """
        session = self.session
        if session is None or not session.is_live or (kind == "reset" and self._is_misplaced):
            return None
        return MuxRequest(self, session, kind, encode(data), done)

    def note_error(self, error: Exception) -> None:
        """Record that a caller received an error; if it ended the session, the next reset opens another."""
        self._end_seen = self._end_seen or _is_end(error)

    @staticmethod
    def data_of(kind: Kind, reply: Replied) -> Any:
        """Return the decoded ``data`` of a reply.

        Raises:
            FrameInvalid: The reply is of another type than a ``kind`` has, or is no JSON.
        """
        if reply.type != REPLY_TYPES[kind] or (kind != "mcp" and reply.t is None):
            raise FrameInvalid(f"the server answered a {kind} with {reply.type!r}, t={reply.t}")
        return decode(reply.payload)

    async def state_at(self, t: int, eid: str | None) -> StateAt:
        """See `Door.state_at`."""
        assert self.session is not None
        wanted: dict[str, Any] = {"t": t} if eid is None else {"t": t, "eid": eid}
        try:
            if eid is None or not self._is_elsewhere(eid):
                answer = await self.session.read("state", encode(wanted), self._client._message_timeout)
                return replayed(_frame(answer), t, eid)
        except UnknownEpisode:  # a session knows only its own episodes, the HTTP routes know all
            if eid is None or eid == self._log.eid:
                raise
        return await self._client._http().state_at(eid, t)

    async def rewards(self, eid: str) -> list[Reward]:
        """See `Door.rewards`."""
        assert self.session is not None
        try:
            if not self._is_elsewhere(eid):
                answer = await self.session.read("rewards", encode({"eid": eid}), self._client._message_timeout)
                return read_rewards(answer.payload, eid)
        except UnknownEpisode:  # a session knows only its own episodes, the HTTP routes know all
            pass
        return await self._client._http().rewards(eid)

    def _is_elsewhere(self, eid: str | None) -> bool:
        """Return whether an episode may be in another data directory, which the session's socket does not reach."""
        shard = shard_of(eid) if eid is not None else None
        return shard is not None and (self._log.eid is None or shard != shard_of(self._log.eid))

    # -- called by the session --------------------------------------------------------------------------------------

    def _delivered(self, reply: Replied) -> None:
        if reply.eid is None or reply.t is None or not reply.digest:
            raise FrameInvalid(f"the server delivered t={reply.t} without eid or digest")
        kind = None if reply.request is None else as_kind(reply.request.kind)
        if kind is None:  # requested by the process that made the ticket
            kind = "mcp" if reply.type == "mcp" else "reset" if reply.t == 0 else "step"
        self._know(reply.eid)
        self._log.note(StateAt(reply.eid, reply.t, kind, reply.payload, reply.digest, "history"))

    def _moved(self, eid: str, t: int) -> None:
        self._know(eid)
        self._log.move(eid, t)

    def _know(self, eid: str) -> None:
        """Let the log have the session's read key when an episode begins."""
        if eid != self._log.eid and self.session is not None:
            self._log.read_key = self.session.read_key

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

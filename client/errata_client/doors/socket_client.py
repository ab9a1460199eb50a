"""`SocketClient`: the base class of `ErrataClient`. It sends one request at a time on the plain socket of OpenEnv's
`EnvClient`.

`EnvClient` opens and closes the socket. Requests and replies are handled here, because the exact bytes of a reply are
needed, and because several callers (threads of a sync client, tasks) may send at the same time.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Generic
from urllib.parse import quote

from openenv.core.env_client import EnvClient, _is_localhost_ws_url
from pydantic import ValidationError
from typing_extensions import TypeVar
from websockets.exceptions import ConnectionClosed
from websockets.protocol import State

from errata_protocol.capabilities import PROBE, Capabilities
from errata_protocol.errors import InvalidRequest, Misdirected, NotSupported, SessionUnknown
from errata_protocol.labels import HEADER, NO_LABELS
from errata_protocol.replay import Kind
from errata_protocol.shards import shard_of

from ..connections.dialing import refusal_reason, ws_url_of
from ..connections.waiting import waits_at
from ..wire.frames import Frame, FrameInvalid, parse_frame, wire_error
from .http_door import HttpDoor

# With defaults, so that `client = ErrataClient(url)` needs no annotation.
ActT = TypeVar("ActT", default=Any)
ObsT = TypeVar("ObsT", default=Any)
StateT = TypeVar("StateT", default=Any)

REPLY_TYPES = {"reset": "observation", "step": "observation", "state": "state", "mcp": "mcp"}


def delivery_kind(message: dict[str, Any]) -> Kind | None:
    """Return the kind of delivery that a request makes; None for a read."""
    match message:
        case {"type": "reset"}:
            return "reset"
        case {"type": "step"}:
            return "step"
        case {"type": "mcp", "data": {"method": "tools/call"}}:
            return "mcp"
        case _:
            return None


def reply_type(message: dict[str, Any]) -> str:
    """Return the type of the frame that answers a request: ``state_at`` for a state request with ``data``."""
    return "state_at" if message["type"] == "state" and "data" in message else REPLY_TYPES[message["type"]]


def may_pass(refusal: Misdirected | SessionUnknown) -> bool:
    """Return whether a socket was refused for what may pass: another one counts as attached, or the server is not that
    of the session's data directory."""
    return isinstance(refusal, Misdirected) or "already has an attached" in refusal.message


class SocketClient(EnvClient[ActT, ObsT, StateT], Generic[ActT, ObsT, StateT]):  # type: ignore[misc]
    """An `EnvClient` that reads the server's capabilities first and checks that each frame answers its request.

    Its arguments are those of `EnvClient`.
    """

    # Attributes of `EnvClient`, which has no types for them.
    _ws: Any
    _ws_loop: asyncio.AbstractEventLoop | None
    _ws_url: str | None
    _headers: dict[str, str] | None
    _sync_client: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._labels = NO_LABELS
        self._session_id: str | None = None
        self._resend_after: float | None = None
        self._capabilities: Capabilities | None = None
        self._probed = False
        self._connecting = False
        self._opened_socket: Any = None  # a plain socket that the search for a multiplexed connection opened
        self._lock: asyncio.Lock | None = None
        self._lock_loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._http_door: HttpDoor | None = None

    @property
    def is_open(self) -> bool:
        """Whether a socket is open and belongs to the running event loop."""
        return self._ws is not None and self._ws.state is State.OPEN and self._ws_loop is asyncio.get_running_loop()

    def turn(self) -> asyncio.Lock:
        """Return the lock whose holder may use the socket. Waiters get it in order."""
        loop = asyncio.get_running_loop()
        if self._lock is None or self._lock_loop is not loop:
            self._lock, self._lock_loop = asyncio.Lock(), loop
        return self._lock

    def _http(self) -> HttpDoor:
        if self._ws_url is None:
            raise ConnectionError("the server of this client was stopped with its provider")
        if self._http_door is None or self._http_door.ws_url != self._ws_url:
            self._http_door = HttpDoor(
                self._ws_url,
                headers=self._headers,
                timeout_s=self._message_timeout,
                trust_env=not _is_localhost_ws_url(self._ws_url),
            )
        return self._http_door

    def _offers(self, extension: str, version: int = 1) -> bool:
        return self._capabilities is not None and self._capabilities.offers(extension, version)

    def _learn(self, capabilities: Capabilities | None) -> None:
        """Keep the server's capabilities; None for a vanilla server."""
        self._capabilities, self._probed = capabilities, True

    async def _close_unconnected(self) -> None:
        """Close as `EnvClient` does when it cannot connect: a provider's server is stopped."""
        await super()._close_async()

    async def open_socket(self) -> None:
        """Open the socket, attached to the given-out session if there is one, and read the server's capabilities.

        The server refuses while another socket is attached to the session, e.g. a lost one whose request still runs,
        and where the session is another server's. Attaching is retried until ``connect_timeout_s`` is over.

        Raises:
            ConnectionError: The server cannot be reached, or closed the socket before it answered.
            ErrataError: The server refused, e.g. CAPACITY_REACHED or an unknown session.
        """
        clock = asyncio.get_running_loop().time
        deadline, pause_s = clock() + self._connect_timeout, 0.02
        shard = shard_of(self._session_id) if self._session_id is not None else None
        with waits_at(self._ws_url).on("a connection", self._connect_timeout):
            while True:
                base = await self._http().base_of(shard)
                try:
                    await self._open_once(ws_url_of(base))
                    return
                except (Misdirected, SessionUnknown) as refusal:
                    if isinstance(refusal, Misdirected):
                        await self._http().find(shard, base)
                    if not may_pass(refusal) or clock() + pause_s > deadline:
                        raise
                except ConnectionError:
                    if shard is None or not await self._http().find(shard, base) or clock() + pause_s > deadline:
                        raise
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.5)

    async def _open_once(self, member_url: str) -> None:
        """Open the socket at a member's ``.../ws`` URL, which is the client's own where there is one member."""
        plain_url, headers = self._ws_url, self._headers
        self._connecting = True  # `EnvClient` calls close() when it cannot connect, which must not end the session
        try:
            self._ws_url = member_url
            if self._session_id is not None:
                self._ws_url = f"{member_url}?session_id={quote(self._session_id, safe='')}"
            if self._opened_socket is not None:  # also when it is closed: it may hold the error frame of a refusal
                self._ws, self._ws_loop, self._opened_socket = self._opened_socket, asyncio.get_running_loop(), None
            else:
                if self._labels and self._session_id is None:
                    self._headers = {**(headers or {}), HEADER: self._labels.header()}
                await super()._connect_async()
        except ConnectionError as error:  # remove the session id, which gives access to the session, from the message
            text = str(error).replace(str(self._ws_url), member_url) if self._ws_url else str(error)
            raise ConnectionError(text + refusal_reason(error.__cause__)) from error.__cause__
        finally:
            self._connecting, self._headers = False, headers
            if self._ws_url is not None:  # it is None where a provider was stopped meanwhile
                self._ws_url = plain_url
        try:
            self._capabilities = await self._probe()
            if self._capabilities is None and self._session_id is not None:
                await self._check_attached(self._session_id)
        except ConnectionClosed as error:
            self.drop_socket()
            raise ConnectionError(f"Failed to connect to {plain_url}: closed before any answer: {error}") from error
        except BaseException:
            self.drop_socket()
            raise
        self._probed = True

    async def _probe(self) -> Capabilities | None:
        frame = await self.exchange(self.encode(PROBE))
        if frame.type == "capabilities":
            try:
                named = {"environment": ""}  # which a server other than ours may leave out
                told = named | frame.data if isinstance(frame.data, dict) else frame.data
                return Capabilities.model_validate(told)
            except ValidationError as error:
                raise FrameInvalid(f"the server answered capabilities this client cannot read: {error}") from error
        if frame.type != "error":
            raise FrameInvalid(f"the server answered the capabilities request with {frame.type!r}")
        refusal = wire_error(frame.data)
        if refusal.code == "UNKNOWN_TYPE":
            return None
        raise refusal

    async def _check_attached(self, session_id: str) -> None:
        """Check that the socket is attached to ``session_id``: vanilla servers before 0.5 ignore it.

        On a socket, ``openenv/session/create`` makes no session; its reply has the id of the socket's own.

        Raises:
            NotSupported: The socket has another session.
        """
        request = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {}}
        frame = self.expect(await self.exchange(self.encode({"type": "mcp", "data": request})), "mcp")
        match frame.data:
            case {"result": {"session_id": str(attached)}} if attached == session_id:
                return
        raise NotSupported("this server does not attach to sessions (openenv < 0.5): connect without durable=True")

    @staticmethod
    def encode(message: dict[str, Any]) -> str:
        """Return the text of a message.

        Raises:
            InvalidRequest: It has no JSON form.
        """
        try:
            return json.dumps(message)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"the {message['type']} request has no JSON form: {error}") from error

    async def exchange(self, text: str, timeout_s: float | None = None) -> Frame:
        """Send a message on the open socket and return the frame that answers it.

        A timeout or cancellation drops the socket, as upstream does: a reply that arrived later would be mistaken for
        that of the next request.

        Args:
            text: The message.
            timeout_s: For sending and the reply, seconds; None takes ``message_timeout_s``.

        Raises:
            TimeoutError: No reply within ``timeout_s``.
            ConnectionClosed: The socket was lost; whether the server acted on the message is unknown.
            FrameInvalid: The reply is no valid frame; the socket was dropped.
        """
        ws = self._ws
        timeout_s = self._message_timeout if timeout_s is None else timeout_s
        try:
            with waits_at(self._ws_url).on("a reply", timeout_s):
                async with asyncio.timeout(timeout_s):
                    try:
                        await ws.send(text)
                    except ConnectionClosed:
                        pass  # the server may have sent an error frame before it closed
                    raw = await ws.recv(decode=False)
            return parse_frame(raw)
        except TimeoutError as error:
            self.drop_socket()
            name = "message_timeout_s=" if timeout_s == self._message_timeout else "the server's call_timeouts_s: "
            raise TimeoutError(f"no reply within {name}{timeout_s:g}: the socket was dropped") from error
        except (asyncio.CancelledError, FrameInvalid):
            self.drop_socket()
            raise

    def expect(self, frame: Frame, expected: str) -> Frame:
        """Return ``frame`` if it has the type ``expected``.

        Raises:
            ErrataError: It is an error frame.
            FrameInvalid: It has another type; the socket was dropped, since later replies could not be matched either.
        """
        if frame.type == "error":
            raise wire_error(frame.data)
        if frame.type != expected:
            self.drop_socket()
            raise FrameInvalid(f"the server answered with {frame.type!r} where {expected!r} was due: socket dropped")
        return frame

    async def _disconnect_async(self) -> None:
        """Close the socket. With a given-out session, send no ``close`` message, which would end the session."""
        if self._session_id is None:
            await super()._disconnect_async()
            return
        self.drop_socket()
        await self._drain_pending_close_tasks()

    def drop_socket(self) -> None:
        """Forget the socket and close it in the background, without sending a ``close`` message. Never blocks.

        A socket that another event loop opened is only forgotten, not closed. Call it in a running event loop.
        """
        ws, same_loop = self._ws, self._ws is not None and self._ws_loop is asyncio.get_running_loop()
        self._ws = self._ws_loop = None
        if same_loop:
            self._schedule_socket_close(ws)

"""The Errata client: OpenEnv's `EnvClient` with state(t), fork, history and sessions that can be attached again.

Against an Errata server every delivery is verified by its digest and any past one is read back from the journal.
Against a vanilla OpenEnv server the client answers state(t) from the bytes it received itself (`DeliveryLog`).
"""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any, Self

from openenv.core.env_client import _is_localhost_ws_url
from websockets.exceptions import ConnectionClosed

from errata_protocol.capabilities import Capabilities
from errata_protocol.errors import (
    ErrataError,
    InvalidRequest,
    NoReset,
    NotSupported,
    ServiceError,
    SessionLost,
    UnknownEpisode,
)
from errata_protocol.payload import digest
from errata_protocol.replay import Kind, StateAt

from .codec import Codec
from .fallback import DeliveryLog
from .frames import Frame, FrameInvalid, replayed
from .http_door import HttpDoor, why_no_fork
from .plain_ws import ActT, ObsT, SocketClient, StateT, delivery_kind, reply_type
from .trace import Lineage

if TYPE_CHECKING:
    from .sync import SyncErrataClient


class ErrataClient(SocketClient[ActT, ObsT, StateT]):
    """Client of one environment session, on an Errata server or a vanilla OpenEnv one.

    ``reset``, ``step``, ``state``, ``connect``, ``close``, ``new_session`` and ``from_docker_image`` are `EnvClient`'s.
    In sync code use ``client.sync()`` or ``with ErrataClient(...) as client``; the methods below are coroutines.

    Args:
        base_url: As `EnvClient` has it, and so are the other positional arguments.
        action_cls: Class of actions; None takes mappings and Pydantic models as they are.
        observation_cls: Class of observations; None gives mappings.
        state_cls: Class of the state; None gives mappings.
        session_id: Attach to this given-out session instead of opening a new one. ``close`` detaches from it.
        durable: Have the server give the session out at the first connect, so that it survives a lost socket (and,
            where the environment can be recovered, the server's crash). ``close`` detaches from it; `end_session`
            ends it. Forked children are durable if their parent is, else they end at ``close``.
    """

    def __init__(
        self,
        base_url: str | None = None,
        connect_timeout_s: float = 10.0,
        message_timeout_s: float = 60.0,
        max_message_size_mb: float = 100.0,
        websocket_ping_interval_s: float | None = 20.0,
        websocket_ping_timeout_s: float | None = 20.0,
        provider: Any = None,
        mode: str | None = None,
        headers: dict[str, str] | None = None,
        *,
        action_cls: type[ActT] | None = None,
        observation_cls: type[ObsT] | None = None,
        state_cls: type[StateT] | None = None,
        session_id: str | None = None,
        durable: bool = False,
    ) -> None:
        super().__init__(
            base_url=base_url,
            connect_timeout_s=connect_timeout_s,
            message_timeout_s=message_timeout_s,
            max_message_size_mb=max_message_size_mb,
            websocket_ping_interval_s=websocket_ping_interval_s,
            websocket_ping_timeout_s=websocket_ping_timeout_s,
            provider=provider,
            mode=mode,
            headers=headers,
        )
        self._codec = Codec(action_cls, observation_cls, state_cls)
        self._session_id = session_id
        self._durable = durable
        self._ends_at_close = False
        self._log = DeliveryLog()
        self._lineage = Lineage(self._log, self._fetch, lambda eid: self._http().episode(eid))
        self._in_doubt: str | None = None
        self._closed = False
        self._door: HttpDoor | None = None

    @property
    def eid(self) -> str | None:
        """Key of the running episode; None before a reset. A vanilla server mints none, so the client does."""
        return self._log.eid

    @property
    def t(self) -> int | None:
        """Last delivery of the running episode that is known of: 0 is the reset's. None before a reset."""
        return self._log.t

    @property
    def session_id(self) -> str | None:
        """Address of a given-out session, to attach again with; None for a session that ends with its socket."""
        return self._session_id

    async def capabilities(self) -> Capabilities | None:
        """Return what the server can do, None on a vanilla one. Connects if this client never did."""
        self._enter()
        await self._ensure_probed()
        return self._capabilities

    async def state_at(self, t: int, eid: str | None = None) -> StateAt:
        """Return the exact bytes that were delivered as ``t``. Never disturbs the session.

        Args:
            t: Delivery index: 0 is the reset's.
            eid: Episode; None is the running one. Episodes that have ended stay readable.

        Returns:
            The payload, verified against its digest; ``source`` says whether the server's journal or, on a vanilla
            server, this client's own record answered.

        Raises:
            StateOutOfRange: The episode has no delivery ``t``.
            UnknownEpisode: No such episode.
            NoReset: No episode is running, or ``t=0`` was never delivered.
            DigestMismatch: The bytes changed on the way.
        """
        self._enter()
        if type(t) is not int:
            raise InvalidRequest(f"t is {t!r}: give the index of a delivery, 0 for the reset's")
        await self._ensure_probed()
        if not self._offers("state_at"):
            return self._log.lookup(t, eid)
        return await self._fetch(t, eid)

    async def history(self, eid: str | None = None) -> list[StateAt]:
        """Return the deliveries of an episode in order, a fork's beginning with those of its parent before the fork.

        A forked child's first own delivery (its t=0) is its parent's at the fork, so that one is not listed twice.

        Args:
            eid: Episode; None is the running one. What this client did not receive itself is fetched.

        Returns:
            The deliveries; empty when no episode is running.

        Raises:
            UnknownEpisode: No such episode.
        """
        self._enter()
        await self._ensure_probed()
        target = eid if eid is not None else self._log.eid
        if target is None:
            return []
        if not self._offers("state_at"):
            if kept := self._log.kept(target):
                return kept
            raise UnknownEpisode(target)
        return await self._lineage.trace(target)

    async def fork(self, t: int, *, eid: str | None = None) -> ErrataClient[ActT, ObsT, StateT]:
        """Start another session from delivery ``t``; this one goes on undisturbed.

        Args:
            t: The delivery the child stands at, as its own t=0.
            eid: Episode to fork; None is the running one. It may have ended.

        Returns:
            A connected client of the same class and parameters. It needs no reset, and is closed with this one.

        Raises:
            NotSupported: The server cannot fork.
            StateOutOfRange: The episode has no delivery ``t``.
            NoReset: No episode is running.
        """
        self._enter()
        child = await self._forked(t, eid)
        try:
            await child.connect()
        except BaseException:
            await child._close_async()
            raise
        self._child_clients[:] = [c for c in self._child_clients if not c._closed]
        self._child_clients.append(child)
        return child

    async def reattach(self) -> Self:
        """Attach again to the given-out session, after its socket was lost or from another place.

        Afterwards `eid` and `t` say where the session stands: a ``t`` one further than before means that the step
        whose reply was lost did act, and ``state_at(client.t)`` is its outcome.

        Raises:
            NotSupported: The session was never given out and ended with its socket.
            SessionUnknown: The server does not know it (any more).
            ConnectionError: The server cannot be reached.
        """
        self._enter()
        if self._session_id is None:
            raise NotSupported(
                "this session was never given out, so it ends with its socket: use ErrataClient(..., durable=True), "
                "or fork the episode from its last (eid, t)"
            )
        async with self.turn():
            if self.is_open:
                await self._disconnect_async()
            await self._open()
            self._settle()
        return self

    async def end_session(self) -> None:
        """End a given-out session on the server and close this client. Its episodes stay readable."""
        self._enter()
        self._ends_at_close = self._session_id is not None
        await self._close_async()

    async def call_tool(self, name: str, arguments: dict[str, Any] | None = None) -> Any:
        """Call a tool of an MCP environment within this session; a delivery like a step.

        Returns:
            The JSON-RPC ``result``.

        Raises:
            ServiceError: The tool call failed; `t` tells whether that was a delivery.
        """
        self._enter()
        params = {"name": name, "arguments": arguments or {}}
        request = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        reply = (await self._send_and_receive({"type": "mcp", "data": request}))["data"]
        if not isinstance(reply, dict):
            raise FrameInvalid(f"tool {name!r} was answered with no JSON-RPC object")
        if (error := reply.get("error")) is not None:
            message = error.get("message") if isinstance(error, dict) else error
            raise ServiceError(f"tool {name!r} failed: {message}", rpc_error=error)
        return reply.get("result")

    def sync(self) -> SyncErrataClient[ActT, ObsT, StateT]:
        """Return the blocking form of this client, usable from any thread."""
        from .sync import SyncErrataClient

        if self._sync_client is None:
            self._sync_client = SyncErrataClient(self)
        client: SyncErrataClient[ActT, ObsT, StateT] = self._sync_client
        return client

    def __enter__(self) -> SyncErrataClient[ActT, ObsT, StateT]:
        """Connect and return the blocking form: ``with ErrataClient(url) as client`` is sync code."""
        return self.sync().connect()

    def __exit__(self, *exc_info: object) -> None:
        self.sync().close()

    async def __aenter__(self) -> Self:
        """Connect, as `EnvClient` does."""
        await super().__aenter__()
        return self

    def _step_payload(self, action: ActT) -> dict[str, Any]:
        return self._codec.action(action)

    def _parse_result(self, payload: dict[str, Any]) -> Any:
        return self._codec.result(payload)

    def _parse_state(self, payload: dict[str, Any]) -> Any:
        return self._codec.state(payload)

    def _create_session_client(self) -> ErrataClient[ActT, ObsT, StateT]:
        child: ErrataClient[ActT, ObsT, StateT] = super()._create_session_client()
        child._codec, child._durable = self._codec, self._durable
        return child

    async def _forked(self, t: int, eid: str | None) -> ErrataClient[ActT, ObsT, StateT]:
        """Fork on the server and return a client of the child that is not connected yet."""
        await self._ensure_probed()
        if not self._offers("fork"):
            raise NotSupported(f"this server cannot fork an episode: {why_no_fork(self._capabilities)}")
        target = eid if eid is not None else self._log.eid
        if target is None:
            raise NoReset("no episode is running here: call reset() first, or name an eid")
        reply = await self._http().fork(target, t, str(uuid.uuid4()))
        child = self._create_session_client()
        child._session_id, child._ends_at_close = reply.session_id, not self._durable
        child._log.seed(self._lineage.ancestors(target, t))
        child._log.move(reply.eid, reply.t)
        child._lineage.origins.update({**self._lineage.origins, reply.eid: reply.origin})
        return child

    async def _connect_async(self) -> Self:
        async with self.turn():
            if not self.is_open:
                if self._session_id is None:
                    self._log.leave()  # a plain session ended with its socket: this is another one
                await self._open()
            self._settle()
        return self

    async def _send_and_receive(self, message: dict[str, Any]) -> dict[str, Any]:
        async with self.turn():
            frame = await self._ask(message)
        return {"type": frame.type, "data": frame.data}

    async def _close_async(self) -> None:
        if self._connecting:
            await super()._close_async()
            return
        self._closed = True
        try:
            if self._ends_at_close and self._session_id is not None and self._ws_url is not None:
                await self._disconnect_async()  # the server ends no session that a socket is attached to
                try:
                    await self._http().close_session(self._session_id)
                except (ErrataError, OSError):
                    pass  # best effort, as upstream's close is: a server that is gone keeps nothing to end
                self._ends_at_close = False
        finally:
            try:
                await super()._close_async()
            finally:
                if self._door is not None:
                    await self._door.aclose()

    def _enter(self) -> None:
        """Claim async use of this client, unless the blocking form called from its own loop."""
        if self._execution_mode != "sync" or self._sync_client is None or not self._sync_client.owns_running_loop():
            self._claim_execution_mode("async")

    def _offers(self, extension: str) -> bool:
        return self._capabilities is not None and self._capabilities.offers(extension)

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

    async def _ensure_probed(self) -> None:
        if not self._probed:
            await self._connect_async()

    async def _open(self) -> None:
        """Open the socket and learn where the session stands. The caller holds the turn."""
        self._closed = False
        self._start_provider_if_needed()
        if self._durable and self._session_id is None:
            self._session_id = await self._http().create_session()
        await self.open_socket()
        position = self._capabilities.session if self._capabilities is not None else None
        if self._session_id is None or position is None or position.eid is None or position.t is None:
            return
        eid, t = position.eid, position.t
        if eid == self.eid and self.t is not None and t < self.t:
            self.drop_socket()
            raise SessionLost(
                f"the server has episode {eid} at t={t} but delivered t={self.t} before: acknowledged deliveries are "
                "gone; fork what is left, or open another session",
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
                raise SessionLost(
                    f"the socket of this session was lost at t={self.t} of episode {self.eid}, and a session that was "
                    "never given out ends with its socket: reset, or fork the episode from there",
                    eid=self.eid,
                    t=self.t,
                )
            await self._open()
        if self._in_doubt is not None and kind in ("step", "mcp"):
            raise SessionLost(self._in_doubt) if self._capabilities is None else InvalidRequest(self._in_doubt)
        text = self.encode(message)
        try:
            frame = self.expect(await self.exchange(text), reply_type(message))
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
        self._in_doubt = f"the reply to a {kind} after t={self.t} was lost: {way_out}"

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

    async def _fetch(self, t: int, eid: str | None) -> StateAt:
        """Read one delivery from the server: over the socket if one is open, else without opening a session for it."""
        target = eid if eid is not None else self._log.eid
        if target is None or self.is_open:
            wanted = {"t": t} if eid is None else {"t": t, "eid": eid}
            try:
                async with self.turn():
                    frame = await self._ask({"type": "state", "data": wanted})
                return replayed(frame, t, eid)
            except UnknownEpisode:
                if eid is None or eid == self._log.eid:
                    raise
        # The socket knows the episodes of its session; the journal knows those of all.
        assert target is not None
        return await self._http().state_at(target, t)

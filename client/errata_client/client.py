"""The Errata client: OpenEnv's `EnvClient` with state(t), fork, history and sessions that outlive their sockets.

Against an Errata server every delivery is verified by its digest and any past one is read back from the journal.
Against a vanilla OpenEnv server the client answers state(t) from the bytes it received itself (`DeliveryLog`).

Whether it goes over a multiplexed socket or a plain one is decided at its first connect (`Door`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from errata_protocol.capabilities import Capabilities
from errata_protocol.errors import (
    InvalidRequest,
    NoReset,
    NotSupported,
    ServiceError,
    UnknownEpisode,
)
from errata_protocol.replay import Kind, StateAt

from .codec import Codec
from .connection import Connection
from .dialing import Dial
from .doors import Begun, ChildDoors, Door
from .fallback import DeliveryLog
from .frames import FrameInvalid
from .http_door import why_no_fork
from .late_rewards import Reward
from .mux_door import MuxDoor
from .plain_door import PlainDoor
from .plain_ws import ActT, ObsT, SocketClient, StateT
from .stats import SessionStats
from .ticket import Ticket, read_ticket
from .trace import Lineage

if TYPE_CHECKING:
    from .sync import SyncErrataClient


class ErrataClient(SocketClient[ActT, ObsT, StateT]):
    """Client of one environment session, on an Errata server or a vanilla OpenEnv one.

    It takes and returns mappings. With ``action_cls``, ``observation_cls`` and ``state_cls``, or together with the
    environment's own client (``class MyClient(ErrataClient, MyEnv)``), it is typed.

    ``reset``, ``step``, ``state``, ``connect``, ``close``, ``new_session`` and ``from_docker_image`` are `EnvClient`'s.
    In sync code use ``client.sync()`` or ``with ErrataClient(...) as client``; the methods below are coroutines.

    Args:
        base_url: As `EnvClient` has it, and so are the other positional arguments.
        action_cls: Class of actions; None takes mappings and Pydantic models as they are.
        observation_cls: Class of observations; None gives mappings.
        state_cls: Class of the state; None gives mappings.
        session_id: Attach to this given-out session instead of opening a new one. ``close`` detaches from it.
        durable: Have the server give the session out at the first connect, so that any OpenEnv client can attach to it
            by `attach_url`. ``close`` detaches from it; `end_session` ends it. Forked children are durable if their
            parent is, else they end at ``close``. Without ``mux`` or ``connection`` such a session is a plain one.
        connection: Carry the session on this multiplexed connection; by default clients of an event loop share one.
        mux: True takes no plain socket, False no multiplexed one; None takes the multiplexed one where it is offered,
            except for sessions by `session_id`. On a multiplexed socket every session survives a lost socket.
        retries: How often a request is sent again by itself after an infrastructure failure that the server rolled back
            (SANDBOX_FAILED); only on a multiplexed socket. `stats` counts them.
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
        connection: Connection | None = None,
        mux: bool | None = None,
        retries: int = 2,
    ) -> None:
        if connection is not None and base_url is None:
            base_url = connection.base_url
        if session_id is not None and (mux or connection is not None):
            raise InvalidRequest("session_id names a plain session: a multiplexed one is continued by its ticket")
        for name, seconds in (("connect_timeout_s", connect_timeout_s), ("message_timeout_s", message_timeout_s)):
            if math.isnan(seconds):
                raise ValueError(f"{name} is not a number: give seconds")
        if connection is not None and mux is False:
            raise InvalidRequest("connection= is a multiplexed one: leave mux=False out")
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
        self._session_id = session_id
        self._durable = durable
        self._mux_wanted = mux
        self._connection = connection
        self._retries = retries
        self._log = DeliveryLog()
        self._plain = PlainDoor(self, self._log, durable=durable)
        self._mux = self._new_mux()
        self._codec = Codec(action_cls, observation_cls, state_cls)
        self._lineage = Lineage(self._log, self._fetch, lambda eid: self._http().episode(eid))

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

    @property
    def attach_url(self) -> str | None:
        """``base_url`` with which any OpenEnv client attaches to the given-out session; None where there is none.

        As secret as `session_id`, which stands in it.
        """
        return None if self._session_id is None else f"{self._base_url}/ws?session_id={self._session_id}&"

    @property
    def stats(self) -> SessionStats:
        """What this client had to ask for again, and what became of it; on a plain socket nothing is counted."""
        return self._mux.stats

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
        """Attach again to the session, after its socket was lost or another process took it over.

        Afterwards `eid` and `t` say where the session stands: a ``t`` one further than before means that the step
        whose reply was lost did act, and ``state_at(client.t)`` is its outcome. On a multiplexed socket, which attaches
        again by itself, it waits until no request is without outcome.

        Raises:
            NotSupported: The session was never given out and ended with its socket.
            SessionUnknown: The server does not know it (any more).
            ConnectionError: The server cannot be reached.
            TimeoutError: A request is still running after ``message_timeout_s``.
        """
        self._enter()
        await self._door.reattach()
        return self

    async def end_session(self) -> None:
        """End a given-out session on the server and close this client. Its episodes stay readable."""
        self._enter()
        await self._end()
        await self._close_async()

    async def rewards(self, eid: str | None = None) -> list[Reward]:
        """Return the rewards that came after their step, in the order they came.

        Args:
            eid: Episode; None is the running one.

        Raises:
            UnknownEpisode: No such episode.
            NoReset: No episode is running.
        """
        self._enter()
        await self._ensure_probed()
        target = eid if eid is not None else self._log.eid
        if target is None:
            raise NoReset("no episode is running here: call reset() first, or name an eid")
        return await self._door.rewards(target)

    def on_reward(self, callback: Callable[[Reward], None] | None) -> None:
        """Have ``callback`` called, on the event loop, with each late reward that the server pushes, once and in order.

        Only multiplexed sessions are pushed to. Read earlier ones by `rewards`.
        """
        self._mux.on_reward = callback

    def ticket(self) -> Ticket:
        """Return what another process needs to continue the multiplexed session: `resume`. JSON-able, and secret.

        From now on the session does not end with this client; a request in flight is delivered to its next process.

        Raises:
            NotSupported: There is no multiplexed session.
        """
        return self._mux.ticket()

    @classmethod
    def resume(cls, base_url: str, ticket: Mapping[str, Any], **kwargs: Any) -> Self:
        """Return a client that continues a session of another process when it connects. ``close`` leaves the session.

        Args:
            base_url: Of the same environment.
            ticket: What `ticket` returned.
            kwargs: As for the class.

        Raises:
            InvalidRequest: It is no ticket.
        """
        client = cls(base_url, **kwargs)
        client._mux_wanted = True
        client._mux = client._new_mux(read_ticket(ticket))
        return client

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

    async def _end(self) -> None:
        """Have the session ended by the close that follows."""
        await self._mux.leave(end=True)
        self._plain.ends_at_close = self._session_id is not None

    def _step_payload(self, action: ActT) -> dict[str, Any]:
        theirs = self._of_other_base("_step_payload") if self._codec.action_cls is None else None
        return self._codec.action(action) if theirs is None else theirs(action)

    def _parse_result(self, payload: dict[str, Any]) -> Any:
        theirs = self._of_other_base("_parse_result") if self._codec.observation_cls is None else None
        return self._codec.result(payload) if theirs is None else theirs(payload)

    def _parse_state(self, payload: dict[str, Any]) -> Any:
        theirs = self._of_other_base("_parse_state") if self._codec.state_cls is None else None
        return self._codec.state(payload) if theirs is None else theirs(payload)

    def _of_other_base(self, name: str) -> Callable[[Any], Any] | None:
        """Return a method of the environment's own client: ``class MyClient(ErrataClient, MyEnv)`` speaks its types."""
        bases = type(self).__mro__
        for base in bases[bases.index(ErrataClient) + 1 :]:
            method = vars(base).get(name)
            if method is not None and not getattr(method, "__isabstractmethod__", False):
                bound: Callable[[Any], Any] = method.__get__(self)
                return bound
        return None

    def _create_session_client(self) -> ErrataClient[ActT, ObsT, StateT]:
        child: ErrataClient[ActT, ObsT, StateT] = super()._create_session_client()
        child._codec, child._durable, child._retries = self._codec, self._durable, self._retries
        child._mux_wanted, child._connection = self._mux_wanted, self._connection
        child._plain, child._mux = PlainDoor(child, child._log, durable=self._durable), child._new_mux()
        return child

    async def _forked(self, t: int, eid: str | None) -> ErrataClient[ActT, ObsT, StateT]:
        """Fork on the server and return a client of the child that is not connected yet."""
        await self._ensure_probed()
        if not self._offers("fork"):
            raise NotSupported(f"this server cannot fork an episode: {why_no_fork(self._capabilities)}")
        target = eid if eid is not None else self._log.eid
        if target is None:
            raise NoReset("no episode is running here: call reset() first, or name an eid")
        child = self._create_session_client()
        reply = await self._door.fork(t, eid, target, ChildDoors(child._plain, child._mux))
        child._log.seed(self._lineage.ancestors(target, t))
        child._log.move(reply.eid, reply.t)
        child._lineage.origins.update({**self._lineage.origins, reply.eid: reply.origin})
        return child

    async def _close_async(self) -> None:
        if self._connecting:
            await super()._close_async()
            return
        self._closed = True
        try:
            await self._plain.end_given_out()
        finally:
            try:
                await super()._close_async()
            finally:
                if self._http_door is not None:
                    await self._http_door.aclose()

    def _enter(self) -> None:
        """Claim async use of this client, unless the blocking form called from its own loop."""
        if self._execution_mode != "sync" or self._sync_client is None or not self._sync_client.owns_running_loop():
            self._claim_execution_mode("async")

    # -- the door ---------------------------------------------------------------------------------------------------

    @property
    def _door(self) -> Door:
        """The multiplexed door while it has a session, else the plain one."""
        return self._mux if self._mux.is_there else self._plain

    def _new_mux(self, ticket: Ticket | None = None) -> MuxDoor:
        durable, connection, retries = self._durable, self._connection, self._retries
        return MuxDoor(self, self._log, connection=connection, ticket=ticket, durable=durable, retries=retries)

    async def _find_door(self) -> bool:
        """Choose the multiplexed door if it is wanted and the server has one; the socket found else is the plain one.

        So a vanilla server is asked nothing that it does not know.

        Returns:
            Whether the multiplexed door was chosen now, and is to be connected.
        """
        wanted = self._mux_wanted is not False and (
            self._mux_wanted or self._connection is not None or not self._durable
        )
        mux = self._mux
        if not wanted or self._session_id is not None or mux.is_there or self.is_open:
            return False
        async with self.turn():
            if mux.is_there or self.is_open:
                return mux.is_there
            self._start_provider_if_needed()
            assert self._base_url is not None and self._ws_url is not None
            dial = Dial(
                self._ws_url,
                Dial.header_items(self._headers),
                self._connect_timeout,
                self._websocket_ping_interval_s,
                self._websocket_ping_timeout_s,
                self._max_message_size,
            )
            try:
                plain = await mux.find(self._base_url, dial)
            except ConnectionError:
                await self._give_up()
                raise
            if mux.is_there:
                self._closed = False
                self._log.leave()
                return True
            if self._mux_wanted:
                if plain is not None:
                    self._schedule_socket_close(plain)
                raise NotSupported(
                    f"{self._base_url} does not speak the multiplexed protocol: leave mux= and tickets out, a plain "
                    "session is attached to by session_id="
                )
            self._handed = plain
            return False

    async def _connect_async(self) -> Self:
        await self._find_door()
        await self._door.connect()
        return self

    async def _disconnect_async(self) -> None:
        await self._mux.leave()
        await super()._disconnect_async()

    async def _ensure_probed(self) -> None:
        if not self._probed:
            await self._connect_async()

    async def _send_and_receive(self, message: dict[str, Any]) -> dict[str, Any]:
        if (message["type"] == "reset" or self._log.eid is None) and await self._find_door():
            await self._door.connect()
        patience_s = max(self._message_timeout, self._call_timeout_s(message["type"], message.get("data")))
        return await self._door.ask(message, patience_s)

    def _call_timeout_s(self, kind: str, data: Any) -> float:
        """Return the longest time that a request may take by the server's capabilities; 0 where they name none."""
        capabilities = self._door.capabilities or self._capabilities
        return 0.0 if capabilities is None or kind != "step" else capabilities.patience_s(data, 0.0)

    def _begin(self, kind: Kind, data: dict[str, Any], done: Callable[[Any], None]) -> Begun | None:
        return self._door.begin(kind, data, done)

    async def _fetch(self, t: int, eid: str | None) -> StateAt:
        return await self._door.state_at(t, eid)

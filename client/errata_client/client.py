"""The Errata client: OpenEnv's `EnvClient` with state(t), fork, history and sessions that outlive their sockets.

On an Errata server every delivery is verified by its digest, and past ones are read from the server's journal. On a
vanilla OpenEnv server the client answers state(t) from the bytes that it received itself (`DeliveryLog`).

The first connect chooses between a multiplexed connection and a plain socket (`Door`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from errata_protocol.capabilities import Capabilities
from errata_protocol.episode_lists import EVERY, NEWEST, EpisodeFilter, EpisodeOrder, page_query
from errata_protocol.errors import (
    InvalidRequest,
    NoReset,
    NotSupported,
    ServiceError,
    UnknownEpisode,
)
from errata_protocol.labels import EXTENSION, NO_LABELS, VERSION, Labels
from errata_protocol.replay import EpisodePage, Kind, StateAt

from .connections.connection import Connection
from .connections.dialing import Dial, is_list, ws_url_of
from .connections.stats import SessionStats
from .connections.ticket import Ticket, read_ticket
from .deliveries.delivery_log import DeliveryLog
from .deliveries.late_rewards import Reward
from .deliveries.lineage import Lineage
from .doors.door import ChildDoors, Door, PendingRequest
from .doors.http_door import why_no_fork, without_secrets
from .doors.mux_door import MuxDoor
from .doors.plain_door import PlainDoor
from .doors.socket_client import ActT, ObsT, SocketClient, StateT
from .wire.codec import Codec
from .wire.frames import FrameInvalid

if TYPE_CHECKING:
    from .sync import SyncErrataClient


_OF_ONE_PROCESS = frozenset(
    [
        "_capabilities", "_child_clients", "_closed", "_connecting", "_execution_mode", "_http_door", "_lineage",
        "_lock", "_lock_loop", "_log", "_mux", "_opened_socket", "_pending_close_tasks", "_plain", "_probed",
        "_sync_client", "_ws", "_ws_loop",
    ]
)  # fmt: skip
"""Attributes that a client in another process has of its own."""


class ErrataClient(SocketClient[ActT, ObsT, StateT]):
    """Client of one environment session, on an Errata server or a vanilla OpenEnv one.

    Actions, observations and states are mappings, or objects of ``action_cls``, ``observation_cls`` and ``state_cls``;
    with ``class MyClient(ErrataClient, MyEnv)`` they are those of the environment's own client.

    ``reset``, ``step``, ``state``, ``connect``, ``close``, ``new_session`` and ``from_docker_image`` are `EnvClient`'s.
    In sync code use ``client.sync()`` or ``with ErrataClient(...) as client``; the methods below are coroutines.

    Args:
        base_url: As for `EnvClient`, and so are the other positional arguments.
        action_cls: Class of actions; None takes mappings and Pydantic models as they are.
        observation_cls: Class of observations; None gives mappings.
        state_cls: Class of the state; None gives mappings.
        session_id: Attach to this given-out session instead of opening a new one. ``close`` detaches from it.
        durable: Have the server give the session out at the first connect, so that any OpenEnv client can attach to it
            by `attach_url`. ``close`` detaches from it; `end_session` ends it. Forked children are durable if their
            parent is, else they end at ``close``. Without ``mux`` or ``connection`` the socket is a plain one.
        connection: The multiplexed connection to use; by default clients of an event loop share one.
        mux: True requires a multiplexed connection, False a plain socket. None uses a multiplexed connection where the
            server offers it, and a plain socket with ``session_id`` or ``durable``. Sessions on a multiplexed
            connection survive a lost socket.
        retries: How often a request is sent again after an infrastructure failure that the server rolled back
            (SANDBOX_FAILED); only on a multiplexed connection. `stats` counts them.
        labels: Labels of the episodes (`labels`).
        resend_after_s: Longest wait for a reply on one plain socket, seconds. Then the client attaches to its given-out
            session again and sends the request again, until ``message_timeout_s`` is over. Needs a server that executes
            a request with an id once (``request_id`` in its capabilities). None waits on the one socket.
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
        resend_after_s: float | None = None,
        labels: Labels = NO_LABELS,
    ) -> None:
        if connection is not None and base_url is None:
            base_url = connection.base_url
        if session_id is not None and (mux or connection is not None):
            raise InvalidRequest("session_id names a plain session: a multiplexed one is continued by its ticket")
        times = {
            "connect_timeout_s": connect_timeout_s,
            "message_timeout_s": message_timeout_s,
            "resend_after_s": resend_after_s,
        }
        for name, seconds in times.items():
            if seconds is not None and math.isnan(seconds):
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
        if base_url is not None and is_list(base_url):
            self._ws_url = ws_url_of(base_url)  # `EnvClient` would take it for a host
        self._session_id = session_id
        self._durable = durable
        self._mux_wanted = mux
        self._connection = connection
        self._retries = retries
        self.labels = labels
        self._resend_after = resend_after_s
        self._log = DeliveryLog()
        self._plain = PlainDoor(self, self._log, durable=durable)
        self._mux = self._new_mux()
        self._codec = Codec(action_cls, observation_cls, state_cls)
        self._lineage = Lineage(self._log, self._fetch, lambda eid: self._http().episode(eid))

    def __getstate__(self) -> dict[str, Any]:
        """Return what a client in another process needs to open a session of its own, or to continue a ticket's.

        Raises:
            TypeError: This client has a session, or a server of its own.
        """
        if self._mux.has_session or self._ws is not None:
            raise TypeError(
                "this client has a session, which stays in its process: hand over client.ticket() and continue it with "
                "ErrataClient.resume() there, or hand over the client before it connects"
            )
        if self._provider is not None:
            raise TypeError("this client's provider runs the server: hand over a client of the server's URL instead")
        kept = {name: value for name, value in self.__dict__.items() if name not in _OF_ONE_PROCESS}
        return {**kept, "_ticket": self._mux.first_ticket}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a client that is not connected."""
        ticket = state.pop("_ticket")
        ErrataClient.__init__(self, "http://127.0.0.1")  # for all that is of one process
        self.__dict__.update(state)
        self._plain, self._mux = PlainDoor(self, self._log, durable=self._durable), self._new_mux(ticket)

    @classmethod
    def from_docker_image(cls, image: str, provider: Any = None, **kwargs: Any) -> Any:
        """Start a container and return its client, as `EnvClient.from_docker_image` does.

        A container that ends before it is ready is an error at once, with its last line and what to do.
        """
        from .containers import ReportingProvider

        return super().from_docker_image(image, ReportingProvider(provider), **kwargs)

    @property
    def eid(self) -> str | None:
        """Key of the running episode; None before a reset. The client makes one where a vanilla server has none."""
        return self._log.eid

    @property
    def read_key(self) -> str | None:
        """What opens this session's episodes to another process on a server without tokens, as its bearer token; None
        before the first reset and where a server tells none. It opens no other session, and steps none."""
        return self._log.read_key

    @property
    def t(self) -> int | None:
        """Index of the last known delivery of the running episode: 0 is the reset's. None before a reset."""
        return self._log.t

    @property
    def labels(self) -> Labels:
        """Labels that the episodes of the next resets have on the server: which run, training step and group of
        rollouts they belong to. The environment does not see them, and a server that does not know them gets none.

        On a multiplexed connection, as by default, they can be set before each reset. On a plain socket they are those
        that the session was opened with, and a reset with others is an InvalidRequest. A fork has its parent's, unless
        `fork` is given others.
        """
        return self._labels

    @labels.setter
    def labels(self, labels: Labels) -> None:
        if not isinstance(labels, Labels):
            raise TypeError(f"labels are Labels(group=..., step=..., run=...), not {type(labels).__name__}")
        self._labels = labels

    @property
    def session_id(self) -> str | None:
        """Id of a given-out session, with which a client attaches to it; None for a session that was not given out."""
        return self._session_id

    @property
    def attach_url(self) -> str | None:
        """``base_url`` with which any OpenEnv client attaches to the given-out session; None where there is none.

        It contains `session_id`: keep it as secret.
        """
        return None if self._session_id is None else f"{self._base_url}/ws?session_id={self._session_id}&"

    @property
    def stats(self) -> SessionStats:
        """Counters of requests, retries and reconnects; on a plain socket nothing is counted."""
        return self._mux.stats

    async def capabilities(self) -> Capabilities | None:
        """Return the server's capabilities; None for a vanilla server. Connects if this client never did."""
        self._enter()
        await self._ensure_probed()
        return self._capabilities

    async def state_at(self, t: int, eid: str | None = None) -> StateAt:
        """Return the payload of delivery ``t``, byte for byte. The session is not changed.

        Args:
            t: Delivery index: 0 is the reset's.
            eid: Episode; None is the running one. Episodes that have ended stay readable.

        Returns:
            The payload, verified by its digest. Its ``source`` is ``server``, or ``history`` where the server has no
            journal and this client's own record answered.

        Raises:
            StateOutOfRange: The episode has no delivery ``t``.
            UnknownEpisode: There is no such episode.
            NoReset: No episode is running, or ``t=0`` was never delivered.
            DigestMismatch: The bytes do not have the digest that the server sent.
            InvalidRequest: ``t`` is not an integer.
        """
        self._enter()
        if type(t) is not int:
            raise InvalidRequest(f"t is {t!r}: give the index of a delivery, 0 for the reset's")
        await self._ensure_probed()
        if not self._offers("state_at"):
            return self._log.lookup(t, eid)
        return await self._fetch(t, eid)

    async def history(self, eid: str | None = None) -> list[StateAt]:
        """Return the deliveries of an episode in order; for a fork, after those of its parent before the fork.

        The parent's delivery at the fork is the child's t=0, and is listed once.

        Args:
            eid: Episode; None is the running one. Deliveries that this client did not receive are read from the server.

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

    async def episodes(
        self,
        *,
        limit: int = 50,
        cursor: str | None = None,
        error_kind: str | None = None,
        episode_id: str | None = None,
        wanted: EpisodeFilter = EVERY,
        order: EpisodeOrder = NEWEST,
    ) -> EpisodePage:
        """Return one page of the episodes of this environment and token. It needs no session.

        Args:
            limit: Most episodes of the page, 1 to 500.
            cursor: ``next`` of the page before; None for the first page.
            error_kind: Only episodes with a turn that is marked with this kind.
            episode_id: Only episodes with this alias, which the client chose.
            wanted: What else the episodes have to be; where an argument is given, too, that one counts.
            order: What the list is sorted by. Each of its pages needs the same one.

        Raises:
            InvalidRequest: An argument is not valid.
            NotSupported: The server has no journal, e.g. a vanilla OpenEnv server.
        """
        self._enter()
        await self._ensure_probed()
        if not self._offers("state_at"):
            raise NotSupported("this server keeps no episodes: it is a vanilla one, or in production mode")
        environment = (
            found.environment if (found := self._door.capabilities or self._capabilities) is not None else None
        )
        given = {"environment": environment, "error_kind": error_kind, "episode_id": episode_id}
        return await self._http().episodes(page_query(limit, cursor, given, wanted, order))

    def __repr__(self) -> str:
        at = f"eid={self.eid!r}, t={self.t}" if self.eid is not None else "no episode"
        return f"<{type(self).__name__} {without_secrets(self._base_url)}: {at}>"

    async def fork(
        self, t: int, *, eid: str | None = None, labels: Labels | None = None
    ) -> ErrataClient[ActT, ObsT, StateT]:
        """Start another session from delivery ``t``. This session is not changed.

        Args:
            t: The delivery that is the child's t=0.
            eid: Episode to fork; None is the running one. It may have ended.
            labels: All labels of the child, so ``Labels()`` for none; None gives it the parent's.

        Returns:
            A connected client of the same class and parameters. It needs no reset, and is closed when this client is.

        Raises:
            NotSupported: The server cannot fork, or takes no labels for forks.
            StateOutOfRange: The episode has no delivery ``t``.
            NoReset: No episode is running.
        """
        self._enter()
        child = await self._forked(t, eid, labels)
        try:
            await child.connect()
        except BaseException:
            await child._close_async()
            raise
        self._child_clients[:] = [c for c in self._child_clients if not c._closed]
        self._child_clients.append(child)
        return child

    async def reattach(self) -> Self:
        """Attach to the session again, after its socket was lost or another process took the session over.

        Afterwards `eid` and `t` are the session's position. A ``t`` that is one larger than before means that the step
        whose reply was lost did run, and ``state_at(client.t)`` is its outcome. A multiplexed connection attaches again
        by itself; there this waits until every request has an outcome.

        Raises:
            NotSupported: The session was never given out and ended with its socket.
            SessionUnknown: The server does not have the session.
            ConnectionError: The server cannot be reached.
            TimeoutError: A request has no outcome after ``message_timeout_s``.
        """
        self._enter()
        await self._door.reattach()
        return self

    async def end_session(self) -> None:
        """End the session on the server, also a given-out one, and close this client. Its episodes stay readable."""
        self._enter()
        await self._end()
        await self._close_async()

    async def rewards(self, eid: str | None = None) -> list[Reward]:
        """Return the late rewards of an episode, in the order in which they were posted.

        Args:
            eid: Episode; None is the latest one of this session, also when it is over.

        Raises:
            UnknownEpisode: No such episode.
            NoReset: ``eid`` is None and this session has had no episode.
        """
        self._enter()
        await self._ensure_probed()
        target = eid if eid is not None else self._log.eid
        if target is None:
            raise NoReset("no episode is running here: call reset() first, or name an eid")
        return await self._door.rewards(target)

    def on_reward(self, callback: Callable[[Reward], None] | None) -> None:
        """Set a callback for late rewards: called on the event loop with each one, once and in order. None removes it.

        The server pushes rewards on multiplexed connections only. `rewards` returns earlier ones.
        """
        self._mux.on_reward = callback

    def ticket(self) -> Ticket:
        """Return a ticket with which another process continues the session by `resume`. It can be written as JSON.

        It gives access to the session: keep it secret. From now on the session does not end with this client, and the
        reply to a request in flight is delivered to the next process too.

        Raises:
            NotSupported: There is no multiplexed session.
            ErrataError: The session is not open, was taken over, or ended.
        """
        return self._mux.ticket()

    @classmethod
    def resume(cls, base_url: str, ticket: Mapping[str, Any], **kwargs: Any) -> Self:
        """Return a client that continues a session of another process when it connects. ``close`` detaches from it.

        Args:
            base_url: Base URL of the same environment.
            ticket: What `ticket` returned.
            kwargs: Further arguments of the class.

        Raises:
            InvalidRequest: ``ticket`` is no ticket.
        """
        client = cls(base_url, **kwargs)
        client._mux_wanted = True
        client._mux = client._new_mux(read_ticket(ticket))
        return client

    async def call_tool(self, name: str, arguments: dict[str, Any] | None = None) -> Any:
        """Call a tool of an MCP environment within this session. The call is a delivery, as a step is.

        Args:
            name: Name of the tool.
            arguments: Its arguments; None is no arguments.

        Returns:
            The JSON-RPC ``result``.

        Raises:
            ServiceError: The tool call failed. Where it was a delivery, `t` is one larger than before.
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
        """Connect and return the blocking form, as in ``with ErrataClient(url) as client``."""
        return self.sync().connect()

    def __exit__(self, *exc_info: object) -> None:
        self.sync().close()

    async def __aenter__(self) -> Self:
        """Connect, as `EnvClient` does."""
        await super().__aenter__()
        return self

    async def _end(self) -> None:
        """End the multiplexed session now, and a session with a ``session_id`` when this client is closed."""
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
        """Return the method ``name`` of a base class after `ErrataClient`, bound to this client.

        In ``class MyClient(ErrataClient, MyEnv)`` it is the method of ``MyEnv``. Abstract methods are skipped; None if
        no base class implements it.
        """
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
        child._resend_after, child.labels = self._resend_after, self._labels
        child._plain, child._mux = PlainDoor(child, child._log, durable=self._durable), child._new_mux()
        return child

    async def _forked(self, t: int, eid: str | None, labels: Labels | None) -> ErrataClient[ActT, ObsT, StateT]:
        """Fork on the server and return a client of the child that is not connected yet."""
        await self._ensure_probed()
        if not self._offers("fork"):
            raise NotSupported(f"this server cannot fork an episode: {why_no_fork(self._capabilities)}")
        if labels is not None and not self._offers(EXTENSION, VERSION):
            raise NotSupported("this server gives a fork the labels of its parent: leave labels out")
        target = eid if eid is not None else self._log.eid
        if target is None:
            raise NoReset("no episode is running here: call reset() first, or name an eid")
        child = self._create_session_client()
        if labels is not None:
            child.labels = labels
        reply = await self._door.fork(t, eid, target, ChildDoors(child._plain, child._mux), labels)
        child._log.add(self._lineage.ancestors(target, t))
        child._log.read_key = reply.read_key
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
        """Mark this client as used by async code, unless its blocking form makes the call."""
        if self._execution_mode != "sync" or self._sync_client is None or not self._sync_client.owns_running_loop():
            self._claim_execution_mode("async")

    # -- the door ---------------------------------------------------------------------------------------------------

    @property
    def _door(self) -> Door:
        """The multiplexed door while it has a session, else the plain door."""
        return self._mux if self._mux.has_session else self._plain

    def _new_mux(self, ticket: Ticket | None = None) -> MuxDoor:
        durable, connection, retries = self._durable, self._connection, self._retries
        return MuxDoor(self, self._log, connection=connection, ticket=ticket, durable=durable, retries=retries)

    async def _find_door(self) -> bool:
        """Choose the multiplexed door if it is wanted and the server speaks the protocol.

        The handshake offers the protocol. A socket whose server did not accept it is used by the plain door, so that a
        vanilla server sees one handshake.

        Returns:
            Whether the multiplexed door has a session that is to be connected.
        """
        wanted = self._mux_wanted is not False and (
            self._mux_wanted or self._connection is not None or not self._durable
        )
        mux = self._mux
        if not wanted or self._session_id is not None or mux.has_session or self.is_open:
            return False
        async with self.turn():
            if mux.has_session or self.is_open:
                return mux.has_session
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
                await self._close_unconnected()
                raise
            if mux.has_session:
                self._closed = False
                self._log.end_episode()
                return True
            if self._mux_wanted:
                if plain is not None:
                    self._schedule_socket_close(plain)
                raise NotSupported(
                    f"{self._base_url} does not speak the multiplexed protocol: leave mux= and tickets out, a plain "
                    "session is attached to by session_id="
                )
            self._opened_socket = plain
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
        timeout_s = max(self._message_timeout, self._call_timeout_s(message["type"], message.get("data")))
        return await self._door.ask(message, timeout_s)

    def _call_timeout_s(self, kind: str, data: Any) -> float:
        """Return the longest time that a request may take by the server's capabilities, seconds; 0 if unknown."""
        capabilities = self._door.capabilities or self._capabilities
        return 0.0 if capabilities is None or kind != "step" else capabilities.step_timeout_s(data, 0.0)

    def _begin(self, kind: Kind, data: dict[str, Any], done: Callable[[Any], None]) -> PendingRequest | None:
        return self._door.begin(kind, data, done)

    async def _fetch(self, t: int, eid: str | None) -> StateAt:
        return await self._door.state_at(t, eid)

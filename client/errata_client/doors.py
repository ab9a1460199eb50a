"""Chooses the door of a client, its way to the server: multiplexed or plain, at its first connect.

`MuxDoor` on a socket that it shares with the other clients of its event loop, where the server accepts the
subprotocol; else the socket that it then has is its plain one (`PlainSession`). So a vanilla server is asked nothing
that it does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self

from errata_protocol.errors import ErrataError, NotSupported, UnknownEpisode
from errata_protocol.replay import Kind, StateAt

from .connection import Connection
from .dialing import Dial
from .frames import replayed
from .mux_door import Begun, MuxDoor, encode
from .plain_session import PlainSession
from .plain_ws import ActT, ObsT, StateT
from .ticket import Ticket


class TwoDoors(PlainSession[ActT, ObsT, StateT], Generic[ActT, ObsT, StateT]):
    """A client's session behind either door.

    Args:
        connection: Carry it on this connection.
        mux: True takes no plain socket, False no multiplexed one.
        retries: See `MuxDoor`.
        args: `PlainSession`'s.
        kwargs: Likewise.
    """

    def __init__(
        self, *args: Any, connection: Connection | None, mux: bool | None, retries: int, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._mux_wanted = mux
        self._connection = connection
        self._retries = retries
        self._mux = self._new_mux()

    def _new_mux(self, ticket: Ticket | None = None) -> MuxDoor:
        return MuxDoor(
            self._log, connection=self._connection, ticket=ticket, durable=self._durable, retries=self._retries
        )

    async def _connect_async(self) -> Self:
        await self._find_door()
        if self._mux.is_there:
            await self._connect_mux()
        else:
            await self.connect_plain()
        return self

    async def _find_door(self) -> None:
        """Take the multiplexed door if it is wanted and there, else stay at the plain one."""
        wanted = self._mux_wanted is not False and (
            self._mux_wanted or self._connection is not None or not (self._durable or self._session_id is not None)
        )
        if not wanted or self._mux.is_there or self.is_open:
            return
        async with self.turn():
            if self._mux.is_there or self.is_open:
                return
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
                plain = await self._mux.find(self._base_url, dial)
            except ConnectionError:
                await super()._close_async()  # as upstream: a provider's server is not left behind
                raise
            if self._mux.is_there:
                self._closed = False
                self._log.leave()
                return
            if self._mux_wanted:
                if plain is not None:
                    self._schedule_socket_close(plain)
                raise NotSupported(
                    f"{self._base_url} does not speak the multiplexed protocol: leave mux= and tickets out, a plain "
                    "session is attached to by session_id="
                )
            self._handed = plain

    async def _connect_mux(self) -> None:
        try:
            await self._mux.connect(self._connect_timeout)
        except ConnectionError:
            await super()._close_async()
            raise
        except ErrataError:
            if self._log.eid is None:  # nothing ever happened in it
                await self._mux.leave()
            raise
        self._capabilities, self._probed = self._mux.capabilities, True

    async def _send_and_receive(self, message: dict[str, Any]) -> dict[str, Any]:
        if not self._mux.is_there and not self.is_open and (message["type"] == "reset" or self._log.eid is None):
            await self._find_door()
            if self._mux.is_there:
                await self._connect_mux()
        if self._mux.is_there:
            return await self._mux.ask(message, self._patience_s(message), self._connect_timeout)
        async with self.turn():
            frame = await self._ask(message)
        return {"type": frame.type, "data": frame.data}

    def _call_timeout_s(self, kind: str, data: Any) -> float:
        """Return how long the server says that a request can take; 0 where it says nothing of it."""
        told = (self._mux.capabilities if self._mux.is_there else None) or self._capabilities
        return 0.0 if told is None or kind != "step" else told.patience_s(data, 0.0)

    def _begin(self, kind: Kind, data: dict[str, Any], done: Callable[[Any], None]) -> Begun | None:
        """Send a request of a multiplexed session without waiting for it; None where there is none that is live."""
        return self._mux.begin(kind, encode(data), done) if self._mux.is_live else None

    async def _disconnect_async(self) -> None:
        await self._mux.leave()
        await super()._disconnect_async()

    async def _ensure_probed(self) -> None:
        if not self._probed:
            await self._connect_async()

    async def _fetch(self, t: int, eid: str | None) -> StateAt:
        """Read one delivery from the server: over the socket if one is open, else without opening a session for it."""
        target = eid if eid is not None else self._log.eid
        if target is None or self._mux.is_there or self.is_open:
            try:
                if self._mux.is_there:
                    return await self._mux.state_at(t, eid, self._message_timeout)
                wanted = {"t": t} if eid is None else {"t": t, "eid": eid}
                async with self.turn():
                    frame = await self._ask({"type": "state", "data": wanted})
                return replayed(frame, t, eid)
            except UnknownEpisode:
                if eid is None or eid == self._log.eid:
                    raise
        # The socket knows the episodes of its session; the journal knows those of all.
        assert target is not None
        return await self._http().state_at(target, t)

"""The blocking form of `ErrataClient`, on a background event loop of its own (OpenEnv's `SyncEnvClient`)."""

from __future__ import annotations

import asyncio
import functools
import inspect
from typing import TYPE_CHECKING, Any, Generic, Self

from openenv.core.sync_client import SyncEnvClient

from errata_protocol.capabilities import Capabilities
from errata_protocol.replay import StateAt

from .plain_ws import ActT, ObsT, StateT

if TYPE_CHECKING:
    from .client import ErrataClient


class SyncErrataClient(SyncEnvClient[ActT, ObsT, StateT], Generic[ActT, ObsT, StateT]):  # type: ignore[misc]
    """What `ErrataClient.sync` returns: every method of the client, blocking.

    Any thread may call it; requests of several threads go out one after the other. ``reset``, ``step``, ``state``,
    ``disconnect`` and ``close`` are `SyncEnvClient`'s.
    """

    _async: ErrataClient[ActT, ObsT, StateT]

    @property
    def eid(self) -> str | None:
        """See `ErrataClient.eid`."""
        return self._async.eid

    @property
    def t(self) -> int | None:
        """See `ErrataClient.t`."""
        return self._async.t

    @property
    def session_id(self) -> str | None:
        """See `ErrataClient.session_id`."""
        return self._async.session_id

    def capabilities(self) -> Capabilities | None:
        """Return what the server can do, None on a vanilla one. See `ErrataClient.capabilities`."""
        capabilities: Capabilities | None = self._run(self._async.capabilities())
        return capabilities

    def state_at(self, t: int, eid: str | None = None) -> StateAt:
        """Return the exact bytes that were delivered as ``t``. See `ErrataClient.state_at`."""
        state: StateAt = self._run(self._async.state_at(t, eid))
        return state

    def history(self, eid: str | None = None) -> list[StateAt]:
        """Return the deliveries of an episode in order. See `ErrataClient.history`."""
        states: list[StateAt] = self._run(self._async.history(eid))
        return states

    def fork(self, t: int, *, eid: str | None = None) -> SyncErrataClient[ActT, ObsT, StateT]:
        """Start another session from delivery ``t``. See `ErrataClient.fork`.

        Returns:
            A connected blocking client with its own loop, closed with this one.
        """
        child: ErrataClient[ActT, ObsT, StateT] = self._run(self._async._forked(t, eid))
        return self._adopt(child)

    def new_session(self) -> SyncErrataClient[ActT, ObsT, StateT]:
        """Open another session on the same server, closed with this one."""
        return self._adopt(self._async._create_session_client())

    def reattach(self) -> Self:
        """Attach again to the given-out session. See `ErrataClient.reattach`."""
        self._run(self._async.reattach())
        return self

    def end_session(self) -> None:
        """End a given-out session on the server and close this client. See `ErrataClient.end_session`."""
        self._async._ends_at_close = self._async.session_id is not None
        self.close()

    def call_tool(self, name: str, arguments: dict[str, Any] | None = None) -> Any:
        """Call a tool of an MCP environment. See `ErrataClient.call_tool`."""
        return self._run(self._async.call_tool(name, arguments))

    def connect(self) -> Self:
        """Connect, or attach again, and learn the position. See `ErrataClient.reattach`."""
        super().connect()
        return self

    def __enter__(self) -> Self:
        """Connect."""
        return self.connect()

    def __getattr__(self, name: str) -> Any:
        """Return a method of the async client's own class (``run`` of a terminal), blocking."""
        found = super().__getattr__(name)
        method = getattr(self._async, name)
        if found is not method and inspect.iscoroutinefunction(method):
            functools.update_wrapper(found, method)
        return found

    def __dir__(self) -> list[str]:
        """List the methods of the async client's own class too: shells and editors complete from this."""
        return sorted({*super().__dir__(), *(name for name in dir(self._async) if not name.startswith("_"))})

    def owns_running_loop(self) -> bool:
        """Whether the caller runs on this client's background loop."""
        return asyncio.get_running_loop() is self._loop

    def _adopt(self, child: ErrataClient[ActT, ObsT, StateT]) -> SyncErrataClient[ActT, ObsT, StateT]:
        client = child.sync()
        try:
            client.connect()
        except BaseException:
            client.close()
            raise
        self._child_clients[:] = [c for c in self._child_clients if not c._async._closed]
        self._child_clients.append(client)
        return client

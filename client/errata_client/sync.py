"""`SyncErrataClient`: blocking form of `ErrataClient`, on an event loop that all blocking clients share."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from openenv.core.sync_client import SyncEnvClient

from errata_protocol.capabilities import Capabilities
from errata_protocol.episode_lists import EVERY, NEWEST, EpisodeFilter, EpisodeOrder
from errata_protocol.labels import Labels
from errata_protocol.replay import EpisodePage, StateAt

from .connections import background
from .connections.stats import SessionStats
from .connections.ticket import Ticket
from .deliveries.late_rewards import Reward
from .doors.socket_client import ActT, ObsT, StateT

if TYPE_CHECKING:
    from .client import ErrataClient


T = TypeVar("T")


class SyncErrataClient(SyncEnvClient[ActT, ObsT, StateT], Generic[ActT, ObsT, StateT]):  # type: ignore[misc]
    """Blocking form of an `ErrataClient`, as `ErrataClient.sync` returns it: every method of the client, blocking.

    Any thread may call it. Requests of several threads to one session run one after the other, those to different
    sessions concurrently. ``reset``, ``step``, ``state``, ``disconnect`` and ``close`` are `SyncEnvClient`'s.

    All blocking clients use one background loop, so that they can share a connection. A client whose server is started
    by a provider, which blocks the loop, has a loop and a thread of its own.
    """

    _async: ErrataClient[ActT, ObsT, StateT]
    _loop: asyncio.AbstractEventLoop | None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the client; see `ErrataClient.__getstate__`."""
        return methodcaller("sync"), (self._async,)

    def _ensure_loop(self) -> asyncio.AbstractEventLoop:
        if self._async._provider is not None:
            own: asyncio.AbstractEventLoop = super()._ensure_loop()
            return own
        self._loop = background.loop()
        return self._loop

    def _stop_loop(self) -> None:
        if self._async._provider is not None:
            super()._stop_loop()
        else:
            self._loop = None  # other clients use the loop too

    def _run(self, coro: Any) -> Any:
        """Run a coroutine on the loop and wait for it; an interrupt, e.g. Ctrl-C, cancels it."""
        self._claim_sync_mode()
        return run_blocking(coro, self._ensure_loop())

    @property
    def eid(self) -> str | None:
        """See `ErrataClient.eid`."""
        return self._async.eid

    @property
    def read_key(self) -> str | None:
        """See `ErrataClient.read_key`."""
        return self._async.read_key

    @property
    def t(self) -> int | None:
        """See `ErrataClient.t`."""
        return self._async.t

    @property
    def session_id(self) -> str | None:
        """See `ErrataClient.session_id`."""
        return self._async.session_id

    @property
    def stats(self) -> SessionStats:
        """See `ErrataClient.stats`."""
        return self._async.stats

    @property
    def labels(self) -> Labels:
        """See `ErrataClient.labels`."""
        return self._async.labels

    @labels.setter
    def labels(self, labels: Labels) -> None:
        self._async.labels = labels

    def capabilities(self) -> Capabilities | None:
        """Return the server's capabilities; None for a vanilla server. See `ErrataClient.capabilities`."""
        capabilities: Capabilities | None = self._run(self._async.capabilities())
        return capabilities

    def state_at(self, t: int, eid: str | None = None) -> StateAt:
        """Return the payload of delivery ``t``, byte for byte. See `ErrataClient.state_at`."""
        state: StateAt = self._run(self._async.state_at(t, eid))
        return state

    def history(self, eid: str | None = None) -> list[StateAt]:
        """Return the deliveries of an episode in order. See `ErrataClient.history`."""
        states: list[StateAt] = self._run(self._async.history(eid))
        return states

    def episodes(
        self,
        *,
        limit: int = 50,
        cursor: str | None = None,
        error_kind: str | None = None,
        episode_id: str | None = None,
        wanted: EpisodeFilter = EVERY,
        order: EpisodeOrder = NEWEST,
    ) -> EpisodePage:
        """Return one page of the episodes of this environment and token. See `ErrataClient.episodes`."""
        page: EpisodePage = self._run(
            self._async.episodes(
                limit=limit, cursor=cursor, error_kind=error_kind, episode_id=episode_id, wanted=wanted, order=order
            )
        )
        return page

    def __repr__(self) -> str:
        return f"{self._async!r}.sync()"

    def fork(
        self, t: int, *, eid: str | None = None, labels: Labels | None = None
    ) -> SyncErrataClient[ActT, ObsT, StateT]:
        """Start another session from delivery ``t``. See `ErrataClient.fork`.

        Returns:
            A connected blocking client, closed with this one.
        """
        child: ErrataClient[ActT, ObsT, StateT] = self._run(self._async._forked(t, eid, labels))
        return self._adopt(child)

    def new_session(self) -> SyncErrataClient[ActT, ObsT, StateT]:
        """Open another session on the same server, closed with this one."""
        return self._adopt(self._async._create_session_client())

    def reattach(self) -> Self:
        """Attach to the session again. See `ErrataClient.reattach`."""
        self._run(self._async.reattach())
        return self

    def end_session(self) -> None:
        """End the session on the server and close this client. See `ErrataClient.end_session`."""
        self._run(self._async._end())
        self.close()

    def rewards(self, eid: str | None = None) -> list[Reward]:
        """Return the late rewards of an episode. See `ErrataClient.rewards`."""
        rewards: list[Reward] = self._run(self._async.rewards(eid))
        return rewards

    def on_reward(self, callback: Callable[[Reward], None] | None) -> None:
        """Set a callback for late rewards. It is called on the background thread and must not block.

        See `ErrataClient.on_reward`.
        """
        self._async.on_reward(callback)

    def ticket(self) -> Ticket:
        """Return a ticket with which another process continues the session. See `ErrataClient.ticket`."""
        return self._async.ticket()

    def call_tool(self, name: str, arguments: dict[str, Any] | None = None) -> Any:
        """Call a tool of an MCP environment. See `ErrataClient.call_tool`."""
        return self._run(self._async.call_tool(name, arguments))

    def connect(self) -> Self:
        """Connect, or attach to the session again."""
        super().connect()
        return self

    def __enter__(self) -> Self:
        """Connect."""
        return self.connect()

    def __getattr__(self, name: str) -> Any:
        """Return a further method of the async client's class, e.g. ``TerminalEnv.run``, blocking."""
        found = super().__getattr__(name)
        method = getattr(self._async, name)
        if found is not method and inspect.iscoroutinefunction(method):
            functools.update_wrapper(found, method)
        return found

    def __dir__(self) -> list[str]:
        """Also list the methods of the async client's class, for completion in shells and editors."""
        return sorted({*super().__dir__(), *(name for name in dir(self._async) if not name.startswith("_"))})

    def owns_running_loop(self) -> bool:
        """Return whether the caller runs on this client's background loop."""
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


def run_blocking(coro: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop | None = None) -> T:
    """Run a coroutine on a loop of another thread and wait for its result; an interrupt, e.g. Ctrl-C, cancels it.

    Args:
        coro: The coroutine.
        loop: The loop; None takes the shared background loop.

    Raises:
        RuntimeError: The caller runs on that loop, and would wait for itself.
    """
    loop = loop or background.loop()
    if _runs_here(loop):
        coro.close()
        raise RuntimeError("a blocking call on the client's own loop would wait for itself: use the async form there")
    future = asyncio.run_coroutine_threadsafe(coro, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False

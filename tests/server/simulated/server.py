"""The server of one boot: all that an application has behind its door, without the application.

A FastAPI application takes longer to build than a schedule takes to run; what it adds to a multiplexed socket is
routing, which tests/server/test_mux_door.py goes through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import ConcurrencyConfig
from starlette.websockets import WebSocket

from errata_protocol.capabilities import Capabilities, ServerLimits
from errata_protocol.errors import JournalUnavailable
from errata_protocol.mux import ServerConfig
from errata_server.doors.mcp import McpDoor
from errata_server.doors.mcp_tools import McpTools
from errata_server.doors.mux.detached import DetachedSessions
from errata_server.doors.mux.multiplexer import Multiplexer
from errata_server.doors.mux.socket import MuxSocket
from errata_server.doors.mux.translation import RequestDecoder
from errata_server.doors.readers import Reader
from errata_server.environments.declarations import Declared
from errata_server.episodes.episodes import Episodes
from errata_server.runtime.runtime import Runtime
from errata_server.sandbox.fake.backend import FakeBackend
from errata_server.sessions.decoding import Decoder
from errata_server.sessions.sessions import Sessions
from errata_server.settings import Settings
from errata_server.simulation import SimulatedMachine, SimulatedThreads

from ..environments import CountAction

SETTINGS = Settings(step_timeout_s=5.0, journal_wait_s=0.5, detach_ttl_s=3.0, disk_floor_bytes=0)
CONFIG = ServerConfig(
    limits=ServerLimits(in_flight_session=3, in_flight_socket=8, max_elements=4, detach_ttl_s=3.0),
    retry_after_s=0.3,
    kept_replies=1,  # nearly every repeat is a recall
    high_water_bytes=2048,
)


class Server:
    """One boot's server.

    Args:
        runtime: On the machine's disk.
        factory: Makes environments.
        deterministic: They are declared so.
        places: How many there may be at a time.
        session_timeout_s: Upstream's, None without.

    Attributes:
        loop: Its event loop.
    """

    def __init__(
        self,
        runtime: Runtime,
        factory: Callable[[], Environment[Any, Any, Any]],
        *,
        deterministic: bool,
        places: int,
        session_timeout_s: float | None,
    ) -> None:
        self.runtime = runtime
        self.loop = asyncio.get_running_loop()
        decoder = Decoder(CountAction)
        concurrency = ConcurrencyConfig(max_concurrent_envs=places, session_timeout=session_timeout_s)
        declared = Declared(deterministic=deterministic)
        self.detached = DetachedSessions()
        self.sessions = Sessions(
            runtime, factory, "log", concurrency, declared=declared, decoder=decoder, multiplexed=self.detached
        )
        runtime.live_sessions.add(self.sessions)
        self.episodes = Episodes.of(runtime)
        self.tools = McpTools(CountAction, SETTINGS.step_timeout_s)
        mcp = McpDoor(self.sessions, self.tools)
        decoder.read_mcp = mcp.decode
        self.multiplexer = Multiplexer(
            replace(CONFIG, shard=runtime.store.shard),
            self.sessions,
            self.detached,
            self.episodes,
            RequestDecoder(CountAction, mcp),
            mcp,
            self._offered,
        )
        runtime.shutdown.add_door(self.multiplexer.drain)
        runtime.rewards.subscribe(self.multiplexer.reward_committed)
        runtime.live_sessions.subscribe(self.multiplexer.session_ended)
        driver = self.multiplexer.driver
        driver._finished = self._ended(driver._tasks)  # type: ignore[method-assign]
        self.sockets: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(cls, machine: SimulatedMachine, *args: Any, **more: Any) -> Server:
        """Start one, however often the disk fails meanwhile."""
        while True:
            try:
                runtime = machine.runtime(SETTINGS)
                break
            except JournalUnavailable as error:
                if not isinstance(error.__cause__, OSError):
                    raise
                machine.note(f"not started: {error.__cause__}")
                await asyncio.sleep(1.0)  # the operator tries again
        server = cls(runtime, *args, **more)
        await runtime.start()
        return server

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a connection."""
        told = {"headers": [], **scope, "state": {"principal": scope["errata.principal"]}}
        websocket = WebSocket(told, receive, send)
        await MuxSocket(websocket, self.multiplexer, Reader(self.runtime.store, websocket)).serve()

    async def stop(self, *, drain_s: float = 0.0) -> None:
        """Stop as a process does that was asked to: what runs commits, then everything is closed.

        Args:
            drain_s: How long it answers what was admitted, having sent its clients away; 0 does without.
        """
        if drain_s:
            await self.runtime.shutdown.drain(drain_s)
        await self.sessions.close_all()
        await self.runtime.close()

    @property
    def threads(self) -> SimulatedThreads:
        """Where sync environments run."""
        assert isinstance(self.runtime.threads, SimulatedThreads)
        return self.runtime.threads

    @property
    def backend(self) -> FakeBackend:
        """Where sandboxes are."""
        assert isinstance(self.runtime.sandboxes, FakeBackend)
        return self.runtime.sandboxes

    def check_nothing_leaked(self) -> None:
        """Assert that a server without sockets and with all its sessions closed holds nothing of them."""
        multiplexer, sessions = self.multiplexer, self.sessions
        assert not multiplexer.connections, "sockets were left"
        tasks = multiplexer.driver._tasks
        assert not tasks, f"tasks were left: {tasks}"
        assert not self.detached, f"detached sessions were left: {list(self.detached._by_sid)}"
        protocol = multiplexer.driver.protocol
        assert protocol.sessions == 0, f"{protocol.sessions} sessions were left in the machine"
        assert not protocol._attachments._being_found, "sessions are still looked for"
        assert not sessions.table.live and not sessions.table.detached, (
            f"sessions were left: {list(sessions.table.live)}"
        )
        assert sessions.capacity.used == 0, f"{sessions.capacity.used} places are taken"
        assert not len(sessions.tasks), f"tasks of sessions were left: {sessions.tasks._tasks}"
        assert not self.runtime.rewards._locks and not self.runtime.rewards._owned, "rewards are still under way"
        assert not self.backend.live, f"sandboxes were left: {list(self.backend.live)}"

    @staticmethod
    def _ended(tasks: set[asyncio.Task[None]]) -> Callable[[asyncio.Task[None]], None]:
        def ended(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error  # the door only logs its defects

        return ended

    def _offered(self) -> Capabilities:
        return Capabilities(environment="log", recovery=self.sessions.recovery.name)

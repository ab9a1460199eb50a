"""`HTTPEnvServer`: OpenEnv's server class with journaled session routes; builds the capabilities answer.

Upstream's class registers its routes; those that hold sessions (``/ws``, ``POST /mcp``) are exchanged for ours.
Upstream's class is captured at import, so that a process which replaces it by ours does not find itself.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, WebSocket
from openenv.core.env_server.exceptions import EnvironmentFactoryError, SessionCapacityError
from openenv.core.env_server.http_server import HTTPEnvServer as _UpstreamServer
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction
from openenv.core.env_server.types import (
    ServerCapacityStatus,
    ServerMode,
    SessionInfo,
)

from errata_protocol import markers
from errata_protocol.capabilities import Capabilities
from errata_protocol.environment import EnvironmentSpec
from errata_protocol.errors import CapacityReached, EnvironmentFailed, InvalidRequest

from ..doors import http_routes
from ..doors.asgi_extensions import by_itself
from ..doors.auth import guard
from ..doors.input_errors import BodyLimit
from ..doors.mcp import McpDoor
from ..doors.mcp_socket import McpSocket
from ..doors.mcp_tools import McpTools
from ..doors.mux.multiplexer import Multiplex
from ..doors.mux.socket import MuxSocket, asks_for_mux
from ..doors.mux.translation import Reading
from ..doors.plain_socket import PlainSocket
from ..environments.declarations import Declared
from ..environments.detection import FieldMap
from ..environments.volatile_fields import field_names, resolved
from ..episodes.episodes import Episodes
from ..episodes.retention import Retention
from ..runtime.runtime import Runtime
from ..sessions.decoding import Decoder
from ..sessions.sessions import Sessions
from . import stateless, upstream_routes

log = logging.getLogger("errata.server")


class HTTPEnvServer(_UpstreamServer):
    """Upstream's server class on journaled, replayable sessions.

    Upstream's own session table stays empty: what its remaining routes do with sessions goes through ours.

    Args:
        *args: As upstream.
        runtime: Shared journal and sandboxes; by default the one of ``ERRATA_DATA_DIR``, or one in memory.
        spec: What the environment publishes; its name, tools and ``agent_text`` version are told to clients.
        insecure: Let other machines in without a token, whatever the settings say.
        deterministic: As in `create_fastapi_app`.
        volatile: Likewise.
        detect: Likewise.
        **kwargs: As upstream.

    Raises:
        InvalidRequest: As in `create_fastapi_app`.
    """

    def __init__(
        self,
        *args: Any,
        runtime: Runtime | None = None,
        spec: EnvironmentSpec | None = None,
        insecure: bool = False,
        deterministic: bool = False,
        volatile: Sequence[str] | str = (),
        detect: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        declared = Declared(
            deterministic=deterministic or (spec is not None and spec.deterministic),
            volatile=self._volatile(volatile),
            detect=FieldMap.parse(detect, self.action_cls, self.observation_cls) if detect is not None else None,
            call_timeouts_s=spec.call_timeouts_s if spec is not None else {},
            sandboxed=spec is not None and spec.sandbox,
        )
        decoder = Decoder(self.action_cls)
        self.runtime = runtime or Runtime.chosen()
        self.sessions = Sessions(
            self.runtime,
            self._env_factory,
            self.env_name,
            self._concurrency_config,
            agent_text_version=spec.agent_text_version if spec is not None else None,
            declared=declared,
            decoder=decoder,
            retention=Retention(self.runtime).when_due,
        )
        if declared.volatile and not self.sessions.recovery.survives_restart:
            raise InvalidRequest(
                "volatile names fields that may differ when requests run again, and sessions of "
                f"{self.env_name} are not run again: say deterministic too"
            )
        self.episodes = Episodes.of(self.runtime)
        self.mcp = McpDoor(self.sessions, McpTools(self.action_cls, self.runtime.settings.step_timeout_s))
        decoder.read_mcp = self.mcp.decode
        self._spec = spec
        self._insecure = insecure
        self.told = functools.partial(self.capabilities, ServerMode.SIMULATION)  # until routes say otherwise

    def _volatile(self, given: Sequence[str] | str) -> tuple[str, ...]:
        """Return the fields that may differ, checked against what reset and step return."""
        names = field_names(given)
        if not names:
            return ()  # nothing is looked up in the classes, which some callers leave out or replace with mocks
        classes = {self.observation_cls, self.reset_observation_cls or self.observation_cls}
        made = getattr(self._env_factory, "func", self._env_factory)
        mcp = issubclass(self.action_cls, CallToolAction) or (
            isinstance(made, type) and issubclass(made, MCPEnvironment)
        )
        found, unknown = resolved(names, sorted(classes, key=lambda cls: cls.__name__), mcp=mcp)
        if unknown:
            held = ", ".join(sorted(set().union(*(cls.model_fields for cls in classes)) - {"done", "reward"}))
            log.warning(
                "volatile: %s of %s is no field of its observations (%s) and taken for a key of their metadata",
                ", ".join(unknown),
                self.env_name,
                held,
            )
        return found

    def capabilities(self, mode: ServerMode) -> Capabilities:
        """Return what a capability probe is answered."""
        recovery = self.sessions.recovery
        extensions = {"error_markers": markers.VERSION, "mux": 1}
        if mode is not ServerMode.PRODUCTION:
            extensions["state_at"] = 1
            extensions["delayed_rewards"] = 1
            if recovery.can_fork:
                extensions["fork"] = 1
        return Capabilities(
            environment=self.env_name,
            extensions=extensions,
            recovery=recovery.name,
            agent_text_version=self._spec.agent_text_version if self._spec is not None else None,
            limits=self.runtime.settings.limits,
            call_timeouts_s=dict(self._spec.call_timeouts_s) if self._spec is not None else {},
        )

    def register_routes(self, app: FastAPI, mode: ServerMode | str = ServerMode.SIMULATION) -> None:
        """Register all doors: upstream's routes, with those that hold a session or an instance exchanged for ours.

        Raises:
            ValueError: No such mode, as upstream.
        """
        resolved = mode if isinstance(mode, ServerMode) else _mode(mode)
        if resolved is None:  # upstream says what is wrong with it
            super().register_routes(app, mode)
            return
        simulation = resolved is not ServerMode.PRODUCTION
        told = functools.partial(self.capabilities, resolved)
        http_routes.register(
            app,
            runtime=self.runtime,
            episodes=self.episodes,
            capabilities=lambda: told().model_dump(mode="json", exclude={"session"}),
            replayable=simulation,
        )  # before upstream's greedy Task API
        super().register_routes(app, resolved)
        for path, method in (("/ws", None), ("/mcp", None), ("/mcp", "POST")):
            upstream_routes.take_route(app, path, method)
        stateless.replace(app, self.sessions, self.action_cls, simulation=simulation)
        upstream_routes.shorten_task_api(app, self.env_name)
        http_routes.register_mcp(app, self.mcp, self.runtime.settings.max_frame)

        reading = Reading(self.action_cls, self.mcp)
        multiplex = Multiplex(self.sessions, self.episodes, reading, self.mcp, told, production=not simulation)

        @app.websocket("/ws")
        async def plain_socket(websocket: WebSocket) -> None:
            episodes = self.episodes if simulation else None
            owner = http_routes.principal(websocket)

            async def serve(socket: WebSocket) -> None:
                if asks_for_mux(socket):
                    await MuxSocket(socket, multiplex, owner).serve()
                else:
                    await PlainSocket(socket, self.sessions, episodes, self.mcp, self.action_cls, told, owner).serve()

            await by_itself(websocket, serve)

        @app.websocket("/mcp")
        async def mcp_socket(websocket: WebSocket) -> None:
            owner = http_routes.principal(websocket)
            await by_itself(websocket, lambda socket: McpSocket(socket, self.sessions, self.mcp, owner).serve())

        app.state.errata = self
        self.told = told
        http_routes.answer_errors(app)
        app.add_middleware(BodyLimit, max_body=self.runtime.settings.max_frame)
        guard(app, self.runtime.settings, insecure=self._insecure)

    # -- what upstream's class tells and does about sessions ------------------------------------------------------

    @property
    def active_sessions(self) -> int:
        """Sessions that hold an environment instance."""
        return self.sessions.room.used

    def get_capacity_status(self) -> ServerCapacityStatus:
        """Return how many sessions hold an instance, and how many may."""
        return ServerCapacityStatus.from_counts(active=self.sessions.room.used, max_sessions=self.max_concurrent_envs)

    def get_session_info(self, session_id: str) -> SessionInfo | None:
        """Return what is known of a session of this process; None if it has none by that id."""
        session = self.sessions.table.get(session_id)
        if session is None or session.host is None:
            return None
        return SessionInfo(
            session_id=session_id,
            created_at=session.row.created,
            last_activity_at=session.last_used,
            step_count=session.t or 0,
            environment_type=type(session.host.env).__name__,
        )

    async def _create_session(self) -> tuple[str, Environment[Any, Any, Any]]:
        """Open one of our sessions for upstream's ``/harness`` route, which drives its environment itself.

        Raises what upstream's own method raises: the route tells its client by these types.
        """
        try:
            session = await self.sessions.open()
        except CapacityReached as error:
            raise SessionCapacityError(self.sessions.room.used, self.max_concurrent_envs) from error
        except EnvironmentFailed as error:
            if "factory_name" in error.details:
                raise EnvironmentFactoryError(error.details["factory_name"]) from error
            raise error.__cause__ or error from None
        self.sessions.lifetime.attach(session, self)
        assert session.host is not None
        return session.sid, session.host.env

    async def _destroy_session(self, session_id: str) -> None:
        session = self.sessions.table.get(session_id)
        if session is not None:
            await self.sessions.lifetime.close(session)

    def _update_session_activity(self, session_id: str, increment_step: bool = False) -> None:
        session = self.sessions.table.get(session_id)
        if session is not None:
            session.last_used = self.runtime.clock.time()

    def _start_reaper(self) -> None:
        """Do nothing: each idle session has timers of its own."""

    def _stop_reaper(self) -> None:
        """Do nothing: see `_start_reaper`."""


def _mode(name: str) -> ServerMode | None:
    try:
        return ServerMode(name.lower())
    except ValueError:
        return None

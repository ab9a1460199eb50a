"""`HTTPEnvServer`: OpenEnv's server class with journaled session routes; it builds the capabilities answer.

Upstream's class registers its routes, and those that hold sessions (``/ws``, ``/mcp``) are then replaced by Errata's.
Upstream's class is bound to a name at import: where a process replaces it with this class, the base class stays.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Mapping, Sequence
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

from errata_protocol import fleet, labels, markers
from errata_protocol.capabilities import Capabilities
from errata_protocol.environment import EnvironmentSpec
from errata_protocol.errors import CapacityReached, EnvironmentFailed, InvalidRequest
from errata_protocol.mux import ServerConfig

from ..doors import http_routes
from ..doors.asgi_extensions import serve_detached
from ..doors.auth import guard
from ..doors.capabilities import capabilities_data
from ..doors.input_errors import BodyLimit
from ..doors.labels import label_headers
from ..doors.mcp import McpDoor
from ..doors.mcp_socket import McpSocket
from ..doors.mcp_tools import McpTools
from ..doors.mux.detached import DetachedSessions
from ..doors.mux.multiplexer import Multiplexer
from ..doors.mux.socket import MuxSocket, asks_for_mux
from ..doors.mux.translation import RequestDecoder
from ..doors.plain_socket import PlainSocket
from ..doors.readers import Reader
from ..environments.conformance_probe import probe_of
from ..environments.declarations import Declared
from ..environments.detection import FieldMap
from ..environments.volatile_fields import field_names, resolved
from ..episodes.episodes import Episodes
from ..episodes.retention import Retention
from ..runtime.fleet import PASSED_ON, SocketRelay
from ..runtime.registry import RUNTIMES
from ..runtime.runtime import Runtime
from ..sessions.decoding import Decoder
from ..sessions.sessions import Sessions
from . import stateless, upstream_routes

log = logging.getLogger("errata.server")


class HTTPEnvServer(_UpstreamServer):  # type: ignore[misc]  # openenv ships no types
    """Upstream's server class with journaled, replayable sessions.

    Upstream's own session table stays empty: methods that upstream's remaining routes call use Errata's sessions.

    Args:
        *args: Arguments of upstream's class.
        runtime: Journal and sandboxes to share; by default the runtime of ``ERRATA_DATA_DIR``, or one in memory.
        spec: Description that the environment publishes; clients get its ``agent_text`` version and call timeouts.
        insecure: Allow requests from other machines without a token, even if the settings do not.
        deterministic: As in `create_fastapi_app`.
        volatile: As in `create_fastapi_app`.
        detect: As in `create_fastapi_app`.
        **kwargs: Arguments of upstream's class.

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
        self.runtime = runtime or RUNTIMES.of_application()
        self._detached = DetachedSessions()
        self.sessions = Sessions(
            self.runtime,
            self._env_factory,
            self.env_name,
            self._concurrency_config,
            agent_text_version=spec.agent_text_version if spec is not None else None,
            declared=declared,
            decoder=decoder,
            retention=Retention(self.runtime).when_due,
            multiplexed=self._detached,
        )
        if declared.volatile and not self.sessions.recovery.survives_restart:
            raise InvalidRequest(
                "volatile names fields that may differ when requests run again, and sessions of "
                f"{self.env_name} are not run again: set deterministic, too"
            )
        self.runtime.live_sessions.add(self.sessions)
        self.episodes = Episodes.of(self.runtime)
        self.mcp = McpDoor(self.sessions, McpTools(self.action_cls, self.runtime.settings.step_timeout_s))
        decoder.read_mcp = self.mcp.decode
        self._spec = spec
        if spec is not None:
            self.runtime.specs[self.env_name] = spec
        if spec is not None and spec.unusable:
            self.runtime.readiness.tell(spec.name, functools.partial(_unusable, spec.unusable))
        self._insecure = insecure
        self.offered = functools.partial(
            self.capabilities, ServerMode.SIMULATION
        )  # until `register_routes` knows the mode

    def _volatile(self, given: Sequence[str] | str) -> tuple[str, ...]:
        """Return the full paths of volatile fields; log a warning for names that the observation classes lack.

        Such a name is taken as a key of the observation's metadata.
        """
        names = field_names(given)
        if not names:
            return ()  # do not look into the classes: some callers leave them out or pass mocks
        classes = {self.observation_cls, self.reset_observation_cls or self.observation_cls}
        made = getattr(self._env_factory, "func", self._env_factory)
        mcp = issubclass(self.action_cls, CallToolAction) or (
            isinstance(made, type) and issubclass(made, MCPEnvironment)
        )
        found, unknown = resolved(names, sorted(classes, key=lambda cls: cls.__name__), mcp=mcp)
        if unknown:
            held = ", ".join(sorted(set().union(*(cls.model_fields for cls in classes)) - {"done", "reward"}))
            log.warning(
                "volatile: %s of %s is not a field of its observations (%s) and is taken as a key of their metadata",
                ", ".join(unknown),
                self.env_name,
                held,
            )
        return found

    def capabilities(self, mode: ServerMode) -> Capabilities:
        """Return the answer to a capability probe in the given mode."""
        recovery = self.sessions.recovery
        extensions = {"error_markers": markers.VERSION, "mux": 1, labels.EXTENSION: labels.VERSION}
        if mode is not ServerMode.PRODUCTION:
            extensions["state_at"] = 1
            extensions["delayed_rewards"] = 1
            if recovery.can_fork:
                extensions["fork"] = 1
        if self.runtime.fleet is not None or self.runtime.listed is not None:
            extensions[fleet.EXTENSION] = 1
        return Capabilities(
            environment=self.env_name,
            extensions=extensions,
            recovery=recovery.name,
            agent_text_version=self._spec.agent_text_version if self._spec is not None else None,
            limits=self.runtime.settings.limits,
            call_timeouts_s=dict(self._spec.call_timeouts_s) if self._spec is not None else {},
            shard=self.runtime.store.shard,
        )

    def register_routes(self, app: FastAPI, mode: ServerMode | str = ServerMode.SIMULATION) -> None:
        """Register upstream's routes, replace those that use a session or an instance, and add Errata's own.

        Raises:
            ValueError: The mode is unknown; raised by upstream.
        """
        resolved = mode if isinstance(mode, ServerMode) else _mode(mode)
        if resolved is None:  # upstream raises the error
            super().register_routes(app, mode)
            return
        simulation = resolved is not ServerMode.PRODUCTION
        offered = functools.partial(self.capabilities, resolved)
        http_routes.register(
            app,
            runtime=self.runtime,
            episodes=self.episodes,
            capabilities=lambda: capabilities_data(offered()),
            replayable=simulation,
        )  # before upstream's greedy Task API
        super().register_routes(app, resolved)
        for path, method in (("/ws", None), ("/mcp", None), ("/mcp", "POST")):
            upstream_routes.remove_route(app, path, method)
        stateless.replace(app, self.sessions, self.action_cls, simulation=simulation)
        upstream_routes.add_short_task_api(app, self.env_name)
        http_routes.register_mcp(app, self.mcp, self.runtime.settings.max_frame)
        if (probe := probe_of(self._env_factory, self.action_cls)) is not None:
            http_routes.register_probe(app, probe)

        self.multiplexer = multiplexer = Multiplexer(
            ServerConfig(
                limits=self.runtime.settings.limits,
                production=not simulation,
                shard=self.runtime.store.shard,
                check_ours=None if self.runtime.lease is None else self.runtime.store.check_ours,
                member=self.runtime.listed.member if self.runtime.listed is not None else None,
            ),
            self.sessions,
            self._detached,
            self.episodes,
            RequestDecoder(self.action_cls, self.mcp),
            self.mcp,
            offered,
        )
        self.runtime.shutdown.add_door(multiplexer.drain)
        self.runtime.rewards.subscribe(multiplexer.reward_committed)
        self.runtime.live_sessions.subscribe(multiplexer.session_ended)

        @app.websocket("/ws")
        async def plain_socket(websocket: WebSocket) -> None:
            episodes = self.episodes if simulation else None
            reader, labelled = Reader(self.runtime.store, websocket), label_headers(websocket)
            workers = None if PASSED_ON in websocket.scope else self.runtime.fleet

            def relay(socket: WebSocket) -> SocketRelay | None:
                limits = self.runtime.settings.limits
                return workers.relay(socket, websocket, limits) if workers is not None else None

            async def serve(socket: WebSocket) -> None:
                if asks_for_mux(socket):
                    await MuxSocket(socket, multiplexer, reader, relay(socket)).serve()
                else:
                    await PlainSocket(
                        socket, self.sessions, episodes, self.mcp, self.action_cls, offered, reader, labelled
                    ).serve()

            await serve_detached(websocket, serve)

        @app.websocket("/mcp")
        async def mcp_socket(websocket: WebSocket) -> None:
            owner, labelled = http_routes.principal(websocket), label_headers(websocket)
            await serve_detached(
                websocket, lambda socket: McpSocket(socket, self.sessions, self.mcp, owner, labelled).serve()
            )

        app.state.errata = self
        self.offered = offered
        http_routes.answer_errors(app)
        app.add_middleware(BodyLimit, max_body=self.runtime.settings.max_frame)
        guard(app, self.runtime.settings, insecure=self._insecure)

    # -- upstream's methods about sessions, which its remaining routes call -----------------------------------------

    @property
    def active_sessions(self) -> int:
        """Number of sessions that hold an environment instance."""
        return self.sessions.capacity.used

    def get_capacity_status(self) -> ServerCapacityStatus:
        """Return the number of sessions that hold an instance, and its limit."""
        return ServerCapacityStatus.from_counts(
            active=self.sessions.capacity.used, max_sessions=self.max_concurrent_envs
        )

    def get_session_info(self, session_id: str) -> SessionInfo | None:
        """Describe a session that holds an instance in this process; None for any other id."""
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
        """Open a session for upstream's ``/harness`` route, which calls the environment itself.

        Errors are mapped to those of upstream's method, by which the route chooses its answer.
        """
        try:
            session = await self.sessions.open()
        except CapacityReached as error:
            raise SessionCapacityError(self.sessions.capacity.used, self.max_concurrent_envs) from error
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
        """Do nothing: each idle session has its own timers."""

    def _stop_reaper(self) -> None:
        """Do nothing: see `_start_reaper`."""


def _mode(name: str) -> ServerMode | None:
    try:
        return ServerMode(name.lower())
    except ValueError:
        return None


def _unusable(function: str) -> Mapping[str, str]:
    """Call the function that an environment names as ``module:attribute`` in `EnvironmentSpec.unusable`."""
    module, _, attribute = function.partition(":")
    found: Mapping[str, str] = getattr(importlib.import_module(module), attribute)()
    return found

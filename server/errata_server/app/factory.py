"""A drop-in for ``openenv.core.env_server``: the same functions with the same signatures, on our sessions.

    from errata_server.app import create_app        # instead of openenv.core.env_server

Upstream's class registers its routes; those that hold sessions (``/ws``, ``POST /mcp``) are exchanged for ours.
Upstream's functions are captured at import, so that a process which replaces them by ours does not find itself.
"""

from __future__ import annotations

import functools
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, WebSocket
from openenv.core.env_server.exceptions import EnvironmentFactoryError, SessionCapacityError
from openenv.core.env_server.http_server import HTTPEnvServer as _UpstreamServer
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import (
    Action,
    ConcurrencyConfig,
    Observation,
    ServerCapacityStatus,
    ServerMode,
    SessionInfo,
    State,
)

from errata_protocol.capabilities import Capabilities
from errata_protocol.environment import EnvironmentSpec, Recovery
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
from ..environments.declarations import Declared, field_names
from ..environments.detection import FieldMap
from ..episodes.reads import Replay
from ..runtime.runtime import Runtime
from ..sessions.decoding import Decoder
from ..sessions.sessions import Sessions
from ..settings import Settings
from . import stateless, upstream_routes
from .multi_environment import mount_by_name

__all__ = ["HTTPEnvServer", "create_app", "create_fastapi_app"]


_TITLE = "OpenEnv Environment HTTP API"
_API_VERSION = "1.0.0"  # upstream's title and version: its validator and clients read them
_DESCRIPTION = """
An OpenEnv environment served by Errata: upstream's HTTP and WebSocket API unchanged, with error-site markers, exact
payloads of any step (`/episodes/{eid}/states/{t}`), fork (`/episodes/{eid}/fork`) and sessions that survive a crash.
"""


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
            volatile=field_names(volatile),
            detect=FieldMap.parse(detect, self.action_cls, self.observation_cls) if detect is not None else None,
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
        )
        if declared.volatile and self.sessions.recovery is Recovery.NONE:
            raise InvalidRequest(
                "volatile names fields that may differ when requests run again, and sessions of "
                f"{self.env_name} are not run again: say deterministic too"
            )
        self.replay = Replay(self.runtime)
        self.mcp = McpDoor(self.sessions, McpTools(self.action_cls, self.runtime.settings.step_timeout_s))
        decoder.read_mcp = self.mcp.decode
        self._spec = spec
        self._insecure = insecure
        self.told = functools.partial(self.capabilities, ServerMode.SIMULATION)  # until routes say otherwise

    def capabilities(self, mode: ServerMode) -> Capabilities:
        """Return what a capability probe is answered."""
        recovery = self.sessions.recovery
        extensions = {"error_markers": 1, "mux": 1}
        if mode is not ServerMode.PRODUCTION:
            extensions["state_at"] = 1
            extensions["delayed_rewards"] = 1
            if recovery is not Recovery.NONE:
                extensions["fork"] = 1
        return Capabilities(
            environment=self.env_name,
            extensions=extensions,
            recovery=recovery,
            agent_text_version=self._spec.agent_text_version if self._spec is not None else None,
            limits=self.runtime.settings.limits,
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
            replay=self.replay,
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
        multiplex = Multiplex(self.sessions, self.replay, reading, self.mcp, told, production=not simulation)

        @app.websocket("/ws")
        async def plain_socket(websocket: WebSocket) -> None:
            replay = self.replay if simulation else None
            owner = http_routes.principal(websocket)

            async def serve(socket: WebSocket) -> None:
                if asks_for_mux(socket):
                    await MuxSocket(socket, multiplex, owner).serve()
                else:
                    await PlainSocket(socket, self.sessions, replay, self.mcp, self.action_cls, told, owner).serve()

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
        return self.sessions.active

    def get_capacity_status(self) -> ServerCapacityStatus:
        """Return how many sessions hold an instance, and how many may."""
        return ServerCapacityStatus.from_counts(active=self.sessions.active, max_sessions=self.max_concurrent_envs)

    def get_session_info(self, session_id: str) -> SessionInfo | None:
        """Return what is known of a session of this process; None if it has none by that id."""
        session = self.sessions.live(session_id)
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
            raise SessionCapacityError(self.sessions.active, self.max_concurrent_envs) from error
        except EnvironmentFailed as error:
            if "factory_name" in error.details:
                raise EnvironmentFactoryError(error.details["factory_name"]) from error
            raise error.__cause__ or error from None
        self.sessions.attach(session, self)
        assert session.host is not None
        return session.sid, session.host.env

    async def _destroy_session(self, session_id: str) -> None:
        session = self.sessions.live(session_id)
        if session is not None:
            await self.sessions.close(session)

    def _update_session_activity(self, session_id: str, increment_step: bool = False) -> None:
        session = self.sessions.live(session_id)
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


def create_fastapi_app(
    env: Callable[[], Environment[Any, Any, Any]],
    action_cls: type[Action],
    observation_cls: type[Observation],
    max_concurrent_envs: int | None = None,
    concurrency_config: ConcurrencyConfig | None = None,
    env_name: str | None = None,
    state_cls: type[State] = State,
    *,
    mode: ServerMode | str | None = None,
    reset_observation_cls: type[Observation] | None = None,
    settings: Settings | None = None,
    data_dir: str | Path | None = None,
    runtime: Runtime | None = None,
    spec: EnvironmentSpec | None = None,
    insecure: bool = False,
    deterministic: bool = False,
    volatile: Sequence[str] | str = (),
    detect: str | None = None,
) -> FastAPI:
    """Create the application of one environment; upstream's arguments first, then ours.

    Args:
        env: Factory of one environment instance, usually its class.
        action_cls: Action class.
        observation_cls: Observation class.
        max_concurrent_envs: Upper bound of environment instances; 1 by default, as upstream.
        concurrency_config: Upstream's limits; excludes ``max_concurrent_envs``.
        env_name: Name of the environment; the factory's name by default, as upstream.
        state_cls: State class.
        mode: ``simulation`` or ``production``; ``OPENENV_MODE`` by default.
        reset_observation_cls: What reset returns, if another class.
        settings: How to keep sessions; ``ERRATA_*`` variables by default.
        data_dir: Directory of journal and sandbox layers; overrides the settings' one.
        runtime: Resources shared with other applications; overrides ``settings`` and ``data_dir``.
        spec: What the environment publishes about itself.
        insecure: Let other machines in without a token.
        deterministic: The environment's answers follow from its reset arguments, seed and actions alone: without
            ``snapshot``/``restore`` its sessions are then continued, and forked, by running their requests again.
        volatile: Fields that may nevertheless differ, such as timestamps in ``metadata``; beside ``VOLATILE_FIELDS`` of
            the observation class. A list, or a text with commas between.
        detect: ``stdout=FIELD,stderr=FIELD,exit_code=FIELD[,command=ACTIONFIELD]``: mark failing steps of an
            environment that does not do so itself, in ``observation.metadata``.

    Raises:
        JournalUnavailable: The data directory cannot be used.
        InvalidRequest: ``detect`` is no field mapping, or names fields that are not there; or ``volatile`` names no
            fields, or fields of sessions that are not run again.
    """
    runtime = runtime or Runtime.chosen(settings, data_dir)
    app = FastAPI(title=_TITLE, version=_API_VERSION, description=_DESCRIPTION, lifespan=lifespan)
    server = HTTPEnvServer(
        env,
        action_cls,
        observation_cls,
        max_concurrent_envs,
        concurrency_config=concurrency_config,
        env_name=env_name or (spec.name if spec is not None else None),
        state_cls=state_cls,
        reset_observation_cls=reset_observation_cls,
        runtime=runtime,
        spec=spec,
        insecure=insecure,
        deterministic=deterministic,
        volatile=volatile,
        detect=detect,
    )
    server.register_routes(app, mode=mode or os.environ.get("OPENENV_MODE", ServerMode.SIMULATION.value))
    mount_by_name(app, app.router, server.env_name)
    return app


def create_app(
    env: Callable[[], Environment[Any, Any, Any]],
    action_cls: type[Action],
    observation_cls: type[Observation],
    env_name: str | None = None,
    max_concurrent_envs: int | None = None,
    concurrency_config: ConcurrencyConfig | None = None,
    gradio_builder: Callable[..., Any] | None = None,
    custom_tab_name: str = "Custom",
    custom_tab_primary: bool = False,
    show_default_tab: bool = True,
    title_override: str | None = None,
    state_cls: type[State] = State,
    *,
    mode: ServerMode | str | None = None,
    reset_observation_cls: type[Observation] | None = None,
    settings: Settings | None = None,
    data_dir: str | Path | None = None,
    runtime: Runtime | None = None,
    spec: EnvironmentSpec | None = None,
    insecure: bool = False,
    deterministic: bool = False,
    volatile: Sequence[str] | str = (),
    detect: str | None = None,
) -> FastAPI:
    """Create the application of one environment with upstream's ``create_app`` signature.

    With ``ENABLE_WEB_INTERFACE`` set it also serves upstream's web interface at ``/web``, driving one of our sessions.
    The arguments are those of upstream's function and of `create_fastapi_app`.

    Raises:
        JournalUnavailable: The data directory cannot be used.
    """
    app = create_fastapi_app(
        env,
        action_cls,
        observation_cls,
        max_concurrent_envs,
        concurrency_config,
        env_name,
        state_cls,
        mode=mode,
        reset_observation_cls=reset_observation_cls,
        settings=settings,
        data_dir=data_dir,
        runtime=runtime,
        spec=spec,
        insecure=insecure,
        deterministic=deterministic,
        volatile=volatile,
        detect=detect,
    )
    if os.getenv("ENABLE_WEB_INTERFACE", "false").lower() in ("true", "1", "yes"):
        os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # it asks other hosts, and waits for their answers
        from .web import add_web_interface  # imports gradio's user interface, seconds of every start

        add_web_interface(
            app,
            app.state.errata,
            gradio_builder=gradio_builder,
            custom_tab_name=custom_tab_name,
            custom_tab_primary=custom_tab_primary,
            show_default_tab=show_default_tab,
            title_override=title_override,
        )
    return app


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Start early and stop cleanly where there is a lifespan; everything also works without one."""
    server: HTTPEnvServer = app.state.errata
    runtime = server.runtime
    await runtime.start(reopen=True)
    runtime.lifespans += 1
    yield
    await server.sessions.close_all()
    runtime.lifespans -= 1
    if runtime.journal.durable and runtime.lifespans == 0:  # the last of the applications that share it
        await runtime.close()

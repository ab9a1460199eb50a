"""A drop-in for ``openenv.core.env_server``: the same functions with the same signatures, on our sessions.

    from errata_server.app import create_app        # instead of openenv.core.env_server

Upstream's class registers its routes; those that hold sessions (``/ws``, ``POST /mcp``) are exchanged for ours.
Upstream's functions are captured at import, so that a process which replaces them by ours does not find itself.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, WebSocket
from openenv.core.env_server.http_server import HTTPEnvServer as _UpstreamServer
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, ConcurrencyConfig, Observation, ServerMode, State
from starlette.routing import BaseRoute

from errata_protocol.capabilities import Capabilities
from errata_protocol.environment import EnvironmentSpec, Recovery
from errata_protocol.errors import ErrataError

from . import http_routes
from .auth import Guard
from .mcp import McpDoor, upstream_handler
from .plain_ws import PlainSocket
from .replay import Replay
from .runtime import Runtime
from .sessions import Sessions
from .settings import Settings

__all__ = ["HTTPEnvServer", "create_app", "create_fastapi_app"]


_TITLE = "OpenEnv Environment HTTP API"
_API_VERSION = "1.0.0"  # upstream's title and version: its validator and clients read them
_DESCRIPTION = """
An OpenEnv environment served by Errata: upstream's HTTP and WebSocket API unchanged, with error-site markers, exact
payloads of any step (`/episodes/{eid}/states/{t}`), fork (`/episodes/{eid}/fork`) and sessions that survive a crash.
"""


class HTTPEnvServer(_UpstreamServer):
    """Upstream's server class with journaled, replayable sessions.

    Args:
        *args: As upstream.
        runtime: Shared journal and sandboxes; by default the one of ``ERRATA_DATA_DIR``, or one in memory.
        spec: What the environment publishes; its name, tools and ``agent_text`` version are told to clients.
        **kwargs: As upstream.
    """

    def __init__(
        self, *args: Any, runtime: Runtime | None = None, spec: EnvironmentSpec | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.runtime = runtime or Runtime.of(Settings())
        self._executor = self.runtime.threads.executor  # of upstream's stateless routes
        self.sessions = Sessions(
            self.runtime,
            self._env_factory,
            self.env_name,
            self._concurrency_config,
            agent_text_version=spec.agent_text_version if spec is not None else None,
        )
        self.replay = Replay(self.runtime)
        self._spec = spec

    @property
    def active_sessions(self) -> int:
        """Sessions that hold an environment instance."""
        return self.sessions.active

    def capabilities(self, mode: ServerMode) -> Capabilities:
        """Return what a capability probe is answered."""
        recovery = self.sessions.recovery
        extensions = {"error_markers": 1}
        if mode is not ServerMode.PRODUCTION:
            extensions["state_at"] = 1
            if recovery is Recovery.SNAPSHOT:
                extensions["fork"] = 1
        return Capabilities(
            environment=self.env_name,
            extensions=extensions,
            recovery=recovery,
            agent_text_version=self._spec.agent_text_version if self._spec is not None else None,
            limits=self.runtime.settings.limits,
        )

    def register_routes(self, app: FastAPI, mode: ServerMode | str = ServerMode.SIMULATION) -> None:
        """Register upstream's routes and ours; the session routes are ours alone."""
        resolved = ServerMode(mode.lower()) if isinstance(mode, str) and mode.lower() in set(ServerMode) else mode
        simulation = resolved != ServerMode.PRODUCTION
        if isinstance(resolved, ServerMode):
            http_routes.register(
                app,
                runtime=self.runtime,
                replay=self.replay,
                capabilities=functools.partial(self.capabilities, resolved),
                replayable=simulation,
            )
        super().register_routes(app, mode)
        handler = upstream_handler(_take_route(app, "/mcp", "POST").endpoint)  # type: ignore[attr-defined]
        _take_route(app, "/ws", None)
        door = McpDoor(self.sessions, handler)
        http_routes.register_mcp(app, door)
        app.state.errata = self
        told = functools.partial(self.capabilities, ServerMode.SIMULATION if simulation else ServerMode.PRODUCTION)

        @app.websocket("/ws")
        async def websocket_endpoint(websocket: WebSocket) -> None:
            socket = PlainSocket(
                websocket,
                self.sessions,
                self.replay if simulation else None,
                door,
                self.action_cls,
                told,
                http_routes.principal(websocket),
            )
            await socket.serve()

    async def _run_in_session_executor(
        self, session_id: str, func: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run an MCP-style step where the session's environment lives; upstream's handler calls this."""
        host = self.sessions.host_of(session_id)
        if host is None:  # not one of our sessions: upstream's own WS /mcp
            return await super()._run_in_session_executor(session_id, func, *args, **kwargs)
        call = functools.partial(func, *args, **kwargs)
        return await host.run_in_place(call, timeout_s=self.runtime.settings.step_timeout_s)


def _take_route(app: FastAPI, path: str, method: str | None) -> BaseRoute:
    """Remove and return upstream's route.

    Raises:
        RuntimeError: This version of openenv registers its routes in another way.
    """
    for route in app.router.routes:
        if getattr(route, "path", None) != path:
            continue
        methods = getattr(route, "methods", None)
        if (method is None and methods is None) or (method is not None and methods and method in methods):
            app.router.routes.remove(route)
            return route
    raise RuntimeError(f"openenv registered no route {method or 'WS'} {path}: install openenv>=0.10,<0.11")


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

    Raises:
        JournalUnavailable: The data directory cannot be used.
    """
    if runtime is None:
        settings = settings or Settings()
        if data_dir is not None:
            settings = settings.model_copy(update={"data_dir": Path(data_dir)})
        runtime = Runtime.of(settings)
    app = FastAPI(title=_TITLE, version=_API_VERSION, description=_DESCRIPTION, lifespan=_lifespan)
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
    )
    server.register_routes(app, mode=mode or os.environ.get("OPENENV_MODE", ServerMode.SIMULATION.value))
    app.add_exception_handler(ErrataError, http_routes.answer_error)
    app.add_middleware(Guard, settings=settings or runtime.settings, insecure=insecure)
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
) -> FastAPI:
    """Create the application of one environment, as `create_fastapi_app`, with upstream's ``create_app`` signature.

    The arguments of the web interface are taken and have no effect yet: with ``ENABLE_WEB_INTERFACE`` set this raises,
    rather than serve pages that would drive sessions of their own beside the journaled ones.

    Raises:
        NotImplementedError: ``ENABLE_WEB_INTERFACE`` asks for the web interface.
        JournalUnavailable: The data directory cannot be used.
    """
    if os.getenv("ENABLE_WEB_INTERFACE", "false").lower() in ("true", "1", "yes"):
        raise NotImplementedError(
            "Errata does not serve OpenEnv's web interface yet: unset ENABLE_WEB_INTERFACE, or use openenv's create_app"
        )
    return create_fastapi_app(
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
    )


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Start early and stop cleanly where there is a lifespan; everything also works without one."""
    server: HTTPEnvServer = app.state.errata
    await server.runtime.start(reopen=True)
    asyncio.get_running_loop().set_default_executor(server.runtime.threads.executor)
    server._start_reaper()
    yield
    server._stop_reaper()
    await server.sessions.close_all()
    if server.runtime.journal.durable:
        await server.runtime.close()

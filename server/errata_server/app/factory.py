"""`create_app` and `create_fastapi_app`: drop-in replacements for OpenEnv's functions, with journaled sessions.

from errata_server.app import create_app        # instead of openenv.core.env_server
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import (
    Action,
    ConcurrencyConfig,
    Observation,
    ServerMode,
    State,
)

from errata_protocol.environment import EnvironmentSpec

from ..runtime.registry import RUNTIMES
from ..runtime.runtime import Runtime
from ..settings import Settings
from .multi_environment import mount_by_name
from .server import HTTPEnvServer

_TITLE = "OpenEnv Environment HTTP API"
_API_VERSION = "1.0.0"  # upstream's validator and clients read title and version
_DESCRIPTION = """
An OpenEnv environment served by Errata: upstream's HTTP and WebSocket API unchanged, with error-site markers, exact
payloads of any step (`/episodes/{eid}/states/{t}`), fork (`/episodes/{eid}/fork`) and sessions that survive a crash.
"""


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
        settings: Settings of the server; read from ``ERRATA_*`` variables by default.
        data_dir: Directory of journal and sandbox layers; overrides the settings' one.
        runtime: Resources shared with other applications; overrides ``settings`` and ``data_dir``.
        spec: Description that the environment publishes.
        insecure: Allow requests from other machines without a token.
        deterministic: Declares that the environment's answers depend on its reset arguments, seed and actions only.
            Sessions of an environment without ``snapshot`` and ``restore`` are then recovered and forked by running
            their requests again.
        volatile: Fields that may differ when requests run again, such as timestamps in ``metadata``, in addition to
            ``VOLATILE_FIELDS`` of the observation class. A sequence, or a string separated by commas.
        detect: Field mapping ``stdout=FIELD,stderr=FIELD,exit_code=FIELD[,command=ACTIONFIELD]``, or for
            ``exit_code`` a boolean as ``success=FIELD``, or what only a failure sets as ``error=FIELD``. Failing steps
            are then marked in ``observation.metadata``; for environments that set no markers themselves.

    Raises:
        JournalUnavailable: The data directory cannot be used.
        InvalidRequest: ``detect`` is not a valid mapping or would mark nothing, or ``volatile`` is not
            a valid list of fields or is given for an environment whose requests are not run again.
    """
    runtime = runtime or RUNTIMES.of_application(settings, data_dir)
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

    If ``ENABLE_WEB_INTERFACE`` is set, upstream's web interface is served at ``/web`` and uses one of Errata's
    sessions. The arguments are those of upstream's function and of `create_fastapi_app`.

    Raises:
        JournalUnavailable: The data directory cannot be used.
        InvalidRequest: See `create_fastapi_app`.
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
    if web_is_wanted():
        import_web()
        from .web import add_web_interface

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


def web_is_wanted() -> bool:
    """Return whether upstream's web interface is to be served: ``ENABLE_WEB_INTERFACE`` is set."""
    return os.getenv("ENABLE_WEB_INTERFACE", "false").lower() in ("true", "1", "yes")


def import_web() -> None:
    """Import what serves the web interface, gradio above all, which takes seconds."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # its analytics call other hosts and wait for them
    from . import web  # noqa: F401


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Start the runtime, and close all sessions and the runtime at shutdown.

    The application also works where no lifespan runs: the runtime then starts with the first request.
    """
    server: HTTPEnvServer = app.state.errata
    runtime = server.runtime
    await runtime.acquire()
    yield
    await server.sessions.close_all()
    await runtime.release()

"""`adopt`: replaces the session routes of an existing OpenEnv application by Errata's; everything else of it stays.

    from errata_server import adopt
    app = adopt(openenv.core.create_app(MyEnvironment, MyAction, MyObservation))

What an app serves is read from its ``/ws`` route, whose endpoint closes over upstream's server object. The routes that
hold sessions are exchanged where they stand; everything else of the app stays: its own routes, middleware, exception
handlers, lifespan, mounts, documentation. A path the app serves itself is never taken from it.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute, APIWebSocketRoute
from openenv.core.env_server.http_server import HTTPEnvServer as _UpstreamServer
from openenv.core.env_server.types import ConcurrencyConfig, ServerMode
from starlette.applications import Starlette
from starlette.datastructures import State
from starlette.routing import BaseRoute, Mount

from errata_protocol.environment import EnvironmentSpec
from errata_protocol.errors import InvalidRequest

from ..doors import http_routes
from ..doors.auth import guard
from ..runtime.registry import RUNTIMES
from ..runtime.runtime import Runtime
from ..settings import Settings
from .factory import lifespan as serving_lifespan
from .multi_environment import mount_by_name
from .server import HTTPEnvServer

log = logging.getLogger("errata.server")

_SOCKET = "/ws"
_SESSION_ROUTES = frozenset({("/ws", "WS"), ("/mcp", "WS"), ("/mcp", "POST"), ("/harness", "WS")})
_CONTROL = frozenset({("/reset", "POST"), ("/step", "POST"), ("/state", "GET")})
"""What only simulation mode has."""

App = TypeVar("App", bound=Starlette)


@dataclass(frozen=True, slots=True)
class Site:
    """Where an application serves one environment.

    Args:
        app: The application whose own or included routes they are; the whole one, or one mounted in it.
        server: Upstream's server object, or ours where the app is adopted already.
        router: Whose routes they are: the app's, an included router's or a mounted application's.
        prefix: What stands before ``/ws`` in that router.
        where: The path in front of ``/ws`` as a client sees it, for messages.
        socket: The ``/ws`` route.
    """

    app: Starlette
    server: _UpstreamServer
    router: APIRouter
    prefix: str
    where: str
    socket: APIWebSocketRoute

    @property
    def mode(self) -> ServerMode:
        """Simulation where the control routes are there, else production."""
        own = {_kind(route, self.prefix) for route in self.router.routes if _is_upstream(route)}
        return ServerMode.SIMULATION if own & _CONTROL else ServerMode.PRODUCTION


def sites(app: Starlette) -> list[Site]:
    """Return where an application serves environments: in its own routes, included routers and mounts."""
    return list(_walk(app, app.router, "", set()))


def is_ours(app: Starlette) -> bool:
    """Return whether an application's sessions are ours already."""
    found = sites(app)
    return bool(found) and all(isinstance(site.server, HTTPEnvServer) for site in found)


def the_server(app: Starlette) -> _UpstreamServer:
    """Return the server object of the one environment that an application serves.

    Raises:
        InvalidRequest: There is none, or there are several.
    """
    return _one_environment(sites(app))[0].server


def _one_environment(found: list[Site]) -> list[Site]:
    if not found:
        raise InvalidRequest(
            "the application has no OpenEnv session route: none of its WebSocket routes was registered by "
            "openenv's create_app, create_fastapi_app or HTTPEnvServer.register_routes"
        )
    if len({id(site.server) for site in found}) > 1:
        places = ", ".join(f"{site.server.env_name} at {site.where or '/'}" for site in found)
        raise InvalidRequest(
            f"the application serves several environments ({places}): adopt each of their applications before "
            "it is mounted, or serve them as several targets"
        )
    return found


def adopt(
    app: App,
    *,
    settings: Settings | None = None,
    data_dir: str | Path | None = None,
    runtime: Runtime | None = None,
    spec: EnvironmentSpec | None = None,
    mode: ServerMode | str | None = None,
    max_concurrent_envs: int | None = None,
    insecure: bool = False,
    deterministic: bool = False,
    volatile: Sequence[str] | str = (),
    detect: str | None = None,
) -> App:
    """Give an existing OpenEnv application journaled, replayable sessions; everything else of it stays.

    Args:
        app: Made by upstream's ``create_app`` or by hand; it may serve the environment in an included router or a
            mounted sub-application. It has not served a request yet. One that is ours already is returned as it is.
        settings: How to keep sessions; ``ERRATA_*`` variables by default.
        data_dir: Directory of journal and sandbox layers; overrides the settings' one.
        runtime: Resources shared with other applications; overrides ``settings`` and ``data_dir``.
        spec: What the environment publishes about itself.
        mode: The mode the app must have been made in; None takes whichever it was.
        max_concurrent_envs: Upper bound of environment instances; the app's own by default.
        insecure: Let other machines in without a token.
        deterministic: As in `create_fastapi_app`.
        volatile: Likewise.
        detect: Likewise.

    Returns:
        The same object.

    Raises:
        InvalidRequest: It serves no environment, or several, or in another mode, or requests already; or it is ours
            already and something is declared here, or another ``max_concurrent_envs`` given, which its ``create_app``
            would have to know; or ``detect`` maps no fields.
        JournalUnavailable: The data directory cannot be used.
    """
    if is_ours(app):
        if deterministic or volatile or detect is not None:
            raise InvalidRequest(
                "the application was made by Errata's create_app already: give it deterministic=, volatile= and detect="
            )
        made: HTTPEnvServer = app.state.errata
        if max_concurrent_envs not in (None, made.max_concurrent_envs):
            raise InvalidRequest(
                f"the application was made by Errata's create_app already, for {made.max_concurrent_envs} sessions: "
                f"give it max_concurrent_envs={max_concurrent_envs}, or leave --max-sessions away"
            )
        return app
    found = _one_environment(sites(app))
    for site in found:
        if mode is not None and ServerMode(mode) is not site.mode:
            raise InvalidRequest(
                f"the application was made in {site.mode.value} mode, not {ServerMode(mode).value}: "
                "leave mode= to create_app away and set OPENENV_MODE"
            )
        if app.middleware_stack is not None or site.app.middleware_stack is not None:
            raise InvalidRequest("the application serves already: adopt it before its first request")
    runtime = runtime or RUNTIMES.of_application(settings, data_dir)
    server = _server_like(
        found[0].server,
        max_concurrent_envs,
        runtime=runtime,
        spec=spec,
        deterministic=deterministic,
        volatile=volatile,
        detect=detect,
    )
    for site in found:
        told = _swap(site, server)
        for each in {app, site.app}:
            each.state._state.update(told._state)
            http_routes.answer_errors(each)
        _take_over_pages(site, server)
    guard(app, settings or runtime.settings, insecure=insecure)
    if any(site.router is app.router and not site.prefix for site in found):
        mount_by_name(app, app.router, server.env_name)
    app.router.lifespan_context = _inside(app.router.lifespan_context)
    return app


def _server_like(upstream: _UpstreamServer, max_concurrent_envs: int | None, **ours: Any) -> HTTPEnvServer:
    limits = upstream.concurrency_config
    if max_concurrent_envs is not None:
        limits = ConcurrencyConfig(max_concurrent_envs=max_concurrent_envs, session_timeout=limits.session_timeout)
    return HTTPEnvServer(
        upstream._env_factory,
        upstream.action_cls,
        upstream.observation_cls,
        concurrency_config=limits,
        env_name=upstream.env_name,
        state_cls=upstream.state_cls,
        reset_observation_cls=upstream.reset_observation_cls,
        **ours,
    )


def _swap(site: Site, server: HTTPEnvServer) -> State:
    """Exchange the session routes where they stand, and put our further routes before upstream's.

    Ours are made on an application of their own and rebuilt on the site's router, so that they get its dependencies.

    Returns:
        What our routes left on their application.
    """
    scratch = FastAPI()
    server.register_routes(scratch, mode=site.mode)
    routes = site.router.routes
    standing = {}
    for route in routes:
        kind = _kind(route, site.prefix)
        if kind is not None and _is_upstream(route):
            standing[kind] = route
    taken = {kind for route in routes if (kind := _kind(route, site.prefix)) and not _is_upstream(route)}
    first = min(routes.index(route) for route in standing.values())
    guarded_by: Any = standing.get(("/mcp", "POST"), site.socket)
    for route in list(scratch.router.routes):
        kind = _kind(route, "")
        if kind is None or not isinstance(route, APIRoute | APIWebSocketRoute):
            continue
        ours = route.endpoint.__module__.partition(".")[0] == __package__.partition(".")[0]
        old = standing.get(kind)
        if old is not None and (ours or kind in _SESSION_ROUTES):
            at = routes.index(old)
            routes.remove(old)
            _put(site, route, at, old)
        elif old is None and ours and kind not in _SESSION_ROUTES:
            if kind in taken or _mounted(routes, kind[0], site.prefix):
                log.warning("%s %s of the application stays; Errata's own is not served", kind[1], site.where + kind[0])
                continue
            _put(site, route, first, guarded_by)
            first += 1
    return scratch.state


def _put(site: Site, route: APIRoute | APIWebSocketRoute, at: int, like: Any) -> None:
    """Rebuild a route on the site's router, behind whatever stands before ``like``, at a position."""
    router = site.router
    path = site.prefix.removeprefix(router.prefix) + route.path
    inherited = [d for d in getattr(like, "dependencies", []) if d not in router.dependencies]
    if isinstance(route, APIWebSocketRoute):
        router.add_api_websocket_route(path, route.endpoint, route.name, dependencies=inherited)
    else:
        router.add_api_route(
            path,
            route.endpoint,
            methods=sorted(route.methods),
            name=route.name,
            dependencies=inherited,
            response_model=route.response_model,
            status_code=route.status_code,
            tags=route.tags,
            summary=route.summary,
            description=route.description,
            responses=route.responses,
            include_in_schema=route.include_in_schema,
        )
    router.routes.insert(at, router.routes.pop())


def _walk(app: Starlette, router: Any, where: str, seen: set[int]) -> Iterator[Site]:
    if id(router) in seen:
        return
    seen.add(id(router))
    for route in list(getattr(router, "routes", ())):
        if isinstance(route, APIWebSocketRoute) and route.path.endswith(_SOCKET):
            server = _closed_over(route.endpoint, "self")
            if isinstance(server, _UpstreamServer):
                prefix = route.path.removesuffix(_SOCKET)
                yield Site(app, server, router, prefix, where + prefix, route)
        elif isinstance(route, Mount):
            inner = _unwrapped(route.app)
            if isinstance(inner, Starlette):
                yield from _walk(inner, inner.router, where + route.path, seen)
            else:
                yield from _walk(app, inner, where + route.path, seen)
        elif (included := getattr(route, "original_router", None)) is not None:  # how newer FastAPIs include a router
            yield from _walk(app, included, where + getattr(route.include_context, "prefix", ""), seen)


def _unwrapped(app: Any) -> Any:
    """Return the application or router inside whatever middleware is wrapped around a mounted one."""
    while not hasattr(app, "routes") and hasattr(app, "app"):
        app = app.app
    return app


def _kind(route: BaseRoute, prefix: str) -> tuple[str, str] | None:
    """Return path and method of a route of the site, None for anything else."""
    if not isinstance(route, APIRoute | APIWebSocketRoute) or not route.path.startswith(prefix):
        return None
    path = re.sub(r"\{[^}]*\}", "{}", route.path.removeprefix(prefix))
    if isinstance(route, APIWebSocketRoute):
        return path, "WS"
    return path, ",".join(sorted(route.methods))


def _is_upstream(route: BaseRoute) -> bool:
    endpoint = getattr(route, "endpoint", None)
    return endpoint is not None and str(endpoint.__module__).startswith("openenv.core.env_server.")


def _mounted(routes: list[BaseRoute], path: str, prefix: str) -> bool:
    """Say whether a mount of the application takes a path; one at the site itself or at the root takes none."""
    mounts = [route.path for route in routes if isinstance(route, Mount) and route.path not in ("", prefix)]
    return any(f"{prefix}{path}/".startswith(f"{mount}/") for mount in mounts)


def _closed_over(function: Callable[..., Any], name: str) -> Any:
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None or name not in code.co_freevars:
        return None
    try:
        return function.__closure__[code.co_freevars.index(name)].cell_contents  # type: ignore[attr-defined]
    except ValueError:  # the cell is empty
        return None


def _take_over_pages(site: Site, server: HTTPEnvServer) -> None:
    """Let OpenEnv's web interface, where the application has it, drive one of our sessions."""
    pages = {kind: route for route in site.router.routes if (kind := _kind(route, site.prefix)) and _is_upstream(route)}
    reset = pages.get(("/web/reset", "POST"))
    if reset is None:
        return
    from .web import redirect_to_pages, start_when_asked, take_over  # the application has imported gradio already

    take_over(_closed_over(reset.endpoint, "web_manager"), server)  # type: ignore[attr-defined]
    start_when_asked(site.router.routes, server.runtime)
    scratch = FastAPI(openapi_url=None)
    redirect_to_pages(scratch)
    for route in list(scratch.router.routes):
        old = pages.get(_kind(route, "") or ("", ""))
        if old is not None and isinstance(route, APIRoute):
            at = site.router.routes.index(old)
            site.router.routes.remove(old)
            _put(site, route, at, old)


def _inside(outer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Start after the application's own startup and stop before its shutdown: environments may need what it opens."""

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[Any]:
        async with outer(app) as state, serving_lifespan(app):
            yield state

    return lifespan

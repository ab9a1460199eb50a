"""`adopt`: replaces the session routes of an existing OpenEnv application with Errata's and keeps the rest of it.

    from errata_server import adopt
    app = adopt(openenv.core.create_app(MyEnvironment, MyAction, MyObservation))

The environment is found through the ``/ws`` route, whose endpoint closes over upstream's server object. Session routes
are replaced at their position in the route list. The application keeps its own routes, middleware, exception handlers,
lifespan, mounts and documentation; a path that it serves itself is never replaced.
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
"""Routes that upstream registers in simulation mode only."""

App = TypeVar("App", bound=Starlette)


@dataclass(frozen=True, slots=True)
class Site:
    """The place where an application serves one environment.

    Args:
        app: The application that the routes belong to: the outermost one, or one mounted in it.
        server: Upstream's server object, or ours if the application is adopted already.
        router: The router that holds the routes: that of ``app``, or one included in it.
        prefix: Path in front of ``/ws`` within the router.
        where: Path in front of ``/ws`` as a client sees it, for messages.
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
        """Simulation mode if the site has one of the control routes, else production mode."""
        own = {_kind(route, self.prefix) for route in self.router.routes if _is_upstream(route)}
        return ServerMode.SIMULATION if own & _CONTROL else ServerMode.PRODUCTION


def sites(app: Starlette) -> list[Site]:
    """Find the ``/ws`` routes of environments in an application's own routes, included routers and mounts."""
    return list(_walk(app, app.router, "", set()))


def is_ours(app: Starlette) -> bool:
    """Return whether an application serves environments, all of them with Errata's server class."""
    found = sites(app)
    return bool(found) and all(isinstance(site.server, HTTPEnvServer) for site in found)


def server_of(app: Starlette) -> _UpstreamServer:
    """Return the upstream server object of the one environment that an application serves.

    Raises:
        InvalidRequest: The application serves no environment, or several.
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
    """Give an existing OpenEnv application journaled, replayable sessions and keep the rest of it.

    Args:
        app: An application made by upstream's ``create_app`` or by hand that has not served a request yet. It may serve
            the environment in an included router or a mounted sub-application. An application that was adopted
            already, or created by Errata's ``create_app``, is returned unchanged.
        settings: Settings of the server; read from ``ERRATA_*`` variables by default.
        data_dir: Directory of journal and sandbox layers; overrides the settings' one.
        runtime: Resources shared with other applications; overrides ``settings`` and ``data_dir``.
        spec: Description that the environment publishes.
        mode: The mode that the application must have been created in; None accepts either.
        max_concurrent_envs: Upper bound of environment instances; the application's own by default.
        insecure: Allow requests from other machines without a token.
        deterministic: As in `create_fastapi_app`.
        volatile: As in `create_fastapi_app`.
        detect: As in `create_fastapi_app`.

    Returns:
        ``app``, changed in place.

    Raises:
        InvalidRequest: The application serves no environment, or several, or in another mode than ``mode``; it has
            served a request; ``detect`` is not a valid field mapping; or it was created by Errata's ``create_app``,
            which has to be given ``deterministic``, ``volatile``, ``detect`` or another ``max_concurrent_envs`` itself.
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
                f"give it max_concurrent_envs={max_concurrent_envs}, or leave out --max-sessions"
            )
        return app
    found = _one_environment(sites(app))
    for site in found:
        if mode is not None and ServerMode(mode) is not site.mode:
            raise InvalidRequest(
                f"the application was made in {site.mode.value} mode, not {ServerMode(mode).value}: "
                "leave out create_app's mode= and set OPENENV_MODE"
            )
        if app.middleware_stack is not None or site.app.middleware_stack is not None:
            raise InvalidRequest("the application has served requests already: adopt it before its first request")
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
        state = _replace_session_routes(site, server)
        applications: set[Starlette] = {app, site.app}
        for each in applications:
            each.state._state.update(state._state)
            http_routes.answer_errors(each)
        _connect_web_interface(site, server)
    guard(app, settings or runtime.settings, insecure=insecure)
    if any(site.router is app.router and not site.prefix for site in found):
        mount_by_name(app, app.router, server.env_name)
    app.router.lifespan_context = _nested_lifespan(app.router.lifespan_context)
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


def _replace_session_routes(site: Site, server: HTTPEnvServer) -> State:
    """Replace the session routes at their positions, and insert Errata's additional routes before upstream's.

    Errata's routes are registered on a scratch application and rebuilt on the site's router, so that they get the
    router's dependencies. A path that the application serves itself is left alone, with a warning.

    Returns:
        The state that registering set on the scratch application.
    """
    scratch = FastAPI()
    server.register_routes(scratch, mode=site.mode)
    routes = site.router.routes
    upstreams = {}
    for route in routes:
        kind = _kind(route, site.prefix)
        if kind is not None and _is_upstream(route):
            upstreams[kind] = route
    taken = {kind for route in routes if (kind := _kind(route, site.prefix)) and not _is_upstream(route)}
    first = min(routes.index(route) for route in upstreams.values())
    guarded_by: Any = upstreams.get(("/mcp", "POST"), site.socket)
    for route in list(scratch.router.routes):
        kind = _kind(route, "")
        if kind is None or not isinstance(route, APIRoute | APIWebSocketRoute):
            continue
        ours = route.endpoint.__module__.partition(".")[0] == __package__.partition(".")[0]
        old = upstreams.get(kind)
        if old is not None and (ours or kind in _SESSION_ROUTES):
            at = routes.index(old)
            routes.remove(old)
            _put(site, route, at, old)
        elif old is None and ours and kind not in _SESSION_ROUTES:
            if kind in taken or _mounted(routes, kind[0], site.prefix):
                log.warning(
                    "the application's own route %s %s is kept; Errata's is not served", kind[1], site.where + kind[0]
                )
                continue
            _put(site, route, first, guarded_by)
            first += 1
    return scratch.state


def _put(site: Site, route: APIRoute | APIWebSocketRoute, at: int, like: Any) -> None:
    """Rebuild a route on the site's router at position ``at``, with the dependencies that the route ``like`` has."""
    router = site.router
    path = site.prefix.removeprefix(router.prefix) + route.path
    inherited = [d for d in getattr(like, "dependencies", []) if d not in router.dependencies]
    if isinstance(route, APIWebSocketRoute):
        router.add_api_websocket_route(path, route.endpoint, route.name, dependencies=inherited)
    else:
        router.add_api_route(
            path,
            route.endpoint,
            methods=sorted(route.methods or ()),
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
    """Yield the sites below ``router``, each router once; ``where`` is the client's path to it."""
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
    """Return the application or router inside the middleware that wraps a mounted one."""
    while not hasattr(app, "routes") and hasattr(app, "app"):
        app = app.app
    return app


def _kind(route: BaseRoute, prefix: str) -> tuple[str, str] | None:
    """Return the path below ``prefix`` and the method of a FastAPI route, None for any other route.

    Path parameters are replaced by ``{}``. The method is ``WS`` for a WebSocket route, and several HTTP methods are
    joined by commas.
    """
    if not isinstance(route, APIRoute | APIWebSocketRoute) or not route.path.startswith(prefix):
        return None
    path = re.sub(r"\{[^}]*\}", "{}", route.path.removeprefix(prefix))
    if isinstance(route, APIWebSocketRoute):
        return path, "WS"
    return path, ",".join(sorted(route.methods or ()))


def _is_upstream(route: BaseRoute) -> bool:
    endpoint = getattr(route, "endpoint", None)
    return endpoint is not None and str(endpoint.__module__).startswith("openenv.core.env_server.")


def _mounted(routes: list[BaseRoute], path: str, prefix: str) -> bool:
    """Return whether a mount serves ``path``; mounts at the root and at the site's prefix are not counted."""
    mounts = [route.path for route in routes if isinstance(route, Mount) and route.path not in ("", prefix)]
    return any(f"{prefix}{path}/".startswith(f"{mount}/") for mount in mounts)


def _closed_over(function: Callable[..., Any], name: str) -> Any:
    """Return the value of a variable that a function closes over; None if there is no such variable or value."""
    function = inspect.unwrap(function)
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or cells is None or name not in code.co_freevars:
        return None
    try:
        return cells[code.co_freevars.index(name)].cell_contents
    except ValueError:  # the cell is empty
        return None


def _connect_web_interface(site: Site, server: HTTPEnvServer) -> None:
    """Make OpenEnv's web interface, if the application has it, use one of Errata's sessions."""
    pages = {kind: route for route in site.router.routes if (kind := _kind(route, site.prefix)) and _is_upstream(route)}
    reset = pages.get(("/web/reset", "POST"))
    if reset is None:
        return
    # The application has imported gradio already.
    from .web import add_redirects, replace_manager, start_on_first_request

    replace_manager(_closed_over(reset.endpoint, "web_manager"), server)  # type: ignore[attr-defined]
    start_on_first_request(site.router.routes, server.runtime)
    scratch = FastAPI(openapi_url=None)
    add_redirects(scratch)
    for route in list(scratch.router.routes):
        old = pages.get(_kind(route, "") or ("", ""))
        if old is not None and isinstance(route, APIRoute):
            at = site.router.routes.index(old)
            site.router.routes.remove(old)
            _put(site, route, at, old)


def _nested_lifespan(outer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a lifespan that starts ours after the application's own and stops ours first.

    Environments may need resources that the application opens at its startup.
    """

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[Any]:
        async with outer(app) as state, serving_lifespan(app):
            yield state

    return lifespan

"""Decides whether an application's middleware and routes allow serving a WebSocket after its ASGI call returned."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute, APIWebSocketRoute
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Mount, Route, Router, WebSocketRoute
from starlette.staticfiles import StaticFiles

from ..doors.auth import Guard
from ..doors.input_errors import BodyLimit
from ..doors.request_bodies import RequestBodies

_APPLICATIONS = (FastAPI, Starlette)
_ROUTERS = (APIRouter, Router)
_MIDDLEWARE: tuple[object, ...] = (Guard, BodyLimit, RequestBodies)
ENDS_EARLY = "ends_before_socket"
"""Attribute that is true of another middleware of Errata's whose work is done once a socket is accepted."""
_LEAVES = (APIRoute, APIWebSocketRoute, Route, WebSocketRoute)


def allows_detached_sockets(app: Starlette) -> bool:
    """Return whether WebSockets of an application may be served after their ASGI call has returned.

    That is so if the application has no middleware but Errata's, whose work is done once a socket is accepted.
    Everything unknown counts as middleware that needs the call: subclasses of Starlette and FastAPI, a middleware stack
    built in another way, other kinds of routes, OpenEnv's web interface. A route with dependencies is served within its
    call by `asgi_extensions.serve_detached`.
    """
    return _allows(app, set())


def _allows(app: object, seen: set[int]) -> bool:
    if id(app) in seen:
        return True
    seen.add(id(app))
    if type(app) in _APPLICATIONS:
        assert isinstance(app, Starlette)
        known = all(
            middleware.cls in _MIDDLEWARE or getattr(middleware.cls, ENDS_EARLY, False)
            for middleware in app.user_middleware
        )
        return known and "build_middleware_stack" not in vars(app) and _allows(app.router, seen)
    if type(app) in _ROUTERS:
        assert isinstance(app, Router)
        return app.middleware_stack == app.app and _routes_allow(app.routes, seen)
    return isinstance(app, StaticFiles)


def _routes_allow(routes: Iterable[BaseRoute], seen: set[int]) -> bool:
    for route in routes:
        if type(route) is Mount:
            if not _allows(route.app, seen):
                return False
        elif (included := getattr(route, "original_router", None)) is not None:  # how newer FastAPIs include a router
            if any(not isinstance(below, Route) for below in included.routes):
                return False
        elif type(route) not in _LEAVES:
            return False
    return True

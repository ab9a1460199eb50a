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
_LEAVES = (APIRoute, APIWebSocketRoute, Route, WebSocketRoute)


def only_ours(app: Starlette) -> bool:
    """Say whether nothing lies above our doors but middleware of ours, which is done once a socket is let in.

    What is not known here is taken for something that minds: classes derived from Starlette's and FastAPI's, a stack of
    middleware that somebody builds otherwise, routes of other kinds, OpenEnv's web pages. A door that depends on
    something is served in place by `asgi_extensions.by_itself`.
    """
    return _fine(app, set())


def _fine(app: object, seen: set[int]) -> bool:
    if id(app) in seen:
        return True
    seen.add(id(app))
    if type(app) in _APPLICATIONS:
        assert isinstance(app, Starlette)
        known = all(middleware.cls in (Guard, BodyLimit, RequestBodies) for middleware in app.user_middleware)
        return known and "build_middleware_stack" not in vars(app) and _fine(app.router, seen)
    if type(app) in _ROUTERS:
        assert isinstance(app, Router)
        return app.middleware_stack == app.app and _all_fine(app.routes, seen)
    return isinstance(app, StaticFiles)


def _all_fine(routes: Iterable[BaseRoute], seen: set[int]) -> bool:
    for route in routes:
        if type(route) is Mount:
            if not _fine(route.app, seen):
                return False
        elif (included := getattr(route, "original_router", None)) is not None:  # how newer FastAPIs include a router
            if any(not isinstance(below, Route) for below in included.routes):
                return False
        elif type(route) not in _LEAVES:
            return False
    return True

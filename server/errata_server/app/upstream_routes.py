"""Edits routes that OpenEnv registered: removes one, replaces an endpoint, adds Task API paths without ``/{env_name}``.

Upstream builds its endpoints as closures inside ``register_routes``, so there is nothing to override.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount
from starlette.types import ASGIApp, Receive, Scope, Send

Endpoint = Callable[..., Awaitable[Any]]


def find_route(app: FastAPI, path: str, method: str | None) -> BaseRoute | None:
    """Return the first route at ``path`` for an HTTP method, or the WebSocket route (None)."""
    for route in app.router.routes:
        if getattr(route, "path", None) == path and not isinstance(route, Mount):
            methods = getattr(route, "methods", None)
            if method in methods if methods and method is not None else methods is method:
                return route
    return None


def take_route(app: FastAPI, path: str, method: str | None) -> BaseRoute:
    """Remove and return a route; see `find_route`.

    Raises:
        RuntimeError: This version of openenv registers its routes in another way.
    """
    route = find_route(app, path, method)
    if route is None:
        raise RuntimeError(f"openenv registered no route {method or 'WS'} {path}: install openenv>=0.10,<0.11")
    app.router.routes.remove(route)
    return route


def answer_from(app: FastAPI, path: str, method: str, endpoint: Endpoint) -> None:
    """Let ``endpoint`` answer an HTTP route of upstream's; its documentation and models stay."""
    route = take_route(app, path, method)
    assert isinstance(route, APIRoute)
    app.add_api_route(
        path,
        endpoint,
        methods=[method],
        response_model=route.response_model,
        tags=route.tags,
        summary=route.summary,
        description=route.description,
        responses=route.responses,
        name=route.name,
    )


TASK_API = (("splits", "GET"), ("tasks", "POST"), ("num_tasks", "POST"), ("task", "POST"), ("task_range", "POST"))
"""Last segment and method of upstream's routes ``/{env_name}/...``."""


def shorten_task_api(app: FastAPI, env_name: str) -> None:
    """Serve the Task API without its first segment too: under a mount at ``/<name>`` an app sees only the rest."""
    for rest, method in TASK_API:
        path = f"/{env_name}/{rest}"
        app.add_api_route(f"/{rest}", _always(app.router, path), methods=[method], include_in_schema=False, name=rest)


def _always(app: ASGIApp, path: str) -> Endpoint:
    async def endpoint() -> Response:
        return Forwarded(app, path)

    return endpoint


class Forwarded(Response):
    """A response that another application gives, asked under another path."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        self._app, self._path = app, path
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("root_path", "") + self._path
        await self._app({**scope, "path": path, "raw_path": path.encode()}, receive, send)

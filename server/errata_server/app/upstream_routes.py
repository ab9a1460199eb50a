"""Edits the routes that OpenEnv registered: removes routes, replaces endpoints, adds short paths of the Task API.

Upstream defines its endpoints as closures inside ``register_routes``, so there is no method to override.
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
    """Return the first route at ``path`` for an HTTP method (None for the WebSocket route); None if there is none."""
    for route in app.router.routes:
        if getattr(route, "path", None) == path and not isinstance(route, Mount):
            methods = getattr(route, "methods", None)
            if method in methods if methods and method is not None else methods is method:
                return route
    return None


def remove_route(app: FastAPI, path: str, method: str | None) -> BaseRoute:
    """Remove and return the route that `find_route` finds.

    Raises:
        RuntimeError: There is no such route: this version of openenv registers its routes in another way.
    """
    route = find_route(app, path, method)
    if route is None:
        raise RuntimeError(f"openenv registered no route {method or 'WS'} {path}: install openenv>=0.10,<0.11")
    app.router.routes.remove(route)
    return route


def replace_endpoint(app: FastAPI, path: str, method: str, endpoint: Endpoint) -> None:
    """Replace the endpoint of an upstream HTTP route; its documentation and response model stay.

    The route moves to the end of the application's routes.

    Raises:
        RuntimeError: There is no such route.
    """
    route = remove_route(app, path, method)
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


def add_short_task_api(app: FastAPI, env_name: str) -> None:
    """Serve the Task API also without ``/{env_name}``, which an application mounted at ``/<name>`` does not see."""
    for rest, method in TASK_API:
        path = f"/{env_name}/{rest}"
        app.add_api_route(
            f"/{rest}", _forward_to(app.router, path), methods=[method], include_in_schema=False, name=rest
        )


def _forward_to(app: ASGIApp, path: str) -> Endpoint:
    async def endpoint() -> Response:
        return Forwarded(app, path)

    return endpoint


class Forwarded(Response):
    """The response of another ASGI application to the same request under another path."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        self._app, self._path = app, path
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("root_path", "") + self._path
        await self._app({**scope, "path": path, "raw_path": path.encode()}, receive, send)

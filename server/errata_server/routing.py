"""Surgery on the routes that upstream registers: take one out, answer one from another function, shorten the Task API.

Upstream builds its endpoints as closures inside ``register_routes``, so there is nothing to override.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from openenv.core.env_server.types import GetTaskRangeRequest, GetTaskRequest, ListTasksRequest, NumTasksRequest
from starlette.routing import BaseRoute, Mount

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


def shorten_task_api(app: FastAPI, env_name: str) -> None:
    """Serve the Task API without its first segment too: under a mount at ``/<name>`` an app sees only the rest."""
    splits = _endpoint(app, "/{env_name}/splits", "GET")
    tasks = _endpoint(app, "/{env_name}/tasks", "POST")
    num_tasks = _endpoint(app, "/{env_name}/num_tasks", "POST")
    task = _endpoint(app, "/{env_name}/task", "POST")
    task_range = _endpoint(app, "/{env_name}/task_range", "POST")

    @app.get("/splits", tags=["Task API"], include_in_schema=False)
    async def list_splits() -> Any:
        return await splits(env_name)

    @app.post("/tasks", tags=["Task API"], include_in_schema=False)
    async def list_tasks(request: ListTasksRequest) -> Any:
        return await tasks(env_name, request)

    @app.post("/num_tasks", tags=["Task API"], include_in_schema=False)
    async def count_tasks(request: NumTasksRequest) -> Any:
        return await num_tasks(env_name, request)

    @app.post("/task", tags=["Task API"], include_in_schema=False)
    async def get_task(request: GetTaskRequest) -> Any:
        return await task(env_name, request)

    @app.post("/task_range", tags=["Task API"], include_in_schema=False)
    async def get_task_range(request: GetTaskRangeRequest) -> Any:
        return await task_range(env_name, request)


def _endpoint(app: FastAPI, path: str, method: str) -> Endpoint:
    route = find_route(app, path, method)
    if route is None:
        raise RuntimeError(f"openenv registered no route {method} {path}: install openenv>=0.10,<0.11")
    endpoint: Endpoint = route.endpoint  # type: ignore[attr-defined]
    return endpoint

"""Serves several environments behind one address: each under ``/<name>``, the routes that they share at the root."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response, WebSocket, status
from starlette.routing import Mount
from starlette.types import ASGIApp

from errata_protocol.errors import InvalidRequest

from ..doors import http_routes
from ..doors.auth import guard
from ..doors.capabilities import capabilities_data
from ..episodes.episodes import Episodes
from ..runtime.runtime import Runtime
from .index_page import add_index
from .upstream_routes import TASK_API, Forwarded

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
RESERVED = frozenset(
    {
        "capabilities",
        "docs",
        "episodes",
        "harness",
        "health",
        "list_environments",
        "mcp",
        "metadata",
        "metrics",
        "openapi.json",
        "ready",
        "redoc",
        "reset",
        "schema",
        "splits",
        "state",
        "step",
        "task",
        "task_range",
        "tasks",
        "num_tasks",
        "viewer",
        "web",
        "ws",
    }
)
"""First segments of routes that the root serves itself."""


def mount_by_name(app: FastAPI, served: ASGIApp, name: str) -> None:
    """Serve ``served`` under ``/<name>`` too, unless the name cannot stand in a path or is taken by a route."""
    there = any(isinstance(route, Mount) and route.path == f"/{name}" for route in app.router.routes)
    if _NAME.fullmatch(name) and name not in RESERVED and not there:
        app.router.routes.append(Mount(f"/{name}", app=served, name=f"environment:{name}"))


def compose(apps: Mapping[str, FastAPI], runtime: Runtime, *, replayable: bool, insecure: bool = False) -> FastAPI:
    """Return the root application of several environments.

    Args:
        apps: Application by environment name; each has its own doors.
        runtime: Shared by all of them.
        replayable: False in production mode: no episodes at the root either.
        insecure: Let other machines in without a token.

    Raises:
        InvalidRequest: A name cannot be a path, or two differ in case only.
    """
    _check(list(apps))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:  # starlette runs no lifespan of a mounted application
            for served in apps.values():
                await stack.enter_async_context(served.router.lifespan_context(served))
            yield

    root = FastAPI(title="OpenEnv Environment HTTP API", version="1.0.0", lifespan=lifespan)
    by_name = {name.lower(): served for name, served in apps.items()}

    add_index(root, apps)

    @root.websocket("/ws")
    async def socket_of_none(websocket: WebSocket) -> None:
        await websocket.accept()
        places = ", ".join(f"/{name}/ws" for name in apps)
        told = {"message": f"this server has several environments: connect to one of {places}", "code": "SESSION_ERROR"}
        await websocket.send_text(json.dumps({"type": "error", "data": told}))
        await websocket.close()

    @root.get("/health", tags=["Health"])
    async def health() -> dict[str, str]:
        return {"status": "healthy"}

    @root.get("/list_environments", tags=["Task API"])
    async def list_environments() -> list[str]:
        return list(apps)

    def capabilities() -> dict[str, Any]:
        return {
            "environments": {name: capabilities_data(served.state.errata.offered()) for name, served in apps.items()}
        }

    http_routes.register(
        root, runtime=runtime, episodes=Episodes.of(runtime), capabilities=capabilities, replayable=replayable
    )
    for rest, method in TASK_API:
        root.add_api_route(
            f"/{{env_name}}/{rest}", _forward(by_name, rest), methods=[method], tags=["Task API"], name=rest
        )
    for name, served in apps.items():
        served.state.errata_lists_only = name
        root.mount(f"/{name}", served, name=f"environment:{name}")
    http_routes.answer_errors(root)
    guard(root, runtime.settings, insecure=insecure)
    return root


def _check(names: list[str]) -> None:
    for name in names:
        if not _NAME.fullmatch(name) or name in RESERVED:
            raise InvalidRequest(
                f"environment {name!r} cannot be served beside others: its path /{name} is not possible or taken; "
                "give it another name"
            )
    folded = [name.lower() for name in names]
    if len(set(folded)) != len(folded):
        raise InvalidRequest(f"two environments have the same name: {', '.join(sorted(names))}; give one another name")


def _forward(by_name: Mapping[str, FastAPI], rest: str) -> Any:
    """Return an endpoint that hands a Task API request to the environment it names, in whatever case, as upstream."""

    async def endpoint(env_name: str, request: Request) -> Response:
        served = by_name.get(env_name.lower())
        if served is None:
            raise HTTPException(status.HTTP_404_NOT_FOUND, f"unknown environment {env_name!r}")
        return Forwarded(served, f"/{rest}")

    return endpoint

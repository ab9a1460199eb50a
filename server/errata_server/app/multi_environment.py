"""Serves several environments at one address: each under ``/<name>``, and the routes they share at the root."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response, WebSocket, status
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from errata_protocol.errors import InvalidRequest
from errata_protocol.names import ENVIRONMENT

from ..doors import http_routes
from ..doors.auth import guard, refuse
from ..doors.capabilities import capabilities_data
from ..doors.session_socket import GONE, accepted
from ..episodes.episodes import Episodes
from ..runtime.runtime import Runtime
from .index_page import add_index
from .upstream_routes import TASK_API, Forwarded

RESERVED = frozenset(
    {
        "capabilities",
        "docs",
        "episodes",
        "fleet",
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
"""First path segments of the root's own routes; no environment can have such a name."""


def mount_by_name(app: Starlette, served: ASGIApp, name: str) -> None:
    """Mount ``served`` under ``/<name>`` too, unless the name is reserved, mounted already or no valid path segment."""
    mounted = any(isinstance(route, Mount) and route.path == f"/{name}" for route in app.router.routes)
    if ENVIRONMENT.matches(name) and name not in RESERVED and not mounted:
        app.router.routes.append(Mount(f"/{name}", app=served, name=f"environment:{name}"))
        explain_unknown_paths(app, ("", name))


class _UnknownPath:
    """Answers requests and handshakes at paths that an application does not have with where its environments are.

    Starlette says "Not Found", and to a handshake nothing.

    Args:
        names: Names of the environments; "" is one that is served at the root.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._places = ", ".join(f"/{name}" for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"Not Found: nothing is at {scope['path'][:100]!r}; environments are at {self._places}"
        if scope["type"] == "websocket":
            await refuse(scope, receive, send, 404, "SESSION_ERROR", message)
        else:
            raise HTTPException(404, message)


def explain_unknown_paths(app: Starlette, names: Iterable[str]) -> None:
    """Name the environments in answers at unknown paths, unless the application treats these in its own way."""
    if isinstance(app.router.default, _UnknownPath) or app.router.default == app.router.not_found:
        app.router.default = _UnknownPath(names)


def compose(apps: Mapping[str, FastAPI], runtime: Runtime, *, replayable: bool, insecure: bool = False) -> FastAPI:
    """Create the root application that serves several environments.

    Args:
        apps: Application by environment name; each serves its own sessions.
        runtime: Runtime that the applications share.
        replayable: Serve the ``/episodes`` routes at the root; False in production mode.
        insecure: Allow requests from other machines without a token.

    Raises:
        InvalidRequest: A name is no valid path segment or reserved, or two names differ in case only.
    """
    _check(list(apps))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:  # starlette does not run the lifespans of mounted applications
            for served in apps.values():
                await stack.enter_async_context(served.router.lifespan_context(served))
            yield

    root = FastAPI(title="OpenEnv Environment HTTP API", version="1.0.0", lifespan=lifespan)
    by_name = {name.lower(): served for name, served in apps.items()}

    add_index(root, apps)

    @root.websocket("/ws")
    async def ambiguous_socket(websocket: WebSocket) -> None:
        if not await accepted(websocket):
            return
        places = ", ".join(f"/{name}/ws" for name in apps)
        error = {
            "message": f"this server has several environments: connect to one of {places}",
            "code": "SESSION_ERROR",
        }
        with suppress(*GONE):
            await websocket.send_text(json.dumps({"type": "error", "data": error}))
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
        explain_unknown_paths(served, apps)
    explain_unknown_paths(root, apps)
    http_routes.answer_errors(root)
    guard(root, runtime.settings, insecure=insecure)
    return root


def _check(names: list[str]) -> None:
    for name in names:
        if not ENVIRONMENT.matches(name) or name in RESERVED:
            raise InvalidRequest(
                f"environment {name!r} cannot be served beside others: the path /{name} is not valid or is reserved; "
                "give it another name"
            )
    folded = [name.lower() for name in names]
    if len(set(folded)) != len(folded):
        raise InvalidRequest(f"two environments have the same name: {', '.join(sorted(names))}; give one another name")


def _forward(by_name: Mapping[str, FastAPI], rest: str) -> Any:
    """Return an endpoint that forwards a Task API request to the environment it names; case is ignored, as upstream.

    It answers 404 for an unknown environment.
    """

    async def endpoint(env_name: str, request: Request) -> Response:
        served = by_name.get(env_name.lower())
        if served is None:
            known = ", ".join(by_name)
            raise HTTPException(status.HTTP_404_NOT_FOUND, f"unknown environment {env_name!r}: there are {known}")
        return Forwarded(served, f"/{rest}")

    return endpoint

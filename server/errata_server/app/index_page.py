"""The page at ``/`` and ``/web`` of a server of several environments: what it serves, with links."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route


def has_pages(app: FastAPI) -> bool:
    """Whether an application serves OpenEnv's web interface."""
    return any(isinstance(route, Route) and route.path == "/web" for route in app.router.routes)


def add_index(root: FastAPI, apps: Mapping[str, FastAPI]) -> None:
    """Serve a list of the environments at ``/``, and at ``/web`` where one of them has pages.

    Browsers get a page with links, other clients JSON. Links hold under any path that the server is mounted at.

    Args:
        root: The application of them all.
        apps: Application by environment name.
    """
    pages = {name: has_pages(app) for name, app in apps.items()}

    def links(request: Request) -> dict[str, Any]:
        above = request.scope.get("root_path", "")
        return {
            "environments": {name: f"{above}/{name}" for name in apps},
            "web": {name: f"{above}/{name}/web/" for name, has_web in pages.items() if has_web},
            "capabilities": f"{above}/capabilities",
            "docs": f"{above}/docs",
        }

    async def index(request: Request) -> Response:
        told = links(request)
        if "text/html" not in request.headers.get("accept", ""):
            return JSONResponse(told)
        return HTMLResponse(_page(told))

    async def web(request: Request) -> Response:
        return HTMLResponse(_page(links(request)))

    root.add_api_route("/", index, include_in_schema=False)
    if any(pages.values()):
        root.add_api_route("/web", web, include_in_schema=False)
        root.add_api_route("/web/", web, include_in_schema=False)


def _page(told: Mapping[str, Any]) -> str:
    rows = []
    for name, path in told["environments"].items():
        web = told["web"].get(name)
        linked = f'<a href="{web}">web interface</a>, ' if web else ""
        rows.append(f'<li><b>{name}</b>: {linked}<a href="{path}/docs">HTTP API</a>, WebSocket at {path}/ws</li>')
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8><title>Errata</title></head><body>"
        f"<h1>Environments</h1><ul>{''.join(rows)}</ul>"
        f'<p>All together: <a href="{told["capabilities"]}">capabilities</a>, <a href="{told["docs"]}">HTTP API</a></p>'
        "</body></html>"
    )

"""The index page at ``/`` and ``/web`` of a server of several environments: its environments, with links."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route


def has_pages(app: FastAPI) -> bool:
    """Return whether an application serves OpenEnv's web interface."""
    return any(isinstance(route, Route) and route.path == "/web" for route in app.router.routes)


def add_index(root: FastAPI, apps: Mapping[str, FastAPI]) -> None:
    """Add a list of the environments at ``/``, and at ``/web`` if one of them has the web interface.

    ``/`` answers a client that accepts HTML with a page and any other client with JSON. Links take the path into
    account that the root application is mounted at.

    Args:
        root: The application that the others are mounted in.
        apps: Application by environment name.
    """
    pages = {name: has_pages(app) for name, app in apps.items()}

    def links(request: Request) -> dict[str, Any]:
        root_path = request.scope.get("root_path", "")
        return {
            "environments": {name: f"{root_path}/{name}" for name in apps},
            "web": {name: f"{root_path}/{name}/web/" for name, has_web in pages.items() if has_web},
            "capabilities": f"{root_path}/capabilities",
            "docs": f"{root_path}/docs",
        }

    async def index(request: Request) -> Response:
        found = links(request)
        if "text/html" not in request.headers.get("accept", ""):
            return JSONResponse(found)
        return HTMLResponse(_page(found))

    async def web(request: Request) -> Response:
        return HTMLResponse(_page(links(request)))

    root.add_api_route("/", index, include_in_schema=False)
    if any(pages.values()):
        root.add_api_route("/web", web, include_in_schema=False)
        root.add_api_route("/web/", web, include_in_schema=False)


def _page(links: Mapping[str, Any]) -> str:
    rows = []
    for name, path in links["environments"].items():
        web = links["web"].get(name)
        linked = f'<a href="{web}">web interface</a>, ' if web else ""
        rows.append(f'<li><b>{name}</b>: {linked}<a href="{path}/docs">HTTP API</a>, WebSocket at {path}/ws</li>')
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8><title>Errata</title></head><body>"
        f"<h1>Environments</h1><ul>{''.join(rows)}</ul>"
        f'<p>All together: <a href="{links["capabilities"]}">capabilities</a>, '
        f'<a href="{links["docs"]}">HTTP API</a></p>'
        "</body></html>"
    )

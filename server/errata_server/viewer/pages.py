"""The files of the viewer, and their routes: nothing in them is made at run time, or comes from another host."""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import NamedTuple

from fastapi import FastAPI, Request, Response
from starlette.responses import RedirectResponse

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Media types by the end of a file's name. Other files, such as licences, are not served."""

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
"""What a page may load and do: whatever an agent wrote becomes no script, no style and no request to anywhere else."""

_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked for again each time, and answered by 304 while it is the same
}


class _File(NamedTuple):
    content: bytes
    zipped: bytes
    tag: str
    media_type: str


@cache
def _files() -> dict[str, _File]:
    """Return the viewer's files by their paths below ``/viewer/``; ``""`` is the page itself."""
    found = dict(_below(files(__package__) / "static", ""))
    return {**found, "": found["index.html"]}


def _below(folder: Traversable, path: str) -> list[tuple[str, _File]]:
    found: list[tuple[str, _File]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _below(entry, f"{path}{entry.name}/")
        elif (media_type := _TYPES.get(entry.name[entry.name.rfind(".") :])) is not None:
            content = entry.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found.append((path + entry.name, _File(content, gzip.compress(content, mtime=0), tag, media_type)))
    return found


def register_viewer(app: FastAPI) -> None:
    """Add the viewer's pages at ``/viewer/``, beside the routes below ``/episodes`` that they read."""
    _files()

    @app.api_route("/viewer", methods=["GET", "HEAD"], include_in_schema=False)
    async def to_viewer(request: Request) -> Response:
        query = f"?{request.url.query}" if request.url.query else ""
        return RedirectResponse(f"{request.scope.get('root_path', '')}/viewer/{query}")

    @app.api_route("/viewer/{path:path}", methods=["GET", "HEAD"], include_in_schema=False)
    async def viewer(request: Request, path: str) -> Response:
        file = _files().get(path)
        if file is None:
            return Response("the viewer has no such file", 404, _HEADERS, "text/plain; charset=utf-8")
        headers = {**_HEADERS, "ETag": file.tag, "Vary": "Accept-Encoding"}
        if file.tag in (tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")):
            return Response(None, 304, headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(file.zipped, 200, {**headers, "Content-Encoding": "gzip"}, file.media_type)
        return Response(file.content, 200, headers, file.media_type)

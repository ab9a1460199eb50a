"""The headers of requests between workers: those of the client, and both ends of the connection that it came in on.

The worker that gets such a request checks it as if the connection were its own: token, Host, Origin, and whether the
client is of this machine and user. Only requests on a worker's Unix socket, in a directory that others cannot enter,
may say so.
"""

from __future__ import annotations

from starlette.requests import HTTPConnection
from starlette.types import Scope

from ..runtime.fleet import PASSED_ON

CLIENT, SERVER = b"x-errata-fleet-client", b"x-errata-fleet-server"
"""Headers with both ends of the connection that a request came in on."""

_HOP_BY_HOP = frozenset(b"connection keep-alive proxy-connection te trailer transfer-encoding upgrade".split())


def passed_on(connection: HTTPConnection) -> list[tuple[str, str]]:
    """Return the headers of a request for another worker, with both ends of the connection that it came in on."""
    scope = connection.scope
    headers = [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in scope["headers"]
        if name.lower() not in _HOP_BY_HOP and name.lower() not in (CLIENT, SERVER)
    ]
    for name, end in ((CLIENT, scope.get("client")), (SERVER, scope.get("server"))):
        if end is not None:
            headers.append((name.decode(), f"{end[0]} {end[1] if end[1] is not None else ''}"))
    return headers


def restored(scope: Scope) -> Scope:
    """Return the scope of a request that another worker has passed on as if it had come in here."""
    ends = {name: value.decode("latin-1") for name, value in scope["headers"] if name in (CLIENT, SERVER)}
    headers = [(name, value) for name, value in scope["headers"] if name not in (CLIENT, SERVER)]
    return {
        **scope,
        "headers": headers,
        "client": _end(ends.get(CLIENT)),
        "server": _end(ends.get(SERVER)),
        PASSED_ON: True,
    }


def _end(text: str | None) -> tuple[str, int | None] | None:
    if text is None:
        return None
    host, _, port = text.rpartition(" ")
    return host, int(port) if port else None

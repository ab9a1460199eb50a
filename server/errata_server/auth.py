"""Who may speak to a server: bearer token, origin, host and peer address (PROTOCOL F2).

Everything is checked before a door sees the request, on HTTP and WebSocket alike. With authentication off everyone is
one anonymous principal, and session ids and eids are the capabilities.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from .settings import Settings

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Answered without a token: probes of a load balancer. They tell nothing about sessions."""


def principal_of(token: str) -> str:
    """Return the name under which a token's sessions are journaled; never the token itself."""
    return hashlib.sha256(b"errata-principal:" + token.encode()).hexdigest()


LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
"""What a server that only this machine can reach may be called."""


def is_loopback(host: str) -> bool:
    """Return whether a bind or peer address is loopback."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host == "testclient"  # starlette's TestClient names its peer so


class Guard:
    """ASGI middleware in front of all doors.

    Args:
        app: What it guards.
        settings: ``token`` switches authentication on.
        insecure: Let peers that are not on this machine in without a token.
    """

    def __init__(self, app: ASGIApp, *, settings: Settings, insecure: bool = False) -> None:
        self._app = app
        self._token = settings.token.get_secret_value() if settings.token is not None else None
        self._insecure = insecure
        self._hosts = frozenset(name.lower() for name in settings.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
            refusal = self._refusal(scope, headers)
            if refusal is not None:
                await _refuse(scope, receive, send, *refusal)
                return
            token = self._token
            scope.setdefault("state", {})["principal"] = principal_of(token) if token is not None else None
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str, str] | None:
        host = headers.get("host", "")
        if self._hosts and _name_of(host) not in self._hosts:
            return (
                403,
                "FORBIDDEN",
                f"this server is not {host[:100]!r}: use its own address or set ERRATA_ALLOWED_HOSTS",
            )
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return 403, "FORBIDDEN", f"a page of {origin} may not use this server"
        if self._token is None:
            peer = (scope.get("client") or ("", 0))[0]
            if not self._insecure and peer and not is_loopback(peer):
                return 403, "FORBIDDEN", "this server has no token and answers loopback only: set ERRATA_TOKEN"
            return None
        if scope["path"] in OPEN_PATHS:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return 401, "UNAUTHORIZED", "this server needs a token: send the header `Authorization: Bearer TOKEN`"
        given = given.strip()
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            return 401, "UNAUTHORIZED", "the token is not this server's"
        return None


def _name_of(host: str) -> str:
    """Return the name in a Host header without its port; empty where there is none to be read."""
    try:
        return urlsplit("//" + host).hostname or ""
    except ValueError:
        return ""


async def _refuse(scope: Scope, receive: Receive, send: Send, status: int, code: str, message: str) -> None:
    body = json.dumps({"code": code, "message": message}).encode()
    prefix = "http"
    if scope["type"] == "websocket":
        await receive()
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": 1008, "reason": message[:120]})
            return
        prefix = "websocket.http"
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": f"{prefix}.response.start", "status": status, "headers": headers})
    await send({"type": f"{prefix}.response.body", "body": body})

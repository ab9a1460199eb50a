"""Access control for HTTP and WebSocket: token, Origin and Host headers, peer address (PROTOCOL F2).

Everything is checked before a door sees the request, on HTTP and WebSocket alike. With authentication off everyone is
one anonymous principal: sessions belong to those who know their ids and keys, episodes as `readers.Reader` says.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import json
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from ..log import hide_ids
from ..settings import Settings
from .request_bodies import RequestBodies
from .viewer_login import Logins, Visitor, is_login, is_open

log = logging.getLogger("errata.server")

Refusal = tuple[int, str, str]

REFUSALS_S = 60.0
"""Shortest time between two lines of the log about refusals of one kind, seconds: they must not fill it."""

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Paths answered without a token, for the probes of a load balancer. The answers show nothing about sessions."""


def principal_of(token: str) -> str:
    """Return the principal of a token: a hash, because it is journaled and the token must not be."""
    return hashlib.sha256(b"errata-principal:" + token.encode()).hexdigest()


PROXY_HEADERS = frozenset({"x-forwarded-for", "forwarded"})
"""Headers of a request that came through a proxy."""

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
"""Host names of a server that only this machine can reach."""


def is_loopback(host: str) -> bool:
    """Return whether a bind or peer address is loopback."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback
    except ValueError:
        return host in ("localhost", "testclient", "testserver")  # the last two: both ends of starlette's TestClient


def guard(app: Starlette, settings: Settings, *, insecure: bool = False) -> None:
    """Add the middleware `RequestBodies` and `Guard` to an application, unless it has a `Guard` already.

    Call it before the application serves its first request.

    Args:
        app: The application.
        settings: See `Guard`.
        insecure: See `Guard`.
    """
    hide_ids()
    installed: list[object] = [middleware.cls for middleware in app.user_middleware]
    if Guard not in installed:
        app.add_middleware(Guard, settings=settings, insecure=insecure)
        app.add_middleware(RequestBodies)  # runs before the guard, which may refuse a request before its body has ended


class Guard:
    """ASGI middleware that checks every request and handshake before a door sees it, and sets its principal.

    A refused request gets 401 or 403 and ``{"code", "message"}``; a refused handshake likewise where the server can
    send that, else close code 1008. The principal of an accepted one is ``scope["state"]["principal"]``: None without
    authentication, and for `OPEN_PATHS` and the files of the viewer without a token. Instead of a token the viewer's
    requests may have the cookie of its login, see `viewer_login`.

    Args:
        app: The application to protect.
        settings: ``tokens``, ``allowed_hosts``, ``allowed_origins`` and ``insecure``; a token switches authentication
            on.
        insecure: Accept requests from other machines without a token, even if the settings do not allow it.
    """

    def __init__(self, app: ASGIApp, *, settings: Settings, insecure: bool = False) -> None:
        self._app = app
        self._principals = {token.encode(): principal_of(token) for token in settings.tokens}
        self._logins = Logins()
        self._insecure = insecure or settings.insecure
        self._hosts = frozenset(name.lower() for name in settings.allowed_hosts)
        self._refusals = Refusals()
        self._origins = frozenset(origin.lower().rstrip("/") for origin in settings.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            names = Counter(k.lower() for k, _ in scope["headers"])
            if repeated := next((name for name in _ONCE if names[name] > 1), None):
                await refuse(scope, receive, send, *_repeated(repeated.decode()))
                return
            headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
            peer = (scope.get("client") or ("", 0))[0]
            not_local = self._refuse_remote(peer, headers)
            refusal = self._refuse_foreign_page(scope["type"], headers, is_loopback(peer)) or not_local
            state, principal = scope.setdefault("state", {}), None
            if refusal is None and self._principals:
                # A guard of an application that this one is mounted in has made it, for its own logins.
                visitor: Visitor = state.setdefault("errata_visitor", Visitor(self._logins, scope))
                principal = self._principal(headers)
                if "authorization" not in headers and (opened := visitor.opens(scope)) in self._principals.values():
                    principal = opened
                if is_login(scope) and visitor.logins.refuses(peer):
                    refusal = _TOO_MANY
                elif principal is None and scope["path"] not in OPEN_PATHS and not is_open(scope):
                    refusal = _NO_TOKEN if "authorization" not in headers else _WRONG_TOKEN
                    if is_login(scope):
                        visitor.logins.note_wrong(peer)
                elif principal not in (None, next(iter(self._principals.values()))) and _PAGES.search(scope["path"]):
                    refusal = _NOT_YOUR_PAGES
            if refusal is not None:
                self._refusals.note(not_local or refusal, peer)
                await refuse(scope, receive, send, *refusal)
                return
            state["principal"] = principal
        await self._app(scope, receive, send)

    def _refuse_foreign_page(self, kind: str, headers: dict[str, str], local: bool) -> Refusal | None:
        """Return the refusal of a request from a page of another origin, also by DNS rebinding; None to accept."""
        host = headers.get("host", "")
        name = _name_of(host)
        if self._hosts and name not in self._hosts:
            message = f"this server is not {host[:100]!r}: use its own address or set ERRATA_ALLOWED_HOSTS"
            if _is_unspecified(name):  # the address that a server listens on, used to connect to it
                message += (
                    f"; {name} is an address to listen on: connect to localhost or 127.0.0.1, or to the machine's name"
                )
            return 403, "FORBIDDEN", message
        origin = headers.get("origin")
        if origin is not None and origin.lower() in self._origins:
            return None
        if origin is None:
            embedded = headers.get("sec-fetch-mode") != "navigate" and not self._origins
            if embedded and headers.get("sec-fetch-site") in ("cross-site", "same-site"):  # an image, a script
                return 403, "FORBIDDEN", "a page of another site may not use this server"
            if kind == "websocket" or self._insecure or not host:
                return None  # a browser sends a host with everything, and an origin with every handshake
        elif not host or origin.partition("://")[2].lower() != host.lower():
            message = f"a page of {origin[:100]} may not use this server: set ERRATA_ALLOWED_ORIGINS to let it"
            return 403, "FORBIDDEN", message
        if local and not self._principals and not self._hosts and _may_be_rebound(name):
            message = f"a page may call this server localhost, not {name[:100]!r}: set ERRATA_ALLOWED_HOSTS to let it"
            return 403, "FORBIDDEN", message
        return None

    def _refuse_remote(self, peer: str, headers: dict[str, str]) -> Refusal | None:
        """Return the refusal of a peer on another machine, where that needs a token and none is set; None to accept."""
        if self._principals or self._insecure:
            return None
        if headers.keys() & PROXY_HEADERS:  # their addresses cannot be trusted: any client can send them
            message = (
                "this request came through a proxy, so other machines may reach this server, and it has no token: "
                "set ERRATA_TOKEN, or ERRATA_INSECURE=1"
            )
            return 403, "FORBIDDEN", message
        if not peer or is_loopback(peer):
            return None
        message = "this server has no token and answers loopback only: set ERRATA_TOKEN, or ERRATA_INSECURE=1"
        return 403, "FORBIDDEN", message

    def _principal(self, headers: dict[str, str]) -> str | None:
        """Return the principal of the token in the Authorization header; None where it is missing or unknown."""
        scheme, _, sent = headers.get("authorization", "").partition(" ")
        given = sent.strip().encode("latin-1")  # the bytes that were sent
        if scheme.lower() == "basic":  # a browser asks its user for a name and a password; the password is the token
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except ValueError:
                return None
        elif scheme.lower() != "bearer":
            return None
        # Every token is compared, in constant time, so that the response time shows nothing about tokens.
        found = [principal for known, principal in self._principals.items() if hmac.compare_digest(given, known)]
        return found[0] if found else None


_NO_TOKEN: Refusal = (
    401,
    "UNAUTHORIZED",
    "this server needs a token: send the header `Authorization: Bearer TOKEN`",
)
_WRONG_TOKEN: Refusal = (401, "UNAUTHORIZED", "the token is not this server's, or not sent as `Bearer TOKEN`")
_TOO_MANY: Refusal = (429, "OVERLOADED", "too many wrong tokens from this address: wait a minute, then try again")


_NOT_YOUR_PAGES: Refusal = (403, "FORBIDDEN", "the web interface is one session, which belongs to the first token")

_ONCE = (b"authorization", b"host", b"origin", b"sec-fetch-mode", b"sec-fetch-site")
"""Headers that decide who may do what. With two of one, this server and a proxy before it could read another each."""


def _repeated(name: str) -> Refusal:
    """Return the refusal of a request with a header of `_ONCE` twice."""
    message = f"the header {name} is there more than once: send one"
    return (401, "UNAUTHORIZED", message) if name == "authorization" else (403, "FORBIDDEN", message)


_PAGES = re.compile(r"/(web|ws/ui)(/|$)")
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\s:@/?#\\\[\]]+))(?::[0-9]{1,5})?")


class Refusals:
    """Logs refused requests: of each kind at once, and then no more than a line a minute with their number.

    Args:
        now: Clock, seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._counts: Counter[tuple[int, str]] = Counter()
        self._said_at: dict[tuple[int, str], float] = {}

    def note(self, refusal: Refusal, peer: str) -> None:
        """Count a refusal of a request from ``peer``, and log it unless its kind was logged in the last minute."""
        status, code, message = refusal
        kind, now = (status, code), self._now()
        self._counts[kind] += 1
        if now - self._said_at.get(kind, -math.inf) < REFUSALS_S:
            return
        self._said_at[kind] = now
        count = self._counts.pop(kind)
        level = logging.WARNING if status == 403 else logging.INFO  # the server's settings, or a client's token
        log.log(level, "refused %d requests (%d %s), the last from %s: %s", count, status, code, peer or "?", message)


def _name_of(host: str) -> str:
    """Return the name in a Host header, without its port; "" where the header is not ``name[:port]``."""
    found = _HOST.fullmatch(host.lower())
    return (found[1] or found[2]) if found else ""


def _is_unspecified(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_unspecified
    except ValueError:
        return False


def _may_be_rebound(name: str) -> bool:
    """Return whether an attacker's DNS could resolve ``name`` to this machine: not an IP address or a single label."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return not name or "." in name.strip(".")  # "" is a Host header that `_name_of` could not parse
    return False


async def refuse(scope: Scope, receive: Receive, send: Send, status: int, code: str, message: str) -> None:
    """Refuse a request or handshake: with an HTTP answer or, for a handshake where the server cannot send that, by
    closing the socket with the reason."""
    body = json.dumps({"code": code, "message": message}).encode()
    prefix = "http"
    if scope["type"] == "websocket":
        await receive()
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send(
                {"type": "websocket.close", "code": 1008, "reason": message.encode()[:120].decode(errors="ignore")}
            )
            return
        prefix = "websocket.http"
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
        if scope["type"] == "http" and _PAGES.search(scope["path"]):
            headers.append((b"www-authenticate", b'Basic realm="Errata: any name, the token as password"'))
    await send({"type": f"{prefix}.response.start", "status": status, "headers": headers})
    await send({"type": f"{prefix}.response.body", "body": body})

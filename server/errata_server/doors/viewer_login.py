"""Login of the viewer: a browser sends its token once, and then a cookie with a random id, which opens reads and forks.

A page load can send no Authorization header, so `auth.Guard` lets requests without one reach the viewer's own files,
which have no data, and asks `Logins` whose a cookie is. The id is no token: it ends with the process, after `LOGIN_S`
and with ``POST /viewer/logout``, and it opens nothing but what the viewer uses.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from fastapi import FastAPI, Request, Response
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from ..viewer import pages

LOGIN_S = 12 * 3600.0
"""How long a login lasts, seconds."""

MAX_LOGINS = 100
"""Most logins of a principal at a time; one more ends its oldest."""

MAX_WRONG = 10
"""Most wrong tokens from one address in `WRONG_S`; a login is then refused, whatever its token."""

WRONG_S = 60.0
MAX_PEERS = 1000
"""Most addresses whose wrong tokens are counted."""

_NO_STORE = {"Cache-Control": "no-store"}


class Logins:
    """The logins of a process: whose each random id is, of which only a hash is kept.

    Args:
        now: Clock, seconds.
        most_wrong: Most wrong tokens from one address in `WRONG_S`.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic, most_wrong: int = MAX_WRONG) -> None:
        self._now = now
        self._most_wrong = most_wrong
        self._found: OrderedDict[bytes, tuple[str, float]] = OrderedDict()  # the oldest first
        self._wrong: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def begin(self, principal: str) -> str:
        """Return a new id for a principal."""
        self._expire()
        own = [key for key, (whose, _) in self._found.items() if whose == principal]
        for key in own[: max(0, len(own) - MAX_LOGINS + 1)]:
            del self._found[key]
        made = secrets.token_urlsafe(32)
        self._found[_hash(made)] = (principal, self._now() + LOGIN_S)
        return made

    def principal(self, sent: str) -> str | None:
        """Return whose an id is; None for one that is unknown or has ended."""
        self._expire()
        found = self._found.get(_hash(sent))
        return found[0] if found is not None else None

    def end(self, sent: str) -> None:
        """Forget an id."""
        self._found.pop(_hash(sent), None)

    def note_wrong(self, peer: str) -> None:
        """Count a wrong token from an address."""
        since, count = self._wrong.pop(peer, (self._now(), 0))
        self._wrong[peer] = (since, count + 1)
        while len(self._wrong) > MAX_PEERS:
            self._wrong.popitem(last=False)

    def refuses(self, peer: str) -> bool:
        """Return whether an address has sent too many wrong tokens."""
        since, count = self._wrong.get(peer, (0.0, 0))
        if count and self._now() - since >= WRONG_S:
            del self._wrong[peer]
            return False
        return count >= self._most_wrong

    def _expire(self) -> None:
        while self._found and next(iter(self._found.values()))[1] <= self._now():
            self._found.popitem(last=False)


def _hash(sent: str) -> bytes:
    return hashlib.sha256(sent.encode()).digest()


class Visitor:
    """A request at a server with tokens, as the viewer's routes see it in ``scope["state"]["errata_visitor"]``.

    Args:
        logins: The server's logins.
        scope: The request at the outermost application that the server is.
    """

    def __init__(self, logins: Logins, scope: Scope) -> None:
        self.logins = logins
        sent = [(name.lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        headers = dict(sent)
        root, host, origin = scope.get("root_path", ""), headers.get(b"host", ""), headers.get(b"origin")
        # A browser sends its cookies to every port of a host, so each server has a name of its own.
        self.cookie = f"errata-{hashlib.sha256(f'{host} {root}'.encode()).hexdigest()[:8]}"
        self.own_page = origin is not None and origin.partition("://")[2].lower() == host.lower()
        cookies = cookie_parser("; ".join(value for name, value in sent if name == b"cookie"))
        # A page of another port of this host is of the same site, and its requests have the cookie: its origin tells.
        self.sent = cookies.get(self.cookie) if origin is None or self.own_page else None
        secure = "; Secure" if scope.get("scheme") == "https" or (origin or "").startswith("https://") else ""
        self._attributes = f"; Path={root}/; HttpOnly; SameSite=Strict{secure}"

    def opens(self, scope: Scope) -> str | None:
        """Return the principal whose cookie opens a request; None where there is none, or it opens no such request."""
        if self.sent is None or scope["type"] != "http" or not _is_of_viewer(scope, self.own_page):
            return None
        return self.logins.principal(self.sent)

    def set_cookie(self, made: str) -> dict[str, str]:
        """Return the header that sets the cookie; that ends it for ""."""
        age = int(LOGIN_S) if made else 0
        return {"Set-Cookie": f"{self.cookie}={made}{self._attributes}; Max-Age={age}"}


def is_open(scope: Scope) -> bool:
    """Return whether a request leads to the viewer's files or to its login, which show no data."""
    if scope["type"] != "http" or "/viewer" not in scope["path"]:
        return False
    found = _route(scope["app"].routes, scope)
    module: str = getattr(getattr(found, "endpoint", None), "__module__", "")
    return module == pages.__name__ or (module == __name__ and not is_login(scope))


def is_login(scope: Scope) -> bool:
    """Return whether a request sends a token to begin a login with."""
    path: str = scope["path"]
    return scope["type"] == "http" and scope["method"] == "POST" and path.endswith("/viewer/login")


def _is_of_viewer(scope: Scope, own_page: bool) -> bool:
    """Return whether a request is one of those that the viewer sends."""
    found = _route(scope["app"].routes, scope)
    module: str = getattr(getattr(found, "endpoint", None), "__module__", "")
    path: str = getattr(found, "path", "")
    if module in (pages.__name__, __name__):
        return not is_login(scope)
    method: str = scope["method"]
    if path == "/capabilities" and module.startswith("errata_server."):
        return method == "GET"
    if module != f"{__package__}.http_routes" or not path.startswith("/episodes"):
        return False
    return method in ("GET", "HEAD") or (method == "POST" and path == "/episodes/{eid}/fork" and own_page)


def _route(routes: Iterable[BaseRoute], scope: Scope) -> BaseRoute | None:
    """Return the route that a request will take, through applications that are mounted."""
    for route in routes:
        match, more = route.matches(scope)
        if match is Match.FULL:
            below = getattr(route, "routes", None)
            return route if below is None else _route(below, {**scope, **more})
    return None


def register_login(app: FastAPI) -> None:
    """Add the viewer's login to an application, before the routes of its files."""

    @app.get("/viewer/login", include_in_schema=False)
    async def look(request: Request) -> Response:
        visitor = _visitor(request)
        signed_in = visitor is None or request.scope["state"]["principal"] is not None
        return JSONResponse({"tokens": visitor is not None, "signed_in": signed_in}, headers=_NO_STORE)

    @app.post("/viewer/login", include_in_schema=False)
    async def begin(request: Request) -> Response:
        visitor = _visitor(request)  # the guard has checked the token in its Authorization header
        if visitor is None:
            return JSONResponse({"tokens": False, "signed_in": True}, headers=_NO_STORE)
        made = visitor.logins.begin(request.scope["state"]["principal"])
        return JSONResponse({"tokens": True, "signed_in": True}, headers={**_NO_STORE, **visitor.set_cookie(made)})

    @app.post("/viewer/logout", include_in_schema=False)
    async def end(request: Request) -> Response:
        visitor = _visitor(request)
        if visitor is None:
            return JSONResponse({"tokens": False, "signed_in": True}, headers=_NO_STORE)
        if visitor.sent is not None:
            visitor.logins.end(visitor.sent)
        return JSONResponse({"tokens": True, "signed_in": False}, headers={**_NO_STORE, **visitor.set_cookie("")})


def _visitor(request: Request) -> Visitor | None:
    found: Visitor | None = request.scope.get("state", {}).get("errata_visitor")
    return found

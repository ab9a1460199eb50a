"""`ServerSource`: a fleet whose members are asked of a member (``GET /fleet``, PROTOCOL F6)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from urllib.parse import urlsplit, urlunsplit

import httpx
from pydantic import ValidationError

from errata_protocol import bounded_json
from errata_protocol.errors import ErrataError, NotSupported, ServiceError
from errata_protocol.exception_text import text_of
from errata_protocol.fleet import MAX_WAIT_S, FleetMembers
from errata_protocol.printable import printable

from ..wire.frames import FrameInvalid, is_known_code, wire_error
from .endpoint import Endpoint, endpoints_of

MAX_BYTES = 1024**2
"""Longest answer, bytes."""

ANSWER_S = 10.0
"""How long an answer may take beyond the wait that was asked for, seconds."""

CONNECT_S = 2.0
"""How long a connection to a member may take, seconds; then the next one is asked."""

MOST_ASKED = 4
"""Most other members that are asked, one after the other."""

_LOOPBACK = ("localhost", "127.0.0.1", "::1")

_SCHEMES = {"ws": "http", "wss": "https"}


class ServerSource:
    """The members that a server lists. Where it cannot be reached, other members of its last list are asked.

    Args:
        url: Base URL of any member, as for `ErrataClient`.
        headers: Sent with each request, e.g. the token; to every member.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None) -> None:
        parts = urlsplit(url.rstrip("/"))
        self._url = urlunsplit((_SCHEMES.get(parts.scheme, parts.scheme), parts.netloc, parts.path, "", ""))
        self._headers = {**(headers or {}), "Accept-Encoding": "identity"}  # so that what is read is bounded
        self._others: list[str] = []
        self._next = self._url  # is asked first: the one that answered last, or the one behind one that did not
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def read(self, after: str | None, wait_s: float) -> tuple[str, list[Endpoint]]:
        """See `Source.read`.

        Raises:
            ConnectionError: No member answers.
            NotSupported: The server has no such route, e.g. a vanilla OpenEnv server.
            FrameInvalid: The answer is no list of members, or too long.
            ErrataError: The server's error.
        """
        query: dict[str, str | float] = {}
        if after is not None:
            query = {"after": after, "wait": min(wait_s, MAX_WAIT_S)}
        failed: ConnectionError | None = None
        urls = [self._url, *self._others[:MOST_ASKED]]
        first = urls.index(self._next) if self._next in urls else 0
        for at in range(first, first + len(urls)):
            url, self._next = urls[at % len(urls)], urls[(at + 1) % len(urls)]  # also where the caller gives up
            try:
                found = await self.ask(url, query)
            except ConnectionError as error:
                failed = failed or error
                continue
            self._next = url
            endpoints = endpoints_of(found, url)
            self._others = list(dict.fromkeys(one.url for one in endpoints if one.url != self._url))
            return found.version, endpoints
        assert failed is not None
        raise failed

    async def ask(self, url: str, query: Mapping[str, str | float] | None = None) -> FleetMembers:
        """Return the members that the server at a base URL lists.

        Args:
            url: Base URL of a member.
            query: Parameters of the request.

        Raises:
            ConnectionError, ErrataError: See `read`.
        """
        query = query or {}
        client, most_s = self._client_here(), float(query.get("wait", 0.0)) + ANSWER_S
        timeout = httpx.Timeout(most_s, connect=CONNECT_S)
        try:
            async with asyncio.timeout(most_s):
                async with client.stream("GET", f"{url}/fleet", params=query, timeout=timeout) as response:
                    parts, size = [], 0
                    async for part in response.aiter_raw():
                        parts.append(part)
                        size += len(part)
                        if size > MAX_BYTES:
                            raise FrameInvalid(f"{url}/fleet answered with more than {MAX_BYTES} bytes")
        except (httpx.HTTPError, TimeoutError) as error:
            raise ConnectionError(f"GET {url}/fleet failed: {text_of(error)}") from error
        text = b"".join(parts)
        try:
            found = bounded_json.decode(text)
        except ValueError:
            found = None
        if not response.is_success:
            raise _error(response.status_code, found, text)
        try:
            return FleetMembers.model_validate(found)
        except ValidationError as error:
            raise FrameInvalid(f"{url}/fleet answered no list of members: {text_of(error)}") from error

    def _client_here(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            # Connections belong to the loop that opened them and cannot be closed from here.
            local = urlsplit(self._url).hostname in _LOOPBACK  # no proxy is between
            self._client = httpx.AsyncClient(headers=self._headers, trust_env=not local, follow_redirects=True)
            self._loop = loop
        return self._client

    async def aclose(self) -> None:
        """See `Source.aclose`."""
        client, loop = self._client, self._loop
        self._client = self._loop = None
        if client is not None and loop is asyncio.get_running_loop():
            await client.aclose()


def _error(status: int, body: object, text: bytes) -> Exception:
    """Return the error that an answer is; one that a proxy gives while its server restarts is a ConnectionError."""
    if isinstance(body, dict) and is_known_code(body):
        error: ErrataError = wire_error(body)
        return error
    if status in (404, 405):
        return NotSupported(f"this server has no /fleet ({status}): it is not an Errata server, or an earlier one")
    shown = printable(text.decode(errors="replace"), 200)
    if status in (408, 429, 500, 502, 503, 504):
        return ConnectionError(f"GET /fleet was answered {status}: {shown}")
    return ServiceError(f"GET /fleet was answered {status}: {shown}")

"""`DnsSource`: a fleet whose members are all addresses of one name, such as that of a headless service."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import urlsplit

from errata_protocol.errors import ErrataError, InvalidRequest
from errata_protocol.exception_text import text_of
from errata_protocol.fleet import MAX_MEMBERS, FleetMember, FleetMembers

from .endpoint import Endpoint, endpoints_of
from .server_source import ServerSource

LOOK_S = 3.0
"""Time between two looks at the name and its members, seconds."""

AT_ONCE = 64
"""Most members that are asked at a time."""

SCHEMES = {"dns": "http", "dns+https": "https"}

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Returns the addresses of a name, for a port; raises OSError where it has none."""


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a name in a fixed order; the resolver runs on a thread.

    Raises:
        OSError: The name has none, or cannot be resolved now.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found})


class DnsSource:
    """All A and AAAA addresses of a name, each of which is asked who it is (``GET /fleet``).

    A member that does not answer, or whose address is gone, is ``down`` if its shard is known from before: it is
    expected back, maybe at another address. No member is ever ``lost``.

    Args:
        address: ``dns://HOST:PORT``, or ``dns+https://HOST:PORT``; a path is that of an environment of each member.
        headers: Sent with each request to a member, e.g. the token.
        resolve: Resolves the name.

    Raises:
        InvalidRequest: The address has no host or no port, or more than a path behind them.
    """

    def __init__(self, address: str, headers: Mapping[str, str] | None, resolve: Resolve = resolve) -> None:
        parts = urlsplit(address)
        try:
            port = parts.port
        except ValueError:
            port = None
        if not parts.hostname or port is None or "@" in parts.netloc or parts.query or parts.fragment:
            raise InvalidRequest("a fleet behind a name is given as dns://HOST:PORT, or dns+https://HOST:PORT")
        self._host, self._port, self._path = parts.hostname, port, parts.path.rstrip("/")
        self._scheme = SCHEMES[parts.scheme]
        self._resolve = resolve
        self._server = ServerSource(f"{self._scheme}://{parts.netloc}", headers)
        self._known: dict[str | None, Endpoint] = {}

    async def read(self, after: str | None, wait_s: float) -> tuple[str, list[Endpoint]]:
        """See `Source.read`.

        Raises:
            ConnectionError: The name has no address, or no member of it answers and none is known.
            ErrataError: The error of the members, where none answers and none is known.
        """
        clock = asyncio.get_running_loop().time
        end = clock() + wait_s
        while True:
            found = await self._look()
            version = FleetMembers.of(
                [FleetMember(shard=one.shard, url=one.url, state=one.state) for one in found]
            ).version
            if version != after or (left := end - clock()) <= 0:
                return version, found
            await asyncio.sleep(min(LOOK_S, left))

    async def _look(self) -> list[Endpoint]:
        try:
            addresses = (await self._resolve(self._host, self._port))[:MAX_MEMBERS]
        except OSError as error:
            raise ConnectionError(f"{self._host} has no address now: {text_of(error)}") from error
        places, failed = asyncio.Semaphore(AT_ONCE), list[Exception]()

        async def ask(url: str) -> list[Endpoint]:
            async with places:
                try:
                    found = await self._server.ask(url)
                except (ConnectionError, ErrataError) as error:
                    failed.append(error)
                    return []
            return [one for one in endpoints_of(found, url) if one.url == url]  # and none of others that it lists

        answered = await asyncio.gather(*(ask(self._url_at(address)) for address in addresses))
        serving = {one.shard: one for several in answered for one in several}
        gone = {shard: Endpoint(shard, one.url, "down") for shard, one in self._known.items() if shard not in serving}
        self._known = dict(list((gone | serving).items())[-MAX_MEMBERS:])
        if not self._known:
            raise failed[0] if failed else ConnectionError(f"{self._host} has no member")
        return [self._known[shard] for shard in sorted(self._known, key=str)]

    def _url_at(self, address: str) -> str:
        host = f"[{address}]" if ":" in address else address
        return f"{self._scheme}://{host}:{self._port}{self._path}"

    async def aclose(self) -> None:
        """See `Source.aclose`."""
        await self._server.aclose()

"""`Source`: where a fleet's members are read, and how the source of an address is found."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Protocol
from urllib.parse import urlsplit

from errata_protocol.errors import InvalidRequest
from errata_protocol.printable import printable

from .dns_source import SCHEMES, DnsSource
from .endpoint import Endpoint
from .file_source import FileSource
from .server_source import ServerSource

GROUP = "errata.fleet_sources"
"""Group of the entry points of further sources. Their names are schemes of addresses; each is called with the address
and the headers and returns a `Source`."""


class Source(Protocol):
    """Where the members of a fleet are read."""

    async def read(self, after: str | None, wait_s: float) -> tuple[str, list[Endpoint]]:
        """Return the version of the members, which changes whenever they do, and the members in an order that stays.

        Args:
            after: Version that the caller has: the answer comes as soon as there is another. None waits for nothing.
            wait_s: Longest wait for another version, seconds. A source may answer sooner, with the same version.

        Raises:
            ConnectionError: The members cannot be read now.
            ErrataError: They cannot be read, and could not later.
        """

    async def aclose(self) -> None:
        """Close what is open."""


def source_of(address: str, headers: Mapping[str, str] | None) -> Source:
    """Return the source of an address; see `Fleet.of`.

    Raises:
        InvalidRequest: There is no source for addresses of this form.
    """
    scheme = urlsplit(address).scheme
    if scheme in ("http", "https", "ws", "wss"):
        return ServerSource(address, headers)
    if scheme == "file":
        return FileSource(address)
    if scheme in SCHEMES:
        return DnsSource(address, headers)
    for found in entry_points(group=GROUP, name=scheme):
        source: Source = found.load()(address, headers)
        return source
    raise InvalidRequest(
        f"{printable(address, 100)!r} is no address of a fleet: give the URL of a server, file:///PATH, "
        f"dns://HOST:PORT, or one of a scheme that an installed package has in the entry points {GROUP}"
    )

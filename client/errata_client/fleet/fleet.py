"""`Fleet`: the members of a server, read from one of them, from a file, or from another source."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Self

from errata_protocol.fleet import MAX_WAIT_S

from .endpoint import Endpoint
from .source import Source, source_of

AGAIN_S = 1.0
"""Pause of `Fleet.watch` where nothing has changed, or no member can be reached, seconds."""

_log = logging.getLogger("errata.client")


class Fleet:
    """The members of a server that is several processes. A server that is one process is one member.

    Args:
        source: Source that the members are read from; `of` finds one.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    @classmethod
    def of(cls, address: str, *, headers: Mapping[str, str] | None = None) -> Self:
        """Return the fleet of an address.

        Args:
            address: Base URL of any member, as for `ErrataClient`; or ``file:///PATH`` of a file with
                ``{"members": [...]}``, as ``GET /fleet`` has them, each with a url; or ``dns://HOST:PORT`` of a name
                whose addresses are the members'; or one of a scheme that an entry point of the group
                ``errata.fleet_sources`` has.
            headers: Sent with each request to a member, e.g. ``{"Authorization": "Bearer …"}``.

        Raises:
            InvalidRequest: The address has none of these forms.
        """
        return cls(source_of(address, headers))

    async def endpoints(self) -> list[Endpoint]:
        """Return the members as they are now, in an order that stays.

        Raises:
            ConnectionError: No member can be reached.
            NotSupported: The server tells no members, e.g. a vanilla OpenEnv server.
            ErrataError: They cannot be read.
        """
        return (await self._source.read(None, 0.0))[1]

    async def watch(self) -> AsyncIterator[list[Endpoint]]:
        """Yield the members now, and again whenever one has changed. Stop by leaving the loop.

        While they cannot be reached, the members last yielded are all that is known, and it tries again.

        Raises:
            ConnectionError: They could not be reached at first.
            NotSupported, ErrataError: See `endpoints`.
        """
        version, endpoints = await self._source.read(None, 0.0)
        while True:
            yield endpoints
            known = version
            while version == known:
                try:
                    version, endpoints = await self._source.read(known, MAX_WAIT_S)
                except ConnectionError as error:
                    _log.info("the members of a fleet cannot be read now: %s", error)
                if version == known:
                    await asyncio.sleep(AGAIN_S)

    async def aclose(self) -> None:
        """Close what is open. A later call opens it again."""
        await self._source.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

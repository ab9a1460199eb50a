"""`Members`: what is known of the members of one fleet: where each is, and which are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import urlsplit

from errata_protocol.errors import ErrataError, SessionLost

from .endpoint import Endpoint
from .fleet import Fleet

FRESH_S = 5.0
"""Age up to which what is known of the members is used, seconds."""

ASK_S = 5.0
"""How long the members may take to be read where a caller goes on without them, seconds."""


class Members:
    """The members of one fleet. They are read only when something is asked, and not again for `FRESH_S`.

    The URLs are those of one environment: a server of several has each below a path, which a list of servers does not
    name. So the path that the address has below a member's own URL is added to those of all.

    Args:
        address: Base URL of an environment of any member, or another address of the fleet; see `Fleet.of`.
        headers: Sent with each request to a member, e.g. the token.
    """

    def __init__(self, address: str, headers: Mapping[str, str]) -> None:
        self._address = _as_http(address.rstrip("/"))
        self._fleet = Fleet.of(address, headers=headers)
        self._endpoints: list[Endpoint] = []
        self._until = float("-inf")
        self._reading = asyncio.Lock()

    async def read(self) -> list[Endpoint]:
        """Return the members, in an order that stays.

        Raises:
            ConnectionError: No member can be reached.
            ErrataError: The members cannot be read.
        """
        clock = asyncio.get_running_loop().time
        async with self._reading:  # so that a thousand clients that ask at once read them once
            if clock() >= self._until:
                self._endpoints = self._of_environment(await self._fleet.endpoints())
                self._until = clock() + FRESH_S
        return self._endpoints

    async def of(self, shard: object) -> Endpoint | None:
        """Return the member that has a shard; None where there is none, or nobody can say.

        Args:
            shard: Name of the shard, as an id or an error of the server has it.
        """
        try:
            async with asyncio.timeout(ASK_S):
                await self.read()
        except (OSError, ErrataError):  # it cannot be known now, and a session is never given up for that
            self._until = asyncio.get_running_loop().time() + FRESH_S
        return self.known(shard)

    def known(self, shard: object) -> Endpoint | None:
        """Return the member that had a shard when the members were last read; None where none had it."""
        return next((one for one in self._endpoints if one.shard == shard is not None), None)

    async def aclose(self) -> None:
        """Close what is open."""
        await self._fleet.aclose()

    def _of_environment(self, found: list[Endpoint]) -> list[Endpoint]:
        """Return members with the URLs of the environment, without those that the headers must not be sent to."""
        if not self._address.startswith(("http://", "https://")):
            return found
        path = next((self._address[len(one.url) :] for one in found if _is_below(self._address, one.url)), None)
        if path is None:  # the address is none of the members', e.g. that of a balancer before them
            path = "".join(urlsplit(self._address).path.rpartition("/")[1:])
        secret = self._address.startswith("https://")
        return [
            one if one.url == self._address else replace(one, url=one.url + path)
            for one in found
            if not secret or one.url.startswith("https://")  # a token that is given to TLS is not sent without it
        ]


def lost_error(member: Endpoint) -> SessionLost:
    """Return the error of sessions whose member is lost."""
    return SessionLost(f"the server says that its member {member.shard}, which has the session, is lost: open another")


def _as_http(address: str) -> str:
    scheme, separator, rest = address.partition("://")
    return {"ws": "http", "wss": "https"}.get(scheme, scheme) + separator + rest


def _is_below(address: str, url: str) -> bool:
    return address == url or address.startswith(f"{url}/")

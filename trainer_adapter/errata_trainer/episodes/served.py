"""An environment on a server, as a trainer plays it: its tools, the way to its sessions, and the check of its name."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from errata_client import ErrataClient
from errata_client.connections.dialing import is_list
from errata_client.doors.http_door import without_secrets
from errata_client.fleet.members import Members
from errata_protocol.errors import InvalidRequest

from .discovery import discovered
from .tools import PlayedEnvironment, is_published, published


@dataclass(frozen=True, slots=True)
class Connect:
    """Opens a session on a server; an object rather than a closure, because processes are handed it.

    Args:
        url: Base URL of the environment.
        headers: Headers sent with each connect, as pairs.
        message_timeout_s: Longest wait for an answer in seconds, reconnects included.
        retries: Most times that a request is sent again after a failure that the server rolled back.
    """

    url: str
    headers: tuple[tuple[str, str], ...]
    message_timeout_s: float
    retries: int

    def __call__(self) -> Any:
        """Return a blocking client that is connected."""
        session = self._client().sync()
        session.connect()
        return session

    async def connected(self) -> ErrataClient[Any, Any, Any]:
        """Return a client that is connected, for an `AwaitedRunner`. Clients of an event loop share one multiplexed
        connection, where the server offers it."""
        client = self._client()
        try:
            await client.connect()
        except BaseException:
            await client.close()
            raise
        return client

    def _client(self) -> ErrataClient[Any, Any, Any]:
        return ErrataClient(
            self.url,
            message_timeout_s=self.message_timeout_s,
            headers=dict(self.headers) or None,
            retries=self.retries,
        )


def served_environment(
    url: str, env: str | PlayedEnvironment, *, headers: Mapping[str, str] | None = None
) -> PlayedEnvironment:
    """Return what a trainer needs of an environment: from its package if that is installed here, else from its server.

    Args:
        url: URL of the environment, or the address of a fleet's members, as ``ray://NAME``: one of them is asked.
        env: Name of the environment on its server, or a description of it, which is returned.
        headers: Headers of each request, e.g. ``{"Authorization": "Bearer TOKEN"}``.

    Raises:
        InvalidRequest: The server has no such environment, or its actions cannot be made by a tool.
        ConnectionError: The environment's package is not installed here, and the server cannot be reached.
        ServiceError: The server failed, or is no OpenEnv server.
    """
    if not isinstance(env, str):
        return env
    return published(env) if is_published(env) else discovered(_server_url(url, headers or {}), env, headers=headers)


def _server_url(address: str, headers: Mapping[str, str]) -> str:
    """Return the URL of an environment at an address: the address, or where that lists members, the URL at one of them.

    Raises:
        ConnectionError: The members cannot be read, or none of them serves.
    """
    if not is_list(address):
        return address

    async def serving() -> list[str]:
        members = Members(address, headers)
        try:
            return [one.url for one in await members.read() if one.state in ("up", "draining")]
        finally:
            await members.aclose()

    with ThreadPoolExecutor(1) as thread:  # the caller may be in an event loop of its own
        urls = thread.submit(asyncio.run, serving()).result()
    if not urls:
        raise ConnectionError(f"no member of the fleet at {address} serves now")
    return urls[0]


def chosen_tools(environment: PlayedEnvironment, tools: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of the tools that a student may call; None chooses all that the environment has.

    Raises:
        InvalidRequest: The environment has no such tool.
    """
    chosen = tuple(environment.tools if tools is None else tools)
    for name in chosen:
        if name not in environment.tools:
            raise InvalidRequest(f"{environment.name} has no tool {name!r}: it has {', '.join(environment.tools)}")
    return chosen


def check_served(session: Any, environment: PlayedEnvironment) -> None:
    """Check that a connected session is one of the environment.

    Raises:
        InvalidRequest: The server has another environment there.
    """
    capabilities = session.capabilities()
    name = capabilities.environment if capabilities is not None else None
    if name is not None and name != environment.name:
        raise InvalidRequest(
            f"the server has the environment {name!r} there, not {environment.name!r}: give its own URL, e.g. "
            f"http://host:port/{environment.name}, or env={name!r}"
        )


def viewer_of(session: Any, url: str) -> str:
    """Return the address of the viewer of an environment's server, to print; "" where there is none for all sessions.

    A server has a viewer if it offers ``state_at``, which neither production mode nor stock OpenEnv does. Errata
    servers from before the viewer offer it, too: the address of such a server leads nowhere. Of a fleet whose members
    have addresses of their own each member has its viewer, so an address that lists members has none.

    Args:
        session: A connected session, which knows the server's capabilities already.
        url: URL of the environment; user, password and query are left out.
    """
    capabilities = session.capabilities()
    if is_list(url) or capabilities is None or not capabilities.offers("state_at"):
        return ""
    address = without_secrets(url).rstrip("/")
    return f"{'http' + address[2:] if address.startswith('ws') else address}/viewer/"

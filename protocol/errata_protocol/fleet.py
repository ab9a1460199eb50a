"""The members of a server: the answer to ``GET /fleet`` (PROTOCOL F6)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, Field, field_validator

from .names import SHARD

EXTENSION = "fleet"
"""Name in a server's `extensions` where it has several members."""

PARAMETER = "shard"
"""Query parameter of a handshake at ``/ws`` that names the member that is to get the socket."""

MAX_MEMBERS = 4096
"""Most members of a server."""

MAX_WAIT_S = 30.0
"""Longest time that a request waits for a change, seconds."""

MAX_URL, MAX_VERSION = 2048, 64

State = Literal["up", "draining", "down", "lost"]
"""Of a member: it serves; it serves the sessions that it has, and is given no new ones; it does not serve now, and its
sessions wait for it; it never will again, its sessions are lost."""


def _state(found: Any) -> Any:
    """Return a state; one that a later protocol adds says no more than that the member is not to be used now."""
    return "down" if isinstance(found, str) and found not in get_args(State) else found


class FleetMember(BaseModel):
    """One member: the process that has one data directory.

    Attributes:
        shard: Name of the member's data directory, which ids have in them; None where it has none.
        url: Base URL of the member; None where it is reached at the address that was asked.
        state: Whether the member serves, and may be given new sessions.
    """

    shard: str | None = None
    url: str | None = Field(default=None, max_length=MAX_URL)
    state: Annotated[State, BeforeValidator(_state)]

    @field_validator("shard")
    @classmethod
    def _is_name(cls, shard: str | None) -> str | None:
        return shard if shard is None else SHARD.check(shard)

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str | None) -> str | None:
        if url is not None:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
                raise ValueError("the url of a member is http:// or https://, a host, and no user")
            if parts.query or parts.fragment:
                raise ValueError("the url of a member has no query and no fragment")
        return url


class FleetMembers(BaseModel):
    """The members of a server, in an order that stays.

    Attributes:
        version: Version of the list, which changes whenever a member does; opaque to clients.
        members: The members.
    """

    version: str = Field(pattern=rf"^[A-Za-z0-9_-]{{1,{MAX_VERSION}}}$")
    members: list[FleetMember] = Field(min_length=1, max_length=MAX_MEMBERS)

    @classmethod
    def of(cls, members: Sequence[FleetMember]) -> Self:
        """Return members with the version that follows from them, the same in every process."""
        digest = hashlib.sha256(repr([(one.shard, one.url, one.state) for one in members]).encode())
        return cls(version=digest.hexdigest()[:32], members=list(members))

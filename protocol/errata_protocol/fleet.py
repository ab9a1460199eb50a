"""The members of a server: the answer to ``GET /fleet`` (PROTOCOL F6)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, field_validator

from . import bounded_json
from .errors import InvalidRequest
from .exception_text import text_of
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


MAX_LIST = 1024**2
"""Longest file with a list of members, and longest answer to ``GET /fleet``, bytes."""


def file_of(address: str) -> str:
    """Return the path of the file with a list of members that an address names, ``file:///PATH``.

    Raises:
        InvalidRequest: The address names another machine, or no file.
    """
    parts = urlsplit(address)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path:
        raise InvalidRequest("a fleet in a file is named by file:///PATH: three slashes, and no machine")
    return unquote(parts.path)


def read_members(text: bytes) -> FleetMembers:
    """Return the members that stand in a file, ``{"members": [{"shard": ..., "url": ..., "state": "up"}, ...]}``.

    Raises:
        InvalidRequest: It is no list of members, or one of them has no url.
    """
    try:
        if len(text) > MAX_LIST:
            raise ValueError(f"it is longer than {MAX_LIST} bytes")
        found = bounded_json.decode(text)
        if not isinstance(found, dict) or not isinstance(found.get("members"), list):
            raise ValueError('it has no array "members"')
        members = FleetMembers.of([FleetMember.model_validate(one) for one in found["members"]])
        if any(one.url is None for one in members.members):
            raise ValueError("a member has no url")
    except (ValueError, ValidationError) as error:
        raise InvalidRequest(f"it is no list of members: {text_of(error)}") from error
    return members

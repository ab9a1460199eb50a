"""`FileSource`: a fleet whose members stand in a file, as ``GET /fleet`` has them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pydantic import ValidationError

from errata_protocol import bounded_json
from errata_protocol.errors import InvalidRequest
from errata_protocol.exception_text import text_of
from errata_protocol.fleet import FleetMember, FleetMembers

from .endpoint import Endpoint, endpoints_of

MAX_BYTES = 1024**2
"""Longest file, bytes."""

LOOK_S = 1.0
"""Time between two looks at the file, seconds."""


class FileSource:
    """A file with ``{"members": [{"shard": ..., "url": ..., "state": "up"}, ...]}``. It may be replaced at any time.

    Args:
        address: Address of the file, ``file:///PATH``.

    Raises:
        InvalidRequest: The address names another machine, or no file.
    """

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise InvalidRequest("a fleet in a file is named by file:///PATH: three slashes, and no machine")
        self._path = Path(unquote(parts.path))

    async def read(self, after: str | None, wait_s: float) -> tuple[str, list[Endpoint]]:
        """See `Source.read`.

        Raises:
            InvalidRequest: The file is no list of members, or one of them has no url.
            ConnectionError: It cannot be opened.
        """
        clock = asyncio.get_running_loop().time
        end = clock() + wait_s
        while True:
            found = await asyncio.to_thread(self._members)
            if found.version != after or (left := end - clock()) <= 0:
                return found.version, endpoints_of(found, "")
            await asyncio.sleep(min(LOOK_S, left))

    def _members(self) -> FleetMembers:
        try:
            if not self._path.is_file():  # a FIFO would be waited for
                raise FileNotFoundError(f"{self._path} is no file")
            with self._path.open("rb") as file:
                text = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise ConnectionError(f"the file of the fleet cannot be read: {text_of(error)}") from error
        try:
            if len(text) > MAX_BYTES:
                raise ValueError(f"it is longer than {MAX_BYTES} bytes")
            found = bounded_json.decode(text)
            if not isinstance(found, dict) or not isinstance(found.get("members"), list):
                raise ValueError('it has no array "members"')
            members = FleetMembers.of([FleetMember.model_validate(one) for one in found["members"]])
            if any(one.url is None for one in members.members):
                raise ValueError("a member has no url")
        except (ValueError, ValidationError) as error:
            raise InvalidRequest(f"{self._path} is no list of members: {text_of(error)}") from error
        return members

    async def aclose(self) -> None:
        """See `Source.aclose`; nothing is open."""

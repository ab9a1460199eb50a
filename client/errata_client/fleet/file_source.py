"""`FileSource`: a fleet whose members stand in a file, as ``GET /fleet`` has them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from errata_protocol.errors import InvalidRequest
from errata_protocol.exception_text import text_of
from errata_protocol.fleet import MAX_LIST, FleetMembers, file_of, read_members

from .endpoint import Endpoint, endpoints_of

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
        self._path = Path(file_of(address))

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
                text = file.read(MAX_LIST + 1)
        except OSError as error:
            raise ConnectionError(f"the file of the fleet cannot be read: {text_of(error)}") from error
        try:
            return read_members(text)
        except InvalidRequest as error:
            raise InvalidRequest(f"{self._path}: {error.message}") from error

    async def aclose(self) -> None:
        """See `Source.aclose`; nothing is open."""

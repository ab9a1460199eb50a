"""`ListedMembers`: the members of a fleet of servers with addresses of their own, read from a list (PROTOCOL F6)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from errata_os.input_files import FileRefused, read_file
from errata_protocol.errors import InvalidRequest
from errata_protocol.exception_text import text_of
from errata_protocol.fleet import MAX_LIST, MAX_MEMBERS, FleetMember, FleetMembers, file_of, read_members

LOOK_S = 1.0
"""Time between two looks at the list, seconds."""

log = logging.getLogger("errata.server")


class ListedMembers:
    """The members that a file lists. It may be replaced at any time; it is read on a thread, as is each change of it.

    A list that cannot be read leaves the members as they were; `trouble` says so until it can be read. Before it has
    been read once, and where it does not name this server, this server is a member at the address that is asked.

    Args:
        address: Address of the list, ``file:///PATH``.
        own: Name of this server's data directory; None where it has none.
        drains: Returns whether this server drains, whatever the list says of it.

    Raises:
        InvalidRequest: It is no such address.
    """

    def __init__(self, address: str, own: str | None, drains: Callable[[], bool] = lambda: False) -> None:
        self._path = Path(file_of(address))
        self._drains = drains
        self._own = FleetMember(shard=own, state="up")
        self._members: Sequence[FleetMember] = [self._own]
        self._by_shard: Mapping[str | None, FleetMember] = {own: self._own}
        self._text: bytes | None = None
        self._trouble: str | None = None
        self._looking: asyncio.Task[None] | None = None

    def members(self) -> Sequence[FleetMember]:
        """Return the members as they are now, this server among them, in the order of the list."""
        if not self._drains():
            return self._members
        own = self._own.shard
        return [one.model_copy(update={"state": "draining"}) if one.shard == own else one for one in self._members]

    def member(self, shard: str) -> FleetMember | None:
        """Return the member that has a shard; None where the list names none."""
        return self._by_shard.get(shard)

    def trouble(self) -> Mapping[str, str]:
        """Return why the list cannot be read now, as `errata_server.runtime.readiness.Unusable`; empty while it can."""
        return {} if self._trouble is None else {"list": self._trouble}

    def look(self) -> bool:
        """Read the list; return whether the members have changed. It blocks, and never raises for what it reads."""
        try:
            text = read_file(self._path, MAX_LIST)
            found = read_members(text) if text != self._text else None
            if found is not None and len(found.members) == MAX_MEMBERS and self._own.shard not in _names(found):
                raise InvalidRequest(f"it names {MAX_MEMBERS} members, and this server is none of them")
        except (OSError, FileRefused, InvalidRequest) as error:
            trouble = f"the list of members {self._path} cannot be read, and stays as it was: {text_of(error)}"
            if trouble != self._trouble:
                log.warning("%s", trouble)
            self._trouble = trouble
            return False
        if self._trouble is not None:
            log.info("the list of members %s can be read again", self._path)
        self._trouble = None
        if found is None:
            return False
        self._text = text
        by_shard = {one.shard: one for one in found.members}
        self._members = found.members if self._own.shard in by_shard else [*found.members, self._own]
        self._by_shard = {self._own.shard: self._own, **by_shard}
        return True

    async def start(self, changed: Callable[[], None]) -> None:
        """Read the list, and again every `LOOK_S` until `stop`.

        Args:
            changed: Called on the event loop after each change.
        """
        await asyncio.to_thread(self.look)
        self._looking = asyncio.get_running_loop().create_task(self._look_on(changed), name="errata-members")

    async def stop(self) -> None:
        """Read the list no longer."""
        looking, self._looking = self._looking, None
        if looking is not None:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    async def _look_on(self, changed: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if await asyncio.to_thread(self.look):
                changed()


def _names(found: FleetMembers) -> set[str | None]:
    return {one.shard for one in found.members}

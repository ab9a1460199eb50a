"""Recovery classes: what can be done with a session after its instance or its server is gone (PROTOCOL E1, E2).

`errata_protocol.environment.Recovery` is the name of a class in the journal and on the wire. Only this module compares
names; other modules use the objects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

from errata_protocol.environment import Recovery


class Restoration(Protocol):
    """The ways to bring a fresh instance to the last delivery of one session."""

    async def from_snapshot(self) -> bool:
        """Restore the snapshot that was journaled with the delivery; return False if there is none."""

    async def by_reexecution(self) -> bool:
        """Run the journaled requests again; return False if the session was not opened with that promise."""


class RecoveryClass(ABC):
    """What can be done with the sessions of one environment.

    Attributes:
        name: Name in the journal and on the wire.
        survives_restart: Whether a session can continue on a fresh instance.
        can_fork: Whether a copy of a session can continue from any delivery that has what `restore` needs.
        takes_snapshots: Whether ``snapshot()`` is called after each delivery.
        repeats_requests: Whether sessions are recovered by running their requests again. The journaled requests then
            have to contain everything that decides their answers.
        means: Text that follows "its sessions survive a restart" and says how.
        caveat: Text that follows and names a limitation.
    """

    name: ClassVar[Recovery]
    survives_restart: ClassVar[bool] = True
    can_fork: ClassVar[bool] = True
    takes_snapshots: ClassVar[bool] = False
    repeats_requests: ClassVar[bool] = False
    means: ClassVar[str] = ""
    caveat: ClassVar[str] = ""

    @abstractmethod
    async def restore(self, restoration: Restoration) -> bool:
        """Bring a fresh instance to the session's last delivery; return whether that was possible."""

    def __repr__(self) -> str:
        return f"<recovery {self.name}>"


class _Snapshot(RecoveryClass):
    name = Recovery.SNAPSHOT
    takes_snapshots = True
    means = "by their snapshots"

    async def restore(self, restoration: Restoration) -> bool:
        return await restoration.from_snapshot()


class _Reexecute(RecoveryClass):
    name = Recovery.REEXECUTE
    repeats_requests = True
    means = "by running their requests again"
    caveat = "; one whose answers differ then is lost, with a message where they differ"

    async def restore(self, restoration: Restoration) -> bool:
        return await restoration.by_reexecution()


class _None(RecoveryClass):
    name = Recovery.NONE
    survives_restart = False
    can_fork = False

    async def restore(self, restoration: Restoration) -> bool:
        return False


SNAPSHOT: RecoveryClass = _Snapshot()
"""Sessions continue from the snapshot of the last delivery."""

REEXECUTE: RecoveryClass = _Reexecute()
"""Sessions continue after their journaled requests ran again with the same answers."""

NONE: RecoveryClass = _None()
"""Sessions end with their instance; their episodes can still be read."""

_BY_NAME: dict[str, RecoveryClass] = {recovery.name.value: recovery for recovery in (SNAPSHOT, REEXECUTE, NONE)}


def recovery_class(name: str) -> RecoveryClass:
    """Return the recovery class with a name; a `Recovery` is such a name.

    Raises:
        KeyError: There is no such class.
    """
    return _BY_NAME[name]


def repeats_requests(name: str) -> bool:
    """Return `RecoveryClass.repeats_requests` of the class with a name.

    Raises:
        KeyError: There is no such class.
    """
    return recovery_class(name).repeats_requests

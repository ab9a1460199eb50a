"""Recovery classes: what each promises about a session after its instance or its server is gone (PROTOCOL E1, E2).

`errata_protocol.environment.Recovery` is the name of a class in the journal and on the wire. Only this module compares
such names; everything else asks the class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

from errata_protocol.environment import Recovery


class Restoration(Protocol):
    """The ways to bring one fresh instance to a session's last delivery. Each says whether it was possible."""

    async def from_snapshot(self) -> bool:
        """Restore the snapshot that was journaled with the delivery; False where there is none."""

    async def by_reexecution(self) -> bool:
        """Run the journaled requests again; False where that was not promised to the client."""


class RecoveryClass(ABC):
    """What can be done with the sessions of one environment.

    Attributes:
        name: In the journal and on the wire.
        survives_restart: A session can be continued on a fresh instance.
        can_fork: So can a copy of it, from any delivery that has what `restore` needs.
        takes_snapshots: Each delivery is followed by ``snapshot()``.
        repeats_requests: The journaled requests have to contain all that decides their answers.
        means: How sessions survive a restart, in words that follow "its sessions survive a restart".
        caveat: What else to say about that.
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
        """Bring a fresh instance to the session's last delivery, and say whether that was possible."""

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
    caveat = "; one that answers otherwise then is lost, and says where it differs"

    async def restore(self, restoration: Restoration) -> bool:
        return await restoration.by_reexecution()


class _None(RecoveryClass):
    name = Recovery.NONE
    survives_restart = False
    can_fork = False

    async def restore(self, restoration: Restoration) -> bool:
        return False


SNAPSHOT: RecoveryClass = _Snapshot()
"""``restore`` on a fresh instance continues at the last delivery."""

REEXECUTE: RecoveryClass = _Reexecute()
"""The journaled requests are run again, and their answers must match."""

NONE: RecoveryClass = _None()
"""A session ends with its instance; its episodes stay readable."""

_BY_NAME: dict[str, RecoveryClass] = {recovery.name.value: recovery for recovery in (SNAPSHOT, REEXECUTE, NONE)}


def recovery_class(name: str) -> RecoveryClass:
    """Return the class of a name in the journal or on the wire (a `Recovery` is such a name).

    Raises:
        KeyError: There is none of that name.
    """
    return _BY_NAME[name]

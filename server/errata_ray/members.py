"""`Members`: what the registry of a fleet knows: who has which shard, where it is, and what is lost. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

HEARD_S = 15.0
"""A member whose keeper has not reported for so long is down, seconds."""

MOST_LOST = 1000
"""Most lost shards that are listed; the earliest are forgotten first."""

State = Literal["up", "draining", "down", "lost"]


@dataclass(frozen=True, slots=True)
class Record:
    """What everybody has to know of one member.

    Args:
        slot: Number of its keeper; -1 for a lost shard.
        shard: Name of its data directory.
        url: Base URL of its process, the last one that it had.
        node: Id of the node that it is on, or was on last.
        state: Whether it serves.
        is_drained: Whether it is to end, or has ended, since it was drained.
    """

    slot: int
    shard: str
    url: str
    node: str
    state: State
    is_drained: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """What a keeper says of its process.

    Args:
        life: Name of this life of the keeper.
        node: Id of its node.
        shard: Name of the data directory; None while it has none.
        url: Base URL of the process; None where it has not had one.
        is_up: Whether the process serves.
        epoch: Epoch of its lease; 0 without leases.
        sessions: Sessions that hold an environment instance; None where it is not known.
        steps_s: Steps a second; None where it is not known.
        lag_s: Worst lateness of the event loop in the last minute, seconds; None where it is not known.
        problem: Reason why it does not serve; empty where there is none.
        is_draining: Whether the keeper has been asked to drain.
    """

    life: str
    node: str
    shard: str | None = None
    url: str | None = None
    is_up: bool = False
    epoch: int = 0
    sessions: int | None = None
    steps_s: float | None = None
    lag_s: float | None = None
    problem: str = ""
    is_draining: bool = False


@dataclass(slots=True)
class _Slot:
    shard: str | None = None
    url: str | None = None
    node: str | None = None
    life: str | None = None
    is_up: bool = False
    heard: float = float("-inf")
    drain: bool | None = None  # None until somebody says
    last: Report | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """Which directory a keeper is to serve.

    Args:
        shard: Name of a directory that it has; None for a fresh one.
        wait: Reason for which it is to ask again later; empty where it need not.
    """

    shard: str | None = None
    wait: str = ""


@dataclass(slots=True)
class Members:
    """The members of one fleet.

    Args:
        slots: Number of keepers.
        is_shared: Whether all nodes see the same directories.
    """

    slots: int
    is_shared: bool
    _slots: list[_Slot] = field(init=False)
    _lost: dict[str, Record] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._slots = [_Slot() for _ in range(self.slots)]

    def learn(self, known: Sequence[Record]) -> None:
        """Take over what a keeper has read from an earlier registry, where nothing is known here."""
        for one in known:
            if one.state == "lost":
                self._lose(one)
            elif 0 <= one.slot < len(self._slots) and one.shard not in self._lost and one.shard not in self._taken():
                slot = self._slots[one.slot]
                if slot.life is None and slot.shard is None:
                    slot.shard, slot.url, slot.node, slot.drain = one.shard, one.url, one.node, one.is_drained

    def claim(self, number: int, life: str, node: str, found: Collection[str], alive: Collection[str]) -> Claim:
        """Say which directory a keeper that begins a life is to serve.

        Args:
            number: Number of the keeper's slot.
            life: Name of this life of the keeper.
            node: Id of its node.
            found: Names of the directories that it sees.
            alive: Ids of the nodes that are alive.
        """
        if node not in alive:  # it was cut off and is back; another keeper has the slot, or will
            return Claim(wait=f"Ray has called node {node} dead")
        slot = self._slots[number]
        if slot.shard is not None and slot.shard not in found and slot.shard not in self._lost:
            if not self.is_shared and slot.node != node and slot.node in alive:
                return Claim(wait=f"shard {slot.shard} is on node {slot.node}, which is alive")
            self._lose_slot(slot)  # its node is dead, or the directory is not there any more
        slot.life, slot.node, slot.is_up = life, node, False
        if slot.shard is None or slot.shard in self._lost:
            taken = self._taken()
            slot.shard = next((one for one in sorted(found) if one not in self._lost and one not in taken), None)
            slot.url = None
        return Claim(slot.shard)

    def report(self, number: int, report: Report, now: float) -> Literal["serve", "drain", "end"]:
        """Note what a keeper says; return what it is to do: ``end`` where its shard is not its any more."""
        slot = self._slots[number]
        if slot.life not in (None, report.life) or report.shard in self._lost:
            return "end"
        if slot.life is None and slot.shard not in (None, report.shard):
            return "end"
        if report.shard is not None and any(one is not slot and one.shard == report.shard for one in self._slots):
            return "end"  # the other one has claimed the directory that this one had made and not yet reported
        slot.life, slot.node, slot.is_up, slot.heard = report.life, report.node, report.is_up, now
        slot.shard, slot.url, slot.last = report.shard or slot.shard, report.url or slot.url, report
        if slot.drain is None:
            slot.drain = report.is_draining  # this registry is younger than the drain
        return "drain" if slot.drain else "serve"

    def drain(self, shard: str, wanted: bool) -> bool:
        """Have a member drain, or not any more; return False where there is none of that shard."""
        for slot in self._slots:
            if slot.shard == shard:
                slot.drain = wanted
                return True
        return False

    def see_nodes(self, alive: Collection[str]) -> None:
        """Note which nodes are alive: what a dead one had is lost with it, or waits for its next keeper."""
        for slot in self._slots:
            if slot.shard is not None and slot.node is not None and slot.node not in alive:
                if self.is_shared:
                    slot.is_up = False
                else:
                    self._lose_slot(slot)

    def records(self, now: float) -> list[Record]:
        """Return the members that have a shard and an address, and the lost ones."""
        found = [
            Record(number, slot.shard, slot.url, slot.node or "", self._state(slot, now), bool(slot.drain))
            for number, slot in enumerate(self._slots)
            if slot.shard is not None and slot.url is not None
        ]
        return [*found, *self._lost.values()]

    def reports(self, now: float) -> list[tuple[State, Report]]:
        """Return what keepers reported last, with the state that follows from it; one that has not yet is ``down``."""
        return [
            (self._state(slot, now), slot.last or Report("", slot.node or "", slot.shard, slot.url))
            for slot in self._slots
        ]

    @staticmethod
    def _state(slot: _Slot, now: float) -> State:
        if not slot.is_up or now - slot.heard > HEARD_S:
            return "down"
        return "draining" if slot.drain else "up"

    def _taken(self) -> set[str]:
        return {slot.shard for slot in self._slots if slot.shard is not None}

    def _lose_slot(self, slot: _Slot) -> None:
        assert slot.shard is not None
        if slot.url is not None:  # else nobody has had a session there
            self._lose(Record(-1, slot.shard, slot.url, slot.node or "", "lost"))
        slot.shard = slot.url = slot.life = slot.last = slot.drain = None
        slot.is_up = False

    def _lose(self, record: Record) -> None:
        self._lost.setdefault(record.shard, replace(record, slot=-1, state="lost"))
        while len(self._lost) > MOST_LOST:
            del self._lost[next(iter(self._lost))]


def version_of(records: Sequence[Record]) -> str:
    """Return the version of a list of members, the same in every process."""
    return hashlib.sha256(repr([tuple(asdict(one).values()) for one in records]).encode()).hexdigest()[:32]

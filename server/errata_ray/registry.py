"""`Registry`: the actor that knows where every shard of a fleet is. Keepers tell its successor what it knew."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray

from errata_server.runtime.leases import Grant, Leases, Wait

from .members import Claim, Members, Record, Report, version_of

NAMESPACE = "errata"
"""Ray's namespace of all fleets."""

LOOK_S = 1.0
"""Time between two looks at the nodes, seconds."""

QUIET_S = 5.0
"""A registry that follows another gives no directories for so long: first the keepers that run say what they have."""

WAIT_S = 30.0
"""Longest wait for a change of the members, seconds."""

DRIFT = 0.02
"""Share by which the rates of two nodes' clocks may differ."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a registry is made with.

    Args:
        slots: Number of keepers.
        is_shared: Whether all nodes see the same directories.
        lease_s: Length of a lease, seconds.
    """

    slots: int
    is_shared: bool
    lease_s: float


class Registry:
    """The members of one fleet, and the leases of their directories.

    Args:
        terms: Description of the fleet.
    """

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._members = Members(terms.slots, terms.is_shared)
        self._leases = Leases(lease_s=terms.lease_s, drift=DRIFT, clock=time.monotonic, after=int(time.time()))
        again = ray.get_runtime_context().was_current_actor_reconstructed
        self._quiet_until = time.monotonic() + (QUIET_S if again else 0.0)
        self._alive: set[str] = set()
        self._changed = asyncio.Event()
        self._version = ""
        self._task: asyncio.Task[None] | None = None

    async def terms(self) -> Terms:
        """Return what it was made with."""
        return self._terms

    async def claim(self, slot: int, life: str, node: str, found: Sequence[str]) -> Claim:
        """See `Members.claim`."""
        if (left := self._quiet_until - time.monotonic()) > 0:
            return Claim(wait=f"the registry has just started and listens for {left:.0f} s")
        await self._see_nodes()
        claimed = self._members.claim(slot, life, node, found, self._alive)
        self._note()
        return claimed

    async def report(self, slot: int, report: Report, known: Sequence[Record]) -> Literal["serve", "drain", "end"]:
        """Note what a keeper says of its process and knows of the others; return what it is to do."""
        if self._task is None:
            await self._begin()
        self._members.learn(known)
        answer = self._members.report(slot, report, time.monotonic())
        self._note()
        return answer

    async def watch(self, after: str | None, wait_s: float) -> tuple[str, list[Record]]:
        """Return the version of the members and the members, as soon as the version is not ``after``."""
        await self._begin()
        end = time.monotonic() + min(wait_s, WAIT_S)
        while True:
            self._note()
            if self._version != after or (left := end - time.monotonic()) <= 0:
                return self._version, self._members.records(time.monotonic())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)

    async def reports(self) -> list[tuple[str, Report]]:
        """Return the state of each keeper's process, and what it reported last."""
        return list(self._members.reports(time.monotonic()))

    async def drain(self, shard: str, wanted: bool) -> bool:
        """See `Members.drain`."""
        found = self._members.drain(shard, wanted)
        self._note()
        return found

    async def take(self, shard: str, life: str, at_least: int) -> Grant | Wait:
        """See `Leases.take`."""
        return self._leases.take(shard, life, at_least)

    async def renew(self, shard: str, life: str, epoch: int) -> bool:
        """See `Leases.renew`."""
        return self._leases.renew(shard, life, epoch)

    async def release(self, shard: str, life: str, epoch: int) -> None:
        """See `Leases.release`."""
        self._leases.release(shard, life, epoch)

    async def _begin(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._look())

    async def _look(self) -> None:
        while True:
            with contextlib.suppress(ray.exceptions.RayError, RuntimeError):  # the cluster does not answer now
                await self._see_nodes()
            await asyncio.sleep(LOOK_S)

    async def _see_nodes(self) -> None:
        nodes: list[dict[str, Any]] = await asyncio.to_thread(ray.nodes)
        self._alive = {node["NodeID"] for node in nodes if node["Alive"]}
        if self._alive:
            self._members.see_nodes(self._alive)
            self._note()

    def _note(self) -> None:
        version = version_of(self._members.records(time.monotonic()))
        if version != self._version:
            self._version = version
            self._changed.set()
            self._changed = asyncio.Event()

"""`Containers`: makes, lends and removes containers: a pool ahead of need, and a reaper off everybody's path."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass

from errata_protocol.errors import SandboxFailed

from ..base import Limits
from .broker import Broker, BrokerRefused

log = logging.getLogger("errata.sandbox")

_REMOVED_AT_ONCE = 2
_RETRY_S = (0.5, 2.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True)
class Kind:
    """What containers have to be alike in to stand for each other.

    Args:
        image: Id of the image, ``sha256:...``.
        memory_bytes: Memory limit.
        pids: Limit of processes.
    """

    image: str
    memory_bytes: int
    pids: int

    @classmethod
    def of(cls, image: str, limits: Limits) -> Kind:
        # The first process and the program that runs a command are not the agent's.
        return cls(image, limits.memory_bytes, limits.pids + 3)


class Containers:
    """Started containers, ready for a sandbox.

    Args:
        broker: Makes them.
        spare: So many are kept ready of the kind that was wanted last.
    """

    def __init__(self, broker: Broker, spare: int) -> None:
        self._broker = broker
        self._spare = spare
        self._ready: dict[Kind, list[str]] = {}
        self._filling: asyncio.Task[None] | None = None
        self._dying: asyncio.Queue[str] = asyncio.Queue()
        self._reapers: list[asyncio.Task[None]] = []
        self._closed = False

    def start(self) -> None:
        """Start the reaper."""
        self._closed = False
        if not self._reapers:
            self._reapers = [asyncio.ensure_future(self._reap()) for _ in range(_REMOVED_AT_ONCE)]

    async def take(self, kind: Kind, *, refill: bool) -> str:
        """Return a started container that nobody has used.

        Args:
            kind: Which.
            refill: More of this kind will be wanted.
        """
        ready = self._ready.get(kind)
        made = ready.pop() if ready else await self._make(kind)
        if refill and self._spare and not self._closed and (self._filling is None or self._filling.done()):
            self._filling = asyncio.ensure_future(self._fill(kind))
        return made

    async def fill(self, kind: Kind) -> None:
        """Make the spare containers of a kind now."""
        while len(self._ready.setdefault(kind, [])) < self._spare and not self._closed:
            self._ready[kind].append(await self._make(kind))

    async def _fill(self, kind: Kind) -> None:
        for other in [other for other in self._ready if other != kind]:
            for container in self._ready.pop(other):
                self.remove(container)
        try:
            await self.fill(kind)
        except SandboxFailed as error:
            log.warning("no spare container: %s", error.message)  # whoever needs one gets the error

    async def _make(self, kind: Kind) -> str:
        made = await self.create(kind)
        try:
            await self._broker.call("start", container=made)
        except BaseException:
            self.remove(made)
            raise
        return made

    async def create(self, kind: Kind) -> str:
        """Return a container that was not started."""
        answer = await self._broker.call(
            "create", image=kind.image, memory_bytes=kind.memory_bytes, pids=kind.pids, timeout_s=90.0
        )
        return str(answer["container"])

    def remove(self, container: str) -> None:
        """Have a container removed; returns at once."""
        self._dying.put_nowait(container)

    async def removed(self) -> None:
        """Wait until all that was given to `remove` is gone or was tried."""
        await self._dying.join()

    async def _reap(self) -> None:
        while True:
            container = await self._dying.get()
            try:
                await self._remove(container)
            finally:
                self._dying.task_done()

    async def _remove(self, container: str) -> None:
        for pause in (*_RETRY_S, None):
            try:
                await self._broker.call("remove", container=container, timeout_s=90.0)
                return
            except BrokerRefused as error:
                if error.why == "unknown":
                    return
                log.warning("container %s was not removed: %s", container[:12], error.message)
            except Exception as error:
                log.warning("container %s was not removed: %s", container[:12], error)
            if pause is None or self._closed:
                return  # the next start removes it by its label
            await asyncio.sleep(pause)

    async def close(self, *, wait_s: float = 30.0) -> None:
        """Remove what is ready, wait for the reaper and end it."""
        self._closed = True
        if self._filling is not None:
            self._filling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._filling
            self._filling = None
        for ready in self._ready.values():
            for container in ready:
                self.remove(container)
        self._ready.clear()
        if self._reapers:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._dying.join(), wait_s)
        for reaper in self._reapers:
            reaper.cancel()
        await asyncio.gather(*self._reapers, return_exceptions=True)
        self._reapers = []

"""`ContainerPool`: starts containers before they are needed, and removes used ones in the background."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass

from errata_protocol.errors import SandboxFailed, SandboxUnavailable

from ..base import Limits
from .broker import Broker, BrokerRefused

log = logging.getLogger("errata.sandbox")

_REMOVED_AT_ONCE = 2
_RETRY_S = (0.5, 2.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True)
class Kind:
    """What has to be equal for one container to be used in place of another.

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
        """Return the kind for an image and limits; 3 processes are added for those that are not the agent's."""
        return cls(image, limits.memory_bytes, limits.pids + 3)


class ContainerPool:
    """A pool of started containers.

    Args:
        broker: The broker.
        spare: Number of containers to keep ready, of the kind that was requested last.
        part: Number of this process, of those that use the broker's socket.
    """

    def __init__(self, broker: Broker, spare: int, part: int = 0) -> None:
        self._broker = broker
        self._part = {"part": part} if part else {}  # a broker of an older version takes none
        self._spare = spare
        self._ready: dict[Kind, list[str]] = {}
        self._filling: asyncio.Task[None] | None = None
        self._to_remove: asyncio.Queue[str] = asyncio.Queue()
        self._reapers: list[asyncio.Task[None]] = []
        self._closed = False

    def start(self) -> None:
        """Start the tasks that remove containers."""
        self._closed = False
        if not self._reapers:
            self._reapers = [asyncio.ensure_future(self._reap()) for _ in range(_REMOVED_AT_ONCE)]

    async def take(self, kind: Kind, *, refill: bool) -> str:
        """Return a started, unused container.

        Args:
            kind: Its kind.
            refill: Start further containers of this kind in the background.

        Raises:
            BrokerRefused: It cannot be made.
        """
        ready = self._ready.get(kind)
        made = ready.pop() if ready else await self._make(kind)
        if refill and self._spare and not self._closed and (self._filling is None or self._filling.done()):
            self._filling = asyncio.ensure_future(self._fill(kind))
        return made

    async def fill(self, kind: Kind) -> None:
        """Start containers of a kind until the pool has as many as it keeps ready.

        Raises:
            BrokerRefused: One cannot be made.
        """
        while len(self._ready.setdefault(kind, [])) < self._spare and not self._closed:
            self._ready[kind].append(await self._make(kind))

    async def _fill(self, kind: Kind) -> None:
        """Remove ready containers of other kinds, then start some of this kind; a failure is logged."""
        for other in [other for other in self._ready if other != kind]:
            for container in self._ready.pop(other):
                self.remove(container)
        try:
            await self.fill(kind)
        except (SandboxFailed, SandboxUnavailable) as error:
            log.warning("no spare container: %s", error.message)  # a caller that needs one gets the error

    async def _make(self, kind: Kind) -> str:
        """Make and start a container; remove it if it cannot be started."""
        made = await self.create(kind)
        try:
            await self._broker.call("start", container=made)
        except BaseException:
            self.remove(made)
            raise
        return made

    async def create(self, kind: Kind) -> str:
        """Make a container without starting it, and return its id; raises as `Broker.call` does."""
        container, _ = await self.create_of(kind)
        return container

    async def create_of(self, kind: Kind) -> tuple[str, str]:
        """Do what `create` does; return the image's id, too, which ``kind`` may give by name."""
        answer = await self._broker.call(
            "create", image=kind.image, memory_bytes=kind.memory_bytes, pids=kind.pids, timeout_s=90.0, **self._part
        )
        return str(answer["container"]), str(answer["image"])

    def remove(self, container: str) -> None:
        """Queue a container for removal; returns at once."""
        self._to_remove.put_nowait(container)

    async def wait_removed(self) -> None:
        """Wait until all queued containers are removed, or all attempts have failed."""
        await self._to_remove.join()

    async def _reap(self) -> None:
        """Remove queued containers one by one, for ever."""
        while True:
            container = await self._to_remove.get()
            try:
                await self._remove(container)
            finally:
                self._to_remove.task_done()

    async def _remove(self, container: str) -> None:
        """Remove a container, with four retries; failures are logged."""
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
        """Remove all unused containers and end the background tasks.

        Waits up to ``wait_s`` seconds for a container that is being started, and again for queued removals.
        """
        self._closed = True
        filling, self._filling = self._filling, None
        if filling is not None:  # it ends after one container; if cancelled, the engine might still make it, unseen
            with contextlib.suppress(TimeoutError, SandboxUnavailable):
                await asyncio.wait_for(filling, wait_s)
        for ready in self._ready.values():
            for container in ready:
                self.remove(container)
        self._ready.clear()
        if self._reapers:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._to_remove.join(), wait_s)
        for reaper in self._reapers:
            reaper.cancel()
        await asyncio.gather(*self._reapers, return_exceptions=True)
        self._reapers = []

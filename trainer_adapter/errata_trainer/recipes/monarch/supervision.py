"""`Supervisor`: an actor beside the trainer that owns processes with one actor each, and begins those anew that die.

Monarch ends a client when nobody takes the failure of a mesh. Here the supervisor takes it: it is an actor in the
trainer's own process, so nothing else can die. Monarch reports a killed process after about nine seconds. A call that
waits for its actor ends then, or earlier, if the actor does not answer when it is asked whether it is alive.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from monarch.actor import Actor, ActorError, Channel, HostMesh, MeshFailure, concurrent_endpoint, endpoint, this_host

log = logging.getLogger("errata.trainer")

T = TypeVar("T")


_PATIENCE_S = 600.0


class Lost(Exception):
    """A call of a worker has no result.

    Attributes:
        reason: Reason: ``lost``, the process ended or does not answer; ``deadline``, the time is over.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class WorkerActor(Actor):
    """An actor that a `Supervisor` begins anew when its process dies."""

    @concurrent_endpoint
    async def alive(self) -> None:
        """Answer, which shows that the process runs and that the actor was made."""


@dataclass(eq=False, slots=True)
class Worker:
    """A process with one actor.

    Attributes:
        name: Name of the actor's mesh, another one for each life.
        place: Index among the supervisor's workers, which later lives keep.
        procs: Mesh of the process.
        actor: Mesh of the actor.
        lost: Event that is set when Monarch has reported the end of the process.
        has_answered: Whether the actor answered once, so that its end was no failure to begin.
        is_silent: Whether it left a question whether it is alive without an answer.
        in_flight: Number of calls that wait for it.
    """

    name: str
    place: int
    procs: Any
    actor: Any
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    has_answered: bool = False
    is_silent: bool = False
    in_flight: int = 0

    @property
    def is_ready(self) -> bool:
        """Whether the actor has answered, and did so when it was asked last."""
        return self.has_answered and not self.is_silent

    async def answers(self, within_s: float) -> bool:
        """Return whether the actor answers within so many seconds."""
        call = kept(self.actor.alive.call_one())
        await asyncio.wait({call}, timeout=within_s)
        if not call.done() or call.exception() is not None:
            return False
        self.has_answered, self.is_silent = True, False
        return True


class Supervisor(Actor):
    """Owns workers, spawns them, and replaces those whose processes die. Subclasses add the calls.

    Args:
        kind: Beginning of the names of the workers' meshes.
        worker_class: Class of the workers' actors.
        arguments: Arguments of the actors.
        count: Number of workers.
        hosts: Hosts that the workers are spread over; None for this host.
    """

    def __init__(
        self, kind: str, worker_class: type[WorkerActor], arguments: tuple[Any, ...], count: int, hosts: HostMesh | None
    ) -> None:
        self._kind, self._class, self._arguments = kind, worker_class, arguments
        self._hosts = [this_host()] if hosts is None else [hosts.slice(hosts=n) for n in range(hosts.size("hosts"))]
        self._counts: Counter[str] = Counter()
        self._stopping = False
        self._vacant: list[int] = []
        self._looking: set[asyncio.Future[bool]] = set()
        self._workers: list[Worker | None] = [self._spawned(place) for place in range(count)]

    def _spawned(self, place: int) -> Worker:
        self._counts["spawned"] += 1
        name = f"{self._kind}{self._counts['spawned']}"
        procs = self._hosts[place % len(self._hosts)].spawn_procs({"processes": 1}, name=name)
        return Worker(name, place, procs, procs.spawn(name, self._class, *self._arguments))

    def __supervise__(self, failure: MeshFailure) -> bool:
        """Take the failure of a worker's mesh; see Monarch. Its other meshes (loggers) fail with it."""
        name = str(failure.mesh_name).rpartition("-")[0]
        for worker in self._workers:
            if worker is not None and worker.name == name:
                worker.lost.set()
                self._counts["lost"] += 1
                self._workers[worker.place] = None
                if worker.has_answered:
                    log.warning("%s is lost, and is begun anew: %s", name, failure)
                    self._vacant.append(worker.place)
                else:  # it would fail again and again
                    log.error("%s failed before its first answer and is given up: %s", name, failure)
                    self._counts["given_up"] += 1
        return True

    @endpoint
    async def start(self, within_s: float) -> None:
        """Wait until all workers answer.

        Args:
            within_s: Longest wait in seconds.

        Raises:
            Exception: A worker's actor could not be made.
        """
        workers = [worker for worker in self._workers if worker is not None]
        await asyncio.wait_for(asyncio.gather(*(awaited(one.actor.alive.call_one()) for one in workers)), within_s)
        for worker in workers:
            worker.has_answered = True

    @endpoint
    async def counts(self) -> dict[str, int]:
        """Return how many workers were ``spawned``, ``lost`` and ``given_up``."""
        return dict(self._counts)

    @endpoint
    async def end(self) -> None:
        """End the workers' processes."""
        self._stopping = True
        for task in self._looking:
            task.cancel()
        workers, self._workers = [one for one in self._workers if one is not None], []
        await asyncio.gather(*(awaited(one.procs.stop()) for one in workers), return_exceptions=True)

    def _best(self, tried: set[Worker]) -> Worker | None:
        """Return the worker with the least to do of those not tried, those that do not answer yet last; None
        without any.

        Lost ones are begun anew here, in an endpoint: what is spawned while a failure is taken has another owner, and
        the next failure would end the trainer.
        """
        while self._vacant and not self._stopping:
            place = self._vacant.pop()
            begun = self._workers[place] = self._spawned(place)
            self._look_after(begun)
        left = [one for one in self._workers if one is not None and one not in tried and not one.lost.is_set()]
        return min(left, key=lambda one: (not one.is_ready, one.in_flight), default=None)

    async def _called(self, worker: Worker, call: Awaitable[T], left_s: float, *, last: bool = True) -> T:
        """Wait for a call of a worker's actor, and return its result.

        Args:
            worker: The worker.
            call: The call.
            left_s: Longest wait in seconds.
            last: Whether nobody else could be called. Otherwise it is waited for half of the time, and for the rest
                only if the actor answers that it is alive.

        Raises:
            Lost: The worker's process ended or does not answer, or the time is over.
            ActorError: The actor raised an exception.
        """
        ends = asyncio.get_running_loop().time() + left_s
        waiting: asyncio.Future[Any] = kept(call)
        lost: asyncio.Future[Any] = asyncio.ensure_future(worker.lost.wait())
        worker.in_flight += 1
        try:
            first_s = left_s if last else left_s / 2
            await asyncio.wait({waiting, lost}, timeout=first_s, return_when=asyncio.FIRST_COMPLETED)
            if not last and not waiting.done() and not lost.done():
                if not await worker.answers(left_s / 8):
                    worker.is_silent = True
                    self._look_after(worker)
                    raise Lost("lost")
                rest_s = max(0.0, ends - asyncio.get_running_loop().time())
                await asyncio.wait({waiting, lost}, timeout=rest_s, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise Lost("lost" if lost.done() else "deadline")
            if (error := waiting.exception()) is not None and not isinstance(error, ActorError):
                raise Lost("lost") from error  # a SupervisionError, which may come before the report of the end
            worker.has_answered, worker.is_silent = True, False
            result: T = waiting.result()
            return result
        finally:
            worker.in_flight -= 1
            lost.cancel()

    def _look_after(self, worker: Worker) -> None:
        """Have a silent worker, or one that has just begun, called as soon as it answers."""
        task = asyncio.ensure_future(worker.answers(_PATIENCE_S))
        self._looking.add(task)
        task.add_done_callback(self._looking.discard)


def channel() -> tuple[Any, Any]:
    """Open a channel whose port may be closed while somebody still sends.

    A message that cannot be delivered goes back to its sender; where that has died by then, Monarch would end this
    process half a minute later.
    """
    port, received = Channel.open()
    port.return_undeliverable = False
    return port, received


_CALLS: set[asyncio.Future[Any]] = set()


def kept(call: Awaitable[T]) -> asyncio.Future[T]:
    """Return a call as a task that lives until it is answered, also where nobody waits for it any more: an answer that
    finds its port closed would go back to its sender (see `channel`)."""
    task = asyncio.ensure_future(awaited(call))
    _CALLS.add(task)
    task.add_done_callback(_forget)
    return task


def _forget(task: asyncio.Future[Any]) -> None:
    _CALLS.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        log.debug("a call has no result: %r", error)


async def awaited(call: Awaitable[T]) -> T:
    """Return the result of one of Monarch's futures, which are no coroutines."""
    return await call

"""Teachers of channel 3 in processes of their own: `ActorTeacher` is a `Teacher` as the one that is asked over HTTP::

    with ReplayTeachers(make_teachers, actors=3) as replay:       # a function of a module that returns teachers
        pool = TeacherPool(replay.teachers, prompter, budget=Budget(usd=20.0), cache=AnswerCache("answers"), ...)

A pool of actors has all the teachers each. A question goes to the actor with the least to do; if its process dies, to
a second one, within the question's deadline. A question without an answer by then is a missing vote.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from monarch.actor import ActorError, HostMesh, concurrent_endpoint, this_proc

from ...teachers import Answer, Budget, Prompt, Teacher, TeacherFailed, TeacherTimeout
from .budgets import AskedBudget, Granted, Reserve, Settle
from .supervision import Lost, Supervisor, Worker, WorkerActor, channel

__all__ = ["ActorTeacher", "MakeTeachers", "ReplayTeachers", "TeacherGone", "TeacherReplayActor"]

log = logging.getLogger("errata.trainer")

MakeTeachers = Callable[[], Sequence[Teacher]]
"""Returns teachers with different names. It is called in each actor's process, and in the trainer's for their names."""

_NUMBERS = itertools.count(1)
_CLOSING_S = 15.0
_ATTEMPTS = 2


class TeacherGone(TeacherFailed):
    """The processes of the teacher's actors ended, or do not answer; the call may have cost money."""

    reason, passes = "gone", True


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no answer.

    Attributes:
        kind: Class of the failure; None for an exception that is no `TeacherFailed`.
        text: Message of the failure, or the traceback of the exception.
    """

    kind: type[TeacherFailed] | None
    text: str


class TeacherReplayActor(WorkerActor):
    """Asks teachers about replayed states, in a process of its own.

    Args:
        make: Makes the teachers.
        at_once: Most questions that are asked at the same time; the others wait.
    """

    def __init__(self, make: MakeTeachers, at_once: int) -> None:
        self._teachers = {teacher.name: teacher for teacher in make()}
        self._gate = asyncio.Semaphore(at_once)

    @concurrent_endpoint
    async def ask(self, name: str, prompt: Prompt, left_s: float, port: Any, attempt: int) -> None:
        """Ask a teacher, and send its `Answer` or a `Failure`; before it, what the call reserves and costs.

        Args:
            name: Name of the teacher.
            prompt: Prompt that the teacher reads.
            left_s: Time limit in seconds, the wait for room included.
            port: Port that the answer is sent to.
            attempt: Number of the attempt at the question, from 0.
        """
        port.return_undeliverable = False  # the question may be over
        try:
            async with asyncio.timeout(left_s), self._gate:
                answer = await self._teachers[name].ask(prompt, AskedBudget(port, attempt))
        except TimeoutError:
            port.send(Failure(TeacherTimeout, f"{name} had no answer within {left_s:g} s"))
        except TeacherFailed as error:
            port.send(Failure(type(error), error.message))
        except Exception:  # of a teacher of somebody's own; it is raised again in the trainer
            port.send(Failure(None, traceback.format_exc()))
        else:
            port.send(answer)


class ReplaySupervisor(Supervisor):
    """Passes questions on to the actors, and those of a lost one to another."""

    @concurrent_endpoint
    async def ask(self, name: str, prompt: Prompt, left_s: float, port: Any) -> None:
        """Have a teacher asked; the answer goes to ``port``. See `TeacherReplayActor.ask`."""
        clock = asyncio.get_running_loop().time
        ends = clock() + left_s
        tried: set[Worker] = set()
        for attempt in range(_ATTEMPTS):
            worker, left_s = self._best(tried), ends - clock()
            if worker is None or left_s <= 0:
                break
            tried.add(worker)
            call = worker.actor.ask.call_one(name, prompt, left_s, port, attempt)
            last = attempt + 1 == _ATTEMPTS or self._best(tried) is None
            try:
                await self._called(worker, call, left_s, last=last)
                return
            except Lost:
                self._counts["asked_again"] += not last
            except ActorError as error:
                port.send(Failure(None, str(error)))
                return
        port.send(Failure(TeacherGone, f"no process of {name} answered: {len(tried)} of them were asked"))


class ActorTeacher:
    """A teacher whose questions are asked in other processes; see `Teacher`.

    Args:
        teacher: The teacher, made in this process for its name, identity and check; it is asked nothing.
        supervisor: Supervisor of the actors.
        deadline_s: Time limit of a question in seconds, the second attempt included.
    """

    def __init__(self, teacher: Teacher, supervisor: Any, deadline_s: float) -> None:
        self._teacher, self._supervisor, self.deadline_s = teacher, supervisor, deadline_s

    @property
    def name(self) -> str:
        """Name of the teacher, unique in its pool."""
        return self._teacher.name

    @property
    def family(self) -> str:
        """Name of the model family; teachers of one family are not independent."""
        return self._teacher.family

    @property
    def identity(self) -> Mapping[str, Any]:
        """All that determines the answer beside the prompt: an answer from the cache of an HTTP pool fits, too."""
        return self._teacher.identity

    def check(self, budget: Budget) -> None:
        """Check that a budget can be kept.

        Raises:
            ValueError: The teacher cannot tell beforehand what a call costs at most.
        """
        self._teacher.check(budget)

    async def ask(self, prompt: Prompt, budget: Budget) -> Answer:
        """Return the answer of the teacher in one of the actors.

        Args:
            prompt: Prompt that the teacher reads.
            budget: Budget in which the call reserves its upper bound, over the question's channel.

        Raises:
            TeacherFailed: There is none within the deadline.
            RuntimeError: The teacher raised what is no failure of a teacher.
        """
        port, received = channel()
        try:
            async with asyncio.timeout(self.deadline_s):
                with Granted(budget) as granted:
                    self._supervisor.ask.broadcast(self.name, prompt, self.deadline_s, port)
                    while True:
                        message = await received.recv()
                        if isinstance(message, Answer):
                            return message
                        if isinstance(message, Failure):
                            raise _raised(self.name, message)
                        if isinstance(message, Reserve | Settle):
                            granted.take(message)
        except TimeoutError as error:
            raise TeacherTimeout(f"{self.name} had no answer within {self.deadline_s:g} s") from error

    async def aclose(self) -> None:
        """Close nothing: `ReplayTeachers.close` ends the processes."""
        await self._teacher.aclose()


class ReplayTeachers:
    """A pool of actors with teachers. It is a context manager that ends their processes.

    Args:
        make: Makes the teachers, in each process.
        actors: Number of processes, each with all the teachers. Limits of an endpoint hold in each.
        at_once: Most questions that one actor asks at the same time.
        deadline_s: Time limit of a question in seconds, the second attempt included.
        start_s: Longest wait for the processes in seconds.
        hosts: Hosts that the processes are spread over; None for this host.

    Raises:
        ValueError: An option has no meaning.
        Exception: An actor cannot be made: what ``make`` raised, e.g. that a key is missing.
    """

    def __init__(
        self,
        make: MakeTeachers,
        *,
        actors: int = 2,
        at_once: int = 16,
        deadline_s: float = 60.0,
        start_s: float = 120.0,
        hosts: HostMesh | None = None,
    ) -> None:
        if actors < 1 or at_once < 1 or not deadline_s > 0:
            raise ValueError(f"actors={actors}, at_once={at_once}, deadline_s={deadline_s}: nobody would be asked")
        own = make()
        name = f"replay_teachers_{next(_NUMBERS)}"
        self._supervisor = this_proc().spawn(
            name, ReplaySupervisor, "replay", TeacherReplayActor, (make, at_once), actors, hosts
        )
        self._supervisor.start.call_one(start_s).get(timeout=start_s + _CLOSING_S)
        self.teachers = tuple(ActorTeacher(teacher, self._supervisor, deadline_s) for teacher in own)

    def metrics(self) -> dict[str, float]:
        """Return counts since the start: ``replay/spawned``, ``replay/lost`` and ``replay/given_up``, processes;
        ``replay/asked_again``, questions that a second process was asked."""
        counts: Mapping[str, int] = self._supervisor.counts.call_one().get(timeout=_CLOSING_S)
        return {f"replay/{name}": float(count) for name, count in sorted(counts.items())}

    def close(self) -> None:
        """End the processes. Close the pool that asks the teachers before."""
        self._supervisor.end.call_one().get(timeout=_CLOSING_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _raised(name: str, failure: Failure) -> Exception:
    if failure.kind is None:
        return RuntimeError(f"the teacher {name} raised an exception in its process:\n{failure.text}")
    return failure.kind(failure.text)

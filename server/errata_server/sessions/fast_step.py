"""The fast path of a step, by callbacks: its session is awake and idle; every other case is left to `admission`.

Nearly every step of a busy server takes this way. Only an environment on the event loop gets a task. Whatever
is out of the ordinary (asleep, busy, no room on the disk, a failure, a deadline) is left to `admission`, which does the
same in the same order and can wait.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

from openenv.core.env_server.types import Action

from errata_protocol.environment import Recovery, Snapshot
from errata_protocol.errors import EnvironmentFailed, ErrataError, ServiceError, StepTimeout

from ..concurrency.calls import Call, CallAbandoned, ThreadGone
from ..concurrency.deadlines import Deadlines
from ..concurrency.step_clock import stopped_s
from ..environments.host import EnvHost
from ..journal.base import DeliveryRow
from ..runtime.rows import Admitted, wire_digest
from ..runtime.runtime import Runtime
from .admission import Admission
from .execution import Execution
from .session import Reply, Request, Session

LOOK_S = 0.01
"""How long it is believed that the journal can be written."""

Settled = Callable[[Reply | None, Exception | None], None]
"""Told once, on the event loop: the committed reply, or why there is none."""


class Express:
    """Runs steps of one environment's sessions.

    Args:
        runtime: Journal and clock.
        execution: Makes rows.
        admission: Takes what is out of the ordinary.
        environment: Name under which requests are counted.
        own: Runs a coroutine to its end.
    """

    def __init__(
        self,
        runtime: Runtime,
        execution: Execution,
        admission: Admission,
        environment: str,
        own: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self.runtime = runtime
        self.execution = execution
        self.admission = admission
        self.environment = environment
        self.own = own
        self._deadlines: Deadlines | None = None
        self._look_at = 0.0

    def begin(
        self,
        session: Session,
        request: Request,
        socket: object | None,
        settled: Settled,
        loop: asyncio.AbstractEventLoop,
    ) -> bool:
        """Begin a step and return True, or return False and do nothing.

        Args:
            session: Whose step it is.
            request: The step.
            socket: As in `Sessions.admit`.
            settled: Told the outcome, unless False is returned.
            loop: The one that runs. To ask Python 3.11 for it costs a system call, and here it would be asked often.
        """
        host = session.host
        if (
            host is None
            or not host.express
            or host.gone
            or request.action is None
            or not session.committed
            or session.eid is None
            or session.t is None
            or session.lost is not None
            or session.closed
            or (socket is not None and session.attached is not socket)
            or self._in_trouble(loop)
            or not session.turn.take()
        ):
            return False
        timeout_s = self.execution.timeout_s(request)
        if request.timeout_s is not None and request.timeout_s < timeout_s:
            timeout_s = request.timeout_s
        created = session.last_used = self.runtime.clock.time()
        admitted = Admitted(
            session.eid, session.t + 1, session.row.sid, request.id, "step", request.data, created, request.sha or b""
        )
        flight = _Flight(self, session, host, request, socket, admitted, settled, loop, timeout_s)
        try:
            flight.depart(request.action)
        except ThreadGone:
            session.turn.leave()
            return False
        return True

    def _in_trouble(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Say whether a commit could not be made durable now, as of `LOOK_S` ago."""
        now = loop.time()
        if now >= self._look_at:
            if self.runtime.store.trouble() is not None:
                return True
            self._look_at = now + LOOK_S
        return False

    def deadlines(self, loop: asyncio.AbstractEventLoop) -> Deadlines:
        """Return the deadlines of the event loop that runs."""
        if self._deadlines is None or self._deadlines.loop is not loop:
            self._deadlines = Deadlines(loop)
        return self._deadlines


class _Flight:
    """One step under way."""

    __slots__ = (
        "_admitted",
        "_call",
        "_deadline",
        "_deadlines",
        "_express",
        "_host",
        "_landed",
        "_loop",
        "_request",
        "_row",
        "_session",
        "_settled",
        "_socket",
        "_started",
        "_stopped_before_s",
        "_task",
        "_timeout_s",
    )

    def __init__(
        self,
        express: Express,
        session: Session,
        host: EnvHost,
        request: Request,
        socket: object | None,
        admitted: Admitted,
        settled: Settled,
        loop: asyncio.AbstractEventLoop,
        timeout_s: float,
    ) -> None:
        self._express = express
        self._session = session
        self._host = host
        self._request = request
        self._socket = socket
        self._admitted = admitted
        self._settled = settled
        self._loop = loop
        self._started = loop.time()
        self._stopped_before_s = stopped_s(host.clock())
        self._task: asyncio.Task[None] | None = None
        self._call: Call | None = None
        self._row: DeliveryRow | None = None
        self._deadlines = express.deadlines(loop)
        self._deadline: object = None
        self._timeout_s = timeout_s
        self._landed = False  # the call has come back, or is not waited for any more

    # -- the call -----------------------------------------------------------------------------------------------------

    def depart(self, action: Action) -> None:
        """Begin the call and its deadline.

        Raises:
            ThreadGone: The instance's thread was given up meanwhile.
        """
        if self._host.on_loop:
            host = self._host
            self._task = self._loop.create_task(self._fly(host, action), context=host.scope())
        else:
            self._call = _FlightCall(self._host.bound_step(action), self._loop, self)
            self._host.place.start(self._call)
        self._deadline = self._deadlines.add(self._timeout_s, self, self._started)

    async def _fly(self, host: EnvHost, action: Action) -> None:
        try:
            observation = await host.env.step_async(action)
            snapshot = await host.snapshot() if host.recovery is Recovery.SNAPSHOT else None
        except asyncio.CancelledError:
            if not self._landed:
                self._land()
                self._fail(EnvironmentFailed("step was cancelled by its own code"))
            raise
        except BaseException as error:
            if not self._landed:
                self._land()
                self._fail(_as_failure(error))
        else:
            if not self._landed:
                self._land()
                self.returned(observation, snapshot)

    def answered(self, call: Call) -> None:
        """Take the outcome of a call in a thread."""
        self._call = None  # which holds this flight: a cycle for each step would be the garbage collector's to find
        if self._landed:
            return
        self._land()
        self._host.place.ended()
        if call.error is None:
            if inspect.isawaitable(call.result):
                self._express.own(self._await(call.result))
            else:
                self.returned(call.result, None)
        elif isinstance(call.error, ThreadGone):  # it ran nothing
            self._session.turn.leave()
            self._express.own(self._again())
        else:
            self._fail(_as_failure(call.error))

    def _land(self) -> None:
        self._landed = True
        self._deadlines.remove(self, self._deadline)

    def expire(self) -> None:
        """Give the call up, unless its clock was stopped for a while."""
        if self._landed:
            return
        clock = self._host.clock()
        if clock is not None:
            now = self._loop.time()
            left_s = clock.left_s(self._timeout_s, now - self._started, self._stopped_before_s)
            if left_s > 0.0:
                self._deadline = self._deadlines.add(left_s, self, now)
                return
        abandoned = CallAbandoned(ran=True) if self._call is None else self._call.give_up()
        if abandoned is None:
            return  # it has just ended, and its result is on the way
        if self._call is not None and abandoned.ran:
            self._host.break_off()
        self._landed = True
        self._express.own(self._abandon(StepTimeout(f"step {abandoned.told(self._timeout_s)}")))

    async def _abandon(self, error: StepTimeout) -> None:
        if self._task is not None:
            await self._host.give_up(self._task)
        await self._failed(error)

    async def _await(self, result: Any) -> None:
        try:
            observation = await self._host.finished(result, self._timeout_s)
        except ErrataError as error:
            await self._failed(error)
        else:
            self.returned(observation, None)

    async def _again(self) -> None:
        try:
            reply = await self._express.admission.deliver(self._session, self._request, self._socket)
        except Exception as error:
            self._settle(None, error)
        else:
            self._settle(reply, None)

    # -- what came of it ------------------------------------------------------------------------------------------

    def returned(self, observation: Any, snapshot: Snapshot | None) -> None:
        """Commit what the environment returned."""
        try:
            row = self._row = self._express.execution.row(self._admitted, self._request, observation, snapshot)
        except ErrataError as error:
            self._fail(error)
            return
        if self._host.recovery is Recovery.NONE:
            self._express.admission.look_at_recovery(self._session, self._host)
        # From here to the commit the environment is ahead of the journal: the reply is held as long as it takes.
        try:
            self._express.runtime.journal.submit((row,), self._committed, self._loop)
        except ErrataError as error:  # it was closed
            self._committed(error)

    def _committed(self, error: ErrataError | None) -> None:
        row, session = self._row, self._session
        assert row is not None and row.t is not None
        if error is not None:
            self._express.own(self._unkept(error))
            return
        session.eid, session.t = row.eid, row.t
        session.turn.leave()
        self._settle(Reply(row.eid, row.t, row.payload, wire_digest(row.digest)), None)

    async def _unkept(self, error: ErrataError) -> None:
        told: Exception = error
        try:
            await self._express.admission.unkept(self._session)
        except Exception as worse:
            told = worse
        finally:
            self._session.turn.leave()
            self._settle(None, told)

    def _fail(self, error: Exception) -> None:
        self._express.own(self._failed(error))

    async def _failed(self, error: Exception) -> None:
        """Do after a failure what `Admission.deliver` does, still in the session's turn."""
        try:
            if isinstance(error, ServiceError):
                await self._express.admission.failed(self._session, self._admitted, error)
        except Exception as worse:
            error = worse
        finally:
            self._session.turn.leave()
            self._settle(None, error)

    def _settle(self, reply: Reply | None, error: Exception | None) -> None:
        outcome = "ok" if error is None else error.code if isinstance(error, ErrataError) else "INTERNAL"
        seconds = self._loop.time() - self._started
        self._express.runtime.metrics.request(self._express.environment, "step", outcome, seconds)
        self._settled(reply, error)


class _FlightCall(Call):
    """A call in a thread whose result goes to a flight."""

    __slots__ = ("_flight",)

    def __init__(self, function: Callable[[], Any], loop: asyncio.AbstractEventLoop, flight: _Flight) -> None:
        self.prepare(function, loop)
        self._flight = flight

    def resolve(self) -> None:
        self._flight.answered(self)


def _as_failure(error: BaseException) -> Exception:
    if isinstance(error, ErrataError):
        return error
    if isinstance(error, SystemExit | KeyboardInterrupt):  # asyncio would let these end the event loop
        failed = EnvironmentFailed(f"it raised {type(error).__name__}: {error}")
    else:
        failed = EnvironmentFailed(str(error))
    failed.__cause__ = error
    return failed

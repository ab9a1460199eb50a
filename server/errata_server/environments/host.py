"""`EnvHost`: one environment instance, whose calls run with deadlines on the event loop or on its thread.

Overridden ``reset_async`` and ``step_async`` run on the event loop. All other calls are *pinned*: factory, reset, step,
``state`` and close run on one thread, unless the class sets ``ANY_THREAD = True``. An MCPEnvironment overrides
``step_async``, because its tools and its MCP session belong to the loop and a thread that waited for them would
deadlock.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation

from errata_protocol.environment import Snapshot
from errata_protocol.errors import EnvironmentFailed, EnvironmentOutputInvalid, ErrataError, ServiceError, StepTimeout
from errata_protocol.exception_text import text_of

from ..concurrency.calls import CallAbandoned, ThreadGone
from ..concurrency.containment import calling
from ..concurrency.deadlines import ends_within
from ..concurrency.places import CancelledByItself, Place, TaskCall, ThreadCall
from ..concurrency.procedures import Procedure, run
from ..concurrency.slots import Share
from ..concurrency.step_clock import StepClock
from ..concurrency.threads import Threads
from ..recovery import NONE, RecoveryClass
from .call_arguments import accepted, parameters_of
from .context import SessionContext, _current
from .forked_state import ForkedState
from .mcp_session import McpKeeper, has_mcp_session
from .placement import EnvironmentFactory, overrides, place_for
from .recovery_class import is_foreign_snapshot, recovery_of
from .reward_credit import Credit
from .snapshot_values import NotASnapshot, packed, unpacked

T = TypeVar("T")

CLOSE_S = 60.0
"""Deadline of an environment's ``close``, seconds."""

STUCK_CLOSE_S = 5.0
"""The same for an async environment after a call that hung, as a client waits for the answer."""

CANCEL_S = 1.0
"""Time for a cancelled call of an async environment to end before it counts as hanging, seconds."""


class CallNotRun(StepTimeout):
    """The call did not run, because no thread was free before its deadline: the request had no effect.

    Not raised for the calls that follow a step (`EnvHost.snapshot`, `EnvHost.step_rewards`).
    """


class ThreadLost(StepTimeout):
    """The call did not run: the thread that the instance shared was written off with another one's call."""


class EnvHost:
    """Owns one environment instance and runs its calls. Its session makes one call at a time."""

    def __init__(
        self,
        env: Environment[Any, Any, Any],
        context: SessionContext,
        threads: Threads,
        place: Place,
        recovery: RecoveryClass,
    ) -> None:
        self.env = env
        self.recovery = recovery
        self.credit = Credit(env)
        self._context = context
        self._threads = threads
        self._async_reset = overrides(env, "reset_async")
        self._async_step = overrides(env, "step_async")
        self.steps_in_thread = not self._async_step
        """Whether steps run in a thread, not on the event loop."""
        self._place: Place | None = place
        self._half_run = False
        if self._async_reset and self._async_step:
            place.release()
            self._place = None
        self._mcp: McpKeeper | None = None
        self._fork: ForkedState | None = None
        self._scope = contextvars.copy_context()
        self._scope.run(_current.set, context)
        self.rates_steps = self.credit.compute is not None
        """Whether the environment computes rewards of earlier steps at the end of an episode."""

    @classmethod
    def create(
        cls,
        factory: EnvironmentFactory,
        context: SessionContext,
        threads: Threads,
        *,
        timeout_s: float = 900.0,
        owner: object = None,
        classify: Callable[[Environment[Any, Any, Any]], RecoveryClass] = recovery_of,
    ) -> Procedure[EnvHost]:
        """Create an instance with the factory, open its MCP session if it has one, and return its host.

        Args:
            factory: Creates the instance.
            context: Context that `current_session` returns in its calls.
            threads: Threads for its blocking calls.
            timeout_s: Deadline of the factory, seconds.
            owner: Key of the shared thread, if the environment asks for a single one.
            classify: Returns the recovery class of the instance.

        Raises:
            ErrataError: Raised by the factory.
            StepTimeout: The factory, or opening the MCP session, exceeded the deadline.
            EnvironmentFailed: The factory raised another exception or returned no environment, or the MCP session could
                not be opened.
            CapacityReached: There is no thread.
        """
        for attempt in (1, 2):
            place = place_for(factory, threads, owner)
            try:
                env = yield ThreadCall(scoped(context, factory), (), place, timeout_s)
                host = calling(cls._of, env, factory, context, threads, place, classify)
                break
            except BaseException as error:
                place.release()
                if isinstance(error, ThreadGone) and attempt == 1:
                    continue  # the factory did not run, and the next attempt gets another thread
                if isinstance(error, ErrataError) or not isinstance(error, Exception):
                    raise
                raise _factory_failed(factory, error, timeout_s) from error
        try:
            if calling(has_mcp_session, host.env):
                host._mcp = yield McpKeeper.open(host.env, timeout_s)
        except (Exception, asyncio.CancelledError) as error:
            yield host.close()
            if isinstance(error, ErrataError | asyncio.CancelledError):
                raise
            raise _factory_failed(factory, error, timeout_s) from error
        return host

    @classmethod
    def _of(
        cls,
        env: object,
        factory: EnvironmentFactory,
        context: SessionContext,
        threads: Threads,
        place: Place,
        classify: Callable[[Environment[Any, Any, Any]], RecoveryClass],
    ) -> EnvHost:
        """Return the host of ``env``, which the factory returned at ``place``; other arguments as in `create`.

        Raises:
            TypeError: ``env`` is not an environment.
        """
        if not isinstance(env, Environment):
            raise TypeError(f"it returned a {type(env).__name__}, not an Environment")
        if getattr(env, "ANY_THREAD", False) and not getattr(factory, "ANY_THREAD", False):
            place.release()  # the factory is a function without ``ANY_THREAD``; the class has it
            place = threads.free()
        return cls(env, context, threads, place, classify(env))

    @property
    def gone(self) -> bool:
        """Whether a call was abandoned, of this instance or on a thread that it shares: no further call can run."""
        return self._half_run or (self._place is not None and self._place.gone)

    def clock(self) -> StepClock | None:
        """Return the clock of the session's calls; None if it was never stopped."""
        return self._context.clock

    @property
    def share(self) -> Share:
        """Share of the session that the instance is of."""
        return self._context.share

    async def scoped(self, call: Callable[[EnvHost], Awaitable[T]], *, timeout_s: float) -> T:
        """Run ``call`` on the event loop with this session as `current_session`; its exceptions propagate.

        Raises:
            StepTimeout: It exceeded the deadline and was abandoned.
        """
        return await run(self._on_loop("tools/call", lambda: call(self), timeout_s, self._context_of_caller()))

    async def run_in_place(self, function: Callable[[], T], *, timeout_s: float) -> T:
        """Run a synchronous function in the instance's place, with this session as `current_session`.

        Its exceptions propagate.

        Raises:
            StepTimeout: It exceeded the deadline and was abandoned.
            ThreadLost: It did not run, because the thread was written off.
        """
        return await run(self._in_thread("tools/call", scoped(self._context, function), timeout_s))

    @contextlib.asynccontextmanager
    async def mcp_client(self, client: Any) -> AsyncIterator[None]:
        """Keep the environment's MCP client connected in the context, connecting it if it is not."""
        if client.is_connected():
            yield
            return
        factory = getattr(self.env, "mcp_session", None)
        async with factory() if callable(factory) else client:
            yield

    @property
    def reset_parameters(self) -> Mapping[str, inspect.Parameter]:
        """Parameters of the environment's reset."""
        return parameters_of(self.env.reset_async if self._async_reset else self.env.reset)

    def reset(self, data: Mapping[str, Any], *, timeout_s: float) -> Procedure[Observation]:
        """Reset the environment with those arguments in ``data`` that its signature accepts, as upstream does.

        Raises:
            StepTimeout: It exceeded the deadline and was abandoned.
            EnvironmentFailed: It raised an exception.
        """
        method = self.env.reset_async if self._async_reset else self.env.reset
        kwargs = accepted(method, data)
        try:
            observation = yield from self._call(functools.partial(method, **kwargs) if kwargs else method, timeout_s)
        finally:
            self._look_for_rubric()
        self._fork = None
        return observation

    def step(
        self, action: Action, given: Mapping[str, Any] | None = None, *, timeout_s: float
    ) -> Procedure[Observation]:
        """Step the environment with those additional arguments in ``given`` that its signature accepts.

        Raises:
            StepTimeout: It exceeded the deadline and was abandoned.
            EnvironmentFailed: It raised an exception.
        """
        call = self.step_call(action, given, timeout_s=timeout_s)
        try:
            result = yield call
        except Exception as error:
            raise (yield from self.step_failure(call, error, timeout_s))  # noqa: B904 - it names its cause
        if self.steps_in_thread and inspect.isawaitable(result):
            result = yield from self.awaited(result, timeout_s)
        return result

    def step_call(
        self, action: Action, given: Mapping[str, Any] | None = None, *, timeout_s: float
    ) -> TaskCall | ThreadCall:
        """Return the call that `step` makes, for a procedure that yields it itself and saves a generator on each step.

        If the call fails, the caller raises what `step_failure` returns. If it ran in a thread and returned an
        awaitable, the caller passes that to `awaited`.
        """
        method = self.env.step_async if self._async_step else self.env.step
        scope = self._scope.copy()
        if given:
            kwargs = accepted(method, given)
            kwargs.pop("action", None)
            method = functools.partial(method, **kwargs)
        if self._async_step:
            return TaskCall(method, (action,), scope, timeout_s, self._context)
        place = self._place or self._threads.free()
        return ThreadCall(scope.run, (method, action), place, timeout_s, self._context)

    def step_failure(self, call: TaskCall | ThreadCall, error: Exception, timeout_s: float) -> Procedure[ErrataError]:
        """Clean up after a `step_call` that failed with ``error``, and return the exception to raise."""
        failure = yield from self._failure("step", call, error, timeout_s)
        if isinstance(failure, ErrataError):
            return failure
        failed = EnvironmentFailed(text_of(error))
        failed.__cause__ = error
        return failed

    def awaited(self, result: Any, timeout_s: float) -> Procedure[Any]:
        """Await what a synchronous ``step`` returned, and return the observation."""
        return (yield from self._call(lambda: result, timeout_s, on_loop=True, name="step"))

    async def state(self) -> dict[str, Any]:
        """Return the environment's state as a dict, of a fork with its own name and count; empty if it has none."""
        state = await run(self._call(lambda: self.env.state, 60.0, on_loop=True, name="state"))
        try:
            found = calling(_as_dict, state)
        except Exception as error:
            raise EnvironmentFailed(f"the state cannot be read: {text_of(error)}") from error
        return found if self._fork is None else self._fork.applied(found)

    def snapshot(self) -> Procedure[Snapshot | None]:
        """Return a snapshot to journal with the last delivery; None if the environment takes none.

        Raises:
            EnvironmentOutputInvalid: ``snapshot()`` raised an exception, or returned what cannot be journaled although
                it is annotated to return something that can.
            StepTimeout: It took longer than 120 s.
        """
        if not self.recovery.takes_snapshots:
            return None
        try:
            snapshot = yield from self._call(getattr(self.env, "snapshot"), 120.0)  # noqa: B009
        except CallNotRun as error:
            raise StepTimeout(error.message) from error  # the request itself has run
        except EnvironmentFailed as error:
            raise EnvironmentOutputInvalid(f"snapshot() of {type(self.env).__name__} failed: {error}") from error
        try:
            return packed(snapshot)
        except NotASnapshot as error:
            name = type(self.env).__name__
            if is_foreign_snapshot(self.env):
                self.recovery = NONE
                self._context.log.warning(
                    "snapshot() of %s returned %s: its sessions cannot be continued or forked", name, error
                )
                return None
            raise EnvironmentOutputInvalid(f"snapshot() of {name} returned {error}") from error

    def step_rewards(self, t: int, *, timeout_s: float) -> Procedure[dict[int, float]]:
        """Return the rewards that ``compute_step_rewards()`` gives the deliveries of the episode, by t.

        Empty if the environment has no such method or it raised an exception, which is logged.

        Args:
            t: The delivery that ended the episode.
            timeout_s: Deadline, seconds.

        Raises:
            StepTimeout: It exceeded the deadline.
        """
        compute = self.credit.compute
        if compute is None:
            return {}
        try:
            values = yield from self._call(compute, timeout_s, name="compute_step_rewards")
        except CallNotRun as error:
            raise StepTimeout(error.message) from error  # the step itself has run
        except EnvironmentFailed as error:  # the step itself succeeded
            self._context.log.warning("compute_step_rewards() of %s failed: %s", type(self.env).__name__, error)
            return {}
        return self.credit.by_delivery(t, values)

    async def restore(self, snapshot: Snapshot) -> None:
        """Restore ``snapshot`` on this fresh instance."""
        await run(self._call(getattr(self.env, "restore"), 120.0, unpacked(snapshot)))  # noqa: B009
        self._look_for_rubric()

    def _look_for_rubric(self) -> None:
        """Update `rates_steps`, as some environments create the rubric of a task in reset or restore."""
        self.rates_steps = self.rates_steps or self.credit.compute is not None

    async def forked(self, episode_id: str) -> None:
        """Call the environment's ``forked``, if it has it: a child episode begins, step_count 0 (PROTOCOL D11)."""
        self.credit.forked()
        if self.counts_forks:
            await run(self._call(getattr(self.env, "forked"), 60.0, episode_id))  # noqa: B009
        else:
            await self.continues_fork(episode_id, 0)

    @property
    def counts_forks(self) -> bool:
        """Whether the environment has ``forked``, and so counts the steps of a fork itself."""
        return callable(getattr(self.env, "forked", None))

    async def continues_fork(self, name: str, t: int) -> None:
        """Count the state of an environment without ``forked`` from the start of a fork, which stands at ``t``."""
        self._fork = None
        try:
            self._fork = ForkedState.of(await self.state(), name, t)
        except ErrataError:
            pass  # as in upstream, a state that cannot be read fails nothing but its own reading

    async def close(self) -> None:
        """Close the MCP session and the environment, and release the thread. Exceptions are logged.

        An environment with a call that hangs on its thread is not closed: ``close`` would run at the same time.
        """
        timeout_s = STUCK_CLOSE_S if self._half_run else CLOSE_S
        if self._mcp is not None:
            await self._mcp.close()
            self._mcp = None
        if self._place is None or not self.gone:
            try:
                aclose = calling(getattr, self.env, "aclose", None)
                await run(self._call(aclose if callable(aclose) else self.env.close, timeout_s))
            except Exception as error:
                self._context.log.warning("close of %s failed: %s", type(self.env).__name__, text_of(error))
        self.abandon()

    def abandon(self) -> None:
        """Give up a running call and release the thread, without waiting."""
        if self._place is not None:
            self._place.give_up()
            self._place.release()

    def _call(
        self,
        method: Callable[..., Any],
        timeout_s: float,
        /,
        *args: Any,
        on_loop: bool = False,
        name: str | None = None,
    ) -> Procedure[Any]:
        """Call a method of the environment in its place; other exceptions than `ErrataError` become
        `EnvironmentFailed`.

        ``on_loop`` runs a synchronous method of an async environment on the event loop instead of on a pool thread. A
        result that can be awaited is awaited on the loop.
        """
        name = name or str(getattr(method, "__name__", "call"))
        try:
            if inspect.iscoroutinefunction(method):
                call = functools.partial(method, *args)
                return (yield from self._on_loop(name, call, timeout_s, self._context_of_caller()))
            if self._place is None and on_loop:
                token = _current.set(self._context)
                try:
                    result = calling(method, *args)
                finally:
                    _current.reset(token)
            else:
                function = scoped(self._context, functools.partial(method, *args) if args else method)
                result = yield from self._in_thread(name, function, timeout_s)
            if inspect.isawaitable(result):
                return (yield from self._on_loop(name, lambda: result, timeout_s, self._context_of_caller()))
            return result
        except ErrataError:
            raise
        except Exception as error:
            raise EnvironmentFailed(text_of(error)) from error

    def _in_thread(self, name: str, function: Callable[[], T], timeout_s: float) -> Procedure[T]:
        call = ThreadCall(function, (), self._place or self._threads.free(), timeout_s, self._context)
        try:
            returned: T = yield call
            return returned
        except Exception as error:
            failure = yield from self._failure(name, call, error, timeout_s)
            raise failure from failure.__cause__

    def _on_loop(
        self, name: str, function: Callable[[], Awaitable[T]], timeout_s: float, context: contextvars.Context
    ) -> Procedure[T]:
        """Run a call on the event loop for at most ``timeout_s``, even if it ignores its cancellation."""
        call = TaskCall(function, (), context, timeout_s, self._context)
        try:
            returned: T = yield call
            return returned
        except Exception as error:
            failure = yield from self._failure(name, call, error, timeout_s)
            raise failure from failure.__cause__

    def _failure(
        self, name: str, call: ThreadCall | TaskCall, error: Exception, timeout_s: float
    ) -> Procedure[Exception]:
        """Clean up after a failed call; return the exception to raise, ours or the environment's own."""
        failure: ErrataError
        if isinstance(error, ThreadGone):
            failure = ThreadLost(
                f"{name} did not run: a call of another session hangs on the thread that this one shared"
            )
        elif isinstance(error, CallAbandoned):
            self._half_run = self._half_run or error.ran
            if isinstance(call, TaskCall):
                yield self._give_up(call.task)
            failure = (StepTimeout if error.ran else CallNotRun)(f"{name} {error.described(timeout_s)}")
        elif isinstance(error, CancelledByItself):
            failure = EnvironmentFailed(f"{name} was cancelled by its own code")
        else:
            return error
        failure.__cause__ = error
        return failure

    async def _give_up(self, task: asyncio.Task[Any]) -> None:
        """Abandon a call on the event loop that exceeded its deadline, even if it ignores its cancellation."""
        self._half_run = True
        if self._place is not None:
            self._place.give_up()  # a function that a tools/call runs in a thread outlives the task
        task.cancel()
        if not await ends_within(CANCEL_S, task):
            abandoned = self._threads.abandoned_calls
            abandoned.add(task)
            task.add_done_callback(abandoned.returned)

    def _context_of_caller(self) -> contextvars.Context:
        """Return a copy of the current context in which `current_session` is this instance's."""
        context = contextvars.copy_context()
        context.run(_current.set, self._context)
        return context


def _as_dict(state: Any) -> dict[str, Any]:
    if hasattr(state, "model_dump"):
        return dict(state.model_dump())
    return dict(state) if state else {}


def _factory_failed(factory: EnvironmentFactory, error: Exception, timeout_s: float) -> ServiceError:
    """Return the error to raise for a factory that raised ``error`` or was abandoned after ``timeout_s``."""
    name = getattr(factory, "__name__", str(factory))
    if isinstance(error, CallAbandoned):
        return StepTimeout(f"environment factory {name} {error.described(timeout_s)}")
    return EnvironmentFailed(f"environment factory {name} failed: {text_of(error)}", factory_name=name)


def scoped(context: SessionContext, function: Callable[[], T]) -> Callable[[], T]:
    """Return a function that calls ``function`` with ``context`` as `current_session`."""
    scope = contextvars.copy_context()
    scope.run(_current.set, context)
    return functools.partial(scope.run, function)

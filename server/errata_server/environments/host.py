"""`EnvHost`: one environment instance; runs its calls, with deadlines, on the event loop or on its thread.

Overridden ``reset_async`` and ``step_async`` run on the loop. Anything else is *pinned*: factory, reset, step,
``state`` and close share one thread, unless the class says ``ANY_THREAD = True``. An MCPEnvironment overrides
``step_async``: its tools and its MCP session live on the loop, and a thread that waited for them would deadlock.
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

from ..concurrency.calls import CallAbandoned, ThreadGone
from ..concurrency.deadlines import ends_within
from ..concurrency.places import CancelledByItself, Place, TaskCall, ThreadCall
from ..concurrency.procedures import Procedure, run
from ..concurrency.step_clock import StepClock
from ..concurrency.threads import Threads
from ..recovery import NONE, RecoveryClass
from .call_arguments import accepted, parameters_of
from .context import SessionContext, _current
from .mcp_session import McpKeeper
from .placement import EnvironmentFactory, overrides, place_for
from .recovery_class import found_others, recovery_of
from .reward_credit import Credit

T = TypeVar("T")

CLOSE_S = 60.0
"""Deadline of an environment's own clean-up."""

STUCK_CLOSE_S = 5.0
"""The same for an async environment whose call hung: a caller waits for the outcome."""

CANCEL_S = 1.0
"""How long a cancelled call of an async environment may clean up before it is given up."""


class ThreadLost(StepTimeout):
    """The call did not run: the thread that the instance shared was given up, because another's call hangs on it."""


class EnvHost:
    """Owns one environment instance. Calls are made one after the other by the session that owns the host."""

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
        self._place: Place | None = place
        self._half_run = False
        if self._async_reset and self._async_step:
            place.release()
            self._place = None
        self._mcp: McpKeeper | None = None
        self._scope = contextvars.copy_context()
        self._scope.run(_current.set, context)
        self.rates_steps = self.credit.compute is not None
        """The environment computes rewards of earlier steps at the end of an episode."""

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
        """Call the factory and return its instance in a host.

        Args:
            factory: Makes the instance.
            context: What `current_session` returns to it.
            threads: Where its blocking code runs.
            timeout_s: Deadline of the factory.
            owner: Whose single thread to use, where the environment asks for one.
            classify: Says the recovery class of the instance.

        Raises:
            ErrataError: The factory raised one.
            StepTimeout: The factory ran too long.
            EnvironmentFailed: The factory raised anything else.
        """
        for attempt in (1, 2):
            place = place_for(factory, threads, owner)
            try:
                env = yield ThreadCall(scoped(context, factory), place, timeout_s)
                host = cls._of(env, factory, context, threads, place, classify)
                break
            except BaseException as error:
                place.release()
                if isinstance(error, ThreadGone) and attempt == 1:
                    continue  # it ran nothing, and the next place is another thread
                if isinstance(error, ErrataError) or not isinstance(error, Exception):
                    raise
                raise _factory_failed(factory, error, timeout_s) from error
        if callable(getattr(host.env, "mcp_session", None)):
            try:
                host._mcp = yield McpKeeper.open(host.env, timeout_s)
            except (Exception, asyncio.CancelledError):
                yield host.close()
                raise
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
        """Return the host of what the factory returned at ``place``; the other arguments as in `create`.

        Raises:
            TypeError: It is no environment.
        """
        if not isinstance(env, Environment):
            raise TypeError(f"it returned a {type(env).__name__}, not an Environment")
        if getattr(env, "ANY_THREAD", False) and not getattr(factory, "ANY_THREAD", False):
            place.release()  # a function made it, which said nothing before it was called
            place = threads.free()
        return cls(env, context, threads, place, classify(env))

    @property
    def gone(self) -> bool:
        """A call was abandoned, here or on the thread the instance shares: it takes no further call."""
        return self._half_run or (self._place is not None and self._place.gone)

    def clock(self) -> StepClock | None:
        """Return the clock that its calls have stopped, None where none ever did."""
        return self._context.clock

    async def scoped(self, call: Callable[[EnvHost], Awaitable[T]], *, timeout_s: float) -> T:
        """Run ``call`` on the loop with this session's `current_session`; what it raises passes unchanged.

        Raises:
            StepTimeout: It ran too long and was abandoned.
        """
        return await run(self._on_loop("tools/call", lambda: call(self), timeout_s, self._context_of_caller()))

    async def run_in_place(self, function: Callable[[], T], *, timeout_s: float) -> T:
        """Run a synchronous part of a `scoped` call where the instance lives; what it raises passes unchanged.

        Raises:
            StepTimeout: It ran too long and was abandoned.
        """
        return await run(self._in_thread("tools/call", scoped(self._context, function), timeout_s))

    @contextlib.asynccontextmanager
    async def mcp_client(self, client: Any) -> AsyncIterator[None]:
        """Keep ``client``, the environment's own, connected: held open with the session, or for this one call."""
        if client.is_connected():
            yield
            return
        factory = getattr(self.env, "mcp_session", None)
        async with factory() if callable(factory) else client:
            yield

    @property
    def reset_parameters(self) -> Mapping[str, inspect.Parameter]:
        """What the environment's reset takes."""
        return parameters_of(self.env.reset_async if self._async_reset else self.env.reset)

    def reset(self, data: Mapping[str, Any], *, timeout_s: float) -> Procedure[Observation]:
        """Reset with those of ``data``'s keys that the environment's signature takes, as upstream does."""
        method = self.env.reset_async if self._async_reset else self.env.reset
        kwargs = accepted(method, data)
        try:
            return (yield from self._call(functools.partial(method, **kwargs) if kwargs else method, timeout_s))
        finally:
            self._look_for_rubric()

    def step(
        self, action: Action, given: Mapping[str, Any] | None = None, *, timeout_s: float
    ) -> Procedure[Observation]:
        """Step the environment, with those of ``given``'s keys that its signature takes."""
        method = self.env.step_async if self._async_step else self.env.step
        scope = self._scope.copy()
        call: TaskCall | ThreadCall
        if given:
            kwargs = accepted(method, given)
            kwargs.pop("action", None)
            method = functools.partial(method, **kwargs)
        if self._async_step:
            call = TaskCall(functools.partial(method, action), scope, timeout_s, self.clock)
        else:
            step = functools.partial(scope.run, method, action)
            call = ThreadCall(step, self._place or self._threads.free(), timeout_s, self.clock)
        try:  # as in `_call`, but without a generator more: this is on the path of every step
            result = yield call
        except Exception as error:
            failure = yield from self._failure("step", call, error, timeout_s)
            if isinstance(failure, ErrataError):
                raise failure from failure.__cause__
            raise EnvironmentFailed(str(error)) from error
        if not self._async_step and inspect.isawaitable(result):
            return (yield from self._call(lambda: result, timeout_s, on_loop=True, name="step"))
        return result

    async def state(self) -> dict[str, Any]:
        """Return the environment's state as a mapping."""
        state = await run(self._call(lambda: self.env.state, 60.0, on_loop=True, name="state"))
        if hasattr(state, "model_dump"):
            return dict(state.model_dump())
        return dict(state) if state else {}

    def snapshot(self) -> Procedure[Snapshot | None]:
        """Return what a journal row needs to continue from here; None for an environment that cannot.

        Raises:
            EnvironmentOutputInvalid: The call it should follow ran, and cannot be kept.
        """
        if not self.recovery.takes_snapshots:
            return None
        try:
            snapshot = yield from self._call(getattr(self.env, "snapshot"), 120.0)  # noqa: B009
        except EnvironmentFailed as error:
            raise EnvironmentOutputInvalid(f"snapshot() of {type(self.env).__name__} failed: {error}") from error
        if not isinstance(snapshot, Snapshot):
            name = type(self.env).__name__
            if found_others(self.env):
                self.recovery = NONE
                self._context.log.warning(
                    "snapshot() of %s returns a %s of its own, not errata_protocol.Snapshot: its sessions cannot be "
                    "continued or forked",
                    name,
                    type(snapshot).__name__,
                )
                return None
            raise EnvironmentOutputInvalid(f"snapshot() of {name} returned a {type(snapshot).__name__}, not a Snapshot")
        return snapshot

    def step_rewards(self, t: int, *, timeout_s: float) -> Procedure[dict[int, float]]:
        """Return what the environment credits the deliveries of its episode with, by t; nothing where it does not.

        Args:
            t: The delivery that ended the episode.
            timeout_s: Deadline.

        Raises:
            StepTimeout: It ran too long and was abandoned.
        """
        compute = self.credit.compute
        if compute is None:
            return {}
        try:
            values = yield from self._call(compute, timeout_s, name="compute_step_rewards")
        except EnvironmentFailed as error:  # the step itself succeeded
            self._context.log.warning("compute_step_rewards() of %s failed: %s", type(self.env).__name__, error)
            return {}
        return self.credit.by_delivery(t, values)

    async def restore(self, snapshot: Snapshot) -> None:
        """Continue from ``snapshot`` on this fresh instance."""
        await run(self._call(getattr(self.env, "restore"), 120.0, snapshot))  # noqa: B009
        self._look_for_rubric()

    def _look_for_rubric(self) -> None:
        """Notice a rubric with step rewards that the environment made for its task only now."""
        self.rates_steps = self.rates_steps or self.credit.compute is not None

    async def forked(self, episode_id: str) -> None:
        """Tell the environment that it now runs a child episode: step_count starts at 0 (PROTOCOL D11)."""
        self.credit.forked()
        method = getattr(self.env, "forked", None)
        if callable(method):
            await run(self._call(method, 60.0, episode_id))

    async def close(self) -> None:
        """Close the environment. Errors are its own business: nothing waits for them.

        One with a call that hangs on a thread is left alone: its close would have to run beside that call.
        """
        timeout_s = STUCK_CLOSE_S if self._half_run else CLOSE_S
        if self._mcp is not None:
            await self._mcp.close()
            self._mcp = None
        if self._place is None or not self.gone:
            aclose = getattr(self.env, "aclose", None)
            try:
                await run(self._call(aclose if callable(aclose) else self.env.close, timeout_s))
            except Exception as error:
                self._context.log.warning("close of %s failed: %s", type(self.env).__name__, error)
        self.abandon()

    def abandon(self) -> None:
        """Let go of the thread without waiting for what runs on it."""
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
        """Call a method of the environment where it runs; convert its exceptions to ours.

        ``on_loop`` lets a synchronous method of an async environment run on the loop; else it gets a helper thread.
        """
        name = name or str(getattr(method, "__name__", "call"))
        try:
            if inspect.iscoroutinefunction(method):
                call = functools.partial(method, *args)
                return (yield from self._on_loop(name, call, timeout_s, self._context_of_caller()))
            if self._place is None and on_loop:
                token = _current.set(self._context)
                try:
                    result = method(*args)
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
            raise EnvironmentFailed(str(error)) from error

    def _in_thread(self, name: str, function: Callable[[], T], timeout_s: float) -> Procedure[T]:
        call = ThreadCall(function, self._place or self._threads.free(), timeout_s, self.clock)
        try:
            returned: T = yield call
            return returned
        except Exception as error:
            failure = yield from self._failure(name, call, error, timeout_s)
            raise failure from failure.__cause__

    def _on_loop(
        self, name: str, function: Callable[[], Awaitable[T]], timeout_s: float, context: contextvars.Context
    ) -> Procedure[T]:
        """Await a call of the environment on the loop, but not longer, even if it ignores that it is cancelled."""
        call = TaskCall(function, context, timeout_s, self.clock)
        try:
            returned: T = yield call
            return returned
        except Exception as error:
            failure = yield from self._failure(name, call, error, timeout_s)
            raise failure from failure.__cause__

    def _failure(
        self, name: str, call: ThreadCall | TaskCall, error: Exception, timeout_s: float
    ) -> Procedure[Exception]:
        """Clean up after a call that failed, and return what to raise: ours, or what the environment raised."""
        failure: ErrataError
        if isinstance(error, ThreadGone):
            failure = ThreadLost(
                f"{name} did not run: a call of another session hangs on the thread that this one shared"
            )
        elif isinstance(error, CallAbandoned):
            self._half_run = self._half_run or error.ran
            if isinstance(call, TaskCall):
                yield self._give_up(call.task)
            failure = StepTimeout(f"{name} {error.described(timeout_s)}")
        elif isinstance(error, CancelledByItself):
            failure = EnvironmentFailed(f"{name} was cancelled by its own code")
        else:
            return error
        failure.__cause__ = error
        return failure

    async def _give_up(self, task: asyncio.Task[Any]) -> None:
        """Abandon a call on the event loop that ran too long, even if it ignores that it is cancelled."""
        self._half_run = True
        if self._place is not None:
            self._place.give_up()  # what a tools/call runs in a thread outlives the task that waits for it
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


def _factory_failed(factory: EnvironmentFactory, error: Exception, timeout_s: float) -> ServiceError:
    """Return what to tell of a factory that raised, or was abandoned after ``timeout_s``."""
    name = getattr(factory, "__name__", str(factory))
    if isinstance(error, CallAbandoned):
        return StepTimeout(f"environment factory {name} {error.described(timeout_s)}")
    return EnvironmentFailed(f"environment factory {name} failed: {error}", factory_name=name)


def scoped(context: SessionContext, function: Callable[[], T]) -> Callable[[], T]:
    """Return ``function`` as a call in which `current_session` is ``context``."""
    scope = contextvars.copy_context()
    scope.run(_current.set, context)
    return functools.partial(scope.run, function)

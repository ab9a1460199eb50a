"""One environment instance and the place its calls run: the event loop, or a thread of its own.

Overridden ``reset_async`` and ``step_async`` run on the loop. Anything else is *pinned*: factory, reset, step,
``state`` and close share one thread, which sqlite3 connections, sync Playwright and thread-locals rely on.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from openenv.core.env_server._utils import overrides_method
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation

from errata_protocol.environment import Recovery, Snapshot
from errata_protocol.errors import EnvironmentFailed, EnvironmentOutputInvalid, ErrataError, StepTimeout

from .context import SessionContext, _current
from .pinned import PinnedThread

T = TypeVar("T")

EnvironmentFactory = Callable[[], Environment[Any, Any, Any]]


def recovery_of(factory: EnvironmentFactory | Environment[Any, Any, Any]) -> Recovery:
    """Return the recovery class of an environment class or instance (PROTOCOL E1).

    A factory that is not a class tells nothing before it was called: `Recovery.NONE`.
    """
    able = all(callable(getattr(factory, name, None)) for name in ("snapshot", "restore"))
    return Recovery.SNAPSHOT if able else Recovery.NONE


def _overrides(env: object, method: str) -> bool:
    return bool(overrides_method(getattr(env, method), getattr(Environment, method)))


class EnvHost:
    """Owns one environment instance. Calls are made one after the other by the session that owns the host."""

    def __init__(
        self, env: Environment[Any, Any, Any], context: SessionContext, thread: PinnedThread, *, shared: bool = False
    ) -> None:
        self.env = env
        self._thread: PinnedThread | None
        self._shared = shared
        self.recovery = recovery_of(env)
        self._context = context
        self._async_reset = _overrides(env, "reset_async")
        self._async_step = _overrides(env, "step_async")
        if self._async_reset and self._async_step:
            if not shared:
                thread.shutdown()
            self._thread = None
        else:
            self._thread = thread
        self._mcp: _McpKeeper | None = None

    @classmethod
    async def create(
        cls, factory: EnvironmentFactory, context: SessionContext, shared: PinnedThread | None = None
    ) -> EnvHost:
        """Call the factory and return its instance in a host.

        Args:
            factory: Makes the instance.
            context: What `current_session` returns to it.
            shared: The thread of all instances, where the environment asks for a single one.

        Raises:
            ErrataError: The factory raised one.
            EnvironmentFailed: The factory raised anything else.
        """
        thread = shared or PinnedThread("errata-env")
        name = getattr(factory, "__name__", str(factory))
        try:
            env = await _in_thread(thread, context, factory)
            if not isinstance(env, Environment):
                raise TypeError(f"it returned a {type(env).__name__}, not an Environment")
        except BaseException as error:
            if shared is None:
                thread.shutdown()
            if isinstance(error, ErrataError) or not isinstance(error, Exception):
                raise
            raise EnvironmentFailed(f"environment factory {name} failed: {error}", factory_name=name) from error
        host = cls(env, context, thread, shared=shared is not None)
        if callable(getattr(env, "mcp_session", None)):
            try:
                host._mcp = await _McpKeeper.open(env)
            except BaseException:
                await host.close()
                raise
        return host

    @property
    def thread(self) -> PinnedThread | None:
        """The thread a pinned environment runs on."""
        return self._thread

    async def scoped(self, call: Callable[[EnvHost], Awaitable[T]]) -> T:
        """Run ``call`` on the loop with this session's `current_session`."""
        token = _current.set(self._context)
        try:
            return await call(self)
        finally:
            _current.reset(token)

    async def reset(self, data: Mapping[str, Any], *, timeout_s: float) -> Observation:
        """Reset with those of ``data``'s keys that the environment's signature takes, as upstream does."""
        method = self.env.reset_async if self._async_reset else self.env.reset
        parameters = inspect.signature(method).parameters
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        kwargs = {k: v for k, v in data.items() if takes_any or k in parameters}
        return await self._call(functools.partial(method, **kwargs) if kwargs else method, timeout_s)

    async def step(self, action: Action, *, timeout_s: float) -> Observation:
        """Step the environment."""
        return await self._call(self.env.step_async if self._async_step else self.env.step, timeout_s, action)

    async def state(self) -> dict[str, Any]:
        """Return the environment's state as a mapping."""
        state = await self._call(lambda: self.env.state, 60.0, on_loop=True)
        if hasattr(state, "model_dump"):
            return dict(state.model_dump())
        return dict(state) if state else {}

    async def snapshot(self) -> Snapshot | None:
        """Return what a journal row needs to continue from here; None for an environment that cannot.

        Raises:
            EnvironmentOutputInvalid: The call it should follow ran, and cannot be kept.
        """
        if self.recovery is not Recovery.SNAPSHOT:
            return None
        try:
            snapshot = await self._call(getattr(self.env, "snapshot"), 120.0)  # noqa: B009
        except EnvironmentFailed as error:
            raise EnvironmentOutputInvalid(f"snapshot() of {type(self.env).__name__} failed: {error}") from error
        if not isinstance(snapshot, Snapshot):
            name = type(self.env).__name__
            raise EnvironmentOutputInvalid(f"snapshot() of {name} returned a {type(snapshot).__name__}, not a Snapshot")
        return snapshot

    async def restore(self, snapshot: Snapshot) -> None:
        """Continue from ``snapshot`` on this fresh instance."""
        await self._call(getattr(self.env, "restore"), 120.0, snapshot)  # noqa: B009

    async def forked(self, episode_id: str) -> None:
        """Tell the environment that it now runs a child episode: step_count starts at 0 (PROTOCOL D11)."""
        method = getattr(self.env, "forked", None)
        if callable(method):
            await self._call(method, 60.0, episode_id)

    async def close(self) -> None:
        """Close the environment. Errors are its own business: nothing waits for them."""
        if self._mcp is not None:
            await self._mcp.close()
            self._mcp = None
        aclose = getattr(self.env, "aclose", None)
        try:
            await self._call(aclose if callable(aclose) else self.env.close, 60.0)
        except Exception as error:
            self._context.log.warning("close of %s failed: %s", type(self.env).__name__, error)
        self.abandon()

    def abandon(self) -> None:
        """Let go of the thread without waiting for what runs on it."""
        if self._thread is not None and not self._shared:
            self._thread.shutdown()

    async def _call(
        self, method: Callable[..., Any], timeout_s: float, /, *args: Any, on_loop: bool = False, **kwargs: Any
    ) -> Any:
        """Call on the right place; map foreign exceptions at this seam.

        ``on_loop`` lets a synchronous method of an async environment run on the loop; else it gets a helper thread.
        """
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                token = _current.set(self._context)
                try:
                    if self._thread is not None and not inspect.iscoroutinefunction(method):
                        return await _in_thread(self._thread, self._context, method, *args, **kwargs)
                    if not on_loop and not inspect.iscoroutinefunction(method):
                        result = await asyncio.to_thread(method, *args, **kwargs)
                    else:
                        result = method(*args, **kwargs)
                    return await result if inspect.isawaitable(result) else result
                finally:
                    _current.reset(token)
        except ErrataError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                name = getattr(method, "__name__", "call")
                raise StepTimeout(f"{name} ran longer than the server's {timeout_s:g} s and was abandoned") from error
            raise EnvironmentFailed(str(error)) from error


async def _in_thread(
    thread: PinnedThread, context: SessionContext, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    scope = contextvars.copy_context()
    scope.run(_current.set, context)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(thread, lambda: scope.run(function, *args, **kwargs))


class _McpKeeper:
    """Holds an MCPEnvironment's transport open in one task, because it must be left in the task that entered it."""

    def __init__(self, env: Environment[Any, Any, Any]) -> None:
        self._env = env
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._done = asyncio.Event()
        self._task = asyncio.create_task(self._keep())

    @classmethod
    async def open(cls, env: Environment[Any, Any, Any]) -> _McpKeeper:
        keeper = cls(env)
        await keeper._ready
        return keeper

    async def _keep(self) -> None:
        try:
            async with self._env.mcp_session():  # type: ignore[attr-defined]
                self._ready.set_result(None)
                await self._done.wait()
        except Exception as error:
            if self._ready.done():
                raise
            self._ready.set_exception(EnvironmentFailed(f"the MCP session could not be opened: {error}"))

    async def close(self) -> None:
        if self._task.get_loop() is not asyncio.get_running_loop():
            return  # its loop is gone, and the transport with it
        self._done.set()
        await asyncio.wait([self._task], timeout=10)

"""Keeps an environment's MCP session open until its instance is closed."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from openenv.core.env_server.interfaces import Environment

from errata_protocol.errors import EnvironmentFailed, StepTimeout
from errata_protocol.exception_text import text_of

from ..concurrency.containment import calling, contained, is_ending

log = logging.getLogger("errata.environment")


def has_mcp_session(env: Environment[Any, Any, Any]) -> bool:
    """Return whether an environment has an MCP session to keep open; prepare its MCP server to outlive its tools.

    FastMCP runs tools in tasks of its own, in which SystemExit would end the event loop.
    """
    try:
        chain = calling(lambda: getattr(getattr(env, "mcp_server", None), "middleware", None))
    except Exception:  # a property that works only later; tools without a client run where `calls.Call` contains them
        chain = None
    if isinstance(chain, list) and _contain not in chain:  # several instances may share a server
        chain.insert(0, _contain)
    return callable(getattr(env, "mcp_session", None))


async def _contain(context: Any, call_next: Any) -> Any:
    """Middleware of FastMCP: what a tool raises is that call's error."""
    task = asyncio.current_task()
    try:
        return await call_next(context)
    except Exception as error:
        cause = error.__cause__
        said = text_of(error).rstrip()
        if said.endswith(":") and cause is not None:  # FastMCP's "Error calling tool 'x': ", and the cause has no text
            error.args = (f"{said} {text_of(cause)}",)
        raise
    except BaseException as error:
        if is_ending(error, task):
            raise
        raise contained(error) from error


class McpKeeper:
    """Keeps an MCPEnvironment's transport open in one task, as it has to be closed in the task that opened it."""

    def __init__(self, env: Environment[Any, Any, Any]) -> None:
        self._env = env
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._done = asyncio.Event()
        self._task = asyncio.create_task(self._keep())

    @classmethod
    async def open(cls, env: Environment[Any, Any, Any], timeout_s: float) -> McpKeeper:
        """Open the MCP session of ``env``.

        Raises:
            StepTimeout: It was not open after ``timeout_s`` seconds.
            EnvironmentFailed: Opening it failed.
        """
        keeper = cls(env)
        try:
            async with asyncio.timeout(timeout_s):
                await keeper._ready
        except TimeoutError as error:
            keeper._task.cancel()
            raise StepTimeout(f"the MCP session could not be opened within {timeout_s:g} s") from error
        return keeper

    async def _keep(self) -> None:
        try:
            async with self._env.mcp_session():
                self._ready.set_result(None)
                await self._done.wait()
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # asyncio would let SystemExit end the event loop
            if self._ready.done():
                log.warning("the MCP session of a %s ended: %s", type(self._env).__name__, text_of(error))
                return
            failed = EnvironmentFailed(f"the MCP session could not be opened: {text_of(error)}")
            failed.__cause__ = error
            self._ready.set_exception(failed)

    async def close(self) -> None:
        """Close the MCP session; wait for up to 10 s. Does nothing in another event loop than that of `open`."""
        if self._task.get_loop() is not asyncio.get_running_loop():
            return  # its event loop has ended, and the transport with it
        self._done.set()
        await asyncio.wait([self._task], timeout=10)

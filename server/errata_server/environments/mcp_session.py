"""Keeps an environment's MCP session open for as long as its instance lives."""

from __future__ import annotations

import asyncio
from typing import Any

from openenv.core.env_server.interfaces import Environment

from errata_protocol.errors import EnvironmentFailed, StepTimeout


class McpKeeper:
    """Holds an MCPEnvironment's transport open in one task, because it must be left in the task that entered it."""

    def __init__(self, env: Environment[Any, Any, Any]) -> None:
        self._env = env
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._done = asyncio.Event()
        self._task = asyncio.create_task(self._keep())

    @classmethod
    async def open(cls, env: Environment[Any, Any, Any], timeout_s: float) -> McpKeeper:
        """Return once it is open.

        Raises:
            StepTimeout: It could not be opened in time.
            EnvironmentFailed: It could not be opened.
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
        except Exception as error:
            if self._ready.done():
                raise
            failed = EnvironmentFailed(f"the MCP session could not be opened: {error}")
            failed.__cause__ = error
            self._ready.set_exception(failed)

    async def close(self) -> None:
        """Leave it."""
        if self._task.get_loop() is not asyncio.get_running_loop():
            return  # its loop is gone, and the transport with it
        self._done.set()
        await asyncio.wait([self._task], timeout=10)

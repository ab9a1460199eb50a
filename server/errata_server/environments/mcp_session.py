"""Keeps an environment's MCP session open until its instance is closed."""

from __future__ import annotations

import asyncio
from typing import Any

from openenv.core.env_server.interfaces import Environment

from errata_protocol.errors import EnvironmentFailed, StepTimeout


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
        except Exception as error:
            if self._ready.done():
                raise
            failed = EnvironmentFailed(f"the MCP session could not be opened: {error}")
            failed.__cause__ = error
            self._ready.set_exception(failed)

    async def close(self) -> None:
        """Close the MCP session; wait for up to 10 s. Does nothing in another event loop than that of `open`."""
        if self._task.get_loop() is not asyncio.get_running_loop():
            return  # its event loop has ended, and the transport with it
        self._done.set()
        await asyncio.wait([self._task], timeout=10)

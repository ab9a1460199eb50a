"""Runs tools/list and tools/call on an environment, with the responses of OpenEnv's own server.

Environments have tools in one of three ways: an ``mcp_client`` (`MCPEnvironment`), only an ``mcp_server``, or an action
class of `ListToolsAction` and `CallToolAction`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from typing import Any

from openenv.core.env_server.http_server import _make_json_serializable as _plain
from openenv.core.env_server.mcp_environment import get_server_tools
from openenv.core.env_server.mcp_types import (
    CallToolAction,
    CallToolObservation,
    JsonRpcErrorCode,
    JsonRpcRequest,
    ListToolsAction,
    ListToolsObservation,
)
from openenv.core.env_server.types import Action

from errata_protocol.errors import ErrataError
from errata_protocol.exception_text import text_of

from ..concurrency.containment import contained
from ..concurrency.procedures import run
from ..environments.host import EnvHost
from .json_rpc import rpc_error, rpc_result


class McpTools:
    """Tools of one environment's instances.

    Args:
        action_cls: The environment's action class.
        timeout_s: Timeout of one call, seconds.
    """

    def __init__(self, action_cls: type[Action], timeout_s: float) -> None:
        self._by_action = action_cls in {CallToolAction, ListToolsAction}
        self.timeout_s = timeout_s

    async def list_tools(self, host: EnvHost, rpc: JsonRpcRequest) -> dict[str, Any]:
        """Return the response to tools/list. An exception of the environment becomes an error response.

        Raises:
            ErrataError: The machine failed, not the environment.
        """
        try:
            tools = await self._listed(host)
        except (ErrataError, asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # asyncio would let SystemExit end the event loop
            return rpc_error(JsonRpcErrorCode.INTERNAL_ERROR, text_of(contained(error)), rpc.id)
        return rpc_result(rpc, {"tools": tools})

    async def call_tool(self, host: EnvHost, rpc: JsonRpcRequest) -> dict[str, Any]:
        """Return the response to tools/call. An exception of the tool becomes an error response.

        Raises:
            ErrataError: The machine failed, not the tool.
        """
        assert isinstance(rpc.params, dict)
        name, arguments = rpc.params["name"], rpc.params.get("arguments", {})
        try:
            result = _plain(await self._called(host, name, arguments))
        except (ErrataError, asyncio.CancelledError, GeneratorExit):
            raise
        except _NoSuchTool as error:
            return rpc_error(JsonRpcErrorCode.INVALID_PARAMS, text_of(error), rpc.id)
        except BaseException as error:  # asyncio would let SystemExit end the event loop
            return rpc_error(JsonRpcErrorCode.INTERNAL_ERROR, text_of(contained(error)), rpc.id)
        return rpc_result(rpc, result)

    async def _listed(self, host: EnvHost) -> list[Any]:
        client, server = _endpoints(host)
        if client is not None:
            async with host.mcp_client(client):
                listed = await client.list_tools()
            return [tool.model_dump() if hasattr(tool, "model_dump") else dict(tool) for tool in listed]
        if server is not None:
            found = await host.run_in_place(functools.partial(get_server_tools, server), timeout_s=self.timeout_s)
            return [
                {"name": tool.name, "description": tool.description or "", "inputSchema": tool.parameters or {}}
                for tool in found.values()
            ]
        observation = await self._stepped(host, ListToolsAction())
        if not isinstance(observation, ListToolsObservation):
            raise TypeError(
                f"MCP-style tools/list step returned {type(observation).__name__}, expected ListToolsObservation"
            )
        return [tool.model_dump() for tool in observation.tools]

    async def _called(self, host: EnvHost, name: str, arguments: dict[str, Any]) -> Any:
        client, server = _endpoints(host)
        if client is not None:
            async with host.mcp_client(client):
                return await client.call_tool(name=name, arguments=arguments)
        if server is not None:
            tools = await host.run_in_place(functools.partial(get_server_tools, server), timeout_s=self.timeout_s)
            if name not in tools:
                raise _NoSuchTool(f"Tool not found: {name}")
            function = functools.partial(tools[name].fn, **arguments)
            if inspect.iscoroutinefunction(tools[name].fn):
                return await function()
            return await host.run_in_place(function, timeout_s=self.timeout_s)
        observation = await self._stepped(host, CallToolAction(tool_name=name, arguments=arguments))
        if not isinstance(observation, CallToolObservation):
            raise TypeError(
                f"MCP-style tools/call step returned {type(observation).__name__}, expected CallToolObservation"
            )
        return observation

    async def _stepped(self, host: EnvHost, action: Action) -> Any:
        if not self._by_action:
            raise TypeError("Environment does not support MCP")
        return await run(host.step(action, timeout_s=self.timeout_s))


class _NoSuchTool(LookupError):
    pass


def _endpoints(host: EnvHost) -> tuple[Any, Any]:
    return getattr(host.env, "mcp_client", None), getattr(host.env, "mcp_server", None)

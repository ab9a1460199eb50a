"""Runs tools/list and tools/call on an environment; answers as OpenEnv's own server does.

Three kinds of environments answer: one with an ``mcp_client`` (`MCPEnvironment`), one with only an ``mcp_server``, and
one whose actions are upstream's `ListToolsAction` and `CallToolAction`.
"""

from __future__ import annotations

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
    JsonRpcResponse,
    ListToolsAction,
    ListToolsObservation,
)
from openenv.core.env_server.types import Action

from errata_protocol.errors import ErrataError

from ..concurrency.procedures import run
from ..environments.host import EnvHost


class McpTools:
    """Tools of one environment's instances.

    Args:
        action_cls: The environment's action class.
        timeout_s: Bound of one call, seconds.
    """

    def __init__(self, action_cls: type[Action], timeout_s: float) -> None:
        self._by_action = action_cls in {CallToolAction, ListToolsAction}
        self.timeout_s = timeout_s

    async def list(self, host: EnvHost, rpc: JsonRpcRequest) -> dict[str, Any]:
        """Answer tools/list."""
        try:
            tools = await self._listed(host)
        except ErrataError:
            raise
        except Exception as error:
            return _failed(rpc, JsonRpcErrorCode.INTERNAL_ERROR, str(error))
        return JsonRpcResponse.success(result={"tools": tools}, request_id=rpc.id).model_dump()

    async def call(self, host: EnvHost, rpc: JsonRpcRequest) -> dict[str, Any]:
        """Answer tools/call. A tool that fails is an error response; a failing machine is an exception.

        Raises:
            ServiceError: The machine failed, not the tool.
        """
        assert isinstance(rpc.params, dict)
        name, arguments = rpc.params["name"], rpc.params.get("arguments", {})
        try:
            result = await self._called(host, name, arguments)
        except ErrataError:
            raise
        except _NoSuchTool as error:
            return _failed(rpc, JsonRpcErrorCode.INVALID_PARAMS, str(error))
        except Exception as error:
            return _failed(rpc, JsonRpcErrorCode.INTERNAL_ERROR, str(error))
        return JsonRpcResponse.success(result=_plain(result), request_id=rpc.id).model_dump()

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


def _failed(rpc: JsonRpcRequest, code: JsonRpcErrorCode, message: str) -> dict[str, Any]:
    return JsonRpcResponse.error_response(code, message, request_id=rpc.id).model_dump()

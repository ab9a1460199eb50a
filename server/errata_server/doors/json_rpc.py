"""Parses MCP JSON-RPC requests and builds JSON-RPC responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openenv.core.env_server.mcp_types import JsonRpcErrorCode, JsonRpcRequest, JsonRpcResponse, McpMethod
from pydantic import ValidationError

from errata_protocol.errors import FrameTooLarge, InvalidRequest, Overloaded

from .strict_json import Refused, parse_object


def parse_rpc(data: dict[str, Any]) -> JsonRpcRequest | dict[str, Any]:
    """Return the request in a JSON object, or an "invalid request" error response."""
    try:
        return JsonRpcRequest(**data)
    except (ValidationError, TypeError) as error:
        return rpc_error(JsonRpcErrorCode.INVALID_REQUEST, f"Invalid request: {error}"[:2000])


def read_rpc(message: Mapping[str, Any], max_frame: int) -> JsonRpcRequest | dict[str, Any]:
    """Return the request in a received message, or an error response where it holds none.

    Args:
        message: The message; see `parse_object`.
        max_frame: The limit that its error names, bytes.
    """
    try:
        return parse_rpc(parse_object(message, max_frame))
    except Overloaded as error:
        return rpc_error(JsonRpcErrorCode.SERVER_ERROR, error.message, data={"code": error.code, **error.details})
    except (Refused, FrameTooLarge) as error:
        return rpc_error(JsonRpcErrorCode.PARSE_ERROR, f"Parse error: {error.message}")
    except InvalidRequest as error:
        return rpc_error(JsonRpcErrorCode.INVALID_REQUEST, f"Invalid request: {error.message}")


def invalid_call(rpc: JsonRpcRequest) -> dict[str, Any] | None:
    """Return the error response to a request that is no well-formed tools/list or tools/call; None for one that is."""
    if rpc.method not in (McpMethod.TOOLS_LIST, McpMethod.TOOLS_CALL):
        return rpc_error(JsonRpcErrorCode.METHOD_NOT_FOUND, f"Method not found: {rpc.method}", rpc.id)
    if rpc.method == McpMethod.TOOLS_CALL:
        assert isinstance(rpc.params, dict)
        if not rpc.params.get("name"):
            return rpc_error(JsonRpcErrorCode.INVALID_PARAMS, "Missing 'name' in params", rpc.id)
        if not isinstance(rpc.params["name"], str) or not isinstance(rpc.params.get("arguments", {}), dict):
            return rpc_error(JsonRpcErrorCode.INVALID_PARAMS, "'name' is a string and 'arguments' is an object", rpc.id)
    return None


def rpc_result(rpc: JsonRpcRequest, result: Any) -> dict[str, Any]:
    """Return the successful response to ``rpc``."""
    response: dict[str, Any] = JsonRpcResponse.success(result=result, request_id=rpc.id).model_dump()
    return response


def rpc_error(
    code: JsonRpcErrorCode, message: str, request_id: Any = None, data: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return an error response; ``request_id`` is None where the request could not be parsed."""
    response: dict[str, Any] = JsonRpcResponse.error_response(
        code, message, request_id=request_id, data=data
    ).model_dump()
    return response

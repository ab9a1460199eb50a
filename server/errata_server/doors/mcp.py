"""`McpDoor`: answers MCP JSON-RPC requests from HTTP and WebSocket, with or without a session (PROTOCOL Terms)."""

from __future__ import annotations

import json
from typing import Any

from openenv.core.env_server.mcp_types import JsonRpcErrorCode, JsonRpcRequest, JsonRpcResponse, McpMethod
from pydantic import ValidationError

from errata_protocol.errors import (
    CapacityReached,
    EnvironmentFailed,
    ErrataError,
    FrameTooLarge,
    InvalidRequest,
    Overloaded,
    SessionLost,
    SessionUnknown,
)

from ..environments.host import EnvHost
from ..sessions.session import Reply, Request, Session
from ..sessions.sessions import Sessions
from .mcp_tools import McpTools
from .strict_json import Refused, parse_object

SESSION_CREATE = "openenv/session/create"
SESSION_CLOSE = "openenv/session/close"


def parse_rpc(data: dict[str, Any]) -> JsonRpcRequest | dict[str, Any]:
    """Return the request in a JSON object, or the response that says why it is none."""
    try:
        return JsonRpcRequest(**data)
    except (ValidationError, TypeError) as error:
        return rpc_failed(JsonRpcErrorCode.INVALID_REQUEST, f"Invalid request: {error}"[:2000])


def read_rpc(message: dict[str, Any], max_frame: int) -> JsonRpcRequest | dict[str, Any]:
    """Return the request in a message (see `parse_object`), or the response that says why it is none."""
    try:
        return parse_rpc(parse_object(message, max_frame))
    except Overloaded as error:
        return rpc_failed(JsonRpcErrorCode.SERVER_ERROR, error.message, data={"code": error.code, **error.details})
    except (Refused, FrameTooLarge) as error:
        return rpc_failed(JsonRpcErrorCode.PARSE_ERROR, f"Parse error: {error.message}")
    except InvalidRequest as error:
        return rpc_failed(JsonRpcErrorCode.INVALID_REQUEST, f"Invalid request: {error.message}")


def rpc_failed(
    code: JsonRpcErrorCode, message: str, request_id: Any = None, data: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return a JSON-RPC error response."""
    return JsonRpcResponse.error_response(code, message, request_id=request_id, data=data).model_dump()


class McpDoor:
    """Answers JSON-RPC requests, on a session or without one.

    Args:
        sessions: The environment's sessions.
        tools: What the methods do with an instance.
    """

    def __init__(self, sessions: Sessions, tools: McpTools) -> None:
        self._sessions = sessions
        self._tools = tools

    async def on_session(
        self, session: Session, rpc: JsonRpcRequest, raw: bytes, socket: object | None = None
    ) -> Reply | dict[str, Any]:
        """Answer a request that came through a session's own socket, or names its session.

        Args:
            session: Whose request it is.
            rpc: The request.
            raw: Its bytes.
            socket: The socket it came through, None for HTTP.

        Returns:
            A `Reply` for a delivery (tools/call), else the JSON-RPC response.
        """
        try:
            return await self._on_session(session, rpc, raw, socket)
        except ErrataError as error:
            return _refused(rpc, error)

    async def over_http(self, rpc: JsonRpcRequest, raw: bytes, principal: str | None) -> dict[str, Any] | bytes:
        """Answer ``POST /mcp``.

        Returns:
            The JSON-RPC response, or the exact payload of a delivery.
        """
        try:
            return await self._over_http(rpc, raw, principal)
        except ErrataError as error:
            return _refused(rpc, error)

    def request(self, rpc: JsonRpcRequest, raw: bytes) -> Request:
        """Return the delivery that a tools/call is; also how re-execution repeats a journaled one."""

        async def call(host: EnvHost) -> dict[str, Any]:
            return await self._tools.call(host, rpc)

        return Request("mcp", raw, call=call)

    def decode(self, raw: bytes) -> Request:
        """Return the request that journaled bytes of a tools/call hold."""
        return self.request(JsonRpcRequest(**json.loads(raw)), raw)

    async def _on_session(
        self, session: Session, rpc: JsonRpcRequest, raw: bytes, socket: object | None
    ) -> Reply | dict[str, Any]:
        if not isinstance(rpc.params, dict):
            return rpc_failed(JsonRpcErrorCode.INVALID_PARAMS, "Params must be an object", rpc.id)
        if rpc.method == SESSION_CREATE:
            await self._sessions.give_out(session)
            return JsonRpcResponse.success(result={"session_id": session.sid}, request_id=rpc.id).model_dump()
        if rpc.method == SESSION_CLOSE:
            named = rpc.params.get("session_id")
            if named == session.sid and socket is not None:
                return rpc_failed(
                    JsonRpcErrorCode.INVALID_REQUEST,
                    "Cannot close active WebSocket-managed session via MCP method",
                    rpc.id,
                )
            return await self._close(rpc, session.row.principal)
        invalid = invalid_call(rpc)
        if invalid is not None:
            return invalid
        if rpc.method == McpMethod.TOOLS_CALL:
            return await self._sessions.admit(session, self.request(rpc, raw), socket)
        return await self._sessions.look(session, lambda host: self._tools.list(host, rpc))

    async def _over_http(self, rpc: JsonRpcRequest, raw: bytes, principal: str | None) -> dict[str, Any] | bytes:
        if not isinstance(rpc.params, dict):
            return rpc_failed(JsonRpcErrorCode.INVALID_PARAMS, "Params must be an object", rpc.id)
        if rpc.method == SESSION_CREATE:
            session = await self._sessions.open(given_out=True, principal=principal)
            self._sessions.lifetime.keep_idle(session)
            return JsonRpcResponse.success(result={"session_id": session.sid}, request_id=rpc.id).model_dump()
        if rpc.method == SESSION_CLOSE:
            return await self._close(rpc, principal)
        named = rpc.params.get("session_id")
        if named:
            session = await self._sessions.find(str(named), principal)
            try:
                answer = await self.on_session(session, rpc, raw)
            finally:
                if session.attached is None:
                    self._sessions.lifetime.keep_idle(session)
            return answer.payload if isinstance(answer, Reply) else answer
        invalid = invalid_call(rpc)
        if invalid is not None:
            return invalid
        async with self._sessions.borrowed() as host:
            answer_of = self._tools.call if rpc.method == McpMethod.TOOLS_CALL else self._tools.list
            return await host.scoped(lambda lent: answer_of(lent, rpc), timeout_s=self._tools.timeout_s)

    async def _close(self, rpc: JsonRpcRequest, principal: str | None) -> dict[str, Any]:
        sid = rpc.params.get("session_id") if isinstance(rpc.params, dict) else None
        if not sid:
            return rpc_failed(JsonRpcErrorCode.INVALID_PARAMS, "Invalid params - 'session_id' is required", rpc.id)
        session = await self._sessions.find(str(sid), principal)
        result: dict[str, Any] = {"session_id": sid}
        if session.attached is not None:
            session.closing = True
            result |= {"closed": False, "closing": True}
        else:
            await self._sessions.lifetime.close(session)
            result["closed"] = True
        return JsonRpcResponse.success(result=result, request_id=rpc.id).model_dump()


def invalid_call(rpc: JsonRpcRequest) -> dict[str, Any] | None:
    """Return the response to a request that reaches no tool."""
    if rpc.method not in (McpMethod.TOOLS_LIST, McpMethod.TOOLS_CALL):
        return rpc_failed(JsonRpcErrorCode.METHOD_NOT_FOUND, f"Method not found: {rpc.method}", rpc.id)
    if rpc.method == McpMethod.TOOLS_CALL:
        assert isinstance(rpc.params, dict)
        if not rpc.params.get("name"):
            return rpc_failed(JsonRpcErrorCode.INVALID_PARAMS, "Missing 'name' in params", rpc.id)
        if not isinstance(rpc.params["name"], str) or not isinstance(rpc.params.get("arguments", {}), dict):
            return rpc_failed(
                JsonRpcErrorCode.INVALID_PARAMS, "'name' is a string and 'arguments' is an object", rpc.id
            )
    return None


def _refused(rpc: JsonRpcRequest, error: ErrataError) -> dict[str, Any]:
    if isinstance(error, SessionUnknown | SessionLost):
        code = JsonRpcErrorCode.INVALID_PARAMS
    elif isinstance(error, CapacityReached) or (isinstance(error, EnvironmentFailed) and error.details):
        code = JsonRpcErrorCode.SERVER_ERROR
    else:
        code = JsonRpcErrorCode.INTERNAL_ERROR
    return rpc_failed(code, error.message, rpc.id, {"code": error.code, **error.details})

"""JSON-RPC on sessions: session life, and tools/call as a delivery (PROTOCOL, head; facts of upstream's /mcp).

What a tool does is upstream's own handler, captured when the routes are registered; which session it acts on, and that
a tools/call is journaled like a step, is ours.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from openenv.core.env_server.mcp_types import JsonRpcErrorCode, JsonRpcRequest, JsonRpcResponse, McpMethod

from errata_protocol.errors import CapacityReached, EnvironmentFailed, ErrataError, SessionLost, SessionUnknown

from .hosting import EnvHost
from .session import Reply, Request, Session
from .sessions import Sessions

UpstreamHandler = Callable[..., Awaitable[JsonRpcResponse]]

SESSION_CREATE = "openenv/session/create"
SESSION_CLOSE = "openenv/session/close"


def upstream_handler(endpoint: Callable[..., Any]) -> UpstreamHandler:
    """Return the JSON-RPC handler that upstream's ``POST /mcp`` endpoint closes over.

    Raises:
        RuntimeError: This version of openenv builds the endpoint in another way.
    """
    found = inspect.getclosurevars(endpoint).nonlocals.get("mcp_handler")
    if found is None:
        raise RuntimeError("this version of openenv has no mcp_handler behind POST /mcp: install openenv>=0.10,<0.11")
    return found  # type: ignore[no-any-return]


class McpDoor:
    """Answers JSON-RPC requests, on a session or without one.

    Args:
        sessions: The environment's sessions.
        handler: Upstream's handler.
    """

    def __init__(self, sessions: Sessions, handler: UpstreamHandler) -> None:
        self._sessions = sessions
        self._handler = handler

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
        if rpc.method == SESSION_CREATE:
            await self._sessions.give_out(session)
            return JsonRpcResponse.success(result={"session_id": session.sid}, request_id=rpc.id).model_dump()

        named = rpc.params.get("session_id") if isinstance(rpc.params, dict) else None
        if rpc.method == SESSION_CLOSE and socket is not None and named and named != session.sid:
            try:
                return await self._close(rpc, str(named), session.row.principal)
            except ErrataError as error:
                return _rpc_error(rpc, error)

        async def call(host: EnvHost) -> dict[str, Any]:
            response = await self._handler(rpc, session_env=host.env, session_id=session.sid)
            return response.model_dump()

        if rpc.method == McpMethod.TOOLS_CALL and isinstance(rpc.params, dict) and rpc.params.get("name"):
            return await self._sessions.admit(session, Request("mcp", raw, call=call), socket)
        return await self._sessions.read_mcp(session, call)

    async def over_http(self, rpc: JsonRpcRequest, raw: bytes, principal: str | None) -> dict[str, Any] | bytes:
        """Answer ``POST /mcp``.

        Returns:
            The JSON-RPC response, or the exact payload of a delivery.
        """
        try:
            if rpc.method == SESSION_CREATE:
                session = await self._sessions.open(given_out=True, principal=principal)
                self._sessions.keep_idle(session)
                return JsonRpcResponse.success(result={"session_id": session.sid}, request_id=rpc.id).model_dump()
            named = rpc.params.get("session_id") if isinstance(rpc.params, dict) else None
            if rpc.method == SESSION_CLOSE and named:
                return await self._close(rpc, str(named), principal)
            if named:
                session = await self._sessions.find(str(named), principal)
                answer = await self.on_session(session, rpc, raw)
                if session.attached is None:
                    self._sessions.keep_idle(session)
                return answer.payload if isinstance(answer, Reply) else answer
        except ErrataError as error:
            return _rpc_error(rpc, error)
        return (await self._handler(rpc)).model_dump()

    async def _close(self, rpc: JsonRpcRequest, sid: str, principal: str | None) -> dict[str, Any]:
        session = await self._sessions.find(sid, principal)
        if session.attached is not None:
            session.closing = True
            result = {"session_id": sid, "closed": False, "closing": True}
        else:
            await self._sessions.close(session)
            result = {"session_id": sid, "closed": True}
        return JsonRpcResponse.success(result=result, request_id=rpc.id).model_dump()


def _rpc_error(rpc: JsonRpcRequest, error: ErrataError) -> dict[str, Any]:
    if isinstance(error, SessionUnknown | SessionLost):
        code = JsonRpcErrorCode.INVALID_PARAMS
    elif isinstance(error, CapacityReached) or (isinstance(error, EnvironmentFailed) and error.details):
        code = JsonRpcErrorCode.SERVER_ERROR
    else:
        code = JsonRpcErrorCode.INTERNAL_ERROR
    data = {"code": error.code, **error.details}
    return JsonRpcResponse.error_response(code, error.message, request_id=rpc.id, data=data).model_dump()

"""`McpDoor`: answers MCP JSON-RPC requests from HTTP and WebSocket, with or without a session (PROTOCOL Terms)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from openenv.core.env_server.mcp_types import JsonRpcErrorCode, JsonRpcRequest, McpMethod

from errata_protocol.errors import (
    CapacityReached,
    EnvironmentFailed,
    ErrataError,
    Misdirected,
    Overloaded,
    SessionLost,
    SessionUnknown,
)
from errata_protocol.labels import NO_LABELS, Labels

from ..environments.host import EnvHost
from ..sessions.session import Reply, Request, Session
from ..sessions.sessions import Sessions
from .json_rpc import invalid_call, rpc_error, rpc_result
from .mcp_tools import McpTools

SESSION_CREATE = "openenv/session/create"
SESSION_CLOSE = "openenv/session/close"


class McpDoor:
    """Answers JSON-RPC requests, on a session or without one.

    Args:
        sessions: The environment's sessions.
        tools: Runs tools/list and tools/call on an instance.
    """

    def __init__(self, sessions: Sessions, tools: McpTools) -> None:
        self._sessions = sessions
        self._tools = tools

    async def on_session(
        self, session: Session, rpc: JsonRpcRequest, raw: bytes, socket: object | None = None
    ) -> Reply | dict[str, Any]:
        """Answer a request of a session: one that arrived on the session's socket, or names the session.

        Args:
            session: The session.
            rpc: The request.
            raw: Bytes of the request, to be journaled.
            socket: The socket on which it arrived; None for HTTP and multiplexed sockets.

        Returns:
            A `Reply` where a tools/call ran, else the JSON-RPC response. An `ErrataError` becomes an error response.
        """
        try:
            return await self._on_session(session, rpc, raw, socket)
        except ErrataError as error:
            return refused(rpc, error)

    async def over_http(
        self, rpc: JsonRpcRequest, raw: bytes, principal: str | None, labels: Callable[[], Labels] = lambda: NO_LABELS
    ) -> dict[str, Any] | bytes:
        """Answer ``POST /mcp``. A request without ``session_id`` runs on an instance that it has for itself.

        Args:
            rpc: The request.
            raw: Bytes of the request, to be journaled.
            principal: Who sent it.
            labels: Returns the labels that came with it, for a session that it makes.

        Returns:
            The JSON-RPC response; as bytes where it is the payload of a delivery, which is journaled so.
        """
        try:
            return await self._over_http(rpc, raw, principal, labels)
        except ErrataError as error:
            return refused(rpc, error)

    def request(self, rpc: JsonRpcRequest, raw: bytes) -> Request:
        """Return the session request that runs the tools/call ``rpc``; ``raw`` is journaled as its request."""

        async def call(host: EnvHost) -> dict[str, Any]:
            return await self._tools.call_tool(host, rpc)

        return Request("mcp", raw, call=call)

    def decode(self, raw: bytes) -> Request:
        """Return the session request for a journaled tools/call, which re-execution runs again."""
        return self.request(JsonRpcRequest(**json.loads(raw)), raw)

    async def _on_session(
        self, session: Session, rpc: JsonRpcRequest, raw: bytes, socket: object | None
    ) -> Reply | dict[str, Any]:
        if not isinstance(rpc.params, dict):
            return rpc_error(JsonRpcErrorCode.INVALID_PARAMS, "Params must be an object", rpc.id)
        if rpc.method == SESSION_CREATE:
            await self._sessions.make_resumable(session)
            return rpc_result(rpc, {"session_id": session.sid})
        if rpc.method == SESSION_CLOSE:
            named = rpc.params.get("session_id")
            if named == session.sid and socket is not None:
                return rpc_error(
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
        return await self._sessions.look(session, lambda host: self._tools.list_tools(host, rpc))

    async def _over_http(
        self, rpc: JsonRpcRequest, raw: bytes, principal: str | None, labels: Callable[[], Labels]
    ) -> dict[str, Any] | bytes:
        if not isinstance(rpc.params, dict):
            return rpc_error(JsonRpcErrorCode.INVALID_PARAMS, "Params must be an object", rpc.id)
        if rpc.method == SESSION_CREATE:
            session = await self._sessions.open(resumable=True, principal=principal, labels=labels())
            self._sessions.lifetime.keep_idle(session)
            return rpc_result(rpc, {"session_id": session.sid})
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
            answer_of = self._tools.call_tool if rpc.method == McpMethod.TOOLS_CALL else self._tools.list_tools
            return await host.scoped(lambda lent: answer_of(lent, rpc), timeout_s=self._tools.timeout_s)

    async def _close(self, rpc: JsonRpcRequest, principal: str | None) -> dict[str, Any]:
        sid = rpc.params.get("session_id") if isinstance(rpc.params, dict) else None
        if not sid:
            return rpc_error(JsonRpcErrorCode.INVALID_PARAMS, "Invalid params - 'session_id' is required", rpc.id)
        session = await self._sessions.find(str(sid), principal)
        result: dict[str, Any] = {"session_id": sid}
        if session.attached is not None:
            session.closing = True
            result |= {"closed": False, "closing": True}
        else:
            await self._sessions.lifetime.close(session)
            result["closed"] = True
        return rpc_result(rpc, result)


def refused(rpc: JsonRpcRequest, error: ErrataError) -> dict[str, Any]:
    """Return the JSON-RPC error response for a request that failed."""
    if isinstance(error, SessionUnknown | SessionLost):
        code = JsonRpcErrorCode.INVALID_PARAMS
    elif isinstance(error, CapacityReached | Misdirected | Overloaded) or (
        isinstance(error, EnvironmentFailed) and error.details
    ):
        code = JsonRpcErrorCode.SERVER_ERROR
    else:
        code = JsonRpcErrorCode.INTERNAL_ERROR
    return rpc_error(code, error.message, rpc.id, {"code": error.code, **error.details})

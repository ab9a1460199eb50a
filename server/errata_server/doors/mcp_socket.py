"""WebSocket ``/mcp``: JSON-RPC frames. Each socket opens a session; each tools/call is a delivery."""

from __future__ import annotations

import logging

from openenv.core.env_server.mcp_types import JsonRpcErrorCode
from starlette.types import Message
from starlette.websockets import WebSocket

from errata_protocol.errors import ErrataError
from errata_protocol.exception_text import text_of

from ..sessions.session import Reply, Session
from ..sessions.sessions import Sessions
from .input_errors import error_json
from .json_rpc import read_rpc, rpc_error
from .labels import LabelHeaders
from .mcp import McpDoor
from .session_socket import SocketDoor

log = logging.getLogger("errata.ws")


class McpSocket(SocketDoor):
    """One connection on WS ``/mcp``.

    Args:
        websocket: Not yet accepted.
        sessions: The environment's sessions.
        mcp: Answers the requests.
        principal: Who opened the socket.
        labels: See `SocketDoor`.
    """

    def __init__(
        self,
        websocket: WebSocket,
        sessions: Sessions,
        mcp: McpDoor,
        principal: str | None,
        labels: LabelHeaders = (),
    ) -> None:
        super().__init__(websocket, sessions, principal, labels)
        self._mcp = mcp

    async def _answer(self, session: Session, message: Message) -> bytes:
        rpc = read_rpc(message, self._sessions.runtime.settings.max_frame)
        if isinstance(rpc, dict):
            return error_json(rpc)
        try:
            answer = await self._mcp.on_session(session, rpc, rpc.model_dump_json().encode(), self)
            return answer.payload if isinstance(answer, Reply) else error_json(answer)
        except Exception as error:  # a defect of ours must not cost the client its session
            log.exception("request failed")
            return error_json(rpc_error(JsonRpcErrorCode.INTERNAL_ERROR, text_of(error), rpc.id))

    def _refusal(self, error: Exception) -> bytes:
        if isinstance(error, ErrataError):
            data = {"code": error.code, **error.details}
            return error_json(rpc_error(JsonRpcErrorCode.SERVER_ERROR, error.message, data=data))
        log.error("session could not be opened", exc_info=error)
        return error_json(rpc_error(JsonRpcErrorCode.SERVER_ERROR, text_of(error)))

"""WebSocket ``/ws`` with OpenEnv's protocol, one session a socket; also capabilities, state(t), attach (PROTOCOL A).

A frame that cannot be answered gets an error frame with a code; the session and the socket stay open.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from openenv.core.env_server.mcp_types import WSMCPMessage
from openenv.core.env_server.types import (
    Action,
    WSCloseMessage,
    WSResetMessage,
    WSStateMessage,
    WSStepMessage,
)
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.types import Message
from starlette.websockets import WebSocket

from errata_protocol.capabilities import Capabilities
from errata_protocol.errors import (
    EnvironmentOutputInvalid,
    ErrataError,
    InvalidRequest,
    NoReset,
    StateOutOfRange,
    UnknownEpisode,
)
from errata_protocol.exception_text import text_of
from errata_protocol.mux import injected_fork
from errata_protocol.payload import splice
from errata_protocol.replay import DeliveryRequest, StateAtRequest

from ..episodes.episodes import Episodes
from ..episodes.forks import Forks
from ..episodes.reads import JournalReads
from ..journal.base import DeliveryRow
from ..runtime.rows import Admitted, encode_output, wire_digest
from ..sessions.decoding import reset_request, step_request
from ..sessions.session import Reply, Session
from ..sessions.sessions import Sessions
from .capabilities import capabilities_data
from .injected_state import reset_to
from .input_errors import error_json
from .json_rpc import parse_rpc
from .labels import LabelHeaders
from .mcp import McpDoor
from .readers import Reader
from .repeat_safe import TAKE_AN_ID, RepeatSafe, read_request_id, validation_error
from .session_socket import SocketDoor
from .strict_json import parse_object_async

log = logging.getLogger("errata.ws")


class PlainSocket(SocketDoor):
    """One connection on ``/ws``.

    Args:
        websocket: Not yet accepted.
        sessions: The environment's sessions.
        episodes: Reads and forks of the journal; None in production mode, which has no state(t) and no fork.
        mcp: Answers JSON-RPC requests.
        action_cls: Action class that steps are validated against.
        capabilities: Returns what the environment offers.
        reader: Who opened the socket.
        labels: See `SocketDoor`.
    """

    def __init__(
        self,
        websocket: WebSocket,
        sessions: Sessions,
        episodes: Episodes | None,
        mcp: McpDoor,
        action_cls: type[Action],
        capabilities: Callable[[], Capabilities],
        reader: Reader,
        labels: LabelHeaders = (),
    ) -> None:
        super().__init__(websocket, sessions, reader.principal, labels)
        self._reader = reader
        self._episodes = episodes
        self._mcp = mcp
        self._action_cls = action_cls
        self._capabilities = capabilities
        self._attached_by_id = False
        self._repeat_safe = (
            RepeatSafe(sessions, episodes.forks, mcp, action_cls, reader) if episodes is not None else None
        )
        self._probed = False  # the client sent a capability probe: its frames may carry eid, t and digest (PROTOCOL C1)

    async def _session(self) -> Session:
        wanted = self._websocket.query_params.get("session_id")
        if wanted:
            session = await self._sessions.find(wanted, self._principal)
            self._attached_by_id = True
            self._sessions.lifetime.attach(session, self)
            return session
        return await super()._session()

    def _refusal(self, error: Exception) -> bytes:
        if isinstance(error, ErrataError):
            wire = error.to_wire()
            if "factory_name" in error.details:
                wire["code"] = "FACTORY_ERROR"
            return _error_frame(wire)
        log.error("session could not be opened", exc_info=error)
        return _error_frame({"message": text_of(error), "code": "SESSION_ERROR"})

    async def _answer(self, session: Session, message: Message) -> bytes | None:
        try:
            frame = await parse_object_async(message, self._sessions.runtime.settings.max_frame)
            if self._offers_replies and "request_id" in frame and frame.get("type") in TAKE_AN_ID:
                size = len(message.get("text") or message.get("bytes") or b"")
                return await self._once(session, frame, read_request_id(frame), size)
            return await self._dispatch(session, frame)
        except ValidationError as error:
            return _error_frame(validation_error(error))
        except EnvironmentOutputInvalid as error:
            # OpenEnv's server has no code of its own for it. A client that sent a capability probe knows ours.
            code = error.code if self._probed else "EXECUTION_ERROR"
            return _error_frame({**error.to_wire(), "code": code})
        except ErrataError as error:
            return _error_frame(error.to_wire())
        except Exception as error:  # a defect of ours must not cost the client its session
            log.exception("request failed")
            return _error_frame({"message": text_of(error), "code": "EXECUTION_ERROR"})

    @property
    def _offers_replies(self) -> bool:
        """Whether replies can be read and requests repeated: the client attached to its session, and has asked."""
        return self._probed and self._attached_by_id and self._repeat_safe is not None

    async def _once(self, session: Session, frame: dict[str, Any], request_id: str, size: int) -> bytes:
        """Answer a request that has an id: run it, or send the reply again that it got."""
        assert self._repeat_safe is not None
        try:
            row = await self._repeat_safe.row(session, frame, request_id, size, self)
        except ErrataError as error:
            return _error_frame(error.to_wire(), request_id)
        if row.t is not None:
            return self._delivered("mcp" if row.kind == "mcp" else "observation", _reply_of(row), request_id)
        if row.status != "ok":
            return splice({"type": "error", "request_id": request_id}, row.payload)
        return splice({"type": "mcp", "request_id": request_id}, row.payload)

    async def _dispatch(self, session: Session, frame: dict[str, Any]) -> bytes | None:
        match frame.get("type", ""):
            case "reset":
                asked = WSResetMessage(**frame).data
                place = injected_fork(asked) if self._episodes is not None else None
                if self._episodes is not None and place is not None:
                    return await self._reset_to(session, asked, self._episodes.forks, place)
                request = reset_request(asked)
                return self._delivered("observation", await self._sessions.run(session, request, self))
            case "step":
                request = step_request(WSStepMessage(**frame).data, self._action_cls)
                return self._delivered("observation", await self._sessions.run(session, request, self))
            case "state" if "data" in frame and self._episodes is not None:
                return await self._state_at(session, frame, self._episodes.reads)
            case "state":
                WSStateMessage(**frame)
                return encode_output({"type": "state", "data": await self._sessions.state(session)})
            case "delivery" if self._offers_replies and self._episodes is not None:
                return await self._delivery(session, frame, self._episodes.reads)
            case "capabilities":
                self._probed = True
                return await self._capable(session)
            case "close":
                WSCloseMessage(**frame)
                session.closing = session.closing or not self._attached_by_id  # upstream: an attached socket detaches
                return None
            case "mcp":
                return await self._mcp_frame(session, WSMCPMessage(**frame).data)
            case other:
                shown = other if isinstance(other, str) else type(other).__name__
                return _error_frame({"message": f"Unknown message type: {shown[:100]}", "code": "UNKNOWN_TYPE"})

    async def _reset_to(self, session: Session, asked: dict[str, Any], forks: Forks, place: tuple[str, int]) -> bytes:
        """Continue a session from a state(t), as on a multiplexed socket (PROTOCOL D11)."""
        runtime = self._sessions.runtime
        admitted = Admitted("", 0, session.sid, None, "reset", to_json(asked), runtime.clock.time())
        row = await reset_to(runtime, forks, session, admitted, place, self._reader, self)
        return self._delivered("observation", Reply(row.eid, 0, row.payload, wire_digest(row.digest)))

    async def _state_at(self, session: Session, frame: dict[str, Any], reads: JournalReads) -> bytes:
        _only_data(frame)
        asked = StateAtRequest.model_validate(frame["data"])
        if asked.eid is not None and asked.eid != session.eid:
            fleet = self._sessions.runtime.fleet
            found = None if fleet is None else await fleet.state_at(asked.eid, asked.t, self._reader.connection)
            if found is not None:
                return splice(
                    {"type": "state_at", "eid": found.eid, "t": found.t, "kind": found.kind, "digest": found.digest},
                    found.payload,
                )
            await self._reader.check(asked.eid, sid=session.sid)
        row = await reads.state_at(session.eid, asked.t, asked.eid, self._principal)
        head = {
            "type": "state_at",
            "eid": row.eid,
            "t": row.t,
            "kind": row.wire_kind,
            "digest": f"sha256:{row.digest.hex()}",
        }
        return splice(head, row.payload)

    async def _capable(self, session: Session) -> bytes:
        first = None
        if self._offers_replies:
            async with session.lock:  # a request of an earlier socket moves the session first
                pass
            first = await self._first(session)
        data = capabilities_data(
            self._capabilities(),
            session,
            with_key=self._episodes is not None,
            attached=self._offers_replies,
            first=first,
        )
        return to_json({"type": "capabilities", "data": data})

    async def _delivery(self, session: Session, frame: dict[str, Any], reads: JournalReads) -> bytes:
        """Send a reply of the current episode again, as it was sent."""
        _only_data(frame)
        asked = DeliveryRequest.model_validate(frame.get("data"))
        try:
            row = await reads.state_at(session.eid, asked.t, None, self._principal)
        except (StateOutOfRange, NoReset, UnknownEpisode):
            where = {"eid": session.eid, "t": session.t, "first": await self._first(session)}
            text = f"delivery {asked.t} of this episode is not there"
            return _error_frame({"message": text, "code": StateOutOfRange.code, **where})
        return self._delivered("mcp" if row.kind == "mcp" else "observation", _reply_of(row))

    async def _first(self, session: Session) -> int | None:
        """Return the first delivery of the current episode: 1 where it began without a reset."""
        eid = session.eid
        if eid is None:
            return None
        began = await self._sessions.runtime.store.read(lambda journal: journal.delivery(eid, 0))
        return 0 if began is not None else 1

    async def _mcp_frame(self, session: Session, data: dict[str, Any]) -> bytes:
        rpc = parse_rpc(data)
        if isinstance(rpc, dict):
            return error_json({"type": "mcp", "data": rpc})
        answer = await self._mcp.on_session(session, rpc, to_json(data), self)
        if isinstance(answer, Reply):
            return self._delivered("mcp", answer)
        return error_json({"type": "mcp", "data": answer})

    def _delivered(self, kind: str, reply: Reply, request_id: str | None = None) -> bytes:
        head: dict[str, Any] = {"type": kind}
        if self._probed:
            head |= {"eid": reply.eid, "t": reply.t, "digest": reply.digest}
        if request_id is not None:
            head["request_id"] = request_id
        return splice(head, reply.payload)


def _reply_of(row: DeliveryRow) -> Reply:
    assert row.t is not None, "a delivery has a t"
    return Reply(row.eid, row.t, row.payload, wire_digest(row.digest))


def _only_data(frame: dict[str, Any]) -> None:
    extra = set(frame) - {"type", "data"}
    if extra:
        raise InvalidRequest(f"a {frame['type']} message has the keys type and data, not {sorted(extra)}")


def _error_frame(data: dict[str, Any], request_id: str | None = None) -> bytes:
    named = {} if request_id is None else {"request_id": request_id}
    return error_json({"type": "error", **named, "data": data})

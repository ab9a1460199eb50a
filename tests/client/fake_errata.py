"""A scripted Errata server: the frames and routes of PROTOCOL A, C and G over a counter, with faults on request.

Payloads are written with odd spacing, escapes and number forms, so that a client that encodes values again is found
out by their digests.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import uuid
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect


@dataclass
class Delivery:
    """One delivery as the journal keeps it."""

    kind: str
    payload: bytes

    @property
    def digest(self) -> str:
        return "sha256:" + hashlib.sha256(self.payload).hexdigest()


@dataclass
class Episode:
    """Deliveries of one episode and where it was forked from."""

    deliveries: list[Delivery] = field(default_factory=list)
    origin: dict[str, Any] | None = None

    def count_at(self, t: int) -> int:
        """The environment's counter at t."""
        count: int = json.loads(self.deliveries[t].payload)["observation"]["count"]
        return count


@dataclass
class Session:
    """A counter with a current episode."""

    id: str
    count: int = 0
    eid: str | None = None


class FakeErrata:
    """The server's memory and its faults.

    Attributes:
        extensions: What capabilities offer.
        says_position: Whether capabilities tell ``session``.
        faults: Faults by request type, each used once: ``cut`` acts and drops the socket without a reply, ``mute``
            acts and stays silent, ``garble`` changes the payload on the way, ``unstamped`` leaves the stamp out,
            ``wrong_type`` answers with another frame, an error dict is answered instead of acting.
        seen: Types of all requests, in order of arrival.
        refusals: Error data for the first frame of the next sockets, which are then closed.
        muted: Released each time a ``mute`` fault has acted.
        broken_forks: How many fork requests are dropped after they acted.
        ignores_session_id: Every socket gets a session of its own, as before openenv 0.5.
        busy_attaches: How many attaches find the session still tied to another socket.
    """

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.episodes: dict[str, Episode] = {}
        self.forks: dict[str, dict[str, Any]] = {}
        self.extensions = {"state_at": 1, "fork": 1}
        self.says_position = True
        self.faults: dict[str, list[Any]] = {}
        self.seen: list[str] = []
        self.headers: list[str | None] = []
        self.fork_requests: list[str] = []
        self.refusals: list[dict[str, Any]] = []
        self.broken_forks = 0
        self.busy_attaches = 0
        self.ignores_session_id = False
        self.muted = threading.Semaphore(0)
        self.app = Starlette(
            routes=[
                WebSocketRoute("/ws", self.ws),
                Route("/mcp", self.mcp, methods=["POST"]),
                Route("/episodes/{eid}", self.episode),
                Route("/episodes/{eid}/states/{t:int}", self.state),
                Route("/episodes/{eid}/fork", self.fork, methods=["POST"]),
            ]
        )

    # -- environment

    def deliver(self, session: Session, kind: str, text: str) -> tuple[str, int, Delivery]:
        """Make a delivery and journal it."""
        if session.eid is None or kind == "reset":
            session.eid = uuid.uuid4().hex
            self.episodes[session.eid] = Episode()
        if kind == "mcp":
            body = f'{{"jsonrpc": "2.0","id":1, "result" : {{"text":{json.dumps(text)}}}}}'
        else:
            said = json.dumps(text, ensure_ascii=session.count % 2 == 0)
            observation = f'{{"count": {session.count},"text":{said}}}'
            body = f'{{ "observation" : {observation},"reward": {session.count}.0e0 ,"done":false}}'
        deliveries = self.episodes[session.eid].deliveries
        deliveries.append(Delivery(kind, body.encode()))
        return session.eid, len(deliveries) - 1, deliveries[-1]

    # -- doors

    async def ws(self, socket: WebSocket) -> None:
        """The plain socket."""
        await socket.accept()
        self.headers.append(socket.headers.get("authorization"))
        if self.refusals:
            await socket.send_text(json.dumps({"type": "error", "data": self.refusals.pop(0)}))
            await socket.close()
            return
        wanted = None if self.ignores_session_id else socket.query_params.get("session_id")
        if wanted is not None and wanted not in self.sessions:
            data = {"message": f"Unknown session_id: {wanted}", "code": "SESSION_ERROR"}
            await socket.send_text(json.dumps({"type": "error", "data": data}))
            await socket.close()
            return
        if wanted is not None and self.busy_attaches:
            self.busy_attaches -= 1
            await socket.send_text(error(f"Session {wanted} already has an attached WebSocket", "SESSION_ERROR"))
            await socket.close()
            return
        session = self.sessions[wanted] if wanted else Session("plain")
        try:
            while True:
                message = json.loads(await socket.receive_text())
                if message["type"] == "close":
                    self.sessions.pop(session.id, None)
                    await socket.close()
                    return
                if not await self.answer(socket, session, message):
                    return
        except WebSocketDisconnect:
            pass

    async def answer(self, socket: WebSocket, session: Session, message: dict[str, Any]) -> bool:
        """Answer one request; False when the socket was cut."""
        kind = message["type"]
        self.seen.append(kind)
        queue = self.faults.get(kind, [])
        fault = queue.pop(0) if queue else None
        if isinstance(fault, dict):
            await socket.send_text(json.dumps({"type": "error", "data": fault}))
            return True
        if kind == "capabilities":
            data: dict[str, Any] = {"environment": "counter", "extensions": self.extensions, "recovery": "snapshot"}
            if self.says_position and session.id != "plain":
                t = len(self.episodes[session.eid].deliveries) - 1 if session.eid else None
                data["session"] = {"session_id": session.id, "eid": session.eid, "t": t}
            await socket.send_text(json.dumps({"type": "capabilities", "data": data}))
            return True
        if kind == "state":
            await socket.send_text(self.replay(session, message["data"]) if "data" in message else self.live(session))
            return True
        if kind == "mcp" and message["data"]["method"] == "openenv/session/create":
            result = {"jsonrpc": "2.0", "id": 1, "result": {"session_id": session.id}}
            await socket.send_text(json.dumps({"type": "mcp", "data": result}))
            return True
        session.count = 0 if kind == "reset" else session.count + 1
        text = message["data"].get("text", "") if kind != "mcp" else message["data"]["params"]["name"]
        eid, t, delivery = self.deliver(session, kind, text)
        if fault == "cut":
            await socket.close(1012)
            return False
        if fault == "mute":
            self.muted.release()
            await asyncio.Event().wait()
        head = {"type": "mcp" if kind == "mcp" else "observation", "eid": eid, "t": t, "digest": delivery.digest}
        if fault == "unstamped":
            head = {"type": head["type"]}
        if fault == "wrong_type":
            head["type"] = "state"
        payload = delivery.payload.replace(b"count", b"COUNT") if fault == "garble" else delivery.payload
        await socket.send_text(splice(head, payload))
        return True

    def live(self, session: Session) -> str:
        """Upstream's state reply."""
        return json.dumps({"type": "state", "data": {"episode_id": None, "step_count": session.count}})

    def replay(self, session: Session, wanted: dict[str, Any]) -> str:
        """The state_at reply; other sessions' episodes are unknown to the socket."""
        eid, t = wanted.get("eid", session.eid), wanted["t"]
        if eid is None:
            return error("no reset yet", "NO_RESET")
        if eid != session.eid or eid not in self.episodes:
            return error(f"no episode {eid}", "UNKNOWN_EPISODE", eid=eid)
        deliveries = self.episodes[eid].deliveries
        if not 0 <= t < len(deliveries):
            return error(f"no t={t}", "T_OUT_OF_RANGE", eid=eid, t=t, deliveries=len(deliveries))
        d = deliveries[t]
        head = {"type": "state_at", "eid": eid, "t": t, "kind": d.kind, "digest": d.digest}
        return splice(head, d.payload)

    async def mcp(self, request: Request) -> Response:
        """Session life by JSON-RPC."""
        body = await request.json()
        match body["method"]:
            case "openenv/session/create":
                session = Session(uuid.uuid4().hex)
                self.sessions[session.id] = session
                result: dict[str, Any] = {"session_id": session.id}
            case "openenv/session/close":
                wanted = body["params"]["session_id"]
                if self.sessions.pop(wanted, None) is None:
                    rpc_error = {"code": -32602, "message": f"Unknown session_id: {wanted}"}
                    return JSONResponse({"jsonrpc": "2.0", "id": 1, "error": rpc_error})
                result = {"session_id": wanted, "closed": True}
        return JSONResponse({"jsonrpc": "2.0", "id": body["id"], "result": result})

    async def episode(self, request: Request) -> Response:
        """One episode and its turns."""
        eid = request.path_params["eid"]
        if eid not in self.episodes:
            return JSONResponse({"code": "UNKNOWN_EPISODE", "message": f"no episode {eid}"}, 404)
        episode = self.episodes[eid]
        turns = [{"t": t, "kind": d.kind, "digest": d.digest} for t, d in enumerate(episode.deliveries)]
        head = {"eid": eid, "environment": "counter", "session": "0" * 12, "created": 0.0, "origin": episode.origin}
        return JSONResponse({**head, "deliveries": len(turns), "turns": turns})

    async def state(self, request: Request) -> Response:
        """P_t as the whole body."""
        eid, t = request.path_params["eid"], request.path_params["t"]
        if eid not in self.episodes:
            return JSONResponse({"code": "UNKNOWN_EPISODE", "message": f"no episode {eid}"}, 404)
        d = self.episodes[eid].deliveries[t]
        headers = {"ETag": f'"{d.digest}"', "X-Errata-T": str(t), "X-Errata-Kind": d.kind}
        return Response(d.payload, media_type="application/json", headers=headers)

    async def fork(self, request: Request) -> Response:
        """Fork once for each request_id."""
        body, eid = await request.json(), request.path_params["eid"]
        self.fork_requests.append(body["request_id"])
        if eid not in self.episodes or body["t"] >= len(self.episodes[eid].deliveries):
            return JSONResponse({"code": "T_OUT_OF_RANGE", "message": "no such t", "eid": eid}, 404)
        if body["request_id"] not in self.forks:
            parent = self.episodes[eid]
            child = Session(uuid.uuid4().hex, count=parent.count_at(body["t"]), eid=uuid.uuid4().hex)
            origin = {"eid": eid, "t": body["t"]}
            self.sessions[child.id] = child
            self.episodes[child.eid or ""] = Episode([self.episodes[eid].deliveries[body["t"]]], origin)
            reply = {"session_id": child.id, "eid": child.eid, "t": 0, "origin": origin}
            self.forks[body["request_id"]] = reply
        if self.broken_forks:
            self.broken_forks -= 1
            return Response(b"", headers={"content-length": "999"})  # less than announced: the connection breaks
        return JSONResponse(self.forks[body["request_id"]])


def splice(head: dict[str, Any], payload: bytes) -> str:
    """Put ``data`` first, where the order of keys is not what a client might count on."""
    return '{"data" :' + payload.decode() + "," + json.dumps(head)[1:]


def error(message: str, code: str, **details: Any) -> str:
    """An error frame."""
    return json.dumps({"type": "error", "data": {"message": message, "code": code, **details}})

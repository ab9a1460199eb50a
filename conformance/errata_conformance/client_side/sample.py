"""A small client that follows R-014, R-015 and R-016, driven by JSON lines; ``--defect NAME`` makes it
break a statement."""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import sys
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.typing import Subprotocol

from ..exact import digest, elements, encode, members
from ..server_side.sockets import name
from ..server_side.target import MUX

DEFECTS: dict[str, tuple[str, str]] = {
    "no-offer": ("R-016-1", "offers no subprotocol"),
    "mux-anyway": ("R-016-1", "speaks in envelopes where the subprotocol is not named"),
    "closed-by-unknown-type": ("R-015-7", "ends its session when capabilities is UNKNOWN_TYPE"),
    "known-kinds-only": ("R-014-12", "takes an observation with an unknown kind for invalid"),
    "strict-fields": ("R-016-4", "ends where a message has a field that it does not know"),
    "strict-types": ("R-016-4", "ends where a message has a type that it does not know"),
    "ids-over-sessions": ("R-016-15", "counts ids over all its sessions"),
    "ids-per-episode": ("R-016-15", "counts ids from 1 in each episode"),
    "new-id-after-cut": ("R-016-22", "sends a request again under another id"),
    "gives-up-after-cut": ("R-016-22", "does not come back"),
    "forgets-unsent": ("R-016-22", "does not send again what was not accepted"),
    "opens-anew": ("R-016-22", "opens another session after a cut"),
    "one-fence": ("R-016-28", "sends the same fence with each attach"),
    "refusal-is-reply": ("R-016-18", "takes a refusal for the reply"),
    "refusal-takes-next": ("R-016-18", "sends a refused request under the next id"),
    "unknown-code-again": ("R-016-40", "sends a request again on a code that it does not know"),
    "any-reply": ("R-016-24", "does not compare `request`"),
    "no-parts": ("R-016-33", "does not put parts together"),
    "reads-the-last": ("R-015-9", "reads the last delivery whatever t it is asked for"),
    "forks-the-last": ("R-016-39", "forks the last delivery whatever t it is asked for"),
    "child-unopened": ("R-016-10", "steps in a child that it has not opened"),
    "one-request-id": ("R-015-19", "has one request_id for all forks of an episode"),
    "no-digest": ("R-015-13", "does not compute digests"),
    "child-unchecked": ("R-015-24", "steps in a child without asking where it stands"),
}
"""Name -> (what it breaks, what it does)."""
KNOWN_FIELDS = {"sid", "id", "q", "type", "data", "eid", "t", "digest", "kind", "seq", "index", "request"}
ANSWERS = {"opened", "resumed", "observation", "state", "state_at", "forked", "closed", "error"}
KNOWN_TYPES = ANSWERS | {"reward", "detached", "goaway", "capabilities", "part"}
RECORDED = {"VALIDATION_ERROR", "EXECUTION_ERROR", "PRECONDITION_FAILED", "TIMEOUT", "CANCELLED", "NOT_SUPPORTED"}
RECORDED |= {"T_OUT_OF_RANGE", "NO_RESET", "UNKNOWN_EPISODE", "ENV_OUTPUT_INVALID", "REPLY_EXPIRED"}
REFUSED = {
    "OUT_OF_ORDER",
    "CONFLICT",
    "NOT_ATTACHED",
    "OVERLOADED",
    "CAPACITY_REACHED",
    "JOURNAL_UNAVAILABLE",
    "MISDIRECTED",
}


class Stopped(Exception):
    """A defect makes the client stop."""


@dataclass
class Session:
    """A session of the client."""

    sid: str = field(default_factory=name)
    key: str = field(default_factory=name)
    fence: int = 0
    last: int = 0
    last_seq: int = 0
    acknowledged: int = 0
    next_id: int = 1
    q: int = 0
    t: int = 0
    socket: Any = None


class Client:
    """A client that uses a multiplexed socket if the server accepts the subprotocol, else a plain socket for each
    session.

    Args:
        url: Base URL of the server.
        defect: Name of its defect, or None.
    """

    def __init__(self, url: str, defect: str | None) -> None:
        self.url, self.defect = url, defect
        self.sessions: dict[str, Session] = {}
        self.mux: ClientConnection | None = None
        self.plain = False
        self._waiting: list[str] = []
        self._parts: dict[tuple[Any, ...], list[str]] = {}
        self._of: ClientConnection | None = None

    def wrong(self, name: str) -> bool:
        """Return whether the client has this defect."""
        return self.defect == name

    async def connect(self, query: str = "", offer: bool = True) -> ClientConnection:
        """Connect to ``/ws``."""
        offered = [Subprotocol(MUX)] if offer and not self.wrong("no-offer") else None
        where = self.url.replace("http", "ws", 1) + "/ws" + query
        return await connect(where, subprotocols=offered, max_size=None, proxy=None, ping_interval=None)

    async def handle(self, line: dict[str, Any]) -> dict[str, Any]:
        """Execute a request and return the answer."""
        session = self.sessions.setdefault(line["session"], Session())
        kind, data = line["type"], line.get("data", {})
        if self.mux is None and not self.plain:
            self.mux = await self.connect()
            self.plain = self.mux.subprotocol != MUX and not self.wrong("mux-anyway")
            if self.plain:
                session.socket, self.mux = self.mux, None
                await self.probe(session)
        if self.plain:
            return await self.handle_plain(session, kind, data)
        if self.wrong("forks-the-last" if kind == "fork" else "reads-the-last") and kind in ("fork", "state"):
            data = {**data, "t": session.t}
        if kind != "fork":
            return await self.handle_mux(session, kind, data)
        child = self.sessions[data["child"]] = Session(fence=1 if self.wrong("child-unopened") else 0)
        return await self.handle_mux(session, kind, {"t": data["t"], "child": {"sid": child.sid, "key": child.key}})

    # A plain socket

    async def probe(self, session: Session) -> dict[str, Any]:
        """Send a ``capabilities`` message and return the reply's ``data``.

        A server without the extension replies with an error (UNKNOWN_TYPE); the result is then ``{}``.
        """
        await session.socket.send('{"type":"capabilities"}')
        reply = json.loads(await session.socket.recv())
        if reply["type"] == "error" and self.wrong("closed-by-unknown-type"):
            raise Stopped
        return reply["data"] if reply["type"] == "capabilities" else {}

    async def handle_plain(self, session: Session, kind: str, data: Any) -> dict[str, Any]:
        """Execute a request on a plain socket."""
        if session.socket is None:
            session.socket = await self.connect(offer=False)
        if kind == "fork":
            return await self.fork(session, data)
        await session.socket.send(encode({"type": kind, **({} if kind == "close" else {"data": data})}))
        if kind == "close":
            return {"type": "closed", "data": {}}
        text = await session.socket.recv()
        reply = json.loads(text)
        return self.checked(reply, text)

    async def fork(self, session: Session, data: dict[str, Any]) -> dict[str, Any]:
        """Fork over HTTP and attach the child; return the server's error if it answers with one."""
        place = (await self.probe(session)).get("session")
        if not place:
            return {"type": "error", "data": {"code": "NOT_SUPPORTED"}}
        request_id = place["eid"] if self.wrong("one-request-id") else name()
        status, text = await asyncio.to_thread(
            self.post, f"/episodes/{place['eid']}/fork", encode({"t": data["t"], "request_id": request_id})
        )
        made = decoded(text)
        if status >= 300 or not {"session_id", "eid"} <= set(made):
            unnamed = {"code": f"HTTP_{status}", "message": f"the fork was answered with {text}"}
            return {"type": "error", "data": made if "code" in made else unnamed}
        child = Session()
        child.socket = await self.connect(f"?session_id={made['session_id']}", offer=False)
        here = (await self.probe(child)).get("session") or {}
        if here.get("eid") != made["eid"] and not self.wrong("child-unchecked"):
            return {"type": "error", "data": {"code": "SESSION_LOST", "message": "the server gave another environment"}}
        self.sessions[data["child"]] = child
        return {"type": "forked", "data": made}

    def post(self, path: str, body: str) -> tuple[int, str]:
        """Send a POST request with a JSON body, and return the status and the body of the response.

        Args:
            path: Path of the request, from the root of the host.
            body: The JSON text to send.

        Raises:
            OSError: The server cannot be reached, or did not answer within 10 s.
        """
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
        try:
            connection.request("POST", path, body.encode(), {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        except http.client.HTTPException as error:
            raise OSError(f"POST {path}: {type(error).__name__}: {error}") from None
        finally:
            connection.close()

    # A multiplexed socket

    async def handle_mux(self, session: Session, kind: str, data: Any) -> dict[str, Any]:
        """Execute a request on the multiplexed socket."""
        if session.fence == 0:
            await self.attach(session)
        if kind == "state":
            return await self.read(session, data)
        if kind == "reset" and self.wrong("ids-per-episode"):
            session.next_id = 1
        if self.wrong("ids-over-sessions"):
            session.next_id = max(one.next_id for one in self.sessions.values())
        id = session.next_id
        text = encode(data)
        while True:
            try:
                await self.send(session, id, kind, text)
                return await self.reply(session, id, kind, text)
            except Again as again:
                if again.wait_s:
                    await asyncio.sleep(again.wait_s)
                id = again.id or id
            except ConnectionClosed:
                if self.wrong("gives-up-after-cut"):
                    raise Stopped from None
                accepted = await self.come_back(session)
                if self.wrong("opens-anew"):
                    id = accepted
                elif self.wrong("new-id-after-cut"):
                    id += 1
                elif id < accepted:
                    try:
                        return await self.reply(session, id, kind, text)
                    except Again as again:
                        id = again.id or id
                elif self.wrong("forgets-unsent"):
                    return await self.reply(session, id, kind, text)

    async def send(self, session: Session, id: int, kind: str, text: str) -> None:
        """Send a request with an id, after an acknowledgement of the replies that came."""
        assert self.mux is not None
        if session.last > session.acknowledged:
            seen = {"last": session.last, "last_seq": session.last_seq}
            await self.mux.send(encode({"sid": session.sid, "type": "ack", "data": seen}))
            session.acknowledged = session.last
        await self.mux.send(f'{{"sid":"{session.sid}","id":{id},"type":"{kind}","data":{text}}}')

    async def attach(self, session: Session) -> int:
        """Open or resume a session and return its next_id."""
        assert self.mux is not None
        fresh = session.fence == 0 or self.wrong("opens-anew")
        if fresh and session.fence:
            session.sid, session.key, session.last, session.acknowledged, session.next_id = name(), name(), 0, 0, 1
        session.fence += 0 if self.wrong("one-fence") and session.fence else 1
        entry: dict[str, Any] = {"key": session.key, "fence": session.fence}
        if fresh:
            await self.mux.send(encode({"sid": session.sid, "type": "open", "data": entry}))
        else:
            entry |= {"sid": session.sid, "last": session.last, "last_seq": session.last_seq}
            await self.mux.send(encode({"type": "resume", "data": [entry]}))
        while True:
            text = await self.next()
            message = json.loads(text)
            if message["type"] in ("opened", "resumed"):
                return int(message["data"]["next_id"])
            if message["type"] == "error":
                raise Stopped

    async def come_back(self, session: Session) -> int:
        """Connect again and resume a session; return its next_id."""
        while True:
            try:
                self.mux = await self.connect()
                return await self.attach(session)
            except (OSError, ConnectionClosed, InvalidHandshake):
                await asyncio.sleep(0.05)

    async def reply(self, session: Session, id: int, kind: str, sent: str) -> dict[str, Any]:
        """Wait for the reply to a request.

        Raises:
            Again: It was refused and has to be sent again.
        """
        while True:
            text = await self.next()
            message = json.loads(text)
            if message.get("id") != id or message.get("sid") != session.sid:
                continue
            data = message["data"]
            if message["type"] == "error" and not self.wrong("refusal-is-reply"):
                code = data["code"]
                refusal = code in REFUSED or (code not in RECORDED and "next_id" in data)
                if code not in RECORDED | REFUSED and self.wrong("unknown-code-again"):
                    refusal = True
                if refusal:
                    raise Again(data.get("retry_after", 0.1), id + 1 if self.wrong("refusal-takes-next") else None)
            session.last, session.next_id = id, id + 1
            other = message.get("request") not in (None, digest(sent))
            if other and not self.wrong("any-reply"):
                raise Again(0.0, id + 1)
            self.check(message)
            session.t = message.get("t", session.t)
            return {"type": message["type"], "data": data}

    async def read(self, session: Session, data: Any) -> dict[str, Any]:
        """Read a delivery and verify its digest."""
        assert self.mux is not None
        session.q += 1
        await self.mux.send(encode({"sid": session.sid, "q": session.q, "type": "state", "data": data}))
        while True:
            text = await self.next()
            message = json.loads(text)
            if message.get("q") != session.q:
                continue
            return self.checked(message, text)

    def checked(self, message: dict[str, Any], text: str) -> dict[str, Any]:
        """Return the answer for a message; an error if its payload is not the one of its digest."""
        named = message.get("digest") if message["type"] == "state_at" else None
        if named not in (None, digest(members(text)["data"])) and not self.wrong("no-digest"):
            return {"type": "error", "data": {"code": "DIGEST", "message": "the payload is not the one of its digest"}}
        return {"type": message["type"], "data": message["data"]}

    def check(self, message: dict[str, Any]) -> None:
        """Stop at an observation with an unknown error kind, for the defect that accepts known ones only."""
        observation = message["data"].get("observation") or {}
        known = {None, "command_not_found", "own"}
        if self.wrong("known-kinds-only") and observation.get("error_kind") not in known:
            raise Stopped

    async def next(self) -> str:
        """Return the text of the next envelope, assembled if it came in parts."""
        assert self.mux is not None
        if self._of is not self.mux:  # what a lost connection began is lost with it
            self._waiting, self._parts, self._of = [], {}, self.mux
        while True:
            while self._waiting:
                text = self._waiting.pop(0)
                message = json.loads(text)
                if self.wrong("strict-fields") and set(message) - KNOWN_FIELDS:
                    raise Stopped
                if self.wrong("strict-types") and message["type"] not in KNOWN_TYPES:
                    raise Stopped
                if message["type"] == "part" and not self.wrong("no-parts"):
                    address = tuple(message.get(one) for one in ("sid", "id", "q", "seq"))
                    held = self._parts.setdefault(address, [])
                    held.append(message["data"]["text"])
                    if len(held) < message["data"]["of"]:
                        continue
                    return "".join(self._parts.pop(address))
                return text
            frame = await self.mux.recv()
            self._waiting += elements(frame if isinstance(frame, str) else frame.decode())


def decoded(text: str) -> dict[str, Any]:
    """Return the JSON object in a text, an empty one if there is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class Again(Exception):
    """A request has to be sent again.

    Args:
        wait_s: Time to wait before, in seconds.
        id: Id to use, or None for the same one.
    """

    def __init__(self, wait_s: float, id: int | None) -> None:
        super().__init__()
        self.wait_s, self.id = wait_s, id


async def main(url: str, defect: str | None) -> None:
    """Read requests and print answers until standard input ends."""
    client = Client(url, defect)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        asked = json.loads(line)
        try:
            answer = await client.handle(asked)
        except (ConnectionClosed, OSError) as error:
            answer = {"type": "error", "data": {"code": "CONNECTION", "message": str(error)}}
        print(json.dumps({"session": asked["session"], **answer}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m errata_conformance.client_side.sample", description=__doc__)
    parser.add_argument("--defect", choices=tuple(DEFECTS))
    parser.add_argument("url")
    asked = parser.parse_args()
    try:
        asyncio.run(main(asked.url, asked.defect))
    except Stopped:
        sys.exit(1)

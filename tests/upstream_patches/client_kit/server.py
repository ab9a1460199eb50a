"""The server that the client meets: the one of the proposals, on an environment that adds numbers, with faults."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol

from .watch import REQUESTS, Watch, content

Message = dict[str, Any]
OFFERS: dict[str, Message] = {"stock": {}, "a": {"delivery": 1}, "c": {"delivery": 1, "request_id": 1}}
"""What a server has in ``extensions``, by the proposals that it knows. ``stock`` does not know ``capabilities``."""
BUSY_FOR = 2
"""How many sockets are refused while the first request of a fault ``busy`` runs."""
HOLD_S = 0.5
"""How long a reply is held back, where the scenario looks for a second request in flight."""


@dataclass
class Session:
    """A session and its environment.

    Args:
        id: The session's id.
        socket: The socket that counts as attached.
        refusals_left: How many more sockets are refused although the attached one is gone; None: all.
        attach_faults: What happens at the next attempts to attach: ``handshake`` or ``capabilities``.
        total: The sum, which is the environment's state.
        episodes: How many resets delivered.
        t: Number of the last delivery.
        recording: Whether ``capabilities`` was asked.
        kept: Frames of the current episode by their ``t``.
        replies: Requests and their frames by request id.
    """

    id: str
    socket: Socket | None = None
    refusals_left: int | None = 0
    attach_faults: list[str] = field(default_factory=list)
    total: int = 0
    steps: int = 0
    episodes: int = 0
    t: int | None = None
    recording: bool = False
    kept: dict[int, str] = field(default_factory=dict)
    replies: dict[str, tuple[Message, str]] = field(default_factory=dict)

    @property
    def position(self) -> Message:
        """``eid`` and ``t`` of A-4."""
        eid = f"ep-{self.episodes}" if self.episodes else None
        return {"eid": eid, "t": self.t}

    def execute(self, message: Message) -> tuple[Message, bool]:
        """Act on a request. Returns the reply without its numbers, and whether it is a delivery."""
        data, kind = message.get("data", {}), message["type"]
        if kind == "mcp":
            called = data.get("method") == "tools/call"
            if called:
                self.total += data["params"]["arguments"]["n"]
            result = (
                {"content": [{"type": "text", "text": str(self.total)}]} if called else {"tools": [{"name": "add"}]}
            )
            return {"type": "mcp", "data": {"jsonrpc": "2.0", "id": data.get("id"), "result": result}}, called
        if kind == "reset":
            self.total = self.steps = 0
            reward = None
        else:
            self.steps += 1
            reward = float(data["n"])
            if data["n"] < 0:
                self.steps -= 1
                return {"type": "error", "data": {"message": "n is negative", "code": "EXECUTION_ERROR"}}, False
            self.total += data["n"]
        observation = {"observation": {"metadata": {}, "total": self.total}, "reward": reward, "done": False}
        return {"type": "observation", "data": observation}, True

    def reply(self, message: Message, numbered: bool) -> str:
        """Execute a request and return its frame, which is kept where the session is asked to keep."""
        request_id = message.get("request_id")
        answer, delivers = self.execute(message)
        frame = {"type": answer["type"]}
        if delivers:
            if message["type"] == "reset" or not self.episodes:
                self.episodes += 1
                self.kept.clear()
            self.t = 0 if message["type"] == "reset" else (self.t or 0) + 1
            if numbered:
                frame |= {"eid": self.position["eid"], "t": self.t}
        if request_id is not None:
            frame["request_id"] = request_id
        text = json.dumps(frame | {"data": answer["data"]}, separators=(",", ":"))
        if delivers and self.recording:
            assert self.t is not None
            self.kept[self.t] = text
        if request_id is not None:
            self.replies[request_id] = (message, text)
        return text


class Server:
    """The server of one scenario.

    Args:
        watch: Looks at what the client sends, and names the faults.
        knows: Which proposals the server knows, a key of `OFFERS`.
        more: Whether it has names and fields in ``capabilities`` that the texts do not have.
        holds: Whether it holds replies back for `HOLD_S` or until the next request comes.
    """

    def __init__(self, watch: Watch, knows: str = "c", more: bool = False, holds: bool = False) -> None:
        self.watch, self.knows, self.more, self.holds = watch, knows, more, holds
        self.sessions: dict[str, Session] = {}
        self.created: list[str] = []
        self.closed: set[str] = set()
        self.sockets = itertools.count()
        self.url = ""

    def rpc(self, body: Message) -> Message:
        """Answer a ``POST /mcp``."""
        answer: Message = {"jsonrpc": "2.0", "id": body.get("id")}
        method, params = body.get("method"), body.get("params") or {}
        if method == "openenv/session/create":
            if params.get("for_socket") is not True:
                self.watch.fail("A-15", f"a session is created without for_socket: {params}")
            session_id = f"session-{len(self.created) + 1}"
            self.created.append(session_id)
            self.sessions[session_id] = Session(session_id)
            return answer | {"result": {"session_id": session_id}}
        session_id = params.get("session_id")
        if method != "openenv/session/close" or session_id not in self.created:
            return answer | {"error": {"code": -32602, "message": f"Unknown session_id: {session_id}"}}
        self.closed.add(session_id)
        if session_id not in self.sessions:
            return answer | {"error": {"code": -32602, "message": f"Unknown session_id: {session_id}"}}
        attached = self.sessions[session_id].socket is not None
        if not attached:
            del self.sessions[session_id]
        return answer | {"result": {"session_id": session_id, "closed": not attached, "closing": attached}}

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one TCP connection: a POST, or a WebSocket."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"POST "):
                body = await _body(head, reader)
                text = json.dumps(self.rpc(json.loads(body))).encode()
                lines = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n"
                writer.write(f"{lines}connection: close\r\n\r\n".encode() + text)
                await writer.drain()
            else:
                await Socket(self, reader, writer).serve(head)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client went away, which it may
        finally:
            writer.close()


async def _body(head: bytes, reader: asyncio.StreamReader) -> bytes:
    pairs = [line.partition(":") for line in head.decode("latin-1").lower().split("\r\n")[1:]]
    headers = {name.strip(): value.strip() for name, _, value in pairs}
    if headers.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(headers.get("content-length", "0")))
    body = b""
    while size := int((await reader.readline()).split(b";")[0], 16):
        body += await reader.readexactly(size)
        await reader.readline()
    return body


class Socket:
    """A WebSocket of the client.

    Args:
        server: The server.
        reader: What comes from the client.
        writer: What goes to it.
    """

    def __init__(self, server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.server, self.reader, self.writer = server, reader, writer
        self.protocol = ServerProtocol(max_size=None)
        self.session: Session | None = None
        self.number = -1
        self.asked = False
        self.executing: str | None = None  # id of the request that came and was not answered
        self.held: list[str] = []  # replies that the client has not got on this socket
        self.text = b""
        self.queue: asyncio.Queue[str | None] = asyncio.Queue()

    def flush(self) -> None:
        """Send what the protocol has to send."""
        for data in self.protocol.data_to_send():
            if data and not self.writer.is_closing():
                self.writer.write(data)

    def send(self, text: str) -> None:
        """Send a frame."""
        self.protocol.send_text(text.encode())
        self.flush()

    def error(self, code: str, message: str, **more: Any) -> None:
        """Send an error frame; ``request_id`` stands beside its data."""
        beside = {"request_id": more.pop("request_id")} if more.get("request_id") is not None else {}
        self.send(json.dumps({"type": "error", **beside, "data": {"message": message, "code": code, **more}}))

    def cut(self) -> None:
        """Cut the connection."""
        self.writer.transport.abort()

    async def serve(self, head: bytes) -> None:
        """Do the handshake, attach, and answer messages until the connection ends."""
        self.protocol.receive_data(head)
        (request,) = self.protocol.events_received()
        assert isinstance(request, Request)
        named = parse_qs(urlsplit(request.path).query).get("session_id")
        session = self.server.sessions.get(named[0]) if named else None
        if session is not None and session.attach_faults[:1] == ["handshake"]:
            session.attach_faults.pop(0)
            self.cut()
            return
        self.protocol.send_response(self.protocol.accept(request))
        self.flush()
        refusal = self.attach(named[0], session) if named else None
        if refusal is not None:
            self.error("SESSION_ERROR", refusal)
            self.protocol.send_close(1000)
            self.flush()
        receiving = asyncio.create_task(self.receive())
        try:
            while (text := await self.queue.get()) is not None:
                if refusal is None:
                    await self.message(json.loads(text))
        finally:
            receiving.cancel()
            await asyncio.wait([receiving])
            if session is not None and session.socket is self and session.refusals_left == 0:
                session.socket = None

    def attach(self, session_id: str, session: Session | None) -> str | None:
        """Attach this socket. Returns why not, or None."""
        if session is None:
            return f"Unknown session_id: {session_id}"
        if session.socket is not None:
            if session.refusals_left:
                session.refusals_left -= 1
                if session.refusals_left == 0:
                    session.socket = None  # the request is done, and this attempt is the last one that is refused
            return f"Session {session_id} already has an attached WebSocket"
        session.socket, self.session, self.number = self, session, next(self.server.sockets)
        return None

    async def receive(self) -> None:
        """Put messages into the queue; None at the end of the connection."""
        try:
            while data := await self.reader.read(1 << 16):
                self.protocol.receive_data(data)
                for event in self.protocol.events_received():
                    assert isinstance(event, Frame)
                    if event.opcode in (Opcode.TEXT, Opcode.CONT):
                        self.text += event.data
                        if event.fin:
                            self.arrived(self.text.decode())
                            self.text = b""
                    elif event.opcode is Opcode.CLOSE:
                        self.queue.put_nowait(None)
                self.flush()
        except OSError:
            pass
        finally:
            self.queue.put_nowait(None)

    def arrived(self, text: str) -> None:
        """Queue a message, and notice a request that comes while another is being executed."""
        message = json.loads(text)
        if message.get("type") in REQUESTS:
            request_id = str(message.get("request_id"))
            if self.executing is None:
                self.executing = request_id
            elif request_id != self.executing:
                self.server.watch.fail("C-8", f"{text} was sent before the reply to the request before it")
        self.queue.put_nowait(text)

    async def message(self, message: Message) -> None:
        """Answer a message."""
        kind, session = message.get("type"), self.session
        if kind in REQUESTS:
            await self.request(message)
        elif kind == "state":
            data = {"episode_id": None, "step_count": session.steps if session else 0}
            self.send(json.dumps({"type": "state", "data": data}))
        elif kind == "capabilities" and self.server.knows != "stock":
            self.capabilities(message)
        elif kind == "delivery" and session is not None and self.asked:
            self.delivery(message, session)
        elif kind == "close":
            self.cut()
        else:
            self.error("UNKNOWN_TYPE", f"Unknown message type: {kind}")

    def capabilities(self, message: Message) -> None:
        """Answer ``capabilities`` (A-3, A-4), or cut the connection where that is due."""
        session = self.session
        data: Message = {"extensions": {}, "session": {"eid": None, "t": None}}
        if set(message) != {"type"}:
            self.server.watch.fail("A-3", f"the request for capabilities has other keys: {message}")
        elif session is not None and session.attach_faults[:1] == ["capabilities"]:
            session.attach_faults.pop(0)
            self.cut()
        else:
            if session is not None:
                self.asked = session.recording = True
                data = {"extensions": dict(OFFERS[self.server.knows]), "session": session.position}
            if self.server.more:
                data["extensions"] |= {"x.unknown": 7}
                data["session"] |= {"x_unknown": {"a": 1}}
                data |= {"x_unknown": [1, None]}
            self.send(json.dumps({"type": "capabilities", "data": data}, separators=(",", ":")))

    def delivery(self, message: Message, session: Session) -> None:
        """Answer ``delivery`` (A-7, A-8)."""
        self.server.watch.read = True
        data = message.get("data")
        if set(message) != {"type", "data"} or not isinstance(data, dict) or set(data) != {"t"}:
            self.server.watch.fail("A-7", f"delivery has other keys: {message}")
        elif type(data["t"]) is not int or data["t"] < 0:
            self.server.watch.fail("A-7", f"t of delivery is no JSON integer from 0 on: {message}")
        elif data["t"] in session.kept:
            self.send(session.kept[data["t"]])
        else:
            self.error("T_OUT_OF_RANGE", f"Delivery {data['t']} is not there", **session.position)

    async def request(self, message: Message) -> None:
        """Answer a reset, step or mcp message, or do the fault that is due."""
        watch, session = self.server.watch, self.session
        if session is None:
            watch.fail("interface", "a request was sent on a socket that is not attached to a session")
            return
        if self.server.knows != "c" and (message.get("data") or {}).get("method") == "openenv/session/create":
            data = {"jsonrpc": "2.0", "id": message["data"].get("id"), "result": {"session_id": session.id}}
            self.send(json.dumps({"type": "mcp", "data": data}))  # as OpenEnv, which makes none on a socket
            self.executing = None
            return
        fault = watch.seen(message, session.id, self.asked, self.number)
        if watch.failure is not None:
            return  # the scenario is over
        if fault == "lost":
            self.cut()
            return
        request_id = message.get("request_id")
        if fault is not None and fault.isupper():
            watch.refused = watch.decided = True
            self.executing = None
            beside = {} if fault == "VALIDATION_ERROR" else {"request_id": request_id}
            self.error(fault, "refused by the kit", **beside)
            return
        frame = self.reply(message, session)
        if fault in ("cut", "flap", "busy", "stuck", "gone"):
            if fault == "flap":
                session.attach_faults = ["handshake", "capabilities"]
            elif fault in ("busy", "stuck"):
                session.refusals_left = BUSY_FOR if fault == "busy" else None
            elif fault == "gone":
                del self.server.sessions[session.id]
            self.cut()
            return
        self.held.append(frame)
        if fault != "swallow":
            if self.server.holds:
                try:
                    async with asyncio.timeout(HOLD_S):
                        await watch.broken.wait()
                except TimeoutError:
                    pass  # no other request came meanwhile
            watch.decided = True
            for one in self.held:
                self.send(one)
            self.held.clear()
        self.executing = None

    def reply(self, message: Message, session: Session) -> str:
        """Return the frame for a request, which is executed unless its id is known."""
        request_id = message.get("request_id")
        if request_id in session.replies:
            first, frame = session.replies[request_id]
            if content(first) != content(message):
                refusal = {"message": f"request_id {request_id!r} was given to another request"}
                data = refusal | {"code": "REQUEST_ID_REUSED"}
                return json.dumps({"type": "error", "request_id": request_id, "data": data})
            return frame
        frame = session.reply(message, self.asked)
        self.server.watch.executed(json.loads(frame))
        return frame


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[None]:
    """Serve on a port of the system's choice; ``server.url`` has it."""
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await server.connection(reader, writer)
        except asyncio.CancelledError:
            pass  # the scenario is over
        finally:
            tasks.discard(task)

    listening = await asyncio.start_server(connected, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield
    finally:
        listening.close()
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

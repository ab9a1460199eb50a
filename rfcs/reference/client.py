"""A client of the multiplexed socket in one file, on websockets and the standard library: ``python client.py URL``.

It reads requests as JSON lines on stdin, ``{"session": "a", "type": "step", "data": {"n": 1}}``, and prints a JSON
line for each reply and push, with ``session`` in place of ``sid``. Requests of a session are pipelined. At the end of
its input it waits for the replies. A line may have ``if``, ``deadline_ms``, and for ``cancel`` the victim's ``id``. The
``child`` of a ``fork`` may be the name of a session.

Left out: plain sockets (every request is answered NOT_SUPPORTED where the server does not name the subprotocol) and
sending parts.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
import sys
from collections.abc import Callable
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

MUTATING = ("reset", "step", "fork", "close")  # and mcp tools/call
REFUSALS = {
    "OUT_OF_ORDER",
    "NOT_ATTACHED",
    "OVERLOADED",
    "CAPACITY_REACHED",
    "JOURNAL_UNAVAILABLE",
    "MISDIRECTED",
}  # to be sent again
TERMINAL = {"INVALID_ENVELOPE", "UNKNOWN_TYPE", "FRAME_TOO_LARGE", "INVALID_JSON"}  # never admitted; takes no id
MAX_LEVELS = 64  # of an envelope (R-016-5)
OVER = {"SESSION_LOST", "SESSION_CLOSED", "SESSION_EXPIRED"}
WAIT_S = 0.05  # before a reconnect or a resend, where the server names no time


def member(text: str, name: str) -> str:
    """Return the exact text of a member of a JSON object (R-015-13)."""
    decoder, at = json.JSONDecoder(), text.index("{") + 1
    while True:
        key, at = decoder.raw_decode(text, re.compile(r"[\s,]*").match(text, at).end())
        start = re.compile(r"\s*:\s*").match(text, at).end()
        _, at = decoder.raw_decode(text, start)
        if key == name:
            return text[start:at]


def digest(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def envelopes(frame: str) -> list[str]:
    """Return the exact texts of a frame's envelopes (R-016-3)."""
    if not frame.lstrip().startswith("["):
        return [frame]
    decoder, at, found = json.JSONDecoder(), frame.index("[") + 1, []
    while frame[at := re.compile(r"[\s,]*").match(frame, at).end()] != "]":
        start, (_, at) = at, decoder.raw_decode(frame, at)
        found.append(frame[start:at])
    return found


def levels(value: Any) -> int:
    """Return how deeply arrays and objects are nested; 0 for any other value."""
    deep, layer = 0, [value]
    while layer := [one for one in layer if isinstance(one, dict | list)]:
        deep += 1
        layer = [inner for one in layer for inner in (one.values() if isinstance(one, dict) else one)]
    return deep


class Session:
    """One session: what was sent and has no reply yet, and what was received."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sid, self.key = secrets.token_urlsafe(18), secrets.token_urlsafe(18)  # 144 random bits each (R-016-8)
        self.fence = self.last = self.last_seq = 0
        self.sent: dict[int, str] = {}  # id -> envelope as sent: a resend has the same bytes (R-016-16)
        self.reads: dict[int, str] = {}  # q -> envelope
        self.opened = self.attaching = self.resuming = False
        self.unanswered: set[int] = set()  # sent on this connection, neither replied to nor refused
        self.again: int | None = None  # the first id to send again, once what was sent behind it is refused too
        self.wait = 0.0
        self.dropped: set[int] = set()  # never admitted: the ids behind them move up
        self.resending: asyncio.TimerHandle | None = None
        self.next_id = 1

    def renumber(self) -> None:
        """Move up the ids behind those that were dropped: no request of these ids was admitted (R-016-47)."""
        if not self.dropped:
            return
        at, sent = min(self.dropped), self.sent
        self.sent = {id: text for id, text in sent.items() if id < at}
        for id in sorted(id for id in sent if id > at and id not in self.dropped):
            self.sent[at] = json.dumps(json.loads(sent[id]) | {"id": at})
            at += 1
        self.next_id, self.dropped = at, set()


class Client:
    """Sessions on one connection at a time; it reconnects until each request has its reply.

    Args:
        url: ``ws://HOST/ws``.
        say: Called with each reply and push.
    """

    def __init__(self, url: str, say: Callable[[dict[str, Any]], None]) -> None:
        self.url, self.say = url, say
        self.sessions: dict[str, Session] = {}
        self.by_sid: dict[str, Session] = {}
        self.parts: dict[tuple[Any, ...], list[str]] = {}
        self.socket: ClientConnection | None = None
        self.pending: asyncio.Queue[str] = asyncio.Queue()
        self.idle = asyncio.Event()
        self.next_q = 1
        self.pause = WAIT_S
        self.plain = False  # the server does not name the subprotocol

    # -- requests --

    def request(self, line: dict[str, Any]) -> None:
        """Number a request and send it; it is sent again until it has its reply."""
        session = self.sessions.setdefault(line["session"], Session(line["session"]))
        self.by_sid[session.sid] = session
        if self.plain:
            self.fail(session, "NOT_SUPPORTED", "the server does not name openenv.mux.v1: use a plain socket")
            return
        kind, data = line["type"], line.get("data", {})
        if kind == "fork" and isinstance(data, dict) and isinstance(data.get("child"), str):
            child = self.sessions.setdefault(data["child"], Session(data["child"]))  # its first request opens it
            data = data | {"child": {"sid": child.sid, "key": child.key}}
        try:  # what would make the whole frame unreadable, and so name no request
            json.dumps(line, allow_nan=False)
            too_deep = levels(line) > MAX_LEVELS
        except (ValueError, RecursionError):
            too_deep = True
        if too_deep:
            self.fail(session, "VALIDATION_ERROR", f"no JSON, or more than {MAX_LEVELS} levels")
            return
        envelope = {"sid": session.sid, "type": kind}
        if kind in ("cancel", "ack"):
            self.put(json.dumps(envelope | ({"id": line["id"]} if kind == "cancel" else {"data": data})))
            return
        if kind in MUTATING or (kind == "mcp" and isinstance(data, dict) and data.get("method") == "tools/call"):
            envelope |= {"id": session.next_id}  # from 1, without a gap (R-016-15)
            session.next_id += 1
        else:
            envelope |= {"q": self.next_q}
            self.next_q += 1
        envelope |= {k: line[k] for k in ("if", "deadline_ms") if k in line} | {"data": data}
        text = json.dumps(envelope)
        (session.sent if "id" in envelope else session.reads)[envelope.get("id") or envelope["q"]] = text
        self.idle.clear()
        if not session.opened:
            self.attach([session])
        if "id" not in envelope:
            self.put(text)
        elif session.again is None and not session.resuming:  # otherwise it goes with what is sent again
            self.send(session, envelope["id"])  # may follow its open at once (R-016-11)

    def send(self, session: Session, id: int) -> None:
        if self.socket is not None:
            session.unanswered.add(id)
            self.put(session.sent[id])

    def put(self, text: str) -> None:
        if self.socket is not None:
            self.pending.put_nowait(text)

    def attach(self, sessions: list[Session]) -> None:
        """Open or resume, each with a higher fence (R-016-28)."""
        if self.socket is None:
            return
        resumed = []
        for session in sessions:
            session.fence += 1
            place = {"key": session.key, "fence": session.fence}
            if session.last == 0 and session.last_seq == 0:  # a repeated open is the same session (R-016-7)
                self.put(json.dumps({"sid": session.sid, "type": "open", "data": place}))
            else:
                seen = {"last": session.last, "last_seq": session.last_seq}
                resumed.append({"sid": session.sid, **place, **seen})
                session.resuming = True
            session.opened = session.attaching = True
        if resumed:
            self.put(json.dumps({"type": "resume", "data": resumed}))

    def resend(self, session: Session, start: int) -> None:
        """Send the ids from ``start`` on again, in order: go-back-n (R-016-18)."""
        session.resending = session.again = None
        session.unanswered = {id for id in session.unanswered if id < start}
        session.renumber()
        for id in sorted(session.sent):
            if id >= start:
                self.send(session, id)
        self.settled()

    # -- replies --

    def receive(self, text: str) -> None:
        """Take one envelope; unknown types and fields are ignored (R-016-4)."""
        envelope = json.loads(text)
        kind, data = envelope.get("type"), envelope.get("data")
        session = self.by_sid.get(envelope.get("sid") or "")
        if session is None:  # a read may be answered without sid: q alone names it
            session = next((s for s in self.sessions.values() if envelope.get("q") in s.reads), None)
        if kind == "part":  # R-016-33
            address = tuple(envelope.get(k) for k in ("sid", "id", "q", "seq"))
            texts = self.parts.setdefault(address, [])
            texts.append(data["text"])
            if len(texts) == data["of"]:
                self.receive("".join(self.parts.pop(address)))
            return
        forged = "digest" in envelope and envelope["digest"] != digest(member(text, "data"))
        if forged and session is not None:  # it is not used (R-015-13)
            session.reads.pop(envelope.get("q"), None)
            session.sent.pop(envelope.get("id"), None)
            self.fail(session, "DIGEST_MISMATCH", "a payload has another digest than it names")
            return
        if session is None:
            if kind == "error" and envelope.get("sid") is None and data.get("code") in (*TERMINAL, "OVERLOADED"):
                self.frame_refused(data)
            elif kind in ("goaway", "error"):
                self.say(envelope)
            return
        if kind in ("opened", "resumed"):
            session.attaching = session.resuming = False
            self.resend(session, data["next_id"]) if kind == "resumed" else None
            for read in session.reads.values() if kind == "resumed" else ():
                self.put(read)
        elif kind == "error" and "id" not in envelope and "q" not in envelope:  # of open or resume
            if session.attaching and "index" not in envelope:  # otherwise of an ack or a cancel, which need no answer
                session.attaching = False
                self.over(session, envelope)
        elif "id" in envelope:
            self.answered(session, envelope)
        elif "q" in envelope:
            if session.reads.pop(envelope["q"], None) is not None:
                self.tell(session, envelope)
        elif kind == "reward" and envelope["seq"] == session.last_seq + 1:  # once each (R-016-37)
            session.last_seq = envelope["seq"]
            self.tell(session, envelope)
        elif kind == "detached":
            self.over(session, envelope)
        self.settled()

    def settled(self) -> None:
        if not any(s.sent or s.reads for s in self.sessions.values()):
            self.idle.set()

    def answered(self, session: Session, envelope: dict[str, Any]) -> None:
        id, data = envelope["id"], envelope.get("data")
        code = data.get("code") if envelope["type"] == "error" else None
        session.unanswered.discard(id)
        if id not in session.sent or id in session.dropped:
            return  # a repeat of what was answered
        if code in REFUSALS | TERMINAL:
            if code in TERMINAL:  # another try would be refused again: it fails, and its id is the next request's
                session.dropped.add(id)
                self.tell(session, envelope)
            start = min(data.get("next_id", id), id)
            session.again = start if session.again is None else min(session.again, start)
            session.wait = max(data.get("retry_after") or WAIT_S, session.wait)
            self.go_back(session)
            return
        if id != session.last + 1:
            raise ValueError(f"reply {id} of a session came after {session.last}")  # R-016-19
        if "request" in envelope and envelope["request"] != digest(member(session.sent[id], "data")):
            session.sent.clear()  # another process spoke for the session; none of these was accepted (R-016-24)
            self.fail(session, "SESSION_LOST", f"request {id} of another process stands in the place of ours")
            return
        del session.sent[id]
        session.last = id
        self.tell(session, envelope)
        self.go_back(session)
        if envelope["type"] != "closed":
            seen = {"last": id, "last_seq": session.last_seq}
            self.put(json.dumps({"sid": session.sid, "type": "ack", "data": seen}))  # R-016-21
        if code in OVER:
            self.over(session, envelope)

    def go_back(self, session: Session) -> None:
        """Send again from the refused id on, once everything behind it was refused too: a later refusal would be taken
        for one of the second round."""
        start = session.again
        if start is None or session.resending is not None or any(id >= start for id in session.unanswered):
            return
        wait, session.wait = session.wait, 0.0
        session.resending = asyncio.get_running_loop().call_later(wait, self.resend, session, start)

    def frame_refused(self, data: dict[str, Any]) -> None:
        """A frame was not read, and which one is not said: resume on another connection (R-016-48).

        The largest request fails where a frame was too large. The one that was refused is no larger, so that a second
        try of the largest would be refused as well.
        """
        if self.socket is None:
            return  # it is being left
        if data["code"] == "FRAME_TOO_LARGE":
            of = [
                (len(text), s, n, kept)
                for s in self.sessions.values()
                for kept in (s.sent, s.reads)
                for n, text in kept.items()
            ]
            _, session, number, kept = max(of, key=lambda one: one[0])
            session.dropped.add(number) if kept is session.sent else session.reads.pop(number)
            self.fail(session, data["code"], data.get("message", ""))
        self.pause = data.get("retry_after") or WAIT_S
        self.socket.transport.abort()
        self.socket = None

    def over(self, session: Session, envelope: dict[str, Any]) -> None:
        """The session does not go on for this client: nothing of it is sent again."""
        session.sent.clear()
        session.reads.clear()
        session.dropped.clear()
        session.again, session.resuming = None, False
        self.tell(session, envelope)

    def fail(self, session: Session, code: str, message: str) -> None:
        """Report an error of the client's own."""
        self.say({"session": session.name, "type": "error", "data": {"code": code, "message": message}})

    def tell(self, session: Session, envelope: dict[str, Any]) -> None:
        self.say({"session": session.name} | {k: v for k, v in envelope.items() if k != "sid"})

    # -- connection --

    async def run(self) -> None:
        """Connect, and again after each loss; ends by being cancelled."""
        while True:
            try:
                async with connect(self.url, subprotocols=["openenv.mux.v1"], max_size=None) as socket:
                    if socket.subprotocol != "openenv.mux.v1":  # R-016-1
                        self.plain = True
                        for session in self.sessions.values():
                            for _ in range(len(session.sent) + len(session.reads)):
                                self.fail(session, "NOT_SUPPORTED", "the server does not name openenv.mux.v1")
                            session.sent.clear()
                            session.reads.clear()
                        self.idle.set()
                        return
                    self.socket, self.pending, self.parts = socket, asyncio.Queue(), {}
                    for session in self.sessions.values():
                        if session.resending is not None:
                            session.resending.cancel()
                        session.resending, session.again, session.wait, session.unanswered = None, None, 0.0, set()
                        session.resuming = False
                        session.renumber()
                    self.settled()
                    again = [s for s in self.sessions.values() if s.sent or s.reads]
                    fresh = [s for s in again if s.last == 0 and s.last_seq == 0]
                    self.attach(again)
                    for session in fresh:  # an open re-sends replies; equal repeats change nothing (R-016-16)
                        self.resend(session, 1)
                        for read in session.reads.values():
                            self.put(read)
                    for session in self.sessions.values():
                        session.opened = session in again
                    writer = asyncio.create_task(self.write(socket))
                    try:
                        async for frame in socket:
                            for text in envelopes(str(frame)):
                                self.receive(text)
                    finally:
                        writer.cancel()
            except (OSError, WebSocketException):
                pass
            self.socket = None
            await asyncio.sleep(self.pause)
            self.pause = WAIT_S

    async def write(self, socket: ClientConnection) -> None:
        while True:
            await socket.send(await self.pending.get())


async def main(url: str) -> None:
    """Read requests from stdin until its end; return when each has its reply."""
    address = re.sub("^http", "ws", url)
    client = Client(
        address if address.endswith("/ws") else address.rstrip("/") + "/ws", lambda e: print(json.dumps(e), flush=True)
    )
    running = asyncio.create_task(client.run())
    while line := await asyncio.to_thread(sys.stdin.readline):
        if running.done():
            break
        client.request(json.loads(line))
    if any(s.sent or s.reads for s in client.sessions.values()):
        await asyncio.wait([running, asyncio.create_task(client.idle.wait())], return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    running.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

"""Multiplexed sockets and their sessions."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..exact import digest, elements, encode, members
from .episodes import LIMITS, Episode, Instance, Refusal, World

NAME = re.compile(r"[A-Za-z0-9_-]{21,128}")
PART = 256 * 1024
ZERO = "sha256:" + "0" * 64
TYPES: dict[str, tuple[bool | None, str | None]] = {  # sid (None: optional), number
    "open": (True, None),
    "resume": (False, None),
    "ack": (True, None),
    "cancel": (True, "id"),
    "reset": (True, "id"),
    "step": (True, "id"),
    "close": (True, "id"),
    "fork": (True, "id"),
    "mcp": (True, "any"),
    "state": (True, "q"),
    "rewards": (True, "q"),
    "capabilities": (None, "q"),
    "close_group": (False, "q"),
    "part": (None, "any"),
}
OWN_DATA: dict[str, type] = {
    "open": dict,
    "resume": list,
    "ack": dict,
    "state": dict,
    "rewards": dict,
    "close_group": dict,
    "part": dict,
}


def is_name(value: Any) -> bool:
    """Return whether a value is a sid, key or group."""
    return isinstance(value, str) and NAME.fullmatch(value) is not None


def is_number(value: Any, low: int = 1) -> bool:
    """Return whether a value is an integer of the protocol."""
    return type(value) is int and low <= value < 2**53


@dataclass
class Request:
    """A numbered request that was accepted."""

    kind: str
    data: str
    condition: dict[str, Any] | None
    deadline_ms: int | None
    attachment: int
    came: float = field(default_factory=time.monotonic)
    reply: tuple[dict[str, Any], str] | None = None
    cancelled: bool = False
    running: bool = False
    acknowledged: bool = False
    sent: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)


class MuxSession(Instance):
    """A session of a multiplexed socket."""

    def __init__(self, world: World, owner: str | None, sid: str, key: str, group: str | None) -> None:
        super().__init__(world, owner)
        self.sid, self.key, self.group = sid, key, group
        self.socket: Socket | None = None
        self.others: set[Socket] = set()
        self.fence, self.attachment, self.answered = 0, 0, 0
        self.over: str | None = None
        self.requests: dict[int, Request] = {}
        self.next_id, self.reads = 1, set[int]()
        self.pushes: list[dict[str, Any]] = []
        self.seq, self.last_seq = 0, 0
        self.queue: asyncio.Queue[int] = asyncio.Queue()
        self.worker = asyncio.create_task(self.work())

    def new_eid(self) -> str:
        """Return the eid of a new episode."""
        return "ep_of_every_episode" if self.world.wrong("mux-one-eid") else super().new_eid()

    def position(self) -> dict[str, Any]:
        """Return the data of opened and resumed."""
        rest = {"seq": self.seq, "recovery": self.world.recovery, "fence": self.fence}
        return {"next_id": self.next_id, **self.place, **rest}

    def say(self, head: dict[str, Any], payload: str) -> None:
        """Send a message to the socket that the session is attached to."""
        if self.socket is not None:
            self.socket.send({"sid": self.sid, **head}, payload)

    # Requests

    def request(self, id: int, message: dict[str, Any], data: str, socket: Socket) -> None:
        """Admit a request with an id.

        Raises:
            Refusal: It is not admitted.
        """
        wrong, kind = self.world.wrong, message["type"]
        known = self.requests.get(id)
        if known is not None and not (wrong("repeat-runs") and known.reply is not None):
            self.repeated(id, known, kind, data)
            return
        if id > self.next_id and not wrong("gaps-pass"):
            fields: dict[str, Any] = {} if wrong("order-without-next") else {"next_id": self.next_id}
            raise Refusal("OUT_OF_ORDER", **fields)
        waiting = sum(one.reply is None for one in self.requests.values())
        if waiting >= LIMITS["in_flight_session"] and not wrong("no-session-bound"):
            fields = {} if wrong("overloaded-without-time") else {"retry_after": 0.1}
            raise Refusal("OVERLOADED", **fields)
        condition = message.get("if")
        if condition is not None and wrong("if-at-admission"):
            self.check(condition)
            condition = None
        self.next_id = id + 1
        request = Request(kind, data, condition, message.get("deadline_ms"), self.attachment)
        self.requests[id] = request
        if request.deadline_ms == 0 and wrong("replies-overtake"):
            self.finish(id, {"type": "error"}, encode(Refusal("TIMEOUT").data))
        elif wrong("runs-at-once"):
            socket.tasks.add(asyncio.create_task(self.run(id)))
        else:
            self.queue.put_nowait(id)

    def repeated(self, id: int, known: Request, kind: str, data: str) -> None:
        """Answer a request whose id was used before.

        Raises:
            Refusal: It is another request, or its reply was deleted.
        """
        wrong = self.world.wrong
        alike = json.loads if wrong("true-is-one") else _canonical
        same = known.kind == kind and (known.data == data or alike(known.data) == alike(data))
        if wrong("spaces-conflict"):
            same = (known.kind, known.data) == (kind, data)
        if not same and not wrong("repeat-unchecked"):
            raise Refusal("CONFLICT", next_id=self.next_id)
        if known.acknowledged:
            raise Refusal("REPLY_EXPIRED")
        if known.reply is not None:
            self.reply(id)

    def check(self, condition: dict[str, Any]) -> None:
        """Compare `if` with the session's position.

        Raises:
            Refusal: They differ.
        """
        wanted = {
            k: v
            for k, v in condition.items()
            if v is not None and not (k == "eid" and self.world.wrong("if-without-eid"))
        }
        if {**self.place, **wanted} != self.place and not self.world.wrong("if-ignored"):
            raise Refusal("PRECONDITION_FAILED", **self.place)

    async def work(self) -> None:
        """Run requests one at a time, in the order of their ids."""
        while True:
            id = await self.queue.get()
            await self.run(id)

    async def run(self, id: int) -> None:
        """Run one request and send its reply."""
        request = self.requests.get(id)
        if request is None or request.reply is not None:
            return
        try:
            if request.cancelled:
                raise Refusal("CANCELLED")
            head, payload = await self.bounded(request)
        except Refusal as error:
            head, payload = {"type": "error"}, encode(error.data)
        if request.cancelled and self.world.wrong("cancel-out-of-turn"):
            request.reply = (head, payload)
            request.done.set()
            return
        self.finish(id, head, payload)

    async def bounded(self, request: Request) -> tuple[dict[str, Any], str]:
        """Run a request with its deadline."""
        left: float | None = None
        if request.deadline_ms is not None and not self.world.wrong("deadline-ignored"):
            since = time.monotonic() if self.world.wrong("deadline-from-turn") else request.came
            left = since + request.deadline_ms / 1000 - time.monotonic()
            if (left <= 0 and request.deadline_ms != 0) or request.deadline_ms == 0:
                raise Refusal("TIMEOUT")
        if request.condition is not None:
            self.check(request.condition)
        request.running = True
        try:
            if self.world.wrong("sessions-wait"):
                async with self.world.turn:
                    return await asyncio.wait_for(self.execute(request), left)
            async with self.running if not self.world.wrong("runs-at-once") else asyncio.Lock():
                return await asyncio.wait_for(self.execute(request), left)
        except TimeoutError:
            raise Refusal("TIMEOUT") from None
        finally:
            request.running = False

    async def execute(self, request: Request) -> tuple[dict[str, Any], str]:
        """Run a request."""
        data = json.loads(request.data)
        if request.kind == "close":
            self.over = "SESSION_CLOSED"
            return {"type": "closed"}, "{}"
        if not isinstance(data, dict):
            raise Refusal("VALIDATION_ERROR")
        if request.kind == "fork":
            return self.fork(data)
        if request.kind == "reset":
            payload = await self.reset(data)
        else:
            payload = await self.step(data, strict=True, kind=request.kind)
        kind = "mcp" if request.kind == "mcp" else "observation"
        place = {**self.place, "digest": self.world.digest(payload)}
        if self.world.wrong("mux-digest-zero"):
            place["digest"] = ZERO
        if self.world.wrong("mux-without-digest"):
            del place["digest"]
        if self.world.wrong("key-twice"):
            payload = f'{{"done":false,{payload[1:]}'
        return {"type": kind, **place}, payload

    async def idle(self) -> None:
        """Wait until every admitted request has its reply."""
        for request in list(self.requests.values()):
            await request.done.wait()

    def fork(self, data: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Make a session that continues from delivery t.

        Raises:
            Refusal: It cannot be made.
        """
        child: Any = data.get("child")
        t: Any = data.get("t")
        if self.world.production:
            raise Refusal("NOT_SUPPORTED")
        if (
            not isinstance(child, dict)
            or not is_name(child.get("sid"))
            or not is_name(child.get("key"))
            or not is_number(t, 0)
        ):
            raise Refusal("VALIDATION_ERROR")
        if child["sid"] in self.world.sessions and not self.world.wrong("child-sid-taken"):
            raise Refusal("VALIDATION_ERROR", "the sid is taken")
        if self.episode is None:
            raise Refusal("NO_RESET")
        if data.get("eid") in (None, self.episode.eid) and t > self.episode.t:
            raise Refusal("T_OUT_OF_RANGE", eid=self.episode.eid, t=t, deliveries=self.episode.t + 1)
        if self.world.wrong("mux-one-eid"):
            self.world.episodes[self.episode.eid] = self.episode  # which another session has overwritten
        episode = self.world.forked(data.get("eid") or self.episode.eid, t, self.owner)
        session = MuxSession(self.world, self.owner, child["sid"], child["key"], self.group)
        session.episode = episode
        episode.session = episode.session or session
        if self.world.wrong("child-attached"):
            session.socket = self.socket
        self.world.sessions[child["sid"]] = session
        return {"type": "forked"}, encode({"sid": session.sid, "eid": episode.eid, "t": 0, "origin": episode.origin})

    def finish(self, id: int, head: dict[str, Any], payload: str) -> None:
        """Record a reply and send it."""
        request = self.requests[id]
        request.reply = (head, payload)
        request.done.set()
        self.answered = max(self.answered, id)
        self.reply(id)
        if request.kind == "reset" and id > 1 and self.world.wrong("ids-per-episode"):
            self.requests, self.next_id, self.answered = {1: request}, 2, 1
        if self.over is not None:
            self.socket = None

    def reply(self, id: int) -> None:
        """Send a recorded reply."""
        request = self.requests[id]
        if request.reply is None:
            return
        head, payload = request.reply
        before = request.attachment < self.attachment and not self.world.wrong("no-request-digest")
        more = {"request": digest(request.data)} if before or self.world.wrong("always-request-digest") else {}
        if self.socket is not None:
            request.sent = True
        self.say({"id": id, **head, **more}, payload)

    # Attachment

    def attach(self, socket: Socket, fence: int | None, answer: str, last: int, last_seq: int) -> None:
        """Attach the session to a socket, and send what was missed.

        Raises:
            Refusal: It is not attached.
        """
        wrong = self.world.wrong
        here = {"next_id": self.next_id, **self.place}
        if last > self.answered and not wrong("last-unchecked"):
            if wrong("last-ends-session"):
                self.over = "SESSION_LOST"
            raise Refusal("SESSION_LOST", **here)
        if self.over is not None:
            code = "SESSION_LOST" if wrong("closed-is-lost") else self.over
            socket.send({"sid": self.sid, "type": "error"}, encode(Refusal(code, **here).data))
            self.attachment += 1
            self.socket = socket
            if not wrong("closed-without-replies"):
                self.missed(last)
            self.socket = None
            return
        other = self.socket is not socket
        if fence is not None and not wrong("fence-ignored"):
            low = fence < self.fence or (fence == self.fence and other and not wrong("fence-equal-wins"))
            if low and self.fence:
                raise Refusal("NOT_ATTACHED", fence=self.fence)
        self.fence = max(self.fence, fence) if fence is not None else self.fence + 1
        if self.socket is not None and other:
            if not wrong("takeover-silent"):
                self.say({"type": "detached"}, encode({"reason": "taken_over"}))
            if wrong("takeover-shares"):
                self.others.add(self.socket)
        if other:
            self.attachment += 1
        self.socket = socket
        if wrong("replies-before-resumed"):
            self.missed(last)
        self.say({"type": answer}, encode(self.position()))
        if not wrong("replies-before-resumed") and not (answer == "opened" and wrong("open-without-replies")):
            self.missed(0 if wrong("replies-from-first") else last)
        for push in self.pushes:
            if push["seq"] > max(last_seq, self.last_seq) and not wrong("reward-pushed-once"):
                self.push(push)

    def missed(self, last: int) -> None:
        """Send the recorded replies after id `last`."""
        for id in sorted(self.requests):
            if id > last and not self.requests[id].acknowledged:
                self.reply(id)

    def push(self, push: dict[str, Any]) -> None:
        """Send a reward."""
        self.say({"seq": push["seq"], "type": "reward"}, push["payload"])

    def rewarded(self, episode: Episode, reward: dict[str, Any]) -> None:
        """Give a reward a seq and push it."""
        self.seq += 2 if self.world.wrong("reward-seq-gap") else 1
        self.pushes.append({"seq": self.seq, "payload": encode({"eid": episode.eid, **reward})})
        if not self.world.wrong("reward-not-pushed"):
            self.push(self.pushes[-1])

    def detached(self) -> None:
        """Called when the socket is lost."""
        self.socket = None
        if self.world.wrong("replies-once"):
            for request in self.requests.values():
                request.acknowledged |= request.sent
        if self.world.wrong("lost-with-socket"):
            del self.world.sessions[self.sid]
        if self.world.wrong("fresh-for-lost"):
            self.env = None
            if self.episode is not None:
                self.episode.prefix = []
        if self.world.wrong("cut-cancels"):
            while not self.queue.empty():
                del self.requests[self.queue.get_nowait()]
            running = [id for id, one in self.requests.items() if one.reply is None]
            self.next_id = max((id for id in self.requests if id not in running), default=0) + 1 + len(running)


class Socket:
    """One multiplexed socket.

    Args:
        world: The server.
        owner: Token of the principal.
    """

    def __init__(self, world: World, owner: str | None) -> None:
        self.world, self.owner = world, owner
        self.out: asyncio.Queue[str | None] = asyncio.Queue()
        self.parts: dict[tuple[Any, ...], list[str]] = {}
        self.tasks: set[asyncio.Task[Any]] = set()
        self.closed = False

    def send(self, head: dict[str, Any], payload: str) -> None:
        """Send an envelope, in parts if it is large."""
        text = f'{encode(head)[:-1]},"data":{payload}}}'
        if len(text) <= PART:
            self.out.put_nowait(text)
            return
        address: dict[str, Any] = {name: head[name] for name in ("sid", "id", "q", "seq") if name in head}
        texts = [text[at : at + PART // 2] for at in range(0, len(text), PART // 2)]
        for n, one in enumerate(texts):
            self.out.put_nowait(
                encode({**address, "type": "part", "data": {"n": n + 1, "of": len(texts), "text": one}})
            )

    def error(self, address: dict[str, Any], error: Refusal) -> None:
        """Send an error with an address."""
        self.send({**address, "type": "error"}, encode(error.data))

    def receive(self, frame: str) -> None:
        """Process a frame."""
        try:
            texts = self.read(frame)
        except Refusal as error:
            if error.code == "INVALID_JSON" and self.world.wrong("bad-json-closes"):
                self.out.put_nowait(None)
                return
            self.error({"sid": None}, error)
            return
        problems: dict[int, Refusal] = {}
        for index, text in enumerate(texts):
            try:
                self.check(text)
            except Refusal as error:
                problems[index] = error
                self.refused(text)
        if problems and self.world.wrong("array-as-transaction"):
            for i in range(len(texts)):
                problems.setdefault(i, Refusal("INVALID_ENVELOPE"))
        opened = set()
        for index, text in enumerate(texts):
            message = _object(text)
            if index in problems:
                address: dict[str, Any] = {k: message[k] for k in ("id", "q") if is_number(message.get(k))}
                sid = message["sid"] if is_name(message.get("sid")) else None
                place = {} if self.world.wrong("no-index") else {"index": index}
                self.error({"sid": sid, **address, **place}, problems[index])
                continue
            if message["type"] == "open":
                opened.add(message["sid"])
            elif self.world.wrong("open-is-awaited") and message.get("sid") in opened:
                self.error({k: message[k] for k in ("sid", "id", "q") if k in message}, Refusal("NOT_ATTACHED"))
                continue
            self.take(text, message)

    def refused(self, text: str) -> None:
        """Use up the id of a refused request, for the defect that does so."""
        message = _object(text)
        session = self.world.sessions.get(str(message.get("sid")))
        if self.world.wrong("refusal-uses-id") and session is not None and message.get("id") == session.next_id:
            session.next_id += 1

    def read(self, frame: str) -> list[str]:
        """Return the texts of a frame's envelopes.

        Raises:
            Refusal: It is not a frame.
        """
        if len(frame.encode()) > LIMITS["max_frame"]:
            raise Refusal("FRAME_TOO_LARGE")
        try:
            if _depth(frame) > 66:
                raise ValueError("too deep")
            constant = None if self.world.wrong("nan-is-read") else _refused
            if json.loads(frame, parse_constant=constant) == []:
                raise ValueError("an empty array")
            texts = elements(frame)
        except (ValueError, RecursionError):
            raise Refusal("INVALID_JSON") from None
        if len(texts) > LIMITS["max_elements"] and not self.world.wrong("no-max-elements"):
            raise Refusal("FRAME_TOO_LARGE")
        return texts

    def check(self, text: str) -> None:
        """Validate an envelope.

        Raises:
            Refusal: It is not valid.
        """
        wrong, message = self.world.wrong, _object(text)
        kind = message.get("type")
        if not isinstance(kind, str):
            raise Refusal("INVALID_ENVELOPE")
        if kind not in TYPES:
            raise Refusal("UNKNOWN_TYPE")
        sid, number = TYPES[kind]
        right = wrong("unknown-fields-pass") or set(message) <= {"sid", "id", "q", "type", "data", "if", "deadline_ms"}
        right &= sid is None or ("sid" in message) == sid
        right &= "sid" not in message or is_name(message["sid"])
        for name in ("id", "q"):
            if number == "any":
                right &= name not in message or is_number(message[name])
            else:
                right &= (name in message) == (name == number)
        if number in ("id", "q"):
            value = message.get(number)
            lax = (wrong("float-id") and isinstance(value, float)) or (wrong("boolean-id") and value is True)
            right &= is_number(value) or lax
        if kind == "mcp":
            right &= ("id" in message) != ("q" in message)
        condition, deadline = message.get("if"), message.get("deadline_ms")
        right &= condition is None or (isinstance(condition, dict) and {"t"} <= set(condition) <= {"t", "eid"})
        right &= deadline is None or is_number(deadline, 0)
        data = message.get("data", {})
        right &= isinstance(data, OWN_DATA.get(kind, object)) or (kind == "resume" and "data" not in message)
        if kind == "state" and isinstance(data, dict) and data:
            right &= set(data) <= {"t", "eid"} and is_number(data.get("t"), 0)
        if kind == "open":
            right &= isinstance(data, dict) and is_name(data.get("key"))
            right &= wrong("open-lax") or set(data) <= {"key", "group", "fence"}
        if kind == "resume":
            right &= data != [] and all(_has(one, {"sid", "key"}, {"fence", "last", "last_seq"}) for one in data)
        if kind == "ack":
            right &= _has(data, set(), {"last", "last_seq"})
        if kind == "rewards":
            right &= _has(data, set(), {"eid"})
        if kind == "close_group":
            right &= _has(data, {"group"}, set())
        if kind == "step" and wrong("bad-data-refused"):
            right &= isinstance(data, dict)
        if not wrong("duplicate-keys"):
            try:
                json.loads(text, object_pairs_hook=_unique)
            except ValueError:
                right = False
        if not right:
            raise Refusal("INVALID_ENVELOPE")

    def take(self, text: str, message: dict[str, Any]) -> None:
        """Process an envelope; answer a refusal with an error."""
        address: dict[str, Any] = {
            k: int(message[k]) if k != "sid" else message[k] for k in ("sid", "id", "q") if k in message
        }
        try:
            self.admit(text, message)
        except Refusal as error:
            session = self.world.sessions.get(str(message.get("sid")))
            if self.world.wrong("refusals-queue") and session is not None and error.code == "OUT_OF_ORDER":
                self.tasks.add(asyncio.create_task(self.later(session, address, error)))
                return
            self.error(address, error)

    async def later(self, session: MuxSession, address: dict[str, Any], error: Refusal) -> None:
        """Send a refusal after the reply of the running request."""
        await session.idle()
        self.error(address, error)

    def admit(self, text: str, message: dict[str, Any]) -> None:
        """Execute a message.

        Raises:
            Refusal: It is refused.
        """
        world, kind, data = self.world, message["type"], message.get("data", {})
        raw = members(text).get("data", "{}")
        if kind != "part" and self.world.wrong("parts-block"):
            self.parts.clear()
        if kind == "part":
            self.joined(message)
        elif kind == "capabilities":
            self.send({"q": message["q"], "type": kind}, encode(world.capabilities()))
        elif kind == "open":
            self.open(message["sid"], data)
        elif kind == "resume":
            self.resume(data)
        elif kind == "close_group":
            self.close_group(message["q"], data)
        else:
            world.own(message["sid"], "misdirected-lost")
            session: MuxSession | None = world.sessions.get(message["sid"])
            attached = session is not None and session.socket is self
            if session is not None and (world.wrong("unattached-runs") or self in session.others):
                session.socket, attached = self, True
            if session is None or not attached:
                raise Refusal("SESSION_LOST" if world.wrong("unattached-lost") else "NOT_ATTACHED")
            self.of_session(session, message, raw)

    def of_session(self, session: MuxSession, message: dict[str, Any], raw: str) -> None:
        """Execute a message to a session."""
        kind, data = message["type"], message.get("data", {})
        if kind == "ack":
            beyond = data.get("last", 0) > session.answered or data.get("last_seq", 0) > session.seq
            if beyond and not self.world.wrong("ack-beyond"):
                raise Refusal("INVALID_ENVELOPE")
            for id, request in session.requests.items():
                request.acknowledged |= id <= data.get("last", 0) or self.world.wrong("ack-deletes-all")
            session.last_seq = max(session.last_seq, data.get("last_seq", 0))
        elif kind == "cancel":
            victim = session.requests.get(message["id"])
            if victim is not None and victim.reply is None and not victim.running:
                victim.cancelled = not self.world.wrong("cancel-ignored")
        elif "q" in message:
            if self.world.wrong("reads-once") and message["q"] in session.reads:
                return
            session.reads.add(message["q"])
            self.tasks.add(asyncio.create_task(self.reading(session, message)))
        else:
            session.request(int(message["id"]), message, raw, self)

    async def reading(self, session: MuxSession, message: dict[str, Any]) -> None:
        """Answer a read."""
        kind, data, q = message["type"], message.get("data", {}), message["q"]
        try:
            if kind == "state" and data:
                if self.world.production:
                    raise Refusal("NOT_SUPPORTED")
                if self.world.wrong("reads-queue"):
                    await session.idle()
                head, payload = session.at(data)
                if self.world.wrong("mux-read-digest-zero"):
                    head["digest"] = ZERO
            elif kind == "rewards":
                if session.episode is None and not data.get("eid"):
                    raise Refusal("NO_RESET")
                episode = self.world.episode(data["eid"], self.owner) if data.get("eid") else session.episode
                assert episode is not None
                head, payload = {"type": kind}, encode([{"eid": episode.eid, **one} for one in episode.rewards])
            else:
                async with session.running:
                    await session.ready()
                    found = session.state() if kind == "state" else session.mcp(data)
                head, payload = {"type": kind}, encode(found)
            self.send({"sid": session.sid, "q": q, **head}, payload)
        except Refusal as error:
            self.error({"sid": session.sid, "q": q}, error)

    def joined(self, message: dict[str, Any]) -> None:
        """Add a part; after the last one, process the message.

        Raises:
            Refusal: It is not the part that follows.
        """
        address = tuple(message.get(name) for name in ("sid", "id", "q"))
        data = message.get("data", {})
        n, of, text = data.get("n"), data.get("of"), data.get("text")
        held = self.parts.setdefault(address, [])
        follows = n == len(held) + 1 or (self.world.wrong("parts-in-any-order") and held)
        if not is_number(n) or not is_number(of) or n > of or not isinstance(text, str) or not follows:
            del self.parts[address]
            raise Refusal("INVALID_ENVELOPE")
        held.append(text)
        if n < of:
            return
        whole = "".join(self.parts.pop(address))
        if len(whole) > LIMITS["max_frame"]:
            raise Refusal("FRAME_TOO_LARGE")
        if self.world.wrong("parts-in-any-order") and len(held) < of:
            raise Refusal("OVERLOADED", retry_after=0.1)
        self.receive(whole)

    def open(self, sid: str, data: dict[str, Any]) -> None:
        """Open a session or find it, and attach it.

        Raises:
            Refusal: It belongs to another principal or has another key.
        """
        self.world.own(sid, "misdirected-lost")
        sessions = self.world.sessions
        if sid not in sessions or (self.world.wrong("open-forgets") and sessions[sid].key == data["key"]):
            sessions[sid] = MuxSession(self.world, self.owner, sid, data["key"], data.get("group"))
        session = sessions[sid]
        if session.key != data["key"] or session.owner != self.owner:
            raise self.lost(session)
        session.attach(self, data.get("fence"), "opened", 0, 0)

    def lost(self, session: MuxSession | None) -> Refusal:
        """Return the answer to a wrong key and to an unknown sid."""
        if session is not None and self.world.wrong("wrong-key-tells"):
            return Refusal("SESSION_LOST", next_id=session.next_id)
        return Refusal("SESSION_LOST")

    def resume(self, entries: list[Any]) -> None:
        """Attach sessions."""
        for entry in entries:
            session = self.world.sessions.get(entry["sid"])
            try:
                self.world.own(entry["sid"], "misdirected-lost")
                if session is None or session.key != entry.get("key") or session.owner != self.owner:
                    raise self.lost(session)
                session.attach(self, entry.get("fence"), "resumed", entry.get("last", 0), entry.get("last_seq", 0))
            except Refusal as error:
                self.error({"sid": entry["sid"]}, error)

    def close_group(self, q: int, data: dict[str, Any]) -> None:
        """End the sessions of a group."""
        closed = 0
        for session in self.world.sessions.values():
            mine = session.group == data.get("group") and session.owner == self.owner and session.over is None
            if mine and not (self.world.wrong("group-of-socket") and session.socket is not self):
                closed += 1
                session.over = "SESSION_CLOSED"
                if not self.world.wrong("group-silent"):
                    session.say({"type": "detached"}, encode({"reason": "closed"}))
                session.socket = None
        self.send({"q": q, "type": "group_closed"}, encode({"closed": closed}))

    def gone(self) -> None:
        """Called when the connection is closed."""
        self.closed = True
        for session in list(self.world.sessions.values()):
            session.others.discard(self)
            if session.socket is self:
                session.detached()


_FORMS: dict[str, Callable[[Any], bool]] = {
    "sid": is_name,
    "key": is_name,
    "group": is_name,
    "fence": is_number,
    "last": lambda value: is_number(value, 0),
    "last_seq": lambda value: is_number(value, 0),
    "eid": lambda value: isinstance(value, str),
}


def _has(value: Any, required: set[str], optional: set[str]) -> bool:
    """Return whether a value is an object of these fields, each in its form."""
    known = isinstance(value, dict) and required <= set(value) <= required | optional
    return known and all(_FORMS[name](one) for name, one in value.items())


def _object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    return found if isinstance(found, dict) else {}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _canonical(text: str) -> str:
    """Return a text that is equal for equal data: 1 and 1.0 are equal, 1 and true are not."""

    def number(digits: str) -> float:
        return float(digits) if -(2**53) < int(digits) < 2**53 else int(digits)

    return json.dumps(json.loads(text, parse_int=number), sort_keys=True)


def _depth(text: str) -> int:
    """Return the number of nested levels of arrays and objects."""
    depth = most = 0
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', text):
        if token[0] in "[{":
            depth += 1
            most = max(most, depth)
        elif token[0] in "]}":
            depth -= 1
    return most

"""Follows a socket and holds each of its messages against its schema, the requests, and the `Ledger`."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from ..exact import digest, elements, encode
from ..results import Blocked
from .ledger import MUX_PLACE, PLACE, UNPLACED, Ask, Ledger, Multiplexed, Place, Plain, place_of, valid

if TYPE_CHECKING:
    from .sockets import Message

FORM = "R-016-4"
"""Statement that an envelope has the fields of its table."""

RECORDED = frozenset(
    {
        "VALIDATION_ERROR",
        "EXECUTION_ERROR",
        "PRECONDITION_FAILED",
        "TIMEOUT",
        "CANCELLED",
        "NOT_SUPPORTED",
        "T_OUT_OF_RANGE",
        "NO_RESET",
        "UNKNOWN_EPISODE",
        "ENV_OUTPUT_INVALID",
    }
)
"""Codes of errors that stay the reply to their id. (REPLY_EXPIRED replaces one.)"""

FIELDS: dict[str, tuple[str, dict[str, type | tuple[type, ...]]]] = {
    "T_OUT_OF_RANGE": ("R-015-12", {"eid": str, "t": int, "deliveries": int}),
    "UNKNOWN_EPISODE": ("R-015-12", {"eid": object}),
    "OUT_OF_ORDER": ("R-016-17", {"next_id": int}),
    "CONFLICT": ("R-016-16", {"next_id": int}),
    "MISDIRECTED": ("R-016-50", {"shard": str}),
    "OVERLOADED": ("R-016-32", {"retry_after": (int, float)}),
    "PRECONDITION_FAILED": ("R-016-20", {"eid": (str, type(None)), "t": (int, type(None))}),
}
"""Fields of an error code beside ``code`` and ``message``, their types, and the statement that names them."""

SCHEMAS = {
    "observation": "Observation",
    "opened": "Opened",
    "resumed": "Resumed",
    "forked": "Forked",
    "closed": "Closed",
    "state": "StateReply",
    "state_at": "StateAtReply",
    "rewards": "RewardsReply",
    "capabilities": "CapabilitiesReply",
    "group_closed": "GroupClosed",
    "reward": "Reward",
    "detached": "Detached",
    "goaway": "GoAway",
    "error": "Error",
}
"""Type of a multiplexed message -> name of its schema. ``mcp`` has two, by its number."""

ANSWERS = {
    "reset": "observation",
    "step": "observation",
    "mcp": "mcp",
    "fork": "forked",
    "close": "closed",
    "state": "state",
    "state_at": "state_at",
    "rewards": "rewards",
    "capabilities": "capabilities",
    "close_group": "group_closed",
}
"""Kind of a request -> type of its answer, if that is no error."""


class Witness:
    """Follows one socket.

    Args:
        ledger: What the server has delivered.
        mux: Whether it is a multiplexed socket.
        session_id: Id of the plain session that it attaches; None for a session of its own.
    """

    def __init__(self, ledger: Ledger, mux: bool, session_id: str | None) -> None:
        self.ledger, self.mux, self.session_id = ledger, mux, session_id
        self.session = Plain()
        if session_id is not None:
            self.session = ledger.plain.setdefault(session_id, Plain(known=False))
        self._owner: object = session_id or self
        self._told = False
        self._asks: list[Ask] = []
        """Requests without an answer: on a plain socket all, in their order; else those with a `q`."""
        self._qs: list[Any] = []
        """The `q` of each."""
        self._sids: set[Any] = set()
        self._numbers: set[Any] = set()
        self._parts: dict[Any, list[str]] = {}
        self._fresh: dict[str, tuple[int, bool]] = {}
        """By sid, the first id of the present attachment, and whether it began on this socket."""
        self._due: Counter[str] = Counter()
        """How often a reply may come, by sid and id: for each request here and each attach after it; by sid and null,
        how often the session was attached here."""
        self._got: Counter[str] = Counter()
        """How often its reply came."""
        self._highest: dict[str, int] = {}
        """By sid, the highest id whose reply came here for the first time."""

    # What the client sends

    def sent(self, text: str) -> None:
        """Note a frame of the client."""
        if not self.mux:
            ask = Ask.of(text)
            if ask.kind != "close":
                self._asks.append(ask)
            return
        try:
            texts = elements(text)
        except (ValueError, RecursionError):
            return
        for one in texts:
            self._envelope(one)

    def _envelope(self, text: str) -> None:
        ask = Ask.of(text)
        if ask.kind is None:
            return
        value = json.loads(text)
        q = value.get("q")
        self._numbers |= {encode(["id", ask.id]), encode(["q", q])}
        if isinstance(ask.sid, str):
            self._sids.add(ask.sid)
        if ask.kind == "part":
            self._joined(value, ask)
        elif ask.kind == "resume":
            for entry in ask.data if isinstance(ask.data, list) else ():
                self._attaching(entry, entry.get("sid") if isinstance(entry, dict) else None)
        elif ask.kind == "open":
            self._attaching(ask.data, ask.sid)
        elif "q" in value:
            self._asks.append(ask)
            self._qs.append(q)
        elif ask.kind in ANSWERS and type(ask.id) is int and isinstance(ask.sid, str):
            self._of(ask.sid).asked.setdefault(ask.id, []).append(ask)
            self._due[encode([ask.sid, ask.id])] += 1

    def _attaching(self, entry: Any, sid: Any) -> None:
        if isinstance(entry, dict) and isinstance(sid, str):
            self._sids.add(sid)
            session = self._of(sid)
            self._due.update(encode([sid, id]) for id in (None, *session.asked))
            session.fences.append(entry.get("fence"))
            if type(entry.get("last_seq")) is int:
                session.last_seq = max(session.last_seq, entry["last_seq"])

    def _joined(self, value: Any, ask: Ask) -> None:
        address = encode([value.get(name) for name in ("sid", "id", "q")])
        data = ask.data if isinstance(ask.data, dict) else {}
        held = self._parts.setdefault(address, [])
        if data.get("n") == len(held) + 1 and isinstance(data.get("text"), str):
            held.append(data["text"])
            if data.get("of") == len(held):
                del self._parts[address]
                self._envelope("".join(held))

    def _of(self, sid: str) -> Multiplexed:
        return self.ledger.multiplexed.setdefault(sid, Multiplexed())

    # What the server sends

    def came(self, message: Message) -> None:
        """Hold a message of the server against what came before.

        Raises:
            Blocked: It breaks the statement that is named.
        """
        if message.twice is not None:
            raise Blocked("R-016-5", f"the key {message.twice!r} stands twice: {message}")
        if self.mux:
            self._multiplexed(message)
        else:
            self._plain(message)

    # Plain sockets

    def _plain(self, message: Message) -> None:
        if not isinstance(message.value, dict):
            raise Blocked("base.exchange", f"a frame is a JSON object: {message}")
        if not self._asks:
            if message.type != "error":  # a socket that can have no session
                raise Blocked("R-015-8", f"no request asked for it: {message}")
            return
        ask = self._asks.pop(0)
        if message.type == "error":
            self._error(message, ask)
            return
        if message.type != ANSWERS.get(str(ask.kind)):
            raise Blocked("base.exchange", f"{ask.kind} was answered with {message}")
        if ask.kind == "capabilities":
            self._capabilities(message)
        elif ask.kind == "state_at":
            valid(message.value, "plain.StateAtFrame", "R-015-9")
            self._state_at(message, ask, self.session.place[0] if self.session.known else None)
        elif ask.kind == "mcp" and not _is_response(message.data, ask.data):
            raise Blocked("base.exchange", f"a JSON-RPC response to {ask.text[:200]} was expected: {message}")
        elif ask.kind in ("reset", "step") or (ask.kind == "mcp" and _is_call(ask.data)):
            self._delivery(message, ask.kind)

    def _capabilities(self, message: Message) -> None:
        self._told = True
        valid(message.data, "plain.Capabilities", "R-015-5")
        self.ledger.offers(message.data, message)
        here = message.data.get("session")
        if not isinstance(here, dict):
            return
        eid, t = here.get("eid"), here.get("t")
        if self.session_id is not None and here.get("session_id") != self.session_id:
            raise Blocked("R-015-5", f"the session_id is {self.session_id}: {message}")
        if self.session.known and (t != self.session.place[1] or self.session.place[0] not in (None, eid)):
            raise Blocked("R-015-5", f"the session stands at {self.session.place}, not at {(eid, t)}: {message}")
        self._stands(eid, t, message)

    def _stands(self, eid: Any, t: Any, what: object) -> None:
        """Note where the plain session stands, and place the deliveries whose eid was not known."""
        self.session.place, self.session.known = (eid, t), True
        if eid is not None:
            self.ledger.belongs(eid, self._owner, what)
            for at, (kind, payload) in self.session.unplaced.items():
                self.ledger.kinds[eid, at] = kind
                self.ledger.delivered("R-015-9", eid, at, payload, what)
            self.session.unplaced.clear()

    def _delivery(self, message: Message, kind: str) -> None:
        session = self.session
        before_eid, before = session.place
        t = 0 if kind == "reset" else 1 if before is None else before + 1
        begins = kind == "reset" or before is None
        if not self._told and "eid" not in message.value:
            if begins:
                session.unplaced.clear()
            if session.known or begins:
                session.place, session.known = (None if begins else before_eid, t), True
                session.unplaced[t] = (kind, message.payload)
                if not begins and before_eid is not None:
                    self._stands(before_eid, t, message)
            return
        eid = message.get("eid")
        if not isinstance(eid, str) or type(message.get("t")) is not int:
            raise Blocked(PLACE, f"a delivery after capabilities carries eid and t: {message}")
        _digested(message)
        if (session.known or begins) and message.get("t") != t:
            raise Blocked("R-015-3", f"t={t} was expected: {message}")
        t = message.get("t")
        if begins:
            session.unplaced.clear()
            if session.known:
                self.ledger.begun(eid, self._owner, message)
        elif session.known and before_eid not in (None, eid):
            raise Blocked("R-015-1", f"the episode {before_eid} goes on: {message}")
        session.unplaced[t] = (kind, message.payload)
        self._stands(eid, t, message)

    # Multiplexed sockets

    def _multiplexed(self, message: Message) -> None:
        name = SCHEMAS.get(message.type) if isinstance(message.type, str) else None
        if message.type == "mcp":
            name = "McpReply" if "id" in message.value else "McpReadReply"
        if name is None:
            if (
                isinstance(message.value, dict)
                and isinstance(message.type, str)
                and not {"id", "q"} & set(message.value)
            ):
                return  # a push of later versions
            raise Blocked(FORM, f"a message of another form: {message}")
        delivery = message.type in ("observation", "state_at")
        valid(message.value, f"server.{name}", FORM, place=delivery)
        sid, id, q = (message.get(one) for one in ("sid", "id", "q"))
        if sid is not None and sid not in self._sids:
            raise Blocked("R-016-10", f"nothing was sent here about the session: {message}")
        for kind, number in (("id", id), ("q", q)):
            before = kind == "id" and isinstance(sid, str) and number in self._of(sid).asked
            if number is not None and not before and encode([kind, number]) not in self._numbers:
                raise Blocked("R-016-15", f"no request has this {kind}: {message}")
        if message.type in ("opened", "resumed"):
            self._attached(message)
        elif message.type == "detached":
            self._counted(sid, None, "R-016-27", message)
        elif message.type == "reward":
            self._pushed(message)
        elif q is not None and id is None:
            self._read(message)
        elif id is not None and sid is not None:
            self._reply(message, self._of(sid))
        elif message.type == "error":
            self._error(message, None)
            if sid is not None and "next_id" in message.data:  # the session is over, and its replies follow
                self._fresh[sid] = (message.data["next_id"], self._of(sid).socket not in (None, self))
            if sid is not None and self._of(sid).fences and message.get("index") is None:
                self._of(sid).fences.pop(0)

    def _counted(self, sid: Any, id: Any, statement: str, message: Message) -> None:
        """Check that a message does not come too often.

        Raises:
            Blocked: It does.
        """
        key = encode([sid, id])
        self._got[key] += 1
        if self._got[key] > self._due[key]:
            raise Blocked(statement, f"it comes too often: {message}")

    def _attached(self, message: Message) -> None:
        sid, data = message.get("sid"), message.data
        session = self._of(sid)
        fence = session.fences.pop(0) if session.fences else None
        wanted = session.fence + 1 if fence is None else fence
        if data["fence"] != wanted:
            raise Blocked("R-016-28", f"the fence is {wanted} after this attach: {message}")
        session.fence = data["fence"]
        expected = session.places.get(data["next_id"] - 1)
        if session.recorded and data["next_id"] <= max(session.recorded):
            raise Blocked("R-016-15", f"an id that was answered is taken again: {message}")
        if data["next_id"] > max(session.asked, default=0) + 1:
            raise Blocked("R-016-15", f"ids were taken that nobody sent: {message}")
        place = (data["eid"], data["t"])
        if expected is not None and place != expected:
            raise Blocked("R-016-22", f"the session stands at {expected}: {message}")
        if self.ledger.capabilities is not None and data["recovery"] != self.ledger.capabilities.get(
            "recovery", "none"
        ):
            raise Blocked("R-015-5", f"capabilities have another `recovery`: {message}")
        if data["seq"] < max(session.pushes, default=0):
            raise Blocked("R-016-37", f"seq of the last push is lower than one that came: {message}")
        self._fresh[sid] = (data["next_id"], session.socket not in (None, self))
        self._highest.pop(sid, None)
        session.socket = self

    def _pushed(self, message: Message) -> None:
        session, seq = self._of(message.get("sid")), message.get("seq")
        last = max(session.last_seq, max(session.pushes, default=0))
        if seq in session.pushes:
            if session.pushes[seq] != message.payload:
                raise Blocked("R-016-37", f"push {seq} was {session.pushes[seq]}, and is {message}")
        elif seq != last + 1 and seq > session.last_seq:
            raise Blocked("R-016-37", f"seq {last + 1} was expected: {message}")
        session.pushes[seq] = message.payload
        self.ledger.belongs(message.data["eid"], message.get("sid"), message)
        self.ledger.rewarded(message.data["eid"], message.data, message)

    def _read(self, message: Message) -> None:
        q, sid = message.get("q"), message.get("sid")
        for i, (ask, asked_q) in enumerate(zip(self._asks, self._qs, strict=True)):
            right = message.type in ("error", ANSWERS.get(str(ask.kind)))
            if asked_q == q and right and (ask.sid == sid or (sid is None and ask.kind == "capabilities")):
                del self._asks[i], self._qs[i]
                break
        else:
            if message.type == "error":
                return self._error(message, None)
            raise Blocked("R-016-15", f"no read that waits has this q, sid and type: {message}")
        if message.type == "error":
            self._error(message, ask)
        elif message.type == "state_at":
            self._state_at(message, ask, None)
            if ask.place[0] is None:
                self.ledger.belongs(message.get("eid"), sid, message)
        elif message.type == "rewards":
            eid = ask.data.get("eid") if isinstance(ask.data, dict) else None
            if message.data and eid is None:
                eid = message.data[0]["eid"]
                self.ledger.belongs(eid, sid, message)
            if eid is not None:
                self.ledger.listed(eid, message.data, message)
        elif message.type == "capabilities":
            self.ledger.offers(message.data, message)
        elif message.type == "mcp" and not _is_response(message.data, ask.data):
            raise Blocked("R-016-15", f"a JSON-RPC response to {ask.text[:200]} was expected: {message}")
        return None

    def _reply(self, message: Message, session: Multiplexed) -> None:
        id, asks = message.get("id"), session.asked.get(message.get("id"), [])
        kinds = {ask.kind for ask in asks}
        if message.type == "error":
            self._error(message, asks[-1] if len(asks) == 1 else None)
            if message.code not in RECORDED or message.get("index") is not None:
                return
        elif message.type == "mcp" and not any(_is_response(message.data, ask.data) for ask in asks):
            raise Blocked("R-016-15", f"a JSON-RPC response was expected: {message}")
        elif message.type not in {ANSWERS.get(str(kind)) for kind in kinds}:
            raise Blocked("R-016-15", f"{sorted(map(str, kinds))} under this id was answered with {message}")
        if message.type in ("observation", "mcp"):
            if None in (message.get("eid"), message.get("t")):
                raise Blocked(MUX_PLACE, f"a delivery carries eid, t and digest: {message}")
            _digested(message)
        self._old(message, asks)
        self._counted(message.get("sid"), id, "R-016-16", message)
        content = (message.type, message.payload, *(message.get(one) for one in ("eid", "t", "digest")))
        if id in session.recorded:
            if session.recorded[id] != content:
                raise Blocked("R-016-16", f"the recorded reply to id {id} was {session.recorded[id]}, and is {message}")
            return
        session.recorded[id] = content
        sid = message.get("sid")
        if id < self._highest.get(sid, 0):
            raise Blocked("R-016-19", f"the reply to id {self._highest[sid]} came before that to {id}: {message}")
        self._highest[sid] = id
        before = session.places.get(id - 1)
        if message.type in ("observation", "mcp"):
            session.places[id] = self._placed(message, before, kinds)
        elif before is not None:
            session.places[id] = before
        if message.type == "forked":
            self._child(message, asks, before)
        if message.code == "PRECONDITION_FAILED" and before not in (None, (message.data["eid"], message.data["t"])):
            raise Blocked("R-016-20", f"the session stands at {before}: {message}")

    def _placed(self, message: Message, before: Place | None, kinds: set[str | None]) -> Place:
        """Check that a delivery names the place that follows, and return it."""
        eid, t, sid = message.get("eid"), message.get("t"), message.get("sid")
        kind = "reset" if t == 0 else "mcp" if message.type == "mcp" else "step"
        if t == 0 and "reset" not in kinds:
            raise Blocked("R-015-3", f"t is 0 for a reset only: {message}")
        if t != 0 and kinds == {"reset"}:
            raise Blocked("R-015-3", f"t=0 was expected for a reset: {message}")
        if t == 0 or before == UNPLACED:
            if t not in (0, 1):
                raise Blocked("R-015-3", f"the first delivery of an episode: {message}")
            self.ledger.begun(eid, sid, message)
        elif before is not None and (eid, t) != (before[0], (before[1] or 0) + 1):
            statement = "R-015-3" if eid == before[0] else "R-015-1"
            raise Blocked(statement, f"the session stood at {before}: {message}")
        self.ledger.belongs(eid, sid, message)
        self.ledger.kinds[eid, t] = kind
        self.ledger.delivered("R-015-9", eid, t, message.payload, message)
        return eid, t

    def _child(self, message: Message, asks: list[Ask], before: Place | None) -> None:
        child: Any = message.data
        for ask in asks:
            wanted = ask.data.get("child") if isinstance(ask.data, dict) else None
            if isinstance(wanted, dict) and wanted.get("sid") == child["sid"]:
                eid, t = ask.place
                self.ledger.forked("R-016-39", child, (eid or (before or UNPLACED)[0], t), child["sid"])
                self._of(child["sid"]).places[0] = (child["eid"], 0)
                return
        raise Blocked("R-016-39", f"no fork has this child: {message}")

    def _old(self, message: Message, asks: list[Ask]) -> None:
        """Check `request`, which stands where a request is older than the attachment."""
        request, id = message.get("request"), message.get("id")
        if request is not None and request not in {digest(ask.text) for ask in asks}:
            raise Blocked("R-016-24", f"`request` is the digest of no data that was sent: {message}")
        first, elsewhere = self._fresh.get(message.get("sid"), (0, False))
        if request is not None and first and id >= first:
            raise Blocked("R-016-24", f"a request of this attachment has no `request`: {message}")
        if request is None and elsewhere and id < first:
            raise Blocked("R-016-24", f"a request from before the attachment has `request`: {message}")

    # Both

    def _state_at(self, message: Message, ask: Ask, current: str | None) -> None:
        _digested(message)
        eid, t = message.get("eid"), message.get("t")
        wanted, at = ask.place
        if t != at or eid != (wanted or current or eid):
            raise Blocked("R-015-9", f"state(t={at}, eid={wanted or current}) was answered with {message}")
        kind = self.ledger.kinds.get((eid, t))
        if message.get("kind") != (kind or message.get("kind")) or (message.get("kind") == "reset") != (t == 0):
            raise Blocked("R-015-9", f"kind {kind} was expected: {message}")
        self.ledger.delivered("R-015-9", eid, t, message.payload, message)

    def _error(self, message: Message, ask: Ask | None) -> None:
        if message.code is None or not isinstance(message.data.get("message"), str):
            raise Blocked("R-015-12" if not self.mux else FORM, f"an error has code and message: {message}")
        statement, fields = FIELDS.get(message.code, ("", {}))
        if message.code == "CONFLICT" and not self.mux:
            return
        for name, kind in fields.items():
            value = message.data.get(name, self)
            if value is self or not isinstance(value, kind) or isinstance(value, bool):
                raise Blocked(statement, f"{message.code} has `{name}`: {message}")
        if ask is not None and message.code in ("T_OUT_OF_RANGE", "UNKNOWN_EPISODE"):
            eid, t = ask.place
            same = message.data["eid"] == (eid if eid is not None else message.data["eid"])
            if not same or message.data.get("t", t) != t:
                raise Blocked(statement, f"it names another place than {ask.place}: {message}")
        id, next_id = message.get("id"), message.data.get("next_id")
        if message.code == "OUT_OF_ORDER" and not next_id < id:
            raise Blocked(statement, f"next_id is lower than the id that is refused: {message}")
        if message.code == "CONFLICT" and not next_id > id:
            raise Blocked(statement, f"next_id is higher than an id that was used: {message}")
        if message.code == "OVERLOADED" and message.data["retry_after"] < 0:
            raise Blocked(statement, f"retry_after is in seconds from 0: {message}")


def _is_call(data: Any) -> bool:
    """Return whether an MCP request is a delivery (R-015-3)."""
    if not isinstance(data, dict) or data.get("method") != "tools/call":
        return False
    params = data.get("params")
    return isinstance(params, dict) and isinstance(params.get("name"), str) and params["name"] != ""


def _is_response(data: Any, request: Any) -> bool:
    """Return whether data is a JSON-RPC response to a request."""
    if not isinstance(data, dict) or not isinstance(request, dict):
        return False
    return data.get("id") == request.get("id") and ("result" in data or "error" in data)


def _digested(message: Message) -> None:
    if message.get("digest") != digest(message.payload):
        raise Blocked(place_of(message.value), f"the digest is not that of the bytes of data: {message}")

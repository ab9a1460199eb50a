"""Follows what a client sends, whatever scenario is played, and holds it against its form and what came before.

A scenario looks at what it is about. A client that sends a field of another form, an id that does not follow or the key
of another session would be noticed only where the server's answer makes the scenario fail, and under the scenario's
statement. The witness names the one that is broken.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..exact import elements, encode, members
from ..results import Blocked
from ..sample.episodes import LIMITS
from ..server_side.ledger import valid

FORM = "R-016-4"
"""Statement that an envelope has the fields of its type, each in its form."""
UNREADABLE = "R-016-6"
"""Statement that names what a server refuses to read."""
KINDS = {
    "open": "Open",
    "resume": "Resume",
    "ack": "Ack",
    "cancel": "Cancel",
    "reset": "Reset",
    "step": "Step",
    "close": "Close",
    "fork": "Fork",
    "state": "State",
    "rewards": "Rewards",
    "capabilities": "CapabilitiesRequest",
    "close_group": "CloseGroup",
    "part": "Part",
}
"""Type of a multiplexed message -> name of its schema. ``mcp`` has two, by its number."""
ARGUMENTS = ("reset", "step", "mcp", "fork")
"""Types whose ``data`` is an argument of the request and no part of the envelope."""
PLAIN: dict[str, tuple[str, ...]] = {
    "capabilities": ("type",),
    "state": ("type", "data"),
    "reset": ("type", "data"),
    "step": ("type", "data"),
    "mcp": ("type", "data"),
    "close": ("type",),
}
"""Type of a plain message -> the keys that it may have."""
BASE = "base.exchange"
"""In place of a statement: a message that servers of the released protocol do not take."""
REFUSALS = frozenset(
    {
        "OUT_OF_ORDER",
        "NOT_ATTACHED",
        "OVERLOADED",
        "CAPACITY_REACHED",
        "JOURNAL_UNAVAILABLE",
        "MISDIRECTED",
        "INVALID_ENVELOPE",
        "UNKNOWN_TYPE",
        "FRAME_TOO_LARGE",
    }
)
"""Codes of errors that give an id back."""


@dataclass
class Session:
    """What a client has sent and got of a session.

    Args:
        key: The session's key.
        fence: The highest fence of its attaches.
        highest: The highest id that was sent.
        requests: By id, the request that the server may have accepted.
        replied: The highest id whose reply the client was sent.
        seq: The highest number of a push that the client was sent.
    """

    key: str
    fence: int = 0
    highest: int = 0
    requests: dict[int, str] = field(default_factory=dict)
    replied: int = 0
    seq: int = 0


class Witness:
    """Follows a client over the connections of one scenario.

    Args:
        names: Sids, keys and groups of earlier scenarios, to which those of this one are added.

    Attributes:
        wrongs: The statements that the client broke, in order.
    """

    def __init__(self, names: set[str]) -> None:
        self.wrongs: list[Blocked] = []
        self._earlier, self._names = frozenset(names), names
        self._sessions: dict[str, Session] = {}
        self._given: Counter[str] = Counter()
        """How many sessions have a name as their sid or key."""
        self._attached: dict[object, set[str]] = {}
        """By connection, the sids that were opened or resumed on it."""
        self._parts: dict[Any, list[str]] = {}

    # What the client sends

    def frame(self, connection: object, text: str) -> list[str]:
        """Hold a frame of a multiplexed socket against the form of frames; return the texts of its envelopes."""
        try:
            json.loads(text, parse_constant=_refused)
            texts = elements(text)
        except (ValueError, RecursionError) as error:
            self._wrong("R-016-3", f"a frame is an envelope or an array of some: {error}: {text[:300]}")
            return []
        if not 1 <= len(texts) <= LIMITS["max_elements"]:
            self._wrong("R-016-3", f"a frame has 1 to {LIMITS['max_elements']} envelopes: {text[:300]}")
        self._attached.setdefault(connection, set())
        return texts

    def envelope(self, connection: object, text: str, arrives: bool = True) -> None:
        """Hold an envelope against its form and what came before.

        Args:
            connection: The connection that the envelope came on.
            text: The envelope's exact text.
            arrives: Whether the server gets it.
        """
        try:
            self._envelope(connection, text, arrives)
        except Blocked as wrong:
            self.wrongs.append(wrong)

    def plain(self, text: str) -> None:
        """Hold a frame of a plain socket against its form."""
        try:
            value, twice = _read(text)
        except ValueError as error:
            self._wrong(BASE, f"a frame is JSON: {error}: {text[:300]}")
            return
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(value, dict) and {"sid", "q", "id"} & set(value):
            self._wrong("R-016-1", f"the socket is a plain one, and takes no envelopes: {text[:300]}")
        elif kind not in PLAIN or set(value) - set(PLAIN[kind]) or any(twice):
            self._wrong(BASE, f"a message of another form: {text[:300]}")
        elif "data" in value and not isinstance(value["data"], dict):
            self._wrong(BASE, f"`data` is an object: {text[:300]}")
        elif kind == "state" and "data" in value:
            self._form("plain.StateAtRequest", value["data"], "R-015-9")

    def body(self, name: str, statement: str, text: str) -> None:
        """Hold the body of an HTTP request against its form.

        Args:
            name: Name of the body's schema.
            statement: The statement that has the form.
            text: The body's exact text.
        """
        try:
            value, twice = _read(text)
        except ValueError as error:
            self._wrong(statement, f"the body is JSON: {error}: {text[:300]}")
            return
        if any(twice):
            self._wrong(statement, f"a key stands twice: {text[:300]}")
        self._form(name, value, statement)

    def _envelope(self, connection: object, text: str, arrives: bool) -> None:
        value, twice = _read(text)
        kind = value.get("type") if isinstance(value, dict) else None
        name = KINDS.get(kind) if isinstance(kind, str) else None
        if kind == "mcp":
            name = "McpCall" if "id" in value else "McpRead"
        if name is None:
            raise Blocked(UNREADABLE, f"an envelope has a `type` of PROTOCOL D2: {text[:300]}")
        if twice[-1] or (any(twice) and kind not in ARGUMENTS):
            raise Blocked("R-016-5", f"a key stands twice: {text[:300]}")
        if any(twice):
            raise Blocked(UNREADABLE, f"a key stands twice in the argument: {text[:300]}")
        valid(value if kind == "cancel" else {"data": {}, **value}, f"client.{name}", FORM)
        if any(value.get(one, 0) is None for one in ("id", "q", "sid", "if", "deadline_ms")):
            raise Blocked(FORM, f"a field without a value is left out: {text[:300]}")
        if kind == "mcp" and ("id" in value) != (value.get("data", {}).get("method") == "tools/call"):
            raise Blocked(FORM, f"a `tools/call` has an `id`, other methods have a `q`: {text[:300]}")
        if any(isinstance(value.get(one), float) for one in ("id", "q")):
            raise Blocked("R-016-5", f"`id` and `q` are JSON integers: {text[:300]}")
        sid, data = value.get("sid"), value.get("data", {})
        if kind == "open":
            self._attach(connection, sid, data, text, new=True)
        elif kind == "resume":
            if not data:
                raise Blocked(UNREADABLE, "a resume without sessions")
            for entry in data:
                self._attach(connection, entry["sid"], entry, text, new=False)
        elif kind == "part":
            self._part(connection, value, text, arrives)
        elif sid is not None and kind != "capabilities":
            if sid not in self._attached.setdefault(connection, set()):
                raise Blocked("R-016-10", f"the session was not attached on this connection: {text[:300]}")
            self._of_session(self._sessions[sid], value, text, arrives)

    def _attach(self, connection: object, sid: str, data: Any, text: str, new: bool) -> None:
        session = self._sessions.get(sid)
        if session is None:
            if not new:
                raise Blocked("R-016-9", f"a session is resumed that was never made: {text[:300]}")
            self._drawn(sid, data["key"], text)
            session = self._sessions[sid] = Session(data["key"])
        if data.get("group") in self._earlier or self._given[data.get("group")]:
            raise Blocked("R-016-8", f"the group is a name that was used before: {text[:300]}")
        if data.get("group") is not None:
            self._names.add(data["group"])
        if session.key != data["key"]:
            raise Blocked("R-016-9", f"the key of the session is {session.key}: {text[:300]}")
        fence = data.get("fence")
        if fence is not None and fence <= session.fence:
            raise Blocked("R-016-28", f"the last fence of the session was {session.fence}: {text[:300]}")
        session.fence = fence or session.fence
        self._attached.setdefault(connection, set()).add(sid)
        self._acknowledged(session, data, text)

    def _drawn(self, sid: str, key: str, text: str) -> None:
        """Note the names of a new session.

        Raises:
            Blocked: One was used before, in this scenario or an earlier one.
        """
        names = {sid, key}
        if len(names) < 2 or names & self._earlier or any(self._given[one] for one in names):
            raise Blocked("R-016-8", f"sid and key are drawn at random, for each session: {text[:300]}")
        self._given.update(names)
        self._names |= names

    def _acknowledged(self, session: Session, data: Any, text: str) -> None:
        if data.get("last", 0) > session.replied or data.get("last_seq", 0) > session.seq:
            here = f"reply {session.replied} and push {session.seq} were sent"
            raise Blocked("R-016-26", f"{here}, no later ones are acknowledged: {text[:300]}")

    def _of_session(self, session: Session, value: dict[str, Any], text: str, arrives: bool) -> None:
        kind, id = value["type"], value.get("id")
        if kind == "ack":
            self._acknowledged(session, value.get("data", {}), text)
        if id is None or kind == "cancel":
            return
        if id > session.highest + 1:
            raise Blocked("R-016-15", f"the highest id of the session was {session.highest}: {text[:300]}")
        session.highest = max(session.highest, id)
        argument = members(text).get("data", "{}")
        form = argument if kind == "fork" else json.dumps(json.loads(argument), sort_keys=True)
        request = encode([kind, form])
        before = session.requests.get(id, request)
        if arrives:
            session.requests[id] = before
        if before != request:
            raise Blocked("R-016-15", f"id {id} stands for {before[:300]} too: {text[:300]}")
        if kind == "fork" and id not in session.requests:
            return
        if kind == "fork" and value["data"]["child"]["sid"] not in self._sessions:
            child = value["data"]["child"]
            self._drawn(child["sid"], child["key"], text)
            self._sessions[child["sid"]] = Session(child["key"])

    def _part(self, connection: object, value: dict[str, Any], text: str, arrives: bool) -> None:
        data = value["data"]
        address = (connection, *(value.get(name) for name in ("sid", "id", "q")))
        held = self._parts.setdefault(address, [])
        if data["n"] != len(held) + 1 or data["n"] > data["of"]:
            raise Blocked("R-016-33", f"part {len(held) + 1} follows: {text[:300]}")
        held.append(data["text"])
        if len(held) < data["of"]:
            return
        whole = "".join(self._parts.pop(address))
        try:
            inner, _ = _read(whole)
        except ValueError as error:
            raise Blocked("R-016-33", f"the parts are no envelope: {error}: {whole[:300]}") from None
        if not isinstance(inner, dict) or inner.get("type") == "part":
            raise Blocked("R-016-33", f"the parts are no envelope: {whole[:300]}")
        if tuple(inner.get(name) for name in ("sid", "id", "q")) != address[1:]:
            raise Blocked("R-016-33", f"the parts have another address than the whole: {whole[:300]}")
        self._envelope(connection, whole, arrives)

    # What the client gets

    def said(self, text: str) -> None:
        """Note a message that the client is sent."""
        value = json.loads(text)
        session = self._sessions.get(value.get("sid") or "")
        id, data = value.get("id"), value.get("data")
        if session is None:
            return
        if value["type"] == "error" and id is not None and data.get("code") in REFUSALS:
            session.requests.pop(id, None)
        elif id is not None and (value["type"] != "part" or data["n"] == data["of"]):
            session.replied = max(session.replied, id)
        session.seq = max(session.seq, value.get("seq") or 0)

    def _form(self, name: str, value: Any, statement: str) -> None:
        try:
            valid(value, name, statement)
        except Blocked as wrong:
            self.wrongs.append(wrong)

    def _wrong(self, statement: str, detail: str) -> None:
        self.wrongs.append(Blocked(statement, detail))


def _read(text: str) -> tuple[Any, list[bool]]:
    """Return a JSON value and, for each of its objects, whether a key stands twice in it; the outermost is the last."""
    twice: list[bool] = []

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(found)
        twice.append(len(made) < len(found))
        return made

    return json.loads(text, object_pairs_hook=pairs, parse_constant=_refused), twice


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")

"""What a server has delivered: every later message and HTTP answer is held against it.

A check looks at the message that it waits for. A field that it does not compare, and a value that only a second message
shows to be wrong, would pass unseen: an ``eid`` that two episodes have, a delivery that has other bytes when it is read
again, a list without a reward that was accepted. `Ledger` knows them all; `witness` follows the sockets. Both raise
`Blocked` with the statement that is broken, whatever check runs.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jsonschema  # type: ignore[import-untyped]

from ..exact import digest, encode, members
from ..results import Blocked
from ..statements import schema

PLACE = "R-015-6"
"""Statement that a delivery of a plain socket carries ``eid``, ``t`` and ``digest``."""

MUX_PLACE = "R-016-46"
"""The same of a multiplexed socket."""

STATES = re.compile(r"/episodes/([^/]+)/states/(\d+)")
FORK = re.compile(r"/episodes/([^/]+)/fork")
REWARDS = re.compile(r"/episodes/([^/]+)/rewards")

Place = tuple[str | None, int | None]
"""``eid`` and ``t`` of a session's last delivery; None and None before the first."""

UNPLACED: Place = (None, None)


OF_A_SOCKET = {"delivery", "request_id"}
"""Extensions that a server offers to some of its sockets only: to those that are attached to a session by its id."""


@dataclass(frozen=True)
class Ask:
    """What a client sent.

    Args:
        kind: Type of the message; ``state_at`` for a ``state`` with `t`.
        data: Value of its ``data``.
        text: Exact text of its ``data``.
        id: ``id`` of the request, None without one.
        sid: Session of the request, None on a plain socket.
    """

    kind: str | None
    data: Any
    text: str
    id: Any = None
    sid: Any = None

    @classmethod
    def of(cls, text: str) -> Ask:
        """Read one message of a client; what cannot be read has the kind None."""
        try:
            value = json.loads(text)
            raw = members(text).get("data", "{}") if isinstance(value, dict) else "{}"
        except (ValueError, RecursionError):
            return cls(None, None, "")
        if not isinstance(value, dict):
            return cls(None, None, "")
        data = value.get("data")
        kind = value.get("type")
        if kind == "state" and isinstance(data, dict) and "t" in data:
            kind = "state_at"
        return cls(kind if isinstance(kind, str) else None, data, raw, value.get("id"), value.get("sid"))

    @property
    def place(self) -> Place:
        """``eid`` and ``t`` that it names."""
        found = self.data if isinstance(self.data, dict) else {}
        if isinstance(found.get("injected_state"), dict):
            found = found["injected_state"]
            return found.get("episode_id"), found.get("t")
        return found.get("eid"), found.get("t")


@dataclass
class Plain:
    """A plain session: the place of its last delivery, and deliveries whose ``eid`` is not known yet, by their t."""

    place: Place = UNPLACED
    known: bool = True
    unplaced: dict[int, tuple[str, str]] = field(default_factory=dict)


@dataclass
class Multiplexed:
    """A multiplexed session: what was asked and recorded by id, and the place after each id."""

    asked: dict[int, list[Ask]] = field(default_factory=dict)
    recorded: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    places: dict[int, Place] = field(default_factory=lambda: {0: UNPLACED})
    pushes: dict[int, str] = field(default_factory=dict)
    last_seq: int = 0
    fence: int = 0
    fences: list[Any] = field(default_factory=list)
    """Fences of ``open`` and ``resume`` without an answer, in their order."""
    socket: object = None


class Ledger:
    """What a server has delivered, in all checks.

    Attributes:
        deliveries: Digest of each delivery by its eid and t.
        kinds: What delivered it: ``reset``, ``step`` or ``mcp``.
        owners: The session of each episode.
        plain: Plain sessions by their session_id.
        multiplexed: Multiplexed sessions by their sid.
        capabilities: The data of ``capabilities`` without ``session``; None until it has come.
        rewards: The content of each reward by its eid and reward_id.
        posted: The reward_ids of the rewards that were accepted, by eid.
    """

    def __init__(self) -> None:
        self.deliveries: dict[tuple[str, int], str] = {}
        self.kinds: dict[tuple[str, int], str] = {}
        self.owners: dict[str, object] = {}
        self.plain: dict[str, Plain] = {}
        self.multiplexed: dict[str, Multiplexed] = {}
        self.capabilities: Any = None
        self.rewards: dict[tuple[str, str], Any] = {}
        self.posted: dict[str, set[str]] = {}

    def delivered(self, statement: str, eid: str, t: int, payload: str, what: object) -> None:
        """Compare the bytes of a delivery with those that came before.

        Raises:
            Blocked: They differ.
        """
        found = digest(payload)
        if self.deliveries.setdefault((eid, t), found) != found:
            raise Blocked(statement, f"delivery t={t} of {eid} has other bytes than before: {what}")

    def begun(self, eid: str, owner: object, what: object) -> None:
        """Note that a session begins an episode.

        Raises:
            Blocked: There is one with this eid already.
        """
        if eid in self.owners:
            raise Blocked("R-015-1", f"a new episode has the eid of an earlier one: {what}")
        self.owners[eid] = owner

    def belongs(self, eid: str, owner: object, what: object) -> None:
        """Note that an episode is a session's.

        Raises:
            Blocked: It is another session's.
        """
        if self.owners.setdefault(eid, owner) != owner:
            raise Blocked("R-015-1", f"the episode {eid} is another session's: {what}")

    def forked(self, statement: str, child: Any, asked: Place, owner: object) -> None:
        """Note a fork: the child's first delivery is the parent's.

        Raises:
            Blocked: It names another origin, or an eid that was used.
        """
        eid, origin = child.get("eid"), child.get("origin") or {}
        if asked not in ((origin.get("eid"), origin.get("t")), (None, origin.get("t"))):
            raise Blocked(statement, f"a fork of {asked} has another origin: {encode(child)}")
        if self.owners.get(eid) == owner:
            return  # the same answer again
        self.begun(eid, owner, encode(child))
        place: Any = (origin.get("eid"), origin.get("t"))
        first = self.deliveries.get(place)
        if first is not None:
            self.deliveries[eid, 0] = first
        self.kinds[eid, 0] = "reset"

    def offers(self, data: Any, what: object) -> None:
        """Compare capabilities with those that came before.

        Raises:
            Blocked: They differ.
        """
        here = {name: value for name, value in data.items() if name != "session"}
        if isinstance(here.get("extensions"), dict):
            here["extensions"] = {name: of for name, of in here["extensions"].items() if name not in OF_A_SOCKET}
            if "fleet" in here["extensions"]:  # each connection is answered by one of several members
                here.pop("shard", None)
        if self.capabilities is None:
            self.capabilities = here
        if here != self.capabilities:
            raise Blocked("R-015-5", f"capabilities were {encode(self.capabilities)[:300]}, and are {what}")

    def rewarded(self, eid: str, reward: Any, what: object) -> None:
        """Compare a reward with what it was before.

        Raises:
            Blocked: It differs.
        """
        content = {name: reward[name] for name in ("t", "value", "source")}
        if self.rewards.setdefault((eid, reward["reward_id"]), content) != content:
            raise Blocked("R-016-37", f"a reward was {encode(self.rewards[eid, reward['reward_id']])}: {what}")

    def listed(self, eid: str, rewards: list[Any], what: object) -> None:
        """Check the list of an episode's rewards.

        Raises:
            Blocked: A reward is of another episode, is not what it was, or is missing.
        """
        for one in rewards:
            valid(one, "http.RewardRecord", "R-016-37")
            if one.get("eid", eid) != eid:
                raise Blocked("R-016-37", f"a reward of another episode than {eid}: {what}")
            self.rewarded(eid, one, what)
        missing = self.posted.get(eid, set()) - {one["reward_id"] for one in rewards}
        if missing:
            raise Blocked("R-016-37", f"accepted rewards are not listed, {sorted(missing)}: {what}")

    def answered(self, method: str, path: str, body: Any, status: int, etag: str | None, found: bytes) -> None:
        """Hold an HTTP answer against what was delivered.

        Raises:
            Blocked: It differs.
        """
        if status != 200:
            return
        what = f"{method} {path}: {found[:300]!r}"
        if (at := STATES.fullmatch(path)) and method == "GET":
            if etag is not None and etag.strip('"') != digest(found):
                raise Blocked("R-015-14", f"{what}: ETag {etag} is not the digest of the body")
            self.delivered("R-015-14", at[1], int(at[2]), found.decode(errors="replace"), what)
        elif (at := FORK.fullmatch(path)) and method == "POST":
            child = _once(found, "R-015-17", what)
            valid(child, "http.ForkReply", "R-015-17")
            self.forked("R-015-17", child, (at[1], body.get("t")), child["session_id"])
            self.plain.setdefault(child["session_id"], Plain((child["eid"], 0)))
        elif (at := REWARDS.fullmatch(path)) and method == "GET":
            self.listed(at[1], _once(found, "R-016-37", what), what)
        elif at and not isinstance(body, str):
            if _once(found, "R-016-35", what) != body:
                raise Blocked("R-016-35", f"{what}: a post is answered with what was posted, {encode(body)[:300]}")
            for one in body if isinstance(body, list) else [body]:
                self.rewarded(at[1], one, what)
                self.posted.setdefault(at[1], set()).add(one["reward_id"])


def _once(body: bytes, statement: str, what: str) -> Any:
    """Return the value of a body of JSON.

    Raises:
        Blocked: It is no JSON, or a key stands twice in it.
    """

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(found)) < len(found):
            raise ValueError("a key stands twice")
        return dict(found)

    try:
        return json.loads(body, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise Blocked(statement, f"{what}: {error}") from None


@cache
def _validator(name: str) -> Any:
    return jsonschema.Draft202012Validator(schema(name))


def place_of(message: Any) -> str:
    """Return the statement that a message carries ``eid``, ``t`` and ``digest``: `MUX_PLACE` of one with a sid."""
    return MUX_PLACE if isinstance(message, dict) and "sid" in message else PLACE


def valid(value: Any, name: str, statement: str, place: bool = False) -> None:
    """Check a value against a schema.

    Raises:
        Blocked: It is not valid; of a delivery's fields with `place_of`.
    """
    found = next(_validator(name).iter_errors(value), None)
    if found is not None:
        about = found.json_path.removeprefix("$.")
        missing = isinstance(value, dict) and {"eid", "t", "digest"} - set(value)
        statement = place_of(value) if place and (missing or about in ("eid", "t", "digest")) else statement
        raise Blocked(statement, f"{name}: {found.json_path}: {found.message[:300]}: {encode(value)[:300]}")

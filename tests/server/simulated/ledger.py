"""What was asked and acknowledged, by whomever, and whether the journal says the same in the end."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from errata_protocol.environment import Recovery
from errata_server.journal.base import DeliveryRow, Journal
from errata_server.mux_shell import journal_sid

from .environments import Executed

ALL = 2**53
_OVER = ("SESSION_CLOSED", "SESSION_EXPIRED", "SESSION_LOST")


class Outcome(NamedTuple):
    """What a client was told under an id; of an error the code."""

    type: str
    eid: str | None
    t: int | None
    payload: bytes


@dataclass(frozen=True, slots=True)
class Asked:
    """A mutating request; its token is in no other one."""

    token: int
    sid: str
    kind: str
    condition: tuple[int, str | None] | None = None


@dataclass(slots=True)
class Known:
    """One session, as all its clients together know it.

    Attributes:
        opened: A client was told that it is there.
        closing: A client asked for its end.
        owner: Name of the client that is in charge.
    """

    sid: str
    key: str
    principal: str
    owner: str
    group: str | None = None
    opened: bool = False
    closing: bool = False
    ended: str | None = None
    replies: dict[int, Outcome] = field(default_factory=dict)
    pushes: dict[int, bytes] = field(default_factory=dict)

    def heard(self, id: int, outcome: Outcome) -> None:
        """Note a reply, which is the same as whenever it was heard before."""
        before = self.replies.setdefault(id, outcome)
        assert before == outcome, f"id {id} of {self.sid[:6]} was {before}, and is {outcome}"

    def pushed(self, seq: int, payload: bytes) -> None:
        """Note a push, likewise."""
        before = self.pushes.setdefault(seq, payload)
        assert before == payload, f"push {seq} of {self.sid[:6]} was {before!r}, and is {payload!r}"

    def deliveries(self) -> list[tuple[str, int, bytes]]:
        """Return (eid, t, payload) of all that were heard of."""
        return [(o.eid, o.t, o.payload) for o in self.replies.values() if o.eid is not None and o.t is not None]


class Ledger:
    """All sessions and requests of a schedule.

    Args:
        recovery: Class of the environment.
    """

    def __init__(self, recovery: Recovery) -> None:
        self.recovery = recovery
        self.expires = False
        self.sessions: dict[str, Known] = {}
        self.asked: dict[int, Asked] = {}
        self.refused: set[int] = set()
        """Tokens of requests whose client was told that they had no effect."""
        self.rewards: dict[str, tuple[str, int, float]] = {}
        """Acknowledged posts by reward id."""
        self.executed: Executed = []

    def ask(self, sid: str, kind: str, condition: tuple[int, str | None] | None = None) -> Asked:
        """Note a request before it is made."""
        asked = Asked(len(self.asked) + 1, sid, kind, condition)
        self.asked[asked.token] = asked
        return asked

    def failed(self, token: int | None, code: str) -> None:
        """Take that a request is over without a record."""
        if token is not None and code not in _OVER:  # what a session ends with may have been executed before
            self.refused.add(token)

    def ended(self, sid: str, code: str) -> None:
        """Take that a session is over, which must have a reason."""
        known = self.sessions[sid]
        known.ended = code
        match code:
            case "SESSION_CLOSED":
                assert known.closing, f"{sid[:6]} was closed by nobody"
            case "SESSION_EXPIRED":
                assert self.expires, f"{sid[:6]} expired, and nothing expires here"
            case "SESSION_LOST":
                assert self.recovery is Recovery.NONE, f"{sid[:6]} is lost, and could be recovered"
            case "TIMEOUT" | "EXECUTION_ERROR":
                assert not known.opened, f"{sid[:6]} was open, and ended with {code}"  # its instance could not be made
            case _:
                raise AssertionError(f"{sid[:6]} ended with {code}")

    def audit(self, journal: Journal) -> None:
        """Assert that the journal holds what was acknowledged, each request at most once, in one line of episodes."""
        committed: Counter[int] = Counter()
        for known in self.sessions.values():
            committed.update(self._audit_session(journal, known))
        twice = [token for token, times in committed.items() if times > 1]
        assert not twice, f"requests {twice} were executed and committed twice"
        effects = self.refused & committed.keys()
        assert not effects, f"requests {effects} were said to have no effect, and are committed"
        times = Counter(self.executed)
        for token in committed:
            if self.asked[token].kind == "step":
                assert times[token], f"step {token} was acknowledged and never ran"
        if self.recovery is Recovery.NONE:
            again = [token for token, n in times.items() if n > 1]
            assert not again, f"steps {again} ran twice, and nothing brings this environment back"
        for reward_id, (eid, t, value) in self.rewards.items():
            found = [row for row in journal.rewards(eid) if row.reward_id == reward_id]
            assert [(row.t, row.value) for row in found] == [(t, value)], f"reward {reward_id} is {found}"

    def _audit_session(self, journal: Journal, known: Known) -> list[int]:
        sid, name = journal_sid(known.sid), known.sid[:6]
        row = journal.session(sid)
        if row is None:
            assert not known.opened and not known.replies, f"{name} was acknowledged and is not there"
            return []
        assert (row.principal, row.group) == (known.principal, known.group), f"{name} is somebody else's: {row}"
        rows = journal.replies(sid, 1, ALL)
        assert [r.id for r in rows] == list(range(1, len(rows) + 1)), f"{name} has {[r.id for r in rows]}"
        assert max(known.replies, default=0) <= len(rows), (
            f"{name} was acknowledged {max(known.replies)}, has {len(rows)}"
        )
        for r in rows:
            assert r.id is not None
            heard = known.replies.get(r.id)
            assert heard is None or heard == outcome_of(r), f"id {r.id} of {name} was {heard}, the journal has {r}"
        seqs = journal.pushes(sid, 1, ALL)
        assert [p.seq for p in seqs] == list(range(1, len(seqs) + 1)), f"pushes of {name}: {seqs}"
        assert max(known.pushes, default=0) <= len(seqs)
        return _Walk(self, journal, known, rows).committed


class _Walk:
    """One session's committed requests, in order, from its beginning."""

    def __init__(self, ledger: Ledger, journal: Journal, known: Known, rows: list[DeliveryRow]) -> None:
        self.committed: list[int] = []
        self._ledger, self._journal, self._name = ledger, journal, known.sid[:6]
        self._eid: str | None = None
        self._t: int | None = None
        self._text = ""
        first = journal.first_episode(journal_sid(known.sid))
        row = journal.session(journal_sid(known.sid))
        if first is not None and row is not None and row.fork_of is not None:
            self._stand_at_fork(first.eid)
        for n, r in enumerate(rows, start=1):
            self._take(r, last=n == len(rows))

    def _stand_at_fork(self, eid: str) -> None:
        episode = self._journal.episode(eid)
        assert episode is not None and episode.origin_eid is not None and episode.origin_t is not None
        origin = self._journal.delivery(episode.origin_eid, episode.origin_t)
        here = self._journal.delivery(eid, 0)
        assert origin is not None and here is not None and here.payload == origin.payload, (
            f"fork {eid} is another state"
        )
        self._eid, self._t, self._text = eid, 0, text_of(here.payload)

    def _take(self, row: DeliveryRow, *, last: bool) -> None:
        token = token_of(row)
        asked = self._ledger.asked.get(token) if token is not None else None
        where = f"id {row.id} of {self._name} ({row.kind}, token {token})"
        if asked is not None:
            met = asked.condition is None or self._meets(asked.condition)
            if row.status == "PRECONDITION_FAILED":
                assert not met, f"{where} was refused although it stood at {self._eid} t={self._t}"
            elif row.status == "ok":
                assert met, f"{where} acted although it stood at {self._eid} t={self._t}, not {asked.condition}"
        if row.status != "ok" or row.t is None:
            assert row.kind != "close" or last or row.status != "ok", f"{where} closed it, and it went on"
            return
        if row.kind == "fork":
            assert row.t == 0, where
            self._stand_at_fork(row.eid)
            return
        assert token is not None and asked is not None, f"{where} was asked by nobody: {row.request!r}"
        self.committed.append(token)
        said = json.loads(row.payload)["observation"]
        assert said["n"] == token, f"{where} was answered with {said['n']}"
        if row.kind == "reset":
            assert (row.t, said["text"]) == (0, "") and row.eid != self._eid, f"{where} began at {row.t}, {said}"
            self._text = ""
        else:
            assert row.eid == self._eid and row.t == (self._t or 0) + 1, f"{where} is {row.eid} t={row.t}"
            self._text = f"{self._text} {token}".strip()
            assert said["text"] == self._text, f"{where} did {said['text']!r}, not {self._text!r}"
        self._eid, self._t = row.eid, row.t

    def _meets(self, condition: tuple[int, str | None]) -> bool:
        t, eid = condition
        return t == self._t and eid in (None, self._eid)


def outcome_of(row: DeliveryRow) -> Outcome:
    """Return what a client is told by a row."""
    if row.status != "ok":
        return Outcome("error", None, None, row.status.encode())
    kind = {"fork": "forked", "close": "closed", "mcp": "mcp"}.get(row.kind, "observation")
    if row.t is None:
        return Outcome(kind, None, None, row.payload)
    return Outcome("mcp" if row.kind == "mcp" else "observation", row.eid, row.t, row.payload)


def text_of(payload: bytes) -> str:
    """Return an environment's log as an observation tells it."""
    return str(json.loads(payload)["observation"]["text"])


def token_of(row: DeliveryRow) -> int | None:
    """Return the token in a journaled request."""
    said: Any = json.loads(row.request or b"{}")
    return said.get("n") if row.kind == "step" else said.get("seed") if row.kind == "reset" else None

"""What was asked and acknowledged, by whomever, and whether the journal says the same in the end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from errata_protocol.environment import Recovery
from errata_server.doors.mux.driver import journal_sid
from errata_server.journal.base import DeliveryRow, Journal
from errata_server.runtime.rewards import ENVIRONMENT

from .environments import Executed

ALL = 2**53
_OVER = ("SESSION_CLOSED", "SESSION_EXPIRED", "SESSION_LOST")


class Outcome(NamedTuple):
    """What a client was told under an id; of an error the code."""

    type: str
    eid: str | None
    t: int | None
    payload: bytes


NOT_MADE = ("TIMEOUT", "EXECUTION_ERROR")
"""What an open ends with whose instance could not be made, and all that was asked of it with it."""

EXPIRED = Outcome("error", None, None, b"REPLY_EXPIRED")


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
        has_deleted: The deletion of one of its episodes was begun.
        expired: Ids whose reply is kept no longer, and who was told so.
    """

    sid: str
    key: str
    principal: str
    owner: str
    group: str | None = None
    opened: bool = False
    closing: bool = False
    ended: str | None = None
    has_deleted: bool = False
    replies: dict[int, Outcome] = field(default_factory=dict)
    pushes: dict[int, bytes] = field(default_factory=dict)
    expired: set[tuple[int, str]] = field(default_factory=set)

    def heard(self, id: int, outcome: Outcome, client: str) -> None:
        """Note a reply, which is the same as whenever it was heard before; or gone, once an episode was deleted."""
        before = self.replies.setdefault(id, outcome)
        if outcome == EXPIRED:
            assert self.has_deleted, f"id {id} of {self.sid[-6:]} is kept no longer, and nothing was deleted"
            self.expired.add((id, client))
            return
        if before == EXPIRED:  # what left before the deletion may arrive after it elsewhere: two sockets have no order
            assert (id, client) not in self.expired, f"id {id} of {self.sid[-6:]} was kept no longer, and is {outcome}"
            self.replies[id] = outcome
            return
        assert before == outcome, f"id {id} of {self.sid[-6:]} was {before}, and is {outcome}"

    def pushed(self, seq: int, payload: bytes) -> None:
        """Note a push, likewise."""
        before = self.pushes.setdefault(seq, payload)
        assert before == payload, f"push {seq} of {self.sid[-6:]} was {before!r}, and is {payload!r}"

    def deliveries(self) -> list[tuple[str, int, bytes]]:
        """Return (eid, t, payload) of all that were heard of."""
        return [(o.eid, o.t, o.payload) for o in self.replies.values() if o.eid is not None and o.t is not None]

    def deliveries_of(self, eid: str) -> list[tuple[int, bytes]]:
        """Return (t, payload) of those of an episode."""
        return [(t, payload) for other, t, payload in self.deliveries() if other == eid]

    @property
    def last_seq(self) -> int:
        """The last push that was heard; some before it may be of deleted episodes."""
        return max(self.pushes, default=0)


class Ledger:
    """All sessions and requests of a schedule.

    Args:
        recovery: Class of the environment.
        judged: It gives a reward for each step.

    Attributes:
        step_rewards: Those that the audit found.
    """

    def __init__(self, recovery: Recovery, *, judged: bool = False) -> None:
        self.recovery = recovery
        self.judged = judged
        self.step_rewards = 0
        self.expires = False
        self.disk_is_lost = False
        """The disk with all sessions is lost, and whoever asks is to be told so."""
        self.sessions: dict[str, Known] = {}
        self.asked: dict[int, Asked] = {}
        self.refused: set[int] = set()
        """Tokens of requests whose client was told that they had no effect."""
        self.rewards: dict[str, tuple[str, int, float]] = {}
        """Acknowledged posts by reward id."""
        self.executed: Executed = []
        self.session_of: dict[str, str] = {}
        """Sid by eid, of all episodes that anybody heard of."""
        self.begun: dict[str, int] = {}
        """Where an episode's environment is known to have begun, by a reset or a tool that worked: t by eid."""
        self.deleting: Counter[str] = Counter()
        """How often the deletion of an episode was begun: it is there, or not."""
        self.by_hand: set[str] = set()
        """Those of them that somebody asked for; a session may end with one."""
        self.deleted: set[str] = set()
        """Episodes whose deletion was acknowledged."""

    def ask(self, sid: str, kind: str, condition: tuple[int, str | None] | None = None) -> Asked:
        """Note a request before it is made."""
        asked = Asked(len(self.asked) + 1, sid, kind, condition)
        self.asked[asked.token] = asked
        return asked

    def heard(self, sid: str, id: int, outcome: Outcome, client: str) -> None:
        """Take a reply that a client was given."""
        if outcome.eid is not None and outcome.t is not None:
            self.session_of.setdefault(outcome.eid, sid)
            if text_of(outcome.payload) is not None:
                self.begun[outcome.eid] = min(outcome.t, self.begun.get(outcome.eid, outcome.t))
        self.sessions[sid].heard(id, outcome, client)

    def forked(self, payload: bytes) -> Known:
        """Take the reply to a fork, and return the child."""
        said = json.loads(payload)
        if self.begun.get(said["origin"]["eid"], ALL) <= said["origin"]["t"]:
            self.begun[said["eid"]] = 0
        return self.sessions[said["sid"]]

    def will_delete(self, eids: Iterable[str], *, by_hand: bool) -> None:
        """Take that episodes may be gone from now on."""
        for eid in eids:
            self.deleting[eid] += 1
            if by_hand:
                self.by_hand.add(eid)
            if (known := self.sessions.get(self.session_of[eid])) is not None:
                known.has_deleted = True

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
                deleted = any(self.session_of[eid] == sid for eid in self.by_hand)
                assert known.closing or deleted, f"{sid[-6:]} was closed by nobody"
            case "SESSION_EXPIRED":
                assert self.expires, f"{sid[-6:]} expired, and nothing expires here"
            case "SESSION_LOST":
                assert self.may_be_lost, f"{sid[-6:]} is lost, and could be recovered"
            case _ if code in NOT_MADE:
                assert not known.opened, f"{sid[-6:]} was open, and ended with {code}"
            case _:
                raise AssertionError(f"{sid[-6:]} ended with {code}")

    @property
    def may_be_lost(self) -> bool:
        """Sessions may be lost: nothing brings them back, or what a fork comes from was deleted, as `audit` checks."""
        deleted = self.recovery is Recovery.REEXECUTE and bool(self.by_hand)
        return self.disk_is_lost or self.recovery is Recovery.NONE or deleted

    def audit(self, journal: Journal) -> None:
        """Assert that the journal holds what was acknowledged, each request at most once, in one line of episodes."""
        committed: Counter[int] = Counter()
        ran: set[int] = set()
        for known in self.sessions.values():
            walk = self._audit_session(journal, known)
            committed.update(walk.committed)
            ran |= walk.ran
        twice = [token for token, times in committed.items() if times > 1]
        assert not twice, f"requests {twice} were executed and committed twice"
        effects = self.refused & committed.keys()
        assert not effects, f"requests {effects} were said to have no effect, and are committed"
        times = Counter(self.executed)
        never = [token for token in ran if not times[token]]
        assert not never, f"requests {never} were acknowledged and never ran"
        if self.recovery is Recovery.NONE:
            again = [token for token, n in times.items() if n > 1]
            assert not again, f"steps {again} ran twice, and nothing brings this environment back"
        for reward_id, (eid, t, value) in self.rewards.items():
            if eid in self.deleting:
                continue
            found = [row for row in journal.rewards(eid) if row.reward_id == reward_id]
            assert [(row.t, row.value) for row in found] == [(t, value)], f"reward {reward_id} is {found}"

        for eid in sorted(self.deleted):
            left = (journal.episode(eid), journal.turns(eid), journal.rewards(eid))
            assert left == (None, [], []), f"{eid} was deleted and left {left}"

    def _audit_session(self, journal: Journal, known: Known) -> _Walk:
        sid, name = journal_sid(known.sid), known.sid[-6:]
        row = journal.session(sid)
        if row is None:
            assert not known.opened and not known.replies, f"{name} was acknowledged and is not there"
            return _Walk(self, journal, known, [])
        assert (row.principal, row.group) == (known.principal, known.group), f"{name} is somebody else's: {row}"
        rows = journal.replies(sid, 1, ALL)
        last = journal.last_id(sid)
        assert known.has_deleted or [r.id for r in rows] == list(range(1, last + 1)), f"{name} has {rows} of {last}"
        ends_deleted = known.has_deleted and row.status != "open"  # what came as the episode went is gone with it
        kept = max(known.replies, default=0) <= last or ends_deleted
        assert kept, f"{name} was acknowledged {max(known.replies)}, has {last}"
        there = {r.id for r in rows}
        for id, heard in known.replies.items():
            if heard.eid is not None and heard.eid not in self.deleting:
                assert id in there, f"id {id} of {name} was acknowledged, and its episode is not deleted"
        for r in rows:
            assert r.id is not None
            assert r.eid not in self.deleted, f"id {r.id} of {name} is of {r.eid}, which was deleted"
            heard = known.replies.get(r.id)
            assert heard is None or heard == outcome_of(r), f"id {r.id} of {name} was {heard}, the journal has {r}"
        seqs, last = journal.pushes(sid, 1, ALL), journal.last_seq(sid)
        gaps = [p.seq for p in seqs] != list(range(1, last + 1))
        assert known.has_deleted or not gaps, f"pushes of {name}: {seqs} of {last}"
        assert known.last_seq <= last
        if known.ended == "SESSION_LOST" and self.recovery is Recovery.REEXECUTE:
            self._audit_lost(journal, known)
        return _Walk(self, journal, known, rows)

    def _audit_lost(self, journal: Journal, known: Known) -> None:
        """A session is lost only where an episode that it was to be re-executed from was deleted by hand."""
        if known.has_deleted:
            return
        last = journal.last_delivery(journal_sid(known.sid))
        eid = last.eid if last is not None else None
        while eid is not None and eid not in self.by_hand:
            row = journal.episode(eid)
            assert row is not None, f"{eid} is gone, and nobody deleted it by hand"
            eid = row.origin_eid
        assert eid is not None, f"{known.sid[-6:]} is lost, and all that it comes from is there"


class _Walk:
    """One session's committed requests, in order, from its beginning, or from the next episode after a deleted one."""

    def __init__(self, ledger: Ledger, journal: Journal, known: Known, rows: list[DeliveryRow]) -> None:
        self.committed: list[int] = []
        self.ran: set[int] = set()
        self._ledger, self._journal, self._name = ledger, journal, known.sid[-6:]
        self._is_known = True
        """It is known where the session stands."""
        self._eid: str | None = None
        self._t: int | None = None
        self._begun_by_failure = False
        """A tools/call before any reset failed, and its instance lives on, for it could not be brought back."""
        self._text: str | None = ""
        """What its environment did; None where nothing says so."""
        self._judged: dict[int, float] | None = {}
        """What each delivery of the episode is worth, None where a restored instance cannot tell."""
        first = journal.first_episode(journal_sid(known.sid))
        row = journal.session(journal_sid(known.sid))
        if row is not None and row.fork_of is not None:
            if first is not None and first.origin_eid == row.fork_of and journal.delivery(first.eid, 0) is not None:
                self._stand_at_fork(first.eid)
            else:
                self._is_known = False
        before = 0
        for r in rows:
            assert r.id is not None
            self._is_known = self._is_known and r.id == before + 1
            before = r.id
            self._take(r, last=r is rows[-1])

    def _stand_at_fork(self, eid: str) -> None:
        episode = self._journal.episode(eid)
        assert episode is not None and episode.origin_eid is not None and episode.origin_t is not None
        origin = self._journal.delivery(episode.origin_eid, episode.origin_t)
        here = self._journal.delivery(eid, 0)
        deleted = episode.origin_eid in self._ledger.deleting
        assert here is not None and (origin is not None or deleted), f"fork {eid} comes from nowhere"
        assert origin is None or here.payload == origin.payload, f"fork {eid} is another state"
        self._eid, self._t, self._text = eid, 0, text_of(here.payload)
        self._is_known = True
        self._judged = None if self._ledger.recovery is Recovery.SNAPSHOT else {}

    def _take(self, row: DeliveryRow, *, last: bool) -> None:
        token = token_of(row)
        asked = self._ledger.asked.get(token) if token is not None else None
        where = f"id {row.id} of {self._name} ({row.kind}, token {token})"
        if asked is not None and self._is_known:
            met = asked.condition is None or self._meets(asked.condition)
            if row.status == "PRECONDITION_FAILED":
                assert not met, f"{where} was refused although it stood at {self._eid} t={self._t}"
            elif row.status == "ok":
                assert met, f"{where} acted although it stood at {self._eid} t={self._t}, not {asked.condition}"
        if row.status == "EXECUTION_ERROR" and self._ledger.recovery is Recovery.SNAPSHOT:
            self._judged = None  # likewise: it was judged, and is no delivery
        if row.status == "SANDBOX_FAILED" and row.kind == "mcp" and self._ledger.recovery is Recovery.NONE:
            self._begun_by_failure = True
        if row.status != "ok" or row.t is None:
            assert row.kind != "close" or last or row.status != "ok", f"{where} closed it, and it went on"
            return
        if row.kind == "fork":
            assert row.t == 0, where
            self._stand_at_fork(row.eid)
            return
        assert token is not None and asked is not None, f"{where} was asked by nobody: {row.request!r}"
        self.committed.append(token)
        if row.kind == "reset":
            said = json.loads(row.payload)["observation"]
            assert said["n"] == token and (row.t, said["text"]) == (0, ""), f"{where} began at {row.t}, {said}"
            assert not self._is_known or row.eid != self._eid, f"{where} is {row.eid} again"
            self._text, self._judged = "", {}
        else:
            self._take_action(row, token, where)
        self._eid, self._t, self._is_known = row.eid, row.t, True

    def _take_action(self, row: DeliveryRow, token: int, where: str) -> None:
        if not self._is_known:  # it begins an episode, for what was deleted are whole ones
            self._eid = self._t = None
        if self._eid is None:
            begins = row.kind == "mcp" or self._begun_by_failure
            assert row.t == 1 and begins, f"{where} is t={row.t} of an episode without a beginning"
            self._text, self._judged = "", {}
        else:
            assert row.eid == self._eid and row.t == (self._t or 0) + 1, f"{where} is {row.eid} t={row.t}"
        said = said_by(row)
        if row.kind == "mcp" and self._ledger.recovery is Recovery.SNAPSHOT:
            self._judged = None  # it was not judged, and what was judged are all that a restored instance remembers
        if said is None:  # a tool that failed did nothing, and is a delivery
            return
        self.ran.add(token)
        self._text = said["text"] if self._text is None else f"{self._text} {token}".strip()
        assert said["n"] == token, f"{where} was answered with {said['n']}"
        assert said["text"] == self._text, f"{where} did {said['text']!r}, not {self._text!r}"
        assert row.t is not None
        if row.kind == "step" and self._judged is not None:
            self._judged[row.t] = float(token)
        if row.done:
            self._look_at_rewards(row, where)

    def _look_at_rewards(self, row: DeliveryRow, where: str) -> None:
        """What the environment credits its episode with was committed with the delivery that says it is done."""
        found = {r.t: r for r in self._journal.rewards(row.eid) if r.source == ENVIRONMENT}
        self._ledger.step_rewards += len(found)
        for t, reward in found.items():
            delivery = self._journal.delivery(row.eid, t)
            assert delivery is not None and reward.value == token_of(delivery), f"{where} credits {delivery}: {reward}"
        if self._judged is not None and self._ledger.judged:
            left_out = self._judged.keys() - found.keys()
            assert not left_out, f"{where} is done, and t={sorted(left_out)} of {row.eid} have no reward"

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


def text_of(payload: bytes) -> str | None:
    """Return an environment's log as an observation or a tool tells it; None for a tool that failed."""
    said = json.loads(payload)
    told = said.get("observation") or said.get("result")
    return told["text"] if told is not None else None


def said_by(row: DeliveryRow) -> Any:
    """Return what a step or tools/call says it did, None for a tool that failed."""
    said = json.loads(row.payload)
    return said["observation"] if row.kind == "step" else said.get("result")


def token_of(row: DeliveryRow) -> int | None:
    """Return the token in a journaled request."""
    said: Any = json.loads(row.request or b"{}")
    if row.kind == "mcp":
        return said["params"]["arguments"].get("n") if "params" in said else None
    return said.get("n") if row.kind == "step" else said.get("seed") if row.kind == "reset" else None

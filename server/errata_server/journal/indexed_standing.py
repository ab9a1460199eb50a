"""`Standing`: looks up the last ids and turns of sessions and episodes of an indexed journal, in memory or in its
index.

It implements `claims.Keys`, with which new records are checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from .base import DeliveryRow, EpisodeRow, RewardRow
from .codec import LogRecord
from .index import decode_replies, decode_turns
from .live import Episode, Live, Session, Turn

Rows = Callable[[str, tuple[Any, ...]], list[tuple[Any, ...]]]
"""Returns all rows of a query on the index."""

_EPISODES = (
    "SELECT json_group_array(json_array(e.eid, e.n, e.session, t.last_t, t.deliveries, printf('%!.17g', t.reward), "
    "t.done, t.error_kinds, t.payload_bytes, t.request_bytes, t.state_bytes, printf('%!.17g', t.newest), "
    "printf('%!.17g', t.last), t.hint_keys, t.task)) "
    "FROM episodes e JOIN totals t ON t.episode = e.n "
    "WHERE e.eid IN (SELECT value FROM json_each(?))"
)
_SESSIONS = (
    "SELECT json_group_array(json_array(s.sid, s.n, s.environment IS NOT NULL, coalesce(c.last_id, 0), "
    "coalesce(c.last_seq, 0))) FROM sessions s LEFT JOIN counters c ON c.session = s.n "
    "WHERE s.sid IN (SELECT value FROM json_each(?))"
)


class Standing:
    """Looks sessions, episodes and deliveries up: the newest in memory, the others in the index.

    It answers `errata_server.journal.claims.Keys`; what those methods are asked about was looked up by `look_up`.

    Args:
        live: What is in memory.
        rows: Returns all rows of a query on the index; none where a value is one that SQLite cannot hold.
    """

    def __init__(self, live: Live, rows: Rows) -> None:
        self._live = live
        self._rows = rows
        self._rewarded: set[tuple[int, str]] = set()

    def turn(self, eid: str, t: int) -> Turn | None:
        """Return a delivery of the index, or None."""
        if eid in self._live.deleted:
            return None
        episode = self._live.episodes.get(eid)
        if episode is not None:
            for batch in self._live.batches():
                if (waiting := batch.turns.get(episode.n, {}).get(t)) is not None:
                    return Turn._make(waiting)
        sql = (
            "SELECT run FROM turns WHERE episode = (SELECT n FROM episodes WHERE eid = ?) AND last >= ? "
            "ORDER BY last LIMIT 1"
        )
        for (run,) in self._rows(sql, (eid, t)):
            for turn in decode_turns(run):
                if turn.t == t:
                    return turn
        return None

    def forked(self, fork_of: str | None, request: str) -> str | None:
        """Return the sid that a fork request made, or None."""
        for batch in self._live.batches():
            if (fork_of, request) in batch.forks:
                return batch.forks[fork_of, request]
        rows = self._rows("SELECT sid FROM sessions WHERE fork_of IS ? AND fork_request = ?", (fork_of, request))
        return str(rows[0][0]) if rows else None

    def episode(self, eid: str) -> Episode | None:
        """Return an episode's totals and last t; None without it, also where it was deleted."""
        if eid in self._live.deleted:
            return None
        return self._live.episodes.get(eid) or self._stored_episodes([eid]).get(eid)

    def session(self, sid: str) -> Session | None:
        """Return a session's last id and seq, or None."""
        return self._live.sessions.get(sid) or self._stored_sessions([sid]).get(sid)

    def _stored_episodes(self, eids: Iterable[str]) -> dict[str, Episode]:
        rows = self._rows(_EPISODES, (json.dumps(list(eids)),))
        found = {}
        for eid, n, session, last_t, deliveries, reward, done, kinds, payloads, requests, states, newest, last, keys, (
            task
        ) in json.loads(rows[0][0]) if rows else ():
            found[eid] = Episode(
                n, session, last_t, last_t, deliveries, float(reward), bool(done), kinds_of(kinds) or None,
                payloads, requests, states, float(newest), float(last), kinds_of(keys) or None, task,
            )  # fmt: skip
        return found

    def _stored_sessions(self, sids: Iterable[str]) -> dict[str, Session]:
        rows = self._rows(_SESSIONS, (json.dumps(list(sids)),))
        return {
            sid: Session(n, bool(known), last_id, last_id, last_seq)
            for sid, n, known, last_id, last_seq in (json.loads(rows[0][0]) if rows else ())
        }

    def look_up(self, records: Iterable[LogRecord]) -> None:
        """Look up where the episodes and sessions of records stand, and which of their rewards are there, all in three
        queries, before they are checked or applied: no row costs a query of its own."""
        live = self._live
        rewards: list[RewardRow] = []
        eids, sids = set[str](), set[str]()
        known_episodes, known_sessions = live.episodes, live.sessions
        for record in records:
            if type(record) is DeliveryRow and record.eid in known_episodes and record.sid in known_sessions:
                continue
            sid, eid = getattr(record, "sid", None), getattr(record, "eid", None)
            if sid is not None and sid not in live.sessions:
                sids.add(sid)
            if eid and eid not in live.episodes and eid not in live.deleted:
                eids.add(eid)
            origin = record.origin_eid if type(record) is EpisodeRow else None
            if origin and origin not in live.episodes and origin not in live.deleted:
                eids.add(origin)  # a fork may have its task from there
            if isinstance(record, RewardRow):
                rewards.append(record)
        if eids:
            live.episodes.update(self._stored_episodes(eids))
        if sids:
            live.sessions.update(self._stored_sessions(sids))
        self._rewarded = self._rewards_there(rewards) if rewards else set()

    def _rewards_there(self, rewards: Iterable[RewardRow]) -> set[tuple[int, str]]:
        asked = [(self._live.episodes[r.eid].n, r.reward_id) for r in rewards if r.eid in self._live.episodes]
        there = {(n, id) for batch in self._live.batches() for n, id in asked if id in batch.rewards.get(n, ())}
        sql = (
            "SELECT json_group_array(json_array(episode, reward_id)) FROM rewards WHERE (episode, reward_id) IN "
            "(SELECT value->>0, value->>1 FROM json_each(?))"
        )
        rows = self._rows(sql, (json.dumps(asked),))
        return there.union((n, id) for n, id in json.loads(rows[0][0]))

    # -- conflicts with a commit (errata_server.journal.claims) ---------------------------------------------

    def accepts(self, d: DeliveryRow) -> bool:
        t, id = d.t, d.id
        assert t is not None and id is not None
        episode, session = self._live.episodes.get(d.eid), self._live.sessions.get(d.sid)
        if episode is not None and session is not None and t > episode.last_t and id > session.last_id:
            return True  # as nearly every step: it comes after all that is there
        return self.has_episode(d.eid) and not self.has_delivery(d.eid, t) and not self.has_id(d.sid, id)

    def has_session(self, sid: str) -> bool:
        session = self._live.sessions.get(sid)
        return session is not None and session.known

    def has_episode(self, eid: str) -> bool:
        return eid in self._live.episodes

    def has_delivery(self, eid: str, t: int) -> bool:
        episode = self._live.episodes.get(eid)
        if episode is None:
            episode = self.episode(eid)  # an origin: it was not looked up with the others
        return episode is not None and t <= episode.last_t and self.turn(eid, t) is not None

    def has_id(self, sid: str, id: int) -> bool:
        session = self._live.sessions.get(sid)
        if session is None or id > session.last_id:
            return False
        if any(id in batch.replies.get(session.n, ()) for batch in self._live.batches()):
            return True
        sql = "SELECT run FROM replies WHERE session = ? AND last >= ? ORDER BY last LIMIT 1"
        return any(reply.id == id for (run,) in self._rows(sql, (session.n, id)) for reply in decode_replies(run))

    def has_fork(self, fork_of: str | None, request: str) -> bool:
        return self.forked(fork_of, request) is not None

    def has_reward(self, eid: str, reward_id: str) -> bool:
        episode = self._live.episodes.get(eid)
        return episode is not None and (episode.n, reward_id) in self._rewarded

    def has_seq(self, sid: str, seq: int) -> bool:
        session = self._live.sessions.get(sid)
        if session is None or seq > session.last_seq:
            return False
        if any(seq in batch.pushes.get(session.n, ()) for batch in self._live.batches()):
            return True
        return bool(self._rows("SELECT 1 FROM rewards WHERE session = ? AND seq = ?", (session.n, seq)))


def kinds_of(text: str | None) -> dict[str, int]:
    """Return error kinds and their counts from their column."""
    return dict(json.loads(text)) if text else {}

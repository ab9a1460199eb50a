"""`IndexedListing`: lists of episodes from a journal's index, and from memory where rows wait for the index.

An episode of which a row waits is left to memory, where all that lists show of it is newer; the index answers for the
others, filtered, sorted and cut to a page by SQLite. It answers with one row of JSON: each row of its own would give
the interpreter's lock away and, beside a busy event loop, wait for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from errata_protocol.episode_lists import (
    MAX_BUCKETS,
    MAX_COUNTS,
    EpisodeFilter,
    EpisodeOrder,
    ListPlace,
    aggregated,
    folded,
    summed,
)
from errata_protocol.replay import EpisodeAggregates, EpisodeBucket

from . import columns
from .base import ALL_OWNERS, EpisodeRow, EpisodeStats, ListedStatus, SessionStatus, is_owned, listed_status
from .live import Episode, Live

Rows = Callable[[str, tuple[Any, ...]], list[tuple[Any, ...]]]
"""Returns all rows of a query on the index."""

_NUMBERS = frozenset({"created"})
_ROW = ", ".join(f"printf('%!.17g', e.{name})" if name in _NUMBERS else f"e.{name}" for name in columns.EPISODE)
_STATS = (
    "json_array(e.n, t.deliveries, printf('%!.17g', t.reward), t.done, t.error_kinds, t.hint_keys, t.task, "
    f"printf('%!.17g', t.last), s.status, {_ROW})"
)
_JOINED = "JOIN totals t ON t.episode = e.n LEFT JOIN sessions s ON s.n = e.session"
_SORTED = {"created": "e.created", "last": "t.last", "reward": "t.reward", "deliveries": "t.deliveries"}
_ERRORS = "CASE WHEN t.error_kinds IS NULL THEN 0 ELSE (SELECT total(value) FROM json_each(t.error_kinds){of}) END"
_AGGREGATES = """
WITH m AS MATERIALIZED (
  SELECT CAST(e.created / ? AS INTEGER) AS at, t.deliveries, t.reward, t.done, t.error_kinds, t.hint_keys
  FROM {tables} WHERE {where}
)
SELECT
  (SELECT json_group_array(json_array(at, n, done, deliveries, printf('%!.17g', reward))) FROM (
    SELECT at, count(*) AS n, sum(done) AS done, sum(deliveries) AS deliveries, sum(reward) AS reward
    FROM m GROUP BY at LIMIT ?)),
  (SELECT json_group_array(json_array(at, key, n)) FROM (
    SELECT at, j.key AS key, sum(j.value) AS n FROM m, json_each(m.error_kinds) j
    WHERE m.error_kinds IS NOT NULL GROUP BY at, j.key LIMIT ?)),
  (SELECT json_group_array(json_array(at, key, n)) FROM (
    SELECT at, j.key AS key, sum(j.value) AS n FROM m, json_each(m.hint_keys) j
    WHERE m.hint_keys IS NOT NULL GROUP BY at, j.key LIMIT ?))
"""
_STATUSES = ("open", "lost", "expired")
"""Statuses of sessions other than closed, which is also what counts where the session is not known."""


class IndexedListing:
    """Lists the episodes of a journal with an index. Any thread may read.

    Args:
        live: What is not in the index yet.
        rows: Returns all rows of a query on the index; none where a value is one that SQLite cannot hold.
    """

    def __init__(self, live: Live, rows: Rows) -> None:
        self._live = live
        self._rows = rows

    def page(
        self,
        *,
        limit: int,
        after: ListPlace | None,
        wanted: EpisodeFilter,
        order: EpisodeOrder,
        principal: str | None,
        attached: frozenset[str] | None,
    ) -> tuple[list[EpisodeStats], ListPlace | None]:
        """Return a page; see `errata_server.journal.base.Reads.episodes`."""
        # What waits first: what leaves for the index meanwhile is then found twice, not missed.
        waiting = _Waiting(self._live, attached)
        query = _Query(wanted, principal, waiting)
        sorted_by, of = _sorted(order)
        if after is not None:
            query.add(f"({sorted_by}, e.eid) {'<' if order.descending else '>'} (?, ?)", *of, *after)
        down = "DESC" if order.descending else "ASC"
        sql = (
            f"SELECT json_group_array({_STATS}) FROM (SELECT e.n AS n FROM {query.tables} WHERE {query.where} "
            f"ORDER BY {sorted_by} {down}, e.eid {down} LIMIT ?) page JOIN episodes e ON e.n = page.n {_JOINED}"
        )
        found = {one.eid: one for one in self._stats(sql, (*query.values, *of, limit + 1), waiting)}
        for one in self._in_memory(waiting):
            if is_owned(one.row.principal, principal) and wanted.matches(one) and order.is_after(one, after):
                found[one.eid] = one
        return order.page(found.values(), limit)

    def aggregates(
        self, bucket_s: int, wanted: EpisodeFilter, principal: str | None, attached: frozenset[str] | None
    ) -> EpisodeAggregates:
        """Return sums; see `errata_server.journal.base.Reads.aggregates`."""
        waiting = _Waiting(self._live, attached)
        found = (one for one in self._in_memory(waiting) if is_owned(one.row.principal, principal))
        newer = aggregated((one for one in found if wanted.matches(one)), bucket_s)
        query = _Query(wanted, principal, waiting)
        sql = _AGGREGATES.format(tables=query.tables, where=query.where)
        limits = (MAX_BUCKETS + 1, MAX_COUNTS + 1, MAX_COUNTS + 1)  # one too many is refused below
        rows = self._rows(sql, (bucket_s, *query.values, *limits))
        buckets: dict[int, EpisodeBucket] = {}
        for texts in rows:
            sums, kinds, keys = map(json.loads, texts)
            for at, episodes, done, deliveries, reward in sums:
                buckets[at] = EpisodeBucket(
                    start=at * bucket_s, episodes=episodes, done=done, deliveries=deliveries, reward=float(reward)
                )
            for at, kind, turns in kinds:
                if at in buckets:  # else there are too many
                    buckets[at].error_kinds[kind] = turns
            for at, key, turns in keys:
                if at in buckets:
                    buckets[at].hint_keys[key] = turns
        return summed([newer, EpisodeAggregates(bucket_s=bucket_s, buckets=list(buckets.values()))])

    def _in_memory(self, waiting: _Waiting) -> Iterator[EpisodeStats]:
        """Yield the episodes of which something waits."""
        statuses = self._statuses(waiting)
        for n, row in waiting.new.items():
            if row.eid not in waiting.deleted:
                yield waiting.totals[n].stats(row, waiting.listed(statuses.get(row.sid), row.sid))
        if older := [n for n in waiting.totals if n not in waiting.new]:
            among = "e.n IN (SELECT value FROM json_each(?))"
            sql = f"SELECT json_group_array({_STATS}) FROM episodes e {_JOINED} WHERE {among}"
            yield from self._stats(sql, (json.dumps(older),), waiting)

    def _stats(self, sql: str, values: tuple[Any, ...], waiting: _Waiting) -> list[EpisodeStats]:
        rows = self._rows(sql, values)
        found = [waiting.made(one) for one in json.loads(rows[0][0])] if rows else []
        return [one for one in found if one.eid not in waiting.deleted]

    def _statuses(self, waiting: _Waiting) -> dict[str, SessionStatus]:
        """Return the statuses of the sessions of new episodes."""
        sids = {row.sid for row in waiting.new.values()} - waiting.statuses.keys()
        sql = (
            "SELECT json_group_array(json_array(sid, status)) FROM sessions WHERE status IS NOT NULL "
            "AND sid IN (SELECT value FROM json_each(?))"
        )
        rows = self._rows(sql, (json.dumps(list(sids)),)) if sids else []
        return {**dict(json.loads(rows[0][0]) if rows else ()), **waiting.statuses}


class _Waiting:
    """What waits for the index, as it is when this is made.

    Args:
        live: What is not in the index yet.
        attached: Ids of the sessions that have a connection; see `errata_server.journal.base.listed_status`.

    Attributes:
        deleted: Numbers of the episodes that the index still has, by eid.
        new: Episodes that the index need not have, by number.
        totals: What the deliveries of episodes add up to of which something waits, by number.
        statuses: Statuses that sessions have since the index was written, by sid.
    """

    def __init__(self, live: Live, attached: frozenset[str] | None) -> None:
        self.attached = attached
        self.new: dict[int, EpisodeRow] = {}
        self.totals: dict[int, Episode] = {}
        self.statuses: dict[str, SessionStatus] = {}
        with live.locked_batches() as batches:
            self.deleted = live.deleted.copy()
            for batch in batches:
                self.new.update((n, row) for n, _, row in batch.episodes.values())
                self.totals.update(batch.of_episodes)
                self.statuses.update((sid, row.status) for sid, (_, row) in batch.sessions.items() if row is not None)
                changed = ((sid, change.status) for sid, change in batch.changes.items())
                self.statuses.update((sid, status) for sid, status in changed if status is not None)

    def listed(self, status: SessionStatus | None, sid: str) -> ListedStatus | None:
        """Return the status that lists show of a session."""
        return listed_status(status, sid, self.attached)

    def made(self, columns_of: list[Any]) -> EpisodeStats:
        """Return the episode of a row `_STATS` of the index, with what is newer in memory."""
        n, deliveries, reward, done, kinds, keys, task, last, status, *row = columns_of
        for at, name in enumerate(columns.EPISODE):
            if name in _NUMBERS:
                row[at] = float(row[at])
        found = columns.episode(row)
        status = self.listed(self.statuses.get(found.sid, status), found.sid)
        if (totals := self.totals.get(n)) is not None:
            return totals.stats(found, status)
        return EpisodeStats(
            found, deliveries, float(reward), bool(done), _counts(kinds), _counts(keys), task, float(last), status
        )


class _Query:
    """The condition of a query on the index: of a filter and an owner, without the episodes that memory answers for."""

    def __init__(self, wanted: EpisodeFilter, principal: str | None, waiting: _Waiting) -> None:
        # A text is mostly sought where few have it: in the order of an index, which else ends early, all cost double.
        scanned = " NOT INDEXED" if wanted.text is not None else ""
        self.tables = f"episodes e{scanned} JOIN totals t ON t.episode = e.n"
        self._wheres: list[str] = ["TRUE"]
        self.values: list[Any] = []
        if principal != ALL_OWNERS:
            self.add("e.principal IS ?", principal)
        hidden = [*waiting.totals, *waiting.deleted.values()]
        if hidden:
            self.add("e.n NOT IN (SELECT value FROM json_each(?))", json.dumps(hidden))
        for clause, value in (
            ("e.environment = ?", wanted.environment),
            ("t.task = ?", wanted.task),
            ("e.episode_id = ?", wanted.episode_id),
            ("t.reward >= ?", wanted.reward_min),
            ("t.reward <= ?", wanted.reward_max),
            ("e.created >= ?", wanted.created_from),
            ("e.created < ?", wanted.created_before),
            ("t.last >= ?", wanted.last_from),
            ("t.last < ?", wanted.last_before),
            ("e.origin_eid = ?", wanted.origin),
            ("e.label_group = ?", wanted.group),
            ("e.label_step = ?", wanted.step),
            ("e.label_run = ?", wanted.run),
            ("EXISTS (SELECT 1 FROM json_each(t.error_kinds) WHERE key = ?)", wanted.error_kind),
        ):
            if value is not None:
                self.add(clause, value)
        if wanted.text is not None:
            sought = folded(wanted.text)
            self.add("(" + " OR ".join(f"instr(lower({name}), ?)" for name in _TEXTS) + ")", *[sought] * len(_TEXTS))
        if wanted.status == "done":
            self.add("t.done")
        elif wanted.status is not None:
            self._add_status(wanted.status, waiting)

    @property
    def where(self) -> str:
        """The condition, for `values`."""
        return " AND ".join(self._wheres)

    def add(self, clause: str, *values: Any) -> None:
        """Add a condition."""
        self._wheres.append(clause)
        self.values += values

    def _add_status(self, status: ListedStatus, waiting: _Waiting) -> None:
        if status == "detached" and waiting.attached is None:
            self.add("FALSE")  # nobody knows, and all open ones are listed as such
            return
        of: tuple[str, ...] = _STATUSES if status == "closed" else ("open",) if status == "detached" else (status,)
        changed = list(waiting.statuses)
        now = [sid for sid, newer in waiting.statuses.items() if newer in of]
        if status in ("open", "detached") and waiting.attached is not None:
            self.add(
                f"e.session {'NOT ' * (status == 'detached')}IN ("
                "SELECT n FROM sessions WHERE sid IN (SELECT value FROM json_each(?)))",
                json.dumps(list(waiting.attached)),
            )
        self.add(
            f"NOT t.done AND e.session {'NOT ' * (status == 'closed')}IN ("
            "SELECT n FROM sessions WHERE status IN (SELECT value FROM json_each(?)) "
            "AND sid NOT IN (SELECT value FROM json_each(?)) "
            "UNION ALL SELECT n FROM sessions WHERE sid IN (SELECT value FROM json_each(?)))",
            json.dumps(of), json.dumps(changed), json.dumps(now),
        )  # fmt: skip


def _sorted(order: EpisodeOrder) -> tuple[str, tuple[str, ...]]:
    """Return what an order sorts by, as SQL, and its values."""
    if order.by != "errors":
        return _SORTED[order.by], ()
    if order.error_kind is None:
        return _ERRORS.format(of=""), ()
    return _ERRORS.format(of=" WHERE key = ?"), (order.error_kind,)


_TEXTS = ("e.eid", "e.episode_id", "t.task")


def _counts(text: str | None) -> dict[str, int]:
    return dict(sorted(json.loads(text).items())) if text else {}

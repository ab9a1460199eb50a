"""Reading the SQLite journal: the queries, and a journal that does nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import apsw

from errata_protocol.environment import SnapshotRef
from errata_protocol.errors import ErrataError, JournalUnavailable

from . import columns
from .base import DeliveryRow, EpisodeRow, EpisodeStats, HeldEpisode, Journal, Record, RewardRow, SessionRow, TurnRow
from .readers import Readers

T = TypeVar("T")

SCHEMA_VERSION = 3
"""``PRAGMA user_version`` of the journals that this Errata reads and writes."""

_ERRORS_AFTER = (
    f"SELECT {columns.DELIVERY} FROM deliveries WHERE eid = ?1 AND t IS NULL "
    "AND n > (SELECT n FROM deliveries WHERE eid = ?1 AND t = ?2) "
    "AND n < coalesce((SELECT n FROM deliveries WHERE eid = ?1 AND t = ?2 + 1), 9223372036854775807) ORDER BY n"
)

_SIZES = (
    "SELECT count(*), coalesce(sum(length(payload)), 0), coalesce(sum(length(request)), 0), "
    "coalesce(sum(length(state)), 0), max(created), max(done) FROM deliveries WHERE eid = ? AND"
)  # once for each of the two partial indexes

MAX_INTEGER = 2**63 - 1
"""Largest integer that SQLite holds."""


class SqliteReads(Journal):
    """The reading half of a journal in one SQLite file; see `Journal`."""

    durable = True
    blocking = True

    def __init__(self, path: Path, *, vfs: str | None = None, flags: int | None = None) -> None:
        self._path = path
        self._vfs = vfs
        self._flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE if flags is None else flags
        self._readers = Readers(self._connect, str(path))
        self._rows = self._readers.rows

    def _connect(self) -> apsw.Connection:
        db = apsw.Connection(str(self._path), flags=self._flags, vfs=self._vfs)
        db.set_busy_timeout(5000)
        db.execute("PRAGMA wal_autocheckpoint=0").fetchall()
        return db

    def _version(self, db: apsw.Connection) -> int:
        """Return the schema version: ours, or 0 for an empty file.

        Raises:
            JournalUnavailable: It is another.
        """
        version: Any = db.execute("PRAGMA user_version").fetchall()[0][0]
        if version not in (0, SCHEMA_VERSION):
            raise JournalUnavailable(
                f"the journal {self._path} has schema version {version}, this Errata writes {SCHEMA_VERSION}: "
                "use the Errata version that made it, or another --data-dir"
            )
        return int(version)

    def delivery(self, eid: str, t: int) -> DeliveryRow | None:
        return _first(
            columns.delivery, self._rows(f"SELECT {columns.DELIVERY} FROM deliveries WHERE eid = ? AND t = ?", (eid, t))
        )

    def recorded(self, eid: str, t: int) -> list[DeliveryRow]:
        delivery = self.delivery(eid, t)
        if delivery is None:
            return []
        return [delivery, *(columns.delivery(row) for row in self._rows(_ERRORS_AFTER, (eid, t)))]

    def last_delivery(self, sid: str) -> DeliveryRow | None:
        sql = f"SELECT {columns.DELIVERY} FROM deliveries WHERE sid = ? AND t IS NOT NULL ORDER BY n DESC LIMIT 1"
        return _first(columns.delivery, self._rows(sql, (sid,)))

    def replies(self, sid: str, first: int, last: int) -> list[DeliveryRow]:
        sql = f"SELECT {columns.DELIVERY} FROM deliveries WHERE sid = ? AND id BETWEEN ? AND ? ORDER BY id"
        return [columns.delivery(row) for row in self._rows(sql, (sid, first, min(last, MAX_INTEGER)))]

    def last_id(self, sid: str) -> int:
        rows = self._rows("SELECT last_id FROM counters WHERE sid = ?", (sid,))
        return rows[0][0] if rows else 0

    def rewards(self, eid: str) -> list[RewardRow]:
        sql = f"SELECT {columns.REWARD} FROM rewards WHERE eid = ? ORDER BY n"
        return [columns.reward(row) for row in self._rows(sql, (eid,))]

    def pushes(self, sid: str, first: int, last: int) -> list[RewardRow]:
        sql = f"SELECT {columns.REWARD} FROM rewards WHERE sid = ? AND seq BETWEEN ? AND ? ORDER BY seq"
        return [columns.reward(row) for row in self._rows(sql, (sid, first, min(last, MAX_INTEGER)))]

    def last_seq(self, sid: str) -> int:
        rows = self._rows("SELECT last_seq FROM counters WHERE sid = ?", (sid,))
        return rows[0][0] if rows else 0

    def episode(self, eid: str) -> EpisodeRow | None:
        sql = f"SELECT {columns.EPISODE} FROM episodes WHERE eid = ?"
        return _first(columns.episode, self._rows(sql, (eid,)))

    def first_episode(self, sid: str) -> EpisodeRow | None:
        sql = f"SELECT {columns.EPISODE} FROM episodes WHERE sid = ? ORDER BY n LIMIT 1"
        return _first(columns.episode, self._rows(sql, (sid,)))

    def turns(self, eid: str) -> list[TurnRow]:
        sql = (
            "SELECT t, kind, digest, semantic_digest, reward, done, error_kind, hint_template_key "
            "FROM deliveries WHERE eid = ? AND t IS NOT NULL ORDER BY t"
        )
        return [TurnRow(t, k, d, sd, r, bool(done), ek, h) for t, k, d, sd, r, done, ek, h in self._rows(sql, (eid,))]

    def episodes(
        self,
        *,
        limit: int,
        before: int | None = None,
        environment: str | None = None,
        error_kind: str | None = None,
        episode_id: str | None = None,
        principal: str | None,
    ) -> tuple[list[EpisodeStats], int | None]:
        wheres: list[str] = ["e.principal IS ?"]
        values: list[str | int | None] = [principal]
        for clause, value in (
            ("e.n < ?", None if before is None else min(before, MAX_INTEGER)),
            ("e.environment = ?", environment),
            ("e.episode_id = ?", episode_id),
            ("EXISTS (SELECT 1 FROM deliveries d WHERE d.eid = e.eid AND d.error_kind = ?)", error_kind),
        ):
            if value is not None:
                wheres.append(clause)
                values.append(value)
        named = ", ".join(f"e.{c.strip()}" for c in columns.EPISODE.split(","))
        sql = f"SELECT e.n, {named} FROM episodes e WHERE {' AND '.join(wheres)} ORDER BY e.n DESC LIMIT ?"
        rows = self._rows(sql, (*values, limit + 1))
        stats = [self._stats(columns.episode(row[1:])) for row in rows[:limit]]
        return stats, rows[limit - 1][0] if len(rows) > limit else None

    def _stats(self, row: EpisodeRow) -> EpisodeStats:
        sql = "SELECT count(*), coalesce(sum(reward), 0.0), max(done) FROM deliveries WHERE eid = ? AND t IS NOT NULL"
        count, reward, done = self._rows(sql, (row.eid,))[0]
        sql = (
            "SELECT error_kind, count(*) FROM deliveries WHERE eid = ? AND error_kind IS NOT NULL GROUP BY 1 ORDER BY 1"
        )
        return EpisodeStats(row, count, reward, bool(done), dict(self._rows(sql, (row.eid,))))

    def held(self, *, after: int, limit: int) -> list[HeldEpisode]:
        sql = f"SELECT n, {columns.EPISODE} FROM episodes WHERE n > ? ORDER BY n LIMIT ?"
        return [self._held(n, columns.episode(row)) for n, *row in self._rows(sql, (after, limit))]

    def _held(self, n: int, row: EpisodeRow) -> HeldEpisode:
        turns, payloads, requests, states, last, done = self._rows(f"{_SIZES} t IS NOT NULL", (row.eid,))[0]
        _, *errors, error_last, _ = self._rows(f"{_SIZES} t IS NULL", (row.eid,))[0]
        payloads, requests, states = (a + b for a, b in zip((payloads, requests, states), errors, strict=True))
        newest = max(row.created if last is None else last, error_last or 0.0)
        return HeldEpisode(n, row, turns, payloads, requests, states, newest, bool(done))

    def session(self, sid: str) -> SessionRow | None:
        return _first(columns.session, self._rows(f"SELECT {columns.SESSION} FROM sessions WHERE sid = ?", (sid,)))

    def open_sessions(self) -> list[SessionRow]:
        rows = self._rows(f"SELECT {columns.SESSION} FROM sessions WHERE status = 'open' ORDER BY created")
        return [columns.session(row) for row in rows]

    def fork_session(self, eid: str, request_id: str) -> SessionRow | None:
        sql = f"SELECT {columns.SESSION} FROM sessions WHERE fork_of = ? AND fork_request = ?"
        return _first(columns.session, self._rows(sql, (eid, request_id)))

    def refs(self) -> set[SnapshotRef]:
        rows = self._rows("SELECT DISTINCT refs FROM deliveries WHERE refs IS NOT NULL")
        return {ref for (refs,) in rows for ref in columns.refs_of(refs)}


class ReadOnlyJournal(SqliteReads):
    """A journal to look at, of a server that may be running: changes no row, starts no thread, writes no schema.

    Args:
        path: Database file.

    Raises:
        JournalUnavailable: There is no journal of this schema version, or it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, flags=apsw.SQLITE_OPEN_READONLY)
        try:
            db = self._connect()
            try:
                version = self._version(db)
            finally:
                db.close()
        except apsw.Error as error:
            raise JournalUnavailable(f"cannot read the journal {path}: {error}; check its permissions") from error
        if version == 0:
            raise JournalUnavailable(f"{path} holds no journal: give another --data-dir")

    @property
    def failing(self) -> str | None:
        return "it was opened to be read only"

    def submit(self, records: Sequence[Record], settled: Callable[[ErrataError | None], None]) -> None:
        raise self._refusal()

    def delete_episode(self, eid: str) -> int:
        raise self._refusal()

    def close(self) -> None:
        self._readers.close()

    def _refusal(self) -> JournalUnavailable:
        return JournalUnavailable(f"the journal {self._path} was opened to be read only")


def _first(made: Callable[[Sequence[Any]], T], rows: list[tuple[Any, ...]]) -> T | None:
    return made(rows[0]) if rows else None

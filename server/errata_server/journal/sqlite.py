"""The durable journal: SQLite in WAL mode, ``synchronous=FULL``, group commit (PROTOCOL E1).

apsw rather than the standard library's module: it brings one SQLite version to every machine, reports which failure
happened (disk full or constraint), and its VFS lets tests take away what was written after the last sync.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import apsw

from errata_protocol.environment import SnapshotRef
from errata_protocol.errors import (
    Conflict,
    EnvironmentOutputInvalid,
    ErrataError,
    JournalUnavailable,
    UnknownEpisode,
)

from .base import (
    DeliveryRow,
    EpisodeRow,
    EpisodeStats,
    Journal,
    Record,
    SessionChange,
    SessionRow,
    TurnRow,
)
from .readers import Readers
from .writer import GroupWriter, StoreFailed

SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE sessions(
  sid TEXT PRIMARY KEY, environment TEXT NOT NULL, recovery TEXT NOT NULL, seed INTEGER NOT NULL, created REAL NOT NULL,
  given_out INTEGER NOT NULL, principal TEXT, status TEXT NOT NULL, fork_of TEXT, fork_request TEXT
) WITHOUT ROWID;
CREATE INDEX sessions_open ON sessions(status) WHERE status = 'open';
CREATE UNIQUE INDEX sessions_fork ON sessions(fork_of, fork_request) WHERE fork_request IS NOT NULL;

CREATE TABLE episodes(
  n INTEGER PRIMARY KEY, eid TEXT NOT NULL UNIQUE, sid TEXT NOT NULL, environment TEXT NOT NULL, created REAL NOT NULL,
  episode_id TEXT, principal TEXT, origin_eid TEXT, origin_t INTEGER, agent_text_version TEXT
);
CREATE INDEX episodes_sid ON episodes(sid);

CREATE TABLE deliveries(
  n INTEGER PRIMARY KEY, eid TEXT NOT NULL, t INTEGER, sid TEXT NOT NULL, id INTEGER, kind TEXT NOT NULL,
  request BLOB NOT NULL, request_sha BLOB NOT NULL, status TEXT NOT NULL, payload BLOB NOT NULL, digest BLOB NOT NULL,
  semantic_digest BLOB, state BLOB, refs TEXT, created REAL NOT NULL, reward REAL, done INTEGER NOT NULL,
  error_kind TEXT, hint_template_key TEXT
);
CREATE UNIQUE INDEX deliveries_t ON deliveries(eid, t) WHERE t IS NOT NULL;
CREATE UNIQUE INDEX deliveries_id ON deliveries(sid, id) WHERE id IS NOT NULL;
CREATE INDEX deliveries_sid ON deliveries(sid, n) WHERE t IS NOT NULL;
"""

_SESSION = "sid, environment, recovery, seed, created, given_out, principal, status, fork_of, fork_request"
_EPISODE = "eid, sid, environment, created, episode_id, principal, origin_eid, origin_t, agent_text_version"
_DELIVERY = (
    "eid, t, sid, id, kind, request, request_sha, status, payload, digest, semantic_digest, state, refs, created, "
    "reward, done, error_kind, hint_template_key"
)

FULL = 2
"""``PRAGMA synchronous`` value under which a commit is on disk when it returns."""
NORMAL = 1
"""Value without that promise: a process crash loses nothing, a power loss may lose the last commits."""


def _placeholders(columns: str) -> str:
    return ", ".join("?" for _ in columns.split(","))


_INSERT_SESSION = f"INSERT INTO sessions({_SESSION}) VALUES ({_placeholders(_SESSION)})"
# Both insert nothing where the row's parent was deleted since the caller read it: ?7 and ?8 are the origin, ?1 the eid.
_INSERT_EPISODE = (
    f"INSERT INTO episodes({_EPISODE}) SELECT {_placeholders(_EPISODE)} "
    "WHERE ?7 IS NULL OR EXISTS (SELECT 1 FROM deliveries WHERE eid = ?7 AND t = ?8)"
)
_INSERT_DELIVERY = (
    f"INSERT INTO deliveries({_DELIVERY}) SELECT {_placeholders(_DELIVERY)} "
    "WHERE EXISTS (SELECT 1 FROM episodes WHERE eid = ?1)"
)

_CHANGE_SESSION = "UPDATE sessions SET status = coalesce(?, status), given_out = coalesce(?, given_out) WHERE sid = ?"

_RETRYABLE = (
    apsw.FullError,
    apsw.IOError,
    apsw.BusyError,
    apsw.LockedError,
    apsw.CantOpenError,
    apsw.ReadOnlyError,
    apsw.NoMemError,
)

_RECORD_FAULTS = (apsw.ConstraintError, apsw.TooBigError, apsw.MismatchError)
"""What SQLite reports about a record; its other errors are about the store, and hold for every record alike."""

MAX_INTEGER = 2**63 - 1
"""Largest integer that SQLite holds."""


class SqliteJournal(Journal):
    """Journal in one SQLite file.

    Args:
        path: Database file; its directory must exist.
        fsync: False trades the promise of E3 under power loss for speed; a process crash still loses nothing.
        vfs: Name of a registered apsw VFS, for tests with a fake disk.

    Raises:
        JournalUnavailable: The file cannot be opened or belongs to another schema version.
    """

    durable = True

    def __init__(self, path: Path, *, fsync: bool = True, vfs: str | None = None) -> None:
        self._path = path
        self._vfs = vfs
        self._readers = Readers(self._connect, str(path))
        self._rows = self._readers.rows
        self._close_lock = threading.Lock()
        self._closed = False
        try:
            path.touch(mode=0o600)  # SQLite gives its other files the same mode
            self._db = self._connect()
            self._set_up(FULL if fsync else NORMAL)
        except (apsw.Error, OSError) as error:
            raise JournalUnavailable(
                f"cannot open the journal {path}: {error}; check the directory's permissions and free space, "
                "or give another --data-dir"
            ) from error
        self._write_lock = threading.Lock()
        self._checkpoint_wanted = threading.Event()
        self._db.set_wal_hook(self._on_wal)
        self._checkpointer = threading.Thread(target=self._checkpoint, name="errata-checkpoint", daemon=True)
        self._checkpointer.start()
        self._writer = GroupWriter(self._write, "errata-journal")

    @property
    def failing(self) -> str | None:
        return self._writer.failing

    async def commit(self, *records: Record) -> None:
        await self._writer.commit(records)

    # -- writing ------------------------------------------------------------------------------------------------

    def _write(self, groups: list[Sequence[Record]]) -> list[ErrataError | None]:
        """Write ``groups`` in one transaction: all that can be written becomes durable with one COMMIT, or nothing."""
        with self._write_lock:
            try:
                try:
                    with self._transaction():
                        for group in groups:
                            self._insert(group)
                    return [None] * len(groups)
                except Exception as error:
                    if _is_of_the_store(error):
                        raise
                with self._transaction():
                    return [self._insert_apart(group) for group in groups]
            except _RETRYABLE as error:
                raise StoreFailed(f"{self._path}: {error}") from error

    def _insert_apart(self, group: Sequence[Record]) -> ErrataError | None:
        """Insert ``group`` within the open transaction, or nothing of it; return what is wrong with it."""
        self._db.execute("SAVEPOINT one")
        try:
            self._insert(group)
        except Exception as error:
            if _is_of_the_store(error):
                raise
            self._db.execute("ROLLBACK TO one")
            self._db.execute("RELEASE one")
            return _fault_of(error)
        self._db.execute("RELEASE one")
        return None

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _insert(self, records: Sequence[Record]) -> None:
        for record in records:
            match record:
                case DeliveryRow() as d:
                    refs = json.dumps([[r.kind, r.id, r.digest] for r in d.refs]) if d.refs else None
                    values: tuple[Any, ...] = (
                        d.eid, d.t, d.sid, d.id, d.kind, d.request, d.request_sha, d.status, d.payload, d.digest,
                        d.semantic_digest, d.state, refs, d.created, d.reward, d.done, d.error_kind,
                        d.hint_template_key,
                    )  # fmt: skip
                    self._db.execute(_INSERT_DELIVERY, values)
                    if d.t is not None and not self._db.changes():
                        raise UnknownEpisode(d.eid)
                case EpisodeRow() as e:
                    values = (
                        e.eid, e.sid, e.environment, e.created, e.episode_id, e.principal, e.origin_eid, e.origin_t,
                        e.agent_text_version,
                    )  # fmt: skip
                    self._db.execute(_INSERT_EPISODE, values)
                    if e.origin_eid is not None and not self._db.changes():
                        raise UnknownEpisode(e.origin_eid)
                case SessionRow() as s:
                    values = (
                        s.sid, s.environment, s.recovery, s.seed, s.created, s.given_out, s.principal, s.status,
                        s.fork_of, s.fork_request,
                    )  # fmt: skip
                    self._db.execute(_INSERT_SESSION, values)
                case SessionChange() as c:
                    self._db.execute(_CHANGE_SESSION, (c.status, c.given_out, c.sid))

    def delete_episode(self, eid: str) -> int:
        with self._write_lock:
            if self._closed:
                raise JournalUnavailable("the journal is closed: the server is shutting down")
            try:
                with self._transaction():
                    self._db.execute("DELETE FROM deliveries WHERE eid = ?", (eid,))
                    deleted = self._db.changes()
                    self._db.execute("DELETE FROM episodes WHERE eid = ?", (eid,))
            except _RETRYABLE as error:
                raise JournalUnavailable(f"cannot delete from the journal {self._path}: {error}") from error
        return deleted

    # -- checkpoints: off the writer, because copying the WAL back can take longer than many commits --------------

    def _on_wal(self, _db: apsw.Connection, _name: str, pages: int) -> int:
        if pages >= 1000:
            self._checkpoint_wanted.set()
        return apsw.SQLITE_OK

    def _checkpoint(self) -> None:
        db = self._connect()
        try:
            while True:
                self._checkpoint_wanted.wait()
                self._checkpoint_wanted.clear()
                if self._closed:
                    return
                try:
                    db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
                except _RETRYABLE:  # a full disk: the WAL stays as it is and the next commit asks again
                    continue
        finally:
            db.close()

    # -- reading ------------------------------------------------------------------------------------------------

    def _connect(self) -> apsw.Connection:
        db = apsw.Connection(str(self._path), vfs=self._vfs)
        db.set_busy_timeout(5000)
        db.execute("PRAGMA wal_autocheckpoint=0").fetchall()
        return db

    def delivery(self, eid: str, t: int) -> DeliveryRow | None:
        return _delivery(self._rows(f"SELECT {_DELIVERY} FROM deliveries WHERE eid = ? AND t = ?", (eid, t)))

    def last_delivery(self, sid: str) -> DeliveryRow | None:
        sql = f"SELECT {_DELIVERY} FROM deliveries WHERE sid = ? AND t IS NOT NULL ORDER BY n DESC LIMIT 1"
        return _delivery(self._rows(sql, (sid,)))

    def episode(self, eid: str) -> EpisodeRow | None:
        rows = self._rows(f"SELECT {_EPISODE} FROM episodes WHERE eid = ?", (eid,))
        return EpisodeRow(*rows[0]) if rows else None

    def first_episode(self, sid: str) -> EpisodeRow | None:
        rows = self._rows(f"SELECT {_EPISODE} FROM episodes WHERE sid = ? ORDER BY n LIMIT 1", (sid,))
        return EpisodeRow(*rows[0]) if rows else None

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
        principal: str | None,
    ) -> tuple[list[EpisodeStats], int | None]:
        wheres: list[str] = ["e.principal IS ?"]
        values: list[str | int | None] = [principal]
        for clause, value in (
            ("e.n < ?", None if before is None else min(before, MAX_INTEGER)),
            ("e.environment = ?", environment),
            ("EXISTS (SELECT 1 FROM deliveries d WHERE d.eid = e.eid AND d.error_kind = ?)", error_kind),
        ):
            if value is not None:
                wheres.append(clause)
                values.append(value)
        columns = ", ".join(f"e.{c.strip()}" for c in _EPISODE.split(","))
        sql = f"SELECT e.n, {columns} FROM episodes e WHERE {' AND '.join(wheres)} ORDER BY e.n DESC LIMIT ?"
        rows = self._rows(sql, (*values, limit + 1))
        stats = [self._stats(EpisodeRow(*row[1:])) for row in rows[:limit]]
        return stats, rows[limit - 1][0] if len(rows) > limit else None

    def _stats(self, row: EpisodeRow) -> EpisodeStats:
        sql = "SELECT count(*), coalesce(sum(reward), 0.0), max(done) FROM deliveries WHERE eid = ? AND t IS NOT NULL"
        count, reward, done = self._rows(sql, (row.eid,))[0]
        sql = (
            "SELECT error_kind, count(*) FROM deliveries WHERE eid = ? AND error_kind IS NOT NULL GROUP BY 1 ORDER BY 1"
        )
        return EpisodeStats(row, count, reward, bool(done), dict(self._rows(sql, (row.eid,))))

    def session(self, sid: str) -> SessionRow | None:
        return _session(self._rows(f"SELECT {_SESSION} FROM sessions WHERE sid = ?", (sid,)))

    def open_sessions(self) -> list[SessionRow]:
        rows = self._rows(f"SELECT {_SESSION} FROM sessions WHERE status = 'open' ORDER BY created")
        return [s for row in rows if (s := _session([row]))]

    def fork_session(self, eid: str, request_id: str) -> SessionRow | None:
        sql = f"SELECT {_SESSION} FROM sessions WHERE fork_of = ? AND fork_request = ?"
        return _session(self._rows(sql, (eid, request_id)))

    def refs(self) -> set[SnapshotRef]:
        rows = self._rows("SELECT DISTINCT refs FROM deliveries WHERE refs IS NOT NULL")
        return {SnapshotRef(*ref) for (refs,) in rows for ref in json.loads(refs)}

    def close(self) -> None:
        with self._close_lock:
            if self._closed:
                return
            with ExitStack() as rest:  # each runs, whatever happens to the others
                rest.callback(self._close_writing)
                rest.callback(self._readers.close)
                self._writer.close()

    def _close_writing(self) -> None:
        with self._write_lock:
            self._closed = True
            self._db.close()
        self._checkpoint_wanted.set()
        self._checkpointer.join()

    def _set_up(self, synchronous: int) -> None:
        try:
            self._db.execute("PRAGMA journal_mode=WAL").fetchall()
            self._db.execute(f"PRAGMA synchronous={synchronous}").fetchall()
            self._migrate()
            _sync_directory(self._path.parent)
        except BaseException:
            self._db.close()
            raise

    def _migrate(self) -> None:
        version = self._db.execute("PRAGMA user_version").fetchall()[0][0]
        if version == SCHEMA_VERSION:
            return
        if version != 0:
            raise JournalUnavailable(
                f"the journal {self._path} has schema version {version}, this Errata writes {SCHEMA_VERSION}: "
                "use the Errata version that made it, or another --data-dir"
            )
        with self._transaction():
            self._db.execute(_SCHEMA)
            self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")


def _is_of_the_store(error: Exception) -> bool:
    """Whether an exception of an insert says nothing about the record: disk full, I/O error, file damaged."""
    return isinstance(error, apsw.Error) and not isinstance(error, _RECORD_FAULTS)


def _fault_of(error: Exception) -> ErrataError:
    """Return what to tell the one whose record SQLite refused."""
    match error:
        case ErrataError():
            return error
        case apsw.ConstraintError():
            return Conflict(f"the journal already holds another record under this key: {error}")
        case _:
            return EnvironmentOutputInvalid(
                f"what the environment returned cannot be journaled: {type(error).__name__}: {error}; "
                "check its texts for lone surrogates and its numbers and sizes for SQLite's limits"
            )


def _sync_directory(directory: Path) -> None:
    """Make the new files' names durable, and the end of the rollback journal that preceded WAL mode."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _delivery(rows: list[tuple[Any, ...]]) -> DeliveryRow | None:
    if not rows:
        return None
    *head, refs, created, reward, done, error_kind, hint = rows[0]
    return DeliveryRow(
        *head,
        tuple(SnapshotRef(*ref) for ref in json.loads(refs)) if refs else (),
        created,
        reward,
        bool(done),
        error_kind,
        hint,
    )


def _session(rows: list[tuple[Any, ...]]) -> SessionRow | None:
    if not rows:
        return None
    sid, environment, recovery, seed, created, given_out, *rest = rows[0]
    return SessionRow(sid, environment, recovery, seed, created, bool(given_out), *rest)

"""The durable journal: SQLite in WAL mode, ``synchronous=FULL``, group commit (PROTOCOL E1).

apsw rather than the standard library's module: it brings one SQLite version to every machine, reports which failure
happened (disk full or constraint), and its VFS lets tests take away what was written after the last sync.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import apsw

from errata_protocol.errors import (
    Conflict,
    EnvironmentOutputInvalid,
    ErrataError,
    JournalUnavailable,
    UnknownEpisode,
)

from . import columns
from .base import DeliveryRow, EpisodeRow, Record, RewardRow, SessionChange, SessionRow
from .sqlite_reads import SCHEMA_VERSION, SqliteReads
from .writer import StoreFailed, ThreadWriter

_SCHEMA = """
CREATE TABLE sessions(
  sid TEXT PRIMARY KEY, environment TEXT NOT NULL, recovery TEXT NOT NULL, seed INTEGER NOT NULL, created REAL NOT NULL,
  given_out INTEGER NOT NULL, principal TEXT, status TEXT NOT NULL, fork_of TEXT, fork_request TEXT,
  lost TEXT, key_hash BLOB, group_id TEXT
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
CREATE INDEX deliveries_errors ON deliveries(eid, n) WHERE t IS NULL;

CREATE TABLE rewards(
  n INTEGER PRIMARY KEY, eid TEXT NOT NULL, t INTEGER NOT NULL, value REAL NOT NULL, source TEXT NOT NULL,
  reward_id TEXT NOT NULL, sid TEXT NOT NULL, seq INTEGER, created REAL NOT NULL
);
CREATE UNIQUE INDEX rewards_id ON rewards(eid, reward_id);
CREATE UNIQUE INDEX rewards_seq ON rewards(sid, seq) WHERE seq IS NOT NULL;
CREATE TABLE counters(sid TEXT PRIMARY KEY, last_id INTEGER NOT NULL, last_seq INTEGER NOT NULL) WITHOUT ROWID;
"""

FULL = 2
"""``PRAGMA synchronous`` value under which a commit is on disk when it returns."""
NORMAL = 1
"""Value without that promise: a process crash loses nothing, a power loss may lose the last commits."""


def _placeholders(columns: str) -> str:
    return ", ".join("?" for _ in columns.split(","))


_INSERT_SESSION = f"INSERT INTO sessions({columns.SESSION}) VALUES ({_placeholders(columns.SESSION)})"
# Both insert nothing where the row's parent was deleted since the caller read it: ?7 and ?8 are the origin, ?1 the eid.
_INSERT_EPISODE = (
    f"INSERT INTO episodes({columns.EPISODE}) SELECT {_placeholders(columns.EPISODE)} "
    "WHERE ?7 IS NULL OR EXISTS (SELECT 1 FROM deliveries WHERE eid = ?7 AND t = ?8)"
)
_INSERT_DELIVERY = (
    f"INSERT INTO deliveries({columns.DELIVERY}) SELECT {_placeholders(columns.DELIVERY)} "
    "WHERE ?1 = '' OR EXISTS (SELECT 1 FROM episodes WHERE eid = ?1)"
)
_INSERT_REWARD = (
    f"INSERT INTO rewards({columns.REWARD}) SELECT {_placeholders(columns.REWARD)} "
    "WHERE EXISTS (SELECT 1 FROM deliveries WHERE eid = ?1 AND t = ?2)"
)
_COUNT = (
    "INSERT INTO counters VALUES (?1, ?2, ?3) "
    "ON CONFLICT DO UPDATE SET last_id = max(last_id, ?2), last_seq = max(last_seq, ?3)"
)

_CHANGE_SESSION = (
    "UPDATE sessions SET status = coalesce(?2, status), given_out = coalesce(?3, given_out), lost = coalesce(?4, lost) "
    "WHERE sid = ?1"
)

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


class SqliteJournal(SqliteReads):
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
        super().__init__(path, vfs=vfs)
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
        self._writer = ThreadWriter(self._write)

    @property
    def failing(self) -> str | None:
        return self._writer.failing

    def watch(self, written: Callable[[int, float], None]) -> None:
        self._writer.written = written

    def submit(self, records: Sequence[Record], settled: Callable[[ErrataError | None], None]) -> None:
        self._writer.submit(records, settled)

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
                case DeliveryRow():
                    self._db.execute(_INSERT_DELIVERY, columns.of_delivery(record))
                    if record.t is not None and not self._db.changes():
                        raise UnknownEpisode(record.eid)
                    if record.id is not None and self._db.changes():
                        self._db.execute(_COUNT, (record.sid, record.id, 0))
                case RewardRow():
                    self._db.execute(_INSERT_REWARD, columns.of_reward(record))
                    if not self._db.changes():
                        raise UnknownEpisode(record.eid)
                    if record.seq is not None:
                        self._db.execute(_COUNT, (record.sid, 0, record.seq))
                case EpisodeRow():
                    self._db.execute(_INSERT_EPISODE, columns.of_episode(record))
                    if record.origin_eid is not None and not self._db.changes():
                        raise UnknownEpisode(record.origin_eid)
                case SessionRow():
                    self._db.execute(_INSERT_SESSION, columns.of_session(record))
                case SessionChange() as c:
                    self._db.execute(_CHANGE_SESSION, columns.of_change(c))

    def delete_episode(self, eid: str) -> int:
        with self._write_lock:
            if self._closed:
                raise JournalUnavailable("the journal is closed: the server is shutting down")
            try:
                with self._transaction():
                    self._db.execute("DELETE FROM deliveries WHERE eid = ?", (eid,))
                    deleted = self._db.changes()
                    self._db.execute("DELETE FROM rewards WHERE eid = ?", (eid,))
                    self._db.execute("DELETE FROM episodes WHERE eid = ?", (eid,))
            except _RETRYABLE as error:
                raise JournalUnavailable(f"cannot delete from the journal: {error}") from error
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
        if self._version(self._db) == SCHEMA_VERSION:
            return
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

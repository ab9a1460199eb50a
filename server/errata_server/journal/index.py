"""Writes the segments' SQLite index, in large sorted batches after the commits. Commits wait only when it falls behind.

It can always be made again from the segments, so nothing is lost with it. What it holds is everything but payloads,
requests and states; of those it has the places. It also holds the position up to which it has the segments, written in
the same transaction as the rows before that position.

A thread that runs one statement a row releases the interpreter lock at each, and beside a busy event loop waits up to
5 ms to get it back; so a batch is few statements of many rows. Deliveries lie in *runs* of up to `RUN`, a row of the
table each: one insert for a run costs what one for a delivery would.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import apsw
import msgspec

from . import columns
from .base import JournalDamaged
from .live import Batch, Replied, Reply, Turn
from .segments import Position

INDEX = "index.db"
"""Name of the index beside the segments."""

VERSION = 5
"""``PRAGMA user_version`` of the indexes that this Errata reads; another is made again.

Version 4 had no labels, and version 3 no ``last``, ``task`` and ``hint_keys``. The totals of version 2 may count rows
behind its position.
"""

RUN = 8
"""Deliveries in one row: a run stays below the 1,002 bytes that SQLite keeps in a page of 4 KiB without overflow."""

REPLY_RUN = 32
"""Likewise of replies."""

CHECKPOINT_PAGES = 1000
"""Pages in the write-ahead log from which on they are copied into the file proper."""

WRITER_KIB, READER_KIB = 8_192, 1_024
"""Page cache of a connection, in KiB. A large one fills over hours, like a leak; the kernel caches the file anyway."""

MAX_VALUES = 32_766
"""Values that SQLite binds in one statement."""

MAX_INTEGER = 2**63 - 1
"""Largest integer that SQLite holds."""

SESSION = ", ".join("group_id" if name == "group" else name for name in columns.SESSION)
EPISODE = ", ".join(columns.EPISODE)
REWARD = ", ".join(columns.REWARD)

SCHEMA = """
CREATE TABLE applied(
  only INTEGER PRIMARY KEY CHECK (only = 1), segment INTEGER NOT NULL, offset INTEGER NOT NULL, salt BLOB NOT NULL,
  next_session INTEGER NOT NULL, next_episode INTEGER NOT NULL
);
CREATE TABLE sessions(
  n INTEGER PRIMARY KEY, sid TEXT NOT NULL UNIQUE, environment TEXT, recovery TEXT, seed INTEGER, created REAL,
  given_out INTEGER, principal TEXT, status TEXT, fork_of TEXT, fork_request TEXT, lost TEXT, key_hash BLOB,
  group_id TEXT, label_group TEXT, label_step INTEGER, label_run TEXT
);
CREATE INDEX sessions_open ON sessions(created) WHERE status = 'open';
CREATE UNIQUE INDEX sessions_fork ON sessions(fork_of, fork_request) WHERE fork_request IS NOT NULL;
CREATE TABLE counters(session INTEGER PRIMARY KEY, last_id INTEGER NOT NULL, last_seq INTEGER NOT NULL);
CREATE TABLE episodes(
  n INTEGER PRIMARY KEY, session INTEGER NOT NULL, eid TEXT NOT NULL UNIQUE, sid TEXT NOT NULL,
  environment TEXT NOT NULL, created REAL NOT NULL, episode_id TEXT, principal TEXT, origin_eid TEXT, origin_t INTEGER,
  agent_text_version TEXT, label_group TEXT, label_step INTEGER, label_run TEXT
);
CREATE INDEX episodes_session ON episodes(session, n);
CREATE INDEX episodes_created ON episodes(principal, created, eid);
CREATE INDEX episodes_origin ON episodes(origin_eid) WHERE origin_eid IS NOT NULL;
CREATE TABLE totals(
  episode INTEGER PRIMARY KEY, last_t INTEGER NOT NULL, deliveries INTEGER NOT NULL, reward REAL NOT NULL,
  done INTEGER NOT NULL, error_kinds TEXT, payload_bytes INTEGER NOT NULL, request_bytes INTEGER NOT NULL,
  state_bytes INTEGER NOT NULL, newest REAL NOT NULL, last REAL NOT NULL, task TEXT, hint_keys TEXT
);
CREATE TABLE turns(episode INTEGER, last INTEGER, run BLOB NOT NULL, PRIMARY KEY (episode, last)) WITHOUT ROWID;
CREATE TABLE replies(
  session INTEGER, last INTEGER, first INTEGER NOT NULL, run BLOB NOT NULL, PRIMARY KEY (session, last)
) WITHOUT ROWID;
CREATE TABLE errors(
  episode INTEGER, segment INTEGER, offset INTEGER, after INTEGER NOT NULL, size INTEGER NOT NULL, id INTEGER,
  PRIMARY KEY (episode, segment, offset)
) WITHOUT ROWID;
CREATE TABLE rewards(
  n INTEGER PRIMARY KEY, episode INTEGER NOT NULL, session INTEGER NOT NULL, segment INTEGER NOT NULL,
  size INTEGER NOT NULL, eid TEXT NOT NULL, t INTEGER NOT NULL, value REAL NOT NULL, source TEXT NOT NULL,
  reward_id TEXT NOT NULL, sid TEXT NOT NULL, seq INTEGER, created REAL NOT NULL
);
CREATE UNIQUE INDEX rewards_id ON rewards(episode, reward_id);
CREATE INDEX rewards_t ON rewards(episode, t);
CREATE UNIQUE INDEX rewards_seq ON rewards(session, seq) WHERE seq IS NOT NULL;
CREATE TABLE refs(n INTEGER PRIMARY KEY, episode INTEGER NOT NULL, refs TEXT NOT NULL);
CREATE INDEX refs_episode ON refs(episode);
CREATE TABLE segments(
  number INTEGER PRIMARY KEY, rows INTEGER NOT NULL, bytes INTEGER NOT NULL, dead_rows INTEGER NOT NULL,
  dead_bytes INTEGER NOT NULL
);
"""

_pack = msgspec.msgpack.Encoder().encode
_unpack_turns: Callable[[bytes], list[Turn]] = msgspec.msgpack.Decoder(list[Turn]).decode
_unpack_replies: Callable[[bytes], list[Reply]] = msgspec.msgpack.Decoder(list[Reply]).decode

FAILURES = (
    apsw.FullError,
    apsw.IOError,
    apsw.BusyError,
    apsw.LockedError,
    apsw.CantOpenError,
    apsw.ReadOnlyError,
    apsw.NoMemError,
    apsw.InterruptError,
)
"""What SQLite reports about the machine. Its other errors mean that the index is not what it should be."""

E = TypeVar("E", Turn, Reply)


class Tally(NamedTuple):
    """What the index knows of a segment: rows and bytes that were ever in it, and those of deleted episodes."""

    number: int
    rows: int
    size_bytes: int
    dead_rows: int
    dead_bytes: int


def connect(path: Path, flags: int = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE) -> apsw.Connection:
    """Open an index.

    Raises:
        apsw.Error: It cannot be opened.
        apsw.NotADBError: Something else than a regular file has its name: SQLite would wait for a FIFO's writer.
    """
    if path.exists() and not path.is_file():
        raise apsw.NotADBError(f"{path} is not a regular file")
    db = apsw.Connection(str(path), flags=flags)
    db.set_busy_timeout(5000)
    db.execute("PRAGMA wal_autocheckpoint=0").fetchall()
    db.pragma("cache_size", -READER_KIB)
    return db


def position_in(db: apsw.Connection) -> Position | None:
    """Return up to where an index has the segments; None for one that is empty or of another version.

    Raises:
        apsw.Error: It is no index, or damaged.
    """
    if db.pragma("user_version") != VERSION:
        return None
    rows: Any = db.execute("SELECT segment, offset, salt FROM applied").fetchall()
    return Position(*rows[0]) if rows else None


class Index:
    """The writing half of the index; the reading half is `errata_server.journal.indexed_reads`. One thread at a time.

    Args:
        path: Its file.

    Raises:
        apsw.Error: The file is no index of this version.
    """

    def __init__(self, path: Path) -> None:
        self._wal_pages = 0
        path.touch(mode=0o600)  # SQLite gives its other files the same mode
        self._db = connect(path)
        try:
            self._db.pragma("journal_mode", "wal")
            # A power loss may take the last batches away with the point up to which they reached, and no more.
            self._db.pragma("synchronous", 1)
            self._db.pragma("cache_size", -WRITER_KIB)
            self._db.set_wal_hook(self._on_wal)
            if self._db.pragma("user_version") not in (0, VERSION):
                raise apsw.SchemaChangeError(f"version {self._db.pragma('user_version')}")
            if self._db.pragma("user_version") == 0:
                with self._transaction():
                    self._db.execute(SCHEMA)
                    self._db.pragma("user_version", VERSION)
        except BaseException:
            self._db.close()
            raise

    def position(self) -> Position | None:
        """Return up to where it has the segments."""
        return position_in(self._db)

    def next_numbers(self) -> tuple[int, int]:
        """Return the numbers of the next session and episode."""
        rows: Any = self._db.execute("SELECT next_session, next_episode FROM applied").fetchall()
        return rows[0] if rows else (1, 1)

    def apply(self, batch: Batch) -> None:
        """Write a batch that has left, all or nothing.

        Raises:
            apsw.Error: Nothing was written.
        """
        if batch.position is None:
            raise ValueError("a batch without a position holds nothing")
        with self._transaction():
            self._sessions(batch)
            self._episodes(batch)
            self._runs(
                "turns", "episode", RUN, {n: (batch.of_episodes[n].indexed_t, t) for n, t in batch.turns.items()}
            )
            self._runs(
                "replies",
                "session",
                REPLY_RUN,
                {n: (batch.of_sessions[n].indexed_id, replies) for n, replies in batch.replies.items()},
            )
            self._insert(
                "errors(episode, after, segment, offset, size, id)",
                sorted((n, *error) for n, errors in batch.errors.items() for error in errors),
            )
            self._rewards(batch)
            self._insert(
                "refs(episode, refs)", [(n, json.dumps(columns.of_refs(refs))[1:-1]) for n, refs in batch.refs]
            )
            self._count(batch.segments.items())
            self._applied(batch.position, batch.next_session, batch.next_episode)

    def checkpoint(self) -> None:
        """Copy a long write-ahead log into the file, as far as no reader is in the way; it syncs, which small batches
        need not.

        Raises:
            apsw.Error: It could not be copied. What was applied is in the log, and must not be applied again.
        """
        if self._wal_pages >= CHECKPOINT_PAGES:
            self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

    def delete(self, n: int, position: Position) -> None:
        """Take an episode out that ``position`` is behind the end of; all before that must have been applied.

        Raises:
            apsw.Error: Nothing was written.
        """
        with self._transaction():
            dead = Counter[int](), Counter[int]()
            ids: list[int] = []
            turns: list[Turn] = self._merged_run("turns", "episode", n, -1, decode_turns)
            errors = [Replied(*row) for row in self._all(
                "SELECT after, segment, offset, size, id FROM errors WHERE episode = ?", (n,)
            )]  # fmt: skip
            rows: list[Turn | Replied] = [*turns, *errors]
            for one in rows:
                dead[0][one.segment] += 1
                dead[1][one.segment] += one.size
                if one.id is not None:
                    ids.append(one.id)
            for segment, size in self._all("SELECT segment, size FROM rewards WHERE episode = ?", (n,)):
                dead[0][segment] += 1
                dead[1][segment] += size
            session = self._all("SELECT session FROM episodes WHERE n = ?", (n,))[0][0]
            if ids:
                self._delete_replies(session, n, min(ids), max(ids))
            for table in ("turns", "errors", "rewards", "refs", "totals"):
                self._db.execute(f"DELETE FROM {table} WHERE episode = ?", (n,))
            self._db.execute("DELETE FROM episodes WHERE n = ?", (n,))
            self._insert(
                "segments", [(number, 0, 0, rows, dead[1][number]) for number, rows in dead[0].items()],
                "ON CONFLICT DO UPDATE SET dead_rows = dead_rows + excluded.dead_rows, "
                "dead_bytes = dead_bytes + excluded.dead_bytes",
            )  # fmt: skip
            self._applied(position, *self.next_numbers())

    def tallies(self) -> list[Tally]:
        """Return what is known of each segment."""
        return [Tally(*row) for row in self._all("SELECT number, rows, bytes, dead_rows, dead_bytes FROM segments")]

    def rewritten(self, before: Tally, rows: int, size_bytes: int) -> None:
        """Note what a segment holds since it was rewritten: what was dead ``before`` is gone."""
        with self._transaction():
            self._db.execute(
                "UPDATE segments SET rows = ?, bytes = ?, dead_rows = max(0, dead_rows - ?), "
                "dead_bytes = max(0, dead_bytes - ?) WHERE number = ?",
                (rows, size_bytes, before.dead_rows, before.dead_bytes, before.number),
            )

    def living(self, eids: Iterable[str]) -> set[str]:
        """Return those of ``eids`` that are episodes."""
        sql = "SELECT json_group_array(eid) FROM episodes WHERE eid IN (SELECT value FROM json_each(?))"
        return set(json.loads(self._all(sql, (json.dumps(list(eids)),))[0][0]))

    def close(self) -> None:
        """Close it; idempotent."""
        self._db.close()

    # -- parts of a batch ----------------------------------------------------------------------------------------

    def _sessions(self, batch: Batch) -> None:
        rows = [(n, *columns.of_session(row)) for n, row in batch.sessions.values() if row is not None]
        updates = ", ".join(f"{name.strip()} = excluded.{name.strip()}" for name in SESSION.split(",")[1:])
        self._insert(f"sessions(n, {SESSION})", rows, f"ON CONFLICT(n) DO UPDATE SET {updates}")
        self._insert(
            "sessions(n, sid)",
            [(n, sid) for sid, (n, row) in batch.sessions.items() if row is None],
            "ON CONFLICT(n) DO NOTHING",
        )
        self._many(
            "WITH c(sid, status, given_out, lost) AS (VALUES {}) UPDATE sessions SET "
            "status = coalesce(c.status, sessions.status), given_out = coalesce(c.given_out, sessions.given_out), "
            "lost = coalesce(c.lost, sessions.lost) FROM c "
            "WHERE sessions.sid = c.sid AND sessions.environment IS NOT NULL",
            [columns.of_change(change) for change in batch.changes.values()],
        )
        self._insert(
            "counters",
            sorted(counter for counter in batch.counters if counter.last_id or counter.last_seq),
            "ON CONFLICT DO UPDATE SET last_id = max(last_id, excluded.last_id), "
            "last_seq = max(last_seq, excluded.last_seq)",
        )

    def _episodes(self, batch: Batch) -> None:
        rows = [(n, session, *columns.of_episode(row)) for n, session, row in batch.episodes.values()]
        self._insert(f"episodes(n, session, {EPISODE})", rows)
        self._insert(
            "totals(episode, last_t, deliveries, reward, done, payload_bytes, request_bytes, state_bytes, newest, "
            "last, task, hint_keys, error_kinds)",
            [
                (*total[:-2], *(json.dumps(counts) if counts else None for counts in total[-2:]))
                for total in sorted(batch.totals, key=itemgetter(0))
            ],
            "ON CONFLICT DO UPDATE SET last_t = excluded.last_t, deliveries = excluded.deliveries, "
            "reward = excluded.reward, done = excluded.done, error_kinds = excluded.error_kinds, "
            "payload_bytes = excluded.payload_bytes, request_bytes = excluded.request_bytes, "
            "state_bytes = excluded.state_bytes, newest = excluded.newest, last = excluded.last, "
            "task = excluded.task, hint_keys = excluded.hint_keys",
        )

    def _rewards(self, batch: Batch) -> None:
        of = {row.sid: n for n, rows in batch.pushes.items() for row in rows.values()}
        placed = sorted(
            ((place, n, row) for n, rewards in batch.rewards.items() for place, row in rewards.values()),
            key=lambda one: one[0],
        )
        rows = [(n, of.get(row.sid, 0), place.segment, place.size, *columns.of_reward(row)) for place, n, row in placed]
        self._insert(f"rewards(episode, session, segment, size, {REWARD})", rows)

    def _runs(self, table: str, key: str, most: int, changes: dict[int, tuple[int, dict[int, Any]]]) -> None:
        """Write new entries as runs that come behind those that are there, or in their place where they must."""
        rows: list[tuple[Any, ...]] = []
        for n in sorted(changes):
            indexed, new = changes[n]
            entries = [new[at] for at in sorted(new)]
            if entries[0][0] <= indexed:  # behind what is there: rare, so it may cost some statements
                decode: Any = decode_turns if table == "turns" else decode_replies
                there = self._merged_run(table, key, n, entries[0][0], decode)
                self._db.execute(f"DELETE FROM {table} WHERE {key} = ? AND last >= ?", (n, entries[0][0]))
                entries = sorted((*there, *entries), key=itemgetter(0))
            rows += _rows_of(table, n, entries, most)
        self._insert(table, rows)

    def _merged_run(
        self, table: str, key: str, n: int, first: int, decode: Callable[[bytes], list[E]], last: int = MAX_INTEGER
    ) -> list[E]:
        """Return all entries of the runs that reach into ``first`` to ``last``."""
        bound = "AND first <= ?" if table == "replies" else "AND ? >= 0"
        rows = self._all(
            f"SELECT group_concat(hex(run)) FROM (SELECT run FROM {table} WHERE {key} = ? AND last >= ? {bound} "
            "ORDER BY last)",
            (n, first, last),
        )
        return entries_of(rows[0][0], decode)

    def _delete_replies(self, session: int, episode: int, first: int, last: int) -> None:
        there = self._merged_run("replies", "session", session, first, decode_replies, last)
        self._db.execute("DELETE FROM replies WHERE session = ? AND last >= ? AND first <= ?", (session, first, last))
        kept = [reply for reply in there if reply.episode != episode]
        self._insert("replies", _rows_of("replies", session, kept, REPLY_RUN))

    def _count(self, segments: Iterable[tuple[int, Sequence[int]]]) -> None:
        self._insert(
            "segments", [(number, rows, size, 0, 0) for number, (rows, size) in segments],
            "ON CONFLICT DO UPDATE SET rows = rows + excluded.rows, bytes = bytes + excluded.bytes",
        )  # fmt: skip

    def _on_wal(self, _db: apsw.Connection, _name: str, pages: int) -> int:
        self._wal_pages = pages
        return apsw.SQLITE_OK

    def _applied(self, position: Position, next_session: int, next_episode: int) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO applied VALUES (1, ?, ?, ?, ?, ?)", (*position, next_session, next_episode)
        )

    # -- statements ----------------------------------------------------------------------------------------------

    def _insert(self, into: str, rows: Sequence[tuple[Any, ...]], then: str = "") -> None:
        self._many(f"INSERT INTO {into} VALUES {{}} {then}", rows)

    def _many(self, sql: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Run a statement on many rows, split over as few executions as SQLite's limit of parameters allows.

        Args:
            sql: The statement, with ``{}`` where the rows of placeholders of ``VALUES`` go.
            rows: Rows of equal length; nothing is run if there are none.
        """
        if not rows:
            return
        width = len(rows[0])
        most = MAX_VALUES // width
        one = f"({', '.join('?' * width)})"
        for at in range(0, len(rows), most):
            part = rows[at : at + most]
            values = [value for row in part for value in row]
            self._db.execute(sql.format(", ".join([one] * len(part))), values, can_cache=False)

    def _all(self, sql: str, values: tuple[Any, ...] = ()) -> list[Any]:
        return self._db.execute(sql, values).fetchall()

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


def decode_turns(run: bytes) -> list[Turn]:
    """Return the turns of a run.

    Raises:
        JournalUnavailable: It is damaged.
    """
    try:
        return _unpack_turns(run)
    except (ValueError, msgspec.MsgspecError) as error:  # the second with old versions of msgspec
        raise _damaged_run(error) from error


def decode_replies(run: bytes) -> list[Reply]:
    """Return the replies of a run; errors as `decode_turns`."""
    try:
        return _unpack_replies(run)
    except (ValueError, msgspec.MsgspecError) as error:  # the second with old versions of msgspec
        raise _damaged_run(error) from error


def _damaged_run(error: Exception) -> JournalDamaged:
    # SQLite has no checksums: a flipped bit in a row is found here, or not at all.
    return JournalDamaged(
        f"the index of the journal is damaged ({error}): stop the server and remove {INDEX}, it is made again from the "
        "segments; no delivery is lost"
    )


def entries_of(text: str | None, decode: Callable[[bytes], list[E]]) -> list[E]:
    """Return the entries of runs that were read as one text: one step of SQLite, however many they are."""
    return [entry for run in text.split(",") for entry in decode(bytes.fromhex(run))] if text else []


def _rows_of(table: str, n: int, entries: Sequence[Any], most: int) -> list[tuple[Any, ...]]:
    runs = (entries[at : at + most] for at in range(0, len(entries), most))
    if table == "turns":
        return [(n, run[-1][0], _pack(run)) for run in runs]
    return [(n, run[-1][0], run[0][0], _pack(run)) for run in runs]

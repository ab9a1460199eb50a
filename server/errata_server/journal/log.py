"""A journal in append-only segments: the codec's frames on a `Disk`, the rows in memory.

One frame is one group commit: append, sync, then the rows can be seen and the commits are answered. At open the
segments are read in order; what a crash tore off the end of the last one was acknowledged to nobody and is cut off.

All rows stay in memory, and the space of deleted episodes is not given back: it is the simulation's store, which needs
every byte to go through a `Disk`, and one for short-lived servers; SQLite is the one for long episodes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from errata_protocol.errors import EnvironmentOutputInvalid, ErrataError, JournalUnavailable

from .base import Record
from .codec import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    SALT_BYTES,
    Deletion,
    Header,
    decode_header,
    encode_frame,
    encode_header,
    encode_records,
    scan,
)
from .disk import Disk
from .tables import Claims, Tables
from .writer import GroupWriter, StoreFailed, ThreadWriter, Write

SEGMENT_BYTES = 64 * 1024**2


def _random_salt() -> bytes:
    return secrets.token_bytes(SALT_BYTES)


class LogJournal(Tables):
    """Journal of append-only segments.

    Args:
        disk: Where; all its files named ``*.log`` are this journal's.
        writer: Makes the group writer.
        salt: Draws `errata_server.journal.codec.SALT_BYTES` random bytes.
        segment_bytes: A segment that reached this size is followed by another.

    Raises:
        JournalUnavailable: The disk cannot be read or written, or a record that was durable is damaged.
    """

    durable = True

    def __init__(
        self,
        disk: Disk,
        *,
        writer: Callable[[Write], GroupWriter] = ThreadWriter,
        salt: Callable[[], bytes] = _random_salt,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        super().__init__()
        self._disk = disk
        self._salt = salt
        self._segment_bytes = segment_bytes
        self._header = Header(0, b"")
        self._size = 0
        self._dirty = False
        self._closed = False
        try:
            self._read_all()
        except (OSError, StoreFailed) as error:
            raise JournalUnavailable(f"cannot open the journal: {error}; mend the disk") from error
        self._writer = writer(self._write)

    @property
    def failing(self) -> str | None:
        return self._writer.failing

    def watch(self, written: Callable[[int, float], None]) -> None:
        self._writer.written = written

    def submit(self, records: Sequence[Record], settled: Callable[[ErrataError | None], None]) -> None:
        self._writer.submit(records, settled)

    def delete_episode(self, eid: str) -> int:
        with self._lock:
            if self._closed:
                raise JournalUnavailable("the journal is closed: the server is shutting down")
            if eid in self._episodes:
                try:
                    self._append(encode_records([Deletion(eid)]))
                except StoreFailed as error:
                    raise JournalUnavailable(f"cannot delete from the journal: {error}") from error
            return self._delete(eid)

    def close(self) -> None:
        self._writer.close()
        with self._lock:
            self._closed = True

    # -- writing ------------------------------------------------------------------------------------------------

    def _write(self, groups: list[Sequence[Record]]) -> list[ErrataError | None]:
        """Make all groups that can be written durable with one sync, then show them; or raise and show none."""
        with self._lock:
            if self._closed:
                raise JournalUnavailable("the journal is closed: the server is shutting down")
            claims, body, accepted = Claims(), bytearray(), list[Sequence[Record]]()
            errors: list[ErrataError | None] = []
            for group in groups:
                try:
                    claimed = self._check(group, claims)
                    encoded = encode_records(group)
                    if len(body) + len(encoded) > MAX_BODY_BYTES:
                        raise EnvironmentOutputInvalid("these records are too large for one commit")
                except ErrataError as error:
                    errors.append(error)
                    continue
                errors.append(None)
                claims.add(claimed)
                accepted.append(group)
                body += encoded
            if accepted:
                self._append(bytes(body))
                for group in accepted:
                    for record in group:
                        self._apply(record)
            return errors

    def _append(self, body: bytes) -> None:
        """Write one frame and sync it.

        Raises:
            StoreFailed: It may be there in part; the next call cuts that off first.
        """
        try:
            if self._dirty:
                self._disk.truncate(self._name, self._size)
                self._dirty = False
            if self._header.number == 0 or self._size >= self._segment_bytes:
                self._begin_segment()
            frame = encode_frame(body, self._header, self._size)
            self._dirty = True
            self._disk.append(self._name, frame)
            self._disk.sync(self._name)
            self._dirty = False
        except OSError as error:
            raise StoreFailed(f"{error.filename or 'disk'}: {error.strerror}") from error
        self._size += len(frame)

    def _begin_segment(self) -> None:
        header = Header(self._header.number + 1, self._salt())
        name = _name(header.number)
        if name in self._disk.names():  # what an attempt left behind that failed
            self._disk.remove(name)
        self._disk.append(name, encode_header(header))
        self._disk.sync(name)
        self._disk.sync_names()
        self._header, self._size = header, HEADER_BYTES

    @property
    def _name(self) -> str:
        return _name(self._header.number)

    # -- opening ------------------------------------------------------------------------------------------------

    def _read_all(self) -> None:
        names = [name for name in self._disk.names() if name.endswith(".log")]
        for number, name in enumerate(names, start=1):
            data = self._disk.read(name)
            header, found = decode_header(data), scan(data)
            last = number == len(names)
            whole = header is not None and not found.torn_bytes
            if name != _name(number) or not (whole or last):
                raise JournalUnavailable(
                    f"the journal is damaged: segment {number} is missing or broken off, and {names[-1]} follows; "
                    "restore the data directory from a copy"
                )
            for record in found.records:
                if isinstance(record, Deletion):
                    self._delete(record.eid)
                else:
                    self._apply(record)
            if header is None:  # torn while it was begun: nothing was ever written to it
                self._disk.remove(name)
                self._disk.sync_names()
                return
            self._header, self._size = header, found.good_bytes
            if found.torn_bytes:
                self._disk.truncate(name, found.good_bytes)
            if last:
                # Also where nothing was torn: a frame that was read here may never have been synced, and whoever
                # asks is told of it now.
                self._disk.sync(name)
                self._disk.sync_names()


def _name(number: int) -> str:
    return f"{number:08d}.log"

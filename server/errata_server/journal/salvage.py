"""Repairs a damaged journal: what is whole stays, sessions with rows in damaged frames end as lost (decision 131).

A repaired segment has the form of a compacted one, so every Errata that reads segments reads it. What ends the lost
sessions is written first, as a segment of its own behind the last one; then each damaged segment is replaced in one
step, and the original kept. A crash in between leaves a journal that is salvaged again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import apsw

from errata_protocol.errors import JournalUnavailable

from . import columns
from .base import DeliveryRow, EpisodeRow, RewardRow, SessionChange, SessionRow
from .codec import (
    FRAME_BYTES,
    HEADER_BYTES,
    Deletion,
    Header,
    LogRecord,
    Moved,
    decode_header,
    decode_records,
    encode_frame,
    encode_header,
    encode_record,
)
from .damage import good_frames, header_of, is_torn, names_in, pieces_of, summary
from .disk import DirectoryDisk
from .index import EPISODE, INDEX, SESSION, connect, decode_replies, decode_turns, position_in
from .live import merged
from .segments import Position, name_of, random_salt

KEPT = "damaged"
"""Directory in the journal's with the originals of segments that were repaired."""

REPORT = "report.json"
"""Beside them, numbered: the report of each repair, with ids that the log abbreviates."""

WHY = "rows of it on disk were damaged: the journal was salvaged without them"
"""What is answered to the owner of a session that is lost so."""


@dataclass(frozen=True, slots=True)
class DamagedRange:
    """Bytes of a segment that hold no good frame.

    Args:
        segment: Its number.
        begin: Offset in it.
        end: Likewise; equal to ``begin`` for a segment that is missing.
        what: ``frame``, ``header``, ``map``, ``segment`` (missing), ``end`` (missing, and known to the index) or
            ``tail``: a frame that was not written whole. A crash leaves one, and nothing of it was acknowledged.
        holds: What can still be read there, in words.
    """

    segment: int
    begin: int
    end: int
    what: str
    holds: str = ""


@dataclass(frozen=True, slots=True)
class AffectedSession:
    """A session with rows in a damaged range.

    Args:
        sid: The session's id.
        status: Before: ``open`` ones are lost now, others stay as they were; ``unknown`` where no row of it is left.
        episodes: The session's episodes, without deleted ones.
    """

    sid: str
    status: str
    episodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SalvageReport:
    """What was damaged, and what became of it.

    Args:
        directory: The journal that was read.
        output: The journal that was written; None where nothing was.
        damaged: In order of the segments.
        sessions: Those with rows in damaged ranges.
        unattributed_bytes: Damaged bytes that do not say whose rows they held and that the index does not know. Open
            sessions without a later row may have had one there: they are among ``sessions``.
        rows: Records that were read whole.
        originals: Where the segments are kept as they were.
    """

    directory: Path
    output: Path | None
    damaged: tuple[DamagedRange, ...]
    sessions: tuple[AffectedSession, ...]
    unattributed_bytes: int
    rows: int
    originals: Path | None

    @property
    def is_damaged(self) -> bool:
        """Whether anything but an unfinished last frame was found."""
        return any(found.what != "tail" for found in self.damaged)

    def as_json(self) -> dict[str, Any]:
        """Return it as values of JSON, with the sids of `lost`."""
        return {**asdict(self), "lost": self.lost} | {
            name: str(path) if (path := getattr(self, name)) is not None else None
            for name in ("directory", "output", "originals")
        }

    @property
    def lost(self) -> list[str]:
        """The sids of sessions that are lost by this."""
        return [session.sid for session in self.sessions if session.status == "open"]


def salvage(directory: Path, *, output: Path | None = None, dry_run: bool = False) -> SalvageReport:
    """Repair a journal in place, or into a copy. No server may be running on a journal that is repaired in place.

    Args:
        directory: Directory of the journal; see `errata_server.journal.journal_in`.
        output: Write a repaired copy there instead; it must not exist yet.
        dry_run: Only report.

    Raises:
        JournalUnavailable: There is no journal, or it cannot be read or written.
    """
    try:
        return _Salvage(directory).run(output, dry_run)
    except (OSError, apsw.Error) as error:
        raise JournalUnavailable(f"cannot salvage the journal in {directory}: {error}") from error


@dataclass(slots=True)
class _Segment:
    """One segment as it was read: good records by the offset they were written at, and the ranges that hold none."""

    number: int
    header: Header | None
    size_bytes: int
    records: list[tuple[int, bytes, LogRecord]] = field(default_factory=list)
    ranges: list[tuple[int, int, str]] = field(default_factory=list)
    lone: list[tuple[int, bytes]] = field(default_factory=list)
    """Damaged records of a compacted segment whose map says where each begins and ends."""


@dataclass(slots=True)
class _Known:
    """The contents of the good frames."""

    rows: int = 0
    sessions: dict[str, SessionRow] = field(default_factory=dict)
    episodes: dict[str, EpisodeRow] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    """sid by eid, also of deleted episodes and of those without a row."""
    deleted: set[str] = field(default_factory=set)
    last: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Segment and offset of the last row by sid."""
    made: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Segment and offset of an episode's row by eid."""
    turns: dict[str, list[int]] = field(default_factory=dict)
    """Number of deliveries and highest t by eid."""
    rewards: set[tuple[str, str]] = field(default_factory=set)
    """eid and reward_id."""
    changes: dict[str, SessionChange] = field(default_factory=dict)
    """What changed of sessions without a row."""

    def take(self, record: LogRecord, place: tuple[int, int]) -> None:
        self.rows += 1
        sid = getattr(record, "sid", None)
        if sid:
            self.last[sid] = max(place, self.last.get(sid, place))
        match record:
            case SessionRow():
                self.sessions[record.sid] = record
            case SessionChange():
                if record.sid in self.sessions:
                    self.sessions[record.sid] = record.applied(self.sessions[record.sid])
                else:
                    self.changes[record.sid] = merged(self.changes.get(record.sid), record)
            case EpisodeRow():
                self.episodes[record.eid], self.made[record.eid] = record, place
                self.owners[record.eid] = record.sid
            case DeliveryRow() | RewardRow():
                if record.eid:
                    self.owners.setdefault(record.eid, record.sid)
                if isinstance(record, DeliveryRow) and record.t is not None:
                    turns = self.turns.setdefault(record.eid, [0, -1])
                    turns[0], turns[1] = turns[0] + 1, max(turns[1], record.t)
                elif isinstance(record, RewardRow):
                    self.rewards.add((record.eid, record.reward_id))
            case Deletion():
                self.deleted.add(record.eid)
                if record.sid:
                    self.owners.setdefault(record.eid, record.sid)

    def names(self) -> dict[str, str]:
        """Return sids by the ids that identify a session: its own and those of its episodes."""
        return {**self.owners, **{sid: sid for sid in (*self.sessions, *self.last)}}


@dataclass(slots=True)
class _Indexed:
    """What the index knows, where it is sound."""

    position: tuple[int, int]
    salt: bytes
    sessions: dict[str, SessionRow]
    episodes: dict[str, EpisodeRow]
    owners: dict[str, str]
    places: list[tuple[int, int, str]]
    """Segment, offset and sid of each row that it has a place of."""
    rewards: list[tuple[str, str, str]]
    """eid, reward_id and sid of each reward."""


class _Salvage:
    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise JournalUnavailable(f"there is no journal in {directory}: give another --data-dir")
        self._directory = directory
        self._index, self._index_is_sound = _indexed(directory / INDEX)
        numbers = [int(path.name[:8]) for path in directory.glob("[0-9]" * 8 + ".log")]
        if self._index is not None and self._is_of_another(self._index):
            self._index = None
        if self._index is not None:
            numbers.append(self._index.position[0])
        if not numbers:
            raise JournalUnavailable(f"{directory} holds no journal: give another --data-dir")
        self._last = max(numbers)
        self._known = _Known()
        self._affected: set[str] = set()
        self._recovered: dict[int, dict[int, SessionRow | EpisodeRow]] = {}
        self._only_indexed: list[SessionRow] = []
        self._deletions: list[Deletion] = []
        self._unknown: list[tuple[int, int]] = []
        self._unattributed = 0
        self._taken = set[int]()
        self._found: list[DamagedRange] = []

    def _is_of_another(self, index: _Indexed) -> bool:
        path = self._directory / name_of(index.position[0])
        header = decode_header(path.read_bytes()[:HEADER_BYTES]) if path.exists() else None
        return header is not None and header.salt != index.salt

    def run(self, output: Path | None, dry_run: bool) -> SalvageReport:
        damaged = []
        for number in range(1, self._last + 1):
            segment = self._read(number)
            for offset, _, record in segment.records:
                self._known.take(record, (number, offset))
            if segment.ranges or segment.lone:
                damaged.append(number)
        self._names = {**(self._index.owners if self._index is not None else {}), **self._known.names()}
        for number in damaged:
            self._attribute(self._read(number))
        self._look_behind()
        sessions = tuple(self._session(sid) for sid in sorted(self._affected))
        report = SalvageReport(
            self._directory, None, tuple(self._found), sessions, self._unattributed, self._known.rows, None
        )
        if dry_run:
            return report
        written, originals = self._write(damaged, sessions, report.is_damaged, output)
        report = replace(report, output=written, originals=originals)
        if originals is not None:
            file = _free_name(originals, REPORT)
            file.touch(mode=0o600)
            file.write_text(json.dumps(report.as_json(), indent=1))
        return report

    # -- reading -----------------------------------------------------------------------------------------------------

    def _read(self, number: int) -> _Segment:
        path = self._directory / name_of(number)
        if not path.exists():
            return _Segment(number, None, 0, ranges=[(0, 0, "segment")])
        data = path.read_bytes()
        header = header_of(data, number)
        segment = _Segment(number, header, len(data))
        if header is None:
            if number == self._last and len(data) <= HEADER_BYTES:
                segment.ranges.append((0, len(data), "tail"))
            else:
                segment.ranges += [(0, HEADER_BYTES, "header"), (HEADER_BYTES, len(data), "frame")]
            return segment
        if encode_header(header) != data[:HEADER_BYTES]:
            segment.ranges.append((0, HEADER_BYTES, "header"))
        at, moved, bodies = HEADER_BYTES, None, []
        gaps: list[tuple[int, int]] = []
        for frame in good_frames(data, header):
            if frame.begin > at:
                gaps.append((at, frame.begin))
            records = list(decode_records(frame.body))
            if len(records) == 1 and isinstance(records[0][2], Moved):
                moved = records[0][2]
            else:
                bodies += [(frame.begin + FRAME_BYTES + begin, size, record) for begin, size, record in records]
            at = frame.end
        if at < len(data):
            gaps.append((at, len(data)))
        if moved is not None:
            self._read_compacted(segment, data, moved, gaps)
            return segment
        segment.records = [(begin, data[begin : begin + size], record) for begin, size, record in bodies]
        for begin, end in gaps:
            if header.map_at and begin == header.map_at:
                segment.ranges.append((begin, end, "map"))
            elif end == len(data) and number == self._last and not header.map_at:
                last, torn = is_torn(data[begin:end])
                torn = torn and begin + last >= self._indexed_to(number)
                if last > 0 or not torn:
                    segment.ranges.append((begin, begin + last if torn else end, "frame"))
                if torn:
                    segment.ranges.append((begin + last, end, "tail"))
            else:
                segment.ranges.append((begin, end, "frame"))
        if self._indexed_to(number) > len(data):
            segment.ranges.append((len(data), self._indexed_to(number), "end"))
        return segment

    def _indexed_to(self, number: int) -> int:
        """Return up to which byte the index has a segment: what it has was durable. 0 for all but its last segment."""
        return self._index.position[1] if self._index is not None and self._index.position[0] == number else 0

    def _read_compacted(self, segment: _Segment, data: bytes, moved: Moved, gaps: list[tuple[int, int]]) -> None:
        """Read the records of a compacted segment one by one, each at the offset in the map."""
        segment.size_bytes = moved.size_bytes
        ends = [*moved.now[1:], segment.header.map_at if segment.header and segment.header.map_at else len(data)]
        for before, now, end in zip(moved.before, moved.now, ends, strict=True):
            try:
                ((_, size, record),) = decode_records(data[now:end])
            except ValueError:
                try:  # the last one, where the header does not say where the map begins
                    _, size, record = next(decode_records(data[now:end]))
                except (ValueError, StopIteration):
                    segment.lone.append((before, data[now:end]))
                    continue
            segment.records.append((before, data[now : now + size], record))
        segment.ranges += [(begin, end, "frame") for begin, end in gaps]

    # -- whose the damaged rows are ----------------------------------------------------------------------------------

    def _attribute(self, segment: _Segment) -> None:
        number = segment.number
        self._taken = {before for before, _, _ in segment.records}
        path = self._directory / name_of(number)
        data = path.read_bytes() if path.exists() else b""
        if segment.lone:
            for before, piece in segment.lone:
                self._attribute_bytes(number, before, bytes(FRAME_BYTES) + piece, segment)
            kept = {before: record for before, _, record in segment.records}
            for begin, end, what in segment.ranges:
                self._found.append(DamagedRange(number, begin, end, what, f"{len(kept)} rows of it are whole"))
            return
        for begin, end, what in segment.ranges:
            holds = ""
            if what == "frame":
                holds = self._attribute_bytes(number, begin, data[begin:end], segment)
            elif what == "end":
                self._cannot_tell((number, begin), (number, end), end - begin)
            elif what == "segment":
                self._cannot_tell((number, 0), (number + 1, 0), 0)
            elif what == "tail":
                holds = summary(piece.record for piece in pieces_of(data[begin:end]) if piece.record is not None)
            self._found.append(DamagedRange(number, begin, end, what, holds))

    def _attribute_bytes(self, number: int, begin: int, data: bytes, segment: _Segment) -> str:
        """Find the sessions of a damaged frame; return what it holds, in words."""
        read: list[LogRecord] = []
        kept: list[SessionRow | EpisodeRow] = []
        unclear = 0
        for piece in pieces_of(data):
            if piece.is_head:
                continue
            if piece.record is None:
                sids = names_in(data[piece.begin : piece.end], self._names)
                self._affected |= sids
                if not (sids and piece.is_one):
                    unclear += piece.end - piece.begin
                continue
            read.append(piece.record)
            if isinstance(piece.record, Moved):
                continue
            sid = getattr(piece.record, "sid", "") or self._names.get(getattr(piece.record, "eid", ""), "")
            if sid:
                self._affected.add(sid)
            if piece.is_chained and isinstance(piece.record, SessionRow | EpisodeRow):
                kept.append(piece.record)
            elif piece.is_chained and isinstance(piece.record, Deletion):
                self._deletions.append(piece.record)
        for record in kept:
            self._recover(number, begin, record)
        if unclear:
            self._cannot_tell((number, begin), (number, begin + len(data)), unclear)
        return summary(read)

    def _recover(self, number: int, begin: int, record: SessionRow | EpisodeRow) -> None:
        """Keep a session's or episode's row that no good frame has; it goes where it stood, before the rows of it."""
        known = self._known
        if isinstance(record, SessionRow) and record.sid not in known.sessions:
            change = known.changes.get(record.sid)
            known.sessions[record.sid] = change.applied(record) if change is not None else record
        elif isinstance(record, EpisodeRow) and record.eid not in known.episodes:
            known.episodes[record.eid] = record
            known.owners[record.eid] = self._names[record.eid] = record.sid
        else:
            return
        places = self._recovered.setdefault(number, {})
        while begin in places or begin in self._taken:
            begin += 1
        places[begin] = record

    def _cannot_tell(self, begin: tuple[int, int], end: tuple[int, int], size_bytes: int) -> None:
        """Add the sessions that the index has rows of in this range, which itself does not say whose rows it held."""
        indexed, known = self._index, self._known
        if indexed is None or indexed.position < end:
            self._unknown.append(begin)
            self._unattributed += size_bytes
        if indexed is None:
            return
        self._affected |= {sid for segment, offset, sid in indexed.places if begin <= (segment, offset) < end}
        self._affected |= {sid for eid, id, sid in indexed.rewards if (eid, id) not in known.rewards}
        for sid, session in indexed.sessions.items():
            there = known.sessions.get(sid)
            if there is None or (there.status == "open" and session.status != "open"):
                self._affected.add(sid)
            if there is None:
                known.sessions[sid] = session
                self._only_indexed.append(session)
        for eid, episode in indexed.episodes.items():
            if eid not in known.episodes and eid not in known.deleted:
                self._affected.add(episode.sid)
                self._recover(begin[0], begin[1], episode)
        for eid, made in known.made.items():
            if made < indexed.position and eid not in indexed.episodes and eid not in known.deleted:
                known.deleted.add(eid)
                self._deletions.append(Deletion(eid, known.owners[eid]))

    def _look_behind(self) -> None:
        """Add the open sessions that may have had their last row where nothing says whose rows there were."""
        gaps = {self._known.owners[eid] for eid, (count, last) in self._known.turns.items() if count <= last}
        for begin in self._unknown:
            for sid, row in self._known.sessions.items():
                if row.status == "open" and (sid in gaps or self._known.last.get(sid, begin) <= begin):
                    self._affected.add(sid)

    def _session(self, sid: str) -> AffectedSession:
        row = self._known.sessions.get(sid)
        eids = [eid for eid, of in self._known.owners.items() if of == sid and eid not in self._known.deleted]
        return AffectedSession(sid, row.status if row is not None else "unknown", tuple(eids))

    # -- writing -----------------------------------------------------------------------------------------------------

    def _write(
        self, damaged: list[int], sessions: tuple[AffectedSession, ...], is_damaged: bool, output: Path | None
    ) -> tuple[Path | None, Path | None]:
        target = output or self._directory
        if output is not None:
            output.mkdir(mode=0o700, parents=True)
            for number in set(range(1, self._last + 1)) - set(damaged):
                shutil.copyfile(self._directory / name_of(number), output / name_of(number))
        elif not is_damaged:
            if not self._index_is_sound:
                _remove_index(self._directory)
            return None, None
        disk = DirectoryDisk(target)
        markers = b"".join(encode_record(record) for record in self._markers(sessions))
        if markers:
            header = Header(self._last + 1, random_salt())
            self._write_new(disk, header.number, encode_header(header) + encode_frame(markers, header, HEADER_BYTES))
            disk.rename(_new_name(header.number), name_of(header.number))
            disk.sync_names()
        return target, self._replace(disk, target, damaged, output)

    def _markers(self, sessions: tuple[AffectedSession, ...]) -> Iterator[LogRecord]:
        yield from self._only_indexed
        for session in sessions:
            row = self._known.sessions.get(session.sid)
            if row is None and (row := self._made_up(session)) is not None:
                yield row
            if row is not None and row.status == "open":
                yield SessionChange(session.sid, status="lost", lost=WHY)
        yield from self._deletions

    def _made_up(self, session: AffectedSession) -> SessionRow | None:
        """Return a row for a session that has none any more, for its owner to be answered; None without an episode."""
        episode = next((self._known.episodes[eid] for eid in session.episodes if eid in self._known.episodes), None)
        if episode is None:
            return None
        return SessionRow(
            session.sid,
            episode.environment,
            "none",
            0,
            episode.created,
            given_out=True,
            principal=episode.principal,
            status="lost",
            lost=WHY,
        )

    def _replace(self, disk: DirectoryDisk, target: Path, damaged: list[int], output: Path | None) -> Path | None:
        """Write each damaged segment anew without what is damaged."""
        originals = self._directory / KEPT
        for number in damaged:
            self._write_new(disk, number, self._repaired(self._read(number)))
            if output is None and (original := self._directory / name_of(number)).exists():
                originals.mkdir(mode=0o700, exist_ok=True)
                os.link(original, _free_name(originals, original.name))
        if output is None:
            _remove_index(target)
        for number in damaged:
            disk.rename(_new_name(number), name_of(number))
        disk.sync_names()
        return originals if output is None and originals.exists() else None

    def _write_new(self, disk: DirectoryDisk, number: int, data: bytes) -> None:
        name = _new_name(number)
        if name in disk.names():  # what an attempt left behind that failed
            disk.remove(name)
        disk.append(name, data)
        disk.sync(name)

    def _repaired(self, segment: _Segment) -> bytes:
        """Return the bytes of a compacted segment with all good records of one, and those that were recovered."""
        recovered = [
            (before, encode_record(record), record)
            for before, record in self._recovered.get(segment.number, {}).items()
        ]
        kept = sorted([*segment.records, *recovered], key=lambda one: one[0])
        salt = segment.header.salt if segment.header is not None else random_salt()
        body = b"".join(part for _, part, _ in kept)
        now, at = list[int](), HEADER_BYTES + FRAME_BYTES
        for _, part, _ in kept:
            now.append(at)
            at += len(part)
        header = Header(segment.number, salt, HEADER_BYTES + FRAME_BYTES + len(body))
        size = max(segment.size_bytes, HEADER_BYTES)
        table = encode_record(Moved([before for before, _, _ in kept], now, size))
        return b"".join(
            (
                encode_header(header),
                encode_frame(body, header, HEADER_BYTES),
                encode_frame(table, header, header.map_at),
            )
        )


def _indexed(path: Path) -> tuple[_Indexed | None, bool]:
    """Read an index; None where there is none or it is not sound, and whether it is sound or absent."""
    if not path.exists():
        return None, True
    try:
        db = connect(path, apsw.SQLITE_OPEN_READONLY)
    except apsw.Error:
        return None, False
    try:
        if db.execute("PRAGMA integrity_check").fetchall() != [("ok",)]:
            return None, False
        position = position_in(db)
        if position is None:
            return None, True
        return _contents(db, position), True
    except (apsw.Error, JournalUnavailable, ValueError, TypeError, KeyError):  # damaged, or of another version
        return None, False
    finally:
        db.close()


def _contents(db: apsw.Connection, position: Position) -> _Indexed:
    named: Any = db.execute("SELECT n, sid FROM sessions").fetchall()
    sids: dict[int, str] = dict(named)
    sessions: Any = db.execute(f"SELECT {SESSION} FROM sessions WHERE environment IS NOT NULL").fetchall()
    episodes: Any = db.execute(f"SELECT n, {EPISODE} FROM episodes").fetchall()
    of = {n: columns.episode(row) for n, *row in episodes}
    places: list[tuple[int, int, str]] = []
    for n, run in db.execute("SELECT episode, run FROM turns"):
        places += [(turn.segment, turn.offset, of[n].sid) for turn in decode_turns(run)]
    for n, run in db.execute("SELECT session, run FROM replies"):
        places += [(reply.segment, reply.offset, sids[n]) for reply in decode_replies(run)]
    for n, segment, offset in db.execute("SELECT episode, segment, offset FROM errors"):
        places.append((segment, offset, of[n].sid))
    return _Indexed(
        (position.segment, position.offset),
        position.salt,
        {row.sid: row for row in map(columns.session, sessions)},
        {episode.eid: episode for episode in of.values()},
        {**{episode.eid: episode.sid for episode in of.values()}, **{sid: sid for sid in sids.values()}},
        places,
        db.execute("SELECT eid, reward_id, sid FROM rewards").fetchall(),  # type: ignore[arg-type]
    )


def _new_name(number: int) -> str:
    return f"{number:08d}.new"


def _remove_index(directory: Path) -> None:
    for end in ("", "-wal", "-shm"):
        (directory / f"{INDEX}{end}").unlink(missing_ok=True)


def _free_name(directory: Path, name: str) -> Path:
    n = 1
    while (path := directory / f"{name}.{n}").exists():
        n += 1
    return path

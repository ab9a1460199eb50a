"""What one flipped bit costs: SQLite alone against the segment log, in sessions and in damage that nothing reports.

    python bench/journal_damage.py [--dir PATH] [--only PART] [--sessions N] [--places N] [--seed N] [--json] [--smoke]

The same group commits are written to the segment log and to both layouts of SQLite that `bench/journal_stores.py`
measures: ``frames`` (a table with a row for each group commit) and ``rows`` (that table and the index in one
database), and to ``frames`` with SQLite's checksum VFS, which PyPI's apsw ships. Then one bit at a time is flipped at
random, what can still be read is compared with what was written, and the bit is flipped back.

For a write-ahead log, and for the segments of a server that was killed, a bit is flipped in what was acknowledged, and
the file is cut off at a random place. A session counts as lost where rows of it are gone or wrong, and as *beyond*
where none of its rows is on the damaged page or in the damaged frame.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import apsw
import apsw.sqlite_extra

from errata_bench.sqlite_journal import FrameTable, journal_of
from errata_protocol.errors import JournalUnavailable
from errata_server.journal import (
    DeliveryRow,
    EpisodeRow,
    IndexedJournal,
    SessionRow,
    salvage,
)
from errata_server.journal.base import Record
from errata_server.journal.codec import HEADER_BYTES, decode_header, decode_records, encode_record
from errata_server.journal.damage import good_frames
from errata_server.journal.index import INDEX

TURNS = 12
"""Deliveries of a session."""

SEGMENT_BYTES = 1024**2
Found = dict[str, Any]
PAGE_BYTES = 4096
TABLE_LEAF = 0x0D
"""First byte of a page with rows of a table."""

WAL_HEADER_BYTES, WAL_FRAME_HEADER_BYTES = 32, 24


def group_commits(sessions: int, chance: random.Random) -> list[list[Record]]:
    """Return group commits of 1 to 64 records, each the next of a session drawn at random."""
    left: dict[int, int] = dict.fromkeys(range(sessions), 0)
    found: list[list[Record]] = []
    while left:
        size = min(len(left), round(2 ** chance.uniform(0, 6)))
        group: list[Record] = []
        for n in chance.sample(sorted(left), size):
            sid, eid, t = f"s_{n:022d}", f"ep_{n:022d}", left[n]
            if t == 0:
                group += [SessionRow(sid, "e", "snapshot", 7, 1.0, given_out=True), EpisodeRow(eid, sid, "e", 1.0)]
            payload = json.dumps({"output": chance.randbytes(chance.randrange(20, 300)).hex()}).encode()
            digest, request = sha256(payload).digest(), b'{"command":"ls"}'
            kind: Any = "step" if t else "reset"
            group.append(
                DeliveryRow(
                    eid, t, sid, t + 1, kind, request, sha256(request).digest(), "ok", payload, digest, None, b"state",
                    (), 1.0, 0.5,
                )
            )  # fmt: skip
            left[n] = t + 1
            if left[n] == TURNS:
                del left[n]
        found.append(group)
    return found


def sids_in(body: bytes) -> set[str]:
    """Return the sessions with records in the body of a frame."""
    return {getattr(record, "sid", "") for _, _, record in decode_records(body)} - {""}


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file in place."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes((byte ^ 1 << bit % 8,)))


@dataclass(slots=True)
class Written:
    """The group commits of a database, by their number from 1, and the commits with bytes on each page."""

    bodies: dict[int, bytes]
    sids: dict[int, set[str]]
    on_page: dict[int, set[int]] = field(default_factory=dict)
    kind_of_page: dict[int, str] = field(default_factory=dict)


def opened(path: Path, vfs: str = "unix") -> apsw.Connection:
    """Open a database that nobody writes; raises where SQLite refuses it."""
    db = apsw.Connection(f"file:{path}?immutable=1", flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI, vfs=vfs)
    db.execute("SELECT count(*) FROM sqlite_schema").fetchall()
    return db


def written(path: Path, vfs: str = "unix") -> Written:
    """Read a whole database, and which commit has bytes on which page."""
    db = opened(path, vfs)
    rows: list[Any] = db.execute("SELECT n, body FROM frames ORDER BY n").fetchall()
    found = Written(dict(rows), {n: sids_in(body) for n, body in rows})
    keys = [n for n, _ in rows]
    first: dict[str, int] = {}
    at = 0
    pages: list[Any] = db.execute(
        "SELECT name, path, pageno, pagetype, ncell FROM dbstat ORDER BY name, path"
    ).fetchall()
    for name, place, page, kind, cells in pages:
        found.kind_of_page[page] = f"{'frames' if name == 'frames' else 'other tables'}: {kind}"
        if name == "frames" and kind == "leaf":
            first[place] = at
            found.on_page[page] = set(keys[at : at + cells])
            at += cells
    for name, place, page, kind, _ in pages:
        if name == "frames" and kind == "overflow":
            leaf, cell = place[: place.rindex("/") + 1], int(place.rpartition("/")[2].partition("+")[0], 16)
            found.on_page[page] = {keys[first[leaf] + cell]}
    found.kind_of_page[1] = "schema"
    if at != len(keys):
        raise SystemExit(f"dbstat has {at} rows of {len(keys)}")
    db.close()
    return found


def is_good(body: bytes) -> bool:
    """Return whether the records' own checksums, which this project's codec adds, find nothing wrong."""
    try:
        return len(list(decode_records(body))) > 0
    except ValueError:
        return False


def in_order(path: Path, vfs: str) -> tuple[dict[int, Any], bool]:
    """Read all commits in one pass, as a start does: those before an error, and whether SQLite reported one."""
    found: dict[int, Any] = {}
    try:
        for n, body in opened(path, vfs).execute("SELECT n, body FROM frames ORDER BY n"):
            found[n] = body
    except (apsw.Error, UnicodeDecodeError):
        return found, True
    return found, False


def by_key(path: Path, numbers: Sequence[int], vfs: str) -> dict[int, Any]:
    """Read each commit by its number, each on its own: the simplest salvage."""
    try:
        db = opened(path, vfs)
    except (apsw.Error, UnicodeDecodeError):
        return {}
    found: dict[int, Any] = {}
    for n in numbers:
        try:
            for (body,) in db.execute("SELECT body FROM frames WHERE n = ?", (n,)):
                found[n] = body
        except (apsw.Error, UnicodeDecodeError):
            continue
    return found


def walked(path: Path) -> dict[int, Any]:
    """Read the commits from the leaf pages of a file, whatever its tree says, where their records' checksums are right.

    This is what ``.recover`` of SQLite's shell does; neither apsw nor Debian ship it.
    """
    data = path.read_bytes()
    usable = PAGE_BYTES - data[20]
    found: dict[int, Any] = {}
    for begin in range(0, len(data), PAGE_BYTES):
        head = begin + 100 * (begin == 0)
        if data[head] != TABLE_LEAF:
            continue
        for cell in range(int.from_bytes(data[head + 3 : head + 5])):
            with contextlib.suppress(IndexError, ValueError):  # it is no cell of the table
                pointer = head + 8 + 2 * cell
                at = begin + int.from_bytes(data[pointer : pointer + 2])
                size, at = varint(data, at)
                number, at = varint(data, at)
                row = overflowing(data, at, size, usable)
                header, at = varint(row, 0)
                serial = varint(row, at + 1)[0]  # behind the key's, which is NULL in the row
                body = row[header:]
                if serial == 2 * len(body) + 12 and is_good(body):
                    found[number] = body
    return found


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return an integer of SQLite's file format, and where it ends."""
    value = 0
    for n in range(8):
        value = value << 7 | data[at + n] & 0x7F
        if data[at + n] < 0x80:
            return value, at + n + 1
    return value << 8 | data[at + 8], at + 9


def overflowing(data: bytes, at: int, size: int, usable: int) -> bytes:
    """Return a row of ``size`` bytes, the first of them at ``at``, the others on the overflow pages."""
    here, least = size, (usable - 12) * 32 // 255 - 23
    if size > usable - 35:
        here = least + (size - least) % (usable - 4)
        here = here if here <= usable - 35 else least
    parts, left, at = [data[at : at + here]], size - here, at + here
    while left > 0:
        page = (int.from_bytes(data[at : at + 4]) - 1) * PAGE_BYTES
        if not 0 < page < len(data):
            raise ValueError("no such page")
        at, part = page, data[page + 4 : page + 4 + min(left, usable - 4)]
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def soundness(path: Path, vfs: str) -> bool:
    """Return whether `PRAGMA integrity_check` finds nothing."""
    try:
        return opened(path, vfs).execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    except (apsw.Error, UnicodeDecodeError):
        return False


def lost(before: Written, now: dict[int, Any]) -> set[str]:
    """Return the sessions with commits that are gone or wrong."""
    return {sid for n, body in before.bodies.items() if now.get(n) != body for sid in before.sids[n]}


def places(size: int, count: int, chance: random.Random) -> Iterator[int]:
    """Yield bits of a file at random."""
    for _ in range(count):
        yield chance.randrange(8 * size)


def spread(values: Sequence[int]) -> dict[str, float]:
    """Return what a reader wants of a count a place."""
    if not values:
        return {"places": 0}
    high = sorted(values)[int(0.95 * (len(values) - 1))]
    return {
        "places": len(values), "median": statistics.median(values), "p95": high, "highest": max(values),
        "places_above_0": sum(value > 0 for value in values),
    }  # fmt: skip


def damaged_database(
    path: Path, count: int, chance: random.Random, vfs: str = "unix", *, tree: bool = False
) -> dict[str, Any]:
    """Flip bits of a checkpointed database one at a time: anywhere, or only where the schema and the tree are."""
    before = written(path, vfs)
    inner = [page for page, kind in before.kind_of_page.items() if kind in ("schema", "frames: internal")]
    numbers = sorted(before.bodies)
    seen, silent = Counter[str](), Counter[str]()
    kinds = Counter[str]()
    salvages: dict[str, dict[str, list[int]]] = {
        name: {"lost": [], "beyond": []} for name in ("one pass up to the error", "each key", "walk of the pages")
    }
    for bit in places(path.stat().st_size, count, chance):
        if tree:
            bit = 8 * PAGE_BYTES * (chance.choice(inner) - 1) + bit % (8 * PAGE_BYTES)
        page = bit // 8 // PAGE_BYTES + 1
        kinds[before.kind_of_page.get(page, "free")] += 1
        here = {sid for n in before.on_page.get(page, ()) for sid in before.sids[n]}
        flip(path, bit)
        try:
            rows, reported = in_order(path, vfs)
            try:
                opened(path, vfs)
            except (apsw.Error, UnicodeDecodeError):
                seen["does not open"] += 1
            is_wrong = rows != before.bodies
            seen["the read reports an error"] += reported
            seen["integrity_check reports an error"] += not soundness(path, vfs)
            seen["rows are wrong or gone"] += is_wrong
            if is_wrong and not reported:
                silent["read without an error of SQLite, and wrong"] += 1
                silent["of these, integrity_check reports nothing"] += soundness(path, vfs)
                gone = set(numbers) - set(rows)
                bad = [n for n in rows if n in before.bodies and rows[n] != before.bodies[n]]
                silent["of these, wrong bodies"] += bool(bad)
                silent["of these, missing rows"] += bool(gone)
                silent["of these, our records' checksums find nothing"] += not gone and all(
                    isinstance(rows[n], bytes) and is_good(rows[n]) for n in bad
                )
            kept = {n: body for n, body in by_key(path, numbers, vfs).items() if body == before.bodies[n]}
            for name, now in (
                ("one pass up to the error", rows),
                ("each key", kept),
                ("walk of the pages", walked(path)),
            ):
                gone_sids = lost(before, now)
                salvages[name]["lost"].append(len(gone_sids))
                salvages[name]["beyond"].append(len(gone_sids - here))
        finally:
            flip(path, bit)
    if written(path, vfs).bodies != before.bodies:
        raise SystemExit("the database is not what it was")
    return {
        "file_bytes": path.stat().st_size,
        "commits": len(numbers),
        "pages_hit": dict(sorted(kinds.items())),
        "seen": dict(seen),
        "silent": dict(silent),
        "sessions": {
            name: {key: spread(values) for key, values in one.items()} for name, one in salvages.items()
        },
    }  # fmt: skip


def damaged_wal(directory: Path, count: int, chance: random.Random, *, cut: bool) -> dict[str, Any]:
    """Flip one bit in the acknowledged part of a write-ahead log, or cut it off there, one at a time."""
    path, wal = directory / "frames.db", directory / "frames.db-wal"
    whole = wal.read_bytes()
    salt = whole[16:24]
    step = PAGE_BYTES + WAL_FRAME_HEADER_BYTES
    end = WAL_HEADER_BYTES
    while end + step <= len(whole) and whole[end + 8 : end + 16] == salt:
        end += step

    def contents() -> tuple[dict[int, Any], bool]:
        """Open a copy as a server after a crash does."""
        with tempfile.TemporaryDirectory(dir=directory) as copy:
            for file in (path, wal):
                shutil.copyfile(file, Path(copy) / file.name)
            try:
                db = apsw.Connection(str(Path(copy) / path.name), vfs="unix")
                sound = db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
                rows: list[Any] = db.execute("SELECT n, body FROM frames").fetchall()
                db.close()
            except apsw.Error:
                return {}, True
            return dict(rows), not sound

    bodies, _ = contents()
    before = Written(bodies, {n: sids_in(body) for n, body in bodies.items()})
    gone_commits, gone_sids, reported = [], [], 0
    try:
        for _ in range(count):
            at = chance.randrange(WAL_HEADER_BYTES, end)
            if cut:
                wal.write_bytes(whole[:at])
            else:
                flip(wal, 8 * at + chance.randrange(8))
            rows, is_reported = contents()
            reported += is_reported
            gone_commits.append(sum(rows.get(n) != body for n, body in before.bodies.items()))
            gone_sids.append(len(lost(before, rows)))
            wal.write_bytes(whole)
    finally:
        wal.write_bytes(whole)
    return {
        "wal_bytes_in_use": end, "wal_bytes": len(whole), "commits": len(bodies), "reported": reported,
        "commits_gone": spread(gone_commits), "sessions_lost": spread(gone_sids),
    }  # fmt: skip


def frames_of(directory: Path) -> list[tuple[Path, int, int, set[str]]]:
    """Return the frames of a journal's segments: file, begin, end and sessions."""
    found = []
    for path in sorted(directory.glob("*.log")):
        data = path.read_bytes()
        header = decode_header(data)
        if header is None:
            raise SystemExit(f"{path.name} has no header")
        found += [(path, frame.begin, frame.end, sids_in(frame.body)) for frame in good_frames(data, header)]
    return found


def contents_of(directory: Path, sessions: int) -> dict[str, list[Any]]:
    """Return the rows of each session, read by a journal as a server reads them."""
    journal = IndexedJournal(directory, background=False)
    try:
        found: dict[str, list[Any]] = {}
        for n in range(sessions):
            sid, eid = f"s_{n:022d}", f"ep_{n:022d}"
            rows = [journal.delivery(eid, turn.t) for turn in journal.turns(eid)]
            found[sid] = [journal.session(sid), journal.episode(eid), *(row for row in rows if row is not None)]
        return found
    finally:
        journal.close()


def damaged_segments(directory: Path, count: int, chance: random.Random, *, how: str) -> dict[str, Any]:
    """Damage the segments at one place at a time, and see what `errata journal salvage` finds.

    Every tenth time a copy is repaired, and read as a server reads it.

    Args:
        directory: Directory of the journal; it stays as it is.
        count: Places.
        chance: Draws them.
        how: ``flip`` one bit, ``flip, no index`` likewise without an index, ``cut`` the end of the last segment off.
    """
    frames, seen = frames_of(directory), Counter[str]()
    before = {sid for *_, sids in frames for sid in sids}
    all_rows = contents_of(directory, len(before))
    files = sorted(directory.glob("*.log"))
    sizes = [path.stat().st_size for path in files]
    listed, beyond, missed = [], [], []
    for n in range(count):
        copy = shutil.copytree(directory, directory.with_name("damaged"))
        if how == "flip, no index":
            for file in copy.glob(f"{INDEX}*"):
                file.unlink()
        if how == "cut":
            path, at = files[-1], chance.randrange(HEADER_BYTES, sizes[-1])
            os.truncate(copy / path.name, at)
            end = sizes[-1]
        else:
            path = chance.choices(files, sizes)[0]
            bit = chance.randrange(8 * path.stat().st_size)
            flip(copy / path.name, bit)
            at, end = bit // 8, bit // 8 + 1
            seen["in a segment's header"] += at < HEADER_BYTES
        hit = {sid for file, begin, last, sids in frames if file == path and begin < end and at < last for sid in sids}
        report = salvage(copy, dry_run=True)
        named = {session.sid for session in report.sessions}
        seen["a whole read reports it"] += report.is_damaged
        listed.append(len(named))
        beyond.append(len(named - hit))
        missed.append(len(hit - named))
        if n % 10 == 0:
            seen["started"] += 1
            seen["starts"] += starts(copy)
            seen["repaired and read"] += 1
            salvage(copy)
            rows = contents_of(copy, len(before))
            seen["rows of other sessions changed"] += any(rows[sid] != all_rows[sid] for sid in before - named)
        shutil.rmtree(copy)
    return {
        "file_bytes": sum(sizes), "frames": len(frames), "segments": len(files), "seen": dict(seen),
        "sessions_lost": spread(listed), "beyond": spread(beyond), "not_listed": spread(missed),
    }  # fmt: skip


def starts(directory: Path) -> bool:
    """Return whether a journal opens, without a change to it."""
    copy = shutil.copytree(directory, directory.with_name("opened"))
    try:
        IndexedJournal(copy, background=False).close()
    except JournalUnavailable:
        return False
    finally:
        shutil.rmtree(copy)
    return True


def damaged_index(directory: Path, count: int, chance: random.Random, sessions: int) -> dict[str, Any]:
    """Flip one bit of the index at one place at a time; what it holds can be made again from the segments."""
    seen, before = Counter[str](), contents_of(directory, sessions)
    path = directory / INDEX
    whole = path.read_bytes()
    try:
        for bit in places(len(whole), count, chance):
            flip(path, bit)
            try:
                changed = sum(rows != before[sid] for sid, rows in contents_of(directory, sessions).items())
                seen["reads another row, or none, without an error"] += changed > 0
            except Exception as error:
                seen["reports an error" if isinstance(error, JournalUnavailable) else f"fails: {error!r}"] += 1
                for file in directory.glob(f"{INDEX}*"):  # as the message says
                    file.unlink()
                seen["of these, all rows are there without the index"] += contents_of(directory, sessions) == before
            for file in directory.glob(f"{INDEX}*"):
                file.unlink()
            path.write_bytes(whole)
    finally:
        path.write_bytes(whole)
    return {"file_bytes": len(whole), "seen": dict(seen)}


async def filled(make: Callable[[Path], IndexedJournal], directory: Path, groups: list[list[Record]]) -> None:
    """Commit the groups, one frame each."""
    journal = make(directory)
    for group in groups:
        await journal.commit(*group)
    journal.close()


def progress(found: Found) -> None:
    """Print the last result to standard error: all of them take long on a busy machine."""
    print(json.dumps({name: found[name] for name in list(found)[-1:]}), file=sys.stderr, flush=True)


async def of_segments(directory: Path, sessions: int, count: int, seed: int, groups: list[list[Record]]) -> Found:
    """Damage the segment log and its index."""

    def made(path: Path) -> IndexedJournal:
        return IndexedJournal(path, segment_bytes=SEGMENT_BYTES)

    await filled(made, directory / "segments", groups)
    found: Found = {}
    for how in ("flip", "flip, no index", "cut"):
        found[f"segments: {how}"] = damaged_segments(directory / "segments", count, random.Random(seed), how=how)
        progress(found)
    found["segments: flip in the index"] = damaged_index(directory / "segments", count, random.Random(seed), sessions)
    return found


async def of_log(directory: Path, sessions: int, count: int, seed: int, groups: list[list[Record]]) -> Found:
    """Damage the write-ahead log that a killed server leaves."""
    killed, running = directory / "killed", directory / "running"
    for path in (killed, running):
        path.mkdir()
    table = FrameTable(running / "frames.db", is_alone=True)
    for group in groups:
        table.append(b"".join(map(encode_record, group)))
    for file in running.iterdir():  # its end was not copied into the database
        shutil.copyfile(file, killed / file.name)
    return {
        f"write-ahead log: {name}": damaged_wal(killed, count, random.Random(seed), cut=name == "cut")
        for name in ("flip", "cut")
    }


async def of_databases(directory: Path, sessions: int, count: int, seed: int, groups: list[list[Record]]) -> Found:
    """Damage databases of which all was copied from the write-ahead log."""
    found: Found = {}

    def damage(name: str, path: Path, vfs: str) -> None:
        found[name] = damaged_database(path, count, random.Random(seed), vfs)
        found[f"{name}: tree"] = damaged_database(path, count, random.Random(seed), vfs, tree=True)
        progress(found)

    for store, name in (("frames", "frames.db"), ("rows", INDEX)):
        await filled(journal_of(store), directory / store, groups)
        path = directory / f"{store}.db"
        db = apsw.Connection(str(directory / store / name))
        db.pragma("wal_checkpoint", "TRUNCATE")
        db.close()
        shutil.copyfile(directory / store / name, path)
        damage(store, path, "unix")
    apsw.sqlite_extra.load(apsw.Connection(":memory:"), "cksumvfs")
    path = directory / "checksums.db"
    rows: list[Any] = opened(directory / "frames.db").execute("SELECT n, body FROM frames ORDER BY n").fetchall()
    db = apsw.Connection(str(path), vfs="cksmvfs")
    db.reserve_bytes(reserve=8)  # of a new database: VACUUM of another leaves pages without a checksum
    db.execute("CREATE TABLE frames(n INTEGER PRIMARY KEY, body BLOB NOT NULL)")
    with db:
        db.executemany("INSERT INTO frames VALUES (?, ?)", rows)
    db.close()
    damage("frames, checksum VFS", path, "cksmvfs")
    return found


PARTS = {"segments": of_segments, "log": of_log, "databases": of_databases}


async def measured(directory: Path, parts: Sequence[str], sessions: int, count: int, seed: int) -> Found:
    """Write the same groups to every store, damage them, and return what was seen."""
    groups = group_commits(sessions, random.Random(seed))
    found: Found = {}
    for part in parts:
        found |= await PARTS[part](directory, sessions, count, seed, groups)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--only", choices=sorted(PARTS), help="one part alone")
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--places", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="a few places of a small journal")
    args = parser.parse_args()
    if args.smoke:
        args.sessions, args.places = 30, 4
    logging.disable()  # each damaged journal would log its damage
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        found = asyncio.run(
            measured(Path(directory), [args.only] if args.only else list(PARTS), args.sessions, args.places, args.seed)
        )
    result = {
        "sessions": args.sessions, "places": args.places, "seed": args.seed, "sqlite": apsw.sqlite_lib_version(),
        "apsw": apsw.apsw_version(), "python": platform.python_version(), "stores": found,
    }  # fmt: skip
    if args.json:
        print(json.dumps(result, indent=1))
        return
    for name, one in found.items():
        print(name)
        for key, value in one.items():
            print(f"  {key}: {json.dumps(value)}")


if __name__ == "__main__":
    main()

"""A damaged journal is repaired: what is whole stays, and only sessions with rows in damaged frames are lost."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import random
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from errata_client import ErrataClient
from errata_protocol.errors import ErrataError, JournalUnavailable
from errata_server.cli import commands
from errata_server.journal import (
    DeliveryRow,
    DirectoryDisk,
    IndexedJournal,
    RewardRow,
    SessionChange,
    SessionRow,
    journal_problems,
    salvage,
)
from errata_server.journal.base import Record
from errata_server.journal.codec import FRAME_BYTES, HEADER_BYTES, LOOSE, decode_header, decode_records
from errata_server.journal.damage import good_frames
from errata_server.journal.index import INDEX
from errata_server.journal.segments import Segments
from errata_server.process import ServerProcess

from .journal_rows import delivery, episode, reward, session
from .local_server import LocalServer

pytestmark = pytest.mark.salvage

COUNT = "tests.server.environments:CountEnvironment"
SESSIONS = 24


def commits(chance: random.Random) -> list[list[Record]]:
    """Commits of some sessions, as a server makes them, in an order of chance."""
    rows: list[list[list[Record]]] = []
    for n in range(SESSIONS):
        sid, eid = f"s_{n:022d}", f"ep_{n:022d}"
        mux: dict[str, object] = {"key_hash": bytes([n + 1]) * 32} if n % 2 else {}
        own: list[list[Record]] = [
            [session(sid, given_out=True, recovery="snapshot", **mux), episode(eid, sid)],
            *([delivery(eid, t, sid=sid, id=t + 1, payload=chance.randbytes(chance.randrange(300)))] for t in range(6)),
        ]
        if n % 4 == 1:
            own.insert(4, [reward(eid, 1, sid=sid)])
        if n % 6 == 0:
            own.append([SessionChange(sid, status="closed")])
        rows.append(own)
    found: list[list[Record]] = []
    while any(rows):
        found.append(chance.choice([own for own in rows if own]).pop(0))
    return found


async def filled(directory: Path, chance: random.Random, *, segment_bytes: int = 4000) -> None:
    journal = IndexedJournal(directory, segment_bytes=segment_bytes, batch_rows=16)
    for records in commits(chance):
        await journal.commit(*records)
    journal.close()


Frame = tuple[Path, int, bytes, set[str]]
"""A frame: its file, where it begins, its bytes, and the sessions that have rows in it."""


def frames_of(directory: Path) -> list[Frame]:
    found = []
    for path in sorted(directory.glob("*.log")):
        data = path.read_bytes()
        header = decode_header(data)
        assert header is not None
        for frame in good_frames(data, header):
            sids = {getattr(record, "sid", "") for _, _, record in decode_records(frame.body)} - {""}
            found.append((path, frame.begin, data[frame.begin : frame.end], sids))
    return found


def in_damaged(frames: Sequence[Frame]) -> set[str]:
    """The sessions with rows in frames that are not what they were. MARK and LOOSE are one bit apart, both good."""
    found = set[str]()
    for path, begin, data, sids in frames:
        now = path.read_bytes()[begin : begin + len(data)]
        if now != data and not (now[:4] == LOOSE and now[4:] == data[4:]):
            found |= sids
    return found


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def flip_anywhere(directory: Path, chance: random.Random, count: int) -> None:
    """Flip bits at random in the segments, headers included."""
    files = sorted(directory.glob("*.log"))
    for _ in range(count):
        path = chance.choices(files, [file.stat().st_size for file in files])[0]
        flip(path, chance.randrange(8 * path.stat().st_size))


def contents(directory: Path) -> dict[str, tuple[SessionRow | None, list[DeliveryRow], list[RewardRow]]]:
    """All that a journal holds, by session."""
    journal = IndexedJournal(directory)
    try:
        found = {}
        for n in range(SESSIONS):
            sid, eid = f"s_{n:022d}", f"ep_{n:022d}"
            rows = [journal.delivery(eid, turn.t) for turn in journal.turns(eid)]
            found[sid] = (journal.session(sid), [row for row in rows if row is not None], journal.rewards(eid))
        return found
    finally:
        journal.close()


@pytest.mark.parametrize("with_index", [True, False], ids=["with the index", "without an index"])
@pytest.mark.parametrize("seed", range(25))
async def test_ten_flipped_bits_lose_only_the_sessions_in_the_damaged_frames(
    tmp_path: Path, seed: int, with_index: bool
) -> None:
    chance = random.Random(seed)
    await filled(tmp_path, chance)
    before = contents(tmp_path)
    frames = frames_of(tmp_path)
    if not with_index:
        (tmp_path / INDEX).unlink()
    flip_anywhere(tmp_path, chance, 10)
    damaged = in_damaged(frames)

    report = await asyncio.to_thread(salvage, tmp_path)

    assert {found.sid for found in report.sessions} == damaged
    assert report.unattributed_bytes == 0
    after = contents(tmp_path)
    for sid, (row, rows, rewards) in before.items():
        assert row is not None
        now, rows_now, rewards_now = after[sid]
        assert now is not None
        if sid not in damaged:
            assert (now, rows_now, rewards_now) == (row, rows, rewards)
            continue
        assert now.status == ("lost" if sid in report.lost else "closed"), sid
        assert [row for row in rows if row in rows_now] == rows_now, "what is left is as it was"
    assert journal_problems(tmp_path) == []


async def test_a_compacted_segment_loses_only_the_damaged_rows(tmp_path: Path) -> None:
    await filled(tmp_path, random.Random(1))
    journal = IndexedJournal(tmp_path, segment_bytes=4000)
    for n in range(0, SESSIONS, 2):
        journal.delete_episode(f"ep_{n:022d}")
    assert journal.compact(garbage=0.01) > 0
    journal.close()
    before = contents(tmp_path)
    path = tmp_path / "00000002.log"
    rows, _ = next(Segments(DirectoryDisk(tmp_path)).whole(2))
    row = next(row for _, row in rows if isinstance(row, DeliveryRow))
    at = path.read_bytes().index(row.payload)
    flip(path, 8 * at)

    assert [found.sid for found in (await asyncio.to_thread(salvage, tmp_path)).sessions] == [row.sid]
    after = contents(tmp_path)
    assert {sid for sid in before if after[sid] != before[sid]} == {row.sid}
    assert journal_problems(tmp_path) == []


@pytest.mark.parametrize("part", ["map", "header", "header and map"])
async def test_a_compacted_segment_without_a_good_header_or_map_loses_nothing(tmp_path: Path, part: str) -> None:
    await filled(tmp_path, random.Random(1))
    journal = IndexedJournal(tmp_path, segment_bytes=4000)
    for n in range(0, SESSIONS, 2):
        journal.delete_episode(f"ep_{n:022d}")
    journal.compact(garbage=0.01)
    journal.close()
    before = contents(tmp_path)
    path = tmp_path / "00000002.log"
    header = decode_header(path.read_bytes())
    assert header is not None and header.map_at
    if "map" in part:
        flip(path, 8 * (header.map_at + 40))
    if "header" in part:
        flip(path, 8 * 25)

    report = await asyncio.to_thread(salvage, tmp_path)

    assert report.is_damaged and report.sessions == ()
    assert contents(tmp_path) == before


@pytest.mark.parametrize("damage", ["zeros", "noise"])
@pytest.mark.parametrize("seed", range(6))
async def test_a_lost_page_is_attributed_by_the_index(tmp_path: Path, seed: int, damage: str) -> None:
    chance = random.Random(seed)
    await filled(tmp_path, chance, segment_bytes=20_000)
    frames, before = frames_of(tmp_path), contents(tmp_path)
    path = sorted(tmp_path.glob("*.log"))[0]
    data = bytearray(path.read_bytes())
    at = chance.randrange(HEADER_BYTES, len(data) - 4096)
    data[at : at + 4096] = bytes(4096) if damage == "zeros" else chance.randbytes(4096)
    path.write_bytes(data)
    damaged = in_damaged(frames)

    report = await asyncio.to_thread(salvage, tmp_path)

    assert {found.sid for found in report.sessions} == damaged
    after = contents(tmp_path)
    assert {sid for sid in before if sid not in damaged and after[sid] != before[sid]} == set()
    for sid in damaged:
        row = after[sid][0]
        assert row is not None and row.status != "open"


@pytest.mark.parametrize("kept_bytes", [8, 60, 190])
async def test_a_page_lost_within_any_frame_is_attributed(tmp_path: Path, kept_bytes: int) -> None:
    """Whatever size the first record says: by chance it is a few bits from that of the whole gap."""
    await filled(tmp_path, random.Random(0), segment_bytes=20_000)
    frames = frames_of(tmp_path)
    path = frames[0][0]
    data = path.read_bytes()
    for _, begin, _, _ in (frame for frame in frames if frame[0] == path and frame[1] + 4500 < len(data)):
        at = begin + kept_bytes
        path.write_bytes(data[:at] + bytes(4096) + data[at + 4096 :])

        report = await asyncio.to_thread(functools.partial(salvage, tmp_path, dry_run=True))

        assert {found.sid for found in report.sessions} == in_damaged(frames), at


async def test_what_nothing_attributes_may_have_been_any_sessions_last_row(tmp_path: Path) -> None:
    """Without an index a lost page says nothing: a session without a later row might repeat a step that acted."""
    await filled(tmp_path, random.Random(3), segment_bytes=20_000)
    frames = frames_of(tmp_path)
    (tmp_path / INDEX).unlink()
    path = sorted(tmp_path.glob("*.log"))[-2]
    data = bytearray(path.read_bytes())
    data[5000:9096] = bytes(4096)
    path.write_bytes(data)

    report = await asyncio.to_thread(salvage, tmp_path)

    assert report.unattributed_bytes > 0
    listed = {found.sid for found in report.sessions}
    later = {sid for of, begin, _, sids in frames if (of, begin) > (path, 9096) for sid in sids}
    assert in_damaged(frames) - later <= listed, "no session that may have lost its last row goes on"


async def test_a_missing_segment_loses_those_that_the_index_has_rows_of_there(tmp_path: Path) -> None:
    await filled(tmp_path, random.Random(4))
    before, frames = contents(tmp_path), frames_of(tmp_path)
    (tmp_path / "00000003.log").unlink()
    with pytest.raises(JournalUnavailable, match="errata journal salvage"):
        IndexedJournal(tmp_path)

    report = await asyncio.to_thread(salvage, tmp_path)

    gone = {sid for path, _, _, sids in frames if path.name == "00000003.log" for sid in sids}
    assert {found.sid for found in report.sessions} == gone
    after = contents(tmp_path)
    assert {sid for sid in before if after[sid] != before[sid]} <= gone
    for sid in gone:
        assert after[sid][0] is not None and after[sid][0].status != "open"


async def test_a_deletion_in_a_damaged_frame_stays_done(tmp_path: Path) -> None:
    await filled(tmp_path, random.Random(5), segment_bytes=1_000_000)
    journal = IndexedJournal(tmp_path, segment_bytes=1_000_000)
    journal.delete_episode("ep_0000000000000000000001")
    await journal.commit(session("later"))
    journal.close()
    path, begin, _, sids = frames_of(tmp_path)[-2]
    assert sids == {"s_0000000000000000000001"}
    flip(path, 8 * (begin + 4))
    (tmp_path / INDEX).unlink()

    await asyncio.to_thread(salvage, tmp_path)

    journal = IndexedJournal(tmp_path)
    assert journal.episode("ep_0000000000000000000001") is None
    journal.close()


async def test_a_whole_frame_at_the_end_that_is_damaged_is_no_torn_one(tmp_path: Path) -> None:
    await filled(tmp_path, random.Random(6), segment_bytes=1_000_000)
    path, begin, _, sids = frames_of(tmp_path)[-1]
    flip(path, 8 * (begin + FRAME_BYTES + 20))

    report = await asyncio.to_thread(salvage, tmp_path)

    assert {found.sid for found in report.sessions} == sids


async def test_a_torn_end_is_cut_off_and_said_with_what_it_held(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = IndexedJournal(tmp_path)
    await journal.commit(session("s"), episode("e"), delivery("e", 0))
    journal.close()
    (tmp_path / INDEX).unlink()
    path = tmp_path / "00000001.log"
    path.write_bytes(path.read_bytes()[:-1])

    report = await asyncio.to_thread(salvage, tmp_path)
    assert (report.is_damaged, report.output) == (False, None)
    assert [found.what for found in report.damaged] == ["tail"]
    assert "session s" in report.damaged[0].holds
    IndexedJournal(tmp_path).close()
    assert "episode e (session s)" in caplog.text


async def test_an_end_that_is_gone_and_that_the_index_knows_of_is_damage(tmp_path: Path) -> None:
    await filled(tmp_path, random.Random(11), segment_bytes=1_000_000)
    frames = frames_of(tmp_path)
    path, begin, data, _ = frames[-3]
    os.truncate(path, begin + len(data) // 2)

    report = await asyncio.to_thread(salvage, tmp_path)

    assert {found.sid for found in report.sessions} == set().union(*(sids for *_, sids in frames[-3:]))
    assert journal_problems(tmp_path) == []


@pytest.mark.parametrize("cut", ["in a frame", "between frames", "in the header"])
async def test_a_start_says_that_an_end_is_gone_that_the_index_knew_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: str
) -> None:
    await filled(tmp_path, random.Random(11), segment_bytes=1_000_000)
    path, begin, data, _ = frames_of(tmp_path)[-3]
    os.truncate(path, {"in a frame": begin + len(data) // 2, "between frames": begin, "in the header": 9}[cut])
    IndexedJournal(tmp_path).close()
    assert "had been acknowledged" in caplog.text and "SESSION_LOST" in caplog.text
    assert "acknowledged nothing" not in caplog.text
    caplog.clear()
    IndexedJournal(tmp_path).close()
    assert "acknowledged" not in caplog.text


async def test_a_missing_last_segment_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await filled(tmp_path, random.Random(11))
    sorted(tmp_path.glob("*.log"))[-1].unlink()
    IndexedJournal(tmp_path).close()
    assert "had been acknowledged" in caplog.text


async def test_the_index_of_another_journal_says_nothing_of_this_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await filled(tmp_path / "one", random.Random(11), segment_bytes=1_000_000)
    journal = IndexedJournal(tmp_path / "other")
    await journal.commit(session("s"), episode("e"), delivery("e", 0))
    journal.close()
    shutil.copy(tmp_path / "one" / INDEX, tmp_path / "other" / INDEX)
    IndexedJournal(tmp_path / "other").close()
    assert "made again" in caplog.text and "acknowledged" not in caplog.text


def damage(directory: Path, how: str, chance: random.Random) -> None:
    files = sorted(directory.glob("*.log"))
    path = chance.choice(files)
    match how:
        case "flips":
            flip_anywhere(directory, chance, 20)
        case "cut":
            os.truncate(files[-1], chance.randrange(HEADER_BYTES, files[-1].stat().st_size))
        case "cut before others":
            os.truncate(files[0], chance.randrange(files[0].stat().st_size))
        case "zeros":
            data = bytearray(path.read_bytes())
            begin = chance.randrange(len(data))
            data[begin : begin + 700] = bytes(len(data[begin : begin + 700]))
            path.write_bytes(data)
        case "missing":
            path.unlink()
        case "header":
            flip(path, chance.randrange(8 * HEADER_BYTES))
        case "one over another":
            shutil.copy(files[0], files[1])


HOW = ["flips", "cut", "cut before others", "zeros", "missing", "header", "one over another"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("with_index", [True, False], ids=["with the index", "without an index"])
async def test_a_repaired_journal_verifies_at_once_and_after_a_start(
    tmp_path: Path, how: str, with_index: bool
) -> None:
    for seed in range(3):
        directory, chance = tmp_path / str(seed), random.Random(seed)
        await filled(directory, chance)
        if not with_index:
            (directory / INDEX).unlink()
        damage(directory, how, chance)
        await asyncio.to_thread(salvage, directory)
        assert journal_problems(directory) == []
        IndexedJournal(directory).close()
        assert journal_problems(directory) == []


async def test_a_flipped_byte_of_a_closed_session_is_found_by_reads_verify_and_salvage_and_not_at_start(
    tmp_path: Path,
) -> None:
    journal = IndexedJournal(tmp_path)
    await journal.commit(session("s"), episode("e", "s"), delivery("e", 0, sid="s"))
    await journal.commit(SessionChange("s", status="closed"))
    await journal.commit(session("other"))
    journal.close()
    path, *_ = frames_of(tmp_path)[0]
    flip(path, 8 * (path.read_bytes().index(delivery("e", 0, sid="s").payload) + 1))
    with contextlib.closing(IndexedJournal(tmp_path)) as journal:  # the index knows the frame: it is not read
        assert journal.episode("e") is not None
        with pytest.raises(JournalUnavailable, match="segment 1"):
            journal.delivery("e", 0)
        assert journal.session("other") is not None
    assert journal_problems(tmp_path)
    assert (await asyncio.to_thread(salvage, tmp_path, dry_run=True)).is_damaged
    (tmp_path / INDEX).unlink()
    with pytest.raises(JournalUnavailable):
        IndexedJournal(tmp_path)


async def test_a_copy_leaves_the_journal_as_it_is(tmp_path: Path) -> None:
    source, copy = tmp_path / "journal", tmp_path / "copy"
    await filled(source, random.Random(7))
    flip_anywhere(source, random.Random(7), 10)
    files = {path: path.read_bytes() for path in source.glob("*.log")}

    report = await asyncio.to_thread(salvage, source, output=copy)

    assert {path: path.read_bytes() for path in source.glob("*.log")} == files
    assert report.output == copy and report.originals is None
    assert journal_problems(copy) == []


async def test_a_dry_run_writes_nothing_and_reports_the_same(tmp_path: Path) -> None:
    await filled(tmp_path, random.Random(8))
    flip_anywhere(tmp_path, random.Random(8), 10)
    files = {path: path.read_bytes() for path in tmp_path.glob("*.log")}

    said = await asyncio.to_thread(salvage, tmp_path, dry_run=True)

    assert {path: path.read_bytes() for path in tmp_path.glob("*.log")} == files
    assert (await asyncio.to_thread(salvage, tmp_path)).sessions == said.sessions


async def test_originals_are_kept_and_a_repaired_journal_is_whole(tmp_path: Path) -> None:
    await filled(tmp_path, random.Random(9))
    flip_anywhere(tmp_path, random.Random(9), 10)
    damaged = {path.name: path.read_bytes() for path in tmp_path.glob("*.log")}

    report = await asyncio.to_thread(salvage, tmp_path)

    assert report.originals is not None
    for number in {found.segment for found in report.damaged}:
        name = f"{number:08d}.log"
        assert (report.originals / f"{name}.1").read_bytes() == damaged[name]
    again = await asyncio.to_thread(salvage, tmp_path)
    assert (again.damaged, again.sessions, again.output) == ((), (), None)


def failing_after(left: Iterator[int], real: Callable[..., Any]) -> Callable[..., Any]:
    """A call that fails once `left` is used up."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(left, None) is None:
            raise OSError(5, "it died")
        return real(*args, **kwargs)

    return call


async def test_a_salvage_that_died_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it dies: the next one comes to the same sessions."""
    chance = random.Random(10)
    await filled(tmp_path / "whole", chance)
    flip_anywhere(tmp_path / "whole", chance, 10)
    wanted = {found.sid for found in (await asyncio.to_thread(salvage, tmp_path / "whole", dry_run=True)).sessions}
    for at in range(40):
        directory = tmp_path / f"{at}"
        shutil.copytree(tmp_path / "whole", directory)
        with monkeypatch.context() as patch:
            left = iter(range(at))
            for name in ("append", "sync", "rename", "sync_names"):
                patch.setattr(DirectoryDisk, name, failing_after(left, getattr(DirectoryDisk, name)))
            try:
                await asyncio.to_thread(salvage, directory)
                return
            except JournalUnavailable:
                pass
        await asyncio.to_thread(salvage, directory)
        journal = IndexedJournal(directory)
        for sid in wanted:
            row = journal.session(sid)
            assert row is not None and row.status != "open", (at, sid)
        journal.close()
    pytest.fail("it never came to its end")


async def test_an_unknown_version_is_no_damage(tmp_path: Path) -> None:
    journal = IndexedJournal(tmp_path)
    await journal.commit(session("s"))
    journal.close()
    path = tmp_path / "00000001.log"
    data = bytearray(path.read_bytes())
    data[7:8] = b"9"
    data[HEADER_BYTES - 4 : HEADER_BYTES] = zlib.crc32(data[: HEADER_BYTES - 4]).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(JournalUnavailable, match="the Errata version that wrote it"):
        await asyncio.to_thread(salvage, tmp_path)


# -- a server on what is whole -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_sessions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, str], tuple[str, str]]:
    """A copy of the data directory of a running server with two given-out sessions, as its kill would leave it.

    Returns:
        The copy, and the sid and eid of each session after two steps.
    """
    directory = tmp_path_factory.mktemp("two")
    found = []
    with LocalServer(COUNT, directory / "data") as server, contextlib.ExitStack() as stack:
        for _ in range(2):
            client = stack.enter_context(ErrataClient[Any, Any, Any](server.url, durable=True).sync())
            client.reset()
            client.step({"n": 3})
            client.step({"n": 4})
            found.append((str(client.session_id), str(client.eid)))
        shutil.copytree(directory / "data", directory / "copy")
    return directory / "copy", found[0], found[1]


def damage_delivery(journal: Path, eid: str, t: int) -> None:
    """Flip a bit in a delivery, behind the index as a killed server leaves it."""
    for path, begin, data, _ in frames_of(journal):
        if any(isinstance(r, DeliveryRow) and (r.eid, r.t) == (eid, t) for _, _, r in decode_records(data[12:])):
            flip(path, 8 * (begin + len(data) - 3))
            return
    pytest.fail("no such delivery")


@pytest.mark.parametrize("how", ["the option", "the variable", "the command"])
async def test_a_server_starts_without_what_is_damaged_and_only_that_session_is_lost(
    tmp_path: Path,
    how: str,
    two_sessions: tuple[Path, tuple[str, str], tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    copy, (sid, eid), (other_sid, other_eid) = two_sessions
    data_dir = shutil.copytree(copy, tmp_path / "data")
    (data_dir / "journal" / INDEX).unlink(missing_ok=True)
    damage_delivery(data_dir / "journal", eid, 1)
    with pytest.raises(JournalUnavailable, match="errata journal salvage"):
        LocalServer(COUNT, data_dir)

    starts: Callable[[], LocalServer | ServerProcess] = functools.partial(LocalServer, COUNT, data_dir)
    if how == "the option":
        starts = functools.partial(ServerProcess, COUNT, data_dir, "--salvage")
    elif how == "the variable":
        monkeypatch.setenv("ERRATA_JOURNAL_SALVAGE", "1")
    else:
        answer = CliRunner().invoke(commands.cli, ["journal", "salvage", "--json", "--data-dir", str(data_dir)])
        told = json.loads(answer.stdout)
        assert (answer.exit_code, told["lost"]) == (1, [sid])
        assert [(s["sid"], s["status"], s["episodes"]) for s in told["sessions"]] == [(sid, "open", [eid])]
    with starts() as server:
        if how != "the command":
            log = "".join(server.log) if isinstance(server, ServerProcess) else caplog.text
            assert "had rows there (it was open)" in log
        report = json.loads((data_dir / "journal" / "damaged" / "report.json.1").read_text())
        assert report["lost"] == [sid]
        with pytest.raises(ErrataError, match="damaged") as caught:
            await ErrataClient[Any, Any, Any](server.url, session_id=sid).connect()
        assert caught.value.code == "SESSION_LOST"
        async with ErrataClient[Any, Any, Any](server.url, session_id=other_sid) as again:
            assert (again.eid, again.t) == (other_eid, 2)
            assert (await again.step({"n": 1})).observation["n"] == 8
        states = {t: httpx.get(f"{server.url}/episodes/{eid}/states/{t}").status_code for t in range(3)}
        assert states == {0: 200, 1: 404, 2: 200}, "what else was delivered stays readable"


def test_the_command_refuses_a_directory_in_use_and_repairs_a_copy_beside_the_server(tmp_path: Path) -> None:
    with (
        LocalServer(COUNT, tmp_path / "data") as server,
        ErrataClient[Any, Any, Any](server.url, durable=True).sync() as client,
    ):
        client.reset()
        refused = CliRunner().invoke(commands.cli, ["journal", "salvage", "--data-dir", str(tmp_path / "data")])
        assert isinstance(refused.exception, JournalUnavailable) and "in use" in str(refused.exception)
        arguments = ["journal", "salvage", "--data-dir", str(tmp_path / "data"), "-o", str(tmp_path / "copy")]
        done = CliRunner().invoke(commands.cli, arguments)
        assert done.exit_code == 0 and "nothing that was acknowledged is damaged" in done.stdout
        eid = client.eid
    shown = CliRunner().invoke(commands.cli, ["replay", str(eid), "--data-dir", str(tmp_path / "copy")])
    assert shown.exit_code == 0 and "reset" in shown.stdout


def test_without_a_journal_the_command_says_so(tmp_path: Path) -> None:
    done = CliRunner().invoke(commands.cli, ["journal", "salvage", "--data-dir", str(tmp_path)])
    assert isinstance(done.exception, JournalUnavailable)
    assert list(tmp_path.iterdir()) == []

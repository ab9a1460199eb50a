"""What the broker holds for a client is bounded, and no client takes the places of others."""

from __future__ import annotations

import io
import json
import tarfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from errata_sandboxd import cli, engine_client, lines, service
from errata_sandboxd import engine as broker_engine
from errata_sandboxd.schema import Refused, check_request
from errata_sandboxd.service import Service
from errata_sandboxd.spool import Spool

from ..machine_speed import SLOWDOWN
from .attacker import Attacker
from .fake_engine import FakeEngine

Serve = Callable[..., Service]
MIB = 1024**2


@pytest.fixture
def most_held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The most bytes that copies held, as its only element."""
    most = [0]
    count = Spool.count

    def counted(self: Spool, size: int) -> None:
        count(self, size)
        most[0] = max(most[0], self.held_bytes)

    monkeypatch.setattr(Spool, "count", counted)
    return most


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """Return the header of a member in the old form of tar."""
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def with_records(records: dict[str, str], name: str = "x") -> bytes:
    """Return an archive with one member of 512 bytes and records in an extended header."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=tarfile.PAX_FORMAT) as out:
        member = tarfile.TarInfo(name)
        member.size, member.pax_headers = 512, records
        out.addfile(member, io.BytesIO(b"1\n0\n512\n".ljust(512, b"\0")))
    return written.getvalue()


def old_sparse() -> bytes:
    """Return an archive of GNU's old form that claims 3 GiB."""
    block = bytearray(header("x", 512, tarfile.GNUTYPE_SPARSE))
    block[386:410] = b"%011o\0%011o\0" % (0, 512)
    block[483:495] = b"%011o\0" % (3 * 1024**3)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + bytes(512) + bytes(1024)


SPARSE = {
    "old": old_sparse(),
    "0.0": with_records({"GNU.sparse.size": "3221225472", "GNU.sparse.numblocks": "1"}),
    "0.1": with_records({"GNU.sparse.size": "3221225472", "GNU.sparse.map": "0,512"}),
    "1.0": with_records(
        {
            "GNU.sparse.major": "1",
            "GNU.sparse.minor": "0",
            "GNU.sparse.name": "x",
            "GNU.sparse.realsize": "3221225472",
        }
    ),
}


@pytest.mark.parametrize("form", SPARSE)
def test_a_sparse_member_is_refused(attacker: Attacker, engine: FakeEngine, most_held: list[int], form: str) -> None:
    mine = engine.add_container("one")
    answer = attacker.call("copy_in", container=mine, data=SPARSE[form])
    assert answer["error"]["code"] == "invalid"
    assert "sparse" in answer["error"]["message"]
    assert engine.written == [] and most_held[0] < MIB


@pytest.mark.parametrize("size", [2 * MIB, 8 * 1024**3])
@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK])
def test_an_extended_header_is_small(attacker: Attacker, engine: FakeEngine, kind: bytes, size: int) -> None:
    mine = engine.add_container("one")
    data = header("x", size, kind) + bytes(2 * MIB)
    answer = attacker.call("copy_in", container=mine, data=data)
    assert (answer["error"]["code"], "extended header" in answer["error"]["message"]) == ("invalid", True)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(header("x", 512, tarfile.XGLTYPE) + bytes(512), id="nothing after a header"),
        pytest.param((header("x", 10, tarfile.XHDTYPE) + b"10 a=bcde\n".ljust(512, b"\0")) * 3000, id="nested headers"),
        pytest.param(header("x", 8 * 1024**3) + bytes(4096), id="less than it says"),
        pytest.param(bytes(100), id="less than a block"),
        pytest.param(b"\xff" * 4096, id="no archive"),
        pytest.param(with_records({"size": "-1"}), id="negative size"),
        pytest.param(with_records({"mtime": "1e999"}), id="no time"),
        pytest.param(with_records({"path": "a\0b"}), id="NUL in a path"),
        pytest.param(with_records({"path": "../x"}), id="path in a header"),
    ],
)
def test_an_archive_that_is_none_is_refused(attacker: Attacker, engine: FakeEngine, data: bytes) -> None:
    mine = engine.add_container("one")
    assert attacker.code("copy_in", container=mine, data=data) == "invalid"
    assert engine.written == []
    assert "engine" in attacker.ok("ping")


def test_bytes_are_counted_as_they_are_written_out(
    serve: Serve, place: Path, engine: FakeEngine, most_held: list[int]
) -> None:
    serve("small", archive_bytes=MIB)
    mine = engine.add_container("small")
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=tarfile.GNU_FORMAT) as out:
        for number in range(1200):
            out.addfile(tarfile.TarInfo(f"ä{number}"))  # written out it has an extended header
    assert len(written.getvalue()) < MIB
    answer = Attacker(place / "small").call("copy_in", container=mine, data=written.getvalue())
    assert answer["error"]["code"] == "too_large"
    assert engine.written == [] and most_held[0] <= MIB


def test_an_archive_is_checked_while_it_is_received(
    serve: Serve, place: Path, engine: FakeEngine, most_held: list[int]
) -> None:
    small = serve("small", archive_bytes=MIB)
    mine = engine.add_container("small")
    answer = Attacker(place / "small").call("copy_in", container=mine, data=bytes(8 * MIB))
    assert answer["error"]["code"] == "too_large"
    assert most_held[0] < MIB and small.spool.held_bytes == 0


def test_what_is_right_arrives(attacker: Attacker, engine: FakeEngine) -> None:
    mine = engine.add_container("one")
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=tarfile.PAX_FORMAT) as out:
        for name, kind in (("d", tarfile.DIRTYPE), ("d/" + "ä" * 120, tarfile.REGTYPE), ("l", tarfile.SYMTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.size = kind, 3 * MIB if kind == tarfile.REGTYPE else 0
            member.linkname = "/x" if kind == tarfile.SYMTYPE else ""
            out.addfile(member, io.BytesIO(bytes(member.size)))
    assert "ok" in attacker.call("copy_in", container=mine, data=written.getvalue())
    with tarfile.open(fileobj=io.BytesIO(engine.written[0])) as read:
        assert [(one.name, one.size) for one in read] == [("d", 0), ("d/" + "ä" * 120, 3 * MIB), ("l", 0)]


def endless(given: list[int]) -> Callable[[str, str], Iterator[bytes]]:
    """Return an archive without an end, which counts its bytes."""

    def archive(_container: str, _path: str) -> Iterator[bytes]:
        while True:
            given[0] += 65536
            yield bytes(65536)

    return archive


def test_a_copy_out_has_a_bound_that_no_client_raises(
    serve: Serve, place: Path, engine: FakeEngine, most_held: list[int]
) -> None:
    small = serve("small", copy_out_bytes=MIB)
    mine, given = engine.add_container("small"), [0]
    engine.archive = endless(given)
    answer = Attacker(place / "small").call("copy_out", container=mine, path="/x", max_bytes=2**40)
    assert answer["error"]["code"] == "too_large" and "--copy-out-mib" in answer["error"]["message"]
    assert most_held[0] <= MIB and small.spool.held_bytes == 0
    given_first = given[0]
    assert Attacker(place / "small").code("copy_out", container=mine, path="/x", max_bytes=2**16) == "too_large"
    assert given_first < 8 * MIB  # what the sockets held beyond the bound


def test_who_has_enough_of_a_copy_ends_it(attacker: Attacker, engine: FakeEngine, most_held: list[int]) -> None:
    mine, given = engine.add_container("one"), [0]
    engine.archive = endless(given)
    with attacker.connected() as link:
        request = {"do": "copy_out", "container": mine, "path": "/x", "max_bytes": 2**40}
        link.sendall(json.dumps(request).encode() + b"\n")
        assert b'{"data": ' in link.recv(100), "it comes while the engine still reads"
    attacker.ok("ping")


def test_what_nobody_reads_fills_the_owners_own_room_only(
    serve: Serve, place: Path, engine: FakeEngine, most_held: list[int]
) -> None:
    serve("full", spool_bytes=MIB)
    serve("other")
    engine.archive = endless([0])
    mine, theirs = engine.add_container("full"), engine.add_container("other")
    with Attacker(place / "full").connected() as link:
        request = {"do": "copy_out", "container": mine, "path": "/x", "max_bytes": 2**30}
        link.sendall(json.dumps(request).encode() + b"\n")
        while most_held[0] < MIB:
            threading.Event().wait(0.01)
        answer = link.makefile("rb").read().splitlines()
    assert json.loads(answer[-1])["error"]["code"] == "busy"
    assert most_held[0] <= MIB
    engine.archive = None
    assert Attacker(place / "other").ok("copy_out", container=theirs, path="/x", max_bytes=2**30)["size"] == 1


def test_a_list_of_the_engine_is_bounded(
    attacker: Attacker, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "LIST_BYTES", 100_000)
    mine = engine.add_container("one")
    engine.changes = json.dumps([{"Path": "/x", "Kind": 1}] * 100).encode()
    assert len(attacker.ok("inspect", container=mine, changes=True)["changes"]) == 100
    engine.changes = json.dumps([{"Path": "/x", "Kind": 1}] * 10_000).encode()
    assert attacker.code("inspect", container=mine, changes=True) == "too_large"


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b'{"do": "ping", "x": "' + b"x" * lines.MAX_REQUEST + b'"}\n', "too_large"),
        (b"x" * (lines.MAX_REQUEST + 65537), "too_large"),
        (b"[" * 100_000 + b"\n", "invalid"),
        (b'{"do": ' * 30_000 + b"\n", "invalid"),
        (b"[" + b"[]," * 80_000 + b"[]]\n", "invalid"),
        (b'{"do": "ping", "x": "\\ud800"}\n', "invalid"),
        (b"1e999\n", "invalid"),
    ],
)
def test_a_line_is_bounded(attacker: Attacker, sent: bytes, code: str) -> None:
    answer = attacker.raw(sent)
    assert [line["error"]["code"] for line in answer] == [code]
    assert "engine" in attacker.ok("ping")


# Others go on


def test_slow_calls_of_one_owner_do_not_hold_up_another(
    attacker: Attacker, neighbour: Attacker, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_engine, "QUICK_S", 30.0 * SLOWDOWN)
    theirs, mine = engine.add_container("two"), engine.add_container("one")
    with ThreadPoolExecutor(48) as pool, engine.held(theirs) as entered:
        slow = [pool.submit(neighbour.call, "inspect", container=theirs, changes=True) for _ in range(24)]
        for _ in range(broker_engine._COPIES_AT_ONCE):
            assert entered.acquire(timeout=120)
        slow += [pool.submit(neighbour.call, "inspect", container=theirs) for _ in range(24)]
        for _ in range(broker_engine._AT_ONCE - broker_engine._COPIES_AT_ONCE):
            assert entered.acquire(timeout=120), "all places of their owner are taken"
        engine.add_image("errata/base:default")
        assert attacker.ok("inspect", container=mine, changes=True)["running"]
        assert attacker.ok("ping")["engine"] == "fake"
        made = attacker.ok("create", image="errata/base:default")["container"]
        attacker.ok("start", container=made)
        assert attacker.call("exec", container=made, argv=["cat"], timeout_s=60, data=b"x")["output"] == b"x"
        assert attacker.ok("copy_out", container=made, path="/x", max_bytes=MIB)["size"] == 1
        attacker.ok("remove", container=made)
        assert not any(one.done() for one in slow)
    assert all("ok" in one.result() for one in slow)


def test_silent_connections_leave_room_for_the_next(attacker: Attacker, neighbour: Attacker) -> None:
    silent = [attacker.connected() for _ in range(300)]
    try:
        for _ in range(4):
            assert attacker.ok("ping")["engine"] == "fake"
            assert neighbour.ok("ping")["engine"] == "fake"
        refused = json.loads(silent[0].makefile("rb").read())
        assert refused["error"]["code"] == "busy", "the oldest were ended, and told so"
    finally:
        for link in silent:
            link.close()


def test_a_program_whose_connection_was_evicted_is_not_started(
    attacker: Attacker, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = engine.add_container("one")

    def evicting(request: Any) -> tuple[str, dict[str, Any]]:
        """Open one connection more than are allowed, once the line of an exec has arrived."""
        checked = check_request(request)
        if checked[0] == "exec":
            attacker.raw(b"x" * (lines.MAX_REQUEST + 65537))
        return checked

    monkeypatch.setattr(service, "IDLE", 1)
    monkeypatch.setattr(service, "check_request", evicting)
    assert attacker.code("exec", container=mine, argv=["cat"], timeout_s=60) == "busy", "it is sent again"
    assert not any("/exec" in target for target in engine.asked)


@pytest.mark.parametrize("step", ["exec_status", "restart"])
def test_a_program_that_was_started_is_never_called_busy(
    attacker: Attacker, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    mine = engine.add_container("one")

    def without_place(*_: object) -> None:
        raise Refused("busy", "all places were taken: try again")

    monkeypatch.setattr(broker_engine.Engine, step, without_place)
    timeout_s = 60.0 if step == "exec_status" else 0.01
    if step == "restart":
        monkeypatch.setattr(broker_engine.Engine, "exec_status", lambda *_: None)
    assert attacker.code("exec", container=mine, argv=["cat"], timeout_s=timeout_s) == "deadline"
    assert sum(target.endswith("/start") for target in engine.asked) == 1


@pytest.mark.parametrize("sent", [b"", b'{"do": "pi'])
def test_a_request_that_does_not_come_is_refused(
    attacker: Attacker, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(service, "REQUEST_S", 0.05)
    assert [line["error"]["code"] for line in attacker.raw(sent)] == ["deadline"]


def test_data_that_does_not_come_is_refused(
    attacker: Attacker, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "STALL_S", 0.05)
    mine = engine.add_container("one")
    answer = attacker.raw(json.dumps({"do": "copy_in", "container": mine}).encode() + b"\n")
    assert [line["error"]["code"] for line in answer] == ["deadline"]


def test_a_full_broker_refuses_and_says_so(serve: Serve, place: Path, engine: FakeEngine) -> None:
    serve("few", connections=2)
    few = Attacker(place / "few")
    mine = engine.add_container("few")
    with ThreadPoolExecutor(2) as pool, engine.held(mine) as entered:
        running = [pool.submit(few.call, "inspect", container=mine) for _ in range(2)]
        for _ in running:
            assert entered.acquire(timeout=120)
        for _ in range(20):
            assert few.code("ping") == "busy"
            assert few.code("copy_in", container=mine, data=bytes(4 * MIB)) == "busy", "also who still sends reads it"
    assert all("ok" in one.result() for one in running)
    assert few.ok("ping")["engine"] == "fake"


# Beginning and end


def test_requests_that_run_are_answered_before_the_broker_ends(serve: Serve, place: Path, engine: FakeEngine) -> None:
    ending = serve("ending")
    client, mine = Attacker(place / "ending"), engine.add_container("ending")
    with ThreadPoolExecutor(2) as pool, engine.held(mine) as entered:
        running = pool.submit(client.call, "commit", container=mine, facts={})
        assert entered.acquire(timeout=120)
        waiting = client.connected()  # it has not sent its request yet
        ended = pool.submit(ending.end, 120.0)
        while (place / "ending").exists():
            threading.Event().wait(0.01)
        with pytest.raises(FileNotFoundError):
            client.connected()
        assert not running.done() and not ended.done()
    assert "ok" in running.result()
    ended.result()
    waiting.sendall(b'{"do": "ping"}\n')
    assert json.loads(waiting.makefile("rb").read())["error"]["code"] == "busy"
    waiting.close()


@pytest.mark.parametrize(("failure", "code"), [(Refused("conflict", "no"), "conflict"), (KeyError(), "engine_failed")])
def test_a_request_runs_until_its_error_is_sent(
    serve: Serve, place: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception, code: str
) -> None:
    ending = serve("ending")
    found_running: list[bool] = []
    send = lines.Lines.send

    def fail(_: object) -> None:
        raise failure

    def ending_first(self: lines.Lines, message: dict[str, Any], until: float | None = None) -> None:
        ending.end(0.0)
        found_running.append(ending.ending.is_set())
        send(self, message, until)

    monkeypatch.setattr(broker_engine.Engine, "ping", fail)
    monkeypatch.setattr(lines.Lines, "send", ending_first)
    assert Attacker(place / "ending").code("ping") == code
    assert found_running == [True], "else the process may end before the client has its answer"


def test_a_program_that_does_not_end_is_killed_when_the_broker_ends(
    serve: Serve, place: Path, engine: FakeEngine
) -> None:
    ending = serve("ending")
    mine = engine.add_container("ending")
    with Attacker(place / "ending").connected() as link:
        link.sendall(json.dumps({"do": "exec", "container": mine, "argv": ["cat"], "timeout_s": 600}).encode() + b"\n")
        while not any("/start" in target for target in list(engine.asked)):
            threading.Event().wait(0.01)
        ending.end(0.05)
        assert json.loads(link.makefile("rb").read())["error"]["code"] == "engine_away"
    assert any(target.startswith(f"POST /v1.41/containers/{mine}/restart") for target in engine.asked)


def test_a_new_broker_takes_the_socket_over_and_the_old_one_leaves_it(
    serve: Serve, place: Path, engine: FakeEngine
) -> None:
    old = serve("owner")
    serve("owner")
    old.end(1.0)
    assert Attacker(place / "owner").ok("ping")["engine"] == "fake"
    assert (place / "owner").stat().st_mode & 0o777 == 0o660
    assert not list(place.glob(".*.new"))


@pytest.mark.parametrize(
    "wrong",
    [
        ["--group", "../no-such-group"],
        ["--mode", "7777777777777777777777"],
        ["--serve", "owner=" + "a" * 200],
        ["--serve", "owner=/dev/null/socket"],
        ["--serve", "owner=a\0b"],
        ["--connections", "100000000"],
    ],
    ids=lambda wrong: wrong[0] + ascii(wrong[1])[:20],
)
def test_what_no_socket_can_be_made_of_is_one_line(
    place: Path, capsys: pytest.CaptureFixture[str], wrong: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 1_000_000))
    monkeypatch.setattr("resource.setrlimit", lambda *_: None)
    serve = [] if wrong[0] == "--serve" else ["--serve", f"owner={place}/socket"]
    assert cli.main([*serve, *wrong]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("errata sandboxd: ")

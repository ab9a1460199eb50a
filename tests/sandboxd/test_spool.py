"""A temporary directory without room: a copy is refused as busy, and nothing of it is left."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import tarfile
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from errata_sandboxd.schema import Refused
from errata_sandboxd.service import Service
from errata_sandboxd.spool import Spool, SpoolFile

from .attacker import Attacker
from .fake_engine import FakeEngine

MIB = 1024**2
CONTENT = bytes(MIB - 1)
"""Its last bytes stay in the buffer of a file."""


class Disk:
    """A disk with room for some bytes of a temporary file.

    Args:
        path: Path of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.room = 0
        self.was_full = threading.Event()


class _File(io.FileIO):
    """A file on a `Disk`; as on a real one, the last write before it is full is short."""

    def __init__(self, disk: Disk) -> None:
        super().__init__(disk.path, "w+")
        self._disk = disk

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")[: self._disk.room]
        if not view:
            self._disk.was_full.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._disk.room -= len(view)
        return super().write(view)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Disk:
    """A disk for all temporary files, without room."""
    made = Disk(tmp_path / "file")
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: io.BufferedRandom(_File(made)))
    return made


def archive(content: bytes = CONTENT) -> bytes:
    """Return an archive with one file."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as out:
        member = tarfile.TarInfo("x")
        member.size = len(content)
        out.addfile(member, io.BytesIO(content))
    return written.getvalue()


@pytest.mark.parametrize("room", [0, 1, 300_000, MIB, len(archive()) - 1])
def test_an_archive_without_room_is_refused_as_busy(
    attacker: Attacker, engine: FakeEngine, disk: Disk, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    disk.room = room
    mine = engine.add_container("one")
    answer = attacker.call("copy_in", container=mine, data=archive())
    assert answer["error"]["code"] == "busy" and "No space left" in answer["error"]["message"]
    assert engine.written == []
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_small_archive_without_room_is_refused_as_busy(attacker: Attacker, engine: FakeEngine, disk: Disk) -> None:
    mine = engine.add_container("one")
    assert attacker.code("copy_in", container=mine, data=archive(b"x")) == "busy"
    assert engine.written == []


@pytest.mark.parametrize("room", [0, 300_000, MIB])
def test_a_copy_that_nobody_reads_is_ended_as_busy_without_room(
    attacker: Attacker, engine: FakeEngine, disk: Disk, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    disk.room = room
    mine = engine.add_container("one")
    engine.archive = lambda *_: iter([bytes(MIB)] * 8)
    with attacker.connected() as link:
        request = {"do": "copy_out", "container": mine, "path": "/x", "max_bytes": 2**30}
        link.sendall(json.dumps(request).encode() + b"\n")
        assert disk.was_full.wait(120)
        assert json.loads(link.makefile("rb").read().splitlines()[-1])["error"]["code"] == "busy"
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


OPERATIONS: dict[str, Callable[[SpoolFile], object]] = {
    "read_at": lambda file: file.read_at(0, 1),
    "rewound": lambda file: file.rewound(),
    "clear": lambda file: file.clear(),
    "write": lambda file: file.write(b"x"),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("room", [0, 300_000, MIB + 1])
def test_every_operation_without_room_is_busy(disk: Disk, operation: str, room: int) -> None:
    disk.room = room
    spool = Spool(8 * MIB)
    with pytest.raises(Refused, match="No space left") as caught, spool.file(8 * MIB, "too large") as file:
        try:
            file.write(CONTENT)
            file.write(b"two")  # in the buffer
        except Refused:
            assert room < MIB
        OPERATIONS[operation](file)
    assert caught.value.code == "busy" and spool.held_bytes == 0


def test_the_first_error_stays_when_the_end_finds_no_room(disk: Disk) -> None:
    disk.room = MIB + 1
    spool = Spool(8 * MIB)
    with pytest.raises(KeyError), spool.file(8 * MIB, "too large") as file:
        file.write(CONTENT)
        file.write(b"two")
        raise KeyError
    assert spool.held_bytes == 0


def test_without_a_temporary_directory_large_copies_are_busy(
    attacker: Attacker, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(**_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "TemporaryFile", nowhere)
    mine = engine.add_container("one")
    assert attacker.code("copy_in", container=mine, data=archive()) == "busy"
    assert "engine" in attacker.ok("ping")


def test_a_copy_with_room_arrives(serve: Callable[..., Service], place: Path, engine: FakeEngine, disk: Disk) -> None:
    disk.room = 8 * MIB
    served = serve("one")
    mine = engine.add_container("one")
    Attacker(place / "one").ok("copy_in", container=mine, data=archive())
    with tarfile.open(fileobj=io.BytesIO(engine.written[0])) as read:
        assert [one.size for one in read] == [len(CONTENT)]
    assert served.spool.held_bytes == 0

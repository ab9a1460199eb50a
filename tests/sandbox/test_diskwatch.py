"""What a command takes from the disk while it runs, and what it cannot take from the server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from errata_protocol.errors import SandboxFailed
from errata_server.journal import EpisodeRow, IndexedJournal, SessionRow
from errata_server.sandbox.base import Limits
from errata_server.sandbox.files.walk import Usage
from errata_server.sandbox.namespace.backend import NamespaceBackend
from errata_server.sandbox.namespace.disk_watch import DiskSpace, DiskWatch, Growth, Measurement, exceeded_limit
from errata_server.sandbox.namespace.free_space import FreeSpace

from ..server.conftest import until

MIB = 1024**2
SMALL = Limits(file_size_bytes=32 * MIB, disk_bytes=64 * MIB, inodes=2_000)
ENDLESS = Limits(file_size_bytes=64 * MIB, disk_bytes=1 << 40, inodes=10**9)
BOUNDED = Limits(disk_bytes=128 * MIB)
FILL = "while :; do n=$((n+1)); head -c 60M /dev/zero > big$n || exit; done"
HELD = (
    "import os, time\n"
    "for n in range(40):\n"
    "    fd = os.open(str(n), os.O_RDWR | os.O_CREAT); os.unlink(str(n))\n"
    "    for _ in range(24): os.write(fd, bytes(1 << 20))\n"
    "time.sleep(60)\n"
)
MAPPED = (
    "import mmap, os, time\n"
    "kept = []\n"
    "for n in range(40):\n"
    "    fd = os.open(str(n), os.O_RDWR | os.O_CREAT); os.unlink(str(n)); os.truncate(fd, 24 << 20)\n"
    "    kept.append(mmap.mmap(fd, 24 << 20)); os.close(fd)\n"
    "    for at in range(0, 24 << 20, 4096): kept[-1][at] = 1\n"
    "time.sleep(60)\n"
)


@pytest.mark.sandbox
@pytest.mark.parametrize("program", [HELD, MAPPED], ids=["open", "mapped"])
async def test_files_without_a_name_count(namespace_backend: NamespaceBackend, program: str) -> None:
    box = await namespace_backend.open(limits=SMALL)
    await box.write_file("p.py", program.encode())
    result = await box.run("python3 p.py", timeout_s=50.0)
    assert (result.limit_hit, result.timed_out, result.exit_code) == ("disk", False, 137), result
    assert (await box.run("echo on")).stdout == "on\n"


def children(pid: int) -> list[int]:
    """Return the pids of a process's children, those of its first thread."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def write_to_disk(path: Path, size_bytes: int) -> None:
    """Write a file of zeros, and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(bytes(size_bytes))
        file.flush()
        os.fsync(file.fileno())


@pytest.mark.sandbox
async def test_a_command_that_has_not_begun_answers_for_no_growth_of_the_disk(
    namespace_backend: NamespaceBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine a child takes long to receive the descriptors of its request, which wait in a socket.
    box = await namespace_backend.open(limits=SMALL)
    counts = 0
    measure = DiskWatch.measure

    def counted(watch: DiskWatch) -> Measurement:
        nonlocal counts
        counts += 1
        return measure(watch)

    monkeypatch.setattr(DiskWatch, "measure", counted)
    await until(lambda: len(namespace_backend.runners._ready) > 0)
    with namespace_backend.runners._lock:  # a thread adds further ones
        ready = list(namespace_backend.runners._ready)
    await until(lambda: all(children(runner.pid) for runner in ready))  # a runner is announced before its init forks
    waiting = [child for runner in ready for child in children(runner.pid)]
    for child in waiting:
        os.kill(child, signal.SIGSTOP)
    task = asyncio.create_task(box.run("echo ok", timeout_s=600.0))  # a busy disk takes long to write
    try:
        await until(lambda: counts > 0)
        await asyncio.to_thread(write_to_disk, tmp_path / "of-another-program", 2 * SMALL.disk_bytes)
        seen = counts
        await until(lambda: counts > seen + 3 or task.done())
        assert not task.done(), task.result()
    finally:
        for child in waiting:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGCONT)
    result = await task
    assert (result.limit_hit, result.stdout) == (None, "ok\n"), result


@pytest.mark.sandbox
async def test_neither_memory_nor_a_deleted_file_of_a_frozen_layer_counts(namespace_backend: NamespaceBackend) -> None:
    box = await namespace_backend.open(limits=SMALL)
    assert (await box.run("head -c 30M /dev/zero > a; head -c 30M /dev/zero > b")).limit_hit is None
    await box.snapshot()
    program = (
        "import os, time\n"
        "kept = [open('a'), open('b')]; os.unlink('a'); os.unlink('b')\n"
        "m = os.memfd_create('m'); s = os.open('/dev/shm/s', 66); os.unlink('/dev/shm/s')\n"
        "for _ in range(30): os.write(m, bytes(1 << 20)); os.write(s, bytes(1 << 20))\n"
        "time.sleep(1)\n"
    )
    await box.write_file("p.py", program.encode())
    result = await box.run("python3 p.py")
    assert (result.limit_hit, result.exit_code) == (None, 0), result


@pytest.mark.sandbox
async def test_a_fast_writer_is_stopped_near_its_limit(namespace_backend: NamespaceBackend) -> None:
    box = await namespace_backend.open(limits=SMALL)
    files = "import itertools\nfor n in itertools.count(): open(str(n), 'w').close()\n"
    await box.write_file("p.py", files.encode())
    result = await box.run("python3 p.py; ls | wc -l", timeout_s=50.0)
    assert result.limit_hit == "inodes"
    # Before, the first look came after 0.3 s, whatever was written by then.
    assert int((await box.run("ls | wc -l")).stdout) < 4 * SMALL.inodes


@pytest.fixture
def own_disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 1 GiB for a server alone."""
    image, place = tmp_path / "image", tmp_path / "disk"
    with image.open("wb") as made:
        made.truncate(1024 * MIB)
    place.mkdir()
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.sandbox
async def test_the_journal_commits_while_sessions_fill_the_disk(own_disk: Path) -> None:
    backend = NamespaceBackend(own_disk / "sandboxes")
    journal = IndexedJournal(own_disk / "journal")
    await backend.start()
    least, commits, committed = 1 << 60, 0, asyncio.Event()

    async def commit() -> None:
        """Commit as fast as the disk syncs, each row in a transaction of its own."""
        nonlocal least, commits
        while True:
            sid = f"s{commits}"
            row = EpisodeRow(sid=sid, eid=sid, environment="x" * 4096, created=1.0)
            await journal.commit(SessionRow(sid=sid, environment="e", recovery="none", seed=commits, created=1.0), row)
            commits += 1
            committed.set()
            space = os.statvfs(own_disk)
            least = min(least, space.f_bavail * space.f_frsize)

    innocent, bounded, *greedy = [
        await backend.open(limits=limits) for limits in (SMALL, BOUNDED, ENDLESS, ENDLESS, ENDLESS)
    ]
    committing = asyncio.create_task(commit())
    waiting = asyncio.create_task(innocent.run("read -t 300 < <(sleep 300)", timeout_s=300.0))
    assert (await bounded.run(FILL, timeout_s=60.0)).limit_hit == "disk", "its own limit"
    greed = (box.run(FILL, timeout_s=60.0) for box in greedy)
    results = await asyncio.gather(*greed, return_exceptions=True)
    assert not committing.done(), committing.result()
    if waiting.done():  # a command that wrote nothing is stopped only once half of the reserve is used, too
        free, reserve = re.findall(r"(\d+) MiB", str(waiting.exception()))
        assert 2 * int(free) <= int(reserve), str(waiting.exception())
    assert [type(result) for result in results] == [SandboxFailed] * 3, results
    assert "free space" in str(results[0])
    assert least > 0 and commits > 0
    with pytest.raises(SandboxFailed, match="free space"):
        await greedy[0].run("true")
    with pytest.raises(SandboxFailed, match="free space"):
        await greedy[1].write_file("f", b"x")
    committed.clear()
    for box in greedy:
        await box.destroy()
    result = await bounded.run("echo room")
    assert result.stdout == "room\n", result
    await asyncio.wait_for(committed.wait(), 60.0)
    for task in (committing, waiting):
        task.cancel()
    await asyncio.gather(committing, waiting, return_exceptions=True)
    await backend.close()
    journal.close()


HIDDEN = (
    "import itertools, os, socket\n"
    "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
    "c, d = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
    "for n in itertools.count():\n"
    "    fd = os.open(str(n), os.O_RDWR | os.O_CREAT)\n"
    "    os.unlink(str(n))\n"
    "    socket.send_fds((a, c)[n % 2], [b'x'], [fd])\n"
    "    for _ in range(60): os.write(fd, bytes(1 << 20))\n"
    "    os.close(fd)\n"
)


@pytest.mark.sandbox
async def test_the_reserve_outlasts_files_that_no_count_sees(own_disk: Path) -> None:
    """Their only descriptors are under way in a socket."""
    backend = NamespaceBackend(own_disk / "sandboxes", limits=ENDLESS)
    await backend.start()
    box = await backend.open()
    await box.write_file("p.py", HIDDEN.encode())
    with ThreadPoolExecutor(1) as reading:
        stop, least = threading.Event(), 1 << 60

        def read() -> int:
            nonlocal least
            while not stop.wait(0.002):
                space = os.statvfs(own_disk)
                least = min(least, space.f_bavail * space.f_frsize)
            return least

        lowest = reading.submit(read)
        try:
            with pytest.raises(SandboxFailed, match="free space"):
                await box.run("exec python3 p.py", timeout_s=60.0)
        finally:
            stop.set()
    assert lowest.result() > 0
    await backend.close()


def test_one_that_began_above_its_limit_may_clean_up() -> None:
    limits, before = Limits(disk_bytes=100, inodes=10), Usage(30, 500)
    assert exceeded_limit(Usage(30, 500), limits, before) is None
    assert exceeded_limit(Usage(29, 501), limits, before) == "disk"
    assert exceeded_limit(Usage(31, 400), limits, before) == "inodes"
    assert exceeded_limit(Usage(11, 50), limits, Usage()) == "inodes"


def test_a_reserve_is_at_most_a_twentieth(tmp_path: Path) -> None:
    space = os.statvfs(tmp_path)
    room = DiskSpace.of(tmp_path, 1 << 60)
    assert room.reserve_bytes == space.f_blocks * space.f_frsize // 20
    assert room.full is (room.free_bytes < room.reserve_bytes)
    assert DiskSpace(10, None, 11, 0).full and DiskSpace(12, 5, 11, 6).full and not DiskSpace(12, None, 11, 6).full


async def test_the_wake_at_comes_when_half_of_the_rest_may_be_written(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as counting:
        limits = Limits(disk_bytes=256 * MIB, inodes=1000)
        space = FreeSpace(tmp_path)

        def watching(limits: Limits) -> DiskWatch:
            return DiskWatch(tmp_path, limits, Usage(), 0, os.getpid(), counting, Growth(), space, lambda: True)

        watch = watching(limits)
        idle = DiskSpace(10**12, 10**6, 300, 20)
        assert watch._wake_at(idle, Usage()) == (10**12 - 128 * MIB, 10**6 - 500)
        assert watch._wake_at(idle, Usage(900, 192 * MIB)) == (10**12 - 32 * MIB, 10**6 - 50)
        assert watch._wake_at(DiskSpace(601, 41, 300, 20), Usage()) == (600, 40), "the reserve is not far"
        assert watch._due(DiskSpace(600, 41, 300, 20), DiskSpace(601, 41, 300, 20), Usage())
        assert watch._wake_at(DiskSpace(600, 41, 300, 20), Usage()) == (300, 20), "the reserve is near"
        assert not watch._due(DiskSpace(590, 41, 300, 20), DiskSpace(600, 41, 300, 20), Usage())
        assert not watch._due(DiskSpace(10**12 - 100 * MIB, 10**6, 0, 0), idle, Usage())
        assert watch._due(DiskSpace(10**12 - 130 * MIB, 10**6, 0, 0), idle, Usage())
        fast, slow = Limits(disk_bytes=256 * MIB, inodes=2000), Limits(disk_bytes=256 * MIB, inodes=10**6)
        pauses = [
            DiskWatch(tmp_path, limits, Usage(), 0, os.getpid(), counting, Growth(), space, lambda: True)._pause(
                idle, idle, used
            )
            for limits, used in ((fast, Usage()), (fast, Usage(3000)), (slow, Usage()))
        ]
        assert pauses == [0.02, 0.005, 0.3]


async def test_what_others_write_and_remove_while_they_are_counted_is_not_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = DiskSpace(1000 * MIB, None, 0, 0)
    uncounted, counts, growth = 0, 0, Growth()

    def written(size: int) -> None:
        nonlocal disk, uncounted
        disk, uncounted = replace(disk, free_bytes=disk.free_bytes - size), uncounted + size

    def refresh(*_: object) -> None:
        nonlocal disk, uncounted, counts
        growth.add(uncounted)
        uncounted = 0
        disk = replace(disk, free_bytes=disk.free_bytes + 60 * MIB)  # a sandbox is destroyed
        growth.add(-60 * MIB)
        written(90 * MIB)  # and those that were counted go on
        counts += 1

    monkeypatch.setattr(DiskSpace, "of", lambda *_: disk)
    monkeypatch.setattr(Growth, "refresh", refresh)
    monkeypatch.setattr(DiskWatch, "measure", lambda _: Measurement(Usage(), is_partial=True))
    with ThreadPoolExecutor(1) as counting:
        limits, space = Limits(disk_bytes=32 * MIB), FreeSpace(tmp_path)
        growth.add(10**12)  # what there is to remove
        watch = DiskWatch(tmp_path, limits, Usage(), 0, os.getpid(), counting, growth, space, lambda: True)
        written(40 * MIB)
        running = asyncio.create_task(watch.run())
        await until(lambda: counts >= 3 or running.done())
        assert not running.done(), running.result()
        monkeypatch.setattr(Growth, "refresh", lambda *_: written(MIB))  # nobody has written what is missing
        assert await running == "disk"


async def test_a_wait_ends_when_space_goes_and_at_its_deadline(own_disk: Path) -> None:
    space, loop = FreeSpace(own_disk), asyncio.get_running_loop()
    free = DiskSpace.of(own_disk, 0).free_bytes
    started = loop.time()
    waits = [asyncio.create_task(space.wait(free - n * 10 * MIB, -1, 60.0)) for n in (1, 2)]
    await space.wait(-1, -1, 0.02)
    assert loop.time() - started >= 0.02 and not any(wait.done() for wait in waits)
    (own_disk / "f").write_bytes(bytes(15 * MIB))
    await waits[0]
    assert not waits[1].done()
    waits[1].cancel()
    await asyncio.gather(*waits, return_exceptions=True)
    await space.wait(free, -1, 60.0)
    assert list(space._waiters.values()) == [set()]


async def test_a_wait_ends_when_its_directory_is_gone(tmp_path: Path) -> None:
    place = tmp_path / "gone"
    place.mkdir()
    space = FreeSpace(place)
    waiting = asyncio.create_task(space.wait(-1, -1, 60.0))
    await asyncio.sleep(0)
    place.rmdir()
    await waiting


def test_another_event_loop_finds_its_own_ticks(tmp_path: Path) -> None:
    space = FreeSpace(tmp_path)
    for _ in range(3):  # each is closed before its tick could see that nobody waits
        asyncio.run(space.wait(1 << 62, 1 << 62, 1.0))
    assert len(space._waiters) <= 1, "ended loops pile up"

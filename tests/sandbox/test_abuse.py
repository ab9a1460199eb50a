"""What an attacker found beyond the hostile battery; each case was a defect once."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from pathlib import Path

import pytest

from errata_protocol.errors import ErrataError
from errata_server.sandbox import shell_state
from errata_server.sandbox.base import Limits, PathRefused
from errata_server.sandbox.files.trees import scan
from errata_server.sandbox.files.walk import Usage, usage
from errata_server.sandbox.host import cgroups
from errata_server.sandbox.host.cgroups import Cgroups
from errata_server.sandbox.namespace.backend import NamespaceBackend
from tests.counted_work import calls_of

MIB = 1024**2


@pytest.mark.sandbox
async def test_space_cannot_be_taken_without_writing_it(namespace_backend: NamespaceBackend) -> None:
    box = await namespace_backend.open(limits=Limits(disk_bytes=48 * MIB))
    result = await box.run(
        'python3 -c "import os; fd = os.open(chr(102), 66); '
        "print(os.fallocate(fd, 0, 0, 1 << 20) if hasattr(os, 'fallocate') else os.posix_fallocate(fd, 0, 1 << 20))\""
    )
    assert result.exit_code == 0 or "not supported" in result.stderr, result
    direct = await box.run(
        "python3 -c \"import ctypes; l = ctypes.CDLL(None, use_errno=True); f = open('g', 'w').fileno(); "
        'print(l.fallocate(f, 0, ctypes.c_long(0), ctypes.c_long(1 << 30)), ctypes.get_errno())"; stat -c %b g'
    )
    assert direct.stdout.split() == ["-1", "95", "0"]


@pytest.mark.sandbox
async def test_holes_count_as_what_their_reader_reads(namespace_backend: NamespaceBackend) -> None:
    box = await namespace_backend.open(limits=Limits(disk_bytes=48 * MIB, file_size_bytes=32 * MIB))
    result = await box.run("truncate -s 30M a; truncate -s 30M b")
    assert result.limit_hit == "disk"


@pytest.mark.sandbox
async def test_a_command_that_waited_while_its_sandbox_was_destroyed_does_not_run(data_dir: Path) -> None:
    backend = NamespaceBackend(data_dir, max_running=1, spare=1)
    try:
        first, second = await backend.open(), await backend.open()
        running = asyncio.create_task(first.run("sleep 20", timeout_s=30))
        waiting = asyncio.create_task(second.run("echo ran"))
        await asyncio.sleep(0.2)
        await second.destroy()
        await first.destroy()
        outcomes = await asyncio.gather(running, waiting, return_exceptions=True)
        assert isinstance(outcomes[1], ErrataError), outcomes
        assert list(backend.live_dir.iterdir()) == []
    finally:
        await backend.close()


@pytest.mark.sandbox
async def test_an_endless_path_is_refused_in_the_shells_words(namespace_backend: NamespaceBackend) -> None:
    box = await namespace_backend.open()
    with pytest.raises(PathRefused) as caught:
        await box.read_file("a" * 300_000)
    assert caught.value.reason == "ENAMETOOLONG" and len(str(caught.value)) < 1000


@pytest.mark.sandbox
async def test_an_agent_is_killed_before_the_server_when_memory_runs_out(namespace_backend: NamespaceBackend) -> None:
    box = await namespace_backend.open()
    assert (await box.run("cat /proc/self/oom_score_adj")).stdout == "1000\n"


def test_a_line_of_traps_is_read_in_linear_time() -> None:
    # A search of the rest from each of them would take hours.
    shell_state.startup(shell_state.ShellState(), b": " + b"trap " * 2_000_000, {})


@pytest.mark.parametrize(
    ("command", "wrapped"),
    [
        (b"trap 'echo bye' EXIT", True),
        (b"trap x 0", True),
        (b"echo a\ntrap x INT EXIT; echo", True),
        (b"trap x INT\necho EXIT", False),
        (b"echo EXIT trap", False),
    ],
)
def test_only_a_command_that_sets_an_exit_trap_pays_for_it(command: bytes, wrapped: bool) -> None:
    text = shell_state.startup(shell_state.ShellState(), command, {})
    assert (b"__errata_trap" in text) is wrapped


def bytes_read() -> int:
    """Return how many bytes this process has read so far."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def test_a_file_of_many_names_is_read_and_counted_once(tmp_path: Path) -> None:
    first = tmp_path / "f"
    first.write_bytes(b"x" * MIB)
    for n in range(100):
        (tmp_path / f"f{n}").hardlink_to(first)
    assert usage(tmp_path, max_entries=1000, max_bytes=1 << 40).size_bytes == MIB
    before = bytes_read()
    tree = scan(tmp_path)
    assert MIB <= bytes_read() - before < 2 * MIB
    assert len({node.mark for node in tree.children.values()}) == 1 and len(tree.children) == 101


def test_whiteouts_are_counted_and_bound_a_count(tmp_path: Path) -> None:
    for n in range(100):
        os.mknod(tmp_path / f"w{n}", 0o600 | stat.S_IFCHR, os.makedev(0, 0))
    assert usage(tmp_path, max_entries=10, max_bytes=1) == Usage(0, 0, 100)
    assert usage(tmp_path, max_entries=10, max_bytes=1, max_whiteouts=8) == Usage(0, 0, 9)


def test_counting_a_few_entries_reads_a_few_names(tmp_path: Path) -> None:
    """What is counted on the event loop after each command: a directory of 60,000 names took half a second there."""
    for number in range(5_000):
        (tmp_path / f"{number}").touch()

    def few() -> None:
        assert usage(tmp_path, max_entries=64, max_bytes=1 << 40, max_whiteouts=64).entries == 65

    assert calls_of(few, at_most=5_000) > 65


@pytest.mark.sandbox
async def test_a_slot_that_wrote_much_serves_a_sandbox_of_little_memory(data_dir: Path) -> None:
    backend = NamespaceBackend(data_dir, spare=1, max_running=1)
    try:
        large = await backend.open(limits=Limits(file_size_bytes=400 * MIB, disk_bytes=400 * MIB))
        small = await backend.open(limits=Limits(memory_bytes=16 * MIB))
        for _ in range(2):
            assert (await large.run("head -c 300M /dev/zero > f")).limit_hit is None
            result = await small.run("echo fine")
            assert (result.stdout, result.limit_hit) == ("fine\n", None), result
    finally:
        await backend.close()


def test_a_busy_memory_limit_is_emptied_and_set_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages under writeback cannot be given up at once."""
    for name in ("pids.max", "memory.limit_in_bytes", "memory.force_empty", "memory.memsw.limit_in_bytes"):
        (tmp_path / "s0").mkdir(exist_ok=True)
        (tmp_path / "s0" / name).touch()
    calls: list[str] = []

    def write(path: Path, value: int) -> None:
        calls.append(path.name)
        if path.name in ("memory.limit_in_bytes", "memory.force_empty") and len(calls) < 7:
            raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(cgroups, "_write", write)
    Cgroups("errata", 1, tmp_path, tmp_path).apply("s0", Limits())
    assert calls[calls.index("memory.force_empty") :][-3:-1] == ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]
    assert calls.count("memory.force_empty") >= 2

"""Which cgroups are used where, on hierarchies that are made up; the real ones are met by every other sandbox test."""

from __future__ import annotations

import errno
import os
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import Any

import pytest

from errata_os.division import Division
from errata_server.sandbox.base import Limits
from errata_server.sandbox.host import cgroups
from errata_server.sandbox.launcher import PROGRAMS

STRANGER = 2**22 + 1
"""A pid beyond every machine's: nobody's ancestor and nobody's child."""


class Hierarchy(PosixPath):
    """Paths of a cgroup file system that behaves as the kernel's, as far as it is asked."""

    closed: frozenset[str] = frozenset()

    def mkdir(self, *arguments: Any, **options: Any) -> None:
        if self.parent.name in self.closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        if self.exists() and options.get("exist_ok"):
            return
        super().mkdir(*arguments, **options)
        is_version_1 = (self.parent / "tasks").exists()
        fill(self, (self.parent / ("cgroup.controllers" if is_version_1 else "cgroup.subtree_control")).read_text())
        if is_version_1:
            Path(self / "tasks").touch()

    def write_text(self, data: str, *arguments: Any, **options: Any) -> int:
        if self.parent.name in self.closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        if self.name == "cgroup.subtree_control":
            if (self.parent / "cgroup.procs").read_text().strip():
                raise OSError(errno.EBUSY, "Device or resource busy", str(self))
            wanted = data.replace("+", "").split()
            if not set(wanted) <= set((self.parent / "cgroup.controllers").read_text().split()):
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(self))
            data = " ".join(dict.fromkeys([*self.read_text().split(), *wanted]))
        elif self.name == "cgroup.procs":
            for other in (self.parent, *self.parent.parents):
                procs = other / "cgroup.procs"
                if procs.exists():
                    left = [pid for pid in procs.read_text().split() if pid != data]
                    super(Hierarchy, procs).write_text("\n".join(left))
            data = f"{self.read_text()}\n{data}".strip()
        return super().write_text(data, *arguments, **options)

    def rmdir(self) -> None:
        if (self / "cgroup.procs").read_text().strip() or any(entry.is_dir() for entry in self.iterdir()):
            raise OSError(errno.EBUSY, "Device or resource busy", str(self))
        for entry in self.iterdir():
            if not entry.is_dir():
                entry.unlink()
        super().rmdir()


def fill(place: Path, controllers: str, pids: tuple[int, ...] = ()) -> None:
    files = {"cgroup.controllers": controllers, "cgroup.subtree_control": "", "cgroup.procs": "\n".join(map(str, pids))}
    if "memory" in controllers:
        files |= {"memory.max": "max", "memory.swap.max": "max", "memory.events": "oom 0\noom_kill 3\n"}
        files |= {"memory.limit_in_bytes": "0", "memory.oom_control": "oom_kill 4\n"}
    if "pids" in controllers:
        files |= {"pids.max": "max", "pids.events": "max 2\n"}
    if "cpu" in controllers:
        files |= {"cpu.weight": ""}
    for name, text in files.items():
        Path(place / name).write_text(text)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    made = Hierarchy(tmp_path / "cgroup")
    Path(made).mkdir()
    monkeypatch.setattr(cgroups, "Path", Hierarchy)
    monkeypatch.setattr(cgroups, "_ROOT", made)
    monkeypatch.setattr(cgroups, "_ancestors", lambda pid: [os.getppid()] if pid == os.getpid() else [])
    yield made
    Hierarchy.closed = frozenset()


def living_in(monkeypatch: pytest.MonkeyPatch, **paths: str) -> None:
    monkeypatch.setattr(cgroups, "_own_paths", lambda: {name.removeprefix("v2"): path for name, path in paths.items()})


def version_2(root: Path, *pids: int) -> Path:
    Path(root / "scope").mkdir()
    fill(root, "memory pids cpu")
    fill(root / "scope", "memory pids", pids)
    return root / "scope"


def version_1(root: Path) -> None:
    for name in ("memory", "pids"):
        Path(root / name).mkdir()
        fill(root / name, "memory pids")
        Path(root / name / "tasks").touch()


def test_version_2_is_taken_before_version_1(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version_1(root)
    scope = version_2(root, os.getpid(), os.getppid())
    living_in(monkeypatch, v2="/scope", memory="/", pids="/")
    found = cgroups.find("errata-x")
    assert (found.version, found.note) == (2, "")
    assert found.roots == [str(scope / "errata-x")]
    assert (scope / "errata-server/cgroup.procs").read_text().split() == [str(os.getpid()), str(os.getppid())]
    assert (scope / "errata-x/cgroup.subtree_control").read_text() == "memory pids"
    assert (found.counters("probe").oom_kills, found.counters("probe").pids_refused) == (3, 2)
    (scope / "errata-x/s0").mkdir()
    found.apply("s0", Limits(memory_bytes=5, pids=7))
    assert [(scope / "errata-x/s0" / name).read_text()[:1] for name in ("memory.max", "pids.max")] == ["5", "7"]


def test_a_later_start_stays_where_the_first_one_was(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scope = version_2(root, os.getpid())
    living_in(monkeypatch, v2="/scope")
    first = cgroups.find("errata-x")
    living_in(monkeypatch, v2="/scope/errata-server")
    assert cgroups.find("errata-x").roots == first.roots
    assert not (scope / "errata-server/errata-x").exists()


def test_processes_that_share_a_cgroup_each_give_limits_once_it_is_prepared(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope = version_2(root, os.getpid())
    Path(scope / "cgroup.controllers").write_text("memory pids cpu")
    living_in(monkeypatch, v2="/scope")
    cgroups.prepare()
    born = scope / "errata-server/cgroup.procs"  # where processes are that are forked now
    Path(born).write_text(f"{os.getpid()}\n{STRANGER}")
    living_in(monkeypatch, v2="/scope/errata-server")
    found = [cgroups.find(f"errata-{number}", Division(number, 2)) for number in (0, 1)]
    assert [one.version for one in found] == [2, 2]
    assert [(scope / f"errata-{number}/cpu.weight").read_text() for number in (0, 1)] == ["25", "25"]


def test_what_cannot_be_prepared_is_said_by_each_process(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scope = version_2(root, os.getpid(), STRANGER)
    living_in(monkeypatch, v2="/scope")
    cgroups.prepare()
    assert set((scope / "cgroup.procs").read_text().split()) == {str(os.getpid()), str(STRANGER)}
    assert "v2: Device or resource busy" in cgroups.find("errata-x").note


def test_in_a_container_that_names_the_hosts_path_its_own_root_is_taken(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(root, "memory pids", (os.getpid(),))
    living_in(monkeypatch, v2="/system.slice/docker-0.scope")
    assert cgroups.find("errata-x").roots == [str(root / "errata-x")]


def test_processes_of_others_are_not_moved(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version_1(root)
    scope = version_2(root, os.getpid(), STRANGER)
    living_in(monkeypatch, v2="/scope", memory="/", pids="/")
    assert cgroups.find("errata-x").version == 1
    assert str(STRANGER) in (scope / "cgroup.procs").read_text()


def test_version_1_serves_where_version_2_has_no_controllers(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version_1(root)
    fill(root, "")
    living_in(monkeypatch, v2="/", memory="/", pids="/")
    found = cgroups.find("errata-x")
    assert found.version == 1
    assert found.roots == [str(root / "memory/errata-x"), str(root / "pids/errata-x")]
    assert found.counters("probe").oom_kills == 4


def test_a_user_without_a_cgroup_of_its_own_is_told_how_to_get_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version_1(root)
    version_2(root, os.getpid())
    Hierarchy.closed = frozenset({"scope", "memory", "pids"})
    living_in(monkeypatch, v2="/scope", memory="/", pids="/")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    found = cgroups.find("errata-x")
    assert (found.version, found.roots) == (0, [])
    assert "v2: Permission denied" in found.note and "v1: Permission denied" in found.note
    assert "systemd-run --user --scope -p Delegate=yes" in found.note


def test_a_machine_without_controllers_says_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    living_in(monkeypatch, v2="/")
    assert "neither hierarchy has the memory and pids controllers" in cgroups.find("errata-x").note


@pytest.fixture
def of_another_user(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pids that were asked to end, none of which this process may signal."""
    asked = []
    kill = os.kill

    def refused(pid: int, number: int) -> None:
        if pid != STRANGER:  # an earlier test's process, which another thread or the garbage collector ends
            return kill(pid, number)
        asked.append(pid)
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "kill", refused)
    return asked


def test_a_directory_with_another_users_process_stays_without_an_error_or_a_wait(
    root: Path, of_another_user: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    scope = version_2(root)
    for name in ("errata-x", "errata-x/s0", "errata-x/s1", "errata-x/s2"):
        (scope / name).mkdir()
    Path(scope / "errata-x/s1/cgroup.procs").write_text(str(STRANGER))
    waits: list[float] = []
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=waits.append)  # for this module: other threads sleep too
    monkeypatch.setattr(cgroups, "time", clock)
    cgroups.Cgroups("errata-x", 2, scope / "errata-x", scope / "errata-x").remove()
    assert (of_another_user, waits) == ([STRANGER], [])
    assert [name for name in ("s0", "s1", "s2") if (scope / "errata-x" / name).exists()] == ["s1"]


def test_where_another_users_process_is_in_the_directory_no_cgroups_are_used(
    root: Path, of_another_user: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    scope = version_2(root)
    (scope / "errata-x").mkdir()
    Path(scope / "errata-x/cgroup.procs").write_text(str(STRANGER))
    living_in(monkeypatch, v2="/scope")
    found = cgroups.find("errata-x")
    assert found.version == 0 and STRANGER in of_another_user
    assert "v2: Device or resource busy" in found.note


def test_a_directory_that_vanishes_while_it_is_removed_is_no_error(root: Path) -> None:
    assert cgroups._kill_below(root / "gone") == (0, 0)
    assert cgroups._remove_below(root / "gone")


def test_the_launcher_goes_on_where_a_process_ends_before_it_is_killed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))  # the launcher puts its directory there
    launcher = runpy.run_path(str(PROGRAMS / "launcher.py"))
    Path(root / "cgroup.procs").write_text(f"{STRANGER}\n")
    attempts = []

    def busy_once(path: str) -> None:
        attempts.append(path)
        if len(attempts) == 1:
            raise OSError(errno.EBUSY, "Device or resource busy", path)

    monkeypatch.setattr(os, "rmdir", busy_once)
    launcher["remove_cgroup"](str(root))
    assert attempts == [str(root)] * 2

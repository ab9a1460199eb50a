"""`errata doctor`: each line on a machine that is made up, and one run on this one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from errata_protocol.errors import SandboxUnavailable
from errata_server.cli.diagnostics.checks import examine, summary
from errata_server.cli.diagnostics.probes import Machine, Space
from errata_server.sandbox.base import BackendConfig, BackendInfo, Finding
from errata_server.sandbox.namespace import checks
from errata_server.sandbox.namespace.backend_type import NamespaceType
from errata_server.sandbox.namespace.probes import Probes, SandboxTrial
from errata_server.settings import Settings
from tests.hangs import HANGS_S

ROOT = BackendInfo("namespace", frozenset({"memory_bytes", "pids"}), (), "root", 1)
USER = BackendInfo("namespace", frozenset({"pids"}), (), "rootless", 0)
BARE = BackendInfo("namespace", frozenset(), (), "root", 0)


class Answers:
    """Of a machine on which all is well, but for what a test says."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {
            "kernel": "6.1.0-18-amd64",
            "python": (3, 11, 7),
            "uid": 0,
            "openenv": "0.10.0",
            "openenv-core": None,
            "try_user_namespace": "",
            "why_refused": "turn the switch on",
            "try_seccomp": "",
            "try_data_dir": "",
            "file_system": "ext4",
            "base": "default-cafe at /bases/default",
            "try_sandbox": SandboxTrial("", ROOT, 0.01, 5),
            "open_files": 20_000,
            "space": Space(50 * 1024**3, 256 * 1024**2, 10**7),
            "fsync_s": 0.002,
            "try_port": "",
        } | answers

    def give(self, name: str) -> Any:
        found = self.answers[name]
        if isinstance(found, Exception):
            raise found
        return found


class MadeUp(Machine):
    """A machine of these answers."""

    def __init__(self, answers: Answers) -> None:
        super().__init__(Settings(data_dir=Path("/srv/errata")))
        self.answers = answers

    def python(self) -> tuple[int, ...]:
        return self.answers.give("python")

    def distribution(self, name: str) -> str | None:
        return self.answers.give(name)

    def try_data_dir(self) -> str:
        return self.answers.give("try_data_dir")

    def file_system(self) -> str:
        return self.answers.give("file_system")

    def open_files(self) -> int:
        return self.answers.give("open_files")

    def space(self) -> Space:
        return self.answers.give("space")

    def fsync_s(self) -> float:
        return self.answers.give("fsync_s")

    def try_port(self, port: int) -> str:
        return self.answers.give("try_port")


class MadeUpProbes(Probes):
    """What its namespace backend finds."""

    def __init__(self, answers: Answers) -> None:
        super().__init__(BackendConfig(Path("/srv/errata/sandboxes")))
        self.answers = answers

    def kernel(self) -> str:
        return self.answers.give("kernel")

    def uid(self) -> int:
        return self.answers.give("uid")

    def try_user_namespace(self) -> str:
        return self.answers.give("try_user_namespace")

    def why_refused(self) -> str:
        return self.answers.give("why_refused")

    def try_seccomp(self) -> str:
        return self.answers.give("try_seccomp")

    def base(self) -> str:
        return self.answers.give("base")

    def try_sandbox(self) -> SandboxTrial:
        return self.answers.give("try_sandbox")


class MadeUpType(NamespaceType):
    """That backend."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers

    def checks(self, config: BackendConfig, *, usable: bool) -> Iterator[Finding]:
        return checks.examine(MadeUpProbes(self.answers), usable=usable)


def report(**given: Any) -> dict[str, Finding]:
    answers = Answers(**given)
    config = BackendConfig(Path("/srv/errata/sandboxes"))
    return {finding.name: finding for finding in examine(MadeUp(answers), MadeUpType(answers), config)}


def test_a_machine_on_which_all_is_well_has_nothing_to_fix() -> None:
    found = report()
    assert len(found) == 14
    assert all((finding.verdict, finding.costs, finding.fix) == ("ok", "", "") for finding in found.values()), found


@pytest.mark.parametrize(
    ("answers", "name", "verdict", "costs", "fix"),
    [
        ({"kernel": "5.10.0"}, "kernel", "missing", "no sandboxes", "Linux 5.11"),
        ({"kernel": "5.15.0-91"}, "kernel", "worse", "uid of its own", "Linux 5.19"),
        ({"python": (3, 10, 2)}, "python", "missing", "not tested", "Python 3.11 to 3.13"),
        ({"openenv": None}, "openenv", "missing", "no server", "pip install"),
        ({"openenv": "0.3.0"}, "openenv", "missing", "drop-in for 0.10", "pip install"),
        ({"openenv-core": "0.2.1"}, "openenv", "missing", "matter of chance", "pip uninstall -y openenv openenv-core"),
        ({"try_user_namespace": "no"}, "user namespaces", "worse", "one uid", "turn the switch on"),
        ({"try_user_namespace": "no", "uid": 7}, "user namespaces", "missing", "no sandboxes", "turn the switch on"),
        ({"try_seccomp": "no"}, "seccomp", "missing", "no sandboxes", "CONFIG_SECCOMP_FILTER"),
        ({"try_data_dir": "cannot be written"}, "data directory", "missing", "no journal", "--data-dir"),
        ({"file_system": "overlay"}, "data directory", "missing", "no sandboxes", "mount a volume"),
        ({"file_system": "tmpfs"}, "data directory", "worse", "end with the machine", "name a disk"),
        ({"base": SandboxUnavailable("none: run it")}, "base tree", "missing", "no sandboxes", "run it"),
        ({"try_sandbox": SandboxTrial("broken: mend it")}, "sandbox", "missing", "no terminal", "mend it"),
        ({"try_sandbox": SandboxTrial("", ROOT, 0.5, 5)}, "sandbox", "worse", "at most 2 commands/s", "idle core"),
        ({"try_sandbox": SandboxTrial("", USER, 0.01, 5)}, "cgroups", "worse", "memory", "systemd-run --user"),
        ({"try_sandbox": SandboxTrial("", USER, 0.01, 5)}, "id-mapped mounts", "worse", "inotify", "as root"),
        ({"try_sandbox": SandboxTrial("", BARE, 0.01, 5)}, "cgroups", "worse", "and its processes", "/sys/fs/cgroup"),
        ({"try_sandbox": SandboxTrial("", ROOT, 0.01, 5, "no")}, "id-mapped mounts", "worse", "share one uid", "5.19"),
        ({"open_files": 4096}, "open files", "worse", "room for 1728 connections, and 72 %", "ulimit -n 14318"),
        ({"open_files": 8192}, "open files", "worse", "room for 4640 connections", "ulimit -n 14318"),
        ({"open_files": 64}, "open files", "missing", "no server with sandboxes", "ulimit -n 14318"),
        ({"space": Space(10**9, 256 * 1024**2, 10**7)}, "disk", "worse", "fill it", "free space"),
        ({"space": Space(10**8, 256 * 1024**2, 10**7)}, "disk", "missing", "no request runs", "free space"),
        ({"space": Space(10**12, 10**8, 500)}, "disk", "missing", "no request runs", "free space"),
        ({"fsync_s": 0.05}, "fsync", "worse", "at most 20 steps/s", "faster disk"),
        ({"try_port": "another program listens there"}, "port", "missing", "ends at once", "--port 0"),
    ],
)
def test_each_missing_piece_is_named_with_its_cost_and_its_fix(
    answers: dict[str, Any], name: str, verdict: str, costs: str, fix: str
) -> None:
    found = report(**answers)
    assert found[name].verdict == verdict
    assert costs in found[name].costs and fix in found[name].fix, found[name]
    others = [other for other in found.values() if other.verdict == "missing" and other.name != name]
    assert not others or name == "data directory", others


def test_file_systems_that_make_inodes_as_needed_are_not_out_of_them() -> None:
    assert report(space=Space(10**12, 10**8, 0, has_inodes=False))["disk"].verdict == "ok"


def test_cgroups_of_a_sandbox_that_holds_all_are_named() -> None:
    assert report()["cgroups"].says == "v1; held: memory_bytes, pids"


def test_without_a_data_directory_nothing_is_tried_in_it() -> None:
    found = report(try_data_dir="cannot be written", try_sandbox=AssertionError(), space=AssertionError())
    assert found["sandbox"].verdict == "missing"
    assert "fsync" not in found


def test_an_unusable_data_directory_is_blamed_once_and_the_sandbox_row_points_to_it() -> None:
    found = report(try_data_dir="/proc/x: no file can be made in /proc", try_sandbox=AssertionError())
    assert found["data directory"].says.startswith("/proc/x") and "ERRATA_DATA_DIR" in found["data directory"].fix
    assert found["sandbox"].fix == "fix the data directory first"


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({}, "`errata serve terminal` would work here"),
        ({"fsync_s": 0.05}, "`errata serve terminal` would work here"),
        (
            {"base": SandboxUnavailable("none: build it"), "try_sandbox": SandboxTrial("none: build it")},
            "`errata serve terminal` would not work here (base tree, sandbox); environments without sandboxes would",
        ),
        (
            {"file_system": "overlay"},
            "`errata serve terminal` would not work here (data directory, sandbox); "
            "environments without sandboxes would",
        ),
        ({"try_data_dir": "cannot be written"}, "`errata serve` would not work here (data directory, sandbox)"),
        ({"try_port": "taken"}, "`errata serve` would not work here (port)"),
    ],
)
def test_the_last_line_says_what_could_be_served(answers: dict[str, Any], says: str) -> None:
    assert summary(list(report(**answers).values())) == says


def test_a_port_in_use_is_found_by_binding_it() -> None:
    machine = Machine(Settings())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert machine.try_port(taken.getsockname()[1]) == "another program listens there"


def test_a_directory_that_is_not_there_yet_is_judged_by_the_one_above(tmp_path: Path) -> None:
    machine = Machine(Settings(data_dir=tmp_path / "a/b"))
    assert machine.try_data_dir() == "" and machine.fsync_s() > 0
    assert machine.space().free_bytes > 0
    assert not (tmp_path / "a").exists(), "looking leaves nothing"


def test_the_file_system_is_that_of_the_longest_mount_point() -> None:
    assert Machine(Settings(data_dir=Path("/proc"))).file_system() == "proc"


@pytest.mark.sandbox
def test_a_run_on_this_machine_agrees_with_its_exit_status(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "errata_server.cli", "doctor", "--data-dir", str(tmp_path / "data")]
    result = subprocess.run([*command, "--port", str(port), "--json"], capture_output=True, text=True, timeout=HANGS_S)
    found = json.loads(result.stdout)
    verdicts = {finding["name"]: finding["verdict"] for finding in found["findings"]}
    assert result.returncode == 0 and found["works"], found
    assert verdicts["sandbox"] in ("ok", "worse") and verdicts["seccomp"] == verdicts["base tree"] == "ok"
    assert list(tmp_path.iterdir()) == [], "the trial leaves nothing"
    text = subprocess.run(
        [*command, "--port", str(port)],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        env={**os.environ, "ERRATA_BASE_DIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)},
    )
    assert text.returncode == 1
    assert "missing base tree" in text.stdout and "fix: run `errata base" in text.stdout

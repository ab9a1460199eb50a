"""Backends are found by their entry points: our own by name, another distribution's without a line of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from errata_protocol.errors import InvalidRequest
from errata_server.journal import IndexedJournal, SessionRow, journal_in
from errata_server.runtime.runtime import Runtime
from errata_server.sandbox import registry
from errata_server.sandbox.base import BackendConfig
from errata_server.sandbox.fake.backend import FakeBackend
from errata_server.settings import Settings
from tests.hangs import HANGS_S

BACKEND = """
from errata_server.sandbox.base import BackendType, Finding
from errata_server.sandbox.fake.backend import FakeBackend

class Made(FakeBackend):
    pass

class MadeType(BackendType):
    unfit_file_systems = {}
    descriptors = 7

    def create(self, config):
        made = Made()
        made.config = config
        return made

    def checks(self, config, *, usable):
        yield Finding("engine", "worse" if usable else "missing", f"at {config.directory.name}", "time", "wait")

    def size_bytes(self, directory):
        return 12345
"""


@pytest.fixture
def elsewhere(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which another distribution brings the backends ``made``, ``broken``, ``odd``."""
    (tmp_path / "made_backend.py").write_text(BACKEND)
    (tmp_path / "made_backend-1.0.dist-info").mkdir()
    (tmp_path / "made_backend-1.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: made-backend\nVersion: 1.0\n"
    )
    (tmp_path / "made_backend-1.0.dist-info/entry_points.txt").write_text(
        "[errata.sandboxes]\nmade = made_backend:MadeType\nbroken = no_such_module:It\nodd = made_backend:Made\n"
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


def python(code: str, env: dict[str, str]) -> str:
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=HANGS_S)
    assert result.returncode == 0, result.stderr
    return result.stdout


def errata(*words: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "errata_server.cli", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANGS_S)


def test_our_own_backends_are_entry_points() -> None:
    assert {"namespace", "fake"} <= registry.BACKENDS.installed.keys()
    assert registry.backend_type(None) is registry.backend_type(registry.DEFAULT)


def test_a_backend_that_is_not_installed_is_refused_before_anything_starts() -> None:
    with pytest.raises(InvalidRequest, match="no sandbox backend 'nope' is installed; there are: "):
        Runtime(Settings(sandbox="nope"))


async def test_settings_choose_the_backend(tmp_path: Path) -> None:
    runtime = Runtime(Settings(data_dir=tmp_path, sandbox="fake"))
    assert isinstance(runtime.sandboxes, FakeBackend)
    await runtime.close()


def test_another_distributions_backend_serves_without_a_line_of_ours(elsewhere: dict[str, str], tmp_path: Path) -> None:
    code = (
        "from errata_server.runtime.runtime import Runtime; from errata_server.settings import Settings\n"
        f"backend = Runtime(Settings(sandbox='made', data_dir={str(tmp_path / 'data')!r})).sandboxes\n"
        "print(type(backend).__name__, backend.config.directory.name, backend.config.reserve_bytes)"
    )
    assert python(code, elsewhere).split() == ["Made", registry.DIRECTORY, str(256 * 1024**2)]


async def test_its_checks_are_doctors_and_its_size_is_the_journals(elsewhere: dict[str, str], tmp_path: Path) -> None:
    env = {**elsewhere, "ERRATA_SANDBOX": "made"}
    told = json.loads(errata("doctor", "--json", "--data-dir", str(tmp_path / "data"), env=env).stdout)
    found = {finding["name"]: finding for finding in told["findings"]}
    assert (found["engine"]["verdict"], found["engine"]["says"]) == ("worse", "at sandboxes")
    assert not found.keys() & {"kernel", "seccomp", "base tree", "sandbox"}
    journal = IndexedJournal(journal_in(tmp_path / "data"))
    await journal.commit(SessionRow(sid="s", environment="e", recovery="none", seed=1, created=0.0))
    journal.close()
    size = errata("journal", "size", "--json", "--data-dir", str(tmp_path / "data"), env=env)
    assert json.loads(size.stdout)["files"]["sandboxes"] == 12345, size.stderr


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("broken", "sandbox backend 'broken' (no_such_module:It) cannot be imported: No module named 'no_such_module'"),
        ("odd", "sandbox backend 'odd' (made_backend:Made) is not an errata_server.sandbox.base.BackendType"),
    ],
)
def test_one_that_cannot_be_used_is_named_with_its_reason(elsewhere: dict[str, str], name: str, says: str) -> None:
    result = errata("doctor", env={**elsewhere, "ERRATA_SANDBOX": name})
    assert result.returncode == 1
    assert result.stderr.strip() == f"errata: {says}"


def test_the_nearest_directory_of_a_place_is_one_that_exists(tmp_path: Path) -> None:
    assert BackendConfig(tmp_path / "a/b").nearest() == tmp_path

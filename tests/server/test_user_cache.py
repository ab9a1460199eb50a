"""Where what can be made again is kept, also for a uid without a passwd entry and without HOME."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from errata_environment.grading import staging
from errata_os.user_cache import user_cache
from errata_protocol.errors import SandboxUnavailable
from errata_server.sandbox.base_trees.tree import base_directories
from swe_bench_lite_env.server.prepare import store
from terminal_env.server.check import results


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "ERRATA_BASE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)


def mount_noexec(monkeypatch: pytest.MonkeyPatch, *places: str | Path) -> None:
    noexec = {str(place) for place in places}
    monkeypatch.setattr(
        os, "statvfs", lambda place: SimpleNamespace(f_flag=os.ST_NOEXEC if str(place) in noexec else 0)
    )


def test_each_directory_of_the_cache_is_below_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ERRATA_BASE_DIR", store.DIRECTORY_VARIABLE, results.DIRECTORY_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "errata"
    for place in (base_directories()[0], store.default_directory(), results.default_directory()):
        assert place.parent == user_cache()


def test_without_a_home_only_what_is_kept_there_is_refused(homeless: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SandboxUnavailable, match="set XDG_CACHE_HOME"):
        user_cache()
    assert base_directories() == [Path("/var/lib/errata/bases")]
    monkeypatch.setenv("ERRATA_BASE_DIR", "/b")
    monkeypatch.setenv(store.DIRECTORY_VARIABLE, "/s")
    monkeypatch.setenv(results.DIRECTORY_VARIABLE, "/r")
    assert base_directories()[0] == Path("/b")
    assert (store.default_directory(), results.default_directory()) == (Path("/s"), Path("/r"))


def test_files_of_graders_need_no_home_where_temporary_files_may_run(homeless: None) -> None:
    assert staging._place() == Path(tempfile.gettempdir())


def test_no_place_for_files_of_graders_says_why_each_is_none(homeless: None, monkeypatch: pytest.MonkeyPatch) -> None:
    mount_noexec(monkeypatch, tempfile.gettempdir())
    with pytest.raises(SandboxUnavailable, match=r"noexec; this user has no home directory.*set TMPDIR"):
        staging._place()


def test_files_of_graders_are_in_the_cache_where_temporary_files_may_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mount_noexec(monkeypatch, tempfile.gettempdir())
    assert staging._place() == tmp_path / "errata"
    mount_noexec(monkeypatch, tempfile.gettempdir(), tmp_path / "errata")
    with pytest.raises(SandboxUnavailable, match=f"{tmp_path}/errata is mounted noexec"):
        staging._place()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(SandboxUnavailable, match=f"Not a directory: '{tmp_path}/file/errata'"):
        staging._place()

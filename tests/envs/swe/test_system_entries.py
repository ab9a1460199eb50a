"""What an archive of files outside the work tree becomes."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from errata_protocol.names import InvalidName
from swe_bench_lite_env.server.prepare.store import _system_entries


def archive(place: Path, *names: str) -> Path:
    with tarfile.open(place, "w") as made:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 1
            made.addfile(member, io.BytesIO(b"x"))
    return place


def test_names_keep_their_dots(tmp_path: Path) -> None:
    made = _system_entries(archive(tmp_path / "x.tar", "./etc/.hidden", ".config", "./..data", "/usr/x"))
    assert [one.path for one in made] == ["/etc/.hidden", "/.config", "/..data", "/usr/x"]


def test_no_entry_is_above_the_root(tmp_path: Path) -> None:
    with pytest.raises(InvalidName, match=r"path with '\.\.'"):
        _system_entries(archive(tmp_path / "x.tar", "etc/../../x"))

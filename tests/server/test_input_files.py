"""Only regular files are read, and only up to a limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from errata_os.input_files import FileRefused, open_regular, read_file


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, kind in (
        (tmp_path / "pipe", "a FIFO"),
        (tmp_path, "a directory"),
        (Path("/dev/zero"), "a character dev"),
    ):
        with pytest.raises(FileRefused, match=f"{path} is {kind}"):
            open_regular(path)


def test_a_file_that_becomes_a_fifo_while_it_is_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    looked = Path.stat

    def replaced(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        found = looked(self, follow_symlinks=follow_symlinks)
        path.unlink()
        os.mkfifo(path)
        return found

    monkeypatch.setattr(Path, "stat", replaced)
    with pytest.raises(FileRefused, match="FIFO"):
        open_regular(path)


def test_links_are_followed_only_where_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 10)
    (tmp_path / "link").symlink_to("file")
    assert read_file(tmp_path / "link", 10) == b"x" * 10
    with pytest.raises(FileRefused, match="symbolic link"):
        read_file(tmp_path / "link", 10, follow=False)


def test_no_more_than_the_limit_is_read(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1024**4)
    with pytest.raises(FileRefused, match="larger than 4 bytes"):
        read_file(tmp_path / "sparse", 4)

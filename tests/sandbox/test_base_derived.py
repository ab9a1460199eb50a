"""A base tree that is made from another one shares its files, and no archive reaches outside of it."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from errata_protocol.errors import SandboxUnavailable
from errata_server.sandbox.base_trees.derived import derive_base, remove_base, using
from errata_server.sandbox.base_trees.tree import BaseTree, find_base


@pytest.fixture
def base(tmp_path: Path) -> BaseTree:
    root = tmp_path / "origin/root"
    for name in ("bin", "usr/lib", "tmp", "home/agent"):
        (root / name).mkdir(parents=True)
    (root / "bin/bash").write_text("#!", "utf-8")
    (root / "usr/lib/a.so").write_text("old", "utf-8")
    (root / "lib").symlink_to("usr/lib")
    (root / "usr/lib/locked").write_text("x", "utf-8")
    (root / "usr/lib/locked").chmod(0o400)
    (root / "tmp").chmod(0o1777)
    if os.geteuid() == 0:
        os.chown(root / "home/agent", 64000, 64000)
    return BaseTree("origin", root, "origin-1")


def archive(path: Path, *members: tuple[str, bytes | str, int]) -> Path:
    """Write a tar: bytes for a file, text for a link's target, None for a directory."""
    with tarfile.open(path, "w") as opened:
        for name, content, mode in members:
            info = tarfile.TarInfo(name)
            info.mode, info.uid, info.gid, info.mtime = mode, 64000, 64000, 1767225600
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                opened.addfile(info)
            else:
                info.size = len(content)
                opened.addfile(info, io.BytesIO(content))
    return path


def test_paths_are_left_out_with_what_is_below_them(base: BaseTree, tmp_path: Path) -> None:
    made = derive_base(base, "less", [], without=["usr/lib/a.so", "home"], directory=tmp_path / "bases")
    assert sorted(path.name for path in (made.root / "usr/lib").iterdir()) == ["locked"]
    assert not (made.root / "home").exists() and (made.root / "lib").is_symlink()
    other = derive_base(base, "less", [], without=["usr/lib/a.so"], directory=tmp_path / "bases")
    assert other.id != made.id


def test_files_are_shared_and_the_origin_stays(base: BaseTree, tmp_path: Path) -> None:
    more = archive(
        tmp_path / "more.tar",
        ("opt/tool/bin/run", b"new", 0o4755),
        ("opt/tool/link", "/opt/tool/bin/run", 0o777),
        ("lib/b.so", b"added", 0o600),
        ("usr/lib/a.so", b"replaced", 0o644),
    )
    made = derive_base(base, "child", [more], directory=tmp_path / "bases")
    assert (made.root / "bin/bash").stat().st_ino == (base.root / "bin/bash").stat().st_ino
    assert (base.root / "usr/lib/a.so").read_text() == "old", "an archive wrote through a shared file"
    assert (made.root / "usr/lib/a.so").read_text() == "replaced"
    assert (made.root / "usr/lib/b.so").read_text() == "added", "a link of the tree's top is followed within it"
    tool = (made.root / "opt/tool/bin/run").stat()
    assert stat.S_IMODE(tool.st_mode) & 0o7000 == 0 and tool.st_uid == os.geteuid() and tool.st_mtime == 1767225600
    assert (made.root / "opt/tool/link").readlink() == Path("/opt/tool/bin/run")
    for name in ("tmp", "home/agent", "usr/lib/locked", "usr/lib"):
        one, other = (base.root / name).stat(), (made.root / name).stat()
        assert (one.st_mode, one.st_uid, one.st_gid) == (other.st_mode, other.st_uid, other.st_gid), name
    assert not list((tmp_path / "bases").glob(".*.building"))


def test_equal_content_is_one_tree(base: BaseTree, tmp_path: Path) -> None:
    more = archive(tmp_path / "more.tar", ("opt/x", b"x", 0o644))
    first = derive_base(base, "child", [more], directory=tmp_path / "bases")
    inode = (first.root / "opt/x").stat().st_ino
    assert derive_base(base, "child", [more], directory=tmp_path / "bases") == first
    assert (first.root / "opt/x").stat().st_ino == inode, "it was made again"
    other = derive_base(
        base, "child", [archive(tmp_path / "o.tar", ("opt/x", b"y", 0o644))], directory=tmp_path / "bases"
    )
    assert other.id != first.id and (first.root / "opt/x").read_text() == "x"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ERRATA_BASE_DIR", str(tmp_path / "bases"))
        assert find_base(first.id).root == first.root
        assert find_base("child").id == other.id


@pytest.mark.parametrize(
    "members",
    [
        [("../outside", b"x", 0o644)],
        [("opt/../../outside", b"x", 0o644)],
        [("opt", "/", 0o777), ("opt/outside", b"x", 0o644)],
        [("usr/lib/door", "../../../..", 0o777), ("usr/lib/door/outside", b"x", 0o644)],
        [("top", "../..", 0o777), ("top/outside", b"x", 0o644)],
    ],
)
def test_an_archive_cannot_write_outside_of_the_tree(
    members: list[tuple[str, bytes | str, int]], base: BaseTree, tmp_path: Path
) -> None:
    before = sorted(path.name for path in tmp_path.iterdir())
    try:
        made = derive_base(base, "child", [archive(tmp_path / "evil.tar", *members)], directory=tmp_path / "bases")
    except SandboxUnavailable as error:
        assert "child could not be made" in error.message
    else:
        assert (made.root / "outside").exists(), "the link was neither refused nor followed within the tree"
    assert not Path("/outside").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({*before, "bases", "evil.tar"})
    assert not list((tmp_path / "bases").glob("outside"))


def test_a_tree_in_use_is_not_removed(base: BaseTree, tmp_path: Path) -> None:
    bases = tmp_path / "bases"
    made = derive_base(base, "child", [archive(tmp_path / "more.tar", ("opt/x", b"x", 0o644))], directory=bases)
    program = (
        "import sys, pathlib; from errata_server.sandbox.base_trees.derived import using\n"
        "with using(sys.argv[1], pathlib.Path(sys.argv[2])):\n    print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, made.id, str(bases)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        assert not remove_base(made.id, bases)
        other.kill()
    with using(made.id, bases):
        assert not remove_base(made.id, bases) and made.root.is_dir()
    assert remove_base(made.id, bases)
    assert not os.path.lexists(bases / "child") and not (bases / made.id).exists()
    assert (base.root / "bin/bash").read_text() == "#!"
    assert [path.name for path in bases.iterdir()] == [".child.lock"]


def test_a_file_that_cannot_be_linked_is_copied(
    base: BaseTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    made = derive_base(base, "child", [], directory=tmp_path / "bases")
    one, other = (base.root / "usr/lib/locked").stat(), (made.root / "usr/lib/locked").stat()
    assert (one.st_mode, one.st_mtime_ns) == (other.st_mode, other.st_mtime_ns) and one.st_ino != other.st_ino

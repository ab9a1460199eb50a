"""Trees taken over from elsewhere: what an ordinary user's copy looks like, and what no archive may do."""

from __future__ import annotations

import io
import json
import os
import stat
import tarfile
from pathlib import Path

import pytest

from errata_protocol.errors import SandboxUnavailable
from errata_server.sandbox.base_trees.importer import agent_mode, import_base
from errata_server.sandbox.base_trees.recipe import AGENT_UID, content_digest
from errata_server.sandbox.base_trees.tree import check_owner

ENTRIES = [
    ("bin", "dir", 0o755, 0, ""),
    ("bin/bash", "file", 0o755, 0, "shell"),
    ("bin/sh", "link", 0o777, 0, "bash"),
    ("etc", "dir", 0o755, 0, ""),
    ("etc/shadow", "file", 0o640, 0, "secret"),
    ("etc/hosts", "file", 0o644, 0, "here"),
    ("etc/hosts.same", "hard", 0o644, 0, "etc/hosts"),
    ("tmp", "dir", 0o1777, 0, ""),
    ("home/agent", "dir", 0o755, AGENT_UID, ""),
    ("home/agent/.profile", "file", 0o600, AGENT_UID, "mine"),
    ("suid", "file", 0o4755, 0, "s"),
    ("null", "device", 0o666, 0, ""),
]
KINDS = {
    "dir": tarfile.DIRTYPE,
    "file": tarfile.REGTYPE,
    "link": tarfile.SYMTYPE,
    "hard": tarfile.LNKTYPE,
    "device": tarfile.CHRTYPE,
}


def archive(place: Path, entries: list[tuple[str, str, int, int, str]], prefix: str = "") -> Path:
    with tarfile.open(place, "w") as made:
        for name, kind, mode, uid, text in entries:
            member = tarfile.TarInfo(f"{prefix}{name}")
            member.type, member.mode, member.uid, member.gid = KINDS[kind], mode, uid, uid
            if kind in ("link", "hard"):
                member.linkname = f"{prefix if kind == 'hard' else ''}{text}"
            content = text.encode() if kind == "file" else b""
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
    return place


@pytest.fixture
def bases(tmp_path: Path) -> Path:
    return tmp_path / "bases"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize(
    ("original", "uid", "gid", "expected"),
    [
        (0o644, 0, 0, 0o444),
        (0o640, 0, 42, 0o040),
        (0o755, 0, 0, 0o555),
        (0o770, 0, AGENT_UID, 0o770),
        (0o600, AGENT_UID, 0, 0o600),
        (0o1777, 0, 0, 0o1777),
    ],
)
def test_the_owners_bits_say_what_the_agent_may_do(original: int, uid: int, gid: int, expected: int) -> None:
    assert agent_mode(original, uid, gid) == expected


def test_an_archive_becomes_the_tree_that_a_name_means(tmp_path: Path, bases: Path) -> None:
    made = import_base(archive(tmp_path / "x.tar", ENTRIES), "mine", directory=bases)
    assert (bases / "mine").resolve() == made.root.parent
    assert (made.root / "bin/sh").readlink() == Path("bash")
    assert (made.root / "etc/hosts").samefile(made.root / "etc/hosts.same")
    assert not (made.root / "null").exists() and mode(made.root / "suid") & stat.S_ISUID == 0
    assert (made.root / "workspace").is_dir() and (made.root / "proc").is_dir()
    assert made.writable == ("home/agent", "tmp", "workspace")
    again = import_base(tmp_path / "x.tar", "mine", directory=bases)
    assert again == made, "the same tree has the same id"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
def test_a_copy_by_root_keeps_owners_and_is_digested_as_a_build_is(tmp_path: Path, bases: Path) -> None:
    made = import_base(archive(tmp_path / "x.tar", ENTRIES), "mine", directory=bases)
    assert (made.root / "home/agent/.profile").stat().st_uid == AGENT_UID
    assert mode(made.root / "etc/shadow") == 0o640
    record = json.loads((made.root.parent / "base.json").read_text())
    second = import_base(made.root, "again", directory=bases)
    assert json.loads((second.root.parent / "base.json").read_text())["digest"] == f"sha256:{content_digest(made.root)}"
    assert record["owner"] == 0


def test_a_tree_of_ours_keeps_its_id_from_a_directory_and_from_an_archive(tmp_path: Path, bases: Path) -> None:
    tree = tmp_path / "default-cafe"
    import_base(archive(tmp_path / "x.tar", ENTRIES), "x", directory=tmp_path / "first")
    (tmp_path / "first/x").resolve().rename(tree)
    record = {"id": tree.name, "recipe": "r", "suite": "bookworm", "digest": "sha256:1"}
    (tree / "base.json").write_text(json.dumps(record))
    packed = tmp_path / "packed.tar"
    with tarfile.open(packed, "w") as made:
        made.add(tree, ".")
    for source in (tree, packed):
        assert import_base(source, directory=bases).id == "default-cafe"
    kept = json.loads((bases / "default/base.json").read_text())
    assert (kept["recipe"], kept["digest"], kept["writable"]) == ("r", "sha256:1", ["home/agent", "tmp", "workspace"])


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([*ENTRIES, ("../out", "file", 0o644, 0, "x")], "path with '..'"),
        ([*ENTRIES, ("away", "link", 0o777, 0, "/"), ("away/x", "file", 0o644, 0, "x")], "leads through a symlink"),
        (ENTRIES[3:], "no /bin/bash"),
    ],
)
def test_an_archive_that_is_no_tree_leaves_nothing(
    tmp_path: Path, bases: Path, entries: list[tuple[str, str, int, int, str]], says: str
) -> None:
    with pytest.raises(SandboxUnavailable, match=says) as caught:
        import_base(archive(tmp_path / "x.tar", entries), "mine", directory=bases)
    assert "\n" not in str(caught.value)
    assert [path.name for path in bases.iterdir()] == [".mine.lock"]


def test_a_file_that_is_no_archive_is_refused_in_one_line(tmp_path: Path, bases: Path) -> None:
    (tmp_path / "x").write_text("no")
    with pytest.raises(SandboxUnavailable, match="give a system's root directory"):
        import_base(tmp_path / "x", directory=bases)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
def test_a_tree_of_another_user_is_refused_with_the_command_that_copies_it(tmp_path: Path, bases: Path) -> None:
    made = import_base(archive(tmp_path / "x.tar", ENTRIES), "mine", directory=bases)
    check_owner(made)
    os.chown(made.root, 1000, 1000)
    with pytest.raises(
        SandboxUnavailable, match=rf"belongs to uid 1000.*run `errata base import {made.root.parent} mine`"
    ):
        check_owner(made)

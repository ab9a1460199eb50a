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
from errata_server.sandbox.base_trees.tree import RECORD_BYTES, check_owner, publish

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


# Hostile archives and records


def packed(place: Path, record: object, entries: list[tuple[str, str, int, int, str]] = ENTRIES) -> Path:
    """Return an archive of a base tree with this ``base.json``, bytes or what becomes JSON."""
    archive(place, entries, "root/")
    data = record if isinstance(record, bytes) else json.dumps(record).encode()
    with tarfile.open(place, "a") as made:
        member = tarfile.TarInfo("base.json")
        member.size = len(data)
        made.addfile(member, io.BytesIO(data))
    return place


def state(path: Path) -> list[tuple[object, ...]]:
    """Return modes, owners and contents of all that is below a directory, and of itself."""
    found = []
    for one in [path, *sorted(path.rglob("*"))]:
        info = one.lstat()
        content = one.read_bytes() if stat.S_ISREG(info.st_mode) else b""
        if one.is_symlink():
            content = os.fsencode(one.readlink())
        found.append((str(one), info.st_mode, info.st_uid, info.st_gid, content))
    return found


@pytest.mark.parametrize(
    "hostile",
    [
        pytest.param(
            [("d", "link", 0o777, 0, "OUTSIDE"), ("d", "dir", 0o4777, AGENT_UID, "")], id="directory over a link"
        ),
        pytest.param([("d", "link", 0o777, 0, "OUTSIDE"), ("d/.", "dir", 0o4777, AGENT_UID, "")], id="with a dot"),
        pytest.param([("d", "link", 0o777, 0, "OUTSIDE"), ("d/x", "file", 0o644, 0, "x")], id="file behind a link"),
        pytest.param([("d", "link", 0o777, 0, "OUTSIDE"), ("d/x", "dir", 0o777, 0, "")], id="directory behind a link"),
        pytest.param([("d", "link", 0o777, 0, "OUTSIDE/file"), ("d", "file", 0o644, 0, "x")], id="file over a link"),
        pytest.param([("e", "hard", 0o777, AGENT_UID, "../OUTSIDE/file")], id="hard link with dots"),
        pytest.param(
            [("d", "link", 0o777, 0, "OUTSIDE"), ("e", "hard", 0o777, 0, "d/file")], id="hard link behind a link"
        ),
        pytest.param([("e", "hard", 0o777, 0, "nothing")], id="hard link to nothing"),
        pytest.param([("e", "hard", 0o777, 0, "bin")], id="hard link to a directory"),
        pytest.param([("bin", "link", 0o777, 0, "OUTSIDE")], id="link over a directory"),
        pytest.param([("a" * 300, "file", 0o644, 0, "x")], id="long name"),
        pytest.param([("a/" * 3000 + "b", "file", 0o644, 0, "x")], id="long path"),
        pytest.param([("x", "file", 0o644, 2**40, "x")], id="no owner"),
    ],
)
def test_no_entry_reaches_out_of_the_tree(
    tmp_path: Path, bases: Path, hostile: list[tuple[str, str, int, int, str]]
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    (outside / "file").write_text("mine")
    before = state(outside)
    entries = [
        (name, kind, mode, uid, text.replace("OUTSIDE", str(outside))) for name, kind, mode, uid, text in hostile
    ]
    with pytest.raises(SandboxUnavailable) as caught:
        import_base(archive(tmp_path / "x.tar", [*ENTRIES, *entries]), "mine", directory=bases)
    assert "\n" not in str(caught.value)
    assert state(outside) == before
    assert [path.name for path in bases.iterdir()] == [".mine.lock"]


HOSTILE_IDS = [
    "..",
    ".",
    "/",
    "/etc",
    "../../../x",
    "a/b",
    "a\0b",
    "a" * 300,
    "a\n",
    "\u0430",
    "",
    5,
    [],
    {},
    True,
    None,
    1e300,
]


@pytest.mark.parametrize("identity", HOSTILE_IDS, ids=ascii)
@pytest.mark.parametrize("kind", ["archive", "directory"])
def test_the_id_of_a_tree_is_no_path(tmp_path: Path, bases: Path, identity: object, kind: str) -> None:
    import_base(archive(tmp_path / "x.tar", ENTRIES), "first", directory=bases)
    before = state(tmp_path)
    source = packed(tmp_path / "hostile.tar", {"id": identity})
    if kind == "directory":
        source = unpacked(tmp_path, source)
    with pytest.raises(SandboxUnavailable, match="cannot be") as caught:
        import_base(source, "mine", directory=bases)
    assert "\n" not in str(caught.value)
    assert [row for row in state(tmp_path) if row in before] == before


def unpacked(place: Path, source: Path) -> Path:
    """Return the directory that an archive is unpacked in."""
    made = place / "hostile"
    with tarfile.open(source) as opened:
        for member in opened:
            if not member.ischr():
                opened.extract(member, made, filter="tar")
    return made


HOSTILE_RECORDS = {
    "a list": b"[1]",
    "text": b'"x"',
    "nothing": b"",
    "broken": b'{"id": "x"',
    "deep": b'{"id": "x", "deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "not UTF-8": b'{"id": "\xff"}',
    "half a surrogate": b'{"id": "\\ud800"}',
    "large": b'{"id": "x", "a": "' + b"a" * 2 * 1024**2 + b'"}',
    "numbers": b'{"id": "x", "digest": 5}',
    "a writable of the host": b'{"id": "x", "writable": ["/etc"]}',
    "a writable above": b'{"id": "x", "writable": ["a/../../etc"]}',
    "a writable that is none": b'{"id": "x", "writable": {"etc": 1}}',
}


@pytest.mark.parametrize("record", HOSTILE_RECORDS)
@pytest.mark.parametrize("kind", ["archive", "directory"])
def test_a_record_that_is_none_is_one_line(tmp_path: Path, bases: Path, record: str, kind: str) -> None:
    source = packed(tmp_path / "x.tar", HOSTILE_RECORDS[record])
    with pytest.raises(SandboxUnavailable) as caught:
        import_base(unpacked(tmp_path, source) if kind == "directory" else source, "mine", directory=bases)
    assert "\n" not in str(caught.value)
    assert [path.name for path in bases.iterdir()] == [".mine.lock"]


@pytest.mark.parametrize("special", ["symlink", "FIFO", "directory", "device", "large"])
def test_a_record_is_a_regular_file(tmp_path: Path, bases: Path, special: str) -> None:
    (tmp_path / "record").write_text('{"id": "x"}')
    source = tmp_path / "tree"
    (source / "root").mkdir(parents=True)
    made = source / "base.json"
    if special == "symlink":
        made.symlink_to(tmp_path / "record")
    elif special == "FIFO":
        os.mkfifo(made)
    elif special == "directory":
        made.mkdir()
    elif special == "device":
        made.symlink_to("/dev/zero")
    else:
        made.write_bytes(b" " * (RECORD_BYTES + 1))
    kinds = {"FIFO": "a FIFO", "directory": "a directory", "large": "larger than 1,048,576 bytes"}
    says = kinds.get(special, "a symbolic link")
    with pytest.raises(SandboxUnavailable, match=rf"base\.json is {says}.*; remove") as caught:
        import_base(source, "mine", directory=bases)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["link", "hard", "dir", "device"])
def test_a_record_in_an_archive_is_a_regular_file(tmp_path: Path, bases: Path, kind: str) -> None:
    source = archive(tmp_path / "x.tar", [*ENTRIES, ("base.json", kind, 0o644, 0, "etc/hosts")])
    with pytest.raises(SandboxUnavailable, match=r"base\.json"):
        import_base(source, "mine", directory=bases)


def test_the_root_of_a_tree_is_no_link(tmp_path: Path, bases: Path) -> None:
    source = tmp_path / "tree"
    source.mkdir()
    (source / "base.json").write_text('{"id": "x"}')
    (source / "root").symlink_to("/")
    with pytest.raises(SandboxUnavailable, match="root is a symlink"):
        import_base(source, "mine", directory=bases)


def test_the_id_of_another_tree_is_refused(tmp_path: Path, bases: Path) -> None:
    first = import_base(packed(tmp_path / "first.tar", {"id": "known"}), "one", directory=bases)
    before = state(bases)
    hostile = [*ENTRIES, ("etc", "dir", 0o777, 0, ""), ("etc/more", "file", 0o644, 0, "x")]
    with pytest.raises(SandboxUnavailable, match="is another tree's, with other files"):
        import_base(packed(tmp_path / "other.tar", {"id": "known"}, hostile), "two", directory=bases)
    digest = json.loads((first.root.parent / "base.json").read_text())["digest"]
    with pytest.raises(SandboxUnavailable, match="is another tree's, with other files"):
        import_base(packed(tmp_path / "other.tar", {"id": "known", "digest": digest}, hostile), "two", directory=bases)
    assert [row for row in state(bases) if ".two" not in str(row[0])] == before


def test_the_same_tree_again_is_only_named(tmp_path: Path, bases: Path) -> None:
    first = import_base(packed(tmp_path / "first.tar", {"id": "known"}), "one", directory=bases)
    record = (first.root.parent / "base.json").read_bytes()
    again = import_base(packed(tmp_path / "again.tar", {"id": "known", "suite": "other"}), "two", directory=bases)
    assert (again.id, (again.root.parent / "base.json").read_bytes()) == ("known", record)
    assert str((bases / "two").readlink()) == "known"


def test_a_name_is_no_id_and_an_id_no_name(tmp_path: Path, bases: Path) -> None:
    import_base(packed(tmp_path / "first.tar", {"id": "known"}), "one", directory=bases)
    for identity, name in (("one", "two"), ("two", "two"), ("other", "known")):
        with pytest.raises(SandboxUnavailable):
            import_base(packed(tmp_path / "other.tar", {"id": identity}), name, directory=bases)
    assert str((bases / "one").readlink()) == "known"


def test_an_imported_tree_does_not_pass_for_one_that_is_built(tmp_path: Path, bases: Path) -> None:
    import_base(packed(tmp_path / "x.tar", {"id": "default-cafe", "digest": "sha256:cafe"}), "other", directory=bases)
    with pytest.raises(SandboxUnavailable, match="other files than its id says"), publish("default", bases) as work:
        (work / "base.json").write_text(json.dumps({"id": "default-cafe", "digest": "sha256:cafe"}))

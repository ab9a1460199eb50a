"""Squashing a chain of layers: what the overlay shows afterwards is what it showed before."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from errata_server.sandbox.files.trees import scan
from errata_server.sandbox.layers import store
from errata_server.sandbox.layers.flatten import flatten
from errata_server.sandbox.namespace.backend import NamespaceBackend


@pytest.mark.sandbox
async def test_a_squash_shows_no_ghost_of_a_deleted_file(
    namespace_backend: NamespaceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_CHAIN", 4)
    box = await namespace_backend.open()
    await box.run("mkdir -p d/e; touch d/a d/b d/e/f; mkdir o; touch o/x")
    await box.snapshot()
    await box.run("rm d/b d/e/f; rm -r o; mkdir o; touch o/y")
    await box.snapshot()
    for n in range(10):
        await box.run(f"echo {n} > n")
        await box.snapshot()
    seen = await box.run("ls -A d d/e o; find . -type c; cp -r d copy && rm -r d o && ls")
    assert seen.exit_code == 0 and seen.stderr == "", seen
    assert seen.stdout.split() == ["d:", "a", "e", "d/e:", "o:", "y", "copy", "n"]


@pytest.mark.sandbox
async def test_a_squash_keeps_what_hides_the_base(
    namespace_backend: NamespaceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_CHAIN", 3)
    box = await namespace_backend.open()
    before = (await box.run("cd ~; ls -A | head -1")).stdout.strip()
    assert before, "the base's home has a file to delete"
    await box.run(f"cd ~; rm -rf './{before}'")
    await box.snapshot()
    for n in range(8):
        await box.run(f"echo {n} > /workspace/n")
        await box.snapshot()
    assert before not in (await box.run("ls -A ~")).stdout.split()


@pytest.fixture
def few_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system on which a file may have four names."""
    real: Callable[..., None] = os.link

    def link(source: Any, target: Any, **options: Any) -> None:
        at = options.get("src_dir_fd")
        if os.stat(source, dir_fd=at, follow_symlinks=options.get("follow_symlinks", True)).st_nlink >= 4:
            raise OSError(errno.EMLINK, "Too many links")
        real(source, target, **options)

    monkeypatch.setattr(os, "link", link)


@pytest.mark.usefixtures("few_names")
def test_files_of_more_names_than_the_file_system_allows_are_copied_now_and_then(tmp_path: Path) -> None:
    layer, base = tmp_path / "layer", tmp_path / "base"
    layer.mkdir()
    base.mkdir()
    (layer / "f").write_text("content")
    os.utime(layer / "f", (1, 1))
    real_link = os.link.__closure__[0].cell_contents  # type: ignore[attr-defined]
    (layer / "s").symlink_to("f")
    for n in range(20):
        real_link(layer / "f", layer / f"f{n}")
        real_link(layer / "s", layer / f"s{n}", follow_symlinks=False)
    flatten([layer], tmp_path / "out", tmp_path / "scratch", base)
    files = sorted((tmp_path / "out").glob("f*"))
    assert len(files) == 21 and all(f.read_text() == "content" and f.stat().st_mtime == 1 for f in files)
    assert len({f.stat().st_ino for f in files}) <= 6, "one copy serves several names"
    assert all(s.readlink() == Path("f") for s in (tmp_path / "out").glob("s*"))


def opaque(path: Path) -> None:
    os.setxattr(path, "trusted.overlay.opaque", b"y")


def whiteout(path: Path) -> None:
    os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(0, 0))


@pytest.mark.sandbox
@pytest.mark.parametrize("failure", [errno.EMFILE, errno.EACCES, errno.EIO])
def test_a_failure_to_look_at_the_base_is_no_absence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: int
) -> None:
    layer, base = tmp_path / "layer", tmp_path / "base"
    for root in (layer, base):
        (root / "d").mkdir(parents=True)
    (base / "d/secret").write_text("hidden")
    whiteout(layer / "d/secret")
    inode = (base / "d").stat().st_ino
    real = os.open

    def failing(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        fd = real(path, flags, mode, dir_fd=dir_fd)
        if os.fstat(fd).st_ino == inode and dir_fd is not None:
            os.close(fd)
            raise OSError(failure, os.strerror(failure))
        return fd

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing)
        with pytest.raises(OSError, match=os.strerror(failure)):
            flatten([layer], tmp_path / "out", tmp_path / "scratch", base)
    flatten([layer], tmp_path / "again", tmp_path / "scratch", base)
    assert stat.S_ISCHR((tmp_path / "again/d/secret").lstat().st_mode)


@pytest.mark.sandbox
def test_an_opaque_mark_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "layer/d").mkdir(parents=True)

    def failing(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "getxattr", failing)
    with pytest.raises(OSError, match="Input/output"):
        scan(tmp_path / "layer")


@pytest.mark.sandbox
@pytest.mark.usefixtures("few_names")
def test_copies_keep_what_chown_and_umask_would_take(tmp_path: Path) -> None:
    layer, base = tmp_path / "layer", tmp_path / "base"
    layer.mkdir()
    base.mkdir()
    capability = bytes.fromhex("0100000200040000000000000000000000000000")  # cap_net_bind_service+ep
    real_link = os.link.__closure__[0].cell_contents  # type: ignore[attr-defined]
    (layer / "f").write_text("program")
    os.chown(layer / "f", 64000, 64000)
    (layer / "f").chmod(0o4755)
    os.setxattr(layer / "f", "security.capability", capability)
    os.mkfifo(layer / "p")
    (layer / "p").chmod(0o666)
    for n in range(6):
        for name in ("f", "p"):
            real_link(layer / name, layer / f"{name}{n}")
    before = os.umask(0o077)
    try:
        flatten([layer], tmp_path / "out", tmp_path / "scratch", base)
    finally:
        os.umask(before)
    for path in (tmp_path / "out").glob("f*"):
        assert os.getxattr(path, "security.capability") == capability, path
        assert (path.stat().st_mode & 0o7777, path.stat().st_uid) == (0o4755, 64000)
    assert all(path.stat().st_mode & 0o7777 == 0o666 for path in (tmp_path / "out").glob("p*"))


@pytest.mark.sandbox
def test_directories_keep_their_times(tmp_path: Path) -> None:
    base, old, new = tmp_path / "base", tmp_path / "old", tmp_path / "new"
    for root in (base, old, new):
        (root / "a/b").mkdir(parents=True)
        (root / "o").mkdir()
    (base / "a/b/gone").write_text("")
    whiteout(old / "a/b/gone")
    whiteout(old / "a/b/never")  # hides nothing, so it is taken out again
    (old / "a/f").write_text("")
    (new / "a/b/g").write_text("")
    (new / "o/h").write_text("")
    opaque(new / "o")
    for root, at in ((old, 1000), (new, 2000)):
        for n, name in enumerate(("a/b", "a", "o")):
            os.utime(root / name, (at + n, at + n + 10))
    (old / "only").mkdir()
    os.utime(old / "only", (5, 5))
    flatten([old, new], tmp_path / "out", tmp_path / "scratch", base)
    out = tmp_path / "out"
    assert [(out / name).stat().st_mtime for name in ("a/b", "a", "o", "only")] == [2010, 2011, 2012, 5]

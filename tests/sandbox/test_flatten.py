"""Squashing a chain of layers: what the overlay shows afterwards is what it showed before."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from errata_server.sandbox import layers
from errata_server.sandbox.flatten import flatten
from errata_server.sandbox.namespace import NamespaceBackend


@pytest.mark.sandbox
async def test_a_squash_shows_no_ghost_of_a_deleted_file(
    namespace_backend: NamespaceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "MAX_CHAIN", 4)
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
    monkeypatch.setattr(layers, "MAX_CHAIN", 3)
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

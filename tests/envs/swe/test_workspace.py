"""The program that prepares a fork for a run of the tests, on trees that an agent may leave."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from errata_server.sandbox.namespace.backend import _OVERLAY_OPTIONS
from swe_bench_lite_env.server import workspaces

PROGRAM = workspaces._SCRIPT


@pytest.fixture
def program() -> ModuleType:
    """The program as a module, of which a test calls parts."""
    spec = importlib.util.spec_from_file_location("workspace_program", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(program: ModuleType, tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "testbed").mkdir()
    yield tmp_path / "testbed"
    program.remove(str(tmp_path))  # pytest cannot remove a tree this deep


def deep(top: Path, levels: int) -> None:
    """Make a tree as `mkdir a; cd a` makes it: deeper than Python nests calls, and longer than a path may be."""
    here = os.open(top, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("a", dir_fd=here)
        inside = os.open("a", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inside
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def answer(root: Path, **request: Any) -> dict[str, Any]:
    asked = json.dumps({"nonce": "n", "root": str(root), "survey": workspaces.SURVEY, **request})
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(PROGRAM)], input=asked, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("levels", [1100, 3000])
def test_a_deep_tree_in_the_repository_is_no_obstacle(root: Path, levels: int) -> None:
    deep(root, levels)
    (root / "test_x.py").write_text("")
    assert answer(root)["survey"] == {"test_x.py": ["test", hashlib.sha256(b"").hexdigest()]}


@pytest.mark.parametrize("levels", [1100, 3000])
def test_a_deep_tree_goes_where_it_is_in_the_way(root: Path, tmp_path: Path, levels: int) -> None:
    for place in (root / "test_x.py", root / "__pycache__", tmp_path / "tmp"):
        place.mkdir()
        deep(place, levels)
    (tmp_path / "tmp" / "other").write_text("")
    found = answer(
        root,
        files={"test_x.py": {"content": "", "mode": 0o644}},
        clear=[str(tmp_path / "tmp")],
        home=f"{tmp_path}/tmp/h",
    )
    assert found["refused"] == [] and names(root) == ["test_x.py"] and (root / "test_x.py").is_file()
    assert names(tmp_path / "tmp") == ["h"]


def test_a_tree_is_removed_whatever_its_names_and_modes_are(program: ModuleType, root: Path) -> None:
    outside = root / "outside"
    outside.mkdir()
    (outside / "kept").write_text("")
    tree = root / "tree"
    for name in ("0/1/2", "1/0", "2", "x/0/0", "x/1"):
        (tree / name).mkdir(parents=True)
        (tree / name / "file").write_text("")
    (tree / "link").symlink_to(outside)
    (tree / "x/0/link").symlink_to(outside)
    (tree / "x/dangling").symlink_to("nowhere")
    os.mkfifo(tree / "x/pipe")
    (tree / "x/0").chmod(0)
    (tree / "1").chmod(0o500)
    program.remove(str(tree))
    assert names(root) == ["outside"] and names(outside) == ["kept"]


def test_a_walk_follows_no_links_and_goes_where_its_caller_lets_it(program: ModuleType, root: Path) -> None:
    for name in ("a/b", "c", "left_out/d"):
        (root / name).mkdir(parents=True)
    (root / "a/file").write_text("")
    (root / "c/loop").symlink_to(root)
    seen = []
    for here, directories, files in program.walk(str(root)):
        directories[:] = sorted(set(directories) - {"left_out"})
        seen.append((os.path.relpath(here, root), directories, files))
    assert seen == [(".", ["a", "c"], []), ("a", ["b"], ["file"]), ("a/b", [], []), ("c", ["loop"], [])]


def test_a_file_of_many_names_is_read_once(program: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []

    def sha256(content: bytes) -> Any:
        hashed.append(content)
        return hashlib.new("sha256", content)

    (root / "test_0.py").write_text("one")
    for number in range(1, 50):
        os.link(root / "test_0.py", root / f"test_{number}.py")
    (root / "test_other.py").write_text("two")
    monkeypatch.setattr(program.hashlib, "sha256", sha256)
    found = program.survey(str(root), workspaces.SURVEY)
    assert sorted(hashed) == [b"one", b"two"]
    assert len(found) == 51 and len({digest for _, digest in found.values()}) == 2


def test_a_cleared_directory_is_made_usable(root: Path, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir(0)
    answer(root, clear=[str(tmp_path / "tmp")], home=f"{tmp_path}/tmp/h")
    assert (tmp_path / "tmp").stat().st_mode & 0o700 == 0o700


def test_files_that_are_not_there_take_no_room_in_the_answer(root: Path) -> None:
    # An agent chooses the names of its own files, which are looked up in the untouched start.
    (root / "here").write_text("x")
    (root / "link").symlink_to("here")
    found = answer(root, read=["here", "link", "gone", "n" * 5000])["read"]
    assert found == {"here": {"content": "eA==", "mode": 0o644}, "link": {"link": "here"}}


@pytest.mark.sandbox
def test_caches_in_a_lower_layer_are_removed(program: ModuleType, tmp_path: Path) -> None:
    """In a fork the agent's files are a lower layer of an overlay, in which no directory can be renamed."""
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    caches = tmp_path / "lower" / "pkg" / "__pycache__"
    (caches / "a" / "b").mkdir(parents=True)
    for place in (caches, caches / "a", caches / "a" / "b"):
        (place / "evil.pyc").write_bytes(b"byte code")
    (tmp_path / "lower" / ".pytest_cache" / "v" / "cache").mkdir(parents=True)
    layers = ",".join(f"{kind}dir={tmp_path / kind}" for kind in ("lower", "upper", "work"))
    merged = tmp_path / "merged"
    request = json.dumps({"nonce": "n", "root": str(merged)})
    command = (
        f"mount -t overlay overlay -o {layers},{_OVERLAY_OPTIONS} {merged} && "
        f"{sys.executable} -I -S {PROGRAM} && find {merged} -mindepth 1"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command], input=request, capture_output=True, text=True, check=True
    )
    left = {line.removeprefix(f"{merged}/") for line in done.stdout.split("\n") if line.startswith(str(merged))}
    assert left == {"pkg"}

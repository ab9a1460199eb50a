"""Small repositories, mirrors and package indexes for tests of `prepare`, made without a network."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from errata_server import sandbox
from swe_bench_lite_env.dataset import Instance, read_row
from swe_bench_lite_env.recipes import Recipe, read_recipe
from swe_bench_lite_env.server import prepare
from swe_bench_lite_env.server.prepare import interpreters

ROOT = Path(__file__).resolve().parents[3]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "errata"
UNUSED_S = 7 * 86_400.0

RUNNER = """\
import importlib, sys, traceback
failed = False
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for test in sorted(vars(module)):
        if test.startswith("test_"):
            try:
                getattr(module, test)()
                print("PASSED", name + ".py::" + test)
            except Exception:
                traceback.print_exc()
                print("FAILED", name + ".py::" + test)
                failed = True
sys.exit(failed)
"""
"""A runner that needs no package and prints what pytest's summary would."""

BUG = "def total(entries):\n    return sum(entries[:-1])\n\n\ndef count(entries):\n    return len(entries)\n"

SETUP = """\
from setuptools import setup
setup(name="ledger", version={version!r}, packages=["ledger"], install_requires={requires!r})
"""


def files(version: str = "1.0", requires: tuple[str, ...] = ()) -> dict[str, str]:
    """Return a repository with a bug: `ledger.total` leaves the last entry out."""
    return {
        "setup.py": SETUP.format(version=version, requires=list(requires)),
        "ledger/__init__.py": BUG,
        "check.py": RUNNER,
        "test_ledger.py": "from ledger import count\n\n\ndef test_count():\n    assert count([1, 2]) == 2\n",
        "bin/tool": "#!/bin/sh\necho tool\n",
        ".gitignore": "*.egg-info/\n__pycache__/\n",
    }


GOLD = """\
diff --git a/ledger/__init__.py b/ledger/__init__.py
--- a/ledger/__init__.py
+++ b/ledger/__init__.py
@@ -1,5 +1,5 @@
 def total(entries):
-    return sum(entries[:-1])
+    return sum(entries)
 
 
 def count(entries):
"""  # noqa: W293 - a diff has such lines

TEST_PATCH = """\
diff --git a/test_ledger.py b/test_ledger.py
--- a/test_ledger.py
+++ b/test_ledger.py
@@ -3,3 +3,8 @@
 
 def test_count():
     assert count([1, 2]) == 2
+
+
+def test_total():
+    from ledger import total
+    assert total([1, 2]) == 3
"""  # noqa: W293


def write(directory: Path, content: Mapping[str, str]) -> Path:
    """Write files below a directory; those in ``bin`` are executable."""
    for name, text in content.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        path.chmod(0o755 if name.startswith("bin/") else 0o644)
    return directory


def instance(**values: Any) -> Instance:
    """Return the instance of `files`."""
    row = {
        "repo": "own/ledger",
        "instance_id": "own__ledger-1",
        "problem_statement": "total leaves the last entry out",
        "version": "1.0",
        "patch": GOLD,
        "test_patch": TEST_PATCH,
        "FAIL_TO_PASS": ["test_ledger.py::test_total"],
        "PASS_TO_PASS": ["test_ledger.py::test_count"],
    }
    return read_row(row | values)


def recipe(root: Path, **values: Any) -> Recipe:
    """Return the recipe of `files` as they stand in ``root/source``."""
    record = {
        "instance_id": "own__ledger-1",
        "source": {"kind": "directory", "path": "source"},
        "python": "base",
        "test_command": "pytest -rA test_ledger.py",
    }
    return read_recipe(record | values, root=root)


def git(directory: Path, *arguments: str) -> str:
    """Run git on a repository of a test."""
    moment = "2020-01-02T03:04:05Z"
    people = {f"GIT_{who}_{what}": "t@t" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = {**os.environ, **people, "GIT_AUTHOR_DATE": moment, "GIT_COMMITTER_DATE": moment}
    command = ["git", "-C", str(directory), "-c", "init.defaultBranch=main", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.strip()


def mirror(directory: Path, name: str, content: Mapping[str, str], tag: str = "") -> str:
    """Make a bare repository in a mirror: a first commit (with a tag), the base commit, and a later one with the fix.

    Returns:
        The base commit.
    """
    work = directory / ".work" / name.replace("/", "-")
    write(work, {**content, "CHANGES": "first\n"})
    git(work, "init", "--quiet")
    git(work, "add", "--all", "--force")
    git(work, "commit", "--quiet", "-m", "first")
    if tag:
        git(work, "tag", tag)
    (work / "CHANGES").write_text("second\n", "utf-8")
    git(work, "commit", "--quiet", "--all", "-m", "second")
    base = git(work, "rev-parse", "HEAD")
    (work / "ledger/__init__.py").write_text("THE_FIX = 'of a later commit'\n", "utf-8")
    git(work, "commit", "--quiet", "--all", "-m", "the fix")
    git(work, "tag", "v9.9")
    place = directory / name
    place.parent.mkdir(parents=True, exist_ok=True)
    git(work, "clone", "--quiet", "--bare", str(work), str(place))
    return base


def wheel(directory: Path, name: str, version: str, modules: Mapping[str, str]) -> Path:
    """Write a wheel of pure Python."""
    path = directory / f"{name}-{version}-py3-none-any.whl"
    information = f"{name}-{version}.dist-info"
    content = {
        **modules,
        f"{information}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{information}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in content.items():
            archive.writestr(member, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            rows.append(f"{member},sha256={digest},{len(text.encode())}\n")
        archive.writestr(f"{information}/RECORD", "".join(rows) + f"{information}/RECORD,,\n")
    return path


def simple_index(directory: Path, archives: Mapping[str, list[Path]]) -> str:
    """Write the pages of an index (PEP 503) and return its URL."""
    for project, paths in archives.items():
        page = directory / project
        page.mkdir(parents=True, exist_ok=True)
        rows = []
        for path in paths:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            (page / path.name).write_bytes(path.read_bytes())
            rows.append(f'<a href="{path.name}#sha256={digest}">{path.name}</a>')
        (page / "index.html").write_text("<!DOCTYPE html><html><body>" + "\n".join(rows) + "</body></html>", "utf-8")
    return directory.as_uri()


def python_or_skip(version: str) -> str:
    """Return a Python version that this machine has. Without it the test is skipped, or fails under REQUIRE_ALL."""
    try:
        return interpreters.find(version).minor
    except interpreters.InterpreterMissing as error:
        if os.environ.get("REQUIRE_ALL"):
            pytest.fail(error.message)
        pytest.skip(error.message)


def shared_data() -> Path:
    """Return the directory of real rows and recipes beside the checkout; without it the test is skipped."""
    place = ROOT.parent / "shared/data"
    if not (place / "swe_recipes.json").is_file():
        pytest.skip("../shared/data with real rows of SWE-bench Lite is not here")
    return place


def kept_place() -> Path:
    """Return where this user keeps prepared instances and base trees: one directory for each state of what makes them.

    Otherwise a run after a change would validate what the code before had built. Places that no test has used for a
    week are removed.
    """
    data = ROOT.parent / "shared/data"
    sources = [*Path(prepare.__file__).parent.rglob("*.py"), *Path(sandbox.__file__).parent.rglob("*.py")]
    digest = hashlib.sha256()
    for file in (*sorted(sources), data / "swe_recipes.json", data / "swebench_lite_subset.jsonl"):
        digest.update(file.read_bytes() if file.is_file() else b"")
    place = CACHE / "swe-tests" / digest.hexdigest()[:12]
    place.mkdir(parents=True, exist_ok=True)
    os.utime(place)
    for other in place.parent.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another run removes it
            if other.stat().st_mtime < time.time() - UNUSED_S:
                shutil.rmtree(other)
    return place


def dump(directory: Path, rows: list[Instance], recipes: list[Recipe]) -> tuple[Path, Path]:
    """Write a data set and its recipes."""
    dataset, target = directory / "rows.jsonl", directory / "recipes.json"
    dataset.write_text("".join(json.dumps(row.row()) + "\n" for row in rows), "utf-8")
    target.write_text(json.dumps([recipe.values() for recipe in recipes]), "utf-8")
    return dataset, target

"""Source trees of OpenEnv that patches are applied to, and programs that run with one of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
FETCHED = ROOT / ".cache" / "upstream-patches" / "dist"


def unpacked(kind: str, to: Path) -> Path:
    """Unpack a distribution as a checkout lies: packages below src, no tests of the patches' names."""
    assert FETCHED.is_dir(), "run `make test-upstream-patches`, which fetches the distributions"
    if kind == "wheel":
        (wheel,) = FETCHED.glob("*.whl")
        zipfile.ZipFile(wheel).extractall(to / "src")
    else:
        (sdist,) = FETCHED.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(to, filter="data")
        (inner,) = to.iterdir()
        for one in inner.iterdir():
            one.rename(to / one.name)
        inner.rmdir()
    return to


def apply(tree: Path, patch: Path) -> None:
    """Apply a patch exactly: no fuzz, no offset in whitespace."""
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}  # not a part of any repository
    for more in (["--check"], []):
        subprocess.run(["git", "apply", "--whitespace=error", *more, str(patch)], cwd=tree, env=environment, check=True)


def run(
    tree: Path, *command: str, text: str = "", python: str | Path = sys.executable, path: str = "src"
) -> subprocess.CompletedProcess[str]:
    """Run a Python with the OpenEnv of a tree in place of the installed one.

    Args:
        tree: Directory that holds the OpenEnv, and in which the program runs.
        *command: Arguments of the Python.
        text: Standard input.
        python: Path of the Python.
        path: Directories of the tree that modules are imported from, separated by colons.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "ERRATA_", "OPENENV_", "PYTEST_"))}
    imported = ":".join(str(tree / one) for one in path.split(":"))
    environment = kept | {"PYTHONPATH": imported, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [str(python), *command], cwd=tree, env=environment, input=text, capture_output=True, text=True, check=False
    )


def files(tree: Path) -> dict[str, bytes]:
    """Return a tree's files by path."""
    return {str(p.relative_to(tree)): p.read_bytes() for p in tree.rglob("*") if p.is_file()}


def changed(patch: Path) -> set[str]:
    """Return the paths that a patch touches."""
    return set(re.findall(r"^diff --git a/\S+ b/(\S+)$", patch.read_text(), re.M))


def lines(name: str) -> str:
    """Return client messages, a JSON line for each connection or request."""
    return (HERE / f"{name}.jsonl").read_text()


def played(tree: Path, messages: Iterable[str], python: str | Path = sys.executable) -> list[Any]:
    """Return what the OpenEnv of a tree answers to client messages, those of `lines` by their names."""
    text = "".join(map(lines, messages))
    done = run(tree, str(HERE / "transcript.py"), "play", text=text, python=python)
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["openenv"].startswith(str(tree))
    return list(said["answers"])

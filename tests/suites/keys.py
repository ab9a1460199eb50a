"""The key of a suite: a digest of everything that its outcome depends on.

Of the repository these are the objects of git's tree for whole folders, with changes that are not committed. What is
outside the repository is named by its version.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from .table import ROOT, Suite

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "errata"
ABSENT = "absent"
RECIPES = "trainer_adapter/errata_trainer/recipes"
KEY_LENGTH = 16


def git(*arguments: str, root: Path = ROOT, text: str = "", **environment: str) -> str:
    """Return what a command of git prints.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    done = subprocess.run(
        ["git", *arguments],
        cwd=root,
        env=os.environ | environment,
        input=text,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def working_tree(root: Path = ROOT) -> str:
    """Return the id of git's tree of the files as they are now: tracked ones, and new ones that are not ignored."""
    with tempfile.TemporaryDirectory() as place:
        index = Path(place, "index")
        own = root / git("rev-parse", "--git-path", "index", root=root)
        if own.exists():
            shutil.copy2(own, index)  # with what git knows of each file, so that unchanged ones are not read again
        git("add", "--all", root=root, GIT_INDEX_FILE=str(index))
        return git("write-tree", root=root, GIT_INDEX_FILE=str(index))


def objects(tree: str, paths: Iterable[str], root: Path = ROOT) -> dict[str, str]:
    """Return the ids of the files and folders of a tree, and the digests of parts of files.

    Args:
        tree: Id of the tree.
        paths: Paths, ``.`` for the whole tree; or ``FILE#PART``: a table of a TOML file, ``project``, without some of
            its keys, ``project -optional-dependencies``, or a constant of a Python module, ``FORMAT``.
        root: The repository.

    Raises:
        FileNotFoundError: The tree lacks one of them.
    """
    parts = {path for path in paths if "#" in path}
    wanted = sorted({path.partition("#")[0] for path in paths})
    listed = listing(tree, root) | {".": tree}
    missing = [path for path in wanted if path not in listed]
    if missing:
        raise FileNotFoundError(f"the table of suites names what is not in the repository: {', '.join(missing)}")
    ids = {path: listed[path] for path in wanted}
    whole = {path for path in paths if path not in parts}
    texts = {path: blob(ids[path], root) for path in {one.partition("#")[0] for one in parts}}
    return {path: ids[path] for path in sorted(whole)} | {
        one: part_digest(texts[one.partition("#")[0]], one) for one in sorted(parts)
    }


@functools.cache  # what an id names never changes
def listing(tree: str, root: Path = ROOT) -> dict[str, str]:
    """Return the ids of git's objects for all folders and files of a tree, by their paths."""
    rows = (row.partition("\t") for row in git("ls-tree", "-r", "-t", "-z", tree, root=root).split("\0") if row)
    return {path: about.split()[2] for about, _, path in rows}


@functools.cache
def blob(object_id: str, root: Path = ROOT) -> str:
    """Return the text of a file by the id of git's object."""
    return git("cat-file", "blob", object_id, root=root)


@functools.cache
def part_digest(text: str, path: str) -> str:
    """Return the digest of a part of a file; of all of it, if it has no such part.

    Args:
        text: Text of the file.
        path: ``FILE#PART``, as for `objects`.
    """
    file, _, part = path.partition("#")
    name, *without = part.split(" -")
    found: object = None
    try:
        if file.endswith(".toml"):
            found = tomllib.loads(text)
            for key in name.split("."):
                found = found[key] if isinstance(found, Mapping) else None
            if isinstance(found, Mapping):
                found = {key: value for key, value in found.items() if key not in without}
        else:
            for node in ast.parse(text).body:
                if isinstance(node, ast.Assign) and any(
                    isinstance(one, ast.Name) and one.id == name for one in node.targets
                ):
                    found = ast.literal_eval(node.value)
    except (KeyError, SyntaxError, ValueError):
        found = None
    return hashlib.sha256((text if found is None else repr(found)).encode()).hexdigest()


@functools.cache
def trainer_files(tree: str, root: Path = ROOT) -> tuple[str, ...]:
    """Return git's rows for the files of the trainer adapter."""
    return tuple(git("ls-tree", "-r", tree, "trainer_adapter/", root=root).splitlines())


def without_other_recipes(tree: str, recipes: Iterable[str], root: Path = ROOT) -> str:
    """Return the digest of the trainer adapter without the recipes that a suite does not use.

    Recipes do not import one another, and nothing imports them (contracts of import-linter).

    Args:
        tree: Id of the tree.
        recipes: Names of the recipes that the suite uses.
        root: The repository.
    """
    kept = {f"{RECIPES}/{name}" for name in (*recipes, "__init__.py")}
    of_suite = [
        line
        for line in trainer_files(tree, root)
        if not (path := line.partition("\t")[2]).startswith(f"{RECIPES}/")
        or any(path == k or path.startswith(f"{k}/") for k in kept)
    ]
    return hashlib.sha256("\n".join(of_suite).encode()).hexdigest()


def shared_digest(path: Path) -> str:
    """Return the digest of a file, or of the files below a folder; ``absent`` if there is none."""
    if not path.exists():
        return ABSENT
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            digest.update(f"{file.relative_to(path.parent)} ".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def versions(commands: Iterable[str] = ()) -> dict[str, str]:
    """Return the versions of Python, the kernel and the base tree of sandboxes, and what more commands print."""
    told = {"python": sys.version, "kernel": os.uname().release, "machine": os.uname().machine}
    base = Path(os.environ.get("ERRATA_BASE_DIR") or CACHE / "bases") / "default"
    told["base tree"] = base.resolve().name if base.exists() else ABSENT
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False
        )
        told[command] = done.stdout.strip() if done.returncode == 0 else ABSENT
    return told


def parts(suite: Suite, common: Iterable[str], tree: str, root: Path = ROOT) -> dict[str, str]:
    """Return what a suite's outcome depends on: names, and the digest or version of each."""
    found = {"suite": suite.how, **objects(tree, (*common, *suite.inputs), root)}
    if suite.recipes:
        found["trainer_adapter"] = without_other_recipes(tree, suite.recipes, root)
    found |= {f"../shared/{path}": shared_digest(root.parent / "shared" / path) for path in suite.shared}
    return found | versions(suite.versions)


def key(found: dict[str, str]) -> str:
    """Return the key of what an outcome depends on: 16 hex digits."""
    lines = (f"{name}\0{value}" for name, value in sorted(found.items()))
    return hashlib.sha256("\0\n".join(lines).encode()).hexdigest()[:KEY_LENGTH]

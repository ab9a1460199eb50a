"""Keeps the fix of an instance out of what its sessions can read: copies of the project, lines of the gold patch."""

from __future__ import annotations

import json
import keyword
import os
import re
import shlex
import tarfile
import zipfile
from collections.abc import Collection
from pathlib import Path

from errata_environment.grading.staging import staged
from errata_protocol.errors import EnvironmentFailed
from errata_server.sandbox.base import Backend, Limits

from .store import Prepared, demand

LEAST_TOKENS, LEAST_WORDS = 10, 3
"""A line is significant from these numbers of tokens and of different words on: shorter ones are anywhere."""

_COMMON = ("self", "cls", "super", "__init__", "args", "kwargs")
_IMPORT = re.compile(
    r"(?:>>>|\.\.\.)?\s*(?:(?:from\s+\S+\s+)?c?import\s.*|\w+(?:\s+as\s+\w+)?(?:\s*,\s*\w+(?:\s+as\s+\w+)?)*[\s,)]*)"
)
"""An import, or a line of names as in an import of several lines. Everybody who imports a module writes the same."""
_TOKEN = re.compile(r"\w+|[^\w\s]")
_WORD = re.compile(r"[^\W\d]\w+")
_SEARCH = Path(__file__).with_name("inside") / "search.py"
_MOUNT = "/setup"
_TIMEOUT_S = 1800.0
_SHOWN = 5
_LIMITS = Limits(memory_bytes=4 * 1024**3, cpu_s=1800, keep_bytes=64 * 1024**2)
_SITES = ("site-packages", "dist-packages")
_VENDORS = ("_vendor", "vendor", "_vendored", "vendored", "packages", "extern", "externals", "third_party")
_ARCHIVES = (".whl", ".egg", ".zip", ".pyz")
_NO_PROJECTS = ("test", "tests", "testing", "doc", "docs", "example", "examples", "benchmarks", "scripts", "tools")
"""Packages in the top level of repositories that are none of the project."""


def project_packages(archive: Path, repo: str) -> frozenset[str]:
    """Return the top-level modules and packages that a work tree has to import.

    Args:
        archive: The tar archive of the work tree.
        repo: ``owner/name``; a module beside the packages counts where it has that name.
    """
    project = re.sub(r"[-.]", "_", repo.partition("/")[2].lower())
    found = set()
    with tarfile.open(archive) as opened:
        for member in opened:
            parts = [part for part in member.name.split("/") if part != "."]
            if parts[:1] in (["src"], ["lib"]):
                del parts[0]
            if parts[1:] == ["__init__.py"]:
                found.add(parts[0])
            elif parts in ([f"{project}.py"], [f"_{project}.py"]):
                found.add(parts[0].removesuffix(".py"))
    return frozenset(found.difference(_NO_PROJECTS))


def copies(root: Path, packages: Collection[str]) -> list[str]:
    """Return the copies of packages in a root file system, relative to it: installed ones, vendored ones, archives.

    A pip that has one is named whole: it could not run without, and sessions have nothing to install from.
    """
    found: set[str] = set()
    for here, subdirectories, files in os.walk(root):
        place = os.path.relpath(here, root)
        holds = _holds_packages(place.split("/"))
        for name in [*subdirectories, *files]:
            path = f"{place}/{name}".removeprefix("./")
            if holds and name.split(".")[0] in packages and (name in subdirectories or name.endswith((".py", ".pyc"))):
                before, pip, _ = path.partition("/pip/_vendor/")
                found.add(f"{before}/pip" if pip else path)
            elif name.endswith(_ARCHIVES) and _has(Path(here, name), packages):
                found.add(path)
        subdirectories[:] = [name for name in subdirectories if f"{place}/{name}".removeprefix("./") not in found]
    return sorted(found)


def _holds_packages(parts: list[str]) -> bool:
    """Return whether a directory is one that packages are imported from, or that a package has copies of others in."""
    last = parts[-2] if parts[-1] == "__pycache__" and len(parts) > 1 else parts[-1]
    return last in _SITES or last in _VENDORS or last.endswith(".egg")


def _has(archive: Path, packages: Collection[str]) -> bool:
    try:
        with zipfile.ZipFile(archive) as opened:
            names = [name.split("/") for name in opened.namelist()]
    except (OSError, zipfile.BadZipFile, ValueError):
        return False
    for parts in names:
        for index, part in enumerate(parts):
            if part.removesuffix(".py") in packages and (index == 0 or _holds_packages(parts[:index])):
                return True
    return False


def significant_lines(patch: str) -> dict[str, tuple[str, ...]]:
    """Return the lines that a patch adds and that can tell, without indentation, each with its words.

    They are long enough and no imports.
    """
    found = {}
    for line in patch.split("\n"):
        text = line[1:].strip()
        words = {word for word in _WORD.findall(text) if not keyword.iskeyword(word) and word not in _COMMON}
        added = line.startswith("+") and not line.startswith("+++ ") and not _IMPORT.fullmatch(text)
        if added and len(_TOKEN.findall(text)) >= LEAST_TOKENS and len(words) >= LEAST_WORDS:
            found[text] = tuple(sorted(words))
    return found


async def fix_in_reach(backend: Backend, prepared: Prepared) -> list[str]:
    """Search all that a session on an instance can read for significant lines of the gold patch.

    Files of the repository are no such place: a line that stands in one is not significant. How many lines have to be
    in a place is written in ``inside/search.py``.

    Args:
        backend: Has the start.
        prepared: The instance.

    Returns:
        A line for each place, with the first few of them.

    Raises:
        EnvironmentFailed: The search failed, or what it printed cannot be read.
        SandboxFailed: The sandbox broke.
    """
    lines = significant_lines(prepared.instance.patch)
    if not lines:
        return []
    request = {
        "root": prepared.workdir,
        "lines": list(lines.items()),
        "skip": [_MOUNT],
        "sites": _SITES,
        "holders": [*_SITES, *_VENDORS],
    }
    sandbox = await backend.restore(prepared.snapshot, limits=_LIMITS)
    try:
        result = await sandbox.run(
            f"exec {shlex.quote(prepared.python)} -I -S {_MOUNT}/search.py",
            clean=True,
            mounts={_MOUNT: staged(_SEARCH)},
            stdin=json.dumps(request).encode(),
            timeout_s=_TIMEOUT_S,
        )
    finally:
        await sandbox.destroy()
    what = f"{prepared.instance.instance_id}: searching what its sessions can read"
    demand(result, what)
    texts = list(lines)
    try:
        places = [(str(path), [texts[index] for index in has]) for path, has in json.loads(result.stdout)]
    except ValueError as error:
        raise EnvironmentFailed(f"{what} printed what cannot be read ({error}): {result.stdout[-300:]!r}") from error
    more = [f"and {len(places) - _SHOWN} more places"] if len(places) > _SHOWN else []
    return [f"{path} has {len(has)} of {len(texts)} lines of its fix: {has[0]}" for path, has in places[:_SHOWN]] + more

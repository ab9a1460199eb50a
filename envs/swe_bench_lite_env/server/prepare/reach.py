"""Keeps the fix of an instance out of what its sessions can read: copies of the project, lines of the gold patch."""

from __future__ import annotations

import json
import keyword
import os
import re
import shlex
import tarfile
import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from errata_server.grading.staging import staged
from errata_server.sandbox.base import Backend, Limits

from .store import Prepared, demand

LEAST_TOKENS, LEAST_WORDS = 10, 3
"""A line is significant from these numbers of tokens and of different words on: shorter ones are anywhere."""

WORDS, WORDS_OF_HALF, WORDS_OF_BYTE_CODE = 5, 4, 6
"""So many different words the lines found in one place have to have together: any lines; half of the significant lines;
half of them in byte code, which does not show how words are combined. Fewer may be there by chance."""

_COMMON = ("self", "cls", "super", "__init__", "args", "kwargs")
_TOKEN = re.compile(r"\w+|[^\w\s]")
_WORD = re.compile(r"[^\W\d]\w+")
_SEARCH = Path(__file__).with_name("inside") / "search.py"
_MOUNT = "/setup"
_TIMEOUT_S = 1800.0
_SHOWN = 5
_LIMITS = Limits(memory_bytes=4 * 1024**3, cpu_s=1800)
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
    """Return the lines that a patch adds and that are long enough to tell, without indentation, each with its words."""
    found = {}
    for line in patch.split("\n"):
        text = line[1:].strip()
        words = {word for word in _WORD.findall(text) if not keyword.iskeyword(word) and word not in _COMMON}
        added = line.startswith("+") and not line.startswith("+++ ")
        if added and len(_TOKEN.findall(text)) >= LEAST_TOKENS and len(words) >= LEAST_WORDS:
            found[text] = tuple(sorted(words))
    return found


async def fix_in_reach(backend: Backend, prepared: Prepared) -> list[str]:
    """Search all that a session on an instance can read for significant lines of the gold patch.

    Files of the repository are no such place: a line that stands in one is not significant.

    Args:
        backend: Has the start.
        prepared: The instance.

    Returns:
        A line for each place, with the first few of them.

    Raises:
        EnvironmentFailed: The search failed.
        SandboxFailed: The sandbox broke.
    """
    lines = significant_lines(prepared.instance.patch)
    if not lines:
        return []
    request = {"root": prepared.workdir, "lines": list(lines.items()), "skip": [_MOUNT]}
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
    demand(result, f"{prepared.instance.instance_id}: searching what its sessions can read")
    texts = list(lines)
    found = [(str(path), [texts[index] for index in has]) for path, has in json.loads(result.stdout)]
    places = [(path, has) for path, has in found if _tells(path, has, lines)]
    more = [f"and {len(places) - _SHOWN} more places"] if len(places) > _SHOWN else []
    return [f"{path} has {len(has)} of {len(texts)} lines of its fix: {has[0]}" for path, has in places[:_SHOWN]] + more


def _tells(path: str, has: Sequence[str], lines: Mapping[str, Sequence[str]]) -> bool:
    """Return whether the lines in a place can hardly be there by chance."""
    words = len({word for text in has for word in lines[text]})
    half = 2 * len(has) >= len(lines)
    if path.endswith((".pyc", ".pyo")):
        return half and words >= WORDS_OF_BYTE_CODE
    return words >= (WORDS_OF_HALF if half else WORDS)

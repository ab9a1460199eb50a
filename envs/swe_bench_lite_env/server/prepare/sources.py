"""Where the code of an instance comes from: what names it, and its tree as an archive."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

from errata_protocol.errors import InvalidRequest

from ...dataset import Instance
from ...recipes import Recipe, Source

FORMAT = 1
"""Raise it whenever the same recipe would be built into something else."""

_LEFT_OUT = (".git", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache")


class SourceMissing(InvalidRequest, LookupError):
    """The code of an instance is not where its recipe says; the message names the next step."""


def build_key(instance: Instance, recipe: Recipe) -> str:
    """Return the digest of all that a build is made of, but for what the package index answers.

    Raises:
        SourceMissing: A directory or tree that the recipe names is not there.
    """
    source = recipe.source
    parts = (
        FORMAT,
        instance.instance_id,
        instance.repo,
        instance.version,
        _source_identity(instance, recipe, source),
        recipe.python,
        recipe.pins,
        recipe.install,
        sorted(recipe.env.items()),
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _source_identity(instance: Instance, recipe: Recipe, source: Source) -> list[str]:
    if source.kind == "sdist":
        return ["sdist", source.name, source.version, source.sha256]
    if source.kind == "git":
        return ["git", source.repo or instance.repo, source.commit or instance.base_commit]
    path = recipe.source_path
    if not path.exists():
        raise SourceMissing(f"{recipe.instance_id}: its recipe names the source {path}, which is not there")
    if source.kind == "directory":
        return ["directory", digest_of(path)]
    status = path.stat()
    return ["tree", str(path.resolve()), str(status.st_mtime_ns), str(status.st_ino)]


def files_of(directory: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files, links and directories below a directory in a fixed order, by relative path; no caches."""
    for here, subdirectories, files in os.walk(directory):
        subdirectories[:] = sorted(name for name in subdirectories if name not in _LEFT_OUT)
        for name in sorted([*subdirectories, *files]):
            path = Path(here, name)
            if name in _LEFT_OUT or path.suffix == ".pyc":
                continue
            yield str(path.relative_to(directory)), path


def digest_of(directory: Path) -> str:
    """Return the hex sha256 of the files below a directory: paths, modes as git has them, links, contents."""
    total = hashlib.sha256()
    for name, path in files_of(directory):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            row = b"l" + os.fsencode(path.readlink())
        elif stat.S_ISREG(mode):
            row = (b"x" if mode & 0o100 else b"f") + hashlib.sha256(path.read_bytes()).digest()
        elif stat.S_ISDIR(mode):
            continue
        else:
            raise InvalidRequest(f"{path} is neither a file, a directory nor a link")
        total.update(os.fsencode(name) + b"\0" + row + b"\0")
    return total.hexdigest()


def pack_directory(directory: Path, archive: Path, mtime_s: int) -> list[str]:
    """Write a tar of the files below a directory whose bytes depend on names, contents, links and modes only.

    Returns:
        Relative names of its files and links.
    """
    names = []
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as opened:
        for name, path in files_of(directory):
            info = tarfile.TarInfo(name)
            status = path.lstat()
            info.mtime = mtime_s
            if not stat.S_ISDIR(status.st_mode):
                names.append(name)
            if stat.S_ISLNK(status.st_mode):
                info.type, info.linkname, info.mode = tarfile.SYMTYPE, os.fspath(path.readlink()), 0o777
                opened.addfile(info)
            elif stat.S_ISDIR(status.st_mode):
                info.type, info.mode = tarfile.DIRTYPE, 0o755
                opened.addfile(info)
            else:
                info.mode, info.size = (0o755 if status.st_mode & 0o100 else 0o644), status.st_size
                with path.open("rb") as file:
                    opened.addfile(info, file)
    return names

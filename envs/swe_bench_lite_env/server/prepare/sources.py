"""Where the code of an instance comes from: what names it, and how a sandbox gets it."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from errata_protocol.errors import InvalidRequest

from ...dataset import Instance
from ...recipes import Recipe, Source
from .index import PackageIndex

FORMAT = 2
"""Raise it whenever the same recipe would be built into something else."""

MOUNT = "/source"
"""Where a sandbox has the directory of a `Fetched`."""

LEFT_OUT = (".git", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache")


class SourceMissing(InvalidRequest, LookupError):
    """The code of an instance is not at the place that its recipe names; the message has the next step."""


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
    if source.kind == "image":
        return ["image", source.name]
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
        subdirectories[:] = sorted(name for name in subdirectories if name not in LEFT_OUT)
        for name in sorted([*subdirectories, *files]):
            path = Path(here, name)
            if name in LEFT_OUT or path.suffix == ".pyc":
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


@dataclass(frozen=True, slots=True)
class Fetched:
    """A source that a sandbox can unpack.

    Args:
        directory: Directory that the sandbox mounts at `MOUNT`.
        command: Shell text that leaves the code in the current directory.
        words: Description of the source, for people.
        is_repository: Whether the code has its history until the repository of one commit is made.
    """

    directory: Path
    command: str
    words: str
    is_repository: bool = False


def fetch(
    instance: Instance, recipe: Recipe, *, index: PackageIndex, mirror: Path | None, work: Path, mtime_s: int
) -> Fetched:
    """Return the source of an instance.

    Args:
        instance: The instance.
        recipe: The recipe of the instance.
        index: Package index that source archives come from.
        mirror: Directory of git repositories; None if there is none.
        work: Directory for temporary files.
        mtime_s: Modification time of all files that are packed, in seconds since 1970.

    Raises:
        SourceMissing: It is not at the place that the recipe names.
        IndexFailed: The package index does not have it.
    """
    source = recipe.source
    place = work / "source"
    place.mkdir(mode=0o755, exist_ok=True)
    if source.kind == "sdist":
        archive = index.source_archive(source.name, source.version, source.sha256)
        shutil.copyfile(archive, place / archive.name)
        (place / archive.name).chmod(0o644)
        name = shlex.quote(f"{MOUNT}/{archive.name}")
        return Fetched(place, f"/usr/bin/python3 -I -S /setup/unpack.py {name} .", f"sdist {archive.name}")
    if source.kind == "git":
        return _from_mirror(instance, recipe, mirror)
    return pack_tree(recipe.source_path, work, mtime_s)


def pack_tree(directory: Path, work: Path, mtime_s: int) -> Fetched:
    """Return the files below a directory as a source.

    Args:
        directory: The directory.
        work: Directory for temporary files.
        mtime_s: Modification time of all of them.
    """
    place = work / "source"
    place.mkdir(mode=0o755, exist_ok=True)
    pack_directory(directory, place / "data.tar", mtime_s)
    (place / "data.tar").chmod(0o644)
    return Fetched(place, f"tar -xpf {MOUNT}/data.tar", f"directory {directory.name}")


def _from_mirror(instance: Instance, recipe: Recipe, mirror: Path | None) -> Fetched:
    repo = recipe.source.repo or instance.repo
    commit = recipe.source.commit or instance.base_commit
    if not commit:
        raise SourceMissing(f"{recipe.instance_id}: neither its row nor its recipe names the base commit")
    if mirror is None:
        raise SourceMissing(
            f"{recipe.instance_id} comes from a git mirror: name the directory with --mirror DIR; it holds bare "
            f"repositories as {' or '.join(mirror_names(repo))}"
        )
    directory = repository_in(mirror, repo)
    quoted = shlex.quote(commit)
    # The objects stay where they are. Tags that the commit descends from, because versions are made of them.
    command = f"""set -euo pipefail
git init --quiet --initial-branch=main --template= .
mkdir -p .git/objects/info
echo {MOUNT}/objects > .git/objects/info/alternates
git cat-file -e {quoted}^{{commit}} || exit 41
if [ -f {MOUNT}/shallow ]; then cp {MOUNT}/shallow .git/shallow; fi
git --git-dir={MOUNT} for-each-ref --merged {quoted} --format='create %(refname) %(objectname)' refs/tags \
    | git update-ref --stdin
git -c advice.detachedHead=false -c core.autocrlf=false checkout --quiet --detach {quoted}"""
    return Fetched(directory, command, f"git {repo} {commit}", is_repository=True)


def mirror_names(repo: str) -> tuple[str, ...]:
    """Return the names that a mirror may have for a repository ``owner/name``; each may end in ``.git``."""
    owner, _, name = repo.partition("/")
    return f"{owner}/{name}", f"{owner}__{name}", f"{owner}+{name}/repo"


def repository_in(mirror: Path, repo: str) -> Path:
    """Return the git directory of a repository in a mirror.

    Raises:
        SourceMissing: It is not there; the message names the places.
    """
    if not mirror.is_dir():
        raise SourceMissing(f"the mirror {mirror} is not a directory: it has to hold bare git repositories")
    for name in mirror_names(repo):
        for place in (mirror / name, mirror / f"{name}.git"):
            for directory in (place, place / ".git"):
                if (directory / "HEAD").is_file() and (directory / "objects").is_dir():
                    return directory.absolute()
    raise SourceMissing(
        f"the mirror {mirror} has no repository {repo}: `git clone --bare` it to {mirror / mirror_names(repo)[0]} (or "
        f"{', '.join(mirror_names(repo)[1:])})"
    )

"""Imports a base tree that was made elsewhere, for this machine and this user: ``errata base import``.

If the server is an ordinary user, that user owns every file of a base tree, and so does the agent, because an ordinary
user cannot give files to another one. The agent's rights are therefore expressed by the owner's bits of the mode, which
are set to those that the agent has in the original (usually the bits for others), and by a read-only mount. A file that
only root may read becomes an empty file that nobody may read; for the agent there is no difference.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import platform
import shutil
import stat
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from errata_protocol.errors import SandboxUnavailable
from errata_protocol.exception_text import text_of
from errata_protocol.names import member_path, shown
from errata_protocol.printable import printable

from .agent_modes import agent_mode
from .recipe import AGENT_DIRECTORIES, AGENT_UID, WORLD_WRITABLE
from .tree import (
    ARCHIVE_ERRORS,
    RECORD_BYTES,
    BaseTree,
    base_directories,
    check_name,
    locked,
    parse_record,
    publish,
    read_record,
)

_NEEDED = {"proc": 0o555, "dev": 0o755, "tmp": 0o1777, "workspace": 0o755}
"""Directories that a sandbox needs, with their modes; made if the source does not have them."""
_RECORD, _ROOT = "base.json", "root"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a source.

    Args:
        path: Path relative to the root of the tree.
        mode: File type and permissions.
        uid: Owner in the source; 64000 is the agent.
        gid: Group in the source.
        target: Target of a symlink; for a hard link, the path of the file's first name.
        is_link: It is a hard link.
        content: Opens the content of a regular file; returns None if it cannot be read.
    """

    path: PurePosixPath
    mode: int
    uid: int
    gid: int
    target: str = ""
    is_link: bool = False
    content: Callable[[], IO[bytes] | None] = lambda: None


def import_base(
    source: Path,
    name: str = "default",
    *,
    directory: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> BaseTree:
    """Copy a base tree into a directory of bases and let ``name`` refer to it.

    Args:
        source: A base tree (a directory with ``base.json``), any directory that can be ``/``, or a tar archive of
            either. A base tree keeps its id, so digests are equal to those on the original.
        name: Name to give it.
        directory: Directory of bases; default: the first of `base_directories`.
        progress: Called with one line for each stage.

    Raises:
        SandboxUnavailable: The source cannot be read or is not a system tree, or has the id of another tree; the
            message, one line, says what to do.
    """
    check_name(name)
    directory = (directory or base_directories()[0]).absolute()
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    started = time.monotonic()
    with locked(directory / f".{name}.lock", progress), publish(name, directory) as work:
        root = work / _ROOT
        root.mkdir(mode=0o755)
        progress(f"base tree {name}: copying {source}")
        with ExitStack() as opened:
            try:
                record, entries = _open(source, opened)
                unread, digest, writable = _unpack(entries, root)
            except ARCHIVE_ERRORS as error:
                why = printable(text_of(error), 300)
                raise SandboxUnavailable(
                    f"{shown(str(source))} cannot be imported ({why}): give a system's root directory, a "
                    f"directory with {_RECORD}, or a tar archive of one, readable by uid {os.geteuid()}"
                ) from error
        if not os.path.lexists(root / "bin/bash") and not os.path.lexists(root / "usr/bin/bash"):
            raise SandboxUnavailable(f"{source} has no /bin/bash: it must be a whole system tree")
        identity = record.get("id") or f"{name}-{digest[:16]}"
        content = f"sha256:{digest}"
        known = _known(directory, identity, content)
        record = known or {
            "format": _FORMAT,
            "digest": content,
            "recipe": "imported",
            "suite": "imported",
            "architecture": platform.machine(),
            **record,
            "id": identity,
            "content": content,
            "created": int(time.time()),
            "owner": os.geteuid(),
            "writable": writable,
        }
        (work / _RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if unread:
        progress(f"{unread} files that only their owner may read are empty here; an agent could not read them either")
    progress(f"base tree {identity} in {time.monotonic() - started:.0f} s")
    return BaseTree(name, directory / identity / _ROOT, identity, tuple(record.get("writable", writable)))


def _known(directory: Path, identity: str, content: str) -> dict[str, Any] | None:
    """Return the record of the tree that has an id already; None if there is none.

    Args:
        directory: Directory of bases.
        identity: The id.
        content: Digest of the tree that is imported.

    Raises:
        SandboxUnavailable: The tree has other files, so that sessions on it would continue on something else.
    """
    place = directory / identity
    if not os.path.lexists(place):
        return None
    record = None if place.is_symlink() else read_record(place)
    if record is not None and record["id"] == identity:
        # The digest of a derived tree is one of what it was made from.
        derived = "content" not in record and record.get("recipe") == "derived"
        there = f"sha256:{_content(place / _ROOT)}" if derived else record.get("content", record.get("digest"))
        if there == content:
            return record
    raise SandboxUnavailable(
        f"the id {identity!r} in {directory} is another tree's, with other files: import this one without its "
        f"{_RECORD}, or into another directory with --directory"
    )


def _content(root: Path) -> str:
    """Return the digest of a tree's files, as `_unpack` computes it."""
    rows: dict[PurePosixPath, bytes] = {}
    for entry in _from_directory(root):
        rows[entry.path] = rows[PurePosixPath(entry.target)] if entry.is_link else _row(entry)
    return _digest(rows)


def _row(entry: Entry) -> bytes:
    """Return what the digest of a tree has of an entry that is no hard link."""
    row = b"%o %d %d " % (entry.mode & ~(stat.S_ISUID | stat.S_ISGID), entry.uid, entry.gid)
    if stat.S_ISLNK(entry.mode):
        return row + os.fsencode(entry.target)
    if not stat.S_ISREG(entry.mode):
        return row
    total = hashlib.sha256()
    with entry.content() or io.BytesIO() as file:
        while data := file.read(1 << 20):
            total.update(data)
    return row + total.digest()


_COMPRESSED = {b"\x1f\x8b": "r:gz", b"BZh": "r:bz2", b"\xfd7zXZ\x00": "r:xz"}
"""Modes of `tarfile` by what a compressed archive begins with."""


def _open(source: Path, opened: ExitStack) -> tuple[dict[str, Any], Iterator[Entry]]:
    """Return the ``base.json`` of a source, empty if it has none, and its entries."""
    if source.is_dir():
        record = read_record(source) or {}
        root = source / _ROOT if record else source
        if record and root.is_symlink():
            raise OSError(errno.ELOOP, f"its {_ROOT} is a symlink")
        return record, _from_directory(root)
    if not source.is_file():
        raise OSError(errno.EINVAL, "it is neither a directory nor a file" if source.exists() else "it is not there")
    archive = opened.enter_context(tarfile.open(source, _mode(source)))  # type: ignore[call-overload]  # noqa: SIM115
    found = [member for member in archive.getmembers() if member_path(member.name) == PurePosixPath(_RECORD)]
    if not found:
        return {}, _from_archive(archive, "")
    if len(found) > 1 or not found[0].isreg() or found[0].issparse():
        raise ValueError(f"it has more than one {_RECORD}, or one that is no regular file")
    file = archive.extractfile(found[0])
    assert file is not None
    return parse_record(file.read(RECORD_BYTES + 1)), _from_archive(archive, _ROOT)


def _mode(archive: Path) -> str:
    """Return how `tarfile` opens an archive. By itself it would try every decompressor on all of a large file."""
    with archive.open("rb") as file:
        head = file.read(6)
    return next((mode for magic, mode in _COMPRESSED.items() if head.startswith(magic)), "r:")


def _from_directory(root: Path) -> Iterator[Entry]:
    """Yield the entries of a directory tree without its root, parents first.

    Symlinks are not followed. Of the names of a hard-linked file, the first has its content and the others are links
    to it. A directory that this user may not list is yielded as an empty one.

    Raises:
        PermissionError: This user may not list the root.
    """
    first_names: dict[tuple[int, int], str] = {}
    todo = [PurePosixPath()]
    while todo:
        parent = todo.pop()
        try:
            children = sorted((root / parent).iterdir())
        except PermissionError:
            if parent == PurePosixPath():
                raise
            continue  # this user may not list it: it stays an empty directory
        for child in children:
            info, path = child.lstat(), parent / child.name
            owner = (info.st_mode, info.st_uid, info.st_gid)
            key = (info.st_dev, info.st_ino)
            if stat.S_ISDIR(info.st_mode):
                todo.append(path)
                yield Entry(path, *owner)
            elif stat.S_ISLNK(info.st_mode):
                yield Entry(path, *owner, target=os.fspath(child.readlink()))
            elif key in first_names:
                yield Entry(path, *owner, target=first_names[key], is_link=True)
            else:
                if info.st_nlink > 1:
                    first_names[key] = str(path)
                yield Entry(path, *owner, content=lambda child=child: _readable(child))  # type: ignore[misc]


def _readable(path: Path) -> IO[bytes] | None:
    """Open a regular file for reading; return None if this user may not read it."""
    try:
        # what was a file when the directory was listed may be a symlink or a pipe by now
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except PermissionError:
        return None


def _from_archive(archive: tarfile.TarFile, prefix: str) -> Iterator[Entry]:
    """Yield the directories, files and links of a tar archive below ``prefix``; devices and FIFOs are skipped."""
    kinds = {tarfile.DIRTYPE: stat.S_IFDIR, tarfile.SYMTYPE: stat.S_IFLNK}
    for member in archive:
        path = _inside(member.name, prefix)
        if path is None:
            continue
        is_link = member.islnk()
        if not (member.isreg() or member.isdir() or member.issym() or is_link):
            continue  # devices, pipes: a sandbox has its own
        target = member.linkname if member.issym() else ""
        if is_link:
            first = _inside(member.linkname, prefix)
            if first is None:
                raise OSError(errno.EINVAL, "the archive has a hard link to something outside", str(path))
            target = str(first)
        owner = (kinds.get(member.type, stat.S_IFREG) | member.mode & 0o7777, member.uid, member.gid)
        yield Entry(path, *owner, target, is_link, lambda member=member: archive.extractfile(member))  # type: ignore[misc]


def _inside(name: str, prefix: str) -> PurePosixPath | None:
    """Return a member's path relative to ``prefix``; None for ``prefix`` itself and for members outside of it.

    Raises:
        InvalidName: It is no path below the archive's root.
    """
    path = member_path(name)
    if prefix:
        if path.parts[:1] != (prefix,):
            return None
        path = path.relative_to(prefix)
    return None if path == PurePosixPath() else path


def _unpack(entries: Iterator[Entry], root: Path) -> tuple[int, str, list[str]]:
    """Write the entries below ``root``.

    Returns:
        The number of files that could not be read, the digest of the original, and the directories that the agent may
        write.

    Raises:
        ARCHIVE_ERRORS: The source cannot be read, or an entry is where another one is, or behind a symlink.
    """
    is_root = os.geteuid() == 0
    rows: dict[PurePosixPath, bytes] = {}
    modes: dict[PurePosixPath, tuple[int, int, int]] = {}
    unread = 0
    for entry in entries:
        place = _place(root, entry.path)
        kind, mode = stat.S_IFMT(entry.mode), entry.mode & ~(stat.S_ISUID | stat.S_ISGID)
        row = b"%o %d %d " % (mode, entry.uid, entry.gid)
        if entry.is_link:
            first = PurePosixPath(entry.target)
            if first not in rows or (first in modes and stat.S_ISDIR(modes[first][0])):
                raise OSError(errno.EINVAL, "the archive has a hard link to what is no earlier file", str(first))
            place.hardlink_to(_place(root, first))
            rows[entry.path] = rows[first]
            continue
        if kind == stat.S_IFLNK:
            place.symlink_to(entry.target)
            rows[entry.path] = row + os.fsencode(entry.target)
            if is_root:
                os.chown(place, entry.uid, entry.gid, follow_symlinks=False)
            continue
        if kind == stat.S_IFDIR:
            # `exist_ok` would take a symlink to a directory, whose owner and mode would be changed below
            if not (place.is_dir() and not place.is_symlink()):
                place.mkdir(mode=0o700)
        elif kind == stat.S_IFREG:
            content = entry.content()
            with place.open("xb") as file:
                if content is None:
                    unread += 1
                    mode &= ~0o777
                else:
                    with content:
                        shutil.copyfileobj(content, file)
            with place.open("rb") as file:
                row += hashlib.file_digest(file, "sha256").digest()
        else:
            continue  # devices, sockets and pipes
        rows[entry.path] = row
        modes[entry.path] = mode, entry.uid, entry.gid
    for path in {parent for row in rows for parent in row.parents} - {PurePosixPath()}:
        modes.setdefault(path, (stat.S_IFDIR | 0o755, 0, 0))  # an archive need not name every directory
    for missing, mode in _NEEDED.items():
        path = PurePosixPath(missing)
        if not os.path.lexists(root / missing):
            (root / missing).mkdir(mode=0o700)
            modes[path] = stat.S_IFDIR | mode, AGENT_UID if missing == "workspace" else 0, 0
    for path in sorted(
        modes, key=lambda path: len(path.parts), reverse=True
    ):  # children first: a mode may deny access to them
        mode, uid, gid = modes[path]
        if (root / path).is_symlink():
            raise OSError(errno.ELOOP, "a symlink is where a file or directory was made", str(path))
        if is_root:
            os.chown(root / path, uid, gid, follow_symlinks=False)
        (root / path).chmod(stat.S_IMODE(mode if is_root else agent_mode(mode, uid, gid)))
    return unread, _digest(rows), _writable(modes)


def _place(root: Path, path: PurePosixPath) -> Path:
    """Make the parents of ``path`` below ``root`` and return its absolute path.

    Raises:
        OSError: ELOOP: the path leads through a symlink, which could lead out of the tree.
    """
    place = root
    for part in path.parts[:-1]:
        place = place / part
        if place.is_symlink():
            raise OSError(errno.ELOOP, "the archive leads through a symlink", str(path))
        place.mkdir(mode=0o700, exist_ok=True)
    return root / path


def _digest(rows: dict[PurePosixPath, bytes]) -> str:
    """Return the digest that `recipe.content_digest` computes for the original, from the attributes of its entries."""
    children: dict[PurePosixPath, list[PurePosixPath]] = {}
    for path in rows:
        children.setdefault(path.parent, []).append(path)
    total = hashlib.sha256()
    todo = [PurePosixPath()]
    while todo:
        here = sorted(children.get(todo.pop(), ()), key=lambda path: path.name)
        for path in here:
            total.update(os.fsencode(path) + b"\0" + rows[path] + b"\0")
        todo.extend(reversed([path for path in here if path in children]))
    return total.hexdigest()


def _writable(modes: dict[PurePosixPath, tuple[int, int, int]]) -> list[str]:
    """Return the directories that the agent owns with write permission or that are world-writable, topmost only.

    Groups are ignored. Those of the image recipe (``workspace``, ``home/agent``, ``tmp``, ``var/tmp``) come first.

    Args:
        modes: Mode, uid and gid of each path.
    """
    found: list[str] = []
    for path in sorted(modes):
        mode, uid, _ = modes[path]
        is_agents = (uid == AGENT_UID and mode & stat.S_IWUSR) or mode & stat.S_IWOTH
        if stat.S_ISDIR(mode) and is_agents and not any(str(parent) in found for parent in path.parents):
            found.append(str(path))
    expected = (*AGENT_DIRECTORIES, *WORLD_WRITABLE)
    return sorted(found, key=lambda name: (name not in expected, name))

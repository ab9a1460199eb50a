"""Makes a base tree from another one plus tar archives.

The common files are hard links, so the new tree uses disk space for the archives' files only.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from errata_protocol.errors import SandboxUnavailable
from errata_protocol.names import BASE_ID, member_path

from ..files import as_owner
from ..files.walk import remove_tree
from .agent_modes import agent_mode
from .tree import ARCHIVE_ERRORS, BaseTree, base_directories, check_name, check_owner, locked, publish, read_record

_FORMAT = 1
_RECORD, _ROOT = "base.json", "root"
_COPIED = (errno.EXDEV, errno.EMLINK, errno.EPERM)
"""Errors of link(2) after which a file is copied: another file system, too many links, fs.protected_hardlinks."""


def derived_id(base: BaseTree, name: str, archives: Sequence[Path], without: Sequence[str] = ()) -> str:
    """Return the id of the tree that `derive_base` makes from the same arguments; reads the archives."""
    total = hashlib.sha256("\0".join((str(_FORMAT), base.id, *without, "")).encode())
    for archive in archives:
        with archive.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return f"{name}-{total.hexdigest()[:16]}"


def derive_base(
    base: BaseTree,
    name: str,
    archives: Sequence[Path],
    *,
    without: Sequence[str] = (),
    directory: Path | None = None,
    about: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> BaseTree:
    """Make a base tree with the files of another one and of tar archives, or return it if it exists.

    Directories, files, symlinks and hard links of the archives replace those of the base tree. Root owns all of them,
    without set-uid bits. An archive cannot write through a symlink of the tree.

    Args:
        base: The tree to start from.
        name: Name of the new tree; its id begins with it.
        archives: Tar archives, unpacked in this order.
        without: Paths in ``base``, relative to its root, that are left out with what is below them.
        directory: Directory of bases; None for the first of `base_directories`.
        about: Further entries for its ``base.json``.
        progress: Called with a message if it has to wait for another process.

    Raises:
        SandboxUnavailable: An archive cannot be unpacked, or the disk is full.
    """
    check_name(name)
    directory = (directory or base_directories()[0]).absolute()
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    if os.geteuid() != 0:
        check_owner(base)
    with locked(directory / f".{name}.lock", progress):
        identity = derived_id(base, name, archives, without)
        if read_record(directory / identity) is not None:
            return BaseTree(name, directory / identity / _ROOT, identity, base.writable)
        with publish(name, directory) as work:
            root = work / _ROOT
            try:
                directories = _link_tree(base.root, root, without)
                added = sum(_unpack(archive, root, directories) for archive in archives)
                _close(directories)
            except ARCHIVE_ERRORS as error:
                raise SandboxUnavailable(f"base tree {name} could not be made in {directory}: {error}") from error
            origin = read_record(base.root.parent) or {}
            record = {
                "format": 1,
                "id": identity,
                "digest": f"sha256:{identity.rpartition('-')[2]}",
                "recipe": "derived",
                "suite": origin.get("suite", "unknown"),
                "architecture": origin.get("architecture", os.uname().machine),
                "from": base.id,
                "created": int(time.time()),
                "added_bytes": added,
                "owner": os.geteuid(),
                "writable": list(base.writable),
                **(about or {}),
            }
            (work / _RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return BaseTree(name, directory / identity / _ROOT, identity, base.writable)


def remove_base(identity: str, directory: Path | None = None) -> bool:
    """Delete a tree and the links to it; return False, and delete nothing, while a process has it in `using`."""
    directory = (directory or base_directories()[0]).absolute()
    check_name(identity, BASE_ID)
    with _claim(directory / f".{identity}.use", exclusive=True) as free:
        if not free:
            return False
        for link in directory.iterdir():
            if link.is_symlink() and os.fspath(link.readlink()) == identity:
                link.unlink()
        removed = directory / f".{identity}.removed"
        if (directory / identity).is_dir():
            (directory / identity).rename(removed)
        if removed.is_dir():
            as_owner.call(remove_tree, removed)
        (directory / f".{identity}.use").unlink(missing_ok=True)
        return True


@contextmanager
def using(identity: str, directory: Path | None = None) -> Iterator[None]:
    """Keep `remove_base` of any process from deleting a tree, by a shared lock; a no-op if the tree is elsewhere."""
    check_name(identity, BASE_ID)
    directory = (directory or base_directories()[0]).absolute()
    if not (directory / identity).is_dir():
        yield
        return
    with _claim(directory / f".{identity}.use", exclusive=False):
        yield


@contextmanager
def _claim(path: Path, *, exclusive: bool) -> Iterator[bool]:
    """Hold a lock on a file and yield True; yield False at once if an exclusive lock is not available.

    A shared lock in a directory that this user may not write is not taken, because such a user can remove nothing.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES) and not exclusive:
            yield True  # this user can remove nothing there either
            return
        raise
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if exclusive else fcntl.LOCK_SH)
    except BlockingIOError:
        os.close(descriptor)
        yield False
        return
    try:
        yield True
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class _Directory:
    """The final mode, owner and times (access and modification, ns) of a directory."""

    mode: int
    uid: int
    gid: int
    times: tuple[int, int]


def _link_tree(source: Path, target: Path, without: Sequence[str]) -> dict[Path, _Directory]:
    """Make a copy of a directory tree whose files are hard links to the source's.

    Returns:
        Its directories, which have mode 0o700 until `_close`, with their final attributes.
    """
    names: dict[tuple[int, int], Path] = {}
    directories: dict[Path, _Directory] = {}
    todo = [(source, target)]
    left_out = {f"{source}/{path}" for path in without}
    while todo:
        here, there = todo.pop()
        there.mkdir(mode=0o700)
        status = here.lstat()
        times = status.st_atime_ns, status.st_mtime_ns
        directories[there] = _Directory(stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, times)
        try:
            entries = list(os.scandir(here))
        except PermissionError:
            if here == source:
                raise
            continue  # in rootless mode, a directory that the agent may not read, which is empty
        for entry in entries:
            if entry.path in left_out:
                continue
            place = there / entry.name
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                todo.append((Path(entry.path), place))
            elif stat.S_ISLNK(status.st_mode):
                place.symlink_to(Path(entry.path).readlink())
                _same_owner(place, status)
                os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)
            elif stat.S_ISREG(status.st_mode):
                _link(Path(entry.path), place, status, names)
    return directories


def _close(directories: Mapping[Path, _Directory]) -> None:
    """Set the owners, modes and times of directories, children before their parents."""
    for place, wanted in sorted(directories.items(), key=lambda item: len(item[0].parts), reverse=True):
        if os.geteuid() == 0:
            os.chown(place, wanted.uid, wanted.gid)
        place.chmod(wanted.mode)
        os.utime(place, ns=wanted.times)


def _link(source: Path, place: Path, status: os.stat_result, names: dict[tuple[int, int], Path]) -> None:
    """Make a hard link to a file, or a copy with its owner, mode and times if that fails with an errno in `_COPIED`.

    ``names`` has the copies of files with several names, by device and inode; further names are links to the copy.
    """
    try:
        place.hardlink_to(source)
        return
    except OSError as error:
        if error.errno not in _COPIED:
            raise
    key = (status.st_dev, status.st_ino)
    if key in names:
        place.hardlink_to(names[key])
        return
    shutil.copyfile(source, place, follow_symlinks=False)
    _same_owner(place, status)
    place.chmod(stat.S_IMODE(status.st_mode))
    os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns))
    if status.st_nlink > 1:
        names[key] = place


def _same_owner(place: Path, status: os.stat_result) -> None:
    if os.geteuid() == 0:
        os.chown(place, status.st_uid, status.st_gid, follow_symlinks=False)


def _unpack(archive: Path, root: Path, directories: dict[Path, _Directory]) -> int:
    """Write the directories, files and links of an archive below ``root``; return the size of its files in bytes.

    A file or symlink in the tree is replaced, an existing directory stays; devices and FIFOs are skipped.

    Raises:
        ARCHIVE_ERRORS: The archive cannot be read, has a directory where the tree has something else, or a path that
            leads out of the tree.
    """
    added = 0
    with tarfile.open(archive) as opened:
        for member in opened:
            path = member_path(member.name)
            if path == PurePosixPath():
                continue
            place = _place(root, path, directories)
            if member.isdir():
                if place.is_symlink() or (place.exists() and not place.is_dir()):
                    raise OSError(errno.ENOTDIR, "the tree has something else there", str(path))
                _make(place, directories, int(member.mtime))
                continue
            if os.path.lexists(place):
                place.unlink()  # it is a hard link to the base tree's file, which must not change
            if member.issym():
                place.symlink_to(member.linkname)
                os.utime(place, (member.mtime, member.mtime), follow_symlinks=False)
            elif member.islnk():
                place.hardlink_to(_place(root, member_path(member.linkname), directories))
            elif member.isreg():
                content = opened.extractfile(member)
                assert content is not None
                with content, place.open("xb") as file:
                    shutil.copyfileobj(content, file, 1024**2)
                place.chmod(_mode(0o755 if member.mode & 0o100 else 0o644))
                os.utime(place, (member.mtime, member.mtime))
                added += member.size
    return added


def _make(place: Path, directories: dict[Path, _Directory], mtime_s: int) -> None:
    """Make a directory with mode 0o700 unless it exists, and record its final attributes."""
    if place not in directories:
        place.mkdir(mode=0o700)
        moment = mtime_s * 10**9
        directories[place] = _Directory(_mode(0o755), os.geteuid(), os.getegid(), (moment, moment))


def _mode(mode: int) -> int:
    """Return the mode for a file of root: unchanged if this process is root, else by `agent_mode`."""
    return mode if os.geteuid() == 0 else agent_mode(mode, 0, 0)


def _place(root: Path, path: PurePosixPath, directories: dict[Path, _Directory]) -> Path:
    """Make the parents of ``path`` below ``root`` and return its absolute path.

    A symlink in the tree's top level (``/lib`` is ``usr/lib``) is followed within the tree.

    Raises:
        OSError: ELOOP: the path leads through another symlink, which could lead out of the tree.
    """
    parts = list(path.parts)
    top = root / parts[0]
    if len(parts) > 1 and top.is_symlink():
        target = PurePosixPath(os.fspath(top.readlink()))
        parts[:1] = (target.relative_to("/") if target.is_absolute() else target).parts
        if ".." in parts:
            raise OSError(errno.ELOOP, "the archive leads through a symlink", str(path))
    place = root
    for part in parts[:-1]:
        place = place / part
        if place.is_symlink():
            raise OSError(errno.ELOOP, "the archive leads through a symlink", str(path))
        _make(place, directories, 0)
    return place / parts[-1]

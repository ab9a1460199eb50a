"""Walks, counts and removes trees that an agent made: any depth, any bytes in a name, no symlink followed.

A path of 3,000 nested directories is longer than the kernel takes, so every step is relative to a directory descriptor;
only one is held at a time, and the way back up is ``..``, checked against what was there on the way down.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_OPEN_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TreeChanged(OSError):
    """A directory moved while it was walked; only a walk beside a running command meets this."""


@dataclass(frozen=True, slots=True)
class Visit:
    """One entry, valid until the walk goes on.

    Args:
        depth: 1 for the entries of the root.
        name: Name in its directory.
        info: Its lstat.
        dir_fd: Descriptor of its directory.
        leaving: A directory after its entries; False when it is met first.
    """

    depth: int
    name: str
    info: os.stat_result
    dir_fd: int
    leaving: bool = False

    @property
    def is_dir(self) -> bool:
        """The entry is a directory."""
        return stat.S_ISDIR(self.info.st_mode)


def walk(root: Path | str, *, leaving: bool = False, missing_ok: bool = False) -> Iterator[Visit]:
    """Yield every entry below ``root``, a directory before its entries, names in byte order.

    Args:
        root: A directory.
        leaving: Yield directories a second time, after their entries.
        missing_ok: Entries that vanish meanwhile are passed over.

    Raises:
        TreeChanged: A directory was moved away below the walk.
        OSError: The tree cannot be read.
    """
    fd = os.open(root, _OPEN_DIR)
    above: list[tuple[str, os.stat_result, int, int]] = []  # name and lstat of each directory, device and inode above
    todo: list[list[str]] = [_names(fd)]
    try:
        while True:
            if todo[-1]:
                name = todo[-1].pop()
                try:
                    info = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    yield Visit(len(todo), name, info, fd)
                    if not stat.S_ISDIR(info.st_mode):
                        continue
                    here = os.fstat(fd)
                    below = os.open(name, _OPEN_DIR, dir_fd=fd)
                except (FileNotFoundError, NotADirectoryError):
                    if missing_ok:
                        continue
                    raise
                os.close(fd)
                fd = below
                above.append((name, info, here.st_dev, here.st_ino))
                todo.append(_names(fd))
                continue
            todo.pop()
            if not above:
                return
            name, info, device, inode = above.pop()
            up = os.open("..", _OPEN_DIR, dir_fd=fd)
            os.close(fd)
            fd = up
            back = os.fstat(fd)
            if (back.st_dev, back.st_ino) != (device, inode):
                raise TreeChanged(f"directory {name!r} moved while it was walked")
            if leaving:
                yield Visit(len(todo), name, info, fd, True)
    finally:
        os.close(fd)


def _names(fd: int) -> list[str]:
    return sorted(os.listdir(fd), key=os.fsencode, reverse=True)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tree holds.

    Args:
        entries: Files, directories and everything else.
        size_bytes: Blocks on disk, holes of files included; a file with several names counts once.
        whiteouts: Removed entries: no use of the disk, but a walk meets each.
        allocated_bytes: Blocks on disk, holes left out.
    """

    entries: int = 0
    size_bytes: int = 0
    whiteouts: int = 0
    allocated_bytes: int = 0


def usage(root: Path | str, *, max_entries: int, max_bytes: int, max_whiteouts: int | None = None) -> Usage:
    """Count a tree, beside a running command too; stops when a bound is passed.

    Args:
        root: A directory.
        max_entries: Bound on entries.
        max_bytes: Bound on bytes.
        max_whiteouts: Bound on whiteouts; None for no bound.
    """
    entries = size = whiteouts = allocated = 0
    linked: set[int] = set()
    try:
        for visit in walk(root, missing_ok=True):
            info = visit.info
            if stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
                whiteouts += 1  # removing files is no use of the disk, and is bounded by what was there
                if max_whiteouts is not None and whiteouts > max_whiteouts:
                    break
                continue
            entries += 1
            if info.st_nlink > 1 and not visit.is_dir:
                if info.st_ino in linked:
                    continue
                linked.add(info.st_ino)
            # A hole is not on the disk, but whoever reads the file reads it all, the digest of a snapshot first of all.
            allocated += info.st_blocks * 512
            size += max(info.st_blocks * 512, info.st_size if stat.S_ISREG(info.st_mode) else 0)
            if entries > max_entries or size > max_bytes:
                break
    except TreeChanged:
        pass  # a lower bound is enough for a poll; the count after the command meets no other process
    return Usage(entries, size, whiteouts, allocated)


def remove_tree(root: Path) -> Usage:
    """Delete ``root`` and everything below it; return what that was. A missing root is nothing to delete."""
    entries = size = 0
    try:
        for visit in walk(root, leaving=True):
            if visit.leaving:
                entries += 1
                size += visit.info.st_blocks * 512
                os.rmdir(visit.name, dir_fd=visit.dir_fd)
            elif not visit.is_dir:
                entries += 1
                size += visit.info.st_blocks * 512 if visit.info.st_nlink == 1 else 0
                os.unlink(visit.name, dir_fd=visit.dir_fd)
        root.rmdir()
    except FileNotFoundError:
        pass
    return Usage(entries, size, 0, size)

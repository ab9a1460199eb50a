"""Walks, counts and removes trees that an agent made: of any depth, with any bytes in names, following no symlink.

A path of 3,000 nested directories is longer than the kernel allows, so every step is relative to a directory
descriptor. Only one is open at a time; the walk returns to a parent by ``..`` and checks that it is the same directory.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

_OPEN_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TreeChanged(OSError):
    """A directory was moved during a walk; this happens only while a command is running."""


@dataclass(frozen=True, slots=True)
class Visit:
    """One entry of a walk, valid until the next one is requested.

    Args:
        depth: 1 for the entries of the root.
        name: Name in its directory.
        info: Result of lstat(2).
        dir_fd: Descriptor of its directory.
        leaving: It is a directory that is yielded the second time, after its entries.
    """

    depth: int
    name: str
    info: os.stat_result
    dir_fd: int
    leaving: bool = False

    @property
    def is_dir(self) -> bool:
        """Whether the entry is a directory."""
        return stat.S_ISDIR(self.info.st_mode)


def walk(
    root: Path | str, *, leaving: bool = False, missing_ok: bool = False, most_names: int | None = None
) -> Iterator[Visit]:
    """Yield every entry below ``root``, a directory before its entries, names in byte order.

    Args:
        root: A directory.
        leaving: Yield directories a second time, after their entries.
        missing_ok: Skip entries that are removed during the walk.
        most_names: Most names that are read of each directory, which ones is not defined; None for all.

    Raises:
        TreeChanged: A directory was moved during the walk.
        OSError: The tree cannot be read.
    """
    fd = os.open(root, _OPEN_DIR)
    above: list[tuple[str, os.stat_result, int, int]] = []  # name and lstat of each directory, device and inode above
    todo: list[list[str]] = [_names(fd, most_names)]
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
                todo.append(_names(fd, most_names))
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


def _names(fd: int, most: int | None) -> list[str]:
    with os.scandir(fd) as entries:
        return sorted((entry.name for entry in islice(entries, most)), key=os.fsencode, reverse=True)


@dataclass(frozen=True, slots=True)
class Usage:
    """The size of a tree.

    Args:
        entries: Entries of every type except whiteouts.
        size_bytes: The greater of length and disk space of each file, so holes count; a file with several names counts
            once.
        whiteouts: Whiteouts (removed entries), which use no disk space but cost a walk time.
        allocated_bytes: Disk space, without holes.
    """

    entries: int = 0
    size_bytes: int = 0
    whiteouts: int = 0
    allocated_bytes: int = 0


def usage(root: Path | str, *, max_entries: int, max_bytes: int, max_whiteouts: int | None = None) -> Usage:
    """Count a tree, which a command may be changing; stop early, with what was counted, once a bound is exceeded.

    Args:
        root: A directory.
        max_entries: Bound on entries.
        max_bytes: Bound on `Usage.size_bytes`.
        max_whiteouts: Bound on whiteouts; None for no bound.

    Raises:
        OSError: The tree cannot be read. A directory that is moved during the walk ends the count without an error.
    """
    entries = size = whiteouts = allocated = 0
    linked: set[int] = set()
    try:
        # A directory with more names than that exceeds one of the bounds, whatever they stand for.
        most_names = None if max_whiteouts is None else max_entries + max_whiteouts + 2
        for visit in walk(root, missing_ok=True, most_names=most_names):
            info = visit.info
            if stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
                whiteouts += 1  # they use no disk space, and their number is bounded by that of the files
                if max_whiteouts is not None and whiteouts > max_whiteouts:
                    break
                continue
            entries += 1
            if info.st_nlink > 1 and not visit.is_dir:
                if info.st_ino in linked:
                    continue
                linked.add(info.st_ino)
            # A hole uses no disk space, but reading the file costs its whole length, as for the digest of a snapshot.
            allocated += info.st_blocks * 512
            size += max(info.st_blocks * 512, info.st_size if stat.S_ISREG(info.st_mode) else 0)
            if entries > max_entries or size > max_bytes:
                break
    except TreeChanged:
        pass  # a lower bound is enough while a command runs; the count after it has no such race
    return Usage(entries, size, whiteouts, allocated)


def remove_tree(root: Path) -> Usage:
    """Delete ``root`` and everything below it; return its size. If ``root`` does not exist, do nothing."""
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

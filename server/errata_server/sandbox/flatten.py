"""Many layers as one directory that an overlay can mount: hard links to the frozen files."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from .treewalk import Visit, remove_tree, walk

_OPAQUE = "trusted.overlay.opaque"


def flatten(layers: Sequence[Path], target: Path, scratch: Path) -> None:
    """Lay ``layers`` over each other in ``target``.

    Whiteouts and opaque marks stay, because the base tree still lies below. The layers do not change: their files get
    one more name.

    Args:
        layers: Directories with overlay upper layers, oldest first.
        target: Directory to make.
        scratch: Name for trees being removed, on the same file system.

    Raises:
        OSError: The disk is full or broken.
    """
    target.mkdir(mode=0o755)
    for layer in layers:
        _lay_over(layer, target, scratch)


def _lay_over(layer: Path, target: Path, scratch: Path) -> None:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    # The walk of the layer moves one directory at a time; a second descriptor follows it through the target.
    fd = os.open(target, flags)
    try:
        for visit in walk(layer, leaving=True):
            if visit.leaving:
                up = os.open("..", flags, dir_fd=fd)
                os.close(fd)
                fd = up
            elif visit.is_dir:
                _enter_dir(visit, fd, scratch)
                below = os.open(visit.name, flags, dir_fd=fd)
                os.close(fd)
                fd = below
            else:
                _clear(visit.name, fd, scratch)
                _link(visit, fd)
    finally:
        os.close(fd)


def _enter_dir(visit: Visit, fd: int, scratch: Path) -> None:
    """Make sure that the target has this directory, with the attributes of the newest layer."""
    source = os.open(visit.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=visit.dir_fd)
    try:
        marks = {name: os.getxattr(source, name) for name in os.listxattr(source)}
        try:
            there = os.stat(visit.name, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            there = None
        if there is not None and (not stat.S_ISDIR(there.st_mode) or _OPAQUE in marks):
            _clear(visit.name, fd, scratch)
            if not stat.S_ISDIR(there.st_mode):
                marks.setdefault(_OPAQUE, b"y")
            there = None
        if there is None:
            os.mkdir(visit.name, 0o700, dir_fd=fd)
        made = os.open(visit.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
        try:
            for name, value in marks.items():
                if name == _OPAQUE or not name.startswith("trusted.overlay."):
                    os.setxattr(made, name, value)
            os.fchown(made, visit.info.st_uid, visit.info.st_gid)
            os.fchmod(made, visit.info.st_mode & 0o7777)
            os.utime(made, ns=(visit.info.st_atime_ns, visit.info.st_mtime_ns))
        finally:
            os.close(made)
    finally:
        os.close(source)


def _clear(name: str, fd: int, scratch: Path) -> None:
    """Remove an entry of the target, whatever it is."""
    try:
        if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=fd)
            return
    except FileNotFoundError:
        return
    os.rename(name, scratch, src_dir_fd=fd)
    remove_tree(scratch)


def _link(visit: Visit, fd: int) -> None:
    try:
        os.link(visit.name, visit.name, src_dir_fd=visit.dir_fd, dst_dir_fd=fd, follow_symlinks=False)
    except OSError as error:
        # A file system bounds the names of one file (ext4: 65,000); a copy then starts a new count.
        if error.errno != errno.EMLINK or not stat.S_ISREG(visit.info.st_mode):
            raise
        read_flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        write_flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with (
            os.fdopen(os.open(visit.name, read_flags, dir_fd=visit.dir_fd), "rb") as source,
            os.fdopen(os.open(visit.name, write_flags, 0o600, dir_fd=fd), "wb") as copy,
        ):
            shutil.copyfileobj(source, copy)
            os.fchown(copy.fileno(), visit.info.st_uid, visit.info.st_gid)
            os.fchmod(copy.fileno(), visit.info.st_mode & 0o7777)

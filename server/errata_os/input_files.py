"""Opens files that another party made: regular files only, read up to a limit."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from errata_protocol.errors import InvalidRequest

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
}
_PART_BYTES = 1024**2


class FileRefused(InvalidRequest):
    """A file that is not read: it is not a regular file, or too large."""


def kind_of(mode: int) -> str:
    """Return what a file is that is not a regular one, such as ``a FIFO``, by its ``st_mode``."""
    return _KINDS.get(stat.S_IFMT(mode), "a special file")


def open_regular(path: Path, *, follow: bool = True) -> BinaryIO:
    """Open a regular file for reading.

    Anything else is refused without opening it: reading from a FIFO waits for a writer, and opening a device can change
    its state.

    Args:
        path: The file.
        follow: Whether the path may be a symbolic link to a regular file.

    Raises:
        FileRefused: It is not a regular file.
        OSError: It cannot be opened.
    """
    _demand_regular(path, (path.stat() if follow else path.lstat()).st_mode)
    # It may be another file by now: then O_NONBLOCK keeps the call from waiting, and what was opened is looked at.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW))
    try:
        _demand_regular(path, os.fstat(fd).st_mode)
    except FileRefused:
        os.close(fd)
        raise
    return os.fdopen(fd, "rb")


def read_file(path: Path, limit_bytes: int, *, follow: bool = True) -> bytes:
    """Return the content of a regular file.

    Args:
        path: The file.
        limit_bytes: Largest size, bytes.
        follow: Whether the path may be a symbolic link to a regular file.

    Raises:
        FileRefused: It is not a regular file, or larger.
        OSError: It cannot be read.
    """
    content = bytearray()
    with open_regular(path, follow=follow) as file:
        if os.fstat(file.fileno()).st_size > limit_bytes:
            raise _too_large(path, limit_bytes)
        while len(content) <= limit_bytes and (part := file.read(_PART_BYTES)):
            content += part
    if len(content) > limit_bytes:  # it grew, or is one of a file system that tells no sizes
        raise _too_large(path, limit_bytes)
    return bytes(content)


def _too_large(path: Path, limit_bytes: int) -> FileRefused:
    return FileRefused(f"{path} is larger than {limit_bytes:,} bytes, the most that is read of such a file")


def _demand_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise FileRefused(f"{path} is {kind_of(mode)}: it has to be a regular file")

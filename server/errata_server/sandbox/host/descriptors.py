"""Makes file descriptors to pass to a command."""

from __future__ import annotations

import os


def memory_file(content: bytes) -> int:
    """Return a read-only descriptor of a memory file with this content."""
    fd = os.memfd_create("content")
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        made = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(fd)
    return made


def close_all(fds: list[int]) -> None:
    """Close descriptors and remove each from the list, so that none is closed twice: its number may be in use again."""
    while fds:
        os.close(fds.pop())


def append_only(fd: int) -> int:
    """Return another descriptor of a memory file, which can only append to it."""
    return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

"""Makes file descriptors to pass to a command."""

from __future__ import annotations

import asyncio
import os

INLINE_BYTES = 4 * 1024**2
"""Content up to this size is written to a memory file on the event loop."""


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


async def large_memory_file(content: bytes) -> int:
    """Return `memory_file` of content of any size; more than `INLINE_BYTES` is written in a thread."""
    if len(content) <= INLINE_BYTES:
        return memory_file(content)
    writing = asyncio.ensure_future(asyncio.to_thread(memory_file, content))
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        writing.add_done_callback(_close_made)
        raise


def _close_made(writing: asyncio.Future[int]) -> None:
    if not writing.cancelled() and writing.exception() is None:
        os.close(writing.result())


def close_all(fds: list[int]) -> None:
    """Close descriptors and remove each from the list, so that none is closed twice: its number may be in use again."""
    while fds:
        os.close(fds.pop())


def append_only(fd: int) -> int:
    """Return another descriptor of a memory file, which can only append to it."""
    return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

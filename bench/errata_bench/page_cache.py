"""Measures, drops and fills the pages of files in the kernel's page cache. Unlike ``drop_caches`` it needs no root."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

_CHUNK = 8 * 1024**2


def drop(files: list[Path]) -> float:
    """Drop the cached pages of some files; return the share that stayed, for example because a process maps it."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # dirty pages are not dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return cached_share(files)


def fill(files: list[Path]) -> None:
    """Read files, so that they are cached as far as memory allows."""
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.read(_CHUNK):
                pass


def cached_share(files: list[Path]) -> float:
    """Return the share of the files' pages that is cached.

    Raises:
        OSError: The kernel does not report it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    cached = pages = 0
    for file in files:
        size = file.stat().st_size
        if not size:
            continue
        held = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        descriptor = os.open(file, os.O_RDONLY)
        try:
            address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
            if address == ctypes.c_void_p(-1).value or libc.mincore(address, size, held):
                raise OSError(ctypes.get_errno(), f"mincore: {os.strerror(ctypes.get_errno())}", str(file))
            libc.munmap(address, size)
        finally:
            os.close(descriptor)
        pages += len(held)
        cached += sum(page & 1 for page in held.raw)
    return cached / pages if pages else 0.0

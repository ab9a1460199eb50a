"""Descriptors of the test's own process, and how to run out of them."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path


def open_descriptors() -> set[int]:
    """Return those that are open."""
    listed = [path.name for path in Path("/proc/self/fd").iterdir()]
    return {int(name) for name in listed if Path(f"/proc/self/fd/{name}").exists()}  # not the one that listed them


@contextlib.contextmanager
def free_descriptors(left: int) -> Iterator[None]:
    """Lower the limit of open files so that ``left`` more can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = open_descriptors()
    low = [n for n in range(len(used) + left + 2) if n not in used][left]
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

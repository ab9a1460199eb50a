"""`watching`: what files this process opens, makes, renames or removes, and what programs and sockets it starts."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = frozenset(
    {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.chmod", "os.chown", "os.truncate"}
)
_READS = frozenset({"os.listdir", "os.scandir", "os.chdir", "sqlite3.connect"})
_STARTS = frozenset({"subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "socket.bind"})


class Started(BaseException):
    """Code under watch wanted to start a program or a server; of a kind that it does not catch."""


@dataclass
class Watched:
    """What was seen.

    Args:
        paths: Every path, as it was given.
        written: Paths that were changed.
        others: Threads that ran before, which are not watched.
    """

    paths: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    others: set[int | None] = field(default_factory=set)


_watched: Watched | None = None
_installed = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    seen = _watched
    if seen is None or threading.get_ident() in seen.others:
        return
    if event in _STARTS:
        raise Started(event)
    if event == "open":
        path, _, flags = arguments
        writes = bool((flags or 0) & _WRITES)
    elif event in _CHANGES or event in _READS:
        path, writes = arguments[0], event in _CHANGES
    else:
        return
    if not isinstance(path, str | bytes | os.PathLike):
        return
    text = os.fsdecode(path)
    seen.paths.append(text)
    if writes:
        seen.written.append(text)


@contextmanager
def watching() -> Iterator[Watched]:
    """Yield what is seen until the end. Programs are not started: `Started` is raised instead."""
    global _watched, _installed
    if not _installed:  # a hook stays for ever
        sys.addaudithook(_hook)
        _installed = True
    _watched = Watched(others={one.ident for one in threading.enumerate()} - {threading.get_ident()})
    try:
        yield _watched
    finally:
        _watched = None

"""Copies of files to mount in sandboxes, with modes that let every user read them."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from errata_os.user_cache import user_cache
from errata_protocol.errors import SandboxUnavailable

_copies: dict[tuple[str, ...], Path] = {}
_lock = threading.Lock()
_home: tempfile.TemporaryDirectory[str] | None = None


def new_directory() -> Path:
    """Create a directory that every user may read; it is removed when the process ends.

    Raises:
        SandboxUnavailable: Neither the directory of temporary files nor the user's cache can hold programs.
    """
    global _home
    with _lock:
        if _home is None:
            _home = tempfile.TemporaryDirectory(prefix="errata-grading-", dir=_place())
    copy = Path(tempfile.mkdtemp(dir=_home.name))
    copy.chmod(0o755)
    return copy


def _place() -> Path:
    """Return a directory whose file system lets programs run: engines mount a container's ``/tmp`` without that."""
    refused: list[str] = []
    places: tuple[Callable[[], str | Path], ...] = (tempfile.gettempdir, user_cache)
    for find in places:
        try:
            place = Path(find())
            place.mkdir(parents=True, exist_ok=True)
            if not os.statvfs(place).f_flag & os.ST_NOEXEC:
                return place
            refused.append(f"{place} is mounted noexec")
        except (OSError, SandboxUnavailable) as error:
            refused.append(str(error))
    raise SandboxUnavailable(
        f"there is no place to run programs of verifiers from ({'; '.join(refused)}): set TMPDIR to a directory on "
        "another file system"
    )


def staged(*sources: Path, key: str = "") -> Path:
    """Return a directory with a copy of each source file and of the contents of each source directory. Thread-safe.

    A copy is made once for the same sources, modification times and ``key``, and removed when the process ends. Links
    in directories are followed, and ``__pycache__`` is left out.

    Args:
        sources: Files and directories; if two have a file of the same name, the later one is kept.
        key: Digest of the content, so that a changed file in a directory causes another copy.
    """
    name = (key, *(f"{path}:{path.stat().st_mtime_ns}" for path in sources))
    if name not in _copies:
        copy = new_directory()
        for source in sources:
            if source.is_dir():
                shutil.copytree(source, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / source.name)
        for path in (copy, *copy.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
        _copies[name] = copy
    return _copies[name]

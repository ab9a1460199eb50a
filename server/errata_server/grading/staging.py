"""Copies of files that a sandbox may have mounted: readable by its user whatever the original's modes are."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

_copies: dict[tuple[str, ...], Path] = {}
_home: tempfile.TemporaryDirectory[str] | None = None


def new_directory() -> Path:
    """Return a new empty directory that any user may read; it is removed at exit."""
    global _home
    if _home is None:
        _home = tempfile.TemporaryDirectory(prefix="errata-grading-")
    copy = Path(tempfile.mkdtemp(dir=_home.name))
    copy.chmod(0o755)
    return copy


def staged(*sources: Path, key: str = "") -> Path:
    """Return a directory that holds a copy of every source file, and of what is in every source directory.

    The copy is made once per process for the same sources and ``key`` and is removed at exit.

    Args:
        sources: Files and directories; of two files with one name the later wins.
        key: Digest of the content, so that an edited source is copied again.
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

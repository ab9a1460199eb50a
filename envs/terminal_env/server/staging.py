"""Copies of task files that a sandbox may have mounted: readable by its user whatever the original's modes are."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

_copies: dict[tuple[str, ...], Path] = {}
_home: tempfile.TemporaryDirectory[str] | None = None


def _directory() -> Path:
    global _home
    if _home is None:
        _home = tempfile.TemporaryDirectory(prefix="errata-terminal-")
    copy = Path(tempfile.mkdtemp(dir=_home.name))
    copy.chmod(0o755)
    return copy


def logs_link(target: str) -> Path:
    """Return a new directory whose only entry ``verifier`` is a link to ``target``, a path inside the sandbox.

    Mounted at ``/logs`` it gives Harbor's scripts the place they write to, although mounts cannot be written.
    """
    directory = _directory()
    (directory / "verifier").symlink_to(target)
    return directory


def programs(sources: Path, names: Mapping[str, str]) -> Path:
    """Return a directory with the files of ``sources`` in ``programs/`` and a program for each name in ``bin/``.

    Args:
        sources: Directory of Python files.
        names: File to run by the name of the program.
    """
    key = ("programs", str(sources), *(f"{path.stat().st_mtime_ns}" for path in sorted(sources.iterdir())))
    if key not in _copies:
        copy = _directory()
        (copy / "bin").mkdir()
        shutil.copytree(sources, copy / "programs", ignore=shutil.ignore_patterns("__pycache__"))
        for name, file in names.items():
            if file.endswith(".sh"):
                shutil.copy(sources / file, copy / "bin" / name)
                continue
            flags, called = ("-I", "") if file == "run_pytest.py" else ("-I -S", f" {name}")
            text = f'#!/bin/sh\nexec /usr/bin/python3 {flags} /verifier/programs/{file}{called} "$@"\n'
            (copy / "bin" / name).write_text(text, "ascii")
        for path in (copy, *copy.rglob("*")):
            path.chmod(0o755 if path.is_dir() or path.parent.name == "bin" else 0o644)
        _copies[key] = copy
    return _copies[key]


def staged(*sources: Path, key: str = "") -> Path:
    """Return a directory that holds a copy of every source file, and of what is in every source directory.

    The copy is made once per process for the same sources and ``key`` and is removed at exit.

    Args:
        sources: Files and directories; of two files with one name the later wins.
        key: Digest of the content, so that an edited source is copied again.
    """
    name = (key, *(f"{path}:{path.stat().st_mtime_ns}" for path in sources))
    if name not in _copies:
        copy = _directory()
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

"""Directories that Harbor's scripts find in a sandbox: the place they write logs to, and programs in front of PATH."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from errata_environment.grading.staging import new_directory

_made: dict[tuple[str, ...], Path] = {}


def logs_link(target: str) -> Path:
    """Return a new directory whose only entry ``verifier`` is a link to ``target``, a path inside the sandbox.

    Mounted at ``/logs`` it gives Harbor's scripts the place they write to, although mounts cannot be written.
    """
    directory = new_directory()
    (directory / "verifier").symlink_to(target)
    return directory


def programs(sources: Path, names: Mapping[str, str]) -> Path:
    """Return a directory with the files of ``sources`` in ``programs/`` and a program for each name in ``bin/``.

    Args:
        sources: Directory of Python files.
        names: File to run by the name of the program.
    """
    key = ("programs", str(sources), *(f"{path.stat().st_mtime_ns}" for path in sorted(sources.iterdir())))
    if key not in _made:
        copy = new_directory()
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
        _made[key] = copy
    return _made[key]

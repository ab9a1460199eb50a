"""Recognises files of the server process: its interpreter, installed packages and imported modules."""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import lru_cache


def is_host_file(path: str) -> bool:
    """Return whether a path from a traceback is a file of this process: a loaded module, or in a package or
    installation.

    Args:
        path: Absolute path, or a path relative to the working directory.
    """
    absolute = os.path.abspath(path)  # noqa: PTH100  (resolves no link: it is compared with both spellings)
    files, trees = _loaded(len(sys.modules))
    return absolute in files or absolute.startswith(trees) or absolute.startswith(_installed())


@lru_cache(maxsize=1)
def _loaded(count: int) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the files of all loaded modules, and the directories of all loaded packages.

    Args:
        count: Number of loaded modules, which is the cache's key: the modules are examined again when it changes.
    """
    del count
    files, trees = set(), set()
    for name, module in list(sys.modules.items()):
        if "." in name:  # is below the directory of its package
            continue
        known = getattr(module, "__dict__", {})  # attributes of a lazy module may import something
        if known.get("__path__"):
            trees |= {f"{d}{os.sep}" for directory in list(known["__path__"]) for d in _spellings(str(directory))}
        elif isinstance(known.get("__file__"), str):
            files |= _spellings(known["__file__"])
    return frozenset(files), tuple(trees)


@lru_cache(maxsize=1)
def _installed() -> tuple[str, ...]:
    """Return the directories of the standard library and of installed packages."""
    names = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
    found = {sysconfig.get_paths().get(name) for name in names}
    found |= {sys.prefix, sys.base_prefix} - {"/", "/usr"}
    return tuple(f"{d}{os.sep}" for directory in found if directory for d in _spellings(directory))


def _spellings(path: str) -> set[str]:
    return {os.path.abspath(path), os.path.realpath(path)}  # noqa: PTH100

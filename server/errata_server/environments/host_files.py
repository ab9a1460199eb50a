"""Recognises files of the server process: its interpreter, installed packages and imported modules."""

from __future__ import annotations

import os
import sys
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class HostFiles:
    """The files of a server process; a worker process that gets a copy recognises them too.

    Args:
        files: Files of loaded modules.
        trees: Directories of loaded packages, and of installations.
        directory: The working directory.
    """

    files: frozenset[str]
    trees: tuple[str, ...]
    directory: str

    def __call__(self, path: str) -> bool:
        """Return whether a path from a traceback, absolute or relative to the working directory, is one of them."""
        # It resolves no link: it is compared with both spellings.
        absolute = os.path.normpath(os.path.join(self.directory, path))  # noqa: PTH118
        return absolute in self.files or absolute.startswith(self.trees)


def host_files() -> HostFiles:
    """Return the files of this process: loaded modules, packages and installations."""
    files, trees = _loaded(len(sys.modules))
    return HostFiles(files, trees + _installed(), str(Path.cwd()))


def is_host_file(path: str) -> bool:
    """Return whether a path from a traceback is a file of this process: a loaded module, or in a package or
    installation.

    Args:
        path: Absolute path, or a path relative to the working directory.
    """
    return host_files()(path)


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

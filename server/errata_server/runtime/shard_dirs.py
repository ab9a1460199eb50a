"""The data directories of a fleet: the first shard is the directory itself, the others lie in its folder ``shards``.

So a directory that one process served is the first shard of a fleet without being moved, ids without a name belong to
it, and one process can serve it again later.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from errata_protocol.errors import JournalUnavailable

from .data_lock import EPOCHS, lock
from .shard_name import draw, shard_name

FOLDER = "shards"


def sockets_in(directory: Path) -> Path:
    """Return the folder of a fleet's data directory that has the Unix sockets on which its workers are asked."""
    return directory / FOLDER / "sockets"


def shards(directory: Path, workers: int) -> list[Path]:
    """Return the data directories of a fleet's workers, in order."""
    return [directory, *(directory / FOLDER / str(shard) for shard in range(1, workers))]


def unserved(directory: Path, workers: int) -> list[Path]:
    """Return the data directories of more workers that earlier fleets had: their episodes are there and not served."""
    found = [path for path in (directory / FOLDER).glob("*") if path.name.isdecimal() and int(path.name) >= workers]
    return sorted(found, key=lambda path: int(path.name))


def name_of(directory: Path) -> str:
    """Return the name of a data directory that no server uses, or that servers share; the first call draws it.

    Raises:
        JournalUnavailable: It cannot be read or written, or a server uses the directory.
    """
    if (directory / EPOCHS).is_dir() and (name := shard_name(directory)) is not None:
        return name
    held = lock(directory)
    try:
        return shard_name(directory) or draw(directory)
    finally:
        os.close(held)


def names_of(directories: Sequence[Path]) -> list[str]:
    """Return the names of data directories.

    Raises:
        JournalUnavailable: See `name_of`; or two have one name, because one is a copy of the other.
    """
    found = [name_of(directory) for directory in directories]
    for at, name in enumerate(found):
        if name in found[:at]:
            first = directories[found.index(name)]
            raise JournalUnavailable(f"{directories[at]} is a copy of {first}: their sessions have the same ids")
    return found

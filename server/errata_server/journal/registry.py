"""Finds the installed journal stores, and the one that keeps the journal of a data directory.

A store is a `journal_type.JournalType` that an entry point of the group ``errata.journal_stores`` names. A data
directory holds the name of its store in the file `NAME_FILE`, so that commands read it without being told; without the
file its store is `DEFAULT`.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from errata_protocol.errors import InvalidRequest, JournalUnavailable

from .disk import DirectoryDisk
from .journal_type import JournalType

GROUP = "errata.journal_stores"
DEFAULT = "segments"
"""The store of a data directory that names none."""

DIRECTORY = "journal"
"""Name of the journal's directory in a data directory, whatever its store."""

NAME_FILE = "journal-store"
"""Name of the file in a data directory that holds the name of its store."""


@cache
def installed() -> dict[str, EntryPoint]:
    """Return the entry points of the installed stores by name, without importing them."""
    return {point.name: point for point in entry_points(group=GROUP)}


def check(name: str) -> EntryPoint:
    """Return the entry point of a store without importing it.

    Args:
        name: Name of the entry point.

    Raises:
        InvalidRequest: No store of that name is installed.
    """
    found = installed().get(name)
    if found is None:
        known = ", ".join(sorted(installed())) or "none: install the project again, `pip install .`"
        raise InvalidRequest(f"no journal store {name!r} is installed; there are: {known}")
    return found


def journal_type(name: str) -> JournalType:
    """Import and return a kind of journal; it is imported once.

    Args:
        name: Name of the entry point.

    Raises:
        InvalidRequest: No store of that name is installed, it cannot be imported, or it is not a `JournalType`.
    """
    return _loaded(check(name))


@cache
def _loaded(point: EntryPoint) -> JournalType:
    """Import an entry point and return an instance of its class, once."""
    try:
        found = point.load()
    except (ImportError, AttributeError) as error:
        raise InvalidRequest(f"journal store {point.name!r} ({point.value}) cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, JournalType)):
        raise InvalidRequest(
            f"journal store {point.name!r} ({point.value}) is not an errata_server.journal.journal_type.JournalType"
        )
    return found()


def journal_in(data_dir: Path) -> Path:
    """Return the directory of the journal in a data directory.

    Raises:
        JournalUnavailable: An earlier Errata kept its journal there.
    """
    if (data_dir / "journal.db").exists():
        raise JournalUnavailable(
            f"the journal in {data_dir} is one of an earlier Errata (journal.db, schema version 3 or less), which this "
            "one cannot read: use the Errata version that made it, or give another --data-dir"
        )
    return data_dir / DIRECTORY


def name_in(data_dir: Path) -> str:
    """Return the name of the store of a data directory, which need not be installed.

    Raises:
        JournalUnavailable: The name cannot be read.
    """
    try:
        return (data_dir / NAME_FILE).read_text(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return DEFAULT
    except OSError as error:
        raise JournalUnavailable(
            f"cannot read the name of the journal's store in {data_dir}: {error.strerror}; check its permissions"
        ) from error


def type_in(data_dir: Path) -> JournalType:
    """Return the kind of journal that a data directory has.

    Raises:
        InvalidRequest: See `journal_type`.
        JournalUnavailable: See `name_in`.
    """
    return journal_type(name_in(data_dir))


def choose(data_dir: Path, wanted: str | None) -> JournalType:
    """Return the kind of journal that a server uses in a data directory, which this process has locked.

    Args:
        data_dir: The data directory; the name of the store is written there if it is a new one.
        wanted: Name of the store that the settings name; None for that of the data directory.

    Raises:
        InvalidRequest: See `journal_type`; or the directory has the journal of another store.
        JournalUnavailable: The name cannot be read or written; or an earlier Errata kept its journal there.
    """
    there, directory = name_in(data_dir), journal_in(data_dir)
    if wanted is None or wanted == there:
        return journal_type(there)
    chosen = journal_type(wanted)
    if directory.is_dir() and any(directory.iterdir()):
        raise InvalidRequest(
            f"the journal in {data_dir} is one of the store {there!r}, not of {wanted!r}: give --journal-store {there} "
            "(ERRATA_JOURNAL_STORE), or another --data-dir"
        )
    write_name(data_dir, wanted)
    return chosen


def write_name(data_dir: Path, name: str) -> None:
    """Write the name of its store into a data directory; `DEFAULT` needs none.

    Raises:
        JournalUnavailable: It cannot be written.
    """
    path = data_dir / NAME_FILE
    try:
        if name == DEFAULT:
            path.unlink(missing_ok=True)
        else:
            new = data_dir / f"{NAME_FILE}.new"
            with new.open("w") as file:
                file.write(f"{name}\n")
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
        DirectoryDisk(data_dir).sync_names()
    except OSError as error:
        raise JournalUnavailable(
            f"cannot write the name of the journal's store in {data_dir}: {error.strerror}; check its permissions and "
            "free space"
        ) from error

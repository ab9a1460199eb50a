"""Finds the installed journal stores, and the one that keeps the journal of a data directory.

A store is a `journal_type.JournalType` that an entry point of the group ``errata.journal_stores`` names. The file
`NAME_FILE` in a data directory has the name of its store, so commands need no option for it. A directory without that
file has the store `DEFAULT`.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from errata_os.plugins import PluginGroup
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


STORES = PluginGroup(GROUP, JournalType, "journal store")  # type: ignore[type-abstract]
"""The installed stores."""


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


def small_text(path: Path) -> str:
    """Return the beginning of a small file of a data directory, at most 256 bytes, without space around it.

    Raises:
        OSError: It cannot be read, or is no regular file: a FIFO would be waited for, a device never ends.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        return os.read(descriptor, 256).decode(errors="replace").strip()
    finally:
        os.close(descriptor)


def name_in(data_dir: Path) -> str:
    """Return the name of the store of a data directory, which need not be installed.

    Raises:
        JournalUnavailable: The name cannot be read.
    """
    try:
        return small_text(data_dir / NAME_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return DEFAULT
    except OSError as error:
        raise JournalUnavailable(
            f"cannot read the name of the journal's store in {data_dir}: {error.strerror}; check its permissions"
        ) from error


def type_in(data_dir: Path) -> JournalType:
    """Return the kind of journal that a data directory has.

    Raises:
        InvalidRequest: See `PluginGroup.load`.
        JournalUnavailable: See `name_in`.
    """
    return STORES.load(name_in(data_dir))


def choose(data_dir: Path, wanted: str | None) -> JournalType:
    """Return the kind of journal that a server uses in a data directory, which this process has locked.

    Args:
        data_dir: The data directory; the name of the store is written there if it is a new one.
        wanted: Name of the store that the settings name; None for that of the data directory.

    Raises:
        InvalidRequest: See `PluginGroup.load`; or the directory has the journal of another store.
        JournalUnavailable: The name cannot be read or written; or an earlier Errata kept its journal there.
    """
    there, directory = name_in(data_dir), journal_in(data_dir)
    if wanted is None or wanted == there:
        return STORES.load(there)
    chosen = STORES.load(wanted)
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

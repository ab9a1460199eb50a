"""The name of a data directory, which ids have in them: drawn once, kept in a file of the directory (PROTOCOL F5)."""

from __future__ import annotations

import os
import secrets
import string
from pathlib import Path

from errata_protocol.errors import JournalUnavailable
from errata_protocol.names import SHARD, shown

from ..journal import DirectoryDisk
from ..journal.registry import small_text

FILE = "shard"
"""Name of the file. It belongs to the directory as its journal does: who copies or moves one takes the other along."""

_CHARACTERS = string.ascii_lowercase + string.digits


def shard_name(directory: Path) -> str | None:
    """Return the name of a data directory; None where it has none.

    Raises:
        JournalUnavailable: It cannot be read, or what the file has is no name.
    """
    try:
        name = small_text(directory / FILE)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise JournalUnavailable(
            f"cannot read the name of the data directory in {directory / FILE}: {error.strerror}; check its permissions"
        ) from error
    if not SHARD.matches(name):
        raise JournalUnavailable(
            f"{directory / FILE} has {shown(name)}, which is not {SHARD.allowed}: restore the file, because the ids in "
            "the journal name the directory"
        )
    return name


def draw(directory: Path) -> str:
    """Give a data directory, which this process has locked and which has no name, a random one, and return it.

    62 bits: of 10,000 directories two have the same with a probability of 1 in 90 billion.

    Raises:
        JournalUnavailable: It cannot be written.
    """
    name = "".join(secrets.choice(_CHARACTERS) for _ in range(12))
    write(directory, name)
    return name


def write(directory: Path, name: str) -> None:
    """Write the name of a data directory so that it is there as a whole, and lasts, or is not there.

    Raises:
        JournalUnavailable: It cannot be written.
    """
    draft = directory / f"{FILE}.new"
    try:
        with draft.open("w") as file:
            file.write(f"{name}\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(directory / FILE)
        DirectoryDisk(directory).sync_names()
    except OSError as error:
        raise JournalUnavailable(
            f"cannot write the name of the data directory in {directory}: {error.strerror}; check its permissions and "
            "free space"
        ) from error

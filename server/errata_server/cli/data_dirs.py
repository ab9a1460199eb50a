"""The default data directories: of ``errata serve``, and of the commands that read a journal."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from errata_protocol.errors import InvalidRequest, JournalUnavailable

from ..journal import journal_in
from ..journal.registry import DIRECTORY, NAME_FILE, type_in
from ..runtime.data_lock import EPOCHS
from ..runtime.epochs import current
from ..runtime.shard_dirs import FOLDER, sockets_in, unserved

MAX_NAME = 80
"""Longest name of a directory, in characters; a longer one is cut off and ends with a hash."""

_RESERVED = frozenset({DIRECTORY, NAME_FILE, "journal.db", "lock", "sandboxes", "server.json", "shard", FOLDER, EPOCHS})
"""Names of files in a data directory: `home` itself was the data directory of earlier versions."""


def home() -> Path:
    """Return the directory that holds one data directory for each set of targets.

    Raises:
        InvalidRequest: This user has no home directory, as a uid of its own in a container.
    """
    try:
        return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "errata"
    except RuntimeError as error:
        raise InvalidRequest(
            "this user has no home directory for the journal: set ERRATA_DATA_DIR to a volume, or, to keep episodes "
            "only until a restart, to /tmp/errata"
        ) from error


def of_targets(targets: Sequence[str]) -> Path:
    """Return the default data directory of a server with these targets: ``ERRATA_DATA_DIR``, else one below `home`.

    The directory is named after the targets in alphabetical order, whatever order they are given in.
    """
    configured = os.environ.get("ERRATA_DATA_DIR")
    if configured:
        return Path(configured)
    name = "+".join(sorted({_name(target) for target in targets}))
    if len(name) > MAX_NAME:
        name = f"{name[: MAX_NAME - 9]}-{sha256(name.encode()).hexdigest()[:8]}"
    return home() / (f"{name}_" if name in _RESERVED else name)


def _name(target: str) -> str:
    """Return a file name for a target: that of a directory, else the target's text with other characters replaced."""
    text = Path(target).resolve().name if Path(target).is_dir() else target
    return re.sub(r"[^A-Za-z0-9_.-]+", ".", text).strip(".") or "environment"


def left_behind(chosen: Path) -> Path | None:
    """Return the data directory that earlier versions used for every server, if it has a journal.

    None if ``chosen`` exists already or ``ERRATA_DATA_DIR`` is set, because then no journal is left behind.
    """
    if os.environ.get("ERRATA_DATA_DIR") or chosen.exists() or not _has_journal(home()):
        return None
    return home()


def for_reading(given: Path | None = None) -> list[Path]:
    """Return the data directories that a command reads: one, or several whose episodes are listed together.

    They are those in ``given``, else in ``ERRATA_DATA_DIR``, else in `home`: each of these may be a data directory, or
    hold some. Those that no server has used yet are left out, unless there is no other.

    Args:
        given: The directory that the command names.

    Raises:
        InvalidRequest: There is no journal.
        JournalUnavailable: A directory cannot be read.
    """
    configured = os.environ.get("ERRATA_DATA_DIR")
    top = given or (Path(configured) if configured else home())
    found = journals(top)
    if not found:
        below = "" if given or configured else " or below"
        raise InvalidRequest(f"no journal in {top}{below}: give --data-dir or --url")
    return [directory for directory in found if not _is_unused(directory)] or found[:1]


def one(given: Path | None) -> Path:
    """Return the data directory of a command that reads one: the given one itself, else the only one that there is.

    Raises:
        InvalidRequest: There is none, or there are several.
    """
    if given is not None and _has_journal(chosen := current(given)):
        return chosen
    return only(for_reading(given))


def only(directories: Sequence[Path]) -> Path:
    """Return the only one of several data directories.

    Raises:
        InvalidRequest: There are several; the message lists them.
    """
    if len(directories) > 1:
        listed = ", ".join(map(str, directories))
        raise InvalidRequest(f"there are {len(directories)} journals: give --data-dir with one of {listed}")
    return directories[0]


def journals(top: Path) -> list[Path]:
    """Return ``top`` and the directories in it, as far as they have a journal, each with those of further workers; of
    one that servers with leases share, that of its newest owner."""
    children = sorted(d for d in top.iterdir() if d.is_dir() and d.name not in _RESERVED) if top.is_dir() else []
    found = [current(directory) for one in (top, *children) for directory in (one, *unserved(one, 1))]
    return [directory for directory in found if _has_journal(directory)]


def fleets(given: Path | None) -> list[Path]:
    """Return the data directories that ``errata serve --workers`` has served, among those of `for_reading`."""
    configured = os.environ.get("ERRATA_DATA_DIR")
    top = given or (Path(configured) if configured else home())
    children = sorted(d for d in top.iterdir() if d.is_dir() and d.name not in _RESERVED) if top.is_dir() else []
    return [directory for directory in (top, *children) if sockets_in(directory).is_dir()]


def _has_journal(directory: Path) -> bool:
    try:
        return journal_in(directory).is_dir()
    except JournalUnavailable:  # in an earlier version's format; opening it reports that
        return True


def _is_unused(directory: Path) -> bool:
    try:
        return type_in(directory).is_unused(journal_in(directory))
    except (InvalidRequest, JournalUnavailable):  # damaged, or of a store that is not here; opening it reports that
        return False

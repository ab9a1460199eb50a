"""Where ``errata serve`` keeps its journal unless one says otherwise, and where the reading commands look for it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

from errata_protocol.errors import InvalidRequest, JournalUnavailable, UnknownEpisode

from ..journal import journal_in

MAX_NAME = 80
"""Characters of a directory's name; what several long targets are called is cut and ends in a digest."""

_RESERVED = frozenset({"journal", "journal.db", "lock", "sandboxes", "server.json"})
"""Names in a data directory: `home` was one itself."""


def home() -> Path:
    """Return the directory that holds one data directory for each set of targets."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "errata"


def of_targets(targets: Sequence[str]) -> Path:
    """Return the data directory of a server of these targets: ``ERRATA_DATA_DIR``, else one in `home` by their names.

    The order of the targets makes no difference.
    """
    configured = os.environ.get("ERRATA_DATA_DIR")
    if configured:
        return Path(configured)
    name = "+".join(sorted({_name(target) for target in targets}))
    if len(name) > MAX_NAME:
        name = f"{name[: MAX_NAME - 9]}-{sha256(name.encode()).hexdigest()[:8]}"
    return home() / (f"{name}_" if name in _RESERVED else name)


def _name(target: str) -> str:
    """Return what a target is called: a directory by its own name, everything else as it is written."""
    called = Path(target).resolve().name if Path(target).is_dir() else target
    return re.sub(r"[^A-Za-z0-9_.-]+", ".", called).strip(".") or "environment"


def left_behind(chosen: Path) -> Path | None:
    """Return the data directory that earlier versions took for every server, where a new one is about to be made."""
    if os.environ.get("ERRATA_DATA_DIR") or chosen.exists() or not _has_journal(home()):
        return None
    return home()


def for_reading(eids: Sequence[str], holds: Callable[[Path, str], bool]) -> Path:
    """Return the data directory that a command reads when none is given.

    Args:
        eids: Episodes that the command is about. Where there are several journals, the first one that has all is read.
        holds: Whether the journal of a directory has an episode.

    Raises:
        InvalidRequest: There is no journal, or there are several and no episode says which; the message names them.
        UnknownEpisode: There are several, and none has the episodes.
    """
    configured = os.environ.get("ERRATA_DATA_DIR")
    if configured:
        return Path(configured)
    found = journals()
    if not found:
        raise InvalidRequest(f"no journal in {home()} or below: give --data-dir or --url")
    if len(found) == 1:
        return found[0]
    if not eids:
        listed = ", ".join(map(str, found))
        raise InvalidRequest(f"there are {len(found)} journals: give --data-dir with one of {listed}; or --url")
    for directory in found:
        if all(holds(directory, eid) for eid in eids):
            return directory
    raise UnknownEpisode(eids[0])


def journals() -> list[Path]:
    """Return the data directories with a journal that servers without ``--data-dir`` have made."""
    at = home()
    below = sorted(d for d in at.iterdir() if d.is_dir() and d.name not in _RESERVED) if at.is_dir() else []
    return [directory for directory in (at, *below) if _has_journal(directory)]


def _has_journal(directory: Path) -> bool:
    try:
        return journal_in(directory).is_dir()
    except JournalUnavailable:  # of an earlier Errata: opening it says so
        return True

"""The data directories of a fleet's shards: each is named after its shard, below the directory of the fleet."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from errata_server.runtime import epochs, shard_name

NODE = "{node}"
"""Stands for the id of a node in the path of a directory; for simulated nodes, which have one file system."""


def default(fleet: str) -> Path:
    """Return the directory of a fleet on this node where none is named, beside those of ``errata serve``.

    Args:
        fleet: Name of the fleet.
    """
    # As `errata_server.cli.data_dirs`, whose package would take a keeper seconds to import.
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "errata" / f"fleet-{fleet}"


def home(data_dir: Path, node: str) -> Path:
    """Return the directory of a fleet on a node.

    Args:
        data_dir: Directory as it was given, perhaps with `NODE` in it.
        node: Id of the node.
    """
    return Path(str(data_dir).replace(NODE, node))


def found(place: Path) -> list[str]:
    """Return the names of the shards that have a data directory below a fleet's.

    Raises:
        OSError: The directory cannot be read.
    """
    if not place.is_dir():
        return []
    return sorted(one.name for one in place.iterdir() if shard_name.shard_name(epochs.current(one)) == one.name)


def epoch(place: Path, shard: str) -> int:
    """Return the highest epoch that a shard's directory shows; 0 where it has had no owner with a lease.

    Raises:
        OSError: It cannot be read.
    """
    return max(epochs.epochs_in(place / shard), default=0)


def make(place: Path) -> str:
    """Make a data directory for a fresh shard, whole or not at all, and return the shard's name.

    Raises:
        OSError: It cannot be made.
        JournalUnavailable: Its name cannot be written.
    """
    draft = place / f".new-{secrets.token_hex(8)}"
    draft.mkdir(parents=True, mode=0o700)
    try:
        name = shard_name.draw(draft)
        draft.rename(place / name)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return name

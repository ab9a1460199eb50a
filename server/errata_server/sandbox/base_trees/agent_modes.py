"""Computes file modes for rootless mode, where the agent owns every file, and sets those of a base tree."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from .recipe import AGENT_DIRECTORIES, AGENT_UID


def agent_mode(mode: int, uid: int, gid: int) -> int:
    """Return the mode that gives the agent, as the owner of a copy, the rights that it has to the original.

    The owner's bits are replaced by the group's if the original's group is the agent's, else by those for others. If
    the agent owns the original, the mode stays.

    Args:
        mode: Mode of the original.
        uid: Owner of the original.
        gid: Group of the original.
    """
    if uid == AGENT_UID:
        return mode
    bits = mode >> 3 & 7 if gid == AGENT_UID else mode & 7
    return mode & ~0o700 | bits << 6


def restrict_modes(root: Path) -> None:
    """Change the mode of every file below ``root`` by `agent_mode`, as if root owned it.

    Args:
        root: A tree that this user made. Symlinks and what is in `AGENT_DIRECTORIES` keep their modes.
    """
    for directory, subdirectories, files in os.walk(root, topdown=False):
        for name in (*subdirectories, *files):
            path = Path(directory, name)
            if path.is_symlink() or any(path.is_relative_to(root / own) for own in AGENT_DIRECTORIES):
                continue
            path.chmod(agent_mode(stat.S_IMODE(path.stat().st_mode), 0, 0))

"""Sets the modes of a rootless base tree, whose every file belongs to the agent."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from .recipe import AGENT_DIRECTORIES, AGENT_UID


def as_agent(mode: int, uid: int, gid: int) -> int:
    """Return the mode of a file whose owner is the agent, so that it may do what it may with the original.

    Args:
        mode: Of the original.
        uid: Its owner.
        gid: Its group.
    """
    if uid == AGENT_UID:
        return mode
    bits = mode >> 3 & 7 if gid == AGENT_UID else mode & 7
    return mode & ~0o700 | bits << 6


def close_tree(root: Path) -> None:
    """Give every file below ``root`` but the agent's own the mode that `as_agent` says.

    Args:
        root: A tree made by this user, with everything but `AGENT_DIRECTORIES` meant to be root's.
    """
    for directory, subdirectories, files in os.walk(root, topdown=False):
        for name in (*subdirectories, *files):
            path = Path(directory, name)
            if path.is_symlink() or any(path.is_relative_to(root / own) for own in AGENT_DIRECTORIES):
                continue
            path.chmod(as_agent(stat.S_IMODE(path.stat().st_mode), 0, 0))

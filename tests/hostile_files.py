"""Files that nobody should open, or read to their end."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def make_socket(path: Path) -> None:
    """Make a socket in the file system."""
    place = Path.cwd()
    os.chdir(path.parent)  # the name of a socket has 107 bytes at most
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(place)


def make_sparse(path: Path) -> None:
    """Make a file of 8 GiB that takes no disk."""
    with path.open("wb") as file:
        file.truncate(8 * 1024**3)

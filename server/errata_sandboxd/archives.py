"""Checks tar archives from a server, member by member, and writes a new one with only what a sandbox may have."""

from __future__ import annotations

import io
import tarfile
from typing import IO

from .schema import Refused

_UIDS = (0, 64000)


def copy_checked(source: IO[bytes], into: IO[bytes]) -> None:
    """Copy a tar archive of directories, regular files and symlinks that root or the agent owns.

    Extended attributes and other metadata are not copied.

    Raises:
        Refused: It has something else, a set-uid bit, or a name outside of the root directory or in /proc, /sys or
            /dev, or it cannot be read.
    """
    try:
        with tarfile.open(fileobj=source, mode="r|") as read, tarfile.open(fileobj=into, mode="w|") as write:
            for member in read:
                clean = _member(member)
                data = read.extractfile(member) if member.isreg() else None
                write.addfile(clean, data if data is not None else io.BytesIO())
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise Refused("invalid", f"the archive cannot be read: {error}") from error


def _member(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return the member to write for one that was read, or raise `Refused`."""
    name = member.name
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if not name or name.startswith("/") or ".." in parts or (parts and parts[0] in ("proc", "sys", "dev")):
        raise Refused("invalid", f"archive: {name[:80]!r} is not a path below the root")
    if not (member.isdir() or member.isreg() or member.issym()):
        raise Refused("invalid", f"archive: {name[:80]!r} is not a directory, regular file or symbolic link")
    if member.uid not in _UIDS or member.gid not in _UIDS:
        raise Refused(
            "invalid", f"archive: {name[:80]!r} belongs to {member.uid}:{member.gid}, only {_UIDS} are allowed"
        )
    if member.mode & ~0o1777:
        raise Refused("invalid", f"archive: {name[:80]!r} has the mode {member.mode:o}, at most 1777 is allowed")
    clean = tarfile.TarInfo("/".join(parts) or ".")
    clean.type = member.type
    clean.mode, clean.mtime, clean.uid, clean.gid = member.mode, member.mtime, member.uid, member.gid
    clean.linkname = member.linkname if member.issym() else ""
    clean.size = member.size if member.isreg() else 0
    return clean

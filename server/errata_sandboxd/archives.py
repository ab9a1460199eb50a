"""Checks tar archives from a server, member by member, and writes a new one with only what a sandbox may have."""

from __future__ import annotations

import io
import tarfile
from typing import Any, Self

from .schema import Refused

_UIDS = (0, 64000)
_HEADER_BYTES = 128 * 1024
"""Largest extended header, which is read into memory: a path has 4,096 bytes."""
_HEADERS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


def copy_checked(source: Any, into: Any) -> None:
    """Copy a tar archive of directories, regular files and symlinks that root or the agent owns.

    Extended attributes and other metadata are not copied.

    Args:
        source: The archive, with ``read``. It is read once, from the beginning to the end.
        into: The new archive, with ``write``, which bounds its size.

    Raises:
        Refused: It has something else, a set-uid bit, holes (a sparse file), or a name outside of the root directory
            or in /proc, /sys or /dev, or it cannot be read.
    """
    try:
        with (
            tarfile.open(fileobj=source, mode="r|", tarinfo=_Member) as read,
            tarfile.open(fileobj=into, mode="w|", format=tarfile.PAX_FORMAT) as write,
        ):
            for member in read:
                clean = _member(member)
                data = read.extractfile(member) if member.isreg() else None
                write.addfile(clean, data if data is not None else io.BytesIO())
                # Both keep what they have seen; an archive can have millions of empty members.
                read.members.clear()  # type: ignore[attr-defined]
                write.members.clear()  # type: ignore[attr-defined]
    except (tarfile.TarError, EOFError, OSError, ValueError, OverflowError, RecursionError) as error:
        raise Refused("invalid", f"the archive cannot be read: {error}") from error


class _Member(tarfile.TarInfo):
    """A member whose headers are bounded, and which has no holes: a few bytes of an archive could claim any size."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Return what a block of the archive is the header of, also of an extended header."""
        made = super().frombuf(buf, encoding, errors)
        if made.type in _HEADERS and made.size > _HEADER_BYTES:
            raise Refused("invalid", f"archive: an extended header of {made.size} bytes, at most {_HEADER_BYTES}")
        if made.size < 0:
            raise Refused("invalid", "archive: a member has a negative size")
        if made.type == tarfile.GNUTYPE_SPARSE:
            raise _has_holes(made)
        return made

    def _refuse_sparse(self, *_: object) -> None:
        raise _has_holes(self)

    # The three forms of a sparse file in an extended header, before their maps are read.
    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_sparse


def _has_holes(member: tarfile.TarInfo) -> Refused:
    return Refused("invalid", f"archive: {member.name[:80]!r} is a sparse file: write it whole")


def _member(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return the member to write for one that was read, or raise `Refused`."""
    name = member.name
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if (
        not name
        or name.startswith("/")
        or ".." in parts
        or "\0" in name
        or (parts and parts[0] in ("proc", "sys", "dev"))
    ):
        raise Refused("invalid", f"archive: {name[:80]!r} is not a path below the root")
    if not (member.isdir() or member.isreg() or member.issym()):
        raise Refused("invalid", f"archive: {name[:80]!r} is not a directory, regular file or symbolic link")
    if member.issparse():
        raise _has_holes(member)
    if member.issym() and (not member.linkname or "\0" in member.linkname):
        raise Refused("invalid", f"archive: {name[:80]!r} is a symbolic link without a target")
    if member.uid not in _UIDS or member.gid not in _UIDS:
        raise Refused(
            "invalid", f"archive: {name[:80]!r} belongs to {member.uid}:{member.gid}, only {_UIDS} are allowed"
        )
    if member.mode & ~0o1777:
        raise Refused("invalid", f"archive: {name[:80]!r} has the mode {member.mode:o}, at most 1777 is allowed")
    clean = tarfile.TarInfo("/".join(parts) or ".")
    clean.type = tarfile.REGTYPE if member.isreg() else member.type
    clean.mode, clean.mtime, clean.uid, clean.gid = member.mode, member.mtime, member.uid, member.gid
    clean.linkname = member.linkname if member.issym() else ""
    clean.size = member.size if member.isreg() else 0
    return clean

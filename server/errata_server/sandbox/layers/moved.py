"""Gives a layer the files of the directories that a command moved.

With ``redirect_dir=on`` rename(2) of a directory that lies in lower layers succeeds: overlayfs makes a directory at the
new place and notes there, in an attribute, where its files are. A layer must not need that: digests, merging and
`flatten` read a layer by its own paths. So a layer with such notes is replaced by a copy in which each of these
directories has all of its files, as hard links, and is opaque.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..files.overlay_form import ROOT_FORM, OverlayForm
from ..files.trees import moved_from
from ..files.walk import Visit
from .flatten import Merge

_OPEN_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def settle(upper: Path, lowers: Sequence[Path], target: Path, scratch: Path, form: OverlayForm = ROOT_FORM) -> None:
    """Make ``target``, which shows over ``lowers`` what ``upper`` shows, and has no moved directories.

    ``upper`` does not change, except that its files get another hard link.

    Args:
        upper: Upper directory of an overlay, which is not mounted.
        lowers: Directories below it, newest first; the base tree is the last.
        target: Directory to make.
        scratch: Unused path on the same file system.
        form: On-disk form of the layers.

    Raises:
        OSError: A file system operation failed, e.g. because the disk is full.
    """
    with Merge(target, scratch, form) as merge:
        merge.add(upper, _Moves(lowers, target.with_name(f"{target.name}-moved"), merge))


class _Moves:
    """What `Merge.add` asks about the directories of an upper layer, in the order of its walk.

    Args:
        lowers: See `settle`.
        place: Unused path on the same file system, for a directory that is being made.
        merge: Makes it.
    """

    def __init__(self, lowers: Sequence[Path], place: Path, merge: Merge) -> None:
        self._lowers = lowers
        self._place = place
        self._merge = merge
        self._below: list[tuple[bytes, ...] | None] = [()]
        """Where overlayfs looks for each open directory in the lower layers; None for nowhere."""
        self._settled_at = 0
        """Depth of the outermost moved directory that the walk is in; 0 outside of one."""

    def keeps_whiteout(self, visit: Visit) -> bool:
        """Return whether a whiteout hides something: in a directory that became opaque it does not."""
        return not 0 < self._settled_at < visit.depth

    def enter(self, visit: Visit) -> Path | None:
        """Return the files that a directory has in lower layers at another place, in a directory; None if it has none.

        Args:
            visit: The directory. Those above it were entered before.
        """
        del self._below[visit.depth :]
        if visit.depth <= self._settled_at:
            self._settled_at = 0
        above = self._below[-1]
        opaque, moved = moved_from(visit, self._merge.form)
        if moved is None:
            self._below.append(None if opaque or above is None else (*above, os.fsencode(visit.name)))
            return None
        below = tuple(filter(None, moved.split(b"/"))) if moved.startswith(b"/") else (*(above or ()), moved)
        self._below.append(below)
        self._settled_at = self._settled_at or visit.depth
        self._place.mkdir(mode=0o700)
        with _found(self._lowers, below, self._merge.form) as sources:
            for fd in sources:
                self._merge.add(f"/proc/self/fd/{fd}/.", into=self._place)
        return self._place


@contextmanager
def _found(lowers: Sequence[Path], path: Sequence[bytes], form: OverlayForm) -> Iterator[list[int]]:
    """Open the directories that overlayfs merges at a path of the lower layers, oldest first.

    Component by component: a symlink could lead to the host, and paths can be longer than the kernel takes.
    """
    found: list[int] = []
    try:
        for lower in lowers:
            fd, hides = os.open(lower, _OPEN_DIR), False
            found.insert(0, fd)
            for name in path:
                try:
                    below = os.open(name, _OPEN_DIR, dir_fd=fd)
                except OSError as error:
                    if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                        raise
                    hides |= error.errno != errno.ENOENT  # something else than a directory, such as a whiteout
                    os.close(found.pop(0))
                    break
                os.close(fd)
                found[0] = fd = below
                hides |= form.opaque in os.listxattr(fd)
            if hides:
                break
        yield found
    finally:
        for fd in found:
            os.close(fd)

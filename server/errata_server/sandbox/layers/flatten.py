"""Merges many layers into one directory that overlayfs can mount, with hard links to the layers' files."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from ..files.overlay_form import ROOT_FORM, OverlayForm
from ..files.trees import is_opaque
from ..files.walk import Visit, remove_tree, walk

_Times = tuple[int, int]


def flatten(layers: Sequence[Path], target: Path, scratch: Path, base: Path, form: OverlayForm = ROOT_FORM) -> None:
    """Merge ``layers`` into a new directory ``target``.

    Opaque marks are kept, and so are whiteouts that hide something of the base tree, over which ``target`` is mounted.
    The layers do not change, except that their files get another hard link.

    Args:
        layers: Upper directories of overlays, oldest first.
        target: Directory to make.
        scratch: Unused path on the same file system, for trees that are being removed.
        base: Root of the base tree.
        form: On-disk form of the layers.

    Raises:
        OSError: A file system operation failed, e.g. because the disk is full.
    """
    target.mkdir(mode=0o755)
    copies: dict[int, int] = {}
    times: dict[int, _Times] = {}
    try:
        for layer in layers:
            _merge_layer(layer, target, scratch, copies, times, form)
    finally:
        for fd in copies.values():
            os.close(fd)
    _drop_unneeded_whiteouts(target, base, form)
    # Last, because every link made or removed in a directory changes its times.
    for visit in walk(target, leaving=True):
        if visit.leaving:
            os.utime(visit.name, ns=times[visit.info.st_ino], dir_fd=visit.dir_fd, follow_symlinks=False)


def _drop_unneeded_whiteouts(target: Path, base: Path, form: OverlayForm) -> None:
    """Remove each whiteout that hides nothing of the base tree.

    If the base tree does not have the directory, or it is opaque, overlayfs merges nothing and lists the directory
    unfiltered: the agent would see a whiteout there as a device that it cannot remove.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    below: list[int | None] = [
        os.open(base, flags)
    ]  # the base tree's directory at each level, None where nothing is merged
    try:
        for visit in walk(target, leaving=True):
            under = below[-1]
            if visit.leaving:
                below.pop()
                if under is not None:
                    os.close(under)
            elif visit.is_dir:
                below.append(None if under is None or is_opaque(visit, form) else _open_dir(visit.name, under, flags))
            elif stat.S_ISCHR(visit.info.st_mode) and visit.info.st_rdev == 0 and not _exists(visit.name, under):
                os.unlink(visit.name, dir_fd=visit.dir_fd)
    finally:
        for fd in below:
            if fd is not None:
                os.close(fd)


def _open_dir(name: str, under: int, flags: int) -> int | None:
    """Open a subdirectory of the base tree; None if there is none that overlayfs would merge."""
    try:
        return os.open(name, flags, dir_fd=under)
    except OSError as error:
        # No entry, no directory, or a symlink, which overlayfs does not merge either. Any other error says nothing of
        # the base tree: treating it as "no directory" could make files visible that the agent deleted.
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise


def _exists(name: str, under: int | None) -> bool:
    """Return whether the base tree's directory ``under`` has an entry; False if ``under`` is None."""
    if under is None:
        return False
    try:
        os.stat(name, dir_fd=under, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _merge_layer(
    layer: Path, target: Path, scratch: Path, copies: dict[int, int], times: dict[int, _Times], form: OverlayForm
) -> None:
    """Merge one layer over the target.

    Args:
        layer: Upper directory of an overlay.
        target: The directory that is being made.
        scratch: Unused path for trees that are being removed.
        copies: See `_link`; shared by all layers.
        times: Gets the access and modification times of the layer's directories by inode of the target's directory.
        form: On-disk form of the layer.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    # The descriptor follows the walk of the layer through the same directories of the target.
    fd = os.open(target, flags)
    try:
        for visit in walk(layer, leaving=True):
            if visit.leaving:
                up = os.open("..", flags, dir_fd=fd)
                os.close(fd)
                fd = up
            elif visit.is_dir:
                _enter_dir(visit, fd, scratch, form)
                below = os.open(visit.name, flags, dir_fd=fd)
                times[os.fstat(below).st_ino] = (visit.info.st_atime_ns, visit.info.st_mtime_ns)
                os.close(fd)
                fd = below
            else:
                _remove_entry(visit.name, fd, scratch)
                _link(visit, fd, copies)
    finally:
        os.close(fd)


def _enter_dir(visit: Visit, fd: int, scratch: Path, form: OverlayForm) -> None:
    """Make a directory of a layer in the target, or change an existing one, with the layer's owner and mode.

    If the target has something else, or the layer's directory is opaque, the target's entry is removed first. A
    directory in place of a file becomes opaque. Of overlayfs' own attributes only the opaque mark is copied.
    """
    source = os.open(visit.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=visit.dir_fd)
    try:
        marks = {name: os.getxattr(source, name) for name in os.listxattr(source)}
        try:
            there = os.stat(visit.name, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            there = None
        if there is not None and (not stat.S_ISDIR(there.st_mode) or form.opaque in marks):
            _remove_entry(visit.name, fd, scratch)
            if not stat.S_ISDIR(there.st_mode):
                marks.setdefault(form.opaque, b"y")
            there = None
        if there is None:
            os.mkdir(visit.name, 0o700, dir_fd=fd)
        made = os.open(visit.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
        try:
            for name, value in marks.items():
                if name == form.opaque or not form.is_private(name):
                    os.setxattr(made, name, value)
            os.fchown(made, visit.info.st_uid, visit.info.st_gid)
            os.fchmod(made, visit.info.st_mode & 0o7777)
        finally:
            os.close(made)
    finally:
        os.close(source)


def _remove_entry(name: str, fd: int, scratch: Path) -> None:
    """Remove an entry of the target, of any type; do nothing if there is none."""
    try:
        if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=fd)
            return
    except FileNotFoundError:
        return
    os.rename(name, scratch, src_dir_fd=fd)
    remove_tree(scratch)


def _link(visit: Visit, fd: int, copies: dict[int, int]) -> None:
    """Make a hard link to an entry of a layer in the target directory, or a copy if it has too many links.

    Args:
        visit: The entry.
        fd: Descriptor of the target directory.
        copies: Descriptors of copies by inode of the original. A file system limits the links of a file (ext4: 65,000);
            when the limit is reached, further links are to a copy.
    """
    try:
        copy = copies.get(visit.info.st_ino)
        if copy is None:
            os.link(visit.name, visit.name, src_dir_fd=visit.dir_fd, dst_dir_fd=fd, follow_symlinks=False)
        else:
            os.link(f"/proc/self/fd/{copy}", visit.name, dst_dir_fd=fd, follow_symlinks=True)
        return
    except OSError as error:
        if error.errno != errno.EMLINK:
            raise
    info = visit.info
    if stat.S_ISREG(info.st_mode):
        old = copies.pop(info.st_ino, None)
        if old is not None:
            os.close(old)
        copies[info.st_ino] = _copy(visit, fd)
    elif stat.S_ISLNK(info.st_mode):
        os.symlink(os.readlink(visit.name, dir_fd=visit.dir_fd), visit.name, dir_fd=fd)
        os.chown(visit.name, info.st_uid, info.st_gid, dir_fd=fd, follow_symlinks=False)
    else:  # a whiteout, of which overlayfs keeps one inode with many names; or a FIFO or socket
        os.mknod(visit.name, info.st_mode, info.st_rdev, dir_fd=fd)
        os.chown(visit.name, info.st_uid, info.st_gid, dir_fd=fd, follow_symlinks=False)
        os.chmod(visit.name, info.st_mode & 0o7777, dir_fd=fd)


def _copy(visit: Visit, fd: int) -> int:
    """Copy a regular file with its attributes; return a descriptor of the copy."""
    info = visit.info
    source = os.open(visit.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=visit.dir_fd)
    try:
        copy = os.open(visit.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=fd)
        with os.fdopen(os.dup(source), "rb") as reader, os.fdopen(os.dup(copy), "wb") as writer:
            shutil.copyfileobj(reader, writer)
        os.fchown(copy, info.st_uid, info.st_gid)  # first: it clears the set-id bits and the file's capabilities
        for name in os.listxattr(source):
            os.setxattr(copy, name, os.getxattr(source, name))
        os.fchmod(copy, info.st_mode & 0o7777)
        os.utime(copy, ns=(info.st_atime_ns, info.st_mtime_ns))
        return copy
    finally:
        os.close(source)

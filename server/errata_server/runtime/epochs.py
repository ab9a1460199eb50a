"""Data directories that several boxes see: each owner has a directory of its own in one of them (decision 210).

The folder ``epochs`` of a shared directory has a data directory for each epoch, named after its number. A new owner
makes its own of the newest one before it, gives it its name when it is complete, and then removes those before it.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from pathlib import Path

from errata_protocol.errors import InvalidRequest, JournalUnavailable

from ..journal import journal_in
from ..journal import registry as journal_registry
from . import hash_seed, shard_name
from .data_lock import EPOCHS, resolved, share
from .lease import boot_id

log = logging.getLogger("errata.server")

HOLDER = "holder"
"""Name of the file with the boot of the box that made an epoch's directory."""

_KEPT = (shard_name.FILE, hash_seed.CHOSEN, hash_seed.PROCESSES, journal_registry.NAME_FILE)
"""Small files that go from one owner's directory to the next one's."""

_DRAFT, _GONE = ".new-", ".old-"


def epochs_in(directory: Path) -> list[int]:
    """Return the epochs of a shared directory that are complete, in order; none of a directory that is not shared.

    Raises:
        OSError: It cannot be read.
    """
    folder = directory / EPOCHS
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal()) if folder.is_dir() else []


def current(directory: Path) -> Path:
    """Return the data directory of the newest owner in a shared directory; one that is not shared, itself."""
    found = epochs_in(directory)
    return _path(directory, found[-1]) if found else directory


def enter(directory: Path, epoch: int, store: str | None = None) -> Path:
    """Return the data directory of an epoch in a shared one; made of the newest before it, if it does not exist yet.

    The caller holds a lease of this epoch, so all that earlier owners acknowledged is there by now.

    Args:
        directory: The shared directory. It may be a data directory of a server without a lease, or not exist yet.
        epoch: Epoch of the caller's lease.
        store: Name of the journal's store in a new directory; None for the default one.

    Raises:
        InvalidRequest: The store of the journal is not installed, or takes no leases.
        JournalUnavailable: A later epoch or another box has the directory, or it cannot be read or written.
    """
    top = resolved(directory)
    try:
        share(top, lambda: shard_name.shard_name(top) or shard_name.draw(top))
        while not _path(top, epoch).exists():
            _make(top, epoch, store)
        _check_later(top, epoch)
        holder = journal_registry.small_text(_path(top, epoch) / HOLDER)
    except OSError as error:
        raise JournalUnavailable(
            f"cannot take over the data directory {top}: {error}; it has to be on a file system with hard links that "
            "all boxes see alike"
        ) from error
    if holder != boot_id():
        raise JournalUnavailable(f"epoch {epoch} of {top} is another box's, or of an earlier boot: take a later one")
    return _path(top, epoch)


def later_than(own: Path) -> int | None:
    """Return the newest epoch, if the data directory ``own`` of an epoch is not its; None if it is.

    Raises:
        OSError: The shared directory cannot be read.
    """
    newest = epochs_in(own.parent.parent)[-1:]
    return newest[0] if newest and newest[0] > int(own.name) else None


def remove_earlier(own: Path) -> None:
    """Remove the directories of the epochs before ``own``, which nobody reads any more.

    A directory loses its name first: who is copying it sees at the end that it is gone, and looks for the newest again.

    Raises:
        OSError: The shared directory cannot be changed.
    """
    folder, epoch = own.parent, int(own.name)
    for path in (folder.parent / journal_registry.DIRECTORY, *folder.iterdir()):
        is_earlier = path.parent != folder or (path.name.isdecimal() and int(path.name) < epoch)
        if is_earlier and path.exists():
            path.rename(folder / f"{path.name}{_GONE}{secrets.token_hex(4)}")
    for path in folder.iterdir():
        number, separator, _ = path.name.partition(_DRAFT)
        if _GONE in path.name or (separator and int(number) <= epoch):
            shutil.rmtree(path, ignore_errors=True)


def _path(top: Path, epoch: int) -> Path:
    return top / EPOCHS / f"{epoch:020d}"


def _check_later(top: Path, epoch: int) -> None:
    newest = epochs_in(top)[-1:]
    if newest and newest[0] > epoch:
        raise JournalUnavailable(f"epoch {newest[0]} has taken {top} over from epoch {epoch}: take a later lease")


def _make(top: Path, epoch: int, store: str | None) -> None:
    """Try to make the directory of an epoch; without effect if the one that it is made of is not the newest any more.

    Raises:
        JournalUnavailable: See `enter`.
        OSError: The directory cannot be read or changed.
    """
    _check_later(top, epoch)
    found = epochs_in(top)
    source = _path(top, found[-1]) if found else top
    draft = top / EPOCHS / f"{epoch:020d}{_DRAFT}{secrets.token_hex(4)}"
    draft.mkdir(mode=0o700)
    try:
        before = source.stat()
        _fill(source, draft, store)
        after = source.stat()
        if epochs_in(top) == found and (before.st_dev, before.st_ino) == (after.st_dev, after.st_ino):
            draft.rename(_path(top, epoch))
            _sync(top / EPOCHS)
            log.info("epoch %d has the data directory %s, made of %s", epoch, top, source.name)
    except FileNotFoundError:
        if epochs_in(top) == found:
            raise
        # It was being removed: there is a later one now.
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _fill(source: Path, draft: Path, store: str | None) -> None:
    journal = journal_in(source)
    is_new = not journal.is_dir()
    name = store if is_new and store is not None else journal_registry.name_in(source)
    kind = journal_registry.STORES.load(name)
    if not kind.takes_leases:
        raise InvalidRequest(f"the journal store {name!r} takes no leases: serve {source} without --lease")
    for kept in _KEPT:
        if (source / kept).is_file():
            _write(draft / kept, (source / kept).read_bytes())
    _write(draft / HOLDER, boot_id().encode())
    if not is_new:
        kind.take_over(journal, journal_in(draft))
    _sync(draft)


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(descriptor)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

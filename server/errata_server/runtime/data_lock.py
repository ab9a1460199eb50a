"""Locks a data directory for one process (PROTOCOL E5), and keeps the address of the process that holds it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from errata_protocol.errors import JournalUnavailable

DRAIN_SIGNAL = signal.SIGUSR1
"""Sent to a server of one process that is to end once its sessions have; only to one that announces it: others end."""
EPOCHS = "epochs"
"""Folder of a directory that several boxes share, with the data directory of each owner."""

_WAYS = "--data-dir, data_dir= or ERRATA_DATA_DIR"


def resolved(directory: Path) -> Path:
    """Return the absolute path of a data directory, without links; where they lead in a circle, `lock` refuses it."""
    return Path(os.path.realpath(directory.expanduser()))  # Path.resolve would raise RuntimeError before Python 3.13


def lock(directory: Path) -> int:
    """Lock the data directory for this process; the kernel releases it when the process ends, in whatever way.

    Returns:
        The descriptor of the lock file; closing it releases the lock.

    Raises:
        JournalUnavailable: Another process holds the lock, or the directory cannot be used, or servers share it.
    """
    held = _locked(directory)
    if (directory / EPOCHS).is_dir():
        os.close(held)
        raise JournalUnavailable(
            f"the data directory {directory} is shared by servers with leases: give --lease, or the directory of one "
            f"owner in {directory / EPOCHS}"
        )
    return held


def share(directory: Path, first: Callable[[], object]) -> None:
    """Let only servers with leases use a directory from now on. Idempotent.

    Args:
        directory: The directory; it is made if it is missing.
        first: Called if it was not shared before, while no server uses it.

    Raises:
        JournalUnavailable: A server without a lease uses it, or it cannot be used.
        OSError: It cannot be written.
    """
    if (directory / EPOCHS).is_dir():
        return
    held = _locked(directory)
    try:
        first()
        (directory / EPOCHS).mkdir(mode=0o700, exist_ok=True)
    finally:
        os.close(held)


def _locked(directory: Path) -> int:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # transcripts are their owner's
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise JournalUnavailable(
            f"cannot use the data directory {directory}: {error.strerror}; give one that this user can write "
            f"({_WAYS}), such as a volume; ERRATA_DATA_DIR=/tmp/errata keeps episodes only until a restart"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        raise JournalUnavailable(
            f"the data directory {directory} is in use by process {owner or 'unknown'}: "
            f"stop it, or give another ({_WAYS}); under uvicorn take --workers 1, because one process holds all "
            "sessions"
        ) from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd


def announce_url(directory: Path | None, url: str, *, drains: bool) -> None:
    """Write the URL of this server into its data directory, where it has one, for command-line tools.

    Args:
        directory: The data directory.
        url: Address of the server.
        drains: Whether this process takes `DRAIN_SIGNAL`.
    """
    if directory is not None:
        (directory / "server.json").write_text(json.dumps({"url": url, "pid": os.getpid(), "drains": drains}))


def draining_owner(directory: Path) -> int | None:
    """Return a pidfd of the process that holds ``directory`` and takes `DRAIN_SIGNAL`; None where there is none here.

    A process id that is written in the directory may be that of another container, or of a process that has ended. So
    the process has to have the lock file open.
    """
    try:
        found: dict[str, Any] = json.loads((directory / "server.json").read_text())
        if not isinstance(pid := found["pid"], int) or found.get("drains") is not True:
            return None
        owner = os.pidfd_open(pid)
    except (OSError, ValueError, KeyError):
        return None
    try:
        lock_file = (directory / "lock").stat()
        if any(os.path.samestat(path.stat(), lock_file) for path in Path(f"/proc/{pid}/fd").iterdir() if path.exists()):
            return owner
    except OSError:
        pass
    os.close(owner)
    return None


def owner_url(directory: Path) -> str | None:
    """Return the URL of the server that holds ``directory``; None where it wrote none."""
    try:
        found: dict[str, Any] = json.loads((directory / "server.json").read_text())
        return str(found["url"])
    except (OSError, ValueError, KeyError):
        return None

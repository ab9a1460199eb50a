"""Makes the files that a sandbox has before its first command, in a runner's child that may still change owners.

The child's root is the sandbox's root, so symlinks resolve as they would for the agent. No program of the agent has
run in the sandbox yet.
"""

# A fork copies the memory of what was imported, so no pathlib.
# ruff: noqa: PTH101, PTH102, PTH106, PTH108, PTH112, PTH114, PTH116, PTH118, PTH120, PTH211

import ctypes
import errno
import marshal
import os

from kernel import check, libc
from runner_files import OVERLAYFS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from messages import PlanRow, PrepareRequest

MAX_WRITABLE = 256
"""Writable places outside of the agent's directories; in rootless mode each costs a mount for every command."""


class Refused(Exception):
    """An entry of a plan cannot be made at its path.

    Args:
        path: Path of the entry.
        why: The reason, as strerror(3) gives it.
    """

    def __init__(self, path: bytes, why: str) -> None:
        super().__init__(path, why)
        self.path = path
        self.why = why


class PlanExecution:
    """Carries out the plan of a request; see `messages.PlanRow`.

    Args:
        request: The request.
        data: Descriptor of the plan, followed by the contents of its files.
    """

    def __init__(self, request: "PrepareRequest", data: int) -> None:
        self.data = data
        self.offset = request["plan_bytes"]
        self.plan: list[PlanRow] = marshal.loads(os.pread(data, self.offset, 0))
        self.parent_mode = request["parent_mode"]
        self.changes_owners = request["changes_owners"]
        self.made: set[bytes] = set()

    def make(self) -> None:
        """Make every entry, in the order of the plan; a file or link replaces what is there unless it is a directory.

        Raises:
            Refused: An entry cannot be made; those before it stay.
        """
        for kind, path, mode, owner, payload in self.plan:
            try:
                if kind == "x":
                    remove_tree(path)
                    continue
                if kind == "d":
                    self.directory(path, mode, owner, payload)
                    continue
                parent = os.path.dirname(path)
                self.directory(parent)
                self.made.add(parent)
                remove_file(path)
                if kind == "l":
                    os.symlink(payload, path)
                else:
                    self.file(path, mode, owner, payload)
                self.made.add(path)
            except OSError as error:
                raise Refused(path, os.strerror(error.errno or 0)) from error

    def directory(
        self, path: bytes, mode: int | None = None, owner: int | None = None, new_mode: int | None = None
    ) -> None:
        """Make a directory, and its missing parents as root's, or change the mode and owner of an existing one.

        Args:
            path: Absolute path.
            mode: Mode of an existing directory; None keeps its own, plus ``u+rwx`` if it gets another owner than root.
            owner: Uid; None is root for a new directory and keeps the owner of an existing one.
            new_mode: Mode of a new directory; None for that of parents.
        """
        for at in range(1, len(path)):
            if path[at] == ord("/"):
                self.make_directory(path[:at], None, None, self.parent_mode)
        self.make_directory(path, mode, owner, self.parent_mode if new_mode is None else new_mode)

    def make_directory(self, path: bytes, mode: int | None, owner: int | None, new_mode: int) -> None:
        """Do what `directory` does for one path whose parent exists.

        Raises:
            OSError: ENOTDIR: there is something else; EXDEV: it is on another file system than the sandbox's files.
        """
        try:
            os.mkdir(path)
            self.made |= {os.path.dirname(path), path}
            self.set_owner(path, owner or 0)
            os.chmod(path, new_mode)
        except FileExistsError:
            if not os.path.isdir(path):
                raise OSError(errno.ENOTDIR, "not a directory") from None
            check_file_system(path)
            if owner is not None:
                self.set_owner(path, owner)
            if owner and mode is None:
                mode = os.stat(path).st_mode & 0o7777 | 0o700  # root does not need these bits, another owner does
            if mode is not None:
                os.chmod(path, mode)

    def file(self, path: bytes, mode: int, owner: int, size: int) -> None:
        """Make a new file of the next ``size`` bytes of the descriptor."""
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            done = 0
            while done < size:
                done += os.sendfile(fd, self.data, self.offset + done, min(size - done, 1 << 20))
        finally:
            os.close(fd)
        self.offset += size
        self.set_owner(path, owner)
        os.chmod(path, mode)

    def set_owner(self, path: bytes, owner: int) -> None:
        """Change uid and gid to ``owner``; does nothing in rootless mode, where only one owner exists."""
        if self.changes_owners:
            os.chown(path, owner, owner)

    def set_times(self, mtime_s: int) -> None:
        """Set the times of everything that was made, and of its directories.

        Called after the last entry, because making an entry changes the times of its directory.
        """
        for path in self.made - {b"", b"/"}:
            os.utime(path, (mtime_s, mtime_s), follow_symlinks=False)


def remove_file(path: bytes) -> None:
    """Remove what is at ``path``, if anything; raises OSError (EISDIR) for a directory."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def remove_tree(path: bytes) -> None:
    """Remove what is at ``path``, if anything, with all below it; raises OSError as `check_file_system` does."""
    if os.path.islink(path) or not os.path.isdir(path):
        remove_file(path)
        return
    check_file_system(path)
    for here, directories, files in os.walk(path, topdown=False):
        for name in files + directories:
            below = os.path.join(here, name)
            if os.path.isdir(below) and not os.path.islink(below):
                os.rmdir(below)
            else:
                os.unlink(below)
    os.rmdir(path)


def check_file_system(path: bytes) -> None:
    """Check that a directory is on overlayfs. A symlink in the sandbox may lead elsewhere, such as to /proc or /dev.

    Raises:
        OSError: EXDEV: the directory is on another file system. Any other: statfs failed.
    """
    found = (ctypes.c_long * 32)()  # struct statfs begins with the type
    check(libc.statfs(path, found), "statfs")
    if found[0] != OVERLAYFS:
        raise OSError(errno.EXDEV, "not a file of the sandbox")


def topmost(paths: "Iterable[bytes]", known: "Sequence[bytes]") -> list[bytes]:
    """Return the paths, sorted, that are neither equal to nor below another one of them or a path of ``known``."""
    found: list[bytes] = []
    for path in sorted(set(paths)):
        if not any(path == parent or path.startswith(parent + b"/") for parent in (*known, *found)):
            found.append(path)
    return found


def prepare(request: "PrepareRequest", data: int) -> "tuple[Any, ...]":
    """Make the directories, files and links of a request's plan, and set their times if the request has ``mtime_s``.

    Args:
        request: The request.
        data: Descriptor from which the plan and the contents of its files are read.

    Returns:
        The answer to the server, either of:

        - ``("done", workdir, writable)``: the real path of the plan's first entry, the work directory; and, in rootless
          mode, the entries that the agent owns outside of its directories, topmost only, relative to the root.
        - ``("refused", path, why)``: the entry at ``path`` cannot be made, or there would be more than `MAX_WRITABLE`
          such entries. What was made before stays.
    """
    execution = PlanExecution(request, data)
    try:
        os.umask(0o022)
        execution.make()
        if request["mtime_s"] is not None:
            execution.set_times(request["mtime_s"])
    except Refused as refused:
        return ("refused", refused.path, refused.why)
    workdir = os.path.realpath(execution.plan[0][1])
    writable = []
    if not request["changes_owners"]:
        owned = [os.path.realpath(path) for kind, path, _, owner, _ in execution.plan if owner and kind != "l"]
        writable = topmost(owned, [b"/" + os.fsencode(name) for name in request["writable"]])
        if len(writable) > MAX_WRITABLE:
            why = f"more than {MAX_WRITABLE} places outside of the agent's directories are its own"
            return ("refused", writable[MAX_WRITABLE], why)
    return ("done", workdir, [path[1:] for path in writable])

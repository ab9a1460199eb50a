"""Makes what stands in a sandbox before its first command: what a runner's child does, with power over owners.

The sandbox's root is its root already, so a path that leads through a link leads where it would lead the agent. No
program of an agent has run in there yet.
"""

# pathlib and what it imports would be copied by every fork.
# ruff: noqa: PTH101, PTH102, PTH108, PTH112, PTH116, PTH120, PTH211

import ctypes
import errno
import marshal
import os

from kernel import check, libc
from runner_files import OVERLAYFS

MAX_WRITABLE = 256
"""Each costs a mount for every command, in rootless mode."""


class Refused(Exception):
    """An entry that cannot be made where the plan wants it."""


class Start:
    """One plan, being carried out.

    A plan is a list of ``(kind, path, mode, owner, payload)``: kind ``d f l``, path in bytes, mode or None, owner a
    uid or None, payload the mode of a new directory, the size of a file's content, which follows the plan, or a link's
    target.
    """

    def __init__(self, order, data):
        self.data = data
        self.at = order["plan_bytes"]
        self.plan = marshal.loads(os.pread(data, self.at, 0))
        self.parent_mode = order["parent_mode"]
        self.changes_owners = order["changes_owners"]
        self.made = set()

    def make(self):
        for kind, path, mode, owner, payload in self.plan:
            try:
                if kind == "d":
                    self.directory(path, mode, owner, payload)
                    continue
                parent = os.path.dirname(path)
                self.directory(parent)
                self.made.add(parent)
                make_way(path)
                if kind == "l":
                    os.symlink(payload, path)
                else:
                    self.file(path, mode, owner, payload)
                self.made.add(path)
            except OSError as error:
                raise Refused(path, os.strerror(error.errno)) from error

    def directory(self, path, mode=None, owner=None, new_mode=None):
        """Make sure of a directory and of those above it, which are root's."""
        for at in range(1, len(path)):
            if path[at] == 0x2F:
                self.enter(path[:at], None, None, self.parent_mode)
        self.enter(path, mode, owner, self.parent_mode if new_mode is None else new_mode)

    def enter(self, path, mode, owner, new_mode):
        try:
            os.mkdir(path)
            self.made |= {os.path.dirname(path), path}
            self.own(path, owner or 0)
            os.chmod(path, new_mode)
        except FileExistsError:
            if not os.path.isdir(path):
                raise OSError(errno.ENOTDIR, "not a directory") from None
            check_file_system(path)
            if owner is not None:
                self.own(path, owner)
            if owner and mode is None:
                mode = os.stat(path).st_mode & 0o7777 | 0o700  # root's may have been closed to everybody else
            if mode is not None:
                os.chmod(path, mode)

    def file(self, path, mode, owner, size):
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            done = 0
            while done < size:
                done += os.sendfile(fd, self.data, self.at + done, min(size - done, 1 << 20))
        finally:
            os.close(fd)
        self.at += size
        self.own(path, owner)
        os.chmod(path, mode)

    def own(self, path, owner):
        if self.changes_owners:
            os.chown(path, owner, owner)

    def set_times(self, mtime_s):
        """All at once: whatever is made in a directory changes its time."""
        for path in self.made - {b"", b"/"}:
            os.utime(path, (mtime_s, mtime_s), follow_symlinks=False)


def make_way(path):
    """Remove what is there, unless it is a directory."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def check_file_system(path):
    """Refuse a directory on a mount of its own (/proc, /dev), which a link may lead to."""
    found = (ctypes.c_long * 32)()  # struct statfs begins with the type
    check(libc.statfs(path, found), "statfs")
    if found[0] != OVERLAYFS:
        raise OSError(errno.EXDEV, "not a file of the sandbox")


def topmost(paths, known):
    """Return those of ``paths`` that do not lie in another one, nor in ``known``."""
    found = []
    for path in sorted(set(paths)):
        if not any(path == above or path.startswith(above + b"/") for above in (*known, *found)):
            found.append(path)
    return found


def prepare(order, data):
    """Carry out a plan; return the answer to the server: ("done", workdir, writable) or ("refused", path, why)."""
    start = Start(order, data)
    try:
        os.umask(0o022)
        start.make()
        if order["mtime_s"] is not None:
            start.set_times(order["mtime_s"])
    except Refused as refused:
        return ("refused", *refused.args)
    workdir = os.path.realpath(start.plan[0][1])
    writable = []
    if not order["changes_owners"]:
        owned = [os.path.realpath(path) for kind, path, _, owner, _ in start.plan if owner and kind != "l"]
        writable = topmost(owned, [b"/" + os.fsencode(name) for name in order["writable"]])
        if len(writable) > MAX_WRITABLE:
            why = f"more than {MAX_WRITABLE} places outside of the agent's directories are its own"
            return ("refused", writable[MAX_WRITABLE], why)
    return ("done", workdir, [path[1:] for path in writable])

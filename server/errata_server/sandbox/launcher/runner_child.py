"""A runner's child: takes one request, drops every privilege, then executes bash or reads or writes one file."""

# A fork copies the memory of what was imported, so no pathlib.
# ruff: noqa: PTH102, PTH106, PTH108, PTH110, PTH112, PTH114, PTH123

import _socket
import ctypes
import marshal
import os
import resource
import sys

from kernel import (
    CLONE_NEWCGROUP,
    CLONE_NEWUSER,
    MNT_DETACH,
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_NOSUID,
    MOUNT_ATTR_RDONLY,
    MS_BIND,
    MS_MOVE,
    MS_NODEV,
    MS_NOSUID,
    MS_RDONLY,
    MS_REMOUNT,
    PR_CAPBSET_DROP,
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    PR_SET_SECCOMP,
    FilterProgram,
    check,
    libc,
    mount,
    mount_id_mapped,
    prctl,
    send,
    setns,
    unshare,
)
from runner_files import read, write
from runner_start import prepare
from user_namespace import become_agent, keep_writable, make_read_only

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal  # which the stubs of the standard library describe; importing it needs `enum`
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn

    from messages import LauncherConfig, PrepareRequest, ReadRequest, Request, RunRequest, WriteRequest
else:
    import _signal

EINVAL = 22
NICE = 5
"""Added to the nice value of commands, which is all that counts where they have no cgroup of their own."""
STATE_FD = 254


class Child:
    """Pid 2: takes one request, mounts the sandbox's root, drops every privilege and carries the request out.

    With a user namespace it runs under a host uid that no other command has at the time. On disk the agent's files in
    the layers and the base tree have one uid; id-mapped mounts present it as that host uid, and the user namespace maps
    the host uid back, so that inside the sandbox files have the uid that they have on disk.

    Args:
        config: The launcher's configuration.
        socket: This process's end of the request socket.
        mount_points: Write end of the pipe to init, for the list of mount points.
        userns: Descriptor of the user namespace; None if commands share a host uid, and in rootless mode.
    """

    def __init__(self, config: "LauncherConfig", socket: _socket.socket, mount_points: int, userns: int | None) -> None:
        self.config = config
        self.socket = socket
        self.mount_points = mount_points
        self.userns = userns
        self.code = ctypes.create_string_buffer(config["seccomp"], len(config["seccomp"]))
        self.filter = FilterProgram(len(config["seccomp"]) // 8, ctypes.addressof(self.code))
        # Arguments of capset(2): version 3 and this thread; then the effective, permitted and inheritable sets, empty.
        self.no_capabilities = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()

    def serve(self) -> "NoReturn":
        """Wait for the request, carry it out and exit, or become bash.

        Raises:
            OSError: The root could not be set up or a privilege could not be dropped.
        """
        os.setsid()
        prctl(PR_SET_DUMPABLE, 1)  # or root would own this process's files in /proc
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")  # when the machine runs out of memory, the kernel kills an agent, not the server
        prctl(PR_SET_PDEATHSIG, _signal.SIGKILL)
        with open("/proc/sys/kernel/cap_last_cap") as last:
            self.capabilities = [ctypes.c_ulong(capability) for capability in range(int(last.read()) + 1)]
        self.drop_bounding_set()
        if self.config["cgroups"]:
            unshare(CLONE_NEWCGROUP)
        self.warm_up()
        data, ancillary, flags, _ = self.socket.recvmsg(1 << 20, 1024, _socket.MSG_CMSG_CLOEXEC)
        if not data:
            os._exit(0)
        if flags & _socket.MSG_CTRUNC:
            raise OSError("not all descriptors of the request arrived: Too many open files (ulimit -n)")
        fds = [
            int.from_bytes(packed[at : at + 4], sys.byteorder)
            for _, _, packed in ancillary
            for at in range(0, len(packed), 4)
        ]
        request: Request = marshal.loads(data)
        self.enter_root(request)
        if request["do"] == "prepare":
            self.prepare(request, fds[0])
        self.drop_privileges(request, fds[1:3])
        if request["do"] == "run":
            self.run(request, fds)
        else:
            self.access_file(request, fds[0])

    def drop_bounding_set(self) -> None:
        """Remove every capability from the bounding set, so that no execve can bring one back."""
        for capability in self.capabilities:
            check(libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0), "prctl")

    def warm_up(self) -> None:
        """Make the system calls of a request once, with arguments that fail or change nothing.

        A forked process takes a page fault on first access to each page; here no request waits for them.
        """
        marshal.loads(marshal.dumps({"do": "run", "argv": [b"", b""], "env": {b"A": b"B"}, "limits": [(1, (2, 3))]}))
        calls: Sequence[Callable[[], Any]] = (
            lambda: mount("overlay", "", "overlay", MS_NOSUID, f"lowerdir={self.config['home']}"),
            lambda: check(libc.pivot_root(b"", b""), "pivot_root"),
            lambda: check(libc.umount2(b"", MNT_DETACH), "umount"),
            lambda: mount_id_mapped("/proc", "", -1),
            lambda: setns(-1, CLONE_NEWUSER),
            lambda: check(libc.capset(None, None), "capset"),
            lambda: resource.setrlimit(resource.RLIMIT_CORE, resource.getrlimit(resource.RLIMIT_CORE)),
            lambda: prctl(PR_SET_PDEATHSIG, _signal.SIGKILL),
            lambda: os.execve("/proc/none", [b"none"], {b"A": b"B"}),
            lambda: os.unlink("/proc/none"),
        )
        for call in calls:
            try:
                call()
            except OSError:
                pass

    def enter_root(self, request: "Request") -> None:
        """Mount the sandbox's overlay with /proc, /dev and the request's bind mounts, and make it this process's root.

        The base tree's hidden directories are empty there; a bind mount of the request may lie on one of them.

        Writes the marshalled list of mount points that `bind` returned to the pipe to init.

        Raises:
            OSError: A mount failed.
        """
        stage = self.config["stage"]
        if not request["mapped"]:
            self.userns = None
        lower = f"{request['lower']}:{request['base']}" if request["lower"] else request["base"]
        if self.userns is None:
            os.chdir(self.config["home"])
        else:
            mount_id_mapped(request["base_root"], f"{stage}/base", self.userns, MOUNT_ATTR_RDONLY)
            os.chdir(f"{stage}/data/layers")
            lower = f"{request['lower']}:../../base" if request["lower"] else "../../base"
        root = f"{stage}/root"
        try:
            # The last mount with `volatile` left this mark, which would refuse the next one: "was not synced".
            os.unlink(f"{request['work']}/work/incompat/volatile/dirty")
            os.rmdir(f"{request['work']}/work/incompat/volatile")
        except FileNotFoundError:
            pass
        options = f"lowerdir={lower},upperdir={request['upper']},workdir={request['work']}"
        mount("overlay", root, "overlay", MS_NOSUID | MS_NODEV, f"{options},{self.config['overlay']}")
        os.chdir(root)
        mount(f"{stage}/proc", "proc", "", MS_MOVE)
        mount(f"{stage}/dev", "dev", "", MS_MOVE)
        for path in self.config["hidden"]:
            if os.path.isdir(path):
                mount(f"{stage}/nothing", path, "", MS_BIND)
        read_only = self.config["rootless"] and request["do"] != "prepare"
        if read_only:
            keep_writable(request["writable"])
        mount_points: list[tuple[bytes, bool]] = []
        for source, inside in request["mounts"]:
            mount_points += self.bind(source, inside)
        if read_only:
            make_read_only()
        os.write(self.mount_points, marshal.dumps(mount_points))
        pivot = libc.pivot_root(b".", b".")
        check(pivot, "pivot_root")
        check(libc.umount2(b".", MNT_DETACH), "umount of the host's root")
        os.chdir("/")

    def bind(self, source: str, inside: str) -> list[tuple[bytes, bool]]:
        """Bind-mount ``source`` read-only on ``inside`` below the current directory; make the parts that are missing.

        Returns:
            Absolute paths inside the sandbox, each with whether it was made here. Init unmounts all of them after the
            command and removes those that were made. They are the parts of ``inside`` that were missing, outermost
            first, or ``inside`` alone if none was.

        Raises:
            OSError: A part of ``inside`` is a symlink or cannot be made, or the mount failed.
        """
        made: list[tuple[bytes, bool]] = []
        path = "."
        parts = [part for part in inside.split("/") if part]
        for at, part in enumerate(parts):
            path = f"{path}/{part}"
            last_file = at == len(parts) - 1 and not os.path.isdir(source)
            if os.path.islink(path):
                raise OSError(f"mount point {inside}: {part} is a symlink in the sandbox")
            if os.path.exists(path):
                continue
            if last_file:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            else:
                os.mkdir(path, 0o755)
            made.append((os.fsencode(path[1:]), True))
        self.bind_read_only(source, path)
        return made or [(os.fsencode(path[1:]), False)]

    def bind_read_only(self, source: str, path: str) -> None:
        """Bind-mount ``source`` on ``path`` read-only, id-mapped where this process has a user namespace."""
        if self.userns is not None:
            try:
                mount_id_mapped(source, path, self.userns, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV)
                return
            except OSError as error:
                # The file system has no id-mapped mounts. Without, files of the agent's uid seem to belong to nobody.
                if error.errno != EINVAL:
                    raise
        mount(source, path, "", MS_BIND)
        # In a user namespace a mount keeps what it forbade outside of it.
        kept = os.statvfs(path).f_flag & os.ST_NOEXEC
        mount("", path, "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | kept)

    def drop_privileges(self, request: "Request", outputs: "Sequence[int]") -> None:
        """Set the resource limits, become the agent's user without capabilities, and load the seccomp filter.

        Args:
            request: The request.
            outputs: Descriptors that the agent's user has to own: the pipes of stdout and stderr.
        """
        os.nice(NICE)
        for name, value in request["rlimits"]:
            resource.setrlimit(name, value)
        uid = self.config["uid"]
        if self.config["rootless"]:
            become_agent(uid)
        elif self.userns is not None:
            setns(self.userns, CLONE_NEWUSER)
        if self.config["rootless"] or self.userns is not None:
            self.drop_bounding_set()  # entering a user namespace restores it, with every other capability
            resource.setrlimit(resource.RLIMIT_NPROC, request["own_processes"])
        if not self.config["rootless"]:
            for fd in outputs:
                os.fchown(fd, uid, uid)  # or the command could not open /dev/stdout and /dev/stderr
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        check(libc.capset(*self.no_capabilities), "capset")
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        prctl(PR_SET_PDEATHSIG, _signal.SIGKILL)
        prctl(PR_SET_SECCOMP, 2, ctypes.byref(self.filter))

    def run(self, request: "RunRequest", fds: "Sequence[int]") -> "NoReturn":
        """Execute bash with the request's descriptors, arguments and environment.

        Args:
            request: The request.
            fds: Descriptors of stdin, stdout, stderr and, optionally, the shell's state.
        """
        stdin, stdout, stderr = fds[:3]
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        if len(fds) > 3:
            os.dup2(fds[3], STATE_FD)
        try:
            os.chdir(request["cwd"])
        except OSError as error:
            # The agent removed its own working directory or its permissions: a message for the agent, not a failure.
            os.write(2, b"/bin/bash: cd: " + request["cwd"] + b": " + os.strerror(error.errno or 0).encode() + b"\n")
        for number in (_signal.SIGPIPE, _signal.SIGXFSZ, _signal.SIGINT):
            _signal.signal(number, _signal.SIG_DFL)
        os.execve("/bin/bash", request["argv"], request["env"])

    def prepare(self, request: "PrepareRequest", data: int) -> "NoReturn":
        """Make the files that the sandbox starts with, send the answer and exit."""
        prctl(PR_SET_DUMPABLE, 0)
        if self.userns is not None:
            setns(self.userns, CLONE_NEWUSER)  # maps the agent's uid to the one it has on disk
        send(self.socket, prepare(request, data))
        os._exit(0)

    def access_file(self, request: "ReadRequest | WriteRequest", data: int) -> "NoReturn":
        """Read or write a file, send ``("done",)`` or ``("refused", errno)`` and exit."""
        prctl(PR_SET_DUMPABLE, 0)
        answer: tuple[Any, ...]
        try:
            answer = read(request, data) if request["do"] == "read" else write(request, data)
        except OSError as error:
            answer = ("refused", error.errno)
        send(self.socket, answer)
        os._exit(0)

"""A runner's child: takes one request, drops every privilege, then executes bash or reads or writes one file."""

# pathlib and what it imports would be copied by every fork.
# ruff: noqa: PTH102, PTH106, PTH108, PTH110, PTH112, PTH114, PTH123

import _signal
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
    check,
    libc,
    mount,
    mount_mapped,
    prctl,
    send,
    setns,
    unshare,
)
from runner_files import read, write
from runner_start import prepare
from user_namespace import become_agent, protect

EINVAL = 22
STATE_FD = 254


class Program(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


class Child:
    """Pid 2: takes one request, puts its root together, gives up every privilege and does it.

    With a user namespace ``users`` it runs under a host uid that no other command has at the time. The layers and the
    base belong to one uid on disk; they are mounted so that this uid is the command's own, and inside the namespace it
    has the number it has on disk again.
    """

    def __init__(self, config, request, made, users):
        self.config = config
        self.request = request
        self.made = made
        self.users = users
        self.code = ctypes.create_string_buffer(config["seccomp"], len(config["seccomp"]))
        self.filter = Program(len(config["seccomp"]) // 8, ctypes.addressof(self.code))
        # Version 3, this thread; then effective, permitted, inheritable twice, all empty.
        self.no_capabilities = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()

    def serve(self):
        os.setsid()
        prctl(PR_SET_DUMPABLE, 1)  # or its own files in /proc would be root's; init's are, in rootless mode
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")  # when the machine runs out of memory, never the server in place of an agent
        prctl(PR_SET_PDEATHSIG, _signal.SIGKILL)
        with open("/proc/sys/kernel/cap_last_cap") as last:
            self.capabilities = [ctypes.c_ulong(capability) for capability in range(int(last.read()) + 1)]
        self.drop_bounding_set()
        if self.config["cgroups"]:
            unshare(CLONE_NEWCGROUP)
        self.warm_up()
        data, ancillary, flags, _ = self.request.recvmsg(1 << 20, 1024, _socket.MSG_CMSG_CLOEXEC)
        if not data:
            os._exit(0)
        if flags & _socket.MSG_CTRUNC:
            raise OSError("not all descriptors of the request arrived: Too many open files (ulimit -n)")
        fds = [
            int.from_bytes(packed[at : at + 4], sys.byteorder)
            for _, _, packed in ancillary
            for at in range(0, len(packed), 4)
        ]
        order = marshal.loads(data)
        self.enter_root(order)
        if order["do"] == "prepare":
            self.prepare(order, fds[0])
        self.give_up(order, fds[1:3])
        if order["do"] == "run":
            self.run(order, fds)
        else:
            self.files(order, fds[0])

    def drop_bounding_set(self):
        for capability in self.capabilities:
            check(libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0), "prctl")

    def warm_up(self):
        """Go through the calls of a request once, in forms that fail or change nothing.

        A forked process takes a page fault for each page it meets first; here they cost nobody's time.
        """
        marshal.loads(marshal.dumps({"do": "run", "argv": [b"", b""], "env": {b"A": b"B"}, "limits": [(1, (2, 3))]}))
        for call in (
            lambda: mount("overlay", "", "overlay", MS_NOSUID, f"lowerdir={self.config['home']}"),
            lambda: check(libc.pivot_root(b"", b""), "pivot_root"),
            lambda: check(libc.umount2(b"", MNT_DETACH), "umount"),
            lambda: mount_mapped("/proc", "", -1),
            lambda: setns(-1, CLONE_NEWUSER),
            lambda: check(libc.capset(None, None), "capset"),
            lambda: resource.setrlimit(resource.RLIMIT_CORE, resource.getrlimit(resource.RLIMIT_CORE)),
            lambda: prctl(PR_SET_PDEATHSIG, _signal.SIGKILL),
            lambda: os.execve("/proc/none", [b"none"], {b"A": b"B"}),
            lambda: os.unlink("/proc/none"),
        ):
            try:
                call()
            except OSError:
                pass

    def enter_root(self, order):
        stage = self.config["stage"]
        if not order["mapped"]:
            self.users = None
        lower = f"{order['lower']}:{order['base']}" if order["lower"] else order["base"]
        if self.users is None:
            os.chdir(self.config["home"])
        else:
            mount_mapped(order["base_root"], f"{stage}/base", self.users, MOUNT_ATTR_RDONLY)
            os.chdir(f"{stage}/data/layers")
            lower = f"{order['lower']}:../../base" if order["lower"] else "../../base"
        root = f"{stage}/root"
        try:
            # Left by the last `volatile` mount of this work directory; says "was not synced", which nobody needs.
            os.unlink(f"{order['work']}/work/incompat/volatile/dirty")
            os.rmdir(f"{order['work']}/work/incompat/volatile")
        except FileNotFoundError:
            pass
        options = f"lowerdir={lower},upperdir={order['upper']},workdir={order['work']}"
        mount("overlay", root, "overlay", MS_NOSUID | MS_NODEV, f"{options},{self.config['overlay']}")
        os.chdir(root)
        mount(f"{stage}/proc", "proc", "", MS_MOVE)
        mount(f"{stage}/dev", "dev", "", MS_MOVE)
        made = []
        for source, inside in order["mounts"]:
            made += self.bind(source, inside)
        if self.config["rootless"] and order["do"] != "prepare":
            protect(order["writable"])
        os.write(self.made, b"\0".join(made))
        pivot = libc.pivot_root(b".", b".")
        check(pivot, "pivot_root")
        check(libc.umount2(b".", MNT_DETACH), "umount of the host's root")
        os.chdir("/")

    def bind(self, source, inside):
        """Mount ``source`` read-only on ``inside`` below the current directory; return the directories made."""
        made, path = [], "."
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
            made.append(os.fsencode(path[1:]))
        self.bind_read_only(source, path)
        return made or [os.fsencode(path[1:])]

    def bind_read_only(self, source, path):
        if self.users is not None:
            try:
                mount_mapped(source, path, self.users, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV)
                return
            except OSError as error:
                # A file system without id-mapped mounts; there only files of the agent's own uid look like nobody's.
                if error.errno != EINVAL:
                    raise
        mount(source, path, "", MS_BIND)
        mount("", path, "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)

    def give_up(self, order, outputs):
        for name, value in order["rlimits"]:
            resource.setrlimit(name, value)
        uid = self.config["uid"]
        if self.config["rootless"]:
            become_agent(uid)
        elif self.users is not None:
            setns(self.users, CLONE_NEWUSER)
        if self.config["rootless"] or self.users is not None:
            self.drop_bounding_set()  # whoever enters has every capability there, the bounding set included
            resource.setrlimit(resource.RLIMIT_NPROC, order["own_processes"])
        if not self.config["rootless"]:
            for fd in outputs:
                os.fchown(fd, uid, uid)  # or nobody inside could open /dev/stdout and /dev/stderr
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        check(libc.capset(*self.no_capabilities), "capset")
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        prctl(PR_SET_PDEATHSIG, _signal.SIGKILL)
        prctl(PR_SET_SECCOMP, 2, ctypes.byref(self.filter))

    def run(self, order, fds):
        stdin, stdout, stderr = fds[:3]
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        if len(fds) > 3:
            os.dup2(fds[3], STATE_FD)
        try:
            os.chdir(order["cwd"])
        except OSError as error:
            # The agent removed or closed its own directory: it has to read that, and be able to go on.
            os.write(2, b"/bin/bash: cd: " + order["cwd"] + b": " + os.strerror(error.errno).encode() + b"\n")
        for number in (_signal.SIGPIPE, _signal.SIGXFSZ, _signal.SIGINT):
            _signal.signal(number, _signal.SIG_DFL)
        os.execve("/bin/bash", order["argv"], order["env"])

    def prepare(self, order, data):
        prctl(PR_SET_DUMPABLE, 0)
        if self.users is not None:
            setns(self.users, CLONE_NEWUSER)  # there the agent's uid is the one it has on disk
        send(self.request, prepare(order, data))
        os._exit(0)

    def files(self, order, data):
        prctl(PR_SET_DUMPABLE, 0)
        try:
            answer = read(order, data) if order["do"] == "read" else write(order, data)
        except OSError as error:
            answer = ("refused", error.errno)
        send(self.request, answer)
        os._exit(0)

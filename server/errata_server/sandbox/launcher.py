"""The launcher: a small program, started by the server with an empty environment, that makes *runners*.

    server --(socket)--> launcher --fork--> runner: init (pid 1 of its own pid namespace)
                                                    `-- child (pid 2): waits, then becomes bash

A runner is made ahead of need and serves one request. It already has its namespaces, /proc, /dev, an empty network
namespace and a cgroup, so that a command only costs the overlay mount, the switch of the root and the start of bash.
The server talks to the two halves directly: requests go to the child, ``kill`` to init and the end comes from init.

Only the standard library, few imports: a fork copies what was imported. One thread: forks and namespace calls need it.
Whoever dies takes everything below along: the server (pidfd), the launcher (PDEATHSIG), init (its pid namespace).
"""

import _signal
import _socket
import ctypes
import fcntl
import gc
import marshal
import os
import select
import sys
import time

import resource  # isort: skip

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_MOVE = 1, 2, 4, 8, 32, 4096, 8192
MS_REC, MS_PRIVATE = 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 15, 22, 24, 38
PR_SET_DUMPABLE = 4
SYS_OPENAT2 = 437
RESOLVE_NO_XDEV, RESOLVE_NO_MAGICLINKS = 1, 2
DEVICES = (("null", 3), ("zero", 5), ("full", 7), ("random", 8), ("urandom", 9))
STATE_FD = 254

libc = ctypes.CDLL(None, use_errno=True)


def check(result, what):
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def mount(source, target, kind, flags=0, data=""):
    result = libc.mount(
        os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), os.fsencode(data)
    )
    check(result, f"mount {kind or source} on {target}")


def unshare(flags):
    check(libc.unshare(flags), f"unshare {flags:#x}")


def setns(fd, kind):
    check(libc.setns(fd, kind), f"setns {kind:#x}")


def prctl(option, *values):
    padded = [ctypes.c_ulong(v) if isinstance(v, int) else v for v in (*values, 0, 0, 0, 0)[:4]]
    check(libc.prctl(option, *padded), f"prctl {option}")


def write_file(path, data):
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def hide_arguments():
    """Blank the command line: /proc/1/cmdline in a sandbox would show the path of this file on the host."""
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rsplit(b")", 1)[1].split()
    start, end = int(fields[45]), int(fields[46])
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, b"init", min(4, end - start))


def send(sock, message, fds=()):
    ancillary = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, b"".join(fd.to_bytes(4, sys.byteorder) for fd in fds))]
    sock.sendmsg([marshal.dumps(message)], ancillary if fds else [])


class Slots:
    """Network namespaces and cgroups, each lent to one runner at a time. Made on demand and used again."""

    def __init__(self, cgroups):
        self.cgroups = cgroups
        self.made = 0
        self.free = []
        self.own_network = os.open("/proc/self/ns/net", os.O_RDONLY)

    def take(self):
        if self.free:
            return self.free.pop()
        unshare(CLONE_NEWNET)
        try:
            network = os.open("/proc/self/ns/net", os.O_RDONLY)
            with_lo = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
            fcntl.ioctl(with_lo.fileno(), 0x8914, b"lo".ljust(16, b"\0") + b"\x41\0".ljust(24, b"\0"))  # IFF_UP
            with_lo.close()
            # A closed connection of the last borrower must not keep its port in TIME_WAIT for the next one.
            write_file("/proc/sys/net/ipv4/tcp_max_tw_buckets", b"0")
        finally:
            setns(self.own_network, CLONE_NEWNET)
        name = f"s{self.made}"
        self.made += 1
        joins = []
        for root in self.cgroups:
            os.makedirs(f"{root}/{name}", exist_ok=True)
            joins.append(os.open(f"{root}/{name}/cgroup.procs", os.O_WRONLY))
        return name, network, joins


def prepare_stage(stage):
    """Mount what all runners share: the place where a root is put together, and a read-only /dev."""
    mount("stage", stage, "tmpfs", MS_NOSUID, "mode=755,size=1m")
    for name in ("root", "proc", "dev"):
        os.mkdir(f"{stage}/{name}")
    dev = f"{stage}/dev"
    mount("dev", dev, "tmpfs", MS_NOSUID, "mode=755,size=1m")
    os.umask(0)
    for name, minor in DEVICES:
        os.mknod(f"{dev}/{name}", 0o20666, os.makedev(1, minor))
    os.mknod(f"{dev}/tty", 0o20666, os.makedev(5, 0))
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{dev}/{name}")
    os.symlink("pts/ptmx", f"{dev}/ptmx")
    os.mkdir(f"{dev}/pts")
    os.mkdir(f"{dev}/shm")
    os.umask(0o022)
    mount("dev", dev, "", MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NOEXEC, "")


def launch(sock, slot, config, unwanted):
    """Fork a runner; return its pid in the launcher's pid namespace."""
    request_server, request_child = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    control_server, control_init = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    unshare(CLONE_NEWPID)
    pid = os.fork()
    if pid == 0:
        try:
            for fd in unwanted:
                os.close(fd)
            request_server.close()
            control_server.close()
            run_init(slot, config, request_child, control_init)
        except BaseException as error:
            try:
                send(control_init, ("broken", str(error)))
            except OSError:
                pass
        finally:
            os._exit(70)
    setns(config["own_pid"], CLONE_NEWPID)
    send(sock, ("runner", pid, slot[0]), (request_server.fileno(), control_server.fileno()))
    for end in (request_server, request_child, control_server, control_init):
        end.close()
    return pid


def run_init(slot, config, request, control):
    _signal.set_wakeup_fd(-1)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    prctl(PR_SET_PDEATHSIG, _signal.SIGKILL)
    prctl(PR_SET_NAME, ctypes.c_char_p(b"init"))
    _, network, joins = slot
    setns(network, CLONE_NEWNET)
    unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS)
    libc.sethostname(b"sandbox", 7)
    stage = config["stage"]
    mount("proc", f"{stage}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount("devpts", f"{stage}/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    mount("shm", f"{stage}/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777,size=64m,nr_inodes=4096")
    made_read, made_write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            control.close()
            os.close(made_read)
            for fd in joins:
                os.write(fd, b"0")
                os.close(fd)
            Child(config, request, made_write).serve()
        except BaseException as error:
            try:
                send(request, ("broken", f"{type(error).__name__}: {error}"))
            except OSError:
                pass
        finally:
            os._exit(71)
    request.close()
    os.close(made_write)
    supervise(child, control, made_read)


def supervise(child, control, made_read):
    """Pid 1: reap, obey ``kill``, and at the child's end kill what it left, then report."""
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    _signal.set_wakeup_fd(wake_write)
    _signal.signal(_signal.SIGCHLD, lambda *_: None)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(wake_read, select.POLLIN)
    status = None
    while True:
        # First of all without waiting: the child may have ended before the handler was there.
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    status = ended[1]
        except ChildProcessError:
            pass
        if status is not None:
            break
        for fd, _ in poll.poll():
            if fd == wake_read:
                os.read(wake_read, 512)
            elif control.recv(16) == b"":
                os._exit(0)  # the server is gone or gave the runner back; the kernel kills the namespace
            else:
                libc.kill(-1, _signal.SIGKILL)
    left = []
    try:
        # Every process of the namespace is below a child of pid 1, so no child means that nothing is left.
        os.waitpid(-1, os.WNOHANG)
        let_grow()
        left = alive()
        os.kill(-1, _signal.SIGKILL)
        while True:
            os.waitpid(-1, 0)
    except (ChildProcessError, ProcessLookupError):
        pass
    for path in reversed(os.read(made_read, 65536).split(b"\0") if select.select([made_read], [], [], 0)[0] else []):
        libc.umount2(path, MNT_DETACH)
        try:
            os.rmdir(path)
        except OSError:
            pass
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    send(control, ("end", os.waitstatus_to_exitcode(status), left, used.ru_utime + used.ru_stime))
    os._exit(0)


def let_grow():
    """Wait while the number of processes left behind grows, at most a second.

    A fork bomb puts itself into the background, so its command ends at once. It has to meet its limit before it is
    killed, or the agent would read that nothing was wrong.
    """
    count = sum(entry.isdigit() for entry in os.listdir("/proc"))
    for _ in range(100):
        time.sleep(0.01)
        before, count = count, sum(entry.isdigit() for entry in os.listdir("/proc"))
        if count <= before:
            return


def alive():
    """Return the command names of the other processes in this pid namespace, at most 32."""
    names = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or entry == "1" or len(names) >= 32:
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as stat:
                head, tail = stat.read().rsplit(b")", 1)
        except OSError:
            continue
        if tail.split()[0] not in (b"Z", b"X"):
            names.append(head.split(b"(", 1)[1])
    return names


class Child:
    """Pid 2: takes one request, puts its root together, gives up every privilege and does it."""

    def __init__(self, config, request, made):
        self.config = config
        self.request = request
        self.made = made

    def serve(self):
        os.setsid()
        prctl(PR_SET_PDEATHSIG, _signal.SIGKILL)
        with open("/proc/sys/kernel/cap_last_cap") as last:
            for capability in range(int(last.read()) + 1):
                prctl(PR_CAPBSET_DROP, capability)
        if self.config["cgroups"]:
            unshare(CLONE_NEWCGROUP)
        data, ancillary, _, _ = self.request.recvmsg(1 << 20, 1024, _socket.MSG_CMSG_CLOEXEC)
        if not data:
            os._exit(0)
        fds = [
            int.from_bytes(packed[at : at + 4], sys.byteorder)
            for _, _, packed in ancillary
            for at in range(0, len(packed), 4)
        ]
        order = marshal.loads(data)
        self.enter_root(order)
        self.give_up(order)
        if order["do"] == "run":
            self.run(order, fds)
        else:
            self.files(order, fds[0])

    def enter_root(self, order):
        os.chdir(self.config["home"])
        stage = self.config["stage"]
        root = f"{stage}/root"
        try:
            # Left by the last `volatile` mount of this work directory; says "was not synced", which nobody needs.
            os.unlink(f"{order['work']}/work/incompat/volatile/dirty")
            os.rmdir(f"{order['work']}/work/incompat/volatile")
        except FileNotFoundError:
            pass
        options = f"lowerdir={order['lower']},upperdir={order['upper']},workdir={order['work']}"
        mount("overlay", root, "overlay", MS_NOSUID | MS_NODEV, f"{options},{self.config['overlay']}")
        os.chdir(root)
        mount(f"{stage}/proc", "proc", "", MS_MOVE)
        mount(f"{stage}/dev", "dev", "", MS_MOVE)
        made = []
        for source, inside in order["mounts"]:
            made += self.bind(source, inside)
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
        mount(source, path, "", MS_BIND)
        mount("", path, "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
        return made or [os.fsencode(path[1:])]

    def give_up(self, order):
        for name, value in order["rlimits"]:
            resource.setrlimit(name, value)
        uid = self.config["uid"]
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        # Version 3, this thread; then effective, permitted, inheritable twice, all empty.
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        check(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        prctl(PR_SET_PDEATHSIG, _signal.SIGKILL)
        code = ctypes.create_string_buffer(self.config["seccomp"], len(self.config["seccomp"]))

        class Program(ctypes.Structure):
            _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

        filled = Program(len(self.config["seccomp"]) // 8, ctypes.addressof(code))
        prctl(PR_SET_SECCOMP, 2, ctypes.byref(filled))

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

    def files(self, order, data):
        prctl(PR_SET_DUMPABLE, 0)
        try:
            answer = read(order, data) if order["do"] == "read" else write(order, data)
        except OSError as error:
            answer = ("refused", error.errno)
        send(self.request, answer)
        os._exit(0)


def open_inside(path, flags, mode=0):
    """Open a path of the sandbox's own files; /proc, /dev and binds are other mounts and refused (EXDEV)."""
    how = (ctypes.c_uint64 * 3)(flags | os.O_CLOEXEC | os.O_NOCTTY, mode, RESOLVE_NO_XDEV | RESOLVE_NO_MAGICLINKS)
    return check(
        libc.syscall(ctypes.c_long(SYS_OPENAT2), ctypes.c_long(-100), ctypes.c_char_p(path), how, ctypes.c_long(24)),
        "open",
    )


def regular(fd):
    kind = os.fstat(fd).st_mode & 0o170000
    if kind == 0o040000:
        raise IsADirectoryError(21, "directory")
    if kind != 0o100000:
        raise OSError(22, "not a regular file")


def read(order, data):
    fd = open_inside(order["path"], os.O_RDONLY | os.O_NONBLOCK)
    regular(fd)
    left = order["max_bytes"]
    while left > 0 and (sent := os.sendfile(data, fd, None, min(left, 1 << 20))):
        left -= sent
    return ("done",)


def write(order, data):
    path, at, refused = order["path"], 0, None
    while (at := path.find(b"/", at + 1)) != -1:
        try:
            os.mkdir(path[:at], 0o777)
        except FileExistsError:
            pass
        except OSError as error:
            refused = error
            break
    mode = order["mode"]
    flags = os.O_WRONLY | os.O_NONBLOCK
    try:
        fd = open_inside(path, flags | os.O_CREAT, 0o666 if mode is None else mode)
    except FileNotFoundError:
        raise refused or FileNotFoundError(2, "open") from None
    regular(fd)
    os.ftruncate(fd, 0)
    if mode is not None:
        os.fchmod(fd, mode)
    size, done = os.fstat(data).st_size, 0
    while done < size:
        done += os.sendfile(fd, data, done, min(size - done, 1 << 20))
    os.close(fd)
    return ("done",)


def main():
    sock = _socket.socket(fileno=int(sys.argv[1]))
    hide_arguments()
    prctl(PR_SET_NAME, ctypes.c_char_p(b"errata-launch"))
    config = marshal.loads(sock.recv(1 << 20))
    try:
        for procs in config["own_cgroups"]:
            write_file(procs, b"0")
        server = os.pidfd_open(config["server"])
        unshare(CLONE_NEWNS)
        mount("", "/", "", MS_REC | MS_PRIVATE)
        prepare_stage(config["stage"])
        config["own_pid"] = os.open("/proc/self/ns/pid", os.O_RDONLY)
        slots = Slots(config["cgroups"])
    except OSError as error:
        send(sock, ("broken", str(error)))
        return
    os.chdir("/")
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    _signal.set_wakeup_fd(wake_write)
    _signal.signal(_signal.SIGCHLD, lambda *_: None)
    poll = select.poll()
    for fd in (sock.fileno(), wake_read, server):
        poll.register(fd, select.POLLIN)
    gc.disable()
    gc.freeze()
    unwanted = (sock.fileno(), wake_read, wake_write, server)
    busy = {}
    while True:
        for fd, _ in poll.poll():
            if fd == server:
                return
            if fd == wake_read:
                os.read(wake_read, 512)
                continue
            message = sock.recv(4096)
            if not message:
                return
            order = marshal.loads(message)
            if order[0] == "kill":
                if order[1] in busy:
                    os.kill(order[1], _signal.SIGKILL)
                continue
            try:
                slot = slots.take()
                busy[launch(sock, slot, config, unwanted)] = slot
            except OSError as error:
                send(sock, ("failed", str(error)))
        while busy:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            slots.free.append(busy.pop(pid))
            send(sock, ("gone", pid))


if __name__ == "__main__":
    main()

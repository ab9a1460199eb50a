"""The launcher: a small program, started by the server with an empty environment, that makes *runners*.

    server --(socket)--> launcher --fork--> runner: init (pid 1 of its own pid namespace)
                                                    `-- child (pid 2): waits, then becomes bash

A runner is made ahead of need and serves one request. It already has its namespaces, /proc, /dev, an empty network
namespace and a cgroup, so that a command only costs the overlay mount, the switch of the root and the start of bash.
The server talks to the two halves directly: requests go to the child, ``kill`` to init and the end comes from init.

Only the standard library, few imports: a fork copies what was imported. One thread: forks and namespace calls need it.
Whoever dies takes everything below along: the server (pidfd), the launcher (PDEATHSIG), init (its pid namespace).
"""

# pathlib and what it imports would be copied by every fork.

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

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from kernel import (
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    MS_BIND,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    PR_SET_NAME,
    PR_SET_SECUREBITS,
    SECBIT_NO_SETUID_FIXUP,
    mapped_clone,
    mount,
    prctl,
    send,
    setns,
    unshare,
    write_file,
)
from runner_init import run_init
from user_namespace import become_root, bind_device, fork_into

LAST_UID = 0x6FFFFFFF
"""Up to here users are themselves inside; `NamespaceBackend` takes those of commands from above."""
NO_TIME_WAIT = "/proc/sys/net/ipv4/tcp_max_tw_buckets"
DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}


def hide_arguments():
    """Blank the command line: /proc/1/cmdline in a sandbox would show the path of this file on the host."""
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rsplit(b")", 1)[1].split()
    start, end = int(fields[45]), int(fields[46])
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, b"init", min(4, end - start))


class Slots:
    """Network namespaces, cgroups and host uids, each lent to one runner at a time. Made on demand and used again."""

    def __init__(self, cgroups, uid, first_uid):
        self.cgroups = cgroups
        self.uid = uid
        self.first_uid = first_uid
        self.made = 0
        self.free = []
        self.own_network = os.open("/proc/self/ns/net", os.O_RDONLY)

    def take(self):
        if self.free:
            return self.free.pop()
        opened = []
        try:
            slot = self.make(opened)
        except BaseException:
            for fd in opened:  # else each attempt while descriptors are short would take some for good
                os.close(fd)
            raise
        self.made += 1
        return slot

    def make(self, opened):
        """Return a new slot; ``opened`` gets its descriptors as they are opened."""
        unshare(CLONE_NEWNET)
        try:
            network = os.open("/proc/self/ns/net", os.O_RDONLY)
            opened.append(network)
            with_lo = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
            fcntl.ioctl(with_lo.fileno(), 0x8914, b"lo".ljust(16, b"\0") + b"\x41\0".ljust(24, b"\0"))  # IFF_UP
            with_lo.close()
            # A closed connection of the last borrower must not keep its port in TIME_WAIT for the next one.
            write_file(NO_TIME_WAIT, b"0")
        finally:
            setns(self.own_network, CLONE_NEWNET)
        name = f"s{self.made}"
        joins = []
        for root in self.cgroups:
            os.makedirs(f"{root}/{name}", exist_ok=True)
            joins.append(os.open(f"{root}/{name}/cgroup.procs", os.O_WRONLY))
            opened.append(joins[-1])
        users = None if self.first_uid is None else user_namespace(self.uid, self.first_uid + self.made + 1)
        return name, network, joins, users


def user_namespace(inside, outside):
    """Return a descriptor of a user namespace in which the host's uid and gid ``outside`` are ``inside``.

    All others are themselves (root owns the base tree, and overlayfs works as root), without any power: whoever enters
    gives up every capability. Its owner is ``outside`` too, because the kernel counts inotify instances and the like
    against the owner as well: were it root, all sandboxes would share root's.
    """
    made_read, made_write = os.pipe()
    try:
        end_read, end_write = os.pipe()
    except OSError:
        os.close(made_read)
        os.close(made_write)
        raise
    try:
        pid = os.fork()
    except OSError:
        for fd in (made_read, made_write, end_read, end_write):
            os.close(fd)
        raise
    if pid == 0:
        try:
            os.close(end_write)
            prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP)  # some distributions let only root make one
            os.setresgid(outside, outside, outside)
            os.setresuid(outside, outside, outside)
            unshare(CLONE_NEWUSER)
            os.write(made_write, b"\0")
            os.read(end_read, 1)
        except OSError as error:
            os.write(made_write, str(error).encode())
        finally:
            os._exit(0)
    try:
        os.close(made_write)
        os.close(end_read)
        failure = os.read(made_read, 1024)
        if failure != b"\0":
            raise OSError(failure.decode() or "a helper process died")
        mapping = f"0 0 {inside}\n{inside} {outside} 1\n{inside + 1} {inside + 1} {LAST_UID - inside}\n".encode()
        write_file(f"/proc/{pid}/uid_map", mapping)
        write_file(f"/proc/{pid}/gid_map", mapping)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)
    finally:
        os.close(made_read)
        os.close(end_write)
        os.waitpid(pid, 0)


def try_mapping(config):
    """Return a user namespace for id-mapped mounts of the data directory, or None and why there is none here."""
    if config["first_uid"] is None:
        return None, "not asked for"
    try:
        users = user_namespace(config["uid"], config["first_uid"] - 1)
        os.close(mapped_clone(config["data"], users))
    except OSError as error:
        return None, str(error)
    return users, ""


def prepare_stage(stage, rootless):
    """Mount what all runners share: the place where a root is put together, and a read-only /dev."""
    mount("stage", stage, "tmpfs", MS_NOSUID, "mode=755,size=1m")
    for name in ("root", "proc", "dev", "data", "base"):
        os.mkdir(f"{stage}/{name}")
    dev = f"{stage}/dev"
    mount("dev", dev, "tmpfs", MS_NOSUID, "mode=755,size=1m")
    os.umask(0)
    for name, device in DEVICES.items():
        if rootless:
            bind_device(name, f"{dev}/{name}")
        else:
            os.mknod(f"{dev}/{name}", 0o20666, os.makedev(*device))
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{dev}/{name}")
    os.symlink("pts/ptmx", f"{dev}/ptmx")
    os.mkdir(f"{dev}/pts")
    os.mkdir(f"{dev}/shm")
    os.umask(0o022)
    # What hides a file of /proc; a bind of a read-only mount is read-only too.
    empty = f"{stage}/empty"
    os.close(os.open(empty, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o444))
    mount(empty, empty, "", MS_BIND)
    mount("", empty, "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NOEXEC)
    mount("dev", dev, "", MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NOEXEC, "")


def make_sysctl_writable():
    """Allow writes below /proc/sys in this mount namespace, where a container has a read-only mount over it."""
    if not os.access(NO_TIME_WAIT, os.W_OK):  # of a directory there it would say no everywhere
        mount("", "/proc/sys", "", MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NOEXEC)


def launch(slot, config, unwanted):
    """Fork a runner; return its pid in the launcher's pid namespace, and the server's ends of its two sockets."""
    request_server, request_child = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    control_server, control_init = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    pid = fork_into(CLONE_NEWPID)
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
    request_child.close()
    control_init.close()
    return pid, (request_server, control_server)


def make_runner(sock, slots, busy, config, unwanted):
    """Make one and hand it to the server, or say why not."""
    slot = None
    try:
        slot = slots.take()
        pid, ends = launch(slot, config, unwanted)
        busy[pid] = slot  # from here on its end is told, whether or not it can be handed over
        slot = None
    except OSError as error:
        if slot is not None:
            slots.free.append(slot)
        return send(sock, ("failed", str(error), error.errno))
    try:
        send(sock, ("runner", pid, busy[pid][0]), [end.fileno() for end in ends])
    except OSError as error:  # it ends when its sockets are closed
        send(sock, ("failed", str(error), error.errno))
    for end in ends:
        end.close()
    return None


def clean_up(config, busy):
    """Kill the runners and remove our cgroups: a server killed by SIGKILL cannot, and might never start again."""
    for pid in busy:
        try:
            os.kill(pid, _signal.SIGKILL)
            os.waitpid(pid, 0)
        except OSError:
            pass  # gone and reaped already
    for root in config["cgroups"]:
        parent = os.path.dirname(root)
        try:
            # In v2 only a leaf may hold processes; the server's own is one.
            leaf = f"{parent}/errata-server"
            write_file(f"{leaf if os.path.isdir(leaf) else parent}/cgroup.procs", b"0")
            for name in os.listdir(root):
                if os.path.isdir(f"{root}/{name}"):
                    remove_cgroup(f"{root}/{name}")
            remove_cgroup(root)
        except OSError:
            pass  # the next start on this data directory tries again


def remove_cgroup(path):
    """Remove an empty cgroup; the kernel calls it busy for a moment after its last process was reaped."""
    for _ in range(300):
        try:
            return os.rmdir(path)
        except OSError as error:
            if error.errno != 16:  # EBUSY
                raise
        with open(f"{path}/cgroup.procs") as procs:
            for pid in procs.read().split():
                os.kill(int(pid), _signal.SIGKILL)
        time.sleep(0.01)
    return os.rmdir(path)


def main():
    sock = _socket.socket(fileno=int(sys.argv[1]))
    hide_arguments()
    prctl(PR_SET_NAME, ctypes.c_char_p(b"errata-launch"))
    config = marshal.loads(sock.recv(1 << 20))
    try:
        for procs in config["own_cgroups"]:
            write_file(procs, b"0")
        server = os.pidfd_open(config["server"])
        if config["rootless"]:
            become_root()
            # The way back from a sandbox's network needs power over the one to come back to.
            unshare(CLONE_NEWNET)
        unshare(CLONE_NEWNS)
        mount("", "/", "", MS_REC | MS_PRIVATE)
        if not config["rootless"]:
            make_sysctl_writable()
        prepare_stage(config["stage"], config["rootless"])
        users, why_shared = try_mapping(config)
        slots = Slots(config["cgroups"], config["uid"], None if users is None else config["first_uid"])
        send(sock, ("users", why_shared), () if users is None else (users,))
    except OSError as error:
        send(sock, ("broken", str(error)))
        return None
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
                return clean_up(config, busy)
            if fd == wake_read:
                os.read(wake_read, 512)
                continue
            message = sock.recv(4096)
            if not message:
                return clean_up(config, busy)
            order = marshal.loads(message)
            if order[0] == "kill":
                if order[1] in busy:
                    os.kill(order[1], _signal.SIGKILL)
                continue
            make_runner(sock, slots, busy, config, unwanted)
        while busy:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            slots.free.append(busy.pop(pid))
            send(sock, ("gone", pid))


if __name__ == "__main__":
    main()
